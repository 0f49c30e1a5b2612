"""A short soak finds nothing in the engine, and finds what is planted: what is kept, lost, or goes wrong in the end.

No time is asserted here: that a long run goes as fast at its end is what `make soak` finds out.
"""

from collections.abc import Callable
from typing import Any

import pytest
from soak import CASES, PARTS, Case, Part, Result, Soak, judge

from minillm.cache import KVPool
from minillm.engine import Engine
from minillm.model import Llama
from minillm.policies import Queue
from minillm.request import Event, Request
from minillm.scheduler import Scheduler
from minillm.sharing import SharedSlots
from minillm.slots import BlockSlots

SHARED, BLOCKS, REGIONS = CASES


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_short_soak_finds_nothing(tiny: Llama, case: Case):
    found = Soak(case, tiny).run(150)
    assert found.failures == []
    assert found.requests >= 150 and len(found.parts) == PARTS and found.compared > 5 and found.checks > 10
    assert sum(found.finish_reasons.values()) == found.requests
    assert case is REGIONS or found.preemptions > 5
    assert {"waiting", "finished", "unknown", "during a step"} <= found.aborts.keys()


# ---- planted: each is put into the engine, and must be found

Plant = Callable[[pytest.MonkeyPatch], None]


def request_kept(patch: pytest.MonkeyPatch) -> None:
    """Every request ever submitted stays in a dict."""
    kept: dict[int, Request] = {}
    submit = Engine.submit

    def keep(engine: Engine, *requests: Request) -> None:
        kept.update((request.id, request) for request in requests)
        submit(engine, *requests)

    patch.setattr(Engine, "submit", keep)


def event_kept(patch: pytest.MonkeyPatch) -> None:
    """One event in ten goes into a log."""
    log: list[Event] = []
    accept = Request.accept

    def logged(request: Request, *sampled: Any) -> Event:
        event = accept(request, *sampled)
        if request.id % 10 == 0:
            log.append(event)
        return event

    patch.setattr(Request, "accept", logged)


def numbers_kept(patch: pytest.MonkeyPatch) -> None:
    """Not the requests, but something of each."""
    kept: list[tuple[int, ...]] = []
    submit = Engine.submit

    def keep(engine: Engine, *requests: Request) -> None:
        kept.extend((request.seed, 10**6 + request.id) for request in requests for _ in range(40))
        submit(engine, *requests)

    patch.setattr(Engine, "submit", keep)


def queue_keeps(patch: pytest.MonkeyPatch) -> None:
    """As it once was: the heap of an idle queue held the last few requests."""
    patch.setattr(Queue, "remove", lambda queue, request: queue._live.pop(request))


def block_lost(patch: pytest.MonkeyPatch) -> None:
    """A block that was copied before a write is not given back by its old owner."""

    def copy_on_write(slots: SharedSlots, request: Request) -> None:
        give_back, slots._give_back = slots._give_back, lambda block: None  # type: ignore[method-assign]
        original(slots, request)
        slots._give_back = give_back  # type: ignore[method-assign]

    original = SharedSlots._copy_on_write
    patch.setattr(SharedSlots, "_copy_on_write", copy_on_write)


def row_lost(patch: pytest.MonkeyPatch) -> None:
    """One who is aborted while computing its prompt does not give its row back."""
    release = BlockSlots.release

    def lossy(slots: BlockSlots, request: Request) -> None:
        mid_prompt = request.row is not None and request.finish_reason == "abort" and request.n_output == 0
        release(slots, request)
        if mid_prompt:
            slots.free_rows.pop()

    patch.setattr(BlockSlots, "release", lossy)


def abort_forgotten(patch: pytest.MonkeyPatch) -> None:
    """The scheduler ends it, but the engine remembers it."""
    abort = Engine.abort

    def remembers(engine: Engine, request_id: int) -> Event | None:
        request = engine._requests.get(request_id)
        event = abort(engine, request_id)
        if request is not None and event is not None:
            engine._requests[-request_id] = request
        return event

    patch.setattr(Engine, "abort", remembers)


def token_lost(patch: pytest.MonkeyPatch) -> None:
    """Who is sent away loses the last token, too."""
    preempt = Scheduler._preempt

    def forgets(scheduler: Scheduler) -> Request:
        request = preempt(scheduler)
        if request.output:
            request.tokens.pop()
        return request

    patch.setattr(Scheduler, "_preempt", forgets)


def copy_left_out(patch: pytest.MonkeyPatch) -> None:
    """The new block gets its place, but not what was in the old one."""
    patch.setattr(KVPool, "copy", lambda pool, moves: None)


def table_late(patch: pytest.MonkeyPatch) -> None:
    """Slots that were found are not entered in the table."""
    patch.setattr(KVPool, "enter", lambda pool, row, start, slots: None)


@pytest.mark.parametrize(
    ("plant", "case", "words"),
    [
        (request_kept, REGIONS, "of Request are in memory, not 0"),
        (event_kept, REGIONS, "of Event are in memory, not 0"),
        (numbers_kept, REGIONS, "blocks of memory more than half way"),
        (queue_keeps, REGIONS, "of Request are in memory, not 0"),
        (block_lost, SHARED, "check_"),
        (row_lost, BLOCKS, "check_invariants"),
        (abort_forgotten, BLOCKS, "the engine knows others than the scheduler"),
        (token_lost, BLOCKS, "tokens == request.output"),
        (copy_left_out, SHARED, ", alone ["),
        (table_late, SHARED, "check_table"),
    ],
)
def test_what_is_planted_is_found(tiny: Llama, plant: Plant, case: Case, words: str, monkeypatch: pytest.MonkeyPatch):
    plant(monkeypatch)
    found = Soak(case, tiny).run(300)
    assert any(words in failure for failure in found.failures), found.failures


# ---- what only a long run is judged by


def result_with(first: float, last: float, rss: int = 0) -> Result:
    parts = [Part(first, first, 1000, 10**8) for _ in range(PARTS)]
    parts[-1] = Part(last, last, 1000, 10**8 + rss)
    return Result("regions", requests=10_000, aborts=dict.fromkeys(REGIONS.states, 1), parts=parts)


@pytest.mark.parametrize(
    ("last", "words"), [(0.95, None), (1.09, None), (0.89, "11.0% slower"), (1.2, "20.0% faster"), (0.0, None)]
)
def test_the_end_must_be_as_fast_as_the_beginning(last: float, words: str | None):
    found = result_with(1.0, last)
    judge(found, REGIONS.states)
    assert found.failures == ([f"the last tenth is {words}"] if words else [])


def test_every_state_must_have_come():
    found = result_with(1.0, 1.0)
    judge(found, SHARED.states)
    assert found.failures == ["nobody was aborted in these states: other sample, others wait for it, sent away"]
