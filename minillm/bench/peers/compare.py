"""minillm and its peers in the same rounds, so that what changes on the machine meanwhile hits all of them.

A row whose token counts are not those that were asked for is void: its times would be those of other work.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from minillm.bench.harness import Job, run
from minillm.bench.peers.base import Grid, Peer, PeerRun, Point, Rows, Target, point
from minillm.bench.peers.http_peer import Http
from minillm.bench.peers.llama_bench import LlamaBench
from minillm.bench.peers.transformers_peer import Transformers
from minillm.bench.tables import new_table, rate, times
from minillm.errors import InputError
from minillm.model import Llama

OURS = "minillm kernels"
KNOWN = "use transformers, llama-bench PATH or http URL"
Found = TypeVar("Found")


def parse(specs: Sequence[tuple[str, str | None]]) -> list[Peer]:
    """Pairs of a peer's name and its path or URL to peers that are there.

    Raises InputError for an unknown name, a missing or needless path or URL, one named twice, and for what is not
    installed or not reachable, with what mends it. Nothing is loaded yet.
    """
    peers: list[Peer] = []
    for name, where in specs:
        if name == "transformers" and where is None:
            peers.append(Transformers())
        elif name == "llama-bench" and where:
            peers.append(LlamaBench(where))
        elif name == "http" and where:
            peers.append(Http(where))
        else:
            given = name if where is None else f"{name} {where}"
            raise InputError(f"peer {given!r} is not known; {KNOWN}")
    names = [peer.name for peer in peers]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"peer {name} is named twice; name each once")
    for peer in peers:
        peer.check()
    return peers


# ---- what is found


@dataclass(frozen=True)
class Range:
    """Of the rounds."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Range | None":
        """None if there are no values."""
        return cls(median(values), min(values), max(values)) if values else None


@dataclass
class SetRow:
    """One engine on the set. If `void` gives a reason, there are no times. Times in seconds."""

    name: str
    note: str
    void: str | None
    requests: int
    prompt_tokens: int
    output_tokens: int
    wasted_tokens: int | None = None  # computed for nothing; None: the peer does not tell
    tokens_equal: float | None = None  # the share of output tokens that are ours; None: the peer tells no ids
    wall: Range | None = None  # to the last token
    output_throughput: Range | None = None  # output tokens per second
    ttft: Range | None = None  # of the requests' medians, as are the next two
    tpot: Range | None = None
    e2el: Range | None = None
    ratio: Range | None = None  # our output throughput over this one's, round by round


@dataclass
class GridRow:
    """One engine on N equal sequences, in tokens per second. If `void` gives a reason, there are no numbers."""

    name: str
    N: int
    note: str
    void: str | None
    prefill_throughput: Range | None = None
    decode_throughput: Range | None = None
    prefill_ratio: Range | None = None  # ours over this one's, round by round
    decode_ratio: Range | None = None


@dataclass
class PeersResult:
    """`partial`: Ctrl-C ended it; what was measured before counts."""

    dtype: str
    device: str
    threads: int
    rounds: int  # asked for
    n_prompt: int  # of the grid, as is the next
    n_new: int
    set_rows: list[SetRow] = field(default_factory=list)
    grid_rows: list[GridRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    partial: bool = False
    seconds: float = 0.0


# ---- measuring


def measure(
    llama: Llama,
    folder: Path,
    jobs: Sequence[Job],
    text: Sequence[int],
    limits: dict[str, int],
    peers: Sequence[Peer],
    rounds: int,
    console: Console,
    sizes: tuple[int, ...] = (1, 8, 32, 64),
    n_prompt: int = 128,
    n_new: int = 64,
) -> PeersResult:
    """Runs the two experiments in interleaved rounds, the order rotated, and closes the peers, however it ends.

    `jobs` have fixed lengths; `limits` are those of the last stage; prompts of the grid are cut out of `text`.

    Raises InputError, before anything is measured, if a peer cannot run this model.
    """
    assert jobs and all(job.ignore_eos for job in jobs) and rounds > 0
    began = time.perf_counter()
    grid = cut_grid(text, sizes, n_prompt, n_new)
    dtype = str(llama.dtype).removeprefix("torch.")
    target = Target(
        folder=folder,
        config=llama.config,
        dtype=dtype,
        device=str(llama.device),
        threads=torch.get_num_threads(),
        max_running=limits["max_running"],
        budget=limits["budget"],
        sample=jobs[0].prompt,
    )
    result = PeersResult(dtype, target.device, target.threads, rounds, n_prompt, n_new)
    sets: dict[str, list[PeerRun]] = {}
    grids: dict[str, list[list[Point]]] = {}
    failed: dict[str, str] = {}
    notes = {OURS: f"{target.max_running} requests and {target.budget} tokens a step at most; on the grid all at once"}
    try:
        on_set, on_grid = start(peers, target, notes, console)
        if on_set:
            on_set = {OURS: partial(ours, llama, limits), **on_set}
        if on_grid:
            check_fits(llama, text, grid)
            on_grid = {OURS: partial(ours_on_grid, llama), **on_grid}
        sets |= {name: [] for name in on_set}
        grids |= {name: [] for name in on_grid}
        todo_set = {name: partial(call, list(jobs)) for name, call in on_set.items()}
        todo_grid = {name: partial(call, grid) for name, call in on_grid.items()}
        warm_set = {name: partial(call, list(jobs[:2])) for name, call in on_set.items()}
        warm_grid = {name: partial(call, Grid(grid.prompts[:1], (1,), 2)) for name, call in on_grid.items()}
        one_round("Peers: warming up", warm_set, 0, {name: [] for name in warm_set}, failed, console)
        one_round("Peers: warming up", warm_grid, 0, {name: [] for name in warm_grid}, failed, console)
        for i in range(rounds):
            title = f"Peers: round {i + 1} of {rounds}"
            one_round(f"{title}, requests of many lengths", todo_set, i, sets, failed, console)
            one_round(f"{title}, equal sequences", todo_grid, i, grids, failed, console)
    except KeyboardInterrupt:
        result.partial = True
    finally:
        for peer in peers:
            peer.close()
    result.set_rows = [set_row(name, notes[name], jobs, sets, failed.get(name)) for name in sets]
    result.grid_rows = [
        grid_row(name, N, notes[name], grid, grids, failed.get(name)) for N in grid.sizes for name in grids
    ]
    result.notes = tell(result, notes, [*sets, *grids])
    result.seconds = time.perf_counter() - began
    return result


def cut_grid(text: Sequence[int], sizes: tuple[int, ...], n_prompt: int, n_new: int) -> Grid:
    prompts = [tuple(text[i * n_prompt : (i + 1) * n_prompt]) for i in range(max(sizes))]
    return Grid(prompts, sizes, n_new)


def check_fits(llama: Llama, text: Sequence[int], grid: Grid) -> None:
    """Raises InputError if the text or the model's context is too short for the grid."""
    needed = max(grid.sizes) * grid.n_prompt
    if len(text) < needed:
        raise InputError(f"the peers' prompts need {needed} tokens of text, and there are {len(text)}")
    if grid.n_prompt + grid.n_new > llama.config.context:
        longest = grid.n_prompt + grid.n_new
        raise InputError(
            f"the peers are measured at {longest} tokens, and the model's context is {llama.config.context}"
        )


def start(
    peers: Sequence[Peer], target: Target, notes: dict[str, str], console: Console
) -> tuple[dict[str, Any], dict[str, Any]]:
    """{row: what to time} of the set and of the grid; adds the rows' notes."""
    on_set: dict[str, Any] = {}
    on_grid: dict[str, Any] = {}
    for peer in peers:
        with console.status(f"Peers: starting {peer.name}"):
            rows: Rows = peer.start(target)
        on_set |= rows.on_set
        on_grid |= rows.on_grid
        notes |= rows.notes
    return on_set, on_grid


def one_round(
    title: str,
    todo: Mapping[str, Callable[[], Found]],
    i: int,
    found: dict[str, list[Found]],
    failed: dict[str, str],
    console: Console,
) -> None:
    """Each row once, beginning with another one in each round. A row that fails is not run again."""
    names = list(todo)
    shift = i % max(1, len(names))
    for name in names[shift:] + names[:shift]:
        if name not in failed:
            try:
                with console.status(f"{title}: {name}"):
                    found[name].append(todo[name]())
            except InputError as error:
                failed[name] = str(error)


def ours(llama: Llama, limits: dict[str, int], jobs: Sequence[Job]) -> PeerRun:
    done = run(llama, "kernels", jobs, limits)
    return PeerRun(
        n_tokens=[len(output) for output in done.outputs],
        n_prompt=[len(job.prompt) for job in jobs],
        first=[stamps[0] for stamps in done.times],
        last=[stamps[-1] for stamps in done.times],
        outputs=done.outputs,
        wasted=done.tokens_pushed - done.tokens_useful,
    )


def ours_on_grid(llama: Llama, grid: Grid) -> list[Point]:
    """All prompts in the first step."""
    jobs = [Job(prompt, grid.n_new) for prompt in grid.prompts]
    return [point(N, ours(llama, {"max_running": N, "budget": N * grid.n_prompt}, jobs[:N])) for N in grid.sizes]


# ---- judging


def disagreement(found: PeerRun, jobs: Sequence[Job]) -> str | None:
    """The first request whose counts are not those that were asked for, in words."""
    for i, (job, n_tokens, n_prompt) in enumerate(zip(jobs, found.n_tokens, found.n_prompt, strict=True)):
        if n_tokens != job.max_tokens:
            return f"request {i}: {job.max_tokens} tokens were asked for and {n_tokens} emitted"
        if n_prompt != len(job.prompt):
            return f"request {i}: the prompt has {len(job.prompt)} tokens and the peer read {n_prompt}"
    return None


def set_row(name: str, note: str, jobs: Sequence[Job], sets: dict[str, list[PeerRun]], failed: str | None) -> SetRow:
    runs = sets[name]
    void = failed or next((why for one in runs if (why := disagreement(one, jobs))), None)
    output_tokens = sum(job.max_tokens for job in jobs)
    if not runs and void is None:
        void = "it was not measured before Ctrl-C"
    row = SetRow(name, note, void, len(jobs), sum(len(job.prompt) for job in jobs), output_tokens)
    if void:
        return row
    row.wasted_tokens = runs[0].wasted
    row.wall = Range.of([one.wall for one in runs])
    row.output_throughput = Range.of([output_tokens / one.wall for one in runs])
    row.ttft = Range.of([median(one.first) for one in runs])
    row.e2el = Range.of([median(one.last) for one in runs])
    row.tpot = Range.of([value for one in runs if (value := median_tpot(one)) is not None])
    mine = sets[OURS]
    if not any(disagreement(one, jobs) for one in mine):
        row.ratio = Range.of([theirs.wall / our.wall for our, theirs in zip(mine, runs, strict=False)])
        if mine and runs[0].outputs is not None and mine[0].outputs is not None:
            pairs = zip(mine[0].outputs, runs[0].outputs, strict=True)
            equal = sum(a == b for one, other in pairs for a, b in zip(one, other, strict=True))
            row.tokens_equal = equal / output_tokens
    return row


def median_tpot(one: PeerRun) -> float | None:
    """None if no request has two tokens."""
    values = [
        (last - first) / (n - 1) for first, last, n in zip(one.first, one.last, one.n_tokens, strict=True) if n > 1
    ]
    return median(values) if values else None


def grid_row(
    name: str, N: int, note: str, grid: Grid, grids: dict[str, list[list[Point]]], failed: str | None
) -> GridRow:
    asked = N * grid.n_prompt, N * grid.n_new

    def points_of(row: str) -> list[Point]:
        return [p for points in grids[row] for p in points if p.N == N]

    points, mine = points_of(name), points_of(OURS)
    void = failed
    for p in points:
        if (p.prompt_tokens, p.new_tokens) != asked:
            void = void or f"{asked} prompt and new tokens were asked for, {p.prompt_tokens, p.new_tokens} came"
    if not points and void is None:
        void = "it was not measured before Ctrl-C"
    row = GridRow(name, N, note, void)
    if void:
        return row
    row.prefill_throughput = Range.of([p.prefill_throughput for p in points])
    row.decode_throughput = Range.of([p.decode_throughput for p in points])
    if all((p.prompt_tokens, p.new_tokens) == asked for p in mine):
        pairs = list(zip(mine, points, strict=False))
        row.prefill_ratio = Range.of([our.prefill_throughput / other.prefill_throughput for our, other in pairs])
        row.decode_ratio = Range.of([our.decode_throughput / other.decode_throughput for our, other in pairs])
    return row


def tell(result: PeersResult, notes: dict[str, str], names: Sequence[str]) -> list[str]:
    """What a reader must know to read the numbers."""
    lines = [f"{name}: {notes[name]}." for name in dict.fromkeys(names)]
    lines.append(
        f"All in {result.dtype} on {result.device} with {result.threads} threads, greedy, ends of text ignored; "
        f"{result.rounds} interleaved rounds. Every request arrives at time 0."
    )
    if result.partial:
        lines.append("Ended by Ctrl-C: what was measured before is shown.")
    return lines


# ---- tables


def tables(result: PeersResult) -> list[Table]:
    """Of the experiments that were run, in the order of `SetRow` and `GridRow`."""
    made = []
    if result.set_rows:
        made.append(set_table(result))
    if result.grid_rows:
        made.append(grid_table(result))
    return made


def set_table(result: PeersResult) -> Table:
    one = result.set_rows[0]
    void = "".join(f" {row.name} is void: {row.void}." for row in result.set_rows if row.void)
    table = new_table(
        f"Peers: {one.requests} requests, {one.prompt_tokens:,} prompt and {one.output_tokens:,} output tokens",
        "output: tokens per second, median and range of the rounds. minillm: how many times as fast it is. wasted: "
        "tokens computed for nothing. equal: output tokens that are minillm's; near-ties make texts part."
        f"{void}",
        ("engine", "output", "rounds", "minillm", "wasted", "equal", "ttft s", "tpot ms"),
    )
    wrap_names(table)
    for row in result.set_rows:
        if row.void:
            table.add_row(row.name, Text("void", style="red"))
            continue
        table.add_row(
            row.name,
            *speed(row.output_throughput),
            middle(row.ratio, times),
            "-" if row.wasted_tokens is None else f"{row.wasted_tokens:,}",
            "-" if row.tokens_equal is None else f"{row.tokens_equal:.0%}",
            middle(row.ttft, "{:.2f}".format),
            middle(row.tpot, lambda value: f"{value * 1e3:.1f}"),
        )
    return table


def grid_table(result: PeersResult) -> Table:
    reasons = dict.fromkeys(f" {row.name} is void: {row.void}." for row in result.grid_rows if row.void)
    table = new_table(
        f"Peers: N sequences at once, {result.n_prompt} prompt and {result.n_new} new tokens each",
        "Tokens per second of all N, median and range of the rounds. minillm: how many times as fast it is."
        + "".join(reasons),
        ("engine", "N", "prefill", "rounds", "minillm", "decode", "rounds", "minillm"),
    )
    wrap_names(table)
    for row in result.grid_rows:
        if row.void:
            table.add_row(row.name, str(row.N), Text("void", style="red"))
            continue
        table.add_row(
            row.name,
            str(row.N),
            *speed(row.prefill_throughput),
            middle(row.prefill_ratio, times),
            *speed(row.decode_throughput),
            middle(row.decode_ratio, times),
        )
    return table


def wrap_names(table: Table) -> None:
    """The names of engines are long; a word that is longer still is broken, never cut off."""
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"


def middle(found: Range | None, words: Callable[[float], str]) -> str:
    return "-" if found is None else words(found.median)


def speed(found: Range | None) -> tuple[Text, str]:
    assert found is not None  # the row is not void
    return Text(rate(found.median), style="bold"), f"{rate(found.min)}-{rate(found.max)}"
