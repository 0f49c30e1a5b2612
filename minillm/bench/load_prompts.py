"""What the load generator asks: the package's prompts, each request's different from its first words on.

Servers keep the K and V of prompts that they have seen. A load of equal prompts, or the same load once more, would
measure that memory in place of the engine, so every prompt begins with a mark of its own, which follows from the seed.
"""

import json
import random
from dataclasses import dataclass
from functools import cached_property

from minillm.bench.prompts import load

CHARACTERS_PER_TOKEN = 4.0  # of English prose, until the server has counted
PROSE = ("passage", "story", "email", "rewrite", "chat")  # kinds of prompts
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass(frozen=True)
class Prompts:
    """Request `i` of a run is the same for everyone who has the same fields."""

    seed: int
    endpoint: str = "chat"  # or completions
    max_tokens: int = 128
    ignore_eos: bool = False
    characters: int | None = None  # of each prompt; None: the package's prompts as they are

    @property
    def path(self) -> str:
        return PATHS[self.endpoint]

    @cached_property
    def conversations(self) -> list[list[dict[str, str]]]:
        found = [list(prompt.messages) for prompt in load()]
        random.Random(self.seed).shuffle(found)
        return found

    @cached_property
    def prose(self) -> str:
        """What prompts of a certain length are cut out of: plain English, so that a token has about as many characters
        all over."""
        prompts = [prompt for prompt in load() if prompt.kind in PROSE]
        return "\n\n".join(m["content"] for prompt in prompts for m in prompt.messages if m["content"].isascii())

    def messages(self, run: str, i: int) -> list[dict[str, str]]:
        draw = random.Random(f"{self.seed} {run} {i}")
        mark = f"{draw.getrandbits(32):08x}"
        if self.characters is not None:
            begin = draw.randrange(len(self.prose))
            text = self.prose[begin:] + self.prose * (1 + self.characters // len(self.prose))
            asked = {"role": "user", "content": text[: max(1, self.characters - len(mark))]}
            # without a system message of ours, a chat template puts its own before the mark, the same for all
            return [{"role": "system", "content": mark}, asked]
        first, *rest = self.conversations[i % len(self.conversations)]
        if first["role"] == "system":
            return [{"role": "system", "content": f"{mark}: {first['content']}"}, *rest]
        return [{"role": "system", "content": f"{mark}: You are a helpful assistant."}, first, *rest]

    def body(self, model: str, run: str, i: int) -> bytes:
        """JSON to post. Prompts of another `run` are others, even for the same `i`."""
        messages = self.messages(run, i)
        prompt: dict[str, object] = {"messages": messages}
        if self.endpoint == "completions":
            prompt = {"prompt": "\n\n".join(m["content"] for m in messages)}
        asked = {
            "model": model,
            **prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:  # no part of OpenAI's API, so not sent without need
            asked["ignore_eos"] = True
        return json.dumps(asked).encode()
