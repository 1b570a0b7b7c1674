"""The ways to load a pair, over the chat: a verdict of one, a row for each; what is chosen is downloaded first."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static

from dflash_local.app.chat_session import ChatSession
from dflash_local.app.load_choices import LoadChoice, LoadChoices
from dflash_local.errors import DFlashError
from dflash_local.load_config import FUSED
from dflash_local.tables import gib, natural_width, table, tokens
from dflash_local.terminal import safe_line
from dflash_local.ui.choice_text import COLUMNS, NO_DRAFTER, basis, choice_row
from dflash_local.ui.job import Job
from dflash_local.ui.tui.dialogs import PullScreen, begin_with
from dflash_local.ui.verdict_text import verdict_on_way

PULSE_S = 0.05
R = TypeVar("R")
WIDEST = 116  # columns of the dialog
AROUND = 8  # of them beside a row: borders, paddings and the bars that scroll
TINY = 20  # rows of the screen; fewer have no room for the lines of the verdict and what speeds rest on
SPARE = ("Memory", "Plain")
SHORTER = {
    ", rounded at load": " at load",
    ", 8-bit KV": ", KV 8",
    "does not fit": "no",
    "reference (slow)": "slow",
}


class LoadScreen(ModalScreen[LoadChoice | None]):
    """Is dismissed with the way that was chosen; all it needs is here then."""

    VERTICAL_BREAKPOINTS = [(0, "-short"), (32, "-tall")]
    BINDINGS = [
        Binding("d", "drafter", "Drafter"),
        Binding("c", "context", "Context"),
        Binding("m", "remember", "Begin with it"),
        Binding("escape,q", "dismiss", "Close"),
    ]

    def __init__(self, session: ChatSession, choices: LoadChoices) -> None:
        super().__init__()
        self._session, self._choices = session, choices
        self._contexts: tuple[int, ...] = choices.contexts
        self._busy = False
        self._word = ""  # in the place of a remark
        self._verdicts: dict[int, tuple[str, list[str]]] = {}

    def compose(self) -> ComposeResult:
        with Vertical(id="load", classes="sheet"):
            yield Static("", id="pair", markup=False)
            yield Static("", id="columns", classes="heading apart", markup=False)
            yield OptionList(markup=False)
            yield Static("", id="remark", classes="apart", markup=False)
            yield Static("", id="basis", markup=False)
            yield Static("", id="keys", classes="heading apart", markup=False)

    def on_mount(self) -> None:
        self._fill(self._choices.preselected)
        self.query_one(OptionList).focus()

    def on_resize(self) -> None:
        """Drop and cut columns as the width has it."""
        self._fill(self._list.highlighted)

    @property
    def _list(self) -> OptionList:
        return self.query_one(OptionList)

    @property
    def _highlighted(self) -> LoadChoice | None:
        at = self._list.highlighted
        return None if at is None else self._choices.choices[at]

    # planning

    def action_drafter(self) -> None:
        if self._choices.has_drafter:
            self._start(self._plan(self._choices.asked.context, not self._choices.asked.draft))

    def action_context(self) -> None:
        """Take the next of: as much context as fits, and the lengths that are offered."""
        offered = (None, *self._contexts)
        asked = self._choices.asked.context
        at = offered.index(asked) if asked in offered else -1
        self._start(self._plan(offered[(at + 1) % len(offered)], self._choices.asked.draft))

    def action_remember(self) -> None:
        """Let commands that are given no MODEL take this one; how it is loaded is chosen at each start."""
        if (choice := self._highlighted) is not None and choice.fits and not self._busy:
            self._word = begin_with(choice.model, self._session.user)
            self._show()

    async def _plan(self, context: int | None, draft: bool) -> None:
        name = self._choices.name
        choices = await self._do("planning", lambda: self._session.load_choices(name, context, draft))
        if choices is None:
            return
        before, moved = self._highlighted, self._list.highlighted != self._choices.preselected
        self._choices = choices
        if choices.asked.context is None:
            self._contexts = choices.contexts
        same = [at for at, each in enumerate(choices.choices) if before is not None and _key(each) == _key(before)]
        self._fill(same[0] if same and moved else choices.preselected)

    def _start(self, course: Coroutine[Any, Any, None]) -> None:
        """Do what takes a while, one thing at a time."""
        if self._busy:
            course.close()
        else:
            self._busy = True
            self.run_worker(self._run(course))

    async def _run(self, course: Coroutine[Any, Any, None]) -> None:
        try:
            await course
        except DFlashError as error:
            self._word = f"error: {error}"
        self._busy = False
        self._show()

    async def _do(self, word: str, work: Callable[[], R]) -> R:
        self._word = word
        self._show()
        job = Job(work)
        async for _ in job.pulses(PULSE_S):
            pass
        self._word = ""
        return job.result

    # choosing

    def on_option_list_option_highlighted(self) -> None:
        if not self._busy:
            self._word = ""
        self._show()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Load it, downloading first what is missing."""
        choice = self._choices.choices[event.option_index]
        if self._busy:
            return
        if not choice.fits:
            self._word = f"cannot be loaded: {_remark(choice)}"
            self._show()
        elif choice.here:
            self.dismiss(choice)
        else:
            self._start(self._pull(choice))

    async def _pull(self, choice: LoadChoice) -> None:
        before = await self._do("looking at the disk", lambda: self._session.before_download(choice.model))
        question, draft = f"It takes {gib(choice.download_gib, choice.computed)} of disk.", choice.config.draft
        screen = PullScreen(self._session, choice.model, question, before, draft=draft, leave=True)
        pulled = await self.app.push_screen_wait(screen)
        if pulled.here:
            self.dismiss(choice)
        else:  # some of it may be here now
            await self._plan(self._choices.asked.context, self._choices.asked.draft)

    # drawing

    def _fill(self, highlighted: int | None) -> None:
        self._verdicts = {}
        head, *lines = _lines(self._choices, self._width)
        self.query_one("#columns", Static).update(Content(head))
        shown = self._list
        shown.clear_options()
        for choice, line in zip(self._choices.choices, lines, strict=True):
            shown.add_option(Content.styled(line, "" if choice.fits else "$text-muted"))
        shown.highlighted = 0 if highlighted is None else highlighted
        self._show()

    @property
    def _width(self) -> int:
        return min(self.size.width, WIDEST) - AROUND

    def _verdict(self, at: int) -> Content:
        """Say what a way comes to; worked out once, it takes a twentieth of a second."""
        if at not in self._verdicts:
            self._verdicts[at] = verdict_on_way(self._choices, self._choices.choices[at], self._width)
        head, lines = self._verdicts[at]
        shown = lines if self.size.height >= TINY else []
        return Content.assemble((safe_line(head), "bold"), *(f"\n{safe_line(line)}" for line in shown))

    def _show(self) -> None:
        choice = self._highlighted
        if self._list.highlighted is not None:
            self.query_one("#pair", Static).update(self._verdict(self._list.highlighted))
        for name, text in (
            ("remark", self._word or ("" if choice is None else _remark(choice))),
            ("basis", basis(self._choices) if self.size.height >= TINY else ""),
            ("keys", self._keys(choice)),
        ):
            place = self.query_one(f"#{name}", Static)
            place.update(Content(safe_line(text)))
            place.display = bool(text) or name == "remark"

    def _keys(self, choice: LoadChoice | None) -> str:
        """Say what the keys do, and how what they change stands."""
        asked = self._choices.asked
        keys = ["Enter loads" if choice.here else "Enter downloads and loads"] if choice and choice.fits else []
        if self._choices.has_drafter:
            keys.append(f"d: drafter {'on' if asked.draft else 'off'}")
        if self._contexts or asked.context is not None:
            keys.append(f"c: context {tokens(asked.context) if asked.context else 'max'}")
        if choice and choice.fits:
            keys.append("m: begin with it")
        return " · ".join([*keys, "Esc closes"])


def _key(choice: LoadChoice) -> tuple[str, str | None, str]:
    return choice.model, choice.config.quantize, choice.config.kv_cache


def _remark(choice: LoadChoice) -> str:
    remark = choice_row(choice).remark
    return f"{choice.model}: {remark}" if choice.fits else remark


def _lines(choices: LoadChoices, width: int) -> list[str]:
    """Write head and lines; too wide, first what is the same for all goes, then words become fewer, then ``SPARE``."""
    rows = [choice_row(each).cells for each in choices.choices]
    idle = {"-", NO_DRAFTER}
    for step in range(4):
        spare = SPARE if step == 3 else ()
        kept = [at for at, cells in enumerate(zip(*rows)) if not set(cells) <= idle and COLUMNS[at].title not in spare]
        columns, cells = [COLUMNS[at] for at in kept], [[row[at] for at in kept] for row in rows]
        if natural_width(columns, cells) <= width:
            break
        idle = {*idle, FUSED}
        if step == 1:
            rows = [tuple(map(_shorter, row)) for row in rows]
    return table(columns, cells, width)


def _shorter(cell: str) -> str:
    for words, fewer in SHORTER.items():
        cell = cell.replace(words, fewer)
    return cell
