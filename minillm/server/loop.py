"""One thread owns the engine and alone touches it; the asyncio side sends commands and gets events.

Commands wait in an inbox and are obeyed between two steps; with nothing to do, the thread sleeps on the inbox. Events
go back once a step, in one call into the asyncio loop, however many tokens the step made. vLLM's AsyncLLM and SGLang's
scheduler process have the same shape, with a socket in the place of the inbox.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue

from minillm.draws import fresh_seed
from minillm.engine import MOST_SAMPLES, Engine, Prompt
from minillm.errors import InputError, whole_number
from minillm.params import SamplingParams
from minillm.request import Event, Request, make_request
from minillm.scheduler import Plan
from minillm.server.culprits import step_each_alone
from minillm.server.stream import Stream, hand_over

log = logging.getLogger(__name__)


class Overloaded(Exception):
    """Too many requests wait already (HTTP 429)."""


class Unavailable(Exception):
    """No request is taken any more: the server drains, or the engine's thread has died (HTTP 503)."""


@dataclass(frozen=True)
class StepRecord:
    """What one step did, for watchers. Times are of `time.monotonic`, in seconds."""

    number: int  # from 1
    began: float
    ended: float
    plan: Plan  # (request, tokens computed); empty where each request was tried alone
    events: list[Event]


class EngineLoop:
    """Steps an engine in a thread of its own, for any number of streams.

    most_waiting  most requests beside the `max_running` that may run, each of n samples counted; more are `Overloaded`
    watchers      called in the engine's thread after each step, with its StepRecord; one that raises is dropped

    A step that raises is tried once more, since memory may have been short for a moment. Then each of its requests is
    tried alone: those that raise end with "error" and the others go on. If all do, or a request alone does twice in a
    row with no good step between, the engine itself is at fault: the thread ends, `alive` is False, and every open
    stream gets an event with "error".
    """

    def __init__(self, engine: Engine, most_waiting: int = 1024):
        whole_number("most_waiting", most_waiting, 0)
        self.engine = engine
        self.most_live = engine.scheduler.max_running + most_waiting
        self.alive, self.draining = False, False
        self.died: BaseException | None = None  # of what, if it did
        self.n_live = 0  # unfinished requests, those not sent yet included
        self.n_aborted = 0  # ever, since their streams were closed
        self.watchers: list[Callable[[StepRecord], None]] = []
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # None: the end
        self._lock = threading.Lock()  # of alive, n_live and _streams, which both sides change
        self._streams: set[Stream] = set()  # with something pending, or nothing sent yet
        self._owners: dict[Request, Stream] = {}  # of the requests in the engine
        self._n_steps = 0
        self._faulty = False  # whether the last step found one request, alone, that raises
        self._plan: Plan = []
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        schedule = engine.scheduler.schedule

        def remembered() -> Plan:
            self._plan = schedule()
            return self._plan

        engine.scheduler.schedule = remembered  # type: ignore[method-assign]

    # ---- the asyncio side

    def start(self) -> None:
        """Starts the thread; a second time changes nothing."""
        if self._thread.ident is None:
            self.alive = True
            self._thread.start()

    def stop(self, seconds: float = 10.0) -> None:
        """Ends the thread after the step it is in, waiting for at most that long; open streams get "abort"."""
        self._inbox.put(None)
        if self._thread.ident is not None:
            self._thread.join(seconds)

    async def drain(self, seconds: float) -> bool:
        """Takes no new requests, and waits until all have ended, at most so many seconds. Whether they have."""
        self.draining = True
        until = time.monotonic() + seconds
        while self.n_live and self.alive and time.monotonic() < until:
            await asyncio.sleep(0.02)
        return not self.n_live

    def open(self, seats: int = 1) -> Stream:
        """A stream with room for so many requests, taken from now on. Raises Overloaded or Unavailable, at once, and
        InputError for more than there can ever be. `close` it if nothing is sent."""
        if seats > self.most_live:
            raise InputError(f"{seats} texts were asked for at once; the server takes {self.most_live} at most")
        with self._lock:
            if self.draining or not self.alive:
                raise Unavailable("the server is shutting down" if self.draining else "the engine has stopped")
            if self.n_live + seats > self.most_live:
                raise Overloaded(f"{self.n_live} requests run or wait, of {self.most_live} at most; try again later")
            self.n_live += seats
            stream = Stream(self, seats)
            self._streams.add(stream)
        return stream

    def make(self, prompt: Prompt, params: SamplingParams, n: int = 1, priority: int = 0) -> list[Request]:
        """n samples of one prompt, checked: what a stream sends as one group. It may be called in any thread, for it
        looks at nothing that the engine changes; a long text takes a while. Raises InputError."""
        whole_number("n", n, 1, MOST_SAMPLES)
        engine, requests = self.engine, list[Request]()
        config, tokenizer, max_len = engine.model.config, engine.tokenizer, engine.max_len
        seed = fresh_seed() if params.seed is None else params.seed  # one for all n: they differ by their index
        for i in range(n):
            ids = requests[0].prompt if requests else prompt  # a text is encoded once
            request = make_request(ids, params, config, tokenizer, max_len, sample_index=i, priority=priority)
            request.seed = seed
            engine.scheduler.slots.check(request)
            requests.append(request)
        return requests

    def submit(self, prompt: Prompt, params: SamplingParams | None = None, n: int = 1, priority: int = 0) -> Stream:
        """`open`, `make` and `send` in one, for prompts that are short or encoded already."""
        whole_number("n", n, 1, MOST_SAMPLES)
        stream = self.open(n)
        try:
            stream.send(self.make(prompt, params or SamplingParams(), n, priority))
        except BaseException:
            stream.close()
            raise
        return stream

    def ask(self, command: Callable[[], None]) -> None:
        """Has the engine's thread do this between two steps: it alone may look at the engine."""
        self._inbox.put(command)

    def _begin(self, stream: Stream, groups: Iterable[list[Request]]) -> None:
        with self._lock:
            if not self.alive:
                raise Unavailable("the engine has stopped")
            self.ask(partial(self._enter, stream, list(groups)))

    def _abandon(self, stream: Stream) -> None:
        if stream.requests:
            self.ask(partial(self._abort, stream))
        else:
            self._release(stream, stream.seats)

    def _release(self, stream: Stream, seats: int) -> None:
        """Of a stream: so many requests have ended."""
        with self._lock:
            self.n_live -= seats
            if not stream.pending:
                self._streams.discard(stream)

    # ---- the engine's thread

    def _run(self) -> None:
        reason = "error"
        try:
            while self._obey():
                if self.engine.busy:
                    self._step()
            reason = "abort"
        except BaseException as error:  # also what is no Exception, such as a panic of a Rust extension
            self.died = error
            log.critical("the engine's thread ends; no more requests are taken", exc_info=True)
        finally:
            with self._lock:
                self.alive = False  # from here on nothing enters the inbox that must be answered
                streams = list(self._streams)
            self._deliver([(s, Event(request, None, "", reason)) for s in streams for request in s.requests])

    def _obey(self) -> bool:
        """Does what the inbox says; with nothing else to do, waits for it. False: it says that this is the end."""
        wait = not self.engine.busy
        while True:
            try:
                command = self._inbox.get(block=wait)
            except Empty:
                return True
            if command is None:
                return False
            command()
            wait = False

    def _enter(self, stream: Stream, groups: list[list[Request]]) -> None:
        for group in groups:
            self._owners.update(dict.fromkeys(group, stream))
            try:
                self.engine.submit(*group)
            except Exception:
                log.exception("the engine does not take a request; it ends with an error")
                self._deliver([(stream, Event(request, None, "", "error")) for request in group])

    def _abort(self, stream: Stream) -> None:
        pending = list(stream.pending)
        stream.pending.clear()
        for request in pending:
            self.engine.abort(request.id)
            self._owners.pop(request, None)
        self.n_aborted += len(pending)
        self._release(stream, len(pending))

    def _step(self) -> None:
        began = time.monotonic()
        try:
            events = self.engine.step()
            self._faulty = False
        except Exception:
            log.exception("the engine's step raised; it is tried again")
            events = self._step_again()
        self._n_steps += 1
        if self.watchers:
            self._tell(StepRecord(self._n_steps, began, time.monotonic(), self._plan, events))
        self._deliver([(self._owners[event.request], event) for event in events if event.request in self._owners])

    def _step_again(self) -> list[Event]:
        """After a step that raised: the same again, then each request alone. Raises if the engine is at fault."""
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            if stream.n_made != sum(request.n_output for request in stream.requests):
                raise RuntimeError("the step raised after tokens were accepted, and they are lost")
        try:
            events = self.engine.step()
            self._faulty = False
            return events
        except Exception:
            log.warning("the engine's step raised again; each of its requests is tried alone")
        events, n_good = step_each_alone(self.engine)
        self._plan = []
        if not n_good and self._faulty:
            raise RuntimeError("two requests in a row make the engine's step raise: the engine is at fault")
        self._faulty = not n_good
        return events

    def _tell(self, record: StepRecord) -> None:
        for watcher in list(self.watchers):
            try:
                watcher(record)
            except Exception:
                log.exception("a watcher of steps raised, and is dropped")
                with suppress(ValueError):  # it may have left by itself meanwhile
                    self.watchers.remove(watcher)

    def _deliver(self, pairs: list[tuple[Stream, Event]]) -> None:
        """Hands events to their streams: one call into each asyncio loop (in a server there is one)."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Stream, Event]]] = {}
        for stream, event in pairs:
            if event.request not in stream.pending:
                continue
            by_loop.setdefault(stream.asyncio_loop, []).append((stream, event))
            stream.n_made += event.token is not None
            if event.finish_reason is not None:
                self._owners.pop(event.request, None)
                stream.pending.discard(event.request)
                self._release(stream, 1)
        for asyncio_loop, its_pairs in by_loop.items():
            try:
                asyncio_loop.call_soon_threadsafe(hand_over, its_pairs)
            except RuntimeError:  # that loop is closed: nobody will ever read
                for stream in {stream for stream, _ in its_pairs}:
                    self._abort(stream)
