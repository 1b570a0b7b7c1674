"""The Chat tab: one conversation for each window, its figures beside it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import gradio as gr
from gradio.blocks import Block
from gradio.components import Component
from gradio.components.chatbot import ExampleMessage

from dflash_local.app.served_pair import ServedPair
from dflash_local.errors import DFlashError
from dflash_local.service.chat_options import MAX_NEW_TOKENS, ChatOptions
from dflash_local.ui.figures import reply_line
from dflash_local.ui.pieces import LEGEND
from dflash_local.ui.web import follow, markup
from dflash_local.ui.web.chat_view import ChatView, chat_options, shown
from dflash_local.ui.web.figures_panel import panel
from dflash_local.ui.web.reply import ReplyJob
from dflash_local.ui.web.visitors import Visitor, Visitors

PULSE_S = 0.1  # the page is changed at most so often
CHARS_A_PULSE = 20_000  # a long text is drawn less often: the browser lays it out anew each time
FIGURES_S = 0.3
Given = dict[Component, Any]
Changes = dict[Component, Any]


def line(label: str, value: str = "", placeholder: str = "default") -> gr.Textbox:
    """Make a field for a number; empty means what its placeholder says."""
    return gr.Textbox(label=label, value=value, placeholder=placeholder, lines=1, max_lines=1, min_width=120)


class ChatTab:
    def __init__(self, served: ServedPair, visitors: Visitors, opened: gr.Tab) -> None:
        self._served, self._visitors = served, visitors
        with gr.Row(elem_classes="df-split"):
            with gr.Column(scale=7, min_width=300):
                self.pair = gr.HTML(elem_classes="df-plain")
                self.chatbot = gr.Chatbot(
                    show_label=False,
                    height=None,
                    autoscroll=False,
                    elem_classes="df-talk",
                    buttons=["copy", "copy_all"],
                    latex_delimiters=[],
                    feedback_options=None,
                    placeholder=self._welcome(),
                    examples=self._examples(),
                )
                follow.build()
                self.status = gr.HTML(elem_classes=["df-plain", "df-status"])
                with gr.Row(elem_classes="df-composer"):
                    self.field = gr.Textbox(
                        show_label=False,
                        container=False,
                        placeholder="Message; Enter sends, Shift+Enter begins a line",
                        lines=1,
                        max_lines=10,
                        scale=8,
                        min_width=200,
                        elem_id="df-field",
                    )
                    self.send = gr.Button("Send", variant="primary", scale=1, min_width=80)
                    self.stop = gr.Button("Stop", scale=1, min_width=80, interactive=False)
                self._tools()
                self._settings()
            with gr.Column(scale=3, min_width=260):
                self.figures = gr.HTML(elem_id="df-figures", elem_classes="df-plain")
        self._bind(opened)

    def _tools(self) -> None:
        with gr.Row(elem_classes="df-tools"):
            self.again = gr.Button("Regenerate", size="sm", min_width=90)
            self.edit = gr.Button("Edit last", size="sm", min_width=90)
            self.clear = gr.Button("Clear", size="sm", min_width=70)
            self.export = gr.Button("Export", size="sm", min_width=70)
            self.origins = gr.Checkbox(label="Tokens by origin", container=False, min_width=150)
        self.links = gr.HTML(elem_classes=["df-plain", "df-maybe"])

    def _settings(self) -> None:
        model = self._served.service.model
        with gr.Accordion("Settings", open=False):
            self.own = gr.HTML(elem_classes="df-plain")
            self.system = gr.Textbox(label="System prompt", lines=2, max_lines=8)
            with gr.Row():
                self.mode = gr.Radio(
                    [("with the drafter", "dflash"), ("without (AR)", "ar")], value=model.mode, label="Mode"
                )
                self.thinking = gr.Checkbox(label="Thinking", value=model.thinking)
            with gr.Row():
                # Text and no gr.Number: that makes a 0 of an empty field.
                self.temperature = line("Temperature")
                self.top_p = line("Top-p")
                self.limit = line("Most tokens", value=str(MAX_NEW_TOKENS))
                self.block = line("Block size")
                self.seed = line("Seed", placeholder="random")

    def _bind(self, opened: gr.Tab) -> None:
        asked: set[Block] = {self.field, self.system, self.mode, self.thinking, self.temperature}
        asked |= {self.top_p, self.limit, self.block, self.seed}
        drawn = [self.chatbot, self.field, self.status, self.figures, self.stop, self.pair]
        how: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden", "concurrency_limit": None}
        gr.on([self.send.click, self.field.submit], self._send, asked, drawn, trigger_mode="once", **how)
        self.chatbot.example_select(self._try, asked, drawn, trigger_mode="once", **how)
        self.again.click(self._again, asked, drawn, trigger_mode="once", **how)
        self.stop.click(self._stop, None, None, **how)
        self.edit.click(self._edit, None, [self.chatbot, self.field, self.status], **how)
        emptied = [self.chatbot, self.status, self.figures, self.links]
        gr.on([self.clear.click, self.chatbot.clear], self._clear, None, emptied, **how)
        self.export.click(self._export, None, [self.links], **how)
        self.origins.change(self._show_origins, [self.origins], [self.chatbot, self.status], **how)
        looked = [self.chatbot, self.pair, self.own, self.figures, self.mode, self.thinking]
        gr.on(None, self._look, None, looked, **how)
        opened.select(self._look, None, looked, **how)

    # What the user does

    async def _send(self, given: Given, request: gr.Request) -> AsyncIterator[Changes]:
        text = given[self.field] or ""
        async for changes in self._ask(text, lambda chat: chat.ask(text, self._options(given)), request):
            yield changes

    async def _try(self, given: Given, event: gr.SelectData, request: gr.Request) -> AsyncIterator[Changes]:
        """Send one of the prompts to begin with; what was typed meanwhile stays in the field."""
        text = str(event.value["text"])
        async for changes in self._ask(text, lambda chat: chat.ask(text, self._options(given)), request):
            if given[self.field]:
                changes.pop(self.field, None)
            yield changes

    async def _again(self, given: Given, request: gr.Request) -> AsyncIterator[Changes]:
        async for changes in self._ask("", lambda chat: chat.again(self._options(given)), request):
            yield changes

    async def _ask(self, text: str, ask: Callable[[ChatView], ReplyJob], request: gr.Request) -> AsyncIterator[Changes]:
        """Start a reply and show it; ``text`` leaves the field for it, empty where it is the last one again."""
        visitor = self._visitors.of(request)
        try:
            reply = ask(visitor.chat)
        except DFlashError as error:
            yield {self.status: markup.failed(error)}
            return
        try:
            emptied: Changes = {self.field: ""} if text else {}
            yield {**emptied, self.stop: gr.update(interactive=True), **self._drawn(visitor, reply)}
            async for changes in self._follow(visitor, reply, text):
                yield changes
        finally:  # a window that is closed ends its reply: nobody listens then
            reply.cancel()

    def _stop(self, request: gr.Request) -> None:
        self._visitors.of(request).chat.stop()

    def _edit(self, request: gr.Request) -> Changes:
        visitor = self._visitors.of(request)
        try:
            text = visitor.chat.conversation.take_back()
        except DFlashError as error:
            return {self.status: markup.failed(error)}
        return {self.field: text, self.chatbot: visitor.chat.messages(visitor.origins), self.status: ""}

    def _clear(self, request: gr.Request) -> Changes:
        chat = self._visitors.of(request).chat
        chat.clear()
        return {self.chatbot: [], self.status: "", self.links: "", self.figures: panel(chat.look())}

    def _export(self, request: gr.Request) -> Changes:
        """Offer the conversation as Markdown and as JSON with its figures."""
        chat = self._visitors.of(request).chat
        if not chat.conversation.turns:
            return {self.links: markup.paragraph("there is nothing to export yet")}
        markdown = markup.save_link("Markdown", "conversation.md", "text/markdown", chat.exported("md"))
        content = chat.exported("json")
        as_json = markup.save_link("JSON with figures", "conversation.json", "application/json", content)
        return {self.links: f'<p class="df-line">Save the conversation: {markdown} · {as_json}</p>'}

    def _show_origins(self, wanted: bool, request: gr.Request) -> Changes:
        visitor = self._visitors.of(request)
        visitor.origins = wanted
        rows = visitor.chat.messages(wanted)
        # What the copy button would take is HTML then.
        buttons = ["copy_all"] if wanted else ["copy", "copy_all"]
        return {
            self.chatbot: gr.update(value=rows, buttons=buttons),
            self.status: markup.paragraph(LEGEND if wanted else ""),
        }

    def _look(self, request: gr.Request) -> Changes:
        """Look anew: another pair may have been loaded while the window was elsewhere."""
        visitor, model = self._visitors.of(request), self._served.service.model
        own = f"The model's defaults: temperature {model.sampling.temperature:g}, top-p {model.sampling.top_p:g}"
        changes: Changes = {
            self.chatbot: gr.update(placeholder=self._welcome(), examples=self._examples()),
            self.pair: self._pair(),
            self.own: markup.paragraph(own),
            self.figures: panel(visitor.chat.look()),
        }
        if visitor.model != model.name:
            visitor.model = model.name
            changes |= {self.mode: model.mode, self.thinking: model.thinking}
        return changes

    # What the user sees

    async def _follow(self, visitor: Visitor, reply: ReplyJob, text: str = "") -> AsyncIterator[Changes]:
        seen: tuple[int, str] | None = None
        drawn = figured = 0.0
        async for _ in reply.pulses(PULSE_S):
            now, stamp = time.monotonic(), (reply.version, reply.state)
            pause = PULSE_S * (1 + len(reply.source.text) // CHARS_A_PULSE)
            if visitor.chat.reply is not reply or stamp == seen or now - drawn < pause * 0.9:
                continue
            changes = {self.stop: gr.update(interactive=True), **self._drawn(visitor, reply)}
            if now - figured < FIGURES_S:
                changes.pop(self.figures)
            else:
                changes[self.pair], figured = self._pair(), now
            seen, drawn = stamp, now
            yield changes
        if visitor.chat.reply is not reply:  # cleared
            yield {self.stop: gr.update(interactive=False)}
            return
        yield {self.stop: gr.update(interactive=False), self.pair: self._pair(), **self._ended(visitor, reply, text)}

    def _drawn(self, visitor: Visitor, reply: ReplyJob) -> Changes:
        return {
            self.chatbot: visitor.chat.messages(visitor.origins),
            self.status: markup.paragraph(reply.state),
            self.figures: panel(reply.readings, tuple(reply.curve)),
        }

    def _ended(self, visitor: Visitor, reply: ReplyJob, text: str) -> Changes:
        """Show a reply for the last time; a message that got none goes back into the field."""
        changes = self._drawn(visitor, reply)
        error = reply.error
        if error is None and reply.source.turn is not None:
            turns = visitor.chat.conversation.turns
            words = [turns[-1].ending] if turns and turns[-1].ending else []
            changes[self.status] = markup.paragraph(" · ".join([*words, reply_line(reply.readings)]))
            return changes
        nothing = markup.paragraph(
            "nothing came of it; the message is back in the field" if text else "nothing came of it"
        )
        changes[self.status] = markup.failed(error) if error is not None else nothing
        if text and reply.source.turn is None:
            changes[self.field] = text
        return changes

    def _pair(self) -> str:
        service = self._served.service
        facts = service.facts
        how = "not loaded yet: the first message loads it"
        if facts is not None:
            how = " · ".join([facts.loaded_as, *([f"context {facts.context:,}"] if facts.context else [])])
        notices = "".join(markup.paragraph(notice) for notice in facts.notices) if facts is not None else ""
        return markup.paragraph(f"{service.model.name} · {how}") + notices

    def _welcome(self) -> str:
        return "\n\n".join(
            ("Type a message below, or begin with one of these.", *(shown(note) for note in self._served.notes))
        )

    def _examples(self) -> list[ExampleMessage]:
        """Offer the prompts to begin with; a click sends one."""
        return [{"text": prompt} for prompt in self._served.examples]

    def _options(self, given: Given) -> ChatOptions:
        return chat_options(
            self._served.service,
            system=given[self.system] or "",
            mode=given[self.mode] or "",
            thinking=given[self.thinking],
            temperature=given[self.temperature],
            top_p=given[self.top_p],
            max_new_tokens=given[self.limit],
            block_size=given[self.block],
            seed=given[self.seed],
        )
