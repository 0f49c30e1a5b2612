"""Pictures with their words: each has alt text, and says the same below for whoever does not see it."""

import io
from collections.abc import Sequence
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor


def show(figure: Figure, words: str) -> None:
    """Displays a figure in a notebook, with `words` as its alt text and below it."""
    from IPython.display import display

    assert words.strip(), "a picture needs words"
    FigureCanvasAgg(figure)
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=90)
    display({"image/png": data.getvalue(), "text/plain": words}, raw=True, metadata={"image/png": {"alt": words}})
    print(f"In words: {words}")


def mask_grid(mask: Tensor, rows: Sequence[Any] | None = None, columns: Sequence[Any] | None = None) -> str:
    """A mask [T, S] in characters: # visible, . hidden; a row for each query, a column for each key."""
    T, S = mask.shape
    rows = list(range(T)) if rows is None else list(rows)
    columns = list(range(S)) if columns is None else list(columns)
    left = max(len(str(row)) for row in rows)
    width = max(len(str(column)) for column in columns)
    lines = [" " * left + " " + " ".join(f"{column!s:>{width}}" for column in columns)]
    for row, values in zip(rows, mask.tolist(), strict=True):
        cells = " ".join(f"{'#' if value else '.':>{width}}" for value in values)
        lines.append(f"{row!s:>{left}} {cells}")
    return "\n".join(lines)


def show_masks(
    masks: dict[str, Tensor],
    rows: Sequence[Any] | None = None,
    columns: Sequence[Any] | None = None,
    words: str | None = None,
) -> None:
    """Masks [T, S] side by side, for example a learner's beside the expected one; cells that differ are crossed out.

    The grids are printed in characters too.
    """
    names = list(masks)
    T, S = masks[names[0]].shape
    figure = Figure(figsize=(1.2 + len(masks) * (0.6 + 0.32 * S), 1.5 + 0.32 * T), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(masks), squeeze=False)[0], names, strict=True):
        draw_mask(axes, masks[name], masks[names[-1]], name, rows, columns)
    if words is None:
        expected, told = masks[names[-1]], []
        for name in names[:-1]:
            if masks[name].shape != expected.shape:
                told.append(f"{name} has another shape than {names[-1]}.")
            elif wrong := int((masks[name] != expected).sum()):
                told.append(f"{name} differs from {names[-1]} in {wrong} of {expected.numel()} cells.")
        words = f"{T} queries by {S} keys: {', '.join(names)}. {' '.join(told) or 'All are the same.'}"
    show(figure, words)
    for name in names:
        print(f"\n{name}\n{mask_grid(masks[name], rows, columns)}")


def draw_mask(
    axes: Any, mask: Tensor, expected: Tensor, title: str, rows: Sequence[Any] | None, columns: Sequence[Any] | None
) -> None:
    T, S = mask.shape
    axes.imshow(mask.int().numpy(), cmap="Greys", vmin=0, vmax=1.4, aspect="equal")
    axes.set_xticks(range(S), columns or range(S), rotation=90 if columns else 0, fontsize=8)
    axes.set_yticks(range(T), rows or range(T), fontsize=8)
    axes.set_xticks([x - 0.5 for x in range(S + 1)], minor=True)
    axes.set_yticks([y - 0.5 for y in range(T + 1)], minor=True)
    axes.grid(which="minor", color="black", linewidth=0.5)
    axes.tick_params(which="both", length=0)
    axes.set_xlabel("key: who is looked at")
    axes.set_ylabel("query: who looks" if T > 1 else "query")
    axes.set_title(title, fontsize=10, loc="left")
    if expected.shape == mask.shape:
        for t, s in (mask != expected).nonzero().tolist():
            axes.plot(s, t, marker="x", color="black", markersize=9, markeredgewidth=2)
            axes.plot(s, t, marker="x", color="white", markersize=8, markeredgewidth=1)
