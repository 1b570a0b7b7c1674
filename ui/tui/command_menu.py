"""The commands that begin as what is typed, with what they do, above the field."""

from __future__ import annotations

from collections.abc import Mapping

from textual.content import Content
from textual.widgets import OptionList


class CommandMenu(OptionList):
    """Shows commands; the field keeps the focus and moves the choice."""

    can_focus = False

    def __init__(self) -> None:
        super().__init__(id="commands", markup=False)
        self._shown: list[str] = []

    def show(self, commands: Mapping[str, str], chosen: int) -> None:
        """Show these commands, usage and help of each; none hides the menu."""
        self.display = bool(commands)
        width = max(map(len, commands), default=0)
        lines = [f"{usage.ljust(width)}  {about}" for usage, about in commands.items()]
        if lines != self._shown:
            self._shown = lines
            self.clear_options()
            self.add_options([Content(line) for line in lines])
        if lines:
            self.highlighted = chosen
