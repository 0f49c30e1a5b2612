"""The engine against the naive oracle, in float64 and with NaN in every free slot; and its small public API."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from conftest import TINY
from hypothesis import given, settings
from hypothesis import strategies as st
from script import (
    EOS,
    KINDS,
    NAN,
    CheckedEngine,
    Codec,
    Kind,
    Script,
    Text,
    Watched,
    assert_drained,
    chain,
    follow,
    run_out,
    solo,
    texts,
)
from test_stages import TEXTS, alike

from minillm.engine import Engine, Output
from minillm.errors import InputError
from minillm.kernels import BACKENDS, why_not
from minillm.model import Llama
from minillm.params import SamplingParams
from minillm.request import Event, Request, make_request
from minillm.sharing import SharedSlots
from minillm.slots import BlockSlots
from minillm.tokenizer import Tokenizer

INF = float("inf")
# those that can run it here; asking imports them, which takes seconds
TINY_BACKENDS = [name for name in BACKENDS if why_not(name, Llama.random(TINY, dtype=torch.float64)) is None]


for_all_kinds = pytest.mark.parametrize("slots", KINDS.values(), ids=KINDS)


def an_engine(model: Any, tokenizer: Any = None, **limits: Any) -> CheckedEngine:
    return CheckedEngine(model, tokenizer, **{"max_running": 4, "budget": 8, "max_len": 64, **limits})


def ends(outputs: Sequence[Output]) -> list[Text]:
    return [(output.token_ids, output.finish_reason) for output in outputs]


# ---- the same tokens as the oracle


@settings(max_examples=25)
@given(
    texts_=st.lists(TEXTS, min_size=1, max_size=6),
    max_running=st.integers(1, 5),
    more=st.integers(0, 12),
    max_len=st.integers(12, 24),
    split=st.sampled_from([0, 6, 3000]),  # how readily single tokens are cut into rectangles
)
@pytest.mark.parametrize("backend", TINY_BACKENDS)
@for_all_kinds
def test_every_request_makes_the_tokens_it_makes_alone(
    tiny: Llama, slots: Kind, backend: str, texts_: list[Any], max_running: int, more: int, max_len: int, split: int
) -> None:
    """vllm#51226, vllm#2514, hf#46765, sgl#36207: answers depended on company, chunks or what lay in free memory."""
    prompts, params = zip(*texts_, strict=True)
    model = Watched(tiny, pools=slots is not KINDS["shared"])
    limits: dict[str, Any] = dict(max_running=max_running, budget=max_running + more, max_len=max_len, slots=slots)
    engine = an_engine(model, backend=backend, **limits)
    requests = [engine.add(prompt, p) for prompt, p in texts_]
    with patch("minillm.batch.SPLIT", split):
        events = run_out(engine)
    expected = [solo(tiny, prompt, p, max_len) for prompt, p in texts_]
    assert texts(events, requests) == expected

    again = [make_request(prompt, p, tiny.config, None, max_len) for prompt, p in texts_]
    alike(tiny, again, requests, events, model.rows)

    # the same engine once more, by the other door (hf#45943: a second call found nothing)
    assert ends(engine.generate(prompts, params)) == expected
    assert_drained(engine)


@settings(max_examples=25)
@given(st.data())
@for_all_kinds
def test_events_survive_any_mix_of_additions_aborts_and_calls(tiny: Llama, slots: Kind, data: st.DataObject) -> None:
    """Each request's events come out once, in order, wherever they were made; an aborted one keeps a prefix."""
    engine = an_engine(tiny, max_running=3, budget=5, max_len=24, slots=slots)
    added: list[tuple[Request, Any]] = []
    events: list[Event] = []
    for _ in range(data.draw(st.integers(1, 12))):
        action = data.draw(st.sampled_from(["add", "add", "step", "step", "abort", "generate"]))
        if action == "add":
            text = data.draw(TEXTS)
            added.append((engine.add(*text), text))
        elif action == "step":
            events += engine.step()
        elif action == "generate":
            text = data.draw(TEXTS)
            assert ends(engine.generate([text[0]], text[1])) == [solo(tiny, *text, max_len=24)]
        elif added:
            request, _ = data.draw(st.sampled_from(added))
            event = engine.abort(request.id)
            events += [event] if event else []
            assert engine.abort(request.id) is None
    events += run_out(engine)
    for request, text in added:
        mine = [event for event in events if event.request is request]
        assert [event.finish_reason for event in mine] == [None] * (len(mine) - 1) + [request.finish_reason]
        tokens, reason = solo(tiny, *text, max_len=24)
        if request.finish_reason == "abort":
            assert request.output == tokens[: request.n_output]
            got = [event.token for event in mine[:-1]]
            assert got == tokens[: len(got)]
        else:
            assert ([event.token for event in mine], request.finish_reason) == (tokens, reason)


@pytest.mark.parametrize("budget", [4, 5, 64])
def test_a_seeded_text_is_the_same_alone_in_company_and_in_any_order(tiny: Llama, budget: int) -> None:
    """vllm#51226: the output changed when a neighbour had no seed, and with the order of the batch."""
    prompt, params = [5, 9, 33, 2, 60, 7], SamplingParams(temperature=1.5, seed=42, max_tokens=12)
    other = SamplingParams(temperature=1.5, max_tokens=12)
    alone = solo(tiny, prompt, params)
    neighbours = [[7, 8], [9] * 11, [5, 9, 33, 2, 60, 7]]
    for at in range(4):
        prompts = [*neighbours[:at], prompt, *neighbours[at:]]
        outputs = an_engine(tiny, budget=budget).generate(prompts, [params if i == at else other for i in range(4)])
        assert ends(outputs)[at] == alone
    assert ends(an_engine(tiny, budget=budget).generate([prompt] * 3, params)) == [alone] * 3


def test_texts_without_a_seed_differ(tiny: Llama) -> None:
    outputs = an_engine(tiny).generate([[5, 9]] * 4, SamplingParams(temperature=2.0, max_tokens=12, ignore_eos=True))
    assert len({tuple(output.token_ids) for output in outputs}) == 4


# ---- limits


@pytest.mark.parametrize("backend", TINY_BACKENDS)
@pytest.mark.parametrize("prompt", [15, 16, 17])
@pytest.mark.parametrize("max_tokens", [1, 2, 10**9])
@for_all_kinds
def test_prompts_around_the_limit(tiny: Llama, slots: Kind, backend: str, prompt: int, max_tokens: int) -> None:
    """vllm#16445, vllm#35541, lcpp#3969: refused, stalled, frozen, or endless at the edge of the context.

    Documented: a prompt of exactly max_len is taken and gets one token; the text ends with "length", once.
    """
    engine = an_engine(tiny, max_len=16, backend=backend, slots=slots)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    behind = engine.add([4], SamplingParams(max_tokens=2, ignore_eos=True))
    if prompt > 16:
        with pytest.raises(InputError, match="the prompt has 17 tokens, but there is room for 16"):
            engine.add([3] * prompt, params)
    else:
        request = engine.add([3] * prompt, params)
    events = run_out(engine)
    assert behind.finish_reason == "length" and behind.n_output == 2
    if prompt <= 16:
        mine = [event for event in events if event.request is request]
        assert len(mine) == min(max_tokens, 17 - prompt)
        assert [e.finish_reason for e in mine] == [None] * (len(mine) - 1) + ["length"]
        assert (request.output, "length") == solo(tiny, [3] * prompt, params, max_len=16)


@pytest.mark.parametrize("max_len", [0, -1, 257])
def test_a_max_len_outside_the_context_is_refused(tiny: Llama, max_len: int) -> None:
    with pytest.raises(InputError, match=f"max_len is {max_len}; it must be from 1 to the model's context, 256"):
        Engine(tiny, max_len=max_len)


@pytest.mark.parametrize(
    "limits",
    [
        dict(max_running=0),
        dict(max_running=9, budget=8),
        dict(budget=0),
        dict(backend="fast"),
        dict(policy="fair"),
        dict(slots=partial(BlockSlots, n_slots=10, size=4)),
        dict(slots=partial(SharedSlots, n_slots=3, size=4)),
        dict(slots=partial(BlockSlots, size=0)),
    ],
    ids=str,
)
def test_limits_that_make_no_sense_are_refused(tiny: Llama, limits: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Engine(tiny, **limits)


@for_all_kinds
def test_a_text_at_its_limit_leaves_its_neighbours_table_alone(tiny: Llama, slots: Kind) -> None:
    """vllm#10730: the row of the block table overflowed into the next. Eight is no multiple of the block's size."""
    engine = an_engine(tiny, max_running=3, max_len=8, slots=slots)
    engine.pool.table.fill_(-7)
    request = engine.add([3] * 5, SamplingParams(max_tokens=9, ignore_eos=True))
    run_out(engine)
    assert request.n_output == 4
    used = (engine.pool.table != -7).sum(-1).tolist()
    assert sorted(used) == [0, 0, 8]


@for_all_kinds
def test_one_row_used_by_one_text_after_another(tiny: Llama, slots: Kind) -> None:
    """llmmanorg/llmman#118: the second request on a reused place was wrong."""
    engine = an_engine(tiny, max_running=1, budget=3, max_len=16, slots=slots)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    prompts = [[5, 6, 7, 8, 9, 10, 11], [12], [13, 14, 15]]
    assert ends(engine.generate(prompts, params)) == [solo(tiny, prompt, params) for prompt in prompts]


@for_all_kinds
def test_what_is_stored_is_what_the_model_computed(tiny: Llama, slots: Kind) -> None:
    """TrenTorch/TrenTorch#192: the first token's K and V were never written. Every place, against one whole pass."""
    keys: dict[int, torch.Tensor] = {}

    class Keep:
        def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keys[layer] = torch.stack((k, v))  # [2, T, Hkv, D]
            return inner(layer, q, k, v)

    from minillm.attention import SelfAttend

    engine = an_engine(tiny, max_running=2, budget=2, slots=slots)
    request = engine.add([9], SamplingParams(max_tokens=20, ignore_eos=True))
    engine.add([3] * 30, SamplingParams(max_tokens=9))
    for n in range(1, 20):
        engine.step()
        assert request.computed == n
        positions = torch.arange(n)
        inner = SelfAttend(positions)
        tiny(torch.tensor(request.tokens[:n]), positions, Keep())
        places = torch.tensor(request.slots[:n])
        for layer, kv in keys.items():
            stored = torch.stack(engine.pool.gather(layer, engine.pool.index(places)))  # [2, n, Hkv, D]
            torch.testing.assert_close(stored, kv, rtol=0, atol=1e-11)


def test_memory_is_what_the_limits_say(tiny: Llama) -> None:
    engine = an_engine(tiny, max_running=3, max_len=10)
    assert engine.pool.nbytes == (3 * 10 + 1) * tiny.config.kv_bytes_per_token(8)  # and one scratch slot


# ---- one bad request


@pytest.mark.parametrize("backend", TINY_BACKENDS)
@pytest.mark.parametrize("value", [NAN, -INF])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("at", [0, 1, 2])
@for_all_kinds
def test_logits_that_are_no_numbers_end_one_request_alone(
    slots: Kind, backend: str, value: float, temperature: float, at: int
) -> None:
    """vllm#5963, robertknight/rten#1089, Avarok-Cybersecurity/atlas#375: one bad request, and everyone's failed."""
    model = follow(chain(10, 11, 12) | chain(20, 21, 22, 23, 24) | chain(30, 31, 32, 33, 34))
    model.table[12] = value
    params = SamplingParams(max_tokens=4, temperature=temperature, seed=3)
    prompts = [[20], [30]]
    prompts.insert(at, [10])
    engine = an_engine(model, backend=backend, slots=slots)
    outputs = engine.generate(prompts, params)
    assert outputs[at].finish_reason == "error"
    assert temperature or outputs[at].token_ids == [11, 12]
    for i, prompt in enumerate(prompts):
        assert ends(outputs)[i] == solo(model, prompt, params)
    assert ends(engine.generate([[20]], params)) == [solo(model, [20], params)]
    assert_drained(engine)


def test_a_failed_step_loses_nothing() -> None:
    """vllm#7632: after an error inside the loop every later request failed. Here the step is simply made again."""
    model = follow(chain(10, 11, 12, 13, 14) | chain(20, 21, 22, 23, 24))
    engine = an_engine(model, budget=4)
    requests = [
        engine.add([20] * 6, SamplingParams(max_tokens=4)),
        engine.add([10], SamplingParams(max_tokens=4)),
    ]
    events: list[Event] = []
    failures = 0

    def fail_sometimes() -> None:
        nonlocal failures
        if len(model.steps) % 2 == failures % 2:
            failures += 1
            raise MemoryError

    model.before = fail_sometimes
    while engine.busy:
        try:
            events += engine.step()
        except MemoryError:
            pass
    assert failures > 2
    assert texts(events, requests) == [([21, 22, 23, 24], "length"), ([11, 12, 13, 14], "length")]
    assert_drained(engine)


def test_a_failed_step_keeps_what_others_have_not_seen_yet() -> None:
    model = follow(chain(10, 11, 12, 13, 14) | chain(20, 21, 22, 23, 24))
    engine = an_engine(model)
    request = engine.add([10], SamplingParams(max_tokens=4))
    engine.generate([[20]], SamplingParams(max_tokens=2))

    def fail() -> None:
        raise MemoryError

    model.before = fail
    with pytest.raises(MemoryError):
        engine.step()
    model.before = lambda: None
    assert texts(run_out(engine), [request]) == [([11, 12, 13, 14], "length")]


def test_bad_input_is_refused_at_the_door_and_nothing_is_queued(tiny: Llama) -> None:
    """vllm#5963, vllm#16529, vllm#7283: one bad request, and every later one failed."""
    engine = an_engine(tiny)
    good = SamplingParams(max_tokens=3)
    for prompts, params in (
        ([[5], []], good),
        ([[5], [64]], good),
        ([[5], [-1]], good),
        ([[5], [2**63]], good),
        ([[5], [3] * 65], good),
        ([[5], "text"], good),
        ([5, 6], good),
        ("text", good),
        ([[5], [6]], [good]),
        ([[5], [6]], [good, good, good]),
        ([[5], [6]], [good, SamplingParams(stop="x")]),
        ([[5], [6]], [good, SamplingParams(logit_bias={64: 1.0})]),
        ([[5], [6]], [good, SamplingParams(stop_token_ids=[-1])]),
    ):
        with pytest.raises(InputError):
            engine.generate(prompts, params)  # type: ignore[arg-type]
        with pytest.raises(InputError):
            engine.stream(prompts, params)  # type: ignore[arg-type]
        assert_drained(engine)
    with pytest.raises(InputError):
        engine.add([])
    assert_drained(engine)
    assert ends(engine.generate([[5]], good)) == [solo(tiny, [5], good)]


def test_an_extreme_bias_of_one_is_not_felt_by_another(tiny: Llama) -> None:
    """vllm#54195: a bias was written into a neighbour's row."""
    good = SamplingParams(max_tokens=6)
    params = [good, SamplingParams(max_tokens=6, logit_bias={0: 1e30, 63: -1e30}), good]
    prompts = [[5], [6, 7], [8]]
    outputs = an_engine(tiny).generate(prompts, params)
    assert outputs[1].token_ids == [0] * 6
    assert ends(outputs)[::2] == [solo(tiny, prompt, good) for prompt in prompts[::2]]


# ---- where texts end, through the engine


@for_all_kinds
def test_eos_first_in_the_middle_and_on_the_last_allowed_token(slots: Kind) -> None:
    """sgl#12151, lvyufeng/PocketLLM#133: the stop was looked for only while decoding."""
    model = follow(chain(10, EOS) | chain(20, 21, EOS) | chain(30, 31, 32, EOS))
    codec = Codec([chr(ord("0") + i) for i in range(64)])
    outputs = an_engine(model, codec, slots=slots).generate([[10], [20], [30], [31]], SamplingParams(max_tokens=3))
    assert ends(outputs) == [
        ([EOS], "stop"),
        ([21, EOS], "stop"),
        ([31, 32, EOS], "stop"),
        ([32, EOS], "stop"),
    ]
    assert [output.text for output in outputs] == ["", "E", "OP", "P"]
    outputs = an_engine(model, codec, slots=slots).generate([[30], [10]], SamplingParams(max_tokens=1))
    assert ends(outputs) == [([31], "length"), ([EOS], "stop")]


@pytest.mark.parametrize("eos", [(5,), (5, 7), ()])
@pytest.mark.parametrize("ignore", [False, True])
def test_every_eos_of_a_list_ends_a_text(eos: tuple[int, ...], ignore: bool) -> None:
    """vllm#4180, turboderp-org/exllamav2#803, vllm#4589: only the first of a list counted; or ignore_eos did not."""
    model = follow(chain(10, 5, 11, 7, 12), eos=eos)
    [output] = an_engine(model).generate([[10]], SamplingParams(max_tokens=4, ignore_eos=ignore))
    expected = [5, 11, 7, 12] if ignore or not eos else [5]
    assert ends([output]) == [(expected, "length" if len(expected) == 4 else "stop")]
    [output] = an_engine(model).generate([[11]], SamplingParams(max_tokens=2, ignore_eos=ignore))
    assert ends([output]) == [([7], "stop") if 7 in eos and not ignore else ([7, 12], "length")]


@pytest.mark.parametrize("min_tokens", [0, 1, 4])
@pytest.mark.parametrize("eos", [(5,), (5, 63)])
def test_min_tokens_is_exact_for_every_stop(min_tokens: int, eos: tuple[int, ...]) -> None:
    """vllm#46243, vllm#5849, vllm#21987: off by one, the second EOS forgotten, the last id banned with index -1."""
    flat = Script(torch.zeros(64, 64, dtype=torch.float64), eos=eos)
    for token in eos:
        params = SamplingParams(max_tokens=9, min_tokens=min_tokens, logit_bias={token: 100.0})
        [output] = an_engine(flat).generate([[10, token, 12]], params)
        assert len(output.token_ids) == min_tokens + 1 and output.finish_reason == "stop"
        assert not set(output.token_ids[:-1]) & set(eos) and output.token_ids[-1] == token
    params = SamplingParams(max_tokens=9, min_tokens=min_tokens, stop_token_ids=[7], logit_bias={7: 100.0})
    [output] = an_engine(flat).generate([[10]], params)
    assert len(output.token_ids) == min_tokens + 1 and output.token_ids[-1] == 7
    if 63 not in eos:
        params = SamplingParams(max_tokens=5, min_tokens=min_tokens, logit_bias={63: 50.0})
        assert an_engine(flat).generate([[10]], params)[0].token_ids == [63] * 5
    lines = Codec(["\n"] * 64)
    [output] = an_engine(flat, lines).generate([[10]], SamplingParams(max_tokens=9, min_tokens=min_tokens, stop="\n"))
    assert len(output.token_ids) == min_tokens + 1
    assert (output.text, output.finish_reason) == ("\n" * min_tokens, "stop")


def test_stop_strings_through_the_engine_beside_others() -> None:
    """vllm#3574: DEF, G, HI leaked before the stop DEFGHIJ was complete."""
    pieces = ["?"] * 64
    pieces[10:15] = ["a", "DEF", "G", "HI", "Jx"]
    pieces[20:24] = ["b", "DEF", "GX", "y"]
    model = follow(chain(10, 11, 12, 13, 14) | chain(20, 21, 22, 23, 24))
    engine = an_engine(model, Codec(pieces))
    params = SamplingParams(max_tokens=4, stop="DEFGHIJ")
    shown: dict[int, list[str]] = {10: [], 20: [], 11: []}
    for event in engine.stream([[10], [20], [11]], params):
        shown[event.request.prompt[0]].append(event.text)
    assert shown == {10: ["", "", "", ""], 20: ["", "DEFGX", "y", "?"], 11: ["G", "HI", "Jx", "Jx"]}
    assert [output.text for output in engine.generate([[10], [20], [11]], params)] == [
        "",
        "DEFGXy?",
        "GHIJxJx",
    ]


def test_an_id_that_the_tokenizer_does_not_know_reads_as_a_replacement() -> None:
    """vllm#13175: the head is padded past the vocabulary, and the model's own output raised."""
    vocab = {chr(ord("!") + i): i for i in range(60)}
    data = {"model": {"type": "BPE", "vocab": vocab, "merges": []}, "added_tokens": []}
    data["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    model = follow(chain(10, 63, 11, 12))
    [output] = an_engine(model, Tokenizer(data, {})).generate(["+"], SamplingParams(max_tokens=3, logprobs=2))
    assert output.prompt_ids == [10] and output.token_ids == [63, 11, 12] and output.text == "\ufffd,-"


def test_empty_text_is_refused_and_the_next_request_served() -> None:
    """vllm#7283, vllm#7632: an empty prompt killed the engine for everyone."""
    model = follow(chain(2, 3, 4, 5))
    for bos in ((), [2]):  # a BOS can be asked for by its id
        engine = an_engine(model, Codec(["x"] * 64, bos=bos))
        with pytest.raises(InputError, match="the prompt is empty"):
            engine.generate([""])
        assert ends(engine.generate([[2]], SamplingParams(max_tokens=2))) == [([3, 4], "length")]


# ---- the API


COUNT = {t: t + 1 for t in range(10, 62)}


def test_generate_answers_in_the_order_of_the_prompts_with_their_own_parameters() -> None:
    engine = an_engine(follow(COUNT), max_running=2, budget=3)
    prompts = [[10] * 9, [20], [30, 31], [40] * 5]
    params = [SamplingParams(max_tokens=n, logprobs=k) for n, k in ((1, None), (5, 0), (2, 2), (3, None))]
    outputs = engine.generate(prompts, params)
    assert [output.prompt_ids for output in outputs] == prompts
    assert [output.token_ids for output in outputs] == [[11], [21, 22, 23, 24, 25], [32, 33], [41, 42, 43]]
    assert [[len(logp) for logp in output.logprobs] for output in outputs] == [[], [1] * 5, [2, 2], []]
    assert [output.text for output in outputs] == [""] * 4  # no tokenizer, no text
    assert_drained(engine)


def test_generate_of_nothing_and_with_the_defaults() -> None:
    engine = an_engine(follow(COUNT), max_len=20)
    assert engine.generate([]) == [] and list(engine.stream([])) == [] and engine.step() == []
    [output] = engine.generate([[10]])
    assert len(output.token_ids) == 20 and output.finish_reason == "length"


def test_the_same_prompt_may_be_added_twice_but_one_request_only_once() -> None:
    """vllm#10583, vllm#15041: one id twice broke the engine. Ids are ours, so equal prompts are different requests."""
    model = follow(COUNT)
    engine = an_engine(model)
    first, second = (engine.add([10], SamplingParams(max_tokens=3)) for _ in range(2))
    with pytest.raises(InputError, match="was submitted before"):
        engine.submit(first)
    assert texts(run_out(engine), [first, second]) == [([11, 12, 13], "length")] * 2
    with pytest.raises(InputError, match="was submitted before"):
        engine.submit(first)
    assert_drained(engine)


def test_a_request_made_for_more_room_than_there_is_is_refused() -> None:
    model = follow(COUNT)
    engine = an_engine(model, max_len=8)
    with pytest.raises(InputError, match="may need 12 KV slots, but there are 8 for each"):
        engine.submit(make_request([10] * 3, SamplingParams(max_tokens=10), model.config, None, 64))
    assert_drained(engine)


@pytest.mark.parametrize("leave_after", [0, 1, 3])
def test_a_stream_left_early_ends_all_it_began_and_nothing_else(leave_after: int) -> None:
    """vllm#10806: the client was gone and the tokens went on."""
    engine = an_engine(follow(COUNT), max_running=2)
    other = engine.add([30], SamplingParams(max_tokens=6))
    stream = engine.stream([[10], [20], [40]], SamplingParams(max_tokens=9))
    seen = [next(stream) for _ in range(leave_after)]
    stream.close()
    assert {event.request.prompt[0] for event in seen} <= {10, 20, 40}
    assert engine.scheduler.running + list(engine.scheduler.waiting) == [other]
    assert texts(run_out(engine), [other]) == [([31, 32, 33, 34, 35, 36], "length")]


def test_a_stream_that_nobody_reads_holds_nothing() -> None:
    engine = an_engine(follow(COUNT))
    stream = engine.stream([[10]])
    assert not engine.busy
    del stream
    assert_drained(engine)


def test_an_error_in_the_readers_loop_frees_the_engine() -> None:
    engine = an_engine(follow(COUNT))
    with pytest.raises(KeyError):
        for _ in engine.stream([[10], [20]]):
            raise KeyError
    assert_drained(engine)


def test_two_streams_read_in_turn_each_get_their_own_events() -> None:
    """Whoever steps makes everyone's tokens; they wait until their reader comes."""
    engine = an_engine(follow(COUNT))
    params = SamplingParams(max_tokens=4)
    first, second = engine.stream([[10], [20]], params), engine.stream([[30]], params)
    a, b = next(first), next(second)
    rest_a = list(first)
    rest_b = list(second)
    assert [e.token for e in [a, *rest_a] if e.request.prompt == [10]] == [11, 12, 13, 14]
    assert [e.token for e in [a, *rest_a] if e.request.prompt == [20]] == [21, 22, 23, 24]
    assert [e.token for e in [b, *rest_b]] == [31, 32, 33, 34]
    assert_drained(engine)


def test_generate_inside_the_loop_of_a_stream() -> None:
    engine = an_engine(follow(COUNT))
    tokens = []
    for event in engine.stream([[10]], SamplingParams(max_tokens=5)):
        tokens.append(event.token)
        assert engine.generate([[20]], SamplingParams(max_tokens=3))[0].token_ids == [21, 22, 23]
    assert tokens == [11, 12, 13, 14, 15]
    assert_drained(engine)


def test_a_loop_over_steps_sees_what_a_call_of_generate_made() -> None:
    engine = an_engine(follow(COUNT))
    request = engine.add([10], SamplingParams(max_tokens=2))
    engine.generate([[20]], SamplingParams(max_tokens=5))
    assert request.finish_reason == "length" and engine.busy  # its events have not been read yet
    assert texts(run_out(engine), [request]) == [([11, 12], "length")]


def test_no_token_comes_after_an_abort() -> None:
    """vllm#26400: one token was visible after the abort; here those that nobody had read yet."""
    engine = an_engine(follow(COUNT))
    request, other = (engine.add([t], SamplingParams(max_tokens=9)) for t in (10, 30))
    engine.generate([[20]], SamplingParams(max_tokens=3))
    event = engine.abort(request.id)
    assert event is not None and (event.token, event.finish_reason) == (None, "abort")
    assert {event.request for event in run_out(engine)} == {other}
    stream = engine.stream([[10], [20]], SamplingParams(max_tokens=4))
    first = next(stream)
    aborted = first.request
    assert engine.abort(aborted.id) is not None
    assert all(event.request is not aborted for event in stream)
    assert engine.abort(aborted.id) is None and engine.abort(10**9) is None
    assert_drained(engine)


@for_all_kinds
def test_abort_while_the_model_runs(slots: Kind) -> None:
    """vllm#26400: the abort comes from elsewhere while the forward pass runs."""
    model = follow(COUNT)
    engine = an_engine(model, slots=slots)
    first, second = (engine.add([t], SamplingParams(max_tokens=4)) for t in (10, 20))
    events = engine.step()

    def abort_once() -> None:
        model.before = lambda: None
        event = engine.abort(first.id)
        assert event is not None
        events.append(event)

    model.before = abort_once
    events += run_out(engine)
    assert [e.token for e in events if e.request is first] == [11, None] and first.output == [11]
    assert [e.token for e in events if e.request is second] == [21, 22, 23, 24]


@for_all_kinds
def test_no_step_is_idle_and_none_is_over_budget(slots: Kind) -> None:
    """A finished text's row is taken in the very next step, and every token goes through the model once."""
    model = follow(COUNT)
    engine = an_engine(model, max_running=2, budget=4, slots=slots)
    prompts, n = [[10] * 3, [20] * 7, [30], [40] * 5], 3
    engine.generate(prompts, SamplingParams(max_tokens=n))
    assert max(model.steps) <= 4 and min(model.steps) >= 1
    assert sum(model.steps) == sum(len(prompt) + n - 1 for prompt in prompts)


def test_the_engine_leaves_the_model_and_its_inputs_alone(tiny: Llama) -> None:
    config, prompts = replace(tiny.config), [[5, 6], [7]]
    params = SamplingParams(max_tokens=3, stop_token_ids=[7], logit_bias={4: 1.0})
    before = {name: p.clone() for name, p in tiny.named_parameters()}
    an_engine(tiny).generate(prompts, params)
    assert tiny.config == config and prompts == [[5, 6], [7]]
    assert params == SamplingParams(max_tokens=3, stop_token_ids=[7], logit_bias={4: 1.0})
    assert all(torch.equal(p, before[name]) for name, p in tiny.named_parameters())


def test_more_kv_memory_than_the_machine_has_is_refused_with_both_numbers(
    tiny: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minillm.cache.memory_bytes", lambda device: 5_000_000)
    with pytest.raises(InputError, match="32768 positions take 0.0168 GB, and cpu has 0.005 GB"):
        Engine(tiny, max_running=256, max_len=128)
    Engine(tiny, max_running=2, max_len=128)


def test_a_text_aborted_while_events_are_read_gives_no_token_after_that(tiny: Llama) -> None:
    """vllm#18485: the events of one step are handed out one by one, and the reader may act in between."""
    engine = an_engine(tiny)
    seen: list[int] = []
    for event in engine.stream([[5], [6, 7]], SamplingParams(max_tokens=4, ignore_eos=True)):
        seen.append(event.request.prompt[0])
        if len(seen) == 1:
            [other] = set(engine._requests.values()) - {event.request}
            assert engine.abort(other.id) is not None
    assert seen == [5] * 4
    assert_drained(engine)
