# %% [markdown]
# # Problem set 5 · Read once, refuse wisely
#
# Two problems about lessons 11 to 13: a decoding step that reads a shared block once for all texts that hold it, and
# the choice of whom to refuse when not everybody can be served in time.
#
# It needs lessons 10 (shared blocks), 11 (a softmax in parts), 12 (what a graph freezes; for the question) and 13
# (ttft, goodput). No weights: everything is small, and every cell runs in seconds. The check tells which properties
# hold; the marker runs the same properties on other inputs too, so write what the text says and not what one example
# needs. A property that holds counts, whether or not the others do. But a function that holds on the shown inputs alone
# gets nothing for the others.
#
# | part | properties | public checks | other inputs | written | minutes |
# |---|--:|--:|--:|--:|--:|
# | 1. `decode_shared` | 5 | 6 points | 2.5 points | | 70 |
# | 2. `keep` | 5 | 6 points | 2.5 points | | 50 |
# | 3. Explain | | | | 3 points | 25 |
# | together | 10 | 12 points | 5 points | 3 points | 145 |

# %% tags=["setup"]
import heapq
import inspect
import random
from statistics import fmean

import torch
from torch import Tensor

from minillm import lab
from minillm.lab.checks.c11 import Counted
from minillm.lab.checks.c11 import right_merge as merge
from minillm.lab.checks.c11 import right_part as part

# %%
lab.start("p5")

# %% [markdown]
# ## Problem 1: read a shared block once
#
# Lesson 10 stores a shared beginning once. But the kernel of lesson 11 has one program for each text and key-value
# head, and each of them reads all K and V of its text. Eight samples of one prompt store the prompt once, and *read* it
# eight times in each step. Attention while decoding is bound by what it reads.
#
# The three numbers of lesson 11 help again. Of any part of the keys, m, s and o can be made, and the parts of a text
# can be merged in any order. So go through the *blocks* instead of the texts: load a block once, make the scores of all
# texts that hold it, and merge what comes out into the state of each of these texts. Nothing says that the blocks of a
# text must come in their order, or one text after the other.
#
# `part` and `merge` are those of lesson 11. They work for any leading axes, as long as these fit: scores [..., T, n]
# and values [..., n, D] give m and s [..., T, 1] and o [..., T, D].

# %%
for given in (part, merge):
    print(inspect.getsource(given).replace("right_", ""))

# %% [markdown]
# Here K and V are a `Counted` of [slots, Hkv, D]: `k.load(slots)`, with a tensor [n] of slots, reads these rows and
# gives [n, Hkv, D]. Block b is the slots b * size .. (b + 1) * size - 1, as always.
#
# By hand, blocks of 2, three texts:
#
# | text | table | stored positions | |
# |---|---|--:|---|
# | 0 | [3, 0, 5] | 6 | |
# | 1 | [3, 0, 1] | 5 | of block 1 only the first slot is stored |
# | 2 | [3, 6] | 3 | of block 6 only the first slot is stored |
#
# One text at a time, 14 slots of K are read. There are 8 stored slots in all: block 3 is loaded once for three texts,
# block 0 once for two, the others once for one.
#
# Three things to know. A table may end with a block that is reserved and has nothing in it yet. A block that is not
# full may be shared as well (samples that have just been forked); then all who hold it have equally many positions in
# it. And texts do not always share from the same place on: some have one block in common, some ten.


# %% task="p5.decode_shared"
def decode_shared(q: Tensor, k: Counted, v: Counted, tables: list[list[int]], kv_lens: list[int], size: int) -> Tensor:
    """Attention of one new token of each of N texts, over all its stored positions 0 .. kv_lens[n] - 1.

    q [N, H, D]; k and v hold [slots, Hkv, D]; query heads head*G .. head*G+G-1 belong to key-value head `head`.
    Every stored slot is read once, by loads of at most one block, and nothing else is read. What is kept between two
    blocks is the state (m, s, o) of each row. Returns [N, H, D].
    """
    ### BEGIN SOLUTION
    N, H, D = q.shape
    Hkv = k.shape[1]
    rows = (q * D**-0.5).view(N, Hkv, H // Hkv, D).transpose(0, 1)  # [Hkv, N, G, D]
    m = torch.full_like(rows[..., :1], float("-inf"))
    s, o = torch.zeros_like(m), torch.zeros_like(rows)
    holders, live = {}, {}  # of each block: which texts, how many positions
    for n, (table, kv_len) in enumerate(zip(tables, kv_lens, strict=True)):
        for i in range(-(-kv_len // size)):
            holders.setdefault(table[i], []).append(n)
            live[table[i]] = min(size, kv_len - i * size)
    for block, texts in holders.items():
        slots = block * size + torch.arange(live[block])
        keys = k.load(slots).transpose(0, 1)[:, None]  # [Hkv, 1, n, D]
        values = v.load(slots).transpose(0, 1)[:, None]
        scores = rows[:, texts] @ keys.transpose(-2, -1)  # [Hkv, texts, G, n]
        merged = merge(m[:, texts], s[:, texts], o[:, texts], *part(scores, values))
        m[:, texts], s[:, texts], o[:, texts] = merged
    return (o / s).transpose(0, 1).reshape(N, H, D)
    ### END SOLUTION


# %%
lab.check("p5", "decode_shared")

# %% [markdown]
# <details><summary>Hint 1</summary>Two loops, one after the other. The first goes through texts and tables and only
# collects: for each block, which texts hold it and how many of its slots are stored. The second goes through the
# blocks.</details>
# <details><summary>Hint 2</summary>Shape q as [Hkv, N, G, D] once. <code>x[:, texts]</code>, with a list of texts,
# takes the rows of these texts out of q, m, s and o, and <code>m[:, texts] = ...</code> puts them back. Keys as [Hkv,
# 1, n, D] fit to all of these texts.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: decode_shared</summary>
#
# The common wrong answer is right, and slow: a loop over texts, which reads a shared block again for each of them. The
# next one looks for a beginning that *all* texts have in common, computes it for all, and goes on text by text: then a
# single stranger in the batch undoes the sharing. Others load the whole of a last block, whose free slots hold whatever
# was there before (0 × NaN is NaN, so a weight of 0 does not help), or take `kv_len % size` for the length of the last
# block, which is 0 if it is full.
#
# A block with R holders is read once for R · G query heads instead of G: the intensity of lesson 11 grows by R. It is
# the change to *what is computed side by side* that was among the answers there.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# How much less is read? Samples of one prompt of 512 positions, each with 64 of its own; then a tree of beginnings: a
# system prompt of 256, four documents of 1,024 behind it, and two questions to each document, of 32. Slots of K read in
# one step and layer, counted by your function, with a tiny head. (This cell needs your function.)

# %%
SIZE = 16


def tree(lengths, counts):
    """Tables and kv_lens: everybody shares the first part, counts[0] groups share the next one, and so on."""
    fresh = iter(range(10_000))
    tables = [[next(fresh) for _ in range(lengths[0] // SIZE)]]
    for length, count in zip(lengths[1:], counts, strict=True):
        tables = [[*table, *(next(fresh) for _ in range(length // SIZE))] for table in tables for _ in range(count)]
    return tables, [sum(lengths)] * len(tables)


print(f"{'':46}{'texts':>6}{'each for itself':>17}{'shared':>9}{'operations per byte':>22}")
for words, lengths, counts in (
    ("one text of 576", (512, 64), (1,)),
    ("8 samples of a prompt of 512", (512, 64), (8,)),
    ("64 samples of a prompt of 512", (512, 64), (64,)),
    ("a system prompt, 4 documents, 2 questions each", (256, 1024, 32), (4, 2)),
):
    tables, kv_lens = tree(lengths, counts)
    data = torch.randn(SIZE * (1 + max(map(max, tables))), 1, 4, generator=torch.Generator().manual_seed(0))
    k, v = Counted(data, 1), Counted(data, 1)
    decode_shared(torch.ones(len(tables), 3, 4), k, v, tables, kv_lens, SIZE)
    reads, apart = int(k.reads.sum()), sum(kv_lens)
    # 4 D operations for a score of each of G = 3 heads; K and V of a slot are 2 D numbers of 2 bytes
    print(f"{words:46}{len(tables):6}{apart:17,}{reads:9,}{4 * 3 * apart / (4 * reads):22.1f}")

# %% [markdown]
# ## Problem 2: whom to refuse
#
# Lesson 13 gave the queue an end: who comes when it is full is refused. That is fair in its way, and it looks at
# nobody. But the requests that wait are known: how long each prompt is, so how many seconds it takes, and until when
# its first token must be there to be of any use. Suppose that a burst has come, and not all can be served in time. Whom
# do you refuse, so that as many as possible are *good*?
#
# The replica computes one prompt after the other, from `now` on. (All who are decoding have their share of the budget,
# and are none of our business here.) Request i takes `seconds[i]`, and its first token is there when it is done. It is
# good if that is at `deadlines[i]` or before. Whoever is refused is told at once, and costs nothing.
#
# By hand, now = 0:
#
# | request | 0 | 1 | 2 | 3 | 4 |
# |---|--:|--:|--:|--:|--:|
# | takes | 5 | 2 | 2 | 3 | 1 |
# | deadline | 6 | 4 | 5 | 11 | 7 |
#
# | rule | order, and when each is done | good |
# |---|---|--:|
# | first come, first served; refused if it would be late | 0 at 5, 3 at 8 | 2 |
# | by deadline, all of them | 1 at 2, 2 at 4, 0 at 9 (late), 4 at 10 (late), 3 at 13 (late) | 2 |
# | **refuse 0** | 1 at 2, 2 at 4, 4 at 5, 3 at 8 | **4** |
#
# `keep` returns the numbers of those that are kept, in the order in which they are computed, here [1, 2, 4, 3]. All of
# them must be good, no other choice may have more of them, and of all choices with as many, it has the least work. A
# burst may have a thousand requests, so you cannot try all choices.


# %% task="p5.keep"
def keep(seconds: list[float], deadlines: list[float], now: float) -> list[int]:
    """Whom to serve, in order, so that as many as possible are good; of equally many, with the least work."""
    ### BEGIN SOLUTION
    kept, done = [], now  # a heap with the longest first
    for i in sorted(range(len(seconds)), key=deadlines.__getitem__):
        heapq.heappush(kept, (-seconds[i], i))
        done += seconds[i]
        if done > deadlines[i]:  # too late for one of those so far: the longest of them goes
            done += heapq.heappop(kept)[0]
    return sorted((i for _, i in kept), key=deadlines.__getitem__)
    ### END SOLUTION


# %%
lab.check("p5", "keep")

# %% [markdown]
# <details><summary>Hint 1</summary>If you knew <i>whom</i> to keep, the order would be easy: by deadline. (If two
# neighbours are in the wrong order and both good, they are good the other way round too.) So go through the requests by
# deadline, and let each in. What if that makes the newest one late? One of those let in so far has to go. All deadlines
# so far are no later than the newest: so who is gone helps all who come after it by the time that it took, and by
# nothing else.</details>
# <details><summary>Hint 2</summary>The longest of all so far goes, and that may be the newest itself. If it is another
# one, the newest is in time now: what was in front of it has become shorter by more than it takes. A heap of
# <code>(-seconds, number)</code> gives the longest first.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: keep</summary>
#
# This is Moore's algorithm of 1968, in the form that he owes to Hodgson. After each request the set that is kept is as
# large as any that can be kept of those seen so far, and of these the one with the least work. Taking the longest out
# keeps both: the number falls by the one that had to go, and the work by as much as possible.
#
# The common wrong answer refuses the request that *would be* late, as a queue does: then one long prompt with an early
# deadline takes the place of three short ones. The next one serves the shortest first, until somebody is late: but a
# short request may have all the time in the world. And one takes the longest out only of those *before* the newest:
# when the newest is the longest itself, somebody else goes for it. (Right as well, and slower: go through the requests
# from the shortest to the longest, and let one in whenever all who are in, ordered by deadline, are good with it.)
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# Who pays? One replica with the numbers of lesson 13: 0.3 ms for a token of a prompt. Prompts have 64 tokens, and one
# in eight has 2,000. Requests come in bursts, and each has a limit of its own for its first token, from half a second
# to two. Beside `keep` stands the queue: first come, first served, where only those are refused who would be late.
# (This cell needs your function.)


# %%
def by_turns(seconds, deadlines, now):
    """First come, first served; whoever would be late is refused."""
    order = []
    for i in range(len(seconds)):
        if now + seconds[i] <= deadlines[i]:
            order.append(i)
            now += seconds[i]
    return order


draw = random.Random(0)
print("requests in a burst   first come: good   of the long ones     keep: good   of the long ones")
for n in (5, 10, 20, 40, 80):
    shares = {by_turns: ([], []), keep: ([], [])}
    for _ in range(200):
        tokens = [2000 if draw.random() < 1 / 8 else 64 for _ in range(n)]
        seconds, deadlines = [3e-4 * t for t in tokens], [draw.uniform(0.5, 2.0) for _ in range(n)]
        long = {i for i in range(n) if tokens[i] == 2000}
        for rule, (good, good_long) in shares.items():
            order = rule(seconds, deadlines, 0.0)
            good.append(len(order) / n)
            if long:
                good_long.append(len(long & set(order)) / len(long))
    cells = [f"{fmean(part_of):.0%}" for rule in shares for part_of in shares[rule]]
    print(f"{n:19}{cells[0]:>19}{cells[1]:>19}{cells[2]:>15}{cells[3]:>19}")

# %% [markdown]
# In the largest bursts more than twice as many are good, and the long ones pay for it: some six in a hundred of them
# are served, however often they ask. Counting heads is a choice. One could count tokens, or money; then a knapsack is
# hidden in the problem, and no rule as short as this one is known to solve it.

# %% [markdown]
# ## Explain
#
# Write between the quotes, in eight to twelve sentences. Somebody captures your `decode_shared` for 8 texts in a CUDA
# graph, sees that the first replay is right, and replays it in every step.
#
# 1. What in it was decided in Python, and is frozen therefore?
# 2. What goes wrong in the very next step, what when a text fills its block, and what when a text ends and its memory
#    is given to another one?
# 3. How would you turn these decisions into buffers of a fixed shape, and what must dummies look like so that they do
#    no harm?
# 4. For which batches would you rather not share reads at all?

# %%
lab.answer("p5.why", """ """)

# %% [markdown]
# <!-- BEGIN SOLUTION -->
# <details><summary>A good answer</summary>
#
# The dictionary is Python's: how many blocks there are, so how often the loop runs, which block each round loads, which
# texts hold it, and how many of its slots are stored. All of it is frozen, as numbers or as shapes. In the next step
# every text has a position more, and the replay does not look at it: each text misses its newest token, itself. When a
# block is full and a new one is taken, nothing reads that block at all, so the text falls behind further with every
# step. When a text ends, its row goes on reading its old blocks, in which somebody else's K and V are by now; and
# whoever has its row gets attention over a stranger's text, without any error. To capture it, the plan must be data:
# for a bucket of at most M blocks and N texts, a tensor of block numbers [M], one of stored positions [M], and one that
# says who holds what, [M, N], written in place before each replay. Every round then computes all N rows, and those
# that do not hold the block get scores of -inf, for which `part` and `merge` change nothing. A dummy block is the
# scratch block with no position stored and no holder; a dummy row needs one position it may read, or s is 0 and it is
# NaN, which is thrown away and must not be stored. I would not share reads where little is shared: nothing is saved in
# bytes, there are many small rounds with one text each, more launches and merges than one program for each text has,
# and in the fixed form scores for N rows where one is needed.
# </details>
# <!-- END SOLUTION -->
