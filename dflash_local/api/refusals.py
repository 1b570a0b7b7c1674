"""Errors as HTTP answers: the statuses only HTTP has, and the bodies, as the clients of a request's API read them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dflash_local.errors import BusyError, ContextError, DFlashError, EngineError, UnknownModelError, UsageError
from dflash_local.request import check_json

MAX_MESSAGE = 500  # a value that a client sent is quoted, not sent back whole
RETRY_AFTER_S = 1

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
ANTHROPIC_TYPES = {413: "request_too_large", 503: "overloaded_error"}  # where they are not OpenAI's
# Of Anthropic's requests: a conversation that the server is to keep. The tool runner of its library asks for one, and
# sends whole conversations from then on where the refusal has these details.
THREAD = "thread"
NO_THREAD = {"error_code": "thread_unsupported_request", "unsupported": [THREAD]}
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


def speaks_anthropic(scope: Mapping[str, Any]) -> bool:
    """Return whether a request is of Anthropic's API; of the models, which both have, its clients' header tells."""
    if scope["path"].startswith("/v1/models"):
        return any(name.lower() == b"anthropic-version" for name, _ in scope["headers"])
    return bool(scope["path"].startswith("/v1/messages"))


def error_body(error: DFlashError, scope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of an error answer to a request of that ASGI scope, whoever refuses it."""
    return _anthropic_error(error) if speaks_anthropic(scope) else error_object(error)


def _anthropic_error(error: DFlashError) -> dict[str, Any]:
    """Return Anthropic's object; clients shorten a conversation where its message begins as theirs does."""
    found, status = error_object(error)["error"], error.http_status
    too_long = "prompt is too long: " if isinstance(error, ContextError) else ""
    kind = ANTHROPIC_TYPES.get(status) or (found["type"] if status < 500 else "api_error")
    details = {"details": NO_THREAD} if found["param"] == THREAD else {}
    return {"type": "error", "error": {"type": kind, "message": too_long + found["message"], **details}}


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
