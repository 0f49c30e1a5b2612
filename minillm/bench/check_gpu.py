"""`python -m minillm.bench.check_gpu [MODEL]`: the CUDA tests and the benchmark on a GPU, in six minutes.

Works with the torch that is there (2.11 and newer) and needs no set-up: without MODEL's weights it takes
random ones of the same shape, and says so. The JSON goes to $OUT if that is set, else to results/.
"""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from minillm.bench import ladder, report
from minillm.bench.workload import FULL, random_workload, real_workload
from minillm.config import Config
from minillm.device import pick_dtype
from minillm.errors import InputError
from minillm.fetch import default_name, find
from minillm.model import Llama
from minillm.tokenizer import Tokenizer

SMOLLM2_135M = Config(
    vocab_size=49152,
    d_model=576,
    n_layers=30,
    n_heads=9,
    n_kv_heads=3,
    head_dim=64,
    d_ff=1536,
    norm_eps=1e-5,
    rope_theta=100_000.0,
    context=8192,
    tied=True,
    eos=(2,),
)
TEST_SECONDS = 120


def main() -> int:
    """The exit status: 0, or 1 if there is no GPU, a test failed or a stage did not emit the right text."""
    console = Console(highlight=False)
    if not torch.cuda.is_available():
        console.print(f"check-gpu needs a CUDA GPU, and torch {torch.__version__} sees none")
        return 1
    tests_passed = run_tests(console)
    out = Path(os.environ.get("OUT") or "results")
    out.mkdir(parents=True, exist_ok=True)
    # the whole of the full preset, with fewer rounds: a GPU is quick to reach the same numbers again
    preset = replace(FULL, name="check-gpu", max_running=32, rounds=2, seconds=100)
    device = torch.device("cuda")
    name = sys.argv[1] if len(sys.argv) > 1 else default_name()
    try:
        folder = find(name)
    except InputError as error:
        if len(sys.argv) > 1:
            console.print(f"{error}")
            return 2
        console.print(f"{error}: random weights of the shape of SmolLM2-135M instead, and random prompts")
        name = "SmolLM2-135M's shape"
        model = random_model(SMOLLM2_135M, device, pick_dtype("auto", device))
        workload = random_workload(preset, model.config)
    else:
        name = folder.name
        model = Llama.from_pretrained(folder, device="cuda")
        workload = real_workload(Tokenizer.from_pretrained(folder), preset, model.config)
    result = ladder.measure(model, name, workload, preset, ladder.pick_stages(None), console)
    report.show(result, console)
    report.save(result, out / "check-gpu.json", out / "check-gpu.png", console)
    return 0 if tests_passed and not any(row.void for row in result.rows) else 1


def run_tests(console: Console) -> bool:
    """Whether the tests marked `cuda` passed; true as well if there is no pytest or no such test."""
    if importlib.util.find_spec("pytest") is None:
        console.print("pytest is not installed; the CUDA tests are left out")
        return True
    # these files alone: others import packages that a GPU machine may lack
    tests = Path(__file__).resolve().parents[2] / "tests"
    files = [str(path) for path in sorted(tests.glob("test_*.py")) if "mark.cuda" in path.read_text("utf-8")]
    if not files:
        console.print(f"{tests} holds no test marked cuda")
        return True
    command = [sys.executable, "-m", "pytest", "-m", "cuda", "-p", "no:cacheprovider", *files]
    try:
        status = subprocess.run(command, timeout=TEST_SECONDS).returncode
    except subprocess.TimeoutExpired:
        console.print(f"the CUDA tests took longer than {TEST_SECONDS} s")
        return False
    if status == 5:  # pytest: no test was selected
        console.print("there is no test marked cuda")
    return status in (0, 5)


def random_model(config: Config, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Llama:
    """As `Llama.random`, but drawn on the device in the final dtype: much sooner, other numbers."""
    generator = torch.Generator(device).manual_seed(seed)
    with torch.device(device):
        model = Llama(config).to(dtype).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norm weights (about 1) or biases
            parameter.normal_(1.0, 0.1, generator=generator)
        else:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
    return model


if __name__ == "__main__":
    sys.exit(main())
