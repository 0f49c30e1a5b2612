"""What clients may send: OpenAI's requests as far as they are implemented, and vLLM's additions to them.

Types are strict ("true" is no boolean), everything countable has a most, and what is not implemented but would change
the answer is refused by name and not ignored. The checks that `SamplingParams` makes are left to it.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from minillm.engine import MOST_SAMPLES
from minillm.errors import InputError
from minillm.params import MOST_LOGPROBS, MOST_STOPS, SamplingParams

MOST_MESSAGES = 1024
MOST_STOP_CHARACTERS = 256  # each token is looked at for the beginning of a stop string of any length
MOST_BIASED = 300  # tokens with a logit_bias
MOST_IDS = 1 << 20  # in all prompts of one request; the body's limit is reached about then

Token = Annotated[int, Field(ge=-(2**63), lt=2**64)]  # whether it is in the vocabulary, the engine says
StopString = Annotated[str, Field(min_length=1, max_length=MOST_STOP_CHARACTERS)]
Biases = Annotated[
    dict[Annotated[str, Field(pattern=r"^[0-9]{1,19}$")], float],
    Field(max_length=MOST_BIASED, json_schema_extra={"additionalProperties": False}),
]
# for the document alone: the engine's own word for an empty prompt is clearer than pydantic's
Ids = Annotated[list[Token], Field(max_length=MOST_IDS, fail_fast=True, json_schema_extra={"minItems": 1})]
Words = Annotated[str, Field(json_schema_extra={"minLength": 1})]
Many = Field(max_length=MOST_SAMPLES, fail_fast=True, json_schema_extra={"minItems": 1})


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: the usage so far in every chunk


class Sampling(Strict):
    """What both requests have. A field that is null counts as left out."""

    model: str
    n: int | None = Field(None, ge=1, le=MOST_SAMPLES)
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Biases | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=MOST_BIASED)] | None = None
    ignore_eos: bool | None = None
    priority: int | None = Field(None, ge=0, le=9)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # these say who asks, or how OpenAI keeps and bills it: they change no answer
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    default_max_tokens: ClassVar[int | None] = None  # None: as many as there is room for

    @property
    def n_logprobs(self) -> int | None:
        raise NotImplementedError

    @property
    def limit(self) -> tuple[str, int | None]:
        """The most new tokens, and the field that says so."""
        return "max_tokens", self.max_tokens

    def params(self, max_len: int) -> SamplingParams:
        """Raises InputError, whose message begins with the field's name."""
        name, most = self.limit
        if most is not None and most > max_len:
            raise InputError(f"{name} is {most}; it must be at most {max_len}, all that a text has room for")
        if self.stream_options is not None and not self.stream:
            raise InputError("stream_options are given, but stream is not true; leave them out")
        given: dict[str, Any] = {
            name: value for name in SHARED_WITH_PARAMS if (value := getattr(self, name)) is not None
        }
        given.setdefault("temperature", 1.0)  # OpenAI's default
        given["max_tokens"] = most or self.default_max_tokens or max_len
        given["logprobs"] = self.n_logprobs
        if self.seed is not None:
            given["seed"] = self.seed % 2**64
        if self.logit_bias:
            given["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        return SamplingParams(**given)


SHARED_WITH_PARAMS = [
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "ignore_eos",
]


class CompletionRequest(Sampling):
    """`POST /v1/completions`. `logprobs` may be up to 20; OpenAI's most is 5."""

    prompt: Words | Ids | Annotated[list[Words], Many] | Annotated[list[Ids], Many]
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    best_of: int | None = Field(None, ge=1, le=1)
    echo: Annotated[bool, Field(json_schema_extra={"const": False})] | None = None  # Literal[False] would take 0
    suffix: None = None

    default_max_tokens = 16  # OpenAI's

    @property
    def n_logprobs(self) -> int | None:
        return self.logprobs

    def params(self, max_len: int) -> SamplingParams:
        if self.echo:
            raise InputError("echo is true, which is not implemented; leave it out")
        return super().params(max_len)

    def prompts(self) -> list[str | list[int]]:
        """Each prompt by itself."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        several: list[str | list[int]] = [one for one in self.prompt if not isinstance(one, int)]
        return several or [[one for one in self.prompt if isinstance(one, int)]]


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    """One message. An answer of this server, or of OpenAI's, may be sent back as it came."""

    role: Annotated[str, Field(min_length=1, max_length=64)]  # which there are, the chat template says
    content: str | Annotated[list[TextPart], Field(min_length=1, max_length=MOST_MESSAGES)]
    name: None = None
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None

    def text(self) -> dict[str, str]:
        """As the chat template takes it; several parts become several lines."""
        parts = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": self.role, "content": parts}


class TextFormat(Strict):
    type: Literal["text"]


class ChatRequest(Sampling):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    response_format: TextFormat | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None  # of none
    parallel_tool_calls: bool | None = None  # of none

    @property
    def limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is None:
            return super().limit
        return "max_completion_tokens", self.max_completion_tokens

    @property
    def n_logprobs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise InputError(
                f"top_logprobs is {self.top_logprobs}, but logprobs is not true; set it, or leave both out"
            )
        return (self.top_logprobs or 0) if self.logprobs else None
