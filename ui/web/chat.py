"""The Chat tab: one conversation for each window, the saved ones before it, its figures behind it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import gradio as gr
from gradio.components import Component
from gradio.components.chatbot import ExampleMessage

from dflash_local.app.reply_text import headline
from dflash_local.app.served_pair import ServedPair
from dflash_local.errors import BusyError, DFlashError
from dflash_local.service.pieces import LEGEND
from dflash_local.ui.web import drawer, follow, markup, memory
from dflash_local.ui.web.chat_settings import Changes, ChatSettings, Given
from dflash_local.ui.web.chat_view import SHOWN, ChatView, shown
from dflash_local.ui.web.drawer import Drawer
from dflash_local.ui.web.figures_panel import panel
from dflash_local.ui.web.message_field import MessageField, mark
from dflash_local.ui.web.reply import ReplyJob
from dflash_local.ui.web.text import MATH
from dflash_local.ui.web.visitors import Visitor, Visitors

PULSE_S = 0.1  # the page is changed at most so often
CHARS_A_PULSE = 20_000  # a long conversation is drawn less often: the browser works through all of it each time
FIGURES_S = 0.3
MORE = 40  # turns that are shown at once when earlier ones are asked for
GONE_S = 3.0  # in which a window that is loaded anew is known to have left
ELSEWHERE = "This chat is open in another window, which writes it. Load this page anew to see what came since."
FOCUS = "() => document.querySelector('#df-field textarea').focus()"


class ChatTab:
    def __init__(self, served: ServedPair, visitors: Visitors, opened: gr.Tab) -> None:
        self._served, self._visitors = served, visitors
        with gr.Row(elem_classes="df-split"):
            self.drawer = Drawer(visitors)
            with gr.Column(scale=7, min_width=300):
                with gr.Row(elem_classes="df-top"):
                    drawer.toggle()
                    self.pair = gr.HTML(elem_classes="df-plain", elem_id="df-pair")
                self._talk()
                self.settings = ChatSettings(served.service, served.full_context)
            with gr.Column(scale=3, min_width=240, elem_classes="df-side"):
                self.figures = gr.HTML(elem_id="df-figures", elem_classes="df-plain")
        self.remembered = memory.remembered()
        self._bind(opened)

    def _talk(self) -> None:
        self.earlier = gr.Button("Show earlier messages", size="sm", visible=False, elem_id="df-earlier")
        self.chatbot = gr.Chatbot(
            show_label=False,
            height=None,
            autoscroll=False,
            elem_classes="df-talk",
            buttons=["copy"],
            latex_delimiters=MATH,
            feedback_options=None,
            placeholder=self._welcome(),
            examples=self._examples(),
        )
        follow.build()
        self.edit = memory.edit_buttons()
        self.status = gr.HTML(elem_classes=["df-plain", "df-status"])
        self.composer = MessageField()
        with gr.Row(elem_classes="df-tools"):
            self.keep = gr.Button("Cancel the edit", size="sm", min_width=90, visible=False)
            self.go_on = gr.Button("Continue", size="sm", min_width=80, visible=False)
            self.again = gr.Button("Regenerate", size="sm", min_width=90, interactive=False)
            self.clear = gr.Button("Clear", size="sm", min_width=70, interactive=False)
            self.undo = gr.Button("Undo Clear", size="sm", min_width=90, visible=False)
            self.export = gr.Button("Export", size="sm", min_width=70, interactive=False)
            self.origins = gr.Checkbox(label="Tokens by origin", container=False, min_width=150)
        self.links = gr.HTML(elem_classes=["df-plain", "df-maybe"])

    def _bind(self, opened: gr.Tab) -> None:
        composer = self.composer
        asked = {composer.field, *self.settings.fields}
        tools: list[Component] = [
            self.earlier,
            self.keep,
            self.go_on,
            self.again,
            self.clear,
            self.undo,
            self.export,
            composer.stop,
        ]
        row = [self.chatbot, self.status, self.figures, self.pair, self.remembered, self.drawer.list, *tools]
        drawn = [*row, composer.mark]
        how: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden", "concurrency_limit": None}
        once: dict[str, Any] = {"trigger_mode": "once", **how}
        # While a reply comes, too: then it is said that the message has to wait.
        gr.on([composer.send.click, composer.field.submit], self._send, asked, drawn, trigger_mode="multiple", **how)
        self.chatbot.example_select(self._try, asked, drawn, **once)
        self.again.click(self._again, asked, drawn, **once)
        self.go_on.click(self._go_on, asked, drawn, **once)
        composer.stop.click(self._stop, None, None, **how)
        self.edit.click(self._edit, None, drawn, **how).then(None, js=FOCUS)
        self.earlier.click(self._earlier, None, drawn, **how)
        self.keep.click(self._keep, None, drawn, **how).then(None, js=FOCUS)
        whole = [*drawn, self.links, *self.settings.changed]
        gr.on([self.clear.click, self.drawer.new.click], self._clear, None, whole, **how).then(None, js=FOCUS)
        self.undo.click(self._undo, None, whole, **how)
        self.export.click(self._export, None, [self.links], **how)
        self.origins.change(self._show_origins, [self.origins], [self.chatbot, self.status], **how)
        self.remembered.click(self._arrive, None, whole, **how)
        self.drawer.list.click(self._act, None, whole, trigger_mode="multiple", **how)
        self.drawer.search.change(
            self._search, [self.drawer.search], [self.drawer.list], trigger_mode="always_last", **how
        )
        opened.select(self._look, None, whole, **how)

    # What the user does

    async def _send(self, given: Given, request: gr.Request) -> AsyncIterator[Changes]:
        text, visitor = given[self.composer.field] or "", self._visitors.of(request)
        place = visitor.editing

        def ask(chat: ChatView) -> ReplyJob:
            options = self.settings.options(given)
            return chat.ask(text, options) if place is None else chat.edit(place, text, options)

        async for changes in self._ask(text, ask, visitor):
            yield changes

    async def _try(self, given: Given, event: gr.SelectData, request: gr.Request) -> AsyncIterator[Changes]:
        """Send one of the prompts to begin with; what was typed meanwhile stays in the field."""
        text = str(event.value["text"])
        ask, visitor = (lambda chat: chat.ask(text, self.settings.options(given))), self._visitors.of(request)
        async for changes in self._ask("", ask, visitor):
            yield changes

    async def _again(self, given: Given, request: gr.Request) -> AsyncIterator[Changes]:
        visitor = self._visitors.of(request)
        async for changes in self._ask("", lambda chat: chat.again(self.settings.options(given)), visitor):
            yield changes

    async def _go_on(self, given: Given, request: gr.Request) -> AsyncIterator[Changes]:
        visitor = self._visitors.of(request)
        async for changes in self._ask("", lambda chat: chat.go_on(self.settings.options(given)), visitor):
            yield changes

    async def _ask(self, text: str, ask: Callable[[ChatView], ReplyJob], visitor: Visitor) -> AsyncIterator[Changes]:
        """Start a reply and show it; ``text`` leaves the field for it, empty where it is no message of the field's.

        The reply does not end with this: a window that is loaded anew follows it, too.
        """
        said = self.composer.mark
        try:
            self._visitors.take(visitor)
            reply = ask(visitor.chat)
        except DFlashError as error:
            why = markup.failed(error)
            # The line of state is written over as long as a reply comes.
            yield {said: mark("kept", note=why)} if visitor.chat.busy else {said: mark("kept"), self.status: why}
            return
        visitor.editing, visitor.most = None, SHOWN  # all of a long one would be worked through at each change
        yield {said: mark("sent", text), **self._drawn(visitor, reply)}
        yield await asyncio.to_thread(self._standing, visitor)
        async for changes in self._follow(visitor, reply):
            yield changes

    def _stop(self, request: gr.Request) -> None:
        self._visitors.of(request).chat.stop()

    def _edit(self, event: gr.EventData, request: gr.Request) -> Changes:
        """Put a message into the field; Send replaces it and what followed."""
        visitor = self._visitors.of(request)
        try:
            back = int(getattr(event, "back", 0))
            text = visitor.chat.message(back)
        except (DFlashError, ValueError) as error:
            return {self.status: markup.paragraph(str(error), "error")}
        visitor.editing = back
        note = markup.paragraph("You are editing a message: Send replaces it and all that followed.")
        return {self.composer.mark: mark("edit", text), self.status: note, self.keep: gr.update(visible=True)}

    def _keep(self, request: gr.Request) -> Changes:
        self._visitors.of(request).editing = None
        return {self.composer.mark: mark("leave"), self.status: "", self.keep: gr.update(visible=False)}

    def _earlier(self, request: gr.Request) -> Changes:
        visitor = self._visitors.of(request)
        visitor.most += MORE
        rows = visitor.chat.messages(visitor.origins, visitor.most)
        return {self.chatbot: rows, **self._standing(visitor)}

    def _clear(self, request: gr.Request) -> Changes:
        visitor = self._visitors.of(request)
        try:
            self._visitors.take(visitor)
            visitor.chat.clear()
        except BusyError:
            self._visitors.show_new(visitor)
        visitor.editing = None
        return self._whole(visitor)

    def _undo(self, request: gr.Request) -> Changes:
        visitor = self._visitors.of(request)
        try:
            visitor.chat.undo_clear()
        except DFlashError as error:
            return {self.status: markup.failed(error)}
        return self._whole(visitor)

    def _export(self, request: gr.Request) -> Changes:
        """Offer the conversation as Markdown and as JSON with its figures."""
        chat = self._visitors.of(request).chat
        markdown = markup.save_link("Markdown", "conversation.md", "text/markdown", chat.exported("md"))
        content = chat.exported("json")
        as_json = markup.save_link("JSON with figures", "conversation.json", "application/json", content)
        return {self.links: f'<p class="df-line">Save the conversation: {markdown} · {as_json}</p>'}

    def _show_origins(self, wanted: bool, request: gr.Request) -> Changes:
        visitor = self._visitors.of(request)
        visitor.origins = wanted
        rows = visitor.chat.messages(wanted, visitor.most)
        # What the copy button would take is HTML then.
        return {
            self.chatbot: gr.update(value=rows, buttons=[] if wanted else ["copy"]),
            self.status: markup.paragraph(LEGEND if wanted else ""),
        }

    def _look(self, request: gr.Request) -> Changes:
        """Look anew: another pair may have been loaded while the window was elsewhere."""
        visitor, model = self._visitors.of(request), self._served.service.model
        other, visitor.model = visitor.model != model.name, model.name
        return {
            self.chatbot: gr.update(placeholder=self._welcome(), examples=self._examples()),
            self.pair: self._pair(),
            self.figures: self._panel(visitor),
            **self.settings.look(other),
        }

    # Its chats

    async def _arrive(self, event: gr.EventData, request: gr.Request) -> AsyncIterator[Changes]:
        """Show a window that is loaded the chat that its tab remembers, and the reply that is on its way in it."""
        visitor = self._visitors.of(request)
        key, _, name = str(getattr(event, "chat", "")).partition(" ")
        yield self._look(request)
        async for changes in self._take_up(visitor, key, name):
            yield changes

    async def _take_up(self, visitor: Visitor, key: str, name: str) -> AsyncIterator[Changes]:
        try:
            await asyncio.to_thread(self._visitors.take_up, visitor, key, name)
        except DFlashError as error:
            yield {**await asyncio.to_thread(self._whole, visitor), self.status: markup.failed(error)}
            return
        yield await asyncio.to_thread(self._whole, visitor)
        chat, reply = visitor.chat, visitor.chat.reply
        if reply is not None and reply.running:
            async for changes in self._follow(visitor, reply):
                yield changes
            return
        until = time.monotonic() + GONE_S
        while chat is visitor.chat:
            with suppress(BusyError):
                self._visitors.take(visitor)
                return
            if time.monotonic() > until:
                yield {self.status: markup.paragraph(ELSEWHERE)}
                return
            await asyncio.sleep(PULSE_S)

    async def _act(self, event: gr.EventData, request: gr.Request) -> AsyncIterator[Changes]:
        """Do what a button of the list asks for."""
        visitor, act, name = self._visitors.of(request), getattr(event, "act", ""), str(getattr(event, "name", ""))
        if act == "open":
            async for changes in self._take_up(visitor, "", name):
                yield changes
            return
        try:
            if act == "rename":
                await asyncio.to_thread(self.drawer.rename, name, str(getattr(event, "title", "")))
            elif act == "delete":
                await asyncio.to_thread(self.drawer.delete, visitor, name)
        except DFlashError as error:
            yield {self.status: markup.failed(error)}
        else:
            yield await asyncio.to_thread(self._whole, visitor)

    def _search(self, words: str, request: gr.Request) -> Changes:
        visitor = self._visitors.of(request)
        visitor.search = (words or "").strip()
        return {self.drawer.list: self.drawer.drawn(visitor)}

    # What the user sees

    async def _follow(self, visitor: Visitor, reply: ReplyJob) -> AsyncIterator[Changes]:
        """Show what comes of a reply as long as the window shows its chat."""
        seen: tuple[int, str] | None = None
        drawn = figured = 0.0
        async for _ in reply.pulses(PULSE_S):
            if visitor.chat.reply is not reply:
                return
            now, stamp = time.monotonic(), (reply.version, reply.state)
            pause = PULSE_S * (1 + visitor.chat.size(visitor.most) // CHARS_A_PULSE)
            if stamp == seen or now - drawn < pause * 0.9:
                continue
            changes = self._drawn(visitor, reply)
            if now - figured < FIGURES_S:
                changes.pop(self.figures)
            else:
                changes[self.pair], figured = self._pair(), now
            seen, drawn = stamp, now
            yield changes
        if visitor.chat.reply is reply:
            standing = await asyncio.to_thread(self._standing, visitor)
            yield {self.pair: self._pair(), **standing, **self._ended(visitor, reply)}

    def _drawn(self, visitor: Visitor, reply: ReplyJob) -> Changes:
        return {
            self.chatbot: visitor.chat.messages(visitor.origins, visitor.most),
            self.status: markup.paragraph(reply.state),
            self.figures: self._panel(visitor),
        }

    def _ended(self, visitor: Visitor, reply: ReplyJob) -> Changes:
        """Show a reply for the last time; a message that got none goes back into the field."""
        text = reply.message if reply.source.turn is None else ""
        changes, chat = self._drawn(visitor, reply), visitor.chat
        changes[self.composer.mark] = mark("back", text) if text else mark("kept")
        error = reply.error
        if error is None and reply.source.turn is not None:
            turns = chat.conversation.turns
            words = [turns[-1].ending] if turns and turns[-1].ending else []
            if (finished := reply.source.finished) is not None:
                words.append(headline(finished))
            lines = (" · ".join(words), *reply.notices, *chat.tell())
            changes[self.status] = "".join(map(markup.paragraph, lines))
            return changes
        nothing = "nothing came of it; the message is back in the field" if text else "nothing came of it"
        changes[self.status] = markup.failed(error) if error is not None else markup.paragraph(nothing)
        return changes

    def _whole(self, visitor: Visitor) -> Changes:
        """Show a conversation that the window has not shown before."""
        chat = visitor.chat
        return {
            self.chatbot: chat.messages(visitor.origins, visitor.most),
            self.status: markup.paragraph(" · ".join(chat.tell())),
            self.links: "",
            self.figures: self._panel(visitor),
            self.settings.system: chat.conversation.options.system,
            **self._standing(visitor),
        }

    def _standing(self, visitor: Visitor) -> Changes:
        """Show what can be done with the conversation as it stands, its place in the list, and have it remembered.

        It reads all chats: many take a second, which the server's loop must not wait for.
        """
        chat = visitor.chat
        turns, idle = chat.conversation.turns, not chat.busy
        last = turns[-1] if turns else None
        hidden = len(turns) - visitor.most
        return {
            self.earlier: gr.update(visible=hidden > 0, value=f"Show earlier messages ({hidden})"),
            self.keep: gr.update(visible=visitor.editing is not None),
            self.go_on: gr.update(visible=idle and last is not None and bool(last.ending)),
            self.again: gr.update(interactive=idle and last is not None),
            self.clear: gr.update(interactive=bool(turns)),
            self.undo: gr.update(visible=chat.conversation.cleared is not None),
            self.export: gr.update(interactive=bool(turns)),
            self.composer.stop: gr.update(interactive=chat.busy),
            self.remembered: memory.mark(chat),
            self.drawer.list: self.drawer.drawn(visitor),
        }

    def _panel(self, visitor: Visitor) -> str:
        """Draw the figures; before the first reply there are none."""
        reply, readings = visitor.chat.reply, visitor.chat.look()
        return "" if reply is None else panel(readings, tuple(reply.curve))

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
