"""The routes: OpenAI's `/v1/models`, `/v1/completions` and `/v1/chat/completions`, `/health`, `/metrics`."""

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException
from starlette.responses import Response

from minillm import __version__
from minillm.params import SamplingParams
from minillm.request import Request as EngineRequest
from minillm.server.answers import Answer, ChatAnswer, CompletionAnswer, Names
from minillm.server.documents import add_schemas, describe, refusals
from minillm.server.errors import ApiError, as_bad_request, dumps
from minillm.server.http import EventStream, Gone, read_json, whole_answer
from minillm.server.loop import EngineLoop, Overloaded, Unavailable
from minillm.server.metrics import Metrics
from minillm.server.protocol import ChatRequest, CompletionRequest, Sampling
from minillm.tokenizer import Tokenizer

Bearer = Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]
Groups = list[list[EngineRequest]]

BODY_BYTES = 4 << 20  # the most of a request's body
BODY_SECONDS = 30.0  # how long a body may take to come
PATIENCE = 60.0  # seconds that a client may take nothing of a stream
TOKENIZERS = 2  # threads


def make_app(
    loop: EngineLoop,
    name: str,
    tokenizer: Tokenizer,
    *,
    api_key: str | None = None,
    body_bytes: int = BODY_BYTES,
    body_seconds: float = BODY_SECONDS,
    patience: float = PATIENCE,
    live: bool = True,
) -> FastAPI:
    """The application that serves this engine's model under this name. It starts the loop with itself, and stops it.

    api_key       what clients must send as a bearer token; all but /health, and the page of the live view, asks for it
    body_bytes    the most that a request may hold; body_seconds: the most time that it may take to come
    patience      seconds after which a client that takes nothing of its stream is cut off
    live          whether there is the live view at /
    """
    metrics = Metrics(loop, name)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        loop.watchers.append(metrics.on_step)
        loop.start()
        lag = asyncio.create_task(metrics.watch_lag())
        try:
            yield
        finally:
            lag.cancel()
            service.pool.shutdown(wait=False, cancel_futures=True)
            await asyncio.to_thread(loop.stop)

    app = FastAPI(
        title="minillm", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    guard = Depends(key_check(api_key))
    service = Service(loop, name, tokenizer, body_bytes, body_seconds, patience)
    app.include_router(service.router(), dependencies=[guard])

    @app.get("/health", summary="Whether requests are taken", responses=refusals(503))
    async def health() -> dict[str, str]:
        if loop.draining or not loop.alive:
            raise ApiError(503, "the server is shutting down" if loop.draining else "the engine has stopped")
        return {"status": "ok"}

    @app.get("/metrics", summary="Prometheus' metrics", dependencies=[guard], **describe("text/plain", 401))
    async def read_metrics() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    if live:
        from minillm.server.live import live_router

        app.include_router(live_router(loop, name, [guard]))

    def refuse(error: ApiError) -> Response:
        metrics.refused.labels(name, str(error.status)).inc()
        return error.response()

    @app.exception_handler(ApiError)
    async def known(_: Request, error: ApiError) -> Response:
        return refuse(error)

    @app.exception_handler(Gone)
    async def gone(_: Request, error: Gone) -> Response:
        return Response(status_code=499)  # nobody reads it

    @app.exception_handler(HTTPException)
    async def by_framework(request: Request, error: HTTPException) -> Response:
        what = f"{request.method} {request.url.path}"
        message = {404: f"{what}: no such address", 405: f"{what}: no such method here"}
        text = message.get(error.status_code, str(error.detail))
        return refuse(ApiError(error.status_code, text, headers=error.headers))

    @app.exception_handler(RequestValidationError)
    async def of_query(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return refuse(ApiError(400, f"{first['loc'][-1]}: {first['msg']}", str(first["loc"][-1])))

    @app.exception_handler(Exception)
    async def bug(_: Request, error: Exception) -> Response:
        return refuse(ApiError(500, "the server made a mistake; its log says more"))

    add_schemas(app, name)
    return app


def key_check(api_key: str | None) -> Callable[..., Any]:
    """A dependency that raises ApiError 401 unless the request brings the key."""
    if api_key is None:
        return anybody
    expected = api_key.encode()

    async def check(bearer: Bearer) -> None:
        given = bearer.credentials.encode("latin-1") if bearer else b""
        if not hmac.compare_digest(given, expected):  # in the same time, however much of it is right
            wrong = "the API key is wrong" if bearer else "no API key was sent"
            message = f"{wrong}; send the header `Authorization: Bearer KEY`"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    return check


async def anybody() -> None:
    """A dependency that lets all in. It is async because FastAPI calls others in a thread."""


class Service:
    """What the routes under /v1 do."""

    def __init__(
        self,
        loop: EngineLoop,
        name: str,
        tokenizer: Tokenizer,
        body_bytes: int,
        body_seconds: float,
        patience: float,
    ):
        self.loop, self.name, self.tokenizer = loop, name, tokenizer
        self.body_bytes, self.body_seconds, self.patience = body_bytes, body_seconds, patience
        self.created = int(time.time())
        self.names = Names(tokenizer.token_bytes)
        self.pool = ThreadPoolExecutor(TOKENIZERS, "tokenizer")
        longest = max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.n_vocab))
        self.most_characters = loop.engine.max_len * longest  # a longer text has too many tokens in any case

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/v1")
        refused = (400, 401, 404, 408, 413, 415, 429, 500, 503)
        router.get("/models", summary="The models", **describe("ModelList", 401))(self.models)
        router.get("/models/{model:path}", summary="One model", **describe("ModelCard", 401, 404))(self.model)
        router.post(
            "/completions",
            summary="Continue a text",
            **describe("Completion", *refused, body=CompletionRequest, stream=True),
        )(self.complete)
        router.post(
            "/chat/completions",
            summary="Answer a conversation",
            **describe("ChatCompletion", *refused, body=ChatRequest, stream=True),
        )(self.chat)
        return router

    # ---- the routes

    async def models(self) -> Response:
        return Response(dumps({"object": "list", "data": [self._card()]}), media_type="application/json")

    async def model(self, model: str) -> Response:
        self._check_model(model)
        return Response(dumps(self._card()), media_type="application/json")

    async def complete(self, request: Request) -> Response:
        body = await read_json(request, CompletionRequest, self.body_bytes, self.body_seconds)
        params = self._params(body)
        answer = CompletionAnswer(self.name, self.names, body.logprobs is not None, *usage_options(body))
        prompts = body.prompts()
        self._check_length("prompt", max((len(prompt) for prompt in prompts if isinstance(prompt, str)), default=0))

        def make() -> Groups:
            groups = []
            for prompt in prompts:
                if isinstance(prompt, str):  # an empty one is refused, also where there would be a BOS
                    prompt = self.tokenizer.encode(prompt) if prompt else []
                groups.append(self._make(prompt, params, body, "prompt"))
            return groups

        return await self._serve(request, body, answer, make, len(prompts))

    async def chat(self, request: Request) -> Response:
        body = await read_json(request, ChatRequest, self.body_bytes, self.body_seconds)
        params = self._params(body)
        answer = ChatAnswer(self.name, self.names, bool(body.logprobs), *usage_options(body))
        answer.n_top = body.top_logprobs or 0
        messages = [message.text() for message in body.messages]
        self._check_length("messages", sum(len(message["content"]) for message in messages))

        def make() -> Groups:
            with as_bad_request((), "messages"):
                ids = self.tokenizer.encode_chat(messages)
            return [self._make(ids, params, body, "messages")]

        return await self._serve(request, body, answer, make, 1)

    # ---- their parts

    def _card(self) -> dict[str, Any]:
        card = {"id": self.name, "object": "model", "created": self.created, "owned_by": "minillm"}
        return {**card, "max_model_len": self.loop.engine.max_len}

    def _check_model(self, model: str) -> None:
        if model != self.name:
            message = f"the model {model[:100]!r} is not served here; there is {self.name!r}"
            raise ApiError(404, message, "model", "model_not_found")

    def _params(self, body: Sampling) -> SamplingParams:
        self._check_model(body.model)
        with as_bad_request(type(body).model_fields):
            return body.params(self.loop.engine.max_len)

    def _check_length(self, field: str, n_characters: int) -> None:
        """Refuses a text that is far too long without tokenising it."""
        if n_characters > self.most_characters:
            max_len = self.loop.engine.max_len
            message = f"{field} has {n_characters} characters, which never fit into {max_len} tokens; shorten it"
            raise ApiError(400, message, field, "context_length_exceeded")

    def _make(self, ids: list[int], params: SamplingParams, body: Sampling, field: str) -> list[EngineRequest]:
        max_len = self.loop.engine.max_len
        if len(ids) > max_len:
            message = f"{field} has {len(ids)} tokens, but there is room for {max_len}; shorten it"
            raise ApiError(400, message, field, "context_length_exceeded")
        with as_bad_request(type(body).model_fields, field):
            return self.loop.make(ids, params, body.n or 1, body.priority or 0)

    async def _serve(
        self, request: Request, body: Sampling, answer: Answer, make: Callable[[], Groups], n_prompts: int
    ) -> Response:
        """Takes seats, tokenises in a thread of the pool, so that no text, however odd, stops the streams; sends."""
        try:
            with as_bad_request((), "n"):
                stream = self.loop.open(max(1, n_prompts) * (body.n or 1))
        except Overloaded as error:
            raise ApiError(429, str(error), code="rate_limit_exceeded") from None
        except Unavailable as error:
            raise ApiError(503, str(error)) from None
        try:
            groups = await asyncio.get_running_loop().run_in_executor(self.pool, make)
            answer.begin(groups)
            stream.send(*groups)
            if body.stream:
                return EventStream(stream, answer, self.patience)
            return await whole_answer(stream, answer, request.receive)
        except Unavailable as error:
            stream.close()
            raise ApiError(503, str(error)) from None
        except BaseException:
            stream.close()
            raise


def usage_options(body: Sampling) -> tuple[bool, bool]:
    options = body.stream_options
    return (False, False) if options is None else (bool(options.include_usage), bool(options.continuous_usage_stats))
