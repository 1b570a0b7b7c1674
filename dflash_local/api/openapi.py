"""The page that describes the endpoint (OpenAPI 3.1), of the records and paths that it is made of."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from dflash_local import __version__
from dflash_local.api.refusals import speaks_anthropic
from dflash_local.api.reply_records import AnthropicError, OpenAIError
from dflash_local.schema import json_schemas

PATH = "/openapi.json"


class Operation(NamedTuple):
    """What is done at a path.

    Attributes:
        path: as Starlette's routes have it. reply: the record of a whole answer; None for plain text.
        body: the record of what is sent. streams: the answer may be one of events.
    """

    method: str
    path: str
    handler: Callable[[HttpRequest], Awaitable[Response]]
    reply: type | None
    body: type | None = None
    streams: bool = False


def describe(operations: Sequence[Operation]) -> dict[str, Any]:
    """Return the page."""
    kinds = {OpenAIError, AnthropicError, *filter(None, (kind for one in operations for kind in (one.body, one.reply)))}
    references, schemas = json_schemas(sorted(kinds, key=lambda kind: kind.__name__), "#/components/schemas/{name}")
    paths: dict[str, dict[str, Any]] = {}
    for one in operations:
        path = re.sub(r":\w+}", "}", one.path)
        paths.setdefault(path, {})[one.method.lower()] = _operation(one, path, references)
    return {
        "openapi": "3.1.0",
        "info": {"title": "dflash-local", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _operation(one: Operation, path: str, references: dict[type, Any]) -> dict[str, Any]:
    good: dict[str, Any] = (
        {"text/plain": {"schema": {"type": "string"}}}
        if one.reply is None
        else {"application/json": {"schema": references[one.reply]}}
    )
    if one.streams:
        good["text/event-stream"] = {}  # OpenAPI 3.1 has no words for the events of a stream
    error = AnthropicError if speaks_anthropic({"path": path, "headers": ()}) else OpenAIError
    names = re.findall(r"{(\w+)}", path)
    sent = {} if one.body is None else {"application/json": {"schema": references[one.body]}}
    return {
        "summary": (one.handler.__doc__ or path).partition("\n")[0],
        **({"parameters": [_parameter(name) for name in names]} if names else {}),
        **({"requestBody": {"required": True, "content": sent}} if sent else {}),
        "responses": {
            "200": {"description": "done", "content": good},
            "default": {"description": "refused", "content": {"application/json": {"schema": references[error]}}},
        },
    }


def _parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
