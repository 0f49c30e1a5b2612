"""What the live view shows of an engine: one step in a few numbers. Plain data, made in the engine's thread.

Numbers of requests and tokens only, never a text: whoever watches sees how much the others ask, and not what.
"""

from collections.abc import Iterable, Mapping
from itertools import chain, islice
from typing import Any

from minillm.engine import Engine
from minillm.request import Request
from minillm.server.loop import StepRecord
from minillm.sharing import SharedSlots
from minillm.slots import BlockSlots

MOST_WAITING = 24  # requests that are listed; the others are counted
MOST_BLOCKS = 4096  # of which each is drawn; of larger memories only the counts are told

State = dict[str, Any]


def describe(engine: Engine, model: str) -> State:
    """What stays as it is for as long as the engine lives."""
    scheduler = engine.scheduler
    slots = scheduler.slots
    size = slots.size if isinstance(slots, BlockSlots) else 0
    n_blocks = slots.n_slots // size if size else 0
    return {
        "model": model,
        "max_running": scheduler.max_running,
        "budget": scheduler.budget,
        "max_len": engine.max_len,
        "block_size": size,  # tokens; 0: this engine has no blocks
        "n_blocks": n_blocks,
        "drawn": n_blocks <= MOST_BLOCKS,
    }


def look(engine: Engine, counts: Mapping[Request, int]) -> State:
    """The engine as it stands between two steps. `counts`: tokens that the last step computed of each request."""
    scheduler = engine.scheduler
    waiting = list(scheduler.waiting)
    n_samples = sum(len(request.samples) for request in chain(scheduler.running, waiting))
    return {
        "running": [_running(request, counts.get(request, 0)) for request in scheduler.running],
        "waiting": [_waiting(request) for request in islice(waiting, MOST_WAITING)],
        "n_waiting": len(waiting) + n_samples,  # other samples of a prompt wait until it is computed
        "preemptions": scheduler.preemptions,
        "blocks": _blocks(scheduler.slots, scheduler.running),
    }


def _running(request: Request, n: int) -> State:
    return {
        "id": request.id,
        "row": request.row,
        "prompt": len(request.prompt),
        "output": request.n_output,
        "computed": request.computed,
        "step": n,
        "again": request.preemptions,
        "samples": len(request.samples),
        "blocks": runs(request.blocks),
    }


def _waiting(request: Request) -> State:
    return {
        "id": request.id,
        "prompt": len(request.prompt),
        "output": request.n_output,
        "again": request.preemptions,
        "samples": len(request.samples),
    }


def _blocks(slots: object, running: Iterable[Request]) -> State | None:
    """How many blocks are held, by more than one, kept though nobody holds them, and free. Tokens of newcomers that
    were found in memory, of all that were asked for."""
    if not isinstance(slots, BlockSlots):
        return None
    n_blocks = slots.n_slots // slots.size
    found = {"held": n_blocks - len(slots.free), "shared": 0, "cached": 0, "free": len(slots.free)}
    if not isinstance(slots, SharedSlots):
        return found | {"kept": []}
    kept = [block for block in slots.entry_of if not slots.owners[block]]
    found["shared"] = found["held"] - slots.owners.count(1)
    found["cached"] = len(kept)
    found["free"] -= len(kept)
    kept_runs = runs(sorted(kept)) if n_blocks <= MOST_BLOCKS else []
    return found | {"kept": kept_runs, "asked": slots.asked, "found": slots.found}


def runs(blocks: Iterable[int]) -> list[list[int]]:
    """[[first, length], ...]: consecutive numbers together, in the order given."""
    found: list[list[int]] = []
    for block in blocks:
        if found and found[-1][0] + found[-1][1] == block:
            found[-1][1] += 1
        else:
            found.append([block, 1])
    return found


def step_line(record: StepRecord) -> list[float]:
    """Number, end and length in seconds, tokens decoded, tokens of prompts, tokens made.

    A text that was sent away is computed again: that counts as its prompt.
    """
    decoded = sum(n for request, n in record.plan if n == 1 and request.computed - n >= len(request.prompt))
    computed = sum(n for _, n in record.plan)
    made = sum(event.token is not None for event in record.events)
    seconds = record.ended - record.began
    return [record.number, round(record.ended, 4), round(seconds, 5), decoded, computed - decoded, made]


def first_tokens(record: StepRecord) -> list[float]:
    """Seconds from arrival to first token, of the texts that begin in this step."""
    begun = [event.request for event in record.events if event.token is not None and event.request.n_output == 1]
    return [round(record.ended - request.arrival, 4) for request in begun]


def endings(record: StepRecord) -> list[State]:
    ended = [event.request for event in record.events if event.finish_reason is not None]
    return [{"id": r.id, "prompt": len(r.prompt), "output": r.n_output, "reason": r.finish_reason or ""} for r in ended]
