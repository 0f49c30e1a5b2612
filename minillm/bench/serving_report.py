"""`minillm bench serving` for people: tables, what came of the targets, and the command itself."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from minillm.bench import machine, results
from minillm.bench.load import allow_connections
from minillm.bench.load_report import ms, ms_cells
from minillm.bench.load_rows import DEFINITIONS, Row
from minillm.bench.serving import Found, Plan, Trial, measure, servers
from minillm.bench.serving_processes import Models, peer_options
from minillm.bench.tables import device_name, new_table, rate, times
from minillm.fetch import find

TARGET, PEER_TARGET = 0.9, 1.2  # of output tokens per second: over the offline engine, and over the peer
LAG_TARGET = 0.1  # seconds
PARTS = ("median", "p99")


@dataclass(frozen=True)
class Verdict:
    """A target and what came of it; `met` is None if it was not measured."""

    what: str
    target: str
    measured: str
    value: float | None
    met: bool | None
    detail: str


@dataclass(frozen=True)
class Result:
    about: dict[str, Any]
    model: dict[str, Any]
    plan: Plan
    found: Found
    peer: str | None  # what it is
    partial: bool

    @property
    def failed(self) -> bool:
        """Whether anything that was asked was not served as it should."""
        rows = [*self.found.sweep, *([self.found.streams] if self.found.streams else [])]
        return any(trial.void for trial in self.found.trials) or any(row.failed or row.short for row in rows)


def run_command(models: Models, plan: Plan, json_path: Path | None, console: Console) -> int:
    """`minillm bench serving`. Returns 1 if a request was not served as it should; a target that is missed is told.

    Raises InputError for bad options before anything is started, and for servers that do not serve. After Ctrl-C it
    shows and saves what was measured, and raises KeyboardInterrupt again.
    """
    models.check()
    find(models.model)
    results.check_room(json_path)
    allow_connections(plan.at_once)
    found, partial = Found(), False
    with servers(models, plan, console) as those:
        try:
            measure(those, plan, found, console)
        except KeyboardInterrupt:
            partial = True
        llama = those.engine.model
    about = machine.describe(llama.device)
    about["command"] = without_folders(about["command"], models)
    model = {"name": Path(models.model).name, "dtype": str(llama.dtype).removeprefix("torch.")}
    model["device"] = str(llama.device)
    result = Result(about, model, plan, found, peer_words(models, plan), partial)
    show(result, console)
    if found.trials:
        results.save(console, json_path, "serving", lambda: as_json(result))
    if partial:
        raise KeyboardInterrupt
    return 1 if result.failed else 0


def without_folders(command: str, models: Models) -> str:
    """Where somebody keeps another project's program is nobody's business."""
    for path in (models.peer_server, models.peer_gguf):
        if path is not None:
            command = command.replace(str(path), path.name)
    return command


def peer_words(models: Models, plan: Plan) -> str | None:
    if models.peer_server is not None:
        return f"{models.peer_server.name} {' '.join(peer_options(plan.clients))}"
    return models.peer_url


# ---- what came of the targets


def verdicts(result: Result) -> list[Verdict]:
    plan, found = result.plan, result.found
    lines = [ratio_verdict(result, "offline", "minillm serve over the engine alone", TARGET)]
    if found.streams is not None:
        lines += of_streams(found.streams, plan)
    if result.peer is not None:
        lines.append(ratio_verdict(result, "peer", "minillm serve over the other server", PEER_TARGET))
    return lines


def ratio_verdict(result: Result, other: str, what: str, target: float) -> Verdict:
    plan, found = result.plan, result.found
    ratio = found.ratio("server", other)
    what = f"{what}: output tokens/s at {plan.clients} clients"
    void = next((trial.void for trial in found.trials if trial.void and trial.engine in ("server", other)), None)
    if void or ratio is None:
        return Verdict(what, f">= {target:g} x", "-", None, None, f"void: {void}" if void else "not measured")
    ours, theirs = (found.middle(name, "output_throughput") or 0.0 for name in ("server", other))
    detail = f"{rate(ours)} and {rate(theirs)} tokens/s"
    return Verdict(what, f">= {target:g} x", times(ratio), ratio, ratio >= target, detail)


def of_streams(row: Row, plan: Plan) -> list[Verdict]:
    whole = row.completed - row.short
    detail = f"{row.most_open:,} at once, {row.output_tokens:,} tokens in {row.wall:.1f} s"
    if row.faults:
        detail += "; " + "; ".join(f"{n:,} x {kind}" for kind, n in row.faults.items())
    what = f"{plan.streams:,} streams at once: taken, and ended with all tokens"
    lines = [Verdict(what, f"{plan.streams:,}", f"{whole:,}", whole, whole == plan.streams, detail)]
    lag, client = row.server.lag_p99, row.client
    what, target = "event-loop lag of the server meanwhile, p99", f"< {LAG_TARGET * 1e3:g} ms"
    detail = f"the client's own: {ms(client.lag_p99)} ms, with {client.cpu_share:.0%} of a core"
    if lag is None:
        return [*lines, Verdict(what, target, "-", None, None, "the server does not tell")]
    return [*lines, Verdict(what, target, f"{ms(lag)} ms", lag, lag < LAG_TARGET, detail)]


def finding(result: Result) -> str:
    """What the numbers show."""
    found, lines = result.found, []
    if ratio := found.ratio("server", "offline"):
        share = client_share(found)
        lines.append(
            f"Through HTTP and streams the engine makes {times(ratio)} the tokens/s it makes alone; the client took "
            f"{share:.1%} of a core."
        )
    if (peer := found.ratio("server", "peer")) and result.peer:
        lines.append(f"{result.peer.split()[0]} on the same requests: minillm serve is {times(peer)} as fast.")
    ends = [row for row in found.sweep if row.ttft is not None]
    if len(ends) > 1 and (first := ends[0].ttft) and (last := ends[-1].ttft):
        lines.append(
            f"From {ends[0].rate:.2f} to {ends[-1].rate:.2f} requests/s the median ttft grows from {ms(first.median)} "
            f"to {ms(last.median)} ms, its p99 from {ms(first.p99)} to {ms(last.p99)} ms."
        )
    return " ".join(lines) or "Nothing was measured that could be compared."


def client_share(found: Found) -> float:
    """Of a core: the client's CPU time while our server worked, over the time that took."""
    rows = [trial.row for trial in found.of("server") if trial.row]
    return sum(row.client.cpu_seconds for row in rows) / sum(row.wall for row in rows)


# ---- tables


def show(result: Result, console: Console) -> None:
    plan, found = result.plan, result.found
    m = result.model
    console.print()
    console.print(Text(f"{m['name']}, {m['dtype']}, {device_name(result.about)}", style="bold"))
    if found.trials:
        console.print(trials_table(result))
    if found.sweep:
        console.print(sweep_table(result))
    console.print(verdicts_table(verdicts(result)))
    console.print(Text(finding(result)))
    for trial in found.trials:
        if trial.void:
            console.print(Text(f"round {trial.round + 1}, {trial.engine} is void: {trial.void}", style="bold red"))
    for row in [*found.sweep, *([found.streams] if found.streams else [])]:
        for kind, n in row.faults.items():
            console.print(Text(f"FAILED: {n:,} x {kind}: the server {row.examples[kind]}", style="bold red"))
    if result.peer:
        console.print(Text(f"peer: {result.peer}", style="dim"))
    console.print(Text(f"Greedy, ends of text ignored; {plan.rounds} rounds by turns; seed {plan.seed}.", style="dim"))
    if result.partial:
        console.print(Text("PARTIAL: stopped by Ctrl-C.", style="bold"))


def trial_cells(engine: str, trials: Sequence[Trial]) -> list[str]:
    """Medians of rounds of one engine, all of which ended well."""
    middle = Found(list(trials)).middle
    speed, wall, steps = (middle(engine, name) or 0.0 for name in ("output_throughput", "wall", "steps"))
    speeds = [trial.output_throughput for trial in trials]
    pids = ("client" if engine == "offline" else engine, "client")
    cpu = [f"{sum(t.cpu.get(pid, 0.0) for t in trials) / len(trials):.1f}" for pid in pids]
    return [
        engine,
        rate(speed),
        f"{rate(min(speeds))} to {rate(max(speeds))}",
        f"{wall:.1f}",
        f"{steps:,.0f}" if steps else "-",
        cpu[0],
        "-" if engine == "offline" else cpu[1],
    ]


TRIAL_COLUMNS = ("engine", "output tokens/s", "rounds", "s", "steps", "its CPU s", "client's CPU s")


def trials_table(result: Result) -> Table:
    plan, found = result.plan, result.found
    table = new_table(
        f"{plan.requests} requests of {plan.clients} clients, {plan.max_tokens} tokens each",
        "Medians of the rounds. offline: the engine alone, kept as full. CPU s: of both cores together.",
        TRIAL_COLUMNS,
    )
    for engine in dict.fromkeys(trial.engine for trial in found.trials):
        if trials := found.of(engine):
            table.add_row(*trial_cells(engine, trials))
    return table


SWEEP_COLUMNS = (
    "offered",
    "of capacity",
    "served",
    "tokens/s",
    "ttft p50",
    "ttft p99",
    "tpot p50",
    "tpot p99",
    "good",
    "most at once",
)


def sweep_cells(row: Row, share: float) -> list[str]:
    return [
        f"{row.rate:.2f}",
        f"{share:.0%}",
        f"{row.request_throughput:.2f}",
        rate(row.output_throughput),
        *ms_cells(row.ttft, PARTS),
        *ms_cells(row.tpot, PARTS),
        f"{(row.request_goodput or 0.0) / row.request_throughput:.0%}" if row.request_throughput else "-",
        f"{row.most_open:,}",
    ]


def limits(plan: Plan) -> str:
    return ", ".join(f"{name} {most * 1e3:g} ms" for name, most in plan.goodput.items())


def sweep_table(result: Result) -> Table:
    table = new_table(
        "The tail as load grows: requests at random times, whether or not the server keeps up",
        f"offered, served: requests/s. ttft and tpot in ms. good: share of requests within {limits(result.plan)}.",
        SWEEP_COLUMNS,
    )
    for row, share in zip(result.found.sweep, result.plan.shares, strict=False):
        table.add_row(*sweep_cells(row, share))
    return table


def verdicts_table(found: Sequence[Verdict]) -> Table:
    table = new_table("Targets", "", ("what", "target", "measured", "met", "detail"))
    for i in (0, 4):
        table.columns[i].no_wrap, table.columns[i].justify, table.columns[i].ratio = False, "left", 1
    words = {True: Text("yes", style="green"), False: Text("no", style="red"), None: Text("-")}
    for one in found:
        table.add_row(one.what, one.target, one.measured, words[one.met], one.detail)
    return table


# ---- JSON


def as_json(result: Result) -> dict[str, Any]:
    found, plan = result.found, result.plan
    by_share = list(zip(found.sweep, plan.shares, strict=False))
    engines = [name for name in dict.fromkeys(trial.engine for trial in found.trials) if found.of(name)]
    return {
        "metrics": DEFINITIONS,
        "about": result.about,
        "model": result.model,
        "plan": asdict(plan),
        "limits": limits(plan),
        "peer": result.peer,
        "finding": finding(result),
        "engines": [dict(zip(TRIAL_COLUMNS, trial_cells(name, found.of(name)), strict=True)) for name in engines],
        "ratios": {name: found.ratio("server", name) for name in engines if name != "server"},
        "trials": [{**asdict(replace(trial, row=None)), "row": compact(trial.row)} for trial in found.trials],
        "streams": compact(found.streams),
        "sweep": [compact(row) for row in found.sweep],
        "load": [dict(zip(SWEEP_COLUMNS, sweep_cells(*pair), strict=True)) for pair in by_share],
        "verdicts": [asdict(verdict) for verdict in verdicts(result)],
        "partial": result.partial,
    }


def compact(row: Row | None) -> dict[str, Any] | None:
    """Without where the server was, and without what only a plot needs."""
    if row is None:
        return None
    left_out = {"url", "model", "examples", "ttft_percentiles", "tpot_percentiles"}
    row = replace(row, faults=dict(row.faults))  # asdict makes nonsense of a Counter
    return {"name": row.name, **{name: value for name, value in asdict(row).items() if name not in left_out}}
