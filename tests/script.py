"""What the tests of requests, scheduling and stages share: a model that follows a table, a codec of a few pieces,
ways to spoil memory that nobody may read, and the oracle `solo`."""

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from conftest import TINY
from torch import Tensor

from minillm.attention import Attend
from minillm.batch import Batch
from minillm.cache import CachedAttend, KVPool
from minillm.engine import Engine
from minillm.params import SamplingParams
from minillm.request import Event, Request, make_request
from minillm.stages import naive

NAN = float("nan")
EOS = 1


# ---- models


class Script:
    """After token t come the logits `table[t]`, [V, V]. It goes through the same seam as a real model.

    Its keys and values are zeros, so attention adds exactly nothing, unless it reads memory that holds NaN.
    """

    def __init__(self, table: Tensor, eos: Sequence[int] = (EOS,), context: int = 256):
        self.table = table
        self.config = replace(TINY, vocab_size=len(table), n_layers=1, eos=tuple(eos), context=context)
        self.device, self.dtype = table.device, table.dtype
        self.steps: list[int] = []  # tokens in each forward pass
        self.before: Callable[[], None] = lambda: None  # called at the start of each forward pass

    def __call__(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        self.before()
        self.steps.append(tokens.numel())
        c = self.config
        q = torch.zeros(*tokens.shape, c.n_heads, c.head_dim, dtype=self.dtype)  # [..., T, H, D]
        kv = torch.zeros(*tokens.shape, c.n_kv_heads, c.head_dim, dtype=self.dtype)  # [..., T, Hkv, D]
        return self.table[tokens] + attend(0, q, kv, kv).sum((-1, -2))[..., None]  # [..., T, V]

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


def follow(then: Mapping[int, int], size: int = 64, eos: Sequence[int] = (EOS,), context: int = 256) -> Script:
    """A script in which token t is followed by `then[t]`, or by itself; every other token is equally unlikely."""
    table = torch.zeros(size, size, dtype=torch.float64)
    table[torch.arange(size), [then.get(t, t) for t in range(size)]] = 10.0
    return Script(table, eos, context)


def chain(*tokens: int) -> dict[int, int]:
    """Each of these tokens is followed by the next."""
    return dict(zip(tokens, tokens[1:], strict=False))


class Watched:
    """A model that spoils, before each pass, all memory this pass may not read; and that keeps every row of logits.

    Places of a rectangle that are not computed yet get 1e4 (a mask hides any number), free slots of a pool NaN.
    """

    def __init__(self, model: object):
        self.model = model
        self.config, self.device, self.dtype = model.config, model.device, model.dtype
        self.rows: list[Tensor] = []  # [V] each, in the order of the events

    def __call__(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        if isinstance(attend, CachedAttend):
            cache = attend.cache
            starts = positions.reshape(-1, positions.shape[-1])[:, 0]  # [B]
            free = torch.arange(cache.k.shape[-2]) >= starts[:, None]  # [B, S]
            free = free.reshape(cache.k.shape[2:-1])  # [B, S] or [S]
            cache.k[:, :, free] = cache.v[:, :, free] = 1e4
        elif hasattr(attend, "pool"):
            spoil(attend.pool, computed(attend.pool, attend.batch))
        return self.model(tokens, positions, attend)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.model.logits(hidden)
        self.rows += logits
        return logits


def computed(pool: KVPool, batch: Batch) -> list[int]:
    """The slots of everything computed before this step, of the sequences in it."""
    return [slot for chunk in batch.chunks for slot in pool.table[chunk.row, : chunk.start].tolist()]


def spoil(pool: KVPool, keep: Sequence[int]) -> None:
    """NaN in every slot but these."""
    free = torch.ones(pool.k.shape[2], dtype=torch.bool)
    free[torch.tensor(keep, dtype=torch.int64)] = False
    pool.k[:, :, free] = pool.v[:, :, free] = NAN


class PoisonedEngine(Engine):
    """Before each step, whatever no running request has computed is NaN."""

    def step(self) -> list[Event]:
        spoil(self.pool, [slot for r in self.scheduler.running for slot in r.slots[: r.computed]])
        return super().step()


# ---- text


class Codec:
    """Token t stands for the bytes `pieces[t]`; a character is encoded as the first piece equal to it."""

    def __init__(self, pieces: Sequence[bytes | str], bos: Sequence[int] = ()):
        self.pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
        self.bos = list(bos)

    def encode(self, text: str) -> list[int]:
        return self.bos + [self.pieces.index(char.encode()) for char in text]

    def decoder(self) -> "Pieces":
        return Pieces(self.pieces)


class Pieces:
    def __init__(self, pieces: Sequence[bytes]):
        self.pieces = pieces
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self.utf8.decode(self.pieces[token])

    def flush(self) -> str:
        return self.utf8.decode(b"", final=True)


# ---- results

Text = tuple[list[int], str | None]  # token ids, finish reason


def texts(events: Iterable[Event], requests: Sequence[Request]) -> list[Text]:
    """What a run made, from its events; each request must end once, and nothing may follow the end."""
    made: dict[Request, Text] = {request: ([], None) for request in requests}
    for event in events:
        tokens, ended = made[event.request]
        assert ended is None, "an event after the end"
        if event.token is not None:
            tokens.append(event.token)
        made[event.request] = (tokens, event.finish_reason)
    for request, (tokens, reason) in made.items():
        assert tokens == request.output and reason == request.finish_reason is not None
    return list(made.values())


def solo(model: object, prompt: Sequence[int], params: SamplingParams, max_len: int = 256) -> Text:
    """The oracle: this request alone, by the naive stage, which keeps nothing between two tokens."""
    request = make_request(prompt, params, model.config, None, max_len)
    return texts(naive.generate(model, [request]), [request])[0]


def run_out(engine: Engine) -> list[Event]:
    """Steps until nothing is left to do."""
    events = []
    while engine.busy:
        events += engine.step()
    assert_drained(engine)
    return events


def assert_drained(engine: Engine) -> None:
    scheduler = engine.scheduler
    assert not engine.busy and not scheduler.waiting and not scheduler.running
    assert sorted(scheduler.slots.free_rows) == list(range(scheduler.max_running))
    assert not engine._requests and not engine._inbox
