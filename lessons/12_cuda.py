# %% [markdown]
# # 12 · CUDA
#
# On a GPU the host only gives orders, and a small model spends its time waiting for the next one. Give them all at
# once.
#
# [![Open this lesson in
# Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minillm/minillm/blob/v0.1.0/lessons/12_cuda.ipynb)
#
# **Objectives.** After this lesson you can
#
# - *write* the least time that a decode step takes on any chip, from two numbers of its data sheet;
# - *count* the kernels that a step launches, and *predict* from that whether it is bound by launches;
# - *write* a decode loop over graphs that were captured once: fixed shapes, fixed addresses, dummy rows;
# - *say* for each classic mistake with graphs what goes wrong, and why it does so late;
# - *write* a loop that plans the next step while this one runs, and *count* what that costs.
#
# **Prerequisites:** lesson 08 (the engine's loop), lesson 09 (slots and tables) and, for what a kernel is, lesson 11.
# **Minutes:** about 150, of which the machine needs about 1. **Hardware:** two CPU cores are enough. You need no GPU:
# what a GPU does differently is counted, modelled, and played by a graph that runs on the CPU with the rules of a real
# one. If there is a GPU, a section at the end measures it.
#
# **The one change:** the model, attention and the scheduler stay. What changes is *who tells the device what to do
# next, and when*: not Python, one operator after the other, but a recording, with one order for the whole step.

# %% tags=["setup"]
import inspect
import json
import random
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from statistics import median

import torch
from matplotlib.figure import Figure
from torch import Tensor

from minillm import attention, lab
from minillm.batch import pack
from minillm.bench import ceiling
from minillm.bench.check_gpu import LLAMA_1B, SMOLLM2_135M, random_model
from minillm.cache import KVPool
from minillm.device import pick_dtype
from minillm.engine import Engine
from minillm.fetch import find as find_folder
from minillm.fusing import fuse
from minillm.kernels.gather import GatherAttend
from minillm.lab.build import ROOT
from minillm.lab.checking import run_checks
from minillm.lab.checks import c12
from minillm.lab.checks.c12 import (
    LAST,
    Device,
    FakeGraph,
    Row,
    Static,
    arithmetic,
    bytes_moved,
    live_bytes,
    one_step,
    operators,
    serve,
    weights_read,
)
from minillm.lab.work import from_namespace
from minillm.model import Llama
from minillm.packing import pack_weights
from minillm.params import SamplingParams
from minillm.request import make_request
from minillm.sampling import sample
from minillm.scheduler import Scheduler
from minillm.slots import RegionSlots

# %%
lab.start("12")

# %% [markdown]
# ## The idea
#
# **Two machines.** With a GPU there are two of them. The *host* runs Python: it goes through the model line by line,
# and at every operator it puts an order into a queue, "multiply these two", and goes on without waiting. The *device*
# takes one order after the other and does the work. An order is called a *launch*, what it starts is a *kernel*.
#
# | | what takes time | how much, roughly |
# |---|---|---|
# | the host | one launch: Python, torch's book-keeping, the driver | 2 to 10 microseconds, whatever the kernel does |
# | the device | a large kernel: reading its weights | bytes / memory bandwidth |
# | the device | a tiny kernel: starting and ending | 1 to 3 microseconds, however little it does |
#
# If the kernels are long, the queue is never empty, and nobody notices the host. If they are short, the device is done
# before the next order comes, and waits. The step is then *launch-bound*: its time is the number of launches times the
# time of one, and a faster GPU changes nothing.
#
# **One order for all.** A *CUDA graph* is a recording of the queue. You *capture* it once: Python goes through the
# step, and the driver writes down which kernels are asked for. From then on one launch *replays* all of them. What was
# written down is which kernels, and at which **addresses** they read and write. Python does not run again. Hence:
#
# - a number that Python had when it was captured is frozen;
# - every shape is frozen: a graph for 8 rows does 8 rows, always;
# - new values must be *written into* the old tensors. Another tensor with the same name is never seen;
# - while it is captured, nothing is computed, so no value can be asked for: no `.item()`, no `if` on a tensor.
#
# **Fixed shapes for a loop that changes.** Continuous batching changes the number of texts in every step. So a graph is
# captured for some numbers of rows, the *buckets*: a step with 5 texts uses the graph for 8, and three rows are
# *dummies*. A dummy is computed like any other row, and it must do no harm: it writes its K and V into the *scratch
# slot*, one slot of the pool that no text ever gets, and reads nothing but that.
#
# **And between two steps?** The host plans a step, sends it off, waits for the sampled tokens, and plans the next. In
# the meantime the device is idle. If the host plans step k + 1 *while* k runs, nobody waits. But the tokens of step k
# are not known yet. The next step does not need them on the host: a *placeholder* says "what you have just sampled for
# this text", and the device puts it in. Only the end of a text is then seen one step too late.
#
# **In the package** the model is unchanged, and [`minillm/graphs.py`](../minillm/graphs.py) lies around it; the recap
# says what to look for there.

# %% [markdown]
# ## Predict
#
# SmolLM2-135M multiplies 134.5 million weights in a step, 16 bits each. An H200 reads 4.8 TB in a second. What is the
# least time of a decode step of one text, in *microseconds*? (Leave K and V out.)

# %%
lab.predict("12.floor", None)

# %% [markdown]
# This model has 30 layers. How many kernels does one decode step launch, if every operator of torch is one? (Views,
# like `transpose`, launch nothing.) Go through `Block.forward` in [`minillm/model.py`](../minillm/model.py) and what it
# calls in your mind, with about 15 for attention, or take a wild guess.

# %%
lab.predict("12.launches", None)

# %% [markdown]
# And how many times as many are they for 64 texts in a step as for one?

# %%
lab.predict("12.more_rows", None)

# %% [markdown]
# Up to 64 texts run, about 25 of them on average, coming and going. There are graphs for 1, 2, 4, 8, 16, 32 and 64
# rows. How many of all rows that are computed are dummies, in *percent*?

# %%
lab.predict("12.padding", None)

# %% [markdown]
# To plan a step takes 3 ms, to run it 5 ms. How many ms do 100 steps take, if step k + 1 is planned while step k runs?

# %%
lab.predict("12.overlapped", None)

# %% [markdown]
# ## Build
#
# ### 1. The least time of a step
#
# A step must read the weights, once, however many rows there are; it must read the K and V of every position that is
# looked at; and it must do the arithmetic. Reading and computing overlap, so the step takes at least the longer of the
# two times. This is the *roofline* of lesson 00, for one decode step.
#
# All numbers have 16 bits. `weights_read(config)` says how many weights a row is multiplied with, and
# `config.kv_bytes_per_token(2)` how many bytes the K and V of one position take, over all layers, at 2 bytes a number.
# A multiplication and an addition are two operations. Attention multiplies twice: q with each k, then each weight
# with its v, in every layer, for every *query* head (`config.n_heads` of them).
#
# `contexts` has the number of positions that each live row looks at. `rows` is how many rows go through the Linears:
# dummies are among them, and what they look at is not worth counting.


# %% task="12.step_floor"
def step_floor(config, rows: int, contexts: list[int], bytes_per_s: float, flops_per_s: float) -> float:
    """The least seconds that a decode step takes on a chip with this bandwidth and this arithmetic."""
    ### BEGIN SOLUTION
    moved = 2 * weights_read(config) + config.kv_bytes_per_token(2) * sum(contexts)
    operations = 2 * weights_read(config) * rows
    operations += 4 * config.n_layers * config.n_heads * config.head_dim * sum(contexts)
    return max(moved / bytes_per_s, operations / flops_per_s)
    ### END SOLUTION


# %%
lab.check("12", "step_floor")

# %% [markdown]
# <details><summary>Hint 1</summary>Four terms: bytes of weights, bytes of K and V, operations of the Linears,
# operations of attention. Two of them depend on <code>rows</code> or on <code>contexts</code> alone; one depends on
# neither.</details>
# <details><summary>Hint 2</summary>The bytes of weights do not depend on the rows. This is why batching pays.</details>
# <details><summary>Hint 3</summary>Attention's operations are 4 * n_layers * n_heads * head_dim for each position; the
# result is <code>max(bytes / bytes_per_s, operations / flops_per_s)</code>.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: step_floor</summary>
#
# Bytes: `2 * weights_read(config) + config.kv_bytes_per_token(2) * sum(contexts)`. Operations: `2 * weights * rows`
# and attention's. The common wrong answer reads the weights once for each row. Then batching would bring nothing: 64
# rows would take 64 times as long. The other one adds the two times up. A chip reads ahead while it computes, so the
# shorter time hides behind the longer one; the sum is up to twice too large.
# </details>
# <!-- END SOLUTION -->
#
# ### 2. The queue
#
# Now the host. It hands over kernel 0 after one launch, kernel 1 after two, and so on, and never waits. The device runs
# them in order, one at a time; `kernels` has how long each one takes. By hand, with `launch` = 4:
#
# | kernel | takes | handed over at | begins | ends |
# |---|--:|--:|--:|--:|
# | 0 | 1 | 4 | 4 | 5 |
# | 1 | 9 | 8 | 8 | 17 |
# | 2 | 1 | 12 | 17 | 18 |
# | 3 | 1 | 16 | 18 | 19 |
#
# Before kernels 0 and 1 the device waits for the host; kernels 2 and 3 wait for the device.


# %% task="12.run_queue"
def run_queue(kernels: list[float], launch: float) -> list[tuple[float, float]]:
    """When each kernel begins and ends, in order. The host begins at 0 and needs `launch` for each of them."""
    ### BEGIN SOLUTION
    times = []
    free = 0.0  # from when on the device is free
    for i, seconds in enumerate(kernels):
        begin = max((i + 1) * launch, free)
        free = begin + seconds
        times.append((begin, free))
    return times
    ### END SOLUTION


# %%
lab.check("12", "run_queue")

# %% [markdown]
# <details><summary>Hint 1</summary>Two things must have happened before a kernel begins.</details>
# <details><summary>Hint 2</summary>Keep one number through the loop: when the device is free again.</details>
# <details><summary>Hint 3</summary>Kernel i begins at the later of <code>(i + 1) * launch</code> and the end of kernel
# i - 1.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: run_queue</summary>
#
# `begin = max((i + 1) * launch, free)`. The common wrong answer adds the launch to each kernel, `free + launch +
# seconds`: then host and device take turns, and a launch is never hidden. That is what happens if you wait after each
# operator, for example to print a value. Another one compares sums only, `max(n * launch, sum(kernels))`: right when
# all kernels are alike, but it misses that the device waits at the beginning, and that a late short kernel comes on
# top.
# </details>
# <!-- END SOLUTION -->
#
# ### 3. Buckets


# %% task="12.bucket"
def bucket(n: int, sizes: list[int]) -> int | None:
    """The smallest of the sizes that holds n rows; None if none does. The sizes come in any order."""
    ### BEGIN SOLUTION
    return min((size for size in sizes if size >= n), default=None)
    ### END SOLUTION


# %%
lab.check("12", "bucket")

# %% [markdown]
# <details><summary>Hint 1</summary>First keep the sizes that are large enough.</details>
# <details><summary>Hint 2</summary>Of those, the smallest. There may be none.</details>
# <details><summary>Hint 3</summary><code>min(..., default=None)</code>.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: bucket</summary>
#
# The common wrong answer gives the largest size when none is enough. Then the step is computed without the last texts,
# which get the tokens of nobody, or wait for ever. A step without a graph is only slower.
# </details>
# <!-- END SOLUTION -->
#
# ### 4. Attention with nothing that changes
#
# Before you write it, meet the graph. `FakeGraph` is what the rest of the lesson captures with: on a CPU, with the
# rules of a real one. It listens to every operator that torch is asked for, and takes it down with the tensors'
# addresses.

# %%
print(inspect.getsource(FakeGraph))

# %%
box = torch.tensor([1.0])  # a static buffer
factor = 2  # a Python number


def times_factor(static):
    return static * factor


demo = FakeGraph(times_factor, box)
demo.replay()
print("as captured:", demo.output)

# %% [markdown]
# Now three things happen: 3 is written into the buffer, the number becomes 10, and the name `box` gets another tensor
# with 5 in it. The graph is replayed. What comes out?

# %%
lab.predict("12.replay", None)

# %%
box.copy_(torch.tensor([3.0]))
factor = 10
box = torch.tensor([5.0])
demo.replay()
lab.reveal("12.replay", demo.output.item())

# %% [markdown]
# The graph knows an address, and 3 is what lies there. The 2 it knows by heart. And the 5 lies somewhere else.
#
# A decode step has four inputs that change, and each graph has buffers for them:

# %%
print(inspect.getsource(Row))
print(inspect.getsource(Static))
print(inspect.getsource(one_step))

# %% [markdown]
# `one_step` is what will be captured, so attention must not depend on any value on the host: not on how long the
# texts are, nor on which rows are dummies. Whatever the texts, look at all S places of the table; the mask hides what
# lies beyond a text's end. You have all parts from earlier lessons:
#
# - `pool.store(layer, slots, k, v)` writes k and v, [B, Hkv, D], into slots [B];
# - `pool.index(slots)` and `pool.gather(layer, index)` give the K and V of slots [B, S], each [B, S, Hkv, D];
# - `attention.visible(q_pos, k_pos)`, here with q_pos [B, 1] and k_pos [S], gives a mask [B, 1, S];
# - `attention.sdpa(q, k, v, mask)` takes q [B, 1, H, D] and gives the same shape. Your q is [B, H, D].


# %% task="12.attend_static"
def attend_static(pool: KVPool, static: Static, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of a decode step over static buffers: q [B, H, D], k and v [B, Hkv, D]  ->  [B, H, D].

    Stores k and v at static.slots, then lets each row look at the positions of its text up to its own: those in
    static.table, as far as static.positions says. All B rows and all S places, always.
    """
    ### BEGIN SOLUTION
    pool.store(layer, static.slots, k, v)
    k, v = pool.gather(layer, pool.index(static.table))  # [B, S, Hkv, D] each
    places = torch.arange(static.table.shape[1], device=q.device)  # [S]
    mask = attention.visible(static.positions[:, None], places)  # [B, 1, S]
    return attention.sdpa(q[:, None], k, v, mask)[:, 0]  # [B, 1, H, D] -> [B, H, D]
    ### END SOLUTION


# %%
lab.check("12", "attend_static")

# %% [markdown]
# <details><summary>Hint 1</summary>Store first: the token looks at itself too.</details>
# <details><summary>Hint 2</summary>Place j of a row of the table is position j of that text. So the positions of the
# keys are 0 .. S - 1, for every row.</details>
# <details><summary>Hint 3</summary>The mask is <code>visible(static.positions[:, None], places)</code>, with the places
# 0 .. S - 1 made on the device of q; add the axis to q with <code>q[:, None]</code> and take it away with <code>[:,
# 0]</code>.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: attend_static</summary>
#
# Store, gather all of the table, mask by position. The common wrong answer gathers only as far as the longest text,
# `static.table[:, : static.positions.max() + 1]`, as `gather` does in the engine. A capture refuses it, and rightly:
# the shape would be that of the day of the capture. If you computed the length outside and passed it in as a number, no
# one would refuse it, and texts that grow longer would forget what lies beyond.
#
# So the places that no text uses are read too. That is the price of fixed shapes for an attention built from torch's
# operators. A kernel of your own (lesson 11) has a fixed *launch*, but reads the lengths on the device and stops there:
# that is why it comes before graphs.
# </details>
# <!-- END SOLUTION -->
#
# ### 5. Fill
#
# Before each replay the buffers get the rows of this step. `rows` are the live ones, at most B. What is in the buffers
# now is left from the last step with this graph, which may have had more rows, or longer texts.
#
# - a live row's token, its position, the slot that its K and V go to, and its slots in the table;
# - the table is [B, S]: behind the last slot of a text it has S - len(row.slots) places more. They are read, and
#   masked. A mask hides any number, but not NaN, which may lie in a slot that is free. So repeat a slot of the text's
#   own there, say its first;
# - a dummy row writes into slot number `scratch` and reads only that. Can you say this by a `Row`?


# %% task="12.fill"
def fill(static: Static, rows: list[Row], scratch: int) -> None:
    """Writes the rows of a step into the buffers of a graph, and dummies behind them. In place."""
    ### BEGIN SOLUTION
    B, S = static.table.shape
    every = rows + [Row(0, [scratch])] * (B - len(rows))  # a dummy is a text of one token, in the scratch slot
    static.tokens.copy_(torch.tensor([row.token for row in every]))  # [B]
    static.positions.copy_(torch.tensor([len(row.slots) - 1 for row in every]))
    static.slots.copy_(torch.tensor([row.slots[-1] for row in every]))
    static.table.copy_(torch.tensor([row.slots + row.slots[:1] * (S - len(row.slots)) for row in every]))  # [B, S]
    ### END SOLUTION


# %%
lab.check("12", "fill")

# %% [markdown]
# <details><summary>Hint 1</summary>Make a list of exactly B rows first. Then each buffer is one line, without a case
# for dummies.</details>
# <details><summary>Hint 2</summary>A dummy is a text of one position: <code>Row(0, [scratch])</code>. What are its
# position, its slot, and its row of the table?</details>
# <details><summary>Hint 3</summary><code>static.tokens.copy_(torch.tensor([...]))</code> writes into the old memory.
# For the table: <code>row.slots + row.slots[:1] * (S - len(row.slots))</code>.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: fill</summary>
#
# B rows, then four copies in place. There are four common wrong answers, and all of them work at first:
#
# - `static.tokens = torch.tensor(...)` binds the name to another tensor. The graph goes on with what was captured.
# - Only the first `len(rows)` rows are written. That is right as long as the batch never shrinks. Then the rows behind
#   still have a text in them that has ended, whose slots belong to somebody else by now: they write into them.
# - Dummies are filled with zeros. Slot 0 is a slot like any other, and somebody has it.
# - The rest of a table row is left as it was. It is masked, so nothing is wrong until a NaN lies there.
# </details>
# <!-- END SOLUTION -->
#
# ### 6. The step
#
# `graphs` leads from a number of rows to its graph, with `graph.static`, `graph.replay()` and `graph.output`, ids [B].
# `eager(rows)` computes the same without a graph, for any number of rows; it returns a list of ids. Ids of dummies are
# of no use to anybody. And mind that `graph.output` is a buffer too: the next replay writes over it.


# %% task="12.decode"
def decode(graphs: dict, rows: list[Row], scratch: int, eager) -> list[int]:
    """One decode step: the next id of each row, in order, as Python numbers. By the smallest graph that holds them."""
    ### BEGIN SOLUTION
    size = bucket(len(rows), list(graphs))
    if size is None:
        return eager(rows)
    graph = graphs[size]
    fill(graph.static, rows, scratch)
    graph.replay()
    return graph.output[: len(rows)].tolist()
    ### END SOLUTION


# %%
lab.check("12", "decode")

# %% [markdown]
# <details><summary>Hint 1</summary>Four steps: choose, fill, replay, read.</details>
# <details><summary>Hint 2</summary><code>bucket(len(rows), list(graphs))</code>, and <code>eager</code> if it is
# None.</details>
# <details><summary>Hint 3</summary><code>graph.output[: len(rows)].tolist()</code> waits for the device and copies the
# ids to the host. It is the only wait of the whole step.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: decode</summary>
#
# Choose, fill, replay, read. The common wrong answer returns `graph.output[: len(rows)]`, a view. It is right when you
# look at it, and wrong one step later. The last property above has put your functions into the engine's loop, with
# texts that come, end and are sent away, in memory that is too small, with NaN in every free slot: every token was the
# naive stage's.
# </details>
# <!-- END SOLUTION -->
#
# ### 7. Two at once
#
# `host[k]` is how long it takes to plan step k, `device[k]` how long to run it. One after the other, everything adds
# up. Overlapped, the host plans step k + 1 while the device runs step k, and no further: to plan step k + 2 it must
# know what step k has sampled. By hand, host = [1, 1, 4], device = [3, 2, 3]:
#
# ```
# host     0 | 1 . .  | 2 2 2 2 | . . .
# device   . | 0 0 0  | 1 1 . . | 2 2 2        1 + 3 + 4 + 3 = 11, and 14 one after the other
# ```


# %% task="12.overlapped"
def overlapped(host: list[float], device: list[float]) -> tuple[float, float]:
    """The time of all steps: one after the other, and with the next one planned while one runs."""
    ### BEGIN SOLUTION
    together = host[0] + device[-1]  # nothing runs while the first is planned; nothing is planned while the last runs
    for run, plan in zip(device[:-1], host[1:], strict=True):
        together += max(run, plan)
    return sum(host) + sum(device), together
    ### END SOLUTION


# %%
lab.check("12", "overlapped")

# %% [markdown]
# <details><summary>Hint 1</summary>Step 0 is planned alone, and the last step runs alone.</details>
# <details><summary>Hint 2</summary>In between, running step k and planning step k + 1 begin together, and the next pair
# begins when both are done.</details>
# <details><summary>Hint 3</summary>So each pair takes <code>max(device[k], host[k + 1])</code>.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: overlapped</summary>
#
# $h_0 + \sum_k \max(d_k, h_{k+1}) + d_n$. The common wrong answer is `max(sum(host), sum(device))`: it lets the host
# run ahead as far as it likes. With a device that is always slower the two differ by one plan only, so it looks right;
# with steps that differ (a long prompt, then a short step) it promises too much.
# </details>
# <!-- END SOLUTION -->
#
# ### 8. Run ahead
#
# Now the loop itself, for texts that are all there. `device` has two methods:
#
# - `device.start({name: token})` begins a step and returns at once. In place of a token that is not known yet stands
#   `LAST`: "what you sampled for this text in the step before". At most two steps may be begun and not finished;
# - `device.finish()` waits for the step that was begun first, and returns what it sampled, `{name: token}`.
#
# A text ends with the token `stop`, which belongs to it, or when it has `max_tokens` new ones. `firsts` are given, not
# sampled: they count neither among these nor in the result. The first end you learn one step too late: the next step
# has begun, with that text in it. Throw away what comes out of it. The second you can foresee.
# A step with nobody in it is not begun.


# %% task="12.run_ahead"
def run_ahead(device: Device, firsts: dict[str, int], stop: int, max_tokens: int) -> tuple[dict[str, list[int]], int]:
    """Generates all texts, beginning with the tokens `firsts`; each step is begun before the one before is finished.

    Returns the sampled tokens of each text, {name: tokens}, and how many tokens were computed and thrown away.
    """
    ### BEGIN SOLUTION
    outputs = {name: [] for name in firsts}
    ended = set()
    thrown = 0
    device.start(firsts)
    running = list(firsts)  # who is in the step that runs
    while running:
        # each of these will have one token more when it is done; which one is not known yet
        following = [name for name in running if name not in ended and len(outputs[name]) + 1 < max_tokens]
        if following:
            device.start({name: LAST for name in following})
        for name, token in device.finish().items():
            if name in ended:
                thrown += 1
                continue
            outputs[name].append(token)
            if token == stop:
                ended.add(name)
        running = following
    return outputs, thrown
    ### END SOLUTION


# %%
lab.check("12", "run_ahead")

# %% [markdown]
# <details><summary>Hint 1</summary>In each round: first start the next step, then finish the one that runs.</details>
# <details><summary>Hint 2</summary>Who is in the next step? Whoever is in this one, is not known to have ended, and
# will not have <code>max_tokens</code> after it.</details>
# <details><summary>Hint 3</summary>When a token arrives for a text that has ended, count it and leave it out. When the
# token is <code>stop</code>, remember that the text has ended; it is in the next step already.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: run_ahead</summary>
#
# The common wrong answer finishes first and starts then: it is the old loop, and the device waits. The next one appends
# whatever arrives, so that every text has a token behind its stop. The third one treats `max_tokens` like a stop: each
# text then costs a token more than it needs, and with K and V: a slot.
#
# The extra token does no other harm. It is written into the text's own slots, which are freed one step later. Whoever
# gets them then writes into them in a later step, and the device does steps in order.
# </details>
# <!-- END SOLUTION -->
#
# The cells from here on use your functions.

# %% [markdown]
# ## Measure: the floor
#
# Three GPUs by their data sheets (bandwidth; 16-bit matrix arithmetic, dense), and this machine as measured now. The
# models are SmolLM2-135M and Llama-3.2-1B, of which only the shapes matter here; every text has 1,024 positions.

# %%
MODELS = {"135M": SMOLLM2_135M, "1B": LLAMA_1B}
dtype = pick_dtype("auto", torch.device("cpu"))
here = ceiling.measure(torch.device("cpu"), dtype, seconds=lab.size(ci=0.1, default=0.5, long=1.0))
CHIPS = {
    "H200": (4.8e12, 989e12),
    "A100": (2.04e12, 312e12),
    "L4": (0.3e12, 121e12),
    "here": (here.bytes_per_s, here.flops_per_s),
}
CONTEXT = 1024
print(f"here: {here.bytes_per_s / 1e9:.0f} GB/s and {here.flops_per_s / 1e9:,.0f} GFLOP/s ({dtype}), measured")
print(f"{'':17}" + "".join(f"{chip:>12}" for chip in CHIPS) + "     least ms of a step")
for name, config in MODELS.items():
    for rows in (1, 64):
        floors = [1e3 * step_floor(config, rows, [CONTEXT] * rows, *chip) for chip in CHIPS.values()]
        print(f"{name:5}{rows:4} rows   " + "".join(f"{ms:12.3f}" for ms in floors))
print("rows at which" + " " * 4 + "".join(f"{f / b:12.0f}" for b, f in CHIPS.values()) + "     arithmetic takes over")
lab.reveal("12.floor", round(1e6 * step_floor(SMOLLM2_135M, 1, [], *CHIPS["H200"])))

# %% [markdown]
# The last line needs no model at all. Without K and V, reading takes $2 W / \text{bandwidth}$ and the arithmetic
# $2 W \cdot \text{rows} / \text{flops}$: they are equal at $\text{flops} / \text{bandwidth}$ rows. Below that number a
# further row costs no time, and a dummy row neither.
#
# ## Measure: launches, counted
#
# `operators` listens to every call into torch's library. The tensors here are on the device `meta`: they have shapes
# and no numbers, so a step of a model of any size takes no time, and the count is the same on every machine. (Only
# another version of torch may count a little differently. A GPU's kernels are about as many: some operators take two,
# and some are merged.)


# %%
def meta_step(config, rows, context=CONTEXT):
    """One decode step to look at: the function that computes it, and its buffers. No numbers, only shapes."""
    with torch.device("meta"):
        model = Llama(config).to(torch.bfloat16).eval().requires_grad_(False)
    pool = KVPool(model, rows * context, rows, context)
    return partial(one_step, attend_static, model, pool), Static.fresh(rows, context, rows * context, "meta")


steps = {}
for name, config in MODELS.items():
    for rows in (1, 64):
        work, static = meta_step(config, rows)
        every = operators(partial(work, static))
        steps[name, rows] = [op for op in every if op.launches]
        print(
            f"{name:4} {config.n_layers} layers, {rows:2} rows: {len(every):,} calls, of which "
            f"{len(steps[name, rows]):,} launch a kernel"
        )
print("\nmost often:", dict(Counter(op.name for op in steps["135M", 1]).most_common(8)))
lab.reveal("12.launches", len(steps["135M", 1]))
lab.reveal("12.more_rows", round(len(steps["135M", 64]) / len(steps["135M", 1]), 2))

# %% [markdown]
# The count goes with the *layers*, not with the width and not with the rows. The model with nine times as many weights
# launches fewer kernels, because it has fewer layers.
#
# ## Measure: who waits for whom
#
# Now your queue. Each kernel takes the time of its bytes or of its arithmetic, but at least 2 µs; a launch takes 6 µs.
# These two numbers are assumed, and those of the chips are their makers'; all else is counted. To the host a graph is
# one kernel, as long as all of them together.

# %%
LAUNCH, SMALLEST = 6e-6, 2e-6


def kernel_seconds(ops, bytes_per_s, flops_per_s):
    return [max(SMALLEST, bytes_moved(op) / bytes_per_s, arithmetic(op) / flops_per_s) for op in ops]


print(f"{'':20}{'floor':>9}{'kernels':>10}{'launches':>10}{'eager':>9}{'graph':>9}   device waits   graph is")
gains = {}
for (name, rows), ops in steps.items():
    for chip in ("H200", "A100", "L4"):
        kernels = kernel_seconds(ops, *CHIPS[chip])
        floor = step_floor(MODELS[name], rows, [CONTEXT] * rows, *CHIPS[chip])
        eager = run_queue(kernels, LAUNCH)[-1][1]
        graph_s = run_queue([sum(kernels)], LAUNCH)[-1][1]
        gains[name, rows, chip] = eager / graph_s
        columns = "".join(f"{1e3 * t:9.2f} " for t in (floor, sum(kernels), len(ops) * LAUNCH, eager, graph_s))
        waits = 1 - sum(kernels) / eager
        print(f"{name:5}{rows:3} rows, {chip:5} {columns} ms {waits:10.0%}    {eager / graph_s:.1f} times as fast")

# %% [markdown]
# Compare the columns *kernels* and *launches*: the step takes the longer one. The small model with one row is
# launch-bound on all three, and takes nearly the same time on all three, however dear they are. The 1B model with 64
# texts is not on the two slower ones: there a graph brings next to nothing. On the fastest chip even that model still
# waits for Python: the faster the device, the more it is launches that count.
#
# A graph does not reach the *floor*, though. What is left is the number of kernels that do little: each takes its 2
# µs, and each reads and writes what the one before has just written. Fewer and larger kernels (lesson 11) are the
# second half of the way. Look at it in time:

# %%
FIRST = 14
kernels = [1e6 * t for t in kernel_seconds(steps["135M", 1][:FIRST], *CHIPS["A100"])]  # microseconds
eager_times, us = run_queue(kernels, 1e6 * LAUNCH), 1e6 * LAUNCH
starts = [us + sum(kernels[:i]) for i in range(FIRST)]
rows_of = {
    "eager: host": [(i * us, us) for i in range(FIRST)],
    "eager: device": [(begin, end - begin) for begin, end in eager_times],
    "graph: host": [(0.0, us)],
    "graph: device": list(zip(starts, kernels, strict=True)),
}
figure = Figure(figsize=(9.5, 2.6), layout="constrained")
axes = figure.subplots()
for y, (name, bars) in enumerate(rows_of.items()):
    shade, hatch = ("white", "///") if "host" in name else ("0.7", "")
    axes.broken_barh(bars, (y - 0.38, 0.76), facecolor=shade, hatch=hatch, edgecolor="black", linewidth=0.7)
axes.set_yticks(range(4), list(rows_of))
axes.invert_yaxis()
axes.set_xlabel("microseconds")
axes.set_title(f"The first {FIRST} kernels of a step, by your queue", loc="left", fontsize=10)
axes.spines[["top", "right"]].set_visible(False)
lab.show(
    figure,
    f"A timeline of {FIRST} kernels. Eager: the host gives an order every {us:.0f} microseconds, the device works "
    f"{sum(kernels):.0f} of {eager_times[-1][1]:.0f} microseconds and waits between any two kernels. Graph: one order, "
    f"then the device works without a gap, and is done at {us + sum(kernels):.0f} microseconds.",
)

# %% [markdown]
# ## Measure: the same on this CPU
#
# A CPU has no queue: host and device are one. But the price of an operator is there, and can be measured. Take a model
# with the same 30 layers and almost no width: the same operators, with nothing to do in them. The time of its step,
# divided by its operators, is the price of one.
#
# Then the real model. Its Linears alone, called one after the other with the inputs they get, are the useful part. The
# prediction is: *a step takes its Linears, and so many operators at that price*.

# %%
folder = find_folder("smollm2-135m-instruct")
model = pack_weights(Llama.from_pretrained(folder, device="cpu"))
thin_config = replace(model.config, vocab_size=64, d_model=18, head_dim=2, d_ff=48)
thin = pack_weights(Llama.random(thin_config, dtype=model.dtype))


def decode_step(model, rows, context=128):
    """One decode step of the engine, as a function to call again and again. K and V are zeros: it takes as long."""
    engine = Engine(model, max_running=rows, budget=rows * (context + 1), max_len=context + 2)
    engine.pool.k.zero_()
    engine.pool.v.zero_()
    for _ in range(rows):
        engine.add([5] * (context + 1), SamplingParams(max_tokens=1, seed=0, ignore_eos=True))
    plan = engine.scheduler.schedule()
    for request, _ in plan:
        request.computed = context
    batch = pack([(request, 1) for request, _ in plan], engine.pool)

    def step():
        hidden = model(batch.tokens, batch.positions, GatherAttend(engine.pool, batch))  # [T, d]
        return model.logits(hidden[batch.last])  # [M, V]

    return step


def linears_alone(model, step):
    """Every Linear of the step, called with its own input and nothing between."""
    calls, hooks = [], []
    for module in model.modules():
        if type(module).__name__.endswith("Linear"):
            hooks.append(module.register_forward_pre_hook(lambda m, args: calls.append((m, args[0].clone()))))
    step()
    for hook in hooks:
        hook.remove()
    return lambda: [module(x) for module, x in calls]


def seconds(*works):
    """The times of each, in interleaved rounds."""
    taken = [[] for _ in works]
    for _ in range(1 + lab.size(ci=2, default=15, long=50)):  # the first round is not counted
        for times, work in zip(taken, works, strict=True):
            began = time.perf_counter()
            work()
            times.append(time.perf_counter() - began)
    return [sorted(times[1:]) for times in taken]


BATCHES = lab.size(ci=(1, 8), default=(1, 8, 32, 64), long=(1, 2, 4, 8, 16, 32, 64))
thin_step = decode_step(thin, 1)
thin_ops = sum(op.launches for op in operators(thin_step))
cpu = {}
for rows in BATCHES:
    step = decode_step(model, rows)
    whole, linear, empty = seconds(step, linears_alone(model, step), thin_step)
    ops = sum(op.launches for op in operators(step))
    price = median(empty) / thin_ops
    cpu[rows] = (whole, median(linear), ops, price)
    said = median(linear) + ops * price
    print(
        f"{rows:3} rows: step {1e3 * median(whole):6.1f} ms ({1e3 * whole[0]:.1f} to {1e3 * whole[-1]:.1f}), Linears "
        f"{1e3 * median(linear):5.1f}; {ops:,} operators at {1e6 * price:.1f} µs, so predicted {1e3 * said:5.1f}; "
        f"not in Linears: {1 - median(linear) / median(whole):.0%}"
    )

# %% [markdown]
# With one row, most of what is not in Linears is the price of operators. With more rows the same operators also have
# work to do, attention most of all, and the prediction falls short by that. Nothing about it is special to GPUs: a step
# has useful work, which grows with the rows, and a price, which does not. A GPU does the useful work many times faster,
# and the price is about the same.
#
# If operators have a price, fewer of them are cheaper. The package can replace all that a layer does before its
# attention, and all that it does after, by one call of C each ([`minillm/fusing.py`](../minillm/fusing.py), where there
# is a compiler). The same numbers come out. How many calls are left, and how long does the step take?

# %%
fused = fuse(pack_weights(Llama.from_pretrained(folder, device="cpu")))


def count_fused(model, step):
    """Calls of C, which torch does not see as operators: a layer in two halves is two, any other such module is one."""
    calls = Counter()
    made_of_c = {"HalfBlocks": 2, "PanelLinear": 1, "FusedNorm": 1, "FusedRotary": 1, "FusedSiluTimes": 1}
    hooks = [
        module.register_forward_pre_hook(lambda m, args: calls.update({"C": made_of_c[type(m).__name__]}))
        for module in model.modules()
        if type(module).__name__ in made_of_c
    ]
    step()
    for hook in hooks:
        hook.remove()
    return calls["C"]


for rows in (BATCHES[0], BATCHES[-1]):
    plain, fast = decode_step(model, rows), decode_step(fused, rows)
    before, after = seconds(plain, fast)
    left = sum(op.launches for op in operators(fast)) + count_fused(fused, fast)
    print(
        f"{rows:3} rows: {cpu[rows][2]:,} operators in {1e3 * median(before):.1f} ms ({1e3 * before[0]:.1f} to "
        f"{1e3 * before[-1]:.1f}); fused {left:,} in {1e3 * median(after):.1f} ms ({1e3 * after[0]:.1f} to "
        f"{1e3 * after[-1]:.1f}); by their price {1e3 * (cpu[rows][2] - left) * cpu[rows][3]:.1f} ms less"
    )

# %% [markdown]
# Where more is gained than by the price of what went, the rest was not a price: the product in C reads its weights
# faster than the one that it replaced, and what lies between two products is still in the cache when the next one wants
# it. Where less: a call from Python into a library of one's own has a price too. On a GPU, in a graph, no call would
# count; there each kernel less saves what it read and wrote.
#
# ## Plot

# %%
figure = Figure(figsize=(9.5, 3.6), layout="constrained")
left, right = figure.subplots(1, 2)
at = range(len(BATCHES))
linear_ms = [1e3 * cpu[rows][1] for rows in BATCHES]
price_ms = [1e3 * cpu[rows][2] * cpu[rows][3] for rows in BATCHES]
whole_ms = [1e3 * median(cpu[rows][0]) for rows in BATCHES]
spread = [[1e3 * (median(w) - w[0]) for w, *_ in cpu.values()], [1e3 * (w[-1] - median(w)) for w, *_ in cpu.values()]]
left.bar([i - 0.2 for i in at], linear_ms, 0.38, color="0.75", edgecolor="black", label="Linears, timed")
left.bar(
    [i - 0.2 for i in at],
    price_ms,
    0.38,
    bottom=linear_ms,
    color="white",
    hatch="///",
    edgecolor="black",
    label="operators counted × price",
)
left.bar(
    [i + 0.2 for i in at], whole_ms, 0.38, yerr=spread, capsize=4, color="0.45", edgecolor="black", label="step, timed"
)
left.set_xticks(list(at), [f"{rows}" for rows in BATCHES])
left.set_xlabel("rows")
left.set_ylabel("milliseconds")
left.set_title("This machine: predicted, counted, timed", loc="left", fontsize=10)
left.legend(frameon=False, fontsize=9)
bars = [(name, rows, chip) for name, rows in (("135M", 1), ("1B", 64)) for chip in ("H200", "A100", "L4")]
right.bar(range(6), [gains[bar] for bar in bars], 0.6, color="0.75", edgecolor="black")
right.axhline(1, color="black", linestyle=":", linewidth=1)
right.set_xticks(range(6), [f"{name}\n{rows} row{'s' * (rows > 1)}\n{chip}" for name, rows, chip in bars], fontsize=8)
right.set_ylabel("times as fast")
right.set_title("A graph against eager, by the model", loc="left", fontsize=10)
for axes in (left, right):
    axes.spines[["top", "right"]].set_visible(False)
told = "; ".join(
    f"{rows} rows: {whole_ms[i]:.1f} ms timed, {linear_ms[i] + price_ms[i]:.1f} predicted, of which {price_ms[i]:.1f} "
    "are the price of operators"
    for i, rows in enumerate(BATCHES)
)
modelled = ", ".join(f"{name} with {rows} on {chip} {gains[name, rows, chip]:.1f}" for name, rows, chip in bars)
lab.show(
    figure,
    f"Two bar charts. Left, steps on this machine: {told}. Right, a graph against eager by the model: {modelled}.",
)

# %% [markdown]
# ## Measure: dummies and memory
#
# Which buckets? More of them mean fewer dummies, more captures, and more memory. The steps of a run of 300 requests,
# with lesson 08's mix of lengths and a new one every seven steps on average, by the package's scheduler without a
# model: the same on every machine.


# %%
def rows_in_steps(n_requests, every=7.0, most=64):
    """The number of texts in each step in which all decode, and how many steps had a piece of a prompt in them."""
    draw = random.Random(12)
    scheduler = Scheduler(RegionSlots(most, 1100), most, 256)
    config, at, coming = SMOLLM2_135M, 0.0, []
    for _ in range(n_requests):
        at += draw.expovariate(1 / every)
        new = draw.randint(40, 200) if draw.random() < 0.85 else draw.randint(400, 1000)
        params = SamplingParams(max_tokens=new, seed=0, ignore_eos=True)
        coming.append((at, make_request([5] * 64, params, config, None, 1100)))
    decoding, others, step = [], 0, 0
    while coming:  # as long as new ones arrive
        while coming and coming[0][0] <= step:
            scheduler.waiting.add(coming.pop(0)[1])
        step += 1
        plan = scheduler.schedule()
        if plan and all(n == 1 == request.pending for request, n in plan):
            decoding.append(len(plan))
        else:
            others += bool(plan)
        scheduler.update(plan, {request: (9, None) for request, n in plan if n == request.pending})
    return decoding, others


POLICIES = {
    "one size": [64],
    "powers of two": [1, 2, 4, 8, 16, 32, 64],
    "multiples of 8": list(range(8, 65, 8)),
    "1, 2, 4, then 8s": [1, 2, 4, *range(8, 65, 8)],
    "every number": list(range(1, 65)),
}
live_rows, others = rows_in_steps(lab.size(ci=60, default=300, long=300))
print(
    f"{len(live_rows):,} decode steps with {sum(live_rows) / len(live_rows):.1f} texts on average, "
    f"{others} steps with a prompt"
)


def captured_bytes(rows):
    """What the step's own tensors take, if each gives way after its last use: counted by a capture without numbers."""
    return live_bytes(FakeGraph(*meta_step(SMOLLM2_135M, rows, 256)))


known = {rows: captured_bytes(rows) for rows in (1, 8, 32, 64)}
print("bytes of one graph:", ", ".join(f"{rows} rows {n / 1e6:.1f} MB" for rows, n in known.items()))
per_row = (known[64] - known[8]) / 56  # the memory grows with the rows
print(f"{'':18}{'graphs':>7}{'dummies':>9}{'floor with them':>18}{'memory':>10}{'in one pool':>13}")
for name, sizes in POLICIES.items():
    used = [bucket(n, sizes) for n in live_rows]
    dummies = 1 - sum(live_rows) / sum(used)
    floor, padded = (
        sum(step_floor(LLAMA_1B, r, [256] * n, *CHIPS["A100"]) for n, r in zip(live_rows, by, strict=True))
        for by in (live_rows, used)
    )
    separate = sum(known[8] + per_row * (size - 8) for size in sizes)
    print(
        f"{name:18}{len(sizes):7}{dummies:9.1%}{padded / floor - 1:+17.1%} {separate / 1e6:8.0f} MB"
        f"{known[64] / 1e6:10.1f} MB"
    )
    if name == "powers of two":
        lab.reveal("12.padding", round(100 * dummies, 1))

# %% [markdown]
# A quarter of all rows may be dummies, and the floor does not move: they lie below the number of rows where arithmetic
# takes over. (Where attention is built from torch's operators they do cost, since a dummy reads S places too.) Memory
# is the better reason to think. If each graph had its own, it would add up. But only one graph runs at a time, so all
# of them may use the same: capture the *largest first*, and the others fit into its pool. With one pool, many buckets
# cost nothing but the time of their captures.

# %%
shown = live_rows[: lab.size(ci=200, default=700, long=700)]
figure = Figure(figsize=(9.5, 3.0), layout="constrained")
told = []
for axes, name in zip(figure.subplots(1, 2, sharey=True), ("powers of two", "multiples of 8"), strict=True):
    used = [bucket(n, POLICIES[name]) for n in shown]
    axes.fill_between(
        range(len(shown)), shown, used, step="mid", facecolor="white", hatch="///", edgecolor="0.6", linewidth=0
    )
    axes.fill_between(range(len(shown)), shown, step="mid", color="0.7")
    axes.step(range(len(shown)), used, where="mid", color="black", linewidth=1.2)
    share = 1 - sum(shown) / sum(used)
    axes.set_title(f"{name}: {share:.0%} dummies (hatched)", loc="left", fontsize=10)
    axes.set_xlabel("decode step")
    axes.spines[["top", "right"]].set_visible(False)
    told.append(f"with {name} the bucket lies above them by {share:.0%} of all rows computed")
figure.axes[0].set_ylabel("rows")
lab.show(
    figure,
    f"Live rows over {len(shown)} decode steps, between {min(shown)} and {max(shown)}, and the bucket that is used for "
    f"each; {', and '.join(told)}.",
)

# %% [markdown]
# ## Measure: the same tokens
#
# The engine's loop with your functions, and graphs for 2 and 8 rows, on a small model in float64: 20 texts that come
# and go, at most 6 at once.
# Beside it the package's engine, which has no graphs. Every token must be the same.

# %%
tiny = Llama.random(c12.TINY, seed=5, dtype=torch.float64)
draw = random.Random(7)
asked = [
    (draw.randint(0, 60), [draw.randrange(2, 64) for _ in range(draw.randint(1, 10))], draw.randint(2, 14))
    for _ in range(lab.size(ci=8, default=20, long=60))
]
theirs = Engine(tiny, max_running=6, budget=64, max_len=32).generate(
    [prompt for _, prompt, _ in asked], [SamplingParams(most, seed=0, ignore_eos=True) for _, _, most in asked]
)


def loop(functions):
    """All texts by the loop over graphs: their tokens, and how the steps went."""
    requests = [
        (step, make_request(prompt, SamplingParams(most, seed=0, ignore_eos=True), tiny.config, None, 32))
        for step, prompt, most in asked
    ]
    went = serve(functions, tiny, requests, (2, 8), max_running=6, max_len=32, n_blocks=30)
    return [request.output for _, request in requests], went


outputs, went = loop({"attend_static": attend_static, "decode": decode})
by_graph = [(n, B) for n, B in zip(went.rows, went.used, strict=True) if B]
print(f"{len(went.rows)} decode steps, {len(by_graph)} of them by a graph; {went.others} steps with a prompt in them")
print(f"{sum(B - n for n, B in by_graph)} of {sum(B for _, B in by_graph)} rows that graphs computed were dummies")
print("every token is the engine's:", outputs == [output.token_ids for output in theirs])

# %% [markdown]
# ## Measure: the host between two steps
#
# How long does the host take for a step, beside the model? The real engine on this CPU, taken apart: planning, packing,
# sampling and book-keeping on one side, the model on the other.

# %%
prompts = [[5 + i] * 64 for i in range(lab.size(ci=4, default=32, long=64))]
engine = Engine(model, max_running=len(prompts), budget=1024, max_len=256)
for prompt in prompts:
    engine.add(prompt, SamplingParams(max_tokens=lab.size(ci=8, default=24, long=100), seed=0, ignore_eos=True))
host, device = [], []
while engine.scheduler.busy:
    began = time.perf_counter()
    plan = engine.scheduler.schedule()
    batch = pack(plan, engine.pool)
    sent = time.perf_counter()
    hidden = model(batch.tokens, batch.positions, GatherAttend(engine.pool, batch))  # [T, d]
    logits = model.logits(hidden[batch.last])  # [M, V]
    back = time.perf_counter()
    sampled = sample(logits, batch.samples)
    engine.scheduler.update(plan, dict(zip(batch.samples, sampled, strict=True)))
    host.append(sent - began + time.perf_counter() - back)
    device.append(back - sent)
host, device = host[3:], device[3:]  # steps in which all decode
print(
    f"{len(prompts)} texts, {len(host)} steps: the host {1e3 * median(host):.2f} ms, the model "
    f"{1e3 * median(device):.2f} ms each"
)

fast = [2 * step_floor(SMOLLM2_135M, len(prompts), [80] * len(prompts), *CHIPS["A100"])] * len(host)
for name, runs in (("model as slow as here", device), ("model at twice the floor of an A100", fast)):
    serial, together = overlapped(host, runs)
    print(
        f"{name:36} one after the other {1e3 * serial:7.1f} ms, overlapped {1e3 * together:7.1f}: "
        f"{1 - together / serial:.0%} less"
    )
lab.reveal("12.overlapped", overlapped([3] * 100, [5] * 100)[1])

# %% [markdown]
# On a CPU there is nothing to win: the host is the device. With a fast device the same host takes most of the step, and
# overlapping can hide only the *shorter* of the two. The host's own work must then become less first.
#
# Hugging Face have measured it, with an 8B model, 32 texts at once and 8,000 tokens of output: 24 % of 300.6 s the GPU
# had nothing to do. Planning ahead made it 234.5 s, 22 % less.
#
# ## Measure: what running ahead throws away
#
# 600 texts of the mix, at most 1,000 tokens each; nine in ten end with a stop of their own, the others are cut off by
# `max_tokens`. How many tokens are computed and thrown away?

# %%
lab.predict("12.thrown", None)

# %%
draw = random.Random(3)
texts = {}
for i in range(lab.size(ci=100, default=600, long=600)):
    n = draw.randint(40, 200) if draw.random() < 0.85 else draw.randint(400, 999)
    own_end = i % 10 > 0
    texts[f"text {i}"] = [draw.randrange(3, 1000) for _ in range(n if own_end else 1001)] + [2] * own_end
device_played = Device(texts)
outputs, thrown = run_ahead(device_played, {name: text[0] for name, text in texts.items()}, stop=2, max_tokens=1000)
kept = sum(map(len, outputs.values()))
print(
    f"{len(texts)} texts, {len(device_played.steps):,} steps, {kept:,} tokens kept, {thrown} thrown away: "
    f"{thrown / kept:.2%}"
)
print(f"the device had to wait {device_played.idle} times")
lab.reveal("12.thrown", thrown)

# %% [markdown]
# One for each stop and none for the others: less than half a percent, for a device that never waits.

# %% [markdown]
# ## With a GPU
#
# If torch sees a GPU, the next cell measures your functions on it: `CudaGraph` has what `FakeGraph` has, so `fill` and
# `decode` cannot tell them apart. If not, it shows what was measured elsewhere and stored with the package.


# %%
class CudaGraph:
    """A real one: static, replay() and output, as the fake one has them."""

    def __init__(self, work, static, pool=None):
        self.static, self.graph = static, torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()  # what is done only once (choosing kernels, taking memory) must be over by then
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                work(static)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(self.graph, pool=pool):
            self.output = work(static)

    def replay(self):
        self.graph.replay()


def measure_on_gpu(config, batches, context=512):
    """(rows, seconds eager, seconds by graph, the same ids?) of random weights of this shape."""
    gpu = torch.device("cuda")
    model = random_model(config, gpu, torch.bfloat16)
    most = max(batches)
    pool = KVPool(model, most * context, most, context)
    pool.k.zero_()
    pool.v.zero_()
    work, shared, graphs = partial(one_step, attend_static, model, pool), None, {}
    for rows in sorted(batches, reverse=True):  # the largest first, and the others into its memory
        graphs[rows] = CudaGraph(work, Static.fresh(rows, context, most * context, gpu), shared)
        shared = graphs[rows].graph.pool()
    for n in batches:
        rows = [Row(5 + i, list(range(i * context, i * context + context - 1))) for i in range(n)]
        ids = decode(graphs, rows, most * context, None)
        same = ids == work(graphs[n].static).tolist()
        times = []
        for step in (partial(work, graphs[n].static), graphs[n].replay):
            step()
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(lab.size(ci=5, default=50, long=200)):
                step()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - began) / lab.size(ci=5, default=50, long=200))
        yield n, *times, same


def stored_tables(section="cuda_graphs"):
    """What `make check-gpu` has left in results/: (file, its content)."""
    for path in sorted((ROOT / "results").glob("*.json")):
        found = json.loads(path.read_text("utf-8"))
        content = found.get("sections", {}).get(section) if isinstance(found, dict) else None
        if isinstance(content, dict) and content.get("rows"):
            yield path.name, content


def shown_as(value):
    return value if not isinstance(value, float) else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


if torch.cuda.is_available():
    print(f"measured now, on {torch.cuda.get_device_name()}:")
    for name, config in MODELS.items():
        for n, eager_s, graph_s, same in measure_on_gpu(
            config, lab.size(ci=(1, 8), default=(1, 8, 64), long=(1, 8, 64, 128))
        ):
            print(
                f"{name:5}{n:4} rows: eager {1e3 * eager_s:7.2f} ms, graph {1e3 * graph_s:7.2f} ms, "
                f"{eager_s / graph_s:5.1f} times as fast; {'the same ids' if same else 'ids differ within rounding'}"
            )
else:
    tables = list(stored_tables())
    if not tables:
        print("torch sees no GPU here, and no measurement on a GPU is stored with this version of the package yet.")
        print("What a GPU would do is above: counted operators, data sheets, and two assumed numbers.")
    for name, content in tables:
        about = content.get("about", {})
        gpu = about.get("machine", {}).get("gpu", "a GPU")
        print(f"Not from this machine: measured on {gpu}, {about.get('date', 'no date')}, results/{name}")
        for row in content["rows"]:
            if row.get("rows", 1) in (1, 8, 64):
                print("  " + ", ".join(f"{key} {shown_as(value)}" for key, value in row.items()))

# %% [markdown]
# ## Explain
#
# A service runs on graphs with buckets of powers of two. For hours all texts are right. Then, whenever a rush is over,
# some texts go astray: only such as began after the rush, never in the first minutes after a restart, and never while
# the load grows. Without graphs it does not happen. Write between the quotes: *what is wrong, in which buffer,
# and why does it show only then? And why would a test with 8 texts that begin and end together not find it?*

# %%
lab.answer("12.why", """ """)

# %% [markdown]
# <!-- BEGIN SOLUTION -->
# <details><summary>A good answer</summary>
#
# Dummy rows are not reset. While the load grows, each step with a graph fills more of its rows than the one before; all
# rows are live or still as fresh as after the capture. When the rush is over, a step with 5 texts uses the graph for 8,
# whose rows 5 to 7 still have `slots` and `table` of texts that have ended in the meantime. Their slots were given
# back, and a newcomer has got them. In every step the stale row writes the K and V of its old token into `slots`, at
# one position of the newcomer's text. (`table` alone would do no harm: a dummy's output is thrown away.) Eight texts
# that begin and end together fill all rows in every step, or none. It takes a step with fewer rows after one with more,
# in the same bucket, and then somebody new in the memory that was given back. The remedy: every row is written in every
# step, dummies to the scratch slot.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# ## Break it
#
# Five named bugs, each in the place of one of your functions. First the loop over the tiny model with each of them:
# how many of its texts come out wrong? The most harmless to look at is `dummies_in_slot_0`. How many of the 20
# does it spoil?

# %%
lab.predict("12.wrong_texts", None)

# %%
mended = {"bucket": bucket, "fill": fill, "decode": decode, "attend_static": attend_static}


def too_small(n, sizes):
    return max((size for size in sizes if size <= n), default=None)  # the bug: the next smaller size


def bound_anew(static, rows, scratch):
    mended["fill"](static, rows, scratch)
    static.tokens = static.tokens.clone()  # the bug: from the second time on, another tensor is filled


def stale_rows(static, rows, scratch):
    before = static.slots.clone(), static.table.clone()
    mended["fill"](static, rows, scratch)
    for buffer, old in zip((static.slots, static.table), before, strict=True):
        buffer[len(rows) :] = old[len(rows) :]  # the bug: rows behind the last live one stay as they were


def dummies_in_slot_0(static, rows, scratch):
    mended["fill"](static, rows, 0)  # the bug: slot 0 belongs to somebody


FROZEN = 12


def frozen_length(pool, static, layer, q, k, v):
    short = Static(static.tokens, static.positions, static.slots, static.table[:, :FROZEN])  # the bug: a Python number
    return mended["attend_static"](pool, short, layer, q, k, v)


BUGS = {
    too_small: "bucket",
    bound_anew: "fill",
    stale_rows: "fill",
    dummies_in_slot_0: "fill",
    frozen_length: "attend_static",
}
for bug, place in BUGS.items():
    try:
        globals()[place] = bug
        outputs, _ = loop({"attend_static": attend_static, "decode": decode})
        wrong = [i for i, (mine, their) in enumerate(zip(outputs, theirs, strict=True)) if mine != their.token_ids]
        found = f"{len(wrong)} of {len(outputs)} texts are wrong"
    except Exception as error:
        wrong, found = [], f"the loop stopped: {type(error).__name__}: {error}"
    finally:
        globals().update(mended)
    print(f"{bug.__name__:18} in the place of {place:14} {found}")
    if bug is dummies_in_slot_0:
        lab.reveal("12.wrong_texts", len(wrong))

# %% [markdown]
# One is loud, and one spoils nearly all. The other three are the dangerous ones: no error, and most texts are right. A
# test with short texts that begin and end together, and just fill a bucket, would pass them all. Now choose one and let
# the check say what it finds. With `stale_rows`, say, `decode` is right, and its check cannot hold: `fill` is broken.

# %%
BUG = stale_rows  # or any other of the five
try:
    globals()[BUGS[BUG]] = BUG
    report = run_checks("12", from_namespace(globals()), ["bucket", "attend_static", "fill", "decode"])
finally:
    globals().update(mended)
print(report.text())

# %% [markdown]
# ## Recap
#
# - A decode step reads the weights once and each live K and V once. Below flops / bandwidth rows, a further row is
#   free.
# - The number of launches goes with the layers. A step takes the longer of its launches and its kernels; a small model
#   on a fast device is bound by launches.
# - A graph replays kernels at addresses. Values are written in place; shapes and Python's numbers are frozen.
# - Buckets and dummy rows make fixed shapes out of a batch that changes. Every row is written in every step; a dummy
#   writes to the scratch slot.
# - What goes wrong with graphs raises nothing, and shows late: when the batch shrinks, when a slot changes hands, when
#   a text grows longer than those of the capture. So test with these.
# - Planning ahead hides the shorter of host and device. It costs a placeholder, and one token for each stop.
#
# In the package all this is [`minillm/graphs.py`](../minillm/graphs.py). Look there for your `bucket` and for your
# `fill`: four rows of numbers go over in one copy, from memory that the device may fetch by itself. Two things are
# better than ours. The table stays on the device, and the graph makes its new entries, so only what is new is sent. And
# attention is a kernel that reads the lengths on the device, so no row reads more than its text. One thing is left out:
# it does not run ahead. Every step fetches what it has sampled before the next is planned.
#
# Next: requests that arrive over a network, and what their senders see.
#
# ## Exercises
#
# 1. Plot the gain of a graph against `LAUNCH` from 1 to 20 µs, for both models with 1 and 64 rows. Where does each
#    begin to be bound by launches? (difficulty 1/5, importance 4/5, 15 minutes)
# 2. `attend_static` computes the mask and the index anew in every layer, and they are always the same. Make a class of
#    it that does so once a step. How many launches are saved, counted? (difficulty 2/5, importance 4/5, 25 minutes)
# 3. Count how many launches on a GPU would be left if `RMSNorm`, `rotate` and silu times up were one kernel each, as in
#    `fusing`. What does your queue say about eager and graph then? Which of the three is worth most?
#    (difficulty 2/5, importance 4/5, 25 minutes)
# 4. Given the rows of all steps, find the k buckets with the fewest dummies. How much better than powers of two are
#    seven of them? (difficulty 3/5, importance 2/5, 40 minutes)
# 5. Sampling with a temperature, inside the graph. Where must the random number come from, and what would happen with
#    `torch.rand` in a graph that was captured naively? (difficulty 3/5, importance 4/5, 30 minutes)
# 6. Let texts join `run_ahead` while it runs, and end at a stop *string*, which only the host can see. What else is
#    known one step late? (difficulty 4/5, importance 4/5, 45 minutes)
# 7. Steps with a prompt in them have no graph. Which shapes would you capture for them, and what would a token budget
#    have to do with it? (difficulty 3/5, importance 3/5, 25 minutes)
#
# ## References
#
# - Gray 2019, [*Getting Started with CUDA Graphs*](https://developer.nvidia.com/blog/cuda-graphs/): for one short
#   kernel launched twenty times, timed three ways: waiting each time, not waiting, and by a graph.
# - Ng et al. 2021, [*Accelerating PyTorch with CUDA
#   Graphs*](https://pytorch.org/blog/accelerating-pytorch-with-cuda-graphs/): for what is recorded and what is not,
#   with pictures of both queues.
# - PyTorch, [*CUDA semantics: CUDA graphs*](https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs): for the
#   list of what may not be captured, and for sharing memory between captures.
# - Williams, Waterman and Patterson 2009, [*Roofline*](https://doi.org/10.1145/1498765.1498785): for the picture with
#   the two slopes; our floor is one point of it.
# - Hugging Face 2026, [*Unlocking asynchronicity in continuous
#   batching*](https://huggingface.co/blog/continuous_async): for overlapping in a real engine, 300.6 s to 234.5 s (22
#   %); read how the placeholder is replaced on the device.
# - PyTorch 2023, [*Accelerating Generative AI with PyTorch II: GPT,
#   Fast*](https://pytorch.org/blog/accelerating-generative-ai-2/): for 25.5 to 107 tokens/s with one text, by a static
#   cache and one launch for many kernels.
