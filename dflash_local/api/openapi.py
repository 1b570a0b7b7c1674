"""The page that describes the endpoint (OpenAPI 3.1), of the records and paths that it is made of."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from dflash_local import __version__
from dflash_local.schema import json_schemas

PATH = "/openapi.json"


class Operation(NamedTuple):
    """What is done at a path.

    Attributes:
        path: as Starlette's routes have it. body: the record of what is sent; None where nothing is.
        replies: media types of a good answer.
    """

    method: str
    path: str
    handler: Callable[[HttpRequest], Awaitable[Response]]
    body: type | None = None
    replies: tuple[str, ...] = ("application/json",)


def describe(operations: Sequence[Operation]) -> dict[str, Any]:
    """Return the page. Answers are named by their media types; what they hold is written where they are made."""
    bodies = {one.body for one in operations if one.body is not None}
    references, schemas = json_schemas(sorted(bodies, key=lambda body: body.__name__), "#/components/schemas/{name}")
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
    names = re.findall(r"{(\w+)}", path)
    sent = {} if one.body is None else {"application/json": {"schema": references[one.body]}}
    return {
        "summary": (one.handler.__doc__ or path).partition("\n")[0],
        **({"parameters": [_parameter(name) for name in names]} if names else {}),
        **({"requestBody": {"required": True, "content": sent}} if sent else {}),
        "responses": {
            "200": {"description": "done", "content": {kind: {} for kind in one.replies}},
            "default": {"description": "refused", "content": {"application/json": {}}},
        },
    }


def _parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
