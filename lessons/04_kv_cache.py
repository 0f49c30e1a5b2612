# %% [markdown]
# # 04 · The KV cache
#
# You keep what the model has already computed, and a new token costs one token instead of the whole text.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minillm/minillm/blob/v0.1.0/lessons/04_kv_cache.ipynb)
#
# **Objectives.** You will
#
# - show, by changing a later token, that the keys and values of earlier tokens never change;
# - compute what a token costs in memory, and find out where a published "16 KB" comes from;
# - write the cache, an attention that uses it, and the loop around both;
# - measure what it saves, in tokens, attention scores and bytes first, in time second.
#
# | | |
# |---|---|
# | prerequisites | lesson 02 (attention, `visible`, `sdpa`, RoPE) and lesson 03 (the naive loop and its cost) |
# | minutes | 75, of which the machine works about two |
# | hardware | any CPU with 2 GB of memory free; a GPU is used where torch finds one |
# | the one change | K and V are kept; each token goes through once ([stages/cached.py](../minillm/stages/cached.py)) |

# %% tags=["setup"]
from statistics import median

import torch
from matplotlib.figure import Figure

from minillm import attention, doctor, lab
from minillm.bench import prompts
from minillm.bench.harness import Job, run
from minillm.fetch import find
from minillm.lab.checks.c04 import MODELS, looks_at
from minillm.model import Llama
from minillm.packing import pack_weights
from minillm.tokenizer import Tokenizer

EXAMPLE = [1, 57, 744, 2090, 451, 348, 680]
WORDS = ["<bos>", "I", "am", "sure", "this", "pro", "ject"]

# %%
lab.start("04")
model = Llama.from_pretrained("smollm2-135m-instruct")
weight_bytes = sum(weight.numel() for weight in model.parameters()) * model.dtype.itemsize
model = pack_weights(model)
tokenizer = Tokenizer.from_pretrained(find("smollm2-135m-instruct"))
L, H, Hkv, D = model.config.n_layers, model.config.n_heads, model.config.n_kv_heads, model.config.head_dim
print(f"L = {L} layers, H = {H} query heads, Hkv = {Hkv} key-value heads, head dim D = {D}, {model.dtype}")

# %% [markdown]
# ## The idea
#
# Lesson 03 wrote `<bos> I am sure this pro ject`, then one more token, then one more. For each it pushed the **whole**
# text through the model:
#
# | step | tokens that went through the model | how many |
# |--:|---|--:|
# | 1 | `<bos> I am sure this pro ject` | 7 |
# | 2 | `<bos> I am sure this pro ject` + 1 new one | 8 |
# | 3 | `<bos> I am sure this pro ject` + 2 new ones | 9 |
#
# The seven were computed three times. Was it the same result each time? If so, we may keep it.
#
# A token needs others in one place only: in attention its query is compared with the **keys** of the tokens before it,
# and their **values** are added up. Everything else in the model is per token. So of an old token, a new one needs just
# K and V, in every layer. The old token's query is of no more use: what it asked for has been answered.
#
# ### Why keeping them is exact
#
# In layer 0 a token's K and V come from its own embedding. In layer 1 they come from what layer 0's attention gave,
# which looked at this token and at those *before* it. And so on up: **the K and V of a token depend on the tokens up to
# it, never on a later one.** Whatever is written next, they stay.
#
# That is a claim, so test it. We run the seven tokens, and again with one of them changed: `pro` becomes `ob`
# (position 5; the text now says `this object`). Then we compare K and V, layer by layer, position by position.


# %%
class Watch:
    """Attention as in lesson 03, nothing stored; it also remembers the K and V that passed by, layer by layer."""

    def __init__(self, mask):
        self.mask, self.passed = mask, []

    def __call__(self, layer, q, k, v):
        self.passed.append(torch.cat((k, v), -1))
        return attention.sdpa(q, k, v, self.mask)


def kv_of(ids, mask):
    watch = Watch(mask)
    model(torch.tensor(ids, device=model.device), torch.arange(len(ids), device=model.device), watch)
    return torch.stack(watch.passed).float().cpu()  # [L, T, Hkv, 2 D]


def compare(title, mask):
    changed = list(EXAMPLE)
    changed[5] = 794  # "ob"
    apart = (kv_of(EXAMPLE, mask) - kv_of(changed, mask)).abs().amax((-2, -1))  # [L, T]
    print(f"{title}\n  largest difference in K or V at position\n  {'layer':>8}", *(f"{word:>7}" for word in WORDS))
    for layer in (0, 1, L - 1):
        print(f"  {layer:>8}", *(f"{value:>7.3g}" for value in apart[layer].tolist()))
    return apart


row = torch.arange(7, device=model.device)
causal = compare("Each token sees itself and those before it (our model):", attention.visible(row, row))
both = compare("\nEach token sees all the others:", torch.ones(7, 7, dtype=torch.bool, device=model.device))

print(f"\nPositions 0 to 4, all layers: {causal[:, :5].max():g} with the causal mask, {both[:, :5].max():.3g} without.")

# %% [markdown]
# Read the first table from the left. Up to position 4 there is 0 in every layer: not a small number, 0. From position 5
# on K and V differ, as they must. (In layer 0 those of `ject` are still the same: there they depend on the token and
# its position alone.)
#
# The second table is the counter-test. Let every token see all others, as encoders like BERT do, and from layer 1 on
# the K and V of *every* token change. **The causal mask is what makes a cache possible.** The cache isn't an
# approximation, and no accuracy is traded for speed.
#
# ### What it saves
#
# Let a prompt have $n$ tokens, and let $g$ new ones be written. How many tokens go through the model in all?
#
# $$\text{naive:}\quad \sum_{i=0}^{g-1} (n + i) \;=\; g\,n + \frac{g\,(g-1)}{2}
# \qquad\qquad \text{cached:}\quad n + g - 1$$
#
# The first grows with the square of the length, the second in proportion to it: $O(n^2)$ to $O(n)$. The "$-1$" is the
# last new token: nothing follows it, so it is never pushed.
#
# Attention itself gets cheaper by one power too, but not free. The new token's query still meets the keys of all $s$
# positions of the text. So for one token at length $s$, in each of $L$ layers and $H$ heads:
#
# | | tokens pushed | attention scores | K and V read, in bytes | K and V kept, in bytes |
# |---|--:|--:|--:|--:|
# | naive | $s$ | $L H s^2$ | $s$ times those of a token | 0 |
# | cached | 1 | $L H s$ | $s$ times those of a token | $s$ times those of a token |
#
# ### One loop, not two
#
# You will hear of two phases: *prefill* (the prompt, many tokens at once) and *decode* (one token at a time). You need
# no code for either. Keep a counter of the tokens **computed** so far, those whose K and V are stored, and in each step
# feed what is missing:
#
#     step 1   computed = 0   feed  <bos> I am sure this pro ject     positions 0 1 2 3 4 5 6
#     step 2   computed = 7   feed  will                              position  7
#     step 3   computed = 8   feed  the next one                      position  8
#
# "All tokens not computed yet" is the prompt at first, and one token later on. Note the positions: they go on counting.

# %% [markdown]
# ## Predict
#
# Put a number in place of each `None`, then run the cell. A wild guess is fine; what counts is to have guessed before
# the machine tells. The formulas under *What it saves* give the first two.

# %%
# 7 prompt tokens, 32 new ones: how many tokens go through the model, all steps together?
lab.predict("04.tokens_naive", None)
lab.predict("04.tokens_cached", None)

# Llama-2-7B: 32 layers, 32 key-value heads, D = 128, 2 bytes a number. K and V of ONE token, in KiB (1,024 bytes)?
lab.predict("04.kib_llama2", None)

# The longest text measured below: how many times faster does a token come with the cache?
LENGTHS = lab.size((32, 128), (64, 128, 256, 512, 1024), (64, 128, 256, 512, 1024, 2048, 4096))
print(f"The longest text has {LENGTHS[-1]:,} tokens.")
lab.predict("04.times_faster", None)

# %% [markdown]
# ## Build
#
# ### Task 1: what a token costs in memory
#
# The cache trades memory for work. How much memory? In every layer a token leaves one key and one value behind, and
# each of the two has $D$ numbers in each of the $H_{kv}$ key-value heads. (Not the $H$ query heads: queries aren't
# kept. That is what grouped-query attention is for.) Write the sum.


# %% task="04.kv_bytes_per_token"
def kv_bytes_per_token(n_layers: int, n_kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Bytes of K and V that one token keeps, over all layers. `itemsize`: bytes of one number (bfloat16: 2)."""
    ### BEGIN SOLUTION
    return 2 * n_layers * n_kv_heads * head_dim * itemsize
    ### END SOLUTION


# %%
lab.check("04", "kv_bytes_per_token")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# It is a product of five numbers: the four arguments, and one that is in no argument.
# </details>
#
# <details><summary>Hint 2</summary>
#
# The fifth is how many tensors are kept in each layer. What are their two names?
# </details>
#
# <details><summary>Hint 3</summary>
#
# Try it on SmolLM2-135M: 30 layers, 3 key-value heads, D = 64, 2 bytes. One layer's K is 3 x 64 x 2 = 384 bytes, its V
# the same, and 30 layers make 23,040.
# </details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked explanation of task 1</summary>
#
# Two tensors, in each layer, for each key-value head, D numbers of `itemsize` bytes: multiply them all. The common
# wrong answer leaves the layers out, because one looks at one layer while thinking. It is off by a factor of 16 to 32,
# and it has been published: see below.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# ### The published 16 KB
#
# Now the sum for Llama-2-7B, factor by factor. A summary of the article that this course follows says that one token of
# this model takes 16 KB of K and V "across its 32 layers". Does it?

# %%
two, heads, dim, itemsize, layers = 2, 32, 128, 2, 32
print(f"one layer:   {two} x {heads} heads x {dim} x {itemsize} B = {two * heads * dim * itemsize:>9,} B")
print(f"{layers} layers:                      x {layers} = {kv_bytes_per_token(layers, heads, dim, itemsize):>9,} B")
lab.reveal("04.kib_llama2", kv_bytes_per_token(layers, heads, dim, itemsize) // 1024)

# %% [markdown]
# The 16 KB are right for **one layer**. The token takes all 32 of them. Whoever plans with the small number believes
# that a GPU holds 32 times as many texts as it does.
#
# So how many does it hold? Say that 16 GB (16 billion bytes) are left for K and V, and every text has 2,048 tokens:

# %%
print(f"{'model':<16}{'L':>4}{'Hkv':>5}{'D':>5}{'bytes per token':>17}{'MB per text':>13}{'texts in 16 GB':>16}")
for name, (layers, heads, dim, _) in MODELS.items():
    each = kv_bytes_per_token(layers, heads, dim, 2)
    fit = 16_000_000_000 // (2048 * each)
    print(f"{name:<16}{layers:>4}{heads:>5}{dim:>5}{each:>17,}{2048 * each / 1e6:>13,.0f}{fit:>16,}")

# %% [markdown]
# Look at the last two rows. Mistral-7B and Llama-2-7B are about equally large, but one keeps a quarter of the other's
# bytes: 8 key-value heads instead of 32. And see SmolLM2-1.7B, a small model with no grouped queries. What a token
# costs depends on the shape of the attention, not on the number of parameters.
#
# This table is why later lessons fight for memory: batching (06) multiplies it by the number of texts.

# %% [markdown]
# ### Task 2: put K and V where they belong
#
# One memory holds one layer's K (another one its V): `[Hkv, S, D]`, the heads first; here $S$ is its room. The
# new ones come as the model makes them, tokens first: `[T, Hkv, D]`. Position $p$ of the text has a fixed place, $p$.


# %% task="04.store"
def store(memory: torch.Tensor, positions: torch.Tensor, new: torch.Tensor) -> None:
    """Writes new[t] at positions[t] of every head, in place. Returns nothing, and touches no other place.

    memory [Hkv, S, D]; positions [T], each below S, in any order; new [T, Hkv, D]
    """
    ### BEGIN SOLUTION
    memory[:, positions] = new.transpose(0, 1)  # [Hkv, T, D]
    ### END SOLUTION


# %%
lab.check("04", "store")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# A loop over the T tokens is a fine first version. Which place of which axis does token t write?
# </details>
#
# <details><summary>Hint 2</summary>
#
# Without a loop: a tensor of positions can be an index. `memory[:, positions]` has the shape [Hkv, T, D].
# </details>
#
# <details><summary>Hint 3</summary>
#
# `new` has the same numbers with its first two axes the other way round. Which operation swaps two axes, and which one
# only pretends to?
# </details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked explanation of task 2</summary>
#
# The left side selects T places in every head, the right side brings the heads to the front, and the assignment writes
# through to the memory. The common wrong answer is `new.reshape(Hkv, T, D)`. It has the right shape and raises nothing,
# but it only cuts the same row of numbers at other places: parts of one token end up in another. `transpose` moves the
# axes. The second most common one writes to `memory[:, :T]`, which is right for the prompt and wrong ever after.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# ### Task 3: attention with a memory
#
# The model hands attention its q, k and v once per layer, already rotated (lesson 02). Your `CachedAttend` is made anew
# for each step, with the two memories and the positions of the step's tokens, and is then called once in each layer. It
# does three things, in this order:
#
# 1. **store** the new k and v in the memories of this layer, at their positions;
# 2. **read** K and V of all positions from 0 to the last new one, both included, and nothing beyond: what lies there
#    was never written;
# 3. **attend** with `attention.sdpa`, under the mask that `attention.visible` makes from *positions*.
#
# How large is the mask? T new tokens look at S positions, so it is `[T, S]`, and that is a square only for a whole
# prompt. If our seven tokens come as 4 and then 3, the second step has positions 4 5 6 against 0 .. 6.


# %% task="04.CachedAttend"
class CachedAttend:
    """Attention over everything stored so far. Made once per step, called once per layer.

    k_memory and v_memory [L, Hkv, room, D]; positions [T] of the step's tokens, one run: 4 5 6, say
    """

    def __init__(self, k_memory: torch.Tensor, v_memory: torch.Tensor, positions: torch.Tensor):
        ### BEGIN SOLUTION
        self.k_memory, self.v_memory, self.positions = k_memory, v_memory, positions
        self.size = int(positions.max()) + 1  # S
        self.mask = attention.visible(positions, torch.arange(self.size, device=positions.device))  # [T, S]
        ### END SOLUTION

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [T, H, D]; k, v [T, Hkv, D], rotated  ->  [T, H, D]. `attention.sdpa` wants K and V as [S, Hkv, D]."""
        ### BEGIN SOLUTION
        store(self.k_memory[layer], self.positions, k)
        store(self.v_memory[layer], self.positions, v)
        keys = self.k_memory[layer, :, : self.size].transpose(0, 1)  # [S, Hkv, D], a view: nothing is copied
        values = self.v_memory[layer, :, : self.size].transpose(0, 1)
        return attention.sdpa(q, keys, values, self.mask)
        ### END SOLUTION


# %%
lab.check("04", "CachedAttend")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# In `__init__`, keep what you were given, and work out what all layers share: how many positions will be read, and the
# mask. S is the last position plus one, since positions count from 0.
# </details>
#
# <details><summary>Hint 2</summary>
#
# `attention.visible(q_pos, k_pos)` takes the positions of the queries, [T], and those of the keys, [S]. The keys are at
# 0, 1, 2, .. S - 1: `torch.arange(S)`.
# </details>
#
# <details><summary>Hint 3</summary>
#
# `self.k_memory[layer]` is the memory that `store` takes, and writing into it writes into the large one. For reading,
# cut its middle axis to S and bring that axis to the front. In v the same.
# </details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked explanation of task 3</summary>
#
# Storing comes first, so that a new token finds its own K and V among those that it reads: every token sees itself.
# Afterwards one read serves old and new alike, and nothing needs to be glued together.
#
# The common wrong answer is the mask. `torch.ones(T, S).tril()`, or `is_causal=True` in PyTorch's own function, starts
# its triangle at the **top left**: row 0 sees key 0 alone. For a whole prompt that is right, so the first test passes.
# For a single new token at position 7 it hides everything but `<bos>`. Compare positions and no such question arises.
# The other one is a mask over the whole memory instead of a cut: it works while free places hold zeros, and costs time
# for each of them; but a weight of 0 times NaN is NaN.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# What does *your* class let a token see? We needn't read the code to know. Ask it: all keys alike, and position $p$ has
# a 1 in dimension $p$ of its value, so the answer shows where the query has looked. First the whole prompt, then the
# second chunk of three, then `will`, alone in its step.

# %%
seven = [*WORDS, "will"]
for start, T in ((0, 7), (4, 3), (7, 1)):
    S = start + T
    top_left = torch.ones(T, S, dtype=torch.bool).tril()  # a triangle drawn without asking for positions
    expected = attention.visible(torch.arange(start, S), torch.arange(S))
    masks = {"from the top left": top_left, "yours": looks_at(CachedAttend, start, T), "expected": expected}
    wrong = [int((masks[name] != expected).sum()) for name in ("from the top left", "yours")]
    where = f"positions {start} to {S - 1}" if T > 1 else f"position {start}"
    words = f"New token{'s' * (T > 1)} {' '.join(seven[start:S])} at {where}: a mask of {T} by {S}. "
    words += f"A top-left triangle is wrong in {wrong[0]} cells of {T * S}, yours in {wrong[1]}."
    lab.show_masks(masks, rows=seven[start:S], columns=seven[:S], words=words)
    print()

# %% [markdown]
# A cross marks a cell that differs from the expected mask. In the first picture there is none: on a whole prompt a
# top-left triangle is right by accident. In the last one `will` would see nothing but `<bos>`.
#
# ### Task 4: the loop
#
# Now the engine of this lesson. Make the two memories (how many positions can the text ever reach?), then repeat: feed
# the tokens not computed yet, take the most likely next token, until there are `n_new`.


# %% task="04.generate"
def generate(model: Llama, prompt: list[int], n_new: int) -> list[int]:
    """The n_new most likely tokens after the prompt, one by one. No end is looked for, and nothing is kept for later.

    Each token goes through the model once: len(prompt) + n_new - 1 in all. The memories are of the model's own
    dtype, on its device; `model.config` has n_layers, n_kv_heads and head_dim. `model(tokens, positions, attend)`
    takes two int64 tensors [T] and gives hidden states [T, d]; `model.logits(hidden [M, d])` gives [M, V].
    """
    ### BEGIN SOLUTION
    c = model.config
    room = len(prompt) + n_new - 1  # the last new token is never fed back
    k_memory = torch.zeros(c.n_layers, c.n_kv_heads, room, c.head_dim, dtype=model.dtype, device=model.device)
    v_memory = torch.zeros_like(k_memory)
    tokens, computed = list(prompt), 0
    while len(tokens) < len(prompt) + n_new:
        new = torch.tensor(tokens[computed:], device=model.device)  # [T]: the prompt, then one at a time
        positions = torch.arange(computed, len(tokens), device=model.device)
        hidden = model(new, positions, CachedAttend(k_memory, v_memory, positions))  # [T, d]
        computed = len(tokens)
        tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]
    ### END SOLUTION


# %%
lab.check("04", "generate")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Two things change from step to step: the list of tokens, which grows by one, and the number of them that are computed.
# Start with a copy of the prompt and with 0. There is one loop, and no `if` for the first step.
# </details>
#
# <details><summary>Hint 2</summary>
#
# The step's tokens are `tokens[computed:]`. Their positions run from `computed` to `len(tokens) - 1`. They serve three
# times: for the rotation inside the model, for the place in the memory, and for the mask.
# </details>
#
# <details><summary>Hint 3</summary>
#
# A memory has the shape [L, Hkv, room, D], all of which `model.config` knows: `n_layers`, `n_kv_heads`, `head_dim`.
# Give it `dtype=model.dtype` and `device=model.device`. Only the last row of the hidden states is worth its logits.
# Count what is computed *before* you put the new token at the end.
# </details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked explanation of task 4</summary>
#
# The loop ends when there are `n_new` more tokens than in the prompt. In each round `tokens[computed:]` is what the
# model has not seen: seven tokens at first, one later. The common wrong answer is `torch.arange(len(new))` for the
# positions. In step 1 it is right. In step 2 it says that `will` is at position 0: it is rotated as if it were, its K
# and V overwrite those of `<bos>`, and the mask shows it nothing else. The text goes on, grammatical for a while, and
# wrong.
#
# The second most common one lives longer: a memory in a global name or a default argument. The first request is right,
# and the next one reads another one's text.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# Yours, on the real model. (In the article the next token is `will`; this small model may have another opinion. The
# cell needs your functions; those under *Measure* use the package's stage, so you can go on without.)

# %%
mine = generate(model, EXAMPLE, 12)
theirs = run(model, "cached", [Job(tuple(EXAMPLE), 12)]).outputs[0]
print("yours:   ", repr(tokenizer.decode(EXAMPLE + mine)))
print("package: ", repr(tokenizer.decode(EXAMPLE + theirs)))
print(f"{sum(a == b for a, b in zip(mine, theirs, strict=True))} of {len(theirs)} tokens are the same.")

# %% [markdown]
# ## Measure
#
# ### The running example, counted
#
# The counters first. They don't depend on the machine, so they must match the formulas exactly: 7 prompt tokens, 32 new
# ones, through the stage before and the stage of this lesson.

# %%
n, g = len(EXAMPLE), 32
predicted = {  # tokens pushed, attention scores
    "naive": (g * n + g * (g - 1) // 2, L * H * sum((n + i) ** 2 for i in range(g))),
    "cached": (n + g - 1, L * H * (n**2 + sum(n + i for i in range(1, g)))),
}
each = model.config.kv_bytes_per_token(model.dtype.itemsize)
runs = {}
print(f"{'stage':<8}{'tokens pushed':>15}{'scores':>14}{'K, V read':>12}{'K, V kept':>12}   as predicted")
for stage in ("naive", "cached"):
    done = runs[stage] = run(model, stage, [Job(tuple(EXAMPLE), g)])
    read = sum(step.kv_bytes for step in done.counts.steps)
    assert read == each * sum(n + i for i in range(g))
    right = (done.tokens_pushed, done.scores) == predicted[stage]
    print(
        f"{stage:<8}{done.tokens_pushed:>15,}{done.scores:>14,}{read / 1e6:>9.1f} MB"
        f"{done.counts.peak_reserved_bytes / 1e6:>9.2f} MB   {'yes' if right else 'NO'}"
    )
print()
lab.reveal("04.tokens_naive", runs["naive"].tokens_pushed)
lab.reveal("04.tokens_cached", runs["cached"].tokens_pushed)

# %% [markdown]
# Two columns deserve a second look. *K, V read* is the **same** for both: the new token's query meets all keys before
# it either way. The naive stage only has to make them first, all of them, each time. *K, V kept* is the price.
#
# And is the text the same? In float64 your checks compared every token. The real model computes in a narrower dtype:

# %%
naive, cached = (runs[stage].outputs[0] for stage in ("naive", "cached"))
same = next((i for i in range(g) if naive[i] != cached[i]), g)
print(f"In {model.dtype}, the first {same} of {g} new tokens are the same.")
if same < g:
    row = torch.arange(n + same, device=model.device)
    ids = torch.tensor(EXAMPLE + naive[:same], device=model.device)
    logits = model.logits(model(ids, row, attention.SelfAttend(row))[-1:])[0].float()
    for stage, token in (("naive", naive[same]), ("cached", cached[same])):
        print(f"Then {stage:<6} takes {tokenizer.decode([token])!r:<10} (naive logit {logits[token]:.3f})")
    print(f"The logits of all tokens spread over {logits.min():.1f} to {logits.max():.1f}.")

# %% [markdown]
# If the two part, then at a place where two tokens are as good as equally likely. A matrix product over one row and one
# over many rows add in a different order, and the last bit decides. It isn't the cache's doing: any change of shape
# does it, and every engine that batches meets it. From there on the texts differ, since each continues its own.
#
# ### One token, at growing length
#
# Now one new token at the end of ever longer texts. First a run of each kind that doesn't count (the first pass over a
# new shape prepares code for it), then some rounds that do. The time is that of whole steps, as a median, with the
# fastest and the slowest behind it.

# %%
ROUNDS, NEW = lab.size(1, 3, 5), lab.size(3, 6, 8)
text = tokenizer.encode("\n".join(message["content"] for prompt in prompts.load() for message in prompt.messages))


def token_steps(stage, length):
    """Steps that make one token each, the first of them from a text of `length` tokens."""
    done = run(model, stage, [Job(tuple(text[: length - 1]), NEW + 1)])
    return done.counts.steps[1:]


timed = {(stage, length): [] for stage in ("naive", "cached") for length in LENGTHS}  # milliseconds
counted = {}
for round_of in range(ROUNDS + 1):
    for stage, length in timed:
        steps = token_steps(stage, length)
        counted[stage, length] = steps[0]
        if round_of > 0:
            timed[stage, length] += [1e3 * (step.ended - step.began) for step in steps]

print(f"{torch.get_num_threads()} of {doctor.usable_cores()} cores of {doctor.cpu_name()}, {model.dtype}; one token:")
print(f"{'':>8}|{'naive':^46}|{'cached':^42}")
heading = "".join(f"|{'pushed':>8}{'scores':>{width}}{'ms':>8}{'from - to':>15}" for width in (15, 11))
print(f"{'length':>8}{heading}")
for length in LENGTHS:
    line = f"{length:>8}"
    for stage, width in (("naive", 15), ("cached", 11)):
        step, ms = counted[stage, length], timed[stage, length]
        assert (step.tokens, step.scores) == ((length, L * H * length**2) if stage == "naive" else (1, L * H * length))
        spread = f"{min(ms):.1f} - {max(ms):.1f}"
        line += f"|{step.tokens:>8,}{step.scores:>{width},}{median(ms):>8.1f}{spread:>15}"
    print(line)

longest = LENGTHS[-1]
faster = median(timed["naive", longest]) / median(timed["cached", longest])
print(f"\nAt {longest} tokens the cache pushes {longest:,} times fewer, and is {faster:.1f} times faster.")
lab.reveal("04.times_faster", round(faster, 1))

# %% [markdown]
# The counters are the formulas of the table in *What it saves*; the cell would have stopped otherwise. The time follows
# them only halfway: pushing so many times fewer tokens didn't make it as many times faster. The next picture and the
# next table show why.

# %% [markdown]
# ## Plot

# %%
figure = Figure(figsize=(10, 3.9), layout="constrained")
left, right = figure.subplots(1, 2)
looks = {"naive": {"color": "black", "marker": "o"}, "cached": {"color": "0.45", "marker": "s"}}
for stage, look in looks.items():
    formula = [length if stage == "naive" else 1 for length in LENGTHS]
    left.plot(LENGTHS, formula, color=look["color"], linestyle="--")
    left.plot(LENGTHS, [counted[stage, length].tokens for length in LENGTHS], linestyle="", markersize=7, **look)
    left.annotate(stage, (LENGTHS[-1], formula[-1]), (-6, 8), textcoords="offset points", ha="right")
    middle = [median(timed[stage, length]) for length in LENGTHS]
    low = [m - min(timed[stage, length]) for m, length in zip(middle, LENGTHS, strict=True)]
    high = [max(timed[stage, length]) - m for m, length in zip(middle, LENGTHS, strict=True)]
    right.errorbar(LENGTHS, middle, yerr=(low, high), capsize=3, markersize=6, **look)
    right.annotate(stage, (LENGTHS[-1], middle[-1]), (-6, 8), textcoords="offset points", ha="right")
    for at in (0, -1):
        right.annotate(f"{middle[at]:.0f}", (LENGTHS[at], middle[at]), (6, -12), textcoords="offset points")
for axes, title, unit in (
    (left, "Predicted (dashed) and counted (marks)", "tokens pushed for one new token"),
    (right, "Timed: median, fastest and slowest", "ms for one new token"),
):
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.yaxis.set_minor_formatter("")
    axes.set_xticks(LENGTHS, [f"{length:,}" for length in LENGTHS])
    axes.set_xlabel("length of the text, in tokens")
    axes.set_ylabel(unit)
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(0.12, 0.15)


def grew(stage):
    return median(timed[stage, longest]) / median(timed[stage, LENGTHS[0]])


lab.show(
    figure,
    f"Two charts over the length of the text, {LENGTHS[0]} to {longest:,} tokens, both axes logarithmic. Left, tokens "
    f"pushed for one new token: naive rises from {counted['naive', LENGTHS[0]].tokens} to "
    f"{counted['naive', longest].tokens:,}, cached stays at 1; every counted mark lies on its predicted line. Right, "
    f"the time for one new token, at {longest // LENGTHS[0]} times the length: naive takes {grew('naive'):.1f} times "
    f"as long as at first ({median(timed['naive', longest]):.0f} ms), cached {grew('cached'):.2f} times as long "
    f"({median(timed['cached', longest]):.0f} ms).",
)

# %% [markdown]
# ### Where the time is now
#
# A cached step does little arithmetic for its one token. But whether one token goes through or a hundred, **every
# weight must be read from memory once** (lesson 00). So compare bytes: the weights, the same in every step, and the K
# and V, which grow with the text.

# %%
print(f"weights: {weight_bytes / 1e6:,.0f} MB in every step; K and V: {each:,} bytes a token")
print(f"{'length':>8}{'K, V read by one cached step':>31}{'beside the weights':>21}")
for length in LENGTHS:
    read = counted["cached", length].kv_bytes
    assert read == each * length
    print(f"{length:>8,}{read / 1e6:>28.2f} MB{read / weight_bytes:>21.1%}")
print(f"Both are the same at {weight_bytes / each:,.0f} tokens; this model's context ends at {model.config.context:,}.")

# %% [markdown]
# That is why the cached curve is nearly flat: at these lengths the step reads the weights and a little more. And that
# is what is left to gain. Reading all weights for *one* token is a waste; the same read would serve many texts at once.
# Lessons 06 to 08 are about that. First, lesson 05 looks at the other end: a very long prompt, all of it in one step.

# %% [markdown]
# ## Explain
#
# You keep K and V of a text of 500 tokens. Now somebody changes token 200. Which K and V are still right, which are
# not, and why? What if the model let every token look both ways? Three or four sentences.

# %%
lab.answer("04.why", """ """)

# %% [markdown]
# <!-- BEGIN SOLUTION -->
# <details><summary>A good answer</summary>
#
# K and V of positions 0 to 199 are still right: they were computed from tokens up to their own, and none of those has
# changed. At position 200 they are wrong, since the token is another one. From 201 on they are wrong too, from layer 1
# upwards, because those tokens looked at token 200; so `computed` goes back to 200. If every token looked both ways,
# nothing above layer 0 would be left.
#
# The common wrong answer is "only position 200": the tokens after it did not change, but what they read did.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# ## Break it
#
# A quiet bug: **the layer index is ignored**. All layers share the memory of layer 0. Before you run the cell: each
# layer stores its own K and V and reads them right away. Which properties do you expect to catch it? Would a test that
# runs a whole prompt in one step?

# %%
unbroken = CachedAttend


class CachedAttend(unbroken):
    def __call__(self, layer, q, k, v):
        return super().__call__(0, q, k, v)


lab.check("04", "CachedAttend")
CachedAttend = unbroken  # as it was

# %% [markdown]
# One property holds: the mask was right all along. Now find the line about the 64 ways to cut seven tokens. It names
# the first cut that failed, and that isn't the uncut prompt: in one step each layer overwrites the memory *after* the
# layer before has done with it, so nothing is missed. The bug shows only when a second step wants the first layer's
# keys back, and finds the last layer's.
#
# The lesson in it: **test a cache by cutting a text at every place, never by a prompt alone.** Three more bugs of the
# kind, to try in the same way: a mask of `torch.ones_like(...)`; `positions - positions[0]` in each step; `v` stored
# twice.

# %% [markdown]
# ## Recap
#
# - A token's K and V depend on the tokens up to it. With a causal mask, keeping them is exact.
# - A new token costs one token, not the whole text: $O(n^2)$ to $O(n)$ tokens pushed. Attention still reads every key.
# - There is one loop: feed the tokens not computed yet. Prefill and decode are its first step and the others.
# - Everything hangs on positions: the rotation, the place in the memory, and the mask. They go on counting.
# - The price is memory: $2 \cdot L \cdot H_{kv} \cdot D$ numbers a token. Llama-2-7B: 512 KiB, not 16 KB; those are one
#   layer's.
# - With the cache, a step's time is that of reading the weights. To use that read better, one needs more texts.

# %% [markdown]
# ## Exercises
#
# Difficulty and importance are out of 5.
#
# 1. **Step back** (difficulty 2, importance 4, 15 minutes). A user deletes the last three tokens of a text and goes on
#    typing. Which of `tokens`, `computed` and the memories must change? Write it, check it against the naive stage, and
#    say why the memory needs no clearing.
# 2. **Grow instead of reserve** (2, 3, 20). Write a `CachedAttend` that begins with empty tensors and glues on the new
#    K and V with `torch.cat`. How many bytes does it copy while a text grows to $n$ tokens? Count it, then plot it.
# 3. **Half the bytes** (3, 4, 30). Load the model in float32 and keep K and V in bfloat16. How far do the logits move,
#    and does an argmax change on 100 tokens of real text? What would one byte a number need that two do not?
# 4. **A window** (4, 3, 45). Keep the last $W$ positions only, at place $p \bmod W$. What must the mask compare now?
#    Measure when the text goes wrong, and find out why models that are made for this were trained with it.
# 5. **Put it in front** (1, 5, 5). A system message is put *before* a text whose K and V are kept. How much of them can
#    be used? What does your answer say about where the unchanging part of a prompt belongs? (Lesson 10.)

# %% [markdown]
# ## References
#
# - Vaswani et al., 2017, *Attention Is All You Need*, [arXiv 1706.03762](https://arxiv.org/abs/1706.03762). Read
#   section 3.2.3 for the causal mask: it is there for training, and is what makes a cache exact.
# - Shazeer, 2019, *Fast Transformer Decoding: One Write-Head is All You Need*, [arXiv
#   1911.02150](https://arxiv.org/abs/1911.02150). Read section 2.4 for the count of bytes against operations in a
#   cached step, and what fewer key-value heads change.
# - Ainslie et al., 2023, *GQA*, [arXiv 2305.13245](https://arxiv.org/abs/2305.13245). Read it for the step from as
#   many key-value heads as query heads to a few, which you saw in the table of models.
# - Pope et al., 2022, *Efficiently Scaling Transformer Inference*, [arXiv
#   2211.05102](https://arxiv.org/abs/2211.05102). Read section 2 for the cost of prefill and decode as memory against
#   arithmetic.
# - Hugging Face, 2025, [*Continuous batching from first
#   principles*](https://huggingface.co/blog/continuous_batching). Read the part on the KV cache: our seven tokens come
#   from there.
