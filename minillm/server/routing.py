"""Which replica answers a request, and what a client hears if that replica dies: code that runs in Ray's HTTP proxies.

A proxy of Ray Serve chooses a replica by the request's head alone; the replica fetches the body afterwards. So `Front`,
a middleware, reads the body first, and writes a hash of the conversation's beginning into a header that the proxy hands
to `PrefixRouter`. With the body in its hand, `Front` can also ask again when a replica dies before it answered.
"""

import json
import logging
import random
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minillm.server.answers import DONE
from minillm.server.errors import ApiError, dumps

log = logging.getLogger("ray.serve")

BEGINNING = 256  # characters of a conversation that say where it belongs: about 60 tokens of English
MOST_BODY = 1 << 18  # bytes of a body that is looked into; the replica alone sees a longer one
SLACK = 8  # requests by which a conversation's own replica may be busier than the idlest
TRIES = 2  # a request that kills every replica it meets must not meet them all
OWN_PATHS = "/-/"  # those that Ray's proxy answers itself
KEY = b"x-session-id"  # what Ray calls the header whose value the router sees
# With these a client could tell Ray's proxy to let work go on when it has left, or to end it sooner.
ORDERS = (b"x-request-disconnect-disabled", b"x-request-timeout-seconds")


def middlewares() -> list[Middleware]:
    """What each proxy is to put around itself; Ray calls this by its name."""
    return [Middleware(Front)]


# ---- the key


def beginning(body: bytes | bytearray) -> str | None:
    """A hash of what later turns of the same conversation repeat: the messages up to the first of the user, or the
    prompt, at most 256 characters. None if the body says neither: the replica will say what is wrong with it."""
    try:
        asked = json.loads(body)
        text = _first_turn(asked["messages"]) if "messages" in asked else str(asked["prompt"])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return blake2b(text[:BEGINNING].encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _first_turn(messages: Sequence[dict[str, Any]]) -> str:
    parts: list[str] = []
    for message in messages:
        parts.append(f"{message['role']}\n{message['content']}")
        if message["role"] == "user":
            break
    return "\n".join(parts)


# ---- the router


class PrefixRouter(RequestRouter):
    """Requests that begin the same go to the same replica, whose memory holds that beginning, as long as it has at most
    8 unfinished requests more than the least loaded; else, and without a key, to the least loaded of two at random.

    The replica of a key is the one with the highest hash of both (rendezvous hashing, Thaler and Ravishankar 1996): all
    proxies agree without talking, and when a replica goes, no key but its own moves. Two random choices are Ray's own
    rule (Mitzenmacher 2001). What the router can see of a replica is how many requests it has, as this proxy last
    heard: not their tokens, nor what is in its memory.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks, the first to be tried first; of the replicas in one rank Ray takes the least loaded."""
        if not candidate_replicas or pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # with all of them full, do not ask in a tight loop
        two = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        key = pending_request.metadata.session_id
        if not key:
            return [two, candidate_replicas]
        home = max(candidate_replicas, key=lambda replica: _score(key, replica.replica_id.unique_id))
        least = min(map(self.load, candidate_replicas))
        return [[home], two] if self.load(home) <= least + SLACK else [two, candidate_replicas]

    def load(self, replica: RunningReplica) -> int:
        return self.replica_queue_len_cache.get(replica.replica_id) or 0


def _score(key: str, replica: str) -> bytes:
    return blake2b(f"{key}/{replica}".encode(), digest_size=8).digest()


# ---- the front


class Front:
    """Gives a request its key, and stands in for a replica that dies.

    If that happens before the first byte of the answer, another replica is asked, once. Later, a stream ends with an
    event that holds an error, and any other answer by a broken connection: no client takes half an answer for a whole.
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(OWN_PATHS):
            return await self.app(scope, receive, send)
        body = Body(receive)
        await body.read()
        if body.gone:
            return
        headers = [pair for pair in scope["headers"] if pair[0].lower() not in ORDERS]
        if body.complete and (key := beginning(body.content)):
            headers = [*(pair for pair in headers if pair[0].lower() != KEY), (KEY, key.encode())]
        for tries_left in reversed(range(TRIES if body.complete else 1)):
            reply = Reply(send)
            await self.app({**scope, "headers": headers}, body.again(), reply)
            if reply.finished or body.gone:
                return
            if reply.begun or not tries_left:
                break
            log.warning("a replica was lost before it answered %s; another is asked", scope["path"])
        await reply.lost()


class Body:
    """A request's body, read once and given as often as is needed. `gone`: the client has left."""

    def __init__(self, receive: Receive):
        self._receive = receive
        self._messages: list[Message] = []
        self.content = bytearray()  # grows by any number of small pieces
        self.complete, self.gone = False, False

    async def read(self) -> None:
        """As far as it is short; the rest is left to flow by."""
        while not (self.complete or self.gone) and len(self.content) <= MOST_BODY:
            message = await self._next()
            self._messages.append(message)
            self.content += message.get("body", b"")

    async def _next(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.gone = True
        elif not message.get("more_body", False):
            self.complete = True
        return message

    def again(self) -> Receive:
        messages = iter(self._messages)

        async def receive() -> Message:
            for message in messages:
                return message
            return await self._next()

        return receive


class Reply:
    """The `send` of one try. The head waits for the first piece of the body, so that until then nothing is lost."""

    def __init__(self, send: Send):
        self._send = send
        self._head: Message | None = None
        self._streams = False
        self.begun, self.finished = False, False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._head = message
            return
        if self._head is not None:
            head, self._head = self._head, None
            kind = dict(head["headers"]).get(b"content-type", b"")
            if head["status"] >= 400 and kind.startswith(b"text/plain"):  # the proxy's words; the app's are JSON
                why = message.get("body", b"").decode("utf-8", "replace")
                return await self._refuse("nothing is served here now" if head["status"] == 404 else why)
            self._streams = kind.startswith(b"text/event-stream")
            self.begun = True
            await self._send(head)
        elif self.finished:
            return
        self.finished = not message.get("more_body", False)
        await self._send(message)

    async def lost(self) -> None:
        """What is left to say after the last try."""
        if not self.begun:
            await self._refuse("the replica that had this request is gone")
        elif self._streams:
            log.warning("a replica was lost within a stream; its client is told")
            error = ApiError(503, "the replica that wrote this stream is gone: the text is not complete", code="lost")
            await self._send({"type": "http.response.body", "body": b"data: " + dumps(error.body()) + b"\n\n" + DONE})

    async def _refuse(self, why: str) -> None:
        self.finished = True
        response = ApiError(503, f"no replica could answer ({why}); try again").response()
        await self._send({"type": "http.response.start", "status": 503, "headers": response.raw_headers})
        await self._send({"type": "http.response.body", "body": response.body})
