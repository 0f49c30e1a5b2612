"""A student's engine, called with care: whatever goes wrong is told in words, with the student's own line.

It also sees who else made the text: where minillm's own engine, scheduler, stages or server give a request its token
inside a call of the student's, the property fails and names them. That is a guard against mistakes, no proof.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any
from unittest.mock import patch

from minillm.lab.conformance import SIGNATURES, Event, Setup
from minillm.lab.conformance_source import Source
from minillm.lab.work import Work, Wrong
from minillm.params import SamplingParams
from minillm.request import Request

IDLE = 300  # steps in a row that may bring no token while requests wait: a prompt may be computed in small pieces
NOT_THEIRS = ("minillm.engine", "minillm.scheduler", "minillm.stages", "minillm.server")  # these make text


class Theirs:
    """An engine, and which of its requests are open. Every call may raise Wrong, and nothing else of the student's."""

    def __init__(self, source: Source, setup: Setup, vocab_size: int):
        self.source, self.vocab_size = source, vocab_size
        self.open: set[int] = set()
        self.idle = 0  # steps in a row that brought nothing
        self._given: dict[int, tuple[list[int], list[int]]] = {}  # each prompt, and a copy
        self.engine = self._called("Engine", source.factory, setup)

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
        given = [list(prompt) for prompt in prompts]
        outputs = self._call("generate", given, [replace(p) for p in params])
        for i, (now, prompt) in enumerate(zip(given, prompts, strict=False)):
            unchanged(f"prompt {i + 1} of {len(prompts)}", now, prompt)
        if not isinstance(outputs, list | tuple) or not all(isinstance(output, list | tuple) for output in outputs):
            kinds = f"{type(outputs).__name__}" + (f" of {type(outputs[0]).__name__}" if is_filled(outputs) else "")
            raise Wrong(f"generate returned {kinds}, and not a list of lists of ints\n  {signature('generate')}")
        if len(outputs) != len(prompts):
            raise Wrong(f"generate returned {len(outputs)} texts for {len(prompts)} prompts")
        for output in outputs:
            for token in output:
                self._check_token("generate", token)
        return [list(output) for output in outputs]

    def add(self, key: int, prompt: Sequence[int], params: SamplingParams) -> None:
        given = list(prompt)
        self._given[key] = (given, list(prompt))
        self._call("add", key, given, replace(params))
        self.open.add(key)

    def step(self) -> list[Event]:
        events = self._call("step")
        if not isinstance(events, list | tuple):
            raise Wrong(f"step returned {type(events).__name__}, and not a list of events\n  {signature('step')}")
        for event in events:
            self._check_event(event)
        self.idle = 0 if events or not self.open else self.idle + 1
        if self.idle >= IDLE:
            keys = ", ".join(str(key) for key in sorted(self.open)[:5])
            raise Wrong(
                f"{len(self.open)} of {len(self._given)} requests never end: {IDLE} steps in a row brought no token "
                f"(keys {keys}{', ..' if len(self.open) > 5 else ''}); are they lost, or waiting for each other?"
            )
        for key, (given, prompt) in self._given.items():
            unchanged(f"the prompt of request {key}", given, prompt)
        return [tuple(event) for event in events]

    def abort(self, key: int) -> None:
        self._call("abort", key)
        self.open.discard(key)

    @property
    def tokens_pushed(self) -> int | None:
        """Their own count, if they keep one."""
        count = getattr(self.engine, "tokens_pushed", None)
        return count if isinstance(count, int) else None

    def _check_event(self, event: Any) -> None:
        if not isinstance(event, list | tuple) or len(event) != 3:
            raise Wrong(f"step returned the event {event!r}; it must be (key, token, reason)\n  {signature('step')}")
        key, token, reason = event
        if key not in self._given:
            raise Wrong(f"step returned an event of {key!r}, a key that was never added")
        if key not in self.open:
            raise Wrong(f"step returned a token of request {key}, which had ended or was aborted before")
        self._check_token("step", token)
        if reason not in (None, "stop", "length"):
            raise Wrong(f'step gave the reason {reason!r}; it must be None, "stop" or "length"')
        if reason is not None:
            self.open.discard(key)

    def _check_token(self, method: str, token: Any) -> None:
        if type(token) is not int or not 0 <= token < self.vocab_size:
            right = f"an int from 0 to {self.vocab_size - 1}{'; use .tolist()' if hasattr(token, 'tolist') else ''}"
            raise Wrong(f"{method} returned {token!r} as a token; it must be {right}")

    def _call(self, name: str, *args: Any) -> Any:
        method = getattr(self.engine, name, None)
        if not callable(method):
            raise Wrong(f"the engine has no method {name}; it must be\n  {signature(name)}")
        return self._called(name, method, *args)

    def _called(self, name: str, method: Callable[..., Any], *args: Any) -> Any:
        work = self.source.work
        try:
            with watching(work) as seen:
                result = method(*args)
        except Wrong:  # out of time
            raise
        except (Exception, SystemExit) as error:
            called = f"\n  it must be  {signature(name)}" if isinstance(error, TypeError) else ""
            raise Wrong(work.explain(name, error) + called) from error
        if seen:
            parts, line = seen[0]
            raise Wrong(f"{' and '.join(parts)} made this text, not your engine{line}")
        return result


def signature(name: str) -> str:
    return ("" if name == "Engine" else "def ") + SIGNATURES[name]


def is_filled(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0


def unchanged(what: str, now: Sequence[int], before: Sequence[int]) -> None:
    if list(now) != list(before):
        how = f"{len(now)} tokens, it had {len(before)}" if len(now) != len(before) else "other tokens in it"
        raise Wrong(f"{what} was changed: it has {how}; work on a copy: list(prompt)")


@contextmanager
def watching(work: Work) -> Iterator[list[tuple[list[str], str]]]:
    """Notes which of minillm's own generators give a request a token inside the block: (modules, student's line)."""
    seen: list[tuple[list[str], str]] = []
    accept = Request.accept

    def watched(request: Request, *args: Any, **kwargs: Any) -> Any:
        if not seen:
            frames = list(callers(sys._getframe(1)))
            names = [str(frame.f_globals.get("__name__")) for frame in frames]
            if parts := list(dict.fromkeys(name for name in names if name.startswith(NOT_THEIRS))):
                own = next((frame for frame in frames if work.is_mine(frame.f_code.co_filename)), None)
                line = ""
                if own is not None:
                    code = (inspect.getframeinfo(own).code_context or [""])[0].strip()
                    line = f"\n  at line {own.f_lineno} of {own.f_code.co_name}: {code}"
                seen.append((parts, line))
        return accept(request, *args, **kwargs)

    with patch.object(Request, "accept", watched):
        yield seen


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


# ---- many requests over time


@dataclass(frozen=True)
class Arrival:
    prompt: Sequence[int]
    params: SamplingParams
    at: int = 0  # the step before which it is added


@dataclass
class Served:
    """What came of each request, in the order of the arrivals."""

    texts: list[list[int]]
    reasons: list[str | None]
    ended: list[int]  # after which step


def serve(
    theirs: Theirs,
    arrivals: Sequence[Arrival],
    aborts: Mapping[int, int] | None = None,
    after_step: Callable[[int], None] = lambda step: None,
) -> Served:
    """Adds, steps and aborts until all have ended, and once more: then there must be nothing left to tell.

    `aborts`: {key: after how many of its tokens}; 0: as soon as it is added.
    """
    aborts = aborts or {}
    found = Served([[] for _ in arrivals], [None for _ in arrivals], [0 for _ in arrivals])
    step, last = 0, max((arrival.at for arrival in arrivals), default=0)
    while step <= last or theirs.open:
        for key, arrival in enumerate(arrivals):
            if arrival.at == step:
                theirs.add(key, arrival.prompt, arrival.params)
        for key in sorted(theirs.open & set(aborts)):
            if len(found.texts[key]) >= aborts[key]:
                theirs.abort(key)
                found.reasons[key] = "abort"
        for key, token, reason in theirs.step():
            found.texts[key].append(token)
            if reason is None and len(found.texts[key]) >= (most := arrivals[key].params.max_tokens):
                raise Wrong(
                    f"request {key} has its token number {len(found.texts[key])}, max_tokens is {most}, and no reason "
                    'came with it: the last event of a request carries "length" or "stop"'
                )
            if reason is not None:
                found.reasons[key], found.ended[key] = reason, step
        after_step(step)
        step += 1
    theirs.step()
    return found
