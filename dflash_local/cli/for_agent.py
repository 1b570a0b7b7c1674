"""``serve --for``: says what a coding agent must be told, writes it into a file of its own, or runs the agent."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from dflash_local import child_process
from dflash_local.app.agents import AGENTS, TOKEN_VARIABLE, Agent, Served
from dflash_local.cli.console import OutputClosed
from dflash_local.cli.invocation import Invocation
from dflash_local.errors import UsageError
from dflash_local.events import LoadProgress, Notice
from dflash_local.store.atomic import write_atomic

AgentChoice = Enum("AgentChoice", [(each, each) for each in AGENTS])  # type: ignore[misc]
LEAVE_S = 5.0  # for an agent that is told to end


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """Of ``dflash serve``; ``load_options.add_command`` makes an option of each field."""

    client: Annotated[
        AgentChoice | None,
        typer.Option("--for", help="Print the settings of a coding agent."),
    ] = None
    write: Annotated[
        bool,
        typer.Option("--write", help="Write them into a file of its own, read beside yours."),
    ] = False
    run: Annotated[
        bool,
        typer.Option("--run", help="Start it here once the model is loaded; end with it."),
    ] = False

    def agent(self, call: Invocation) -> ForAgent | None:
        """Return what is to be done for an agent; None for nothing.

        Raises:
            UsageError: options without ``--for``, both of them, an agent that is not installed, or no home for a file.
        """
        if self.client is None:
            if self.write or self.run:
                raise UsageError(
                    f"--{'write' if self.write else 'run'} of which agent?", f"--for {' or '.join(AGENTS)}"
                )
            return None
        agent = AGENTS[self.client.value]
        if self.write and self.run:
            raise UsageError("--run needs no file, and --write starts nothing", "leave one of them out")
        if self.run and child_process.find_program(agent.program) is None:
            raise UsageError(f"{agent.title} is not installed: there is no {agent.program} on PATH", agent.install)
        home = call.user.home
        if home is None:
            raise UsageError("no home folder is known, where the agent's file would be", "set HOME")
        return ForAgent(call, agent, agent.file(call.user.environ, home), self.write, self.run)


@dataclass(slots=True)
class ForAgent:
    """An agent, and what is done for it once the model is loaded.

    Attributes:
        file: of its settings. code: the agent's exit status, once it has ended.
    """

    call: Invocation
    agent: Agent
    file: Path
    writes: bool
    runs: bool
    code: int = 0
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def running(self) -> bool:
        """True while the agent has the terminal: nothing else may write there, and Ctrl-C is its own."""
        return self._process is not None and self._process.poll() is None

    def note(self, line: str) -> None:
        """Say a line, but for while the agent has the terminal."""
        if not self.running:
            self.call.console.note(line)

    def notify(self, event: Notice | LoadProgress) -> None:
        """As ``note``."""
        if not self.running:
            self.call.console.notify(event)

    def ready(self, served: Served) -> bool:
        """Do what was asked for; True when the agent ran, to its end.

        Raises:
            UsageError: its file cannot be written, or it cannot be started.
        """
        text = self.agent.text(served)
        if self.runs:
            self._run(served, text)
        elif self.writes:
            self._write(text)
            self.call.console.note(f"start {self.agent.title} with: {self.agent.start(self.file, served)}")
        else:
            with suppress(OutputClosed):  # the server goes on where nobody reads this
                self.call.console.data_text(text, end="")
            start = self.agent.start(self.file, served)
            self.call.console.note(f"with this in {self.file} (--write puts it there): {start}")
        return self.runs

    def close(self) -> None:
        """End an agent that still runs."""
        if self._process is not None and self.running:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(LEAVE_S)

    def _write(self, text: str) -> None:
        """Write the file; what another one held there stays beside it."""
        old = self.file.with_name(f"{self.file.name}.old")
        try:
            there = self.file.read_bytes() if self.file.exists() else None
            if there is not None and there != text.encode():
                write_atomic(old, there)
                self.call.console.note(f"what {self.file} held is in {old.name} now", "dim")
            write_atomic(self.file, text)
        except OSError as error:
            raise UsageError(f"{self.file} cannot be written: {error.strerror}", "leave out --write") from error
        self.call.console.note(f"wrote {self.file}")

    def _run(self, served: Served, text: str) -> None:
        """Start the agent in the user's folder, on this terminal, and wait for its end."""
        arguments, variables = self.agent.launch(served, text)
        token = {TOKEN_VARIABLE: served.token} if served.token else {}
        try:
            self._process = child_process.start(
                [self.agent.program, *arguments],
                granted={**variables, **token},
                folder=child_process.USERS_FOLDER,  # where it is to work
            )
        except OSError as error:
            raise UsageError(f"{self.agent.program} cannot be started: {error.strerror}", self.agent.install) from error
        code = self._process.wait()
        self.code = code if code >= 0 or sys.platform == "win32" else 128 - code  # as shells tell of a signal
