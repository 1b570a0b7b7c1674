"""The routes: OpenAI's, vLLM's health and metrics, and our own under ``/dflash/v1``; errors as OpenAI writes them."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from dflash_local import __version__
from dflash_local.api import chat_request, completion_request
from dflash_local.api.answer import JSON_TYPE, Answer, EventStream, WholeAnswer
from dflash_local.api.chat_reply import ChatReply
from dflash_local.api.completion_reply import CompletionReply
from dflash_local.api.endpoint import Endpoint, stopping
from dflash_local.api.fields import Fields, parse
from dflash_local.api.guard import App, Guard, Rules
from dflash_local.api.log import LOGGER, AccessLog
from dflash_local.api.metrics import CONTENT_TYPE
from dflash_local.api.refusals import Refusal, as_json, error_headers, error_object
from dflash_local.api.reply import Reply
from dflash_local.api.request_fields import ParsedRequest
from dflash_local.errors import DFlashError, UnknownModelError
from dflash_local.service.resident import Model


def guarded_app(
    endpoint: Endpoint, rules: Rules, more: Sequence[BaseRoute] = (), lifespan: Callable[[Any], Any] | None = None
) -> App:
    """The whole server: log, guard, routes, and behind them ``more`` routes of a web page with its ``lifespan``."""
    handlers: dict[Any, Any] = {DFlashError: _on_error, HTTPException: _on_http_error}
    routes = _Routes(endpoint)
    app = Starlette(routes=[*routes.all(), *more], exception_handlers=handlers, lifespan=lifespan)
    return AccessLog(Guard(app, rules))


class _Routes:
    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def all(self) -> list[BaseRoute]:
        get, post = ["GET"], ["POST"]
        return [
            Route("/v1/models", self.models, methods=get),
            Route("/v1/models/{name:path}", self.model, methods=get),
            Route("/v1/chat/completions", self.chat, methods=post),
            Route("/v1/completions", self.completion, methods=post),
            Route("/health", self.health, methods=get),
            Route("/metrics", self.metrics, methods=get),
            Route("/dflash/v1/status", self.status, methods=get),
            Route("/dflash/v1/load", self.load, methods=post),
            Route("/dflash/v1/unload", self.unload, methods=post),
        ]

    async def models(self, _request: HttpRequest) -> Response:
        return _json({"object": "list", "data": [self._described(self._endpoint.resident.model)]})

    async def model(self, request: HttpRequest) -> Response:
        return _json(self._described(self._endpoint.model_named(request.path_params["name"])))

    async def chat(self, request: HttpRequest) -> Answer:
        parsed = await self._endpoint.in_thread(chat_request.read, await _body(request), self._endpoint.model_named)
        form = self._endpoint.resident.model.call_format
        return self._answer(parsed, ChatReply(parsed, self._head("chatcmpl"), form))

    async def completion(self, request: HttpRequest) -> Answer:
        read, find = completion_request.read, self._endpoint.model_named
        parsed = await self._endpoint.in_thread(read, await _body(request), find)
        return self._answer(parsed, CompletionReply(parsed, self._head("cmpl")))

    async def health(self, _request: HttpRequest) -> Response:
        """200 while requests are taken (also while loading, and unloaded when idle), 503 when broken or stopping."""
        status, facts = self._endpoint.resident.status, self._endpoint.resident.facts
        state = "stopping" if self._endpoint.draining else status.state
        body = {
            "status": "ok" if state not in ("broken", "stopping") else "error",
            "state": state,
            "running": status.running,
            "waiting": status.waiting,
            "last_progress_s": status.last_progress_s,
            "load": None if facts is None else asdict(facts.load),
        }
        return _json(body, 200 if body["status"] == "ok" else 503)

    async def metrics(self, _request: HttpRequest) -> Response:
        status, facts = self._endpoint.resident.status, self._endpoint.resident.facts
        in_server = facts is not None and facts.in_server
        text = self._endpoint.metrics.text(status.model, status.running, status.waiting, in_server)
        return Response(text, media_type=None, headers={"content-type": CONTENT_TYPE})

    async def status(self, _request: HttpRequest) -> Response:
        resident = self._endpoint.resident
        status, model = resident.status, resident.model
        models = await self._endpoint.in_thread(self._endpoint.models)
        return _json(
            {
                "version": __version__,
                "pid": os.getpid(),
                "model": model.name,
                "aliases": list(model.aliases),
                "state": "stopping" if self._endpoint.draining else status.state,
                "running": status.running,
                "waiting": status.waiting,
                "last_progress_s": status.last_progress_s,
                "loading": asdict(status.progress) if status.progress is not None else None,
                "error": status.error.as_dict()["error"] if status.error is not None else None,
                "keep_alive_s": resident.keep_alive_s,
                "sampling": asdict(model.sampling),
                "thinking": model.thinking,
                "mode": model.mode,
                "tools": model.call_format,
                "facts": None if resident.facts is None else resident.facts.as_dict(),  # of the last load
                "models": list(models),
            }
        )

    async def load(self, request: HttpRequest) -> Response:
        """Load the model, or switch to another one that is on this machine; what runs is cancelled then."""
        fields = Fields(parse(await _body(request)))
        name = fields.needed_text("model")
        fields.finish()
        endpoint, model = self._endpoint, self._endpoint.resident.model
        known = (model.name, *model.aliases, *await endpoint.in_thread(endpoint.models))
        if name.casefold() not in {one.casefold() for one in known}:  # never a path, never a download
            raise UnknownModelError(f"unknown model {name[:80]!r}", f"known here: {', '.join(known)}")
        if endpoint.draining:
            raise stopping()
        LOGGER.info("load %s", name)
        await endpoint.in_thread(endpoint.resident.switch, name)
        return await self.status(request)

    async def unload(self, request: HttpRequest) -> Response:
        """Give the model's memory back; what runs is cancelled. The next request loads it again."""
        LOGGER.info("unload")
        await self._endpoint.in_thread(self._endpoint.resident.unload)
        return await self.status(request)

    def _answer(self, parsed: ParsedRequest, reply: Reply) -> Answer:
        kind = EventStream if parsed.stream else WholeAnswer
        return kind(self._endpoint, parsed.request, parsed.model, reply)

    def _head(self, prefix: str) -> Callable[[], dict[str, Any]]:
        """What every object of one answer begins with; the model may still be loading now."""
        name, created, model = f"{prefix}-{secrets.token_hex(16)}", int(time.time()), self._endpoint.resident.model.name

        def head() -> dict[str, Any]:
            fingerprint = self._endpoint.fingerprint
            return {"id": name, "object": "", "created": created, "model": model, "system_fingerprint": fingerprint}

        return head

    def _described(self, model: Model) -> dict[str, Any]:
        facts = self._endpoint.resident.facts  # of the last load
        return {
            "id": model.name,
            "object": "model",
            "created": self._endpoint.created,
            "owned_by": "dflash-local",
            "max_model_len": (facts.context or None) if facts is not None else model.context,
            "aliases": list(model.aliases),
        }


async def _body(request: HttpRequest) -> bytes:
    kind = request.headers.get("content-type", JSON_TYPE).partition(";")[0].strip().lower()
    if kind != JSON_TYPE:
        raise Refusal(415, "the body must be JSON", f"send the header Content-Type: {JSON_TYPE}")
    return await request.body()


def _json(value: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(as_json(value), status, headers, JSON_TYPE)


async def _on_error(_request: HttpRequest, error: DFlashError) -> Response:
    return _json(error_object(error), error.http_status, error_headers(error))


async def _on_http_error(request: HttpRequest, error: HTTPException) -> Response:
    what = "there is nothing at this path" if error.status_code == 404 else str(error.detail)
    refusal = Refusal(error.status_code, what, "see /v1/models, /v1/chat/completions, /v1/completions, /health")
    return _json(error_object(refusal), error.status_code, dict(error.headers or {}))
