# %% [markdown]
# # 10 · Prefix sharing
#
# Texts that begin alike share the blocks of their beginning: it is computed once and stored once, for all of them.
#
# [![Open this lesson in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minillm/minillm/blob/v0.1.0/lessons/10_prefix_sharing.ipynb)
#
# **Objectives.** After this lesson you can
#
# - *say* exactly when two blocks hold the same K and V, and *write* a key that is equal then and only then;
# - *write* the life of a shared block: found, held by several, given back, found again or taken for something else;
# - *write* copy on write, and *count* how many copies the samples of one prompt need;
# - *predict* to the token what a shared system prompt, a chat and parallel samples save, and measure it;
# - *explain* how a shared prefix can tell one user what another one has asked.
#
# **Prerequisites:** lesson 04 (why K and V may be kept), lesson 08 (the engine's loop) and lesson 09 (blocks, block
# tables, preemption). **Minutes:** about 120, of which the machine needs about 2. **Hardware:** two CPU cores are
# enough.
#
# **The one change:** in lesson 09 a block belonged to one text. Now it has a *count of owners*, and a full block can
# be *found by what is in it*. In the package `SharedSlots` takes the place of `BlockSlots`
# ([`minillm/sharing.py`](../minillm/sharing.py), [`minillm/stages/shared.py`](../minillm/stages/shared.py)); the model,
# attention and the loop stay as they are.

# %% tags=["setup"]
import inspect
from functools import partial
from statistics import median

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minillm import attention, lab
from minillm.bench import harness
from minillm.bench.harness import Job
from minillm.bench.prompts import load
from minillm.engine import Engine
from minillm.fetch import find as find_folder
from minillm.lab.checking import run_checks
from minillm.lab.checks.c10 import FunctionSlots, Memory
from minillm.lab.work import from_namespace
from minillm.model import Llama
from minillm.packing import pack_weights
from minillm.params import SamplingParams
from minillm.sharing import SharedSlots
from minillm.slots import BlockSlots
from minillm.tokenizer import Tokenizer

# %%
lab.start("10")

# %% [markdown]
# ## The idea
#
# **Many texts begin alike.** Every request to an assistant begins with the same system message. Every turn of a chat
# begins with all the turns before it. And whoever wants eight answers to choose from sends one prompt eight times.
# So far the engine computes each of these beginnings anew, and stores it anew.
#
# **It need not.** Lesson 04 has shown why K and V may be kept at all: those of a token depend on that token, on its
# position, and on the tokens before it. Nothing that comes later changes them. So two texts that begin with the same
# tokens have the *same* K and V there, number for number. Since lesson 09 a text is a list of block numbers, its block
# table, and nobody minds if one number stands in two tables:
#
# | text, in blocks of 2 | block 0 | block 1 | block 2 | block 3 |
# |---|---|---|---|---|
# | A | `<bos> I` | `am sure` | `this pro` | `ject` |
# | B | `<bos> I` | `am sure` | `this will` | |
# | C | `<bos> am` | `I sure` | `this pro` | `ject` |
#
# A and B can share blocks 0 and 1, and no more. C can share nothing with A. Look at their blocks 2: both hold `this
# pro`, at the same positions. But in A these two tokens have read `I am sure`, and in C they have read `am I sure`, so
# from the second layer on their K and V are different. **What a block holds is told by its own tokens and all that
# came before**; its own tokens alone are not enough.
#
# **How a block is found.** A dictionary, the *index*, leads from a *key* to a block. The key of a block is a chain: the
# key of the block before it, and its own tokens. Only *full* blocks have one, because they never change again.
#
# **The life of a block.** A block counts its *owners*: the tables it stands in.
#
# | a block is | owners | in `free` | in the index | how it gets there |
# |---|--:|---|---|---|
# | empty | 0 | yes | no | in the beginning |
# | being filled | 1 or more | no | no | `take` |
# | full, held and found | 1 or more | no | yes | `publish`, once it is computed |
# | resting | 0 | yes | yes | `give_back` by its last owner |
#
# The last row is the point: nobody holds a resting block, yet what is in it stays, until somebody takes the block for
# something else. So the memory that nobody needs is the cache, and costs nothing. From resting a block goes two ways:
# `hold` makes it *held* again, if it is found; `take` makes it *being filled*, and then it must no longer be found.
#
# **One token is left.** If a text is known from its first to its last token, there is nothing to compute; but without
# a step there is no hidden state, no logits and no next token. So at least the last token is always computed.
#
# **Samples.** Several samples of one prompt need it computed only once. The first sample does that; then the others are
# *forked*: each holds all the blocks of the first, also the last one, which may be half full, and draws its own first
# token from the same logits. So nobody computes a token of the prompt again. But in the last block each wants to write
# what it drew. Whoever writes into a block with other owners gets a copy of it first: *copy on
# write*. Take three samples of A (7 tokens, blocks of 2): block 3 holds `ject` and has three owners. The first writer
# copies, two owners remain; the second copies, one remains; the third is alone in the block and just writes.

# %%
WORD = {1: "<bos>", 57: "I", 339: "I", 744: "am", 2090: "sure", 451: "this", 348: "pro", 680: "ject", 523: "will"}
A = [1, 57, 744, 2090, 451, 348, 680]  # <bos> I am sure this pro ject
B = [1, 57, 744, 2090, 451, 523]  # <bos> I am sure this will
C = [1, 744, 339, 2090, 451, 348, 680]  # <bos> am I sure this pro ject

# %% [markdown]
# ## Predict
#
# Blocks have 16 positions from here on. A system prompt of exactly 1,000 tokens is followed by a question of 24
# tokens, another one each time. Two such requests come, one after the other. How many of its 1,024 tokens does the
# *second* one compute before its first new token?

# %%
lab.predict("10.second_tokens", None)

# %% [markdown]
# Eight samples of one prompt of 512 tokens, each with 64 new tokens, all running at the same time. How many blocks do
# they hold together at the end? Mind that the last new token is never fed back, so its K and V are never stored.
# (Without sharing each holds 36 blocks, which is 288 in all.)

# %%
lab.predict("10.sample_blocks", None)

# %%
lab.predict("10.copies", None)  # and how many of these blocks were made by copy on write?

# %% [markdown]
# A chat. The first prompt has 200 tokens, each answer 60, and each further question 40, and every prompt begins with
# all that was said before it, so the third prompt has 400 tokens. What *percentage* of these 400 is found in memory?

# %%
lab.predict("10.third_turn", None)

# %% [markdown]
# ## Build
#
# No tensors in this lesson: you write seven short functions over plain Python lists and dictionaries. They do their
# books in an object of this class, which is given:

# %%
print(inspect.getsource(Memory))

# %% [markdown]
# `OrderedDict` is a dictionary that you can use as a queue. `free[b] = None` puts block b at its end,
# `free.popitem(last=False)` takes the pair (block, None) from its front, and, which a queue cannot do,
# `free.pop(b, None)` takes b out of the middle, if it is there.
#
# ### 1. Keys
#
# Any key will do that can stand in a dictionary, as long as two keys are equal exactly when the two texts agree from
# their first token to the end of the block. Say what a key *is* and let the dictionary do the hashing: it finds the
# place by the hash, then compares the whole key. If you hash yourself and return the number, two keys are equal
# whenever their hashes are.


# %% task="10.block_keys"
def block_keys(tokens: list[int], size: int) -> list:
    """The keys of a text's full blocks, one for each, in order. A last block that is not full has none."""
    ### BEGIN SOLUTION
    keys = []
    key = None  # nothing comes before block 0
    for i in range(len(tokens) // size):
        key = (key, tuple(tokens[i * size : (i + 1) * size]))
        keys.append(key)
    return keys
    ### END SOLUTION


# %%
lab.check("10", "block_keys")

# %% [markdown]
# <details><summary>Hint 1</summary>A loop over the full blocks, with one name that holds the key so far.</details>
# <details><summary>Hint 2</summary>The key of the next block is a pair: the key so far, and the block's own
# tokens.</details>
# <details><summary>Hint 3</summary>A slice of a list is a list, which cannot stand in a dictionary. Make a tuple of
# it.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: block_keys</summary>
#
# `key = (key, tuple(own))`: the chain. The common wrong answer is `tuple(own)` alone. It finds `this pro` of A for C,
# and the text goes on, reads well, and is a text about something else. The next common one is `hash(...)` of the right
# thing: two texts whose hashes agree by chance, or because somebody made them so, then get each other's K and V.
# `tuple(tokens[: (i + 1) * size])` is right too, only longer. To look up a chain is to hash it from its beginning, so
# a long text costs the square of the number of its blocks. The package keeps the *entry* of the block before in place
# of its key: it is the same object or it is not, which is one step, whatever the length. (And Python compares nested
# tuples by recursion, which ends at about a thousand of them.)
# </details>
# <!-- END SOLUTION -->
#
# ### 2. Find
#
# Which blocks can a newcomer begin with? Think of three things: they must be a *beginning* of its text, without a gap;
# they must be as many as possible; and at least one token must be left to compute.


# %% task="10.find"
def find(index: dict, tokens: list[int], size: int) -> list[int]:
    """The blocks that a new text may begin with, in order: its longest beginning that is known, never the whole."""
    ### BEGIN SOLUTION
    found = []
    for key in block_keys(tokens[:-1], size):  # without the last token, which is left to compute
        if key not in index:
            break
        found.append(index[key])
    return found
    ### END SOLUTION


# %%
lab.check("10", "find")

# %% [markdown]
# <details><summary>Hint 1</summary>Go through <code>block_keys</code> of the text, and stop at the first that is not
# in the index.</details>
# <details><summary>Hint 2</summary>A later block may be known although an earlier one is not, for blocks are taken
# one by one. It is of no use.</details>
# <details><summary>Hint 3</summary>A text of 8 tokens in blocks of 4 may find one block, one of 9 may find two. In
# general (n - 1) // size: as many full blocks as the text has without its last token.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: find</summary>
#
# `block_keys(tokens[:-1], size)` are the keys of all blocks that leave a token over. The common wrong answer looks
# through all full blocks: all is well until somebody sends a known prompt whose length is a multiple of the block
# size. Then nothing is left to compute, and the step has no row to sample from. It is a classic: several engines have
# crashed on it.
# </details>
# <!-- END SOLUTION -->
#
# ### 3. Take
#
# Somebody needs a block to write into. There may be an old text in it that can still be found.


# %% task="10.take"
def take(memory: Memory) -> int:
    """Takes the first of the free blocks for something new, and returns its number. It has one owner now, and what
    was in it can no longer be found. (The scheduler has made sure that one is free.)"""
    ### BEGIN SOLUTION
    block, _ = memory.free.popitem(last=False)
    memory.owners[block] = 1
    key = memory.key_of.pop(block, None)
    if key is not None:
        del memory.index[key]
    return block
    ### END SOLUTION


# %%
lab.check("10", "take")

# %% [markdown]
# <details><summary>Hint 1</summary>Three things change: <code>free</code>, <code>owners</code>, and the two
# dictionaries, if the block has an entry.</details>
# <details><summary>Hint 2</summary>Not every free block has an entry: some never were full.</details>
# <details><summary>Hint 3</summary><code>key_of.pop(block, None)</code> removes the one entry and tells you the key of
# the other.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: take</summary>
#
# `key_of` is there for this function alone: it knows which entry of the index leads to the block. The common wrong
# answer leaves the entry where it is. Then the old key leads to a block in which a stranger's text stands by now.
# Comparing the block's own tokens when it is found does not help: let X = 1 1 9 9 5, then Y = 2 2 9 9 in the same
# blocks, then X again. Its block `9 9` is there, with the right tokens; but it is Y's, after 2 2.
# </details>
# <!-- END SOLUTION -->
#
# ### 4. Hold
#
# Blocks get one more owner. A newcomer calls it with what it has found; some of these blocks may be resting, others
# held. Once a prompt is computed, each further sample calls it with the table of the first: that is the *fork*.


# %% task="10.hold"
def hold(memory: Memory, blocks: list[int]) -> list[int]:
    """One more table holds these blocks, which may have been free or held by others. Returns that table, a new list."""
    ### BEGIN SOLUTION
    for block in blocks:
        memory.owners[block] += 1
        memory.free.pop(block, None)
    return list(blocks)
    ### END SOLUTION


# %%
lab.check("10", "hold")

# %% [markdown]
# <details><summary>Hint 1</summary>Count up, and see to it that a block which is held is not free.</details>
# <details><summary>Hint 2</summary><code>free.pop(block, None)</code> does nothing if the block is not
# there.</details>
# <details><summary>Hint 3</summary>The caller's table will grow later. Would yours grow with it?</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: hold</summary>
#
# Count, take out of `free`, and return `list(blocks)`. There are two common wrong answers. One leaves a resting block
# in `free`: it is held, and the next `take` gives it to somebody else, who writes over it. The other returns `blocks`
# itself: two samples then have one list, and the first block that one of them takes is in the table of both.
# </details>
# <!-- END SOLUTION -->
#
# ### 5. Give back
#
# A text has ended. Which of its blocks should be taken first? Remember what `find` does when a beginning is gone.


# %% task="10.give_back"
def give_back(memory: Memory, table: list[int]) -> None:
    """A table is given up: each of its blocks has one owner less. Who has none left is free, behind all that are free
    already; of one table the end of the text comes before its beginning. Free blocks can still be found."""
    ### BEGIN SOLUTION
    for block in reversed(table):
        memory.owners[block] -= 1
        if memory.owners[block] == 0:
            memory.free[block] = None
    ### END SOLUTION


# %%
lab.check("10", "give_back")

# %% [markdown]
# <details><summary>Hint 1</summary>First count down, then look whether anybody is left.</details>
# <details><summary>Hint 2</summary>Setting a new key of an <code>OrderedDict</code> puts it at the end.</details>
# <details><summary>Hint 3</summary>The first in <code>free</code> is taken first. So the last block of the table must
# be put there first: <code>reversed</code>.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: give_back</summary>
#
# `reversed(table)`, so that of a text the end is taken before the beginning. The common wrong answer goes from the
# first block to the last. Nothing breaks; but one single block taken from a text of 64 is then its *first*, and the
# other 63 are in memory and will never be found. The worse one puts every block into `free` without looking at the
# count: a block that others still read is given out to be written over.
# </details>
# <!-- END SOLUTION -->
#
# ### 6. Publish
#
# After each step the engine tells, for every text, how many of its tokens are computed by now.


# %% task="10.publish"
def publish(memory: Memory, table: list[int], tokens: list[int], computed: int) -> None:
    """From now on the full blocks of this text can be found, as far as their K and V are computed: those of the first
    `computed` tokens. Where a key leads to a block already, that one stays. It is called after every step, so most
    of the blocks are in the index already."""
    ### BEGIN SOLUTION
    for key, block in zip(block_keys(tokens[:computed], memory.size), table, strict=False):
        if key not in memory.index:
            memory.index[key] = block
            memory.key_of[block] = key
    ### END SOLUTION


# %%
lab.check("10", "publish")

# %% [markdown]
# <details><summary>Hint 1</summary>The i-th key belongs to the i-th block of the table; the table may be
# longer.</details>
# <details><summary>Hint 2</summary>A prompt may be half computed. The rest of its blocks are reserved, and hold
# nothing, or the text of somebody else.</details>
# <details><summary>Hint 3</summary>Two equal prompts in one step are both computed: neither could find the other. Only
# one of two equal blocks may have an entry, in <i>both</i> dictionaries.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: publish</summary>
#
# Keys of `tokens[:computed]`, and an entry only where there is none yet. The common wrong answer publishes what is
# *reserved*, or all the tokens there are: another request finds the block and reads it before it is written. It may go
# well for weeks, as long as the first request is never aborted and never in the same step. The other one overwrites
# the entry of an equal block: `index` leads to the second block, `key_of` knows both, and when the first is taken, it
# deletes the entry of the second.
# </details>
# <!-- END SOLUTION -->
#
# ### 7. Copy on write
#
# A text is about to write at `position`, in the block `position // size` of its table. That block may have other
# owners; or the table may not hold it yet, if the position begins a new block, which the engine will then `take`.
# K and V themselves are copied by the engine: you only say which slots go where, as pairs (from, to). Remember that
# block b is the slots `b * size` to `(b + 1) * size - 1`.
#
# Example, size 4: the table is [7, 2], block 2 has three owners, and position 6 comes next. Positions 4 and 5 are
# stored, in slots 8 and 9. If `take` gives block 5, then the table becomes [7, 5], block 2 has two owners, and the
# moves are [(8, 20), (9, 21)].


# %% task="10.copy_on_write"
def copy_on_write(memory: Memory, table: list[int], position: int) -> list[tuple[int, int]]:
    """Before a text writes at `position`: if other tables hold that block too, it gets a new block in its place.

    Changes `table`; returns which slots are to be copied, (from, to), those of the block that are stored already.
    Returns [] and changes nothing if it is the only owner, or if the table ends before that block.
    """
    ### BEGIN SOLUTION
    size = memory.size
    i = position // size
    if i >= len(table) or memory.owners[table[i]] == 1:
        return []
    old, new = table[i], take(memory)
    memory.owners[old] -= 1
    table[i] = new
    return [(old * size + j, new * size + j) for j in range(position % size)]
    ### END SOLUTION


# %%
lab.check("10", "copy_on_write")

# %% [markdown]
# <details><summary>Hint 1</summary>Two cases in which nothing happens come first: no such block in the table, or a
# block with one owner.</details>
# <details><summary>Hint 2</summary><code>take</code> has given the new block its one owner. Which count is left to
# mend?</details>
# <details><summary>Hint 3</summary>Of the block, <code>position % size</code> slots are stored. Slot j of the old block
# goes to slot j of the new one.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: copy_on_write</summary>
#
# The new block has its one owner from `take`; the old one loses this owner, or it would never be free again. The
# common wrong answer forgets the moves: the new block then holds garbage at the positions before, and only the *first*
# half block of each sample is wrong, which is easy to overlook with long blocks. The other one writes without a copy,
# because "they share it anyway": the samples then overwrite each other's last tokens, and differ less than they
# should.
#
# Why is no copy ever needed for a block that was *found*? Because it is full. Whoever finds it goes on in a new one.
# </details>
# <!-- END SOLUTION -->
#
# The last property above has put all seven into the real engine, with samples, aborts, equal prompts in one step and
# memory so small that requests are sent away; NaN was in every slot that was neither held nor to be found. Now see
# your functions at work without any model, on the texts of the table. (This cell, *Your functions in the engine* and
# *Break it* need your functions; all others run without them.)

# %%
memory = Memory.fresh(7, 2)


def enter(name, tokens):
    """A newcomer: finds, holds, takes the rest, is computed (we say), and is published."""
    table = hold(memory, find(memory.index, tokens, memory.size))
    found = len(table) * memory.size
    while len(table) * memory.size < len(tokens):
        table.append(take(memory))
    publish(memory, table, tokens, len(tokens))
    print(f"{name}: {len(tokens)} tokens, {found} found, {len(tokens) - found} computed; table {table}")
    return table


table_a = enter("A      ", A)
table_b = enter("B      ", B)
print("owners ", memory.owners)
give_back(memory, table_a)
give_back(memory, table_b)
print("A and B have ended; free, the next to be taken first:", list(memory.free))
give_back(memory, enter("C      ", C))
print("C has ended; free:", list(memory.free))
table_a = enter("A again", A)
print("owners ", memory.owners)

# %% [markdown]
# There are only seven blocks, so C took the two that were empty and two that A had given back: 3 and 2, its end. A's
# beginning outlived it, although nobody held it, and A found 4 of its 7 tokens when it came again.

# %% [markdown]
# ## Measure: what is the same
#
# First the claim on which all this stands, on the real model. `am sure` comes after `<bos> I` in A and in B; `this pro`
# comes after four tokens in A and in C, but they are not the same four. How far apart are their K, layer by layer?

# %%
folder = find_folder("smollm2-135m-instruct")
model = pack_weights(Llama.from_pretrained(folder))
tokenizer = Tokenizer.from_pretrained(folder)
ids = [token for prompt in load() for token in tokenizer.encode_chat(list(prompt.messages))]


def keys_by_layer(tokens):
    """K of every layer, [T, Hkv, D] each, of a text computed in one piece."""
    kept = []
    positions = torch.arange(len(tokens), device=model.device)

    def attend(layer, q, k, v):
        kept.append(k.float())
        return attention.sdpa(q, k, v, attention.visible(positions, positions))

    model(torch.tensor(tokens, device=model.device), positions, attend)
    return kept


in_a, in_b, in_c = (keys_by_layer(text[:6]) for text in (A, B, C))
print("largest difference in K                " + "".join(f"  layer {layer:2}" for layer in (0, 1, 2, 15, 29)))
for words, one, other, block in (
    ("`am sure` in A and in B", in_a, in_b, slice(2, 4)),
    ("`this pro` in A and in C", in_a, in_c, slice(4, 6)),
):
    far = [(one[layer][block] - other[layer][block]).abs().max().item() for layer in (0, 1, 2, 15, 29)]
    print(f"{words:39}" + "".join(f"{value:10.3f}" for value in far))

# %% [markdown]
# In layer 0 the K of a token depends on the token and its position alone. From layer 1 on it depends on all that the
# token has read. So the same tokens in the same place are not enough; the same beginning is.

# %% [markdown]
# ## Measure: one system prompt, many questions
#
# Four requests come one after the other, with the same 1,000 tokens in front and another question of 24 tokens each
# time. The stage of lesson 09, `paged`, computes everything anew; `shared` looks first. Counters come first: they are
# the same on every machine.

# %%
STAGES = ("paged", "shared")
LIMITS = {"max_running": 8, "budget": 256, "block": 16}
system = tuple(ids[:1000])
questions = [tuple(ids[2000 + 100 * i : 2024 + 100 * i]) for i in range(lab.size(ci=2, default=4, long=8))]
jobs = [Job(system + question, 1) for question in questions]

harness.run(model, "paged", jobs[:1], LIMITS)  # the first run of all is slower, and not counted
runs = {stage: [] for stage in STAGES}
for i in range(lab.size(ci=1, default=3, long=7)):  # rounds are interleaved, and each begins with another stage
    for stage in STAGES[:: -1 if i % 2 else 1]:
        runs[stage].append(harness.run(model, stage, jobs, LIMITS, clients=1))  # one client: one after the other


def computed(done):
    """Tokens that each request pushed through the model."""
    return [sum(step.new.get(i, 0) for step in done.counts.steps) for i in range(len(done.jobs))]


pushed = {stage: computed(runs[stage][0]) for stage in STAGES}
for stage in STAGES:
    print(f"{stage:7} computes {pushed[stage]} tokens for the requests, {sum(pushed[stage]):,} in all")
lab.reveal("10.second_tokens", pushed["shared"][1])

# %% [markdown]
# Not 24. Of the 1,000 tokens $\lfloor 1000 / 16 \rfloor = 62$ blocks are full, which are 992 tokens. The 63rd block
# holds the last 8 tokens of the system prompt and the first 8 of a question, which is another one each time. So
#
# $$\text{computed} = n - \text{size} \cdot \left\lfloor \frac{\text{common beginning}}{\text{size}} \right\rfloor ,$$
#
# with at least one token left over. Now the time to the first token (*ttft*), of the second request and those after
# it.

# %%
first_token = {
    stage: [t[0] - a for done in runs[stage] for a, t in list(zip(done.arrivals, done.times, strict=True))[1:]]
    for stage in STAGES
}
for stage in STAGES:
    found = sorted(first_token[stage])
    print(f"{stage:7} ttft {median(found):.3f} s (median of {len(found)}; {found[0]:.3f} to {found[-1]:.3f} s)")
faster = median(first_token["paged"]) / median(first_token["shared"])
print(f"{faster:.1f} times sooner, with {pushed['paged'][1] / pushed['shared'][1]:.0f} times fewer tokens")
same = runs["paged"][0].outputs == runs["shared"][0].outputs
print(f"The tokens are {'the same' if same else 'not all the same: some are equally good within rounding'}.")

# %% [markdown]
# The time falls by less than the tokens do: a step over few tokens still has to read all the weights, and to look at
# all 1,024 positions.

# %% [markdown]
# ## Measure: a chat
#
# One conversation on one engine, which remembers. Each turn's prompt is all that was said before, in tokens, and 40
# new ones.

# %%
engine = Engine(model, max_running=8, budget=256, max_len=1024, slots=partial(SharedSlots, size=16))
slots = engine.scheduler.slots
said, rates = list(ids[3000:3200]), []
for turn in range(1, 5):
    asked_before, found_before = slots.asked, slots.found
    [output] = engine.generate([said], SamplingParams(max_tokens=60, ignore_eos=True))
    found, asked = slots.found - found_before, slots.asked - asked_before
    rates.append(100 * found / asked)
    print(
        f"turn {turn}: a prompt of {asked} tokens, {found} found, {asked - found} computed: hit rate {rates[-1]:.0f} %"
    )
    said += [*output.token_ids, *ids[4000 + 100 * turn : 4040 + 100 * turn]]
lab.reveal("10.third_turn", round(rates[2]))

# %% [markdown]
# When turn 2 ended, $200 + 60 + 40 + 60 = 360$ tokens had been said, and 359 of them stored: the last one was sampled
# and never fed back. These are 22 full blocks, 352 tokens, of the 400 that turn 3 sends. Without sharing a chat
# computes all of it in every turn, which grows with the square of the number of turns; with sharing every turn costs
# what is new in it, and at most one block more.

# %% [markdown]
# ## Measure: eight samples of one prompt
#
# Now 512 tokens of prompt and eight answers of 64 tokens, with temperature 1. Sample i draws the same numbers as it
# would alone: each draw depends on the seed, the number of the sample and how many tokens it has made. So samples
# differ, and sharing cannot change a draw. The budget is eight prompts, so that without sharing too all of them fit
# into one step, and run side by side from there. A last run has a prompt of 500 tokens, which does not fill its last
# block.

# %%
SAMPLES = 8
PROMPT, NEW = lab.size(ci=128, default=512, long=512), lab.size(ci=24, default=64, long=64)


def samples(kind, prompt):
    """Eight samples on an engine of its own: most blocks held at one time, blocks copied, steps."""
    engine = Engine(model, max_running=8, budget=8 * prompt, max_len=prompt + NEW, slots=partial(kind, size=16))
    slots, pool, copied = engine.scheduler.slots, engine.pool, set()
    copy = pool.copy

    def counted_copy(moves):
        copied.update(to // 16 for _, to in moves)
        copy(moves)

    pool.copy = counted_copy
    asked = SamplingParams(NEW, temperature=1.0, seed=7, ignore_eos=True)
    requests = engine.add_samples(list(ids[5000 : 5000 + prompt]), asked, SAMPLES)
    held = 0
    with harness.counting(model, requests) as counts:
        while engine.busy:
            engine.step()
            held = max(held, slots.n_slots // 16 - len(slots.free))
    return held, len(copied), counts.steps


held, copies = {}, {}
for prompt, kind in ((PROMPT, BlockSlots), (PROMPT, SharedSlots), (PROMPT - 12, SharedSlots)):
    held[prompt, kind], copies[prompt], steps = samples(kind, prompt)
    print(
        f"{kind.__name__:12} prompt of {prompt}: {held[prompt, kind]:4} blocks held at most, {copies[prompt]} copied, "
        f"{sum(step.tokens for step in steps):5,} tokens pushed; {steps[0].ended - steps[0].began:.2f} s to the first "
        f"tokens, {steps[-1].ended - steps[0].began:.2f} s in all"
    )
lab.reveal("10.sample_blocks", held[PROMPT, SharedSlots])
lab.reveal("10.copies", copies[PROMPT])

# %% [markdown]
# The prompt is $512 / 16 = 32$ blocks, held eight times and stored once. The 63 new tokens that are stored need
# $\lceil 63 / 16 \rceil = 4$ blocks for each sample. That is $32 + 8 \cdot 4 = 64$ against $8 \cdot 36 = 288$. And no
# copy at all: 512 is a multiple of 16, so no sample ever writes into a block of the prompt. With 500 tokens there are
# seven: the last of the eight writers is alone in the block, and keeps it.

# %% [markdown]
# ## Plot
#
# Predicted by the formulas, counted in the engine, and timed.

# %%
predicted = {
    "tokens": [1024, 1024 - 16 * (1000 // 16)],
    "blocks": [8 * -(-(PROMPT + NEW - 1) // 16), PROMPT // 16 + 8 * -(-(NEW - 1) // 16)],
}
counted = {
    "tokens": [pushed[stage][1] for stage in STAGES],
    "blocks": [held[PROMPT, BlockSlots], held[PROMPT, SharedSlots]],
}
middle = [median(first_token[stage]) for stage in STAGES]
spread = [[m - min(first_token[s]) for m, s in zip(middle, STAGES, strict=True)]]
spread += [[max(first_token[s]) - m for m, s in zip(middle, STAGES, strict=True)]]

figure = Figure(figsize=(10, 3.4), layout="constrained")
panels = figure.subplots(1, 3)
for axes, name, title in zip(
    panels, ("tokens", "blocks"), ("Tokens of the second request", "Blocks of eight samples"), strict=False
):
    for shift, values, shade, hatch, label in (
        (-0.2, predicted[name], "white", "///", "predicted"),
        (0.2, counted[name], "0.75", "", "counted"),
    ):
        at = [x + shift for x in range(2)]
        bars = axes.bar(at, values, 0.38, color=shade, hatch=hatch, edgecolor="black", label=label)
        axes.bar_label(bars, fmt="{:,.0f}", fontsize=9)
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_ylabel(name)
    axes.set_ylim(0, 1.25 * max(counted[name]))
    axes.yaxis.set_major_formatter("{x:,.0f}")
panels[1].legend(frameon=False, loc="upper right")
bars = panels[2].bar(range(2), middle, 0.5, yerr=spread, capsize=6, color="0.75", edgecolor="black")
panels[2].bar_label(bars, fmt="%.2f s", fontsize=9, padding=3)
panels[2].set_title("Its first token: median, range", loc="left", fontsize=10)
panels[2].set_ylabel("seconds")
panels[2].set_ylim(0, 1.25 * max(max(first_token[stage]) for stage in STAGES))
for axes in panels:
    axes.set_xticks(range(2), STAGES)
    axes.spines[["top", "right"]].set_visible(False)
lab.show(
    figure,
    "Three bar charts, paged beside shared. Tokens computed for the second request with the same system prompt: "
    f"{predicted['tokens'][0]:,} and {predicted['tokens'][1]} predicted, {counted['tokens'][0]:,} and "
    f"{counted['tokens'][1]} counted. Blocks of eight samples: {predicted['blocks'][0]} and {predicted['blocks'][1]} "
    f"predicted, {counted['blocks'][0]} and {counted['blocks'][1]} counted. Time to the first token of the second "
    f"request: {middle[0]:.2f} and {middle[1]:.2f} s, a ratio of {faster:.1f}.",
)

# %% [markdown]
# Where do the blocks lie? Three samples of A (7 tokens, blocks of 2) on the real engine, after their first step; then,
# one step later, with B and C beside them. Each row is a block table, each cell a block with its number and how many
# owners it has. Hatched cells are shared.

# %%
engine = Engine(model, max_running=8, budget=64, max_len=16, slots=partial(SharedSlots, size=2))
slots = engine.scheduler.slots
hot = SamplingParams(max_tokens=6, temperature=1.5, seed=2, ignore_eos=True)
names = {request: f"A, sample {i}" for i, request in enumerate(engine.add_samples(A, hot, 3))}
engine.step()


def state():
    return {name: [(block, slots.owners[block]) for block in request.blocks] for request, name in names.items()}


after_one = state()
short = SamplingParams(max_tokens=2, ignore_eos=True)
names |= {engine.add(B, short): "B", engine.add(C, short): "C"}
engine.step()
after_two = state()


def draw_tables(axes, tables, title):
    for y, cells in enumerate(tables.values()):
        for x, (block, owners) in enumerate(cells):
            shared = {"facecolor": "0.85", "hatch": "///"} if owners > 1 else {"facecolor": "white"}
            axes.add_patch(Rectangle((x, y), 1, 0.8, edgecolor="black", **shared))
            words = {"ha": "center", "va": "center", "fontsize": 9}
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
            axes.text(x + 0.5, y + 0.4, f"{block}  × {owners}", bbox=box, **words)
    axes.set_xlim(0, 4.05)
    axes.set_ylim(5, -0.1)
    axes.set_yticks([y + 0.4 for y in range(len(tables))], list(tables))
    axes.set_xticks([x + 0.5 for x in range(4)], [f"{2 * x}-{2 * x + 1}" for x in range(4)])
    axes.set_xlabel("positions")
    axes.set_title(title, loc="left", fontsize=10)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def in_words(tables):
    rows = (f"{name}: " + ", ".join(f"{b} (x {n})" for b, n in cells) for name, cells in tables.items())
    return "; ".join(rows)


figure = Figure(figsize=(10, 3), layout="constrained")
left, right = figure.subplots(1, 2)
draw_tables(left, after_one, "after step 1: block × owners, hatched where shared")
draw_tables(right, after_two, "after step 2")
lab.show(
    figure,
    f"Block tables with owners, before and after the samples' first own token. Step 1: {in_words(after_one)}. "
    f"Step 2: {in_words(after_two)}.",
)

# %% [markdown]
# In step 2 two of the samples got a copy of block 3 and the third kept it; B holds A's first two blocks, and C shares
# nothing, though its third block holds the same two tokens as A's.
#
# What can be found is a tree: each entry hangs below the entry of the block before it. Here it is, when all have ended
# but sample 0. Blocks in use are grey; white, dashed ones are resting.

# %%
for request, name in names.items():
    if name != "A, sample 0":
        engine.abort(request.id)
children = {}
for entry in slots.index.values():
    children.setdefault(entry.parent, []).append(entry)


def label(entry):
    return " ".join(WORD.get(token) or tokenizer.decode([token]).strip() or "_" for token in entry.tokens)


def place(parent=None, depth=0, leaf=0):
    """(entry, depth, height, height of its parent), and how many leaves there are so far."""
    nodes, heights = [], []
    for entry in children.get(parent, []):
        below, own, leaf = place(entry, depth + 1, leaf)
        nodes += [*below, (entry, depth, own)]
        heights.append(own)
    if not heights:
        return [], leaf, leaf + 1
    return nodes, sum(heights) / len(heights), leaf


nodes, root, leaves = place()
height = {None: root} | {entry: y for entry, _, y in nodes}
figure = Figure(figsize=(9, 0.9 + 0.62 * leaves), layout="constrained")
axes = figure.subplots()
for entry, depth, y in nodes:
    used = slots.owners[entry.block] > 0
    axes.plot([depth - 0.3, depth], [height[entry.parent], y], color="black", linewidth=0.8)
    style = {"facecolor": "0.85"} if used else {"facecolor": "white", "linestyle": "--"}
    axes.add_patch(Rectangle((depth, y - 0.3), 0.7, 0.6, edgecolor="black", **style))
    axes.text(depth + 0.35, y, f"{label(entry)}\nblock {entry.block}", ha="center", va="center", fontsize=9)
axes.plot(-0.3, root, marker="o", color="black")
axes.set_xlim(-0.4, max(depth for _, depth, _ in nodes) + 0.75)
axes.set_ylim(leaves - 0.5, -0.6)
axes.axis("off")
axes.set_title("What can be found: grey is held, dashed is resting", loc="left", fontsize=10)


def outline(parent=None, depth=0):
    for entry in children.get(parent, []):
        held_by = slots.owners[entry.block]
        yield f"{'  ' * depth}{label(entry)} (block {entry.block}, {'held' if held_by else 'resting'})"
        yield from outline(entry, depth + 1)


lab.show(
    figure,
    f"A tree of {len(nodes)} blocks that can be found, {leaves} ways through it; "
    f"{sum(slots.owners[entry.block] > 0 for entry, _, _ in nodes)} are held and the others are resting. The outline "
    "below says the same.",
)
print("\n".join(outline()))

# %% [markdown]
# ### Your functions in the engine
#
# `FunctionSlots` is the package's `SharedSlots`, with your functions in the place of its own. The four requests of the
# first measurement and eight samples, with yours and with the package's: every step must have the same tokens.

# %%
MINE = {
    "find": find,
    "take": take,
    "hold": hold,
    "give_back": give_back,
    "publish": publish,
    "copy_on_write": copy_on_write,
}


def story(kind):
    """Tokens in each step, and the texts: four requests, one after the other, then eight samples of 100 tokens."""
    engine = Engine(model, max_running=8, budget=256, max_len=1100, slots=partial(kind, n_slots=4800, size=16))
    widths, texts = [], []
    for prompt, n in [*((job.prompt, 1) for job in jobs), (ids[6000:6100], 8)]:
        requests = engine.add_samples(list(prompt), SamplingParams(20, 1.0, seed=5, ignore_eos=True), n)
        with harness.counting(model, requests) as counts:
            while engine.busy:
                engine.step()
        widths.append([step.tokens for step in counts.steps])
        texts += [request.output for request in requests]
    return widths, texts


mine, theirs = story(partial(FunctionSlots, MINE)), story(SharedSlots)
print("the same tokens in every step:", mine[0] == theirs[0])
print("the same texts:", mine[1] == theirs[1])

# %% [markdown]
# ## What a shared prefix tells
#
# Sharing changes no token, but it changes the *time*, and anyone can measure that. You saw by how much: an outsider who
# sends a guess and gets the first token many times sooner than usual knows that somebody has sent a text with this
# beginning before, and can go on guessing block by block. Published work has found such caches, shared between all
# users, at several large services. The remedy is to share only among those who may know of each other: begin the chain
# with the user's or the organisation's name (a *salt*) in place of `None`. A second way in is the hash: an engine that
# compares hashes alone can be made to give one user the K and V of another, if two texts with one hash can be
# constructed. That is why the check gave you tokens with equal hashes.

# %% [markdown]
# ## Explain
#
# Write it between the quotes: *a block that was computed for another user's request is used for yours, and not one
# token of your answer changes. Why is that so? Name everything on which the K and V in a block depend. And name
# something that could be added to a model or an engine that would make it untrue.*

# %%
lab.answer("10.why", """ """)

# %% [markdown]
# <!-- BEGIN SOLUTION -->
# <details><summary>A good answer</summary>
#
# K and V of a token are a function of the weights, the token, its position and the tokens before it: attention is
# causal, so nothing later enters, and no random number does. Equal beginnings have equal positions too, because every
# text counts from 0. So the other request has computed exactly what mine would have computed; the sampling, which is
# mine alone, reads only logits and my own draws. (In float64 this holds to the last digit that matters. In bfloat16
# the shape of the step may change the rounding, with or without sharing.) It becomes untrue as soon as anything else
# enters: an adapter (LoRA) that differs by user, an image behind equal placeholder tokens, attention that looks ahead
# within the prompt, positions that do not begin at 0, K and V stored in another precision. Each of these must then
# be a part of the key.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# ## Break it
#
# Three named bugs, in the place of your own functions; the rest stays right. Choose one. Its own function will be told
# to be wrong. But which others, though nothing is wrong in them, cannot hold before it is mended? The report marks them
# *wait*. Guess how many functions wait; then run it.

# %%
mended = {"block_keys": block_keys, "give_back": give_back, "publish": publish}


def own_tokens_only(tokens, size):
    return [keys[-1] for keys in mended["block_keys"](tokens, size)]  # the bug: what came before is left out


def head_first(memory, table):
    mended["give_back"](memory, table[::-1])  # the bug: the beginning is taken before the end


def too_early(memory, table, tokens, computed):
    mended["publish"](memory, table, tokens, len(tokens))  # the bug: also what is not computed yet


BUGS = {own_tokens_only: "block_keys", head_first: "give_back", too_early: "publish"}
BUG = own_tokens_only  # or head_first, or too_early

# %%
lab.predict("10.followers", None)  # how many of the six other functions wait

# %%
try:
    globals()[BUGS[BUG]] = BUG
    report = run_checks("10", from_namespace(globals()))
finally:
    globals().update(mended)
print(report.text())
lab.reveal("10.followers", len({finding.prop.function for finding in report.findings if finding.waits}))

# %% [markdown]
# `head_first` is the quiet one: every text stays right, only the hit rate falls. No comparison with the naive stage can
# find it. It takes a property that says what the *order* must be.
#
# ## Recap
#
# - K and V of a block depend on its own tokens and all tokens before it. Its key is the chain of both, and is compared
#   whole. Own tokens alone, or a hash alone, give one text the memory of another.
# - A block is free when its count of owners is 0, and can be found until it is taken for something else. What nobody
#   needs is the cache.
# - It can be found only once it is computed. At least one token is always computed, or there would be no logits. Of a
#   text the end is taken before the beginning.
# - Samples share until they differ: n samples copy at most n - 1 half blocks, and none at all if the prompt fills its
#   last block.
# - What is saved can be said beforehand, to the token. The time saved is a message to whoever measures it.
#
# This is the last lesson that changes what is computed. What follows is how fast: kernels.
#
# ## Exercises
#
# 1. Give the chain a salt: two users with the same system prompt must not find each other's blocks. Which of the seven
#    functions changes? (difficulty 1/5, importance 4/5, 10 minutes)
# 2. Plot the hit rate of the chat against the block size, 1 to 128. What else changes with it? (difficulty 2/5,
#    importance 3/5, 20 minutes)
# 3. Ten users talk by turns, each with a system prompt of their own, and the pool is too small for all. Plot the hit
#    rate against the number of blocks, with `give_back` as it is and with `head_first`. (difficulty 3/5, importance
#    4/5, 40 minutes)
# 4. In a real chat the answer comes back as *text*. Decode the answers of the chat above, encode them again, and
#    count how many are the same tokens. What happens to the hit rate where they are not? (difficulty 2/5, importance
#    5/5, 20 minutes)
# 5. Free blocks without an entry should be taken before those that can be found. Change `give_back` so, as
#    [`minillm/slots.py`](../minillm/slots.py) does; which property of the check must change with it? (difficulty 2/5,
#    importance 3/5, 15 minutes)
# 6. Two equal prompts of 1,000 tokens come in the same step, and both are computed. Let the second wait for the first.
#    What if the first is aborted half way? (difficulty 4/5, importance 3/5, 45 minutes)
#
# ## References
#
# - Kwon et al. 2023, [*PagedAttention*](https://arxiv.org/abs/2309.06180): for copy on write, and for what sharing
#   saves in parallel sampling, 6.1 to 9.8 % of the memory (Alpaca) and 16.2 to 30.5 % (ShareGPT): their prompts are
#   short.
# - Zheng et al. 2024, [*SGLang*](https://arxiv.org/abs/2312.07104): for the tree of prefixes (RadixAttention), and for
#   a scheduler that serves first who finds most.
# - vLLM, [*Automatic prefix caching*](https://docs.vllm.ai/en/latest/design/prefix_caching/): for the design you have
#   built, with a hash in place of the whole key, and a salt.
# - vLLM, [pull request 12621](https://github.com/vllm-project/vllm/pull/12621): for a hash that became predictable, and
#   what could be done with it.
# - Gu et al. 2025, [*Auditing prompt caching in language model APIs*](https://arxiv.org/abs/2502.07776): for how to
#   tell from the time alone that a cache is shared, and where it was found.
