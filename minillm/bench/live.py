"""Texts on the terminal while a stage makes them."""

import os.path
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.text import Text

from minillm.bench.harness import Job, Run, run
from minillm.model import Llama
from minillm.request import Event
from minillm.terminal import one_line
from minillm.tokenizer import Tokenizer


def watch(
    model: Llama,
    stage: str,
    jobs: Sequence[Job],
    questions: Sequence[str],
    limits: dict[str, int],
    tokenizer: Tokenizer,
    console: Console,
    first: Run | None,
) -> Run:
    """Runs a stage and shows its texts growing side by side. If they turn out to be those of the `first`
    stage, one line says so in their place.
    """
    texts = [""] * len(jobs)
    open_texts = set(range(len(jobs)))

    def view() -> Group:
        lines: list[RenderableType] = []
        for i, (question, text) in enumerate(zip(questions, texts, strict=True)):
            mark = Text("> ", style="cyan") if i in open_texts else Text("> ", style="green")
            title = mark.append(one_line(" ".join(question.split())), "dim")
            title.no_wrap, title.overflow = True, "ellipsis"
            lines.append(Padding(title, (0, 2)))
            answer = Text.assemble(one_line(" ".join(text.split())), ("|" if i in open_texts else "", "cyan"))
            lines.append(Padding(answer, (0, 2, 0, 4)))
        return Group(*lines)

    def on_event(i: int, event: Event) -> None:
        texts[i] += event.text
        if event.finish_reason is not None:
            open_texts.discard(i)
        live.update(view())

    with Live(view(), console=console, refresh_per_second=12, transient=True) as live:
        done = run(model, stage, jobs, limits, tokenizer, on_event)
    console.print(view() if first is None else Text.assemble("  ", same_text(done, first)))
    return done


def same_text(done: Run, first: Run) -> Text:
    """How the texts compare with those of another stage, in one line."""
    for i, (mine, theirs) in enumerate(zip(done.outputs, first.outputs, strict=True), start=1):
        if mine != theirs:
            at = len(os.path.commonprefix([mine, theirs]))
            return Text(f"text {i} leaves {first.stage}'s at token {at + 1}; checked below", style="yellow")
    total = sum(len(output) for output in done.outputs)
    return Text(f"the same text as {first.stage}'s, token for token ({total} tokens)", style="green")
