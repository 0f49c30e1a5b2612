"""A wrong token is found, a near-tie is excused, and too many excuses void the row."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minillm.bench import verify
from minillm.bench.harness import Job, Run, run
from minillm.bench.verify import Check, Verifier, judge
from minillm.model import Llama
from minillm.stages import STAGES

JOBS = [Job((5, 6, 7), 6), Job((9, 10), 12)]


def with_output(done: Run, i: int, output: list[int]) -> Run:
    outputs = [output if k == i else old for k, old in enumerate(done.outputs)]
    return dataclasses.replace(done, outputs=outputs)


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_is_right(tiny: Llama, stage: str):
    verdict = judge([run(tiny, stage, JOBS, {"max_running": 2})], Verifier(tiny))
    assert verdict.void is None
    assert (verdict.check.positions, verdict.check.excused, verdict.check.wrong) == (18, 0, 0)


@given(st.integers(0, 5), st.integers(1, 63))
def test_one_wrong_token_voids_the_row(tiny: Llama, at: int, shift: int):
    done = run(tiny, "cached", JOBS)
    output = list(done.outputs[0])
    output[at] = (output[at] + shift) % 64
    verdict = judge([with_output(done, 0, output)], Verifier(tiny))
    assert verdict.check.wrong >= 1 and verdict.void is not None and "naive" in verdict.void


def test_a_wrong_last_token_is_found(tiny: Llama):
    done = run(tiny, "cached", JOBS)
    output = [*done.outputs[1][:-1], (done.outputs[1][-1] + 1) % 64]
    verdict = judge([with_output(done, 1, output)], Verifier(tiny))
    assert verdict.check.wrong == 1 and verdict.check.positions == 18


def test_a_missing_token_voids_the_row(tiny: Llama):
    """TensorRT-LLM#355: systems that emitted different numbers of tokens are not compared."""
    done = run(tiny, "cached", JOBS)
    verdict = judge([with_output(done, 1, done.outputs[1][:-1])], Verifier(tiny))
    assert verdict.void is not None and "12 tokens were asked for and 11 emitted" in verdict.void


def test_a_text_that_may_end_early_may(tiny: Llama):
    jobs = [dataclasses.replace(job, max_tokens=200, ignore_eos=False) for job in JOBS]
    assert judge([run(tiny, "cached", jobs)], Verifier(tiny)).void is None


def naive_gap(model: Llama, prompt: tuple[int, ...], token: int) -> float:
    return Verifier(model).check(prompt, [token]).gap


def test_the_gap_decides_between_excused_and_wrong(tiny: Llama, monkeypatch: pytest.MonkeyPatch):
    gap = naive_gap(tiny, (5, 6, 7), 30)
    assert gap > 0
    for tolerance, expected in ((gap * 1.01, (1, 0)), (gap * 0.99, (0, 1))):
        monkeypatch.setitem(verify.TOLERANCE, torch.float64, tolerance)
        check = Verifier(tiny).check((5, 6, 7), [30])
        assert (check.excused, check.wrong) == expected


def test_more_than_five_percent_excused_voids_the_row(tiny: Llama, monkeypatch: pytest.MonkeyPatch):
    done = run(tiny, "cached", [Job((5, 6, 7), 1)] * 30)
    second = min(range(64), key=lambda t: naive_gap(tiny, (5, 6, 7), t) or 9e9)
    monkeypatch.setitem(verify.TOLERANCE, torch.float64, naive_gap(tiny, (5, 6, 7), second) * 1.01)

    def excused(n: int) -> verify.Verdict:
        outputs = [[second] if i < n else old for i, old in enumerate(done.outputs)]
        return judge([dataclasses.replace(done, outputs=outputs)], Verifier(tiny))

    assert excused(1).void is None and excused(1).check.excused == 1
    void = excused(2).void
    assert void is not None and "excused" in void


class NotANumber(torch.nn.Module):
    """The model's logits are NaN."""

    def __init__(self, model: Llama):
        super().__init__()
        self.model, self.config, self.device, self.dtype = model, model.config, model.device, model.dtype

    def forward(self, *args: object) -> Tensor:
        return self.model(*args)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden) * float("nan")


def test_what_is_not_a_number_is_wrong(tiny: Llama):
    check = Verifier(NotANumber(tiny)).check((5, 6), [7, 8])  # type: ignore[arg-type]
    assert check.wrong == 2


def test_the_same_text_is_read_once(tiny: Llama):
    passes: list[int] = []
    handle = tiny.register_forward_pre_hook(lambda module, args: passes.append(args[0].numel()))
    try:
        verifier = Verifier(tiny)
        assert verifier.check((5, 6), [7, 8]) == verifier.check((5, 6), [7, 8])
        verifier.check((5, 6), [7])
        assert passes == [3, 2]
    finally:
        handle.remove()


def test_checks_add_up():
    total = Check(10, 1, 0, 0.2) + Check(30, 1, 2, 0.1)
    assert total == Check(40, 2, 2, 0.2) and total.share_excused == 0.05
    assert Check(0, 0, 0, 0.0).share_excused == 0.0
