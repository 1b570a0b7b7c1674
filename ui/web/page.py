"""The page: its tabs, and how it looks. Each tab is a file of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import gradio as gr

from dflash_local.app.served_pair import ServedPair
from dflash_local.ui.web.about import AboutTab
from dflash_local.ui.web.bench import BenchTab
from dflash_local.ui.web.chat import ChatTab
from dflash_local.ui.web.looks import THEME
from dflash_local.ui.web.models import ModelsTab
from dflash_local.ui.web.mount import Ending, Page, mounted
from dflash_local.ui.web.race import RaceTab
from dflash_local.ui.web.visitors import Visitors

TITLE = "dflash"
SENTENCE = "Chat with a model on your own machine. A small drafter guesses ahead, the model checks every word."
TABS = {"Chat": ChatTab, "Race": RaceTab, "Models": ModelsTab, "Bench": BenchTab, "About": AboutTab}
SHEETS = ("face.css", "looks.css", "tables.css", "race.css")
AT_ONCE = 16  # handlers that may run side by side; the pair itself answers one request at a time


def page(served: ServedPair, ending: Ending = lambda: False) -> Page:
    """The page over a pair, ready to be served.

    Args:
        ending: tells whether the server is about to end; windows that are open must not hold it up.
    """
    visitors = Visitors(served.service, served.chats)
    with gr.Blocks(title=TITLE, analytics_enabled=False, fill_height=True) as blocks:
        gr.HTML(f"<h1>{TITLE}</h1><p>{SENTENCE}</p>", apply_default_css=False, elem_id="df-head")
        for name, tab in TABS.items():
            with gr.Tab(name, id=name.lower()) as opened:
                tab(served, visitors, opened)
        blocks.unload(visitors.leave)
    blocks.queue(default_concurrency_limit=AT_ONCE, max_size=64, status_update_rate="auto")
    css = "\n".join(Path(__file__).with_name(name).read_text(encoding="utf-8") for name in SHEETS)
    return _kept(mounted(blocks, ending, theme=THEME, css=css), visitors)


def _kept(built: Page, visitors: Visitors) -> Page:
    """Have what came of replies that are on their way kept when the server ends."""

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[Any]:
        async with built.lifespan(app) as state:
            try:
                yield state
            finally:
                await asyncio.to_thread(visitors.close)

    return replace(built, lifespan=lifespan)
