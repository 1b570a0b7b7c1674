"""Prompts to begin with, shown in an empty conversation; a click puts one into the field."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import Static

from dflash_local.terminal import safe_line

HEADING = "Try one of these: Tab or a click puts it into the field."


class Example(Static):
    """One of them."""

    class Chosen(Message):
        """The user wants this prompt."""

        def __init__(self, prompt: str) -> None:
            super().__init__()
            self.prompt = prompt

    def __init__(self, prompt: str) -> None:
        super().__init__(Content(f"› {safe_line(prompt)}"), classes="example")
        self._prompt = prompt

    def on_click(self) -> None:
        """Chosen."""
        self.post_message(self.Chosen(self._prompt))


class Examples(Vertical):
    """All of them under their heading."""

    def __init__(self, prompts: Sequence[str]) -> None:
        super().__init__(classes="examples")
        self._prompts = prompts

    def compose(self) -> ComposeResult:
        yield Static(HEADING, markup=False)
        for prompt in self._prompts:
            yield Example(prompt)
