"""Prompts to begin with, shown in an empty conversation; Tab or a click puts one into the field."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from dflash_local.terminal import safe_line
from dflash_local.ui.tui.widgets.composer import Composer

HEADING = "Try one of these: Tab or a click puts it into the field."


class Example(Static):
    def __init__(self, prompt: str) -> None:
        super().__init__(Content(f"› {safe_line(prompt)}"), classes="example")
        self._prompt = prompt

    def on_click(self) -> None:
        composer = self.screen.query_one(Composer)
        composer.put(self._prompt)
        composer.focus()


class Examples(Vertical):
    """All of them under their heading; as long as they are shown, the field offers them to Tab."""

    def __init__(self, prompts: Sequence[str]) -> None:
        super().__init__(classes="examples")
        self._prompts = prompts

    def compose(self) -> ComposeResult:
        yield Static(HEADING, markup=False)
        for prompt in self._prompts:
            yield Example(prompt)

    def on_mount(self) -> None:
        self.screen.query_one(Composer).examples = self._prompts

    def on_unmount(self) -> None:
        for composer in self.screen.query(Composer):  # none where the program ends
            composer.examples = ()
