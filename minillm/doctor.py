"""What this machine has, how fast it is, and what is missing with the command that mends it.

Everything but the standard library and rich is imported only when it is known to be there.
"""

import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from minillm import host
from minillm.errors import InputError
from minillm.terminal import one_line

if TYPE_CHECKING:
    import torch

NEEDED = (
    "torch",
    "numpy",
    "tiktoken",
    "safetensors",
    "regex",
    "jinja2",
    "typer",
    "rich",
    "gguf",
    "matplotlib",
)
OPTIONAL = {
    "huggingface_hub": "hub",
    "jupyterlab": "lessons",
    "fastapi": "serve",
    "pytest": "dev",
}  # package: extra
PYTHON = (3, 11)
RESULTS = Path(__file__).parents[1] / "results"  # of a clone; an installed package has none
BYTES = {"bfloat16": 2, "float32": 4}  # a number


def examine(model: str) -> dict[str, Any]:
    """All findings, ready for JSON. GB and GFLOP are 1e9; `missing` and `advice`: [point, command] pairs."""
    versions = {name: version(name) for name in (*NEEDED, *OPTIONAL)}
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": {"name": cpu_name(), "cores": usable_cores(), "memory_gb": memory_gb()},
        "packages": versions,
        "missing": [],
        "advice": [],
    }
    missing, advice = report["missing"], report["advice"]
    if sys.version_info < PYTHON:
        need = ".".join(map(str, PYTHON))
        missing.append((f"Python {need} or newer", f"make run PYTHON=python{need}"))
    absent = [name for name in NEEDED if versions[name] is None]
    if absent:
        mend = "make run" if "torch" in absent else f"{sys.executable} -m pip install {' '.join(absent)}"
        missing.append((f"packages: {', '.join(absent)}", mend))
    if versions["torch"] is not None:
        report |= examine_torch()
        ours, cpu = report["dtype"], report["devices"][0]
        other = "bfloat16" if ours == "float32" else "float32"
        if len(report["devices"]) == 1 and cpu[f"{other}_gflop_s"] > 1.5 * cpu[f"{ours}_gflop_s"]:
            advice.append((f"{other} multiplies faster here than {ours}, which `auto` takes", f"--dtype {other}"))
        if report["torch"]["cuda"] is None and shutil.which("nvidia-smi"):
            advice.append(("there is an NVIDIA GPU, but this torch is built without CUDA", "make run TORCH=cuda"))
        report["lessons"] = lesson_seconds(RESULTS, cpu, ours)
    report["weights"] = examine_weights(model, loadable=not absent)
    if report["weights"]["error"]:
        missing.append((report["weights"]["error"], report["weights"].pop("mend")))
    elif not absent:
        report["backends"] = examine_backends(Path(report["weights"]["folder"]))
    return report


# ---- the machine


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores that this process may use, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_gb() -> float:
    return round(host.memory_bytes() / 1e9, 1)


# ---- torch, and how fast it is


def examine_torch() -> dict[str, Any]:
    import torch

    from minillm.device import cpu_has_bf16, pick_device, pick_dtype

    devices = [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]
    preferred = pick_device("auto")
    return {
        "torch": {
            "version": torch.__version__,
            "cuda": torch.version.cuda,
            "threads": torch.get_num_threads(),
            "onednn": torch.backends.mkldnn.is_available(),
            "cpu_bfloat16": cpu_has_bf16(),
        },
        "devices": [measure(device) for device in devices],
        "device": str(preferred),
        "dtype": str(pick_dtype("auto", preferred)).removeprefix("torch."),
    }


def measure(device: "torch.device") -> dict[str, Any]:
    """Copy bandwidth (GB/s, read and written) and the speed of a square matmul (GFLOP/s) in two dtypes."""
    import torch

    from minillm.device import synchronize

    def seconds(work: Callable[[], object]) -> float:
        """The median of five, after one to warm up."""
        times = []
        for _ in range(6):
            began = time.perf_counter()
            work()
            synchronize(device)
            times.append(time.perf_counter() - began)
        return statistics.median(times[1:])

    on_gpu = device.type == "cuda"
    nbytes = 1 << 30 if on_gpu else copy_bytes()
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found: dict[str, Any] = {
        "device": str(device),
        "name": torch.cuda.get_device_name(device) if on_gpu else cpu_name(),
        "copy_gb_s": round(2 * nbytes / seconds(lambda: target.copy_(source)) / 1e9, 1),
    }
    n = 4096 if on_gpu else 768
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.ones(n, n, dtype=dtype, device=device)
        speed = 2 * n**3 / seconds(lambda a=a: a @ a)  # type: ignore[misc]
        found[f"{str(dtype).removeprefix('torch.')}_gflop_s"] = round(speed / 1e9)
    return found


def copy_bytes() -> int:
    """A buffer too big for the last cache: four times that, from 256 MiB to 1 GiB."""
    try:
        cache = os.sysconf("SC_LEVEL3_CACHE_SIZE")
    except (ValueError, OSError):  # macOS
        cache = 0
    return min(max(4 * cache, 1 << 28), 1 << 30)


def examine_backends(folder: Path) -> dict[str, str | None]:
    """{attention backend: why it cannot run this model here, with `auto` device and dtype; None: it can}."""
    from minillm.config import Config
    from minillm.device import pick_device, pick_dtype
    from minillm.kernels import BACKENDS, why_not
    from minillm.kernels.choose import attention_only

    device = pick_device("auto")
    model = attention_only(Config.from_folder(folder), device, pick_dtype("auto", device))
    return {name: why_not(name, model) for name in BACKENDS}


# ---- the lessons


def lesson_seconds(results: Path, here: dict[str, Any], dtype: str) -> dict[str, list[float]]:
    """{lesson: [least, most] seconds on this machine}, from stored runs on another: empty where there are none.

    Steps with few tokens take their time from memory, steps with many from arithmetic. So every lesson lies between
    its stored time scaled by the one speed, and by the other. Both machines' speeds come from `measure`.
    """
    for path in sorted(results.glob("*.json")):
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))["sections"]["lessons"]
            there, their_dtype = stored["speeds"], stored["dtype"]
        except (KeyError, TypeError, ValueError, OSError):
            continue
        memory = there["copy_gb_s"] / here["copy_gb_s"] * BYTES[dtype] / BYTES[their_dtype]
        arithmetic = there[f"{their_dtype}_gflop_s"] / here[f"{dtype}_gflop_s"]
        low, high = sorted((memory, arithmetic))
        return {
            name: [round(run["seconds"] * low, 1), round(run["seconds"] * high, 1)]
            for name, run in stored["seconds"].items()
            if run["size"] == "default"
        }
    return {}


# ---- weights


def examine_weights(model: str, loadable: bool) -> dict[str, Any]:
    """Whether a model's folder is there and whole: config, tokenizer, every tensor's name and shape.

    The numbers themselves are not read. Without the packages only the folder is looked for.
    """
    from minillm.fetch import find, manifest

    found: dict[str, Any] = {"model": model, "folder": None, "error": None}
    known = model in manifest()
    try:
        folder = find(model)
        found["folder"] = str(folder)
        if loadable:
            check_folder(folder)
    except InputError as error:
        found["error"] = str(error)
        fetch = f"minillm weights {model}" if known else "minillm weights --list"
        found["mend"] = f"rm -r '{found['folder']}' && {fetch}" if known and found["folder"] else fetch
    return found


def check_folder(folder: Path) -> None:
    """Raises InputError for a model folder that `Llama` or `Tokenizer` would refuse."""
    import torch

    from minillm.config import Config
    from minillm.model import Llama
    from minillm.tokenizer import Tokenizer
    from minillm.weights import match, open_tensors

    config = Config.from_folder(folder)
    Tokenizer.from_pretrained(folder)
    with torch.device("meta"):
        model = Llama(config)
    with ExitStack() as stack:
        match(folder, model, config, open_tensors(folder, stack))


# ---- the page


def minutes(lesson: tuple[str, list[float]]) -> str:
    name, (least, most) = lesson
    low, high = f"{least / 60:.1f}", f"{most / 60:.1f}"
    return f"{name[:2]} {low}" + (f" to {high}" if high != low else "")


def show(report: dict[str, Any], console: Console) -> None:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")

    def row(name: str, value: str) -> None:
        table.add_row(Text(name), Text(one_line(value)))

    cpu, torch = report["cpu"], report.get("torch")
    row("Python", f"{report['python']} on {report['platform']}")
    row("CPU", f"{cpu['name']}, {cpu['cores']} cores for this process, {cpu['memory_gb']} GB of memory")
    if torch:
        cuda = f"CUDA {torch['cuda']}" if torch["cuda"] else "no CUDA"
        onednn = "with oneDNN" if torch["onednn"] else "without oneDNN (slower on a CPU)"
        row("torch", f"{torch['version']}, {cuda}, {onednn}, {torch['threads']} threads")
        for device in report["devices"]:
            speeds = f"float32 {device['float32_gflop_s']}, bfloat16 {device['bfloat16_gflop_s']} GFLOP/s"
            row(device["device"], f"copies {device['copy_gb_s']} GB/s (read + written); matmul {speeds}")
            if device["device"] != "cpu":
                row("", device["name"])
        bf16 = "this CPU multiplies bfloat16" if torch["cpu_bfloat16"] else "this CPU only emulates bfloat16"
        row("auto means", f"--device {report['device']} --dtype {report['dtype']} ({bf16})")
    row("packages", ", ".join(f"{name} {report['packages'][name] or '(missing)'}" for name in NEEDED))
    extras = [f"{name} {found}" for name in OPTIONAL if (found := report["packages"][name])]
    absent = [f"{name} (minillm[{extra}])" for name, extra in OPTIONAL.items() if not report["packages"][name]]
    row("optional", ", ".join(extras) + ("; not here: " if extras and absent else "") + ", ".join(absent))
    if lessons := report.get("lessons"):
        row("lessons", f"minutes of machine time, estimated: {', '.join(map(minutes, lessons.items()))}")
    if backends := report.get("backends"):
        lacking = [f"{name} ({reason})" for name, reason in backends.items() if reason]
        here = ", ".join(name for name, reason in backends.items() if not reason)
        row("backends", here + ("; not here: " if lacking else "") + ", ".join(lacking))
    weights = report["weights"]
    row("weights", f"{weights['model']}: {'missing or broken' if weights['error'] else weights['folder']}")
    console.print(table)
    for colour, label, points in (
        ("red", "missing", report["missing"]),
        ("yellow", "advice", report["advice"]),
    ):
        for what, mend in points:
            console.print(Text.assemble((f"\n{label}: ", f"bold {colour}"), one_line(what)), soft_wrap=True)
            console.print(Text.assemble("  run  ", (one_line(mend), "bold")), soft_wrap=True)
    if not report["missing"]:
        console.print(Text("\nAll that is needed is here.", "green"))
