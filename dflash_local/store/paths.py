"""Which folder of the user's holds what. Creates nothing."""

from __future__ import annotations

import re
from pathlib import Path

from dflash_local.errors import UsageError
from dflash_local.settings import Settings

CHAT_SUFFIX = ".jsonl"
KERNEL_RECORD = "kernels-{}.json"
MEASURED = "measured"  # of the cache folder: the last report of each kind of measurement
CHECKS = "checks"  # of the cache folder: what checks of pairs found, a file each
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def chats_folder(settings: Settings) -> Path | None:
    """Return where conversations are kept; None when there is no home folder."""
    return settings.data_dir / "chats" if settings.data_dir else None


def cubins_folder(settings: Settings) -> Path | None:
    """Return where compiled kernels are kept, with what is known of them; None when there is no home folder."""
    return settings.cache_dir / "cubins" if settings.cache_dir else None


def speeds_folder(settings: Settings) -> Path | None:
    """Return where measured times of steps and cycles are kept; None when there is no home folder."""
    return settings.cache_dir / "speeds" if settings.cache_dir else None


def sequences_folder(settings: Settings) -> Path | None:
    """Return where conversations' states are kept; None when there is no home folder."""
    return settings.cache_dir / "sequences" if settings.cache_dir else None


def packages_folder(settings: Settings) -> Path | None:
    """Return where files of packages of the Python registry are kept; None when there is no home folder."""
    return settings.cache_dir / "packages" if settings.cache_dir else None


def loads_folder(settings: Settings) -> Path | None:
    """Return where loads that ended the program are remembered; None when there is no home folder."""
    return settings.data_dir / "loads" if settings.data_dir else None


def adaptations_folder(settings: Settings) -> Path | None:
    """Return where adaptations of drafters are kept; None when there is no home folder."""
    return settings.data_dir / "adaptations" if settings.data_dir else None


def adapting_folder(settings: Settings) -> Path | None:
    """Return where a drafter's training keeps what it goes on with; None when there is no home folder."""
    return settings.cache_dir / "adapting" if settings.cache_dir else None


def chat_path(folder: Path, name: str) -> Path:
    """Return the file of a chat. UsageError for a name of anything but letters, digits, dot, dash and underscore."""
    stem = name[: -len(CHAT_SUFFIX)] if name.endswith(CHAT_SUFFIX) else name
    if not is_chat_name(stem):
        allowed = "use up to 64 letters, digits, dots, dashes and underscores"
        raise UsageError(f"{name!r} cannot be the name of a chat", allowed)
    return folder / f"{stem}{CHAT_SUFFIX}"


def is_chat_name(stem: str) -> bool:
    return _NAME.fullmatch(stem) is not None
