"""What a request takes at the door, where its text ends, and what of it is shown when."""

import math
import time
from collections.abc import Sequence
from typing import Any

import pytest
from conftest import TINY
from hypothesis import assume, given
from hypothesis import strategies as st
from script import EOS, Codec

from minillm.errors import InputError
from minillm.params import SamplingParams
from minillm.request import Arrivals, Event, Request, longest_prefix_at_end, make_request

V = TINY.vocab_size


def a_request(prompt: Any = (5,), codec: Codec | None = None, max_len: int = 100, **params: Any) -> Request:
    return make_request(prompt, SamplingParams(**params), TINY, codec, max_len)


def feed(request: Request, tokens: Sequence[int]) -> list[Event]:
    """Accepts the tokens until the request ends."""
    events = []
    for token in tokens:
        events.append(request.accept(token))
        if request.finish_reason:
            break
    return events


def speak(pieces: Sequence[bytes | str], **params: Any) -> tuple[list[str], str | None]:
    """The text shown with each token when these pieces are made one after the other."""
    codec = Codec(["?", "<eos>", *pieces])
    request = make_request([0], SamplingParams(**params), TINY, codec, 100)
    events = feed(request, range(2, 2 + len(pieces)))
    return [event.text for event in events], request.finish_reason


# ---- sampling parameters


@pytest.mark.parametrize(
    "name, value",
    [
        *[("max_tokens", v) for v in (0, -1, 1.5, "3", None, True, math.inf)],
        *[("min_tokens", v) for v in (-1, 257, 0.5, None)],
        *[("temperature", v) for v in (-0.1, math.nan, math.inf, "hot", None, True, 10**400)],
        *[("top_k", v) for v in (-2, 1.0, None)],
        *[("top_p", v) for v in (0, 0.0, -0.1, 1.1, math.nan, None)],
        *[("min_p", v) for v in (-0.1, 1.1, math.nan)],
        *[("seed", v) for v in (-1, 2**64, 1.0, True)],
        *[("repetition_penalty", v) for v in (0, -1, math.inf, None, 1e-40)],
        *[("presence_penalty", v) for v in (math.nan, math.inf, "a", 1e39)],
        *[("logit_bias", v) for v in ({3: 1e39}, {3: -1e39})],  # more than a float32 logit can take
        *[("frequency_penalty", v) for v in (math.nan, -math.inf)],
        *[("logprobs", v) for v in (-1, 21, 1.0, True)],
        *[("stop", v) for v in ("", [""], ["a"] * 17, [3], [b"a"], None, 5)],
        *[("stop_token_ids", v) for v in (None, 5)],
        *[("logit_bias", v) for v in ({3: math.nan}, {3: math.inf}, {3: "a"}, {3: None}, {3: True}, None, [3])],
    ],
)
def test_a_parameter_out_of_range_is_refused_by_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(InputError) as error:
        SamplingParams(**{name: value})
    message = str(error.value)
    shown = next(iter(value.values())) if isinstance(value, dict) else value
    assert message.startswith(name) and "must" in message and "\n" not in message
    assert (repr(shown) if name != "stop" or value is None else "stop is ") in message


@pytest.mark.parametrize(
    "params",
    [
        {},
        dict(max_tokens=1, min_tokens=1),
        dict(max_tokens=10**9),
        dict(temperature=0),
        dict(temperature=1e-320),
        dict(temperature=1e300),
        dict(top_k=-1),
        dict(top_k=0),
        dict(top_k=10**6),
        dict(top_p=1e-9, min_p=1.0),
        dict(top_p=1, min_p=0),
        dict(seed=2**64 - 1),
        dict(seed=None, logprobs=None),
        dict(logprobs=20),
        dict(repetition_penalty=1e-3, presence_penalty=-2, frequency_penalty=2),
        dict(stop="x"),
        dict(stop=["a"] * 16),
        dict(stop=(), stop_token_ids=[], logit_bias={}),
        dict(logit_bias={3: -100, 4: 1.5}),
    ],
)
def test_the_edges_of_every_range_are_taken(params: dict[str, Any]) -> None:
    for name, value in params.items():
        if name not in ("stop", "stop_token_ids"):
            assert getattr(SamplingParams(**params), name) == value


def test_one_stop_string_is_not_taken_for_its_characters() -> None:
    assert SamplingParams(stop="END").stop == ("END",)


# ---- the door


@pytest.mark.parametrize("token", [-1, V, 2**63, True, 1.0, "a", None])
@pytest.mark.parametrize("place", ["prompt", "stop_token_ids", "logit_bias"])
def test_a_token_id_out_of_range_is_refused_wherever_it_stands(place: str, token: Any) -> None:
    """vllm#16529, vllm#54195, sgl#28088: a bad id killed the engine, or wrote into a neighbour's row."""
    params = {"stop_token_ids": [token]} if place == "stop_token_ids" else {}
    params |= {"logit_bias": {token: 1.0}} if place == "logit_bias" else {}
    with pytest.raises(InputError, match=f"{place} holds token id .*; ids run from 0 to {V - 1}") as error:
        a_request([3, token] if place == "prompt" else [3], **params)
    assert repr(token) in str(error.value)


@pytest.mark.parametrize("token", [0, V - 1])
def test_the_first_and_the_last_id_are_taken(token: int) -> None:
    request = a_request([token], stop_token_ids=[token], logit_bias={token: 1.0})
    assert request.prompt == [token] and token in request.stop_ids


def test_an_empty_prompt_is_refused_as_text_and_as_ids() -> None:
    """vllm#7283, vllm#7632: an empty prompt killed the engine for everyone."""
    codec = Codec("abc")
    for prompt in ("", [], ()):
        with pytest.raises(InputError, match="the prompt is empty; it must hold at least one token"):
            a_request(prompt, codec)


@pytest.mark.parametrize("prompt", [5, None, 2.5])
def test_a_prompt_that_is_neither_text_nor_ids_is_refused(prompt: Any) -> None:
    """The likely mistake is `generate([1, 2, 3])`: one prompt where a list of prompts belongs."""
    with pytest.raises(InputError, match=f"the prompt is {prompt!r}; it must be text or a list of token ids"):
        a_request(prompt)


def test_text_needs_a_tokenizer() -> None:
    with pytest.raises(InputError, match="no tokenizer was given; pass token ids"):
        a_request("abc")
    with pytest.raises(InputError, match="stop strings were given, but no tokenizer; pass stop_token_ids"):
        a_request([3], stop="x")
    assert a_request("abca", Codec("abc")).prompt == [0, 1, 2, 0]


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12))
def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(n: int, max_len: int, max_tokens: int) -> None:
    """vllm#35541, vllm#16445: one that never fits froze the queue; one that just fits was refused."""
    if n > max_len:
        with pytest.raises(InputError, match=f"prompt has {n} tokens, but there is room for {max_len}"):
            a_request([3] * n, max_len=max_len, max_tokens=max_tokens)
    else:
        request = a_request([3] * n, max_len=max_len, max_tokens=max_tokens)
        assert request.limit == min(max_tokens, max_len - n + 1)
        assert request.most_slots <= max_len
        events = feed(request, [4] * 30)
        assert len(events) == request.limit and events[-1].finish_reason == "length"
        assert len(request.tokens) - 1 == request.most_slots  # the last token is never fed back


def test_the_prompt_is_copied() -> None:
    mine = [3, 4]
    request = a_request(mine)
    request.accept(5)
    assert mine == [3, 4] == request.prompt and request.output == [5] and request.n_output == 1


def test_a_seed_is_kept_and_a_missing_one_is_made() -> None:
    assert a_request(seed=0).seed == 0
    assert len({a_request().seed for _ in range(20)}) == 20


def test_ids_are_never_used_twice() -> None:
    assert len({a_request().id for _ in range(20)}) == 20


# ---- where a text ends


@pytest.mark.parametrize("at", [0, 1, 4])
@pytest.mark.parametrize("token, params", [(EOS, {}), (7, {"stop_token_ids": (7, 9)}), (9, {"stop_token_ids": (7, 9)})])
def test_a_stop_token_ends_the_text_also_as_the_first_and_the_last(at: int, token: int, params: dict[str, Any]) -> None:
    """sgl#12151: the stop was looked for only while decoding, so a first EOS went unseen."""
    request = a_request(max_tokens=5, **params)
    events = feed(request, [5] * at + [token, 6, 6, 6])
    assert [event.finish_reason for event in events] == [None] * at + ["stop"]
    assert request.output == [5] * at + [token]


def test_ignore_eos_leaves_the_stop_tokens_of_the_user() -> None:
    """vllm#4589: ignore_eos stopped anyway, since EOS was among the stop ids."""
    request = a_request(max_tokens=4, ignore_eos=True)
    assert [e.finish_reason for e in feed(request, [EOS] * 9)] == [None, None, None, "length"]
    request = a_request(max_tokens=4, ignore_eos=True, stop_token_ids=[EOS])
    assert [e.finish_reason for e in feed(request, [EOS] * 9)] == ["stop"]


@pytest.mark.parametrize("prompt, limit", [(10, 5), (1, 1), (3, 1)])
def test_max_tokens_counts_new_tokens_alone(prompt: int, limit: int) -> None:
    """ai-glimpse/toyllm#107: the loop ran from the prompt's length to max_new_tokens."""
    request = a_request([5] * prompt, max_tokens=limit)
    assert [e.finish_reason for e in feed(request, [6] * 20)] == [None] * (limit - 1) + ["length"]


def test_a_token_below_zero_is_an_error_and_is_not_kept() -> None:
    request = a_request(codec=Codec(["a", "b", "c", "d", "e", "f"]), stop="fx")
    assert request.accept(5).text == ""  # could begin "fx"
    event = request.accept(-1)
    assert (event.token, event.text, event.finish_reason) == (None, "f", "error")
    assert request.output == [5] and request.finish_reason == "error"


def test_a_finished_request_takes_no_token() -> None:
    request = a_request(max_tokens=1)
    request.accept(4)
    with pytest.raises(AssertionError):
        request.accept(5)


# ---- stop strings


@pytest.mark.parametrize(
    "pieces, params, shown, reason",
    [
        (["DEF", "G", "HI", "J"], dict(stop="DEFGHIJ"), ["", "", "", ""], "stop"),
        (["DEF", "GX"], dict(stop="DEFGHIJ", max_tokens=2), ["", "DEFGX"], "length"),
        (["DEF", "GX", "y"], dict(stop="DEFGHIJ"), ["", "DEFGX", "y"], None),
        (["abSTOPcd"], dict(stop="STOP"), ["ab"], "stop"),
        (["abSTOP"], dict(stop="STOP"), ["ab"], "stop"),
        (["a", "x--y++z"], dict(stop=["++", "--"]), ["a", "x"], "stop"),
        (["a", "x++y--z"], dict(stop=["++", "--"]), ["a", "x"], "stop"),
        (["aa", "ab"], dict(stop="aab"), ["", "a"], "stop"),  # after "aa", "aaa" still ends in a beginning
        (["STO", "P"], dict(stop="STOP", max_tokens=1), ["STO"], "length"),  # given out at the end
        (["ST", "OP"], dict(stop="STOP", max_tokens=2), ["", ""], "stop"),  # complete with the last token
        (["é".encode()[:1], "é".encode()[1:] + b"!"], dict(stop="é!"), ["", ""], "stop"),
    ],
)
def test_stop_strings_across_token_borders(
    pieces: list[bytes | str], params: dict[str, Any], shown: list[str], reason: str | None
) -> None:
    """vllm#3574, vllm#2577, vllm#13087: parts of a stop string leaked, or the final text was cut."""
    assert speak(pieces, **params) == (shown, reason)


@pytest.mark.parametrize("end", ["stop", "abort", "error", "length"])
def test_what_was_held_back_comes_out_at_every_kind_of_end(end: str) -> None:
    codec = Codec(["?", "<eos>", "a", "ST", "O"])
    request = a_request([0], codec, stop="STOP", max_tokens=3)
    assert [event.text for event in feed(request, [2, 3])] == ["a", ""]
    last = request.accept({"stop": EOS, "length": 4}[end]) if end in ("stop", "length") else request.end(end)
    # EOS is a token of this codec like any other, but the stop token's own text is never shown
    assert (last.text, last.finish_reason) == ("STO" if end == "length" else "ST", end)


@pytest.mark.parametrize("end", ["stop", "abort", "error", "length"])
def test_half_a_character_at_the_end_comes_out_as_a_replacement(end: str) -> None:
    codec = Codec(["?", "<eos>", "👩".encode()[:2], "👩".encode()[2:]])
    request = a_request([0], codec, max_tokens=4)
    assert [event.text for event in feed(request, [2, 3, 2])] == ["", "👩", ""]
    last = request.accept({"stop": EOS, "length": 2}[end]) if end in ("stop", "length") else request.end(end)
    assert (last.text, last.finish_reason) == ("\ufffd" * (2 if end == "length" else 1), end)


def test_min_tokens_holds_for_stop_strings() -> None:
    """vllm#15407: stop strings ended a text before min_tokens."""
    assert speak(["a\n", "b\n", "c\n"], stop="\n", min_tokens=0) == (["a"], "stop")
    assert speak(["a\n", "b\n", "c\n", "d"], stop="\n", min_tokens=1) == (["a\n", "b"], "stop")
    assert speak(["a\n", "b\n", "c\n", "d"], stop="\n", min_tokens=2) == (["a\n", "b\n", "c"], "stop")
    assert speak(["a\n", "b\n", "c\n"], stop="\n", min_tokens=3, max_tokens=3) == (
        ["a\n", "b\n", "c\n"],
        "length",
    )


PIECES = ["a", "b", "ab", "aab", "ba", "", "é", b"\xc3", b"\xa9", b"\xff", "👩"]


@given(
    pieces=st.lists(st.sampled_from(PIECES), min_size=1, max_size=12),
    stops=st.lists(st.text("abé", min_size=1, max_size=4), max_size=3),
    min_tokens=st.integers(0, 4),
    end=st.sampled_from(["eos", "length", "abort"]),
)
def test_the_stream_is_the_text_cut_at_the_earliest_stop(
    pieces: list[bytes | str], stops: list[str], min_tokens: int, end: str
) -> None:
    """The same rule written over whole texts: nothing is held back, the stream is only cut once."""
    codec = Codec(["?", "<eos>", *pieces])
    most = len(pieces) if end == "length" else 100
    min_tokens = min(min_tokens, most)
    request = a_request([0], codec, max_tokens=most, min_tokens=min_tokens, stop=stops)
    events = feed(request, range(2, 2 + len(pieces)))
    if request.finish_reason is None:
        events.append(request.accept(EOS) if end == "eos" else request.end("abort"))

    def text_of(n: int, flush: bool) -> str:
        decoder = codec.decoder()
        return "".join(decoder.push(2 + i) for i in range(n)) + (decoder.flush() if flush else "")

    skip = len(
        text_of(min(min_tokens, len(pieces)), flush=min_tokens == most)
    )  # stop strings before this are ordinary text
    expected, reason = text_of(len(pieces), flush=True), {"eos": "stop"}.get(end, end)
    for n in range(min_tokens + 1, len(pieces) + 1):
        text = text_of(n, flush=n == most)
        cuts = [at for stop in stops if (at := text.find(stop, skip)) >= 0]
        if cuts:
            expected, reason = text[: min(cuts)], "stop"
            break
    assert "".join(event.text for event in events) == expected
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + [reason]


@given(
    st.text("ab", max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    st.lists(st.text("ab", max_size=5), min_size=1, max_size=3),
)
def test_only_what_can_still_become_a_stop_is_held_back(text: str, stops: list[str], futures: list[str]) -> None:
    assume(not any(stop in text for stop in stops))
    keep = longest_prefix_at_end(text, stops)
    beginnings = {stop[:n] for stop in stops for n in range(1, len(stop))}
    assert keep == max((n for n in range(1, len(text) + 1) if text[-n:] in beginnings), default=0)
    shown = text[: len(text) - keep]
    for future in futures:  # no stop that is not complete yet ever reaches back into what was shown
        for stop in stops:
            at = (text + future).find(stop, max(0, len(text) - len(stop) + 1))
            assert at < 0 or at >= len(shown)


# ---- arrivals


def arriving(*times: float) -> list[Request]:
    return [make_request([3], SamplingParams(), TINY, None, 100, arrival=t) for t in times]


@given(st.lists(st.sampled_from([-3.0, -2.0, -1.0, 0.0]), max_size=8), st.integers(1, 4), st.booleans())
def test_arrivals_are_handed_out_in_order_and_each_once(times: list[float], most: int, wait: bool) -> None:
    requests = arriving(*times)
    arrivals = Arrivals(requests)
    taken: list[Request] = []
    while arrivals:
        some = arrivals.take(most, wait=wait)
        assert 1 <= len(some) <= most
        taken += some
    assert taken == sorted(requests, key=lambda request: request.arrival)  # sorted is stable: ties keep their order
    assert arrivals.take(most) == []


def test_arrivals_wait_only_when_asked_to() -> None:
    late, now = requests = arriving(3600.0, 0.0)
    arrivals = Arrivals(requests)
    assert arrivals.take(5, wait=False) == [now]
    assert arrivals.take(5, wait=False) == [] and arrivals
    with pytest.raises(InputError, match="max_running is 0"):  # no room, ever: the caller would wait for nothing
        arrivals.take(0, wait=True)
    start = time.monotonic()
    [soon] = requests = arriving(0.05)
    arrivals = Arrivals(requests)
    assert arrivals.take(5) == [soon] and time.monotonic() - start >= 0.05
    assert not arrivals


def test_stop_token_ids_may_come_from_a_generator() -> None:
    """It can be read only once: a check that reads it must not leave nothing behind."""
    assert a_request([5], stop_token_ids=(i for i in (7, 8))).stop_ids >= {7, 8}


@pytest.mark.parametrize("prompt", ["", [], (), b"Hello", bytearray(b"Hello")])
def test_nothing_and_bytes_are_no_prompt_even_where_a_bos_would_be_added(prompt: object) -> None:
    """vllm#7283; bytes would pass for token ids."""
    with pytest.raises(InputError, match="prompt"):
        make_request(prompt, SamplingParams(), TINY, Codec([], bos=[3]), 8)  # type: ignore[arg-type]
