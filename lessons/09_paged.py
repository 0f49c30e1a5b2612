# %% [markdown]
# # 09 · Paged KV memory
#
# Memory in small blocks, handed out as a text grows: several times as many texts fit, and now and then one gives way.
#
# [![Open this lesson in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minillm/minillm/blob/v0.1.0/lessons/09_paged.ipynb)
#
# **Objectives.** After this lesson you can
#
# - *explain* what a region for the longest text wastes, and *predict* the waste of blocks from their size;
# - *write* the arithmetic of a block table, and *say* exactly which tokens a length counts;
# - *write* a scheduler that runs out of memory in the middle of a text, and loses nothing;
# - *prove* that no block is ever lost or held twice, and that every text is the one it would be alone;
# - *weigh* more texts at once against tokens that have to be computed again.
#
# **Prerequisites:** lesson 07 (slots: where K and V lie) and lesson 08 (a request is two counters; `schedule`, the
# loop). **Minutes:** about 130, of which the machine needs about 5. **Hardware:** two CPU cores are enough.
#
# **The one change:** who says which slots a text may use. Lesson 08 gave every running request one long region; now
# it gets a small block whenever it has filled the last one. In the package that is `BlockSlots` in the place of
# `RegionSlots`, both in [`minillm/slots.py`](../minillm/slots.py), and the stage is
# [`minillm/stages/paged.py`](../minillm/stages/paged.py). Not one line of attention changes.

# %% tags=["setup"]
from collections import deque
from statistics import median

from matplotlib.figure import Figure

from minillm import lab
from minillm.batch import pack
from minillm.bench import fragmentation, harness, queueing
from minillm.bench.prompts import load
from minillm.bench.verify import Verifier, judge
from minillm.cache import KVPool
from minillm.config import Config
from minillm.fetch import find
from minillm.kernels.gather import GatherAttend
from minillm.lab.checking import run_checks
from minillm.lab.work import from_namespace
from minillm.model import Llama
from minillm.packing import pack_weights
from minillm.params import SamplingParams
from minillm.request import Arrivals, Request, make_request
from minillm.sampling import sample
from minillm.scheduler import Scheduler
from minillm.simulation.workload import ARTICLE_MIX, at_once
from minillm.slots import BlockSlots, RegionSlots
from minillm.tokenizer import Tokenizer

# %%
lab.start("09")
folder = find("smollm2-135m-instruct")
config = Config.from_folder(folder)

# %% [markdown]
# ## The idea
#
# ### What a region wastes
#
# Nobody knows how long a text will be. So lesson 08 gave each running request a region as long as the longest text
# that may come. If that is 1,232 positions, and a text ends after 60, then 1,172 slots were kept for nobody. At
# 23,040 bytes for each position of SmolLM2-135M that is 27 MB. And while the text is young, even the slots that it
# will use are empty.
#
# One region of just the right length for each text does not help: nobody knows that length, and regions of many
# lengths leave holes between them. When a text of 7 tokens leaves a hole of 7 slots, a text of 9 cannot use it,
# although 7 slots are free here and 20 more elsewhere. (That is *external* fragmentation; slots that are held and
# empty are *internal* fragmentation.)
#
# ### Blocks
#
# An operating system had the same problem sixty years ago, and solved it with pages. Cut the memory into **blocks** of
# a few slots. A text takes one, and when it is full, another one, wherever that lies. Its **block table** lists them
# in order. Our example, with blocks of 4 and the block table `[5, 2]`:
#
# ```
# position            0      1    2    3       4     5    6    7
# token             <bos>    I    am  sure    this  pro  ject  .       . = reserved, not used yet
# block of the text   0      0    0    0       1     1    1    1       position // 4
# place in the block  0      1    2    3       0     1    2    3       position %  4
# block of the memory 5      5    5    5       2     2    2    2       table[position // 4]
# slot               20     21   22   23       8     9   10   11       table[position // 4] * 4 + position % 4
# ```
#
# $$\text{slot}(p) = \text{table}[\lfloor p / s \rfloor] \cdot s + (p \bmod s), \qquad s = \text{slots in a block}.$$
#
# Any free block is as good as any other, so no hole is useless. And what is wasted is at most the rest of *one* block
# for each text. Here it is one slot, number 11, and `will` is about to fill it.
#
# Attention notices nothing. Since lesson 07 it has read K and V by a list of slots, in any order: "where position p of
# text i lies, `slot_of[i][p]` says, and nothing else does". Only who makes this list changes.
#
# ### What a length counts
#
# The whole lesson depends on one number. `kv_len` is the number of positions whose K and V have a place when the next
# step has run, $\text{computed} + n$ if the step gives the request $n$ tokens:
#
# | the example, budget 4 | tokens | computed | n | kv_len | blocks of 4 |
# |---|--:|--:|--:|--:|--:|
# | first piece of the prompt | 7 | 0 | 4 | 4 | 1 |
# | second piece; then `will` is sampled | 7 | 4 | 3 | 7 | 2 |
# | `will` goes through the model; the next is sampled | 8 | 7 | 1 | 8 | 2 |
# | the next goes through | 9 | 8 | 1 | 9 | 3 |
#
# A token that was just sampled is in `tokens`, and has no K and V yet: it gets them in the next step.
#
# ### What blocks cost
#
# More texts are let in than could all grow to their full length. That is the point of it, and it goes well most of the
# time, since most texts end early. But one day a running text needs a block, and none is free. Then somebody must
# **give way**: its blocks go back, and it waits until there is room again.
#
# What is lost? Only K and V, and they can be computed again from the tokens. In the two counters of lesson 08 a
# preempted request is `computed = 0` with all its tokens kept. When it comes back, prompt and output together are
# pending, like a long prompt; when none is left, the next token is sampled, and the text goes on where it stopped.
# (This is *recomputation*. The other way is *swapping*: K and V are copied to slower memory and back.)
#
# Who gives way? **The newest.** Then the oldest never loses its memory, so it ends; then the next one is the oldest.
# If the oldest gave way, two texts could take each other's memory for ever, and neither would end.

# %% [markdown]
# ## Predict
#
# The example writes 6 new tokens (`max_tokens` = 6) after its 7. How many blocks of 4 does it hold in its last step?

# %%
lab.predict("09.last_blocks", None)

# %% [markdown]
# Now many texts: 600 requests, all there at the start. The outputs are the mix of lesson 08 (85 % of 40 to 200 tokens,
# 15 % of 400 to 1,000), the prompts 16 to 256 tokens. The memory is as large as 8 regions of the longest of them, 1,232
# positions. *Waste* is what running texts hold and do not use, in percent of what they hold, over the whole run. How
# much is it with regions? With blocks of 16? With blocks of 13, which do not divide the memory: 9,856 slots are 758
# blocks, and 2 slots that nobody gets?
#
# A help: take a look at a running text at any moment. It has about 370 positions on average, more than the mean length
# of all texts, for long ones run longer.

# %%
lab.predict("09.waste_regions", None)  # percent

# %%
lab.predict("09.waste_16", None)  # percent

# %%
lab.predict("09.waste_13", None)  # percent

# %% [markdown]
# The regions hold 8 texts at once. How many run at once, on average, in blocks of 16 in the same memory, if at most 32
# may?

# %%
lab.predict("09.at_once", None)

# %% [markdown]
# ## Build
#
# ### 1. Positions and blocks
#
# Two lines of arithmetic, on which all else stands. Be careful at the border of a block.


# %% task="09.blocks_needed"
def blocks_needed(kv_len: int, size: int) -> int:
    """How many blocks of `size` slots hold the K and V of kv_len positions, 0 .. kv_len - 1."""
    ### BEGIN SOLUTION
    return -(-kv_len // size)
    ### END SOLUTION


# %% task="09.slots_of"
def slots_of(table: list[int], start: int, stop: int, size: int) -> list[int]:
    """The slots of positions start .. stop - 1 of a text, in order.

    `table` is the text's block table; block b of the memory is the slots b * size .. (b + 1) * size - 1.
    """
    ### BEGIN SOLUTION
    return [table[p // size] * size + p % size for p in range(start, stop)]
    ### END SOLUTION


# %%
lab.check("09", "blocks_needed", "slots_of")

# %% [markdown]
# <details><summary>Hint 1</summary>7 positions, blocks of 4: 7 / 4 is 1.75, and a block that is begun is taken whole.
# What about 8?</details>
# <details><summary>Hint 2</summary>Python's <code>//</code> rounds down. Rounding down the negative rounds up; or add
# <code>size - 1</code> first.</details>
# <details><summary>Hint 3</summary>For slots_of: one position after the other, by the formula above. Dividing tells
# which block of the text, the remainder tells the place in it.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: blocks_needed, slots_of</summary>
#
# `-(-kv_len // size)` rounds up. The common wrong answer is `kv_len // size + 1`, which is right for 7 and 9 and takes
# a block too many for 8: at every border a text holds a whole empty block, and with blocks of 1 twice what it needs.
# In `slots_of` the common wrong answer swaps the two: `table[p % size]` walks through the table as if neighbours lay
# in different blocks. With a prompt of one block all positions but the first are wrong, and the model reads what
# nobody wrote.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# ### 2. Take and give back
#
# `free` is the list of blocks that nobody holds, in any order. The same two lists are changed in place, since others
# look at them too: a block leaves `free` when it comes into a table, and the reverse. It is never in both, and never
# in none. `reserve` is all or nothing: if there are too few, it answers `False` and has changed nothing. By hand:
#
# ```
# table = [], free = [3, 0, 2, 5]
# reserve(table, 7, free, 4)  ->  True     two blocks, for example table = [5, 2], free = [3, 0]
# reserve(table, 8, free, 4)  ->  True     nothing new
# reserve(table, 9, free, 4)  ->  True     one more: table = [5, 2, 0], free = [3]
# reserve(table, 17, free, 4) ->  False    two more are needed and one is free: nothing has changed
# release(table, free)                     table = [], free holds all four again
# ```


# %% task="09.reserve"
def reserve(table: list[int], kv_len: int, free: list[int], size: int) -> bool:
    """Gives a text the blocks that it lacks, until kv_len positions have a place: from `free` to the end of `table`.

    Returns True; or False if there are too few, and then nothing has changed. What is in the table stays.
    """
    ### BEGIN SOLUTION
    new = blocks_needed(kv_len, size) - len(table)
    if new > len(free):
        return False
    for _ in range(new):
        table.append(free.pop())
    return True
    ### END SOLUTION


# %% task="09.release"
def release(table: list[int], free: list[int]) -> None:
    """Gives all blocks of a text back. Its table is empty then, so that releasing twice changes nothing."""
    ### BEGIN SOLUTION
    free.extend(table)
    table.clear()
    ### END SOLUTION


# %%
lab.check("09", "reserve", "release")

# %% [markdown]
# <details><summary>Hint 1</summary>How many does the text lack? Often none, and often just one.</details>
# <details><summary>Hint 2</summary>Compare that number with <code>len(free)</code> before you take the first
# one.</details>
# <details><summary>Hint 3</summary><code>free.pop()</code> gives a block and removes it from the list. In release, put
# all into <code>free</code> first, then empty the table with <code>table.clear()</code>; <code>table = []</code> would
# only give the name another list, and the caller's stays full.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: reserve, release</summary>
#
# Count, compare, take. The common wrong answer takes one block after the other and answers `False` when none is left:
# then the text holds a part of what it asked for, asks again in the next step, and the books are wrong in between. In
# `release` it leaves the table full: the blocks are free *and* held. Two texts get the same block sooner or later and
# write into each other's K and V. That is the worst fault of all, for nothing fails: both texts just go astray.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# ### 3. Who may enter
#
# A newcomer computes its prompt in pieces, as the budget allows, and each piece takes only the blocks that it needs. So
# the first piece may fit where the whole prompt does not. Take two prompts of 12 tokens, 5 blocks of 4 in all, and a
# budget of 4. **A** has computed its prompt and holds 3 blocks; its next token takes a fourth, and 1 is free. If **B**
# is let in because its first piece of 3 tokens fits, it needs a second block in the next step, and finds none. It is
# the newest: it gives way, and its work was for nothing. Then its first piece fits again. Real engines had this loop,
# and some never left it.
#
# So: a newcomer may enter if *all of its tokens* have room. What it will yet write does not count: that is the gamble.
# `request.tokens` are prompt and output so far, `request.prompt` the prompt alone.
#
# (Must it leave something for those who run? In this scheduler they have theirs by then: a newcomer is asked only when
# budget is left, so everybody who runs has been given all of its pending tokens, and their places. Exercise 5 changes
# that.)


# %% task="09.may_enter"
def may_enter(request: Request, free: list[int], size: int) -> bool:
    """Whether a newcomer, which holds no block yet, may join: all of its tokens have room. Only answers."""
    ### BEGIN SOLUTION
    return blocks_needed(len(request.tokens), size) <= len(free)
    ### END SOLUTION


# %%
lab.check("09", "may_enter")

# %% [markdown]
# <details><summary>Hint 1</summary>In the example B needs 3 blocks, and 1 is free: no. With how many free would it be
# yes?</details>
# <details><summary>Hint 2</summary>Compare blocks with blocks. You have a function that turns one into the
# other.</details>
# <details><summary>Hint 3</summary>A newcomer may have been here before. Then it brings its output along: count
# <code>tokens</code>, not <code>prompt</code>.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: may_enter</summary>
#
# One comparison. The common wrong answer asks for the prompt only. It lets a request come back that was sent away with
# a long output, finds no room for it, and sends it away again. Another one says no when the tokens fill the memory to
# the last block: then a text that needs all of it waits for ever, though it would have been alone.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# ### 4. Who gives way
#
# `running` is in the order of arrival, the oldest first, and so is `waiting`, of whom the left one is next. Everybody
# in `waiting` came after everybody in `running`; your function must keep it so.
#
# Where a request keeps its things: `request.blocks` is its block table, `request.computed` the counter; you may use
# both, and `request.pending`.


# %% task="09.preempt"
def preempt(running: list, waiting: deque, free: list[int]) -> Request:
    """The newest running request gives up its memory, and is first in line again. Returns it.

    Its blocks are free, nothing of it is computed, and its tokens stay.
    """
    ### BEGIN SOLUTION
    request = running.pop()
    release(request.blocks, free)
    request.computed = 0
    waiting.appendleft(request)
    return request
    ### END SOLUTION


# %%
lab.check("09", "preempt")

# %% [markdown]
# <details><summary>Hint 1</summary>Four things happen: it leaves one list, joins another, frees its blocks, and one of
# its two counters changes.</details>
# <details><summary>Hint 2</summary>Which counter says how much of it is stored? The other one is the length of what a
# reader has been shown already.</details>
# <details><summary>Hint 3</summary>The newest is the last of <code>running</code>, and older than all who wait: it goes
# to the left end, with <code>appendleft</code>.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: preempt</summary>
#
# The common wrong answer sets the tokens back to the prompt, "to begin again". The text is then sampled a second time,
# and its reader gets the beginning twice. Another one appends at the right end of `waiting`: then it waits behind
# everybody who came later, and under load it may never come back. And `running.pop(0)` sends the oldest away, the only
# one of whom it is certain that it will end.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# ### 5. The scheduler, with memory in it
#
# Lesson 08's `schedule`, with two more questions. Whoever runs must **reserve** its places before it goes into the
# plan, and if there are none, the newest gives way, and again, until there are. A newcomer must be **allowed to
# enter**; if the first in line is not, nobody behind it passes.
#
# Three cases to think of first:
#
# - Whoever gives way has not had its turn yet. Then its turn is skipped.
# - It is the very one that asks for a block. That is fine: it is the newest, and waits.
# - It stands in the plan already. Then it must not be run, and what it had been given goes back to the budget. (In
#   your loop only a newer single can be planned before an older prompt. With a plain queue that never happens, since
#   the older prompt gets the budget first; urgent requests in the package make it possible, and the check tries it.)
#
# By hand, three blocks of 4, a budget of 8. **A** has 12 tokens, 4 of them computed, in block 0. **B**, newer, has 5
# tokens, 4 computed, in block 1. Block 2 is free. B needs one token: it gets block 2, and 7 tokens are left. A could
# compute 7 of its 8, and needs two more blocks. B gives way, and 8 are left again. The plan is `[(A, 8)]`.


# %% task="09.schedule"
def schedule(running: list, waiting: deque, budget: int, max_running: int, free: list[int], size: int) -> list:
    """Who computes how many tokens in the next step: [(request, n)], all with their places reserved, no n of 0.

    1. every running request with 1 pending token gets it, in the order of `running`;
    2. then running requests with more pending, in the order of `running`, as much as is left of the budget;
       in 1 and 2 the newest running gives way (`preempt`) as often as `reserve` says no;
    3. then waiting ones join, first come, first served, while less than `max_running` run, budget is left, and the
       first in line may enter.

    Changes `running`, `waiting`, `free` and the block tables. budget >= max_running.
    """
    ### BEGIN SOLUTION
    plan = {}
    left = budget
    for request in sorted(running, key=lambda r: r.pending > 1):  # a new list: `preempt` changes the old one
        while request in running and (n := min(request.pending, left)):
            if reserve(request.blocks, request.computed + n, free, size):
                plan[request] = n
                left -= n
                break
            left += plan.pop(preempt(running, waiting, free), 0)  # it may stand in the plan already
    while waiting and left and len(running) < max_running and may_enter(waiting[0], free, size):
        request = waiting.popleft()
        n = min(request.pending, left)
        reserve(request.blocks, n, free, size)
        running.append(request)
        plan[request] = n
        left -= n
    return list(plan.items())
    ### END SOLUTION


# %%
lab.check("09", "schedule")

# %% [markdown]
# <details><summary>Hint 1</summary>Begin with your <code>schedule</code> of lesson 08, and keep the plan as a
# dictionary {request: n} until the end: entries can be taken out of it.</details>
# <details><summary>Hint 2</summary>For each who runs: as long as <code>reserve</code> says no, call
# <code>preempt</code>; take whoever it returns out of the plan, and add what it had been given to what is left; then
# ask for n anew: min(pending, left) has grown. Stop when the request itself is no longer in
# <code>running</code>.</details>
# <details><summary>Hint 3</summary><code>plan.pop(request, 0)</code> removes an entry and gives its n, or 0 if there is
# none. Go through a copy of <code>running</code>, for <code>preempt</code> makes the list shorter, and skip those who
# have left. A newcomer's <code>kv_len</code> is n: nothing of it is computed.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: schedule</summary>
#
# The `while` of each running request ends in one of three ways: places are reserved, nothing is left of the budget, or
# it has been sent away itself. It must end: each round of it makes `running` shorter, and when a request is alone it
# has the whole memory. (One that needs more than the whole memory must be refused at the door, before it ever waits;
# the engine's `submit` does that.) The common wrong answer leaves whoever gave way in the plan. Its `blocks` are empty
# and its `computed` is 0, so the step would write its token's K and V to nowhere, or into somebody's block. The next
# one forgets to give its tokens back to the budget: nothing breaks, and a little of every such step is wasted.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# ### Who owns which block
#
# Five blocks of 4, and twice our example: **A** and **B** have 7 tokens each and write 6. Your functions say who holds
# what; no model is needed for that. Before you look: B has to give way. How many tokens does it compute in the step in
# which it is back?
#
# (This cell, `Your own, on the real model` and `Break it` need your functions; all others run without them.)

# %%
lab.predict("09.again", None)


# %%
def play(n_blocks, size, prompts, outputs):
    """Your scheduler without a model. Returns a list of steps: the plan in words, and {block: (letter, slots used)}."""
    letters = "ABCDEFGHIJ"
    on, queue, pile, steps = [], deque(), list(range(n_blocks))[::-1], []
    names = {
        make_request([5] * n, SamplingParams(max_tokens=most, seed=0, ignore_eos=True), config, None, 64): letter
        for letter, n, most in zip(letters, prompts, outputs, strict=False)
    }
    queue.extend(names)
    while (on or queue) and len(steps) < 40:
        plan = schedule(on, queue, 64, 8, pile, size)
        for request, n in plan:
            request.computed += n
        owned = {
            block: (names[request], min(size, request.computed - i * size))
            for request in on
            for i, block in enumerate(request.blocks)
        }
        steps.append(({names[request]: n for request, n in plan}, owned))
        for request, _ in plan:
            if request.pending == 0:
                request.accept(9)
                if request.finish_reason is not None:
                    on.remove(request)
                    release(request.blocks, pile)
    return steps


steps = play(5, 4, prompts=(7, 7), outputs=(6, 6))
for k, (plan, _) in enumerate(steps, 1):
    print(f"step {k:2}: " + ", ".join(f"{name} computes {n}" for name, n in plan.items()))
lab.reveal("09.again", max(plan.get("B", 0) for plan, _ in steps[1:]))
lab.reveal("09.last_blocks", sum(name == "A" for name, _ in [o for p, o in steps if "A" in p][-1].values()))

# %%
SHADES = {"A": ("0.8", ""), "B": ("white", "///")}


def draw_blocks(steps, n_blocks):
    """A row for each block, a column for each step: whose it is, and how many of its slots are used."""
    figure = Figure(figsize=(1.6 + 0.62 * len(steps), 1.3 + 0.5 * n_blocks), layout="constrained")
    axes = figure.subplots()
    for k, (_, owned) in enumerate(steps, 1):
        for block in range(n_blocks):
            name, used = owned.get(block, ("", 0))
            shade, hatch = SHADES.get(name, ("white", ""))
            axes.bar(k, 0.9, 0.9, bottom=block - 0.45, color=shade, hatch=hatch, edgecolor="0.55", linewidth=0.8)
            if name:
                box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
                axes.text(k, block, f"{name} {used}", ha="center", va="center", fontsize=9, bbox=box)
    axes.set_xticks(range(1, len(steps) + 1))
    axes.set_yticks(range(n_blocks), [f"block {b}" for b in range(n_blocks)])
    axes.invert_yaxis()
    axes.set_xlabel("step")
    axes.set_title("Who holds which block, and how many of its 4 slots are used", loc="left", fontsize=10)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure


def holds(name, steps):
    """How many blocks it holds in each step."""
    return [sum(owner == name for owner, _ in owned.values()) for _, owned in steps]


away = [k for k, n in enumerate(holds("B", steps), 1) if n == 0]
of_a, of_b = (", ".join(map(str, holds(name, steps))) for name in "AB")
lab.show(
    draw_blocks(steps, 5),
    f"A grid of 5 blocks by {len(steps)} steps. Blocks held by A, step by step: {of_a}. By B: {of_b}. B holds nothing "
    f"in the steps {', '.join(map(str, away))}: it gave way when both needed a third block and one was left.",
)
for block in range(5):
    print(f"block {block}: " + " ".join("{}{}".format(*owned.get(block, (".", " "))) for _, owned in steps))

# %% [markdown]
# A and B each fill their second block to the end, and each needs a third at once. A is older and gets the last one. B
# gives up 8 positions that are computed, and keeps its 9 tokens: the 7 of its prompt and 2 that its reader has seen.
# It cannot come back at once, since it needs 3 blocks and 2 are free.

# %% [markdown]
# ## Measure: waste, counted
#
# The 600 requests of your prediction, in the same memory, through the package's scheduler and slots without a model:
# so the numbers are the same on every machine. `fragmentation.count` adds up, step by step, what running texts hold and
# what they use.
#
# The prediction beside it needs no run at all. Where in its last block a text stands is a matter of chance, so of $s$
# slots $(s - 1) / 2$ are empty on average. With $\bar n$ positions in use,
#
# $$\text{waste} = \frac{(s - 1) / 2}{\bar n + (s - 1) / 2} \quad \text{for blocks}, \qquad
#   \text{waste} = 1 - \frac{\bar n}{\text{longest}} \quad \text{for regions},$$
#
# where $\bar n$ is the mean over all steps of all texts: one with a prompt of $P$ and an output of $K$ tokens counts
# for $K$ steps, with $P + (K - 1) / 2$ positions on average.

# %%
few_regions, most_texts = 8, 32
demands = fragmentation.Plan().demands(lab.size(ci=60, default=600, long=2000))
longest = fragmentation.longest_of(demands)
memory = few_regions * longest  # slots
in_use = sum(d.output * (d.prompt + (d.output - 1) / 2) for d in demands) / sum(d.output for d in demands)
BLOCKS = (1, 4, 13, 16, 64)
counted = {"regions": fragmentation.count(demands, RegionSlots(few_regions, longest), None)}
for s in BLOCKS:
    counted[s] = fragmentation.count(demands, BlockSlots(most_texts, longest, memory // s * s, s), s)
said = {"regions": 1 - in_use / longest} | {s: (s - 1) / 2 / (in_use + (s - 1) / 2) for s in BLOCKS}
print(f"{len(demands)} requests, the longest {longest:,} positions; {in_use:.0f} in use on average, {memory:,} slots")
print(f"{'':13}{'waste':^19}{'running':>10}{'steps':>8}{'gave way':>10}{'computed again':>16}")
print(f"{'':13}{'predicted':>10}{'counted':>9}")
for name, c in counted.items():
    print(
        f"{c.memory:13}{said[name]:>9.2%}{c.waste:>9.2%}{c.running:>11.1f}{c.steps:>8,}{c.preemptions:>10,}"
        f"{c.recomputed:>9,} tokens"
    )
lab.reveal("09.waste_regions", round(100 * counted["regions"].waste, 1))
lab.reveal("09.waste_16", round(100 * counted[16].waste, 1))
lab.reveal("09.waste_13", round(100 * counted[13].waste, 1))
lab.reveal("09.at_once", round(counted[16].running, 1))

# %% [markdown]
# Blocks of 13 waste what the formula says, like all others: a block need not divide anything. What is left over at the
# end of the memory is less than one block, for all texts together; no text holds it, so it is not in the waste. (Sizes
# like 16 are for the hardware, which likes to read neighbours together.) Nor is the smallest the best one: blocks of 1
# waste nothing, but every slot is looked up on its own, and the tables are 16 times as long.
#
# Over time it looks like this, for the first of these requests. The grey area is used; the line is what running texts
# hold; what lies between is waste. Above the line is memory that nobody holds.


# %%
def over_time(slots, demands):
    """For each step: slots that running texts hold, and slots that they use."""
    scheduler = Scheduler(slots, len(slots.free_rows), 256)
    for d in demands:
        params = SamplingParams(max_tokens=d.output, seed=0, ignore_eos=True)
        scheduler.waiting.add(make_request([5] * d.prompt, params, config, None, slots.capacity))
    held, used = [], []
    while scheduler.busy:
        plan = scheduler.schedule()
        held.append(fragmentation.held_by(scheduler.running, slots))
        used.append(sum(r.computed for r in scheduler.running) + sum(n for _, n in plan))
        scheduler.update(plan, {r: (9, None) for r, n in plan if n == r.pending})
    return held, used


first = demands[: lab.size(ci=60, default=150, long=150)]
curves = {
    "8 regions": over_time(RegionSlots(few_regions, longest), first),
    "blocks of 16": over_time(BlockSlots(most_texts, longest, memory // 16 * 16, 16), first),
}
figure = Figure(figsize=(9.5, 3.4), layout="constrained")
told = []
for axes, (name, (held, used)) in zip(figure.subplots(1, 2, sharex=True, sharey=True), curves.items(), strict=True):
    at = range(1, len(held) + 1)
    axes.fill_between(at, used, held, facecolor="white", hatch="///", edgecolor="0.6", label="held, not used")
    axes.fill_between(at, used, color="0.7", label="used")
    axes.plot(at, held, color="black", linewidth=1.3, label="held")
    axes.axhline(memory, color="black", linestyle=":", linewidth=1)
    waste = 1 - sum(used) / sum(held)
    axes.set_title(f"{name}: {waste:.0%} waste, {len(held):,} steps", loc="left", fontsize=10)
    axes.set_xlabel("step")
    axes.spines[["top", "right"]].set_visible(False)
    told.append(f"{name}: {len(held):,} steps, at most {max(held):,} held and {max(used):,} used, {waste:.0%} waste")
figure.axes[0].set_ylabel("slots")
figure.axes[0].yaxis.set_major_formatter("{x:,.0f}")
figure.axes[0].annotate("the memory", (1, memory), (0, 3), textcoords="offset points", fontsize=8)
figure.axes[0].set_ylim(0, 1.12 * memory)
figure.axes[1].legend(frameon=False, fontsize=9, loc="upper right", bbox_to_anchor=(1, 0.93))
lab.show(
    figure,
    f"KV memory of {memory:,} slots over the steps of {len(first)} requests, two panels. {'; '.join(told)}. With "
    "regions the line of what is held is far above the area of what is used; with blocks the two lie on each other.",
)

# %% [markdown]
# Now the price. In the table above, thousands of tokens were computed again. How many depends on how many texts may run
# at once: the more, the less room each has to grow.

# %%
needed = sum(d.prompt + d.output - 1 for d in demands)
print("at most   running    steps   gave way   computed for each token needed")
for most in lab.size(ci=(8, 32), default=(8, 16, 24, 32, 48, 64), long=(8, 16, 24, 32, 48, 64)):
    c = fragmentation.count(demands, BlockSlots(most, longest, memory // 16 * 16, 16), 16)
    print(f"{most:7}{c.running:10.1f}{c.steps:9,}{c.preemptions:11,}{1 + c.recomputed / needed:19.3f}")

# %% [markdown]
# From some number on the memory is full, and no more texts run, however many may: they push each other out, and only
# the work that is done twice still grows. A good limit lies where the memory just begins to be full.

# %% [markdown]
# ## Measure: the real model
#
# The real engine of lesson 08 again: the same mix, shortened, prompts of 7 tokens, all there at the start. First
# `continuous` with 8 regions, then `paged` with blocks of 16 in the same memory, with at most 32 texts at once. How
# many times fewer steps does paged take? And how many times less time? (A step with 30 texts in it takes longer than
# one with 8. How much longer?)

# %%
lab.predict("09.steps_ratio", None)  # steps of continuous over steps of paged

# %%
lab.predict("09.seconds_ratio", None)

# %%
model = pack_weights(Llama.from_pretrained(folder))
tokenizer = Tokenizer.from_pretrained(folder)
ids = [token for prompt in load() for token in tokenizer.encode_chat(list(prompt.messages))]
MIX = ARTICLE_MIX.scaled(lab.size(ci=0.05, default=0.25, long=0.25))
jobs = queueing.jobs_of(at_once(lab.size(ci=12, default=96, long=200), MIX, prompt=7, seed=0), ids)
region = max(len(job.prompt) + job.max_tokens - 1 for job in jobs)  # positions of the longest
rooms = lab.size(ci=2, default=8, long=8)
LIMITS = {
    "continuous": {"max_running": rooms, "budget": 256},
    "paged": {"max_running": 4 * rooms, "budget": 256, "n_slots": rooms * region // 16 * 16, "block": 16},
}
real = {stage: [] for stage in LIMITS}
for i in range(lab.size(ci=1, default=3, long=5)):  # rounds are interleaved, and each begins with another stage
    for stage in list(LIMITS)[:: -1 if i % 2 else 1]:
        real[stage].append(harness.run(model, stage, jobs, LIMITS[stage]))

print(f"{len(jobs)} requests, {sum(job.max_tokens for job in jobs):,} output tokens, the longest {region} positions")
print(f"{'':12}{'K and V':>9}{'steps':>8}{'texts in a step':>17}{'gave way':>10}{'computed/needed':>17}   seconds")
for stage, done in real.items():
    one, seconds = done[0], sorted(each.summary.wall for each in done)
    texts = sum(len(step.new) for step in one.counts.steps) / len(one.counts.steps)
    print(
        f"{stage:12}{one.counts.peak_reserved_bytes / 1e6:6.1f} MB{len(one.counts.steps):8,}{texts:17.1f}"
        f"{one.preemptions:10,}{one.tokens_pushed / one.tokens_useful:17.3f}   {seconds[0]:.2f} to {seconds[-1]:.2f}"
    )
walls = {stage: [each.summary.wall for each in done] for stage, done in real.items()}
faster = median(slow / fast for slow, fast in zip(walls["continuous"], walls["paged"], strict=True))
lab.reveal("09.steps_ratio", round(len(real["continuous"][0].counts.steps) / len(real["paged"][0].counts.steps), 2))
lab.reveal("09.seconds_ratio", round(faster, 2))
same_text = real["continuous"][0].outputs == real["paged"][0].outputs
print(f"Both made {'the same text' if same_text else 'texts that differ where two tokens are close within rounding'}.")

# %% [markdown]
# The steps say what the memory allows, exactly and on every machine; the seconds add what a step costs. While few texts
# run, a step reads all the weights for a handful of tokens, so more texts in it cost little. The more there are, the
# more each one costs, and the gain in time falls behind the gain in steps.
#
# ## Plot

# %%
figure = Figure(figsize=(9.5, 3.6), layout="constrained")
left, right = figure.subplots(1, 2)
names = ["regions", *BLOCKS]
for shift, values, shade, hatch, label in (
    (-0.2, said, "white", "///", "predicted"),
    (0.2, {name: c.waste for name, c in counted.items()}, "0.75", "", "counted"),
):
    at = [x + shift for x in range(len(names))]
    heights = [100 * values[name] for name in names]
    bars = left.bar(at, heights, 0.38, color=shade, hatch=hatch, edgecolor="black", label=label)
    left.bar_label(bars, fmt="{:.1f}", fontsize=7, padding=2)
left.set_xticks(range(len(names)), ["regions", *(f"{s}" for s in BLOCKS)])
left.set_xlabel("blocks of so many slots")
left.set_ylabel("waste, % of what is held")
left.set_title("Waste, predicted and counted", loc="left", fontsize=10)
left.legend(frameon=False, loc="upper right")
middle = {stage: median(values) for stage, values in walls.items()}
spread = [[middle[s] - min(walls[s]) for s in walls], [max(walls[s]) - middle[s] for s in walls]]
timed = right.bar(range(2), list(middle.values()), 0.5, yerr=spread, capsize=6, color="0.75", edgecolor="black")
right.bar_label(timed, fmt="%.2f s", fontsize=9, label_type="center")
counts = {stage: len(done[0].counts.steps) for stage, done in real.items()}
right.set_xticks(range(2), [f"{stage}\n{counts[stage]:,} steps" for stage in walls])
right.set_ylabel("seconds")
right.set_title("In the same memory: median, fastest, slowest", loc="left", fontsize=10)
for axes in (left, right):
    axes.spines[["top", "right"]].set_visible(False)
wasted = ", ".join(f"{name} {said[name]:.1%} and {counted[name].waste:.1%}" for name in names)
lab.show(
    figure,
    f"Two bar charts. Left, waste predicted and counted: {wasted}. Right, the real model in the same KV memory: "
    f"continuous {middle['continuous']:.2f} s in {counts['continuous']:,} steps, paged {middle['paged']:.2f} s in "
    f"{counts['paged']:,} steps, so paged is {faster:.2f} times as fast.",
)

# %% [markdown]
# ## Your own, on the real model
#
# Here is the loop of lesson 08 with blocks in the place of regions: the whole engine, out of your functions. The row
# of a request is its place among those that run; `entered = 0` has `pack` write that row of the slot table anew. The
# model, `pack` and the attention are as they were.


# %%
def run(model, requests, max_running: int = 8, budget: int = 256, n_slots: int = 0, block: int = 16):
    """Serves all requests and yields the events of every step."""
    requests = list(requests)
    arrivals = Arrivals(requests)
    pool = KVPool(model, n_slots, max_running, n_slots)
    running, waiting, spare = [], deque(), list(range(n_slots // block))
    while running or waiting or arrivals:
        waiting.extend(arrivals.take(len(requests), wait=not (running or waiting)))
        plan = schedule(running, waiting, budget, max_running, spare, block)
        for row, request in enumerate(running):
            request.row, request.entered = row, 0
        for request, n in plan:
            request.slots = slots_of(request.blocks, 0, request.computed + n, block)
        batch = pack(plan, pool)
        hidden = model(batch.tokens, batch.positions, GatherAttend(pool, batch))  # [T, d]
        tokens = [token for token, _ in sample(model.logits(hidden[batch.last]), batch.samples)]
        for request, n in plan:
            request.computed += n
        events = [request.accept(token) for request, token in zip(batch.samples, tokens, strict=True)]
        for request in [request for request in running if request.finish_reason is not None]:
            running.remove(request)
            release(request.blocks, spare)
        yield from events


short, cut = jobs[: lab.size(ci=4, default=12, long=12)], lab.size(ci=4, default=16, long=16)
longest_job = max(len(job.prompt) + job.max_tokens - 1 for job in short)
tight = {"max_running": 8, "budget": 64, "n_slots": -(-longest_job // cut) * cut, "block": cut}  # one text's worth
own = harness.run(model, "mine", short, tight, generate=run)
theirs = harness.run(model, "paged", short, tight)
naive = judge([own], Verifier(model)).check
print(f"{len(short)} texts in memory for one; {theirs.preemptions} times one gave way")
print("as many tokens in every step:", [s.tokens for s in own.counts.steps] == [s.tokens for s in theirs.counts.steps])
print("the same text as the package's:", own.outputs == theirs.outputs)
print(
    f"against the naive model, token by token: {naive.positions - naive.excused - naive.wrong} are its own choice, "
    f"{naive.excused} lie within rounding of it, {naive.wrong} are wrong"
)

# %% [markdown]
# This model computes in few bits, and in other company the sums run in another order: where two tokens are nearly
# equal, either may win. The check has done the same in float64, with NaN in every slot that nobody may read. There
# every single token is the naive model's.

# %% [markdown]
# ## Explain
#
# A small and well-made engine takes a new block before a step exactly if `len(tokens) % size == 1`, where `tokens` is
# the list with the newest sampled token in it. Eight people have reported this as an off-by-one fault: "at `len % size
# == 0` the block is full, so that is when a new one is needed." Write between the quotes: *are they right? Say what
# `len` counts at that moment, and try `size` = 4 with 8 and 9 tokens.*

# %%
lab.answer("09.why", """ """)

# %% [markdown]
# <!-- BEGIN SOLUTION -->
# <details><summary>A good answer</summary>
#
# They are not right. The newest token was appended when it was sampled, and has no K and V yet: the coming step
# computes them. So `len(tokens)` counts the positions that will have a place *after* this step; it is the `kv_len` of
# this lesson, `computed + 1`. With 8 tokens the step writes position 7, the last place of the second block, and no new
# block is needed. With 9 it writes position 8, the first place of the third: 9 % 4 = 1. Had `len` counted what is
# computed already, `% size == 0` would be right. Both rules exist in real engines, and both are right where their
# length counts what they think it does. (With `size` = 1 the rule of the question fails: `len % 1` is never 1.)
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# ## Break it
#
# Three named bugs, each in the place of one of your functions. `WRONG` in a report is where the fault is; `wait` says
# that a function would be right if another one were. Begin with `the_oldest_gives_way`, in the place of `preempt`.
# `schedule` calls it. How many properties of `schedule` turn to `wait`? (The report of your own `schedule`, above,
# lists them all.)

# %%
mended = {"blocks_needed": blocks_needed, "preempt": preempt, "may_enter": may_enter}


def one_more_at_the_border(kv_len, size):
    return kv_len // size + 1  # the bug: 8 positions in blocks of 4


def the_oldest_gives_way(running, waiting, free):
    running.reverse()  # the bug: the first is last
    request = mended["preempt"](running, waiting, free)
    running.reverse()
    return request


def one_block_is_enough(request, free, size):
    return len(free) > 0  # the bug: its first piece fits


BUG = the_oldest_gives_way  # or one_more_at_the_border, or one_block_is_enough

# %%
lab.predict("09.waits", None)  # how many properties of schedule

# %%
place = {"one_more_at_the_border": "blocks_needed", "the_oldest_gives_way": "preempt"}.get(BUG.__name__, "may_enter")
try:
    globals()[place] = BUG
    report = run_checks("09", from_namespace(globals()))
finally:
    globals().update(mended)
print(report.text())
of_schedule = [finding for finding in report.findings if finding.prop.function == "schedule"]
waits = sum(finding.waits for finding in of_schedule)
print(f"{BUG.__name__} in the place of {place}: {waits} of {len(of_schedule)} properties of schedule wait")
lab.reveal("09.waits", waits)

# %% [markdown]
# Look at what still holds with `the_oldest_gives_way`: many properties of `schedule` do not notice who gives way, and
# the one with a model is among them. The texts would all be right. Only that somebody might wait for ever is wrong, and
# no test of a text can find it. The other two bugs are not so quiet: try them, and predict anew.
#
# ## Recap
#
# - A region is sized for the longest text, and most texts are short and young: over half of it is waste. A text in
#   blocks of $s$ slots wastes $(s - 1) / 2$ of them on average, whatever its length.
# - The block table maps positions to slots: `//` gives the block, `%` the place. Attention reads by slots, as before.
# - Say what a length counts: `kv_len` is what has a place after the step, `computed + n`.
# - Nothing is kept for what a text may yet write. So it can find no block free; then the newest gives way. Its tokens
#   stay, `computed` is 0, and it is first in line.
# - A newcomer enters if all of its tokens have room. Otherwise it is let in and sent away, again and again.
# - More texts at once mean fewer steps; too many mean that work is done twice.
#
# In the package your functions are the methods of `BlockSlots` and of `Scheduler`. The stage differs from `continuous`
# in the one argument that chooses the slots. There whoever has the greatest turn gives way: first come, first served,
# that is the newest.
#
# What is still wasteful: many texts begin with the same tokens, and each keeps its own K and V of them. Lesson 10
# shares them.
#
# ## Exercises
#
# 1. Llama-2-7B needs 512 KiB for each position at 16 bits. Of a GPU with 80 GB, 14 GB hold the weights. How many texts
#    run at once with regions of 4,096 positions, and how many in blocks of 16, if a running text has 500 positions on
#    average? (difficulty 1/5, importance 4/5, 10 minutes)
# 2. Let `may_enter` leave some blocks free, say one for each who runs. Count steps and tokens computed again as in the
#    table of "at most". Is it better than a smaller limit? (difficulty 2/5, importance 4/5, 25 minutes)
# 3. Swap in place of recompute: copy the K and V of whoever gives way out of the pool, and back when it returns. Which
#    is cheaper, and from which length on? Count bytes against operations. (difficulty 4/5, importance 3/5, 45 minutes)
# 4. Let the request with the fewest computed tokens give way, whoever it is: the least work is lost. Build a case in
#    which somebody never ends. (difficulty 3/5, importance 4/5, 30 minutes)
# 5. Give no prompt more than 4 tokens in a step, whatever is left of the budget, as some engines do so that one long
#    prompt does not take it all. Then several prompts are half computed at once. Build a case in which they send each
#    other away, and mend `may_enter`: what must a newcomer leave for those who run?
#    (difficulty 4/5, importance 3/5, 40 minutes)
#
# ## References
#
# - Kwon et al. 2023, [*Efficient Memory Management for Large Language Model Serving with
#   PagedAttention*](https://arxiv.org/abs/2309.06180): the source of blocks, of preemption by recomputation or
#   swapping, and of the measured 60 to 80 % waste before and less than 4 % after. Read section 3 for the kinds of
#   fragmentation; section 7 for what a kernel pays that reads by a table.
# - Denning 1970, *Virtual Memory*: for pages, and for *thrashing*, which is the last rows of the table of "at most".
# - Yu et al. 2022, *Orca*: for the regions, reserved for the longest text, that blocks have replaced.
# - Prabhu et al. 2024, *vAttention*: for the other view, that the hardware's own pages can do it and kernels stay as
#   they were.
