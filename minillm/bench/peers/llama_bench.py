"""`--peer llama-bench PATH`: llama.cpp's `llama-batched-bench` on our weights, in our dtype."""

import json
import shutil
import subprocess
from pathlib import Path

import torch

from minillm.bench.peers.base import Grid, Point, Rows, Target
from minillm.bench.peers.gguf_file import cached_gguf
from minillm.errors import InputError

CACHE = Path("build") / "peers"
SECONDS = 600  # for one round of the grid: far more than it takes, so that a program that hangs is found out


class LlamaBench:
    """The program runs once per round, for all N, and ends; nothing is left to close."""

    name = "llama-bench"

    def __init__(self, program: str, cache: Path = CACHE):
        self.program, self.cache = Path(shutil.which(program) or program).absolute(), cache  # a bare name: from PATH
        self.version = ""

    def check(self) -> None:
        if not self.program.is_file():
            raise InputError(
                f"peer llama-bench: there is no file {self.program}; give the path of llama.cpp's llama-batched-bench"
            )
        if "-npl" not in self.call("--help", seconds=30):
            raise InputError(f"{self.program} has no option -npl; give the path of llama.cpp's llama-batched-bench")
        told = [line for line in self.call("--version", seconds=30).splitlines() if line.startswith("version")]
        self.version = told[0] if told else "version unknown"

    def start(self, target: Target) -> Rows:
        if target.device != "cpu":
            raise InputError(f"peer llama-bench runs on the CPU, and we on {target.device}; use --device cpu")
        self.threads = target.threads
        self.gguf = cached_gguf(target.folder, target.config, getattr(torch, target.dtype), self.cache)
        note = (
            f"llama-batched-bench {self.version}; weights {target.dtype}, KV cache and attention as it chooses; "
            "its tokens are random ones and none is sampled"
        )
        return Rows(on_set={}, on_grid={"llama.cpp": self.grid}, notes={"llama.cpp": note})

    def grid(self, grid: Grid) -> list[Point]:
        output = self.call(
            *("-m", str(self.gguf), "-ngl", "0"),
            *("-npp", str(grid.n_prompt), "-ntg", str(grid.n_new), "-npl", ",".join(map(str, grid.sizes))),
            *("-c", str(max(grid.sizes) * (grid.n_prompt + grid.n_new))),
            *("-t", str(self.threads), "-tb", str(self.threads), "--output-format", "jsonl"),
            seconds=SECONDS,
        )
        points = [self.read(line) for line in output.splitlines() if line.startswith("{")]
        if [p.N for p in points] != list(grid.sizes):
            raise InputError(f"{self.program}: was asked for N = {grid.sizes} and told of {[p.N for p in points]}")
        return points

    def read(self, line: str) -> Point:
        """One line of the program's output."""
        try:
            found = json.loads(line)
            N, new = found["pl"], found["pl"] * found["tg"]
            return Point(N, N * found["pp"], new, float(found["t_pp"]), float(found["t_tg"]), new)
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{self.program}: printed {line[:80]!r}, not the JSON of a result ({error!r})") from None

    def call(self, *options: str, seconds: float) -> str:
        """What the program prints. Raises InputError if it cannot be run, fails or takes longer than `seconds`.

        Whatever else ends this call, Ctrl-C among it, `subprocess.run` ends the program too.
        """
        try:
            done = subprocess.run(
                [str(self.program), *options],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds,
                start_new_session=True,  # Ctrl-C is for us
            )
        except OSError as error:
            raise InputError(f"{self.program} cannot be run ({error.strerror}); build llama.cpp's for here") from None
        except subprocess.TimeoutExpired:
            raise InputError(f"{self.program} {' '.join(options)}: took more than {seconds:g} s") from None
        if done.returncode:
            words = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
            raise InputError(f"{self.program} {options[0]}: ended with status {done.returncode}: {words}")
        return done.stdout + done.stderr

    def close(self) -> None:
        pass
