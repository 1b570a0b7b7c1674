"""The routes: OpenAI's, vLLM's health and metrics, and our own under ``/dflash/v1``."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from dflash_local import __version__
from dflash_local.api import chat_completions, completions, messages, openapi, responses
from dflash_local.api.answer import JSON_TYPE, HttpAnswer
from dflash_local.api.endpoint import Endpoint
from dflash_local.api.guard import App, Guard, Rules
from dflash_local.api.log import LOGGER, AccessLog
from dflash_local.api.metrics import CONTENT_TYPE
from dflash_local.api.models_list import ListedModel
from dflash_local.api.openapi import Operation
from dflash_local.api.refusals import Refusal, as_json, error_body, error_headers, speaks_anthropic, stopping
from dflash_local.api.reply import Reply
from dflash_local.api.request_body import ParsedRequest, parse, read_record
from dflash_local.errors import DFlashError, UnknownModelError
from dflash_local.schema import Record
from dflash_local.service.backend import Model

STREAMED = ("application/json", "text/event-stream")
CODEX = "client_version"  # that Codex adds to the address of the list


def guarded_app(
    endpoint: Endpoint, rules: Rules, more: Sequence[BaseRoute] = (), lifespan: Callable[[Any], Any] | None = None
) -> App:
    """Return the whole server: log, guard, routes, behind them ``more`` routes of a web page with its ``lifespan``."""
    handlers: dict[Any, Any] = {DFlashError: _on_error, HTTPException: _on_http_error}
    routes = _Routes(endpoint)
    app = Starlette(routes=[*routes.all(), *more], exception_handlers=handlers, lifespan=lifespan)
    return AccessLog(Guard(app, rules))


class Dialect(NamedTuple):
    """How the bodies of a path are read, what writes the replies to them, and the record of a body."""

    path: str
    read: Callable[[bytes, Callable[[str], Model]], ParsedRequest]
    reply: type[Reply]
    body: type


DIALECTS = (
    Dialect("/v1/chat/completions", chat_completions.read, chat_completions.ChatReply, chat_completions.ChatBody),
    Dialect("/v1/completions", completions.read, completions.CompletionReply, completions.CompletionBody),
    Dialect("/v1/messages", messages.read, messages.MessageReply, messages.MessagesBody),
    Dialect("/v1/responses", responses.read, responses.ResponseReply, responses.ResponsesBody),
)


class LoadBody(Record, frozen=True):
    """The body of ``POST /dflash/v1/load``."""

    model: str


class _Routes:
    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def all(self) -> list[BaseRoute]:
        routes = [Route(one.path, one.handler, methods=[one.method]) for one in self._operations()]
        return [*routes, Route(openapi.PATH, self.describe, methods=["GET"])]

    def _operations(self) -> list[Operation]:
        return [
            Operation("GET", "/v1/models", self.models),
            Operation("GET", "/v1/models/{name:path}", self.model),
            *(Operation("POST", one.path, self.generate(one), one.body, STREAMED) for one in DIALECTS),
            Operation("POST", "/v1/messages/count_tokens", self.count_tokens, messages.MessagesBody),
            Operation("GET", "/health", self.health),
            Operation("GET", "/metrics", self.metrics, replies=("text/plain",)),
            Operation("GET", "/dflash/v1/status", self.status),
            Operation("POST", "/dflash/v1/load", self.load, LoadBody),
            Operation("POST", "/dflash/v1/unload", self.unload),
        ]

    async def describe(self, _request: HttpRequest) -> Response:
        """Return the page of all this, for programs."""
        return _json(await self._endpoint.in_thread(openapi.describe, self._operations()))

    async def models(self, request: HttpRequest) -> Response:
        """List the one model: in Anthropic's shape where the client names its API, with Codex's fields for Codex."""
        served = self._served(self._endpoint.service.model)
        if speaks_anthropic(request.scope):
            only = served.for_anthropic()
            return _json({"data": [only], "has_more": False, "first_id": only["id"], "last_id": only["id"]})
        codex = {"models": [served.for_codex()]} if CODEX in request.query_params else {}
        return _json({"object": "list", "data": [served.for_openai()], **codex})

    async def model(self, request: HttpRequest) -> Response:
        """Tell of the model by one of its names, in the shape of the list."""
        served = self._served(self._endpoint.model_named(request.path_params["name"]))
        return _json(served.for_anthropic() if speaks_anthropic(request.scope) else served.for_openai())

    def generate(self, dialect: Dialect) -> Callable[[HttpRequest], Awaitable[Response]]:
        """Return the handler of a dialect's path."""

        async def answer(request: HttpRequest) -> Any:  # an ASGI app, as a response is one
            """Answer, whole or as a stream of events."""
            parsed = await self._endpoint.in_thread(dialect.read, await _body(request), self._endpoint.model_named)
            reply = dialect.reply(parsed, self._endpoint.service.model, self._endpoint.fingerprint)
            return HttpAnswer(self._endpoint, parsed, reply)

        return answer

    async def count_tokens(self, request: HttpRequest) -> Response:
        """Say how long a prompt is, as the reply to it would report; waits for no other reply."""
        endpoint = self._endpoint
        parsed = await endpoint.in_thread(messages.read, await _body(request), endpoint.model_named)
        if endpoint.draining:
            raise stopping()
        tokens = await endpoint.in_thread(endpoint.service.count, parsed.request, parsed.model)
        return _json({"input_tokens": tokens})

    async def health(self, _request: HttpRequest) -> Response:
        """Answer 200 while requests are taken (also loading, and unloaded when idle), 503 when broken or stopping."""
        status, facts = self._endpoint.service.status, self._endpoint.service.facts
        state = "stopping" if self._endpoint.draining else status.state
        body = {
            "status": "ok" if state not in ("broken", "stopping") else "error",
            "state": state,
            "running": status.running,
            "waiting": status.waiting,
            "set_aside": status.set_aside,
            "last_progress_s": status.last_progress_s,
            "load": None if facts is None else asdict(facts.load),
        }
        return _json(body, 200 if body["status"] == "ok" else 503)

    async def metrics(self, _request: HttpRequest) -> Response:
        status, facts = self._endpoint.service.status, self._endpoint.service.facts
        in_server = facts is not None and facts.in_server
        held = await self._endpoint.in_thread(self._endpoint.service.held)
        waiting = status.waiting + status.set_aside
        text = self._endpoint.metrics.text(status.model, status.running, waiting, in_server, held)
        return Response(text, media_type=None, headers={"content-type": CONTENT_TYPE})

    async def status(self, _request: HttpRequest) -> Response:
        service = self._endpoint.service
        status, model = service.status, service.model
        models = await self._endpoint.in_thread(self._endpoint.models)
        held = await self._endpoint.in_thread(service.held)
        return _json(
            {
                "version": __version__,
                "pid": os.getpid(),
                "model": model.name,
                "aliases": list(model.aliases),
                "state": "stopping" if self._endpoint.draining else status.state,
                "running": status.running,
                "waiting": status.waiting,
                "set_aside": status.set_aside,
                "last_progress_s": status.last_progress_s,
                "held": [asdict(each) for each in held],
                "reused_tokens": self._endpoint.metrics.reused_tokens,
                "loading": asdict(status.progress) if status.progress is not None else None,
                "error": status.error.as_dict()["error"] if status.error is not None else None,
                "keep_alive_s": service.keep_alive_s,
                "sampling": asdict(model.sampling),
                "thinking": model.thinking,
                "mode": model.mode,
                "tools": model.call_format,
                "facts": None if service.facts is None else service.facts.as_dict(),  # of the last load
                "models": list(models),
            }
        )

    async def load(self, request: HttpRequest) -> Response:
        """Load the model, or switch to another one that is on this machine; what runs is cancelled then."""
        name = read_record(LoadBody, parse(await _body(request))).model
        endpoint, model = self._endpoint, self._endpoint.service.model
        known = (model.name, *model.aliases, *await endpoint.in_thread(endpoint.models))
        if name.casefold() not in {one.casefold() for one in known}:  # never a path, never a download
            raise UnknownModelError(f"unknown model {name[:80]!r}", f"known here: {', '.join(known)}")
        if endpoint.draining:
            raise stopping()
        LOGGER.info("load %s", name)
        await endpoint.in_thread(endpoint.service.switch, name)
        return await self.status(request)

    async def unload(self, request: HttpRequest) -> Response:
        """Give the model's memory back; what runs is cancelled. The next request loads it again."""
        LOGGER.info("unload")
        await self._endpoint.in_thread(self._endpoint.service.unload)
        return await self.status(request)

    def _served(self, model: Model) -> ListedModel:
        facts = self._endpoint.service.facts  # of the last load
        context = (facts.context or None) if facts is not None else model.context
        return ListedModel(model, context, self._endpoint.created)


async def _body(request: HttpRequest) -> bytes:
    kind = request.headers.get("content-type", JSON_TYPE).partition(";")[0].strip().lower()
    if kind != JSON_TYPE:
        raise Refusal(415, "the body must be JSON", f"send the header Content-Type: {JSON_TYPE}")
    return await request.body()


def _json(value: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(as_json(value), status, headers, JSON_TYPE)


async def _on_error(request: HttpRequest, error: DFlashError) -> Response:
    return _json(error_body(error, request.scope), error.http_status, error_headers(error))


async def _on_http_error(request: HttpRequest, error: HTTPException) -> Response:
    what = "there is nothing at this path" if error.status_code == 404 else str(error.detail)
    paths = ", ".join(("/v1/models", *(dialect.path for dialect in DIALECTS), "/health"))
    refusal = Refusal(error.status_code, what, f"see {paths}")
    return _json(error_body(refusal, request.scope), error.status_code, dict(error.headers or {}))
