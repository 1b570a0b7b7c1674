"""The page: its tabs, and how it looks. Each tab is a file of its own."""

from __future__ import annotations

import gradio as gr

from dflash_local.ui.web import about, bench, chat, models, race
from dflash_local.ui.web.desk import Desk
from dflash_local.ui.web.looks import CSS, THEME
from dflash_local.ui.web.mount import Page, mounted

TITLE = "dflash"
AT_ONCE = 16  # handlers that may run side by side; the pair itself answers one request at a time


def page(desk: Desk) -> Page:
    """The page over a desk, ready to be served."""
    with gr.Blocks(title=TITLE, analytics_enabled=False, fill_height=True) as blocks:
        for name, tab in (("Chat", chat), ("Race", race), ("Models", models), ("Bench", bench), ("About", about)):
            with gr.Tab(name, id=name.lower()):
                tab.build(desk)
    blocks.queue(default_concurrency_limit=AT_ONCE, max_size=64, status_update_rate="auto")
    return mounted(blocks, theme=THEME, css=CSS)
