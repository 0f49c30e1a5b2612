"""The soak's clients: some that do as they should, some that leave, some that read slowly or not at all, some that send
what is no request, and many at once. Each is a task that goes on until the time is up."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import soak_malformed as malformed
from soak_asks import Answer, Ask, check, known_asks, long_ask, random_ask, read, same, with_logprobs
from soak_wire import Wire, Wrong

LIVENESS = 180.0  # seconds after which a client that waits counts as lost
STOPPED = 12.0, 30.0  # seconds for which a client takes nothing: the server must have cut off the longer ones
SHARE_KNOWN = 0.4
AT_ONCE = 12  # more than the server takes, in a burst
BURST_EVERY = 8.0  # seconds
MOST_LISTED = 20  # of what went wrong

N_CLIENTS = {"ordinary": 7, "leaving": 4, "slow": 2, "stopping": 2, "malformed": 2, "turns": 2, "bursts": 1}


@dataclass
class Tally:
    """What became of everything that was asked."""

    asked: int = 0
    ends: dict[str, Counter[str]] = field(default_factory=dict)  # by client, then what came of a request
    known: Counter[str] = field(default_factory=Counter)
    whole_texts: int = 0  # that clients got to their end
    reused: int = 0  # requests on a connection that had one before
    refused_seconds: list[float] = field(default_factory=list)  # from a request to its 429
    wrong: list[str] = field(default_factory=list)
    n_wrong: int = 0

    def end(self, client: str, what: str) -> None:
        self.ends.setdefault(client, Counter())[what] += 1

    def fault(self, what: str) -> None:
        self.n_wrong += 1
        if len(self.wrong) < MOST_LISTED:
            self.wrong.append(what)

    @property
    def ended(self) -> int:
        return sum(counter.total() for counter in self.ends.values())

    def count(self, what: str) -> int:
        return sum(counter[what] for counter in self.ends.values())


class Clients:
    def __init__(self, port: int, model: str, most_live: int, seed: int):
        self.port, self.model, self.most_live, self.seed = port, model, most_live, seed
        self.until = 0.0
        self.tally = Tally()
        self.known: list[Ask] = []

    async def learn(self) -> None:
        """What the idle server makes of the known questions: with log-probabilities once, then as they will be sent."""
        for ask in known_asks(self.model):
            first = Ask(ask.path, ask.fields | with_logprobs(ask.path, 2))
            ask.expected = await self._learn_one(first)
            self.known.append(ask)
            for stream in (False, True):
                again = ask.varied(random.Random(0), stream)
                self._compare(again, await self._learn_one(again))

    async def _learn_one(self, ask: Ask) -> Answer:
        wire = await Wire(self.port).open()
        try:
            async with asyncio.timeout(LIVENESS):
                await wire.send(ask.data)
                wire.expect()
                assert await wire.head() == 200, f"an idle server answers {wire.status}"
                answer = await read(wire, ask)
        finally:
            wire.leave(False)
        check(ask, answer)
        return answer

    def _compare(self, ask: Ask, answer: Answer) -> None:
        kind = "greedy" if ask.is_greedy else "seeded"
        self.tally.known[kind] += 1
        self.tally.known[f"{kind}, equal"] += same(ask, answer)

    async def run(self, until: float) -> None:
        """Until the time is up, and all that was asked has ended."""
        self.until = until
        kinds: dict[str, Callable[[random.Random], Awaitable[None]]] = {
            "ordinary": self.ordinary,
            "leaving": self.leaving,
            "slow": self.slow,
            "stopping": self.stopping,
            "malformed": self.malformed,
            "turns": self.turns,
            "bursts": self.bursts,
        }
        async with asyncio.TaskGroup() as group:
            for name, n in N_CLIENTS.items():
                for i in range(n):
                    group.create_task(self._go_on(name, kinds[name], random.Random(f"{self.seed} {name} {i}")))

    async def _go_on(self, name: str, once: Callable[[random.Random], Awaitable[None]], draw: random.Random) -> None:
        while time.monotonic() < self.until:
            await self._guarded(name, once(draw))

    async def _guarded(self, name: str, one: Awaitable[None]) -> None:
        """Whatever happens to a client is counted."""
        try:
            async with asyncio.timeout(LIVENESS):
                await one
        except TimeoutError:
            self.tally.fault(f"{name}: no end within {LIVENESS:g} s; a request is lost")
            self.tally.end(name, "lost")
        except Exception as error:  # all of them are findings
            where = error.__traceback__
            while where is not None and where.tb_next is not None:
                where = where.tb_next
            line = f" ({Path(where.tb_frame.f_code.co_filename).name}:{where.tb_lineno})" if where else ""
            self.tally.fault(f"{name}: {type(error).__name__}: {error}{line}")
            self.tally.end(name, "wrong")
            await asyncio.sleep(0.2)  # a server that is dead is not asked a thousand times a second

    # ---- as it should be

    def _draw(self, draw: random.Random) -> Ask:
        known = draw.random() < SHARE_KNOWN
        return draw.choice(self.known).varied(draw) if known else random_ask(self.model, draw)

    async def ordinary(self, draw: random.Random) -> None:
        """Some requests over one connection."""
        wire = await Wire(self.port).open()
        try:
            for i in range(draw.randint(1, 6)):
                self.tally.reused += i > 0
                await self._ask(wire, self._draw(draw), "ordinary")
                if not wire.reusable or time.monotonic() > self.until:
                    break
                await asyncio.sleep(draw.choice((0, 0, 0.2)))
        finally:
            wire.leave(False)

    async def _ask(self, wire: Wire, ask: Ask, client: str) -> None:
        self.tally.asked += 1
        began = time.monotonic()
        await wire.send(ask.data)
        wire.expect()
        status = await wire.head()
        if status == 429:
            await self._refused(wire, began, client)
            await asyncio.sleep(float(wire.headers["retry-after"]) / 4)
            return
        if status != 200:
            raise Wrong(f"status {status} to {ask.path}: {await wire.json()}")
        answer = await read(wire, ask)
        check(ask, answer)
        self.tally.whole_texts += ask.n
        if ask.expected is not None:
            self._compare(ask, answer)
        self.tally.end(client, "whole")

    async def _refused(self, wire: Wire, began: float, client: str) -> None:
        self.tally.refused_seconds.append(time.monotonic() - began)
        error = (await wire.json())["error"]
        if not wire.headers.get("retry-after", "").isdecimal() or error["code"] != "rate_limit_exceeded":
            raise Wrong(f"a 429 with Retry-After {wire.headers.get('retry-after')!r}: {error}")
        self.tally.end(client, "refused (429)")

    async def bursts(self, draw: random.Random) -> None:
        """More at once than the server takes: all are answered."""
        asks = [self._draw(draw) for _ in range(self.most_live + AT_ONCE)]
        async with asyncio.TaskGroup() as group:
            for ask in asks:
                group.create_task(self._guarded("bursts", self._alone(ask)))
        await asyncio.sleep(max(0.0, min(BURST_EVERY, self.until - time.monotonic())))

    async def _alone(self, ask: Ask) -> None:
        wire = await Wire(self.port).open()
        try:
            await self._ask(wire, ask, "bursts")
        finally:
            wire.leave(False)

    # ---- who leaves

    async def leaving(self, draw: random.Random) -> None:
        """At a byte of the request, at a token of the stream, or while it waits for a whole answer."""
        self.tally.asked += 1
        ask = self._draw(draw)
        wire = await Wire(self.port).open()
        how = draw.random()
        try:
            if how < 0.3:
                await wire.send(ask.data[: draw.randrange(len(ask.data))])
                await asyncio.sleep(draw.choice((0, 0, 0.01, 0.3)))
                return self.tally.end("leaving", "left in its request")
            if how < 0.5:
                await wire.send(Ask(ask.path, ask.fields | {"stream": False, "stream_options": None}).data)
                await asyncio.sleep(draw.uniform(0, 2))
                return self.tally.end("leaving", "left while waiting")
            await self._leave_stream(wire, Ask(ask.path, ask.fields | {"stream": True}), draw)
        finally:
            wire.leave(rudely=draw.random() < 0.5)

    async def _leave_stream(self, wire: Wire, ask: Ask, draw: random.Random) -> None:
        await wire.send(ask.data)
        wire.expect()
        if await wire.head() == 429:
            await asyncio.sleep(0.3)
            return self.tally.end("leaving", "refused (429)")
        left = draw.randint(0, ask.fields["max_tokens"])
        async for _ in wire.sse():
            left -= 1
            if left <= 0:
                return self.tally.end("leaving", "left in its stream")
        self.tally.end("leaving", "left after its stream")

    # ---- who reads slowly, or not at all

    async def slow(self, draw: random.Random) -> None:
        """A few bytes at a time for a while, then the rest: it gets all, unless the server's patience ends."""
        self.tally.asked += 1
        wire = await Wire(self.port, small=True).open()
        try:
            ask = long_ask(self.model, draw)
            await wire.send(ask.data)
            wire.expect()
            wire.most, wire.pause = draw.choice((16, 64, 256)), 0.25
            asyncio.get_running_loop().call_later(draw.uniform(2, 20), self._speed_up, wire)
            await self._long(wire, ask, "slow")
        finally:
            wire.leave(False)

    def _speed_up(self, wire: Wire) -> None:
        wire.most, wire.pause = 1 << 16, 0.0

    async def _long(self, wire: Wire, ask: Ask, client: str) -> None:
        try:
            if await wire.head() == 429:
                await wire.json()
                await asyncio.sleep(1)
                return self.tally.end(client, "refused (429)")
            answer = await read(wire, ask)
        except ConnectionError:
            return self.tally.end(client, "cut off")
        check(ask, answer)
        self.tally.whole_texts += 1
        self.tally.end(client, "whole")

    async def stopping(self, draw: random.Random) -> None:
        """Reads the beginning, then nothing for so long that the server cuts it off, if its stream is not all there."""
        self.tally.asked += 1
        wire = await Wire(self.port, small=True).open()
        try:
            ask = long_ask(self.model, draw)
            await wire.send(ask.data)
            wire.expect()
            wire.most = draw.choice((64, 512))
            if await wire.head() == 200:
                await asyncio.sleep(draw.uniform(*STOPPED))
                self._speed_up(wire)
                try:
                    check(ask, await read(wire, ask))
                except ConnectionError:  # seen only now: before the reset stands what was not read
                    return self.tally.end("stopping", "cut off")
                return self.tally.end("stopping", "whole after all")
            await wire.json()
            await asyncio.sleep(1)
            self.tally.end("stopping", "refused (429)")
        finally:
            wire.leave(False)

    # ---- what is no request

    async def malformed(self, draw: random.Random) -> None:
        self.tally.asked += 1
        what = await malformed.ask(draw.choice(malformed.CASES), self.port, self.model, draw)
        self.tally.end("malformed", f"answered {what}")
        await asyncio.sleep(0.2)

    async def turns(self, draw: random.Random) -> None:
        self.tally.asked += 1
        name = draw.choice(list(malformed.TURNS))
        wire = await Wire(self.port).open()
        try:
            await malformed.TURNS[name](wire, self.model)
        except ConnectionError as error:
            raise Wrong(f"{name}: {error}") from None
        finally:
            wire.leave(False)
        self.tally.end("turns", name)
        await asyncio.sleep(0.2)
