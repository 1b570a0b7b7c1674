"""``dflash demo``: the toy pair on a built-in prompt, first without and then with its drafter.

A race in lines: both replies from the same loaded pair, every figure from their events.
"""

from __future__ import annotations

from typing import Annotated

import typer

from dflash_local import terminal
from dflash_local.app.examples import TOY, built_in_prompt
from dflash_local.app.reply_text import figures, histogram
from dflash_local.catalog.bundled import BUNDLED, find
from dflash_local.cli import options as opt
from dflash_local.cli.console import Console
from dflash_local.cli.invocation import Invocation
from dflash_local.cli.load_options import add_command
from dflash_local.cli.reply import ReplyPrinter, first_interrupt
from dflash_local.errors import UsageError
from dflash_local.events import Event, Finished, Mode, Step
from dflash_local.load_config import LoadConfig
from dflash_local.request import Limits, user_request
from dflash_local.service.race import Race, Racer

MAX_NEW_TOKENS = 256


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, "demo", demo)


def demo(
    pair_name: Annotated[str, typer.Argument(metavar="[PAIR]", help=f"One of: {', '.join(BUNDLED)}.")] = "demo",
    as_json: opt.Json = False,
    debug: opt.Debug = False,
    *,
    load: LoadConfig,
) -> None:
    """Watch a toy pair write the same text without and with its drafter."""
    call = Invocation.begin()
    console = call.console
    if pair_name not in BUNDLED:
        raise UsageError(f"{pair_name!r} is not a bundled pair", f"one of: {', '.join(BUNDLED)}")
    pair = find(pair_name)
    prompt = built_in_prompt()
    with call.start(pair, load) as service:
        racer = Racer(service, user_request(prompt, limits=Limits(MAX_NEW_TOKENS)))
        if not as_json:
            console.data(f"{pair.label}: {prompt}", "bold")
        race = run_in_lines(racer, None if as_json else Show(console))
    if as_json:
        console.json({"pair": pair.name, "note": TOY, "prompt": prompt, **race.as_dict()})
    else:
        conclude(console, race)


class MarkedPrinter:
    """Prints a reply with the target's own tokens in brackets, and in colour where there is any."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._filter = terminal.TerminalFilter()
        self._open, self._close = ("‹", "›") if console.can_show("‹›") else ("[", "]")
        self._line_end, self._space = ("↵", "␣") if console.can_show("↵␣") else ("\\n", " ")
        self._ends_line = True

    @property
    def legend(self) -> str:
        """What the marks mean."""
        return f"drafted and accepted, {self._open}chosen by the target itself{self._close}"

    def __call__(self, event: Event) -> None:
        if isinstance(event, Step):
            for piece in event.pieces:
                text = self._filter.feed(piece.text)
                if text and piece.origin == "bonus":
                    self._bonus(text)
                elif text:
                    self._put(text, "green")

    def finish(self) -> None:
        """Show what was held back and end the line."""
        self._put(self._filter.finish(), "")
        if not self._ends_line:
            self._console.raw("\n")

    def _bonus(self, text: str) -> None:
        """Brackets stand around the visible part, or a sign for what has none, so that a line end stays one."""
        core = text.strip()
        before, _, after = text.partition(core) if core else ("", "", text)
        if not core:
            core, after = (self._line_end, text) if "\n" in text else (self._space, text[1:])
        self._put(before, "")
        self._put(f"{self._open}{core}{self._close}", "yellow")
        self._put(after, "")

    def _put(self, text: str, style: str) -> None:
        if text:
            self._console.raw(text, style)
            self._ends_line = text.endswith("\n")


def run_in_lines(racer: Racer, show: Show | None) -> Race:
    """Run a race, printing its replies with ``show``; the first Ctrl-C ends it in order.

    Raises:
        Interrupted: Ctrl-C. DFlashError: a reply failed.
    """
    with first_interrupt(racer.cancel):
        try:
            return racer.run(show or (lambda _mode, _event: None))
        finally:
            if show is not None:
                show.finish()


class Show:
    """Prints both replies, each under its title and over its figures."""

    with_figures = True

    def __init__(self, console: Console) -> None:
        self.console = console
        self._mode: Mode | None = None
        self._printer: ReplyPrinter | MarkedPrinter | None = None

    def __call__(self, mode: Mode, event: Event) -> None:
        if mode != self._mode or self._printer is None:
            self.finish()
            self._mode, self._printer = mode, self.begin(mode)
        self._printer(event)
        if isinstance(event, Finished):
            self.finish()
            if self.with_figures:
                self.console.data(figures(event), "dim")

    def begin(self, mode: Mode) -> ReplyPrinter | MarkedPrinter:
        """The title, and what prints the reply."""
        self.console.data()
        if mode == "ar":
            self.console.data("without drafting, one token at a time (ar):", "bold")
            return ReplyPrinter(self.console)
        marks = MarkedPrinter(self.console)
        self.console.data(f"with the drafter (dflash); {marks.legend}:", "bold")
        return marks

    def finish(self) -> None:
        """End the line."""
        if self._printer is not None:
            self._printer.finish()
            self._printer = None


def conclude(console: Console, race: Race) -> None:
    """The histogram of the drafted reply and what came of both."""
    console.data()
    console.data("cycles by acceptance length (accepted drafts + 1):", "bold")
    for line in histogram(race.dflash.finished, "█" if console.can_show("█") else "#"):
        console.data(line)
    console.data()
    console.data(race.verdict)
    console.data(race.ratios)
    console.data(f"({TOY})")
