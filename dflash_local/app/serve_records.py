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

STOP_S = 15.0  # the server itself gives replies a few seconds; then its memory is freed
CLOCK_S = 5.0  # by which the system's time of a start may be off
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


def stop_server(record: dict[str, Any]) -> None:
    """End the process that wrote a record, in order, and wait until it is gone; at once where that takes too long.

    Raises:
        UsageError: it is another user's.
    """
    import psutil

    try:
        process = psutil.Process(record["pid"])
        if process.create_time() > record["started"] + CLOCK_S:
            return  # it is gone, and its number is another program's
        for end in (process.terminate, process.kill):
            end()
            until = time.monotonic() + STOP_S
            while time.monotonic() < until:
                if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:  # its memory is free
                    return
                time.sleep(0.05)
    except psutil.NoSuchProcess:
        return
    except psutil.AccessDenied as error:
        raise UsageError(f"process {record['pid']} is another user's", "stop it as that user") from error


def _records(user: Settings) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The files of servers and what they hold; those that hold no address are left out."""
    from dflash_local.remote.endpoint import endpoint

    for path in user.cache_dir.glob(RECORDS) if user.cache_dir else ():
        with suppress(OSError, ValueError, UsageError):
            found = parse_json(path.read_text(encoding="utf-8"))
            if isinstance(found, dict) and isinstance(found.get("url"), str):
                endpoint(found["url"])
                yield path, found
