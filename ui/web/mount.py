"""Gradio's page as routes for the server behind the guard, with only the paths that the page needs.

No uploads, no files of this machine, no proxying, no monitoring, no sharing: those paths answer 404, and a request that
names a file in its body is refused.
"""

from __future__ import annotations

import asyncio
import re
import traceback
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse
from starlette.routing import BaseRoute, Mount

from dflash_local.api.guard import App, Message, Receive, Scope, Send, replay
from dflash_local.api.log import LOGGER
from dflash_local.api.refusals import FieldError
from dflash_local.api.request_body import parse
from dflash_local.request import MAX_DEPTH
from dflash_local.ui.web.streams import RECEIPT_PATH, STREAM_PATH, Streams

if TYPE_CHECKING:
    import gradio as gr

PATHS = {
    "GET": re.compile(
        r"/|/(config|theme\.css|favicon\.ico|manifest\.json|robots\.txt)/?|/(static|assets|svelte)/.+"
        r"|/gradio_api/(startup-events|app_id/?|queue/data|heartbeat/[\w-]+)"
    ),
    "POST": re.compile(r"/gradio_api/(queue/join|cancel|reset/?)"),
}
# Scripts and styles come from this server alone, and nothing on the page can reach another one. Gradio
# writes its configuration into the page (inline) and compiles templates and plots in the browser (eval).
POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self' 'unsafe-inline' 'unsafe-eval'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "font-src 'self' data:",
        "connect-src 'self' data:",
        "object-src 'none'",
        "base-uri 'self'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    )
)
ASSETS, KEEP = ("/assets/", "/static/"), (b"cache-control", b"private, max-age=86400")  # named by their content
MAX_VALUES = 50_000  # of a body: Gradio goes through them all before anybody else is answered
LOOK_S = 0.1  # how often an open stream looks whether the server ends
Ending = Callable[[], bool]
Lifespan = Callable[[Any], AbstractAsyncContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Page:
    """Is what ``api.app.guarded_app`` wants of a page."""

    routes: tuple[BaseRoute, ...]
    lifespan: Lifespan


def mounted(blocks: gr.Blocks, ending: Ending = lambda: False, **looks: Any) -> Page:
    """The page at ``/``. No environment variable of Gradio's opens anything: every setting is given.

    Args:
        ending: tells whether the server is about to end. looks: ``theme``, ``css`` and the like, as Gradio takes them.
    """
    import gradio.queueing

    gradio.queueing.traceback = _ONE_LINE  # type: ignore[assignment,attr-defined]  # it prints one for each bad request
    host = Starlette()
    gradio.mount_gradio_app(
        host,  # type: ignore[arg-type]  # FastAPI is a Starlette; nothing more is used of it
        blocks,
        path="/",
        server_name="127.0.0.1",
        footer_links=[],
        run_history=False,
        root_path="",
        allowed_paths=[],
        blocked_paths=["/"],
        show_error=True,
        max_file_size=0,
        ssr_mode=False,
        enable_monitoring=False,
        pwa=False,
        mcp_server=False,
        app_kwargs={"telemetry": {"auto_configure": False}},
        **looks,
    )
    return Page((Mount("/", _Narrow(host.router, ending)),), host.router.lifespan_context)


def _log_exception() -> None:
    LOGGER.warning("the page cannot answer a request", exc_info=True)


_ONE_LINE = SimpleNamespace(**{**vars(traceback), "print_exc": _log_exception})


def check_body(body: bytes) -> None:
    """Refuse a body that names a file: Gradio copies the file, or fetches the address, at ``path`` of any object.

    Raises:
        FieldError: it does, or it is not JSON, is nested too deep, or holds too many values.
    """
    level: list[Any] = [parse(body)]
    count = depth = 0
    while parts := [value for value in level if isinstance(value, (dict, list))]:
        count, depth = count + sum(map(len, parts)), depth + 1
        if count > MAX_VALUES:
            raise FieldError("body", f"the body holds more than {MAX_VALUES:,} values", "send less")
        if depth > MAX_DEPTH:
            raise FieldError("body", f"the body is nested more than {MAX_DEPTH} deep", "send it flatter")
        if any("path" in part for part in parts if isinstance(part, dict)):
            raise FieldError("path", "the body has an object with a path, and this page takes no files", "leave it out")
        level = [value for part in parts for value in (part.values() if isinstance(part, dict) else part)]


class _Narrow:
    """Lets through what the page needs, and forbids the browser to ask others; ends its streams with the server."""

    def __init__(self, app: App, ending: Ending) -> None:
        self._app, self._ending = app, ending
        self._streams = Streams()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        allowed = PATHS.get("GET" if scope["method"] == "HEAD" else scope["method"])
        if allowed is None or allowed.fullmatch(scope["path"]) is None:
            return await PlainTextResponse("there is nothing at this path\n", 404)(scope, receive, send)
        if scope["method"] == "POST":
            body = (await receive())["body"]  # the guard gives it whole
            await asyncio.to_thread(check_body, body)
            receive = replay(body, receive)
        begun = whole = False

        async def with_policy(message: Message) -> None:
            nonlocal begun, whole
            if message["type"] == "http.response.start":
                begun = True
                headers = [*message.get("headers", ()), (b"content-security-policy", POLICY.encode("ascii"))]
                if scope["path"].startswith(ASSETS) and not any(
                    name.lower() == b"cache-control" for name, _ in headers
                ):
                    headers.append(KEEP)
                message = {**message, "headers": headers}
            elif message["type"] == "http.response.body":
                whole = not message.get("more_body", False)
            await send(message)

        answer = {STREAM_PATH: self._streams.stream, RECEIPT_PATH: self._streams.receipt}.get(scope["path"])
        over = False
        try:
            await self._run(answer(self._app) if answer else self._app, scope, receive, with_policy)
        except (HTTPException, RuntimeError) as error:
            over = begun and isinstance(error.__cause__ or error, HTTPException)
            if not over:  # a stream that cannot go on says so to its window, and then to the server, too late
                raise
        if begun and not whole and (over or self._ending()):
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _run(self, app: App, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; a page's streams have no end of their own, so the server's end is theirs."""
        answer = asyncio.ensure_future(_as_coroutine(app(scope, receive, send)))
        try:
            while not answer.done():
                await asyncio.wait({answer}, timeout=LOOK_S)
                if self._ending():
                    break
        finally:
            answer.cancel()
        with suppress(asyncio.CancelledError):
            await answer


async def _as_coroutine(answer: Awaitable[None]) -> None:
    await answer
