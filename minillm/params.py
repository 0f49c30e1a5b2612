"""How to choose tokens and when to stop: what a user asks for, checked when it is written down."""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from minillm.errors import InputError

MOST_STOPS, MOST_LOGPROBS = 16, 20
MOST_BIAS = 1e30  # added to a logit in float32, it still leaves a number


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop. Raises InputError for a value out of range.

    Repetition penalty counts prompt and output, presence and frequency penalty the output alone (as OpenAI and
    vLLM define them). The end-of-text ids and `stop_token_ids` are kept in `token_ids`; a stop string is cut off.
    Before `min_tokens` nothing stops a text, and a stop string that begins there is ordinary text.
    """

    max_tokens: int = 256
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 and -1: off
    top_p: float = 1.0
    min_p: float = 0.0  # least probability, as a share of the most probable token's
    seed: int | None = None  # None: a fresh one per request
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None  # report the chosen token's log-probability and that many of the largest
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, kind, right in (
            ("stop", Iterable, "a string or a list of strings"),
            ("stop_token_ids", Iterable, "a list of token ids"),
            ("logit_bias", Mapping, "a mapping from token ids to numbers"),
        ):
            if not isinstance(value := getattr(self, name), kind):
                raise InputError(f"{name} is {value!r}; it must be {right}")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        for name, least, most in (
            ("max_tokens", 1, math.inf),
            ("min_tokens", 0, self.max_tokens),
            ("top_k", -1, math.inf),
            ("seed", 0, 2**64 - 1),
            ("logprobs", 0, MOST_LOGPROBS),
        ):
            value = getattr(self, name)
            if value is None and name in ("seed", "logprobs"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise InputError(f"{name} is {value!r}; it must be a whole number {_range(least, most)}")
        for name, low, high in (
            ("temperature", 0.0, math.inf),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("repetition_penalty", 1e-6, 1e6),
            ("presence_penalty", -MOST_BIAS, MOST_BIAS),
            ("frequency_penalty", -MOST_BIAS, MOST_BIAS),
        ):
            value = getattr(self, name)
            open_below = name in ("top_p", "repetition_penalty")
            if not _is_number(value) or not low <= value <= high or (open_below and value == 0):
                raise InputError(f"{name} is {value!r}; it must be a number {_range(low, high, open_below)}")
        if len(self.stop) > MOST_STOPS or not all(isinstance(s, str) and s for s in self.stop):
            raise InputError(f"stop is {self.stop!r}; it must be at most {MOST_STOPS} strings, none of them empty")
        for token, bias in self.logit_bias.items():
            if not _is_number(bias) or abs(bias) > MOST_BIAS:
                raise InputError(f"logit_bias of token {token!r} is {bias!r}; it must be at most {MOST_BIAS:g} in size")


def _is_number(value: object) -> bool:
    """Neither NaN nor infinite, nor a whole number too large for a float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _range(least: float, most: float, open_below: bool = False) -> str:
    low = "" if least == -math.inf else f"above {least:g}" if open_below else f"of at least {least:g}"
    high = "" if most == math.inf else f"at most {most:g}"
    return " and ".join(part for part in (low, high) if part) or "that is finite"
