"""`python -m minillm.bench.check_gpu [MODEL]`: the CUDA tests and the benchmarks on a GPU, in six minutes.

Works with the torch that is there (2.11 and newer) and needs no set-up: without MODEL's weights it takes
random ones of the same shape, and says so. The JSON goes to $OUT if that is set, else to results/, with a section for
each part as soon as it is measured: cuda_graphs (decode steps), continuous_static, targets, backends, ladder.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from minillm.bench import backends, ceiling, decoding, ladder, machine, report, results
from minillm.bench.claims import Claim, at_least, at_most, not_measured
from minillm.bench.decoding import GRAPHS, Cell, Result, Served
from minillm.bench.workload import FULL, random_workload, real_workload
from minillm.config import Config, RopeScaling
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
LLAMA_1B = Config(  # Llama-3.2-1B
    vocab_size=128256,
    d_model=2048,
    n_layers=16,
    n_heads=32,
    n_kv_heads=8,
    head_dim=64,
    d_ff=8192,
    norm_eps=1e-5,
    rope_theta=500_000.0,
    context=131072,
    rope_scaling=RopeScaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192),
    tied=True,
    eos=(128001,),
)
SHAPES = {"SmolLM2-135M": SMOLLM2_135M, "Llama-3.2-1B": LLAMA_1B}
SMALL, LARGE = SHAPES
RECORDED = "triton_paged"  # the backend that can be recorded

# of six minutes; what a part does not use is not handed on
TEST_SECONDS = 100
DECODE_SECONDS = 60  # for each shape
LADDER_SECONDS = 30
BACKENDS_PLAN = backends.Plan(batches=(1, 32), contexts=(512, 2048), rounds=30, seconds=1.0)
SERVED = {SMALL: ((8, 120), (32, 240)), LARGE: ((32, 240),)}  # (slots, requests)


def main() -> int:
    """The exit status: 0; 1 if there is no GPU, a test failed or a stage did not emit the right text; 2 if MODEL is not
    there."""
    console = Console(highlight=False)
    if not torch.cuda.is_available():
        console.print(f"check-gpu needs a CUDA GPU, and torch {torch.__version__} sees none")
        return 1
    wanted = sys.argv[1] if len(sys.argv) > 1 else None
    try:
        folder = find(wanted or default_name())
    except InputError as error:
        console.print(f"{error}")
        if wanted:
            return 2
        folder = None
    tests_passed = run_tests(console)
    out = Path(os.environ.get("OUT") or "results")
    out.mkdir(parents=True, exist_ok=True)
    device, path = torch.device("cuda"), out / "check-gpu.json"
    measure_decoding(device, path, console)
    found = backends.measure(
        SMOLLM2_135M, f"{SMALL}'s shape", device, pick_dtype("auto", device), BACKENDS_PLAN, console
    )
    backends.show(found, console)
    results.add(path, "backends", backends.as_json(found))
    stages_are_right = climb(folder, out, console)
    return 0 if tests_passed and stages_are_right else 1


def climb(folder: Path | None, out: Path, console: Console) -> bool:
    """The ladder on the model in this folder (None: on the default one's shape). Whether every text is right."""
    # the full preset's prompts, but fewer and shorter: a GPU is quick to reach the same numbers again
    preset = replace(
        FULL, name="check-gpu", main=12, main_cap=64, max_running=8, rounds=1, seconds=LADDER_SECONDS, claims=False
    )
    device = torch.device("cuda")
    if folder is None:
        console.print("Random weights of the shape of SmolLM2-135M, and random prompts")
        name = "SmolLM2-135M's shape"
        model = random_model(SMOLLM2_135M, device, pick_dtype("auto", device))
        workload = random_workload(preset, model.config)
    else:
        name = folder.name
        model = Llama.from_pretrained(folder, device=device)
        workload = real_workload(Tokenizer.from_pretrained(folder), preset, model.config)
    result = ladder.measure(model, name, workload, preset, ladder.pick_stages(None), console)
    report.show(result, console)
    report.save(result, out / "check-gpu.json", out / "check-gpu.png", console)
    return not any(row.void for row in result.rows)


def measure_decoding(
    device: torch.device, path: Path, console: Console, shapes: dict[str, Config] = SHAPES, **limits: Any
) -> None:
    """Decode steps, then continuous against static batching, on random weights of each shape; then the targets.

    `limits` go to `decoding.measure`. Every part is a section of the JSON file at once.
    """
    found: dict[str, Result] = {}
    served: list[Served] = []
    dtype = pick_dtype("auto", device)
    for name, config in shapes.items():
        model = random_model(config, device, dtype)
        ceilings = ceiling.measure(device, dtype, 0.3)
        result = decoding.measure(model, name, ceilings, **{"seconds": DECODE_SECONDS, **limits})
        found[name] = result
        decoding.show(result, console)
        save(path, "cuda_graphs", device, as_json(list(found.values())))
        recorded = any(cell.way == RECORDED + GRAPHS and cell.seconds for cell in result.cells)
        backend, scale = (RECORDED, 1.0) if recorded else ("gather", 0.1)  # eagerly, all of it would take minutes
        for slots, requests in SERVED.get(name, ()):
            served.append(decoding.serve(model, name, backend, slots, requests, scale))
        del model
    decoding.show_served(served, console)
    rows = [asdict(row) | {"ratio": row.ratio, "step_ratio": row.step_ratio} for row in served]
    save(path, "continuous_static", device, {"rows": rows})
    claims = targets(found, served)
    for claim in claims:
        measured = "not measured" if claim.measured is None else f"{claim.measured:.2f} x"
        met = {True: "met", False: "missed", None: ""}[claim.met]
        console.print(f"{claim.claim}: target {claim.target}, {measured} {met} ({claim.detail})")
    save(path, "targets", device, {"claims": [asdict(claim) for claim in claims]})


def save(path: Path, section: str, device: torch.device, content: dict[str, Any]) -> None:
    results.add(path, section, {"about": machine.describe(device), **content})


def as_json(found: Sequence[Result]) -> dict[str, Any]:
    """All that was measured, and in `rows` what a reader looks for."""
    rows = [
        {"model": result.name, "rows": cell.batch, "way": cell.way}
        | ({"not measured": cell.why_not} if cell.seconds is None else in_short(cell))
        for result in found
        for cell in result.cells
    ]
    return {"rows": rows, "results": [asdict(result) for result in found]}


def in_short(cell: Cell) -> dict[str, Any]:
    values = {
        "ms": cell.seconds and cell.seconds * 1e3,
        "tokens/s": cell.tokens_per_s,
        "of_floor": cell.of_floor,
        "launch_bound": cell.launch_bound,
        "gap_ms": cell.gap and cell.gap * 1e3,
    }
    return {name: round(value, 3) for name, value in values.items() if value is not None}


def targets(found: dict[str, Result], served: Sequence[Served]) -> list[Claim]:
    """What graphs and continuous batching are said to buy on a GPU, with what was measured."""
    claims = []
    way = RECORDED + GRAPHS
    what = f"graphs over the same backend run eagerly, {SMALL}'s shape, batch 1, decode tokens/s"
    small = found.get(SMALL)
    if small is not None and (ratio := small.ratio(way, RECORDED, 1)):
        detail = f"over gather: {decoding.times(small.ratio(way, 'gather', 1))}"
        claims.append(at_least(what, 5, ratio, detail))
    else:
        claims.append(not_measured(what, ">= 5 x", reason(small, way, 1)))
    what = f"a decode step over the time to move weights and K and V, {LARGE}'s shape, batch 64"
    large = found.get(LARGE)
    cell = large.cell(way, 64) if large else None
    if cell is not None and cell.seconds:
        detail = f"{decoding.ms(cell.seconds)} ms, of which the graph {decoding.ms(cell.replay)}"
        claims.append(at_most(what, 2, cell.seconds / cell.floor, detail))
    else:
        claims.append(not_measured(what, "<= 2 x", reason(large, way, 64)))
    for row in served:
        what = (
            f"static to continuous, the article's mix, {row.model}'s shape, {row.slots} slots, time to the last token"
        )
        detail = f"{decoding.times(row.step_ratio)} by the number of steps"
        claims.append(at_least(what, 3, row.ratio, detail))
    return claims


def reason(result: Result | None, way: str, batch: int) -> str:
    cell = result.cell(way, batch) if result else None
    if cell is not None and cell.why_not:
        return cell.why_not
    return (result.absent.get(RECORDED) if result else None) or "it did not run"


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
