"""Which request of a step makes it raise: each is tried alone, so that one bad request ends and the others go on."""

import logging

from minillm.engine import Engine
from minillm.request import Event, Request

log = logging.getLogger(__name__)


def step_each_alone(engine: Engine) -> tuple[list[Event], int]:
    """One step for each running request by itself, after a step of all of them raised: the events, and how many
    requests went well. The others end with "error". Raises what they raised if there were several and none went well:
    then the fault is the engine's."""
    events: list[Event] = []
    running = list(engine.scheduler.running)
    failed: list[Request] = []
    fault: Exception | None = None
    for request in running:
        try:
            events += step_alone(engine, request)
        except Exception as error:
            log.exception("request %d makes the engine's step raise: it ends with an error", request.id)
            failed.append(request)
            fault = error
    if fault and len(failed) == len(running) > 1:
        raise fault
    for request in failed:
        engine.abort(request.id)
        events.append(Event(request, None, "", "error"))
    return events, len(running) - len(failed)


def step_alone(engine: Engine, request: Request) -> list[Event]:
    """A step in which no other running request takes part and nobody joins."""
    scheduler = engine.scheduler
    running, most = scheduler.running, scheduler.max_running
    i = running.index(request)
    scheduler.running, scheduler.max_running = [request], 1
    try:
        return engine.step()
    finally:
        scheduler.running = running[:i] + scheduler.running + running[i + 1 :]
        scheduler.max_running = most
