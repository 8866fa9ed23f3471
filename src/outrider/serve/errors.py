"""Errors as the wire shows them: an HTTP status and OpenAI's error object.

Messages are ours or name a field of the request; nothing of an exception's inside reaches a client.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from outrider.errors import ContextExceeded, InvalidParameter, Overloaded

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "server_error",
    501: "not_implemented_error",
    503: "overloaded_error",
    504: "timeout_error",
}


@dataclass
class ApiError(Exception):
    """A request that is refused or has failed.

    Attributes:
        status: the HTTP status.
        message: one line for people.
        param: the request's field at fault.
        code: a word for programs.
        retry_after: seconds after which trying again makes sense; `None` where it never does.
        headers: more headers of the response.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: float | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = KINDS.get(self.status, "server_error")
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response_headers(self) -> dict[str, str]:
        """What tells a client whether trying again makes sense."""
        if self.retry_after is None:
            return {"x-should-retry": "false", **self.headers}
        seconds = max(1, round(self.retry_after))
        return {"x-should-retry": "true", "retry-after": str(seconds), **self.headers}


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request asks for what cannot be."""
    return ApiError(400, message, param, code or "invalid_value")


def headers_too_large() -> ApiError:
    """431: more, or larger, headers than are read."""
    return ApiError(431, "too many or too large headers; send fewer", code="headers_too_large")


def from_engine(fault: Exception) -> ApiError:
    """The wire's form of what the engine refused a request with."""
    if isinstance(fault, Overloaded):
        return overloaded(str(fault))
    if isinstance(fault, InvalidParameter):
        too_long = isinstance(fault, ContextExceeded)
        return bad_request(str(fault), code="context_length_exceeded" if too_long else None)
    return internal()


def overloaded(message: str, *, retry_after: float = 1.0) -> ApiError:
    """429: no room now."""
    return ApiError(429, message, code="overloaded", retry_after=retry_after)


def internal(message: str = "the request failed inside the server; see its log") -> ApiError:
    """500: our fault. Trying again may help."""
    return ApiError(500, message, code="internal_error", retry_after=1.0)


def unavailable(message: str, *, retry_after: float = 2.0) -> ApiError:
    """503: the server starts, drains or has failed."""
    return ApiError(503, message, code="unavailable", retry_after=retry_after)
