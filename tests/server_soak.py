"""`make soak-server`: minutes of random clients against a real `minillm serve`, to find what only time brings out.

Clients of all kinds at once: some do as they should; some leave at any byte of their request or token of the answer;
some read slowly, or stop; some send what is no request; and bursts ask for more than the server takes. It has little
KV memory and a short queue, so that blocks run out and requests are sent away and refused. Some texts are asked again
and again and must be those that the idle server gave, except where rounding decides between two tokens: that is why
the model computes in float32. In the end the server must be as it was after its warm-up, and then it is told to stop
while it streams.

The server's patience is shortened, so that many clients meet its end in a short run; all else is the real command.
"""

import argparse
import asyncio
import contextlib
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from soak_asks import CHAT, COMPLETIONS, QUESTIONS, Ask, known_asks, question  # noqa: E402
from soak_clients import LIVENESS, Clients, Tally  # noqa: E402
from soak_process import (  # noqa: E402
    BODY_SECONDS,
    DRAIN,
    LIMITS,
    NAME,
    PATIENCE,
    Process,
    Sample,
    get,
    lag_quantile,
    metrics,
)
from soak_wire import Wire, Wrong  # noqa: E402

LAST_STREAMS, LAST_TOKENS = 6, 40  # that run when the server is told to stop
LEFT_TOKENS = 350  # of a text whose client leaves at its beginning
TOKENS_MADE = "vllm:generation_tokens_total"
SETTLE = 30.0  # seconds in which the server must be empty after its last client
EARLY, LATE = (0.2, 0.45), (0.75, 1.0)  # parts of the run that are compared
SHARE_SEEDED = 0.9  # of sampled texts, that must be equal: there rounding cannot be told from a fault
# What counts as a leak
MOST_MEMORY = 96 << 20  # bytes, late median over early: allocators keep what was freed; Python's objects are counted
MOST_FILES, MOST_THREADS = 12, 0  # the same; as many clients as are there change the number of files
MOST_BLOCKS_PER_REQUEST, NOISE_BLOCKS = 1, 8_000  # of Python's allocator, idle at the end over idle at the start
# Objects that may be left of the requests: those of the last step stay until the next one.
KEPT = {"Request": LIMITS["max-running"], "Event": LIMITS["max-running"], "Task": 2}
LONG = 120.0  # seconds from which everything must have happened


# ---- the run


@dataclass
class Result:
    """What the soak saw. `failures` is empty if nothing was wrong."""

    seconds: float
    seed: int
    limits: dict[str, Any]
    tally: Tally = field(default_factory=Tally)
    metrics: dict[str, float] = field(default_factory=dict)  # at the end
    lag: dict[str, float] = field(default_factory=dict)  # seconds
    idle: dict[str, dict[str, Any]] = field(default_factory=dict)  # what the server held before and after
    early: dict[str, float] = field(default_factory=dict)  # medians
    late: dict[str, float] = field(default_factory=dict)
    tenths: list[float] = field(default_factory=list)  # MB of memory
    scrapes: list[float] = field(default_factory=list)  # seconds that /health took
    log: dict[str, int] = field(default_factory=dict)  # lines of the log by their beginning
    left_alone: list[int] = field(default_factory=list)  # tokens made for one that leaves at the first
    stopped: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def require(self, holds: bool, what: str) -> None:
        if not holds:
            self.failures.append(what)


async def soak(process: Process, result: Result) -> None:
    seconds = result.seconds
    port = await asyncio.to_thread(process.port)
    clients = Clients(port, NAME, LIMITS["max-running"] + LIMITS["max-waiting"], result.seed)
    result.tally = clients.tally
    say(f"the server is ready; it writes {len(known_asks(NAME))} known texts")
    await clients.learn()
    say("now come all others")
    result.idle["before"] = await asyncio.to_thread(process.census)
    before, began = await metrics(port), time.monotonic()
    threading.Thread(target=process.sample, args=(began,), daemon=True).start()
    looking = asyncio.create_task(look(port, result))
    await clients.run(began + seconds)
    looking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await looking
    result.early, result.late = (medians(process.samples, seconds, part) for part in (EARLY, LATE))
    parts = [medians(process.samples, seconds, (i / 10, (i + 1) / 10)) for i in range(10)]
    result.tenths = [part["memory"] / 1e6 for part in parts if part]
    await settle(port, result)
    after = result.metrics = await metrics(port)
    result.lag = {f"p{round(100 * q)}": lag_quantile(before, after, q) for q in (0.5, 0.99)}
    async with asyncio.timeout(LIVENESS):
        await leave(port, result)
    await settle(port, result)
    await take_census(process, result)
    async with asyncio.timeout(3 * DRAIN):
        await stop(process, port, result)


async def look(port: int, result: Result) -> None:
    """The probes of a real installation: /health and /metrics, every few seconds."""
    while True:
        began = time.monotonic()
        status, _ = await get(port, "/health")
        result.scrapes.append(time.monotonic() - began)
        result.require(status == 200, f"/health answers {status}")
        await metrics(port)
        await asyncio.sleep(2)


async def settle(port: int, result: Result) -> None:
    """Waits until nothing is running, waiting or holding memory."""
    until = time.monotonic() + SETTLE
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    while any(values := [(await metrics(port))[name] for name in names]):
        if time.monotonic() > until:
            named = ", ".join(f"{name} {value:g}" for name, value in zip(names, values, strict=True))
            return result.failures.append(f"{SETTLE:g} s after the last client the server is not empty: {named}")
        await asyncio.sleep(0.2)


async def take_census(process: Process, result: Result) -> None:
    """Of the idle server; more than once, since the last connections may still be on their way to their end."""
    until = time.monotonic() + SETTLE
    while True:
        result.idle["after"] = await asyncio.to_thread(process.census)
        if not left_over(result) or time.monotonic() > until:
            return
        await asyncio.sleep(1)


async def leave(port: int, result: Result) -> None:
    """One client alone, who leaves early: the server must not write on for nobody."""
    for stream in (True, False):
        before = (await metrics(port))[TOKENS_MADE]
        fields: dict[str, Any] = {"max_tokens": LEFT_TOKENS, "temperature": 0, "ignore_eos": True, "stream": stream}
        ask = question(NAME, COMPLETIONS, "Once upon a time", **fields)
        wire = await Wire(port).open()
        await wire.send(ask.data)
        while (await metrics(port))[TOKENS_MADE] == before:
            await asyncio.sleep(0.05)
        wire.leave(False)
        await settle(port, result)
        made = (await metrics(port))[TOKENS_MADE] - before
        result.left_alone.append(int(made))
        kind = "stream" if stream else "whole answer"
        result.require(made < LEFT_TOKENS / 2, f"{made:g} tokens of a {kind} were made for a client that had left")


def medians(samples: Sequence[Sample], seconds: float, part: tuple[float, float]) -> dict[str, float]:
    rows = [vars(one) for one in samples if part[0] * seconds <= one.seconds <= part[1] * seconds]
    return {name: median(row[name] for row in rows) for name in ("memory", "files", "threads")} if rows else {}


async def stop(process: Process, port: int, result: Result) -> None:
    """SIGTERM while streams run: they end, new requests are refused, and then the process does."""
    ended: Counter[str] = Counter()
    begun = asyncio.Semaphore(0)
    ask = question(NAME, CHAT, QUESTIONS[1], max_tokens=LAST_TOKENS, temperature=0, ignore_eos=True, stream=True)

    async def one() -> None:
        wire = await Wire(port).open()
        try:
            await wire.send(ask.data)
            wire.expect()
            await wire.head()
            begun.release()
            reasons = [choice["finish_reason"] async for chunk in wire.sse() for choice in chunk["choices"]]
            ended[str(reasons[-1])] += 1
        except (Wrong, OSError, LookupError) as error:
            ended[f"{type(error).__name__}: {error}"] += 1
            begun.release()
        finally:
            wire.leave(False)

    async with asyncio.TaskGroup() as group:
        for _ in range(LAST_STREAMS):
            group.create_task(one())
        for _ in range(LAST_STREAMS):
            await begun.acquire()
        before = ended.total()
        process.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        refused = await refused_while_draining(port, ask)
    code = await asyncio.to_thread(process.process.wait, 2 * DRAIN)
    took = time.monotonic() - began
    result.stopped = {"streams": dict(ended), "new requests": refused, "exit code": code, "seconds": took}
    result.require(before < LAST_STREAMS, "all streams had ended before the server was told to stop")
    result.require(ended == {"length": LAST_STREAMS}, f"when the server was told to stop, streams ended {dict(ended)}")
    result.require(refused == 503, f"after SIGTERM a new request got {refused}, not 503")
    result.require(code == 0, f"the exit code is {code}")
    result.require(took < DRAIN, f"the server took {took:.1f} s to end, and had {DRAIN:g}")


async def refused_while_draining(port: int, ask: Ask) -> int:
    await asyncio.sleep(0.3)
    wire = await Wire(port).open()
    try:
        await wire.send(ask.data)
        wire.expect()
        return await wire.head()
    finally:
        wire.leave(False)


# ---- what must hold


def judge(result: Result, log: Sequence[str]) -> None:
    tally, require = result.tally, result.require
    lines: Counter[str] = Counter(" ".join(line.split()[:4]) for line in log)
    result.log = dict(lines)
    bad = [line for line in log if not line.startswith("WARNING: ")]
    require(not bad, f"the log has {len(bad)} lines that are no warnings: {bad[:3]}")
    if tally.n_wrong:
        result.failures += [f"{tally.n_wrong} times something was wrong:", *tally.wrong]
    if result.failures:
        return
    require(tally.asked == tally.ended, f"{tally.asked} were asked, and {tally.ended} came to an end")
    judge_metrics(result)
    judge_idle(result)
    early, late = result.early, result.late
    for name, most, what in (
        ("memory", MOST_MEMORY, "bytes of memory"),
        ("files", MOST_FILES, "open files"),
        ("threads", MOST_THREADS, "threads"),
    ):
        if early and late:
            grown = late[name] - early[name]
            require(grown <= most, f"the server has {grown:,.0f} {what} more than early, and {most:,.0f} are allowed")
    seeded = tally.known["seeded, equal"] / max(1, tally.known["seeded"])
    require(seeded >= SHARE_SEEDED, f"only {seeded:.0%} of the seeded texts are those of the idle server")


def judge_metrics(result: Result) -> None:
    values = result.metrics
    failed = sum(values.get(f'vllm:request_success_total{{finished_reason="{why}"}}', 0) for why in ("error", "abort"))
    whole = sum(values.get(f'vllm:request_success_total{{finished_reason="{why}"}}', 0) for why in ("stop", "length"))
    faults = [name for name in values if name.startswith("minillm:requests_refused_total") and '"5' in name]
    result.require(not failed, f"{failed:g} texts ended with an error")
    result.require(not faults, f"answers of the server's own fault: {faults}")
    n = result.tally.whole_texts
    result.require(whole >= n, f"clients got {n} whole texts, and the server counted {whole:g}")


def left_over(result: Result) -> dict[str, tuple[int, int]]:
    """Of kinds of objects: how many the server still has, and how many it may have, where that is fewer."""
    before, after = (result.idle[when]["objects"] for when in ("before", "after"))
    most = {kind: n + KEPT.get(kind, 0) for kind, n in before.items()}
    return {kind: (n, most[kind]) for kind, n in after.items() if n > most[kind]}


def judge_idle(result: Result) -> None:
    before, after = result.idle["before"], result.idle["after"]
    for name in ("n_live", "streams", "owners", "running", "waiting", "blocks held"):
        result.require(after[name] == 0, f"{name} of the idle server is {after[name]}")
    for kind, (n, most) in left_over(result).items():
        result.require(False, f"{n} objects {kind} are left in the idle server; at most {most} may be")
    grown = after["python blocks"] - before["python blocks"]
    most = NOISE_BLOCKS + MOST_BLOCKS_PER_REQUEST * result.tally.asked
    result.require(grown <= most, f"Python keeps {grown:,} blocks of memory more than before; {most:,} are allowed")


def judge_variety(result: Result) -> None:
    """What is only asked of a long run: that everything happened."""
    tally, values = result.tally, result.metrics
    happened = {
        "was sent away for want of memory": values["vllm:num_preemptions_total"],
        "was refused with 429": tally.count("refused (429)"),
        "left in its request": tally.count("left in its request"),
        "left in its stream": tally.count("left in its stream"),
        "was cut off because it read nothing": tally.ends.get("stopping", Counter())["cut off"],
        "found its beginning in memory": values["vllm:prefix_cache_hits_total"],
        "asked for a known text": tally.known["greedy"],
    }
    for what, n in happened.items():
        result.require(n > 0, f"nobody {what}")


# ---- for people


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def show(result: Result) -> None:
    tally, values = result.tally, result.metrics
    print(f"Soak of the server: {result.seconds:g} s, seed {result.seed}, float32, {result.limits}")
    for client, counter in tally.ends.items():
        print(f"  {client:10} " + ", ".join(f"{n:,} {what}" for what, n in counter.most_common()))
    print(f"  asked {tally.asked:,}, came to an end {tally.ended:,}; {tally.reused:,} over a connection used before")
    for kind in ("greedy", "seeded"):
        n, equal = tally.known[kind], tally.known[f"{kind}, equal"]
        print(f"  known texts, {kind}: {equal:,} of {n:,} equal those of the idle server ({equal / max(1, n):.2%})")
    if seconds := tally.refused_seconds:
        print(f"  429 after {1e3 * median(seconds):.1f} ms in the median, {1e3 * max(seconds):.0f} ms at most")
    if result.scrapes:
        print(f"  /health in {1e3 * median(result.scrapes):.1f} ms, {1e3 * max(result.scrapes):.0f} ms at most")
    if values:
        print(
            f"  sent away {values['vllm:num_preemptions_total']:,.0f}, aborted "
            f"{values['minillm:requests_aborted_total']:,.0f}, tokens {values[TOKENS_MADE]:,.0f}, "
            f"found in memory {values['vllm:prefix_cache_hits_total']:,.0f}"
        )
        print(f"  event-loop lag, s: p50 <= {result.lag['p50']:g}, p99 <= {result.lag['p99']:g}")
    if result.early and result.late:
        for name, unit in (("memory", 1e6), ("files", 1), ("threads", 1)):
            print(f"  {name + (' MB' if unit > 1 else ''):8} early {result.early[name] / unit:,.1f}", end="")
            print(f", late {result.late[name] / unit:,.1f}")
        print(f"  memory MB in each tenth: {' '.join(f'{part:,.0f}' for part in result.tenths)}")
    for when, found in result.idle.items():
        print(f"  idle {when}: {found}")
    print(f"  log: {result.log}")
    print(f"  made for clients that leave a text of {LEFT_TOKENS} tokens at once: {result.left_alone}")
    print(f"  told to stop: {result.stopped}")
    for failure in result.failures:
        print(f"  FAILED: {failure}")


def content(result: Result) -> dict[str, Any]:
    """For JSON."""
    tally = result.tally
    spread = {
        name: {"n": len(values), "median": median(values), "max": max(values)} if values else {"n": 0}
        for name, values in (("429 seconds", tally.refused_seconds), ("health seconds", result.scrapes))
    }
    return {name: value for name, value in vars(result).items() if name not in ("tally", "scrapes", "metrics")} | {
        "ends": {client: dict(counter) for client, counter in tally.ends.items()},
        "known": dict(tally.known),
        **{name: getattr(tally, name) for name in ("asked", "ended", "reused", "whole_texts")},
        **spread,
        "metrics": {name: value for name, value in result.metrics.items() if "_bucket" not in name},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300, help="of random clients")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="a name or folder; default: as minillm serve")
    parser.add_argument("--json", type=Path, help="a results file, for the section `server soak`")
    options = parser.parse_args()
    from minillm.bench import machine, results

    results.check_room(options.json)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the server is ended on the way out
    result = Result(options.seconds, options.seed, {**LIMITS, "patience": PATIENCE, "body seconds": BODY_SECONDS})
    with tempfile.TemporaryDirectory() as folder:
        process = Process(Path(folder), ["--model", options.model] if options.model else [])
        try:
            asyncio.run(soak(process, result))
        except Exception as error:  # all of them are findings
            traceback.print_exc()
            result.failures.append(f"the soak broke off: {type(error).__name__}: {error}")
        finally:
            judge(result, process.log.read_text(errors="replace").splitlines())
            process.end()
    if not result.failures and options.seconds >= LONG:
        judge_variety(result)
    show(result)
    if options.json:
        import torch

        about = machine.describe(torch.device("cpu"))
        results.add(options.json, "server soak", {"about": about, "partial": False, **content(result)})
    print("FAILED" if result.failures else "Nothing was lost, kept or left without an answer.")
    return bool(result.failures)


if __name__ == "__main__":
    sys.exit(main())
