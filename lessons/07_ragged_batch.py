# %% [markdown]
# # 07 · Ragged batch
#
# No batch axis any more: texts of any length lie end to end, and one mask keeps them apart.
#
# [![Open this lesson in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minillm/minillm/blob/v0.1.0/lessons/07_ragged_batch.ipynb)
#
# **Objectives.** You will
# - explain why a transformer needs no batch axis, not even in attention;
# - write the mask that is block-diagonal and causal, from positions and text numbers alone;
# - build a step over texts of unequal length, and the loop around it, without a single pad;
# - prove that nothing leaks from one text into another, to the last bit;
# - predict from two formulas what a dense mask costs, and say at what context size it starts to lose.
#
# **Prerequisites:** lessons 04 (KV cache), 05 (chunked prefill) and 06 (padded batch). **Minutes:** about 100, of which
# the machine works for a few. **Hardware:** any CPU; the real model needs about 1 GB of memory.
#
# **The one change:** the tokens of a step lose their batch axis. The rectangle `[B, T]` becomes one line `[T]` that
# holds the new tokens of all texts. In the package this is [`minillm/stages/ragged.py`](../minillm/stages/ragged.py).

# %% tags=["setup"]
from statistics import median

import torch
from matplotlib.figure import Figure
from torch import Tensor

from minillm import attention, lab
from minillm import batch as batches
from minillm.bench.harness import Job, counting, run
from minillm.bench.prompts import load
from minillm.cache import KVPool
from minillm.fetch import find
from minillm.kernels.dense import DenseAttend
from minillm.kernels.gather import GatherAttend
from minillm.lab.work import from_namespace
from minillm.model import Llama
from minillm.packing import pack_weights
from minillm.params import SamplingParams
from minillm.request import Request
from minillm.tokenizer import Tokenizer

# %%
lab.start("07")

# %% [markdown]
# ## The idea
#
# ### Where the pads came from
#
# In lesson 06 seven rows were in the middle of their texts, and a prompt of n = 100 tokens came into the eighth. Seven
# tokens were wanted from the others, and seven times 99 pads came along: (n − 1)(B − 1) = 693. Every Linear worked on
# them. There was one reason for it: a tensor `[B, T]` has no ragged edge.
#
# So let us not have a B. Take the new tokens of all texts and write them in one line:
#
# ```
# T = Σ t        t: new tokens of a text in this step        [tokens]
# ```
#
# ### Almost nothing notices
#
# The embedding, every norm, every Linear, SwiGLU and the head work on each row of `[T, d]` alone. RoPE needs the row's
# position and nothing else. None of them knows which row belongs to which text. See for yourself: the MLP of layer 0
# gets seven tokens at once, then the same seven in three pieces. The two differ by rounding at most.

# %%
model = pack_weights(Llama.from_pretrained("smollm2-135m-instruct", device="cpu"))
EXAMPLE = [1, 57, 744, 2090, 451, 348, 680]  # <bos> I am sure this pro ject
WORDS = ["<bos>", "I", "am", "sure", "this", "pro", "ject"]

x = model.embed(torch.tensor(EXAMPLE))  # [7, d]
mlp = model.blocks[0].mlp
whole, pieces = mlp(x), torch.cat([mlp(piece) for piece in x.split([4, 2, 1])])  # [7, d] each
print(f"largest value {whole.abs().max().item():.3g}, largest difference {(whole - pieces).abs().max().item():.3g}")

# %% [markdown]
# ### Attention asks for three facts
#
# Only attention looks at other tokens. For each token it must know its **position** in its own text, the **number of
# the text**, and (for K and V, which stay) its **slot** in memory. Take the seven tokens of our example, but as
# *three* texts, of 4, 2 and 1 tokens:
#
# ```
# tokens      <bos>  I  am  sure   this  pro   ject
# text          0    0   0    0      1    1      2
# position      0    1   2    3      0    1      0      each text counts from its own start
# last                        ^           ^      ^      after these rows a token is sampled: 3, 5, 6
# ```
#
# The same seven tokens, in the same line. That they are three texts and not one is said by the mask alone, and the
# whole rule is one line:
#
# ```
# query q sees key k   if   text(k) = text(q)   and   position(k) ≤ position(q)
# ```
#
# As one text of 7, 28 of the 49 cells are visible. As three, 10 + 3 + 1 = 14: three small staircases along the
# diagonal. Everything you know already follows from this rule: causality, the cache, chunks, and now the walls between
# texts.
#
# ### What it costs
#
# A **dense** mask has a row for every new token of anybody and a column for every position of anybody. Each cell costs
# a score, visible or not. Let s be the positions of a text after the step (what was computed before, plus its t new
# ones):
#
# ```
# dense    =  T · S  =  Σ t · Σ s                                [scores per layer and query head]
# needed   =  the visible cells among them
# ```
#
# SmolLM2-135M has 30 layers of 9 query heads, so a step computes 270 times as many. Pads in the Linears are gone; in
# return there are scores between texts, which the mask throws away. Whether that is a good bargain is what you are
# about to find out.

# %% [markdown]
# ## Predict
#
# Put numbers in place of `None`. That you guess is what counts.
#
# 1. The step of the 693 pads, now ragged: how many tokens go through the Linears? (The rectangle pushed 8 · 100 =
#    800.)

# %%
lab.predict("07.tokens", None)

# %% [markdown]
# 2. The same step: the seven decoding texts have 100 positions each after it, as has the newcomer. How many scores
#    does the dense mask compute, per layer and head? For comparison: a rectangle of 8 rows, 100 queries and 100 keys
#    has 80,000.

# %%
lab.predict("07.scores", None)

# %% [markdown]
# 3. Real prompts of mixed length, at most eight texts at once, from the first token to the last: how many scores does
#    the dense mask compute for each one that is needed?

# %%
lab.predict("07.ratio", None)

# %% [markdown]
# 4. At how many context positions S, over all texts together, does a dense mask cost as much arithmetic as all the
#    Linears of the 30 layers? (Think of one new token. They hold 106 million weights, each used for one multiplication
#    and one addition. A score costs about 4 · 64 operations, and there are 270 · S of them.)

# %%
lab.predict("07.break_even", None)

# %% [markdown]
# ## Build
#
# ### 1. Who may look at whom
#
# The rule above, for whole tensors of positions at once. `q_seq` and `k_seq` are the text numbers, the row `text` of
# the drawing: code says `seq`, for sequence. Without them there is only one text. The package's own function of this
# name is used in **every** stage, so yours must do what it does for a rectangle too, where `q_pos` is `[B, T]` and
# `k_pos` is `[S]`: the result is `[B, T, S]`.


# %% task="07.visible"
def visible(q_pos: Tensor, k_pos: Tensor, q_seq: Tensor | None = None, k_seq: Tensor | None = None) -> Tensor:
    """Which keys each query may look at.

    q_pos [..., T], k_pos [..., S]  positions, each in its own text
    q_seq [T], k_seq [S]            numbers of the texts; None: there is only one

    Returns bool [..., T, S], true where query t may see key s.
    """
    ### BEGIN SOLUTION
    mask = k_pos[..., None, :] <= q_pos[..., :, None]  # [..., T, S]
    if q_seq is not None and k_seq is not None:
        mask = mask & (k_seq[..., None, :] == q_seq[..., :, None])
    return mask
    ### END SOLUTION


# %%
lab.check("07", "visible")

# %% [markdown]
# <details><summary>Hint 1</summary>You need every query beside every key. Broadcasting does it: give the queries a
# last axis of size 1, and the keys one of size 1 before their last.</details>
#
# <details><summary>Hint 2</summary>An index with three dots keeps whatever axes are in front:
# <code>x[..., None]</code> adds an axis at the end.</details>
#
# <details><summary>Hint 3</summary>Two comparisons, both of shape [..., T, S], joined by <code>&</code>. The second
# one only if there are text numbers.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked explanation</summary>
#
# `k_pos[..., None, :]` is `[..., 1, S]` and `q_pos[..., :, None]` is `[..., T, 1]`, so the comparison is
# `[..., T, S]`: cell (t, s) asks whether key s stands at or before query t. The text numbers are compared the same
# way. The common wrong answer is `torch.tril`: it compares indices in the batch. That is right for the prompts of one
# step with nothing cached, and wrong as soon as query 0 stands at position 5. The other one compares the texts and
# forgets the positions: each token then sees its own future.
#
# </details>
# <!-- END SOLUTION -->
#
# Look at what you wrote. First the seven tokens as one text, then as three; what the walls took away is crossed out. A
# query is a row: read along it whom it looks at.

# %%
position = torch.tensor([0, 1, 2, 3, 0, 1, 0])
text = torch.tensor([0, 0, 0, 0, 1, 1, 2])
one, three = visible(torch.arange(7), torch.arange(7)), visible(position, position, text, text)
lab.show_masks(
    {"one text of 7": one, "three texts of 4, 2 and 1": three},
    WORDS,
    WORDS,
    f"Two masks of 7 queries by 7 keys. One text: a staircase, {int(one.sum())} cells visible. Three texts: three "
    f"small staircases along the diagonal, {int(three.sum())} cells visible; {int((one != three).sum())} crossed out.",
)

# %% [markdown]
# ### 2. Many texts, one line
#
# A step is planned as a list of rows `(seq, start, new)`: the number of the text, the position of its first new token,
# and its new tokens. A prompt comes with start 0; a text that is being written comes with one token. In the example:
#
# ```
# pack([(0, 0, [1, 57, 744, 2090]), (1, 0, [451, 348]), (2, 0, [680])])
#
#     tokens      1 57 744 2090 451 348 680      positions   0 1 2 3 0 1 0
#     seq         0 0 0 0 1 1 2                  last        3 5 6
# ```


# %% task="07.pack"
def pack(rows: list[tuple[int, int, list[int]]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Lays the new tokens of all rows end to end.

    rows: (seq, start, new) for each of N texts; seq is any number that names the text.

    Returns int64 tensors: tokens [T], positions [T] in their own text, seq [T] number of each token's text, and
    last [N], where in the line the last new token of each row is.
    """
    ### BEGIN SOLUTION
    tokens, positions, seq, last = [], [], [], []
    for i, start, new in rows:
        tokens += new
        positions += range(start, start + len(new))
        seq += [i] * len(new)
        last.append(len(tokens) - 1)
    return torch.tensor(tokens), torch.tensor(positions), torch.tensor(seq), torch.tensor(last)
    ### END SOLUTION


# %%
lab.check("07", "pack")

# %% [markdown]
# <details><summary>Hint 1</summary>Four plain lists that grow in one loop over the rows; tensors at the end.</details>
#
# <details><summary>Hint 2</summary>A list takes a whole range at once: <code>a += range(2, 5)</code>.</details>
#
# <details><summary>Hint 3</summary>When a row's tokens are in, the last of them is the last of the list so
# far.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked explanation</summary>
#
# No index arithmetic is left: the line grows, and everything that belongs to a token is appended with it. The common
# wrong answer counts positions through the whole batch. Then text 1 believes that it begins at position 4: RoPE turns
# its queries and keys by the wrong angles against what lies in the cache, and the mask, which compares positions,
# opens and closes the wrong cells. The next common one gives `last` within the row: 3, 1, 0 in place of 3, 5, 6, so
# texts 1 and 2 are continued with what text 0 thinks.
#
# </details>
# <!-- END SOLUTION -->
#
# ### 3. What the step may read
#
# K and V of everything computed so far lie in **slots**, in one flat memory, in any order. Where position p of text i
# lies, `slot_of[i][p]` says, and nothing else does. A text may have more slots than it has used: they are reserved for
# later, and hold garbage, maybe NaN. Lesson 06 has shown why that matters: a mask gives weight 0, and 0 × NaN is NaN.
# So they must not be hidden. They must not be **read**.


# %% task="07.context"
def context(rows: list[tuple[int, int, list[int]]], slot_of: dict[int, list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Every position that some token of this step may look at: of each row, what was computed and what is new.

    slot_of[i][p]: where K and V of position p of text i lie. It may know more texts, and more slots, than are needed.

    Returns int64 tensors [S] that belong together: slots, positions, and seq, the number of the text.
    """
    ### BEGIN SOLUTION
    slots, positions, seq = [], [], []
    for i, start, new in rows:
        n = start + len(new)
        slots += slot_of[i][:n]
        positions += range(n)
        seq += [i] * n
    return torch.tensor(slots), torch.tensor(positions), torch.tensor(seq)
    ### END SOLUTION


# %%
lab.check("07", "context")

# %% [markdown]
# <details><summary>Hint 1</summary>The same kind of loop as in <code>pack</code>, but from position 0 on.</details>
#
# <details><summary>Hint 2</summary>The new tokens see themselves: their positions belong to what is read.</details>
#
# <details><summary>Hint 3</summary>A row reads <code>start + len(new)</code> positions, the first so many of its
# text's slots.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked explanation</summary>
#
# T and S are made by the same loop with different ranges: `pack` takes the positions from start on, `context` all of
# them from 0. The common wrong answer takes the whole of `slot_of[i]`. The mask would hide what is too much, so it
# works as long as the memory happens to hold numbers. Then, one day, it does not. The other one walks through
# `slot_of.values()` beside the rows: it takes for granted that both are in the same order.
#
# </details>
# <!-- END SOLUTION -->
#
# Now the second step of the example. Each text has got its next token: `this`, `ject` and `will`. Three queries, and
# ten keys in the cache (5 + 3 + 2). Beside yours is the mask of the package; a cell that differs would be crossed out.

# %%
rows = [(0, 4, [451]), (1, 2, [680]), (2, 1, [523])]
_, q_pos, q_seq, _ = pack(rows)
_, k_pos, k_seq = context(rows, {0: [0, 1, 2, 3, 7], 1: [4, 5, 8], 2: [6, 9]})
lab.show_masks(
    {
        "yours": visible(q_pos, k_pos, q_seq, k_seq),
        "the package's": attention.visible(q_pos, k_pos, q_seq, k_seq),
    },
    ["this", "ject", "will"],
    ["<bos>", "I", "am", "sure", "this", "this", "pro", "ject", "ject", "will"],
)

# %% [markdown]
# ### 4. One step
#
# Now put the three together. The model takes tokens, positions and a function `attend(layer, q, k, v)`, which it calls
# in every layer with `q [T, H, D]` and `k`, `v [T, Hkv, D]`, already rotated. It must return `[T, H, D]`, as
# `attention.sdpa` does. Yours needs a store, a gather and a sum: write the new K and V into their slots, then attend
# over everything that may be read. The memory is the package's `KVPool`:
#
# - `pool.store(layer, slots, k, v)` writes `k`, `v [T, Hkv, D]` into `slots [T]`;
# - `pool.index(slots)`, made once per step from `slots [S]`, is what `pool.gather(layer, index)` wants; that returns K
#   and V, `[S, Hkv, D]` each.
#
# The model returns hidden states `[T, d]`, and `model.logits(hidden)` makes `[N, V]` of N rows of them. The sum is
# `attention.sdpa(q, k, v, mask)`. Call it by this full name, so that the counters see it. (`KVPool` also has a table
# of slots, which belongs to the engine. Here `slot_of` does its work.)


# %% task="07.step"
def step(model: Llama, pool: KVPool, rows: list[tuple[int, int, list[int]]], slot_of: dict[int, list[int]]) -> Tensor:
    """One pass of the model over the new tokens of all rows. Returns the logits after each row's last token, [N, V].

    slot_of has the slots of the new tokens too; this step writes their K and V there.
    """
    ### BEGIN SOLUTION
    tokens, positions, seq, last = pack(rows)
    slots, k_pos, k_seq = context(rows, slot_of)
    mask = visible(positions, k_pos, seq, k_seq)  # [T, S]
    new_slots = torch.tensor([slot for i, start, new in rows for slot in slot_of[i][start : start + len(new)]])  # [T]
    index = pool.index(slots)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pool.store(layer, new_slots, k, v)
        return attention.sdpa(q, *pool.gather(layer, index), mask)

    hidden = model(tokens, positions, attend)  # [T, d]
    return model.logits(hidden[last])
    ### END SOLUTION


# %%
lab.check("07", "step")

# %% [markdown]
# <details><summary>Hint 1</summary>Before the model runs, make everything that is the same in all layers: the mask,
# the slots to write, the index to read.</details>
#
# <details><summary>Hint 2</summary>The slots to write are those of the new positions of each row, in the order of
# <code>pack</code>: from <code>start</code> on, as many as there are new tokens.</details>
#
# <details><summary>Hint 3</summary>Store first, then gather: a token looks at itself. And only N of the T rows of
# hidden states are worth a product with the whole vocabulary.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked explanation</summary>
#
# The mask, the slots and the index depend on who is in the step, not on the layer, so they are made once. The common
# wrong answer writes the new K and V into `slots[:T]`. In a step of prompts only, `slots` are exactly the new ones,
# and all is well; in the next step they are the first T positions of the first text. The other one leaves the text
# numbers out of `visible`: what comes out may still read well, but it has read its neighbours.
#
# </details>
# <!-- END SOLUTION -->
#
# ### 5. Nothing leaks
#
# Three texts on the real model, in one step. Then again, with other words in text 1. If the walls hold, texts 0 and 2
# must come out **equal to the last bit**, not just close: a masked score is −∞, its weight is exactly 0, and adding
# exact zeros changes nothing.


# %%
def logits_of(middle: list[int]) -> Tensor:
    texts = [EXAMPLE[:4], middle, EXAMPLE]
    pool, slot_of, first = KVPool(model, 32, 1, 1), {}, 0  # 32 slots; 1, 1: the pool's own table, unused here
    for i, tokens in enumerate(texts):
        slot_of[i] = list(range(first, first + len(tokens)))
        first += len(tokens)
    return step(model, pool, [(i, 0, tokens) for i, tokens in enumerate(texts)], slot_of)


before, after = logits_of([451, 348, 680]), logits_of([2090, 57, 744])
for i in range(3):
    print(f"text {i}: {'equal to the last bit' if torch.equal(before[i], after[i]) else 'changed'}")

# %% [markdown]
# ### 6. The loop
#
# Texts come and go; the line holds whoever is there. For each running text the step computes everything that is not
# computed yet: the whole prompt at first, then one token. Whoever has all its new tokens leaves at once, and its slots
# go back to `free`. Whoever waits comes in as soon as there is a place. `step` looks the slots up, so the loop must put
# those of the new tokens into `slot_of` before it calls `step`. The last token of a text is sampled but never computed,
# so it needs no slot. `len(slot_of[i])` can serve as the number of computed tokens: between two steps a text has
# exactly as many slots as tokens in the cache.


# %% task="07.generate"
def generate(model: Llama, prompts: list[list[int]], n_new: list[int], max_running: int = 8) -> list[list[int]]:
    """Greedy text after each prompt, n_new[i] tokens of text i (at least 1), at most max_running texts at once.

    The prompts are taken in order. Returns the new tokens of each, in the order of the prompts.
    """
    texts = [list(prompt) for prompt in prompts]
    longest = max(len(prompt) + n - 1 for prompt, n in zip(prompts, n_new, strict=True))  # the last is not fed back
    pool = KVPool(model, max_running * longest, 1, 1)  # 1, 1: the pool's own table, unused here
    free = list(range(max_running * longest))  # slots that nobody holds
    slot_of: dict[int, list[int]] = {}  # of the running texts
    ### BEGIN SOLUTION
    waiting, running = list(range(len(texts))), []
    while waiting or running:
        while waiting and len(running) < max_running:
            running.append(waiting.pop(0))
            slot_of[running[-1]] = []
        rows = []
        for i in running:
            start = len(slot_of[i])
            new = texts[i][start:]
            slot_of[i] += [free.pop() for _ in new]
            rows.append((i, start, new))
        logits = step(model, pool, rows, slot_of)  # [N, V]
        for i, token in zip(running, logits.argmax(-1).tolist(), strict=True):
            texts[i].append(token)
            if len(texts[i]) == len(prompts[i]) + n_new[i]:
                free += slot_of.pop(i)
        running = [i for i in running if i in slot_of]
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
    ### END SOLUTION


# %%
lab.check("07", "generate")

# %% [markdown]
# <details><summary>Hint 1</summary>Two lists of text numbers, those that wait and those that run. Each round: fill up,
# make rows, step, give each text its token, let the finished ones go.</details>
#
# <details><summary>Hint 2</summary>Slots are taken from <code>free</code> one by one, for the new tokens only; a
# text's list in <code>slot_of</code> grows in the order of its positions.</details>
#
# <details><summary>Hint 3</summary>Row r of the logits belongs to row r of the step. Go through both together, and
# change the list of running texts only afterwards.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked explanation</summary>
#
# Compare this with lesson 06: there is no row to keep alive, no last place for pads, no width. A common wrong answer
# gives text number r among the *running* ones the slots r · longest and up. When a text leaves, everyone behind it
# moves up and takes over slots that hold someone else's K and V. What a text holds must belong to the text, not to its
# place. Another one frees the slots before the text's last step has been run.
#
# </details>
# <!-- END SOLUTION -->
#
# ### 7. What a dense mask costs
#
# Two formulas, for one layer and one head. For the step of three texts above, `news` is `[4, 2, 1]` and `lengths`
# (after the step) is `[4, 2, 1]` too: 49 cells, 14 visible. For the step after it, `[1, 1, 1]` and `[5, 3, 2]`: 30
# cells, 10 visible.


# %% task="07.scores_dense"
def scores_dense(news: list[int], lengths: list[int]) -> int:
    """Cells of the dense mask of a step. Text i has news[i] new tokens, and lengths[i] positions after the step."""
    ### BEGIN SOLUTION
    return sum(news) * sum(lengths)
    ### END SOLUTION


# %% task="07.scores_needed"
def scores_needed(news: list[int], lengths: list[int]) -> int:
    """Visible cells of the same mask."""
    ### BEGIN SOLUTION
    return sum(t * (s - t) + t * (t + 1) // 2 for t, s in zip(news, lengths, strict=True))
    ### END SOLUTION


# %%
lab.check("07", "scores_dense", "scores_needed")

# %% [markdown]
# <details><summary>Hint 1</summary>The dense mask is a rectangle: rows times columns, over all texts.</details>
#
# <details><summary>Hint 2</summary>For the visible cells take one text at a time. All its new tokens see everything
# that was computed before them.</details>
#
# <details><summary>Hint 3</summary>Among themselves, t new tokens see 1 + 2 + ... + t. That sum has a
# formula.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked explanation</summary>
#
# Needed is Σ [ t (s − t) + t (t + 1) / 2 ]: a rectangle of t queries by s − t old keys, and a staircase of t. For a
# single new token it is just s. The common wrong answer for the dense mask is T²: right while nothing is cached, and
# far too small once texts are being written. For eight texts of equal length s that each get one token, dense is 64 s
# and needed is 8 s: with N texts, N times too many. A step of N equal prompts is worse still, nearly 2 N times,
# because half of each block is hidden too.
#
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# ## Measure
#
# Counters first; they are the same on every machine. The cells from here to "your own" use the package's functions, so
# they run whether your own are done or not.
#
# ### The step of the 693 pads


# %%
def one_step(backend, news: list[int], lengths: list[int], repeats: int = 1):
    """A step in the package, over random K and V. Returns the counted steps and the hidden states, [T, d]."""
    torch.manual_seed(0)
    pool = KVPool(model, sum(lengths), len(lengths), max(lengths))
    pool.k.normal_()
    pool.v.normal_()
    plan, first = [], 0
    for row, (n, size) in enumerate(zip(news, lengths, strict=True)):
        request = Request([2 + row] * size, SamplingParams(), seed=0, limit=1)
        request.row, request.computed, request.slots = row, size - n, range(first, first + size)
        pool.table[row, :size] = torch.tensor(request.slots)
        plan.append((request, n))
        first += size
    batch = batches.pack(plan, pool)
    with counting(model, []) as counts:
        for _ in range(repeats):
            hidden = model(batch.tokens, batch.positions, backend(pool, batch))
    return counts.steps, hidden


HEADS = model.config.n_layers * model.config.n_heads  # 270 query heads over all layers
news, lengths = [100] + [1] * 7, [100] * 8
(dense,), dense_hidden = one_step(DenseAttend, news, lengths)
(gather,), gather_hidden = one_step(GatherAttend, news, lengths)
print(f"tokens through the Linears: {dense.tokens}; as a rectangle: {8 * 100}, {8 * 100 - dense.tokens} of them pads")
print(f"scores per layer and head: dense {dense.scores // HEADS:,}; in pieces {gather.scores // HEADS:,}")
gap = (dense_hidden - gather_hidden).abs().max() / dense_hidden.abs().max()
print(f"hidden states: they differ by at most {gap.item():.1%} of the largest value ({model.dtype})")

# %%
lab.reveal("07.tokens", dense.tokens)
lab.reveal("07.scores", dense.scores // HEADS)

# %% [markdown]
# The pads are gone. But look at the scores: the dense mask computes more of them than the rectangle's 80,000, and only
# 5,750 are needed. The waste has moved out of the Linears into attention.
#
# The second number, "in pieces", is the package's `gather`: **the same predicate**, evaluated only where it can be
# true. The chunk of 100 is an attention of its own, and the seven single tokens are one small rectangle of 7 rows. No
# score between two texts is ever computed, and the hidden states are the same but for rounding. That is what lesson 08
# runs on.

# %% [markdown]
# ### A mixed set of prompts
#
# Real prompts of mixed length, answers of mixed length, three stages on the same work: `padded` (lesson 06), `ragged`
# (dense mask) and `continuous` (lesson 08: no pads, pieces). How many tokens each answer has is fixed here, so that
# the counters are the same on every machine.

# %%
count, longest, cap = lab.size(ci=(3, 64, 8), default=(16, 400, 48), long=(32, 1200, 96))
rounds = lab.size(ci=1, default=3, long=5)
tokenizer = Tokenizer.from_pretrained(find("smollm2-135m-instruct"))
encoded = [tokenizer.encode_chat(list(prompt.messages)) for prompt in load()]
prompts = [ids for ids in encoded if len(ids) <= longest][:count]
n_new = [max(2, cap // (1, 4, 2, 8)[i % 4]) for i in range(len(prompts))]
jobs = [Job(tuple(ids), n) for ids, n in zip(prompts, n_new, strict=True)]
print(f"{len(jobs)} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens, {sum(n_new)} new tokens")

runs = {name: [] for name in ("padded", "ragged", "continuous")}
for _ in range(rounds):
    for name in runs:  # by turns, so that a slow moment hits all of them
        runs[name].append(run(model, name, jobs, {"max_running": 8, "budget": 256}))

needed = HEADS * sum(n * (n + 1) // 2 for ids, new in zip(prompts, n_new, strict=True) for n in [len(ids) + new - 1])
print(f"\n{'':12}{'tokens':>8}{'per needed':>12}{'scores':>12}{'per needed':>12}   seconds, median (from .. to)")
for name, done in runs.items():
    tokens, seconds = done[0].tokens_pushed, sorted(each.summary.wall for each in done)
    print(
        f"{name:12}{tokens:>8,}{tokens / done[0].tokens_useful:>12.2f}{done[0].scores / 1e6:>10,.0f} M"
        f"{done[0].scores / needed:>12.2f}   {median(seconds):.2f} ({seconds[0]:.2f} .. {seconds[-1]:.2f})"
    )

# %%
lab.reveal("07.ratio", round(runs["ragged"][0].scores / needed, 1))

# %% [markdown]
# Read the table by columns. Tokens: ragged pushes exactly what is needed, as continuous does; padded pushes pads and
# finished rows. Scores: ragged wastes about as many as padded does, or more, for another reason. There pads look at
# pads; here texts look at other texts, in vain. Time depends on your machine, and on what is dearer there, a token or
# its scores. Linears are the bulk of the work while contexts are short, so ragged gains; with longer contexts the
# scores win.
#
# ### Where the dense mask loses
#
# That point can be computed. Per new token, in floating-point operations:
#
# ```
# Linears      2 · weights                       two for each weight: multiply, add
# attention    L · H · S · 4 D                   2 D for q·k, 2 D for weight·v, for each of S keys
# equal at     S = 2 · weights / (L · H · 4 D)   positions of all texts together
# ```

# %%
c = model.config
weights = c.n_layers * c.d_model * ((2 * c.n_heads + 2 * c.n_kv_heads) * c.head_dim + 3 * c.d_ff)
break_even = 2 * weights // (HEADS * 4 * c.head_dim)
print(f"{weights:,} weights in the Linears of the layers; equal at S = {break_even:,} positions")
lab.reveal("07.break_even", break_even)

# %% [markdown]
# T has dropped out: it does not matter how many tokens are new. It is all of the *context* that counts, and it is soon
# reached: eight texts of a few hundred tokens. With `gather`, a token pays for its own text alone: a single text must
# have so many positions before its scores outweigh the Linears, and company costs it nothing.
#
# Now by clock. Eight texts get one token each, with more and more context behind them.

# %%
sizes = lab.size(ci=(16, 64), default=(16, 64, 256, 1024), long=(16, 64, 256, 1024, 2048))
repeats = lab.size(ci=2, default=10, long=30)
counted, timed = {}, {}
for name, backend in (("dense", DenseAttend), ("gather", GatherAttend)):
    for size in sizes:
        steps, _ = one_step(backend, [1] * 8, [size] * 8, repeats + 1)
        counted[name, size] = steps[-1].scores // HEADS
        timed[name, size] = sorted(1e3 * (each.ended - each.began) for each in steps[1:])  # ms; the first one warms up
        low, *_, high = timed[name, size]
        print(f"{name:7} S = {8 * size:>6,}: {counted[name, size]:>7,} scores", end=", ")
        print(f"{median(timed[name, size]):.1f} ms ({low:.1f} .. {high:.1f})")

# %% [markdown]
# ### Your own, counted
#
# The same prompts through **your** `generate`. Tokens and scores must be those of the package's ragged stage.

# %%
with counting(model, []) as counts:
    mine = generate(model, prompts, n_new)
theirs = runs["ragged"][0]
for what, own, stage in (
    ("tokens pushed", sum(each.tokens for each in counts.steps), theirs.tokens_pushed),
    ("scores", sum(each.scores for each in counts.steps), theirs.scores),
):
    print(f"{what}: yours {own:,}, the stage's {stage:,}, {'equal' if own == stage else 'NOT equal'}")
print("your text 0:", repr(tokenizer.decode(mine[0])))

# %% [markdown]
# And your `visible` can do more than that. `lab.use` puts it into the engine, in the place of the package's. All
# stages use it from then on, here the ragged one, until `undo()`.

# %%
clean = run(model, "ragged", jobs[:3]).outputs
undo = lab.use(from_namespace({"visible": visible}))
try:
    with_mine = run(model, "ragged", jobs[:3]).outputs
finally:
    undo()
print("same tokens as with the package's:", with_mine == clean)

# %% [markdown]
# ## Plot
#
# Left: scores of a step by formula (lines, from your two functions) and counted (marks). Right: the time of the same
# steps. S grows by the same factor from tick to tick.

# %%
figure = Figure(figsize=(10, 4), layout="constrained")
left, right = figure.subplots(1, 2)
S = [8 * size for size in sizes]
for name, formula, marker, line in (("dense", scores_dense, "o", "-"), ("gather", scores_needed, "s", "--")):
    left.plot(S, [formula([1] * 8, [size] * 8) for size in sizes], line, color="0.5")
    left.plot(S, [counted[name, size] for size in sizes], marker, color="black", fillstyle="none")
    left.annotate(name, (S[-1], counted[name, sizes[-1]]), (6, 0), textcoords="offset points", va="center")
    middle = [median(timed[name, size]) for size in sizes]
    spread = [[m - timed[name, size][0] for m, size in zip(middle, sizes, strict=True)]]
    spread += [[timed[name, size][-1] - m for m, size in zip(middle, sizes, strict=True)]]
    right.errorbar(S, middle, spread, marker=marker, linestyle=line, color="black", fillstyle="none", capsize=3)
    right.annotate(name, (S[-1], middle[-1]), (6, 0), textcoords="offset points", va="center")
if S[-1] > break_even:
    right.axvline(break_even, color="0.6", linestyle=":")
    words = f"S = {break_even:,}: as much\narithmetic as the Linears"
    where = dict(xycoords=right.get_xaxis_transform(), textcoords="offset points", ha="right", va="top", fontsize=8)
    right.annotate(words, (break_even, 0.97), (-5, 0), **where)
for axes, what in ((left, "scores per layer and head"), (right, "ms per step, median and range")):
    axes.set(xscale="log", xlabel="S: context positions of all eight texts", ylabel=what)
    axes.set_xlim(S[0] / 1.3, S[-1] * 2)
    axes.set_xticks(S, [f"{size:,}" for size in S])
    axes.minorticks_off()
left.set_yscale("log")
right.set_ylim(bottom=0)
off = sum(counted["dense", size] != scores_dense([1] * 8, [size] * 8) for size in sizes)
ratio = {size: median(timed["dense", size]) / median(timed["gather", size]) for size in sizes}
ms = [f"{median(timed['dense', n]):.1f} and {median(timed['gather', n]):.1f} at S = {8 * n:,}" for n in sizes]
lab.show(
    figure,
    f"Eight texts get one token each. Scores: the dense mask computes {counted['dense', sizes[0]]:,} at S = {S[0]:,} "
    f"and {counted['dense', sizes[-1]]:,} at S = {S[-1]:,}, eight times what gather does; {off} counted points are off "
    f"the line. Time, dense and gather, median in ms: {'; '.join(ms)}. Dense takes "
    f"{ratio[sizes[0]]:.2f} times as long as gather at S = {S[0]:,}, and {ratio[sizes[-1]]:.2f} times at S = {S[-1]:,}."
    + (f" A dotted line at S = {break_even:,}: as much arithmetic as the Linears." if S[-1] > break_even else ""),
)

# %% [markdown]
# ## Explain
#
# Ragged pushes not one token too many. Why can it still be slower than a stage that pushes the same tokens, and why
# does that get worse with more texts, though each text has only its own context? Three sentences; use T and S.

# %%
lab.answer("07.why", """ """)

# %% [markdown]
# ## Break it
#
# The most dangerous bug of a server: the mask forgets whose token it is. Everything runs, all shapes are right, and
# someone gets an answer to a question that somebody else has asked. Which property sees it first? And would the
# *first* property of `visible` have been enough?

# %%
yours = visible


def visible(q_pos, k_pos, q_seq=None, k_seq=None):  # noqa: F811
    return yours(q_pos, k_pos)  # the text numbers are dropped


try:
    lab.check("07", "visible", "step")
    undo = lab.use(from_namespace({"visible": visible}))
    try:
        leaky = run(model, "ragged", jobs[:3]).outputs
    finally:
        undo()
finally:
    visible = yours
changed = sum(a != b for a, b in zip(leaky, clean, strict=True))
print(f"\ntexts that come out differently in the engine: {changed} of {len(clean)}")
print("text 0, clean:", repr(tokenizer.decode(clean[0])))
print("text 0, leaky:", repr(tokenizer.decode(leaky[0])))

# %% [markdown]
# ## Recap
#
# - Everything but attention is per token. So the new tokens of all texts can lie in one line `[T]`, and no pad is
#   left.
# - The mask is one rule, same text and not later. It is block-diagonal, and the blocks are staircases.
# - Position, slot and place in the batch are three different things. Only the position enters RoPE and the mask; only
#   the slot says where K and V lie.
# - Free slots are not masked. They are not read.
# - A dense mask computes T · S scores. With N texts of similar length that is N times what is needed, and from some S
#   on (here 3,072 positions) it outweighs all the Linears.
# - `gather` evaluates the same rule in pieces, so the waste goes away and the result stays. In lesson 08 a scheduler
#   with a token budget decides who is in the line.
#
# ## Exercises
#
# 1. **Any order** (difficulty 1/5, importance 3/5, 10 minutes). Run `generate` on the same prompts in three orders. Do
#    the texts change? Should they, in bfloat16? In float64?
# 2. **When is the rectangle cheaper?** (2/5, 4/5, 15 minutes). N texts of equal length s get one token each. How many
#    scores does a rectangle compute, and how many the dense mask? And if one text has 1,000 positions and seven have
#    10?
# 3. **In pieces** (3/5, 5/5, 30 minutes). Change `step` so that it calls `attention.sdpa` once for each row, over that
#    row's own slots. All checks must still pass. Compare the counted scores with `scores_needed`.
# 4. **A sick neighbour** (3/5, 4/5, 25 minutes). Compute three prompts with `step`, put NaN into V of the first slot
#    of one of them (in layer 0), and give each text one more token. Whose logits are NaN, and why, if nothing leaks?
#    Do it again with the step of exercise 3.
# 5. **A budget** (4/5, 5/5, 40 minutes). Give `generate` a limit m of new tokens in a step: a long prompt comes in
#    chunks. Make sure that no text being written ever waits. You have then built most of lesson 08.
#
# ## References
#
# - Yu et al. 2022, *Orca: A Distributed Serving System for Transformer-Based Generative Models*. Read "selective
#   batching": all operations but attention work on one line of tokens, as here.
# - [*Continuous batching from first principles*](https://huggingface.co/blog/continuous_batching) (Hugging Face, 2025).
#   Read the section on ragged batching for its drawings of the mask; it has the example with the seven tokens.
# - Krell et al. 2021, [*Efficient Sequence Packing without Cross-contamination*](https://arxiv.org/abs/2107.02027).
#   The same mask in training: read why packing needs positions that restart.
# - Dao 2023, [*FlashAttention-2*](https://arxiv.org/abs/2307.08691). Read it for how a kernel skips blocks that the
#   mask hides; its variable-length interface takes texts end to end.
# - Dong et al. 2024, [*Flex Attention*](https://arxiv.org/abs/2412.05496). Read how a rule like your `visible` becomes
#   a kernel that skips empty blocks by itself.
