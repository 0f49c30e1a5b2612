"""Metrics on fixtures with exact numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.bench import metrics
from minillm.bench.metrics import Stats, summarize

TWO = [[1.0, 1.5, 2.5], [4.0]]  # two requests; the run ends at 4 s


def test_one_request_by_hand():
    times = [3.0, 3.5, 5.0]
    assert metrics.ttft(1.0, times) == 2.0  # the second it waited in the queue is part of it
    assert metrics.itl(times) == [0.5, 1.5]
    assert metrics.e2el(1.0, times) == 4.0
    assert metrics.tpot(1.0, times) == 1.0


def test_a_single_token_has_no_tpot():
    assert metrics.tpot(0.0, [2.0]) is None
    assert metrics.itl([2.0]) == []
    only = summarize([5], [0.0], [[2.0]])
    assert only.tpot is None and only.itl is None and only.ttft is not None


def test_prompt_and_output_are_kept_apart():
    """vllm#435, vllm#8231: a throughput that adds prompt tokens to output tokens is another number."""
    s = summarize([100, 20], [0.0, 1.0], TWO)
    assert (s.requests, s.prompt_tokens, s.output_tokens, s.wall) == (2, 120, 4, 4.0)
    assert s.prompt_throughput == 30.0
    assert s.output_throughput == 1.0
    assert s.total_token_throughput == 31.0
    assert s.request_throughput == 0.5


def test_requests_are_pooled_as_vllm_pools_them():
    s = summarize([100, 20], [0.0, 1.0], TWO)
    assert s.ttft == Stats(mean=2.0, median=2.0, p95=2.9, p99=2.98)  # 1 and 3
    assert s.tpot == Stats(0.75, 0.75, 0.75, 0.75)  # of the first request alone
    assert s.itl == Stats(0.75, 0.75, pytest.approx(0.975), pytest.approx(0.995))  # 0.5 and 1
    assert s.e2el is not None and s.e2el.mean == 2.75  # 2.5 and 3


def test_output_tokens_are_ids_not_text():
    """vllm-omni#4459: a hundred blanks tokenized again are 7 tokens; the engine emitted a hundred."""
    times = [[0.01 * i for i in range(1, 101)]]
    s = summarize([3], [0.0], times)
    assert s.output_tokens == 100
    assert s.tpot is not None and s.tpot.mean == pytest.approx(0.01)


def test_a_request_without_tokens_counts_nowhere_but_in_the_number_of_requests():
    s = summarize([4, 4], [0.0, 0.0], [[2.0], []])
    assert (s.requests, s.output_tokens, s.wall) == (2, 1, 2.0)
    empty = summarize([4], [0.0], [[]])
    assert empty.output_throughput == 0.0 and empty.ttft is None


@given(st.lists(st.lists(st.floats(0.001, 9), min_size=1, max_size=9), min_size=1, max_size=5))
def test_e2el_is_ttft_and_all_gaps(gaps: list[list[float]]):
    times = [[sum(row[: i + 1]) for i in range(len(row))] for row in gaps]
    s = summarize([1] * len(times), [0.0] * len(times), times)
    assert s.wall == max(row[-1] for row in times)
    assert s.output_throughput * s.wall == pytest.approx(sum(map(len, times)))
    for row in times:
        assert metrics.ttft(0.0, row) + sum(metrics.itl(row)) == pytest.approx(metrics.e2el(0.0, row))
        if (tpot := metrics.tpot(0.0, row)) is not None:
            assert tpot * (len(row) - 1) == pytest.approx(sum(metrics.itl(row)))


def test_goodput_counts_what_kept_both_limits_from_its_own_arrival():
    arrivals = [0.0, 4.0, 4.0, 0.0, 0.0]
    times = [
        [1.0, 2.0],  # ttft 1, tpot 1
        [5.0, 5.5, 6.0],  # arrived at 4: ttft 1, tpot 0.5
        [7.5],  # ttft 3.5; a single token has no tpot
        [0.5, 3.0],  # tpot 2.5
        [],  # never answered
    ]
    assert metrics.request_goodput(arrivals, times, 1.0, 1.0) == 2 / 7.5  # the limits themselves are kept
    assert metrics.request_goodput(arrivals, times, 4.0, 1.0) == 3 / 7.5
    assert metrics.request_goodput(arrivals, times, 4.0, 0.5) == 2 / 7.5
    assert metrics.request_goodput(arrivals, times, 4.0, 2.5) == 4 / 7.5
    assert metrics.request_goodput([0.0], [[]], 1.0, 1.0) == 0.0
