"""Each ``dflash serve`` that runs on this machine: what it wrote down, and its pair in place of one loaded here."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_local.app.notices import Notify
from dflash_local.catalog.bundled import Pair
from dflash_local.errors import UsageError
from dflash_local.events import Notice
from dflash_local.json_text import parse_json
from dflash_local.settings import Settings

if TYPE_CHECKING:
    from dflash_local.load_config import LoadConfig
    from dflash_local.loaded import SessionFacts
    from dflash_local.remote.attached import AttachedSession

RECORDS = "serve-*.json"  # in the cache folder, one of each running ``dflash serve``


def attached(pair: Pair, load: LoadConfig, user: Settings, notify: Notify, own_url: str = "") -> AttachedSession | None:
    """The session of the first running server that keeps this pair as it is to be loaded; None when there is none.

    A server of another model is left alone: switching it would take it from others. One that has the pair loaded with
    other options than those given is left alone, too, and the user is told; so is one that passes on the replies of a
    server of another program.

    Args:
        own_url: of the server that asks.

    Raises:
        DFlashError: the server has the pair and cannot load it.
    """
    for record in running_servers(user) if user.attach else ():
        if record["url"] == own_url:
            break  # two servers that attach to each other would wait for each other: only to an earlier one
        if not record.get("replies_from"):
            session = _session(pair, load, record, user, notify)
            if session is not None:
                return session
    return None


def running_servers(user: Settings) -> tuple[dict[str, Any], ...]:
    """What servers wrote down when they started, in that order; some may be gone since."""
    return tuple(sorted((record for _, record in _records(user)), key=lambda record: str(record.get("started"))))


@contextmanager
def recorded(user: Settings, url: str, model: str, **more: Any) -> Iterator[None]:
    """Within, a file in the cache folder tells other commands of this server.

    Args:
        more: of the address; ``replies_from``: the server of another program whose replies it passes on.
    """
    from dflash_local.remote.attached import is_listening
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


def _session(
    pair: Pair, load: LoadConfig, record: dict[str, Any], user: Settings, notify: Notify
) -> AttachedSession | None:
    """That of one server."""
    from dflash_local.remote import attached as remote

    server = remote.Server(record["url"], user.environ.get("DFLASH_TOKEN") if record.get("token") else None)
    status = server.status() if remote.is_listening(server.url) else None
    if status is None or not _has(pair, status):
        return None
    facts = remote.facts_of(status)
    if facts is not None and not _is_usable(pair, load, facts, server.url, notify):
        return None
    session = remote.attach(server, str(status["model"]))
    if facts is None and not _is_usable(pair, load, session.facts, server.url, notify):
        return None
    process = f"{server.url} (process {status.get('pid')})"
    notify(Notice(f"using the pair that dflash serve keeps loaded at {process}: {session.facts.loaded_as}"))
    return session


def _has(pair: Pair, status: dict[str, Any]) -> bool:
    names = {str(name).casefold() for name in (status["model"], *status.get("aliases", ()))}
    return pair.name.casefold() in names and status["state"] not in ("broken", "stopping")


def _is_usable(pair: Pair, load: LoadConfig, facts: SessionFacts, url: str, notify: Notify) -> bool:
    """True when loading here would bring the same: the same folders, and every option that was given."""
    if facts.target != pair.target_label or (load.draft and facts.drafter != pair.drafter_label):
        return False
    unlike = load.unlike(facts.load)
    if unlike:
        there = f"{pair.name} loaded without {' '.join(unlike)} ({facts.loaded_as})"
        notify(Notice(f"dflash serve at {url} has {there}: it is loaded here once more"))
    return not unlike
