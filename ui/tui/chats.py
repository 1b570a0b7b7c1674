"""The chats on disk in a frame: found by words, chosen with the arrows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from textual import on, work
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static

from dflash_local import settings
from dflash_local.app.kept_chats import age
from dflash_local.store import history
from dflash_local.store.history import ChatEntry
from dflash_local.tables import cut
from dflash_local.terminal import safe_line
from dflash_local.ui.tui.theme import use_theme

AGE, MODEL, COUNT = 16, 18, 8
NARROW = 60  # columns for a row; fewer have no room for the model
BESIDE = 8  # columns of the frame and the list around a row


class ChatsScreen(ModalScreen[ChatEntry | None]):
    """Lists the chats, the newest first; dismissed with the one that was chosen."""

    BINDINGS = [
        Binding("escape", "dismiss", "Close"),
        Binding("up", "move(-1)", "Up", show=False, priority=True),
        Binding("down", "move(1)", "Down", show=False, priority=True),
    ]

    def __init__(self, folder: Path | None) -> None:
        super().__init__()
        self._folder = folder
        self._entries: Sequence[ChatEntry] = ()

    def compose(self) -> ComposeResult:
        with Vertical(id="chats", classes="sheet"):
            yield Input(placeholder="Words of a title or a message")
            yield Static(id="columns", classes="heading", markup=False)
            yield OptionList(markup=False)
            yield Static("Enter goes on with it. Esc closes this.", classes="heading")

    def on_mount(self) -> None:
        self._search("")

    def on_resize(self) -> None:
        self._show(self._entries)

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        self._search(event.value)

    @work(thread=True, exclusive=True)
    def _search(self, words: str) -> None:
        found = history.entries(self._folder, words.strip())
        self.app.call_from_thread(self._show, found)

    def _show(self, entries: Sequence[ChatEntry]) -> None:
        whole = self.query_one("#chats").size.width - BESIDE
        beside = MODEL if whole >= NARROW else 0
        width, now = max(8, whole - AGE - beside - COUNT), time.time()

        def row(title: str, when: str, model: str, turns: str) -> str:
            name = cut(model, MODEL - 2).ljust(beside)[:beside]
            return safe_line(f"{cut(title, width).ljust(width)}  {when:{AGE}s}{name}{turns:>{COUNT}s}")

        self.query_one("#columns", Static).update(Content(row("Chat", "Age", "Model", "Messages")))
        listed = self.query_one(OptionList)
        listed.clear_options()
        rows = [row(each.title, age(now - each.modified), each.model, str(each.turns)) for each in entries]
        listed.add_options([Content(text) for text in rows])
        listed.highlighted = 0 if rows else None
        self._entries = entries

    def action_move(self, step: int) -> None:
        """Choose the next chat or the one before, while words are typed."""
        listed = self.query_one(OptionList)
        if self._entries:
            listed.highlighted = ((listed.highlighted or 0) + step) % len(self._entries)

    @on(Input.Submitted)
    def _enter(self) -> None:
        at = self.query_one(OptionList).highlighted
        if at is not None:
            self.dismiss(self._entries[at])

    @on(OptionList.OptionSelected)
    def _selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._entries[event.option_index])


class ChatsApp(App[ChatEntry]):
    """Shows the chats before any model is loaded, and returns the one that was chosen."""

    TITLE = "dflash chat"
    CSS_PATH = "screens.tcss"
    BINDINGS = [Binding("ctrl+c,ctrl+q", "quit", "Quit", show=False, priority=True)]

    def __init__(self, folder: Path | None) -> None:
        super().__init__()
        self._folder = folder

    def on_mount(self) -> None:
        use_theme(self, settings.load())
        self.push_screen(ChatsScreen(self._folder), self.exit)
