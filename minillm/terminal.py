"""What a model writes is shown on a terminal, never obeyed; several texts grow at once, one panel each."""

import sys
import time
import unicodedata
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from minillm.request import Event, Request

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

REFRESH = 0.1  # seconds between two drawings of the panels
LEAST_HEIGHT = 3  # a panel's border and one line


def printable(text: str, keep: str = "\n\t") -> str:
    """Control characters and lone surrogates, all but those in `keep`, written as escapes.

    A generated ESC would otherwise move the cursor, change the title or answer in the user's name.
    """

    def shown(c: str) -> str:
        hidden = unicodedata.category(c) in ("Cc", "Cs") and c not in keep
        return c.encode("unicode_escape").decode() if hidden else c

    return "".join(map(shown, text))


def one_line(text: str, most: int | None = None) -> str:
    """`text` on one line, cut to `most` characters."""
    line = printable(text, keep="")
    return line if most is None or len(line) <= most else line[: most - 1] + "…"


def heading(number: int, of: int, prompt: str) -> str:
    return f"{number} of {of}: {one_line(prompt, 60)}"


def write(text: str) -> None:
    """Text to stdout at once: as it is into a pipe or file, made harmless on a terminal."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def complain(message: str) -> None:
    err.print(Text("error: ", "bold red").append(one_line(message), "default"), soft_wrap=True)


def remark(text: str) -> None:
    err.print(Text(one_line(text), "dim"), soft_wrap=True)


class Panels:
    """A live view of several requests: each text grows in its own panel, and is printed whole at last.

    While it is live, no more is drawn than the terminal holds: the end of every text, or of the first
    unfinished ones and a line that counts the rest. However the block ends, all text made so far is printed.
    """

    def __init__(self, console: Console, prompts: Sequence[str], requests: Sequence[Request]):
        self.console, self.requests = console, list(requests)
        self.titles = [heading(i, len(prompts), prompt) for i, prompt in enumerate(prompts, 1)]
        self.texts = dict.fromkeys(self.requests, "")
        self.live = Live(console=console, auto_refresh=False, transient=True)
        self.due = 0.0

    def __enter__(self) -> "Panels":
        self.live.__enter__()
        self._draw()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.live.__exit__(kind, error, trace)
        for request in self.requests:
            self.console.print(self._panel(request, self.texts[request]))

    def show(self, event: Event) -> None:
        self.texts[event.request] += printable(event.text)
        if time.monotonic() >= self.due:
            self._draw()

    def _draw(self) -> None:
        began = time.monotonic()
        self.live.update(self._view(), refresh=True)
        now = time.monotonic()
        self.due = now + max(REFRESH, 10 * (now - began))  # drawing long texts takes a tenth of the time at most

    def _view(self) -> RenderableType:
        height = self.console.height - 1
        shown = self.requests
        if len(shown) * LEAST_HEIGHT > height:
            unfinished = [request for request in self.requests if request.finish_reason is None]
            shown = unfinished[: max(1, (height - 1) // LEAST_HEIGHT)]
        n_lines = max(1, height // max(1, len(shown)) - 2)
        panels: list[RenderableType] = [self._panel(r, self._end(self.texts[r], n_lines)) for r in shown]
        if len(shown) < len(self.requests):
            done = sum(request.finish_reason is not None for request in self.requests)
            more = len(self.requests) - done - len(shown)
            panels.append(Text(f"{done} finished, {more} more not shown", style="dim"))
        return Group(*panels)

    def _end(self, text: str, n_lines: int) -> str:
        """The last lines of `text`, as they are when wrapped into a panel."""
        lines = Text(text).wrap(self.console, self.console.width - 4)
        return "\n".join(line.plain for line in lines[-n_lines:])

    def _panel(self, request: Request, text: str) -> Panel:
        state = f"{request.n_output} tokens"
        if request.finish_reason is not None:
            state += f", {request.finish_reason}"
        if request.params.temperature > 0:
            state += f", seed {request.seed}"
        return Panel(
            Text(text),
            title=Text(self.titles[self.requests.index(request)]),
            title_align="left",
            subtitle=Text(state, style="dim"),
            subtitle_align="right",
            border_style="dim" if request.finish_reason is None else "green",
        )
