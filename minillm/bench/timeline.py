"""What each request did in each step of one run: made from a `Run`, and shown in letters and in words.

`trace` draws it and writes it for a trace viewer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rich.console import Console
from rich.text import Text

from minillm.bench.harness import Run, Step

# kind: its letter and its colour on a terminal. Pads are not a kind: they fill up the row of a cell, or all of it.
KINDS = {
    "prefill": ("P", "bold blue"),  # a piece of the prompt
    "decode": ("d", "yellow"),  # the token made last
    "again": ("A", "magenta"),  # the whole text so far, to make one more token
    "waiting": (".", "dim"),  # it has arrived, but has no place yet
    "idle": ("-", "cyan"),  # it has a place, but no token in this step
    "held": ("x", "red"),  # it has ended, but its row of the rectangle goes on
}
COMPUTED = ("prefill", "decode", "again")  # those with tokens of the request's own


@dataclass(frozen=True)
class Cell:
    """One request in one step."""

    kind: str  # one of KINDS
    n: int = 0  # tokens of its own
    start: int = 0  # the first of them is this token of the text
    pads: int = 0  # what its row of the rectangle was filled up with


@dataclass(frozen=True)
class Timeline:
    """Steps and requests count from 0 here, and from 1 in everything that people see. Times are in seconds."""

    stage: str
    limits: Mapping[str, int]  # those that the stage knows
    steps: Sequence[Step]
    cells: Sequence[Mapping[int, Cell]]  # for each request {step: cell}; none before it arrives and after it is gone
    arrivals: Sequence[float]
    prompts: Sequence[int]  # tokens of each prompt
    outputs: Sequence[int]  # tokens of each text that was made
    token_bytes: int  # K and V of one token, over all layers
    partial: bool  # stopped half way

    @property
    def end(self) -> float:
        return self.steps[-1].ended if self.steps else 0.0

    @property
    def most_tokens(self) -> int | None:
        """Most tokens in one step, where the stage has such a limit."""
        return self.limits.get("budget", self.limits.get("chunk"))

    def first(self, i: int) -> int | None:
        """The first step that request i took part in; None if it never did."""
        return min((k for k, cell in self.cells[i].items() if cell.kind in COMPUTED), default=None)

    @cached_property
    def waits(self) -> list[float]:
        """From each arrival to the request's first step, or to the end of a run that was stopped."""
        firsts = [self.first(i) for i in range(len(self.cells))]
        began = [self.end if k is None else self.steps[k].began for k in firsts]
        return [max(0.0, at - arrival) for at, arrival in zip(began, self.arrivals, strict=True)]

    def tokens(self, kind: str) -> list[int]:
        """Tokens of one kind in each step."""
        return [
            sum(cells[k].n for cells in self.cells if k in cells and cells[k].kind == kind)
            for k in range(len(self.steps))
        ]

    @property
    def pads(self) -> list[int]:
        """Tokens of nobody in each step, those of rows without a request included."""
        return [step.tokens - sum(step.new.values()) for step in self.steps]

    @property
    def used_bytes(self) -> list[int]:
        """KV memory that was needed at the end of each step."""
        return [step.stored_tokens * self.token_bytes for step in self.steps]


def make_timeline(run: Run, limits: Mapping[str, int], token_bytes: int, partial: bool = False) -> Timeline:
    """Works for every stage: kinds follow from the counts alone.

    A step in which nobody got anything was broken off by Ctrl-C, and is left out.
    """
    steps = [step for step in run.counts.steps if step.new]
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for k, step in enumerate(steps):
        for i in step.new:
            first.setdefault(i, k)
            last[i] = k
    cells: list[dict[int, Cell]] = [{} for _ in run.jobs]
    done = [0] * len(run.jobs)  # tokens of each text that went through the model at least once
    rows: list[int] = []  # which request sits in which row of the rectangle; only rectangles have pads
    for k, step in enumerate(steps):
        newcomers = [i for i in step.new if first[i] == k]
        take_rows(rows, [last[i] < k for i in rows], sorted(newcomers, key=lambda i: (run.arrivals[i], i)))
        width = max(step.new.values())  # T of a rectangle: nobody has more tokens than the widest row
        padded = step.tokens > sum(step.new.values())
        held = {i for i in rows[: step.tokens // width] if last[i] < k} if padded else set()
        for i, job in enumerate(run.jobs):
            if i in step.new:
                n = step.new[i]
                pads = width - n if padded else 0
                if done[i] < len(job.prompt):
                    cells[i][k] = Cell("prefill", n, done[i], pads)
                elif n == 1:
                    cells[i][k] = Cell("decode", n, done[i], pads)
                else:
                    cells[i][k] = Cell("again", n, 0, pads)
                done[i] = cells[i][k].start + n
            elif i in held:
                cells[i][k] = Cell("held", pads=width)
            elif first.get(i, len(steps)) > k:
                if run.arrivals[i] <= step.began:
                    cells[i][k] = Cell("waiting")
            elif run.finish_reasons[i] is None or k < last[i]:
                cells[i][k] = Cell("idle")
    return Timeline(
        run.stage,
        limits,
        steps,
        cells,
        run.arrivals,
        [len(job.prompt) for job in run.jobs],
        [len(output) for output in run.outputs],
        token_bytes,
        partial,
    )


def take_rows(rows: list[int], free: Sequence[bool], newcomers: Sequence[int]) -> None:
    """Newcomers take the free rows from the top, as in `stages.dynamic`, then new ones below."""
    places = [row for row, is_free in enumerate(free) if is_free]
    for row, i in zip(places, newcomers, strict=False):
        rows[row] = i
    rows += newcomers[len(places) :]


@dataclass(frozen=True)
class Span:
    """Steps in a row in which a request did the same: `first` to `last`, both included."""

    kind: str
    first: int
    last: int
    n: int  # tokens of its own in each step


def spans(cells: Mapping[int, Cell]) -> list[Span]:
    """A request's cells, joined where one follows the other; each piece of a prompt stays on its own."""
    joined: list[Span] = []
    for k, cell in cells.items():
        before = joined[-1] if joined else None
        if before and cell.kind == before.kind != "prefill" and before.last == k - 1:
            joined[-1] = Span(cell.kind, before.first, k, cell.n)
        else:
            joined.append(Span(cell.kind, k, k, cell.n))
    return joined


# ---- in letters

BLOCKS = " ▁▂▃▄▅▆▇█"


def letters(timeline: Timeline, i: int) -> str:
    """Request i, one letter for each step; a blank before it arrives and after it is gone."""
    cells = timeline.cells[i]
    return "".join(KINDS[cells[k].kind][0] if k in cells else " " for k in range(len(timeline.steps)))


def blocks(values: Sequence[int], most: int) -> str:
    """A block for each value, the full one for `most`; what is not 0 is seen."""
    full = len(BLOCKS) - 1
    return "".join(BLOCKS[-(-value * full // most)] if value else BLOCKS[0] for value in values)


def show_text(timeline: Timeline, console: Console) -> None:
    """The picture in letters, folded to the console's width."""
    labels = [f"request {i + 1}" for i in range(len(timeline.cells))]
    rows = [letters(timeline, i) for i in range(len(timeline.cells))]
    totals = [step.tokens for step in timeline.steps]
    bars = {"tokens": totals, "pads": timeline.pads, "KV in use": timeline.used_bytes}
    scales = {"tokens": max(totals), "pads": max(totals), "KV in use": peak_reserved(timeline)}
    for name, values in bars.items():
        if any(values):
            labels.append(name)
            rows.append(blocks(values, scales[name]))
    styles = {letter: style for letter, style in KINDS.values()}
    margin = max(map(len, labels)) + 2
    room = max(10, console.width - margin)
    for begin in range(0, len(timeline.steps), room):
        end = min(begin + room, len(timeline.steps))
        console.print(Text(f"steps {begin + 1} to {end}", style="bold"))
        for label, row in zip(labels, rows, strict=True):
            if not row[begin:end].strip():
                continue
            line = Text(label.ljust(margin))
            for letter in row[begin:end]:
                line.append(letter, styles.get(letter, "default"))
            console.print(line)
        console.print()
    seen = {cell.kind for cells in timeline.cells for cell in cells.values()}
    names = {
        "prefill": "a piece of the prompt",
        "decode": "one more token",
        "again": "the whole text computed again",
        "waiting": "waiting",
        "idle": "no token in this step",
        "held": "ended, its row is all pads",
    }
    legend = [f"{KINDS[kind][0]} {names[kind]}" for kind in KINDS if kind in seen]
    legend.append(f"blocks: full is {max(totals)} tokens")
    if any(timeline.used_bytes):
        legend.append(f"{peak_reserved(timeline) / 1e6:,.1f} MB of KV")
    console.print(Text(", ".join(legend), style="dim"))


# ---- in words


def peak_reserved(timeline: Timeline) -> int:
    return max((step.reserved_bytes for step in timeline.steps), default=0)


def share_of_pads(timeline: Timeline) -> float:
    return sum(timeline.pads) / max(1, sum(step.tokens for step in timeline.steps))


def alt_text(timeline: Timeline) -> str:
    """The picture in words, for those who do not see it."""
    t, numbers = timeline, range(len(timeline.cells))
    kinds = [f"{kind} {sum(t.tokens(kind)):,}" for kind in COMPUTED if any(t.tokens(kind))]
    longest = sorted(numbers, key=lambda i: -t.waits[i])[:3]
    at_once = max(sum(k in cells and cells[k].kind in COMPUTED for cells in t.cells) for k in range(len(t.steps)))
    parts = [
        f"{heading(t)}. A row for each request, a column for each step.",
        f"Tokens: {', '.join(kinds)}, pads {sum(t.pads):,} ({share_of_pads(t):.1%} of all).",
        f"At most {some(at_once, 'request')} in one step, and {some(max(step.tokens for step in t.steps), 'token')}.",
        "Longest waits: " + ", ".join(f"request {i + 1}: {waited(t, i)}" for i in longest) + ".",
        f"KV memory: at most {peak_reserved(t) / 1e6:.2f} MB reserved, {max(t.used_bytes) / 1e6:.2f} MB in use.",
    ]
    return " ".join(parts)


def heading(timeline: Timeline) -> str:
    """What was run, in one line."""
    words = {"max_running": "at most {} running", "budget": "a budget of {} tokens", "chunk": "chunks of {} tokens"}
    limits = [words[name].format(value) for name, value in timeline.limits.items()]
    partial = ["partial: stopped by Ctrl-C"] if timeline.partial else []
    size = f"{some(len(timeline.cells), 'request')} in {some(len(timeline.steps), 'step')}, {timeline.end:.2f} s"
    return f"{timeline.stage}: {', '.join([size, *limits, *partial])}"


def waited(timeline: Timeline, i: int) -> str:
    first = timeline.first(i)
    until = "the end" if first is None else f"step {first + 1}"
    return f"{timeline.waits[i]:.2f} s (until {until})"


def some(n: int, what: str) -> str:
    return f"{n:,} {what}" + ("" if n == 1 else "s")
