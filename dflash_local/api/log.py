"""One line per event, whatever a client sends: control characters are spelled out. Knows no prompts and no tokens."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from dflash_local.api.guard import App, Message, Receive, Scope, Send

LOGGER = logging.getLogger("dflash_local.api")
SERVER_LOGGER = "uvicorn.error"
MAX_VALUE = 200
QUIET_PATHS = ("/health", "/metrics")  # asked every few seconds by watchers
QUIET_FOLDERS = ("/assets/", "/static/", "/svelte/", "/gradio_api/")  # a web page asks for hundreds of them


def one_line(text: str, limit: int = MAX_VALUE) -> str:
    """Return the text on one line, printable ASCII only, cut at ``limit`` characters."""
    shown = text.encode("unicode_escape").decode("ascii")
    return shown if len(shown) <= limit else f"{shown[:limit]}..."


class _Lines(logging.Handler):
    """Gives every record to ``write`` as one line; of an exception its last line only."""

    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage().strip()
        if record.exc_info and record.exc_info[1] is not None:
            message = f"{message}: {type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
        when = time.strftime("%H:%M:%S", time.localtime(record.created))
        self._write(f"{when} {record.levelname.lower()} {one_line(message, 10 * MAX_VALUE)}")


def send_lines_to(write: Callable[[str], None]) -> Callable[[], None]:
    """Give every line to ``write`` from now on; returns what ends that."""
    handler = _Lines(write)
    server = logging.getLogger(SERVER_LOGGER)
    for logger, level in ((LOGGER, logging.INFO), (server, logging.WARNING)):
        logger.addHandler(handler)
        logger.setLevel(level)
        logger.propagate = False

    def stop() -> None:
        for logger in (LOGGER, server):
            logger.removeHandler(handler)

    return stop


class AccessLog:
    """Says of each request: method, path, status, seconds. The query is left out."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        status, began = 0, time.monotonic()

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            path = scope["path"]
            quiet = path in QUIET_PATHS or (status == 200 and path.startswith(QUIET_FOLDERS))
            level = logging.DEBUG if quiet else logging.INFO
            shown = status or "no answer"  # the client left first
            took = time.monotonic() - began
            LOGGER.log(level, "%s %s %s %.3f s", scope["method"], path[:MAX_VALUE], shown, took)
