"""`--peer http URL`: the same requests to any server that speaks OpenAI's completions API (llama-server, vLLM)."""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minillm.bench.harness import Job
from minillm.bench.peers.base import PeerRun, Rows, Target
from minillm.errors import InputError

CONNECT_SECONDS = 5
SILENCE_SECONDS = 300  # between two pieces of an answer, its place in the server's queue included


@dataclass(frozen=True)
class Answer:
    n_prompt: int
    n_tokens: int
    first: float  # when the first text came, in time.perf_counter's seconds
    last: float


class Http:
    """All requests of a set are sent at once; how many the server runs at a time is its own affair."""

    name = "http"

    def __init__(self, url: str):
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = ""
        self.as_ids = True
        self.silence: float = SILENCE_SECONDS

    def check(self) -> None:
        """Asks for the model's name."""
        if not self.url.startswith(("http://", "https://")):
            raise InputError(f"peer http: the URL {self.url!r} must begin with http:// or https://")
        try:
            import httpx  # noqa: F401
        except ImportError:
            raise InputError(f"peer http needs httpx; run `{sys.executable} -m pip install httpx`") from None
        self.model = asyncio.run(self.get_model())

    def start(self, target: Target) -> Rows:
        """Sends one short request, as token ids, and if the server refuses these as text."""
        probe = [Job(target.sample, 1)]
        self.tokenizer: Any = None
        try:
            self.run(probe)
        except Refused as error:
            from minillm.tokenizer import Tokenizer

            self.tokenizer, self.as_ids = Tokenizer.from_pretrained(target.folder), False
            try:
                self.run(probe)
            except Refused as second:
                raise InputError(f"{second} (to token ids before that: {error})") from None
        row = f"http {self.model.rpartition('/')[2]}"  # some servers give a path
        sent = "token ids" if self.as_ids else "text"
        note = (
            f"{self.url}, prompts sent as {sent}, all at time 0: the server queues and batches by its own settings; "
            "times are when text arrived"
        )
        return Rows(on_set={row: self.run}, on_grid={}, notes={row: note})

    def run(self, jobs: Sequence[Job]) -> PeerRun:
        """Raises InputError, with the URL and what came, for whatever is not a complete answer."""
        bodies = [self.body(job) for job in jobs]  # texts are made before the clock starts
        start = time.perf_counter()
        answers = asyncio.run(self.send_all(bodies))
        return PeerRun(
            n_tokens=[answer.n_tokens for answer in answers],
            n_prompt=[answer.n_prompt for answer in answers],
            first=[answer.first - start for answer in answers],
            last=[answer.last - start for answer in answers],
            outputs=None,
            wasted=None,
        )

    def body(self, job: Job) -> dict[str, Any]:
        ids = list(job.prompt)
        return {
            "model": self.model,
            "prompt": ids if self.as_ids else self.tokenizer.decode(ids, skip_special=False),
            "max_tokens": job.max_tokens,
            "temperature": 0,
            "ignore_eos": job.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_prompt": False,  # llama-server: read nothing from an earlier run
        }

    async def send_all(self, bodies: list[dict[str, Any]]) -> list[Answer]:
        import httpx

        async with self.client() as client:
            try:
                return list(await asyncio.gather(*(self.send(client, body) for body in bodies)))
            except httpx.HTTPError as error:
                raise self.unreachable(error) from None

    def client(self) -> Any:
        import httpx

        return httpx.AsyncClient(
            timeout=httpx.Timeout(self.silence, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,  # no proxy in between
        )

    async def send(self, client: Any, body: dict[str, Any]) -> Answer:
        url = f"{self.url}/v1/completions"
        texts: list[float] = []
        usage: dict[str, Any] | None = None
        async with client.stream("POST", url, json=body) as response:
            if response.status_code != 200:
                words = (await response.aread()).decode("utf-8", "replace")
                kind = Refused if response.status_code in (400, 422) else InputError
                raise kind(f"{url} answered {response.status_code}: {one_line(words)}")
            async for line in response.aiter_lines():
                arrived = time.perf_counter()
                if not line.startswith("data:"):
                    if line and not line.startswith((":", "event:", "id:", "retry:")):
                        raise InputError(f"{url} sent {one_line(line)!r}, which is no server-sent event")
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    break
                try:
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise InputError(f"{url} answered with an error: {one_line(json.dumps(chunk['error']))}")
                    usage = usage if chunk.get("usage") is None else chunk["usage"]
                    choices = chunk["choices"]
                    if choices and choices[0]["text"]:
                        texts.append(arrived)
                except InputError:
                    raise
                except (ValueError, KeyError, TypeError, IndexError, AttributeError):
                    raise InputError(f"{url} sent {one_line(data)!r}, which is no piece of a completion") from None
        end = time.perf_counter()
        if usage is None:
            raise InputError(f"{url} sent no usage, so its tokens cannot be counted; it must know stream_options")
        try:
            n_prompt, n_tokens = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
            cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise InputError(f"{url} sent no usage that counts tokens: {one_line(str(usage))}") from None
        if cached:
            raise InputError(
                f"{url} took {cached} prompt tokens from an earlier request; "
                "switch its prefix cache off (vLLM: --no-enable-prefix-caching)"
            )
        first, last = (texts[0], texts[-1]) if texts else (end, end)
        return Answer(n_prompt, n_tokens, first, last)

    async def get_model(self) -> str:
        import httpx

        url = f"{self.url}/v1/models"
        async with self.client() as client:
            try:
                response = await client.get(url, timeout=CONNECT_SECONDS)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise self.unreachable(error) from None
        if response.status_code != 200:
            raise InputError(f"{url} answered {response.status_code}: {one_line(response.text)}")
        try:
            return str(response.json()["data"][0]["id"])
        except (ValueError, KeyError, TypeError, IndexError):
            raise InputError(f"{url} answered {one_line(response.text)!r}, which is no list of models") from None

    def unreachable(self, error: Exception) -> InputError:
        reason = one_line(str(error)) or type(error).__name__
        return InputError(f"{self.url} cannot be used: {reason}; is the server running there, and its model loaded?")

    def close(self) -> None:
        pass


class Refused(InputError):
    """The server does not take a request in this form."""


def one_line(words: str) -> str:
    """At most 200 characters, whatever a server sent."""
    return " ".join(words.split())[:200]
