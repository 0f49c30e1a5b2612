"""Decode steps from recorded graphs, on a CPU: a recorder that repeats the operations and holds them to what a CUDA
graph allows. The tests at the end need a GPU."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from conftest import TINY
from hypothesis import given, settings
from hypothesis import strategies as st
from script import EOS, KINDS, NAN, CheckedEngine, Kind, chain, follow, living, run_out, solo, spoil, texts
from test_stages import TEXTS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minillm import attention, graphs
from minillm.batch import Batch
from minillm.cache import KVPool
from minillm.engine import Engine
from minillm.graphs import Graphs, Outputs, Step, buckets, decodes, record_graphs
from minillm.kernels import BACKENDS, Backend, why_not
from minillm.model import Llama
from minillm.params import SamplingParams
from minillm.request import Event, Request
from minillm.scheduler import Plan
from minillm.sharing import SharedSlots
from minillm.slots import BlockSlots

for_all_kinds = pytest.mark.parametrize("slots", KINDS.values(), ids=KINDS)


class FixedAttend:
    """Attention with one shape whatever is stored: every token looks through a whole row of the table."""

    fixed_shape = True

    def __init__(self, pool: KVPool, batch: Batch):
        self.pool, self.batch = pool, batch

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.pool.store(layer, self.batch.slots, k, v)
        slots = self.pool.table[self.batch.seq]  # [T, S]
        places = torch.arange(slots.shape[1], device=slots.device)  # [S]
        mask = attention.visible(self.batch.positions[:, None], places)  # [T, 1, S]
        keys, values = (
            torch.where(mask[:, 0, :, None, None], x, 0)  # a free slot may hold NaN
            for x in self.pool.gather(layer, self.pool.index(slots))
        )  # [T, S, Hkv, D]
        return attention.sdpa(q[:, None], keys, values, mask)[:, 0]  # [T, H, D]


BACKENDS_HERE = {**BACKENDS, "fixed": f"{__name__}:FixedAttend"}


# ---- a graph without a GPU


class Tape(TorchDispatchMode):
    """Writes down every operation: its name, its numbers, the shapes of what it reads, and the address of whatever was
    there before. What would make a host wait, or bring values from it, is refused."""

    WAITS = ("_local_scalar_dense", "nonzero", "_unique2", "masked_select", "lift_fresh", "is_nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []
        self.made: dict[int, Tensor] = {}  # by the operations: {address of the memory: a tensor in it, kept alive}
        self.outside: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._opname
        assert name not in self.WAITS, f"{name} inside a graph"
        self.ops.append((name, [self.describe(x) for x in args], self.describe(list((kwargs or {}).items()))))
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in self.outside:
                self.made[x.untyped_storage().data_ptr()] = x
        return out

    def describe(self, x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return [self.describe(one) for one in x]
        if not isinstance(x, Tensor):
            return x
        memory = x.untyped_storage().data_ptr()
        if memory not in self.made:
            self.outside[memory] = x
        return x.shape, x.stride(), None if memory in self.made else x.data_ptr()


class FakeRecorder:
    """Repeats a step by calling it, which must do exactly what was recorded. As on a GPU, what it puts out is always in
    the same place, and spoilt when another graph has run."""

    def __init__(self) -> None:
        self.recorded: list[Outputs] = []
        self.replayed: list[int] = []  # the number of rows of each replay
        self.before = lambda: None

    def __call__(self, step: Step) -> Step:
        step()  # to warm up
        with Tape() as tape:
            outputs = step()
        assert not {t.untyped_storage().data_ptr() for t in outputs} & tape.outside.keys()
        self.recorded.append(outputs)

        def replay() -> Outputs:
            self.before()
            with Tape() as again:
                new = step()
            assert again.ops == tape.ops
            for logits, best in self.recorded:
                logits.fill_(NAN), best.fill_(-7)
            for old, value in zip(outputs, new, strict=True):
                old.copy_(value)
            self.replayed.append(len(outputs[0]))
            return outputs

        return replay


@contextmanager
def faked() -> Iterator[FakeRecorder]:
    """Engines that are made inside record graphs with a fake recorder, on the CPU."""
    fake = FakeRecorder()

    def record(model: Llama, pool: KVPool, backend: Backend, most: int) -> Graphs:
        return Graphs(model, pool, FixedAttend, most, fake)  # the engine's own may be wrapped, and look at host state

    with patch("minillm.engine.record_graphs", record), patch.dict(BACKENDS, BACKENDS_HERE):
        yield fake


class WatchedEngine(CheckedEngine):
    """Checked before and after each step; and no step may write to a slot that is not its own, but for the scratch."""

    def __init__(self, *args: Any, **limits: Any):
        super().__init__(*args, **limits)
        schedule = self.scheduler.schedule
        self.decoded: list[int] = []  # the number of rows of each decode step
        self.may_hold: set[int] = set()  # slots

        def noted() -> Plan:
            before = living(self.scheduler)
            plan = schedule()
            self.decoded += [len(plan)] if plan and decodes(plan) else []
            new = [slot for r, n in plan for slot in r.slots[r.computed : r.computed + n]]
            self.may_hold = {*before, *living(self.scheduler), *new, *(to for r, _ in plan for _, to in r.moves)}
            return plan

        self.scheduler.schedule = noted  # type: ignore[method-assign]

    def step(self) -> list[Event]:
        events = super().step()
        free = torch.tensor(sorted(set(range(self.pool.k.shape[2] - 1)) - self.may_hold), dtype=torch.int64)
        assert self.pool.k[:, :, free].isnan().all() and self.pool.v[:, :, free].isnan().all()
        return events


def an_engine(model: Any, **limits: Any) -> WatchedEngine:
    defaults: dict[str, Any] = {"max_running": 4, "budget": 8, "max_len": 24, "backend": "fixed"}
    return WatchedEngine(model, **{**defaults, **limits})


def sizes(engine: WatchedEngine) -> list[int]:
    """The rows of the graphs that should have run, in order."""
    return [min(b for b in buckets(engine.scheduler.max_running) if b >= n) for n in engine.decoded]


# ---- buckets


@given(st.integers(1, 1000))
def test_every_number_of_rows_has_a_graph_that_fits_well(most: int) -> None:
    found = buckets(most)
    assert found == sorted(set(found)) and found[-1] == most and found[0] == 1
    for n in range(1, most + 1):
        size = min(b for b in found if b >= n)
        assert size < 2 * n or size - n < 32


def test_the_buckets_of_256() -> None:
    assert buckets(256) == [1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256]
    assert buckets(40) == [1, 2, 4, 8, 16, 32, 40]
    assert [buckets(n) for n in (1, 2, 3, 32, 33)] == [
        [1], [1, 2], [1, 2, 3], [1, 2, 4, 8, 16, 32], [1, 2, 4, 8, 16, 32, 33],
    ]  # fmt: skip


def test_the_largest_is_recorded_first_and_each_of_them_once(tiny: Llama) -> None:
    with faked() as fake:
        an_engine(tiny, max_running=40, budget=40)
    assert [len(logits) for logits, _ in fake.recorded] == [40, 32, 16, 8, 4, 2, 1]


def test_recording_touches_no_slot_but_the_scratch(tiny: Llama) -> None:
    pool = KVPool(tiny, 10, 3, 5)
    spoil(pool, [])
    pool.table.fill_(-7)
    made = Graphs(tiny, pool, FixedAttend, 3, FakeRecorder())
    assert pool.k[:, :, :10].isnan().all() and pool.v[:, :, :10].isnan().all()
    assert pool.k[:, :, 10].isfinite().all()
    assert (pool.table[:3] == -7).all() and pool.table[3].tolist() == [10] * 5 and made.row == 3
    table = pool.table
    assert Graphs(tiny, pool, FixedAttend, 3, FakeRecorder()).row == 3
    assert pool.table is table, "graphs of another backend have moved the table of the first"


# ---- the same tokens as ever


@settings(max_examples=25)
@given(
    texts_=st.lists(TEXTS, min_size=1, max_size=8),
    max_running=st.integers(1, 7),
    more=st.integers(0, 12),
    tight=st.booleans(),
)
@for_all_kinds
def test_every_request_makes_the_tokens_it_makes_alone(
    tiny: Llama, slots: Kind, texts_: list[Any], max_running: int, more: int, tight: bool
) -> None:
    """vllm#5898, vllm#51226: random requests in random company, memory that is too small for all, NaN in free slots."""
    if tight and slots is not KINDS["regions"]:
        kind = BlockSlots if slots is KINDS["blocks"] else SharedSlots
        slots = partial(kind, n_slots=24, size=3)
    limits: dict[str, Any] = dict(max_running=max_running, budget=max_running + more, slots=slots)
    with faked() as fake:
        engine = an_engine(tiny, **limits)
    requests = [engine.add(prompt, p) for prompt, p in texts_]
    events = run_out(engine)
    assert texts(events, requests) == [solo(tiny, prompt, p, 24) for prompt, p in texts_]
    assert fake.replayed == sizes(engine)

    eager = CheckedEngine(tiny, **limits, max_len=24)
    again = [eager.add(prompt, p) for prompt, p in texts_]
    plain = run_out(eager)
    assert [requests.index(e.request) for e in events] == [again.index(e.request) for e in plain]
    for event, other in zip(events, plain, strict=True):
        assert (event.token, event.finish_reason) == (other.token, other.finish_reason)
        assert list(event.logprobs or {}) == list(other.logprobs or {})
        assert list((event.logprobs or {}).values()) == pytest.approx(list((other.logprobs or {}).values()), abs=1e-11)


@settings(max_examples=25)
@given(st.data())
@for_all_kinds
def test_tokens_survive_any_mix_of_additions_and_aborts(tiny: Llama, slots: Kind, data: st.DataObject) -> None:
    """Steps of all sizes in any order: what a larger one left in the buffers must not reach a smaller one."""
    with faked() as fake:
        engine = an_engine(tiny, max_running=6, budget=9, slots=slots)
    added: list[tuple[Request, Any, int]] = []
    for _ in range(data.draw(st.integers(4, 25))):
        action = data.draw(st.sampled_from(["add", "step", "step", "abort", "samples"]))
        if action == "step":
            engine.step()
        elif action in ("add", "samples"):
            prompt, p = data.draw(TEXTS)
            n = 1 if action == "add" else 3
            added += [(r, (prompt, p), i) for i, r in enumerate(engine.add_samples(prompt, p, n))]
        elif added:
            engine.abort(data.draw(st.sampled_from(added))[0].id)
    run_out(engine)
    for request, text, i in added:
        tokens, reason = solo(tiny, *text, max_len=24, sample_index=i)
        if request.finish_reason == "abort":
            assert request.output == tokens[: request.n_output]
        else:
            assert (request.output, request.finish_reason) == (tokens, reason)
    assert fake.replayed == sizes(engine)


def test_many_preemptions_change_no_token(tiny: Llama) -> None:
    p = SamplingParams(max_tokens=16, ignore_eos=True)
    prompts = [[i + 2, 2 * i + 3] for i in range(5)]
    with faked() as fake:
        engine = an_engine(tiny, max_running=5, slots=partial(BlockSlots, n_slots=24, size=3))
    requests = [engine.add(prompt, p) for prompt in prompts]
    assert texts(run_out(engine), requests) == [solo(tiny, prompt, p, 24) for prompt in prompts]
    assert engine.scheduler.preemptions > 3 and {1, 2, 4, 5} >= set(fake.replayed) >= {1, 2}


def test_blocks_that_were_found_are_entered_before_a_graph_reads_them(tiny: Llama) -> None:
    """All of a prompt but its last token is in memory: its first step is a decode step, with others' slots to read."""
    p = SamplingParams(max_tokens=5, ignore_eos=True)
    prompt = [5, 6, 7, 8, 9, 10, 11]
    with faked() as fake:
        engine = an_engine(tiny, slots=partial(SharedSlots, n_slots=48, size=3))
    for i in range(2):
        request = engine.add(prompt, p)
        assert texts(run_out(engine), [request]) == [solo(tiny, prompt, p)]
        assert len(fake.replayed) == (4, 9)[i], "the second is decoded from its first step on"


def test_forks_are_copied_before_a_graph_writes(tiny: Llama) -> None:
    p = SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.5, seed=3)
    prompt = [5, 6, 7, 8]
    with faked() as fake:
        engine = an_engine(tiny, slots=KINDS["shared"])
    requests = engine.add_samples(prompt, p, 3)
    assert texts(run_out(engine), requests) == [solo(tiny, prompt, p, sample_index=i) for i in range(3)]
    assert fake.replayed == [4] * 7


def test_one_bad_row_ends_alone() -> None:
    """vllm#5963: a row whose logits are no numbers, beside others and beside dummies."""
    model = follow(chain(10, 11, 12) | chain(20, 21, 22, 23, 24) | chain(30, 31, 32, 33, 34))
    model.table[12] = NAN
    p = SamplingParams(max_tokens=4)
    with faked() as fake:
        engine = an_engine(model)
    requests = [engine.add(prompt, p) for prompt in ([20], [10], [30])]
    ends = texts(run_out(engine), requests)
    assert ends[1][1] == "error" and ends[1][0] == [11, 12]
    assert ends[::2] == [([21, 22, 23, 24], "length"), ([31, 32, 33, 34], "length")]
    assert fake.replayed == [4, 4, 4, 2]


def test_the_model_may_say_anything_of_the_dummies() -> None:
    """What comes out of the dummy rows is not looked at: here it is no number, and would be an error."""
    model = follow(chain(10, 11, 12, 13, 14))
    model.table[0] = NAN
    with faked() as fake:
        engine = an_engine(model, max_running=5)
    request, other, third = (engine.add([10], SamplingParams(max_tokens=n)) for n in (4, 3, 2))
    assert texts(run_out(engine), [request, other, third])[0] == ([11, 12, 13, 14], "length")
    assert fake.replayed == [4, 4, 2, 1]


def test_a_failed_replay_loses_nothing() -> None:
    model = follow(chain(10, 11, 12, 13, 14) | chain(20, 21, 22, 23, 24))
    with faked() as fake:
        engine = an_engine(model)
    requests = [engine.add([20], SamplingParams(max_tokens=4)), engine.add([10], SamplingParams(max_tokens=4))]
    failures = 0

    def fail() -> None:
        nonlocal failures
        failures += 1
        if failures % 2:
            raise MemoryError

    fake.before = fail
    events: list[Event] = []
    while engine.busy:
        try:
            events += engine.step()
        except MemoryError:
            pass
    assert failures == 8 and texts(events, requests) == [([21, 22, 23, 24], "length"), ([11, 12, 13, 14], "length")]


@pytest.mark.parametrize("max_running", [1, 2, 3, 8])
def test_tokens_in_float32_are_those_of_each_prompt_alone(max_running: int) -> None:
    """vllm#5898, vllm#7779, hf#29029: greedy tokens at batch 1, 2, 3 and 8, here with dummies beside them."""
    model = Llama.random(TINY, dtype=torch.float32)
    p = SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = [[(7 * i + j) % 64 for j in range(1 + 2 * i)] for i in range(8)]
    with faked():
        engine = an_engine(model, max_running=max_running, budget=8, max_len=64)
    outputs = engine.generate(prompts, p)
    assert [(o.token_ids, o.finish_reason) for o in outputs] == [solo(model, prompt, p) for prompt in prompts]


# ---- what is replayed, and from what


def test_only_steps_of_single_tokens_are_replayed(tiny: Llama) -> None:
    """A prompt of one token is as good as any other; one that is cut to one token samples nothing, and is not."""
    p = SamplingParams(max_tokens=4, ignore_eos=True)
    with faked() as fake:
        engine = an_engine(tiny, max_running=2, budget=2)
    engine.add([5], p)
    engine.step()
    assert fake.replayed == [1]
    engine.add([6, 7, 8], p)
    for _ in range(2):
        engine.step()
        assert [n for _, n in engine.plans[-1]] == [1, 1] and fake.replayed == [1]
    engine.step()
    assert fake.replayed == [1, 2]
    run_out(engine)


def test_a_prompt_that_others_wait_for_is_no_decode_step(tiny: Llama) -> None:
    with faked() as fake:
        engine = an_engine(tiny, slots=KINDS["shared"])
    engine.add_samples([5], SamplingParams(max_tokens=2, ignore_eos=True), 3)
    engine.step()
    assert not fake.replayed
    run_out(engine)
    assert fake.replayed == [4]


def test_the_rest_of_the_buffer_is_dummies(tiny: Llama) -> None:
    """Three rows after four in the same graph: the fourth stands for nothing again."""
    p = SamplingParams(max_tokens=9, ignore_eos=True)
    with faked() as fake:
        engine = an_engine(tiny)
    requests = [engine.add([i + 3], p) for i in range(4)]
    engine.step()
    engine.step()
    engine.abort(requests[1].id)
    engine.step()
    assert fake.replayed == [4, 4, 4]
    made = engine.graphs
    assert made is not None
    tokens, positions, seq, slots = made.inputs.view(4, 4).tolist()
    left = [r for r in requests if r.finish_reason is None]
    assert tokens == [*[r.tokens[2] for r in left], 0]
    assert positions == [2, 2, 2, 0]
    assert seq == [*[r.row for r in left], made.row]
    assert slots == [*[r.slots[2] for r in left], engine.scheduler.slots.n_slots]
    assert (engine.pool.table[made.row] == engine.scheduler.slots.n_slots).all()
    # hf#25284, pytorch#131060: a pad that sees nothing makes NaN. A dummy sees itself, in the scratch slot
    assert fake.recorded[0][0].isfinite().all() and (fake.recorded[0][1] >= 0).all()


def test_an_engine_takes_graphs_where_it_can(tiny: Llama) -> None:
    with patch.dict(BACKENDS, BACKENDS_HERE):
        assert Engine(tiny, backend="fixed").graphs is None  # on a CPU
    gpu: Any = SimpleNamespace(device=torch.device("cuda"), _forward_pre_hooks={})
    taken: list[Any] = []
    with patch.object(graphs, "Graphs", lambda *args: taken.append(args[3])), patch.object(graphs, "Recorder"):
        record_graphs(gpu, None, FixedAttend, 5)  # type: ignore[arg-type]
        for backend in (Batch, FakeRecorder):
            assert record_graphs(gpu, None, backend, 5) is None  # type: ignore[arg-type]
        gpu._forward_pre_hooks[0] = print  # someone counts the model's calls
        assert record_graphs(gpu, None, FixedAttend, 5) is None  # type: ignore[arg-type]
    assert taken == [5]
    with faked():
        assert an_engine(tiny).graphs is not None


def test_what_is_asked_of_cuda() -> None:
    """The order of calls: once for real on a stream of its own, after the work before it; then recorded on that stream,
    into the memory that all graphs share."""
    calls: list[str] = []

    def step() -> Any:
        calls.append("step")
        return len(calls)

    def within(name: str) -> Any:
        @contextmanager
        def context(*args: Any, **kwargs: Any) -> Iterator[None]:
            assert args[0] in (recorder.stream, recorder.device, made.CUDAGraph.return_value)
            assert kwargs == (dict(pool=recorder.memory, stream=recorder.stream) if name == "record" else {})
            calls.append(name)
            yield
            calls.append(f"end of {name}")

        return context

    with patch("minillm.graphs.torch.cuda") as made:
        recorder = graphs.Recorder(torch.device("cuda:1"))
        made.device, made.stream, made.graph = within("device"), within("stream"), within("record")
        recorder.stream.wait_stream.side_effect = lambda other: calls.append("wait")  # type: ignore[attr-defined]
        replay = recorder(step)
        assert calls == [
            "device", "wait", "stream", "step", "end of stream", "record", "step", "end of record", "end of device",
        ]  # fmt: skip
        assert not made.CUDAGraph.return_value.replay.called
        assert [replay(), replay()] == [7, 7] and calls.count("step") == 2
        assert made.CUDAGraph.return_value.replay.call_count == 2


# ---- the fake itself: it must see what a real graph would get wrong


def test_the_fake_sees_another_address(tiny: Llama) -> None:
    with faked():
        engine = an_engine(tiny)
    engine.add([5], SamplingParams(max_tokens=5, ignore_eos=True))
    engine.step()
    engine.pool.table = engine.pool.table.clone()
    with pytest.raises(AssertionError):
        engine.step()


@pytest.mark.parametrize("how", ["a list as index", "a number from the device", "a shape by value"])
def test_the_fake_sees_the_host_take_part(how: str) -> None:
    x = torch.ones(3)
    steps = {
        "a list as index": lambda: x[[0, 1]],
        "a number from the device": lambda: x * float(x[0]),
        "a shape by value": lambda: x.nonzero(),
    }
    with pytest.raises(AssertionError, match="inside a graph"):
        FakeRecorder()(lambda: (steps[how](), x))


def test_the_fake_sees_a_changed_shape_or_number() -> None:
    for before, after in ((torch.ones(2), torch.ones(3)), (2, 3)):
        state: list[Any] = [before]
        replay = FakeRecorder()(lambda state=state: (torch.zeros(1) + state[0], torch.zeros(1)))
        state[0] = after
        with pytest.raises(AssertionError):
            replay()


def test_a_backend_that_reads_early_makes_other_tokens(tiny: Llama) -> None:
    """`fixed_shape` promises that values are read at each call."""

    class Early(FixedAttend):
        def __init__(self, pool: KVPool, batch: Batch):
            super().__init__(pool, batch)
            object.__setattr__(self, "batch", SimpleNamespace(**{**vars(batch), "positions": batch.positions.clone()}))

    p = SamplingParams(max_tokens=12, ignore_eos=True)
    with faked():
        engine = an_engine(tiny)
    engine.graphs = Graphs(tiny, engine.pool, Early, 4, FakeRecorder())
    request = engine.add([5, 6, 7, 8], p)
    run_out(engine)
    assert (request.output, "length") != solo(tiny, [5, 6, 7, 8], p)


# ---- on a GPU

cuda = pytest.mark.cuda
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")
PROMPTS = [[(7 * i + j) % 64 for j in range(1 + 3 * i)] for i in range(7)]


def on_gpu(dtype: torch.dtype) -> Llama:
    return Llama.random(TINY, dtype=dtype).to("cuda")


@cuda
@needs_gpu
def test_real_graphs_make_the_same_tokens() -> None:
    """In float64, with prompts that end at different times, and memory that is too small for all at once."""
    model = on_gpu(torch.float64)
    params = [SamplingParams(max_tokens=4 + 5 * i, ignore_eos=True, temperature=i % 2, seed=i) for i in range(7)]
    slots = partial(BlockSlots, n_slots=96, size=4)
    limits: dict[str, Any] = dict(max_running=5, budget=16, max_len=64, backend="fixed", slots=slots)
    with patch.dict(BACKENDS, BACKENDS_HERE):
        engine, eager = Engine(model, **limits), Engine(model, **limits)
    assert engine.graphs is not None
    eager.graphs = None
    assert engine.generate(PROMPTS, params) == eager.generate(PROMPTS, params)
    assert engine.scheduler.preemptions > 0


@cuda
@needs_gpu
def test_the_triton_kernel_can_be_recorded() -> None:
    if "triton_paged" not in BACKENDS or why_not("triton_paged", on_gpu(torch.float32)):
        pytest.skip("triton_paged cannot run here")
    model = on_gpu(torch.float32)
    limits: dict[str, Any] = dict(max_running=5, budget=16, max_len=64)
    p = SamplingParams(max_tokens=20, ignore_eos=True)
    engine, eager = Engine(model, **limits, backend="triton_paged"), Engine(model, **limits)
    assert engine.graphs is not None
    assert engine.generate(PROMPTS, p) == eager.generate(PROMPTS, p)


@cuda
@needs_gpu
@pytest.mark.parametrize(
    "params",
    [
        dict(),
        dict(temperature=1.0),
        dict(temperature=1.0, top_k=5, top_p=0.9, min_p=0.01),
        dict(repetition_penalty=1.2, frequency_penalty=0.1, presence_penalty=0.1, logit_bias={3: 1.0}, min_tokens=30),
    ],
    ids=str,
)
def test_the_host_waits_once_in_a_decode_step(params: dict[str, Any]) -> None:
    with patch.dict(BACKENDS, BACKENDS_HERE):
        engine = Engine(on_gpu(torch.float32), max_running=4, budget=16, max_len=64, backend="fixed")
    for i in range(3):
        engine.add([i + 2, 5], SamplingParams(max_tokens=40, ignore_eos=True, seed=i, stop_token_ids=[EOS], **params))
    for _ in range(3):
        engine.step()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [str(w.message) for w in seen if "synchronizing CUDA operation" in str(w.message)]
    assert len(waits) == 1
