"""Each ``dflash serve`` or ``dflash web`` that runs on this machine, by what it wrote down."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dflash_local.errors import UsageError
from dflash_local.json_text import parse_json
from dflash_local.settings import Settings

RECORDS = "serve-*.json"  # in the cache folder, one of each running ``dflash serve``


def running_servers(user: Settings) -> tuple[dict[str, Any], ...]:
    """What servers wrote down when they started, in that order; some may be gone since."""
    return tuple(sorted((record for _, record in _records(user)), key=lambda record: str(record.get("started"))))


@contextmanager
def recorded(user: Settings, url: str, model: str, **more: Any) -> Iterator[None]:
    """Within, a file in the cache folder tells other commands of this server.

    Args:
        more: of the address; ``replies_from``: the server of another program whose replies it passes on.
    """
    from dflash_local.remote.serve_status import is_listening
    from dflash_local.store.kept import keep

    if user.cache_dir is None:
        yield
        return
    for old, record in _records(user):
        if not is_listening(record["url"]):  # of a server that was killed
            old.unlink(missing_ok=True)
    path = user.cache_dir / RECORDS.replace("*", f"{os.getpid()}-{secrets.token_hex(4)}")
    keep(path, json.dumps({"pid": os.getpid(), "url": url, "model": model, "started": time.time(), **more}) + "\n")
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()


def _records(user: Settings) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The files of servers and what they hold; those that hold no address are left out."""
    from dflash_local.remote.endpoint import endpoint

    for path in user.cache_dir.glob(RECORDS) if user.cache_dir else ():
        with suppress(OSError, ValueError, UsageError):
            found = parse_json(path.read_text(encoding="utf-8"))
            if isinstance(found, dict) and isinstance(found.get("url"), str):
                endpoint(found["url"])
                yield path, found
