"""Errors of the API: one object, ``{"error": {message, type, param, code}}``, in answers and in streams."""

import functools
import json
from collections.abc import Mapping, Sequence as Seq
from typing import Any, TypeVar

from fastapi import Response
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from foredraft.core.errors import ForedraftError, OptionError, PromptError

B = TypeVar("B", bound=BaseModel)
RETRY_SECONDS = 1.0
"""When to repeat a request that the server could not take."""
_LONGEST = 2000
"""Characters of a message, which may quote what a client sent."""
_NO_OBJECT = "The body must be a JSON object (content-type: application/json)."
_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "TimeoutError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    431: "RequestTooLargeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}


class ApiError(Exception):
    """A request that ends with an error object; ``status`` is its HTTP status and its ``code``."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.retry_after = status, message, param, retry_after

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(ApiError, param=self.param, retry_after=self.retry_after), (self.status, self.message)

    def text(self) -> str:
        """The error object in JSON; ASCII, since a message may quote text that is not valid Unicode."""
        kind = _TYPES.get(self.status, "BadRequestError" if self.status < 500 else "InternalServerError")
        message = self.message if len(self.message) <= _LONGEST else f"{self.message[: _LONGEST - 3]}..."
        fields = {"message": message, "type": kind, "param": self.param, "code": self.status}
        return json.dumps({"error": fields})

    def ending(self) -> bytes:
        """The error object and the last line of a stream that it ends."""
        return f"data: {self.text()}\n\ndata: [DONE]\n\n".encode()

    def response(self) -> Response:
        """The error object as an answer."""
        headers = {} if self.retry_after is None else {"retry-after": str(max(1, round(self.retry_after)))}
        if self.status == 408:  # clients would repeat what has just taken too long; the rest of a body may still come
            headers |= {"x-should-retry": "false", "connection": "close"}
        return Response(self.text(), self.status, headers, media_type="application/json")


def stopped() -> ApiError:
    """The error of a request that the end of the server cuts short."""
    return ApiError(503, "The server stopped before the request ended.")


def late() -> ApiError:
    """The error of a request after its time."""
    return ApiError(408, "The request took too long and was cancelled.")


def unfinished() -> ApiError:
    """The error of a request whose body does not come to its end."""
    return ApiError(408, "The body of the request took too long to arrive.")


def gone() -> ApiError:
    """The error of a request whose client is no longer there."""
    return ApiError(408, "The client went away.")


def stopping() -> ApiError:
    """The error of a request that a server does not take any more."""
    return ApiError(503, "The server is about to stop.", retry_after=RETRY_SECONDS)


def api_error(error: Exception) -> ApiError:
    """The error of the API for an exception; an unexpected one says nothing of its inside."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, (OptionError, PromptError)):
        return ApiError(400, str(error))
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail))
    if isinstance(error, ForedraftError):
        return ApiError(500, str(error))
    if isinstance(error, RecursionError):  # of the walk over a schema or a template's variables
        return ApiError(400, "The request is nested too deep.")
    return ApiError(500, "The server failed on this request; its log has the reason.")


def body_of(kind: type[B], raw: bytes) -> B:
    """A body as it came over HTTP.

    Raises:
        ApiError: it is not JSON, a field is unknown or has a wrong value.
    """
    if not raw.strip():
        raise ApiError(400, _NO_OBJECT)
    try:
        body = json.loads(raw)
    except UnicodeDecodeError as error:
        at = f"{error.reason} at byte {error.start}"
        raise ApiError(400, f"The body is not valid {error.encoding.upper()}: {at}.") from None
    except json.JSONDecodeError as error:
        raise ApiError(400, f"The body is not valid JSON: {error.msg} at character {error.pos}.") from None
    except RecursionError:
        raise ApiError(400, "The body is nested too deep.") from None
    except ValueError:  # of int(), which limits the digits
        raise ApiError(400, "The body has a number with too many digits.") from None
    return validated(kind, body)


def validated(kind: type[B], body: Any) -> B:
    """A body that is no text any more.

    Raises:
        ApiError: a field is unknown or has a wrong value.
    """
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _invalid(error.errors(include_url=False), body) from None


def _invalid(errors: Seq[Mapping[str, Any]], body: Any) -> ApiError:
    """The first of the deepest faults of a body: where a value has several types, the one that fits best. A value out
    of range fits better than one of another type."""
    faults = [(_place(each, body), each) for each in errors]
    place, fault = max(faults, key=lambda each: (len(each[0]), not each[1]["type"].endswith("_type")))
    own = fault.get("ctx", {}).get("error")
    if not place and own is None:
        return ApiError(400, _NO_OBJECT)
    if isinstance(own, ForedraftError):
        message = str(own)
    else:
        same = [each for at, each in faults if at == place and each["type"].endswith("_type")]
        message = _types(same) if fault in same else fault["msg"]
    name = ".".join(place)
    return ApiError(400, f"{name}: {message}" if name else message, param=name or None)


def _place(fault: Mapping[str, Any], body: Any) -> list[str]:
    """Where in a body a fault is; pydantic also names the types that it tried there."""
    place, value = [], body
    for part in fault["loc"]:
        if isinstance(value, list) and isinstance(part, int) and part < len(value):
            place.append(str(part))
            value = value[part]
        elif isinstance(value, dict) and part in value:
            place.append(str(part))
            value = value[part]
    if fault["type"] == "missing" and isinstance(value, dict):
        place.append(str(fault["loc"][-1]))
    return place


def _types(faults: Seq[Mapping[str, Any]]) -> str:
    """The types that a value may have, in one sentence."""
    objects = ("model_type", "model_attributes_type", "dict_type")
    wanted = [
        "a valid object" if each["type"] in objects else each["msg"].removeprefix("Input should be ") for each in faults
    ]
    *others, last = dict.fromkeys(wanted)
    return "Input should be " + (f"{', '.join(others)} or {last}" if others else last)
