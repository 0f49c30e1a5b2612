"""Between HTTP and streams of events: bodies with a limit, server-sent events with back-pressure, clients that go."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minillm.server.answers import DONE, Answer
from minillm.server.errors import ApiError, dumps, of_validation
from minillm.server.loop import Stream

log = logging.getLogger(__name__)

Model = TypeVar("Model", bound=BaseModel)

SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Gone(Exception):
    """The client closed its connection: nobody is left to be answered."""


async def read_json(request: Request, kind: type[Model], most_bytes: int, seconds: float) -> Model:
    """The body, checked. Raises ApiError: 400 for what is no such JSON, 408 if it takes longer than so many seconds,
    413 if it is larger, with a stated length or without, 415 for another content type; and Gone."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":  # a page of another site can send no such request without asking before
        raise ApiError(415, f"the content type is {content_type[:60]!r}; it must be application/json")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "the body has a Content-Encoding; send it as it is")
    stated = request.headers.get("content-length", "0")
    if stated.isdecimal() and len(stated) < 19 and int(stated) > most_bytes:
        raise _too_large(most_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise Gone
                body += message.get("body", b"")
                if len(body) > most_bytes:
                    raise _too_large(most_bytes)
                if not message.get("more_body"):
                    break
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {seconds:g} s", headers={"Connection": "close"}) from None
    try:
        return kind.model_validate_json(bytes(body))
    except ValidationError as wrong:
        raise of_validation(wrong) from None


def _too_large(most_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {most_bytes} bytes, the most that is taken")


@asynccontextmanager
async def closed_when_gone(stream: Stream, receive: Receive) -> AsyncIterator[None]:
    """Closes the stream at the end of the block, and as soon as the client has closed its connection."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        stream.close()

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        stream.close()


async def whole_answer(stream: Stream, answer: Answer, receive: Receive) -> Response:
    """Raises ApiError if a text ends with an error, and Gone if the client leaves."""
    async with closed_when_gone(stream, receive):
        async for event in stream:
            answer.take(event)
        if stream.closed:
            raise Gone
    return Response(dumps(answer.whole()), media_type="application/json")


class EventStream(Response):
    """Server-sent events, as OpenAI sends them. The response begins with the first token, so that what fails before
    still has a status of its own; what fails later is an event with an error, the last one.

    Where the client reads slowly, what several steps made goes out together. One that takes nothing for `patience`
    seconds is cut off, and so is its work.
    """

    media_type = "text/event-stream"

    def __init__(self, stream: Stream, answer: Answer, patience: float):
        super().__init__(headers=SSE_HEADERS)
        del self.headers["content-length"]
        self.stream, self.answer, self.patience = stream, answer, patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with closed_when_gone(self.stream, receive):
                await self._send_all(scope, receive, send)
        except TimeoutError:
            log.warning("a client took nothing for %g s, and is cut off", self.patience)
            await cut_off(receive)
        except asyncio.CancelledError:  # the server ends, and does not wait for this client any longer
            await cut_off(receive)

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream, answer = self.stream, self.answer
        begun = False
        try:
            while events := await stream.batch():
                data = answer.chunks(events)
                if not begun:
                    data = answer.first() + data
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    begun = True
                if data:
                    async with asyncio.timeout(self.patience):
                        await send({"type": "http.response.body", "body": data, "more_body": True})
            data = answer.last()
        except ApiError as error:
            if not begun:
                return await error.response()(scope, receive, send)
            data = b"data: " + dumps(error.body()) + b"\n\n" + DONE
        if not stream.closed:
            async with asyncio.timeout(self.patience):
                await send({"type": "http.response.body", "body": data, "more_body": False})


async def cut_off(receive: Receive) -> None:
    """Drops a connection with all that it has not taken. ASGI has no word for it, so this asks uvicorn's own object,
    if it is uvicorn's; the server closes any other as soon as the application returns."""
    transport = getattr(getattr(receive, "__self__", None), "transport", None)
    if transport is not None:
        transport.abort()
        while (await receive())["type"] != "http.disconnect":  # uvicorn logs an error if it does not know of it yet
            pass
