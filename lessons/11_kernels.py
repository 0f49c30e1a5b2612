# %% [markdown]
# # 11 · Kernels
#
# One predicate, four ways to compute it: as a function of two indices, as running sums of lengths, as a loop that keeps
# three numbers, and inside a kernel that follows the slot table.
#
# [![Open this lesson in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minillm/minillm/blob/v0.1.0/lessons/11_kernels.ipynb)
#
# **Objectives.** After this lesson you can
#
# - *write* the rule "same text, and not later" in the four forms that fast kernels ask for;
# - *say* which blocks of a mask a kernel may skip, and why a step of single tokens leaves none to skip;
# - *write* a softmax that reads every key and value once and never has all the scores, and *prove* it equal;
# - *write* a kernel, one program for each text and key-value head, and *count* its reads;
# - *predict* from two numbers of a machine whether memory or arithmetic limits attention.
#
# **Prerequisites:** lesson 05 (queries and keys of different lengths), lesson 07 (the mask of a ragged batch), lesson
# 09 (slots and tables). **Minutes:** about 150, of which the machine needs about 3. **Hardware:** two CPU cores are
# enough. With a CUDA GPU more rows of the last tables are filled; nothing else needs one.
#
# **The one change:** none in what is computed. Who may look at whom is as in lesson 07, to the last cell. Only *how* it
# is computed changes, and with it what is read, copied and thrown away. In the package: one more entry in `BACKENDS`
# ([`minillm/kernels`](../minillm/kernels/__init__.py)) each time.

# %% tags=["setup"]
import inspect
import io
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from minillm import attention, kernels, lab
from minillm.batch import groups
from minillm.bench import backends, results
from minillm.config import Config
from minillm.device import pick_device, pick_dtype
from minillm.engine import Engine
from minillm.errors import InputError
from minillm.fetch import find as find_folder
from minillm.kernels.choose import Probe, answer, attention_only
from minillm.lab.build import ROOT
from minillm.lab.checking import run_checks
from minillm.lab.checks.c11 import (
    Counted,
    Largest,
    ProgramAttend,
    flops_per_byte,
    kinds,
    laid_out,
    right_attend_in_blocks,
    right_paged_decode,
)
from minillm.lab.work import from_namespace
from minillm.model import Llama
from minillm.packing import pack_weights
from minillm.params import SamplingParams
from minillm.tokenizer import Tokenizer

# %%
lab.start("11")

# %% [markdown]
# ## The idea
#
# **The rule.** A step has T new tokens of several texts, laid end to end, and S positions that they may look at:
#
# ```
# query q sees key k   if   text(k) = text(q)   and   position(k) ≤ position(q)
# ```
#
# Lesson 07 computed it as a mask `[T, S]`: a score for every cell, most of them thrown away. Lesson 08 went over to
# `gather`: rectangles, within which few cells are hidden. But it *copies* K and V into these rectangles, in every layer
# of every step: each number is read, written, and read again. And it still writes all its scores to memory, reads them
# for the softmax, writes the weights, and reads these once more.
#
# **Why that matters.** A machine makes f operations and moves b bytes in a second. Work of F operations that moves B
# bytes takes at least
#
# $$ t \ge \max(F / f,\; B / b) . $$
#
# This is the *roofline*. Which side wins is told by the *intensity* F / B of the work, in operations per byte: below
# f / b of the machine the arithmetic waits for the memory. Nothing then helps but to move fewer bytes.
#
# **How do you tell a kernel the rule without a mask?** In four ways:
#
# | form | what you hand over | who asks for it |
# |---|---|---|
# | `mask_mod` | a function of a query's index and a key's index | FlexAttention: makes a kernel of your function |
# | `cu_seqlens` | two lists of N + 1 whole numbers | *varlen* kernels, such as FlashAttention: know the rule |
# | bounds of a loop | nothing: the loop ends at the last key that may be seen | your own loop: an *online softmax* |
# | a slot table | the table, and the length of each text | *paged* kernels in Triton or C: that loop, over slots |
#
# **A softmax in parts.** To weigh values by a softmax you seem to need all scores first, for you divide by their sum,
# and subtract their maximum before exp. You do not. Of any part of the keys, with scores x and values v, keep three
# things:
#
# $$ m = \max_j x_j \qquad s = \sum_j e^{x_j - m} \qquad o = \sum_j e^{x_j - m}\, v_j $$
#
# The answer of this part alone is o / s. And the three of two parts can be *merged* into the three of both, without
# looking at any key again. You will find out how. So a loop over blocks of keys needs one block and (m, s, o), however
# long the text is. This is the *online softmax*; with it, FlashAttention has removed the score matrix from memory.
#
# **A program.** A kernel on a GPU is one small program, started many times at once: a *grid*. Each instance asks for
# its number, loads what it needs from the large, slow memory, works in registers, and stores its result. Instances know
# nothing of each other, and come in any order. Here an instance is a pair of a text and a key-value head. The G = H /
# Hkv query heads that share this key-value head are its rows, so what is loaded serves G queries.

# %% [markdown]
# ## Predict
#
# Four prompts of 256 tokens come at once, laid end to end: 1,024 queries by 1,024 keys. Cut the mask into blocks of
# 128 by 128, which are 64. In how many of them is no cell visible, so that a kernel need not touch them at all?

# %%
lab.predict("11.prefill_skipped", None)

# %% [markdown]
# Later, eight texts get one new token each, and each has 1,024 positions then, laid end to end again: 8 queries by
# 8,192 keys, one row of 64 blocks. In how many of these is no cell visible?

# %%
lab.predict("11.decode_skipped", None)

# %% [markdown]
# One head with D = 64, 1,024 queries, 1,024 keys. The matrix of scores has 1,048,576 numbers. Take the keys in blocks
# of 64 and keep m, s and o for every query: how many numbers has the largest tensor that is ever made?

# %%
lab.predict("11.scratch", None)

# %% [markdown]
# One layer of SmolLM2-135M: 9 query heads, 3 key-value heads, D = 64, two bytes a number. A text of 1,024 positions
# gets one new token. A score costs D multiplications and D additions, and as many again for its share of the values. K,
# V, q and the result are moved once each. How many operations is that for one byte moved? (Leave the exponentials out.)

# %%
lab.predict("11.intensity", None)

# %% [markdown]
# And if all the 1,024 tokens are new, a prompt in one piece: how many times as many operations per byte? (Each token
# sees itself and those before it.)

# %%
lab.predict("11.prefill_ratio", None)

# %% [markdown]
# ## Build
#
# Nine short functions. They work on CPU tensors, and mostly on one head: what is new is in the indices.
#
# ### 1. A mask as a function
#
# FlexAttention never asks for a mask. It asks for a function of four indices, batch, head, query and key, and makes it
# a part of the kernel that it compiles. Index q says where a query lies in the step, index k where a key lies among the
# keys. Neither is a position: the function looks these up. As it is *traced*, not run, nothing in it may be decided in
# Python: q and k are tensors, and so is the result. Batch and head do not matter here; the checks pass 0 for both.


# %% task="11.mask_mod"
def mask_mod(q_pos: Tensor, k_pos: Tensor, q_seq: Tensor, k_seq: Tensor) -> Callable[..., Tensor]:
    """Makes the function mod(b, h, q, k) of the rule. The indices may have axes, as in mod(0, 0, q [T, 1], k [S]).

    q_pos [T], k_pos [S]  the position of each query and each key in its own text
    q_seq [T], k_seq [S]  the number of its text

    The result of mod: bool, true where query q may see key k; its shape is that of q and k broadcast.
    """
    ### BEGIN SOLUTION

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k_seq[k] == q_seq[q]) & (k_pos[k] <= q_pos[q])

    return mod
    ### END SOLUTION


# %%
lab.check("11", "mask_mod")

# %% [markdown]
# <details><summary>Hint 1</summary>A function may define a function and return it. The inner one still sees the four
# tensors.</details>
# <details><summary>Hint 2</summary>q is an index: the position of that query is <code>q_pos[q]</code>, whatever shape q
# has.</details>
# <details><summary>Hint 3</summary>Two comparisons, one of texts and one of positions, joined by <code>&</code>.
# Python's
# <code>and</code> would have to know the value now.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: mask_mod</summary>
#
# The same two comparisons as in lesson 07's `visible`, and no broadcasting: who calls it decides for which cells. The
# common wrong answer is `k <= q`, as in the first example of every FlexAttention tutorial. There queries and keys are
# one text from its start, and index and position are the same. With a cache they are not: the only query of a step has
# index 0, and would see one key.
# </details>
# <!-- END SOLUTION -->
#
# ### 2. Blocks
#
# A function of one cell alone could not save anything. So FlexAttention evaluates it once for a whole step and cuts the
# mask into blocks. Of an *empty* block the kernel reads no key and computes no score. A *full* one it computes without
# asking the function. Only in *partial* blocks it asks for every cell.


# %% task="11.block_mask"
def block_mask(mod: Callable[..., Tensor], T: int, S: int, size: int) -> Tensor:
    """What each block of a mask of T queries by S keys is: 0 empty, 1 partial, 2 full.

    Cells past the edge count as hidden (so a block that is cut off is never full), and mod is not asked about them.
    Returns whole numbers [ceil(T / size), ceil(S / size)].
    """
    ### BEGIN SOLUTION
    rows, columns = -(-T // size), -(-S // size)
    mask = torch.zeros(rows * size, columns * size, dtype=torch.bool)
    mask[:T, :S] = mod(0, 0, torch.arange(T)[:, None], torch.arange(S))
    cells = mask.view(rows, size, columns, size)
    return cells.any(3).any(1).int() + cells.all(3).all(1).int()
    ### END SOLUTION


# %%
lab.check("11", "block_mask")

# %% [markdown]
# <details><summary>Hint 1</summary>First the whole mask: <code>mod(0, 0, q, k)</code> with q of shape [T, 1] and k of
# shape [S] is [T, S].</details>
# <details><summary>Hint 2</summary>Rounded up: <code>-(-T // size)</code>. Put the mask into one of so many whole
# blocks that begins as all False.</details>
# <details><summary>Hint 3</summary><code>view(rows, size, columns, size)</code> gives each block two axes of its own, 1
# and 3. <code>any</code> over both, and <code>all</code> over both.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: block_mask</summary>
#
# A block with any visible cell counts 1, one with all visible counts 1 more. The common wrong answer decides by the
# indices of the block, "left of the diagonal is full": right for one text, and wrong as soon as two lie side by side.
# Another one looks at the corners alone. That does well for staircases, but a block may have hidden corners and a
# visible middle.
#
# The mask was there in full, once per step, to be cut. FlexAttention does the same. For long contexts that is much, and
# engines build the table of blocks from the lengths directly.
# </details>
# <!-- END SOLUTION -->
#
# See what you have made. Four prompts of 250 tokens, so that texts end within blocks; then the same texts when each
# gets one more token. (This cell, those called *Yours* and *Break it* need your functions; all others run without
# them.)

# %%
SIGNS = ".+#"  # empty, partial, full


def blocks_of(chunks, size):
    """Your table of blocks for a step of (computed, new) tokens of each text."""
    q_pos, k_pos, q_seq, k_seq = laid_out(chunks)
    return block_mask(mask_mod(q_pos, k_pos, q_seq, k_seq), len(q_pos), len(k_pos), size)


tables = {"four prompts of 250": blocks_of([(0, 250)] * 4, 64), "one new token each": blocks_of([(250, 1)] * 4, 64)}
figure = Figure(figsize=(9, 4.4), layout="constrained")
for axes, (name, table) in zip(figure.subplots(1, 2), tables.items(), strict=True):
    axes.imshow(table.numpy(), cmap="Greys", vmin=0, vmax=2.6, aspect="equal")
    for i, j in (table == 1).nonzero().tolist():
        axes.text(j, i, "+", ha="center", va="center", fontsize=11)
    axes.set_xticks([x - 0.5 for x in range(table.shape[1] + 1)], minor=True)
    axes.set_yticks([y - 0.5 for y in range(table.shape[0] + 1)], minor=True)
    axes.grid(which="minor", color="black", linewidth=0.5)
    axes.tick_params(which="both", length=0)
    axes.set_yticks(range(table.shape[0]))
    axes.set_xlabel("block of 64 keys")
    axes.set_ylabel("block of 64 queries")
    axes.set_title(f"{name}: white empty, + partial, dark full", loc="left", fontsize=10)
told = [f"{name}: " + ", ".join(f"{int((t == i).sum())} {kind}" for i, kind in enumerate(("empty", "partial", "full")))
        for name, t in tables.items()]  # fmt: skip
lab.show(figure, f"Two tables of blocks of 64 by 64 cells. {'; '.join(told)}.")
for name, table in tables.items():
    print(f"\n{name}\n" + "\n".join("".join(SIGNS[kind] for kind in row) for row in table.tolist()))

# %% [markdown]
# ### 3. Running sums
#
# A *varlen* kernel (for "variable length") has the rule built in. It knows that texts lie end to end, that each looks
# at itself only, and that a text's queries are its *last* positions. All it lacks is where each text begins: one list
# for the queries, one for the keys, both called `cu_seqlens`, cumulative sequence lengths. Each has N + 1 entries, the
# first is 0, and text i lies from entry i to entry i + 1. They are `int32`: the kernel takes nothing else.


# %% task="11.cu_seqlens"
def cu_seqlens(chunks: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Where each text's queries and keys begin. chunks: (computed before, new tokens) of each of N texts.

    Returns int32 [N + 1] for the queries, and int32 [N + 1] for the keys.
    """
    ### BEGIN SOLUTION
    cu_q, cu_k = [0], [0]
    for start, n in chunks:
        cu_q.append(cu_q[-1] + n)
        cu_k.append(cu_k[-1] + start + n)
    return torch.tensor(cu_q, dtype=torch.int32), torch.tensor(cu_k, dtype=torch.int32)
    ### END SOLUTION


# %%
lab.check("11", "cu_seqlens")

# %% [markdown]
# <details><summary>Hint 1</summary>Two lists that begin with 0 and grow by one entry for each text.</details>
# <details><summary>Hint 2</summary>The new entry is the last one and the length of this text.</details>
# <details><summary>Hint 3</summary>A text's queries are its new tokens. Its keys are all its positions, the new ones
# among them.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: cu_seqlens</summary>
#
# For two texts, 4 + 2 and 0 + 3 tokens, they are [0, 2, 5] and [0, 6, 9]. The common wrong answer uses one list for
# both. With prompts alone that is right, and the mistake shows when the first text has a cache: its keys end where
# another text's begin. The next common one forgets the 0, so that text 0 is never computed.
# </details>
# <!-- END SOLUTION -->
#
# ### 4. Which corner
#
# With t queries and s keys, t < s, a "causal" triangle can be laid into the rectangle in two ways:
#
# ```
# 2 queries, 5 keys      top left    # . . . .        bottom right    # # # # .
#                                    # # . . .                        # # # # #
# ```
#
# The queries of a chunk are the *last* positions of their text, so only the right one is our rule. FlashAttention
# aligns bottom right since its version 2.1, and torch's `varlen_attn` does so with `window_size=(-1, 0)`. torch's
# `is_causal=True` aligns top left (lesson 05 broke it). Write down what a varlen kernel computes, as a mask: from the
# two lists alone, without positions and text numbers.


# %% task="11.varlen_mask"
def varlen_mask(cu_q: Tensor, cu_k: Tensor) -> Tensor:
    """The mask that a varlen kernel stands for: text by text, causal, aligned at the bottom right.

    cu_q [N + 1], cu_k [N + 1]: where each text's queries and keys begin. No text has more queries than keys.
    Returns bool [T, S], T and S being the last entries.
    """
    ### BEGIN SOLUTION
    mask = torch.zeros(int(cu_q[-1]), int(cu_k[-1]), dtype=torch.bool)
    for i in range(len(cu_q) - 1):
        queries, keys = (slice(int(cu[i]), int(cu[i + 1])) for cu in (cu_q, cu_k))
        t, s = queries.stop - queries.start, keys.stop - keys.start
        mask[queries, keys] = torch.arange(s) <= torch.arange(s - t, s)[:, None]
    return mask
    ### END SOLUTION


# %%
lab.check("11", "varlen_mask")

# %% [markdown]
# <details><summary>Hint 1</summary>All hidden at first; then one rectangle for each text.</details>
# <details><summary>Hint 2</summary>In a text of s keys and t queries, query i has s - t positions before the first
# query, and i more. Which position is it, and which keys does it see?</details>
# <details><summary>Hint 3</summary>Positions of the queries: <code>torch.arange(s - t, s)</code>. Positions of the
# keys:
# <code>torch.arange(s)</code>. Compare them as always.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: varlen_mask</summary>
#
# That the lists are enough is the point: the position of a query follows from how many keys its text has. So 2 (N + 1)
# numbers say the same as the T times S cells of a mask. The common wrong answer is `tril()` of the rectangle, the top
# left corner. For t = s both are the same, so every test with fresh prompts passes; a decoding text, t = 1, then sees
# its first key and nothing else. The other one offsets all texts by the same S - T.
# </details>
# <!-- END SOLUTION -->
#
# ### 5. A part of the softmax
#
# Now the loop. First the three numbers of one block of keys, for T queries at once. A key that may not be seen has the
# score −∞. It may be that a query sees no key of a block at all: then m is −∞, and s and o are 0.


# %% task="11.part"
def part(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """m, s and o of a block of n keys: scores [T, n], -inf where hidden; values [n, D].

    Returns m [T, 1] the largest score, s [T, 1] the sum of exp(score - m), o [T, D] the sum of exp(score - m) * value.
    """
    ### BEGIN SOLUTION
    m = scores.amax(-1, keepdim=True)  # [T, 1]
    weights = (scores - m).exp().masked_fill(scores == float("-inf"), 0.0)  # [T, n]
    return m, weights.sum(-1, keepdim=True), weights @ values
    ### END SOLUTION


# %%
lab.check("11", "part")

# %% [markdown]
# <details><summary>Hint 1</summary><code>keepdim=True</code> keeps the last axis with size 1, so that m and s go on
# fitting to [T, n] and [T, D].</details>
# <details><summary>Hint 2</summary>Try it with a row of nothing but −∞. What is −∞ − (−∞)?</details>
# <details><summary>Hint 3</summary>Where the score is −∞ the weight is 0: <code>masked_fill</code> after the exp, not
# before.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: part</summary>
#
# Every row subtracts its own maximum, so that the largest weight is 1 and nothing overflows. The common wrong answer
# has NaN in rows that see nothing, since −∞ − (−∞) is NaN, and NaN goes wherever the row is merged to. Kernels put 0 in
# place of m in such a row; the result is the same. Another one divides o by s already here. Then two parts can still
# be merged, but only by a sum that is weighted by s, which is one more thing to get wrong.
# </details>
# <!-- END SOLUTION -->
#
# ### 6. Merge
#
# m, s and o of one part of the keys, and of another part: what are m, s and o of both? Note that the s of a part was
# made with *its* m. Write down what s would have been with a larger one; there is one factor that s and o have in
# common.


# %% task="11.merge"
def merge(m1: Tensor, s1: Tensor, o1: Tensor, m2: Tensor, s2: Tensor, o2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The state of two parts of the keys together: m and s [T, 1], o [T, D] each. Either part may have seen nothing:
    its m is -inf, its s and o are 0."""
    ### BEGIN SOLUTION
    m = torch.maximum(m1, m2)
    f1, f2 = ((own - m).exp().masked_fill(own == float("-inf"), 0.0) for own in (m1, m2))
    return m, s1 * f1 + s2 * f2, o1 * f1 + o2 * f2
    ### END SOLUTION


# %%
lab.check("11", "merge")

# %% [markdown]
# <details><summary>Hint 1</summary>exp(x − m) = exp(x − m1) · exp(m1 − m). The second factor does not depend on the
# key.</details>
# <details><summary>Hint 2</summary>m is the larger of the two, so both factors are at most 1, and one of them is
# 1.</details>
# <details><summary>Hint 3</summary>An empty part has the factor 0. exp(−∞ − m) gives that by itself, unless m is −∞
# too.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: merge</summary>
#
# Both parts are brought to the common m, then added. The common wrong answer scales s and forgets o: no error, no NaN,
# and weights that do not add up to 1. The other one takes the second part for the newer and larger one, and scales only
# the first. It is right whenever the largest key comes last.
#
# Merging has no order: parts may be computed at the same time, by different programs, and merged at the end. That is
# Flash-Decoding, which cuts one long text into many, since a single text would keep few of a GPU's processors busy.
# </details>
# <!-- END SOLUTION -->
#
# ### 7. The loop
#
# Put together: T queries of one text and one head, and keys in blocks. To count what is read, K and V lie in a
# `Counted`, which is given. `k.load(rows)` reads rows of it:

# %%
print(inspect.getsource(Counted))

# %% [markdown]
# Row j of K and V belongs to position j, and query t sees positions 0 to `q_pos[t]`. Positions behind the last one that
# anybody sees may hold anything, NaN included. So they must not be loaded.


# %% task="11.attend_in_blocks"
def attend_in_blocks(q: Tensor, q_pos: Tensor, k: Counted, v: Counted, size: int) -> Tensor:
    """softmax(q k^T / sqrt(D)) v of one head, by blocks of `size` keys. Every row of k and v is loaded once at most.

    q [T, D], q_pos [T]; k and v hold [S, D], row j for position j. Returns [T, D].
    """
    ### BEGIN SOLUTION
    (T, D), n = q.shape, int(q_pos.max()) + 1
    m, s, o = q.new_full((T, 1), float("-inf")), q.new_zeros(T, 1), q.new_zeros(T, D)
    for start in range(0, n, size):
        positions = torch.arange(start, min(start + size, n))
        scores = q @ k.load(positions).T * D**-0.5  # [T, size]
        scores = scores.masked_fill(positions > q_pos[:, None], float("-inf"))
        m, s, o = merge(m, s, o, *part(scores, v.load(positions)))
    return o / s
    ### END SOLUTION


# %%
lab.check("11", "attend_in_blocks")

# %% [markdown]
# <details><summary>Hint 1</summary>Begin with the state of somebody who has seen nothing. In each turn: load, scores,
# hide, <code>part</code>, <code>merge</code>.</details>
# <details><summary>Hint 2</summary>The positions of a block: from <code>start</code> on, at most <code>size</code> of
# them, and none behind <code>q_pos.max()</code>.</details>
# <details><summary>Hint 3</summary>Only after the last block: <code>o / s</code>. A query sees itself at least, so s is
# never 0.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: attend_in_blocks</summary>
#
# This is FlashAttention without the GPU. Nothing in the loop grows with the number of keys. The common wrong answer
# makes two passes, one for the maximum and one for the sum. It is exact, and reads K twice; to avoid just that,
# `merge` was invented. The other one forgets that positions in a block begin at `start`, so that each block is masked
# like the first.
#
# A kernel cuts the queries into tiles too, and ends the loop of a tile at the tile's own last position: there
# "causal" saves half of the work, and no mask was needed for it.
# </details>
# <!-- END SOLUTION -->
#
# ### 8. The kernel
#
# One program for text n and key-value head `head`: it has G queries, all of the same new token, and keys wherever the
# table says. Slots are loaded from the table in blocks, with `table.load(n, positions)`, and K and V with
# `k.load(head, slots)`.
#
# In Triton, blocks have a fixed size (a power of two), so the last one reaches past the end of the text. What lies
# there in the table is no slot, and may be any number. So every load is given a mask, here `live`: where it is False
# nothing is read, and 0 comes back. Do it the same way, always `size` positions at a time. But then a dead key has the
# score q · 0 = 0, which is a score like any other!


# %% task="11.paged_decode"
def paged_decode(
    n: int, head: int, q: Tensor, k: Counted, v: Counted, table: Counted, kv_len: int, size: int
) -> Tensor:
    """The program of text n and key-value head `head`: its G query heads against positions 0 .. kv_len-1 of the text.

    q [N, H, D], one new token of each text; query heads head*G .. head*G+G-1 belong to this key-value head
    k, v hold [Hkv, slots, D]; table holds [N, width], the slot of each position. Returns [G, D].
    """
    ### BEGIN SOLUTION
    D, G = q.shape[-1], q.shape[1] // k.shape[0]
    mine = q[n, head * G : (head + 1) * G] * D**-0.5  # [G, D]
    m, s, o = q.new_full((G, 1), float("-inf")), q.new_zeros(G, 1), q.new_zeros(G, D)
    for start in range(0, kv_len, size):
        positions = start + torch.arange(size)
        live = positions < kv_len
        slots = table.load(n, positions, live=live)
        keys, values = k.load(head, slots, live=live), v.load(head, slots, live=live)  # [size, D] each
        scores = (mine @ keys.T).masked_fill(~live, float("-inf"))  # [G, size]
        m, s, o = merge(m, s, o, *part(scores, values))
    return o / s
    ### END SOLUTION


# %%
lab.check("11", "paged_decode")

# %% [markdown]
# <details><summary>Hint 1</summary>It is the loop of task 7 with three changes: queries of several heads in place of
# several tokens, positions that go through the table, and <code>live</code>.</details>
# <details><summary>Hint 2</summary><code>live = positions < kv_len</code>, once for each block, for all three loads and
# for the scores.</details>
# <details><summary>Hint 3</summary>All G query heads are one tensor [G, D], so one product with the block of keys
# serves them all, and each key is loaded once.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: paged_decode</summary>
#
# No mask of texts and none of positions is left. That a text sees only itself is in `table[n]`; that it sees nothing
# later is in `kv_len`. The common wrong answer forgets the −∞ for dead keys: they then get the weight exp(0 − m), which
# is small when scores are large and so passes loose tests, and vanishes when the length is a multiple of the block.
# The next one takes query heads `head`, `head + Hkv`, ...: the heads of one group lie side by side.
# </details>
# <!-- END SOLUTION -->
#
# The same in Triton, from the package ([`triton_kernel.py`](../minillm/kernels/triton_kernel.py)). Read it beside
# yours:
#
# | yours | Triton |
# |---|---|
# | arguments `n`, `head` | `tl.program_id(0)`, `tl.program_id(1)` |
# | `k.load(head, slots, live=live)` | `tl.load(pointer + offsets, mask=..., other=0.0)`: you compute the addresses |
# | the queries of this program times the block of keys | `tl.dot(query, key)` |
# | `part` and `merge` | written out: new weights use the larger maximum at once, so only old sums need a factor |
# | returned | `tl.store(pointer + offsets, ..., mask=...)` |
#
# It does three things more. Its rows are G heads of up to 16 *tokens*, so that a chunk of a prompt needs no other
# kernel; hence the second mask, by position. It may be one of several programs that share a text (`split`). And it
# computes powers of 2, for which the hardware has an instruction; the scale holds the factor. The package has the loop
# a third time, in C for CPUs ([`attention.c`](../minillm/native/attention.c)): there the rows are the G heads of one
# token, or, in a chunk, one head of up to 32 tokens.

# %%
file = Path(kernels.__file__).with_name("triton_kernel.py")
if file.exists():
    lines = file.read_text("utf-8").splitlines()
    first = next((i for i, text in enumerate(lines) if "for start in range" in text), 0)
    print("\n".join(lines[first - 3 : first + 23]))
else:
    print("This version of the package has no Triton kernel.")

# %% [markdown]
# What Triton compiles needs a GPU. Its *interpreter* does not: with `TRITON_INTERPRET=1` every program of the grid runs
# in Python, slowly, with the same loads and masks. If Triton can be imported here (it exists for Linux), the package's
# kernel now computes a small step, in a process of its own, because the variable must be set before the import.

# %%
INTERPRETED = """
import torch
from minillm.config import Config
from minillm.kernels import BACKENDS, why_not
from minillm.kernels.choose import Probe, answer, attention_only, judge
config = Config(vocab_size=2, d_model=2, n_layers=1, n_heads=9, n_kv_heads=3, head_dim=64, d_ff=2, norm_eps=1e-5,
                rope_theta=1e4, context=256, tied=True, eos=(1,))
model = attention_only(config, torch.device("cpu"), torch.float32)
reason = why_not("triton_paged", model) if "triton_paged" in BACKENDS else "this version has no such backend"
probe = Probe.of(model, [(20, 1), (0, 5), (3, 1)])
verdict = None if reason else judge("triton_paged", probe, answer("gather", probe))
print("not run: " + reason if reason else verdict.fault or f"largest difference from gather: {verdict.difference:.1e}")
"""
environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
print("Triton's interpreter,", done.stdout.strip() or f"it failed: {done.stderr.strip().splitlines()[-1]}")

# %% [markdown]
# ### 9. How intense?
#
# The last function says what the hardware will make of all this. Count as in the prediction: 4 D operations for each
# *visible* score of each query head; K and V of every position and key-value head moved once; q and the result, of
# every new token and query head, moved once each.


# %% task="11.intensity"
def intensity(n: int, kv_len: int, H: int, Hkv: int, D: int, itemsize: int) -> float:
    """Operations per byte of the attention of one text in one layer: n new tokens, the last of its kv_len positions.

    H query heads, Hkv key-value heads, D numbers in each, itemsize bytes a number.
    """
    ### BEGIN SOLUTION
    scores = n * (kv_len - n) + n * (n + 1) // 2
    operations = 4 * D * H * scores
    moved = itemsize * D * (2 * Hkv * kv_len + 2 * H * n)
    return operations / moved
    ### END SOLUTION


# %%
lab.check("11", "intensity")

# %% [markdown]
# <details><summary>Hint 1</summary>How many scores n new tokens have among kv_len positions, you have found in lesson
# 07: a rectangle and a staircase.</details>
# <details><summary>Hint 2</summary>Numbers moved: K and V are 2 · Hkv · D for each of kv_len positions; q and the
# result are 2 · H · D for each of n tokens.</details>
# <details><summary>Hint 3</summary>D falls out. For n = 1 and a long text what is left is 2 G / itemsize.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: intensity</summary>
#
# For one new token it tends to 2 G / itemsize: each number of K is used in G products of two operations. Nothing that
# the user does changes that, neither a longer text nor more texts: every text brings its own K and V. For a prompt in
# one piece it is H (n + 1) / (itemsize (H + Hkv)), which grows with n. The common wrong answer divides by H in place of
# Hkv heads of K and V, which is what a kernel reaches that reads them anew for each query head.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# ## Measure: blocks
#
# The tables of blocks of the two predictions, of torch's usual size, 128.

# %%
skipped = {}
for words, chunks in (
    ("four prompts of 256 tokens", [(0, 256)] * 4),
    ("eight texts, one new token each", [(1023, 1)] * 8),
):
    found = kinds(attention.visible(*laid_out(chunks)), 128)
    skipped[words], some, full = (int((found == kind).sum()) for kind in range(3))
    needed = sum(n * start + n * (n + 1) // 2 for start, n in chunks)
    print(
        f"{words}: {found.numel()} blocks: {skipped[words]} empty, {some} partial, {full} full; "
        f"{(some + full) * 128**2:,} scores computed, {needed:,} needed"
    )
lab.reveal("11.prefill_skipped", skipped["four prompts of 256 tokens"])
lab.reveal("11.decode_skipped", skipped["eight texts, one new token each"])

# %% [markdown]
# For prompts the table of blocks does what it is there for: of each text's four blocks three are computed, and nothing
# between two texts. For single tokens it does nothing. All eight queries lie in *one* block of queries, and each block
# of keys is visible to one of them. So FlexAttention, fed with texts end to end, computes 128 rows for every key, of
# which one is used. What is good for a prompt is not good for decoding, and engines have kernels of both kinds. The
# package's [`flex`](../minillm/kernels/flex.py) lets every text begin a block of queries of its own, so that most of
# its blocks are empty again, and takes blocks of few queries where it can.
#
# ### Yours, in FlexAttention
#
# Your `mask_mod` in torch's own function, uncompiled (so it is slow, and shows only that it is right), beside the
# package's attention. And torch's count of blocks beside yours.

# %%
chunks = [(0, 200), (90, 60), (300, 1), (0, 39)]
q_pos, k_pos, q_seq, k_seq = laid_out(chunks)
T, S = len(q_pos), len(k_pos)
mine = mask_mod(q_pos, k_pos, q_seq, k_seq)
blocks = create_block_mask(mine, None, None, T, S, device="cpu", BLOCK_SIZE=64)
generator = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(n, heads, 64, generator=generator) for n, heads in ((T, 9), (S, 3), (S, 3)))
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that it is not compiled
    heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, H or Hkv, T or S, D]
    flexed = flex_attention(*heads_first, block_mask=blocks, enable_gqa=True)[0].transpose(0, 1)  # [T, H, D]
ours = attention.sdpa(q, k, v, attention.visible(q_pos, k_pos, q_seq, k_seq))
print(f"FlexAttention with your mask_mod against the package: largest difference {(flexed - ours).abs().max():.1e}")
table = block_mask(mine, T, S, 64)
print(f"partial: torch {int(blocks.kv_num_blocks.sum())}, yours {int((table == 1).sum())}", end="; ")
print(f"full: torch {int(blocks.full_kv_num_blocks.sum())}, yours {int((table == 2).sum())}")
cu_q, cu_k = cu_seqlens(chunks)
same = torch.equal(varlen_mask(cu_q, cu_k), attention.visible(q_pos, k_pos, q_seq, k_seq))
print(f"the mask has {T * S:,} cells; cu_seqlens are {2 * len(cu_q)} numbers, and say {'the same' if same else 'else'}")

# %% [markdown]
# ## Measure: what is computed, copied, kept
#
# One step, as it comes in lesson 08: seven texts of 600 positions get one token each, and a prompt of 256 tokens comes
# in. First the counters, the same on every machine. *K and V moved* is what one layer reads and writes of them, two
# bytes a number: `dense`, `gather` and `flex` read them, write a copy, and read that. *Largest tensor*: that
# an operation makes, masks included, indices not.

# %%
STEP = [(599, 1)] * 7 + [(0, 256)]
config = Config.from_folder(find_folder("smollm2-135m-instruct"))
H, Hkv, D = config.n_heads, config.n_kv_heads, config.head_dim
cpu = torch.device("cpu")
probe = Probe.of(attention_only(config, cpu, torch.float32, layers=1), STEP)
T, S = sum(n for _, n in STEP), sum(start + n for start, n in STEP)
needed = sum(n * start + n * (n + 1) // 2 for start, n in STEP)
largest = {}
for name in ("dense", "gather"):
    with Largest() as seen:
        answer(name, probe)
    largest[name] = seen.size
pieces = groups(probe.batch, probe.pool.table)

memory = [Counted(x[0], 2) for x in (probe.pool.k, probe.pool.v)]  # [Hkv, slots, D] of the first layer
table, lengths = Counted(probe.pool.table, 2), [start + n for start, n in STEP[:2]]
answer("gather", probe)  # whose K and V of this step are stored now
with Largest() as seen:
    for n in range(2):  # the first two texts
        for head in range(Hkv):
            right_paged_decode(n, head, probe.q, *memory, table, lengths[n], 16)
largest["kernel"] = seen.size


def in_kernel(chunks, tile=16, size=16):
    """Of a paged kernel: scores of one head, positions read. A program has up to `tile` queries of one text and reads
    up to the last one's position, in blocks."""
    ends = [start + min(i + tile, n) for start, n in chunks for i in range(0, n, tile)]
    queries = [min(tile, n - i) for _, n in chunks for i in range(0, n, tile)]
    return sum(q * -(-end // size) * size for q, end in zip(queries, ends, strict=True)), sum(ends)


table_of_blocks = kinds(attention.visible(*laid_out(STEP)), 128)
kernel_scores, kernel_rows = in_kernel(STEP)
rows = {  # scores of one head; positions whose K and V are moved, each as often as it is
    "dense": (T * S, 3 * S),
    "gather": (sum(piece.mask.numel() for piece in pieces), 3 * sum(piece.slots.numel() for piece in pieces)),
    "blocks of 128": (int((table_of_blocks > 0).sum()) * 128**2, None),
}
if "flex" in kernels.BACKENDS:
    flex = kernels.backend("flex")(probe.pool, probe.batch)  # its table of blocks; nothing is compiled yet
    high, wide = flex.mask.BLOCK_SIZE
    rows["flex"] = int(flex.mask.kv_num_blocks.sum()) * high * wide, 3 * flex.index.shape[-1]
rows["kernel"] = kernel_scores, kernel_rows
print(f"{T} queries, {S:,} positions; {needed:,} scores are needed for each head\n")
print(f"{'':14}{'scores':>10}{'per needed':>12}{'K and V moved':>16}{'largest tensor':>18}")
for name, (scores, positions) in rows.items():
    moved = f"{positions * 2 * Hkv * D * 2 / 1e6:.2f} MB" if positions else "-"
    size = f"{largest[name]:,}" if name in largest else "-"
    print(f"{name:14}{scores:>10,}{scores / needed:>12.2f}{moved:>16}{size:>18}")
reads, live = memory[0].reads, torch.cat([probe.pool.table[n, : lengths[n]] for n in range(2)])
print(
    "\nthe kernel on the first two texts: each live row of K is read once:", bool((reads[:, live] == 1).all()), end=", "
)
print("and nothing else:", int(reads.sum()) == reads[:, live].numel())

# %% [markdown]
# (*Blocks of 128*: torch's own table, for texts end to end. It says nothing of memory. *flex*: the package's, where
# each text begins a block of its own.) The kernel computes a few scores more than are needed, since it takes whole
# blocks; it moves K and V of each decoding text once, and its largest tensor is one block of keys. `gather` does away
# with nearly all scores that nobody needs, and copies no less than `dense` does. A tile of the prompt
# reads all positions before it, so the prompt's K and V are read several times, but by neighbours that run at the same
# time and find them in a cache.
#
# Now the memory of the loop, for one head as in the prediction. Twice: with 1,024 keys, and with 4,096.

# %%
generator = torch.Generator().manual_seed(1)
for keys in (1024, 4096):
    q, k, v = (torch.randn(n, 64, generator=generator) for n in (1024, keys, keys))
    q_pos = torch.arange(keys - 1024, keys)
    with Largest() as seen:
        in_blocks = right_attend_in_blocks(q, q_pos, Counted(k, 1), Counted(v, 1), 64)
    with Largest() as whole:
        at_once = attention.sdpa(q[:, None], k[:, None], v[:, None], attention.visible(q_pos, torch.arange(keys)))
    gap = (in_blocks - at_once[:, 0]).abs().max().item()
    print(f"{keys:,} keys: {seen.size:,} numbers at most in blocks, {whole.size:,} at once; they differ by {gap:.0e}")
    if keys == 1024:
        lab.reveal("11.scratch", seen.size)

# %% [markdown]
# A block of scores is `[1024, 64]`, and so is o. With four times as many keys, that stays as it is. The matrix grows.

# %% [markdown]
# ## Measure: intensity
#
# The two predictions, and what lies between: chunks of a prompt.

# %%
decode, whole = (flops_per_byte(n, 1024, H, Hkv, D, 2) for n in (1, 1024))
for n in (1, 4, 16, 64, 256, 1024):
    print(f"{n:>5} new of 1,024 positions: {flops_per_byte(n, 1024, H, Hkv, D, 2):7.1f} operations per byte")
lab.reveal("11.intensity", round(decode, 2))
lab.reveal("11.prefill_ratio", round(whole / decode, 1))

# %% [markdown]
# For one new token the limit is 2 G / 2 = 3: a number of K has two bytes, and is used by G = 3 query heads for one
# multiplication and one addition each. With 64 texts instead of one it is the same, for each has its own K and V. The
# Linear layers are different: all texts share their weights, so B rows make B operations per byte of a two-byte
# weight. **Batching makes the Linears more intense, and leaves attention as it is.** As contexts grow, attention
# becomes what a decoding step waits for.

# %% [markdown]
# ## Measure: time
#
# Every backend of the package that runs on this machine: one layer of attention, without the rest of the model, first
# decoding, then a chunk of a prompt. The layers take turns, so that K and V come from memory and not from a cache. Each
# answer is compared with `gather`'s before any time is taken; the rounds are interleaved.

# %%
device = pick_device("auto")
dtype = pick_dtype("auto", device)
plan = backends.Plan(
    batches=lab.size(ci=(4,), default=(1, 8), long=(1, 8, 32)),
    contexts=lab.size(ci=(64,), default=(128, 1024, 4096), long=(128, 512, 2048, 8192)),
    chunk=lab.size(ci=64, default=512, long=1024),
    starts=(0,),
    rounds=lab.size(ci=1, default=20, long=50),
    seconds=lab.size(ci=0.1, default=2.0, long=5.0),
)
result = backends.measure(
    config, "smollm2-135m-instruct", device, dtype, plan, Console(file=io.StringIO(), force_jupyter=False)
)
about = result.about["machine"]
print(f"{about['gpu'] or about['cpu']}, {about['cores']} cores, {str(dtype).removeprefix('torch.')}")
for name in kernels.BACKENDS:
    print(f"{name:13} {'runs here' if name in result.names else 'does not run here: ' + result.absent[name]}")
for point, entry in result.faults:
    print(f"{entry.backend} is not shown for {point.texts} x {point.new} after {point.context}: {entry.void}")

# %%
print("microseconds for one layer: median, and in brackets what 95 of 100 rounds stay below\n")
for point in result.points:
    print(f"{point.texts} x {point.new} new, {point.context:,} positions each; the floor is {1e6 * point.floor:,.0f}")
    for entry in sorted((e for e in point.entries if e.layer), key=lambda e: e.layer.median):
        middle, high = 1e6 * entry.layer.median, 1e6 * entry.layer.p95
        print(f"    {entry.backend:13}{middle:>10,.0f}  ({high:,.0f})   {entry.ratio:.2f} times as fast as gather")

# %% [markdown]
# ## Plot
#
# First the same numbers as a picture: time against context, and the floor, which is the live K and V at the machine's
# copy bandwidth.

# %%
lab.show(backends.plot(result), backends.alt_text(result))

# %% [markdown]
# Then the roofline of this machine: what it reaches at most at an intensity, by memory (the slope) or by arithmetic
# (the flat roof). Each mark is a backend, at the largest decoding step of the table (hollow) and at the chunk of a
# prompt (filled). How far it lies below the roof is what is still to be had.

# %%
bytes_s, flops_s = result.ceilings.bytes_per_s, result.ceilings.flops_per_s
balance = flops_s / bytes_s
shown = [[point for point in result.points if point.decodes][-1], result.points[-1]]
figure = Figure(figsize=(8, 4.6), layout="constrained")
axes = figure.subplots()
xs = [2.0**e for e in range(-2, 12)]
roof = sorted({*xs, balance})
axes.plot(roof, [min(x * bytes_s, flops_s) / 1e9 for x in roof], color="black")
axes.axvline(balance, color="0.6", linestyle=":")
told = []
for point, what in zip(shown, ("decode", "prompt"), strict=True):
    x = flops_per_byte(point.new, point.context, H, Hkv, D, dtype.itemsize)
    limit = min(x * bytes_s, flops_s)
    for i, name in enumerate(result.names):
        if seconds := point.seconds(name):
            y, filled = point.flops / seconds, {"decode": "none", "prompt": "full"}[what]
            label = name if point is shown[-1] else None
            axes.plot(x, y / 1e9, "osD^vx+*"[i % 8], color="black", fillstyle=filled, label=label, linestyle="")
            told.append(f"{name}, {what}: {100 * y / limit:.0f} %")
    words, side = f"{what}: {point.texts} x {point.new} new,\n{point.context:,} positions", -8 if x < balance else 8
    at = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points", "fontsize": 8}
    axes.annotate(words, (x, 0.03), (side, 0), ha="right" if x < balance else "left", **at)
axes.annotate(f"balance: {balance:.0f}", (balance, 0.6), (5, 0), **at)
axes.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="billions of operations per second")
axes.set_title(f"roofline: {bytes_s / 1e9:.0f} GB/s, {flops_s / 1e9:,.0f} G operations/s", loc="left", fontsize=10)
axes.legend(frameon=False, fontsize=8, loc="upper left")
axes.spines[["top", "right"]].set_visible(False)
decode_x, prompt_x = (flops_per_byte(p.new, p.context, H, Hkv, D, dtype.itemsize) for p in shown)
lab.show(
    figure,
    f"Roofline of this machine: {bytes_s / 1e9:.0f} GB/s, {flops_s / 1e9:,.0f} billion operations/s, so memory and "
    f"arithmetic are balanced at {balance:.0f} operations per byte. Decoding has {decode_x:.1f}, the prompt "
    f"{prompt_x:.0f}. Share of what the roof allows: {'; '.join(told)}.",
)
for what, x in (("decoding", decode_x), ("the prompt", prompt_x)):
    side = "memory" if x < balance else "arithmetic"
    print(f"{what}: {x:.1f} operations per byte, the balance is at {balance:.0f}: bound by {side}")

# %% [markdown]
# The balance of machines in use today is from several operations per byte to some tens on a CPU, and hundreds on a GPU.
# Attention while decoding lies below it: it is bound by memory, and a kernel is good if it moves K and V once, however
# it does its arithmetic. A long prompt lies on the other side. (A mark above the slope means that part of K and V came
# from a cache after all.)
#
# ### Where there is no GPU
#
# `varlen`, and Triton outside its interpreter, need CUDA. What the package has stored from such machines:

# %%
stored = 0
for path in sorted((ROOT / "results").glob("*.json")):
    try:
        section = results.load(path).get("backends")
    except (InputError, ValueError, AttributeError):  # of an older version, or no results file
        continue
    if section and section["about"]["machine"]["gpu"]:
        stored += 1
        at = section["about"]
        print(f"{at['machine']['gpu']}, {section['model']['name']}, {section['model']['dtype']}, {at['date'][:10]}")
        for point in section["points"]:
            times = {e["backend"]: 1e6 * e["layer"]["median"] for e in point["entries"] if e["layer"]}
            told = ", ".join(f"{name} {us:,.0f}" for name, us in sorted(times.items(), key=lambda pair: pair[1]))
            print(f"  {point['texts']} x {point['new']} new, {point['context']:,} positions: microseconds {told}")
if not stored:
    print("None: no times of the backends on a CUDA GPU are stored in this version. On a machine with one the tables")
    print("above have them, and `minillm bench --backends` measures more.")

# %% [markdown]
# ### Yours, in the engine
#
# Your program as a backend, on the real model: `ProgramAttend` starts it for every new token and key-value head, in
# every layer, 90 times for each token. Two short texts, with your program and with the package's `gather`. It is slow,
# for a Python loop is no kernel; what counts is that the tokens are the same. (In bfloat16, two tokens that are equally
# good within rounding may be swapped.)

# %%
folder = find_folder("smollm2-135m-instruct")
model = pack_weights(Llama.from_pretrained(folder, device="cpu"))
tokenizer = Tokenizer.from_pretrained(folder)
texts = [tokenizer.encode(text) for text in ("The capital of France is", "Once upon a time there was")]
ask = SamplingParams(max_tokens=lab.size(ci=2, default=8, long=32), ignore_eos=True)


def written(attend=None):
    engine = Engine(model, max_running=2, budget=64, max_len=64)
    engine.attend = attend or engine.attend
    return [output.token_ids for output in engine.generate(texts, ask)]


mine, theirs = written(partial(ProgramAttend, paged_decode, 16)), written()
for own, its in zip(mine, theirs, strict=True):
    print(f"{'the same tokens' if own == its else f'yours {own}, theirs {its}'}: {tokenizer.decode(own)!r}")

# %% [markdown]
# ## Explain
#
# Write it between the quotes: *a server with 64 running texts is 64 times as busy as one with a single text. Its Linear
# layers become hardly slower for it, its attention becomes 64 times as slow. Why? And name two changes, to the model or
# to what is stored, that make attention while decoding more intense.*

# %%
lab.answer("11.why", """ """)

# %% [markdown]
# <!-- BEGIN SOLUTION -->
# <details><summary>A good answer</summary>
#
# While decoding, both are bound by memory. A Linear moves its weights once for all rows of a step, so 64 rows are 64
# times the operations for nearly the same bytes, and the time hardly changes until the balance of the machine is
# reached. Attention moves K and V, and every text has its own: 64 times the operations, 64 times the bytes, the same
# intensity. It rises when a number of K and V is used more often or made smaller: more query heads to a key-value head
# (GQA, MQA), K and V in 8 bits, one latent vector for all heads (MLA), several new tokens of a text in one step
# (speculative decoding), or texts that share a beginning and are computed side by side, so that its K and V are read
# once for all of them.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# ## Break it
#
# Three named bugs, in the place of your own functions; the rest stays right. Choose one. Its own function will be told
# to be wrong. But which others, though nothing is wrong in them, cannot hold before it is mended? The report marks them
# *wait*. Guess how many functions wait; then run it.

# %%
mended = {"merge": merge, "varlen_mask": varlen_mask, "paged_decode": paged_decode}


def no_rescale(m1, s1, o1, m2, s2, o2):
    m, s, _ = mended["merge"](m1, s1, o1, m2, s2, o2)
    return m, s, o1 + o2  # the bug: o keeps the maximum that it was made with


def top_left(cu_q, cu_k):
    square = mended["varlen_mask"](cu_q, cu_q)  # the bug: as if there were as many keys as queries
    mask = torch.zeros(len(square), int(cu_k[-1]), dtype=torch.bool)
    sizes = (cu_q[1:] - cu_q[:-1]).tolist()
    mask[:, torch.cat([start + torch.arange(n) for start, n in zip(cu_k.tolist(), sizes, strict=False)])] = square
    return mask


def tiled_heads(n, head, q, k, v, table, kv_len, size):
    Hkv = k.shape[0]
    order = [h + Hkv * g for h in range(Hkv) for g in range(q.shape[1] // Hkv)]  # the bug: every Hkv-th head
    return mended["paged_decode"](n, head, q[:, order], k, v, table, kv_len, size)


BUGS = {no_rescale: "merge", top_left: "varlen_mask", tiled_heads: "paged_decode"}
BUG = no_rescale  # or top_left, or tiled_heads

# %%
lab.predict("11.followers", None)  # how many of the eight other functions wait

# %%
try:
    globals()[BUGS[BUG]] = BUG
    report = run_checks("11", from_namespace(globals()))
finally:
    globals().update(mended)
print(report.text())
lab.reveal("11.followers", len({finding.prop.function for finding in report.findings if finding.waits}))

# %% [markdown]
# Each of the three runs without an error and gives numbers of the right shape and size. And each is right in the case
# that one tries first: `no_rescale` where all keys lie in one block; `top_left` for prompts without a cache;
# `tiled_heads` where every query head has a key-value head of its own, or all have one.
#
# ## Recap
#
# - There is one rule, and there are many ways to say it: a mask, a function of two indices, running sums of lengths,
#   the bounds of a loop. They can be tested against each other, cell by cell.
# - A table of blocks lets a kernel skip what is empty. With texts end to end it saves most of a prompt's scores, and
#   none for single tokens.
# - The softmax can be made in parts: (m, s, o) of each, merged in any order. So K and V are read once, and the scores
#   are never all there.
# - A paged kernel needs no mask of texts at all: the table leads to nobody else's slots, and the length ends the loop.
#   All loads are masked; and a masked key needs −∞, not 0.
# - Decoding makes about 2 G / itemsize operations per byte of K and V, whatever the batch: it is bound by memory. A
#   prompt is not.
#
# The fastest kernel is of little use if the machine waits for Python between two of them. That is the next lesson.
#
# ## Exercises
#
# 1. A window: each token sees the last w positions only. Change `mask_mod`, count the blocks for four prompts of 1,024
#    and w = 256, and say what `window_size` of `varlen_attn` must be. (difficulty 2/5, importance 4/5, 15 minutes)
# 2. Give the block mask of a decoding step an axis for the texts: N masks of 1 query by their own keys. How many blocks
#    of 128 are computed for eight texts of 1,024 positions, and how many of their rows are used? (difficulty 2/5,
#    importance 3/5, 15 minutes)
# 3. Flash-Decoding: let `paged_decode` take a first and a last position, run four programs for one text, and `merge`
#    what they return (before the division). Is it still equal, also where a program gets no position at all?
#    (difficulty 3/5, importance 5/5, 30 minutes)
# 4. K and V in one byte a number: what is the intensity of decoding then, and what must a kernel do after the load?
#    (difficulty 2/5, importance 3/5, 10 minutes)
# 5. A tile: let `paged_decode` take up to 16 new tokens of one text, G heads each, as rows of one program. Now there is
#    a mask by position. How often is K read for a prompt of 256? (difficulty 4/5, importance 5/5, 45 minutes)
# 6. The keys of a paged FlexAttention are *slots*, not positions: write the `mask_mod` of a step over the whole pool,
#    given a text number and a position for each slot. What of free slots? (difficulty 3/5, importance 4/5, 25 minutes)
# 7. On Linux: `pip install triton`, set `TRITON_INTERPRET=1`, and write your program as a `@triton.jit` kernel. Check
#    it against `paged_decode`. (difficulty 5/5, importance 4/5, 90 minutes)
#
# ## References
#
# - Milakov & Gimelshein 2018, [*Online normalizer calculation for softmax*](https://arxiv.org/abs/1805.02867): for
#   the idea behind `merge`, and why it saves memory traffic and not arithmetic.
# - Dao et al. 2022, [*FlashAttention*](https://arxiv.org/abs/2205.14135): for the count of what is moved between slow
#   and fast memory (section 3.2), which is the argument of this lesson.
# - Dao 2023, [*FlashAttention-2*](https://arxiv.org/abs/2307.08691): for the loop as it is written today, with the
#   division at the end.
# - Dao, Haziza, Massa & Sizov 2023, [*Flash-Decoding for long-context
#   inference*](https://pytorch.org/blog/flash-decoding/): for what a single text needs on a GPU; up to 8 times faster
#   end to end.
# - Dong et al. 2024, [*Flex Attention*](https://arxiv.org/abs/2412.05496), and the [blog
#   post](https://pytorch.org/blog/flexattention/): for more rules than ours as a `mask_mod`, and for its use with paged
#   memory.
# - Kwon et al. 2023, [*PagedAttention*](https://arxiv.org/abs/2309.06180): for the price of the table, a kernel that is
#   20 to 26 % slower than one without (section 7.1), and why it pays nevertheless.
# - Tillet, Kung & Cox 2019, [*Triton*](https://www.eecs.harvard.edu/~htk/publication/2019-mapl-tillet-kung-cox.pdf):
#   for why programs are written for blocks and not for threads.
# - Williams, Waterman & Patterson 2009, [*Roofline*](https://doi.org/10.1145/1498765.1498785): for reading such plots,
#   and what to do about a point below each part of the roof.
# - Ainslie et al. 2023, [*GQA*](https://arxiv.org/abs/2305.13245): for grouped query heads as a way to read less while
#   decoding.
