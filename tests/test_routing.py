"""What runs in Ray's proxies: keys, the choice of a replica, and the front that asks again; and metrics of several."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray.serve", reason="ray is not installed; it comes with minillm[cluster]")

from starlette.types import ASGIApp, Message, Receive, Scope, Send  # noqa: E402

from minillm.server import routing  # noqa: E402
from minillm.server.replica import merged  # noqa: E402

PATIENCE = 90.0  # seconds until a test says that something hangs


def test_a_key_says_what_later_turns_repeat() -> None:
    def key(**asked: Any) -> str | None:
        return routing.beginning(json.dumps(asked).encode())

    system, first = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}
    later = [{"role": "assistant", "content": "Hi"}, {"role": "user", "content": "What is a tide?"}]
    assert key(messages=[system, first], n=2) == key(messages=[system, first, *later], temperature=0)
    assert key(messages=[system, first]) != key(messages=[first])
    assert key(prompt="a" * 256 + "b") == key(prompt="a" * 256 + "c") != key(prompt="a" * 255 + "b")
    assert key(prompt=[1, 2, 3]) != key(prompt=[1, 2, 4])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"1",
        b'"messages"',
        b"\xff",
        b'{"messages": 3}',
        b'{"messages": [3]}',
        b'{"messages": [{"role": "user"}]}',
        b"[" * 100_000,
        b'{"prompt": ' + b"1" * 5000 + b"}",
    ],
)
def test_a_body_that_says_nothing_has_no_key_and_harms_nobody(body: bytes) -> None:
    assert routing.beginning(body) is None


class Fake:
    """A replica as the router sees it."""

    def __init__(self, name: str):
        self.replica_id = SimpleNamespace(unique_id=name)


def choose(loads: dict[str, int], key: str) -> list[set[str]]:
    """The ranks for a request with that key."""
    router = object.__new__(routing.PrefixRouter)
    router._replica_queue_len_cache = SimpleNamespace(get=lambda replica_id: loads[replica_id.unique_id])
    pending = SimpleNamespace(metadata=SimpleNamespace(session_id=key), routing_context=SimpleNamespace())
    ranks = asyncio.run(router.choose_replicas([Fake(name) for name in loads], pending))  # type: ignore
    return [{replica.replica_id.unique_id for replica in rank} for rank in ranks]


def test_a_key_has_one_home_until_that_is_clearly_busier_than_another() -> None:
    idle = dict.fromkeys("abcdef", 0)
    homes = {key: choose(idle, key)[0] for key in map(str, range(60))}
    assert all(len(home) == 1 for home in homes.values())
    assert set().union(*homes.values()) == set(idle)  # every replica is somebody's home
    for key, home in homes.items():
        [name] = home
        assert choose({**idle, name: 8}, key)[0] == home
        assert len(choose({**idle, name: 9}, key)[0]) == 2  # any two, of which Ray takes the less loaded
        rest = {other: 0 for other in idle if other != name}
        assert [k for k in homes if choose(rest, k)[0] != homes[k]] == [k for k in homes if homes[k] == home]


def test_without_a_key_two_at_random_are_compared() -> None:
    assert {len(choose(dict.fromkeys("abc", 0), "")[0]) for _ in range(20)} == {2}


def talk(app: ASGIApp, body: bytes = b'{"prompt": "x"}', gone_after: int | None = None) -> list[Message]:
    """What a client hears of an app behind the front; it may leave after so many pieces."""
    sent: list[Message] = []

    async def receive() -> Message:
        if body_left:
            return {"type": "http.request", "body": body_left.pop(0), "more_body": bool(body_left)}
        while gone_after is None or len(sent) < gone_after:
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    body_left = [body[:3], body[3:]]
    headers = [(b"x-session-id", b"theirs"), (b"X-Request-Disconnect-Disabled", b"1"), (b"accept", b"*/*")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    asyncio.run(asyncio.wait_for(routing.Front(app)(scope, receive, send), PATIENCE))
    return sent


def dying(pieces_of: list[int], kind: bytes = b"text/event-stream") -> tuple[ASGIApp, list[bytes]]:
    """An app that at its i-th call sends the head and so many pieces and then no more, as Ray's proxy does if a replica
    dies; and the bodies that it got."""
    bodies: list[bytes] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        n = pieces_of[len(bodies)]
        bodies.append(body)
        if n >= 0:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        for i in range(n):
            await send({"type": "http.response.body", "body": b"data: %d\n\n" % i, "more_body": i < 2})

    return app, bodies


@pytest.mark.parametrize("first", [-1, 0])  # without a head, and with one that nobody has seen yet
def test_what_nobody_has_seen_is_asked_again_with_the_same_body(first: int) -> None:
    app, bodies = dying([first, 3])
    sent = talk(app)
    assert bodies == [b'{"prompt": "x"}'] * 2
    assert [m["type"][14:] for m in sent] == ["start", "body", "body", "body"] and not sent[-1]["more_body"]


def test_a_request_that_kills_is_not_passed_on_for_ever() -> None:
    app, bodies = dying([-1, -1, 3])
    start, body = talk(app)
    assert len(bodies) == 2 and start["status"] == 503 and (b"retry-after", b"1") in start["headers"]
    assert "error" in json.loads(body["body"])


def test_a_stream_that_breaks_off_ends_with_an_error() -> None:
    app, bodies = dying([2, 3])
    sent = talk(app)
    assert len(bodies) == 1 and [m.get("body") for m in sent[1:3]] == [b"data: 0\n\n", b"data: 1\n\n"]
    error, done, rest = sent[3]["body"].split(b"\n\n")
    assert "not complete" in json.loads(error.removeprefix(b"data: "))["error"]["message"]
    assert done == b"data: [DONE]" and not rest and not sent[3].get("more_body")


def test_a_broken_answer_that_is_no_stream_stays_broken() -> None:
    app, bodies = dying([2, 3], kind=b"application/json")
    assert len(bodies) == 0 and [m.get("more_body") for m in talk(app)] == [None, True, True]


def test_who_has_left_is_not_asked_for_again() -> None:
    calls = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        calls.append(scope)
        while (await receive())["type"] != "http.disconnect":
            pass

    assert talk(app, gone_after=0) == [] and len(calls) == 1


def test_clients_give_the_proxy_no_orders() -> None:
    seen: list[bytes] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend(name.lower() for name, _ in scope["headers"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    talk(app)
    assert sorted(seen) == [b"accept", b"x-session-id"]


def test_the_key_goes_into_the_header_that_ray_reads() -> None:
    seen = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append([value for name, value in scope["headers"] if name == b"x-session-id"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    talk(app)
    talk(app, b"no JSON")
    assert len(seen[0]) == 1 and seen[0][0].decode() == routing.beginning(b'{"prompt": "x"}') and seen[1] == [b"theirs"]


def test_words_of_the_proxy_become_an_error_that_clients_understand() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/plain; charset=utf-8")]
        await send({"type": "http.response.start", "status": 404, "headers": headers})
        await send({"type": "http.response.body", "body": b"Path not found"})

    start, body = talk(app)
    assert start["status"] == 503 and json.loads(body["body"])["error"]["type"] == "service_unavailable_error"


def test_merged_metrics_say_whose_they_are() -> None:
    text = '# HELP x_total What.\n# TYPE x_total counter\nx_total{a="b"} 3.0\n'
    lines = merged([("one", text), ("two", text)]).decode().splitlines()
    assert [line for line in lines if line[0] != "#"] == [
        'x_total{a="b",replica="one"} 3.0',
        'x_total{a="b",replica="two"} 3.0',
    ]
