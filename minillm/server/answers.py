"""From events to the JSON of an answer, whole or in chunks, for both of OpenAI's APIs.

A chunk is made for every token of every stream, so all that does not change in it is made once for a choice: what is
left is to write one text as JSON between two byte strings.
"""

import json
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from minillm.request import Event, Request
from minillm.server.errors import ApiError, dumps

LEAST_LOGPROB = -9999.0  # in the place of minus infinity, which JSON has not
DONE = b"data: [DONE]\n\n"

Json = dict[str, Any]


class Names:
    """How tokens are written in log-probabilities: as their text, or, where that is only part of a character, as OpenAI
    writes it, "bytes:\\\\xf0\\\\x9f"."""

    def __init__(self, token_bytes: Callable[[int], bytes]):
        self._token_bytes = token_bytes

    def __call__(self, token: int) -> tuple[str, list[int]]:
        data = self._token_bytes(token)
        try:
            return data.decode(), list(data)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), list(data)


class Choice:
    """One text of an answer, as far as it has come."""

    def __init__(self, index: int):
        self.index = index
        self.text = ""
        self.n_characters = 0  # made so far, sent or not
        self.n_tokens = 0
        self.finish_reason: str | None = None
        self.logprobs: list[Json] = []  # in the API's own form, one for each token
        self.head = self.tail = b""  # around the text of a chunk


class Answer:
    """What both APIs have in common. Subclasses say how a choice looks in a chunk, and in a whole answer."""

    prefix: str  # of the id
    kind: str  # of a whole answer
    chunk_kind: str

    def __init__(self, model: str, names: Names, wants_logprobs: bool, usage: bool = False, usage_always: bool = False):
        self.model, self.names, self.wants_logprobs = model, names, wants_logprobs
        self.usage, self.usage_always = usage, usage and usage_always
        self.id, self.created = f"{self.prefix}-{secrets.token_hex(12)}", int(time.time())
        self.choices: dict[Request, Choice] = {}
        self.n_prompt = 0

    def begin(self, groups: Sequence[Sequence[Request]]) -> None:
        """The requests of the answer, in the order of its choices; those of one group have one prompt."""
        self.n_prompt = sum(len(group[0].prompt) for group in groups)
        for index, request in enumerate(request for group in groups for request in group):
            self.choices[request] = choice = Choice(index)
            if not self.wants_logprobs and not self.usage_always:
                choice.head, choice.tail = self._frame(choice)

    # ---- in chunks

    def first(self) -> bytes:
        """What is sent before there is any token."""
        return b""

    def chunks(self, events: Sequence[Event]) -> bytes:
        """The chunks for these events: one for each choice that has new text, however many tokens that has, and one
        for each end. Raises ApiError if a text ended with an error."""
        by_request: dict[Request, list[Event]] = {}
        for event in events:
            by_request.setdefault(event.request, []).append(event)
        out: list[bytes] = []
        for request, its_events in by_request.items():
            choice = self.choices[request]
            text, logprobs = self._take(choice, its_events)
            if choice.head:
                if text:
                    out += choice.head, json.dumps(text).encode(), choice.tail
            elif text or logprobs:
                out.append(self._chunk([self._delta(choice, text, logprobs)]))
            if choice.finish_reason is not None:
                out.append(self._chunk([self._end(choice)]))
        return b"".join(out)

    def last(self) -> bytes:
        usage = self._data({"choices": [], "usage": self._usage()}) if self.usage else b""
        return usage + DONE

    def _chunk(self, choices: list[Json]) -> bytes:
        usage = {"usage": self._usage() if self.usage_always else None} if self.usage else {}
        return self._data({"choices": choices, **usage})

    def _data(self, more: Json) -> bytes:
        head = {"id": self.id, "object": self.chunk_kind, "created": self.created, "model": self.model}
        return b"data: " + dumps({**head, **more}) + b"\n\n"

    def _frame(self, choice: Choice) -> tuple[bytes, bytes]:
        """What stands around the text in every chunk of a choice."""
        mark = secrets.token_hex(8)
        head, tail = self._chunk([self._delta(choice, mark, [])]).split(dumps(mark))
        return head, tail

    # ---- whole

    def whole(self) -> Json:
        """The answer, after `take` was given all events."""
        head = {"id": self.id, "object": self.kind, "created": self.created, "model": self.model}
        choices = [self._whole(choice) for choice in self.choices.values()]
        return {**head, "choices": choices, "usage": self._usage()}

    def take(self, event: Event) -> None:
        """Raises ApiError if a text ended with an error."""
        choice = self.choices[event.request]
        text, logprobs = self._take(choice, [event])
        choice.text += text
        choice.logprobs += logprobs

    # ---- both

    def _take(self, choice: Choice, events: Sequence[Event]) -> tuple[str, list[Json]]:
        """Counts; the text and the log-probabilities of these events."""
        logprobs = []
        for event in events:
            choice.n_tokens += event.token is not None
            if event.logprobs is not None and event.token is not None:
                logprobs.append(self._logprobs(event.token, event.logprobs, choice.n_characters))
            choice.n_characters += len(event.text)
        choice.finish_reason = events[-1].finish_reason
        if choice.finish_reason == "error":
            raise ApiError(500, "the model failed on this request; others go on", code="engine_error")
        if choice.finish_reason == "abort":
            raise ApiError(503, "the server is shutting down, and the text is not finished", code="shutting_down")
        return (events[0].text if len(events) == 1 else "".join(event.text for event in events)), logprobs

    def _usage(self) -> Json:
        n = sum(choice.n_tokens for choice in self.choices.values())
        return {"prompt_tokens": self.n_prompt, "completion_tokens": n, "total_tokens": self.n_prompt + n}

    def _delta(self, choice: Choice, text: str, logprobs: list[Json]) -> Json:
        raise NotImplementedError

    def _end(self, choice: Choice) -> Json:
        raise NotImplementedError

    def _whole(self, choice: Choice) -> Json:
        raise NotImplementedError

    def _logprobs(self, token: int, logprobs: dict[int, float], offset: int) -> Json:
        """Of one token; `offset` is where its text begins."""
        raise NotImplementedError


class CompletionAnswer(Answer):
    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def _delta(self, choice: Choice, text: str, logprobs: list[Json]) -> Json:
        return {"index": choice.index, "text": text, "logprobs": self._columns(logprobs), "finish_reason": None}

    def _end(self, choice: Choice) -> Json:
        return {"index": choice.index, "text": "", "logprobs": None, "finish_reason": choice.finish_reason}

    def _whole(self, choice: Choice) -> Json:
        logprobs = self._columns(choice.logprobs)
        return {
            "index": choice.index,
            "text": choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }

    def _logprobs(self, token: int, logprobs: dict[int, float], offset: int) -> Json:
        top = {self.names(one)[0]: max(value, LEAST_LOGPROB) for one, value in logprobs.items()}
        return {
            "tokens": self.names(token)[0],
            "token_logprobs": max(logprobs[token], LEAST_LOGPROB),
            "top_logprobs": top,
            "text_offset": offset,
        }

    def _columns(self, logprobs: list[Json]) -> Json | None:
        if not logprobs:
            return {name: [] for name in COLUMNS} if self.wants_logprobs else None
        return {name: [one[name] for one in logprobs] for name in COLUMNS}


COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class ChatAnswer(Answer):
    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def first(self) -> bytes:
        delta = {"role": "assistant", "content": "", "refusal": None}
        return b"".join(
            self._chunk([{"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}])
            for choice in self.choices.values()
        )

    def _delta(self, choice: Choice, text: str, logprobs: list[Json]) -> Json:
        listed = {"content": logprobs, "refusal": None} if self.wants_logprobs else None
        return {"index": choice.index, "delta": {"content": text}, "logprobs": listed, "finish_reason": None}

    def _end(self, choice: Choice) -> Json:
        return {"index": choice.index, "delta": {}, "logprobs": None, "finish_reason": choice.finish_reason}

    def _whole(self, choice: Choice) -> Json:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": {"content": choice.logprobs, "refusal": None} if self.wants_logprobs else None,
            "finish_reason": choice.finish_reason,
        }

    def _logprobs(self, token: int, logprobs: dict[int, float], offset: int) -> Json:
        # the chosen token comes first and is among the most likely ones or not: only those are listed
        listed = sorted(((value, one) for one, value in logprobs.items()), key=lambda pair: -pair[0])
        top = [self._entry(one, value) for value, one in listed[: self.n_top]]
        return {**self._entry(token, logprobs[token]), "top_logprobs": top}

    n_top = 0  # how many of the most likely tokens were asked for

    def _entry(self, token: int, logprob: float) -> Json:
        name, data = self.names(token)
        return {"token": name, "logprob": max(logprob, LEAST_LOGPROB), "bytes": data}
