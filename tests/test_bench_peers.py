"""Peers: transformers in its own process, llama.cpp's program (a stand-in), and what makes a row void."""

import copy
import dataclasses
import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from conftest import TINY
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from minillm.bench.harness import Job, run
from minillm.bench.peers import compare
from minillm.bench.peers.base import Grid, PeerRun, Point, Rows, Target, point
from minillm.bench.peers.compare import OURS, PeersResult, measure, parse, tables
from minillm.bench.peers.gguf_file import cached_gguf, permute, write_gguf
from minillm.bench.peers.llama_bench import LlamaBench
from minillm.bench.peers.transformers_peer import GENERATE, GENERATE_BATCH, Transformers
from minillm.config import Config
from minillm.convert import llama_config, read_gguf, tensor_names, unpermute
from minillm.errors import InputError
from minillm.lab.conformance_world import write_folder
from minillm.model import Llama
from minillm.weights import load_folder

JOBS = [Job((5, 6, 7), 9), Job((8, 9, 10, 11, 12), 2), Job((20, 21), 6), Job((30, 31, 32, 33), 1), Job((40, 41), 7)]
TEXT = [2 + (i * i) % 60 for i in range(200)]
LIMITS = {"max_running": 2, "budget": 16, "chunk": 16}


def save(llama: Llama, folder: Path) -> Path:
    """A model folder in float32 with these weights, as Hugging Face lays it out."""
    folder.mkdir()
    return write_folder(folder, copy.deepcopy(llama).float())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(Llama.random(TINY, seed=3), tmp_path_factory.mktemp("peers") / "tiny")


@pytest.fixture(scope="module")
def llama(folder: Path) -> Llama:
    return load_folder(folder, torch.device("cpu"), torch.float32)


def target(folder: Path, **changes: object) -> Target:
    plain = Target(folder, Config.from_folder(folder), "float32", "cpu", 1, max_running=2, budget=16, sample=(5, 6))
    return dataclasses.replace(plain, **changes)


def silent() -> Console:
    return Console(file=io.StringIO(), width=120)


def compared(llama: Llama, folder: Path, peers: Sequence[compare.Peer], rounds: int = 2) -> PeersResult:
    found = measure(llama, folder, JOBS, TEXT, LIMITS, peers, rounds, silent(), sizes=(1, 3), n_prompt=8, n_new=4)
    json.dumps(dataclasses.asdict(found), allow_nan=False)
    return found


def shown(result: PeersResult) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(*tables(result))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text  # nothing is cut off
    return " ".join(text.split())


# ---- transformers


@pytest.fixture(scope="module")
def worker(folder: Path) -> Iterator[Transformers]:
    pytest.importorskip("transformers")
    peer = Transformers()
    peer.check()
    peer.start(target(folder))
    yield peer
    peer.close()
    peer.close()  # twice does no harm
    assert peer.worker is not None and peer.worker.returncode is not None


def test_both_variants_emit_the_naive_models_tokens(worker: Transformers, llama: Llama) -> None:
    expected = run(llama, "naive", JOBS).outputs
    for found in (worker.generate(JOBS), worker.generate_batch(JOBS)):
        assert found.outputs == expected
        assert found.n_tokens == [job.max_tokens for job in JOBS]
        assert found.n_prompt == [len(job.prompt) for job in JOBS]
        for job, first, last in zip(JOBS, found.first, found.last, strict=True):
            assert 0 < first <= last and (first == last) == (job.max_tokens == 1)


def test_texts_go_on_where_the_model_would_end_them(
    tmp_path: Path, worker: Transformers, llama: Llama, folder: Path
) -> None:
    """The first token of the first job is declared an end of text."""
    end = run(llama, "naive", JOBS[:1]).outputs[0][0]
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": end}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    plain = {"dtype": "float32", "device": "cpu", "threads": 1}
    try:
        worker.ask("load", folder=str(tmp_path), **plain)
        for found in (worker.generate(JOBS[:1]), worker.generate_batch(JOBS[:1])):
            assert found.n_tokens == [9]
    finally:
        worker.ask("load", folder=str(folder), **plain)


def test_waste_of_padded_groups_is_counted(worker: Transformers) -> None:
    """Groups of two: prompts of 3 and 5 padded to 5, 9 and 2 tokens made 9 times; and so on. By hand."""
    pushed = 2 * (5 + 8) + 2 * (4 + 5) + 1 * (2 + 6)
    useful = (3 + 8) + (5 + 1) + (2 + 5) + (4 + 0) + (2 + 6)
    assert worker.generate(JOBS).wasted == pushed - useful


def test_groups_follow_each_other(worker: Transformers) -> None:
    found = worker.generate(JOBS)
    assert found.first[0] == found.first[1] < found.last[0] < found.first[2] == found.first[3] < found.first[4]
    assert found.wall == found.last[4]


def test_an_error_of_the_worker_is_told_and_it_goes_on(worker: Transformers) -> None:
    with pytest.raises(InputError, match="transformers: generate failed: .*Error") as error:
        worker.ask("generate", prompts=[[10**6]], n_new=[1], max_running=1)
    assert "\n" not in str(error.value)
    assert worker.generate(JOBS[:1]).n_tokens == [9]


def test_a_folder_that_transformers_cannot_load_is_named(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    peer = Transformers()
    (tmp_path / "config.json").write_text("{}")
    try:
        with pytest.raises(InputError, match="peer transformers: load failed"):
            peer.start(Target(tmp_path, TINY, "float32", "cpu", threads=1, max_running=2, budget=16, sample=(5, 6)))
    finally:
        peer.close()
    assert not alive(peer)


def test_a_worker_that_dies_is_told_with_its_last_words(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minillm.bench.peers.transformers_peer.WORKER", "minillm.no_such_module")
    peer = Transformers()
    try:
        with pytest.raises(InputError, match="ended with status 1: .*no_such_module"):
            peer.start(target(folder))
    finally:
        peer.close()


def test_transformers_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="-m pip install transformers"):
        parse([("transformers", None)])


def alive(peer: Transformers) -> bool:
    return peer.worker is not None and peer.worker.poll() is None


def test_ctrl_c_keeps_what_was_measured_and_leaves_no_process(folder: Path, llama: Llama) -> None:
    pytest.importorskip("transformers")

    class Interrupted(Transformers):
        calls = 0

        def generate_batch(self, jobs: Sequence[Job]) -> PeerRun:
            self.calls += 1
            if self.calls == 3:  # after the warm-up and the first round
                raise KeyboardInterrupt
            return super().generate_batch(jobs)

    peer = Interrupted()
    found = compared(llama, folder, [peer], rounds=3)
    assert found.partial and not alive(peer) and peer.worker is not None
    rows = {row.name: row for row in found.set_rows}
    assert set(rows) == {OURS, GENERATE, GENERATE_BATCH}
    for row in rows.values():
        assert row.void is None and row.wall is not None and row.ratio is not None
        assert row.tokens_equal == 1.0 and row.output_tokens == 25
    assert rows[OURS].ratio.median == 1.0 and rows[OURS].wasted_tokens == 0
    assert [(row.name, row.N) for row in found.grid_rows] == [(OURS, 1), (GENERATE, 1), (OURS, 3), (GENERATE, 3)]
    assert all(row.void is None and row.decode_ratio is not None for row in found.grid_rows)
    assert any("Ctrl-C" in note for note in found.notes)
    assert "generate_batch" in shown(found)


# ---- GGUF


@given(heads=st.integers(1, 4), half=st.integers(1, 4), columns=st.integers(1, 3))
def test_permute_is_undone_by_the_converter(heads: int, half: int, columns: int) -> None:
    rows = torch.randn(heads * 2 * half, columns)
    assert torch.equal(unpermute(permute(rows, heads), heads), rows)
    bias = rows[:, 0]
    assert torch.equal(unpermute(permute(bias, heads), heads), bias)


def test_permute_by_hand() -> None:
    """Two heads of four rows: halves (0 1)(2 3) become 0 2 1 3."""
    assert permute(torch.arange(8)[:, None], 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gguf_holds_our_weights(tmp_path: Path, dtype: torch.dtype, tied: bool) -> None:
    """Read back as the converter reads a file, and compared with the folder."""
    from gguf import dequantize
    from safetensors.torch import load_file

    config = dataclasses.replace(TINY, tied=tied)
    folder = save(Llama.random(config, seed=5), tmp_path / "model")
    path = tmp_path / "out.gguf"
    write_gguf(folder, config, dtype, path)
    fields, stored = read_gguf(path)
    assert fields["tokenizer.ggml.model"] == "no_vocab" and fields["llama.vocab_size"] == 64
    vocabulary = {
        "tokenizer.ggml.tokens": [""] * 64,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    read = llama_config(path, fields | vocabulary, tied="output.weight" not in stored)
    assert dataclasses.replace(Config.from_dict(read), eos=(1,)) == config
    expected = load_file(folder / "model.safetensors")
    names = tensor_names(read)
    assert set(names) == set(stored)
    for gguf_name, (name, _) in names.items():
        tensor = stored[gguf_name]
        rows = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        for role, heads in (("attn_q", 4), ("attn_k", 2)):
            if role in gguf_name:
                rows = unpermute(rows, heads)
        want = expected[name]
        assert torch.equal(rows, want if want.dim() == 1 else want.to(dtype).float()), gguf_name
        assert (tensor.tensor_type.name == "F32") == (want.dim() == 1 or dtype == torch.float32)


def test_gguf_is_made_once_for_the_same_weights(tmp_path: Path, folder: Path) -> None:
    cache = tmp_path / "a" / "b"
    path = cached_gguf(folder, TINY, torch.bfloat16, cache)
    before = path.stat().st_mtime_ns
    assert cached_gguf(folder, TINY, torch.bfloat16, cache) == path and path.stat().st_mtime_ns == before
    assert cached_gguf(folder, TINY, torch.float32, cache) != path
    other = save(Llama.random(TINY, seed=4), tmp_path / "tiny")  # of the same name
    assert cached_gguf(other, TINY, torch.bfloat16, cache) != path
    assert len(list(cache.iterdir())) == 3  # and no half-written one


def test_what_gguf_cannot_hold_is_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(InputError, match="float64 has no GGUF counterpart"):
        cached_gguf(folder, TINY, torch.float64, tmp_path)
    with pytest.raises(InputError, match="only a plain Llama"):
        cached_gguf(folder, dataclasses.replace(TINY, qk_norm=True), torch.float32, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        cached_gguf(folder, TINY, torch.float32, tmp_path / "file")


# ---- llama.cpp's program


PROGRAM = """#!{python}
import json, sys, time
from pathlib import Path
options = sys.argv[1:]
if "--help" in options:
    print("{help}")
    sys.exit(0)
if "--version" in options:
    print("version: 7 (abc)", file=sys.stderr)
    sys.exit(0)
get = lambda name: options[options.index(name) + 1]
Path(__file__).with_suffix(".log").open("a").write(json.dumps(options) + "\\n")
assert Path(get("-m")).read_bytes()[:4] == b"GGUF"
pp, tg = int(get("-npp")), int(get("-ntg"))
print("some words first")
for pl in map(int, get("-npl").split(",")):
    print({line})
{end}
"""
LINE = "json.dumps(dict(pp=pp, tg=tg, pl=pl, n_kv=pl * (pp + tg), t_pp=0.5, t_tg=0.25))"


def program(folder: Path, line: str = LINE, help: str = "-npl n0,n1", end: str = "") -> Path:
    path = folder / "llama-batched-bench"
    path.write_text(PROGRAM.format(python=sys.executable, line=line, help=help, end=end))
    path.chmod(0o755)
    return path


def test_llama_bench_is_asked_for_our_grid(tmp_path: Path, folder: Path, llama: Llama) -> None:
    path = program(tmp_path)
    [peer] = parse([("llama-bench", str(path))])
    assert isinstance(peer, LlamaBench)
    peer.cache = tmp_path / "cache"
    found = compared(llama, folder, [peer])
    assert found.set_rows == [] and not found.partial
    ours, theirs = [row for row in found.grid_rows if row.N == 3]
    assert theirs.void is None and theirs.prefill_throughput.median == 3 * 8 / 0.5
    assert theirs.decode_throughput.median == 3 * 4 / 0.25  # each of its steps decodes, the first one too
    assert ours.decode_throughput.min <= theirs.decode_ratio.median * 48 <= ours.decode_throughput.max
    assert "version: 7 (abc)" in theirs.note
    *_, last = (json.loads(line) for line in path.with_suffix(".log").read_text().splitlines())
    options = dict(zip(last[::2], last[1::2], strict=True))
    assert options.pop("-m").endswith(".gguf")
    threads = str(torch.get_num_threads())
    assert options == {
        **{"-ngl": "0", "-npp": "8", "-ntg": "4", "-npl": "1,3", "-c": "36"},
        **{"-t": threads, "-tb": threads, "--output-format": "jsonl"},
    }
    assert "llama.cpp" in shown(found)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (LINE.replace("tg=tg", "tg=tg - 1"), "tokens were asked for"),
        (LINE.replace("pp=pp", "pp=2 * pp"), "tokens were asked for"),
        (LINE.replace("pl=pl", "pl=pl + 1"), "was asked for N"),
        ("'{not json'", "not the JSON of a result"),
        ("'{}'", "not the JSON of a result"),
        ("'no result'", "was asked for N"),
        ("1 / 0", "ended with status 1: ZeroDivisionError"),
    ],
)
def test_a_program_that_does_other_work_is_void(
    tmp_path: Path, folder: Path, llama: Llama, line: str, reason: str
) -> None:
    peer = LlamaBench(str(program(tmp_path, line)), tmp_path / "cache")
    found = compared(llama, folder, [peer], rounds=1)
    for row in found.grid_rows:
        if row.name == OURS:
            assert row.void is None and row.decode_throughput is not None
        else:
            assert row.void is not None and reason in row.void and "\n" not in row.void
            assert row.prefill_throughput is row.decode_throughput is row.decode_ratio is None
    assert reason in shown(found)


def test_programs_that_are_not_llama_bench_are_refused(tmp_path: Path) -> None:
    path = program(tmp_path, help="usage: something else")
    with pytest.raises(InputError, match="has no option -npl"):
        parse([("llama-bench", str(path))])
    path.chmod(0o644)
    with pytest.raises(InputError, match="cannot be run"):
        parse([("llama-bench", str(path))])
    with pytest.raises(InputError, match="there is no file"):
        parse([("llama-bench", str(tmp_path / "nothing"))])


def test_llama_bench_stays_on_the_cpu(tmp_path: Path, folder: Path) -> None:
    peer = LlamaBench(str(program(tmp_path)), tmp_path / "cache")
    with pytest.raises(InputError, match="use --device cpu"):
        peer.start(target(folder, device="cuda"))


def test_a_program_is_ended_when_time_is_up(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    end = f"import os; Path({str(pid)!r}).write_text(str(os.getpid())); time.sleep(60)"
    peer = LlamaBench(str(program(tmp_path, end=end)), tmp_path / "cache")
    model = tmp_path / "x.gguf"
    model.write_bytes(b"GGUF")
    with pytest.raises(InputError, match="took more than 2 s"):
        peer.call("-m", str(model), "-npp", "1", "-ntg", "1", "-npl", "1", seconds=2)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


# ---- names


@pytest.mark.parametrize(
    "spec",
    [("vllm", None), ("", None), ("transformers", "x"), ("llama-bench", None), ("http", None), ("llama-bench", "")],
)
def test_unknown_peers_are_refused_with_the_known_ones(spec: tuple[str, str | None]) -> None:
    with pytest.raises(InputError, match="use transformers, llama-bench PATH or http URL"):
        parse([spec])


def test_a_peer_named_twice_is_refused() -> None:
    with pytest.raises(InputError, match="named twice"):
        parse([("transformers", None), ("transformers", None)])


# ---- rounds and rows


class Told:
    """A peer that answers what it is told to; every answer takes one second more than the one before."""

    name = "told"

    def __init__(self, **changes: object):
        self.changes = changes
        self.calls: list[str] = []
        self.closed = 0

    def check(self) -> None: ...

    def start(self, target: Target) -> Rows:
        return Rows({"told": self.run, "other": self.run}, {}, {"told": "", "other": ""})

    def run(self, jobs: Sequence[Job]) -> PeerRun:
        self.calls.append("told")
        n_tokens, n_prompt = [job.max_tokens for job in jobs], [len(job.prompt) for job in jobs]
        late = [float(len(self.calls))] * len(jobs)
        return dataclasses.replace(PeerRun(n_tokens, n_prompt, [0.5] * len(jobs), late, None, None), **self.changes)

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"n_tokens": [9, 2, 6, 1, 8]}, "request 4: 7 tokens were asked for and 8 emitted"),
        ({"n_tokens": [9, 0, 6, 1, 7]}, "request 1: 2 tokens were asked for and 0 emitted"),
        ({"n_prompt": [3, 5, 3, 4, 2]}, "request 2: the prompt has 2 tokens and the peer read 3"),
    ],
)
def test_a_row_is_void_when_its_counts_disagree(
    llama: Llama, folder: Path, changes: dict[str, object], reason: str
) -> None:
    peer = Told(**changes)
    found = compared(llama, folder, [peer], rounds=1)
    ours, told, _ = found.set_rows
    assert ours.void is None and ours.wall is not None
    assert told.void == reason and told.wall is told.ttft is told.output_throughput is told.ratio is None
    assert found.grid_rows == [] and peer.closed == 1
    assert reason in shown(found)


def test_ratios_are_of_the_same_round(monkeypatch: pytest.MonkeyPatch, llama: Llama, folder: Path) -> None:
    """Ours takes 1, 2, 3 s; theirs twice that: the ratio is 2 in every round, and the medians are the middle ones."""
    made = [1.0, 1.0, 2.0, 3.0]  # the first to warm up

    def ours(llama: Llama, limits: object, jobs: Sequence[Job]) -> PeerRun:
        wall = made.pop(0)
        n_tokens, n_prompt = [job.max_tokens for job in jobs], [len(job.prompt) for job in jobs]
        return PeerRun(n_tokens, n_prompt, [wall / 2] * len(jobs), [wall] * len(jobs), None, 0)

    class Twice(Told):
        def start(self, target: Target) -> Rows:
            return Rows({"twice": self.run}, {}, {"twice": ""})

        def run(self, jobs: Sequence[Job]) -> PeerRun:
            one = super().run(jobs)
            return dataclasses.replace(one, last=[2.0 * max(1, len(self.calls) - 1)] * len(jobs))

    monkeypatch.setattr(compare, "ours", ours)
    _, row = compared(llama, folder, [Twice()], rounds=3).set_rows
    assert row.ratio == compare.Range(2.0, 2.0, 2.0)
    assert row.wall == compare.Range(4.0, 2.0, 6.0)
    assert row.output_throughput == compare.Range(25 / 4, 25 / 6, 25 / 2)
    assert row.ttft.median == 0.5 and row.e2el.median == 4.0
    assert row.tpot.median == pytest.approx((3.5 / 6 + 3.5 / 5) / 2)  # the middle of 3.5 s / (8, 1, 5, 6)


def test_each_round_begins_with_another_row(llama: Llama) -> None:
    order: list[str] = []
    todo = {name: lambda name=name: order.append(name) for name in "abc"}
    for i in range(4):
        compare.one_round("", todo, i, {name: [] for name in todo}, {}, silent())
    assert "".join(order) == "abcbcacababc"


def test_a_row_that_fails_is_void_and_is_not_run_again(llama: Llama, folder: Path) -> None:
    class Broken(Told):
        def start(self, target: Target) -> Rows:
            return Rows({"told": self.run, "broken": self.fail}, {}, {"told": "", "broken": ""})

        def fail(self, jobs: Sequence[Job]) -> PeerRun:
            self.fails = getattr(self, "fails", 0) + 1
            raise InputError("it broke")

    peer = Broken()
    rows = {row.name: row for row in compared(llama, folder, [peer], rounds=3).set_rows}
    assert rows["broken"].void == "it broke" and peer.fails == 1
    assert rows["told"].void is None and len(peer.calls) == 4


def test_peers_are_closed_when_one_cannot_start(llama: Llama, folder: Path) -> None:
    class Unable(Told):
        def start(self, target: Target) -> Rows:
            raise InputError("not this model")

    peers = [Told(), Unable()]
    with pytest.raises(InputError, match="not this model"):
        compared(llama, folder, peers)
    assert [peer.closed for peer in peers] == [1, 1] and not peers[0].calls


def test_a_text_too_short_for_the_grid_is_refused(tmp_path: Path, llama: Llama, folder: Path) -> None:
    peer = LlamaBench(str(program(tmp_path)), tmp_path / "cache")
    with pytest.raises(InputError, match="need 8192 tokens of text, and there are 200"):
        measure(llama, folder, JOBS, TEXT, LIMITS, [peer], 1, silent())
    with pytest.raises(InputError, match="model's context is 256"):
        measure(llama, folder, JOBS, TEXT, LIMITS, [peer], 1, silent(), sizes=(1,), n_prompt=100, n_new=200)


def test_a_point_of_the_grid_by_hand() -> None:
    """Two sequences of 3 prompt and 5 new tokens: all first tokens at 2 s, all last ones at 6 s."""
    one = point(2, PeerRun([5, 5], [3, 3], [1.0, 2.0], [5.0, 6.0], None, None))
    assert one == Point(2, 6, 10, prefill=2.0, decode=4.0, decoded=8)
    assert (one.prefill_throughput, one.decode_throughput) == (3.0, 2.0)
    assert Grid([(1, 2, 3)] * 2, (1, 2), 5).n_prompt == 3
