"""Lesson 13, serving: what a sender sees, bytes cut anywhere, queues by their laws, and the two sides of an engine's
inbox, each against a played other side that notices whoever sleeps, polls, forgets or is too late."""

import asyncio
import contextlib
import math
import queue
import random
import threading
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch

from minillm.engine import Engine
from minillm.lab import seeds
from minillm.lab.checking import holds
from minillm.lab.tiny import TINY
from minillm.lab.work import Work, Wrong, same, time_limit
from minillm.model import Llama
from minillm.params import SamplingParams
from minillm.request import Event, make_request
from minillm.sharing import SharedSlots
from minillm.simulation import policies
from minillm.stages import naive

EOS = 1

PATIENCE = 2.0  # seconds after which something that should happen at once has not
SOON = 5.0  # seconds, for what takes a twentieth of one
ENGINE_SECONDS = 8.0  # for ten short texts of a tiny model


@cache
def model() -> Llama:
    return Llama.random(TINY, seed=0, dtype=torch.float64)


def pair_of(got: Any, n: int, what: str) -> list[Any]:
    """A tuple or list of n values; raises Wrong for anything else."""
    if got is None:
        raise Wrong(f"{what} returned None: is a `return` missing?")
    if not isinstance(got, list | tuple) or len(got) != n:
        raise Wrong(f"{what} returned {got!r}; it must return {n} values")
    return list(got)


# ---- metrics

STREAMS = (
    (10.0, [10.5, 10.75, 11.0, 11.5]),
    (0.0, [2.0, 2.25]),
    (3.0, [3.0, 3.0, 3.5, 7.5]),  # the first token at once, two in one piece
    (1.0, [1.25, 1.5, 1.75]),
)


def streams() -> Iterator[tuple[float, list[float]]]:
    yield from STREAMS
    draw = seeds.rng(0)
    for _ in range(40):
        sent = draw.randint(0, 40) / 4
        times, at = [], sent
        for _ in range(draw.randint(2, 9)):
            at += draw.randint(0, 12) / 4
            times.append(at)
        yield sent, times


def seen(work: Work, sent: float, times: list[float]) -> tuple[list[Any], str]:
    what = f"metrics({sent:g}, {[float(f'{t:g}') for t in times]})"
    return pair_of(work.call("metrics", sent, times), 3, what), what


@holds(
    "13",
    "metrics",
    "ttft: from the sending to the first token; the gaps: from each token to the next",
    hint="times[0] - sent; and a gap for each pair of neighbours, one fewer than tokens.",
)
def metrics_parts(work: Work) -> None:
    for sent, times in streams():
        (ttft, _, gaps), what = seen(work, sent, times)
        same(ttft, times[0] - sent, f"{what}, ttft")
        if not isinstance(gaps, list):
            raise Wrong(f"{what}: the gaps are {gaps!r}; they must be a list")
        if len(gaps) == len(times):
            raise Wrong(
                f"{what}: {len(times)} tokens have {len(times) - 1} gaps between them, and here are {len(gaps)}"
            )
        same(gaps, [b - a for a, b in pairwise(times)], f"{what}, gaps")


@holds(
    "13",
    "metrics",
    "tpot is the time after the first token, divided by the tokens that came in it",
    hint="(times[-1] - times[0]) / (len(times) - 1): the first token and the wait for it are ttft's.",
)
def metrics_tpot(work: Work) -> None:
    for sent, times in streams():
        (_, tpot, _), what = seen(work, sent, times)
        n, expected = len(times), (times[-1] - times[0]) / (len(times) - 1)
        if isinstance(tpot, int | float) and not math.isclose(tpot, expected, abs_tol=1e-9):
            for value, words in (
                ((times[-1] - sent) / n, "the wait for the first token is in it"),
                ((times[-1] - sent) / (n - 1), "the wait for the first token is in it"),
                ((times[-1] - times[0]) / n, f"{n} tokens have {n - 1} gaps"),
            ):
                if math.isclose(tpot, value, abs_tol=1e-9):
                    raise Wrong(f"{what}, tpot: expected {expected:g}, got {tpot:g}: {words}")
        same(tpot, float(expected), f"{what}, tpot")


@holds(
    "13",
    "metrics",
    "a text of one token has a ttft, no gaps, and no tpot: None, and not 0",
    hint="0 would be the best tpot of all, and make every mean look better.",
)
def metrics_one_token(work: Work) -> None:
    (ttft, tpot, gaps), what = seen(work, 2.0, [2.5])
    same(ttft, 0.5, f"{what}, ttft")
    if tpot is not None:
        raise Wrong(f"{what}: tpot is {tpot!r}; a text of one token has none, so it must be None")
    same(gaps, [], f"{what}, gaps")


# ---- feed

TEXTS = (  # (bytes of a stream, data of its events)
    (b'data: {"a": 1}\n\ndata: {"b": 2}\n\ndata: [DONE]\n\n', ['{"a": 1}', '{"b": 2}', "[DONE]"]),
    ("data: né\n\ndata: 日本 🙂\n\n".encode(), ["né", "日本 🙂"]),
    (b"data: a\r\n\r\ndata: b\r\n\r\n", ["a", "b"]),
    (b": keep-alive\n\ndata: a\n\n: still here\n\ndata: b\n\n", ["a", "b"]),
    (b"event: piece\nid: 7\ndata: a\n\nretry: 10\n\n", ["a"]),
    (b"data: one\ndata: two\n\n", ["one\ntwo"]),
    (b"data:a\n\ndata:  b \n\ndata: data: dad\n\n", ["a", " b ", "data: dad"]),
    ("data: a\u2028b\x85c\x0bd\n\n".encode(), ["a\u2028b\x85c\x0bd"]),
    (b"data: \n\ndata: x\n\n", ["", "x"]),
    (b": a comment with data: inside\ndata: a\n\n", ["a"]),
)


def fed(work: Work, pieces: Sequence[bytes]) -> tuple[list[str], bytes]:
    """What comes out of a stream that arrives in these pieces."""
    events: list[str] = []
    rest = b""
    for piece in pieces:
        before = rest
        found, rest = pair_of(work.call("feed", rest, piece), 2, f"feed({before!r}, {piece!r})")
        if not isinstance(found, list) or any(not isinstance(event, str) for event in found):
            raise Wrong(f"feed({before!r}, {piece!r}) gave {found!r}; the events must be a list of texts")
        if not isinstance(rest, bytes):
            raise Wrong(f"feed({before!r}, {piece!r}): what waits is {rest!r}; it must be bytes")
        events += found
    return events, rest


def shown(pieces: Sequence[bytes]) -> str:
    return ", ".join(map(repr, pieces)) if len(pieces) < 5 else f"{b''.join(pieces)!r}, byte by byte"


def must_feed(work: Work, pieces: Sequence[bytes], expected: list[str]) -> None:
    got, rest = fed(work, pieces)
    if got != expected:
        raise Wrong(f"the pieces {shown(pieces)}: expected the events {expected}, got {got}")
    if rest.strip():
        raise Wrong(f"the pieces {shown(pieces)}: all events are whole, and {rest!r} is said to wait still")


@holds(
    "13",
    "feed",
    "a stream in one piece: the data of each event, as text",
    hint="an event ends with an empty line; of its lines those count that begin with `data:`, without one blank.",
)
def feed_whole(work: Work) -> None:
    for text, expected in TEXTS[:2]:
        must_feed(work, [text], expected)


@holds(
    "13",
    "feed",
    "cut anywhere, also within a character or within the empty line: the same events, none lost and none twice",
    hint="put `rest` before `piece`, split at the empty lines, keep what is behind the last one; decode whole events.",
)
def feed_cut(work: Work) -> None:
    for text, expected in TEXTS[:3]:
        for i in range(len(text) + 1):
            must_feed(work, [text[:i], text[i:]], expected)
        must_feed(work, [text[i : i + 1] for i in range(len(text))], expected)
    draw = seeds.rng(1)
    for text, expected in TEXTS:
        for _ in range(20):
            cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randint(1, 6)))
            must_feed(work, [text[a:b] for a, b in pairwise([0, *cuts, len(text)])], expected)


@holds(
    "13",
    "feed",
    "an event is given out with its last byte, not when the next one begins",
    hint="what the split leaves behind the last empty line is unfinished; all before it is whole.",
)
def feed_at_once(work: Work) -> None:
    events, rest = fed(work, [b"data: a\n\n"])
    if events != ["a"]:
        raise Wrong(
            f"after b'data: a\\n\\n' the event 'a' is whole and must be given out; got {events}: users wait for it"
        )
    events, rest = fed(work, [b"data: a\n\nda", b"ta: b\n"])
    if events != ["a"]:
        raise Wrong(f"b'data: b\\n' has no empty line behind it, so only 'a' is whole; got {events}")
    if b"b" not in rest:
        raise Wrong(f"b'data: b\\n' must wait for its empty line, and {rest!r} is what waits")


@holds(
    "13",
    "feed",
    "comments, other fields and lines of Windows change nothing; several lines of data are one event",
    hint="lines that begin with `:` keep the connection open and say nothing; an event without data is none.",
)
def feed_lines(work: Work) -> None:
    for text, expected in TEXTS[2:]:
        must_feed(work, [text], expected)


# ---- mean_wait

QUEUES = (  # (rate, services, mean wait)
    (0.5, [1.0], 0.5),
    (0.25, [1.0, 3.0], 1.25),
    (2.0, [0.25], 0.125),
    (0.75, [1.0], 1.5),
    (0.125, [2.0, 2.0, 8.0], 3.0),
)


def waited(work: Work, rate: float, services: list[float]) -> tuple[float, str]:
    what = f"mean_wait({rate:g}, {services})"
    got = work.call("mean_wait", rate, services)
    if got is None:
        raise Wrong(f"{what} returned None: is a `return` missing?")
    if isinstance(got, bool) or not isinstance(got, int | float) or math.isnan(got):
        raise Wrong(f"{what} is {got!r}; it must be a number of seconds")
    return float(got), what


@holds(
    "13",
    "mean_wait",
    "by hand: equal and unequal service times",
    hint="rate * (mean of the squares) / (2 * (1 - load)), with load = rate * mean.",
)
def wait_by_hand(work: Work) -> None:
    for rate, services, expected in QUEUES:
        got, what = waited(work, rate, services)
        if not math.isclose(got, expected, rel_tol=1e-9):
            mean = sum(services) / len(services)
            load = rate * mean
            for value, words in (
                (expected + mean, "the service itself is in it: that is the time in the system"),
                (2 * expected, "twice as long; a newcomer finds the one in service half done on average"),
                (load * mean / (1 - load), "that is so if service times are exponential; these are not"),
                (load * mean / (2 * (1 - load)), "that is so if all service times are equal; these are not"),
            ):
                if math.isclose(got, value, rel_tol=1e-9):
                    raise Wrong(f"{what}: expected {expected:g}, got {got:g}: {words}")
        same(got, expected, what)


@holds(
    "13",
    "mean_wait",
    "at a load of 1 and above the queue grows without end: the wait is infinite, not negative and no error",
    hint="return math.inf where rate * mean is 1 or more, before you divide.",
)
def wait_full(work: Work) -> None:
    for rate, services in ((1.0, [1.0]), (2.0, [1.0]), (0.5, [1.0, 3.0]), (3.0, [0.5, 0.25])):
        got, what = waited(work, rate, services)
        if got != math.inf:
            raise Wrong(f"{what}: the load is {rate * sum(services) / len(services):g}; expected inf, got {got:g}")


@holds(
    "13",
    "mean_wait",
    "against a queue that was played: 200,000 requests, three kinds of service times",
    hint="the square of each service time, then the mean: not the square of the mean.",
)
def wait_played(work: Work) -> None:
    for services in ([1.0], [0.5, 1.5], [0.25] * 9 + [7.75]):
        for load in (0.5, 0.8):
            rate = load / (sum(services) / len(services))
            got, what = waited(work, rate, services)
            played = played_wait(rate, tuple(services))
            if not 0.9 * played < got < 1.1 * played:
                raise Wrong(f"{what}: a queue that was played waited {played:.3g} on average, got {got:.3g}")


@seeds.cache
def played_wait(rate: float, services: tuple[float, ...]) -> float:
    """One server, first come, first served, by Lindley's recursion."""
    draw = seeds.rng(7)
    wait = total = 0.0
    n = 200_000
    for _ in range(n):
        total += wait
        wait = max(0.0, wait + draw.choice(services) - draw.expovariate(rate))
    return total / n


# ---- bounded

Case = tuple[list[int], list[int], int, float]  # arrivals, durations, slots, most_waiting

BY_HAND: Case = ([0, 1, 2, 3, 6], [4, 4, 4, 4, 4], 1, 1)


def cases(seed: int, n: int) -> Iterator[Case]:
    """Whole numbers, no two events at one time that matter: arrivals are odd, and all ends are even or odd alike."""
    draw = seeds.rng(seed)
    for _ in range(n):
        size = draw.randint(1, 16)
        arrivals = sorted(2 * draw.randint(0, 20) + 1 for _ in range(size))
        yield arrivals, [draw.randint(1, 9) for _ in range(size)], draw.randint(1, 3), draw.randint(0, 4)


def words_of(case: Case) -> str:
    arrivals, durations, slots, most = case
    return f"arrivals = {arrivals}, durations = {durations}, slots = {slots}, most_waiting = {most}"


def right_bounded(case: Case) -> list[float | None]:
    arrivals, durations, slots, most = case
    starts: list[float | None] = []
    free = [0.0] * slots
    for arrival, duration in zip(arrivals, durations, strict=True):
        slot = free.index(min(free))
        start = max(arrival, free[slot])
        waiting = sum(other is not None and other > arrival for other in starts)
        if start > arrival and waiting >= most:
            starts.append(None)
            continue
        free[slot] = start + duration
        starts.append(start)
    return starts


def bounded_of(work: Work, case: Case) -> list[float | None]:
    got = work.call("bounded", *case)
    if got is None:
        raise Wrong("bounded returned None: is a `return` missing?")
    if not isinstance(got, list) or len(got) != len(case[0]):
        raise Wrong(f"{words_of(case)}: expected a list of {len(case[0])} starts, got {got!r}")
    for i, start in enumerate(got):
        if start is not None and (isinstance(start, bool) or not isinstance(start, int | float)):
            raise Wrong(f"{words_of(case)}: the start of request {i} is {start!r}; it must be a number, or None")
    return got


def told(start: float | None) -> str:
    return "is refused" if start is None else f"starts at {start:g}"


def must_bound(work: Work, case: Case) -> None:
    for i, (mine, ours) in enumerate(zip(bounded_of(work, case), right_bounded(case), strict=True)):
        if mine != ours:
            should = "must be refused" if ours is None else f"must start at {ours:g}"
            raise Wrong(f"{words_of(case)}: request {i} {should}, and {told(mine)}")


@holds(
    "13",
    "bounded",
    "by hand: one slot and one place to wait",
    hint="who waits at an arrival: those let in before whose start is later than this arrival.",
)
def bounded_by_hand(work: Work) -> None:
    must_bound(work, BY_HAND)


@holds(
    "13",
    "bounded",
    "with no limit it is the queue of lesson 08: nobody is refused",
    hint="most_waiting may be math.inf; starts are as in `continuous`.",
)
def bounded_unlimited(work: Work) -> None:
    for arrivals, durations, slots, _ in cases(1, 60):
        case = (arrivals, durations, slots, math.inf)
        expected = policies.continuous(arrivals, durations, slots).starts
        for i, (mine, ours) in enumerate(zip(bounded_of(work, case), expected, strict=True)):
            if mine != ours:
                raise Wrong(f"{words_of(case)}: request {i} must start at {ours:g}, and {told(mine)}")


@holds(
    "13",
    "bounded",
    "never more wait than may, and nobody is refused while a slot or a place is free",
    hint="count at each arrival, before the newcomer: running requests hold slots, not places.",
)
def bounded_places(work: Work) -> None:
    for case in [BY_HAND, *cases(2, 120)]:
        arrivals, durations, slots, most = case
        starts = bounded_of(work, case)
        for i, (arrival, start) in enumerate(zip(arrivals, starts, strict=True)):
            before = [(s, d) for s, d in zip(starts[:i], durations[:i], strict=True) if s is not None]
            waiting = sum(s > arrival for s, _ in before)
            running = sum(s <= arrival < s + d for s, d in before)
            state = f"{words_of(case)}: when request {i} arrives at {arrival}, {running} of {slots} slots are taken"
            if start is not None and start < arrival:
                raise Wrong(f"{words_of(case)}: request {i} starts at {start:g}, before it arrives")
            if start is None and running < slots:
                raise Wrong(f"{state}, and it is refused though a slot is free")
            if start is None and waiting < most:
                raise Wrong(f"{state} and {waiting} wait, of {most} who may; it is refused though a place is free")
            if start is not None and start > arrival and waiting >= most:
                raise Wrong(f"{state} and {waiting} wait, of {most} who may; it must be refused, and is let in")


@holds(
    "13",
    "bounded",
    "whoever is refused costs nothing: all others start as if it had never come; and 30,000 requests are soon done",
    hint="a refused request must not take a slot, nor be counted among those who wait. Starts never fall: those "
    "who have begun need not be looked at again.",
)
def bounded_free(work: Work) -> None:
    for case in cases(3, 80):
        must_bound(work, case)
        arrivals, durations, slots, most = case
        kept = [i for i, start in enumerate(right_bounded(case)) if start is not None]
        without: Case = ([arrivals[i] for i in kept], [durations[i] for i in kept], slots, most)
        must_bound(work, without)
    many = 30_000
    with time_limit(SOON, "bounded"):  # who looks through all starts for each request takes a minute
        work.call("bounded", [float(i) for i in range(many)], [1.0] * many, 1, 5)


# ---- goodput

Seen = list[tuple[float, float | None] | None]
SEEN: tuple[
    tuple[Seen, float, float, float, float], ...
] = (  # seen, seconds, most ttft, most tpot; requests per second
    ([(0.1, 0.02), (0.3, 0.02), (0.1, 0.08), (0.9, 0.9)], 2.0, 0.2, 0.05, 0.5),
    ([(0.2, 0.05), (0.2, 0.05)], 4.0, 0.2, 0.05, 0.5),
    ([(0.0, 0.0), (0.0, None), (0.1, None)], 1.0, 0.2, 0.05, 3.0),
    ([None, None, (0.1, 0.01)], 2.0, 0.2, 0.05, 0.5),
    ([], 2.0, 0.2, 0.05, 0.0),
    ([(0.3, 0.01), (0.1, None), (0.5, None)], 0.5, 0.2, 0.05, 2.0),
)


@holds(
    "13",
    "goodput",
    "requests per second that kept both limits: all of them, in every second of the run",
    hint="count those with ttft <= most_ttft and tpot <= most_tpot; divide by the seconds, not by the requests.",
)
def goodput_counts(work: Work) -> None:
    for arguments in (SEEN[0], SEEN[1], SEEN[4]):
        good(work, *arguments)


@holds(
    "13",
    "goodput",
    "refused or failed (None) is not good, however fast; one token (tpot None) keeps the limit of tpot",
    hint="two different Nones: the whole entry, and its second number.",
)
def goodput_nones(work: Work) -> None:
    for arguments in (SEEN[2], SEEN[3], SEEN[5]):
        good(work, *arguments)


def good(work: Work, seen: Seen, seconds: float, most_ttft: float, most_tpot: float, expected: float) -> None:
    what = f"goodput({seen}, seconds={seconds:g}, most_ttft={most_ttft:g}, most_tpot={most_tpot:g})"
    same(work.call("goodput", list(seen), seconds, most_ttft, most_tpot), expected, what)


# ---- engine_thread: an inbox and an engine, played


@dataclass(eq=False)
class Asked:
    """A request for the played engine: so many steps without a token (its prompt), then so many tokens."""

    id: int
    silent: int
    tokens: int

    def __repr__(self) -> str:
        return f"request {self.id}"


class Stage:
    """An engine, its inbox and the other side, all in one thread: what happens is written down in `log`.

    `during`: {step: commands that arrive while it runs}; `later`: what arrives, one batch after the other, while the
    engine's thread sleeps. At the end of all comes None.
    """

    def __init__(self, during: dict[int, list[Any]], later: list[list[Any]]):
        self.during, self.later = during, deque(later)
        self.items: deque[Any] = deque()
        self.left: dict[Asked, list[int]] = {}  # [silent, tokens] still to come
        self.expected: list[Any] = []  # commands in the order they were put
        self.done: list[Any] = []  # in the order they were obeyed
        self.steps = self.polls = 0
        self.undelivered: list[Event] = []
        self.delivered: list[list[Event]] = []
        self.over = False  # None was taken
        self.complaint: str | None = None  # told at the end, since `except` may swallow it

    # the engine

    @property
    def busy(self) -> bool:
        return bool(self.left)

    def submit(self, *requests: Asked) -> None:
        for request in requests:
            self.left[request] = [request.silent, request.tokens]

    def abort(self, request_id: int) -> None:
        self.left = {request: left for request, left in self.left.items() if request.id != request_id}

    def step(self) -> list[Event]:
        if not self.busy:
            raise Wrong("engine.step() was called with nothing to do; sleep in inbox.get() until a command comes")
        if self.items:
            n = len(self.items)
            what = "a command waits in the inbox" if n == 1 else f"{n} commands wait in the inbox"
            what = "None lies in the inbox: the end" if None in self.items else what
            raise Wrong(
                f"step {self.steps + 1} began while {what}; all that lies there is done before each step, or a "
                "newcomer waits, and a client that has left is computed on"
            )
        self.must_have_delivered()
        self.steps += 1
        self.polls = 0
        self.put_all(self.during.get(self.steps, []))
        events = []
        for request, left in list(self.left.items()):
            if left[0]:
                left[0] -= 1
                continue
            left[1] -= 1
            events.append(Event(request, left[1], "", None if left[1] else "length"))  # type: ignore[arg-type]
            if not left[1]:
                del self.left[request]
        self.undelivered = list(events)
        return events

    # the other side

    def deliver(self, events: Sequence[Event]) -> None:
        events = list(events)
        if not events:
            raise Wrong(
                f"deliver was called after step {self.steps} with no events: it wakes the other side for nothing"
            )
        if events != self.undelivered:
            raise Wrong(
                f"after step {self.steps}, deliver must get all its {len(self.undelivered)} events at once, and got "
                f"{len(events)}"
            )
        self.undelivered = []
        self.delivered.append(events)

    def must_have_delivered(self) -> None:
        if self.undelivered:
            raise Wrong(f"the {len(self.undelivered)} events of step {self.steps} were never delivered")

    def put_all(self, commands: list[Any]) -> None:
        self.items += commands
        self.expected += [command for command in commands if command is not None]

    # the inbox

    def empty(self) -> bool:
        self.polled()
        return not self.items

    def qsize(self) -> int:
        self.polled()
        return len(self.items)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if self.over:
            raise Wrong("None was taken out of the inbox, which is the end, and the thread goes on")
        if not self.items:
            if not block or timeout is not None:
                self.polled()
                raise queue.Empty
            self.sleep()
        command = self.items.popleft()
        self.polls = 0
        if command is None:
            self.over = True
            return None
        return partial(self.obey, command)

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def put(self, command: Any) -> None:
        raise Wrong("the engine's thread put something into its own inbox; it only takes")

    def obey(self, command: Any, engine: Any) -> None:
        if engine is not self.engine:
            raise Wrong(f"a command must be called with the engine, and was called with {engine!r}")
        self.must_have_delivered()
        self.done.append(command)
        command(self)

    def sleep(self) -> None:
        self.must_have_delivered()
        if self.busy:
            raise Wrong(
                f"after step {self.steps} the inbox is empty, and inbox.get() sleeps although {len(self.left)} "
                "requests are not done: all streams stand still until somebody else comes"
            )
        self.put_all(self.later.popleft() if self.later else [None])

    def polled(self) -> None:
        self.polls += 1
        if self.polls > 20 and not self.busy and not self.items:
            self.complaint = "with nothing to do, the empty inbox is asked again and again: that keeps a core busy"
            self.sleep()

    @property
    def engine(self) -> "Stage":
        return self


def submits(*requests: Asked) -> list[Any]:
    return [partial(submit_command, request) for request in requests]


def submit_command(request: Asked, engine: Stage) -> None:
    engine.submit(request)


def abort_command(request: Asked, engine: Stage) -> None:
    engine.abort(request.id)


def nothing_command(engine: Stage) -> None:
    """As an abort of somebody who has ended already."""


def stages() -> Iterator[Stage]:
    yield Stage({}, [submits(Asked(1, 0, 3))])
    yield Stage({}, [submits(Asked(1, 2, 3), Asked(2, 0, 1)), submits(Asked(3, 0, 2))])
    first, second, third = Asked(1, 0, 9), Asked(2, 1, 2), Asked(3, 0, 4)
    yield Stage({2: submits(second, third), 4: [partial(abort_command, first)]}, [submits(first), [nothing_command]])
    draw = seeds.rng(5)
    for _ in range(30):
        later, during, number = [], dict[int, list[Any]](), 0
        for _ in range(draw.randint(1, 4)):
            batch: list[Any] = []
            for _ in range(draw.randint(1, 3)):
                number += 1
                batch += submits(Asked(number, draw.randint(0, 3), draw.randint(1, 6)))
            if draw.random() < 0.4:
                batch.append(nothing_command)
            later.append(batch)
        for _ in range(draw.randint(0, 4)):
            number += 1
            newcomer = Asked(number, draw.randint(0, 2), draw.randint(1, 4))
            commands = submits(newcomer)
            if draw.random() < 0.5:
                commands.append(partial(abort_command, newcomer))
            during.setdefault(draw.randint(1, 12), []).extend(commands)
        yield Stage(during, later)


def run_stage(work: Work, stage: Stage) -> None:
    work.call("engine_thread", stage, stage, stage.deliver, changes=(0, 1, 2))
    if stage.complaint:
        raise Wrong(stage.complaint)
    if not stage.over:
        raise Wrong("engine_thread returned before None came: whoever comes now is never served")
    stage.must_have_delivered()


@holds(
    "13",
    "engine_thread",
    "each step's events are delivered once, together, in order; a step without events delivers nothing",
    hint="call deliver once after a step, with the whole list, if it has anything in it.",
)
def thread_delivers(work: Work) -> None:
    for stage in stages():
        run_stage(work, stage)
        if stage.left and not any(None in commands for commands in stage.during.values()):
            raise Wrong(f"it ended with {len(stage.left)} requests unfinished")


@holds(
    "13",
    "engine_thread",
    "all that lies in the inbox is done before the next step, in the order in which it was put there",
    hint="take commands until the inbox is empty: not one for each step, and not only when nothing is to compute.",
)
def thread_obeys(work: Work) -> None:
    for stage in stages():
        run_stage(work, stage)
        if stage.done != stage.expected:
            raise Wrong(
                f"{len(stage.expected)} commands were put, and {len(stage.done)} were done, or in another order"
            )


@holds(
    "13",
    "engine_thread",
    "with nothing to compute it sleeps in the inbox; with something to compute it never does",
    hint="`inbox.get()` sleeps until there is something: call it only if the engine is idle or the inbox is not empty.",
)
def thread_sleeps(work: Work) -> None:
    for stage in [
        Stage({}, [[nothing_command], [nothing_command, nothing_command], submits(Asked(1, 0, 2)), [nothing_command]]),
        Stage({1: submits(Asked(2, 0, 1)), 3: submits(Asked(3, 3, 3))}, [submits(Asked(1, 0, 6))]),
    ]:
        run_stage(work, stage)


@holds(
    "13",
    "engine_thread",
    "None is the end, also while texts are being made: no further step, no further command",
    hint="return as soon as the command is None, before it is called.",
)
def thread_ends(work: Work) -> None:
    late = Asked(2, 0, 1)
    for stage in (
        Stage({2: [None, *submits(late)]}, [submits(Asked(1, 0, 9))]),
        Stage({1: [*submits(late), None]}, [submits(Asked(1, 1, 9))]),
        Stage({}, [[None]]),
    ):
        run_stage(work, stage)
        ends = [step for step, commands in stage.during.items() if None in commands] or [0]
        if stage.steps != ends[0]:
            raise Wrong(f"None came during step {ends[0]}, and {stage.steps} steps were made")


def right_engine_thread(engine: Any, inbox: Any, deliver: Callable[[list[Event]], None]) -> None:
    while True:
        while not engine.busy or not inbox.empty():
            command = inbox.get()
            if command is None:
                return
            command(engine)
        if events := engine.step():
            deliver(events)


# ---- answer: the other side of the inbox


def in_thread(make: Callable[[], Awaitable[Any]], what: str = "it", seconds: float = 4 * PATIENCE) -> Any:
    """Runs a coroutine in an event loop of its own, in a thread of its own: a notebook's kernel has one already.

    Raises what it raises, and Wrong if it takes longer than so many seconds.
    """
    outcome: list[tuple[Any, BaseException | None]] = []

    async def main() -> Any:
        return await make()

    def go() -> None:
        try:
            outcome.append((asyncio.run(main()), None))
        except BaseException as error:  # it belongs to whoever called
            outcome.append((None, error))

    thread = threading.Thread(target=go, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise Wrong(f"{what} took longer than {seconds:g} s, and nothing else ran meanwhile: does it block the loop?")
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


@dataclass
class Side:
    """The engine's side, played: an inbox that obeys at once, and tokens that come when the check says so."""

    eager: int = 0  # tokens that are made before `put` returns, as a fast engine may
    queues: dict[Any, Any] = field(default_factory=dict)
    submitted: list[Asked] = field(default_factory=list)
    aborted: list[Any] = field(default_factory=list)
    ended: set[Asked] = field(default_factory=set)

    def put(self, command: Any) -> None:
        if not callable(command):
            raise Wrong(f"{command!r} was put into the inbox; a command is a function that is called with the engine")
        command(self)

    put_nowait = put

    def submit(self, *requests: Asked) -> None:
        for request in requests:
            if request in self.submitted:
                raise Wrong(f"{request} was submitted twice")
            self.submitted.append(request)
            for n in range(self.eager):
                self.tell(request, n)

    def abort(self, request_id: Any) -> None:
        if not isinstance(request_id, int):
            raise Wrong(f"engine.abort was called with {request_id!r}; it takes the number, request.id")
        self.aborted.append(request_id)

    def tell(self, request: Asked, token: int, reason: str | None = None) -> None:
        """An event arrives, as `put` of the lesson does it."""
        waits = self.queues.get(request)
        if waits is None:
            if self.eager:
                raise Wrong(
                    f"the first event of {request} came before its queue was in `queues`, and is lost: put the queue "
                    "there, then send the command"
                )
            return
        try:
            waits.put_nowait(Event(request, token, "", reason))  # type: ignore[arg-type]
        except asyncio.QueueFull:
            raise Wrong(
                f"the queue of {request} is full: the engine's side never waits for a reader, so what is unread must "
                "have room (max_tokens bounds it already)"
            ) from None
        if reason is not None:
            self.ended.add(request)


def opened(work: Work, side: Side, request: Asked) -> AsyncGenerator[Event, None]:
    got = work.call("answer", request, side.queues, side, changes=(0, 1, 2))
    if not hasattr(got, "__anext__") or not hasattr(got, "aclose"):
        if asyncio.iscoroutine(got):
            try:
                got.send(None)
            except NotImplementedError as error:  # the stub has no `yield` in it
                raise Wrong(work.explain("answer", error)) from error
            except (Exception, StopIteration):
                pass
            got.close()
        raise Wrong(f"answer gave {type(got).__name__}; it must be an async generator: `async def` with `yield` in it")
    return got


async def following(work: Work, stream: AsyncGenerator[Event, None], what: str) -> Event | None:
    """The next event; None at the end. Raises Wrong if there is none within some seconds."""
    try:
        async with asyncio.timeout(PATIENCE):
            return await anext(stream, None)
    except TimeoutError:
        raise Wrong(f"{what}, and answer yields nothing and does not end") from None


def scene(work: Work, make: Callable[[Work], Awaitable[None]]) -> None:
    """Runs an async check; what the learner's code raises there is told as elsewhere."""

    async def quiet() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # of tasks that were left behind
        await make(work)

    try:
        in_thread(quiet, "answer", 4 * PATIENCE + ENGINE_SECONDS)
    except Wrong:
        raise
    except Exception as error:
        if "different event loop" in str(error):
            raise Wrong("answer used a queue of an earlier call; each request needs a queue of its own") from error
        if work.took_part("answer", error.__traceback__):
            raise Wrong(work.explain("answer", error)) from error
        raise


async def let_others_run() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def begun(stream: AsyncGenerator[Event, None]) -> "asyncio.Task[Event | None]":
    """The client's handler waits for its first event."""
    task = asyncio.ensure_future(anext(stream, None))
    await let_others_run()
    if task.done() and task.exception() is not None:
        await task
    return task


async def received(task: "asyncio.Task[Event | None]", what: str) -> Event | None:
    done, _ = await asyncio.wait([task], timeout=PATIENCE)
    if not done:
        task.cancel()
        raise Wrong(f"{what}, and answer yields nothing and does not end")
    return task.result()


@holds(
    "13",
    "answer",
    "submits once, then yields the request's events in order, the last one too, and ends by itself",
    hint="after the event whose finish_reason is not None there is none: leave the loop behind its yield.",
)
def answer_in_order(work: Work) -> None:
    async def play(work: Work) -> None:
        for n in (1, 2, 5):
            side, request = Side(), Asked(n, 0, n)
            stream = opened(work, side, request)
            task = await begun(stream)
            if side.submitted != [request]:
                raise Wrong(f"nothing was submitted: send a command by inbox.put that calls engine.submit({request})")
            for token in range(n):
                side.tell(request, token, "stop" if token == n - 1 else None)
            got: list[Any] = []
            while (event := await received(task, f"{n} events came, {len(got)} were yielded")) is not None:
                got.append(event.token)
                task = asyncio.ensure_future(anext(stream, None))
            if got != list(range(n)):
                raise Wrong(f"of the tokens {list(range(n))} were yielded {got}")

    scene(work, play)


@holds(
    "13",
    "answer",
    "a text that has ended is not aborted, and its queue is gone",
    hint="remember that the last event came before you yield it: the reader may leave at that very place.",
)
def answer_leaves_nothing(work: Work) -> None:
    async def play(work: Work) -> None:
        for leaves_at_last in (False, True):
            side, request = Side(), Asked(7, 0, 2)
            stream = opened(work, side, request)
            task = await begun(stream)
            side.tell(request, 0)
            side.tell(request, 1, "length")
            await received(task, "2 events came, 0 were yielded")
            event = await following(work, stream, "2 events came, 1 was yielded")
            if event is None or event.finish_reason is None:
                raise Wrong("the last event, which has the finish_reason, was not yielded")
            if leaves_at_last:
                await stream.aclose()
            elif await following(work, stream, "all events were yielded") is not None:
                raise Wrong("answer goes on after the event with a finish_reason")
            if side.aborted:
                raise Wrong("the text had ended, and an abort was sent all the same")
            if side.queues:
                raise Wrong("the text has ended, and its queue stays in `queues`: memory grows with every request")

    scene(work, play)


@holds(
    "13",
    "answer",
    "a client that leaves between two tokens: one abort for its request, its queue gone, others go on",
    hint="`try: ... finally:` around the loop; a generator that is closed raises GeneratorExit at its yield.",
)
def answer_closed(work: Work) -> None:
    async def play(work: Work) -> None:
        side, leaver, other = Side(), Asked(3, 0, 9), Asked(4, 0, 2)
        stream, stays = opened(work, side, leaver), opened(work, side, other)
        task, second = await begun(stream), await begun(stays)
        side.tell(leaver, 0)
        side.tell(other, 0)
        await received(task, "an event came")
        await stream.aclose()
        left_well(side, leaver)
        if other not in side.queues:
            raise Wrong("one client left, and the queue of another one is gone too")
        side.tell(leaver, 1)
        side.tell(other, 1, "length")
        got = [await received(second, "an event came"), await following(work, stays, "an event came")]
        if [event.token if event else None for event in got] != [0, 1]:
            raise Wrong(f"one client left; the other must get its tokens 0 and 1, and got {got}")

    scene(work, play)


def left_well(side: Side, request: Asked) -> None:
    if not side.aborted:
        raise Wrong(f"the client of {request} left, and no abort was sent: the engine goes on computing for nobody")
    if side.aborted != [request.id]:
        raise Wrong(f"the client of {request} left; expected one abort of {request.id}, got aborts of {side.aborted}")
    if request in side.queues:
        raise Wrong(f"the client of {request} left, and its queue stays in `queues`")


@holds(
    "13",
    "answer",
    "a client that leaves while it waits, before the first token too: the task is cancelled, and the request aborted",
    hint="cancelling raises CancelledError at the await, which is neither GeneratorExit nor an Exception: use finally.",
)
def answer_cancelled(work: Work) -> None:
    async def play(work: Work) -> None:
        for tokens in (0, 2):
            side, request = Side(), Asked(5, 0, 9)
            stream = opened(work, side, request)
            task = await begun(stream)
            for token in range(tokens):
                side.tell(request, token)
                await received(task, "an event came")
                task = await begun(stream)
            task.cancel()
            done, _ = await asyncio.wait([task], timeout=PATIENCE)
            if not done:
                raise Wrong("the task was cancelled, and answer goes on waiting")
            left_well(side, request)
            if not task.cancelled():
                raise Wrong("the task was cancelled, and answer swallowed it: whoever cancelled waits in vain")

    scene(work, play)


@holds(
    "13",
    "answer",
    "an engine that is fast: the first event may come before the command has been sent; none is lost",
    hint="first the queue into `queues`, then inbox.put.",
)
def answer_early(work: Work) -> None:
    async def play(work: Work) -> None:
        side, request = Side(eager=2), Asked(6, 0, 3)
        stream = opened(work, side, request)
        task = await begun(stream)
        side.tell(request, 2, "length")
        got = [await received(task, "an event came")]
        got += [await following(work, stream, f"3 events came, {n} were yielded") for n in (1, 2)]
        tokens = [event.token if event else None for event in got]
        if tokens != [0, 1, 2]:
            raise Wrong(f"two events came before the command was sent; expected the tokens [0, 1, 2], got {tokens}")

    scene(work, play)


@holds(
    "13",
    "answer",
    "two clients at once, one of them slow: each gets its own events, and what is unread waits",
    hint="one queue for each request, without a limit of its own.",
)
def answer_slow(work: Work) -> None:
    async def play(work: Work) -> None:
        side, slow, fast = Side(), Asked(8, 0, 60), Asked(9, 0, 60)
        streams_of = {request: opened(work, side, request) for request in (slow, fast)}
        tasks = {request: await begun(stream) for request, stream in streams_of.items()}
        got: dict[Asked, list[int | None]] = {slow: [], fast: []}
        for token in range(60):
            side.tell(slow, 1000 + token, "length" if token == 59 else None)
            side.tell(fast, 2000 + token, "length" if token == 59 else None)
            event = await received(tasks[fast], f"{token + 1} events came, {token} were yielded")
            got[fast].append(event.token if event else None)
            tasks[fast] = asyncio.ensure_future(anext(streams_of[fast], None))
        while (event := await received(tasks[slow], "60 events came")) is not None:
            got[slow].append(event.token)
            tasks[slow] = asyncio.ensure_future(anext(streams_of[slow], None))
        await received(tasks[fast], "all events were yielded")
        for request, first in ((slow, 1000), (fast, 2000)):
            same(got[request], list(range(first, first + 60)), f"the tokens of {request}")

    scene(work, play)


async def serve(
    thread: Callable[..., None], answer: Callable[..., Any], engine: Engine, clients: dict[Any, Callable[..., Any]]
) -> dict[Any, Any]:
    """Both of a learner's functions on an engine, in two threads. `clients`: {request: what reads its answer}."""
    loop, queues, inbox = asyncio.get_running_loop(), dict[Any, Any](), queue.SimpleQueue[Any]()

    def put(events: list[Event]) -> None:
        for event in events:
            if event.request in queues:
                queues[event.request].put_nowait(event)

    def deliver(events: list[Event]) -> None:
        loop.call_soon_threadsafe(put, events)

    runner = threading.Thread(target=thread, args=(engine, inbox, deliver), daemon=True)
    runner.start()
    try:
        results = await asyncio.gather(*(read(answer(request, queues, inbox)) for request, read in clients.items()))
        return dict(zip(clients, results, strict=True))
    finally:
        inbox.put(None)
        await asyncio.to_thread(runner.join, PATIENCE)


async def read_all(stream: AsyncGenerator[Event, None]) -> list[int]:
    async with contextlib.aclosing(stream):
        return [event.token async for event in stream if event.token is not None]


async def read_some(n: int, stream: AsyncGenerator[Event, None]) -> list[int]:
    """A client that leaves after n tokens."""
    got: list[int] = []
    async with contextlib.aclosing(stream):
        async for event in stream:
            if event.token is not None:
                got.append(event.token)
            if len(got) >= n:
                break
    return got


@holds(
    "13",
    "answer",
    "on a real engine, by your engine_thread in its own thread: every text is the naive stage's, and a client leaves",
    hint="if all above holds, look at what both share: the inbox takes functions of the engine, and None is the end.",
    uses={"engine_thread": right_engine_thread},
)
def answer_on_engine(work: Work) -> None:
    draw = seeds.rng(3)
    engine = Engine(model(), slots=partial(SharedSlots, n_slots=None, size=4), max_running=4, budget=16, max_len=96)
    made = [
        make_request(
            [draw.randrange(3, 60) for _ in range(draw.randint(1, 30))],
            SamplingParams(max_tokens=draw.randint(4, 20), temperature=0.0, ignore_eos=True),
            TINY,
            None,
            96,
        )
        for _ in range(9)
    ]
    leaver = make_request([5, 6, 7], SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True), TINY, None, 96)
    clients: dict[Any, Callable[..., Any]] = {request: read_all for request in made}
    clients[leaver] = partial(read_some, 3)
    failed: list[BaseException] = []
    opened(work, Side(), Asked(1, 0, 1))  # is it a generator at all?

    async def play(work: Work) -> None:
        loop, over = asyncio.get_running_loop(), asyncio.Event()

        def thread(*arguments: Any) -> None:
            try:
                work.function("engine_thread")(*arguments)
            except BaseException as error:
                failed.append(error)
            finally:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(over.set)

        task = asyncio.ensure_future(serve(thread, work.function("answer"), engine, clients))
        ended = asyncio.ensure_future(over.wait())
        await asyncio.wait([task, ended], timeout=ENGINE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if over.is_set():  # at the right end, or too early
            await asyncio.wait([task], timeout=PATIENCE)
        if failed and isinstance(failed[0], NotImplementedError):
            raise Wrong(work.explain("answer", failed[0]))
        if failed:
            raise Wrong(f"engine_thread raised {type(failed[0]).__name__}: {failed[0]}")
        if not task.done():
            task.cancel()
            when = "when engine_thread had returned" if over.is_set() else f"after {ENGINE_SECONDS:g} s"
            raise Wrong(f"ten clients of a real engine were not done {when}")
        texts = task.result()
        for i, request in enumerate(made):
            expected = expected_text(tuple(request.prompt), request.limit)
            same(texts[request], expected, f"the tokens of client {i}")
        if leaver.finish_reason != "abort":
            state = f"ended with {leaver.finish_reason!r}" if leaver.finish_reason else "is still being computed"
            raise Wrong(f"a client left after 3 of 80 tokens, and its request {state}; it must be aborted")

    scene(work, play)


@cache
def expected_text(prompt: tuple[int, ...], limit: int) -> list[int]:
    request = make_request(
        list(prompt), SamplingParams(max_tokens=limit, temperature=0.0, ignore_eos=True), TINY, None, 96
    )
    return [event.token for event in naive.generate(model(), [request]) if event.token is not None]


# ---- two_choices


def chosen(work: Work, loads: list[int], draw: random.Random) -> int:
    got = work.call("two_choices", loads, draw, changes=(1,))
    if got is None:
        raise Wrong("two_choices returned None: is a `return` missing?")
    if isinstance(got, bool) or not isinstance(got, int) or not 0 <= got < len(loads):
        raise Wrong(f"two_choices({loads}) is {got!r}; it must be the number of a replica, 0 to {len(loads) - 1}")
    return got


def counts(work: Work, loads: list[int], n: int) -> Counter[int]:
    draw = seeds.rng(11)
    return Counter(chosen(work, loads, draw) for _ in range(n))


@holds(
    "13",
    "two_choices",
    "the more loaded of the two is never taken: so the most loaded of all never is",
    hint="two *different* replicas, draw.sample(range(n), 2), and of these the one with the smaller load.",
)
def choices_never_worst(work: Work) -> None:
    for loads in ([1, 2], [5, 0], [3, 9, 1], [7, 1, 2, 3, 4, 5, 6, 0]):
        found = counts(work, loads, 300)
        worst = loads.index(max(loads))
        if found[worst]:
            raise Wrong(
                f"loads {loads}: replica {worst} has the most, and was chosen {found[worst]} of 300 times; whichever "
                "other it is compared with has less"
            )


@holds(
    "13",
    "two_choices",
    "two are asked, and no more: of n replicas the least loaded is taken with a chance of 2 / n, by rank falling",
    hint="draw both at random, each pair as likely as another; do not look at all loads.",
)
def choices_by_rank(work: Work) -> None:
    n, times = 6, 3000
    for seed in range(3):
        loads = seeds.rng(seed).sample(range(0, 60, 10), n)
        found = counts(work, loads, times)
        if found[loads.index(min(loads))] == times:
            raise Wrong(
                f"loads {loads}: the least loaded is chosen {times} of {times} times, so all are asked, not two"
            )
        for replica, load in enumerate(loads):
            rank = sorted(loads).index(load)
            chance = 2 * (n - 1 - rank) / (n * (n - 1))
            spread = 5 * math.sqrt(times * chance * (1 - chance)) + 1
            if abs(found[replica] - times * chance) > spread:
                raise Wrong(
                    f"loads {loads}: replica {replica} should be chosen about {times * chance:.0f} of {times} times, "
                    f"and was {found[replica]} times"
                )


@holds(
    "13",
    "two_choices",
    "with equal loads everybody gets a share; a single replica gets all; the draw is the one that is given",
    hint="of two equal ones take the one drawn first, not the one with the smaller number.",
)
def choices_fair(work: Work) -> None:
    found = counts(work, [4] * 5, 1000)
    for replica in range(5):
        if not 120 < found[replica] < 280:
            raise Wrong(
                f"five replicas with equal loads: replica {replica} was chosen {found[replica]} of 1000 times, not 200"
            )
    if chosen(work, [3], seeds.rng(0)) != 0:
        raise Wrong("there is one replica, number 0")
    loads = [0] * 50
    runs = []
    for other in (1, 2):
        random.seed(other)
        draw = seeds.rng(4)
        runs.append([chosen(work, loads, draw) for _ in range(20)])
    if runs[0] != runs[1]:
        raise Wrong("the same draw chose differently the second time: draw from `draw`, not from `random`")


# ---- fleet


def needed(work: Work, rate: float, seconds: float, load: float, spare: int) -> tuple[int, str]:
    what = f"fleet(rate={rate:g}, seconds={seconds:g}, load={load:g}, spare={spare})"
    got = work.call("fleet", rate, seconds, load, spare)
    if got is None:
        raise Wrong(f"{what} returned None: is a `return` missing?")
    if isinstance(got, bool) or not isinstance(got, int | float):
        raise Wrong(f"{what} is {got!r}; it must be a whole number of replicas")
    if got != int(got):
        raise Wrong(f"{what} is {got!r}; there are whole replicas only")
    return int(got), what


@holds(
    "13",
    "fleet",
    "by hand: busy replicas are rate times seconds; at half load twice as many; and the spare ones on top",
    hint="rate * seconds are the replicas that are busy at any moment (Little's law); divide by the load, round up.",
)
def fleet_by_hand(work: Work) -> None:
    for rate, seconds, load, spare, expected in (
        (8.0, 0.5, 0.5, 0, 8),
        (8.0, 0.5, 0.5, 2, 10),
        (9.0, 0.5, 0.5, 0, 9),
        (1.0, 0.125, 0.5, 0, 1),
        (1.0, 0.125, 0.5, 1, 2),
        (100.0, 0.25, 0.75, 1, 35),
        (3.0, 1.5, 0.75, 0, 6),
    ):
        got, what = needed(work, rate, seconds, load, spare)
        if got != expected:
            raise Wrong(f"{what}: expected {expected}, got {got}")


@holds(
    "13",
    "fleet",
    "with the spare ones gone each replica is busy at most `load` of its time, and with one fewer it is not",
    hint="math.ceil: rounding down or to the nearest leaves too few, and + 1 is one too many where it divides.",
)
def fleet_enough(work: Work) -> None:
    draw = seeds.rng(9)
    for _ in range(100):
        rate, seconds = draw.randint(1, 400) / 4, draw.randint(1, 64) / 16
        load, spare = draw.choice((0.25, 0.5, 0.75, 0.875)), draw.randint(0, 3)
        got, what = needed(work, rate, seconds, load, spare)
        left = got - spare
        if left < 1 or rate * seconds > load * left:
            busy = rate * seconds / left if left > 0 else math.inf
            raise Wrong(f"{what} = {got}: with {spare} gone, {left} are busy {busy:.2%} of the time, above {load:.2%}")
        if left > 1 and rate * seconds <= load * (left - 1):
            raise Wrong(f"{what} = {got}: {got - 1} would be enough")
