"""Every stage makes the tokens of the naive one, from logits equal to 1e-11, whatever lies in unused memory; and
each stage is a small change from the one before."""

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from script import EOS, NAN, PoisonedEngine, Script, Text, Watched, chain, follow, solo, texts
from torch import Tensor

from minillm.errors import InputError
from minillm.model import Llama
from minillm.params import SamplingParams
from minillm.request import Event, Request, make_request
from minillm.stages import STAGES, cached, chunked, continuous, dynamic, kernels, naive, padded, paged, ragged, shared

MODULES = dict(
    zip(STAGES, (naive, cached, chunked, padded, dynamic, ragged, continuous, paged, shared, kernels), strict=True)
)
LOOPS = ("continuous", "paged", "shared", "kernels")  # on the engine
LATER = [name for name in STAGES if name != "naive"]

IDS = st.integers(0, 63)


@st.composite
def params(draw: st.DrawFn) -> SamplingParams:
    """All that changes tokens, often enough to matter: about every second text stops before its limit."""
    max_tokens = draw(st.sampled_from([4, 8, 2, 1]))
    p: dict[str, Any] = dict(max_tokens=max_tokens, seed=draw(st.integers(0, 2**64 - 1)))
    p["stop_token_ids"] = draw(st.lists(IDS, max_size=20))
    p["ignore_eos"] = draw(st.booleans())
    if draw(st.booleans()):
        p |= dict(temperature=draw(st.sampled_from([0.7, 2.0])), top_k=draw(st.sampled_from([0, 5])))
        p |= dict(top_p=draw(st.sampled_from([1.0, 0.8])), min_p=draw(st.sampled_from([0.0, 0.05])))
    if draw(st.booleans()):
        p |= dict(repetition_penalty=draw(st.sampled_from([1.0, 1.4])), presence_penalty=0.5, frequency_penalty=0.3)
        p |= dict(logit_bias=draw(st.dictionaries(IDS, st.sampled_from([-5.0, 2.0]), max_size=3)))
        p |= dict(min_tokens=draw(st.integers(0, max_tokens)), logprobs=draw(st.sampled_from([0, 3])))
    return SamplingParams(**p)


TEXTS = st.tuples(st.lists(IDS, min_size=1, max_size=12), params())  # (prompt, parameters)


def limits_of(name: str, max_running: int, chunk: int) -> dict[str, int]:
    """Those that the stage knows."""
    if name == "chunked":
        return {"chunk": chunk}
    if name == "continuous":
        return {"max_running": max_running, "budget": max(max_running, chunk)}
    if name in LOOPS:  # memory for one text of 24, and blocks that do not divide it
        return {"max_running": max_running, "budget": max(max_running, chunk), "block": 3, "n_slots": 24}
    return {} if name in ("naive", "cached") else {"max_running": max_running}


def run(name: str, model: Any, requests: Sequence[Request], **limits: int) -> Iterator[Event]:
    """The stage; the last one with NaN in all free memory (the others are spoiled by `Watched`)."""
    with ExitStack() as undo:
        for loop in LOOPS:
            undo.enter_context(patch.object(MODULES[loop], "Engine", PoisonedEngine))
        yield from STAGES[name](model, requests, **limits)


def alike(
    tiny: Llama,
    fresh: Sequence[Request],
    requests: Sequence[Request],
    events: Sequence[Event],
    rows: Sequence[Tensor],
) -> None:
    """The logits behind each event, and the log-probabilities in it, equal the naive stage's to 1e-11.

    `fresh` are the same requests, not yet begun; `rows` holds the logits [V] of each event, in order.
    """
    oracle = Watched(tiny)
    expected: dict[int, Any] = {}
    for i, event in enumerate(naive.generate(oracle, fresh)):
        expected.setdefault(fresh.index(event.request), []).append((oracle.rows[i], event.logprobs))
    assert len(rows) == len(events)
    made = [0] * len(requests)
    for event, row in zip(events, rows, strict=True):
        which = requests.index(event.request)
        right, logprobs = expected[which][made[which]]
        made[which] += 1
        torch.testing.assert_close(row, right, rtol=0, atol=1e-11)
        assert (event.logprobs is None) == (logprobs is None)
        if logprobs is not None:
            assert list(event.logprobs or {}) == list(logprobs)
            assert list((event.logprobs or {}).values()) == pytest.approx(list(logprobs.values()), abs=1e-11)


@settings(max_examples=25)
@given(texts_=st.lists(TEXTS, min_size=1, max_size=6), max_running=st.integers(1, 4), chunk=st.integers(1, 9))
@pytest.mark.parametrize("name", LATER)
def test_every_stage_makes_the_tokens_of_the_naive_one(
    tiny: Llama, name: str, texts_: list[Any], max_running: int, chunk: int
) -> None:
    """pytorch#108108, hf#33095, hf#46765, waybarrios/vllm-mlx#380: chunks, pads, neighbours and stale memory leaked."""

    def make() -> list[Request]:
        return [make_request(prompt, p, tiny.config, None, 24) for prompt, p in texts_]

    model, requests = Watched(tiny, pools=name not in ("shared", "kernels")), make()
    events = list(run(name, model, requests, **limits_of(name, max_running, chunk)))
    assert texts(events, requests) == [solo(tiny, prompt, p, 24) for prompt, p in texts_]
    alike(tiny, make(), requests, events, model.rows)


@pytest.mark.parametrize("name", LATER)
def test_a_prompt_of_one_token_at_every_step(tiny: Llama, name: str) -> None:
    """TrenTorch/TrenTorch#192: the first token's K and V were never written, and every later step was subtly worse."""
    p = SamplingParams(max_tokens=20, ignore_eos=True)

    def make() -> list[Request]:
        return [make_request([t], p, tiny.config, None, 24) for t in (9, 40)]

    model, requests = Watched(tiny, pools=name not in ("shared", "kernels")), make()
    events = list(run(name, model, requests, **limits_of(name, 2, 3)))
    assert len(events) == 40
    alike(tiny, make(), requests, events, model.rows)


@pytest.mark.parametrize("name", STAGES)
def test_stages_end_texts_alike(name: str) -> None:
    """Stop first, later, at the limit, never, and logits that are no numbers: without any trained weights."""
    model = follow(chain(10, EOS) | chain(20, 21, EOS) | chain(30, 31, 32, 33, 34) | chain(40, 41))
    model.table[41] = NAN
    prompts = [[10], [20, 20, 20], [30], [40, 40], [5]]
    requests = [make_request(prompt, SamplingParams(max_tokens=3), model.config, None, 16) for prompt in prompts]
    expected: list[Text] = [
        ([EOS], "stop"),
        ([21, EOS], "stop"),
        ([31, 32, 33], "length"),
        ([41], "error"),
        ([5, 5, 5], "length"),
    ]
    assert texts(run(name, model, requests, **limits_of(name, 3, 2)), requests) == expected


def test_samples_of_one_prompt_are_computed_once_by_the_stage_that_shares() -> None:
    """The next prompt, and the same one with another seed, are not among them."""
    model = follow({}, context=64)
    params = [SamplingParams(max_tokens=2, temperature=1.0, seed=seed) for seed in (7, 7, 7, 8, 7)]
    prompts = [[5] * 10] * 4 + [[6] * 10]
    requests = [
        make_request(prompt, p, model.config, None, 16, sample_index=i)
        for i, (prompt, p) in enumerate(zip(prompts, params, strict=True))
    ]
    list(run("shared", model, requests, max_running=8, budget=64))
    assert model.steps == [3 * 10, 5]  # three prompts are computed, then five texts go on


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_of_nothing_yields_nothing(name: str) -> None:
    assert list(run(name, follow({}), [])) == []


@pytest.mark.parametrize("name", STAGES)
def test_a_request_that_arrives_later_waits_for_its_time_and_comes_out_right(tiny: Llama, name: str) -> None:
    p = SamplingParams(max_tokens=3, temperature=1.0, seed=5)
    late, early = requests = [
        make_request(prompt, p, tiny.config, None, 24, arrival=at) for prompt, at in (([7, 8], 0.05), ([9], 0.0))
    ]
    start = time.monotonic()
    events = []
    for event in run(name, tiny, requests):
        events.append(event)
        if event.request is late:
            assert time.monotonic() - start >= 0.05
    assert events[0].request is early
    assert texts(events, requests) == [solo(tiny, r.prompt, p) for r in requests]


@pytest.mark.parametrize("name", ["dynamic", "ragged", *LOOPS])
def test_a_freed_place_is_taken_in_the_next_step(name: str) -> None:
    """Padded waits for the longest of each batch; these do not."""
    model = follow({t: t + 1 for t in range(10, 60)})
    lengths = [8, 2, 2, 2, 2]
    requests = [make_request([10], SamplingParams(max_tokens=n), model.config, None, 16) for n in lengths]
    list(run(name, model, requests, max_running=2))
    assert len(model.steps) == 8  # as many as the longest takes: the four short ones pass beside it, one by one
    waits: Script = follow({t: t + 1 for t in range(10, 60)})
    requests = [make_request([10], SamplingParams(max_tokens=n), waits.config, None, 16) for n in lengths]
    list(run("padded", waits, requests, max_running=2))
    assert len(waits.steps) == 8 + 2 + 2


def test_how_many_tokens_each_stage_puts_through_the_model() -> None:
    """The ladder in numbers: two texts, prompts of 6 and 2, 4 and 2 new tokens."""

    def tokens(name: str, **limits: int) -> list[int]:
        model = follow({t: t + 1 for t in range(10, 60)})
        requests = [
            make_request([10] * n, SamplingParams(max_tokens=new), model.config, None, 16)
            for n, new in ((6, 4), (2, 2))
        ]
        list(run(name, model, requests, **limits))
        return model.steps

    assert tokens("naive") == [6, 7, 8, 9, 2, 3]  # the whole text again for each token
    assert tokens("cached") == [6, 1, 1, 1, 2, 1]
    assert tokens("chunked", chunk=4) == [4, 2, 1, 1, 1, 2, 1]
    assert tokens("padded", max_running=2) == [12, 2, 2, 2]  # a rectangle of 2: pads, and a row that is over
    assert tokens("dynamic", max_running=2) == [12, 2, 2, 2]
    assert tokens("ragged", max_running=2) == [8, 2, 1, 1]  # no pads
    assert tokens("continuous", max_running=2, budget=4) == [4, 4, 2, 1, 1]  # and no step above the budget


def test_dynamic_pads_everyone_to_a_newcomers_prompt() -> None:
    """(n - 1)(B - 1) pads when a prompt of n tokens joins B - 1 decoding rows: n = 100, B = 8 gives 693."""
    model = follow({t: t + 1 for t in range(10, 60)})
    lengths = [2] + [6] * 7
    requests = [make_request([10], SamplingParams(max_tokens=n), model.config, None, 128) for n in lengths]
    requests.append(make_request([10] * 100, SamplingParams(max_tokens=1), model.config, None, 128))
    list(run("dynamic", model, requests, max_running=8))
    assert model.steps[:4] == [8, 8, 8 * 100, 8]
    real = 100 + 7
    assert model.steps[2] - real == 693 == (100 - 1) * (8 - 1)


@pytest.mark.parametrize("name", ["padded", "dynamic", "ragged", *LOOPS])
def test_a_newcomer_at_the_last_step_of_the_longest_text(tiny: Llama, name: str) -> None:
    """The longest text's last token stands on the last place there is, and the newcomer's prompt pads its row."""
    p = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (4, 3, 1)]
    prompts = [[9, 17], [5], [30, 31, 32, 33]]

    def make() -> list[Request]:
        return [make_request(prompt, q, tiny.config, None, 24) for prompt, q in zip(prompts, p, strict=True)]

    model, requests = Watched(tiny), make()
    events = list(run(name, model, requests, max_running=2))
    assert texts(events, requests) == [solo(tiny, prompt, q) for prompt, q in zip(prompts, p, strict=True)]
    alike(tiny, make(), requests, events, model.rows)


@pytest.mark.parametrize("name", ["padded", "dynamic", "ragged", *LOOPS])
def test_a_stage_for_nobody_is_refused(tiny: Llama, name: str) -> None:
    """It would otherwise wait for ever, or drop every request without a word."""
    requests = [make_request([2, 3], SamplingParams(max_tokens=2), tiny.config, None, 8)]
    with pytest.raises(InputError, match="max_running is 0"):
        list(STAGES[name](tiny, requests, max_running=0))


def test_a_request_that_does_not_fit_the_model_is_refused_by_the_last_stage() -> None:
    model = follow({}, context=8)
    request = make_request([3] * 20, SamplingParams(max_tokens=2), model.config, None, 64)
    with pytest.raises(InputError, match="21.* context, 8"):
        list(run("continuous", model, [request]))


@pytest.mark.parametrize("before, after", list(zip(STAGES, LATER, strict=False)))
def test_each_stage_is_a_small_change(before: str, after: str) -> None:
    """The diff is the lesson, so it must stay readable: at most 60 added lines."""
    files = [str(Path(str(MODULES[name].__file__))) for name in (before, after)]
    command = ["git", "diff", "--no-index", "--numstat", *files]
    added, deleted, _ = subprocess.run(command, capture_output=True, text=True).stdout.split(maxsplit=2)
    print(f"{before} -> {after}: {added} lines added, {deleted} deleted")
    assert 0 < int(added) <= 60
