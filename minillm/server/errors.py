"""Errors in OpenAI's shape, which its clients turn into exceptions of their own."""

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import takewhile
from reprlib import Repr
from typing import Any

from pydantic import ValidationError
from starlette.responses import Response

from minillm.errors import InputError

TYPES = {  # of an error, by status; OpenAI's words
    401: "authentication_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
RETRY_AFTER = "1"  # seconds
MOST_FAULTS = 100  # that are listed: to list hundreds of thousands takes seconds

_short = Repr()
_short.maxstring = _short.maxother = _short.maxlong = 60
_short.maxlist = _short.maxdict = 4


class ApiError(Exception):
    """What a client is answered: a status, a message that says what would be right, and the field it is about."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})
        if status in (429, 503):
            self.headers.setdefault("Retry-After", RETRY_AFTER)

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error")
        message = self.message.encode(errors="replace").decode()  # some readers of JSON take no lone surrogate
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return Response(dumps(self.body()), self.status, self.headers, "application/json")


def dumps(value: Any) -> bytes:
    """JSON in ASCII. Raises ValueError for NaN."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


def shown(value: object) -> str:
    """A value of any size in a few words."""
    try:
        return _short.repr(value)
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        return "a huge number"


@contextmanager
def as_bad_request(fields: Collection[str], default: str | None = None) -> Iterator[None]:
    """An InputError becomes a 400 about the field that its message begins with, else about `default`."""
    try:
        yield
    except InputError as error:
        first = str(error).split(" ", 1)[0]
        raise ApiError(400, str(error), first if first in fields else default) from None


def of_validation(wrong: ValidationError) -> ApiError:
    """A 400 from what pydantic found. The field is written as OpenAI writes it, such as `messages[0].content`."""
    if wrong.error_count() > MOST_FAULTS:
        return ApiError(400, f"the body has {wrong.error_count()} faults; send only fields that this server knows")
    first, *others = wrong.errors(include_url=False)
    if not first["loc"]:
        return ApiError(400, f"the body is no JSON object: {first['msg']}")
    # where a field may be of several kinds, pydantic tells for each why it is not; meant was the one that came furthest
    same = [other for other in others if before_kinds(other["loc"]) == before_kinds(first["loc"])]
    error = max((first, *same), key=lambda one: (one["type"] == "too_long", [i for i in one["loc"] if type(i) is int]))
    unknown = error["type"] == "extra_forbidden"
    param = ""
    for i, part in enumerate(error["loc"]):
        if isinstance(part, int):
            param += f"[{part}]"
        elif not is_kind(part) or (unknown and i == len(error["loc"]) - 1):
            param += f".{part:.60}" if param else f"{part:.60}"
    if unknown:
        return ApiError(400, f"{param} is not a field that this server knows; leave it out", param)
    if error["type"] == "none_required" or error.get("ctx", {}).get("max_length") == 0:
        return ApiError(400, f"{param} is {shown(error['input'])}, which is not implemented; leave it out", param)
    if error["type"] == "missing":
        return ApiError(400, f"{param} is missing; it must be given", param)
    return ApiError(400, f"{param} is {shown(error['input'])}; {error['msg']}", param)


def before_kinds(place: tuple[int | str, ...]) -> list[int | str]:
    return list(takewhile(lambda part: not is_kind(part), place))


def is_kind(part: int | str) -> bool:
    """Whether it is no field, but what pydantic calls one of several kinds of value: "str", "list[int]", "[key]"."""
    return isinstance(part, str) and (part in ("str", "constrained-str") or "[" in part)
