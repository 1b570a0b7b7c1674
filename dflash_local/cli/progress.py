"""How far a pull is: lines rewritten in place on a terminal, a plain line now and then elsewhere.

Knows repositories and bytes; what a pull does is the store's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from dflash_local import terminal
from dflash_local.cli.console import Console
from dflash_local.events import Notice, PullProgress
from dflash_local.tables import amount, cut
from dflash_local.ui.downloads import DownloadProgress

UP, CLEAR_LINE, CLEAR_BELOW = "\x1b[{}A", "\x1b[K", "\x1b[J"
REDRAW_S = 0.1
PLAIN_S = 10.0
BAR = 20
TOTAL = "total"


class Board:
    """Writes lines at the bottom of a terminal's stderr again in place.

    Only for a live terminal. No mode of the terminal is changed, so there is nothing to restore:
    whenever the program ends, the cursor stands below the last line.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown = 0

    def show(self, lines: Sequence[str]) -> None:
        """Replace what was shown; a line too long for the terminal is cut, since a wrapped one cannot be undone."""
        width = max(10, self._console.note_columns - 1)
        safe = [cut(terminal.safe_line(line), width, "") for line in lines]
        self._console.raw_note(self._back() + "".join(f"{line}{CLEAR_LINE}\n" for line in safe) + CLEAR_BELOW)
        self._shown = len(safe)

    def hide(self) -> None:
        """Clear it away for notes in its place; the next ``show`` draws it below them."""
        self._console.raw_note(self._back() + CLEAR_BELOW)
        self._shown = 0

    def _back(self) -> str:
        return f"{UP.format(self._shown)}\r" if self._shown else ""


class PullLines:
    """Shows a pull's events, ``repos`` (bytes in all by name) in their order; may be called from any thread."""

    def __init__(self, console: Console, repos: Mapping[str, int], clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._download = DownloadProgress(clock, repos)
        self._finished = {repo for repo, total in repos.items() if not total}
        self._board = Board(console) if console.live else None
        self._bar = ("█", "░") if console.can_show("█░") else ("#", ".")
        self._lock = threading.Lock()
        self._last = clock()

    def __call__(self, event: PullProgress | Notice) -> None:
        with self._lock:
            if isinstance(event, Notice):
                self._notice(event)
                return
            now = self._clock()
            self._download.take(event)
            ended = event.done >= event.total and event.repo not in self._finished
            if ended:
                self._finished.add(event.repo)
            if self._board is not None:
                if ended or now - self._last >= REDRAW_S:
                    self._last = now
                    self._board.show(self.lines())
            elif ended:
                self._console.note(f"{event.repo}: {amount(event.total)}, all here")
            elif now - self._last >= PLAIN_S:
                self._last = now
                self._console.note(self._plain(event))

    def finish(self) -> None:
        """Draw the last state; it stays on the screen."""
        with self._lock:
            if self._board is not None:
                self._board.show(self.lines())

    def lines(self) -> list[str]:
        """Write one line for each repository and, for more than one, the total."""
        whole = self._download
        width = max(len(name) for name in (*whole.repos, TOTAL))
        rows = [self._row(event.repo, event.done, event.total, width) for event in whole.repos.values()]
        pace = self._pace()
        if len(rows) == 1:
            return [f"{rows[0]}  {pace}".rstrip()]
        return [*rows, f"{self._row(TOTAL, whole.done, whole.total, width)}  {pace}".rstrip()]

    def _row(self, name: str, done: int, total: int, width: int) -> str:
        share = min(1.0, done / total) if total else 1.0
        figures = f"{int(share * 100):3d}%  {amount(done):>10} of {amount(total):>10}"
        room = self._console.note_columns - width - len(figures) - 34  # what speed and ETA take
        full, empty = self._bar
        size = min(BAR, room)
        bar = f"{full * int(share * size)}{empty * (size - int(share * size))}  " if size >= 8 else ""
        return f"{name:<{width}}  {bar}{figures}"

    def _pace(self) -> str:
        rate, left, verified = self._download.bytes_per_s, self._download.left_s, self._download.verified
        if rate is None or not left:
            return ""
        more = f"  {amount(verified)} verified" if verified else ""
        return f"{amount(rate)}/s  {terminal.duration(left)} left{more}"

    def _plain(self, event: PullProgress) -> str:
        whole = self._download
        share = int(100 * whole.done / whole.total) if whole.total else 100
        pace = self._pace().replace("  ", ", ")
        text = f"{event.repo}: {amount(event.done)} of {amount(event.total)}; in all {share}%"
        return f"{text}, {pace}" if pace else text

    def _notice(self, event: Notice) -> None:
        if self._board is None:
            self._console.notify(event)
        else:
            self._board.hide()
            self._console.notify(event)
            self._board.show(self.lines())
