# %% [markdown]
# # 08 · Continuous batching
#
# Who is in the batch changes in every step: you write the queue, the scheduler and the loop, and measure what they buy.
#
# [![Open this lesson in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minillm/minillm/blob/v0.1.0/lessons/08_continuous.ipynb)
#
# **Objectives.** After this lesson you can
#
# - *derive* from the lengths of the outputs what continuous batching gains over static batching, and when it gains
#   nothing;
# - *reproduce* a published queueing experiment, and say which of its inputs had to be inferred;
# - *write* a scheduler with a token budget, and *show* that neither decode nor prefill can starve;
# - *write* the loop of a continuous engine, and *prove* that every request gets the text it would get alone.
#
# **Prerequisites:** lessons 04 to 07: K and V that are kept, chunks of a prompt, pads, and `pack` with its flat run of
# tokens. **Minutes:** about 115, of which the machine needs about 5. **Hardware:** two CPU cores are enough.
#
# **The one change:** in lesson 07 every request in the batch computed all of its pending tokens in each step. Now a
# *scheduler* decides, step by step, who computes how many, under a budget of tokens. In the package this is
# [`minillm/stages/continuous.py`](../minillm/stages/continuous.py) with
# [`minillm/scheduler.py`](../minillm/scheduler.py).

# %% tags=["setup"]
import heapq
import math
from collections import deque
from dataclasses import asdict
from statistics import median

from matplotlib.figure import Figure

from minillm import lab
from minillm.batch import pack
from minillm.bench import harness, queueing, trace
from minillm.bench.harness import Job
from minillm.bench.prompts import load
from minillm.bench.timeline import alt_text, letters
from minillm.cache import KVPool
from minillm.config import Config
from minillm.fetch import find
from minillm.kernels.gather import GatherAttend
from minillm.model import Llama
from minillm.packing import pack_weights
from minillm.params import SamplingParams
from minillm.request import Arrivals, make_request
from minillm.sampling import sample
from minillm.simulation import policies
from minillm.simulation.article import EQUAL, MIXED, PUBLISHED, RATE, Setup, run_seeds
from minillm.simulation.policies import Figures, Schedule, bands
from minillm.simulation.workload import ARTICLE_MIX, at_once, poisson_demands
from minillm.slots import RegionSlots
from minillm.tokenizer import Tokenizer

PAIR = ("static", "continuous")

# %%
lab.start("08")
folder = find("smollm2-135m-instruct")
config = Config.from_folder(folder)

# %% [markdown]
# ## The idea
#
# **A static group ends with its longest text.** Put eight requests into a batch. If one of them writes 800 tokens and
# the others 100, seven slots are held for 700 steps in which nobody works in them. The cure is old: let a finished
# request go at once, and give its slot to the next in line. That is *continuous batching* (Orca called it
# iteration-level scheduling).
#
# Lesson 06 tried it with a rectangle, and lost: a newcomer with a prompt of $n$ tokens makes all $B$ rows $n$ wide,
# which is $(n - 1)(B - 1)$ pads; $n = 100$ and $B = 8$ gave 693. Lesson 07 removed the rectangle, and the pads with
# it. One thing is still open: a prompt of 2,000 tokens makes one step very long, and everybody else waits for it.
#
# **A request is two counters.** `len(tokens)` is how long its text is by now, `computed` is how many of these tokens
# have their K and V stored. Everything follows from the difference, `pending = len(tokens) - computed`:
#
# | the request | tokens | computed | pending |
# |---|--:|--:|--:|
# | `<bos> I am sure this pro ject`, new | 7 | 0 | 7 |
# | the same after a step that gave it 4 | 7 | 4 | 3 |
# | after a step that gave it 3: a token, `will`, is sampled | 8 | 7 | 1 |
# | after a step that gave it 1: the next one is sampled | 9 | 8 | 1 |
#
# There is no prefill phase and no decode phase. Each step gives a request some of its pending tokens, and a new token
# is sampled exactly when none is left. A prompt in chunks and a text that grows are the same thing with different
# numbers.
#
# **The budget.** A step may hold at most $m$ new tokens in all. Request $i$ gets
#
# $$n_i = \min(\text{pending}_i,\ m - \text{what was given before it}) \quad \text{tokens}, \qquad \sum_i n_i \le m .$$
#
# The order of giving decides who can starve. First come all running requests that need one token; then prompts half
# computed; then newcomers. Since $m$ is at least the most that may run, every text that grows gets its token in every
# step. And a prompt half computed is itself one of those that run, so at least one token is left for the first of
# them: it ends too.

# %% [markdown]
# ## Predict
#
# First the queue without a model: 600 requests, 8 slots, 8 ms for each output token, 11 requests per second. Of the
# outputs 85 % have 40 to 200 tokens and 15 % have 400 to 1,000. *Static* takes eight at a time and lets them go
# together; *continuous* refills each slot when it is free. A *wait* is start minus arrival, in seconds; the
# *makespan* is when the last token of all is out. How many times longer are they under static?
#
# A help: the mean length is 207 tokens. With probability $0.85^8 = 27\%$ a group of eight holds no long text at all.

# %%
lab.predict("08.makespan_ratio", None)  # makespan of static over that of continuous

# %%
lab.predict("08.wait_ratio", None)  # mean wait of static over that of continuous

# %%
lab.predict("08.equal_ratio", None)  # the makespan again, if every output has 150 tokens

# %% [markdown]
# ## Build: two queues
#
# Requests are numbered in the order of their arrival. `durations[i]` is how long request `i` works once it has a
# slot. You return when each one *starts*. By hand, with two slots:
#
# | request | arrives | works for | static starts | continuous starts |
# |--:|--:|--:|--:|--:|
# | 0 | 0 s | 1 s | 0 s | 0 s |
# | 1 | 0 s | 5 s | 0 s | 0 s |
# | 2 | 1 s | 2 s | **5 s** | 1 s |
# | 3 | 1 s | 2 s | **5 s** | 3 s |


# %% task="08.static"
def static(arrivals: list[float], durations: list[float], slots: int) -> list[float]:
    """Groups of `slots` requests in the order of arrival. Returns the start of each request.

    A group waits until it is full and everybody before it has left, then starts together. A slot is not given away
    before the longest of the group has ended. Only the very last group may be smaller: it waits for its own last one.
    """
    ### BEGIN SOLUTION
    starts: list[float] = []
    clock = 0.0  # when the group before has ended
    for first in range(0, len(arrivals), slots):
        group = durations[first : first + slots]
        start = max(clock, arrivals[first + len(group) - 1])
        starts += [start] * len(group)
        clock = start + max(group)
    return starts
    ### END SOLUTION


# %%
lab.check("08", "static")

# %% [markdown]
# <details><summary>Hint 1</summary>Go through the requests in steps of <code>slots</code>, and keep one clock: when the
# group before has ended.</details>
# <details><summary>Hint 2</summary>Two things must be true before a group starts, so its start is the later of two
# times. Arrivals are in order: the last member of the group is the last to be there.</details>
# <details><summary>Hint 3</summary>The last group is shorter than <code>slots</code>. A slice of the durations gives
# its length without any special case; the arrival that counts is that of its own last member.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: static</summary>
#
# `group = durations[first : first + slots]` is the group, whatever its length. It starts at `max(clock,
# arrivals[first + len(group) - 1])`, and the clock moves on by its *longest* duration. The common wrong answer moves
# the clock by the last duration of the group, which looks right whenever the longest stands last: then two requests
# share a slot, and the check finds the time at which three work in two slots.
# </details>
# <!-- END SOLUTION -->


# %% task="08.continuous"
def continuous(arrivals: list[float], durations: list[float], slots: int) -> list[float]:
    """First come, first served: a slot is refilled as soon as it is free. Returns the start of each request."""
    ### BEGIN SOLUTION
    free = [0.0] * slots  # a heap: when each slot is free
    starts: list[float] = []
    for arrival, duration in zip(arrivals, durations, strict=True):
        start = max(arrival, free[0])
        heapq.heapreplace(free, start + duration)
        starts.append(start)
    return starts
    ### END SOLUTION


# %%
lab.check("08", "continuous")

# %% [markdown]
# <details><summary>Hint 1</summary>No clock that ticks is needed. Keep a list with one number for each slot: the time
# at which it is free.</details>
# <details><summary>Hint 2</summary>The next request in line takes the slot that is free first. It starts when both are
# there: the slot and the request.</details>
# <details><summary>Hint 3</summary>Look for the smallest number in the list, and put the request's end in its place:
# <code>min</code> and <code>index</code> will do, or <code>heapq</code>, which keeps the smallest in front.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: continuous</summary>
#
# A slot is known by one number, the time at which it is free. The next request starts at `max(arrival, free[0])`, and
# its end takes the place of that number; `heapreplace` keeps the smallest in front. The common wrong answer gives
# slots out in turn (`i % slots`): a request then waits behind a long one while another slot stands free.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# ## Measure: the published table
#
# The experiment above was published, with a table of results. It does not say when requests arrive, nor how long the
# equal outputs of its control are. Poisson arrivals at **11 requests per second** and **150 tokens** are **inferred
# by fitting**: at these values each of its figures lies where 95 of 100 simulated runs lie. So is the rule that a
# static group waits until it is full. The bands below come from the package's own queues, so they show even if yours
# are not written yet. The last lines try other rates too.

# %%
setup, runs = Setup(), {}
run_seeds(setup, PAIR, runs)  # {(rate, case, policy): one Figures for each seed}
print(f"At {RATE:g} requests/s; the band holds 95 of 100 runs of {setup.seeds}.")
print(f"{'lengths':8}{'policy':12}{'figure':20}{'published':>10}   band")
for (case, policy), published in PUBLISHED.items():
    found = bands(runs[RATE, case, policy])
    for name, value in published.items():
        low, high = found[name].low, found[name].high
        within = "inside" if low <= value <= high else "OUTSIDE"
        print(f"{case:8}{policy:12}{name:20}{value:10.3f}   {low:8.3f} to {high:8.3f}   {within}")
for rate in sorted({rate for rate, _, _ in runs}):
    outside = [
        f"{case} {policy} {name}"
        for (case, policy), published in PUBLISHED.items()
        for name, value in published.items()
        if value not in bands(runs[rate, case, policy])[name]
    ]
    print(
        f"At {rate:g} requests/s {len(outside)} of the published figures are outside: {', '.join(outside) or 'none'}."
    )

# %% [markdown]
# Now with your two functions. (Not written yet? Put `policies.static(...).starts` of the package in their place, and
# go on.) `busy` adds up the time in which slots work for somebody. It is the same under both policies, since the work
# is the same: what differs is the rest, $\text{idle} = 1 - \text{busy} / (\text{slots} \times \text{makespan})$.

# %%
MINE = {"static": static, "continuous": continuous}


def figures(start_times, demands, slots, seconds):
    """What a queue makes of demands, where each output token takes so many seconds."""
    arrivals = [demand.arrival for demand in demands]
    durations = [demand.output * seconds for demand in demands]
    starts = start_times(arrivals, durations, slots)
    ends = [start + duration for start, duration in zip(starts, durations, strict=True)]
    return Figures.of(Schedule(arrivals, starts, ends, ends), slots)


SEEDS = range(5)
mine = {}
for case, each in ((MIXED, Setup()), (EQUAL, Setup(uniform=150))):
    for policy, start_times in MINE.items():
        mine[case, policy] = [
            figures(start_times, each.demands(seed), each.slots, each.time_per_token) for seed in SEEDS
        ]
        first, theirs = mine[case, policy][0], runs[RATE, case, policy][0]
        agree = math.isclose(first.mean_wait, theirs.mean_wait) and math.isclose(first.makespan, theirs.makespan)
        print(
            f"{case:6} {policy:11} mean wait {first.mean_wait:7.2f} s, makespan {first.makespan:6.1f} s, busy "
            f"{first.busy:6.1f} s, idle {first.idle_share:5.1%}   as the package's: {'yes' if agree else 'NO'}"
        )


def times(case, name):
    """Static over continuous, seed by seed; the median."""
    slow, fast = mine[case, "static"], mine[case, "continuous"]
    return median(getattr(s, name) / getattr(f, name) for s, f in zip(slow, fast, strict=True))


lab.reveal("08.makespan_ratio", round(times(MIXED, "makespan"), 2))
lab.reveal("08.wait_ratio", round(times(MIXED, "mean_wait"), 2))
lab.reveal("08.equal_ratio", round(times(EQUAL, "makespan"), 2))

# %% [markdown]
# The wait gains more than the makespan, because a queue that is served more slowly than it fills grows all the time.
# If $\mu$ requests are served and $\lambda$ arrive in a second, the last of $N$ waits about $N\,(1/\mu - 1/\lambda)$
# seconds. With the published 1.84 and 4.99 requests/s that is $600\,(1/1.84 - 1/11) = 272$ s under static and
# $600\,(1/4.99 - 1/11) = 66$ s under continuous; the published longest waits are 272.69 and 66.79 s.
#
# With equal lengths nothing is gained. Continuous batching lives on the *spread* of the lengths, and on nothing else
# in this model.

# %% [markdown]
# ## Build: the scheduler
#
# From the queue to the engine. `running` is a list and `waiting` a queue (`deque`) of requests; you may use
# `request.pending`, `request.computed` and `request.finish_reason`. `schedule` changes both: whoever joins leaves
# `waiting` at its left end and is appended to `running`. Take a budget of 4, and **A** and **B** with 7 tokens each.
# Alone, A gets 4, then 3. If B is waiting, it gets the 1 that A leaves; from then on A needs one token a step, and B
# gets the other 3.


# %% task="08.schedule"
def schedule(running: list, waiting: deque, budget: int, max_running: int) -> list:
    """Who computes how many tokens in the next step: [(request, n)], at most `budget` tokens in all, no n of 0.

    1. every running request with 1 pending token gets it, in the order of `running`;
    2. then running requests with more pending, in the order of `running`, as much as is left;
    3. then waiting ones join, first come, first served, while less than `max_running` run and budget is left.

    `waiting` loses whoever joins, `running` gains it at its end, and its order is kept. budget >= max_running.
    """
    ### BEGIN SOLUTION
    plan = []
    left = budget
    for request in sorted(running, key=lambda r: r.pending > 1):  # single tokens first, else in order
        if n := min(request.pending, left):
            plan.append((request, n))
            left -= n
    while waiting and left and len(running) < max_running:
        request = waiting.popleft()
        running.append(request)
        plan.append((request, min(request.pending, left)))
        left -= plan[-1][1]
    return plan
    ### END SOLUTION


# %%
lab.check("08", "schedule")

# %% [markdown]
# <details><summary>Hint 1</summary>Keep one number, what is left of the budget, and take every n off it at
# once.</details>
# <details><summary>Hint 2</summary>Three loops, one for each line of the docstring. Or two: Python's sort is stable, so
# sorting a <i>copy</i> of the running ones by "has more than one pending" keeps each kind in order.</details>
# <details><summary>Hint 3</summary>A newcomer that does not fit whole joins with a part of its prompt. Stop as soon as
# nothing is left, or you plan entries of 0 tokens, and somebody runs who does nothing.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: schedule</summary>
#
# `sorted` with the key `pending > 1` puts single tokens first and is stable, and leaves `running` itself alone. Each
# entry gets `min(pending, left)`. There are two common wrong answers. One goes through `running` in its own order: a
# long prompt that came first takes the whole budget, and texts that were growing stand still (prefill starves
# decode). The other lets a newcomer join only with its whole prompt: one that is longer than the budget waits for
# ever.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# After the step somebody has to do the books. `sampled` says which token was sampled for which request; it holds only
# those whose pending tokens were *all* computed in this step. `request.accept(token)` appends the token, decides
# whether the text ends with it (then `finish_reason` is set), and returns an `Event`, which is what a user sees.


# %% task="08.update"
def update(plan: list, sampled: dict, running: list) -> list:
    """After the step: plan [(request, n)] is computed, {request: token} was sampled. Returns the events, in its order.

    `computed` grows by n. Sampled tokens are accepted, each once. Finished requests leave `running`, the list itself,
    in this very step; all others stay, in order, also those that had no part in the plan.
    """
    ### BEGIN SOLUTION
    events = []
    for request, n in plan:
        request.computed += n
        if request in sampled:
            events.append(request.accept(sampled[request]))
    running[:] = [request for request in running if request.finish_reason is None]
    return events
    ### END SOLUTION


# %%
lab.check("08", "update")

# %% [markdown]
# <details><summary>Hint 1</summary>The token that is sampled now has not gone through the model: it is not computed.
# It is what makes <code>pending</code> 1 again.</details>
# <details><summary>Hint 2</summary>A prompt that is half computed is in the plan, but not in
# <code>sampled</code>.</details>
# <details><summary>Hint 3</summary>The caller holds the same list. Giving the name a new list inside your function
# changes nothing for the caller; assign to <code>running[:]</code>.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: update</summary>
#
# `computed += n` for everybody in the plan, `accept` for those in `sampled`, then the list is filled anew *in place*.
# The common wrong answer is `running = [...]`: it makes a new list and leaves the caller's as it was, so the finished
# request keeps its slot, is planned again, and is asked for a token after its end. The other one removes from the
# list while going through it, which skips the neighbour of everyone removed.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# Your two functions make a scheduler already, without any model: the example above, with a budget of 4 and made-up
# tokens. (This cell, `Break it` and the last measurement need your functions; all others run without them.)

# %%
A, B = (make_request([5] * 7, SamplingParams(max_tokens=most, seed=0), config, None, 64) for most in (6, 3))
NAMES = {A: "A", B: "B"}
on, queue = [], deque([A, B])
for step in range(1, 20):
    plan = schedule(on, queue, budget=4, max_running=2)
    gives = ", ".join(f"{NAMES[request]} gets {n}" for request, n in plan)
    events = update(plan, {request: 9 for request, n in plan if n == request.pending}, on)
    made = ", ".join(f"{NAMES[event.request]} has a new token" for event in events) or "nobody has a new token"
    ends = "".join(f", {NAMES[event.request]} ends" for event in events if event.finish_reason)
    print(f"step {step}: {gives}; {made}{ends}")
    if not on and not queue:
        break

# %% [markdown]
# ## Build: the loop
#
# Now with a model. The package gives the parts, most of them new to you. `RegionSlots` hands out rows of memory
# (`reserve(request, n)` for its next n tokens, `release(request)` when it has ended). `pack(plan, pool)` makes the
# tensors of one step from your plan. The model is called as before,
# `hidden = model(batch.tokens, batch.positions, GatherAttend(pool, batch))`, and `model.logits(rows of hidden)` gives
# logits. `sample(logits, requests)` returns a pair for each request, of which you need the first, the token.
# `batch.last` are the rows of the hidden states from which a token may be sampled, and `batch.samples` the requests
# they belong to. In some steps both are empty, for half a prompt samples nothing; `model.logits` and `sample` take that
# as it is.
#
# `Arrivals` is the queue in front of it all. Call `ask_arrivals()`, which is given, at the head of every turn.


# %% task="08.run"
def run(model, requests, budget: int, max_running: int):
    """Serves all requests and yields the events of every step.

    Each turn: ask who has arrived, schedule, reserve slots, pack, run the model, sample, update, release the slots of
    whoever has ended, and yield the events.
    """
    requests = list(requests)
    arrivals = Arrivals(requests)  # true while somebody is still to come
    size = max(request.most_slots for request in requests)
    slots = RegionSlots(max_running, size)
    pool = KVPool(model, max_running * size, max_running, size)
    running, waiting = [], deque()

    def ask_arrivals():  # they join the queue; it sleeps if there is nothing else to do
        waiting.extend(arrivals.take(len(requests), wait=not (running or waiting)))

    ### BEGIN SOLUTION
    while running or waiting or arrivals:
        ask_arrivals()
        plan = schedule(running, waiting, budget, max_running)
        for request, n in plan:
            slots.reserve(request, n)
        batch = pack(plan, pool)
        hidden = model(batch.tokens, batch.positions, GatherAttend(pool, batch))  # [T, d]
        tokens = [token for token, _ in sample(model.logits(hidden[batch.last]), batch.samples)]
        events = update(plan, dict(zip(batch.samples, tokens, strict=True)), running)
        for request, _ in plan:
            if request.finish_reason is not None:
                slots.release(request)
        yield from events
    ### END SOLUTION


# %%
lab.check("08", "run")

# %% [markdown]
# <details><summary>Hint 1</summary>The loop goes on while somebody runs, waits, or is still to come: three
# things.</details>
# <details><summary>Hint 2</summary>Reserve after planning and before packing: pack writes down where each token's K
# and V go. Release after update, which is what sets <code>finish_reason</code>.</details>
# <details><summary>Hint 3</summary>Rows of the hidden states: <code>hidden[batch.last]</code>, in the order of
# <code>batch.samples</code>. The k-th token belongs to the k-th of these, which <code>zip</code> turns into the
# dictionary that update wants. Then <code>yield from</code> what it returned.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: run</summary>
#
# Ask, schedule, reserve, pack, run, sample, update, release, yield: each is a line or two, in this order. The common
# wrong answers are about endings. `while waiting` stops when the queue is empty and leaves texts unfinished. Without
# `release` the rows run out as soon as more requests come than may run. And sampling at the end of *every* chunk
# appends a token in the middle of a prompt: the text goes on, and reads well, and is another text.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# ## Measure: a newcomer under a budget
#
# The real model now, and the newcomer of lessons 06 and 07. Eight requests run, with prompts of 7 tokens. One ends
# after 4 tokens, and a ninth with a prompt of $n = 100$ tokens takes its place in step 5, while seven others decode.
# The rectangle pushed 800 tokens in that step, the ragged step 107. Under a budget of $m = 32$, how many steps does
# the newcomer need until its first token? Each of the seven gets its one token first, in every step.

# %%
lab.predict("08.join_steps", None)

# %%
model = pack_weights(Llama.from_pretrained(folder))
tokenizer = Tokenizer.from_pretrained(folder)
ids = [token for prompt in load() for token in tokenizer.encode_chat(list(prompt.messages))]


def join(n, budget, outputs):
    """Seven requests that decode, one that ends early, and a newcomer of n tokens that takes its place in step 5."""
    seven = tuple(ids[:7])
    jobs = [Job(seven, 4), *[Job(seven, outputs)] * 7, Job(tuple(ids[:n]), 1)]
    return harness.run(model, "continuous", jobs, {"max_running": 8, "budget": budget})


LONG = lab.size(ci=120, default=900, long=1900)
counted = {}
print("newcomer  budget   steps to its first token            most tokens   its first   longest gap")
print("                   ceil(n / (m - 7))     counted         in a step       token   of the others")
for n, budget in ((100, 256), (100, 32), (LONG, 32), (LONG, 128), (LONG, 2048)):
    found = join(n, budget, outputs=lab.size(ci=12, default=60, long=120))
    steps = found.counts.steps
    pieces = [k for k, step in enumerate(steps) if 8 in step.new]
    first_token = found.times[8][0] - steps[pieces[0]].began
    gap = max(b - a for stamps in found.times[1:8] for a, b in zip(stamps, stamps[1:], strict=False))
    said = math.ceil(n / (budget - 7))
    most = max(step.tokens for step in steps)
    print(f"{n:8}{budget:8}{said:20}{len(pieces):12}{most:18}{first_token:10.3f} s{gap:14.3f} s")
    counted[n, budget] = len(pieces)
lab.reveal("08.join_steps", counted[100, 32])

# %% [markdown]
# A small budget keeps everybody's steps short and makes the newcomer wait; a large one does the reverse. The budget
# bounds the longest step, and so the longest time that a text stands still.

# %% [markdown]
# ## Measure: the same queue on the real engine
#
# Now the experiment of the table with the real model. Lengths are drawn from the same mix, shortened, so that it
# takes minutes; every prompt has 7 tokens. All requests are there at the start, so that the counters do not depend on
# your machine. `static` here is `minillm.bench.queueing.static`: the same engine, kernels and weights, where nobody
# enters before everybody has left. So the ratio shows what the *policy* buys.
#
# Your queues can say beforehand what will happen. Count time in *steps*: a prompt of 7 tokens fits into one step,
# whose end is the first token, so an output of $k$ tokens takes $k$ steps. Predict again, for this shorter run; there
# is a long tail now, when the last long text runs alone.

# %%
lab.predict("08.real_makespan_ratio", None)  # seconds of static over seconds of continuous

# %%
lab.predict("08.real_wait_ratio", None)

# %%
N, SLOTS = lab.size(ci=10, default=64, long=200), lab.size(ci=4, default=8, long=8)
MIX = ARTICLE_MIX.scaled(lab.size(ci=0.05, default=0.25, long=0.25))
LIMITS = {"max_running": SLOTS, "budget": 256}
demands = at_once(N, MIX, prompt=7, seed=0)
jobs = queueing.jobs_of(demands, ids)

real = {policy: [] for policy in PAIR}
for i in range(lab.size(ci=1, default=3, long=5)):  # rounds are interleaved, and each begins with another policy
    for policy in PAIR[:: -1 if i % 2 else 1]:
        real[policy].append(harness.run(model, policy, jobs, LIMITS, generate=queueing.POLICIES[policy]))


def first_steps(done):
    """For each request, how many steps there were before its first."""
    return [next(k for k, step in enumerate(done.counts.steps) if i in step.new) for i in range(len(done.jobs))]


# the package's queues, which are there whether or not yours are written; the check has compared them
predicted = {
    policy: getattr(policies, policy)([0] * N, [demand.output for demand in demands], SLOTS) for policy in PAIR
}
print(f"{N} requests, {SLOTS} slots, {sum(demand.output for demand in demands):,} output tokens")
for policy in PAIR:
    steps = len(real[policy][0].counts.steps)
    waits, said = sum(first_steps(real[policy][0])) / N, sum(predicted[policy].starts) / N
    seconds = sorted(max(t[-1] for t in done.times) for done in real[policy])
    print(
        f"{policy:11} makespan predicted {max(predicted[policy].ends):5.0f} steps, counted {steps:5}; "
        f"mean wait predicted {said:6.1f} steps, counted {waits:6.1f}; makespan {seconds[0]:.2f} to {seconds[-1]:.2f} s"
    )


def seconds_ratio(name):
    """Static over continuous, round by round; the median."""
    pairs = zip(*([queueing.figures_of(done, SLOTS) for done in real[policy]] for policy in PAIR), strict=True)
    return median(getattr(slow, name) / getattr(fast, name) for slow, fast in pairs)


lab.reveal("08.real_makespan_ratio", round(seconds_ratio("makespan"), 2))
lab.reveal("08.real_wait_ratio", round(seconds_ratio("mean_wait"), 2))
same_text = real["static"][0].outputs == real["continuous"][0].outputs
print(f"Both made {'the same text' if same_text else 'texts that differ where two tokens are close within rounding'}.")

# %% [markdown]
# The queue is exact: counted in steps, the engine does what the fixed-time model says, to the step. In seconds the
# ratio is another one, because steps are not equally long: one with fewer requests in it takes less time, so an idle
# slot of `static` costs less than a working one.
#
# Last, with requests that *arrive*, as in the table: Poisson arrivals at 2.15 times what continuous batching can
# serve, which is the table's own overload ($11 \times 941.1 / 600 / 8$: 941.1 s are what the slots were busy). The
# fixed-time line uses the same arrivals and, for each policy, the median time of a step of its run above.

# %%
best = min(max(t[-1] for t in done.times) for done in real["continuous"])
late = poisson_demands(N, 2.15 * N / best, MIX, prompt=7, seed=0)
late_jobs = queueing.jobs_of(late, ids)
found = {policy: {"published": PUBLISHED[MIXED, policy]} for policy in PAIR}
for policy in PAIR:
    step_time = median(step.ended - step.began for step in real[policy][0].counts.steps)
    durations = [demand.output * step_time for demand in late]
    fixed = getattr(policies, policy)([demand.arrival for demand in late], durations, SLOTS)
    found[policy]["fixed time"] = asdict(Figures.of(fixed, SLOTS))
    done = harness.run(model, policy, late_jobs, LIMITS, generate=queueing.POLICIES[policy])
    found[policy]["real engine"] = asdict(queueing.figures_of(done, SLOTS))
print("static, then continuous:  mean wait           makespan           idle         ratio of waits, of makespans")
for where in ("published", "fixed time", "real engine"):
    slow, fast = (found[policy][where] for policy in PAIR)
    waits = f"{slow['mean_wait'] / fast['mean_wait']:.2f}" if fast["mean_wait"] else "nobody waited"
    print(
        f"{where:12}"
        f"{slow['mean_wait']:15.2f} {fast['mean_wait']:7.2f} s {slow['makespan']:9.2f} {fast['makespan']:7.2f} s"
        f"{slow['idle_share']:9.0%} {fast['idle_share']:5.0%}{waits:>14} {slow['makespan'] / fast['makespan']:10.2f}"
    )

# %% [markdown]
# ## Plot

# %%
steps_said = [int(max(predicted[policy].ends)) for policy in PAIR]
steps_counted = [len(real[policy][0].counts.steps) for policy in PAIR]
seconds = {policy: [max(t[-1] for t in done.times) for done in real[policy]] for policy in PAIR}
middle = [median(seconds[policy]) for policy in PAIR]
spread = [[m - min(seconds[p]) for m, p in zip(middle, PAIR, strict=True)]]
spread += [[max(seconds[p]) - m for m, p in zip(middle, PAIR, strict=True)]]

figure = Figure(figsize=(9, 3.6), layout="constrained")
left, right = figure.subplots(1, 2)
for shift, values, shade, hatch, label in (
    (-0.2, steps_said, "white", "///", "predicted"),
    (0.2, steps_counted, "0.75", "", "counted"),
):
    at = [x + shift for x in range(2)]
    bars = left.bar(at, values, 0.38, color=shade, hatch=hatch, edgecolor="black", label=label)
    left.bar_label(bars, fmt="{:,.0f}", fontsize=9)
timed = right.bar(range(2), middle, 0.5, yerr=spread, capsize=6, color="0.75", edgecolor="black")
right.bar_label(timed, fmt="%.2f s", fontsize=9, label_type="center")
for axes, title, unit in (
    (left, "Predicted and counted", "steps until the last token"),
    (right, "Timed: median, fastest and slowest", "seconds"),
):
    axes.set_xticks(range(2), PAIR)
    axes.set_ylabel(unit)
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
left.set_ylim(0, 1.3 * max(steps_said))
left.yaxis.set_major_formatter("{x:,.0f}")
left.legend(frameon=False, loc="upper right")
lab.show(
    figure,
    f"Two bar charts of {N} requests on {SLOTS} slots. Left, steps: static {steps_said[0]:,} predicted and "
    f"{steps_counted[0]:,} counted, continuous {steps_said[1]:,} predicted and {steps_counted[1]:,} counted, a ratio "
    f"of {steps_counted[0] / steps_counted[1]:.2f}. Right, seconds: static {middle[0]:.2f}, continuous "
    f"{middle[1]:.2f}, a ratio of {middle[0] / middle[1]:.2f}.",
)

# %% [markdown]
# What the scheduler does is best seen as a timeline: a row for each request, a column for each step. Real prompts of
# many lengths, four at a time, a budget of 128. First the padded batch of lesson 06, then continuous batching. Look
# for the rows that go on after their text has ended, and for pieces of a prompt that fill a step up to the budget.

# %%
few = trace.make_jobs(tokenizer, config, lab.size(ci=5, default=10, long=12), lab.size(ci=6, default=30, long=40), None)
drawn = {}
for stage in ("padded", "continuous"):
    limits = trace.pick_limits(stage, 4, 128 if stage == "continuous" else None)
    drawn[stage] = trace.trace(model, stage, few, limits, None)
    timeline = drawn[stage][1]
    lab.show(trace.draw(timeline, name=folder.name), alt_text(timeline))

# %% [markdown]
# And your own loop? It is a stage like any other, so the harness can run it. Its steps must be those of the package.

# %%
own = harness.run(model, "mine", few, {"max_running": 4, "budget": 128}, generate=run)
theirs, timeline = drawn["continuous"]
print("the same tokens in every step:", [step.new for step in own.counts.steps] == [s.new for s in theirs.counts.steps])
print("the same text:", own.outputs == theirs.outputs)
print("P a piece of the prompt, d one more token, . waiting, - no token in this step")
for i in range(len(few)):
    print(f"request {i + 1:2} {letters(timeline, i)}")

# %% [markdown]
# ## Explain
#
# Write it between the quotes: *with equal lengths, all there at once, the queue gains nothing from continuous
# batching. Why? And what could a real service still gain from it then, which the queue with its fixed time per token
# cannot show?*

# %%
lab.answer("08.why", """ """)

# %% [markdown]
# <!-- BEGIN SOLUTION -->
# <details><summary>A good answer</summary>
#
# Slots that are filled together and work equally long are free together. Then "refill the slot that is free" and
# "refill all slots when all are free" are the same rule, so starts, waits and makespan are the same: the gain comes
# from the spread of lengths within a group, and there is none. A real service has more: nobody has to wait until a
# group is full, so at low load the first request starts at once; prompts differ even where outputs do not, and the
# budget lets a long one be computed beside texts that grow; and nobody knows lengths beforehand, so they are never
# equal.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# ## Break it
#
# Three named bugs, each wrapped around your own functions, so that the rest stays right. Choose one, guess whose
# property catches it first, then run the check.

# %%
mended = {"schedule": schedule, "update": update}


def last_come_first(running, waiting, budget, max_running):
    waiting.reverse()  # the bug: the queue is a stack
    plan = mended["schedule"](running, waiting, budget, max_running)
    waiting.reverse()
    return plan


def one_too_many(running, waiting, budget, max_running):
    return mended["schedule"](running, waiting, budget + 1, max_running)  # the bug: one more than the budget


def leaves_late(plan, sampled, running):
    before = list(running)
    events = mended["update"](plan, sampled, running)
    running[:] = before  # the bug: whoever has ended stays
    return events


BUG = leaves_late  # or last_come_first, or one_too_many

# %%
lab.predict("08.caught_by", None)  # "schedule", "update" or "run", in quotes

# %%
try:
    if BUG is leaves_late:
        update = BUG
    else:
        schedule = BUG
    lab.check("08", "schedule", "update", "run")
finally:
    schedule, update = mended["schedule"], mended["update"]
lab.reveal("08.caught_by", "update" if BUG is leaves_late else "schedule")

# %% [markdown]
# A finished request that stays is planned again, and is then asked for a token after its end. Note that `run` fails
# with it, though nothing in `run` is wrong: a check of the whole tells you *that* something is broken, a check of the
# part tells you *where*.
#
# ## Recap
#
# - A request is two counters, `len(tokens)` and `computed`. What is pending may be computed in any pieces, and a
#   token is sampled exactly when nothing is pending. Prefill and decode are words for large and small pieces.
# - A finished request leaves in the same step, and the next in line takes its slot in the next one. The gain over
#   static batching is what the slots idled, and comes from the spread of the lengths: none for equal ones.
# - The budget bounds the longest step, and so the longest gap between two tokens of everybody else. Single tokens
#   first, then prompts half computed, then newcomers: nobody starves.
# - Counted in steps the queue predicts the engine exactly. Only the time of a step belongs to the machine.
#
# What is still wasteful: every running request holds memory for the longest text it may become. Lesson 09 pages it.
#
# ## Exercises
#
# 1. Let a static group start with whoever is there, as [`stages/padded.py`](../minillm/stages/padded.py) does. Which
#    published figures leave their band? It shows that the article's groups wait until they are full. (difficulty 2/5,
#    importance 3/5, 20 minutes)
# 2. Let the shortest output start first. What happens to the mean wait, and to the longest? Who pays? Why can a real
#    server not do this? (difficulty 2/5, importance 4/5, 20 minutes)
# 3. Plot the longest gap and the newcomer's first token against the budget, for 12 budgets. Where would you put it if
#    nobody should wait more than 200 ms between two tokens? (difficulty 3/5, importance 5/5, 30 minutes)
# 4. Write `abort(request, running, waiting)`: a user hangs up, in the queue, half way through the prompt, or while
#    its step runs. Compare with `scheduler.py`. (difficulty 3/5, importance 4/5, 30 minutes)
# 5. Show Little's law on your own queues: mean number that wait = arrival rate × mean wait.
#    (difficulty 2/5, importance 2/5, 15 minutes)
#
# ## References
#
# - Yu et al. 2022, *Orca*: for iteration-level scheduling, the idea itself; its 36.9 times is at equal latency on
#   GPT-3 175B.
# - Agrawal et al. 2024, [*Sarathi-Serve*](https://arxiv.org/abs/2403.02310): for the token budget, and for figures of
#   texts that stall while a prompt is computed.
# - Kwon et al. 2023, [*PagedAttention*](https://arxiv.org/abs/2309.06180): for the memory that fixed regions waste;
#   it leads to lesson 09.
# - Hugging Face 2025, *Continuous batching from first principles*: for the same story in pictures, with the 7 tokens
#   of our example. (It calls the $(n - 1)(B - 1)$ pads quadratic; the product is linear in each of the two.)
# - Little 1961, *A proof for the queuing formula L = λW*: for exercise 5.
