"""What the tests of requests, scheduling and stages share: a model that follows a table, a codec of a few pieces,
ways to spoil memory that nobody may read, and the oracle `solo`."""

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from conftest import TINY
from torch import Tensor

from minillm import policies
from minillm.attention import Attend
from minillm.batch import Batch
from minillm.cache import CachedAttend, KVPool
from minillm.engine import Engine
from minillm.params import SamplingParams
from minillm.request import Event, Request, make_request
from minillm.scheduler import Plan, Scheduler
from minillm.sharing import SharedSlots
from minillm.slots import BlockSlots, RegionSlots, Slots
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

    def __init__(self, model: object, pools: bool = True):
        self.model, self.pools = model, pools  # whether pools are spoiled too: not where others' blocks may be found
        self.config, self.device, self.dtype = model.config, model.device, model.dtype
        self.rows: list[Tensor] = []  # [V] each, in the order of the events

    def __call__(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        if isinstance(attend, CachedAttend):
            cache = attend.cache
            starts = positions.reshape(-1, positions.shape[-1])[:, 0]  # [B]
            free = torch.arange(cache.k.shape[-2]) >= starts[:, None]  # [B, S]
            free = free.reshape(cache.k.shape[2:-1])  # [B, S] or [S]
            cache.k[:, :, free] = cache.v[:, :, free] = 1e4
        elif self.pools and hasattr(attend, "pool"):
            spoil(attend.pool, computed(attend.pool, attend.batch))
        return self.model(tokens, positions, attend)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.model.logits(hidden)
        self.rows += logits
        return logits


def computed(pool: KVPool, batch: Batch) -> list[int]:
    """The slots of everything computed before this step, of the sequences in it."""
    return [slot for chunk in batch.chunks for slot in pool.table[chunk.row, : chunk.start].tolist()]


def spoil(pool: KVPool, keep: Sequence[int], poison: float = NAN) -> None:
    """NaN, or another number, in every slot but these."""
    free = torch.ones(pool.k.shape[2], dtype=torch.bool)
    free[torch.tensor(keep, dtype=torch.int64)] = False
    pool.k[:, :, free] = pool.v[:, :, free] = poison


class PoisonedEngine(Engine):
    """Before each step, whatever no running request has computed, and nobody can find, is `poison`."""

    poison = NAN

    def step(self) -> list[Event]:
        spoil(self.pool, living(self.scheduler), self.poison)
        return super().step()


class CheckedEngine(PoisonedEngine):
    """Checks all that the scheduler, the slots and the table must keep: between two steps, as soon as a step is
    planned, and when it is packed."""

    def __init__(self, *args: Any, **limits: Any):
        super().__init__(*args, **limits)
        schedule, attend = self.scheduler.schedule, self.attend
        self.plans: list[Plan] = []

        def checked_schedule() -> Plan:
            before, queue = list(self.scheduler.running), set(self.scheduler.waiting)
            plan = schedule()
            check_invariants(self.scheduler, plan)
            assert plan or not self.scheduler.busy, "it hangs"
            for newcomer in self.scheduler.running:
                if newcomer not in before:  # turn: when it is served, and as which it arrived
                    passed = [one for one in self.scheduler.waiting if one in queue]  # not samples without a row
                    most = [one.turn[1] + policies.PATIENCE for one in passed]
                    assert newcomer.turn[1] < min(most, default=float("inf")), "someone was passed once too often"
            self.plans.append(plan)
            return plan

        def checked_attend(pool: KVPool, batch: Batch) -> Attend:
            check_table(pool, self.scheduler, batch)
            return attend(pool, batch)

        self.scheduler.schedule = checked_schedule  # type: ignore[method-assign]
        self.attend = checked_attend

    def step(self) -> list[Event]:
        check_invariants(self.scheduler)
        events = super().step()
        check_invariants(self.scheduler)
        check_table(self.pool, self.scheduler)
        return events


# ---- slots

Kind = Callable[[int, int], Slots]  # (max_running, max_len) -> slots, as `Engine` takes them

KINDS: dict[str, Kind] = {  # with room for all, in blocks that divide nothing in particular
    "regions": RegionSlots,
    "blocks": partial(BlockSlots, size=3),
    "shared": partial(SharedSlots, size=3),
}


def living(scheduler: Scheduler) -> list[int]:
    """The slots that a later step may read: what a running request has computed, and what can be found."""
    slots = scheduler.slots
    keep = [slot for request in scheduler.running for slot in request.slots[: request.computed]]
    if isinstance(slots, SharedSlots):
        keep += [block * slots.size + i for block in slots.entry_of for i in range(slots.size)]
    return keep


def check_invariants(scheduler: Scheduler, plan: Plan = ()) -> None:
    """What holds between two steps; and with a plan, what holds as soon as it is made."""
    counts = dict(plan)
    running, slots = scheduler.running, scheduler.slots
    # the plan: within the budget, nobody twice, nobody for nothing, nobody who does not run
    assert len(counts) == len(plan) <= scheduler.max_running and sum(counts.values()) <= scheduler.budget
    assert all(request in running and 0 < n <= request.pending for request, n in plan)
    # rows: one for each who runs
    rows = [request.row for request in running]
    assert sorted([*slots.free_rows, *rows]) == list(range(len(rows) + len(slots.free_rows)))
    assert len(running) <= scheduler.max_running
    for request in running:
        kv_len = request.computed + counts.get(request, 0)
        assert request.finish_reason is None and 0 <= request.computed < len(request.tokens)
        assert kv_len <= len(request.slots) and request.computed <= request.most_slots <= slots.capacity
        assert request not in scheduler.waiting and request.leader is None
        assert all(to in request.slots for _, to in request.moves) and (plan or not request.moves)
    for request in scheduler.waiting:
        assert request.finish_reason is None and request.leader is None
        assert_holds_nothing(request)
    for leader in (*running, *scheduler.waiting):
        for request in leader.samples:
            assert request.leader is leader and request.finish_reason is None and request.tokens == leader.prompt
            assert request not in scheduler.waiting and request not in running
            assert_holds_nothing(request)
    if isinstance(slots, BlockSlots):
        check_blocks(slots, running, counts)
    else:
        held = [slot for request in running for slot in request.slots]
        assert len(held) == len(set(held)) and all(0 <= slot < slots.n_slots for slot in held)


def assert_holds_nothing(request: Request) -> None:
    assert request.row is None and not request.blocks and not list(request.slots) and request.computed == 0
    assert not request.moves and request.entered == 0


def check_blocks(slots: BlockSlots, running: Sequence[Request], counts: Mapping[Request, int]) -> None:
    total, size = slots.n_slots // slots.size, slots.size
    tables = [block for request in running for block in request.blocks]
    referenced = set(tables)
    assert len(slots.free) + len(referenced) == total and not referenced & set(slots.free)
    assert all(0 <= block < total for block in (*referenced, *slots.free))
    shared = isinstance(slots, SharedSlots)
    assert shared or len(tables) == len(referenced)
    for request in running:
        kv_len = request.computed + counts.get(request, 0)
        # kv_len counts the tokens whose K and V are stored when the step is over: not the one sampled after it
        assert len(request.blocks) == -(-kv_len // size) == len(set(request.blocks))
        assert list(request.slots) == [block * size + i for block in request.blocks for i in range(size)]
        written = {position // size for position in range(request.computed, kv_len)}
        assert all(tables.count(request.blocks[i]) == 1 for i in written), "a block that is written has other owners"
    if not shared:
        return
    assert slots.owners == [tables.count(block) for block in range(total)]
    assert {entry.key: entry for entry in slots.entry_of.values()} == slots.index
    assert all(entry.block == block for block, entry in slots.entry_of.items())
    assert set(slots.chains) == set(running)
    assert 0 <= slots.found <= slots.asked
    for request in running:
        chain = slots.chains[request]
        assert len(chain) == request.computed // size
        for i, entry in enumerate(chain):
            assert list(entry.tokens) == request.tokens[i * size : (i + 1) * size]
            assert entry.parent is (chain[i - 1] if i else None)
            assert entry.block == request.blocks[i] and slots.entry_of[entry.block] is entry


def check_table(pool: KVPool, scheduler: Scheduler, batch: Batch | None = None) -> None:
    """The table says what the requests' slots say, as far as it was told; in a step, of all that the step reads."""
    read = {chunk.row: chunk.kv_len for chunk in batch.chunks} if batch else {}
    for request in scheduler.running:
        assert request.row is not None and request.entered >= read.get(request.row, 0)
        assert pool.table[request.row, : request.entered].tolist() == list(request.slots[: request.entered])


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


def solo(
    model: object, prompt: Sequence[int], params: SamplingParams, max_len: int = 256, sample_index: int = 0
) -> Text:
    """The oracle: this request alone, by the naive stage, which keeps nothing between two tokens."""
    request = make_request(prompt, params, model.config, None, max_len, sample_index=sample_index)
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
    slots = scheduler.slots
    assert sorted(slots.free_rows) == list(range(scheduler.max_running))
    if isinstance(slots, BlockSlots):
        assert sorted(slots.free) == list(range(slots.n_slots // slots.size))
    if isinstance(slots, SharedSlots):
        assert not any(slots.owners) and not slots.chains
        assert {entry.key: entry for entry in slots.entry_of.values()} == slots.index
    assert not engine._requests and not engine._inbox
