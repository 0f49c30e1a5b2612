"""A request is two counters: `len(tokens)` and `computed`, the tokens whose K and V are stored.

There is no prefill phase and no decode phase: each step computes some of the tokens not computed yet, and a new
token is sampled exactly when none is left. Plain Python: nothing here knows of tensors.
"""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from minillm.config import Config
from minillm.draws import fresh_seed
from minillm.errors import InputError
from minillm.params import SamplingParams


class Decoder(Protocol):
    """Token ids to text as it becomes certain (see `tokenizer.Decoder`)."""

    def push(self, token: int) -> str: ...
    def flush(self) -> str: ...


class TextCodec(Protocol):
    """The part of `tokenizer.Tokenizer` that a request needs."""

    def encode(self, text: str) -> list[int]: ...
    def decoder(self) -> Decoder: ...


@dataclass(frozen=True)
class Event:
    """One token of one request, as it is made. `text` is what became certain with it, and may be empty.

    The last event of a request carries `finish_reason`: "stop", "length", "abort" or "error" (the model's logits
    were not numbers); `token` is None where the end came without one.
    """

    request: "Request"
    token: int | None
    text: str
    finish_reason: str | None = None
    logprobs: dict[int, float] | None = None


_ids = count()


@dataclass(eq=False)
class Request:
    """One text in the making. Build it with `make_request`, which checks what comes from outside."""

    prompt: list[int]
    params: SamplingParams
    seed: int
    limit: int  # most new tokens: max_tokens, or what the context leaves
    stop_ids: frozenset[int] = frozenset()
    decoder: Decoder | None = None
    arrival: float = 0.0  # seconds after the run began
    sample_index: int = 0  # which of several samples of one prompt
    priority: int = 0  # 0 to 9, the most urgent; only a policy that asks for it looks at it

    def __post_init__(self) -> None:
        self.id = next(_ids)
        self.tokens = list(self.prompt)  # prompt, then output
        self.computed = 0  # 0 <= computed < len(tokens) until finished
        self.row: int | None = None  # of the slot table, while it runs
        self.slots: Sequence[int] = ()  # slot of each position reserved so far
        self.blocks: list[int] = []  # the same in blocks, where there are any
        self.entered = 0  # positions whose slots the pool's table knows
        self.moves: list[tuple[int, int]] = []  # what is to be copied before the next step: from slot, to slot
        self.submitted = False  # to an engine: a request is served once
        self.turn = (0.0, 0)  # given in the queue: the smallest is served first; of equal ones, who arrived first
        self.preemptions = 0  # times it lost its memory and had to begin again
        self.leader: Request | None = None  # whose prompt it waits for, as another sample of it
        self.samples: list[Request] = []  # who waits for this one's
        self.finish_reason: str | None = None
        self._held = ""  # text that may yet turn out to begin a stop string

    @property
    def pending(self) -> int:
        """Tokens not computed yet; at 1, one more step samples the next token."""
        return len(self.tokens) - self.computed

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def n_output(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def most_slots(self) -> int:
        """Slots it can ever need: the last token is never fed back, so its K and V are never stored."""
        return len(self.prompt) + self.limit - 1

    def accept(self, token: int, logprobs: dict[int, float] | None = None) -> Event:
        """Appends a sampled token, decides whether the text ends here, and tells what became visible.

        A token below 0 stands for logits that were not numbers: the request ends with "error".
        """
        assert self.finish_reason is None, "a finished request was given a token"
        if token < 0:
            return self.end("error")
        self.tokens.append(token)
        if token in self.stop_ids:
            return self._finish("stop", token, self._end_of_text(), logprobs)
        self._held += self.decoder.push(token) if self.decoder else ""
        at_limit = self.n_output == self.limit
        if at_limit and self.decoder:
            self._held += self.decoder.flush()
        if self.n_output > self.params.min_tokens:
            starts = [at for stop in self.params.stop if (at := self._held.find(stop)) >= 0]
            if starts:
                return self._finish("stop", token, self._held[: min(starts)], logprobs)
            keep = 0 if at_limit else longest_prefix_at_end(self._held, self.params.stop)
        else:
            keep = 0
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        if at_limit:
            return self._finish("length", token, text, logprobs)
        return Event(self, token, text, None, logprobs)

    def end(self, reason: str) -> Event:
        """Ends it from outside ("abort", "error"); text held back is given out."""
        return self._finish(reason, None, self._end_of_text(), None)

    def _end_of_text(self) -> str:
        return self._held + (self.decoder.flush() if self.decoder else "")

    def _finish(self, reason: str, token: int | None, text: str, logprobs: dict[int, float] | None) -> Event:
        self.finish_reason = reason
        self._held = ""
        return Event(self, token, text, reason, logprobs)


def longest_prefix_at_end(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of `text` could be the beginning of a stop string."""
    most = max((len(stop) - 1 for stop in stops), default=0)
    for n in range(min(most, len(text)), 0, -1):
        if any(stop.startswith(text[-n:]) for stop in stops):
            return n
    return 0


def make_request(
    prompt: str | Sequence[int],
    params: SamplingParams,
    config: Config,
    tokenizer: TextCodec | None,
    max_len: int,
    arrival: float = 0.0,
    sample_index: int = 0,
    priority: int = 0,
) -> Request:
    """The door: everything about a request is checked here, and nowhere below. Raises InputError.

    `max_len` is the most positions whose K and V can be stored for one request. A prompt of exactly that length
    is taken, and gets one token; a text that grows into the limit ends with "length".
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InputError("the prompt is text, but no tokenizer was given; pass token ids")
        ids = tokenizer.encode(prompt) if prompt else []  # not even where a BOS would be added
    elif isinstance(prompt, Iterable) and not isinstance(prompt, bytes | bytearray):
        ids = list(prompt)
    else:
        raise InputError(f"the prompt is {prompt!r}; it must be text or a list of token ids")
    if not ids:
        raise InputError("the prompt is empty; it must hold at least one token")
    _check_ids("prompt", ids, config.vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, config.vocab_size)
    _check_ids("logit_bias", params.logit_bias, config.vocab_size)
    if params.stop and tokenizer is None:
        raise InputError("stop strings were given, but no tokenizer; pass stop_token_ids")
    if not isinstance(priority, int) or isinstance(priority, bool) or not 0 <= priority <= 9:
        raise InputError(f"priority is {priority!r}; it must be a whole number from 0 to 9, the most urgent")
    if len(ids) > max_len:
        raise InputError(
            f"the prompt has {len(ids)} tokens, but there is room for {max_len}; shorten it or raise max_len"
        )
    return Request(
        prompt=ids,
        params=params,
        seed=fresh_seed() if params.seed is None else params.seed,
        limit=min(params.max_tokens, max_len - len(ids) + 1),
        stop_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(config.eos)),
        decoder=tokenizer.decoder() if tokenizer else None,
        arrival=arrival,
        sample_index=sample_index,
        priority=priority,
    )


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise InputError(f"{name} holds token id {token!r}; ids run from 0 to {vocab_size - 1}")


class Arrivals:
    """The queue in front of a stage: requests in order of arrival, handed out once their time has come."""

    def __init__(self, requests: Iterable[Request]):
        self._waiting = deque(sorted(requests, key=lambda request: request.arrival))
        self._start = time.monotonic()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def take(self, most: int, wait: bool = True) -> list[Request]:
        """At most that many, in order. With `wait`, sleeps until there is one; empty then means that none is left."""
        if wait and most < 1:
            raise InputError(f"max_running is {most}; it must be at least 1")
        if wait and self._waiting:
            time.sleep(max(0.0, self._start + self._waiting[0].arrival - time.monotonic()))
        now = time.monotonic() - self._start
        taken: list[Request] = []
        while self._waiting and len(taken) < most and (self._waiting[0].arrival <= now or (wait and not taken)):
            taken.append(self._waiting.popleft())
        return taken
