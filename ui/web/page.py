"""The page: its tabs, and how it looks. Each tab is a file of its own."""

from __future__ import annotations

from pathlib import Path

import gradio as gr

from dflash_local.app.served_pair import ServedPair
from dflash_local.ui.web.about import AboutTab
from dflash_local.ui.web.bench import BenchTab
from dflash_local.ui.web.chat import ChatTab
from dflash_local.ui.web.looks import CSS, THEME
from dflash_local.ui.web.models import ModelsTab
from dflash_local.ui.web.mount import Ending, Page, mounted
from dflash_local.ui.web.race import RaceTab
from dflash_local.ui.web.visitors import Visitors

TITLE = "dflash"
TABS = {"Chat": ChatTab, "Race": RaceTab, "Models": ModelsTab, "Bench": BenchTab, "About": AboutTab}
TABLES = Path(__file__).with_name("tables.css")
AT_ONCE = 16  # handlers that may run side by side; the pair itself answers one request at a time


def page(served: ServedPair, ending: Ending = lambda: False) -> Page:
    """The page over a pair, ready to be served.

    Args:
        ending: tells whether the server is about to end; windows that are open must not hold it up.
    """
    visitors = Visitors(served.service)
    with gr.Blocks(title=TITLE, analytics_enabled=False, fill_height=True) as blocks:
        for name, tab in TABS.items():
            with gr.Tab(name, id=name.lower()) as opened:
                tab(served, visitors, opened)
        blocks.unload(visitors.leave)
    blocks.queue(default_concurrency_limit=AT_ONCE, max_size=64, status_update_rate="auto")
    return mounted(blocks, ending, theme=THEME, css=f"{CSS}\n{TABLES.read_text(encoding='utf-8')}")
