"""What of check_gpu can be checked without a GPU."""

import dataclasses
import subprocess

import pytest
import torch
from conftest import TINY
from rich.console import Console

from minillm.bench import check_gpu
from minillm.bench.check_gpu import SMOLLM2_135M, random_model
from minillm.bench.ladder import measure
from minillm.bench.workload import PRESETS, random_workload


def test_without_a_gpu_one_line_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check_gpu.main() == 1
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 1 and "needs a CUDA GPU" in out


@pytest.mark.parametrize(("status", "passed"), [(0, True), (1, False), (2, False), (5, True)])
def test_failed_tests_are_not_forgotten(status: int, passed: bool, monkeypatch: pytest.MonkeyPatch):
    done = subprocess.CompletedProcess([], status)
    monkeypatch.setattr(subprocess, "run", lambda command, timeout: done)
    assert check_gpu.run_tests(Console(quiet=True)) is passed


def test_tests_that_hang_have_failed(monkeypatch: pytest.MonkeyPatch):
    def hang(command: list[str], timeout: float) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    assert check_gpu.run_tests(Console(quiet=True)) is False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_weights_have_the_size_of_trained_ones(dtype: torch.dtype):
    config = dataclasses.replace(TINY, d_model=256, vocab_size=512)
    model = random_model(config, torch.device("cpu"), dtype)
    assert model.dtype == dtype and model.head.weight is model.embed.weight
    for name, parameter in model.named_parameters():
        assert not parameter.requires_grad
        wide = parameter.double()
        expected = (1.0, 0.1) if parameter.dim() == 1 else (0.0, parameter.shape[-1] ** -0.5)
        assert wide.mean().item() == pytest.approx(expected[0], abs=0.05), name
        assert wide.std().item() == pytest.approx(expected[1], rel=0.2), name
    again = random_model(config, torch.device("cpu"), dtype)
    assert torch.equal(again.embed.weight, model.embed.weight)


def test_the_shape_is_that_of_the_default_model(real_weights):
    from minillm.config import Config

    assert Config.from_folder(real_weights) == SMOLLM2_135M


def test_the_benchmark_runs_on_random_weights():
    preset = dataclasses.replace(
        PRESETS["full"], small=1, small_cap=3, main=3, main_longest=80, main_cap=4, rounds=1, claims=False
    )
    model = random_model(TINY, torch.device("cpu"), torch.float32)
    stages = ["naive", "cached", "continuous"]
    result = measure(model, "random", random_workload(preset, TINY), preset, stages, Console(quiet=True))
    assert [row.void for row in result.rows] == [None] * 3
    assert result.model["weights"] == "random" and any("Random weights" in note for note in result.notes)
