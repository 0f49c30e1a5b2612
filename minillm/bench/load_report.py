"""`minillm load` for people: tables, a plot, and the plot in words; and the command itself."""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from minillm.bench import results
from minillm.bench.load import Plan, Run, Target, allow_connections, fit_characters, measure
from minillm.bench.load_http import Server
from minillm.bench.load_prompts import Prompts
from minillm.bench.load_rows import DEFINITIONS, LATE, Against, Row, compare, summarize
from minillm.bench.load_server import find_model
from minillm.bench.metrics import Stats
from minillm.bench.tables import new_table, rate, times
from minillm.errors import InputError

BUSY_SHARE, BUSY_LAG = 0.7, 0.020  # of the client, from which it is no longer the server that is measured
FLATTERS = 0.05  # share of the prompt tokens found in a cache, from which it is no longer the engine


@dataclass(frozen=True)
class Result:
    plan: Plan
    rows: Sequence[Row]
    against: Sequence[Against]
    partial: bool

    @property
    def failed(self) -> bool:
        return any(row.failed for row in self.rows) or any(one.void for one in self.against)


def run_command(
    url: str,
    peer_url: str | None,
    plan: Plan,
    model: str | None,
    api_key: str | None,
    json_path: Path | None,
    plot_path: Path | None,
    console: Console,
) -> int:
    """`minillm load`. Raises InputError, before anything is measured, for bad options and for what is no server.

    Returns 1 if a request failed, or if two servers did not do the same work.
    """
    if peer_url is not None and plan.seconds is not None:
        raise InputError("--peer-url compares the same work; give --requests in place of --seconds")
    results.check_room(json_path)
    results.check_plot(plot_path)
    allow_connections(plan)
    servers = [Server.parse(one, api_key) for one in (url, peer_url) if one is not None]
    runs: list[Run] = []
    partial = False
    with console.status("Load: asking for the model", refresh_per_second=2) as status:

        def told(run: Run, ended: int, sent: int) -> None:
            status.update(f"Load: {heading(run.plan, run.rate)} on {run.target.server.url}: {ended} of {sent} ended")

        try:
            asyncio.run(go(servers, plan, model, runs, told))
        except KeyboardInterrupt:
            partial = True
    rows = [summarize(run) for run in runs if run.answers]
    result = Result(plan, rows, comparisons(rows) if peer_url else [], partial)
    show(result, console)
    if any(row.completed for row in rows):
        name = "load_peer" if peer_url else "load_sweep" if len(plan.rates) > 1 else "load"
        results.save(console, json_path, name, lambda: as_json(result, api_key), plot_path, lambda: plot(result))
    if partial:
        raise KeyboardInterrupt
    return 1 if result.failed else 0


async def go(servers: Sequence[Server], plan: Plan, model: str | None, runs: list[Run], told: Any) -> None:
    targets = []
    prompts = Prompts(plan.seed, plan.endpoint, plan.max_tokens, plan.ignore_eos)
    try:
        for i, server in enumerate(servers):
            targets.append(Target(*await find_model(server, model), prompts, peer=i > 0))
        if plan.prompt_tokens is not None:
            characters = await fit_characters(targets[0], plan.prompt_tokens, plan.timeout)
            targets = [replace(target, prompts=replace(prompts, characters=characters)) for target in targets]
        await measure(targets, plan, runs, told)
    finally:
        for server in servers:
            server.close()


def comparisons(rows: Sequence[Row]) -> list[Against]:
    rates = dict.fromkeys(row.rate for row in rows)
    return [
        compare(*([row for row in rows if (row.rate, row.peer) == (rate, peer)] for peer in (False, True)))
        for rate in rates
    ]


def as_json(result: Result, api_key: str | None) -> dict[str, Any]:
    import torch

    from minillm.bench import machine

    about = machine.describe(torch.device("cpu"))
    if api_key:
        about["command"] = about["command"].replace(api_key, "***")
    return {
        "metrics": DEFINITIONS,
        "alt_text": alt_text(result),
        "about": about,
        "note": "the machine of `about` is the client's",
        **asdict(result),
    }


# ---- words and tables


def heading(plan: Plan, rate: float | None) -> str:
    return f"{plan.clients} clients, closed loop" if rate is None else f"{rate:g} requests/s, open loop (Poisson)"


def show(result: Result, console: Console) -> None:
    """All about a single run; of several what tells whether they can be trusted, and a table of them together."""
    plan, alone = result.plan, len(result.rows) == 1
    for row in result.rows:
        console.print()
        console.print(Text(f"{row.name} at {row.url}: {heading(plan, row.rate)}, {plan.endpoint}", style="bold"))
        for line in [work(row), *(rates(plan, row) if alone else []), client(row), *told_by_server(row)]:
            console.print(Text(line))
        if alone and row.completed:
            console.print(latency_table(row))
        for line in complaints(plan, row):
            console.print(Text(line, style="bold red"), soft_wrap=True)
    if not alone and any(row.completed for row in result.rows):
        console.print(runs_table(result))
    for one in result.against:
        console.print(peer_table(one))
        if one.void:
            console.print(Text(f"VOID: {one.void}", style="bold red"), soft_wrap=True)
    eos = "ignored" if plan.ignore_eos else "obeyed"
    console.print(Text(f"Ends of text {eos}; at most {plan.max_tokens} tokens each; seed {plan.seed}.", style="dim"))
    if result.partial:
        console.print(Text("PARTIAL: stopped by Ctrl-C; what had ended until then counts.", style="bold"))


def work(row: Row) -> str:
    return (
        f"{row.completed:,} of {row.sent:,} requests completed in {row.wall:.2f} s, at most {row.most_open:,} at once; "
        f"{row.prompt_tokens:,} prompt tokens ({row.shortest_prompt} to {row.longest_prompt} each), "
        f"{row.output_tokens:,} output tokens"
    )


def rates(plan: Plan, row: Row) -> list[str]:
    lines = [
        f"request_throughput {row.request_throughput:.2f}/s, output_throughput {rate(row.output_throughput)} tokens/s, "
        f"total_token_throughput {rate(row.total_token_throughput)} tokens/s"
    ]
    if row.request_goodput is not None:
        limits = ", ".join(f"{name} {most * 1e3:g} ms" for name, most in plan.goodput.items())
        lines.append(f"request_goodput {row.request_goodput:.2f}/s within {limits}")
    return lines


def client(row: Row) -> str:
    c = row.client
    line = (
        f"client: {c.cpu_share:.1%} of a core ({c.cpu_seconds:.2f} s), event-loop lag p50 {ms(c.lag_p50)}, p99 "
        f"{ms(c.lag_p99)}, max {ms(c.lag_max)} ms"
    )
    if row.rate is not None:
        line += f"; {row.late:,} requests sent more than {ms(LATE)} ms late (the latest {ms(row.most_late)} ms)"
    return line


def told_by_server(row: Row) -> list[str]:
    s, lines = row.server, []
    if s.lag_p50 is not None and s.lag_p99 is not None:
        lines.append(f"server: event-loop lag p50 {ms(s.lag_p50)}, p99 {ms(s.lag_p99)} ms, by its /metrics")
    if row.hit_rate is not None:
        lines.append(f"prefix cache: {row.hit_rate:.1%} of the prompt tokens were there before")
    else:
        lines.append("prefix cache: the server does not tell; all prompts differ from their first words on")
    if row.tokens_per_piece is not None and abs(row.tokens_per_piece - 1) > 0.05:
        lines.append(f"a piece of the stream holds {row.tokens_per_piece:.2f} tokens: itl is between pieces")
    return lines


def complaints(plan: Plan, row: Row) -> list[str]:
    """What must not be overlooked."""
    lines = [f"FAILED: {n:,} x {kind}: the server {row.examples[kind]}" for kind, n in row.faults.items()]
    if row.unfinished:
        lines.append(f"{row.unfinished:,} requests had not ended when Ctrl-C came; they count nowhere")
    if row.uncounted:
        lines.append(f"{row.uncounted:,} answers came without usage: their pieces are counted in place of tokens")
    if row.short:
        lines.append(f"{row.short:,} answers ended before {plan.max_tokens} tokens: the server does not ignore the end")
    if row.client.cpu_share > BUSY_SHARE or row.client.lag_p99 > BUSY_LAG:
        lines.append("The client was busy: these latencies are also its own")
    if row.hit_rate is not None and row.hit_rate > FLATTERS:
        lines.append("The prefix cache flatters these figures; take another --seed, or none")
    return lines


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


def ms_cells(stats: Stats | None, parts: Sequence[str]) -> list[str]:
    return ["-" if stats is None else ms(getattr(stats, part)) for part in parts]


def latency_table(row: Row) -> Table:
    begin = "the scheduled time" if row.rate is not None else "the sending"
    table = new_table(
        "Latency in ms",
        f"ttft: first text minus {begin}. tpot: (e2el - ttft) / (tokens - 1). itl: between pieces. e2el: to the end.",
        ("metric", "mean", "median", "p95", "p99"),
    )
    for name in ("ttft", "tpot", "itl", "e2el"):
        table.add_row(name, *ms_cells(getattr(row, name), ("mean", "median", "p95", "p99")))
    return table


def runs_table(result: Result) -> Table:
    """A row for each run."""
    limits = bool(result.plan.goodput)
    table = new_table(
        "The tail as load grows" if len(result.plan.rates) > 1 else "The runs",
        "load: requests/s offered, or clients. served: requests/s. ttft and tpot in ms."
        + (" good: share within the limits." if limits else ""),
        (
            "load",
            "served",
            "tokens/s",
            "ttft p50",
            "p95",
            "p99",
            "tpot p50",
            "p95",
            "p99",
            *(["good"] if limits else []),
        ),
    )
    for row in result.rows:
        cells = [
            f"{row.clients}" if row.rate is None else f"{row.rate:g}",
            f"{row.request_throughput:.2f}",
            rate(row.output_throughput),
            *ms_cells(row.ttft, ("median", "p95", "p99")),
            *ms_cells(row.tpot, ("median", "p95", "p99")),
        ]
        if row.request_goodput is not None:
            cells.append(f"{row.request_goodput / (row.request_throughput or 1):.0%}")
        table.add_row(*cells)
    return table


def peer_table(one: Against) -> Table:
    offered = "" if one.rate is None else f" at {one.rate:g} requests/s"
    table = new_table(
        f"The first server and the peer{offered}: medians of the rounds",
        "Per second, and ms. ratio: first over peer; above 1 is better for throughput, worse for latency.",
        ("figure", "first", "peer", "ratio"),
    )
    for name, (first, peer, ratio) in one.figures.items():
        words = ms if " " in name else rate
        table.add_row(name, words(first), words(peer), Text("void", style="red") if one.void else times(ratio))
    return table


# ---- the plot


def alt_text(result: Result) -> str:
    from minillm.bench.load_plot import alt_text

    return alt_text(result.rows)


def plot(result: Result) -> Any:
    from minillm.bench.load_plot import plot

    return plot(result.rows)
