"""`make soak`: thousands of short requests through the real engine, to find what only time brings out.

Texts that begin alike, several samples of one prompt, aborts in every state, and memory for a few texts only, so that
many are sent away and computed anew. The run has ten parts. After each the engine runs empty, and then nothing of a
request may be left: no block, no Python object, no memory. A share of the texts is compared with the naive stage.

Speed is counted in tokens per second of this process's CPU time, and beside it stands a fixed piece of work, timed
every few steps: on a machine that others use as well, both slow down alike, and only their ratio is compared.
"""

import argparse
import gc
import os
import random
import sys
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

import torch  # noqa: E402
from conftest import TINY  # noqa: E402
from rich.console import Console  # noqa: E402
from script import NAN, assert_drained, check_invariants, check_table  # noqa: E402

from minillm.batch import Batch, Chunk  # noqa: E402
from minillm.bench import machine, results  # noqa: E402
from minillm.bench.tables import new_table  # noqa: E402
from minillm.engine import Engine  # noqa: E402
from minillm.model import Llama  # noqa: E402
from minillm.params import SamplingParams  # noqa: E402
from minillm.request import Event, Request, make_request  # noqa: E402
from minillm.sharing import Entry, SharedSlots  # noqa: E402
from minillm.slots import BlockSlots, RegionSlots, Slots  # noqa: E402
from minillm.stages import naive  # noqa: E402

PARTS = 10
MAX_LEN, MAX_RUNNING, BUDGET = 48, 8, 12
BLOCKS = {"n_slots": 80, "size": 4}  # for about three texts
WAITING = 8  # texts in the queue, more or less
SLICE = 20  # steps between two timings
LEAST_SLICES = 30  # of a part, to speak of its speed
CHECK = 5  # steps between two looks at the invariants
SHARE_COMPARED = 0.1  # of the texts, with the naive stage
# What counts as a leak, for each request of the second half. The blocks are those of Python's allocator.
MOST_BLOCKS, MOST_BYTES = 0.2, 500
NOISE_BLOCKS, NOISE_BYTES = 300, 2**20  # however few the requests are
MOST_DRIFT = 0.10  # of the speed, last part over first


@dataclass(frozen=True)
class Case:
    name: str
    slots: Callable[[int, int], Slots]
    share: float  # of the requests
    policy: str
    states: frozenset[str]  # in which requests must have been aborted


STATES = frozenset({"waiting", "mid-prompt", "decoding", "during a step", "finished", "unknown"})
CASES = (
    Case(
        "shared",
        partial(SharedSlots, **BLOCKS),
        1.0,
        "first-come",
        STATES | {"sent away", "other sample", "others wait for it"},
    ),
    Case("blocks", partial(BlockSlots, **BLOCKS), 0.2, "priority", STATES | {"sent away"}),
    Case("regions", RegionSlots, 0.1, "shortest-prompt", STATES),
)


@dataclass
class Part:
    """A tenth of the requests. `speed`: tokens per second of CPU time; `relative`: per time of the fixed work."""

    speed: float
    relative: float
    python_blocks: int  # of Python's allocator, when the engine is empty
    rss: int  # bytes of this process, then


@dataclass
class Result:
    """What one case did. `failures` is empty if nothing was wrong."""

    case: str
    requests: int = 0
    steps: int = 0
    tokens: int = 0  # through the model
    preemptions: int = 0
    copies: int = 0  # blocks copied before they were written to
    found: float = 0.0  # share of the newcomers' tokens whose K and V were there
    finish_reasons: dict[str, int] = field(default_factory=dict)
    aborts: dict[str, int] = field(default_factory=dict)  # by state
    compared: int = 0  # texts, with the naive stage
    checks: int = 0  # looks at the invariants
    seconds: float = 0.0
    parts: list[Part] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def drift(self) -> float | None:
        """How much faster the last part was than the first, against the fixed work; None if one was too short."""
        if len(self.parts) < PARTS or not (first := self.parts[0].relative) or not (last := self.parts[-1].relative):
            return None
        return last / first - 1


# ---- what must hold between two steps


def check(engine: Engine) -> None:
    check_invariants(engine.scheduler)
    check_table(engine.pool, engine.scheduler)
    known = {one for r in (*engine.scheduler.running, *engine.scheduler.waiting) for one in (r, *r.samples)}
    assert set(engine._requests.values()) == known, "the engine knows others than the scheduler"


def lineage(entries: Iterable[Entry]) -> set[Entry]:
    """These, and all that they follow: so many must there be in memory, and no more."""
    found: set[Entry] = set()
    for entry in entries:
        one: Entry | None = entry
        while one is not None and one not in found:
            found.add(one)
            one = one.parent
    return found


def rss() -> int:
    """Bytes of this process in memory; 0 where the system does not tell."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


# ---- the run


class Soak:
    """One case: an engine, and who sends it requests, aborts them and looks at everything that comes out."""

    def __init__(self, case: Case, model: Llama, seed: int = 0):
        self.case, self.model = case, model
        self.seed, self.draw = seed, random.Random(seed)  # what is asked
        self.chance = random.Random(seed)  # what happens to it
        self.engine = Engine(
            model, max_running=MAX_RUNNING, budget=BUDGET, max_len=MAX_LEN, slots=case.slots, policy=case.policy
        )
        self.engine.pool.k.fill_(NAN)  # what nobody wrote must reach no result
        self.engine.pool.v.fill_(NAN)
        self.beginnings = [self._ids(4 * i + i % 3) for i in range(1, 7)]
        self.live: dict[Request, list[int]] = {}  # unfinished: their tokens, by the events
        self.due: list[tuple[int, int]] = []  # (step, id) of aborts to come
        self.gone: weakref.WeakSet[Request] = weakref.WeakSet()  # ended; nobody else should know them
        self.aborts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.result = Result(case.name)
        self.stepping = False
        self.clock = 0.0  # seconds of CPU time in the engine, in this slice
        self.tokens = 0  # in this slice
        self.slices: list[tuple[float, float]] = []  # of this part: speed, and relative to the fixed work

    def run(self, requests: int) -> Result:
        began = time.perf_counter()
        gc.collect()
        gc.freeze()  # what is there already is not looked at again: it is none of ours
        hook = self.model.register_forward_pre_hook(self._during)
        try:
            for part in range(PARTS):
                self._part(part, requests * (part + 1) // PARTS)
                self.result.parts.append(self._census())
                if self.result.failures:
                    break
        except Exception as error:  # all of them are findings
            where = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__}: {str(error) or where.line}"
            self.result.failures.append(f"step {self.result.steps}: {what} ({where.name}, line {where.lineno})")
        finally:
            hook.remove()
            gc.unfreeze()
        self._sum_up()
        self.result.seconds = time.perf_counter() - began
        return self.result

    def _part(self, part: int, until: int) -> None:
        """Adds until there were so many requests, and runs empty. Only steps at full load are timed."""
        self.draw.seed(f"{self.seed} {part % (PARTS - 1)}")  # the last asks what the first asked: equal work
        self.slices = []
        before = self._fixed_work()
        self.clock, self.tokens = 0.0, 0
        steps = 0
        while self.result.requests < until or self.engine.busy:
            full = self.result.requests < until
            while full and len(self.engine.scheduler.waiting) < WAITING:
                self._timed(self._add)
            while self.due and self.due[0][0] <= self.result.steps:
                self._abort(self.due.pop(0)[1])
            sent_away = [r for r in self.live if r.preemptions and r.row is None]
            if sent_away and self.chance.random() < 0.1:
                self._abort(sent_away[0].id)
            del sent_away
            self._look_at(self._timed(self._step))
            self.result.steps += 1
            steps += 1
            if self.result.steps % CHECK == 0:
                check(self.engine)
                self.result.checks += 1
            if full and steps % SLICE == 0:
                speed, after = self.tokens / self.clock, self._fixed_work()
                self.slices.append((speed, speed * (before + after) / 2))
                before = after
                self.clock, self.tokens = 0.0, 0
        for _, request in self.due:  # whom the part outlived
            self._abort(request)
        self.due.clear()
        assert_drained(self.engine)
        assert not self.live, f"{len(self.live)} requests never ended"

    def _timed(self, work: Callable[[], Any]) -> Any:
        start = time.process_time()
        done = work()
        self.clock += time.process_time() - start
        return done

    def _fixed_work(self) -> float:
        """Seconds of CPU time that the naive stage takes for the same text each time, alone."""
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        request = make_request(range(2, 22), params, TINY, None, MAX_LEN)
        start = time.process_time()
        for _ in naive.generate(self.model, [request]):
            pass
        return time.process_time() - start

    def _step(self) -> list[Event]:
        self.stepping = True
        try:
            return self.engine.step()
        finally:
            self.stepping = False

    def _during(self, module: object, args: tuple[Any, ...]) -> None:
        """Called when the model begins its pass: now and then someone is aborted meanwhile."""
        if not self.stepping:
            return
        self.tokens += args[0].numel()
        self.result.tokens += args[0].numel()
        if self.live and self.chance.random() < 0.02:
            self._end(self.chance.choice(list(self.live)), "during a step")

    # ---- requests and aborts

    def _ids(self, n: int) -> list[int]:
        return [self.draw.randrange(2, TINY.vocab_size) for _ in range(n)]

    def _add(self) -> None:
        draw = self.draw
        beginning = draw.choice(self.beginnings) if draw.random() < 0.6 else []
        prompt = beginning + self._ids(draw.randint(0, 8) if beginning else draw.randint(1, 20))
        params = SamplingParams(
            max_tokens=draw.randint(1, 12),
            temperature=draw.choice((0.0, 0.9)),
            top_k=draw.choice((0, 5)),
            seed=draw.randrange(1000),
            stop_token_ids=self._ids(draw.randint(0, 2)),
        )
        n = draw.randint(2, 4) if draw.random() < 0.1 else 1
        for request in self.engine.add_samples(prompt, params, n, priority=draw.randrange(10)):
            self.live[request] = []
            self.result.requests += 1
            if draw.random() < 0.2:
                self.due.append((self.result.steps + draw.randint(0, 25), request.id))
        self.due.sort()

    def _abort(self, request_id: int) -> None:
        request = next((r for r in self.live if r.id == request_id), None)
        if request is not None:
            return self._end(request, self._state(request))
        assert self.engine.abort(request_id) is None, "aborted what had ended"
        assert self.engine.abort(-1) is None
        self.aborts.update(("finished", "unknown"))

    def _state(self, request: Request) -> str:
        if request.leader is not None:
            return "other sample"
        if request.row is None:
            return "sent away" if request.preemptions else "waiting"
        return "others wait for it" if request.samples else "mid-prompt" if request.pending > 1 else "decoding"

    def _end(self, request: Request, state: str) -> None:
        event = self.engine.abort(request.id)
        assert event is not None and event.request is request and event.token is None
        assert self.engine.abort(request.id) is None
        self.aborts[state] += 1
        self._over(request, event)

    # ---- what comes out

    def _look_at(self, events: Sequence[Event]) -> None:
        for event in events:
            if event.request.finish_reason == "abort":
                raise AssertionError("an event after the abort")
            if event.token is not None:
                self.live[event.request].append(event.token)
            if event.finish_reason is not None:
                self._over(event.request, event)

    def _over(self, request: Request, event: Event) -> None:
        tokens = self.live.pop(request)
        assert event.finish_reason is not None and tokens == request.output
        self.reasons[event.finish_reason] += 1
        self.gone.add(request)
        if self.chance.random() < SHARE_COMPARED and not (self.stepping or event.finish_reason == "error"):
            self._compare(request)

    def _compare(self, request: Request) -> None:
        """With the naive stage, alone: the same text, or its beginning if it was aborted."""
        alone = make_request(request.prompt, request.params, TINY, None, MAX_LEN, sample_index=request.sample_index)
        expected = [event.token for event in naive.generate(self.model, [alone])]
        same = request.output == expected and request.finish_reason == alone.finish_reason
        aborted = request.finish_reason == "abort" and request.output == expected[: request.n_output]
        assert same or aborted, f"request {request.id} made {request.output}, alone {expected}"
        self.result.compared += 1

    # ---- what is left

    def _census(self) -> Part:
        """The engine is empty: nothing of the requests may be in memory, but what is kept to be found again."""
        gc.collect()
        there = Counter(map(type, gc.get_objects()))
        slots = self.engine.scheduler.slots
        kept = len(lineage(slots.entry_of.values())) if isinstance(slots, SharedSlots) else 0
        for kind, n in ((Request, 0), (Event, 0), (Batch, 0), (Chunk, 0), (Entry, kept)):
            if there[kind] != n:
                self.result.failures.append(
                    f"after {self.result.requests} requests {there[kind]} of {kind.__name__} are in memory, not {n}"
                )
        if self.gone:
            self.result.failures.append(f"{len(self.gone)} requests that ended are still known")
        assert there[Request] < 1000, "requests are kept"
        enough = len(self.slices) >= LEAST_SLICES
        speeds, relative = zip(*self.slices, strict=True) if enough else ((0.0,), (0.0,))
        return Part(median(speeds), median(relative), sys.getallocatedblocks(), rss())

    def _sum_up(self) -> None:
        result, scheduler = self.result, self.engine.scheduler
        result.preemptions = scheduler.preemptions
        result.finish_reasons, result.aborts = dict(self.reasons), dict(self.aborts)
        if isinstance(scheduler.slots, SharedSlots):
            result.found = scheduler.slots.found / max(1, scheduler.slots.asked)
        if result.failures:
            return
        if self.reasons["error"]:
            result.failures.append(f"{self.reasons['error']} requests ended with an error")
        middle, last = result.parts[PARTS // 2 - 1], result.parts[-1]
        half = result.requests / 2
        blocks, grown = last.python_blocks - middle.python_blocks, last.rss - middle.rss
        if blocks > max(NOISE_BLOCKS, MOST_BLOCKS * half):
            result.failures.append(f"Python keeps {blocks:,} blocks of memory more than half way")
        if grown > max(NOISE_BYTES, MOST_BYTES * half):
            result.failures.append(f"the process takes {grown / 1e6:.1f} MB more than half way")


# ---- for people


def judge(result: Result, states: frozenset[str]) -> None:
    """What is only asked of a long run: that everything happened, and that it went as fast at the end."""
    if result.failures:
        return
    missed = sorted(states - result.aborts.keys())
    if missed:
        result.failures.append(f"nobody was aborted in these states: {', '.join(missed)}")
    if result.case != "regions" and result.preemptions < result.requests / 50:
        result.failures.append(f"only {result.preemptions} were sent away: memory was never short")
    if result.drift is not None and abs(result.drift) > MOST_DRIFT:
        how = "slower" if result.drift < 0 else "faster"
        result.failures.append(f"the last tenth is {abs(result.drift):.1%} {how}")


def show(results_: Sequence[Result], console: Console) -> None:
    table = new_table(
        "Soak: the real engine on a tiny float64 model",
        "sent away: lost their memory and were computed anew. found: tokens of newcomers that were in memory. drift: "
        "speed of the last tenth over the first, in CPU time against a fixed piece of work. Python, RSS: growth over "
        "the second half, in blocks of its allocator and in bytes of the process.",
        ("slots", "requests", "steps", "sent away", "found", "compared", "drift", "Python", "RSS kB", "seconds"),
    )
    for r in results_:
        if len(r.parts) < PARTS:
            table.add_row(r.case, f"{r.requests:,}", f"{r.steps:,}", "", "", "", "broke off")
            continue
        middle, last = r.parts[PARTS // 2 - 1], r.parts[-1]
        table.add_row(
            r.case,
            f"{r.requests:,}",
            f"{r.steps:,}",
            f"{r.preemptions:,}",
            f"{r.found:.0%}",
            f"{r.compared:,}",
            "-" if r.drift is None else f"{r.drift:+.1%}",
            f"{last.python_blocks - middle.python_blocks:+,}",
            f"{(last.rss - middle.rss) / 1e3:+,.0f}",
            f"{r.seconds:.0f}",
        )
    console.print(table)
    for r in results_:
        ends = ", ".join(f"{n:,} {reason}" for reason, n in sorted(r.finish_reasons.items()))
        aborts = ", ".join(f"{n} {state}" for state, n in sorted(r.aborts.items()))
        console.print(f"{r.case}: ended: {ends}. Aborted: {aborts}. Invariants looked at {r.checks:,} times.")
        if r.drift is not None:
            console.print(f"  tokens per CPU second in each tenth: {' '.join(f'{p.speed:,.0f}' for p in r.parts)}")
        for failure in r.failures:
            console.print(f"  FAILED: {failure}", style="red", markup=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000, help="of the first case; the others have fewer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="a results file, for the section `soak`")
    options = parser.parse_args()
    results.check_room(options.json)
    model = Llama.random(TINY, seed=0, dtype=torch.float64)
    Soak(CASES[0], model, options.seed).run(200)  # what is made once, is made now
    found = []
    for case in CASES:
        result = Soak(case, model, options.seed).run(round(options.requests * case.share))
        judge(result, case.states)
        found.append(result)
    show(found, Console(width=120))
    failed = any(result.failures for result in found)
    if options.json:
        about = machine.describe(model.device)
        cases = [asdict(result) | {"drift": result.drift} for result in found]
        results.add(options.json, "soak", {"about": about, "partial": False, "cases": cases})
    print("FAILED" if failed else "Nothing was lost, kept or slowed down.")
    return failed


if __name__ == "__main__":
    sys.exit(main())
