"""`--peer transformers`: starts `transformers_worker` and asks it."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import minillm
from minillm.bench.harness import Job
from minillm.bench.peers.base import Grid, PeerRun, Point, Rows, Target, point
from minillm.errors import InputError

GENERATE, GENERATE_BATCH = "transformers generate", "transformers generate_batch"
WORKER = "minillm.bench.peers.transformers_worker"


class Transformers:
    """One worker process, from `start` to `close`."""

    name = "transformers"

    def __init__(self) -> None:
        self.worker: subprocess.Popen[str] | None = None

    def check(self) -> None:
        if importlib.util.find_spec("transformers") is None:
            raise InputError(f"peer transformers is not installed; run `{sys.executable} -m pip install transformers`")

    def start(self, target: Target) -> Rows:
        self.target = target
        self.errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # the worker's stderr
        package = str(Path(minillm.__file__).resolve().parents[1])
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        self.worker = subprocess.Popen(
            [sys.executable, "-m", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            encoding="utf-8",
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"},
            start_new_session=True,  # Ctrl-C is for us; we end the worker
        )
        about = self.ask(
            "load",
            folder=str(target.folder.resolve()),
            dtype=target.dtype,
            device=target.device,
            threads=target.threads,
        )
        with_what = f"version {about['version']}, attention {about['attention']}"
        return Rows(
            on_set={GENERATE: self.generate, GENERATE_BATCH: self.generate_batch},
            on_grid={GENERATE: self.generate_grid},
            notes={
                GENERATE: f"{with_what}; on the set in groups of {target.max_running}",
                GENERATE_BATCH: f"{with_what}; {target.max_running} requests and {target.budget} tokens a step at "
                "most, no shared prefixes",
            },
        )

    def generate(self, jobs: Sequence[Job], max_running: int | None = None) -> PeerRun:
        return self.run("generate", jobs, max_running=max_running or self.target.max_running)

    def generate_batch(self, jobs: Sequence[Job]) -> PeerRun:
        return self.run("generate_batch", jobs, max_running=self.target.max_running, budget=self.target.budget)

    def generate_grid(self, grid: Grid) -> list[Point]:
        jobs = [Job(prompt, grid.n_new) for prompt in grid.prompts]
        return [point(N, self.generate(jobs[:N], max_running=N)) for N in grid.sizes]

    def run(self, order: str, jobs: Sequence[Job], **limits: int) -> PeerRun:
        prompts = [job.prompt for job in jobs]
        answer = self.ask(order, prompts=prompts, n_new=[job.max_tokens for job in jobs], **limits)
        return PeerRun(
            n_tokens=[len(output) for output in answer["outputs"]],
            n_prompt=[len(prompt) for prompt in prompts],  # sent as token ids
            **answer,
        )

    def ask(self, order: str, **details: Any) -> dict[str, Any]:
        """Raises InputError with what the worker says, or with its last words if it is gone."""
        assert self.worker is not None and self.worker.stdin is not None and self.worker.stdout is not None
        try:
            self.worker.stdin.write(json.dumps({"order": order, **details}) + "\n")
            self.worker.stdin.flush()
            line = self.worker.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            status = self.worker.wait()
            self.errors.seek(0)
            words = self.errors.read().strip().splitlines()
            raise InputError(f"peer transformers ended with status {status}: {words[-1] if words else 'no message'}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise InputError(f"peer transformers: {order} failed: {answer['error']}")
        ok: dict[str, Any] = answer["ok"]
        return ok

    def close(self) -> None:
        if self.worker is not None:
            self.worker.kill()
            self.worker.wait()
            for pipe in (self.worker.stdin, self.worker.stdout):
                assert pipe is not None
                try:
                    pipe.close()
                except BrokenPipeError:  # an order that was never read
                    pass
            self.errors.close()
