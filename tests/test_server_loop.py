"""The engine's thread and its streams. Rows of CASES: F2 (who leaves is aborted), F3 (bounded), F8 (one bad request),
F9 (a dead loop is seen), F10 (draining), F11 (a limit that counts each of n)."""

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import pytest
from script import Script, assert_drained, chain, follow, solo
from serving import LIVENESS, eventually, ids, make_engine, tiny_model, writes

from minillm.engine import Engine
from minillm.errors import InputError
from minillm.params import SamplingParams
from minillm.request import Event
from minillm.server.loop import EngineLoop, Overloaded, StepRecord, Stream, Unavailable


class Poisoned(Script):
    """Raises whenever a certain token is computed."""

    poison = 99

    def __call__(self, tokens, positions, attend):
        if (tokens == self.poison).any():
            raise RuntimeError("the poison was computed")
        return super().__call__(tokens, positions, attend)


def poisoned() -> Poisoned:
    return Poisoned(follow({5: 6, 6: 7, 7: 8}, size=259).table)


@contextmanager
def running(engine: Engine, most_waiting: int = 1024) -> Iterator[EngineLoop]:
    loop = EngineLoop(engine, most_waiting)
    loop.start()
    try:
        yield loop
        if loop.alive:
            eventually(lambda: loop.n_live == 0 and not loop._streams and not loop._owners)
            loop.stop()
            assert not loop._thread.is_alive()
            assert_drained(engine)
    finally:
        loop.stop()


def run(main: Callable[[], Awaitable[object]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(LIVENESS):
            await main()

    asyncio.run(limited())


async def read(stream: Stream) -> list[Event]:
    return [event async for event in stream]


def tokens(events: list[Event]) -> list[int]:
    return [event.token for event in events if event.token is not None]


def gate(engine: Engine) -> threading.Event:
    """Until it is set, the model computes nothing."""
    go = threading.Event()
    engine.model.before = lambda: go.wait(LIVENESS) or pytest.fail("nobody opened the gate")
    return go


def n_tokens(most: int = 8, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=most, ignore_eos=True, **more)


# ---- streams


def test_many_streams_give_what_each_request_alone_would_have() -> None:
    model = tiny_model()
    prompts = [[3 + (i * 7 + j) % 250 for j in range(1 + i % 9)] for i in range(60)]
    params = [SamplingParams(max_tokens=1 + i % 12, temperature=(i % 2) * 1.0, seed=i) for i in range(60)]
    expected = [solo(model, prompt, p)[0] for prompt, p in zip(prompts, params, strict=True)]

    async def main() -> None:
        streams = [loop.submit(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
        made = await asyncio.gather(*(read(stream) for stream in streams))
        assert [tokens(events) for events in made] == expected
        assert all(events[-1].finish_reason in ("stop", "length") for events in made)

    with running(make_engine(model)) as loop:
        run(main)
        assert loop.n_aborted == 0


def test_samples_of_a_prompt_come_in_one_stream_and_differ_by_their_index_alone() -> None:
    model = tiny_model()
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=3)

    async def main() -> None:
        stream = loop.submit(ids("abc"), params, n=3)
        events = await read(stream)
        for i, request in enumerate(stream.requests):
            own = [event for event in events if event.request is request]
            assert tokens(own) == solo(model, ids("abc"), params, sample_index=i)[0]
            assert own[-1].finish_reason is not None

    with running(make_engine(model)) as loop:
        run(main)


def test_samples_without_a_seed_share_one() -> None:
    async def main() -> None:
        stream = loop.submit(ids("abc"), SamplingParams(max_tokens=2, temperature=1.0), n=3)
        assert len({request.seed for request in stream.requests}) == 1
        await read(stream)

    with running(make_engine(tiny_model())) as loop:
        run(main)


def test_a_batch_holds_all_that_has_come() -> None:
    """F3: a slow reader gets everything, in order, and never more than its own requests made."""

    async def main() -> None:
        stream = loop.submit(ids("a"), n_tokens(20))
        while loop.n_live:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)
        assert len(stream._events) == 20
        events = await stream.batch()
        assert len(events) == 20 and events[-1].finish_reason == "length"
        assert await stream.batch() == []

    with running(make_engine(writes("abcd"))) as loop:
        run(main)


def test_events_cross_into_the_asyncio_loop_once_a_step() -> None:
    engine = make_engine(writes("abcd"))
    go = gate(engine)
    crossings: list[int] = []

    async def main() -> None:
        asyncio_loop = asyncio.get_running_loop()
        plain = asyncio_loop.call_soon_threadsafe

        def counted(function, pairs, *rest):
            crossings.append(len(pairs))
            return plain(function, pairs, *rest)

        asyncio_loop.call_soon_threadsafe = counted
        streams = [loop.submit(ids("a"), n_tokens(5)) for _ in range(6)]
        go.set()
        await asyncio.gather(*map(read, streams))
        asyncio_loop.call_soon_threadsafe = plain

    with running(engine) as loop:
        run(main)
    assert sum(crossings) == 30 and len(crossings) <= 7 and max(crossings) == 6


def test_two_asyncio_loops_each_get_their_own() -> None:
    async def main() -> None:
        assert tokens(await read(loop.submit(ids("a"), n_tokens(30)))) == [*ids("bcd"), *[1] * 27]

    with running(make_engine(writes("abcd", then=1))) as loop:
        threads = [threading.Thread(target=run, args=(main,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIVENESS)
            assert not thread.is_alive()


def test_an_asyncio_loop_that_is_closed_harms_nobody() -> None:
    engine = make_engine(writes("abcd"))
    go = gate(engine)

    async def leave() -> None:
        loop.submit(ids("a"), n_tokens(200))

    async def stay() -> None:
        stream = loop.submit(ids("a"), n_tokens(9))
        go.set()
        assert len(await read(stream)) == 9

    with running(engine) as loop:
        run(leave)
        run(stay)
        assert loop.alive


# ---- who leaves


@pytest.mark.parametrize("after", [0, 1, 3])
def test_f2_a_closed_stream_is_aborted_within_a_step(after: int) -> None:
    engine = make_engine(writes("abcd"))
    steps: list[StepRecord] = []

    async def main() -> None:
        loop.watchers.append(steps.append)
        stream = loop.submit(ids("a"), n_tokens(250), n=2)
        for _ in range(after):
            await stream.batch()
        stream.close()
        stream.close()  # twice is nothing
        closed_at = len(steps)
        assert await stream.batch() == []
        while loop.n_live:
            await asyncio.sleep(0.005)
        assert len(steps) <= closed_at + 3
        assert loop.n_aborted == 2

    with running(engine) as loop:
        run(main)


def test_seats_that_were_taken_for_nothing_are_given_back_once() -> None:
    async def main() -> None:
        stream = loop.open(3)
        assert loop.n_live == 3
        stream.close()
        stream.close()
        assert loop.n_live == 0
        stream.send(loop.make(ids("a"), n_tokens(5), 3))  # too late: nothing enters the engine
        assert not stream.requests and await stream.batch() == []

    with running(make_engine(writes("abcd"))) as loop:
        run(main)


def test_a_reader_who_waits_is_woken_when_the_stream_is_closed() -> None:
    engine = make_engine(writes("abcd"))
    go = gate(engine)

    async def main() -> None:
        stream = loop.submit(ids("a"), n_tokens(9))
        reading = asyncio.create_task(read(stream))
        await asyncio.sleep(0.01)
        stream.close()
        assert await reading == []
        go.set()

    with running(engine) as loop:
        run(main)


def test_random_clients_that_come_and_leave_leave_nothing_behind() -> None:
    rng = random.Random(1)
    engine = make_engine(tiny_model(), n_slots=160, max_running=4)

    async def client() -> None:
        await asyncio.sleep(rng.random() * 0.2)
        prompt = [3 + rng.randrange(4) for _ in range(rng.randint(1, 20))]
        stream = loop.submit(prompt, n_tokens(rng.randint(1, 60)), n=rng.randint(1, 3))
        stay = rng.choice([0, 1, 5, 1000])
        while stay and await stream.batch():
            stay -= 1
        stream.close()

    async def main() -> None:
        await asyncio.gather(*(client() for _ in range(80)))

    with running(engine) as loop:
        run(main)
        assert loop.alive and loop.n_aborted > 0


# ---- how many


def test_f11_the_limit_counts_each_sample_and_refuses_at_once() -> None:
    engine = make_engine(writes("abcd"), max_running=2)
    go = gate(engine)

    async def main() -> None:
        first = loop.submit(ids("a"), n_tokens(), n=3)
        with pytest.raises(Overloaded, match="3 requests run or wait, of 4"):
            loop.submit(ids("a"), n_tokens(), n=2)
        second = loop.submit(ids("a"), n_tokens())
        with pytest.raises(Overloaded):
            loop.submit(ids("a"), n_tokens())
        with pytest.raises(InputError, match="5 texts were asked for at once; the server takes 4"):
            loop.open(5)  # it could never be served
        go.set()
        await asyncio.gather(read(first), read(second))
        while loop.n_live:
            await asyncio.sleep(0.001)
        assert len(await read(loop.submit(ids("a"), n_tokens(), n=4))) == 32

    with running(engine, most_waiting=2) as loop:
        run(main)


def test_seats_that_are_given_back_unused_are_free_again() -> None:
    async def main() -> None:
        stream = loop.open(3)
        with pytest.raises(Overloaded):
            loop.open()
        stream.close()
        stream.send(loop.make(ids("a"), n_tokens(), 3))  # closed before: nothing is sent
        assert await read(stream) == [] and loop.n_live == 0
        with pytest.raises(InputError, match="the prompt is empty"):
            loop.submit([], n_tokens())
        with pytest.raises(InputError, match="token id 259"):
            loop.submit([259], n_tokens())
        assert loop.n_live == 0

    with running(make_engine(writes("abcd"), max_running=1), most_waiting=2) as loop:
        run(main)


# ---- the end


def test_f10_draining_takes_nothing_new_and_ends_what_runs() -> None:
    engine = make_engine(writes("abcd"))
    go = gate(engine)

    async def main() -> None:
        stream = loop.submit(ids("a"), n_tokens(30))
        draining = asyncio.create_task(loop.drain(LIVENESS))
        await asyncio.sleep(0.01)
        with pytest.raises(Unavailable, match="shutting down"):
            loop.submit(ids("a"))
        assert not draining.done()
        go.set()
        assert len(await read(stream)) == 30
        assert await draining is True

    with running(engine) as loop:
        run(main)


def test_f10_what_does_not_end_in_time_is_told_so() -> None:
    engine = make_engine(writes("abcd"))
    go = gate(engine)

    async def main() -> None:
        stream = loop.submit(ids("a"), n_tokens(200), n=2)
        assert await loop.drain(0.05) is False
        engine.model.before = lambda: None
        go.set()
        await asyncio.to_thread(loop.stop)
        events = await read(stream)
        assert [event.finish_reason for event in events if event.finish_reason] == ["abort"] * 2

    with running(engine) as loop:
        run(main)


def test_stopping_what_never_ran_changes_nothing() -> None:
    loop = EngineLoop(make_engine(writes("abcd")))
    loop.stop()

    async def main() -> None:
        with pytest.raises(Unavailable):
            loop.open()

    run(main)


class Counted:
    """An inbox that counts how often somebody looks into it."""

    def __init__(self):
        self.inbox, self.looks = SimpleQueue(), 0
        self.put = self.inbox.put

    def get(self, *how, **hows):
        self.looks += 1
        return self.inbox.get(*how, **hows)


def test_an_idle_loop_sleeps_on_its_inbox() -> None:
    loop = EngineLoop(make_engine(writes("abcd")))
    loop._inbox = inbox = Counted()
    loop.start()

    async def main() -> None:
        assert len(await read(loop.submit(ids("a"), n_tokens(3)))) == 3

    run(main)
    looks = inbox.looks
    threading.Event().wait(0.1)
    assert inbox.looks <= looks + 1  # it does not look again and again
    run(main)
    loop.stop()


# ---- what raises


def test_f8_a_request_that_makes_the_model_raise_ends_alone() -> None:
    model = poisoned()
    engine = make_engine(model)
    go = gate(engine)

    async def main() -> None:
        good = [loop.submit([token], n_tokens(20)) for token in (5, 6, 9)]
        bad = loop.submit([5, model.poison, 5], n_tokens(20))
        go.set()
        texts = await asyncio.gather(*map(read, good))
        for token, events in zip((5, 6, 9), texts, strict=True):
            assert tokens(events) == solo(follow({5: 6, 6: 7, 7: 8}, size=259), [token], n_tokens(20))[0]
        assert [event.finish_reason for event in await read(bad)] == ["error"]
        assert len(await read(loop.submit([5], n_tokens(3)))) == 3

    with running(engine) as loop:
        run(main)
        assert loop.alive


def test_f8_nobody_joins_the_one_that_is_tried_alone_and_has_it_blamed() -> None:
    model = poisoned()
    engine = make_engine(model, max_running=8, budget=8)
    go = gate(engine)

    async def main() -> None:
        good = loop.submit([5], n_tokens(20))
        bad = loop.submit([model.poison] * 20, n_tokens(20))  # fills the step, so that the next one waits
        waiting = loop.submit([model.poison], n_tokens(20))
        go.set()
        assert len(tokens(await read(good))) == 20
        for stream in (bad, waiting):
            assert [event.finish_reason for event in await read(stream)] == ["error"]

    with running(engine) as loop:
        run(main)
        assert loop.alive


def test_f8_one_that_raises_only_later_ends_with_what_it_had() -> None:
    model = Poisoned(follow(chain(10, 11, 12, 99), size=259).table)

    async def main() -> None:
        bad, good = loop.submit([10], n_tokens(20)), loop.submit([20], n_tokens(20))
        events = await read(bad)
        assert tokens(events) == [11, 12, 99] and events[-1].finish_reason == "error"
        assert tokens(await read(good)) == [20] * 20

    with running(make_engine(model)) as loop:
        run(main)


def test_f8_bad_requests_one_by_one_do_not_kill_while_others_go_well() -> None:
    model = poisoned()

    async def main() -> None:
        for _ in range(4):
            assert [e.finish_reason for e in await read(loop.submit([model.poison], n_tokens()))] == ["error"]
            assert len(await read(loop.submit([5], n_tokens(3)))) == 3

    with running(make_engine(model)) as loop:
        run(main)
        assert loop.alive


def test_a_fault_that_passes_costs_nothing() -> None:
    """Memory that was short for a moment, say: the step is tried again, and no token is lost or doubled."""
    model = tiny_model()
    engine = make_engine(model)
    plain, calls = engine._forward, []

    def sometimes(plan):
        calls.append(len(plan))
        if len(calls) % 3 == 0:
            raise RuntimeError("out of memory, for now")
        return plain(plan)

    engine._forward = sometimes

    async def main() -> None:
        streams = [loop.submit(ids("abc"), n_tokens(12), n=2), loop.submit(ids("xy"), n_tokens(9))]
        first, second = await asyncio.gather(*map(read, streams))
        assert (
            tokens([e for e in first if e.request is streams[0].requests[1]])
            == solo(model, ids("abc"), n_tokens(12))[0]
        )
        assert tokens(second) == solo(model, ids("xy"), n_tokens(9))[0]

    with running(engine) as loop:
        run(main)
        assert loop.alive and len(calls) > 6


def broken(engine: Engine) -> None:
    def raising(plan):
        raise RuntimeError("the GPU is gone")

    engine._forward = raising


def test_f9_an_engine_that_always_raises_dies_and_everybody_hears() -> None:
    engine = make_engine(writes("abcd"))
    go = gate(engine)

    async def main() -> None:
        streams = [loop.submit(ids("a"), n_tokens(30), n=1 + i % 2) for i in range(12)]
        reading = [asyncio.create_task(read(stream)) for stream in streams]
        await asyncio.sleep(0.01)
        go.set()
        broken(engine)
        for stream, task in zip(streams, reading, strict=True):
            ends = [event.finish_reason for event in await task if event.finish_reason]
            assert ends == ["error"] * len(stream.requests)
        assert not loop.alive and loop.n_live == 0 and isinstance(loop.died, RuntimeError)
        with pytest.raises(Unavailable, match="has stopped"):
            loop.submit(ids("a"))

    with running(engine) as loop:
        run(main)


def test_f9_requests_alone_that_fail_in_a_row_are_the_engines_fault() -> None:
    engine = make_engine(writes("abcd"))
    broken(engine)

    async def main() -> None:
        assert (await read(loop.submit(ids("a"))))[-1].finish_reason == "error"
        assert loop.alive  # it may have been the request
        assert (await read(loop.submit(ids("b"))))[-1].finish_reason == "error"
        while loop.alive:
            await asyncio.sleep(0.001)

    with running(engine) as loop:
        run(main)


class Panic(BaseException):
    """What a Rust extension raises is no Exception."""


def test_f9_even_a_panic_is_heard() -> None:
    engine = make_engine(writes("abcd"))

    def panic():
        raise Panic

    engine.model.before = panic

    async def main() -> None:
        stream = loop.open()
        late = loop.open()
        stream.send(loop.make(ids("a"), n_tokens()))
        assert [event.finish_reason for event in await read(stream)] == ["error"]
        while loop.alive:
            await asyncio.sleep(0.001)
        assert isinstance(loop.died, Panic)
        with pytest.raises(Unavailable):
            late.send(loop.make(ids("a"), n_tokens()))
        late.close()

    with running(engine) as loop:
        run(main)


def test_tokens_that_got_lost_end_the_loop_and_no_text_has_a_hole() -> None:
    engine = make_engine(writes("abcd"))
    plain, calls = engine.scheduler.update, []

    def raising(plan, sampled):
        events = plain(plan, sampled)
        calls.append(events)
        if len(calls) == 4:
            raise RuntimeError("after the tokens were accepted")
        return events

    engine.scheduler.update = raising

    async def main() -> None:
        events = await read(loop.submit(ids("a"), n_tokens(30)))
        assert tokens(events) == [*ids("bcd")] and events[-1].finish_reason == "error"
        assert not loop.alive

    with running(engine) as loop:
        run(main)


# ---- watchers


def test_watchers_see_every_step_and_one_that_raises_is_dropped() -> None:
    records: list[StepRecord] = []

    def raising(record: StepRecord) -> None:
        raise RuntimeError("a bug of a watcher")

    async def main() -> None:
        loop.watchers += [raising, records.append]
        stream = loop.submit(ids("abcab"), n_tokens(4))
        events = await read(stream)
        while len(records) < 5:
            await asyncio.sleep(0.001)
        assert loop.watchers == [records.append]
        request = stream.requests[0]
        assert [record.number for record in records] == [1, 2, 3, 4, 5]
        # the budget of 4 cuts the prompt of 5 in two
        assert [record.plan for record in records] == [[(request, n)] for n in (4, 1, 1, 1, 1)]
        assert [event for record in records for event in record.events] == events
        assert all(record.began <= record.ended for record in records)

    with running(make_engine(writes("abcd"), max_running=2, budget=4)) as loop:
        run(main)


def test_priority_is_handed_on() -> None:
    engine = make_engine(writes("abcd"), policy="priority", max_running=1)
    go = gate(engine)
    order: list[int] = []

    async def one(priority: int) -> None:
        await read(loop.submit(ids("a"), n_tokens(2), priority=priority))
        order.append(priority)

    async def main() -> None:
        first = asyncio.create_task(one(5))
        await asyncio.sleep(0.02)  # it runs already
        rest = [asyncio.create_task(one(priority)) for priority in (0, 9, 3)]
        await asyncio.sleep(0.02)
        go.set()
        await asyncio.gather(first, *rest)

    with running(engine) as loop:
        run(main)
    assert order == [5, 9, 3, 0]
