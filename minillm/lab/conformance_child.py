"""The checks of an engine in a process of their own: what hangs is ended, and what dies leaves the report whole."""

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from minillm.errors import InputError
from minillm.lab.conformance import LEAST_SPEED, LEVELS, Finding

if TYPE_CHECKING:
    from minillm.lab.conformance_source import Source
    from minillm.lab.conformance_world import World

GRACE = 10.0  # seconds after its own limit until a child that does not answer is ended
LOADING = 120.0  # seconds for torch and the engine's module
STOPPED = ("the engine took longer than", "the engine's process was ended", "the engine ended its own process")
SLOW = 20  # a property of the last level may take so many times the limit
SPEED = f"at least {LEAST_SPEED} x the output tokens per second of the ladder's continuous stage, in the same rounds"


@dataclass(frozen=True)
class Loaded:
    name: str
    flags: list[str]


@dataclass(frozen=True)
class Refused:
    """The words of an InputError."""

    words: str


def names_of(claimed: int) -> list[tuple[int, str]]:
    """(level, what must hold) of all properties up to this level, in the order in which they are tried."""
    from minillm.lab.conformance_levels import PROPERTIES

    every = [(prop.level, prop.says) for prop in PROPERTIES] + [(len(LEVELS), SPEED)]
    return [one for one in every if one[0] <= claimed]


def limit(level: int, seconds: float) -> float:
    return seconds * (SLOW if level == len(LEVELS) else 1)


class Child:
    """Tries the properties in `todo`, one by one. Afterwards `died` says why it did not come to the end of one."""

    def __init__(
        self, spec: str, seed: int | None, seconds: float, todo: Sequence[tuple[int, str]], failed: Sequence[int]
    ):
        self.seconds, self.todo, self.died = seconds, todo, ""
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe(duplex=False)
        arguments = theirs, spec, seed, seconds, todo, failed
        self.process = spawn.Process(target=work, args=arguments)
        self.process.start()
        theirs.close()

    def __enter__(self) -> "Child":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()

    def messages(self) -> Iterator[Any]:
        """What it tells, as it comes. Raises InputError for an engine that cannot be loaded."""
        done, level, seconds = 0, self.todo[0][0], LOADING
        while done < len(self.todo):
            if not self.pipe.poll(seconds + GRACE):
                self.died = f"the engine took longer than {seconds:g} s, and could not be interrupted: it was ended"
                return
            try:
                message = self.pipe.recv()
            except EOFError:
                self.process.join()
                self.died = died_of(self.process.exitcode)
                return
            if isinstance(message, Refused):
                raise InputError(message.words)
            done += isinstance(message, Finding)
            if done < len(self.todo):
                level = self.todo[done][0]
            seconds = limit(level, self.seconds)
            yield message


def died_of(code: int | None) -> str:
    if code is not None and code < 0:
        return f"the engine's process was ended by {signal.Signals(-code).name}: a crash in native code, or no memory"
    return f"the engine ended its own process (exit code {code})"


def work(
    pipe: Connection,
    spec: str,
    seed: int | None,
    seconds: float,
    todo: Sequence[tuple[int, str]],
    failed: Sequence[int],
) -> None:
    """The child's whole life: the engine's name, then what was found, one by one."""
    from minillm.lab.conformance_source import load
    from minillm.lab.conformance_world import World
    from minillm.lab.seeds import variant

    try:
        try:
            source = load(spec)
        except InputError as error:
            pipe.send(Refused(str(error)))
            return
        pipe.send(Loaded(source.name, source.flags))
        with variant(seed), tempfile.TemporaryDirectory() as folder:
            for found in findings(World(Path(folder)), source, seconds, todo, failed):
                pipe.send(found)
    except KeyboardInterrupt:
        os._exit(130)


def findings(
    world: "World", source: "Source", seconds: float, todo: Sequence[tuple[int, str]], failed: Sequence[int] = ()
) -> Iterator[Finding]:
    """Of one engine, in this process. The speed of wrong texts is not measured."""
    import torch

    from minillm.lab.conformance_levels import PROPERTIES
    from minillm.lab.conformance_speed import speed
    from minillm.lab.work import Wrong, time_limit

    runs = {(prop.level, prop.says): prop.run for prop in PROPERTIES}
    known, threads = set(failed), torch.get_num_threads()
    _ = world.model  # made now, and in nobody's time
    for level, says in todo:
        note, data, wrong = "", dict[str, Any](), None
        # on so small a model more threads would only wait for each other
        torch.set_num_threads(threads if level == len(LEVELS) else 1)
        try:
            if level == len(LEVELS) and known & {1, 2, 4}:
                raise Wrong("not tried: levels 1, 2 and 4 come first, since it needs right texts")
            with time_limit(limit(level, seconds), "the engine"):
                found = speed(source) if level == len(LEVELS) else runs[level, says](world, source)
            if found:
                note, data = found
        except Wrong as error:
            wrong = str(error)
            known.add(level)
        yield Finding(level, says, wrong, note, data)
