"""What the load generator reads: bytes to a body, that to events, these to tokens and times; no sockets, no clock."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.bench.load_client import Answer, EventReader
from minillm.bench.load_http import MOST_HEAD, Fault, HttpReader, Server
from minillm.errors import InputError

BODY = b'data: {"a": 1}\n\n: a comment\n\ndata: [DONE]\n\n'
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKS = b"8;name=value\r\n" + BODY[:8] + b"\r\n%x\r\n" % len(BODY[8:]) + BODY[8:] + b"\r\n0\r\nTrailer: yes\r\n\r\n"
FRAMED = {
    "chunked": HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKS,
    "length": HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY,
    "close": HEAD + b"\r\n" + BODY,
    "after 100": b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"transfer-encoding: Chunked\r\n\r\n" + CHUNKS,
}


def read(pieces: list[bytes]) -> tuple[HttpReader, bytes]:
    reader = HttpReader()
    return reader, b"".join([reader.feed(piece) for piece in pieces])


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in zip(edges, edges[1:], strict=False)]


def fault(work: Any, *given: Any) -> Fault:
    with pytest.raises(Fault) as error:
        work(*given)
    words = str(error.value)
    assert "\n" not in words and "\x1b" not in words and len(words) < 500
    return error.value


# ---- HTTP


@pytest.mark.parametrize("framing", FRAMED)
def test_a_body_is_the_same_byte_by_byte(framing: str) -> None:
    data = FRAMED[framing]
    reader, body = read([data[i : i + 1] for i in range(len(data))])
    assert (reader.status, body) == (200, BODY)
    assert reader.ended == (framing != "close") and reader.kept_open == reader.ended
    reader.close()
    assert reader.ended


@given(st.sampled_from(sorted(FRAMED)), st.lists(st.integers(0, 400), max_size=6))
def test_a_body_is_the_same_however_it_is_cut(framing: str, places: list[int]) -> None:
    _, body = read(cut(FRAMED[framing], places))
    assert body == BODY


@pytest.mark.parametrize("framing", ["chunked", "length"])
def test_a_body_that_is_not_all_there_has_not_ended(framing: str) -> None:
    for n in range(len(FRAMED[framing])):
        reader, _ = read([FRAMED[framing][:n]])
        reader.close()
        assert not reader.ended, n


def test_bytes_after_the_body_are_none_of_it() -> None:
    reader, body = read([FRAMED["length"] + b"more"])
    assert body == BODY and reader.ended
    reader, body = read([FRAMED["chunked"] + b"more"])
    assert body == BODY and reader.ended and not reader.kept_open


def test_a_server_may_close_the_connection() -> None:
    reader, _ = read([HEAD + b"Connection: Close\r\nContent-Length: 0\r\n\r\n"])
    assert reader.ended and not reader.kept_open


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH",
        b"\x00\x01",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1\r\n\r\n",
        b"HTTP/2",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: \xb2\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nsize\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n-4\r\n",
        HEAD + b"x" * MOST_HEAD,
    ],
)
def test_what_is_not_http_is_told(data: bytes) -> None:
    assert fault(read, [data]).kind == "not HTTP"


# ---- events


@given(st.lists(st.integers(0, 100), max_size=6), st.booleans())
def test_events_are_the_same_however_they_are_cut(places: list[int], crlf: bool) -> None:
    body = BODY.replace(b"\n", b"\r\n") if crlf else BODY
    reader = EventReader()
    found = [event for piece in cut(body, places) for event in reader.feed(piece)]
    reader.close()
    assert found == [b'{"a": 1}', b"[DONE]"]


@pytest.mark.parametrize(
    "body, kind",
    [
        (b"<html>\n", "not events"),
        (b"<html>", "not events"),
        (b'{"choices": []}', "not events"),
        (b"\x1b[2J\n", "not events"),
        (b"data: {}\nerror: no memory\n", "error event"),
        (b'data: {"cho', "cut off"),
        (b"data: " + b"x" * 300_000, "not events"),
    ],
)
def test_what_is_no_event_is_told(body: bytes, kind: str) -> None:
    def work() -> None:
        reader = EventReader()
        reader.feed(body)
        reader.close()

    assert fault(work).kind == kind


def test_fields_without_data_are_passed_over() -> None:
    assert EventReader().feed(b"event: message\nid: 7\nretry: 10\n: hm\n\ndata:{}\n") == [b"{}"]


# ---- answers


def taken(*pieces: object) -> Answer:
    """The first piece comes after one second, each other one a second later."""
    answer = Answer(scheduled=0.0)
    for at, piece in enumerate(pieces, 1):
        answer.take(piece.encode() if isinstance(piece, str) else json.dumps(piece).encode(), float(at))
    return answer


def chat(text: str | None = None, finish: str | None = None, **more: str) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text, **more}, "finish_reason": finish}]}


def text(words: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"text": words, "finish_reason": finish}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 9}}


def test_times_are_of_text_and_tokens_are_of_usage() -> None:
    answer = taken(chat("", role="assistant"), chat("a"), chat("bc d"), chat(None, "stop"), USAGE, "[DONE]")
    assert answer.times == [2.0, 3.0] and answer.first == 2.0
    assert answer.last == 4.0, "the reason why it ended may be the last token's time"
    assert (answer.n_prompt, answer.n_output, answer.finish, answer.done) == (5, 9, "stop", True)
    answer.check()


def test_without_usage_pieces_are_counted() -> None:
    answer = taken(text("a"), text("b"), text("", "length"))
    assert (answer.usage, answer.n_prompt, answer.n_output) == (None, 0, 2)
    answer.check()


def test_a_text_that_ends_at_once_has_its_time() -> None:
    answer = taken(text("", "stop"), {"usage": {"prompt_tokens": 5, "completion_tokens": 1}}, "[DONE]")
    assert (answer.first, answer.last, answer.n_output) == (1.0, 1.0, 1)
    answer.check()


def test_thoughts_are_text() -> None:
    assert taken(chat(reasoning_content="hm"), chat("a")).times == [1.0, 2.0]


def test_cached_tokens_are_kept() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 4}}
    assert taken(text("a"), {"choices": [], "usage": usage}).cached == 4
    assert taken(text("a"), {"choices": [], "usage": {**usage, "prompt_tokens_details": None}}).cached is None


@pytest.mark.parametrize("pieces", [(), (text("a"),), ("[DONE]",), (USAGE,), (USAGE, "[DONE]")])
def test_an_answer_without_an_end_is_cut_off(pieces: tuple[object, ...]) -> None:
    assert fault(taken(*pieces).check).kind == "cut off"


@pytest.mark.parametrize(
    "piece, kind",
    [
        ('{"choices": [', "invalid JSON"),
        ("", "invalid JSON"),
        ("[" * 100_000, "invalid JSON"),
        ("9" * 5000, "invalid JSON"),
        ('{"error": {"message": "out of memory"}}', "error event"),
        ('{"error": "\x1b[2J"}'.replace("\x1b", "\\u001b"), "error event"),
        ("7", "not a completion"),
        ("null", "not a completion"),
        ("{}", "not a completion"),
        ('{"choices": 7}', "not a completion"),
        ('{"choices": "abc"}', "not a completion"),
        ('{"choices": {"0": 1}}', "not a completion"),
        ('{"choices": [{"text": 7}]}', "not a completion"),
        ('{"choices": [{"delta": 7}]}', "not a completion"),
        ('{"choices": [], "usage": 7}', "not a completion"),
        ('{"choices": [], "usage": {}}', "not a completion"),
        ('{"choices": [], "usage": {"prompt_tokens": -1, "completion_tokens": 1}}', "not a completion"),
        ('{"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1e400}}', "not a completion"),
    ],
)
def test_what_is_no_piece_of_an_answer_is_told(piece: str, kind: str) -> None:
    assert fault(taken, piece).kind == kind


# ---- where


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_a_url_may_end_in_v1(ending: str) -> None:
    server = Server.parse("http://127.0.0.1:8000" + ending)
    assert (server.path, server.address, server.tls) == ("", ("127.0.0.1", 8000), None)
    assert Server.parse("https://example.org/a b" + ending).path == "/a%20b"


def test_the_head_of_a_request() -> None:
    head = Server.parse("http://[::1]:8000", "secret").head("POST", "/v1/completions", 3)
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\nHost: [::1]:8000\r\nAuthorization: Bearer secret\r\n")
    assert head.endswith(b"\r\n\r\n") and b"Content-Length: 3\r\n" in head
    assert Server.parse("https://example.org").address[1] == 443
    assert b"Host: xn--mnchen-3ya.de:80\r\n" in Server.parse("http://münchen.de").head("GET", "/", 0)
    assert b"Authorization" not in Server.parse("http://a").head("GET", "/", 0)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:8000",
        "ftp://a",
        "http://",
        "http://a:99999",
        "http://a:b",
        "http://u:p@a",
        "http://a..b",
        "http://a?x",
        "http://[a",
    ],
)
def test_a_wrong_url_is_refused(url: str) -> None:
    with pytest.raises(InputError, match="must be as http://"):
        Server.parse(url)


@pytest.mark.parametrize("key", ["a\r\nX: y", "schlüssel", "\x00"])
def test_a_key_that_is_no_header_is_refused(key: str) -> None:
    with pytest.raises(InputError, match="printable ASCII") as error:
        Server.parse("http://a", key)
    assert key not in str(error.value)
