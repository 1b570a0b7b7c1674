"""``dflash adapt`` that ends itself with SIGKILL at a moment: ``python -m tests.adapt.killed LOG MOMENT COUNT WORDS``.

A moment is the beginning of what a user is told, or ``replace`` with the name of a file that is about to come into its
place; the log says what came before it. Time is counted in looks at the clock, so that each moment comes.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_local.app import measurements
from dflash_local.cli.main import main
from tests.adapt.drifted import make_short


class Watch:
    """Writes down what happens and kills the process at a count of one moment."""

    def __init__(self, log: Path, moment: str, count: int) -> None:
        self._log, self._moment, self._left = log, moment, count
        self._replace = os.replace

    def saw(self, event: str) -> None:
        with self._log.open("a", encoding="utf-8") as file:
            file.write(f"{event}\n")
        self._left -= event.startswith(self._moment)
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def replace(self, source: Any, target: Any) -> None:
        self.saw(f"replace {Path(target).name}")
        self._replace(source, target)

    def progress_of(self, notify: object) -> Callable[[str, float], None]:
        return lambda text, _: self.saw(text)


if __name__ == "__main__":
    log, moment, count, *words = sys.argv[1:]
    watch = Watch(Path(log), moment, int(count))
    patch = pytest.MonkeyPatch()
    make_short(patch)
    patch.setattr(os, "replace", watch.replace)
    patch.setattr(measurements, "progress_of", watch.progress_of)
    sys.exit(main(words))
