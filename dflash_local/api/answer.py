"""A reply on its way to the client: whole JSON, or server-sent events.

The one place of the endpoint where an unknown fault becomes an answer: a stream never just stops.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from typing import Any

from dflash_local.api.endpoint import ClientGone, Endpoint
from dflash_local.api.guard import Receive, Scope, Send
from dflash_local.api.log import LOGGER
from dflash_local.api.refusals import as_json, error_headers, error_object
from dflash_local.api.reply import Reply
from dflash_local.errors import DFlashError, EngineError
from dflash_local.events import Event, Finished, Queued
from dflash_local.request import Request

JSON_TYPE = "application/json"
SSE_TYPE = "text/event-stream; charset=utf-8"


class Answer:
    """An ASGI response that produces the reply while it is sent; a client that leaves cancels it.

    The status line waits for the first sign of the engine, so that a request it refuses gets its own
    status and not a broken stream.

    Args:
        model: the name the request was checked for; None for whatever is loaded.
    """

    def __init__(self, endpoint: Endpoint, request: Request, model: str | None) -> None:
        self._endpoint, self._request, self._model = endpoint, request, model
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._endpoint.follow(self._request, self._model, receive)) as events:
                await self._send_all(events, send)
        except ClientGone:
            LOGGER.info("the client left: %s", "cancelled" if self._begun else "before the first event")
        except DFlashError as error:
            traceback.clear_frames(error.__traceback__)  # they hold the request, and would for long: a circle
            await self._fail(error, send)
        except Exception as fault:  # one of the three broad ones: an answer must end with a word, whatever happened
            await self._fail(EngineError(f"the endpoint failed: {type(fault).__name__}", "see its messages"), send)
            LOGGER.log(logging.ERROR, "the endpoint failed", exc_info=fault)

    async def _send_all(self, events: AsyncIterator[Event | None], send: Send) -> None:
        raise NotImplementedError

    def _error_bytes(self, error: DFlashError) -> bytes:
        """How an error looks in the middle of the answer."""
        return b""

    async def _fail(self, error: DFlashError, send: Send) -> None:
        if error.http_status >= 500:  # what a client did wrong may quote what it sent
            where = "in the middle of a reply" if self._begun else "before a reply"
            LOGGER.warning("%s %s: %s", error.kind, where, error.message)
        if self._begun:
            await send({"type": "http.response.body", "body": self._error_bytes(error), "more_body": False})
            return
        body = as_json(error_object(error))
        await self._begin(send, error.http_status, JSON_TYPE, len(body), error_headers(error))
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _begin(
        self, send: Send, status: int, content_type: str, length: int | None = None, more: dict[str, str] | None = None
    ) -> None:
        self._begun = True
        headers = {"content-type": content_type, **(more or {})}
        if length is not None:
            headers["content-length"] = str(length)
        pairs = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": pairs})


class WholeAnswer(Answer):
    """One JSON object at the end."""

    def __init__(self, endpoint: Endpoint, request: Request, model: str | None, reply: Reply) -> None:
        super().__init__(endpoint, request, model)
        self._reply = reply

    async def _send_all(self, events: AsyncIterator[Event | None], send: Send) -> None:
        async for event in events:
            for _chunk in self._reply.chunks(event):
                pass
            if isinstance(event, Finished):
                body = as_json(self._reply.body(event))
                await self._begin(send, 200, JSON_TYPE, len(body))
                await send({"type": "http.response.body", "body": body, "more_body": False})


class EventStream(WholeAnswer):
    """The same as server-sent events, as OpenAI's clients read them."""

    async def _send_all(self, events: AsyncIterator[Event | None], send: Send) -> None:
        async for event in events:
            if event is None:
                data = b": waiting\n\n"  # a comment: tells both ends that the other one is there
            else:
                data = _framed(self._reply.chunks(event))
            if isinstance(event, Queued) or (event is None and not self._begun):
                continue
            if not self._begun:
                await self._begin(send, 200, SSE_TYPE)
                data = _framed(self._reply.begin()) + data
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    def _error_bytes(self, error: DFlashError) -> bytes:
        return _framed([error_object(error)]) + b"data: [DONE]\n\n"


def _framed(chunks: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(b"data: " + as_json(chunk) + b"\n\n" for chunk in chunks)
