"""The queue with a fixed time per token: by hand, and by laws that hold for every queue."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.errors import InputError
from minillm.simulation.policies import POLICIES, Band, Figures, Schedule, bands, continuous, ratio, static
from minillm.simulation.workload import (
    ARTICLE_MIX,
    Demand,
    Mix,
    at_once,
    poisson_demands,
    read_trace,
    uniform,
)

# ---- policies, by hand


def test_static_by_hand():
    """Two slots: the second pair waits for the longest of the first."""
    s = static([0, 0, 1, 1], [1, 5, 2, 2], 2)
    assert s == Schedule([0, 0, 1, 1], [0, 0, 5, 5], [1, 5, 7, 7], [5, 5, 7, 7])
    assert Figures.of(s, 2) == Figures(
        mean_wait=2.0,
        p95_wait=4.0,
        max_wait=4.0,
        makespan=7.0,
        request_throughput=4 / 7,
        busy=10.0,
        idle_share=1 - 10 / 14,
    )


def test_continuous_by_hand():
    """The same requests: the first one's slot serves the third and the fourth."""
    s = continuous([0, 0, 1, 1], [1, 5, 2, 2], 2)
    assert s == Schedule([0, 0, 1, 1], [0, 0, 1, 3], [1, 5, 3, 5], [1, 5, 3, 5])
    assert Figures.of(s, 2) == Figures(0.5, pytest.approx(1.7), 2.0, 5.0, 0.8, 10.0, 0.0)


def test_a_static_group_waits_until_it_is_full_but_the_last_one_does_not():
    assert static([0, 3, 9], [1, 1, 1], 2).starts == [3, 3, 9]


def test_an_empty_queue_serves_who_comes_at_once():
    s = continuous([2, 10], [3, 1], 1)
    assert s.starts == [2, 10] and s.ends == [5, 11]
    assert Figures.of(s, 1).mean_wait == 0


def test_dynamic_is_continuous_where_prompts_cost_nothing():
    assert POLICIES["dynamic"] is POLICIES["continuous"] is continuous


# ---- laws; whole numbers, so that all of them hold exactly

QUEUES = st.tuples(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9)), min_size=1, max_size=14).map(sorted), st.integers(1, 4)
)
each_policy = pytest.mark.parametrize("policy", POLICIES)


def served(policy: str, queue: tuple[list[tuple[int, int]], int]) -> tuple[Schedule, list[int], int]:
    requests, slots = queue
    arrivals, durations = (list(column) for column in zip(*requests, strict=True))
    return POLICIES[policy](arrivals, durations, slots), durations, slots


def holding(s: Schedule, t: int) -> int:
    """Slots that are taken from t to t + 1."""
    return sum(start <= t < freed for start, freed in zip(s.starts, s.freed, strict=True))


@each_policy
@given(QUEUES)
def test_every_policy_does_the_same_work_on_no_more_slots_than_there_are(policy: str, queue):
    s, durations, slots = served(policy, queue)
    assert [end - start for start, end in zip(s.starts, s.ends, strict=True)] == durations
    assert all(arrival <= start for arrival, start in zip(s.arrivals, s.starts, strict=True))
    assert all(end <= freed for end, freed in zip(s.ends, s.freed, strict=True))
    assert max(holding(s, t) for t in range(int(max(s.freed)))) <= slots
    figures = Figures.of(s, slots)
    assert figures.busy == sum(durations)
    assert figures.makespan >= max(sum(durations) / slots, max(durations))
    assert 0 <= figures.idle_share < 1 or figures.idle_share == pytest.approx(0, abs=1e-12)


@each_policy
@given(QUEUES)
def test_first_come_first_served(policy: str, queue):
    s, _, _ = served(policy, queue)
    assert list(s.starts) == sorted(s.starts)


@each_policy
@given(QUEUES)
def test_littles_law(policy: str, queue):
    """The number of those who wait, added up over time, is the sum of all waits (Little 1961)."""
    s, _, _ = served(policy, queue)
    pairs = list(zip(s.arrivals, s.starts, strict=True))
    waiting = [sum(arrival <= t < start for arrival, start in pairs) for t in range(int(max(s.starts)) + 1)]
    assert sum(waiting) == sum(start - arrival for arrival, start in pairs)


@given(QUEUES)
def test_continuous_never_idles_while_somebody_waits(queue):
    s, _, slots = served("continuous", queue)
    for arrival, start in zip(s.arrivals, s.starts, strict=True):
        assert all(holding(s, t) == slots for t in range(arrival, int(start)))


@given(QUEUES)
def test_nobody_starts_later_than_under_static(queue):
    early, _, _ = served("continuous", queue)
    late, _, _ = served("static", queue)
    assert all(a <= b for a, b in zip(early.starts, late.starts, strict=True))


@given(st.integers(1, 20), st.integers(1, 9), st.integers(1, 5))
def test_equal_lengths_at_once_leave_no_gain(n: int, length: int, slots: int):
    assert static([0] * n, [length] * n, slots) == continuous([0] * n, [length] * n, slots)


# ---- bands


def test_a_band_holds_95_of_100():
    band = Band.of([float(i) for i in range(101)])
    assert band == Band(2.5, 50.0, 97.5)
    assert 2.5 in band and 97.5 in band and 97.6 not in band and 2.4 not in band


def test_ratios_are_taken_run_by_run():
    runs = [Figures(*[float(i)] * 7) for i in (1, 2, 4)]
    assert bands(runs)["busy"].median == 2.0
    assert ratio(runs, runs, "makespan") == Band(1.0, 1.0, 1.0)
    assert ratio(runs[::-1], runs, "makespan") == Band.of([4.0, 1.0, 0.25])
    assert ratio(runs, [Figures(*[0.0] * 7)] * 3, "mean_wait") is None


# ---- demands


def test_the_articles_mix():
    lengths = np.array(ARTICLE_MIX.draw(20_000, np.random.default_rng(0)))
    short = (lengths >= 40) & (lengths <= 200)
    long = (lengths >= 400) & (lengths <= 1000)
    assert (short | long).all() and short.mean() == pytest.approx(0.85, abs=0.01)
    assert {lengths.min(), lengths.max()} == {40, 1000} and {200, 400} <= set(lengths.tolist())  # ends included
    assert ARTICLE_MIX.mean == 0.85 * 120 + 0.15 * 700
    assert lengths.mean() == pytest.approx(ARTICLE_MIX.mean, rel=0.03)


def test_a_scaled_mix():
    assert ARTICLE_MIX.scaled(0.25) == Mix(((0.85, 10, 50), (0.15, 100, 250)))
    assert ARTICLE_MIX.scaled(1e-6) == Mix(((0.85, 1, 1), (0.15, 1, 1)))
    assert set(uniform(7).draw(50, np.random.default_rng(0))) == {7}


def test_poisson_arrivals():
    demands = poisson_demands(5000, 11.0, ARTICLE_MIX, 16, seed=3)
    gaps = np.diff([d.arrival for d in demands])
    assert gaps.min() > 0 and gaps.mean() == pytest.approx(1 / 11, rel=0.05)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)  # exponential gaps
    assert {d.prompt for d in demands} == {16}
    assert demands == poisson_demands(5000, 11.0, ARTICLE_MIX, 16, seed=3)
    assert demands != poisson_demands(5000, 11.0, ARTICLE_MIX, 16, seed=4)


def test_the_same_seed_has_the_same_lengths_whenever_they_arrive():
    slow, fast = (poisson_demands(50, rate, ARTICLE_MIX, 1, 0) for rate in (1.0, 9.0))
    together = at_once(50, ARTICLE_MIX, 1, 0)
    assert [d.output for d in slow] == [d.output for d in fast] == [d.output for d in together]
    assert {d.arrival for d in together} == {0.0}


def test_a_trace_comes_back_in_order_of_arrival(tmp_path: Path):
    path = tmp_path / "trace.csv"
    path.write_text("\ufeffarrival, prompt,output\r\n2.5,3,4\r\n\r\n0,1,2\r\n", encoding="utf-8")
    assert read_trace(path) == [Demand(0.0, 1, 2), Demand(2.5, 3, 4)]


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "line 1: the header is ''"),
        ("time,prompt,output\n0,1,1\n", "line 1: the header is 'time,prompt,output'"),
        ("arrival,prompt,output\n", "holds no requests"),
        ("arrival,prompt,output\n0,1,1\nsoon,1,1\n", "line 3: arrival is 'soon'"),
        ("arrival,prompt,output\n-1,1,1\n", "line 2: arrival is '-1'"),
        ("arrival,prompt,output\nnan,1,1\n", "line 2: arrival is 'nan'"),
        ("arrival,prompt,output\ninf,1,1\n", "line 2: arrival is 'inf'"),
        ("arrival,prompt,output\n0,0,1\n", "line 2: prompt is '0'"),
        ("arrival,prompt,output\n0,1,2.5\n", "line 2: output is '2.5'"),
        ("arrival,prompt,output\n0,1,999999999\n", "line 2: output is '999999999'"),
        ("arrival,prompt,output\n\n0,1,1\n0,1\n", "line 4: '0,1' has 2 values"),
        ("arrival,prompt,output\n0,1,1,1\n", "line 2: '0,1,1,1' has 4 values"),
        ("arrival,prompt,output\n0,1,\x1b[31m\n", r"line 2: output is '\x1b[31m'"),
    ],
)
def test_a_bad_trace_is_refused_by_line_and_value(tmp_path: Path, text: str, said: str):
    path = tmp_path / "trace.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(str(path)) and said in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_no_text_file_is_refused(tmp_path: Path):
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, said in ((tmp_path, "cannot be read"), (tmp_path / "none", "cannot be read"), (binary, "not UTF-8")):
        with pytest.raises(InputError, match=said):
            read_trace(path)
