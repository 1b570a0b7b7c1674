"""Gradio's page as routes for the server behind the guard, with only the paths that the page needs.

No uploads, no files of this machine, no proxying, no monitoring, no sharing: those paths answer 404.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import BaseRoute, Mount

from dflash_local.api.guard import App, Message, Receive, Scope, Send

if TYPE_CHECKING:
    import gradio as gr

PATHS = {
    "GET": re.compile(
        r"/|/(config|theme\.css|favicon\.ico|manifest\.json|robots\.txt)/?|/(static|assets|svelte)/.+"
        r"|/gradio_api/(info/?|startup-events|app_id/?|queue/data|heartbeat/[\w-]+|call/\w+/\w+)"
    ),
    "POST": re.compile(r"/gradio_api/(queue/join|cancel|reset/?|call/(v2/)?\w+/?)"),
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
Lifespan = Callable[[Any], AbstractAsyncContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Page:
    """What ``api.app.guarded_app`` wants of a page."""

    routes: tuple[BaseRoute, ...]
    lifespan: Lifespan


def mounted(blocks: gr.Blocks, **looks: Any) -> Page:
    """The page at ``/``. No environment variable of Gradio's opens anything: every setting is given.

    Args:
        looks: ``theme``, ``css`` and the like, as Gradio takes them.
    """
    import gradio

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
        **looks,
    )
    return Page((Mount("/", _Narrow(host.router)),), host.router.lifespan_context)


class _Narrow:
    """Lets through what the page needs, and forbids the browser to ask others."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI app."""
        allowed = PATHS.get("GET" if scope["method"] == "HEAD" else scope["method"])
        if allowed is None or allowed.fullmatch(scope["path"]) is None:
            return await PlainTextResponse("there is nothing at this path\n", 404)(scope, receive, send)

        async def with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                policy = (b"content-security-policy", POLICY.encode("ascii"))
                message = {**message, "headers": [*message.get("headers", ()), policy]}
            await send(message)

        await self._app(scope, receive, with_policy)
