"""Links that save something from the page. The file lies in the link: the server stores nothing."""

from __future__ import annotations

import base64

from dflash_local.ui.web.chat_view import ChatView
from dflash_local.ui.web.markup import paragraph, word


def link(label: str, name: str, kind: str, content: str) -> str:
    """A link that saves ``content`` under ``name``."""
    data = base64.b64encode(content.encode("utf-8", "replace")).decode("ascii")
    href = f"data:{kind};charset=utf-8;base64,{data}"
    return f'<a class="df-save" download="{word(name)}" href="{href}">{word(label)}</a>'


def links(chat: ChatView) -> str:
    """The conversation as Markdown and as JSON with its figures."""
    if not chat.conversation.turns:
        return paragraph("there is nothing to export yet")
    markdown = link("Markdown", "conversation.md", "text/markdown", chat.exported("md"))
    as_json = link("JSON with figures", "conversation.json", "application/json", chat.exported("json"))
    return f'<p class="df-line">Save the conversation: {markdown} · {as_json}</p>'
