"""The About tab."""

from __future__ import annotations

import gradio as gr

from dflash_local.ui.web.desk import Desk


def build(desk: Desk) -> None:
    """Add the tab's components; called inside its ``gr.Tab``."""
    gr.Markdown(desk.resident.model.name)
