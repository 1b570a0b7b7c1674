"""``dflash serve`` over a model that knows one task by heart, for real coding agents: list the files, read one, change
it, say so. Each is a call of a tool that the client offers, cut into pieces as drafts are.

    python -m tests.clients.scripted_agent LOG serve demo [options]

LOG gets a line of JSON for each request: the roles of its messages, how many tools it has, what was answered, and
whether it begins as the last one with tools, so that its prefix is in the caches.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_local.app import loading
from dflash_local.catalog import bundled
from dflash_local.cli.main import main
from dflash_local.events import Channel, Event, Piece, Step
from dflash_local.load_config import LoadConfig
from dflash_local.request import Message, Request
from tests.service.scripted import ScriptedFacts, ScriptedSession

CONTEXT = 65_536
FILE, BEFORE, AFTER = "notes.txt", "colour: red", "colour: green"
TASK = f"List the files here, read {FILE}, change the colour in it to green, and say DONE."
CALLS = 3
DONE = f"{FILE} says green now. DONE"
BLOCK = f"{FILE}\n```\n<<<<<<< SEARCH\n{BEFORE}\n=======\n{AFTER}\n>>>>>>> REPLACE\n```\n"  # aider's
CUT = 7  # characters of a piece; three of them are a step
Arguments = Callable[[str], dict[str, Any]]  # of a command, or of a file's path

SHELLS: dict[str, Arguments] = {
    "Bash": lambda command: {"command": command, "description": "as asked"},
    "bash": lambda command: {"command": command, "description": "as asked"},
    "exec_command": lambda command: {"cmd": command},
}
READS: dict[str, Arguments] = {
    "Read": lambda path: {"file_path": path},
    "read": lambda path: {"filePath": path},
}
EDITS: dict[str, Arguments] = {
    "Edit": lambda path: {"file_path": path, "old_string": BEFORE, "new_string": AFTER},
    "edit": lambda path: {"filePath": path, "oldString": BEFORE, "newString": AFTER},
}


def next_call(offered: set[str], number: int) -> tuple[str, dict[str, Any]]:
    """The call with this number: by the client's tool for it, else by its shell."""
    path = str(Path.cwd() / FILE)
    command = ("ls", f"cat {FILE}", f"sed -i 's/{BEFORE}/{AFTER}/' {FILE}")[number]
    tools: dict[str, Arguments] = ({}, READS, EDITS)[number]
    for name, arguments in tools.items():
        if name in offered:
            return name, arguments(path)
    shell = next(name for name in SHELLS if name in offered)
    return shell, SHELLS[shell](command)


@dataclass(slots=True)
class AgentSession(ScriptedSession):
    """Answers with what the task needs next, by the results that the conversation holds."""

    facts: ScriptedFacts = field(default_factory=lambda: ScriptedFacts(load=LoadConfig(context=CONTEXT)))
    log: Path = Path(os.devnull)
    before: tuple[Message, ...] = ()  # the last request with tools

    def _events(self, request: Request, *more: Any) -> Iterator[Event]:
        thought, said = "The next step of it.\n" if request.thinking else "", self._said(request)
        pieces = [*_pieces(thought, "thinking"), *_pieces(said, "final")]
        self.steps = [
            Step(tuple(pieces[at : at + 3]), tuple(range(at, min(at + 3, len(pieces)))), 3, 2, 4, 0.001)
            for at in range(0, len(pieces), 3)
        ]
        roles = "".join(message.role[0] for message in request.messages)
        told = {"roles": roles, "tools": len(request.tools), "said": said}
        if request.tools:
            told["extends"] = request.messages[: len(self.before)] == self.before
            self.before = request.messages
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(told) + "\n")
        yield from ScriptedSession._events(self, request, *more)

    def _said(self, request: Request) -> str:
        asked = "\n".join(message.content for message in request.messages)
        if request.constraint is not None:
            return '{"title": "A colour"}'
        if TASK not in asked:
            return "A colour"
        if not request.tools:
            return BLOCK if "SEARCH/REPLACE" in asked else "A colour"
        number = sum(message.role == "tool" for message in request.messages)
        if number == CALLS:
            return DONE
        name, arguments = next_call({tool["function"]["name"] for tool in request.tools}, number)
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _pieces(text: str, channel: Channel) -> list[Piece]:
    return [Piece(text[at : at + CUT], channel) for at in range(0, len(text), CUT)]


def run(log: Path, words: list[str]) -> int:
    """The command, over a bundled pair whose files are there by name only."""
    loading.open_session = lambda *_: AgentSession(log=log)  # type: ignore[assignment, return-value]
    with tempfile.TemporaryDirectory() as folder:
        bundled.FOLDER = Path(folder)
        for part in ("target", "drafter"):
            (bundled.FOLDER / "demo" / part).mkdir(parents=True)
            (bundled.FOLDER / "demo" / part / "config.json").write_text("{}", encoding="utf-8")
        return main([*words, "--context", str(CONTEXT)])


if __name__ == "__main__":
    os.environ["DFLASH_IN_PROCESS"] = "1"
    sys.exit(run(Path(sys.argv[1]), sys.argv[2:]))
