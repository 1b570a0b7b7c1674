"""To whom the application says what it found and how far it is."""

from __future__ import annotations

from collections.abc import Callable

from dflash_local.events import LoadProgress, Notice

Notify = Callable[[Notice | LoadProgress], None]


def progress_of(notify: Notify) -> Callable[[str, float], None]:
    """Say how far something other than a load is."""
    return lambda text, part: notify(LoadProgress(text, part))
