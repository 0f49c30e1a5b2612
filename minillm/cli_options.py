"""Options that several commands have, and their defaults."""

from pathlib import Path
from typing import Annotated

import typer

INPUT, SAMPLING, STOPPING, RUNNING = "What to read", "How to choose tokens", "When to stop", "How to run"

Model = Annotated[
    str,
    typer.Option(help="A name that `minillm weights --list` knows, or a folder.", rich_help_panel=RUNNING),
]
Device = Annotated[
    str, typer.Option(help="auto (a GPU if there is one), cpu, cuda or cuda:N.", rich_help_panel=RUNNING)
]
Dtype = Annotated[
    str,
    typer.Option(
        help="auto (bfloat16 where the hardware has it), float32, bfloat16, float16 or float64.",
        rich_help_panel=RUNNING,
    ),
]
MaxTokens = Annotated[int, typer.Option(help="Most new tokens for each text.", rich_help_panel=STOPPING)]
Temperature = Annotated[
    float, typer.Option(help="0 takes the most likely token; above 0 draws.", rich_help_panel=SAMPLING)
]
TopK = Annotated[int, typer.Option(help="Draw from the K most likely tokens; 0: all.", rich_help_panel=SAMPLING)]
TopP = Annotated[
    float, typer.Option(help="Draw from the likeliest tokens that hold this share.", rich_help_panel=SAMPLING)
]
MinP = Annotated[
    float,
    typer.Option(help="Leave out tokens below this share of the likeliest one's.", rich_help_panel=SAMPLING),
]
Seed = Annotated[
    int | None,
    typer.Option(help="Same seed, same draws.  [dim]\\[default: a new one][/]", rich_help_panel=SAMPLING),
]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Above 1: avoid tokens of prompt and text.", rich_help_panel=SAMPLING)
]
DEFAULT_MODEL = "smollm2-135m-instruct"
JsonPath = Annotated[
    Path | None,
    typer.Option("--json", help="Write the measurements into this file, beside those of other experiments."),
]
PlotPath = Annotated[Path | None, typer.Option("--plot", help="Draw them into this file (.png, .svg, .pdf).")]
Stage = Annotated[
    str,
    typer.Option(
        help="naive, cached, chunked, padded, dynamic, ragged, continuous, paged, shared or kernels.",
        rich_help_panel=RUNNING,
    ),
]
Backend = Annotated[
    str,
    typer.Option(
        help="How attention is computed, where the stage has a choice: auto (the fastest here, measured once), dense, "
        "gather, segments, c_paged, flex, varlen or triton_paged.",
        rich_help_panel=RUNNING,
    ),
]
Stages = Annotated[str | None, typer.Option(help="Some stages only: a,b,...  [dim]\\[default: all][/]")]
