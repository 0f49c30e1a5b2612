"""Replicas of a tiny model for `test_cluster`, in a process of their own: `python cluster_server.py` prints the URL."""

import asyncio
import os
import time
from functools import partial
from typing import Any

import torch
from starlette.requests import Request
from starlette.responses import JSONResponse

from minillm.config import Config
from minillm.engine import Engine
from minillm.model import Llama
from minillm.request import Event
from minillm.server import cluster
from minillm.server.app import make_app
from minillm.server.loop import EngineLoop
from minillm.sharing import SharedSlots
from minillm.tokenizer import Tokenizer

TINY = Config(
    vocab_size=60,
    d_model=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    d_ff=48,
    norm_eps=1e-5,
    rope_theta=10000.0,
    context=256,
    tied=True,
    eos=(),
)
PAUSE = 0.02  # seconds before each step: a stream of 50 tokens takes a second


def tokenizer() -> Tokenizer:
    """A letter is a token."""
    data: dict[str, Any] = {"model": {"type": "BPE", "vocab": {chr(ord("!") + i): i for i in range(60)}, "merges": []}}
    data["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    return Tokenizer({**data, "added_tokens": []}, {})


class Slow(Engine):
    broken = False

    def step(self) -> list[Event]:
        if self.broken:
            raise SystemExit("broken by the test")  # what the loop does not mend
        time.sleep(PAUSE)
        return super().step()


def engine(kind: type[Engine] = Engine) -> Engine:
    torch.set_num_threads(1)
    model = Llama.random(TINY, seed=0, dtype=torch.float64)
    return kind(model, tokenizer(), max_running=8, budget=64, slots=partial(SharedSlots, n_slots=4096))


def make() -> tuple[EngineLoop, Any]:
    """The real app, and what tests want to know and to break."""
    slow = engine(Slow)
    assert isinstance(slow, Slow)
    loop = EngineLoop(slow)
    app = make_app(loop, "tiny", tokenizer(), api_key="key", live=False)

    @app.middleware("http")
    async def own(request: Request, go_on: Any) -> Any:
        await asyncio.sleep(float(request.headers.get("x-wait", 0)))
        if request.url.path == "/break":
            slow.broken = True
        response = await go_on(request)
        response.headers["x-pid"] = str(os.getpid())
        return response

    @app.get("/who")
    async def who() -> JSONResponse:
        return JSONResponse({"pid": os.getpid(), "threads": torch.get_num_threads()})

    return loop, app


if __name__ == "__main__":
    import cluster_server  # so that `make` is found by its name in the replicas, and not pickled whole

    cluster.run(cluster_server.make, replicas=2, port=0, drain_seconds=10, ready=partial(print, flush=True))
