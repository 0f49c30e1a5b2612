# %% [markdown]
# # 13 · Serving
#
# Requests arrive when they like, and behind each of them somebody watches a stream: what they wait for, why the waiting
# grows near capacity, whom to refuse, and what more machines would buy.
#
# [![Open this lesson in
# Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minillm/minillm/blob/v0.1.0/lessons/13_serving.ipynb)
#
# **Objectives.** After this lesson you can
#
# - *measure* what users see of a stream (ttft, tpot, gaps), and *say* which load generators flatter a server;
# - *write* both ends of a stream: a reader that survives any cut of the bytes, and the hand-over from the engine's
#   thread to many clients, of whom some are slow and some leave;
# - *predict* from arrivals and service times how long requests wait, and *show* why the tail grows near capacity;
# - *choose* a token budget, the length of a queue and a rule for replicas, and *say* who pays for each choice;
# - *compute* on paper what one GPU, eight and a thousand would serve, and what does not multiply.
#
# **Prerequisites:** lesson 08 (the loop, the budget, the two queues), lesson 09 (memory in blocks). You have seen
# `async def` and `await` before. **Minutes:** about 150, of which the machine needs about 4. **Hardware:** two CPU
# cores are enough. All traffic stays on this machine.
#
# **The one change:** the engine stays as it is. What changes is *who asks*: no longer a list of prompts that are all
# there, but people who come when they like, read as fast as they like, and leave when they like.

# %% tags=["setup"]
import asyncio
import bisect
import contextlib
import heapq
import http.client
import json
import math
import random
import threading
import time
from collections import OrderedDict, deque
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, pairwise
from statistics import fmean, linear_regression, median
from types import SimpleNamespace
from urllib.parse import urlsplit

import numpy as np
from matplotlib.figure import Figure

from minillm import lab
from minillm.bench.prompts import load as load_prompts
from minillm.config import Config
from minillm.engine import Engine
from minillm.fetch import find
from minillm.fusing import make_fast
from minillm.lab.checking import run_checks
from minillm.lab.checks.c13 import in_thread, read_all, read_some, serve
from minillm.lab.work import from_namespace
from minillm.model import Llama
from minillm.params import SamplingParams
from minillm.request import make_request
from minillm.scheduler import Scheduler
from minillm.sharing import SharedSlots
from minillm.simulation.steps import StepTime, capacity
from minillm.simulation.workload import Demand, Mix, at_once, poisson_demands
from minillm.slots import RegionSlots
from minillm.tokenizer import Tokenizer

# %%
lab.start("13")
folder = find("smollm2-135m-instruct")
config = Config.from_folder(folder)

# %% [markdown]
# ## The idea
#
# **Two numbers for one user.** Whoever sends a prompt first stares at nothing, then reads along. The first part is the
# *time to first token*, the second the *time per output token*:
#
# ```
#  sent             first token                                   last token
#   |                    |      |      |         |      |      |      |
#   |------ ttft --------|--gap-|--gap-|-- gap --|-gap--|-gap--|-gap--|        tpot = mean of the gaps
# ```
#
# People read some four words a second, so a tpot of 50 ms is fast enough for anybody, and one of 500 ms is not. A
# ttft of many seconds feels broken. Throughput, the number of all the lessons so far, is nothing that a user sees.
#
# **A queue is not a line of tokens.** A machine that can serve 10 requests a second and gets 9 has nothing to fear,
# one should think. But they do not come every 111 ms. Sometimes three come together, and sometimes nobody for a
# second. What was not done while nobody was there is lost, and the three must wait. The *load* (utilisation) is
# arrival rate times service time, $\rho = \lambda S$. The nearer it is to 1, the rarer are the pauses in which a queue
# can become short again: close to 1, waiting grows like $1 / (1 - \rho)$, and at $\rho = 1$ without end.
#
# **Somebody always pays.** A larger budget serves newcomers sooner, and those who are reading stand still meanwhile. A
# longer queue refuses nobody, and makes everybody late. A slow reader must cost memory or patience: whose? A second
# machine costs money. This lesson measures each of these trades.
#
# **Three loops.** In a server run an engine's loop, which wants to do one step after the other; an event loop with a
# thousand connections, which must never wait for anything; and each client's own. They may touch each other only at two
# places: an *inbox*, in which commands lie until the engine has finished its step, and a *queue for each request*, in
# which events lie until its client has taken them:
#
# ```
#   client 1 <~~~ bytes ~~~ handler 1 <--- queue 1 <---.
#   client 2 <~~~ bytes ~~~ handler 2 <--- queue 2 <---+-- deliver(events)  once a step -- engine's thread
#   client 3 <~~~ bytes ~~~ handler 3 <--- queue 3 <---'                                    |        ^
#                               '-------- submit, abort --------> inbox --- between two steps        |
#                                                                                            step, step, step
# ```
#
# In the package these are [`minillm/server/loop.py`](../minillm/server/loop.py) and
# [`minillm/server/stream.py`](../minillm/server/stream.py); HTTP lies around them.

# %% [markdown]
# ## Predict
#
# One token of this model is about 4 characters of English. How many *bytes* travel for each token, if each is sent as
# an event of OpenAI's API?

# %%
lab.predict("13.bytes", None)

# %% [markdown]
# Requests arrive at random, and take a random time to serve (exponentially distributed). At a load of 90 %, how many
# times as long do they wait on average as at 50 %?

# %%
lab.predict("13.wait", None)

# %% [markdown]
# A server answers each request in 10 ms. Once, in the middle of a test of 20 seconds, it stands still for a second. A
# client that sends its next request when the last one was answered finds a 99th percentile of 10 ms. What does the same
# server's 99th percentile look like, in *milliseconds*, to users of whom one comes every 20 ms?

# %%
lab.predict("13.p99", None)

# %% [markdown]
# One and a half times as many requests arrive as can be served, and none is refused. After three minutes, how many
# *percent* of them were served with a ttft below half a second?

# %%
lab.predict("13.good", None)

# %% [markdown]
# There are eight replicas, each under a load of 90 %. How many times shorter is the mean wait, if each request asks
# two of them, drawn at random, and goes to the less loaded one, than if it goes to one at random?

# %%
lab.predict("13.two", None)

# %% [markdown]
# ## Build: what a user sees
#
# All cells that measure use the functions that you have written by then.
#
# ### 1. Metrics
#
# `sent` is when a request was sent, or should have been; `times` are those of its tokens. All are seconds of one clock.
# By hand, sent at 10:
#
# | | | | | |
# |---|--:|--:|--:|--:|
# | token comes at | 10.5 | 10.75 | 11 | 11.5 |
# | ttft, gaps | **0.5** | 0.25 | 0.25 | 0.5 |
#
# So tpot is $(11.5 - 10.5) / 3 = 0.333$ s.


# %% task="13.metrics"
def metrics(sent: float, times: list[float]) -> tuple[float, float | None, list[float]]:
    """What the sender of one request saw: (ttft, tpot, gaps), in seconds. `times` has at least one entry.

    tpot is the mean gap. A text of one token has no gaps, and its tpot is None.
    """
    ### BEGIN SOLUTION
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return times[0] - sent, fmean(gaps) if gaps else None, gaps
    ### END SOLUTION


# %%
lab.check("13", "metrics")

# %% [markdown]
# <details><summary>Hint 1</summary>Four tokens have three gaps.</details>
# <details><summary>Hint 2</summary><code>itertools.pairwise(times)</code> gives each token with its next one.</details>
# <details><summary>Hint 3</summary>tpot is <code>(times[-1] - times[0]) / (len(times) - 1)</code>, which is the mean of
# the gaps; without gaps it is None.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: metrics</summary>
#
# The common wrong answer divides everything by everything, `(times[-1] - sent) / len(times)`. Then a long queue makes
# tpot worse, although the tokens came as fast as ever, and you look for the fault in the wrong place. The other one
# gives a text of one token a tpot of 0, the best of all, and the average improves with every user who got nothing.
# </details>
# <!-- END SOLUTION -->
#
# ### 2. Bytes that are cut anywhere
#
# Tokens travel as *server-sent events*: lines of text. An event ends with an empty line. Of its lines only those count
# that begin with `data:`; their text is what follows the colon, less *one* blank if there is one. If there are several,
# they are lines of one text; an event that has none is no event. A line that begins with a colon is a comment, which
# keeps a silent connection open. Lines may end in `\n` or `\r\n`.
#
# ```
# data: {"choices": [{"text": " Paris", ...}], ...}
#
# : still here
#
# data: [DONE]
#
# ```
#
# But a network knows of no events, it hands out *bytes*, as many as have come: half an event, three and a half, half
# of a letter. `feed` gets what was left over from last time and what came now. It returns the data of all events that
# are whole, and what is left over this time.


# %% task="13.feed"
def feed(rest: bytes, piece: bytes) -> tuple[list[str], bytes]:
    """More bytes of a stream of events: (the data of the events that are whole now, the bytes that still wait)."""
    ### BEGIN SOLUTION
    *whole, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
    events = []
    for event in whole:
        lines = [line.removeprefix(b"data:") for line in event.split(b"\n") if line.startswith(b"data:")]
        if lines:
            events.append(b"\n".join(line.removeprefix(b" ") for line in lines).decode())
    return events, rest
    ### END SOLUTION


# %%
lab.check("13", "feed")

# %% [markdown]
# <details><summary>Hint 1</summary>Put the two together first. Whatever was cut is whole again then, and you need no
# special case for any place of the cut.</details>
# <details><summary>Hint 2</summary><code>split(b"\n\n")</code> gives one part more than there are empty lines: the last
# one is what waits, even if it is empty. Turn <code>\r\n</code> into <code>\n</code> before.</details>
# <details><summary>Hint 3</summary><code>*whole, rest = ....split(b"\n\n")</code>. Then for each event its lines that
# begin with <code>b"data:"</code>, and <code>.decode()</code> at the very end.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: feed</summary>
#
# Join, split, keep the last part. There are three common wrong answers. One decodes each piece as it comes: that works
# for years, until a piece ends within an é. One looks for events in the piece alone, which works as long as the
# network is fast and every event comes in a packet of its own, as it does on your own machine. And one uses
# `splitlines` on text, which also splits at U+2028, a character that JSON may hold as it is.
# </details>
# <!-- END SOLUTION -->
#
# ## Measure: a stream, byte by byte
#
# Here is the real server: our engine behind HTTP, in a thread of this process, on a port that only this machine
# reaches. Its parts need FastAPI and uvicorn (`pip install 'minillm[serve]'`).

# %%
model = make_fast(Llama.from_pretrained(folder))
tokenizer = Tokenizer.from_pretrained(folder)


def new_engine(**limits):
    return Engine(
        model,
        tokenizer,
        backend="auto",
        slots=partial(SharedSlots, n_slots=None, size=16),
        **{"max_len": 2048, **limits},
    )


@contextmanager
def serving(most_waiting=1024, **limits):
    """The server on a free port, for the time of a `with` block: (its address, its engine's loop)."""
    from minillm.server.app import make_app
    from minillm.server.loop import EngineLoop
    from minillm.server.run import Server, listen, url_of

    loop = EngineLoop(new_engine(**limits), most_waiting)
    socket, ready = listen("127.0.0.1", 0), threading.Event()
    server = Server(make_app(loop, folder.name, tokenizer, live=False), loop, drain_seconds=5.0, ready=ready.set)
    thread = threading.Thread(target=server.run, args=([socket],), daemon=True)
    thread.start()
    assert ready.wait(60), "the server did not start"
    try:
        yield url_of(socket), loop
    finally:
        server.should_exit = True
        thread.join(60)


def ask(url, prompt, max_tokens, piece):
    """One request by hand: sends it, and gives the answer's bytes in pieces of this size, with the time of each."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    body = {"model": folder.name, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    sent = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    while data := response.read(piece):
        yield data, time.perf_counter() - sent
    connection.close()


PIECE = 7  # bytes
with serving(max_running=4) as (url, _):
    list(ask(url, "Once upon a time", 4, 4096))  # to warm up
    rest, n_bytes, text, token_times = b"", 0, "", []
    for data, at in ask(url, "The capital of France is", 24, PIECE):
        n_bytes += len(data)
        events, rest = feed(rest, data)
        for event in events:
            if n_bytes < 500:
                print(event[:110])
            if event != "[DONE]" and (new := json.loads(event)["choices"][0]["text"]):
                text += new
                token_times.append(at)
print(f"...\n{text!r}")
ttft, tpot, gaps = metrics(0.0, token_times)
print(f"{n_bytes:,} bytes came in pieces of {PIECE}: {len(token_times)} events with text, {len(text)} characters")
print(f"ttft {1e3 * ttft:.1f} ms, tpot {1e3 * tpot:.1f} ms, longest gap {1e3 * max(gaps):.1f} ms")
lab.reveal("13.bytes", round(n_bytes / len(token_times)))

# %% [markdown]
# For a few letters go two hundred bytes and more. On the wire that is nothing: a text at 20 tokens/s needs 4 to 5
# kB/s. But to make, send and read such an event costs some tens of microseconds of Python, each time. A step with 256
# texts makes 256 of them. We will come back to this with the thousand GPUs.
#
# ## Build: the queue in front
#
# ### 3. How long do they wait?
#
# Take one server that serves one request at a time, first come, first served. Requests arrive at random with `rate`
# per second, each independent of the others (a *Poisson process*). The time to serve one is drawn from the list
# `services`, each entry as likely. A newcomer has to wait for those in line and for what is left of the one in
# service. The result is Pollaczek's and Khinchine's:
#
# $$ W = \frac{\lambda \, \overline{S^2}}{2 (1 - \rho)}, \qquad \rho = \lambda \, \overline{S} $$
#
# The bar is the mean. So what counts is not only how much work arrives, but how *uneven* it is: one service of 8 s
# among seven of nothing makes others wait longer than eight of 1 s. If all are equal, $\overline{S^2} =
# \overline{S}^2$ (M/D/1); if they are exponential, $\overline{S^2} = 2 \overline{S}^2$ (M/M/1), and $W =
# \overline{S}\,\rho / (1 - \rho)$.


# %% task="13.mean_wait"
def mean_wait(rate: float, services: list[float]) -> float:
    """Seconds that a request waits on average before it is served. math.inf if work arrives as fast as it is done."""
    ### BEGIN SOLUTION
    load = rate * fmean(services)
    if load >= 1:
        return math.inf
    return rate * fmean(seconds * seconds for seconds in services) / (2 * (1 - load))
    ### END SOLUTION


# %%
lab.check("13", "mean_wait")

# %% [markdown]
# <details><summary>Hint 1</summary>The load first. If it is 1 or more, there is nothing to divide.</details>
# <details><summary>Hint 2</summary>The mean of the squares: square each entry, then take the mean.</details>
# <details><summary>Hint 3</summary><code>rate * fmean(s * s for s in services) / (2 * (1 - load))</code></details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: mean_wait</summary>
#
# The common wrong answer squares the mean. It is right for equal services, and tells you that a server with a few very
# long requests is as good as one without. The other one forgets that a load above 1 makes the formula *negative*: a
# dashboard then shows a wonderful wait on the day on which everything stands still.
# </details>
# <!-- END SOLUTION -->
#
# ### 4. A queue with an end
#
# The queue of lesson 08, `continuous` (in the package: [policies.py](../minillm/simulation/policies.py)), with one more
# rule. Who comes and finds all slots taken *and* `most_waiting` others waiting already is refused, at once. A refused
# request takes no slot and no place. The next cell plays 400,000 requests, so do not look through all starts for each
# of them: those of the admitted come in order. By hand, one slot, one place:
#
# | request | arrives | takes | finds | |
# |--:|--:|--:|---|---|
# | 0 | 0 | 4 | a free slot | starts at 0 |
# | 1 | 1 | 4 | the slot taken, nobody waiting | starts at 4 |
# | 2 | 2 | 4 | the slot taken, 1 waiting | refused: `None` |
# | 3 | 3 | 4 | the same | refused |
# | 4 | 6 | 4 | the slot taken, nobody waiting (1 runs) | starts at 8 |


# %% task="13.bounded"
def bounded(arrivals: list[float], durations: list[float], slots: int, most_waiting: float) -> list[float | None]:
    """First come, first served, on `slots` slots, and at most `most_waiting` (it may be math.inf) wait.

    Returns the start of each request, in the order of arrival; None: it was refused.
    """
    ### BEGIN SOLUTION
    free = [0.0] * slots  # a heap: when each slot is free
    waiting = deque()  # starts that lie ahead
    starts = []
    for arrival, duration in zip(arrivals, durations, strict=True):
        while waiting and waiting[0] <= arrival:
            waiting.popleft()
        start = max(arrival, free[0])
        if start > arrival and len(waiting) >= most_waiting:
            starts.append(None)
            continue
        heapq.heapreplace(free, start + duration)
        starts.append(start)
        waiting.append(start)
    return starts
    ### END SOLUTION


# %%
lab.check("13", "bounded")

# %% [markdown]
# <details><summary>Hint 1</summary>Begin with <code>continuous</code> of lesson 08: for each slot the time at which it
# is free, and the next request takes the one that is free first.</details>
# <details><summary>Hint 2</summary>You know the start of everybody whom you have let in. Who waits when somebody
# arrives? Those whose start is still to come.</details>
# <details><summary>Hint 3</summary>Refuse if <code>start > arrival</code> and so many starts lie after
# <code>arrival</code>; and leave <code>free</code> alone then. Starts never fall, so <code>bisect.bisect_right(starts,
# arrival)</code> of those let in says how many have begun.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: bounded</summary>
#
# Starts come in order (first come, first served), so a deque from which those are dropped that have begun is enough.
# The common wrong answer counts everybody in the house, running or waiting: with 8 slots and `most_waiting = 4` it
# refuses while four slots are idle. The next one lets the refused request take the slot that it does not use.
# </details>
# <!-- END SOLUTION -->
#
# ## Measure: why the tail grows
#
# One server, 1 second for each request on average, Poisson arrivals. Three kinds of work with the same mean: all
# equal; exponential; and lengths as in lesson 08's table (85 % short, 15 % long), scaled to a mean of 1. The formula
# is `mean_wait`, the simulation is `bounded` without an end.

# %%
KINDS = {"equal": lambda n, rng: [1.0] * n, "exponential": lambda n, rng: list(rng.exponential(1.0, n))}
ARTICLE = Mix(((0.85, 40, 200), (0.15, 400, 1000)))
KINDS["short and long"] = lambda n, rng: [tokens / ARTICLE.mean for tokens in ARTICLE.draw(n, rng)]
MANY = {kind: draw(100_000, np.random.default_rng(1)) for kind, draw in KINDS.items()}
MANY["exponential"] = [-math.log((i + 0.5) / 100_000) for i in range(100_000)]  # without the luck of the draw
LOADS = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
N = lab.size(ci=5_000, default=400_000, long=2_000_000)


def poisson(n, rate, rng):
    return list(np.cumsum(rng.exponential(1 / rate, n)))


said, played, tail = {}, {}, {}
print("load   equal: said, played    exponential: said, played    short and long: said, played    mean wait in seconds")
for load in LOADS:
    line = f"{load:4.2f}"
    for kind, draw in KINDS.items():
        rng = np.random.default_rng(0)
        services = draw(N, rng)
        arrivals = poisson(N, load, rng)
        starts = bounded(arrivals, services, 1, math.inf)
        waits = np.array(starts) - np.array(arrivals)
        said[kind, load] = mean_wait(load, MANY[kind])
        played[kind, load], tail[kind, load] = waits.mean(), np.percentile(waits, 99)
        line += f"{said[kind, load]:16.2f}{played[kind, load]:8.2f}"
    print(line)
lab.reveal("13.wait", round(said["exponential", 0.9] / said["exponential", 0.5], 1))

# %% [markdown]
# The 99th percentile, and a check of **Little's law**: the mean number in a queue is the arrival rate times the mean
# wait, $L = \lambda W$, whatever the order and whatever the distributions. Look at the queue at random moments and
# count.

# %%
print("load     99 of 100 wait less than (seconds)               mean number waiting: counted, rate x wait")
print("         " + "".join(f"{kind:>16}" for kind in KINDS))
for load in (0.5, 0.8, 0.9, 0.95):
    rng = np.random.default_rng(0)
    services = KINDS["exponential"](N, rng)
    arrivals = poisson(N, load, rng)
    starts = bounded(arrivals, services, 1, math.inf)
    looks = rng.uniform(0, arrivals[-1], 20_000)
    waiting = [bisect.bisect(arrivals, at) - bisect.bisect(starts, at) for at in looks]  # arrived, and not begun
    print(
        f"{load:4.2f}     "
        + "".join(f"{tail[kind, load]:16.1f}" for kind in KINDS)
        + f"{fmean(waiting):20.2f}{load * played['exponential', load]:10.2f}"
    )

# %%
figure = Figure(figsize=(9, 3.6), layout="constrained")
left, right = figure.subplots(1, 2)
for kind, style, marker in (("equal", "-", "o"), ("exponential", "--", "s"), ("short and long", ":", "^")):
    left.plot(LOADS, [said[kind, load] for load in LOADS], linestyle=style, color="0.4", label=f"{kind}: said")
    left.plot(LOADS, [played[kind, load] for load in LOADS], marker, color="black", label=f"{kind}: played")
    right.plot(LOADS, [tail[kind, load] for load in LOADS], linestyle=style, marker=marker, color="black", label=kind)
for axes, title in ((left, "Mean wait"), (right, "99th percentile of the wait")):
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel("load")
    axes.set_ylabel("seconds; one service takes 1 on average")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
points = "; ".join(f"{kind} {played[kind, 0.5]:.1f} at 0.5 and {played[kind, 0.95]:.0f} at 0.95" for kind in KINDS)
lab.show(
    figure,
    f"Two charts of the wait over the load, a line for each kind of work. Mean wait in service times: {points}. All "
    f"curves are flat at first and then rise ever more steeply towards a load of 1. The 99th percentile has the "
    f"same shape and is {tail['exponential', 0.9]:.0f} at 0.9 for exponential work.",
)

# %% [markdown]
# There is no corner at which the trouble begins: whenever what is left to 1 is halved, from 0.8 to 0.9 and from 0.9 to
# 0.95, the wait doubles. And the
# uneven work waits longest, with the same load. Outputs of language models are very uneven. Three remedies follow:
# keep the load below 0.7 or so; make the work less uneven; or serve many at once, so that a long one does not block
# the door. The third is what continuous batching does.
#
# ## Measure: a continuous batch as a server
#
# So how much of this holds for our engine, which takes several at a time, and slows down with each of them? Below is
# the package's real scheduler with a model that only takes time. So it needs no seconds of yours, and gives the same
# numbers everywhere. A step takes 8 ms, and 0.3 ms more for each token in it, and a bit for each position that is
# looked at: rounded from what two cores need for this model.

# %%
STEP = StepTime(base=8e-3, per_token=3e-4, per_position=4e-7, per_chunk=0.0)  # seconds
CHAT = Mix(((1.0, 8, 56),))  # output tokens, 32 on average
PROMPT, ROWS = 64, 16


def virtual(demands, budget=256, max_running=ROWS, step_time=STEP):
    """The scheduler on a clock that only steps move: when each token of each request comes, a list for each."""
    longest = max(demand.prompt + demand.output for demand in demands)
    scheduler = Scheduler(RegionSlots(max_running, longest), max_running, budget)
    requests = [
        make_request(
            [5] * demand.prompt,
            SamplingParams(max_tokens=demand.output, ignore_eos=True, seed=0),
            config,
            None,
            longest,
        )
        for demand in demands
    ]
    times = {request: [] for request in requests}
    clock, first = 0.0, 0
    while scheduler.busy or first < len(demands):
        if not scheduler.busy:
            clock = max(clock, demands[first].arrival)
        while first < len(demands) and demands[first].arrival <= clock:
            scheduler.waiting.add(requests[first])
            first += 1
        plan = scheduler.schedule()
        clock += step_time(sum(n for _, n in plan), sum(request.computed + n for request, n in plan), 0)
        for event in scheduler.update(plan, {request: (9, None) for request, n in plan if n == request.pending}):
            times[event.request].append(clock)
    return list(times.values())


def what_users_saw(demands, times):
    """(ttfts, tpots, all gaps) of everybody, by your metrics."""
    found = [metrics(demand.arrival, stamps) for demand, stamps in zip(demands, times, strict=True)]
    return (
        [ttft for ttft, _, _ in found],
        [tpot for _, tpot, _ in found if tpot is not None],
        [gap for _, _, gaps in found for gap in gaps],
    )


def percentiles_ms(values, *which):
    return [1e3 * float(value) for value in np.percentile(values, which)]


N_CHAT = lab.size(ci=120, default=1500, long=6000)
most = capacity(STEP, ROWS, at_once(N_CHAT, CHAT, PROMPT, seed=0), budget=256)
print(f"All at once, {ROWS} at a time: {most:.1f} requests/s. That is the capacity.")
print("load   requests/s   rows at work    ttft ms: p50     p95     p99       tpot ms: p50    p99      in the house")
sweep = {}
for load in (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95):
    demands = poisson_demands(N_CHAT, load * most, CHAT, PROMPT, seed=0)
    times = virtual(demands)
    ttfts, tpots, _ = what_users_saw(demands, times)
    sweep[load] = percentiles_ms(ttfts, 50, 95, 99), percentiles_ms(tpots, 50, 99)
    span = max(stamps[-1] for stamps in times)
    in_house = sum(stamps[-1] - demand.arrival for demand, stamps in zip(demands, times, strict=True)) / span
    at_work = sum(stamps[-1] - stamps[0] for stamps in times) / span
    print(
        f"{load:4.2f}{load * most:12.1f}{at_work:13.1f}      "
        + "".join(f"{value:9.0f}" for value in sweep[load][0])
        + "      "
        + "".join(f"{value:9.1f}" for value in sweep[load][1])
        + f"{in_house:15.1f}"
    )

# %% [markdown]
# Here load means something else than on one server: at 0.5 most slots are free, and nobody waits for one. What grows
# first is *tpot*, and gently: with more rows in a step, everybody's step is longer. It cannot grow beyond that of a
# full batch with a full budget of prompts. *ttft* hardly grows as long as a slot is free. Near capacity, now and then,
# there is none, and then it is a queue like any other: the tail of ttft leaves first, long before its median does.
#
# So the two numbers tell different stories: a high tpot says "busy", a high ttft says "full". The last column is
# Little's law put to use: the mean number of requests in the house, from how long each of them was there.
#
# ## Measure: who asks, and from when
#
# A *closed* loop has so many clients, each of which sends its next request when its last one has been answered. An
# *open* loop sends at times that were drawn before, whatever the server does. People are an open loop: they do not
# know that you are busy. A slow server slows a closed loop down, and so it measures mostly the good times. Watch the
# prediction: 10 ms each, and one pause of a second.

# %%
SERVICE, PAUSE = 0.010, 1.0
n = 1000
durations = [SERVICE] * n
durations[n // 2] += PAUSE
closed = durations  # the only client waits for each answer: nobody is in front of it
arrivals = [0.020 * i for i in range(n)]
starts = bounded(arrivals, durations, 1, math.inf)
ends = [start + duration for start, duration in zip(starts, durations, strict=True)]
from_due = [end - arrival for end, arrival in zip(ends, arrivals, strict=True)]
# a generator with one connection, as most are: late with a request, it takes the time from when it got round to it
from_sent, ready = [], 0.0
for due, duration in zip(arrivals, durations, strict=True):
    sent = max(due, ready)
    ready = sent + duration
    from_sent.append(ready - sent)
print("latency in ms                                         mean      p95      p99     max")
for name, values in (
    ("closed: one client, one after the other", closed),
    ("every 20 ms, timed from when it was sent", from_sent),
    ("every 20 ms, timed from when it was due", from_due),
):
    cells = "".join(f"{value:9.0f}" for value in [1e3 * fmean(values), *percentiles_ms(values, 95, 99, 100)])
    print(f"{name:45}{cells}")
lab.reveal("13.p99", round(percentiles_ms(from_due, 99)[0]))

# %% [markdown]
# One sample of a thousand saw the pause, and a hundred users did. The middle line is the treacherous one: it looks
# like an open loop, but whoever is sent late is timed from then. Gil Tene calls it *coordinated omission*: the client
# agrees with the server on leaving the bad times out. Hence `sent` in your `metrics` is when a request was *due*.
# `minillm load` does so, too.
#
# A closed loop is not wrong; it answers another question: how much can be served, with so many at once? It cannot show
# a queue without end, for there are never more than its clients.
#
# ## Measure: the budget and the tail
#
# Lesson 08 had a newcomer with a long prompt join texts that grow. Under load there is always such a newcomer. Here 1
# request in 8 has a prompt of 2,000 tokens, the others 64; load is 0.6. A budget of $m$ tokens bounds the step, so it
# bounds the gaps of those who read; and it cuts the long prompts into more pieces.

# %%
LONG = lab.size(ci=400, default=2000, long=2000)
N_MIXED = lab.size(ci=80, default=800, long=3000)
rng = np.random.default_rng(2)
outputs, longs = CHAT.draw(N_MIXED, rng), rng.random(N_MIXED) < 1 / 8
everyone = [Demand(0.0, LONG if big else PROMPT, out) for big, out in zip(longs, outputs, strict=True)]
rate = 0.6 * capacity(STEP, ROWS, everyone, budget=512)
mixed = [Demand(float(at), d.prompt, d.output) for at, d in zip(poisson(N_MIXED, rate, rng), everyone, strict=True)]
print("                steps for a    ttft of long prompts    ttft of short ones       gap between two tokens")
print("budget   long prompt alone         p50       p95          p50       p95         p50      p99      max     ms")
budgets = {}
for budget in (16, 32, 64, 128, 256, 512, 2048):
    times = virtual(mixed, budget=budget)
    ttfts, _, gaps = what_users_saw(mixed, times)
    big, small = (
        [t for t, d in zip(ttfts, mixed, strict=True) if (d.prompt == LONG) == kind] for kind in (True, False)
    )
    budgets[budget] = percentiles_ms(big, 50, 95), percentiles_ms(small, 50, 95), percentiles_ms(gaps, 50, 99, 100)
    cells = ["".join(f"{value:10.0f}" for value in part) for part in budgets[budget]]
    print(f"{budget:6}{math.ceil(LONG / budget):20}{cells[0]:>24}{cells[1]:>23}{cells[2]:>31}")

# %% [markdown]
# Read the last columns upwards, and the first downwards. A budget of 2,048 lets a long prompt through in one step, in
# which all others stand still for 0.6 s. One of 16 is all decode and nearly no prompt: the steps are short,
# but there are so many of them, each with its 8 ms that are always there, that the machine cannot keep up at all, and
# everybody waits. In between lies a wide valley. Nobody escapes: what the budget takes from the gaps, it gives to
# ttft. (Sarathi-Serve is the paper on this; DistServe goes further and computes prompts on machines of their own.)
#
# ## Build: goodput
#
# ### 5. What counts
#
# Throughput counts answers that came too late, too. *Goodput* is the number of requests per second that kept what was
# promised, both limits at once. `seen` has a pair (ttft, tpot) for each request that was answered, and None for each
# that was refused or failed. A text of one token has a tpot of None: whatever the limit, it keeps it.


# %% task="13.goodput"
def goodput(seen: list[tuple[float, float | None] | None], seconds: float, most_ttft: float, most_tpot: float) -> float:
    """Requests per second, over a run of so many seconds, whose ttft and tpot are at most these."""
    ### BEGIN SOLUTION
    answered = [pair for pair in seen if pair is not None]
    good = [ttft <= most_ttft and (tpot is None or tpot <= most_tpot) for ttft, tpot in answered]
    return sum(good) / seconds
    ### END SOLUTION


# %%
lab.check("13", "goodput")

# %% [markdown]
# <details><summary>Hint 1</summary>Count, then divide by the seconds: it is a rate, not a share.</details>
# <details><summary>Hint 2</summary>There are two different Nones. One says: not answered. The other says: one
# token.</details>
# <details><summary>Hint 3</summary>Mind <code>if tpot and ...</code>: 0.0 is a number, and false.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: goodput</summary>
#
# The common wrong answer divides by the number of requests. A share of 100 % is easy: refuse nearly everybody. Another
# one counts those who kept *either* limit, by adding up two goodputs. And one takes a refusal for a very fast answer,
# which it is, but not to the one who asked.
# </details>
# <!-- END SOLUTION -->
#
# ## Measure: back-pressure
#
# What if more arrive than can be served? Eight slots, a token takes 20 ms, 8 to 56 of them: 12.5 requests/s are the
# capacity. A request is good with a ttft of at most 0.5 s. Once everybody is let in; once at most 6 wait, and the rest
# is told at once to come later.

# %%
TOKEN, SLOTS, LIMIT = 0.020, 8, 0.5
N_PRESS = lab.size(ci=400, default=3400, long=20_000)
at_most = SLOTS / (TOKEN * CHAT.mean)
pressed = {}
print("offered    everybody let in: good    p50 of ttft      at most 6 wait: good    refused    p99 of ttft")
for load in (0.4, 0.7, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0):
    rng = np.random.default_rng(3)
    outputs = CHAT.draw(N_PRESS, rng)
    arrivals, durations = poisson(N_PRESS, load * at_most, rng), [TOKEN * tokens for tokens in outputs]
    for room in (math.inf, 6):
        starts = bounded(arrivals, durations, SLOTS, room)
        ttfts = [None if s is None else s - a + TOKEN for s, a in zip(starts, arrivals, strict=True)]
        seen = [None if ttft is None else (ttft, TOKEN) for ttft in ttfts]
        served = [ttft for ttft in ttfts if ttft is not None]
        seconds = arrivals[-1]
        pressed[load, room] = (
            goodput(seen, seconds, LIMIT, 2 * TOKEN),
            percentiles_ms(served, 50, 99),
            seen.count(None) / N_PRESS,
            sum(ttft <= LIMIT for ttft in served) / N_PRESS,
        )
    (good, (middle, _), _, _), (good6, (_, late), refused, _) = pressed[load, math.inf], pressed[load, 6]
    print(f"{load:4.2f} x{good:22.1f}/s{middle / 1e3:14.2f} s{good6:22.1f}/s{refused:12.0%}{late / 1e3:13.2f} s")
lab.reveal("13.good", round(100 * pressed[1.5, math.inf][3], 1))

# %%
figure = Figure(figsize=(6.5, 3.4), layout="constrained")
axes = figure.subplots()
offered = sorted({load for load, _ in pressed})
for room, style, marker, name in ((6, "-", "o", "at most 6 wait"), (math.inf, "--", "s", "everybody is let in")):
    values = [pressed[load, room][0] for load in offered]
    axes.plot([load * at_most for load in offered], values, linestyle=style, marker=marker, color="black", label=name)
axes.axvline(at_most, color="0.5", linestyle=":", label="capacity")
axes.set_xlabel("requests/s offered")
axes.set_ylabel("good requests/s")
axes.set_ylim(0)
axes.set_title("Goodput: ttft at most 0.5 s", loc="left", fontsize=10)
axes.spines[["top", "right"]].set_visible(False)
axes.legend(frameon=False, fontsize=8)
lab.show(
    figure,
    f"A line chart of good requests per second over those offered, capacity {at_most:.1f}. With at most 6 waiting it "
    f"rises to {pressed[1.0, 6][0]:.1f} at capacity and is {pressed[2.0, 6][0]:.1f} at twice as many. With "
    f"everybody let in it is {pressed[0.9, math.inf][0]:.1f} at 0.9 of capacity and falls to "
    f"{pressed[1.5, math.inf][0]:.1f} at 1.5 and {pressed[2.0, math.inf][0]:.1f} at 2.",
)

# %% [markdown]
# Past capacity somebody must be disappointed. A queue with an end disappoints those who are too many, and says so in a
# millisecond (HTTP 429, with `Retry-After`). A queue without one disappoints *everybody*, and works hard at it: each
# answer is right, and late. The machine is as busy in both cases. How long should the queue be? About as long as what
# can be served within the limit: $6 / 12.5 \approx 0.5$ s.
#
# ## Build: the hand-over
#
# ### 6. The engine's thread
#
# Nobody else may touch the engine: two threads in one scheduler would corrupt it. So whoever wants something puts a
# *command* into the inbox: a function that is called with the engine, such as `lambda engine: engine.submit(request)`.
# The engine's thread takes commands between two steps.
#
# - `inbox.get()` takes the first command, and *sleeps* until there is one; `inbox.empty()` says whether there is none.
# - `engine.busy` says whether there is anything to compute; `engine.step()` computes one step and returns its events.
# - `deliver(events)` hands them over to the event loop. That wakes it up, so do it once a step, and not for nothing: in
#   some steps, pieces of prompts, there are none.
# - The command `None` is the end.


# %% task="13.engine_thread"
def engine_thread(engine, inbox, deliver) -> None:
    """Owns the engine. Before each step it does all commands that lie in the inbox, in order; None: it returns at once.

    With nothing to compute it sleeps in `inbox.get()`. After a step, `deliver` gets its events, if there are any.
    """
    ### BEGIN SOLUTION
    while True:
        while not engine.busy or not inbox.empty():
            command = inbox.get()  # sleeps if there is nothing at all to do
            if command is None:
                return
            command(engine)
        if events := engine.step():
            deliver(events)
    ### END SOLUTION


# %%
lab.check("13", "engine_thread")

# %% [markdown]
# <details><summary>Hint 1</summary>Two loops: an outer one for steps, and an inner one for commands.</details>
# <details><summary>Hint 2</summary>When may you call <code>get</code>? If there is something in the inbox, it returns
# at once; if there is nothing in it, you may sleep only if there is nothing to compute either.</details>
# <details><summary>Hint 3</summary><code>while not engine.busy or not inbox.empty():</code> is the inner loop's head. A
# command may leave the engine idle (an abort of somebody who has ended), and the loop then sleeps again.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: engine_thread</summary>
#
# The common wrong answer takes *one* command, then makes one step. At 100 arrivals in a second and 20 steps, the inbox
# grows and grows, aborts among it: the server computes for people who left minutes ago. The second one waits with
# `get()` in every turn: streams then move on only when somebody new comes. The third one never sleeps, `get_nowait` in
# a circle: all is well, and a core is gone. And looking into the inbox only when idle is static batching by accident.
# </details>
# <!-- END SOLUTION -->
#
# ### 7. One client
#
# Now the other side, in the event loop. The handler of each client runs `async for event in answer(...)`, and sends
# what it gets. The package's half, which is given:
#
# ```python
# def put(events):                                   # runs in the event loop
#     for event in events:
#         if event.request in queues:                # else its client has left
#             queues[event.request].put_nowait(event)
#
# def deliver(events):                               # runs in the engine's thread
#     event_loop.call_soon_threadsafe(put, events)
# ```
#
# Yours: make an `asyncio.Queue` for the request, under `queues[request]`; put a command into the inbox,
# `inbox.put(lambda engine: engine.submit(request))`; yield each event from the queue; end after the one whose
# `finish_reason` is not None. And when it is over, *however* it is over, take the queue away. If the text has not ended
# by then, the client has left: send the command `engine.abort(request.id)` in the same way, so that the engine stops
# computing it and its blocks are free.
#
# A client that leaves shows in two ways. At a `yield`, the generator is closed (`GeneratorExit` is raised there); at an
# `await`, the handler's task is cancelled (`CancelledError`).


# %% task="13.answer"
async def answer(request, queues: dict, inbox):
    """The events of one request, as they are made: an async generator, for the handler of one client."""
    ### BEGIN SOLUTION
    queues[request] = events = asyncio.Queue()
    inbox.put(lambda engine: engine.submit(request))
    ended = False
    try:
        while not ended:
            event = await events.get()
            ended = event.finish_reason is not None
            yield event
    finally:
        del queues[request]
        if not ended:
            inbox.put(lambda engine: engine.abort(request.id))
    ### END SOLUTION


# %%
lab.check("13", "answer")

# %% [markdown]
# <details><summary>Hint 1</summary>What must happen at the end in any case goes into <code>finally</code>.</details>
# <details><summary>Hint 2</summary>The engine's thread may be faster than you. Is the queue there before the first
# event can be?</details>
# <details><summary>Hint 3</summary>The client may leave at the <code>yield</code> of the last event. Set
# <code>ended</code> before it.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: answer</summary>
#
# The common wrong answer has no `finally`: all tests with friendly clients pass. Then people close their tabs, and the
# engine writes to nobody until `max_tokens`. The next one catches `GeneratorExit` only, or `Exception`: a client that
# leaves while it waits for its *first* token, the impatient one, is cancelled at the `await`, and `CancelledError` is
# neither. The third one gives the queue a length, "so that a slow reader cannot fill memory". But who should wait
# then? The engine's side cannot, all others are behind it. What a request can leave unread is bounded already, by its
# `max_tokens`.
# </details>
# <!-- END SOLUTION -->
#
# ## Measure: one reads, one dawdles, one leaves
#
# Your two functions on the real engine: three clients, no HTTP. A reads as fast as it can. B reads too, but takes 25
# ms over each token. C leaves after 3 of 200 tokens. All are in the same batch. For how many steps is C computed after
# it has left, and whom does B slow down?

# %%
lab.predict("13.left", None)  # steps with C in them, beyond the 3 that made what it read

# %%
TOKENS = lab.size(ci=12, default=40, long=100)


async def dawdle(stream):
    """A client that takes its time over every token."""
    got = []
    async with contextlib.aclosing(stream):
        async for event in stream:
            got.append(event.token)
            await asyncio.sleep(0.025)
    return got


engine = new_engine(max_running=4, budget=64)
prompt = tokenizer.encode("Once upon a time there was")
made = [
    make_request(prompt, SamplingParams(max_tokens=most, temperature=0, ignore_eos=True), config, None, 512)
    for most in (TOKENS, TOKENS, 200)
]
names = dict(zip(made, "ABC", strict=True))
plans = []


def remembered(schedule=engine.scheduler.schedule):
    plan = schedule()
    plans.append({names[request]: n for request, n in plan})
    return plan


engine.scheduler.schedule = remembered
clients = {made[0]: read_all, made[1]: dawdle, made[2]: partial(read_some, 3)}
# serve: your engine_thread in a thread, and for each client a reader of your answer; read_some leaves after 3 tokens
texts = in_thread(lambda: serve(engine_thread, answer, engine, clients))
for request, name in names.items():
    steps = [i for i, plan in enumerate(plans, 1) if name in plan]
    print(
        f"{name}: read {len(texts[request]):3} tokens, was computed in steps {steps[0]} to {steps[-1]}, ended by "
        f"{request.finish_reason!r}"
    )
print("A and B got the same text:", texts[made[0]] == texts[made[1]])
print(f"{len(plans)} steps in all; requests that still hold blocks: {sum(bool(request.blocks) for request in made)}")
lab.reveal("13.left", sum("C" in plan for plan in plans) - 3)

# %% [markdown]
# B was computed in the same steps as A, though it read for much longer: what it had not read lay in its queue. Nobody
# else knew. C cost a few steps too many, if any: those that were made until its handler had read its tokens and its
# command was in the inbox. (How many depends on threads, so it is not the same each time; on a fast device it is more.)
#
# With HTTP in between there is one more buffer, the connection's own. When it is full, `await send(...)` waits: for
# this handler alone. One that takes nothing for a minute is cut off.
#
# ## Measure: the real server under load
#
# Now all of it: engine, thread, HTTP, and `minillm load` as the client, in one process on your machine. First a closed
# loop with as many clients as there are slots: that is the capacity. Every step is watched on the way: what was in it,
# and how long it took.

# %%
NEW = 24  # tokens of each answer
REAL_ROWS = lab.size(ci=4, default=8, long=16)


def drive(url, characters=240, **plan):
    """The package's load generator: [(a run with its `answers`, its figures)]."""
    from minillm.bench.load import Plan, Target, measure
    from minillm.bench.load_http import Server
    from minillm.bench.load_prompts import Prompts
    from minillm.bench.load_rows import summarize
    from minillm.bench.load_server import find_model

    async def go():
        server, name = await find_model(Server.parse(url), None)
        asked = Plan(max_tokens=NEW, ignore_eos=True, **plan)
        prompts = Prompts(asked.seed, "chat", NEW, True, characters)
        runs = []
        try:
            await measure([Target(server, name, prompts)], asked, runs, lambda *_: None)
        finally:
            server.close()
        return [(run, summarize(run)) for run in runs]

    return in_thread(go, "the load", seconds=600)


def pairs(run):
    """(ttft, tpot) of each answer by your metrics, from when it was due; None where there was none."""
    return [metrics(a.scheduled, a.times)[:2] if a.whole else None for a in run.answers]


records = []
with serving(max_running=REAL_ROWS, budget=256) as (url, loop):
    loop.watchers.append(records.append)
    [(run, row)] = drive(url, clients=REAL_ROWS, requests=lab.size(ci=12, default=80, long=300))
real_most = row.request_throughput
n_prompt = round(row.prompt_tokens / row.completed)
print(f"{row.completed} requests, {n_prompt} prompt tokens and {NEW} new ones each, {REAL_ROWS} clients:")
print(f"{real_most:.2f} requests/s, {row.output_throughput:.0f} tokens/s: that is the capacity, closed loop")
saw = [pair for pair in pairs(run) if pair]
print(
    f"ttft p50 {1e3 * median(ttft for ttft, _ in saw):.0f} ms, tpot p50 {1e3 * median(tpot for _, tpot in saw):.1f} ms"
)
same_as = np.allclose(
    [median(t for t, _ in saw), median(t for _, t in saw)], [row.ttft.median, row.tpot.median], rtol=0.05
)
print(f"Your metrics and the load generator's agree within 5 %: {'yes' if same_as else 'no'}")
tokens_of = [sum(n for _, n in record.plan) for record in records if record.plan]
seconds_of = [record.ended - record.began for record in records if record.plan]
slope, base = linear_regression(tokens_of, seconds_of)
print(
    f"A step takes about {1e3 * base:.1f} ms + {1e3 * slope:.2f} ms for each token in it, over {len(tokens_of)} steps."
)

# %% [markdown]
# From this line your machine's own curve can be *predicted*: the same arrivals and lengths go through `virtual`, with
# this step time. Then the real server gets them in an open loop.

# %%
N_REAL = lab.size(ci=10, default=90, long=300)
real_step = StepTime(base=max(base, 1e-3), per_token=max(slope, 1e-6), per_position=0.0, per_chunk=0.0)
fractions = lab.size(ci=(0.5, 1.2), default=(0.3, 0.6, 0.8, 0.95, 1.2), long=(0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2))
rates = tuple(round(fraction * real_most, 2) for fraction in fractions)
with serving(max_running=REAL_ROWS, budget=256) as (url, loop):
    runs = drive(url, rates=rates, requests=N_REAL, seed=13)
curve = []
print("            predicted, ms:                         measured, ms:                                   most at")
print("load  req/s   ttft p50     p95   tpot p50       ttft p50     p95   tpot p50     p95    served/s      once")
for fraction, (run, row) in zip(fractions, runs, strict=True):
    due = [a.scheduled - run.health.began for a in run.answers]
    demands = [Demand(at, n_prompt, NEW) for at in due]
    ttfts, tpots, _ = what_users_saw(demands, virtual(demands, max_running=REAL_ROWS, step_time=real_step))
    saw = [pair for pair in pairs(run) if pair]
    first, second = [t for t, _ in saw], [t for _, t in saw]
    curve.append(
        (
            percentiles_ms(ttfts, 50, 95),
            percentiles_ms(tpots, 50),
            percentiles_ms(first, 50, 95),
            percentiles_ms(second, 50, 95),
        )
    )
    cells = [" ".join(f"{value:8.1f}" for value in part) for part in curve[-1]]
    print(
        f"{fraction:4.2f}{run.rate:7.2f}  {cells[0]}   {cells[1]}      {cells[2]}   {cells[3]}"
        f"{row.request_throughput:11.2f}{row.most_open:10}"
    )
n_failed = sum(answer.fault is not None for run, _ in runs for answer in run.answers)
print(f"Client and server share this process and its cores; {n_failed} requests failed.")

# %%
figure = Figure(figsize=(9, 3.6), layout="constrained")
for axes, name, columns in zip(figure.subplots(1, 2), ("ttft", "tpot"), ((0, 2), (1, 3)), strict=True):
    for column, style, grey, who in ((columns[0], "--", "0.55", "predicted"), (columns[1], "-", "0", "measured")):
        for i, part in enumerate(("p50", "p95")[: len(curve[0][column])]):
            values = [line[column][i] for line in curve]
            axes.plot(rates, values, linestyle=style, marker="os"[i], color=grey, label=f"{who}, {part}")
    axes.axvline(real_most, color="0.7", linestyle=":", label="capacity")
    axes.set_title(name, loc="left", fontsize=10)
    axes.set_xlabel("requests/s offered")
    axes.set_ylabel("ms")
    axes.set_ylim(0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
lowest, highest = curve[0], curve[-1]
lab.show(
    figure,
    f"Two line charts over the requests per second offered to the real server, whose capacity is {real_most:.1f}. "
    f"ttft: at {rates[0]:g} requests/s a median of {lowest[2][0]:.0f} ms (predicted {lowest[0][0]:.0f}) and a p95 of "
    f"{lowest[2][1]:.0f}; at {rates[-1]:g} a median of {highest[2][0]:.0f} (predicted {highest[0][0]:.0f}) and a p95 "
    f"of {highest[2][1]:.0f}. tpot grows from {lowest[3][0]:.1f} to {highest[3][0]:.1f} ms.",
)

# %% [markdown]
# On a quiet machine the shape is the one that the clock without a machine has shown: tpot first and gently, ttft late
# and steeply. Where prediction and measurement differ, it is by what a line of two numbers leaves out: HTTP,
# tokenising, a client that shares the cores, and whatever else runs on them. And with so few requests a p95 is the word
# of four or five people: run it again with another seed.
#
# Past capacity, with an end to the queue and without. A good request has its first token within a second.

# %%
press = round(1.8 * real_most, 2)
print(f"{press:g} requests/s offered, {real_most:.1f} can be served")
for room in (1024, REAL_ROWS // 2):
    with serving(most_waiting=room, max_running=REAL_ROWS, budget=256) as (url, loop):
        [(run, row)] = drive(url, rates=(press,), requests=lab.size(ci=20, default=140, long=500), seed=14)
    seen = pairs(run)
    first = [pair[0] for pair in seen if pair]
    kept = goodput(seen, row.wall, most_ttft=1.0, most_tpot=0.2)
    told = sorted(a.ended - a.sent for a in run.answers if a.fault is not None)
    refused = (
        f"{len(told)} refused ({dict(row.faults)}), half of them within {1e3 * median(told):.0f} ms"
        if told
        else "0 refused"
    )
    middle, late = percentiles_ms(first, 50, 95)
    print(
        f"at most {room:4} wait: {row.completed} of {row.sent} served, ttft p50 {middle:.0f} ms, p95 {late:.0f} ms, "
        f"goodput {kept:.2f}/s; {refused}"
    )

# %% [markdown]
# And the budget, with the package's own prompts, short and long, at 60 % of what the line above says it can do with
# them.

# %%
lengths = [len(tokenizer.encode_chat(list(prompt.messages))) for prompt in load_prompts()]
most_real = capacity(real_step, 8, [Demand(0.0, length, NEW) for length in lengths], budget=512)
rate = round(0.6 * most_real, 2)
print(f"prompts of {min(lengths)} to {max(lengths):,} tokens, {rate:g} requests/s")
found = {}
for budget in (16, 64, 512):
    records = []
    with serving(max_running=8, budget=budget) as (url, loop):
        loop.watchers.append(records.append)
        [(run, row)] = drive(
            url, characters=None, rates=(rate,), requests=lab.size(ci=6, default=36, long=150), seed=15
        )
    gaps = [gap for a in run.answers if a.whole for gap in metrics(a.scheduled, a.times)[2]]
    first = [pair[0] for pair in pairs(run) if pair]
    longest = max(sum(n for _, n in record.plan) for record in records)
    cells = [f"{value:8.0f}" for value in (*percentiles_ms(first, 50, 95), *percentiles_ms(gaps, 50, 99, 100))]
    if not found:
        print("budget   steps   most tokens in one   ttft p50     p95   gap p50     p99     max   ms")
    print(f"{budget:6}{len(records):8}{longest:21}   " + "".join(cells))
    found[budget] = len(records), longest

# %% [markdown]
# Steps and tokens are counted, and carry the argument; the times are your machine's, today.
#
# ## Build: more than one
#
# ### 8. Two choices
#
# Several replicas of the engine stand behind one address, each with a queue of its own. Who gets the next request? To
# ask all of them how loaded they are is dear when there are a thousand, and the answers are old when they come.
# Drawing one at random costs nothing. In between: draw *two different* ones, and take the one with less to do.


# %% task="13.two_choices"
def two_choices(loads: list[int], draw: random.Random) -> int:
    """Of two different replicas, drawn by `draw`, the number of the one with the smaller load. Of one replica: 0."""
    ### BEGIN SOLUTION
    if len(loads) == 1:
        return 0
    one, other = draw.sample(range(len(loads)), 2)
    return one if loads[one] <= loads[other] else other
    ### END SOLUTION


# %%
lab.check("13", "two_choices")

# %% [markdown]
# <details><summary>Hint 1</summary><code>draw.sample(range(n), 2)</code> gives two different numbers.</details>
# <details><summary>Hint 2</summary>It cannot draw two of one.</details>
# <details><summary>Hint 3</summary>With equal loads take the one that was drawn first: if you prefer the smaller
# number, an idle cluster sends everything to the first machines.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: two_choices</summary>
#
# The common wrong answer draws with replacement, `draw.choices`: with two replicas, every other time it draws the same
# one twice and takes it, however loaded. The other one is `min(range(n), key=loads.__getitem__)`, which asks all. It
# is a little better here, where loads are always fresh. In a real cluster many routers see the same old numbers, and
# all of them send to the same idle machine, until it is not.
# </details>
# <!-- END SOLUTION -->
#
# ## Measure: what a second replica buys
#
# First one against two, *each* under the same load, exponential service times of 1 s. Twice the machines serve twice
# the requests; that is why you buy them. But what happens to the wait? `bounded` with two slots is one queue for both.
# Thrown by lot, each has a queue of its own.


# %%
def spread(arrivals, services, replicas, choose):
    """Replicas that serve one request at a time; choose(loads) says who gets it. The wait of each request."""
    free, ends, waits = [0.0] * replicas, [deque() for _ in range(replicas)], []
    for arrival, service in zip(arrivals, services, strict=True):
        for queued in ends:
            while queued and queued[0] <= arrival:
                queued.popleft()
        i = choose([len(queued) for queued in ends])
        start = max(arrival, free[i])
        free[i] = start + service
        ends[i].append(free[i])
        waits.append(start - arrival)
    return waits


N_SPREAD = lab.size(ci=5_000, default=120_000, long=1_000_000)


def at_load(load, replicas, seed=4):
    rng = np.random.default_rng(seed)
    return poisson(N_SPREAD, load * replicas, rng), list(rng.exponential(1.0, N_SPREAD))


print("load of each     one     two by lot     two behind one queue     mean wait, services of 1 s")
for load in (0.5, 0.7, 0.8, 0.9):
    alone = fmean(spread(*at_load(load, 1), 1, lambda loads: 0))
    draw = random.Random(0)
    by_lot = fmean(spread(*at_load(load, 2), 2, lambda loads, draw=draw: draw.randrange(2)))
    arrivals, services = at_load(load, 2)
    shared = fmean(start - at for start, at in zip(bounded(arrivals, services, 2, math.inf), arrivals, strict=True))
    print(f"{load:8.1f}{alone:14.2f}{by_lot:13.2f}{shared:18.2f}      ({alone / shared:.1f} times shorter)")

# %% [markdown]
# By lot nothing is gained but throughput: each half is what it was. Behind *one* queue the wait is more than halved on
# top of it, for a request waits only if both are taken. A larger pool can run hotter at the same wait. That is the
# true economy of scale, and one of the few.
#
# Now eight replicas, each with its own queue, as it must be with K and V in their memories. Who chooses?


# %%
def by_turns():
    state = iter(range(10**9))
    return lambda loads: next(state) % len(loads)


def rules():
    draw = random.Random(5)
    return {
        "by lot": lambda loads: draw.randrange(len(loads)),
        "by turns": by_turns(),
        "two choices": lambda loads: two_choices(loads, draw),
        "least of all": lambda loads: min(draw.sample(range(len(loads)), len(loads)), key=loads.__getitem__),
    }


waits_of = {}
print("eight replicas     load 0.7: mean     p99       load 0.9: mean     p99       seconds, services of 1 s")
for rule in rules():
    line = f"{rule:15}"
    for load in (0.7, 0.9):
        waits_of[rule, load] = spread(*at_load(load, 8), 8, rules()[rule])
        line += f"{fmean(waits_of[rule, load]):17.2f}{np.percentile(waits_of[rule, load], 99):9.1f}"
    print(line)
limit = sum(0.9 ** (2**i - 2) for i in range(1, 12)) - 1
print(f"For very many replicas, theory gives 9 s by lot and {limit:.2f} s with two choices at 0.9 (Mitzenmacher).")
lab.reveal("13.two", round(fmean(waits_of["by lot", 0.9]) / fmean(waits_of["two choices", 0.9]), 1))

# %%
figure = Figure(figsize=(6.5, 3.4), layout="constrained")
axes = figure.subplots()
for rule, style in zip(rules(), ("-", "--", "-.", ":"), strict=True):
    values = np.sort(waits_of[rule, 0.9])
    places = np.unique(np.geomspace(1, len(values), 300).astype(int))
    axes.plot(values[-places], places / len(values), linestyle=style, color="black", label=rule)
axes.set_yscale("log")
axes.set_yticks([1, 0.1, 0.01, 0.001], ["all", "1 in 10", "1 in 100", "1 in 1,000"])
axes.set_xlabel("waits longer than so many service times")
axes.set_ylabel("share of the requests")
axes.set_title("Eight replicas, load 0.9", loc="left", fontsize=10)
axes.spines[["top", "right"]].set_visible(False)
axes.legend(frameon=False, fontsize=8)
tails = ", ".join(f"{rule} {np.percentile(waits_of[rule, 0.9], 99):.1f}" for rule in rules())
lab.show(
    figure,
    "A chart of the share of requests that wait longer than so many service times, on a logarithmic scale, for four "
    f"rules on eight replicas at a load of 0.9. One in 100 waits longer than: {tails}.",
)

# %% [markdown]
# The second choice brings most of what there is to be had; all others together bring the rest.
#
# ## Measure: near to the cache, or away from the crowd
#
# Our replicas are not alike for a request: one of them may hold the K and V of its beginning (lesson 10). A system
# prompt of 1,000 tokens took 604 ms to compute and 39 ms to find again, on two cores. So send conversations that begin
# the same to the same replica, their *home*. But then a popular one makes its home hot. The package's rule is a
# compromise: home, unless it has more than so many (`slack`) requests beyond the least loaded; then two choices.

# %%
BEGINNINGS, ROOM, REPLICAS = 96, 12, 8  # different system prompts, how many of them a replica holds, replicas
COMPUTE, FOUND, REST = 0.604, 0.039, 0.300  # seconds: the beginning, the same from the cache, all else of a request
popular = list(accumulate(1 / (k + 1) for k in range(BEGINNINGS)))  # the first is the most popular, as it is in life


def with_caches(choose, rate, n, seed=6):
    """choose(loads, home) for each request. (share of beginnings found, mean load, highest load, waits)"""
    draw = random.Random(seed)
    caches = [OrderedDict() for _ in range(REPLICAS)]
    free, ends, busy, waits, hits, at = (
        [0.0] * REPLICAS,
        [deque() for _ in range(REPLICAS)],
        [0.0] * REPLICAS,
        [],
        0,
        0.0,
    )
    for _ in range(n):
        at += draw.expovariate(rate)
        beginning = draw.choices(range(BEGINNINGS), cum_weights=popular)[0]
        for queued in ends:
            while queued and queued[0] <= at:
                queued.popleft()
        i = choose([len(queued) for queued in ends], beginning % REPLICAS)
        found = beginning in caches[i]
        hits += found
        caches[i][beginning] = True
        caches[i].move_to_end(beginning)
        if len(caches[i]) > ROOM:
            caches[i].popitem(last=False)
        service = (FOUND if found else COMPUTE) + draw.expovariate(1 / REST)
        start = max(at, free[i])
        free[i] = start + service
        ends[i].append(free[i])
        busy[i] += service
        waits.append(start - at)
    return hits / n, fmean(busy) / at, max(busy) / at, waits


def home_with(slack, draw):
    return lambda loads, home: home if loads[home] <= min(loads) + slack else two_choices(loads, draw)


draw = random.Random(7)
print(f"{'':24}beginnings found   load: mean   highest      wait p50      p99    s")
for name, choose in (
    ("by lot", lambda loads, home: draw.randrange(REPLICAS)),
    ("two choices", lambda loads, home: two_choices(loads, draw)),
    ("home, always", lambda loads, home: home),
    ("home, slack of 8", home_with(8, draw)),
    ("home, slack of 2", home_with(2, draw)),
    ("home, slack of 0", home_with(0, draw)),
):
    share, load_mean, load_most, waits = with_caches(
        choose, rate=12.0, n=lab.size(ci=3_000, default=40_000, long=200_000)
    )
    middle, late = np.percentile(waits, (50, 99))
    print(f"{name:24}{share:16.0%}{load_mean:13.0%}{load_most:10.0%}{middle:14.2f}{late:9.2f}")

# %% [markdown]
# Two mistakes at the two ends. By load alone each replica sees all beginnings, holds a few of them, and computes the
# others anew: all are busy with work that was done before next door. By home alone nearly everything is found, and the
# home of the most popular one drowns, while its neighbours are idle. A little slack takes from both. How much it
# should be depends on what a found beginning is worth.
#
# ## Build: on paper
#
# ### 9. How many machines?
#
# Little's law once more, for machines in the place of people: if `rate` requests arrive in a second and each costs a
# replica `seconds` of its time, then $\text{rate} \times \text{seconds}$ replicas are busy at any moment. They should
# be busy at most `load` of their time, so that queues stay short; and this even while `spare` of them are gone,
# because they are broken or being replaced.


# %% task="13.fleet"
def fleet(rate: float, seconds: float, load: float, spare: int) -> int:
    """How many replicas are needed, so that with `spare` of them gone each is busy at most `load` of its time."""
    ### BEGIN SOLUTION
    return math.ceil(rate * seconds / load) + spare
    ### END SOLUTION


# %%
lab.check("13", "fleet")

# %% [markdown]
# <details><summary>Hint 1</summary>How many are busy, at any moment?</details>
# <details><summary>Hint 2</summary>If each may be busy half of its time only, you need twice as many.</details>
# <details><summary>Hint 3</summary><code>math.ceil</code> first, then the spare ones.</details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked: fleet</summary>
#
# The common wrong answer multiplies by the load. It looks right at 0.9, and at 0.5 it orders a quarter of what is
# needed. The other one leaves the spare ones out, since "one in a thousand does not matter". It does not, for a
# thousand. For two it is half.
# </details>
# <!-- END SOLUTION -->
#
# ## Measure: one GPU, eight, a thousand
#
# On paper, from figures that were measured. A request is chosen: 512 prompt tokens, 128 new ones, nothing shared. With
# $B$ texts running, a step reads the weights once and everybody's K and V, or computes, whichever takes longer (lesson
# 12); a request has its share of 128 such steps, and its prompt is arithmetic. Nobody reaches that floor:
# [NVIDIA's own figures](https://github.com/NVIDIA/TensorRT-LLM/blob/v0.17.0/docs/source/performance/perf-overview.md)
# for Llama-3.1-8B (TensorRT-LLM 0.17, one A100 or H200) are 46 to 70 % of what the same formula gives. Below, a share
# of one half is *assumed*. An H200 copied 4.3 TB/s and multiplied 790 TFLOP/s when one was measured. The two cores are
# measured, all of it: 187 ms for the prompt and 30.4 ms for a step of 32.

# %%
P, NEW_TOKENS = 512, 128
# {name: (weights, bytes of K and V a token)}
MODELS = {"135M": (134.5e6, 23_040), "1B": (1.236e9, 32_768), "8B": (8.03e9, 131_072)}
H200 = (4.3e12, 790e12)  # bytes/s, operations/s
SHARE, ROWS_GPU, LOAD = 0.5, 256, 0.7  # of the floor (assumed); texts at once; how busy a replica may be


def request_seconds(weights, kv, bandwidth, flops, rows=ROWS_GPU, share=SHARE):
    """(seconds of the device for one request, tpot in seconds) with so many texts running."""
    step = max((2 * weights + rows * (P + NEW_TOKENS / 2) * kv) / bandwidth, 2 * weights * rows / flops)
    seconds = (NEW_TOKENS * step / rows + 2 * weights * P / flops) / share
    return seconds, seconds * rows / NEW_TOKENS


cores = 0.187 + NEW_TOKENS * 0.0304 / 32
rows_of = {("135M", "2 cores"): (cores, 32 * cores / NEW_TOKENS)}
rows_of |= {(name, "H200"): request_seconds(*shape, *H200) for name, shape in MODELS.items()}
print(
    "                     s of the device   requests/s at a load of 0.7, by      tokens/s     tpot   machines for 1,000"
)
print(
    "model  device            a request        1        8      1,000          of one       ms     requests/s, 1 spare"
)
for (name, device), (seconds, tpot) in rows_of.items():
    per_second = LOAD / seconds
    print(
        f"{name:7}{device:12}{seconds:15.4f}{per_second:12,.1f}{8 * per_second:9,.0f}{1000 * per_second:11,.0f}"
        f"{per_second * NEW_TOKENS:16,.0f}{1e3 * tpot:9.1f}{fleet(1000, seconds, LOAD, 1):17,}"
    )
here_seconds = 1 / real_most
print(f"\nThis machine, the run above ({n_prompt} + {NEW} tokens): {here_seconds:.3f} s a request, closed loop")

# %% [markdown]
# If everybody sends one request a minute, a GPU with the 1B model holds some 8,600 people, eight of them 69,000, a
# thousand 8.6 million. The columns for 8 and 1,000 are multiplication. What does *not* multiply:
#
# - **The front.** One GPU with the 1B model makes 18,300 tokens a second at that load, each an event of 200 bytes that
#   you have seen; a machine with eight makes 146,000. At an assumed 50 µs of Python for each, that is 7.3 cores, and a
#   Python process has one. So tokens must go out in bundles, or not through Python.
# - **Waiting gets better.** One queue for eight waits far less than eight queues, as you have measured.
# - **Caches get worse.** Each replica has its own. By lot, memory must hold every system prompt eight times.
# - **Failures become daily work.** Meta's training of Llama 3 had 419 unexpected interruptions in 54 days on 16,384
#   GPUs: one in 50,700 hours of a GPU. At that rate one GPU fails once in 5.8 years, eight once in 264 days, and a
#   thousand **once in 51 hours**. Each takes 256 running texts with it. (Training's rate; serving's may differ.)
# - **Nothing gets faster.** A replica more serves more people. Your own text takes as long as before. And a model that
#   does not fit into one GPU needs several that compute one step together, which this engine cannot.

# %%
for n in (1, 8, 1000):
    hours = 16_384 * 54 * 24 / 419 / n
    print(f"{n:5} GPUs: an interruption every {hours:9,.0f} hours ({hours / 24:7,.1f} days)")

# %% [markdown]
# In the package, `minillm serve --replicas 2` starts such a fleet on this machine through Ray Serve, with the rule
# above; [`minillm/server/routing.py`](../minillm/server/routing.py) has it, and says what happens when a replica dies:
# a request that has had no token yet is asked again elsewhere, once; a stream that has begun ends with an error. On
# two cores two replicas are no faster than one: they share them.
#
# ## Explain
#
# A team tests its new server with 50 clients, each of which sends its next request as soon as it has its answer: p99
# of ttft is 0.9 s, at 14 requests/s, and never an error. They go live. At 13 requests/s on average everything is fine
# in the morning. At noon it is 15 for an hour, ttft grows to minutes, and stays there *long after* noon, when it is 13
# again. Users press "retry". Write between the quotes: *why did the test not show it? Why does it not go away when the
# rush is over, and what would you change first?*

# %%
lab.answer("13.why", """ """)

# %% [markdown]
# <!-- BEGIN SOLUTION -->
# <details><summary>A good answer</summary>
#
# The test was a closed loop: there are never more than 50 in the house, so the queue cannot grow beyond what 50
# clients make of it, and a slow server is asked less. It measured the capacity (about 14/s), and its ttft is that of
# 50 at once. Live requests are an open loop. At 15/s one request a second is too many: after an hour some 3,600 wait.
# At 13/s afterwards only one a second can be worked off, which takes another hour, in which each newcomer waits behind
# all of them: 3,600 / 14 s is more than four minutes at first. Retries make it worse: those who gave up are still
# computed, and come once more, so the load stays above 1. First an end to the queue: let in what can be served in
# time, and refuse the rest at once with `Retry-After`. Then abort what nobody reads any more; then run at a lower
# load, with another machine; and test with an open loop, past capacity, timed from when each request was due.
# </details>
# <!-- END SOLUTION -->
#
# ## Break it
#
# Five named bugs, each of which passes a friendly test: one client that reads to the end, on a fast network, with a
# server that is never full. Choose one, guess which function's check catches it, and run the cell.

# %%
mended = {"feed": feed, "bounded": bounded, "engine_thread": engine_thread, "answer": answer}


def each_piece_alone(rest, piece):
    events, rest = mended["feed"](b"", piece)  # the bug: what was left over is forgotten
    return events, rest


def everybody_counts(arrivals, durations, slots, most_waiting):
    return mended["bounded"](arrivals, durations, slots, max(0, most_waiting - slots))  # the bug: slots are no places


def only_when_idle(engine, inbox, deliver):
    looks = SimpleNamespace(
        get=inbox.get, empty=lambda: True, qsize=lambda: 0
    )  # the bug: it never looks, it only waits
    mended["engine_thread"](engine, looks, deliver)


def never_mind(request, queues, inbox):
    sent = []

    def put(command):
        if not sent:  # the bug: only the first command is ever sent
            inbox.put(command)
        sent.append(command)

    return mended["answer"](request, queues, SimpleNamespace(put=put))


async def late_queue(request, queues, inbox):
    own = {}

    def put(command):
        inbox.put(command)
        queues.update(own)  # the bug: the queue is there only when the command has been sent

    try:
        async with contextlib.aclosing(mended["answer"](request, own, SimpleNamespace(put=put))) as stream:
            async for event in stream:
                yield event
    finally:
        queues.pop(request, None)


BUGS = {
    each_piece_alone: "feed",
    everybody_counts: "bounded",
    only_when_idle: "engine_thread",
    never_mind: "answer",
    late_queue: "answer",
}
BUG = never_mind  # or any other of the five

# %%
lab.predict("13.caught_by", None)  # the name of one of your functions, in quotes

# %%
try:
    globals()[BUGS[BUG]] = BUG
    report = run_checks("13", from_namespace(globals()), ["feed", "bounded", "engine_thread", "answer"])
finally:
    globals().update(mended)
print("\n".join(line for line in report.text().splitlines() if not line.startswith("  ok")))
lab.reveal("13.caught_by", BUGS[BUG])

# %% [markdown]
# With `only_when_idle`, look at how the report treats `answer`: it is right and *waits*, for it cannot work on such an
# engine's thread. All five need an unfriendly world to show: a cut, a crowd, somebody who leaves.
#
# ## Recap
#
# - Users see ttft and tpot. tpot says how busy a server is, ttft how full. Throughput is what the owner sees; goodput
#   is throughput that kept its promise.
# - Close to a load of 1 waiting grows like $1 / (1 - \rho)$, with the unevenness of the work on top. There is no safe
#   place near 1.
# - Time a request from when it was due. A closed loop measures capacity; an open loop measures what users see.
# - A budget trades the gaps of those who read against the first token of those who come. A bounded queue trades a
#   clear no for some against lateness for all. Past capacity only the bounded one has any goodput.
# - One thread owns the engine. Commands wait for the end of its step; events wait in one queue for each request. So a
#   slow reader costs its own memory, and one who leaves costs a few steps.
# - A second replica doubles throughput, and shortens the wait only if requests go to whoever is free. Two choices are
#   nearly as good as all. Near to the cache is worth a little crowding, not more.
#
# This was the last lesson. You have written the parts of an engine, from bytes to a fleet. `minillm serve` has them
# all; open its page and look at the rows: you know each of them.
#
# ## Exercises
#
# 1. Let the shortest prompt start first (`policy="shortest-prompt"`): ttft p50 and p99 against first come, at a load
#    of 0.9, in `virtual` and on the real server. Who pays? (difficulty 2/5, importance 4/5, 25 minutes)
# 2. Find the budget with the most goodput for limits of your own, ttft and tpot, on your own machine. Is it the same
#    at a load of 0.3 and of 0.9? (difficulty 2/5, importance 5/5, 30 minutes)
# 3. Add retries to the back-pressure measurement: whoever has waited 2 s comes again, and the first try is computed
#    all the same. From which load on does it never recover? And with aborts? (difficulty 3/5, importance 5/5, 40
#    minutes)
# 4. Give `two_choices` loads that are a second old. At which age is it better than the least of all? (difficulty 3/5,
#    importance 4/5, 30 minutes)
# 5. A replica dies in the middle of a stream. Resume it on another one with prompt + tokens so far. For which sampling
#    parameters is the text the same as it would have been? What does the new replica's prefix cache do for you?
#    (difficulty 3/5, importance 3/5, 40 minutes)
# 6. Send several tokens in one event when the handler falls behind, as [`server/http.py`](../minillm/server/http.py)
#    does. What happens to the gaps, what to tpot, and what to the bytes a token? (difficulty 3/5, importance 3/5, 35
#    minutes)
# 7. `fleet` for a load that changes over the day: which machines could be switched off at night, and how long before
#    the morning must they be started, if that takes two minutes? (difficulty 3/5, importance 3/5, 30 minutes)
#
# ## References
#
# - Yu et al. 2022, [*Orca*](https://www.usenix.org/conference/osdi22/presentation/yu): for why a batch must change
#   with every step, seen from a server; its figures are throughput at equal latency.
# - Agrawal et al. 2024, [*Sarathi-Serve*](https://arxiv.org/abs/2403.02310): for the budget as a promise about the
#   tail: 2.6 to 5.6 times the load within the same limit on the gaps.
# - Zhong et al. 2024, [*DistServe*](https://arxiv.org/abs/2401.09670): for goodput, for prompts and tokens on different
#   machines, and for M/D/1 applied to prefill; up to 7.4 times the requests within both limits.
# - Little 1961, [*A proof for the queuing formula L = λW*](https://doi.org/10.1287/opre.9.3.383): three pages; read
#   what it does *not* assume.
# - Schroeder, Wierman and Harchol-Balter 2006, [*Open versus closed: a cautionary
#   tale*](https://www.usenix.org/legacy/event/nsdi06/tech/full_papers/schroeder/schroeder_html/index.html): for how far
#   apart the two are at the same load, and the figure with both curves.
# - Tene, [*wrk2*](https://github.com/giltene/wrk2), the section on coordinated omission: for the fault in his own
#   predecessor, and the remedy that your `metrics` takes.
# - Mitzenmacher 2001, [*The power of two choices in randomized load
#   balancing*](https://doi.org/10.1109/71.963420): for why the second choice is worth so much more than the third.
# - WHATWG, [*Server-sent events*](https://html.spec.whatwg.org/multipage/server-sent-events.html): for what your `feed`
#   leaves out (names, ids, reconnecting).
# - Dubey et al. 2024, [*The Llama 3 Herd of Models*](https://arxiv.org/abs/2407.21783), section 3.3.4: for what breaks
#   in a cluster of 16,384 GPUs, in a table.
