# %% [markdown]
# # Problem set 4 · Memory that moves
#
# Two problems about lessons 09 and 10: how a text that gave way comes back soonest, and how the hypotheses of a beam
# search share their blocks.
#
# It needs lessons 09 (blocks, tables, who gives way) and 10 (owners, `hold`, `give_back`, `take`, copy on write). No
# weights: the models here are tiny, and every cell runs in seconds. The check tells which properties hold; the marker
# runs the same properties on other inputs too, so write what the text says and not what one example needs. A property
# that holds counts, whether or not the others do. But a function that holds on the shown inputs alone gets nothing for
# the others.
#
# | part | properties | public checks | other inputs | written | minutes |
# |---|--:|--:|--:|--:|--:|
# | 1. `come_back` | 5 | 6 points | 2.5 points | | 35 |
# | 2. `beam_step` | 5 | 6 points | 2.5 points | | 60 |
# | 3. Explain | | | | 3 points | 25 |
# | together | 10 | 12 points | 5 points | 3 points | 120 |

# %% tags=["setup"]
import inspect

import torch
from torch import Tensor

from minillm import attention, lab
from minillm.lab.checks.c10 import Memory
from minillm.lab.checks.c10 import right_give_back as give_back
from minillm.lab.checks.c10 import right_hold as hold
from minillm.lab.checks.c10 import right_take as take
from minillm.lab.checks.p4 import search
from minillm.lab.tiny import TINY
from minillm.model import Llama

# %%
lab.start("p4")

# %% [markdown]
# ## Problem 1: the way back
#
# In lesson 09 a text that gave way lost its K and V, and computed them again when it returned: *recomputation*. The
# other way is *swapping*. Before its blocks are given up, they are copied to the memory of the host, which is large and
# slow. When there is room again, they are copied back over the *bus*.
#
# Copying needs the bus and no arithmetic, computing needs arithmetic and no bus. So both can go on at the same time:
# some blocks are computed anew, *while* the others are copied. But which ones? Before you read on, look at what can be
# computed when half of the K and V are still on their way. The model is tiny, with random weights and two layers.

# %%
model = Llama.random(TINY, seed=0, dtype=torch.float64)
text = list(range(5, 29))  # 24 tokens


def compute(kept: Tensor, start: int, stop: int) -> None:
    """K and V of positions start .. stop-1 into kept [2, layers, T, Hkv, D]; it reads what lies there before them."""
    positions = torch.arange(start, stop)

    def attend(layer, q, k, v):
        kept[0, layer, start:stop], kept[1, layer, start:stop] = k, v
        mask = attention.visible(positions, torch.arange(stop))
        return attention.sdpa(q, kept[0, layer, :stop], kept[1, layer, :stop], mask)

    model(torch.tensor(text[start:stop]), positions, attend)


whole = torch.full((2, TINY.n_layers, len(text), TINY.n_kv_heads, TINY.head_dim), torch.nan, dtype=torch.float64)
compute(whole, 0, 24)
for words, start, stop in (("the first 12 positions", 0, 12), ("the last 12 positions", 12, 24)):
    kept = torch.full_like(whole, torch.nan)  # nothing is back yet
    compute(kept, start, stop)
    for layer in range(TINY.n_layers):
        equal = torch.allclose(kept[:, layer, start:stop], whole[:, layer, start:stop])
        print(f"{words} computed before the others are there: layer {layer} is {'right' if equal else 'wrong'}")

# %% [markdown]
# So the *first* blocks are computed and the *last* ones are copied, beginning from the end of the text. Neither has to
# wait for the other, and somewhere they meet.
#
# Write `come_back`: where should they meet? It is given
#
# - `stored`: K and V of so many positions, 0 to stored-1, have been copied to the host. In blocks of `size` positions,
#   where the last one may be partly full;
# - `found`: so many blocks at the beginning are in the device's memory still, since other texts hold them, or nobody
#   has taken them yet (lesson 10). They are full, and neither computed nor copied;
# - `budget`: a step computes at most so many tokens. All steps but the last compute exactly so many;
# - `step(n, kv_len)`: the seconds of a step that computes n tokens of this text, of which the last one is at position
#   kv_len-1, so that the step reads kv_len positions. It was measured, and may be any function: a step of 64 tokens
#   may even be shorter than one of 60, where the kernels are made for whole tiles;
# - `copy`: the seconds for one block over the bus. One block comes after the other, and a block that is not full is
#   copied whole.
#
# By hand: 18 positions in blocks of 4 are 5 blocks, the last of which has 2 positions. One block is found. A step
# computes at most 6 tokens and takes 2 + n seconds, and a block takes 5 s to be copied.
#
# | blocks computed | tokens | steps | computing takes | copying takes | back after |
# |--:|--:|---|--:|--:|--:|
# | 0 | 0 | | 0 | 20 | 20 |
# | 1 | 4 | 4 | 6 | 15 | 15 |
# | **2** | 8 | 6, 2 | 12 | 10 | **12** |
# | 3 | 12 | 6, 6 | 16 | 5 | 16 |
# | 4 | 14 | 6, 6, 2 | 20 | 0 | 20 |
#
# For two blocks the calls are `step(6, 10)` and `step(2, 12)`: the first computed position is 4. The answer is `(2,
# 12)`. All copied or all computed would take 20 s.


# %% task="p4.come_back"
def come_back(stored: int, found: int, size: int, budget: int, step, copy: float) -> tuple[int, float]:
    """How many blocks are computed, the first ones behind those that are found, while all others are copied, so that
    the text is back as soon as possible; and the seconds until it is. Of equally good numbers the smallest."""
    ### BEGIN SOLUTION
    blocks = -(-stored // size)
    start = found * size
    best = None
    for computed in range(blocks - found + 1):
        stop = min(stored, start + computed * size)
        ends = [min(at + budget, stop) for at in range(start, stop, budget)]  # of each step
        computing = sum(step(end - at, end) for at, end in zip(range(start, stop, budget), ends, strict=True))
        seconds = max(computing, copy * (blocks - found - computed))
        if best is None or seconds < best[1]:
            best = computed, seconds
    return best
    ### END SOLUTION


# %%
lab.check("p4", "come_back")

# %% [markdown]
# <details><summary>Hint 1</summary>First write down what <i>one</i> row of the table takes, for a given number of
# computed blocks: from which position to which, in which steps, how many blocks are left to copy. Then take the best
# row.</details>
# <details><summary>Hint 2</summary>Steps begin at <code>range(start, stop, budget)</code>, and each ends at
# <code>min(at + budget, stop)</code>, which is its kv_len. Where is <code>stop</code>, if the last block is not
# full?</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: come_back</summary>
#
# One loop over all rows of the table, with `max` of the two times; `<` in place of `<=` keeps the smaller number. The
# common wrong answer compares two rows only, all copied and all computed. Where both take equally long it misses a
# factor of nearly two, as in the example. Another one begins kv_len at 0 for the part that is computed: these tokens
# look at the found blocks too, and a step that reads more takes longer. And a sum in place of the `max` is what you get
# if computing has to wait for the bus, as it would with the last blocks computed and the first copied.
#
# If computing grew with each block, the rows would get better and then worse, and one could stop at the first worse
# one. But a step of more tokens may be the shorter one, and then a better row comes after a worse one. A text has a few
# hundred blocks, and comes back once in a while, so a loop over all rows is good enough.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# What does it buy? Three models; the device is an H200. Computing reaches half of its arithmetic (790 TFLOP/s measured,
# one half assumed). The two ways back are assumed as well: 25 GB/s, as a PCIe bus of 16 lanes gives, and 3 GB/s, as an
# SSD does. The text has 4,096 positions, in blocks of 16, and a step takes at most 2,048 tokens. (This cell needs your
# function.)

# %%
MODELS = {"135M": (134.5e6, 23_040), "1B": (1.236e9, 32_768), "8B": (8.03e9, 131_072)}  # weights, bytes a position
print("model   bus          all copied   all computed   both at once    computed     milliseconds")
for name, (weights, kv_bytes) in MODELS.items():
    for bus in (25e9, 3e9):

        def seconds(n, kv_len, weights=weights):
            return 2 * weights * n / (790e12 / 2)

        computed, both = come_back(4096, 0, 16, 2048, seconds, 16 * kv_bytes / bus)
        copied = 4096 * kv_bytes / bus
        alone = seconds(4096, 4096)
        cells = "".join(f"{1e3 * found:15.1f}" for found in (copied, alone, both))
        print(f"{name:8}{bus / 1e9:2.0f} GB/s{cells}{computed / 256:15.0%}")

# %% [markdown]
# Neither way is better as such. Bytes for a position grow more slowly than weights do, so the larger the model, the
# more the bus is worth. And an engine with `come_back` need not decide between the two.

# %% [markdown]
# ## Problem 2: hypotheses that share
#
# *Beam search* looks for a likely text, not a random one. It keeps n unfinished texts, the *hypotheses*, each with the
# sum of the log-probabilities of its tokens. In each step every hypothesis is continued with every token of the
# vocabulary, and of all these continuations the n best are kept. So one hypothesis may have several children, and
# another none. (The first step has one hypothesis, the prompt. Ends of texts are left out here.)
#
# All hypotheses begin with the same prompt, and most have a longer beginning in common. Their K and V need to be in
# memory once. Blocks with owners, as in lesson 10, do this, if the books are kept well: in each step whole texts are
# forked, given up, and written on, all at once.
#
# `Memory` is the one of lesson 10, and so are `hold`, `give_back` and `take`, which are given. (Where a `key` or the
# `index` is spoken of, it is about finding beginnings of texts, which does not matter here.)

# %%
for given in (Memory, hold, give_back, take):
    print(inspect.getsource(given).replace("right_", ""))

# %% [markdown]
# Write `beam_step`. All B hypotheses have K and V of positions 0 to position-1, and the tables for just these. The
# tokens that you choose will be computed next, all at `position`. So in the end
#
# - each of the n new tables leads to the block of `position`, and nobody else holds that block;
# - all that was stored for a hypothesis can be read by each of its children, where the child's table says, once the
#   `moves` have been done. Moves are pairs of slots (from, to). They are done all at once, before the step;
# - blocks in which nothing is written any more are shared, and of all who would write into a shared block, one keeps it
#   and the others get a copy;
# - the old tables are given up. What no child needs is free;
# - memory may be just large enough: what is given up now must be there to be taken now.
#
# By hand, blocks of 2, three hypotheses, position 3, n = 3, and a vocabulary of three tokens:
#
# | hypothesis | table | score | log-probabilities | sums |
# |---|---|--:|---|---|
# | 0 | [0, 1] | −1 | −0.5, −1.25, −3 | **−1.5**, **−2.25**, −4 |
# | 1 | [0, 2] | −2 | −4, −0.75, −5 | −6, **−2.75**, −7 |
# | 2 | [0, 3] | −4 | −1, −2, −3 | −5, −6, −7 |
#
# Hypothesis 0 goes on with token 0 and with token 1, hypothesis 1 with token 1, and hypothesis 2 ends here. If blocks
# 4, 5 and 6 were free, and `take` gives 4, the new tables are [0, 4], [0, 1] and [0, 2]; the tokens are [0, 1, 1], the
# scores −1.5, −2.25, −2.75; and the only move is (2, 8), the slot of position 2. Block 0 has three owners, and block 3
# is free. (Which of the two children keeps block 1 is up to you.)


# %% task="p4.beam_step"
def beam_step(
    memory: Memory, tables: list[list[int]], scores: Tensor, logprobs: Tensor, position: int, n: int
) -> tuple[list[list[int]], list[int], Tensor, list[tuple[int, int]]]:
    """Chooses the n best continuations and gives each the blocks it needs to write at `position`.

    tables: B block tables; scores [B]; logprobs [B, V], of the next token. There are at least n continuations.
    Returns the new tables, their tokens (Python numbers), their scores [n], the best first; and the moves (from, to).
    """
    ### BEGIN SOLUTION
    V = logprobs.shape[1]
    best, at = (scores[:, None] + logprobs).flatten().topk(n)  # [n] of the B * V
    new = [hold(memory, tables[b]) for b in (at // V).tolist()]
    for table in tables:
        give_back(memory, table)
    size, i, moves = memory.size, position // memory.size, []
    for table in new:
        if i == len(table):  # the position begins a block
            table.append(take(memory))
        elif memory.owners[table[i]] > 1:
            old, table[i] = table[i], take(memory)
            memory.owners[old] -= 1
            moves += [(old * size + j, table[i] * size + j) for j in range(position % size)]
    return new, (at % V).tolist(), best, moves
    ### END SOLUTION


# %%
lab.check("p4", "beam_step")

# %% [markdown]
# <details><summary>Hint 1</summary>Which continuations: one <code>topk</code> over the flattened sums [B * V]; an index
# there is parent * V + token. Then think of the owners' counts alone, before any copy: what must be done for all,
# before anything is taken?</details>
# <details><summary>Hint 2</summary>Three passes: <code>hold</code> the parent's table for every child;
# <code>give_back</code> every old table; then, for every new table, <code>take</code> what it lacks. In the third pass
# a block with one owner is the child's own; with more, it is copied, and the old block has one owner less.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: beam_step</summary>
#
# The order is all. The common wrong answer serves one child after the other, each with its `hold` and its `take`. If
# the old tables are given back at the end, it runs out of memory although blocks are about to come free. If they are
# given back at the beginning, the first child may take a block that the last child has not held yet, and both write
# into it; but only in memory that is nearly full, since given-back blocks are taken last. Another one changes a
# parent's table in place for its first child: the second child then begins from the first one's block.
#
# Nobody has to count children: the owners do. The first child of a block with two owners copies, and then the second
# finds itself alone. When the position begins a block nothing is copied at all, however many children there are.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# A whole search, with your function: 4 hypotheses, a prompt of 40 tokens, 24 steps, on the tiny model. `search`
# computes the prompt, and in each step calls your function, makes the moves, computes the new tokens and counts the
# blocks that are held and copied. How many blocks do the four hold together, and how many would they hold without
# sharing? (This cell needs your function.)

# %%
prompt = [2 + (7 * i) % 60 for i in range(40)]
print("blocks of   held at the end, shared   each for itself   copied in 24 steps")
for size in (1, 2, 4, 8, 16):
    found = search(beam_step, prompt, n=4, steps=24, size=size, n_blocks=5 * -(-64 // size))
    alone = 4 * -(-64 // size)
    print(f"{size:9}{found.held[-1]:25}{alone:18}{found.copied:18}")
own = {tuple(text[:length]) for text in found.texts for length in range(41, 65)}
print(f"The 4 texts of 24 new tokens have {len(own)} different beginnings, of {4 * 24}: the rest they have in common.")

# %% [markdown]
# Small blocks share more and copy less; with large ones each hypothesis has a half-full block of its own most of the
# time. Kwon et al. 2023 (section 6.3 of [*PagedAttention*](https://arxiv.org/abs/2309.06180)) measured 37.6 to 55.2 %
# of the memory saved by sharing in beam search on short prompts, far more than in parallel sampling: hypotheses have
# much in common beyond the prompt.

# %% [markdown]
# ## Explain
#
# Write between the quotes, in eight to twelve sentences.
#
# 1. A colleague turns your plan of problem 1 round: "Copy the first blocks and compute the last ones. It is the same
#    number of blocks, so it takes the same time." What is overlooked, and how long does it really take?
# 2. For which model is the colleague right, or for which plans?
# 3. A hypothesis of problem 2 dies whose blocks stand in other tables too. What exactly has to happen to its blocks?
# 4. What would a reader of the texts notice if they were freed, and what if they were left in the books as they are?
#    When?

# %%
lab.answer("p4.why", """ """)

# %% [markdown]
# <!-- BEGIN SOLUTION -->
# <details><summary>A good answer</summary>
#
# K and V of a token depend, from the second layer on, on all tokens before it, through attention, which reads their K
# and V. So the last blocks cannot be computed until the first ones have arrived: the two works come one after the
# other, and the times add up, where in the plan of problem 1 only the longer one counts. (The last positions also read
# the most, so their steps are the longest.) The colleague is right for a model of one layer, whose K and V depend on
# the token and its position alone; and for any model where one of the two parts is empty: all copied or all computed.
# (If K and V are copied layer by layer, layer 0 of the last blocks can be computed while layer 1 of the first is on the
# bus, and most of the time is won back.) A block in several tables loses one owner when one of them is given up, no
# more and no less. If it is freed, it is taken for something else and written over while the other hypotheses read it:
# their texts go astray, without an error, and only from the moment at which somebody takes the block, which may be many
# steps later. If the count stays as it was, no text is ever wrong; but the block is never free again, so memory shrinks
# with every step, fewer texts run, texts give way more often, and one day nothing fits any more.
# </details>
# <!-- END SOLUTION -->
