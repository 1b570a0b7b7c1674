"""The settings below a conversation: how replies are made, read anew for each one."""

from __future__ import annotations

from typing import Any

import gradio as gr
from gradio.blocks import Block
from gradio.components import Component

from dflash_local.service.chat_options import MAX_NEW_TOKENS, ChatOptions
from dflash_local.service.service import Service
from dflash_local.settings import FullContext
from dflash_local.ui.web import markup
from dflash_local.ui.web.chat_view import chat_options

Given = dict[Component, Any]
Changes = dict[Component, Any]


def line(label: str, value: str = "", placeholder: str = "default") -> gr.Textbox:
    """Make a field for a number; empty means what its placeholder says."""
    return gr.Textbox(label=label, value=value, placeholder=placeholder, lines=1, max_lines=1, min_width=120)


FULL = [
    ("leave out the oldest messages", "drop"),
    ("summarise the oldest messages", "summarise"),
    ("stop, and say so", "stop"),
]


class ChatSettings:
    """Holds the fields, folded.

    Attributes:
        fields: whose values ``options`` reads. changed: those that ``look`` and a chat of the store fill in.
    """

    def __init__(self, service: Service, full_context: FullContext) -> None:
        self._service = service
        model = service.model
        with gr.Accordion("Settings", open=False):
            self.own = gr.HTML(elem_classes="df-plain")
            self.system = gr.Textbox(label="System prompt", lines=2, max_lines=8)
            with gr.Row():
                modes = [("with the drafter", "dflash"), ("plain", "ar")]
                self.mode = gr.Radio(modes, value=model.mode, label="Mode")
                self.thinking = gr.Checkbox(label="Thinking", value=model.thinking)
                self.full = gr.Dropdown(FULL, value=full_context, label="When the context is full", filterable=False)
            with gr.Row():
                # Text and no gr.Number: that makes a 0 of an empty field.
                self.temperature = line("Temperature")
                self.top_p = line("Top-p")
                self.limit = line("Most tokens", value=str(MAX_NEW_TOKENS))
                self.block = line("Block size")
                self.seed = line("Seed", placeholder="random")
        self.fields: set[Block] = {self.system, self.mode, self.thinking, self.temperature}
        self.fields |= {self.top_p, self.limit, self.block, self.seed, self.full}
        self.changed: list[Component] = [self.own, self.system, self.mode, self.thinking]

    def look(self, other_model: bool) -> Changes:
        """Say what the loaded pair does by itself; another pair than before has its own mode and thinking."""
        model = self._service.model
        own = f"The model's defaults: temperature {model.sampling.temperature:g}, top-p {model.sampling.top_p:g}"
        changes: Changes = {self.own: markup.paragraph(own)}
        return {**changes, self.mode: model.mode, self.thinking: model.thinking} if other_model else changes

    def options(self, given: Given) -> ChatOptions:
        """Read the fields; UsageError where a value is not allowed."""
        return chat_options(
            self._service,
            system=given[self.system] or "",
            mode=given[self.mode] or "",
            thinking=given[self.thinking],
            temperature=given[self.temperature],
            top_p=given[self.top_p],
            max_new_tokens=given[self.limit],
            block_size=given[self.block],
            seed=given[self.seed],
            full_context=given[self.full],
        )
