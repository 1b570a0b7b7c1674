"""Gradio's two halves of an answer kept in order: a request's receipt, and the stream that brings what comes of it.

Gradio closes a window's stream when nothing is due, and the window loses the answer to a request whose receipt
overtakes the word that the stream is closed. A window hangs up when it has read that word: so the stream is left
open until then, and so long no receipt is sent to that window.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from urllib.parse import parse_qs

from dflash_local.api.guard import App, Message, Receive, Scope, Send

STREAM_PATH, LAST_WORD = "/gradio_api/queue/data", b'data: {"msg":"close_stream"'  # how such a message begins
RECEIPT_PATH = "/gradio_api/queue/join"
HANG_UP_S = 10.0  # a window that has not hung up by then sleeps, or never will


class Streams:
    """Keeps the windows' streams, and which of them have said their last word without being hung up."""

    def __init__(self) -> None:
        self._hung_up: dict[str, asyncio.Event] = {}

    def stream(self, app: App) -> App:
        """Leave Gradio's stream open after its last word until the window hangs up."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            window = parse_qs(scope["query_string"].decode("latin-1")).get("session_hash", [""])[0]
            hung_up = asyncio.Event()
            ended = False

            async def held(message: Message) -> None:
                nonlocal ended
                if message.get("body", b"").startswith(LAST_WORD):
                    self._hung_up[window], ended = hung_up, True
                if not ended or message.get("more_body", False):
                    await send(message)

            try:
                await app(scope, receive, held)
                if ended:
                    with suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(_gone(receive), HANG_UP_S)
            finally:
                hung_up.set()
                if self._hung_up.get(window) is hung_up:
                    del self._hung_up[window]
            if ended:
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        return answer

    def receipt(self, app: App) -> App:
        """Hold Gradio's receipt for a request until the window's last stream is hung up."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            asked = b""

            async def heard() -> Message:
                nonlocal asked
                message = await receive()
                asked += message.get("body", b"")
                return message

            async def held(message: Message) -> None:
                hung_up = self._hung_up.get(_window(asked)) if message["type"] == "http.response.start" else None
                if hung_up is not None:
                    await hung_up.wait()
                await send(message)

            await app(scope, heard, held)

        return answer


def _window(asked: bytes) -> str:
    """Name the window that a request came from; empty for none."""
    try:
        return str(json.loads(asked)["session_hash"])
    except (ValueError, TypeError, KeyError):
        return ""


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
