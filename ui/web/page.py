"""The page: its tabs, and how it looks. Each tab is a file of its own."""

from __future__ import annotations

from pathlib import Path

import gradio as gr

from dflash_local.app.served_pair import ServedPair
from dflash_local.ui.web import about, bench, chat, models, race
from dflash_local.ui.web.looks import CSS, THEME
from dflash_local.ui.web.models_view import ModelsView
from dflash_local.ui.web.mount import Ending, Page, mounted
from dflash_local.ui.web.visitors import Visitors

TITLE = "dflash"
TABLES = Path(__file__).with_name("tables.css")
AT_ONCE = 16  # handlers that may run side by side; the pair itself answers one request at a time


def page(served: ServedPair, ending: Ending = lambda: False) -> Page:
    """The page over a pair, ready to be served.

    Args:
        ending: tells whether the server is about to end; windows that are open must not hold it up.
    """
    visitors = Visitors(served.resident)
    with gr.Blocks(title=TITLE, analytics_enabled=False, fill_height=True) as blocks:
        with gr.Tab("Chat", id="chat") as opened:
            chat.build(served, visitors, opened)
        with gr.Tab("Race", id="race") as opened:
            race.build(served, visitors, opened)
        with gr.Tab("Models", id="models") as opened:
            models.build(ModelsView(served), visitors, opened)
        with gr.Tab("Bench", id="bench") as opened:
            bench.build(served, visitors, opened)
        with gr.Tab("About", id="about") as opened:
            about.build(served, visitors, opened)
        blocks.unload(visitors.leave)
    blocks.queue(default_concurrency_limit=AT_ONCE, max_size=64, status_update_rate="auto")
    return mounted(blocks, ending, theme=THEME, css=f"{CSS}\n{TABLES.read_text(encoding='utf-8')}")
