"""Is it the same text? Every token that a stage emitted, against the naive model, before any time is
believed.

Two ways to add up the same numbers round differently, and where the two best logits are nearly equal the
texts part and are never the same again. So texts are not compared. Instead the naive model reads prompt and
output once ("teacher forcing"), and each emitted token must be its best one, or within a tolerance of it:
then it is excused.

The reference runs with the same weights in the run's own dtype: against a wider one, what the dtype itself
rounds would be charged to the stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from minillm.attention import SelfAttend
from minillm.batch import line
from minillm.bench.harness import Run
from minillm.model import Llama

# How far below the best logit an emitted token may lie. Measured between stages; a wrong token lies far
# below.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 0.05, torch.float16: 0.1, torch.bfloat16: 0.5}
MOST_EXCUSED = 0.05


@dataclass(frozen=True)
class Check:
    """Emitted tokens of one or more texts."""

    positions: int  # tokens checked
    excused: int  # not the best, but within the tolerance
    wrong: int  # neither
    gap: float  # the largest distance from the best logit

    def __add__(self, other: "Check") -> "Check":
        return Check(
            self.positions + other.positions,
            self.excused + other.excused,
            self.wrong + other.wrong,
            max(self.gap, other.gap),
        )

    @property
    def share_excused(self) -> float:
        return self.excused / self.positions if self.positions else 0.0


class Verifier:
    """Checks texts, each pair of prompt and output once: most stages emit the same ones."""

    def __init__(self, model: Llama):
        self.model = model
        self.tolerance = TOLERANCE[model.dtype]
        self._done: dict[tuple[tuple[int, ...], tuple[int, ...]], Check] = {}

    def check(self, prompt: Sequence[int], output: Sequence[int]) -> Check:
        """One naive forward over prompt and output."""
        key = tuple(prompt), tuple(output)
        if not output:
            return Check(0, 0, 0, 0.0)
        if key not in self._done:
            tokens, positions = line([*prompt, *output[:-1]], 0, self.model.device)  # [T]
            hidden = self.model(tokens, positions, SelfAttend(positions))  # [T, d]
            logits = self.model.logits(hidden[len(prompt) - 1 :]).double()  # [n_output, V]
            emitted = torch.tensor(output, device=logits.device)[:, None]
            gaps = logits.amax(-1) - logits.gather(-1, emitted)[:, 0]  # [n_output]
            wrong = ~(gaps <= self.tolerance)  # NaN counts as wrong
            excused = (gaps > 0) & ~wrong
            self._done[key] = Check(len(output), int(excused.sum()), int(wrong.sum()), float(gaps.max()))
        return self._done[key]


@dataclass(frozen=True)
class Verdict:
    """What the check says of a stage; `void` gives the reason why its times may not be shown."""

    check: Check
    void: str | None


def judge(runs: Sequence[Run], verifier: Verifier, most_excused: float = MOST_EXCUSED) -> Verdict:
    """All runs of one stage. Runs whose jobs ignore the end of text must also have emitted exactly what was
    asked: then every stage that is compared has emitted the same number of tokens.
    """
    check = Check(0, 0, 0, 0.0)
    for run in runs:
        for job, output, reason in zip(run.jobs, run.outputs, run.finish_reasons, strict=True):
            check += verifier.check(job.prompt, output)
            expected = len(output) == job.max_tokens if job.ignore_eos else reason in ("stop", "length")
            if not expected:
                asked = f"{job.max_tokens} tokens were asked for and {len(output)} emitted"
                return Verdict(check, f"{asked} (it ended with {reason!r})")
    if check.wrong:
        return Verdict(check, f"{check.wrong} of {check.positions} tokens are not the naive model's")
    if check.share_excused > most_excused:
        return Verdict(check, f"{check.share_excused:.1%} excused, and {most_excused:.0%} may be")
    return Verdict(check, None)
