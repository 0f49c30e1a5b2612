"""One streamed request to an OpenAI-compatible server: server-sent events to text, tokens and times.

`EventReader` takes what `load_http` makes of the bytes and gives events, `Answer` takes these and keeps their times;
neither knows of sockets.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from minillm.bench.load_http import Fault, Server, exchange, now, one_line

MOST_LINE = 262_144  # bytes


class EventReader:
    """Server-sent events. A line of data is an event here: no such server spreads JSON over several."""

    def __init__(self) -> None:
        self.rest = b""

    def feed(self, body: bytes) -> list[bytes]:
        """The data of the events that are whole now. Raises Fault."""
        *lines, self.rest = (self.rest + body).split(b"\n")
        if len(self.rest) > MOST_LINE:
            raise Fault("not events", f"sent a line of more than {MOST_LINE:,} bytes")
        found = []
        for line in lines:
            if line.startswith(b"data:"):
                found.append(line[5:].strip())
            elif line.startswith(b"error:"):
                raise Fault("error event", f"sent {one_line(line)!r}")
            elif line.strip() and not line.startswith((b":", b"event:", b"id:", b"retry:")):
                raise Fault("not events", f"sent {one_line(line)!r} in place of a server-sent event")
        return found

    def close(self) -> None:
        """Raises Fault if something is left: the body ended within a line."""
        left = self.rest.strip()
        if left.startswith(b"data:"):
            raise Fault("cut off", f"ended its answer within an event: {one_line(left)!r}")
        self.feed(b"\n")


@dataclass
class Answer:
    """What came of one request. Times are `time.perf_counter`'s seconds."""

    scheduled: float  # when it should have been sent; in a closed loop when it was
    sent: float = 0.0
    times: list[float] = field(default_factory=list)  # when pieces with text came
    last: float = 0.0  # when the last piece came that had text or the reason why the text ended
    finish: str | None = None  # that reason
    usage: tuple[int, int] | None = None  # prompt and output tokens
    cached: int | None = None  # prompt tokens that the server had already
    done: bool = False  # [DONE] came
    ended: float = 0.0  # 0: it has not
    fault: Fault | None = None

    @property
    def whole(self) -> bool:
        return self.ended > 0 and self.fault is None

    @property
    def first(self) -> float:
        """When its first token came; one that ended with its first token may have no text."""
        return self.times[0] if self.times else self.last

    @property
    def n_prompt(self) -> int:
        return self.usage[0] if self.usage else 0

    @property
    def n_output(self) -> int:
        """By the server's count; without one the pieces, each of which may hold several tokens."""
        return self.usage[1] if self.usage else len(self.times)

    def take(self, data: bytes, at: float) -> None:
        """One event's data. Raises Fault for what is no piece of an answer."""
        if data == b"[DONE]":
            self.done = True
            return
        try:
            piece = json.loads(data)
        except (ValueError, RecursionError):
            raise Fault("invalid JSON", f"sent {one_line(data)!r}, which is not JSON") from None
        try:
            if piece.get("error") is not None:
                raise Fault("error event", f"sent an error: {one_line(json.dumps(piece['error']))}")
            if piece.get("usage") is not None:
                self.count(piece["usage"])
            for choice in piece["choices"][:1] if "choices" in piece or self.usage is None else []:
                if text_of(choice):
                    self.times.append(at)
                    self.last = at
                if choice.get("finish_reason"):
                    self.finish, self.last = str(choice["finish_reason"]), at
        except (AttributeError, KeyError, TypeError):
            raise Fault("not a completion", f"sent {one_line(data)!r}, which is no piece of a completion") from None

    def count(self, usage: dict[str, Any]) -> None:
        counts = usage["prompt_tokens"], usage["completion_tokens"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if not all(isinstance(n, int) and 0 <= n < 1e9 for n in (*counts, cached or 0)):
            raise TypeError
        self.usage, self.cached = counts, cached

    def check(self) -> None:
        """Raises Fault if the server ended the answer before the text had ended."""
        if self.finish is None and not (self.done and self.times):
            ended = "[DONE]" if self.done else "no reason and no [DONE]"
            raise Fault("cut off", f"ended its answer after {len(self.times)} pieces of text, with {ended}")


def text_of(choice: dict[str, Any]) -> str | None:
    """Of a completion or of a chat, with the thoughts that some servers send apart."""
    text = choice.get("text")
    if text is None and (delta := choice.get("delta")) is not None:
        text = delta.get("content") or delta.get("reasoning_content")
    if text is not None and not isinstance(text, str):
        raise TypeError
    return text


async def send(server: Server, path: str, content: bytes, answer: Answer, seconds: float) -> None:
    """Fills `answer`; whatever goes wrong is its `fault`."""
    events = EventReader()

    def take(body: bytes, at: float) -> bool:
        for data in events.feed(body):
            answer.take(data, at)
        return answer.done

    answer.sent = now()
    try:
        await exchange(server, "POST", path, content, seconds, take)
        events.close()
        answer.check()
    except Fault as fault:
        answer.fault = fault
    answer.ended = now()
