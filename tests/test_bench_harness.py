"""The harness counts exactly, by hand-made numbers, and leaves nothing behind."""

import time

import pytest
import torch
from conftest import TINY
from hypothesis import given
from hypothesis import strategies as st

from minillm import attention
from minillm.bench import harness
from minillm.bench.harness import Job, counting, run
from minillm.cache import KVCache, KVPool
from minillm.model import Llama
from minillm.params import SamplingParams
from minillm.request import make_request
from minillm.stages import STAGES

LAYERS, HEADS = TINY.n_layers, TINY.n_heads
TOKEN_BYTES = TINY.kv_bytes_per_token(8)  # float64


def prompt(n: int, first: int = 2) -> tuple[int, ...]:
    return tuple(2 + (first + 7 * i) % 60 for i in range(n))


def scores(pairs: list[tuple[int, int]]) -> int:
    """Attention scores of steps in which T queries met S keys."""
    return LAYERS * HEADS * sum(T * S for T, S in pairs)


# 4 prompt tokens and 3 new ones: tokens and keys of each step
ONE = [Job(prompt(4), 3)]
STEPS = {
    "naive": [(4, 4), (5, 5), (6, 6)],
    "cached": [(4, 4), (1, 5), (1, 6)],
    "chunked": [(3, 3), (1, 4), (1, 5), (1, 6)],  # chunks of 3
    "padded": [(4, 4), (1, 5), (1, 6)],
    "ragged": [(4, 4), (1, 5), (1, 6)],
    "continuous": [(3, 3), (1, 4), (1, 5), (1, 6)],  # a budget of 3
}


@pytest.mark.parametrize("stage", STEPS)
def test_one_request_by_hand(tiny: Llama, stage: str):
    done = run(tiny, stage, ONE, {"chunk": 3, "budget": 3, "max_running": 1})
    assert [step.tokens for step in done.counts.steps] == [T for T, _ in STEPS[stage]]
    assert done.scores == scores(STEPS[stage])
    assert sum(step.rows for step in done.counts.steps) == 3
    assert done.tokens_useful == 4 + 3 - 1
    read = LAYERS * TINY.n_kv_heads * TINY.head_dim * 2 * 8
    assert [step.kv_bytes for step in done.counts.steps] == [S * read for _, S in STEPS[stage]]


def test_the_naive_stage_computes_every_token_again(tiny: Llama):
    done = run(tiny, "naive", [Job(prompt(5), 4), Job(prompt(2), 3)])
    assert done.tokens_pushed == (5 + 6 + 7 + 8) + (2 + 3 + 4)
    assert done.tokens_useful == (5 + 3) + (2 + 2)
    assert done.counts.peak_reserved_bytes == done.counts.peak_stored_tokens == 0


def test_padding_after_the_end_is_not_output(tiny: Llama):
    """TensorRT-LLM#355: two rows of 3 and 10 tokens are 13 tokens, though 20 went through the model."""
    done = run(tiny, "padded", [Job(prompt(4), 3), Job(prompt(4, 5), 10)], {"max_running": 2})
    assert [len(output) for output in done.outputs] == [3, 10]
    assert done.summary.output_tokens == 13
    assert done.tokens_useful == (4 + 2) + (4 + 9)
    assert done.tokens_pushed == 2 * 4 + 2 * 9  # the shorter row stays till the end


def test_a_newcomer_pads_everyone(tiny: Llama):
    """Dynamic: a prompt of n tokens that joins B - 1 decoding rows costs (n - 1)(B - 1) pads."""
    n, B = 9, 3
    jobs = [Job(prompt(1, i), 2 if i == 0 else 4) for i in range(B)] + [Job(prompt(n, 9), 1)]
    done = run(tiny, "dynamic", jobs, {"max_running": B})
    assert [step.tokens for step in done.counts.steps] == [B, B, n * B, B]
    pads = done.tokens_pushed - done.tokens_useful
    assert pads == (n - 1) * (B - 1) + 1  # and in the last step the row of the newcomer, which has ended


def test_kv_memory_by_hand(tiny: Llama):
    jobs = [Job(prompt(4), 3), Job(prompt(8), 2)]
    one_by_one = run(tiny, "cached", jobs).counts
    assert one_by_one.peak_reserved_bytes == 9 * TOKEN_BYTES  # never both at once
    assert one_by_one.peak_stored_tokens == 8 + 2 - 1
    together = run(tiny, "padded", jobs, {"max_running": 2}).counts
    assert together.peak_reserved_bytes == 2 * (9 + 1) * TOKEN_BYTES
    assert together.peak_stored_tokens == (4 + 1) + (8 + 1)  # after the second step; then the longer one leaves
    pool = run(tiny, "continuous", jobs, {"max_running": 2, "budget": 64}).counts
    assert pool.peak_reserved_bytes == (2 * 9 + 1) * TOKEN_BYTES  # and the scratch slot
    assert pool.peak_stored_tokens == (4 + 1) + (8 + 1)


def test_ragged_scores_everything_against_everything(tiny: Llama):
    jobs = [Job(prompt(4), 2), Job(prompt(6), 2)]
    assert run(tiny, "ragged", jobs, {"max_running": 2}).scores == scores([(10, 10), (2, 12)])
    # gathered: each prompt against itself, then one rectangle of two rows, as wide as the longer one
    gathered = run(tiny, "continuous", jobs, {"max_running": 2, "budget": 64})
    assert gathered.scores == scores([(4, 4), (6, 6), (1, 7), (1, 7)])


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 6)), min_size=1, max_size=5),
    st.sampled_from(list(STAGES)),
    st.integers(1, 4),
)
def test_every_stage_emits_what_was_asked_and_wastes_no_less_than_nothing(
    tiny: Llama, sizes: list[tuple[int, int]], stage: str, max_running: int
):
    jobs = [Job(prompt(n, 2 + i), n_new) for i, (n, n_new) in enumerate(sizes)]
    done = run(tiny, stage, jobs, {"max_running": max_running, "budget": 8, "chunk": 5})
    assert [len(output) for output in done.outputs] == [n_new for _, n_new in sizes]
    assert [len(row) for row in done.times] == [n_new for _, n_new in sizes]
    assert all(row == sorted(row) for row in done.times)
    assert done.tokens_useful == sum(n + n_new - 1 for n, n_new in sizes)
    assert done.tokens_pushed >= done.tokens_useful
    if stage in ("cached", "chunked", "ragged", "continuous"):
        assert done.tokens_pushed == done.tokens_useful
    if stage != "naive":
        assert done.counts.peak_stored_tokens * TOKEN_BYTES <= done.counts.peak_reserved_bytes
    assert done.counts.reserved_bytes == 0  # all of it was given back


class Broken(Exception):
    pass


def hooks(model: Llama) -> int:
    return len(model._forward_pre_hooks) + len(model.head._forward_pre_hooks)


def test_nothing_is_left_behind_even_after_an_error(tiny: Llama):
    before = attention.sdpa, KVCache.__init__, KVPool.__init__, hooks(tiny)
    with pytest.raises(Broken), counting(tiny, []):
        assert (attention.sdpa, KVCache.__init__, KVPool.__init__, hooks(tiny)) != before
        raise Broken

    def break_it(i: int, event: object) -> None:
        raise Broken

    with pytest.raises(Broken):
        run(tiny, "continuous", ONE, on_event=break_it)
    assert (attention.sdpa, KVCache.__init__, KVPool.__init__, hooks(tiny)) == before


def test_counting_changes_no_token(tiny: Llama):
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    request = make_request(ONE[0].prompt, params, tiny.config, None, 64)
    plain = [event.token for event in STAGES["cached"](tiny, [request])]
    assert run(tiny, "cached", ONE).outputs == [plain]


def test_the_device_has_finished_before_the_clock_is_read(tiny: Llama, monkeypatch: pytest.MonkeyPatch):
    """warp-rnnt#9: without it, only the launching of work is timed."""
    calls: list[str] = []
    monkeypatch.setattr(harness, "synchronize", lambda device: calls.append("wait"))
    monkeypatch.setattr(time, "perf_counter", lambda: calls.append("read") or float(len(calls)))
    run(tiny, "cached", ONE)
    assert calls.count("wait") == 1 + 3  # the start, and each token
    assert all(after == "read" for before, after in zip(calls, calls[1:], strict=False) if before == "wait")
    assert calls.count("read") == 1 + 3 + 3 + 1  # without waiting: as a step begins, and at the end


def test_a_job_stops_at_the_end_of_text_unless_told_otherwise(tiny: Llama):
    on = run(tiny, "cached", [Job(prompt(4), 200)]).outputs[0]
    assert len(on) == 200
    stops = run(tiny, "cached", [Job(prompt(4), 200, ignore_eos=False)])
    eos = on.index(1) + 1 if 1 in on else 200
    assert stops.outputs == [on[:eos]]
    assert stops.finish_reasons == ["stop" if 1 in on else "length"]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("stage", STAGES)
def test_cuda_emits_what_the_cpu_emits(tiny: Llama, stage: str):
    jobs = [Job(prompt(n, 2 + n), 5) for n in (3, 11, 7)]
    limits = {"max_running": 2, "budget": 6, "chunk": 4}
    expected = run(tiny, "naive", jobs).outputs
    on_gpu = Llama.random(TINY, seed=0, dtype=torch.float64).to("cuda")
    assert run(on_gpu, stage, jobs, limits).outputs == expected


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_cuda_times_the_work_and_not_the_asking():
    """Eight times the side is 512 times the work; a clock that does not wait sees none of it."""
    from minillm.bench.ceiling import fastest

    device = torch.device("cuda")

    def seconds(side: int) -> float:
        a = torch.ones(side, side, device=device)
        return fastest(lambda: a @ a, device, 0.2)

    assert seconds(8192) > 20 * seconds(1024)


# ---- steps: whose tokens, when, and what they held


NEW = {  # of requests 0 and 1: 4 and 2 prompt tokens, 2 and 3 new ones
    "naive": [{0: 4}, {0: 5}, {1: 2}, {1: 3}, {1: 4}],
    "cached": [{0: 4}, {0: 1}, {1: 2}, {1: 1}, {1: 1}],
    "chunked": [{0: 3}, {0: 1}, {0: 1}, {1: 2}, {1: 1}, {1: 1}],  # chunks of 3
    "padded": [{0: 4, 1: 2}, {0: 1, 1: 1}, {1: 1}],
    "dynamic": [{0: 4, 1: 2}, {0: 1, 1: 1}, {1: 1}],
    "ragged": [{0: 4, 1: 2}, {0: 1, 1: 1}, {1: 1}],
    "continuous": [{0: 3}, {0: 1, 1: 2}, {0: 1, 1: 1}, {1: 1}],  # a budget of 3
}
NEW["paged"] = NEW["shared"] = NEW["kernels"] = NEW["continuous"]  # there is memory for all, and nothing to share


@pytest.mark.parametrize("stage", STAGES)
def test_every_step_says_whose_tokens_it_computed(tiny: Llama, stage: str):
    jobs = [Job(prompt(4), 2), Job(prompt(2, first=9), 3)]
    done = run(tiny, stage, jobs, {"chunk": 3, "budget": 3, "max_running": 2})
    assert [step.new for step in done.counts.steps] == NEW[stage]


@given(data=st.data(), stage=st.sampled_from(list(STAGES)))
def test_steps_add_up(data: st.DataObject, stage: str, tiny: Llama):
    sizes = data.draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=5))
    jobs = [Job(prompt(n, first=i), m) for i, (n, m) in enumerate(sizes)]
    limits = {"chunk": data.draw(st.integers(1, 5)), "max_running": data.draw(st.integers(1, 3))}
    limits["budget"] = data.draw(st.integers(limits["max_running"], 8))
    done = run(tiny, stage, jobs, limits)
    steps = done.counts.steps
    for i, job in enumerate(jobs):
        computed = sum(step.new.get(i, 0) for step in steps)
        again = sum(range(len(job.prompt), len(job.prompt) + job.max_tokens))  # the whole text for each token
        assert computed == (again if stage == "naive" else len(job.prompt) + job.max_tokens - 1)
    for step in steps:
        assert sum(step.new.values()) <= step.tokens and step.new
        assert step.began <= step.ended
        assert step.stored_tokens * TOKEN_BYTES <= step.reserved_bytes
    assert all(one.ended <= other.began for one, other in zip(steps, steps[1:], strict=False))
    for start, arrival, times in zip(done.starts, done.arrivals, done.times, strict=True):
        assert arrival <= start <= times[0]


def test_stored_tokens_by_hand(tiny: Llama):
    done = run(tiny, "padded", [Job(prompt(4), 2), Job(prompt(2, first=9), 3)], {"max_running": 2})
    # 4 + 2 after the prompts; 5 + 3; then request 0 has ended, and only 4 of request 1 are needed
    assert [step.stored_tokens for step in done.counts.steps] == [6, 8, 4]
    assert {step.reserved_bytes for step in done.counts.steps} == {2 * 6 * TOKEN_BYTES}  # one place is for pads


# ---- arrivals


@pytest.mark.parametrize("stage", STAGES)
def test_nothing_starts_before_it_arrives(tiny: Llama, stage: str):
    jobs = [Job(prompt(2, first=i), 2, arrival=0.02 * i) for i in range(3)]
    done = run(tiny, stage, jobs, {"max_running": 2})
    assert done.arrivals == [0.0, 0.02, 0.04]
    assert all(start >= arrival - 1e-3 for start, arrival in zip(done.starts, done.arrivals, strict=True))
    assert done.summary.ttft is not None and done.summary.ttft.p99 < done.summary.wall  # counted from the arrival


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("clients", [1, 2, 3, 9])
def test_in_a_closed_loop_a_request_arrives_when_another_ends(tiny: Llama, stage: str, clients: int):
    jobs = [Job(prompt(2, first=i), 1 + i % 3) for i in range(6)]
    done = run(tiny, stage, jobs, {"max_running": 2}, clients=clients)
    ends = sorted(times[-1] for times in done.times)
    assert done.arrivals == [0.0] * min(clients, 6) + ends[: max(0, 6 - clients)]
    assert [len(output) for output in done.outputs] == [job.max_tokens for job in jobs]
