"""From logits to tokens: filters, penalties and draws against a plain reference, row by row."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from conftest import TINY
from hypothesis import given
from hypothesis import strategies as st
from script import NAN
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.draws import uniform
from minillm.params import SamplingParams
from minillm.request import Request, make_request
from minillm.sampling import adjust, greedy, greedy_in_c, sample, upload

INF = float("inf")


def a_request(prompt: Sequence[int] = (3,), output: Sequence[int] = (), **params: Any) -> Request:
    """A request that has already made `output`."""
    request = make_request(prompt, SamplingParams(**{"seed": 0, **params}), TINY, None, 256)
    request.tokens += output
    return request


def pick(logits: Sequence[float] | Tensor, dtype: torch.dtype = torch.float64, **params: Any) -> int:
    return sample(torch.as_tensor(logits, dtype=dtype)[None], [a_request(**params)])[0][0]


# ---- the reference: one row, Python floats


def reference(logits: Sequence[float], p: SamplingParams) -> list[float]:
    """The exact distribution after temperature, top-k, top-p, min-p."""
    best = max(logits)
    weights = [math.exp((x - best) / p.temperature) for x in logits]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])  # stable: the lower id first among equals
    kept = order[: p.top_k] if p.top_k > 0 else order
    share = math.fsum(weights[i] for i in kept)
    nucleus: list[int] = []
    for i in kept:
        if p.top_p < 1 and math.fsum(weights[j] for j in nucleus) >= p.top_p * share:
            break
        nucleus.append(i)
    kept = [i for i in nucleus if weights[i] >= p.min_p * weights[order[0]]]
    total = math.fsum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(weights))]


LOGITS = st.lists(st.floats(-8, 8, width=16), min_size=8, max_size=8)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([-1, 0, 1, 2, 5, 8, 9, 100_000]),
    top_p=st.sampled_from([1e-6, 0.1, 0.37, 0.8, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.013, 0.29, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)


@given(
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    V=st.sampled_from([1, 31, 32, 33, 1023, 1024, 1057, 5000]),
    seed=st.integers(0, 99),
    bad=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4999), st.sampled_from([NAN, INF, -INF])), max_size=3),
)
def test_the_best_token_in_c_is_torchs(
    dtype: torch.dtype, V: int, seed: int, bad: list[tuple[int, int, float]]
) -> None:
    """The first of equals, wherever in the row it stands; -1 for a row with a NaN or an infinite maximum."""
    if greedy_in_c(dtype) is None:
        pytest.skip("no C code here")
    logits = (torch.randn(5, V, generator=torch.Generator().manual_seed(seed)) * 2).round().to(dtype)  # many equals
    for row, column, value in bad:
        logits[row, column % V] = value
    best = logits.amax(-1, keepdim=True)  # [5, 1]
    first = (logits == best).int().argmax(-1)  # [5]
    assert torch.equal(greedy(logits), torch.where(best[:, 0].isfinite(), first, -1))
    with patch("minillm.sampling.greedy_in_c", return_value=None):  # torch's own, where any of the equals may come
        plain = greedy(logits)
    good = plain >= 0
    assert torch.equal(good, best[:, 0].isfinite())
    assert torch.equal(logits.gather(-1, plain.clamp(min=0)[:, None])[good], best[good])


@given(LOGITS, PARAMS, st.sampled_from([0.0, 2**-24, 0.25, 0.5, 0.9, 1 - 2**-24]), st.booleans())
def test_a_draw_inverts_the_filtered_distribution(logits: list[float], p: SamplingParams, u: float, wide: bool) -> None:
    """Token t is drawn exactly when u lies in t's stretch of the running sum, in order of ids."""
    probabilities = reference(logits, p)
    request = make_request([3], p, TINY, None, 256)
    with patch("minillm.sampling.uniform", return_value=u):
        [(token, _)] = sample(torch.tensor([logits], dtype=torch.float64 if wide else torch.float32), [request])
    below = math.fsum(probabilities[:token])
    slack = 1e-12 if wide else 1e-6
    assert probabilities[token] > 0
    assert below - slack <= u <= below + probabilities[token] + slack


COMBINATIONS: list[dict[str, Any]] = [
    dict(temperature=1.0),
    dict(temperature=0.5),
    dict(temperature=3.0),
    dict(temperature=1.0, top_k=3),
    dict(temperature=1.0, top_p=0.7),
    dict(temperature=1.0, min_p=0.2),
    dict(temperature=2.0, top_k=6, top_p=0.9, min_p=0.1),
]


@pytest.mark.parametrize("params", COMBINATIONS, ids=str)
@pytest.mark.parametrize("vary", ["seed", "token"])
def test_counts_follow_the_exact_probabilities(params: dict[str, Any], vary: str) -> None:
    """Chi-square over 8,000 draws, over seeds and along one text. What was filtered out never comes."""
    n, logits = 8000, [2.0, -1.0, 0.5, 1.9, -3.0, 1.0, 0.0, -0.5]
    if vary == "seed":
        requests = [a_request(seed=i, **params) for i in range(n)]
    else:
        requests = [a_request(output=[4] * i, seed=11, **params) for i in range(n)]
    p = SamplingParams(**params)
    counts = Counter(token for token, _ in sample(torch.tensor([logits]).expand(n, -1), requests))
    exact = reference(logits, p)
    assert set(counts) <= {i for i, share in enumerate(exact) if share > 0}
    expected = {i: n * share for i, share in enumerate(exact) if share > 0}
    chi2 = sum((counts[i] - e) ** 2 / e for i, e in expected.items())
    df = len(expected) - 1
    assert chi2 < df + 4 * math.sqrt(2 * df) + 4  # fixed seeds: a run that passes once passes always


# ---- filters at their edges


@pytest.mark.parametrize("k", [-1, 0, 64, 65, 100_000])
def test_a_top_k_of_the_vocabulary_or_more_is_no_filter(k: int) -> None:
    """TransformerLensOrg/TransformerLens#1347, ml-explore/mlx-lm#1377: "index k out of range", or k == V refused."""
    logits = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    plain = sample(logits, [a_request(seed=i, temperature=1.5) for i in range(200)])
    assert sample(logits, [a_request(seed=i, temperature=1.5, top_k=k) for i in range(200)]) == plain


@pytest.mark.parametrize("params", [dict(top_k=1), dict(top_p=1e-9), dict(min_p=1.0)], ids=str)
def test_the_tightest_filter_leaves_the_best_token(params: dict[str, Any]) -> None:
    logits = torch.randn(100, 64, generator=torch.Generator().manual_seed(1))
    tokens = [token for token, _ in sample(logits, [a_request(seed=i, temperature=5.0, **params) for i in range(100)])]
    assert tokens == logits.argmax(-1).tolist()


def drawn(logits: Sequence[float], **params: Any) -> set[int]:
    rows = torch.tensor([logits], dtype=torch.float64).expand(300, -1)
    return {token for token, _ in sample(rows, [a_request(seed=i, temperature=1.0, **params) for i in range(300)])}


def test_top_p_keeps_the_smallest_set_that_holds_the_share() -> None:
    quarters = [math.log(x) for x in (0.5, 0.25, 0.25)]
    assert drawn(quarters, top_p=0.5) == {0}
    assert drawn(quarters, top_p=0.51) == {0, 1}
    assert drawn(quarters, top_p=0.75) == {0, 1}
    assert drawn(quarters, top_p=0.76) == {0, 1, 2}
    assert drawn(quarters, top_p=1.0) == {0, 1, 2}
    assert drawn(quarters, top_k=2, top_p=0.6) == {0}  # the share is of what top-k left: 2/3 is enough


def test_top_k_keeps_k_also_among_equals() -> None:
    assert drawn([1.0, 1.0, 1.0, 1.0], top_k=2) == {0, 1}


def test_min_p_is_a_share_of_the_best() -> None:
    logits = [math.log(x) for x in (0.5, 0.26, 0.24)]
    assert drawn(logits, min_p=0.5) == {0, 1}
    assert drawn(logits, min_p=0.47) == {0, 1, 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("params", [{}, dict(top_p=0.999999), dict(top_k=40_000), dict(min_p=1e-6)], ids=str)
@pytest.mark.parametrize("u", [0.0, 1 - 2**-24])
def test_no_draw_reaches_a_token_without_probability(dtype: torch.dtype, params: dict[str, Any], u: float) -> None:
    """However the running sum of a large vocabulary rounds: neither end of it is ever drawn."""
    logits = torch.zeros(49152, dtype=dtype)
    logits[:100] = logits[-100:] = -INF
    with patch("minillm.sampling.uniform", return_value=u):
        token = pick(logits, dtype, temperature=1.0, **params)
    assert 100 <= token < 49152 - 100


# ---- temperature


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0, 1e-320, 1e-45, 1e-38, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3])
def test_a_temperature_near_zero_is_greedy(dtype: torch.dtype, temperature: float) -> None:
    """vllm#3063, vllm#890, hf#11267: logits / T overflowed float16, and the text was "<s><s><s>"."""
    logits = (torch.randn(50, 64, generator=torch.Generator().manual_seed(2)) * 11).to(dtype)
    gap = logits.double().topk(2).values
    logits = logits[gap[:, 0] - gap[:, 1] > 0.05]  # ties stay ties, and a gap of 0.05 is 50 times the warmest T
    for params in ({}, dict(top_p=0.9, top_k=5, min_p=0.1)):
        requests = [a_request(seed=i, temperature=temperature, **params) for i in range(len(logits))]
        assert [token for token, _ in sample(logits, requests)] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e30, 1e38, 1e39, 1e300])
def test_a_huge_temperature_is_uniform_over_what_is_allowed(temperature: float) -> None:
    logits = [5.0, -3.0, -INF, 0.0]
    tokens = Counter(pick(logits, torch.float32, temperature=temperature, seed=i) for i in range(600))
    assert set(tokens) == {0, 1, 3} and min(tokens.values()) > 150


# ---- logits that are not numbers


@pytest.mark.parametrize("bad", [[NAN] * 8, [0.0] * 7 + [NAN], [NAN] + [0.0] * 7, [-INF] * 8, [INF] + [0.0] * 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_row_that_is_no_numbers_fails_alone(bad: list[float], dtype: torch.dtype) -> None:
    """robertknight/rten#1089, flashinfer-ai/flashinfer#2455: a panic, or some token for everyone."""
    good = torch.randn(3, 8, generator=torch.Generator().manual_seed(3)).tolist()
    for params in (
        {},
        dict(temperature=1.0),
        dict(temperature=1.0, top_k=3, top_p=0.8, min_p=0.1),
        dict(logit_bias={2: 1.0}, repetition_penalty=2.0, logprobs=3),
    ):
        requests = [a_request(seed=i, **params) for i in range(4)]
        rows = torch.tensor([good[0], bad, good[1], good[2]], dtype=dtype)
        sampled = sample(rows, requests)
        assert sampled[1] == (-1, None)
        for i in (0, 2, 3):
            assert sampled[i] == sample(rows[i : i + 1], requests[i : i + 1])[0] and sampled[i][0] >= 0


# ---- penalties and bias


def adjusted(logits: list[float], request: Request) -> list[float]:
    """The reference of `adjust`, on Python numbers."""
    p, row = request.params, list(logits)
    for t in set(request.prompt) | set(request.output):
        row[t] = row[t] / p.repetition_penalty if row[t] > 0 else row[t] * p.repetition_penalty
    for t, times in Counter(request.output).items():
        row[t] -= p.presence_penalty + p.frequency_penalty * times
    for t, bias in p.logit_bias.items():
        row[t] += bias
    if request.n_output < p.min_tokens:
        for t in request.stop_ids:
            row[t] = -INF
    return row


IDS = st.integers(0, 7)


@given(
    logits=LOGITS,
    prompt=st.lists(IDS, min_size=1, max_size=6),
    output=st.lists(IDS, max_size=6),
    repetition=st.sampled_from([1.0, 2.0, 1.3, 0.7]),
    presence=st.sampled_from([0.0, 0.1, -1.5]),
    frequency=st.sampled_from([0.0, 0.1, -0.3, 2.0]),
    bias=st.dictionaries(IDS, st.sampled_from([-100.0, -0.1, 3.0]), max_size=3),
    min_tokens=st.integers(0, 6),
)
def test_penalties_count_what_they_should(
    logits: list[float], prompt: list[int], output: list[int], repetition: float, presence: float,
    frequency: float, bias: dict[int, float], min_tokens: int,
) -> None:  # fmt: skip
    """vllm-metal#69, NVIDIA/TensorRT-LLM#5623: penalties on the wrong tokens. Beside a neighbour of another kind."""
    request = a_request(
        prompt, output, repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency,
        logit_bias=bias, min_tokens=min_tokens, stop_token_ids=[7], temperature=1.0, logprobs=0,
    )  # fmt: skip
    row = torch.tensor(logits, dtype=torch.float64)
    adjust(row, request)
    expected = torch.tensor(adjusted(logits, request), dtype=torch.float64)
    torch.testing.assert_close(row, expected, rtol=0, atol=1e-12)

    rows = torch.tensor([logits, logits, logits], dtype=torch.float64)
    before = rows.clone()
    sampled = sample(rows, [a_request(), request, a_request(temperature=1.0, seed=5)])
    assert torch.equal(rows, before)  # the model's logits are left alone
    assert sampled[0] == sample(rows[:1], [a_request()])[0]
    assert sampled[2] == sample(rows[:1], [a_request(temperature=1.0, seed=5)])[0]
    token, logp = sampled[1]
    assert logp is not None and abs(logp[token] - float(rows[0].log_softmax(-1)[token])) < 1e-12


@pytest.mark.parametrize(
    "params, token, value",
    [
        (dict(frequency_penalty=0.5), 5, 0.0),
        (dict(frequency_penalty=0.5), 3, 1.0),
        (dict(presence_penalty=0.5), 5, 0.5),
        (dict(presence_penalty=0.5), 4, 1.0),
        (dict(repetition_penalty=2.0), 3, 0.5),
        (dict(repetition_penalty=2.0), 4, 0.5),
        (dict(repetition_penalty=2.0), 5, 0.5),
        (dict(repetition_penalty=2.0), 6, 1.0),
    ],
)
def test_each_penalty_on_prompt_3_3_4_and_output_5_5(params: dict[str, Any], token: int, value: float) -> None:
    row = torch.ones(8)
    adjust(row, a_request([3, 3, 4], [5, 5], **params))
    assert row[token] == value


def test_a_bias_moves_one_token_and_the_first_and_the_last_can_be_moved() -> None:
    logits = [0.0, 1.0] + [0.0] * 62
    for token in (0, 63):
        assert pick(logits, logit_bias={token: 2.0}) == token
    assert pick(logits, logit_bias={1: -100.0, 63: 0.5}) == 63


# ---- log-probabilities


@given(LOGITS, st.integers(0, 20), st.sampled_from([0.0, 1.0]), st.sampled_from([torch.float32, torch.float64]))
def test_logprobs_are_the_models_own(logits: list[float], k: int, temperature: float, dtype: torch.dtype) -> None:
    """Of the raw logits, whatever the penalties; the chosen token first, then the k most likely, in order."""
    row = torch.tensor([logits], dtype=dtype)
    request = a_request(
        temperature=temperature, top_k=2, logprobs=k, logit_bias={0: 50.0}, repetition_penalty=1.5, seed=k
    )
    [(token, logp)] = sample(row, [request])
    assert logp is not None
    ids = list(logp)
    exact = row.double().log_softmax(-1)[0]
    assert token == 0 and ids[0] == token and len(ids) in (min(k, 8), min(k, 8) + 1)
    most_likely = exact.sort(descending=True).values[:k]
    others = sorted((logp[i] for i in ids[1:]), reverse=True)
    assert others == [logp[i] for i in ids[1:]]
    if k:
        in_order = sorted(logp.values(), reverse=True)[:k]
        torch.testing.assert_close(torch.tensor(in_order, dtype=torch.float64), most_likely, rtol=0, atol=1e-5)
    for i, value in logp.items():
        assert abs(value - float(exact[i])) < (1e-5 if dtype == torch.float32 else 1e-12)
    if k >= 8:
        assert math.fsum(map(math.exp, logp.values())) == pytest.approx(1, abs=1e-5)


def test_logprobs_only_for_those_who_ask() -> None:
    rows = torch.randn(3, 8)
    sampled = sample(rows, [a_request(), a_request(logprobs=0), a_request(logprobs=2)])
    assert sampled[0][1] is None
    assert [len(logp or {}) for _, logp in sampled] == [0, 1, 2]


# ---- nobody depends on company


ROW = st.tuples(LOGITS, PARAMS, st.lists(IDS, max_size=5))


@given(st.lists(ROW, min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_a_row_draws_the_same_alone_and_in_any_company(rows: list[Any], random: Any) -> None:
    """vllm#51226, vllm#2514: a seeded text changed with its neighbours."""

    def make(row: Any) -> Request:
        return a_request(
            [3], row[2], **{k: getattr(row[1], k) for k in ("temperature", "top_k", "top_p", "min_p", "seed")}
        )

    alone = [sample(torch.tensor([row[0]]), [make(row)])[0] for row in rows]
    order = list(range(len(rows)))
    random.shuffle(order)
    together = sample(torch.tensor([rows[i][0] for i in order]), [make(rows[i]) for i in order])
    assert together == [alone[i] for i in order]


def test_the_draw_is_keyed_by_seed_sample_and_tokens_emitted() -> None:
    """One draw for each emitted token: the same three numbers make the same draw, each of them changes it."""
    flat = torch.zeros(1, 4096, dtype=torch.float64)

    def token(seed: int, n: int, sample_index: int = 0, prompt: Sequence[int] = (3,)) -> int:
        request = a_request(prompt, [4] * n, seed=seed, temperature=1.0)
        request.sample_index = sample_index
        return sample(flat, [request])[0][0]

    for seed in (0, 1, 2**64 - 1):
        for n in (0, 1, 9):
            for index in (0, 1, 3):
                assert token(seed, n, index) == int(uniform(seed, index, n) * 4096)
                assert token(seed, n, index) == token(seed, n, index, prompt=[5, 6, 7])
    assert len({token(s, n, i) for s in (0, 1) for n in (0, 1) for i in (0, 1)}) == 8


# ---- on a GPU the host waits once


class Waits(TorchDispatchMode):
    """Counts what would make the host wait for a GPU: numbers fetched, sizes that depend on values, and tensors made
    from lists, which an index by a list is too."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._opname
        by_mask = name in ("index", "index_put", "index_put_") and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        from_list = name == "lift_fresh" and args[0].dim() > 0
        if (
            by_mask
            or from_list
            or name in ("_local_scalar_dense", "nonzero", "_unique2", "masked_select", "is_nonzero")
        ):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


@given(st.lists(ROW, min_size=1, max_size=5), st.booleans())
def test_sampling_asks_and_does_not_wait(rows: list[Any], penalties: bool) -> None:
    """Whatever comes from the host comes by `upload`, and nothing goes back but the ids."""
    more: dict[str, Any] = dict(
        repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.1, logit_bias={2: 1.0}, min_tokens=9,
        stop_token_ids=[1, 4],
    )  # fmt: skip
    requests = [
        a_request([3], row[2], **{k: getattr(row[1], k) for k in ("temperature", "top_k", "top_p", "min_p", "seed")})
        for row in rows
    ]
    if penalties:
        requests.append(a_request([3, 5], [5, 5, 2], **more))
    logits = torch.tensor([row[0] for row in rows] + [rows[0][0]] * penalties)
    no_c = patch("minillm.sampling.greedy_in_c", return_value=None)  # as on a GPU
    with no_c, patch("minillm.sampling.upload", wraps=upload) as uploaded, Waits() as waits:
        sample(logits, requests)
    assert waits.found == {"lift_fresh": uploaded.call_count}


def test_what_goes_to_a_gpu_is_pinned_and_not_waited_for() -> None:
    for device, pinned in ((torch.device("cuda", 0), True), (torch.device("cpu"), False)):
        with patch("minillm.sampling.torch.tensor") as made:
            upload([1, 2], torch.int64, device)
        assert made.call_args.kwargs == {"dtype": torch.int64, "pin_memory": pinned}
        made.return_value.to.assert_called_once_with(device, non_blocking=pinned)


@given(st.lists(ROW, min_size=1, max_size=5), st.sampled_from([0, 1, 2]))
def test_the_best_tokens_may_be_known_already(rows: list[Any], which: int) -> None:
    """What a graph has computed is used as it is, unless a penalty changes some row; and it is left as it was."""
    kinds: list[dict[str, Any]] = [{}, dict(temperature=0.7, top_k=3, seed=5), dict(logit_bias={2: 50.0})]
    requests = [a_request([3], row[2], **(kinds[which] if i == 0 else kinds[0])) for i, row in enumerate(rows)]
    logits = torch.tensor([row[0] for row in rows])
    logits[-1, 3] = [NAN, 0.0, INF][which]
    expected = sample(logits, requests)
    best = greedy(logits)
    before = best.clone()
    assert sample(logits, requests, best) == expected
    assert torch.equal(best, before)
    assert [token for token, _ in expected[1:]] == best.tolist()[1:]
    if which == 0:
        assert [token for token, _ in sample(logits, requests, 7 - best)] == (7 - best).tolist()
