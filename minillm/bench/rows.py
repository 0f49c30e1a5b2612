"""From runs to rows: one stage, measured, and compared with the one before it and the first."""

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from minillm.bench import ceiling
from minillm.bench.ceiling import Ceilings
from minillm.bench.harness import Run
from minillm.bench.metrics import Summary
from minillm.bench.verify import Verdict
from minillm.model import Llama
from minillm.stages import STAGES


@dataclass
class Row:
    """One stage, measured. Times and throughputs are medians over the `rounds`, which are kept too."""

    stage: str
    about: str
    request_set: str
    positions_checked: int
    share_excused: float
    largest_gap: float | None  # None: it was no number
    void: str | None
    steps: int
    tokens_pushed: int
    tokens_useful: int
    attention_scores: int
    peak_kv_reserved_bytes: int
    peak_kv_stored_bytes: int
    wall: float
    prompt_throughput: float
    output_throughput: float
    output_throughput_min: float
    output_throughput_max: float
    total_token_throughput: float
    request_throughput: float
    ttft_median: float
    ttft_p95: float
    tpot_median: float
    tpot_p95: float
    itl_median: float
    itl_p95: float
    e2el_median: float
    floor_seconds: float
    ceiling_throughput: float  # output tokens per second if every step took its floor
    ceiling_share: float
    ratio_before: float | None
    ratio_before_set: str | None
    ratio_first: float | None
    flags: list[str]
    rounds: list[Summary]

    @property
    def tokens_wasted(self) -> int:
        """Pads, rows that had ended, and tokens computed again; less what was found and not computed at all."""
        return self.tokens_pushed - self.tokens_useful


def make_rows(
    stages: Sequence[str],
    plan: dict[str, list[str]],
    runs: dict[tuple[str, str], list[Run]],
    verdicts: dict[str, Verdict],
    model: Llama,
    ceilings: Ceilings,
) -> list[Row]:
    """One row per stage, from the first of its sets. A void stage has no ratios, and none is taken to it."""
    rows: list[Row] = []
    ratio_first: float | None = 1.0
    for i, stage in enumerate(stages):
        key, void = plan[stage][0], verdicts[stage].void
        before = stages[i - 1] if i else None
        ratio, common = None, None
        if before is not None:
            common = next(k for k in plan[stage] if k in plan[before])
            if not void and not verdicts[before].void:
                ratio = throughput(runs[stage, common]) / throughput(runs[before, common])
            ratio_first = ratio_first * ratio if ratio_first is not None and ratio is not None else None
        rows.append(make_row(stage, key, runs[stage, key], verdicts[stage], model, ceilings))
        rows[-1].ratio_before, rows[-1].ratio_before_set = ratio, common
        rows[-1].ratio_first = None if void else ratio_first
    return rows


def throughput(runs: Sequence[Run]) -> float:
    return median(one.summary.output_throughput for one in runs)


def make_row(stage: str, key: str, runs: Sequence[Run], verdict: Verdict, model: Llama, ceilings: Ceilings) -> Row:
    """Counts are those of the first round: they are the same in every one."""
    one, rounds = runs[0], [r.summary for r in runs]
    speeds = [s.output_throughput for s in rounds]
    floor = ceiling.floor_seconds(one.counts.steps, model.config, model.dtype.itemsize, ceilings)
    wall = median(s.wall for s in rounds)

    def over_rounds(metric: str, part: str) -> float:
        values = [getattr(stats, part) for s in rounds if (stats := getattr(s, metric)) is not None]
        return median(values) if values else 0.0

    flags = []
    if rounds[0].wall > 2 * wall:
        flags.append(f"the first round took {rounds[0].wall:.1f} s, the median {wall:.1f} s: not warm")
    return Row(
        stage=stage,
        about=about_stage(stage),
        request_set=key,
        positions_checked=verdict.check.positions,
        share_excused=verdict.check.share_excused,
        largest_gap=verdict.check.gap if math.isfinite(verdict.check.gap) else None,
        void=verdict.void,
        steps=len(one.counts.steps),
        tokens_pushed=one.tokens_pushed,
        tokens_useful=one.tokens_useful,
        attention_scores=one.scores,
        peak_kv_reserved_bytes=one.counts.peak_reserved_bytes,
        peak_kv_stored_bytes=one.counts.peak_stored_tokens * model.config.kv_bytes_per_token(model.dtype.itemsize),
        wall=wall,
        prompt_throughput=median(s.prompt_throughput for s in rounds),
        output_throughput=median(speeds),
        output_throughput_min=min(speeds),
        output_throughput_max=max(speeds),
        total_token_throughput=median(s.total_token_throughput for s in rounds),
        request_throughput=median(s.request_throughput for s in rounds),
        ttft_median=over_rounds("ttft", "median"),
        ttft_p95=over_rounds("ttft", "p95"),
        tpot_median=over_rounds("tpot", "median"),
        tpot_p95=over_rounds("tpot", "p95"),
        itl_median=over_rounds("itl", "median"),
        itl_p95=over_rounds("itl", "p95"),
        e2el_median=over_rounds("e2el", "median"),
        floor_seconds=floor,
        ceiling_throughput=rounds[0].output_tokens / floor,
        ceiling_share=floor / wall if wall else 0.0,
        ratio_before=None,
        ratio_before_set=None,
        ratio_first=None,
        flags=flags,
        rounds=rounds,
    )


def about_stage(stage: str) -> str:
    """What the stage changes, in its module's own words: the first paragraph of the docstring."""
    paragraph = (inspect.getdoc(inspect.getmodule(STAGES[stage])) or "").split("\n\n")[0]
    words = " ".join(paragraph.split()).partition(": ")[2]
    return words[:1].upper() + words[1:]
