"""What the OpenAPI document says of answers and errors. The server writes its answers by itself, in `answers`; the
models here only describe them, and the tests check that they do."""

from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from minillm.server.protocol import ChatRequest, CompletionRequest


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorBody


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


Reason = Literal["stop", "length"]


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Reason


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Reason


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


DOCUMENTED = (CompletionRequest, ChatRequest, Completion, ChatCompletion, ModelList, ModelCard, ErrorResponse)
REFUSALS = {
    400: "The request is wrong; `param` names the field",
    401: "The API key is missing or wrong",
    404: "There is no such model",
    408: "The body took too long to come",
    413: "The body is too large",
    415: "The body is no application/json",
    429: "Too many requests wait already",
    500: "The model failed on this request",
    503: "The server shuts down, or its engine has stopped",
}


def _content(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"description": REFUSALS[status], "content": _content("ErrorResponse")} for status in statuses}


def describe(answer: str, *statuses: int, body: type[BaseModel] | None = None, stream: bool = False) -> dict[str, Any]:
    """Arguments of a route: the kind of its answer (or a content type), its errors, its body, whether it can stream."""
    content = {answer: {"schema": {"type": "string"}}} if "/" in answer else _content(answer)
    if stream:
        content["text/event-stream"] = {}
    responses = {200: {"description": "The answer", "content": content}, **refusals(*statuses)}
    extra = {"requestBody": {"required": True, "content": _content(body.__name__)}} if body else None
    return {"responses": responses, "openapi_extra": extra, "response_model": None}


def add_schemas(app: FastAPI, name: str) -> None:
    """Has the app's document hold what `describe` points to, and the name of the one model that is served."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        document = plain()
        _, models = models_json_schema(
            [(model, "validation") for model in DOCUMENTED], ref_template="#/components/schemas/{model}"
        )
        for request in (ChatRequest, CompletionRequest):
            models["$defs"][request.__name__]["properties"]["model"]["enum"] = [name]
        document["paths"]["/v1/models/{model}"]["get"]["parameters"][0]["example"] = name
        document.setdefault("components", {}).setdefault("schemas", {}).update(models["$defs"])
        for operation in (one for path in document["paths"].values() for one in path.values()):
            operation["responses"].pop("422", None)  # FastAPI's own; here that is a 400
        return document

    app.openapi = openapi  # type: ignore[method-assign]
