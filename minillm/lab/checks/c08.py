"""Lesson 08, continuous batching: two queues by their laws, a scheduler by its invariants, and a loop whose every
token is the naive stage's, with NaN in every slot that nobody may read."""

import math
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from minillm.attention import Attend
from minillm.lab import seeds
from minillm.lab.checking import holds
from minillm.lab.tiny import TINY
from minillm.lab.work import Work, Wrong
from minillm.model import Llama
from minillm.params import SamplingParams
from minillm.request import Event, Request, make_request
from minillm.simulation import policies
from minillm.stages import continuous, naive

EOS = 1


@cache
def model() -> Llama:
    return Llama.random(TINY, seed=0, dtype=torch.float64)


# ---- the queues: static, continuous

Queue = tuple[list[int], list[int], int]  # arrivals, durations, slots; whole numbers, so that all laws hold exactly

BY_HAND: Queue = ([0, 0, 1, 1], [1, 5, 2, 2], 2)


def queues(seed: int, n: int) -> Iterator[Queue]:
    draw = seeds.rng(seed)
    for _ in range(n):
        size = draw.randint(1, 14)
        arrivals = sorted(draw.randint(0, 12) for _ in range(size))
        yield arrivals, [draw.randint(1, 9) for _ in range(size)], draw.randint(1, 4)


def queue_words(queue: Queue) -> str:
    return f"for arrivals = {queue[0]}, durations = {queue[1]}, slots = {queue[2]}"


def starts_of(work: Work, name: str, queue: Queue) -> list[float]:
    """What the learner's function says, once it is a list of one number for each request."""
    arrivals, durations, slots = queue
    got = work.call(name, arrivals, durations, slots)
    if got is None:
        raise Wrong(f"{name} returned None: is a `return` missing?")
    if not isinstance(got, list | tuple):
        raise Wrong(f"{name} returned {type(got).__name__}; it must return a list of starts, one for each request")
    if len(got) != len(arrivals):
        raise Wrong(f"{queue_words(queue)}: expected {len(arrivals)} starts, got {len(got)}")
    for i, start in enumerate(got):
        if not isinstance(start, int | float) or math.isnan(start):
            raise Wrong(f"{queue_words(queue)}: the start of request {i} is {start!r}; it must be a number")
    return list(got)


def must_start(work: Work, name: str, queue: Queue) -> None:
    """Exactly as the package's own queue, which has tests of its own."""
    expected = getattr(policies, name)(*queue).starts
    for i, (mine, ours) in enumerate(zip(starts_of(work, name, queue), expected, strict=True)):
        if mine != ours:
            raise Wrong(f"{queue_words(queue)}: request {i} must start at {ours:g}, and starts at {mine:g}")


def taken(starts: Sequence[float], queue: Queue, at: float) -> int:
    """Slots in which a request works at a time."""
    return sum(start <= at < start + duration for start, duration in zip(starts, queue[1], strict=True))


def lawful(work: Work, name: str, seed: int) -> None:
    """Nobody starts before it is there, and no slot holds two."""
    for queue in [BY_HAND, *queues(seed, 60)]:
        starts = starts_of(work, name, queue)
        for i, (start, arrival) in enumerate(zip(starts, queue[0], strict=True)):
            if start < arrival:
                raise Wrong(f"{queue_words(queue)}: request {i} starts at {start:g}, before it arrives at {arrival}")
        for at in starts:
            if (busy := taken(starts, queue, at)) > queue[2]:
                raise Wrong(f"{queue_words(queue)}: at time {at:g}, {busy} requests hold a slot, of {queue[2]} slots")


@holds(
    "08",
    "static",
    "by hand: of four requests on two slots, the second pair waits for the longest of the first",
    hint="the next group starts when the longest of this one has ended: its start plus the greatest duration.",
)
def static_by_hand(work: Work) -> None:
    must_start(work, "static", BY_HAND)
    must_start(work, "static", ([0, 0, 1, 1], [5, 1, 2, 2], 2))


@holds(
    "08",
    "static",
    "nobody starts before it arrives, and a slot serves one request at a time",
    hint="a group may start once its last member is there and everybody before it has left: the later of the two.",
)
def static_lawful(work: Work) -> None:
    lawful(work, "static", 1)


@holds(
    "08",
    "static",
    "a group starts together; it waits until it is full, and only the very last one may be smaller",
    hint="a group starts at its last member's arrival at the earliest; the last group ends with number n - 1.",
)
def static_groups(work: Work) -> None:
    for queue in [([0, 3, 9], [1, 1, 1], 2), ([0, 0, 0], [4, 4, 4], 2), *queues(2, 40)]:
        starts = starts_of(work, "static", queue)
        for first in range(0, len(starts), queue[2]):
            group = starts[first : first + queue[2]]
            if len(set(group)) > 1:
                raise Wrong(
                    f"{queue_words(queue)}: requests {first} to {first + len(group) - 1} are one group and must start "
                    f"together, and start at {group}"
                )
        must_start(work, "static", queue)


@holds(
    "08",
    "continuous",
    "by hand: the first request's slot serves the third and then the fourth",
    hint="keep for each slot the time at which it is free; the next request takes the slot that is free first.",
)
def continuous_by_hand(work: Work) -> None:
    must_start(work, "continuous", BY_HAND)


@holds(
    "08",
    "continuous",
    "nobody starts before it arrives, and a slot serves one request at a time",
    hint="a slot is free again at the request's start plus its duration, not at its duration.",
)
def continuous_lawful(work: Work) -> None:
    lawful(work, "continuous", 3)


@holds(
    "08",
    "continuous",
    "first come, first served: nobody is overtaken",
    hint="go through the requests in the order of arrival; never sort them by length.",
)
def continuous_in_order(work: Work) -> None:
    for queue in queues(4, 60):
        starts = starts_of(work, "continuous", queue)
        for i, (before, after) in enumerate(zip(starts, starts[1:], strict=False)):
            if after < before:
                raise Wrong(
                    f"{queue_words(queue)}: first come, first served, but request {i + 1} starts at {after:g}, before "
                    f"request {i} at {before:g}"
                )


@holds(
    "08",
    "continuous",
    "no slot is free while somebody waits: a freed one is refilled at once",
    hint="take the slot with the smallest time of being free, not the next one in turn, nor when all are free.",
)
def continuous_never_idles(work: Work) -> None:
    for queue in [BY_HAND, *queues(5, 60)]:
        starts = starts_of(work, "continuous", queue)
        moments = {*queue[0], *(start + duration for start, duration in zip(starts, queue[1], strict=True))}
        for i, (start, arrival) in enumerate(zip(starts, queue[0], strict=True)):
            for at in sorted(moment for moment in moments if arrival <= moment < start):
                if (busy := taken(starts, queue, at)) < queue[2]:
                    raise Wrong(
                        f"{queue_words(queue)}: at time {at:g} request {i} waits although a slot is free ({busy} of "
                        f"{queue[2]} are taken); it starts only at {start:g}"
                    )


@holds(
    "08",
    "continuous",
    "equal lengths, all there at once: the same starts as under static, so nothing is gained",
    hint="if all slots end together, refilling one by one and refilling all at once are the same thing.",
)
def no_spread_no_gain(work: Work) -> None:
    draw = seeds.rng(6)
    for _ in range(20):
        n, slots, length = draw.randint(1, 14), draw.randint(1, 4), draw.randint(1, 9)
        queue = ([0] * n, [length] * n, slots)
        groups, refilled = starts_of(work, "static", queue), starts_of(work, "continuous", queue)
        if groups != refilled:
            raise Wrong(f"{queue_words(queue)}: static starts at {groups}, continuous at {refilled}; both must agree")


# ---- schedule


def half_done(prompt: int, made: int = 0, computed: int = 0, most: int = 50) -> Request:
    """A request on its way: `made` tokens are sampled, of all its tokens `computed` are stored."""
    request = make_request([3] * prompt, SamplingParams(max_tokens=most, seed=0), TINY, None, 200)
    request.tokens += [4] * made
    request.computed = computed
    return request


def decoding(prompt: int, made: int, most: int = 50) -> Request:
    return half_done(prompt, made, prompt + made - 1, most)


@dataclass
class State:
    """What a scheduler is asked about; requests are A, B, C ... in messages."""

    running: list[Request]
    waiting: list[Request]
    budget: int
    max_running: int
    names: dict[Request, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
        self.names = self.names or dict(zip([*self.running, *self.waiting], letters, strict=False))

    def line(self, requests: Sequence[Request]) -> str:
        return ", ".join(f"{self.names[r]} ({r.pending} pending)" for r in requests) or "nobody"

    def __str__(self) -> str:
        limits = f"budget {self.budget}, at most {self.max_running} running"
        return f"running {self.line(self.running)}; waiting {self.line(self.waiting)}; {limits}"


def states(seed: int, n: int) -> Iterator[State]:
    """Any mixture of requests that need one token, prompts half computed, and newcomers."""
    draw = seeds.rng(seed)
    for _ in range(n):
        most = draw.randint(1, 5)
        running = []
        for _ in range(draw.randint(0, most)):
            prompt = draw.randint(2, 20)
            if draw.random() < 0.5:
                running.append(decoding(prompt, draw.randint(1, 4)))
            else:
                running.append(half_done(prompt, 0, draw.randint(1, prompt - 1)))
        waiting = [half_done(draw.choice((1, 2, 7, 20))) for _ in range(draw.randint(0, 5))]
        yield State(running, waiting, most + draw.randint(0, 10), most)


Plan = list[tuple[Request, int]]


def plan_words(plan: Plan, state: State) -> str:
    return ", ".join(f"{state.names[r]} {n}" for r, n in plan) or "nothing"


def ask(work: Work, state: State) -> tuple[Plan, list[Request], list[Request]]:
    """The learner's plan, and who runs and who waits after it."""
    running, waiting = list(state.running), deque(state.waiting)
    before = {r: (r.computed, len(r.tokens)) for r in state.names}
    got = work.call("schedule", running, waiting, state.budget, state.max_running, changes=(0, 1))
    if got is None:
        raise Wrong("schedule returned None: is a `return` missing?")
    if not isinstance(got, list | tuple):
        raise Wrong(f"schedule returned {type(got).__name__}; it must return a list of pairs (request, n)")
    plan: Plan = []
    for entry in got:
        if not isinstance(entry, list | tuple) or len(entry) != 2:
            raise Wrong(f"the plan holds {entry!r}; each entry must be a pair (request, n)")
        request, n = entry
        if not isinstance(request, Request) or request not in before or not isinstance(n, int):
            raise Wrong(f"the plan holds ({type(request).__name__}, {n!r}); each entry must be a request and a number")
        plan.append((request, n))
    for request, (computed, size) in before.items():
        if (request.computed, len(request.tokens)) != (computed, size):
            raise Wrong(
                f"schedule changed request {state.names[request]}; it only plans: `computed` grows in update, after "
                "the step has run"
            )
    return plan, running, list(waiting)


def must_plan(work: Work, state: State, expected: Plan) -> None:
    plan, _, _ = ask(work, state)
    if plan != expected:
        raise Wrong(f"{state}:\nexpected {plan_words(expected, state)}; got {plan_words(plan, state)}")


@holds(
    "08",
    "schedule",
    "by hand: a prompt of 7 tokens under a budget of 4, alone and in company",
    hint="singles first, then prompts half computed, then newcomers; each gets min(pending, what is left).",
)
def schedule_by_hand(work: Work) -> None:
    a = half_done(7)
    must_plan(work, State([], [a], 4, 2), [(a, 4)])
    a = half_done(7, computed=4)
    must_plan(work, State([a], [], 4, 2), [(a, 3)])
    a, b = decoding(7, 2), half_done(7)
    must_plan(work, State([a], [b], 4, 2), [(a, 1), (b, 3)])
    a, b, c = half_done(7, computed=4), decoding(7, 2), half_done(7)
    must_plan(work, State([a, b], [c], 4, 3), [(b, 1), (a, 3)])
    must_plan(work, State([a, b], [c], 8, 3), [(b, 1), (a, 3), (c, 4)])
    must_plan(work, State([a, b], [c], 8, 2), [(b, 1), (a, 3)])


@holds(
    "08",
    "schedule",
    "never more tokens than the budget, no entry of 0, nobody twice, no more running than allowed",
    hint="take each n off what is left at once, and add an entry only if its n is above 0.",
)
def schedule_limits(work: Work) -> None:
    for state in states(11, 300):
        plan, running, _ = ask(work, state)
        made = plan_words(plan, state)
        for request, n in plan:
            name = state.names[request]
            if n < 1:
                raise Wrong(f"{state}:\nthe plan is {made}: an entry of {n} tokens, for {name}")
            if n > request.pending:
                raise Wrong(f"{state}:\nthe plan is {made}: {name} has only {request.pending} pending")
        if len(set(r for r, _ in plan)) < len(plan):
            raise Wrong(f"{state}:\nthe plan is {made}: a request is in it twice")
        if (total := sum(n for _, n in plan)) > state.budget:
            raise Wrong(f"{state}:\nthe plan is {made}: {total} tokens, and the budget is {state.budget}")
        if len(running) > state.max_running:
            raise Wrong(f"{state}:\n{len(running)} requests run then, and at most {state.max_running} may")


@holds(
    "08",
    "schedule",
    "every running request that needs one token gets it, before any piece of a prompt: prefill never starves decode",
    hint="give single tokens out first: go through the running ones twice, or by a stable sort on `pending > 1`.",
)
def decode_goes_on(work: Work) -> None:
    for state in states(12, 300):
        plan, _, _ = ask(work, state)
        single = [r for r in state.running if r.pending == 1]
        given = dict(plan)
        for request in single:
            if request not in given:
                raise Wrong(
                    f"{state}:\nthe plan is {plan_words(plan, state)}: {state.names[request]} runs and needs one "
                    "token, and gets none"
                )
        if [r for r, _ in plan[: len(single)]] != single:
            raise Wrong(
                f"{state}:\nthe plan is {plan_words(plan, state)}: it must begin with {state.line(single)}, in the "
                "order in which they run"
            )


@holds(
    "08",
    "schedule",
    "what is left of the budget goes to prompts half computed, in order: decode never starves prefill",
    hint="after the single tokens: n = min(pending, left) for each running prompt, until nothing is left.",
)
def prefill_goes_on(work: Work) -> None:
    for state in states(13, 300):
        plan, _, _ = ask(work, state)
        left = state.budget - sum(r.pending == 1 for r in state.running)
        expected: Plan = []
        for request in state.running:
            if request.pending > 1 and left:
                expected.append((request, min(request.pending, left)))
                left -= expected[-1][1]
        given = [(r, n) for r, n in plan if r in state.running and r.pending > 1]
        if given != expected:
            raise Wrong(
                f"{state}:\nthe running prompts must get {plan_words(expected, state)}, and get "
                f"{plan_words(given, state)}"
            )


@holds(
    "08",
    "schedule",
    "newcomers join first come, first served, while there are slots and budget: from `waiting` to `running`",
    hint="waiting.popleft() and running.append(...) go together, for the first in the queue, cut to what is left.",
)
def newcomers_join(work: Work) -> None:
    for state in states(14, 300):
        plan, running, waiting = ask(work, state)
        left = state.budget - sum(n for r, n in plan if r in state.running)
        room = state.max_running - len(state.running)
        expected: Plan = []
        for request in state.waiting[:room]:
            if left > 0:
                expected.append((request, min(request.pending, left)))
                left -= expected[-1][1]
        joined = [r for r, _ in expected]
        known = len(state.running)
        if [r for r, _ in plan if r in state.running] != [r for r, _ in plan][: len(plan) - len(joined)]:
            raise Wrong(f"{state}:\nthe plan is {plan_words(plan, state)}: newcomers must come after all who run")
        given = [(r, n) for r, n in plan if r not in state.running]
        if given != expected:
            raise Wrong(
                f"{state}:\nfirst come, first served: the newcomers must get {plan_words(expected, state)}, and get "
                f"{plan_words(given, state)}"
            )
        if running[:known] != state.running:
            raise Wrong(f"{state}:\nrunning then begins with {state.line(running[:known])}: its order must be kept")
        if running[known:] != joined:
            raise Wrong(f"{state}:\nrunning must gain {state.line(joined)}, and gains {state.line(running[known:])}")
        if waiting != state.waiting[len(joined) :]:
            raise Wrong(
                f"{state}:\n`waiting` must then hold {state.line(state.waiting[len(joined) :])}, and holds "
                f"{state.line(waiting)}"
            )


@holds(
    "08",
    "schedule",
    "step after step everybody comes to an end, prompts longer than the budget too",
    hint="a newcomer may join with a part of its prompt: one that must fit whole may wait for ever.",
)
def nobody_starves(work: Work) -> None:
    draw = seeds.rng(15)
    for _ in range(15):
        most = draw.randint(1, 4)
        everyone = [half_done(draw.choice((1, 3, 7, 20))) for _ in range(draw.randint(1, 9))]
        want = {r: draw.randint(1, 6) for r in everyone}
        names = State([], everyone, 0, 0).names
        running: list[Request] = []
        waiting = list(everyone)
        budget = most + draw.randint(0, 6)
        steps = sum(len(r.prompt) + want[r] for r in everyone)
        for step in range(1, steps + 1):
            state = State(running, waiting, budget, most, names)
            plan, running, waiting = ask(work, state)
            if not sum(n for _, n in plan):
                raise Wrong(f"step {step}, {state}:\nthe plan is empty, though there is work")
            for request, n in plan:
                request.computed += n
                if request.pending == 0:
                    request.tokens.append(4)
            running = [r for r in running if r.n_output < want[r]]
            if not running and not waiting:
                break
        if missing := [r for r in everyone if r.n_output < want[r]]:
            raise Wrong(f"after {steps} steps with a budget of {budget}, {state.line(missing)} never came to an end")


# ---- update


@dataclass
class Past:
    """A step that has run: who ran, what was planned, what was sampled."""

    running: list[Request]
    plan: Plan
    sampled: dict[Request, int]
    names: dict[Request, str]
    computed: dict[Request, int]
    sizes: dict[Request, int]

    @property
    def ending(self) -> list[Request]:
        """Those whose text the sampled token ends."""
        return [r for r, token in self.sampled.items() if token == EOS or r.n_output + 1 == r.limit]

    def __str__(self) -> str:
        plan = ", ".join(f"{self.names[r]} {n}" for r, n in self.plan)
        sampled = ", ".join(f"{self.names[r]} {token}" for r, token in self.sampled.items()) or "nobody"
        runs = ", ".join(f"{self.names[r]} ({r.pending} pending)" for r in self.running)
        return f"running {runs}; plan {plan}; sampled {sampled} (token {EOS} ends a text)"


def past(running: list[Request], plan: Plan, tokens: Sequence[int]) -> Past:
    done = [r for r, n in plan if n == r.pending]
    return Past(
        running,
        plan,
        dict(zip(done, tokens, strict=False)),
        State(running, [], 0, 0).names,
        {r: r.computed for r in running},
        {r: len(r.tokens) for r in running},
    )


def pasts(seed: int, n: int) -> Iterator[Past]:
    # two neighbours that end together, one by its last token and one by its limit; and one without a part in the step
    a, b, c, d = decoding(3, 2), decoding(7, 4, most=5), half_done(7, computed=3), half_done(9, computed=1)
    yield past([a, b, c, d], [(a, 1), (b, 1), (c, 2)], [EOS, 9])
    draw = seeds.rng(seed)
    for _ in range(n):
        running = []
        for _ in range(draw.randint(1, 6)):
            prompt = draw.randint(2, 9)
            if draw.random() < 0.6:
                made = draw.randint(1, 3)
                running.append(decoding(prompt, made, most=draw.choice((made + 1, 50))))
            else:
                running.append(half_done(prompt, computed=draw.randint(0, prompt - 1), most=draw.choice((1, 50))))
        ordered = sorted(running, key=lambda r: r.pending > 1)
        plan = [(r, draw.choice((r.pending, draw.randint(1, r.pending)))) for r in ordered if draw.random() < 0.8]
        yield past(running, plan or [(running[0], 1)], [draw.choice((EOS, 5, 6)) for _ in running])


def after(work: Work, step: Past) -> tuple[list[Event], list[Request], str]:
    """The learner's events, who runs now, and the step in words."""
    words, running = str(step), list(step.running)
    got = work.call("update", list(step.plan), dict(step.sampled), running, changes=(0, 1, 2))
    if got is None:
        raise Wrong("update returned None: is a `return` missing? It must return a list of events")
    if not isinstance(got, list | tuple):
        raise Wrong(f"update returned {type(got).__name__}; it must return a list of events")
    for event in got:
        if not isinstance(event, Event):
            raise Wrong(f"update returned a list with {event!r} in it; it must hold what `request.accept` returned")
    return list(got), running, words


@holds(
    "08",
    "update",
    "what was planned is computed now: `computed` grows by n, once, and the sampled token is not computed yet",
    hint="only `request.computed += n`: the token sampled now goes through the model in the next step.",
)
def computed_grows(work: Work) -> None:
    for step in pasts(21, 100):
        planned = dict(step.plan)
        _, _, words = after(work, step)
        for request, before in step.computed.items():
            expected = before + planned.get(request, 0)
            if request.computed != expected:
                raise Wrong(
                    f"{words}:\n`computed` of {step.names[request]} was {before} and must be {expected}, and is "
                    f"{request.computed}"
                )


@holds(
    "08",
    "update",
    "a text grows by its sampled token, through `accept`, and no other text grows",
    hint="ask `if request in sampled`: a prompt that is half computed has no token to take.",
)
def tokens_land(work: Work) -> None:
    for step in pasts(22, 100):
        ending = step.ending
        events, _, words = after(work, step)
        for request, size in step.sizes.items():
            name, new = step.names[request], request.tokens[size:]
            expected = [step.sampled[request]] if request in step.sampled else []
            if new != expected:
                raise Wrong(f"{words}:\nthe new tokens of {name} must be {expected}, and are {new}")
            if (request.finish_reason is not None) != (request in ending):
                raise Wrong(
                    f"{words}:\n{name} {'has ended' if request in ending else 'goes on'}, but its finish_reason is "
                    f"{request.finish_reason!r}: only `request.accept(token)` knows when a text ends"
                )
        expected_events = [(step.names[r], step.sampled[r]) for r, _ in step.plan if r in step.sampled]
        made = [(step.names[e.request], e.token) for e in events]
        if made != expected_events:
            raise Wrong(
                f"{words}:\nthe events must be {expected_events}, one for each sampled token in the order of the plan; "
                f"they are {made}"
            )


@holds(
    "08",
    "update",
    "who has ended leaves `running` in the same step; all others stay, in order",
    hint="change the list itself: `running[:] = [...]`; and do not remove from a list while going through it.",
)
def ended_leave(work: Work) -> None:
    for step in pasts(23, 100):
        ending = step.ending
        _, running, words = after(work, step)
        expected = [r for r in step.running if r not in ending]
        names = [step.names.get(r, "?") for r in running]
        for request in ending:
            if request in running:
                raise Wrong(f"{words}:\n{step.names[request]} has ended and is still in running ({', '.join(names)})")
        for request in expected:
            if request not in running:
                raise Wrong(f"{words}:\n{step.names[request]} has not ended and must stay in running, but is gone")
        if running != expected:
            raise Wrong(f"{words}:\nrunning is now {', '.join(names)}: its order must be kept, and nobody twice")


# ---- run


def right_schedule(running: list[Request], waiting: deque[Request], budget: int, max_running: int) -> Plan:
    plan: Plan = []
    left = budget
    for request in sorted(running, key=lambda r: r.pending > 1):
        if n := min(request.pending, left):
            plan.append((request, n))
            left -= n
    while waiting and left and len(running) < max_running:
        running.append(waiting.popleft())
        plan.append((running[-1], min(running[-1].pending, left)))
        left -= plan[-1][1]
    return plan


def right_update(plan: Plan, sampled: dict[Request, int], running: list[Request]) -> list[Event]:
    for request, n in plan:
        request.computed += n
    events = [request.accept(sampled[request]) for request, _ in plan if request in sampled]
    running[:] = [request for request in running if request.finish_reason is None]
    return events


PARTS = {"schedule": right_schedule, "update": right_update}


@dataclass(frozen=True, eq=False)
class Text:
    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class Story:
    """Requests in their order of arrival, and the limits."""

    texts: tuple[Text, ...]
    budget: int
    max_running: int

    def requests(self, late: bool = False) -> list[Request]:
        """All of them long there, in order; with `late`, all but the first arrive while others run."""
        made = [make_request(text.prompt, text.params, TINY, None, TINY.context) for text in self.texts]
        for i, request in enumerate(made):
            request.arrival = math.inf if late and i else float(i - len(made))
        return made

    def __str__(self) -> str:
        return f"{len(self.texts)} requests, budget {self.budget}, at most {self.max_running} running"


@seeds.cache
def stories(seed: int, n: int) -> list[Story]:
    draw = seeds.rng(seed)

    def text() -> Text:
        prompt = tuple(draw.randrange(10, 64) for _ in range(draw.choice((1, 2, 4, 7, 7, 12))))
        stops = range(2, 2 + draw.randint(0, 8))  # so that texts end at any time
        temperature = draw.choice((0.0, 1.0))
        return Text(
            prompt,
            SamplingParams(draw.randint(1, 7), temperature, seed=draw.randrange(1000), stop_token_ids=tuple(stops)),
        )

    made = []
    for _ in range(n):
        most = draw.randint(1, 4)
        made.append(Story(tuple(text() for _ in range(draw.randint(3, 7))), most + draw.choice((0, 1, 3, 30)), most))
    return made


@cache
def alone(text: Text) -> tuple[list[int], str | None]:
    """The oracle: this text by itself, by the naive stage, which keeps nothing between two tokens."""
    request = make_request(text.prompt, text.params, TINY, None, TINY.context)
    for _ in naive.generate(model(), [request]):
        pass
    return request.output, request.finish_reason


class Watched:
    """A model that looks, before each pass, whether all is as it must be; and that may spoil all free memory.

    late  requests that arrive one by one, each with a pass
    """

    def __init__(self, requests: Sequence[Request], poison: bool = False, late: Sequence[Request] = ()):
        self.requests, self.poison, self.late = list(requests), poison, list(late)
        self.config, self.device, self.dtype = TINY, model().device, model().dtype
        self.widths: list[int] = []  # tokens in each step
        self.held: str | None = None  # who had ended and still held a row
        self.most = sum(len(r.prompt) + r.limit for r in requests) + 5

    def __call__(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        self.widths.append(tokens.numel())
        if len(self.widths) > self.most:
            left = sum(r.finish_reason is None for r in self.requests)
            raise Wrong(f"after {self.most} steps {left} requests have not ended: does the loop make progress?")
        for i, request in enumerate(self.requests):
            if request.finish_reason is not None and request.row is not None:
                self.held = self.held or f"request {i} ended before step {len(self.widths)} and still holds its row"
        if self.late:
            self.late.pop(0).arrival = 0.0
        pool = getattr(attend, "pool", None)
        if pool is None:
            raise Wrong("the model was not given GatherAttend(pool, batch): build one for every step")
        if self.poison:
            keep = [s for r in self.requests if r.finish_reason is None for s in list(r.slots)[: r.computed]]
            free = torch.ones(pool.k.shape[2], dtype=torch.bool)
            free[torch.tensor(keep, dtype=torch.int64)] = False
            pool.k[:, :, free] = pool.v[:, :, free] = math.nan
        return model()(tokens, positions, attend)

    def logits(self, hidden: Tensor) -> Tensor:
        return model().logits(hidden)


def drain(work: Work, watched: Watched, story: Story) -> list[Event]:
    """The learner's loop to its end."""
    made = work.function("run")(watched, watched.requests, story.budget, story.max_running)
    if made is None:
        raise Wrong("run returned None; it must yield the events of every step: `yield from update(...)`")
    try:
        events = list(made)
    except (AssertionError, IndexError) as error:
        if str(error) and isinstance(error, AssertionError):
            raise
        where = traceback.extract_tb(error.__traceback__)[-1]
        if where.filename.endswith("slots.py"):
            raise Wrong(f"{story}: no row of memory is left: whoever has ended must give its own back") from error
        if where.name == "pack":
            raise Wrong(
                f"{story}: pack refused the plan; each request in it needs its slots reserved, and 0 < n <= pending"
                f"{work.line(error.__traceback__)}"
            ) from error
        raise
    for event in events:
        if not isinstance(event, Event):
            raise Wrong(f"run yielded {event!r}; it must yield the events that update returned")
    return events


def same_texts(story: Story, requests: Sequence[Request]) -> None:
    for i, (request, text) in enumerate(zip(requests, story.texts, strict=True)):
        expected, reason = alone(text)
        who = f"{story}: request {i} (a prompt of {len(text.prompt)})"
        if request.finish_reason == "error":
            raise Wrong(f"{who} got logits that are not numbers: it read memory that holds nothing of its own")
        if request.finish_reason is None:
            raise Wrong(f"{who} never ended, and has {request.n_output} of {len(expected)} tokens")
        for j, (mine, ours) in enumerate(zip(request.output, expected, strict=False)):
            if mine != ours:
                raise Wrong(f"{who}: token {j} must be {ours}, as the naive stage has it, and is {mine}")
        if (request.output, request.finish_reason) != (expected, reason):
            raise Wrong(
                f"{who}: {len(expected)} tokens and then {reason!r} were expected; it has {request.n_output} and "
                f"{request.finish_reason!r}"
            )


@holds(
    "08",
    "run",
    "every token is the naive stage's, whatever the budget, the limits and the order",
    hint="the rows hidden[batch.last] belong to the requests batch.samples, one for one: hand sample() these two.",
    uses=PARTS,
)
def run_is_naive(work: Work) -> None:
    for story in stories(31, 14):
        requests = story.requests()
        drain(work, Watched(requests), story)
        same_texts(story, requests)


@holds(
    "08",
    "run",
    "a free slot is never read: with NaN in all of them before each step, the tokens are the same",
    hint="reserve slots for every entry of the plan, and give none away before its owner has ended.",
    uses=PARTS,
)
def run_reads_its_own(work: Work) -> None:
    for story in stories(32, 10):
        requests = story.requests()
        drain(work, Watched(requests, poison=True), story)
        same_texts(story, requests)


@holds(
    "08",
    "run",
    "who has ended gives its row of memory back in the same step",
    hint="after update: slots.release(request) for everyone in the plan that has a finish_reason.",
    uses=PARTS,
)
def run_releases(work: Work) -> None:
    for story in stories(33, 8):
        requests = story.requests()
        watched = Watched(requests)
        drain(work, watched, story)
        if watched.held:
            raise Wrong(f"{story}: {watched.held}")
        for i, request in enumerate(requests):
            if request.finish_reason is None:
                raise Wrong(f"{story}: request {i} never ended")
            if request.row is not None:
                raise Wrong(f"{story}: request {i} has ended and still holds row {request.row} after the run")


@holds(
    "08",
    "run",
    "every token is yielded once, as an event, and every text ends once",
    hint="yield what update returned, nothing more: an event of the last token already carries the finish_reason.",
    uses=PARTS,
)
def run_tells_once(work: Work) -> None:
    for story in stories(34, 8):
        requests = story.requests()
        events = drain(work, Watched(requests), story)
        for i, request in enumerate(requests):
            mine = [event for event in events if event.request is request]
            ends = sum(event.finish_reason is not None for event in mine)
            if ends != 1:
                raise Wrong(f"{story}: request {i} ends {ends} times in the events; once is right")
            if [event.token for event in mine] != request.output:
                raise Wrong(
                    f"{story}: request {i} has the tokens {request.output}, and its events {[e.token for e in mine]}"
                )


def package(watched: Any, story: Story) -> None:
    for _ in continuous.generate(watched, watched.requests, story.max_running, story.budget):
        pass


def widths(story: Story, late: bool, drive: Callable[[Watched], object]) -> list[int]:
    """Tokens in each step; with `late`, all but the first request arrive one by one, each with a step."""
    requests = story.requests(late)
    watched = Watched(requests, late=requests[1:] if late else ())
    drive(watched)
    return watched.widths


@holds(
    "08",
    "run",
    "who is there joins the next step with room: every step has as many tokens as in stages.continuous",
    hint="take all arrivals at the head of every turn of the loop, not only when nobody runs.",
    uses=PARTS,
)
def run_fills_steps(work: Work) -> None:
    for i, story in enumerate(stories(35, 16)):
        late = i % 2 == 1
        words = f"{story}, {'which arrive one with each step' if late else 'all there at once'}"
        mine = widths(story, late, partial(drain, work, story=story))
        ours = widths(story, late, partial(package, story=story))
        for step, (got, expected) in enumerate(zip(mine, ours, strict=False), 1):
            if got != expected:
                raise Wrong(f"{words}: step {step} must have {expected} tokens, and has {got}")
        if len(mine) != len(ours):
            raise Wrong(f"{words}: {len(ours)} steps were expected, and there are {len(mine)}")
