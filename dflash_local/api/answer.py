"""A reply on its way to the client: whole JSON, or a stream.

The one place of the endpoint where an unknown fault becomes an answer: a stream never just stops.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import AsyncIterator
from contextlib import aclosing

from dflash_local.api.endpoint import ClientGone, Endpoint
from dflash_local.api.guard import Receive, Scope, Send
from dflash_local.api.log import LOGGER
from dflash_local.api.refusals import as_json, error_body, error_headers
from dflash_local.api.reply import Reply
from dflash_local.api.request_body import ParsedRequest
from dflash_local.errors import DFlashError, EngineError
from dflash_local.events import Event, Finished, Queued

JSON_TYPE = "application/json"


class HttpAnswer:
    """An ASGI response that produces the reply while it is sent; a client that leaves cancels it.

    The status line waits for the first sign of the engine, so that a request it refuses gets its own
    status and not a broken stream.
    """

    def __init__(self, endpoint: Endpoint, parsed: ParsedRequest, reply: Reply) -> None:
        self._endpoint, self._parsed, self._reply = endpoint, parsed, reply
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send_all = self._stream if self._parsed.stream else self._send_whole
        try:
            async with aclosing(self._endpoint.follow(self._parsed.request, self._parsed.model, receive)) as events:
                await send_all(events, send)
        except ClientGone:
            LOGGER.info("the client left: %s", "cancelled" if self._begun else "before the first event")
        except DFlashError as error:
            traceback.clear_frames(error.__traceback__)  # they hold the request, and would for long: a circle
            await self._fail(error, scope, send)
        except Exception as fault:  # one of the three broad ones: an answer must end with a word, whatever happened
            told = EngineError(f"the endpoint failed: {type(fault).__name__}", "see its messages")
            await self._fail(told, scope, send)
            LOGGER.log(logging.ERROR, "the endpoint failed", exc_info=fault)

    async def _send_whole(self, events: AsyncIterator[Event | None], send: Send) -> None:
        async for event in events:
            for _chunk in self._reply.chunks(event):
                pass
            if isinstance(event, Finished):
                body = as_json(self._reply.body(event))
                await self._begin(send, 200, JSON_TYPE, {"content-length": str(len(body))})
                await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _stream(self, events: AsyncIterator[Event | None], send: Send) -> None:
        frame = self._reply.frame
        async for event in events:
            if isinstance(event, Queued) or (event is None and not self._begun):
                continue
            data = b"" if self._begun else b"".join(map(frame, self._reply.begin()))
            data += self._reply.keep_alive if event is None else b"".join(map(frame, self._reply.chunks(event)))
            if not self._begun:
                await self._begin(send, 200, self._reply.stream_type)
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": self._reply.end, "more_body": False})

    async def _fail(self, error: DFlashError, scope: Scope, send: Send) -> None:
        if error.http_status >= 500:  # what a client did wrong may quote what it sent
            where = "in the middle of a reply" if self._begun else "before a reply"
            LOGGER.warning("%s %s: %s", error.kind, where, error.message)
        told = error_body(error, scope)
        if self._begun:
            await send({"type": "http.response.body", "body": self._reply.error(told), "more_body": False})
            return
        body = as_json(told)
        await self._begin(
            send, error.http_status, JSON_TYPE, {"content-length": str(len(body)), **error_headers(error)}
        )
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _begin(self, send: Send, status: int, content_type: str, more: dict[str, str] | None = None) -> None:
        self._begun = True
        headers = {"content-type": content_type, **(more or {})}
        pairs = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": pairs})
