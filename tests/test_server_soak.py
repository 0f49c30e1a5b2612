"""The soak of the server finds what it is for: each of its rules is broken once, and known texts are compared rightly.

The soak itself takes minutes, and is run by `make soak-server`.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from random import Random

import pytest
from server_soak import Result, judge, judge_variety
from soak_asks import CHAT, COMPLETIONS, NEAR_TIE, Answer, Ask, Text, check, known_asks, parting, random_ask, read, same
from soak_clients import Tally
from soak_malformed import CASES, TURNS
from soak_process import lag_quantile
from soak_wire import Wire, Wrong

OBJECTS = ("Request", "Event", "Stream", "EventStream", "RequestResponseCycle", "Limited", "Task", "Choice")


def idle() -> dict[str, object]:
    names = ("n_live", "streams", "owners", "running", "waiting", "blocks held")
    return {**dict.fromkeys(names, 0), "python blocks": 1000, "objects": dict.fromkeys(OBJECTS, 0)}


def good() -> Result:
    """As a run that found nothing."""
    tally = Tally(asked=100, whole_texts=50, known=Counter(greedy=10, seeded=10))
    tally.known |= Counter({"greedy, equal": 10, "seeded, equal": 10})
    tally.ends = {
        "stopping": Counter({"cut off": 1}),
        "leaving": Counter({"left in its request": 9, "left in its stream": 9}),
        "ordinary": Counter({"whole": 80, "refused (429)": 1}),
    }
    counted = {'vllm:request_success_total{finished_reason="stop"}': 60.0, "vllm:num_preemptions_total": 1.0}
    counted |= {"vllm:prefix_cache_hits_total": 1.0}
    result = Result(300, 0, {}, tally, counted, idle={"before": idle(), "after": idle()})
    result.early = result.late = {"memory": 1e9, "files": 30.0, "threads": 4.0}
    return result


def grown(**more: float) -> Callable[[Result], None]:
    return lambda result: setattr(result, "late", {name: n + more.get(name, 0) for name, n in result.early.items()})


def left(name: str, n: int = 1) -> Callable[[Result], None]:
    def plant(result: Result) -> None:
        found = result.idle["after"]
        (found if name in found else found["objects"])[name] += n

    return plant


def counted(name: str) -> Callable[[Result], None]:
    return lambda result: result.metrics.update({name: 1.0})


PLANTS: list[tuple[Callable[[Result], None], str]] = [
    (lambda result: setattr(result.tally, "asked", 101), "101 were asked"),
    (lambda result: result.tally.fault("a request is lost"), "a request is lost"),
    (lambda result: setattr(result.tally, "whole_texts", 61), "61 whole texts"),
    (lambda result: result.tally.known.update({"seeded": 3}), "of the seeded texts"),
    (grown(memory=2e8), "bytes of memory more"),
    (grown(files=20), "20 open files more"),
    (grown(threads=1), "1 threads more"),
    (left("n_live"), "n_live of the idle server is 1"),
    (left("blocks held"), "blocks held of the idle server is 1"),
    (left("streams"), "streams of the idle server is 1"),
    (left("Limited"), "1 objects Limited are left"),
    (left("Request", 50), "50 objects Request are left"),
    (left("python blocks", 100_000), "100,000 blocks of memory more"),
    (counted('vllm:request_success_total{finished_reason="error"}'), "1 texts ended with an error"),
    (counted('minillm:requests_refused_total{status="500"}'), "the server's own fault"),
]


def test_a_good_run_is_found_good() -> None:
    result = good()
    judge(result, ["WARNING: a client took nothing for 4 s, and is cut off"])
    judge_variety(result)
    assert result.failures == [] and result.log == {"WARNING: a client took": 1}


@pytest.mark.parametrize(("plant", "words"), PLANTS, ids=[words for _, words in PLANTS])
def test_what_is_wrong_is_found(plant: Callable[[Result], None], words: str) -> None:
    result = good()
    plant(result)
    judge(result, [])
    assert any(words in failure for failure in result.failures), result.failures


@pytest.mark.parametrize("line", ["ERROR: Exception in ASGI application", "Traceback (most recent call last):"])
def test_the_log_may_hold_warnings_only(line: str) -> None:
    result = good()
    judge(result, [line])
    assert "the log has 1 lines that are no warnings" in result.failures[0]


def test_a_long_run_in_which_something_never_happened() -> None:
    result = good()
    del result.tally.ends["stopping"]
    judge_variety(result)
    assert result.failures == ["nobody was cut off because it read nothing"]


# ---- texts


def known(temperature: float = 0) -> Ask:
    """A text of three tokens; at the second, another was nearly as good."""
    text = Text("one two three", "length", ["one", " two", " three"], [5.0, NEAR_TIE / 2, 5.0])
    return Ask(COMPLETIONS, {"temperature": temperature, "max_tokens": 3}, Answer([text]))


def test_a_text_may_part_only_where_rounding_decides() -> None:
    assert same(known(), Answer([Text("one two three", "length")]))
    assert not same(known(), Answer([Text("one too much", "length")]))  # at " two", a near-tie
    for other in ("one two four", "ONE two three", "one two", "one two three four"):
        with pytest.raises(Wrong, match="parts from the idle server's"):
            same(known(), Answer([Text(other, "length")]))
    with pytest.raises(Wrong):
        same(known(), Answer([Text("one two three", "stop")]))
    assert not same(known(0.8), Answer([Text("all else", "length")]))  # sampled: only counted
    assert parting("one twa", known().expected.texts[0]) == (6, NEAR_TIE / 2)  # type: ignore[union-attr]


def test_a_form_that_is_right() -> None:
    asked = {"temperature": 1, "max_tokens": 3, "n": 2, "logprobs": 1, "stop": "x"}
    texts = [Text("b", "length", ["b"] * 3), Text("", "stop", ["x"])]
    check(Ask(COMPLETIONS, asked), Answer(texts, {"completion_tokens": 4}))
    check(Ask(COMPLETIONS, asked | {"stream": True}), Answer(texts))
    check(Ask(COMPLETIONS, asked | {"min_tokens": 1}), Answer([Text("x", "stop", ["x"])] * 2, {"completion_tokens": 2}))


@pytest.mark.parametrize(
    ("fields", "text", "usage"),
    [
        ({}, Text("a", None), 3),
        ({}, Text("a", "abort"), 3),
        ({}, Text("a", "length"), 2),
        ({}, Text("a", "stop"), 4),
        ({"logprobs": 1}, Text("a", "stop", ["a"] * 4), 3),
        ({"stop": "a"}, Text("cat", "stop"), 3),
        ({}, Text("a", "stop"), None),
    ],
)
def test_a_form_that_cannot_be(fields: dict[str, object], text: Text, usage: int | None) -> None:
    ask = Ask(COMPLETIONS, {"temperature": 1, "max_tokens": 3, **fields})
    with pytest.raises(Wrong):
        check(ask, Answer([text], None if usage is None else {"completion_tokens": usage}))


# ---- what comes over the wire


def answered(data: bytes, ask: Ask) -> Answer:
    """What a client makes of these bytes of a server."""

    async def run() -> Answer:
        async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(data)
            writer.close()

        async with await asyncio.start_server(server, "127.0.0.1", 0) as listening:
            wire = await Wire(listening.sockets[0].getsockname()[1]).open()
            try:
                await wire.send(ask.data)
                wire.expect()
                assert await wire.head() == 200
                return await read(wire, ask)
            finally:
                wire.leave(True)

    return asyncio.run(asyncio.wait_for(run(), 10))


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
PART = b'data: {"choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": null}]}\n\n'
END = b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\n'


def chunked(*parts: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    return HEAD + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + end


def test_streams_are_read_and_their_faults_seen() -> None:
    ask = Ask(CHAT, {"stream": True, "temperature": 0, "max_tokens": 3})
    done = b"data: [DONE]\n\n"
    whole = answered(chunked(PART + END[:10], END[10:] + done), ask)
    assert [(text.text, text.reason) for text in whole.texts] == [("hi", "stop")]
    with pytest.raises(Wrong, match="without .DONE."):
        answered(chunked(PART, END), ask)
    with pytest.raises(Wrong, match="goes on after its end"):
        answered(chunked(END, PART, done), ask)
    with pytest.raises(Wrong, match="an error in a stream"):
        answered(chunked(PART, b'data: {"error": {}}\n\n', done), ask)
    with pytest.raises(Wrong, match="in a stream"):
        answered(chunked(PART, done, PART), ask)
    with pytest.raises(ConnectionResetError):
        answered(chunked(PART, end=b""), ask)
    with pytest.raises(ConnectionResetError):
        answered(b"", ask)
    with pytest.raises(Wrong, match="no HTTP"):
        answered(b"SSH-2.0\r\n\r\n", ask)


# ---- what is asked


def test_what_is_asked_is_drawn_from_the_seed() -> None:
    drawn = [[random_ask("m", Random(seed)).data for _ in range(5)] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len({ask.data for ask in known_asks("m")}) == len(known_asks("m"))


def test_names_of_what_is_malformed_differ() -> None:
    names = [case.name for case in CASES] + list(TURNS)
    assert len(set(names)) == len(names)


def test_lag_is_read_from_the_buckets() -> None:
    def buckets(*counts: float) -> dict[str, float]:
        ends = ("0.001", "0.1", "+Inf")
        names = (f'minillm:event_loop_lag_seconds_bucket{{le="{end}"}}' for end in ends)
        return dict(zip(names, counts, strict=True))

    before, after = buckets(5, 5, 6), buckets(104, 105, 106)
    assert [lag_quantile(before, after, q) for q in (0.5, 0.99, 0.999, 1)] == [0.001, 0.001, 0.1, 0.1]
