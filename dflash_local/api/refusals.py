"""Errors as HTTP answers: the statuses only HTTP has, and OpenAI's error object."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dflash_local.errors import BusyError, ContextError, DFlashError, EngineError, UnknownModelError, UsageError
from dflash_local.request import check_json

MAX_MESSAGE = 500  # a value that a client sent is quoted, not sent back whole
RETRY_AFTER_S = 1

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
CODES: tuple[tuple[type[DFlashError], str], ...] = (
    (ContextError, "context_length_exceeded"),
    (UnknownModelError, "model_not_found"),
    (BusyError, "queue_full"),
    (EngineError, "engine_error"),
)


class Refusal(DFlashError):
    """An error with an HTTP status of its own."""

    def __init__(self, status: int, message: str, hint: str = "", code: str | None = None) -> None:
        super().__init__(message, hint)
        self.status = status
        self.code = code

    @property
    def http_status(self) -> int:
        return self.status


def stopping() -> Refusal:
    """Return the error for requests that come, or still run, while the server ends."""
    return Refusal(503, "the server is stopping", "try again when it is back", "stopping")


def cut_off() -> Refusal:
    """Return the error for a reply that was cancelled, and not by its client."""
    return Refusal(503, "the reply was cut off: the model is being unloaded", "send the request again", "cut_off")


class FieldError(UsageError):
    """A field of a request body that is wrong, unknown or not supported here."""

    def __init__(self, param: str, message: str, hint: str = "", code: str | None = None) -> None:
        super().__init__(message, hint)
        self.param = param
        self.code = code


def error_object(error: DFlashError) -> dict[str, Any]:
    """Return the body of an error answer, as OpenAI's clients read it."""
    status = error.http_status
    fallback = "invalid_request_error" if 400 <= status < 500 else "server_error"
    code = getattr(error, "code", None) or next((code for kind, code in CODES if isinstance(error, kind)), None)
    message = str(error)
    if len(message) > MAX_MESSAGE:
        message = message[: MAX_MESSAGE - 1] + "…"
    return {
        "error": {
            "message": message,
            "type": TYPES.get(status, fallback),
            "param": getattr(error, "param", None),
            "code": code,
        }
    }


def error_headers(error: DFlashError) -> dict[str, str]:
    status = error.http_status
    if status in (429, 503):
        return {"Retry-After": str(RETRY_AFTER_S)}
    return {"WWW-Authenticate": 'Basic realm="dflash", Bearer'} if status == 401 else {}


def as_json(value: object) -> bytes:
    """Return JSON on one line, all ASCII: no line separator of any kind can break a stream of lines."""
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode("ascii")


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Within, a refused value is the field's of that name."""
    try:
        yield
    except UsageError as error:
        raise FieldError(path, error.message, error.hint) from error


def check_field(path: str, value: object) -> None:
    """Refuse a JSON value that is too large or nested too deep, by the field's name."""
    with naming(path):
        check_json(path, value)
