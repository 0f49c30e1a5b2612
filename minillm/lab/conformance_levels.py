"""The properties of levels 1 to 6, on the small random model in float64, where every text is exactly the naive one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from minillm.lab.conformance_count import CountTokens, kept_bytes, least_weights, new_tensors
from minillm.lab.conformance_source import Source
from minillm.lab.conformance_theirs import Arrival, Served, Theirs, serve
from minillm.lab.conformance_world import World
from minillm.lab.work import Wrong
from minillm.params import SamplingParams

MOST_PUSHED = 1.10  # tokens for each needed one
SLACK = 64 * 1024  # bytes for masks, tables and what is being sampled
Found = tuple[str, dict[str, Any]]  # a measured figure for people, and for the report
Prompt = Sequence[int]


@dataclass(frozen=True)
class Property:
    level: int
    says: str
    run: Callable[[World, Source], Found | None]


PROPERTIES: list[Property] = []


def holds(level: int, says: str) -> Callable[[Callable[[World, Source], Found | None]], None]:
    def register(run: Callable[[World, Source], Found | None]) -> None:
        PROPERTIES.append(Property(level, says, run))

    return register


def plain(max_tokens: int) -> SamplingParams:
    """Greedy, and never ended by a token."""
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def alone(world: World, theirs: Theirs, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> None:
    """Each in a call of its own."""
    for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        [got] = theirs.generate([prompt], [p])
        world.compare(f"text {i + 1} of {len(prompts)}", got, prompt, p)


def together(world: World, theirs: Theirs, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> None:
    """All in one call. Where a text is wrong, it is tried alone, to find whether its neighbours are to blame."""
    outputs = theirs.generate(prompts, params)
    for i, (got, prompt, p) in enumerate(zip(outputs, prompts, params, strict=True)):
        try:
            world.compare(f"text {i + 1} of {len(prompts)}", got, prompt, p)
        except Wrong as wrong:
            [solo] = theirs.generate([prompt], [p])
            if solo == world.expected(prompt, p)[0]:
                raise Wrong(f"{wrong}\nalone it is right: something of its neighbours leaks into it") from wrong
            raise


# ---- 1: one text


@holds(1, "a greedy text is the naive model's, to the last token")
def one_text(world: World, source: Source) -> None:
    alone(world, world.engine(source), world.prompts(11, [5, 1, 30, 12, 3]), [plain(n) for n in (24, 12, 1, 20, 30)])


@holds(1, "nothing is left over: the same prompt again gives the same text")
def again(world: World, source: Source) -> None:
    prompts, theirs = world.prompts(12, [7, 4]), world.engine(source)
    alone(world, theirs, [prompts[0], prompts[1], prompts[0]], [plain(10)] * 3)


# ---- 2: many texts


@holds(2, "texts of any lengths, together, each as it would be alone")
def many(world: World, source: Source) -> None:
    prompts = world.prompts(21, [1, 13, 4, 27])
    together(world, world.engine(source), prompts, [plain(n) for n in (9, 3, 14, 6)])


@holds(2, "more texts than may run at once")
def more(world: World, source: Source) -> None:
    prompts = world.prompts(22, [6, 2, 19, 3, 8, 1, 12, 5, 2])
    together(world, world.engine(source, 3), prompts, [plain(n) for n in (4, 8, 1, 6, 2, 9, 3, 5, 7)])


# ---- 3: sampling


@holds(3, "a draw depends on the seed and on the number of the token, and on nothing else")
def draws(world: World, source: Source) -> None:
    theirs, [prompt] = world.engine(source), world.prompts(31, [6])
    params = [SamplingParams(max_tokens=10, temperature=1.2, seed=seed, ignore_eos=True) for seed in (1, 2)]
    outputs = [theirs.generate([prompt], [p])[0] for p in params]
    if outputs[0] == outputs[1]:
        greedy = outputs[0] == world.expected(prompt, plain(10))[0]
        raise Wrong(
            f"seeds 1 and 2 gave the same text{', the greedy one' if greedy else ''}; each token must be drawn with "
            "minillm.draws.uniform(seed, 0, number of new tokens so far)"
        )
    for p, got in zip(params, outputs, strict=True):
        world.compare(f"seed {p.seed}", got, prompt, p)
    together(world, theirs, [prompt] * 3, [params[1], plain(10), params[0]])


@holds(3, "temperature, top-k and top-p")
def filters(world: World, source: Source) -> None:
    asked: list[dict[str, Any]] = [
        dict(temperature=0.6),
        dict(temperature=1.5, top_k=4),
        dict(temperature=1.5, top_p=0.7),
    ]
    asked += [dict(temperature=2.0, top_k=20, top_p=0.8)]
    params = [SamplingParams(max_tokens=8, seed=7 + i, ignore_eos=True, **one) for i, one in enumerate(asked)]
    theirs = world.engine(source)
    for prompt, p, one in zip(world.prompts(32, [5, 3, 9, 4]), params, asked, strict=True):
        [got] = theirs.generate([prompt], [p])
        world.compare(f"with {', '.join(f'{name} {value}' for name, value in one.items())}", got, prompt, p)


# ---- 4: requests over time


def ending(world: World) -> tuple[list[list[int]], list[SamplingParams]]:
    """Texts that the end-of-text token or a stop token ends, and one that goes on past the first."""
    [first] = world.prompts(1, [5])  # which the world's end-of-text token is chosen for
    others = world.prompts(41, [4, 8])
    stop = world.expected(others[0], plain(12))[0][4]
    return [first, first, *others], [
        SamplingParams(max_tokens=20),
        plain(20),
        SamplingParams(max_tokens=20, stop_token_ids=(stop,), ignore_eos=True),
        SamplingParams(max_tokens=6, stop_token_ids=(stop,)),
    ]


@holds(4, "an end-of-text or stop token ends its text, and is its last token")
def ends(world: World, source: Source) -> None:
    together(world, world.engine(source), *ending(world))


def compare_served(world: World, arrivals: Sequence[Arrival], served: Served, but: Sequence[int] = ()) -> None:
    for key, arrival in enumerate(arrivals):
        if key not in but:
            world.compare(f"request {key}", served.texts[key], arrival.prompt, arrival.params)
            _, reason = world.expected(arrival.prompt, arrival.params)
            if served.reasons[key] != reason:
                raise Wrong(f"request {key} ended with {served.reasons[key]!r}, and should with {reason!r}")


@holds(4, "the same by add and step, each with its reason")
def steps(world: World, source: Source) -> None:
    arrivals = [Arrival(prompt, p) for prompt, p in zip(*ending(world), strict=True)]
    compare_served(world, arrivals, serve(world.engine(source), arrivals))


@holds(4, "requests that arrive while others run: right, and not made to wait until these have ended")
def arrive(world: World, source: Source) -> None:
    draws = SamplingParams(max_tokens=5, temperature=1.0, seed=3, ignore_eos=True)
    wanted = zip(world.prompts(42, [6, 3, 11, 2]), [plain(60), plain(4), draws, plain(3)], (0, 3, 3, 20), strict=True)
    arrivals = [Arrival(prompt, p, at) for prompt, p, at in wanted]
    served = serve(world.engine(source), arrivals)
    compare_served(world, arrivals, served)
    if late := [key for key in (1, 2) if served.ended[key] >= served.ended[0]]:
        raise Wrong(
            f"request {late[0]} arrived before step 3 and wants few tokens; it ended in step {served.ended[late[0]]}, "
            f"not before request 0 with its 60 tokens (step {served.ended[0]})"
        )


@holds(4, "an aborted request ends at once and makes room; the others do not notice")
def aborts(world: World, source: Source) -> None:
    prompts = world.prompts(43, [5, 4, 9, 3, 6])
    arrivals = [Arrival(prompt, plain(n)) for prompt, n in zip(prompts, (40, 8, 40, 40, 7), strict=True)]
    theirs, ended = world.engine(source, 2), {0: 2, 2: 0, 3: 1}  # one that runs, one that waits, one later
    compare_served(world, arrivals, serve(theirs, arrivals, ended), but=list(ended))


# ---- 5: memory


def crowd(world: World) -> tuple[list[Arrival], int]:
    """Many more requests than their K and V have room for, and the room: some fit only alone."""
    lengths = [3 + 7 * i % 11 for i in range(26)]
    prompts = world.prompts(51, lengths)
    arrivals = [Arrival(prompt, plain(6 + 5 * i % 9), i % 3) for i, prompt in enumerate(prompts)]
    return arrivals, max(len(arrival.prompt) + arrival.params.max_tokens for arrival in arrivals) + 4


@holds(5, "more requests than there is memory for: none is lost, every text is right")
def nobody_lost(world: World, source: Source) -> None:
    arrivals, n_slots = crowd(world)
    compare_served(world, arrivals, serve(world.engine(source, 16, n_slots), arrivals))


@holds(5, "no more K and V are kept than n_slots")
def bounded(world: World, source: Source) -> Found:
    arrivals, n_slots = crowd(world)
    config = world.model.config
    room = n_slots * config.kv_bytes_per_token(8)
    most, at = 0, 0

    def look(step: int) -> None:
        nonlocal most, at
        if step % 4 == 1 and (kept := kept_bytes()) > most:
            most, at = kept, step

    with new_tensors():
        theirs = world.engine(source, 16, n_slots)
        before = kept_bytes()
        serve(theirs, arrivals, after_step=look)
    weights = least_weights(config, world.model.dtype)
    if before > 3 * weights + room + SLACK:
        raise Wrong(
            f"a new engine keeps {before:,} bytes: {before - weights:,} beside the weights, and n_slots = {n_slots} "
            f"positions are {room:,}"
        )
    grown = max(0, most - before)
    if grown > room + SLACK:
        raise Wrong(
            f"after step {at} the engine keeps {grown:,} bytes more than when it was new; K and V of n_slots = "
            f"{n_slots} positions are {room:,}, and it may keep {SLACK:,} beside them"
        )
    return f"{n_slots} positions are {room:,} bytes; it grew by {grown:,}", {"kept_bytes": grown, "room_bytes": room}


# ---- 6: work


@holds(6, f"at most {MOST_PUSHED:.2f} tokens are pushed through the model for each needed one")
def work(world: World, source: Source) -> Found:
    lengths, news = (3, 20, 1, 9, 14, 5), (12, 2, 9, 20, 4, 7)
    arrivals = [Arrival(p, plain(n)) for p, n in zip(world.prompts(61, lengths), news, strict=True)]
    theirs = world.engine(source)
    own = theirs.tokens_pushed or 0
    with CountTokens(world.model.config) as counted:
        served = serve(theirs, arrivals)
    compare_served(world, arrivals, served)
    needed = sum(lengths) + sum(news) - len(news)
    pushed, how = counted.tokens, "counted"
    if not pushed:
        if theirs.tokens_pushed is None:
            raise Wrong(
                "the model's matrix products are not torch's, so they cannot be counted; keep a count of the tokens "
                "that go through the model in an attribute tokens_pushed"
            )
        pushed, how = theirs.tokens_pushed - own, "by the engine's own count"
    ratio = pushed / needed
    if ratio > MOST_PUSHED:
        raise Wrong(f"{pushed:g} tokens were pushed for {needed} needed ones: {ratio:.2f} ({how})")
    return f"{ratio:.2f}, {how}", {"pushed": pushed, "needed": needed, "how": how}
