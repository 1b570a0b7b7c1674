"""What the program itself writes into the user's settings file: single keys; all else in it stays, in its order."""

from __future__ import annotations

import json
import stat

from dflash_local.errors import SettingsError
from dflash_local.json_text import parse_json
from dflash_local.settings import SETTINGS_FILE, Settings
from dflash_local.store.atomic import FILE_MODE, write_atomic


def remember(user: Settings, **values: str) -> None:
    """Write settings into the user's file, for the next start.

    Raises:
        SettingsError: there is no home for the file, or it cannot be read or written.
    """
    if user.config_dir is None:
        raise SettingsError("there is no home folder to keep settings in", "set HOME or DFLASH_HOME")
    path = user.config_dir / SETTINGS_FILE
    try:
        path = path.resolve()  # one that is a link stays one
        content = parse_json(path.read_bytes()) if path.exists() else {}
        mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else FILE_MODE
        write_atomic(path, json.dumps({**content, **values}, indent=2, ensure_ascii=False) + "\n", mode)
    except OSError as error:
        wrong = f"{', '.join(values)} cannot be kept: {path}: {error.strerror or error}"
        raise SettingsError(wrong, "make it writable") from error
    except (ValueError, TypeError) as error:
        raise SettingsError(f"{path} is not JSON any more", "correct it or remove it") from error
