"""The ``dflash serve`` that runs on this machine: what it wrote down, and its pair in place of one loaded here."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from dflash_local.app.notices import Notify
from dflash_local.catalog.bundled import Pair
from dflash_local.events import Notice
from dflash_local.settings import Settings

if TYPE_CHECKING:
    from dflash_local.load_config import LoadConfig
    from dflash_local.loaded import SessionFacts
    from dflash_local.remote.attached import AttachedSession

RECORD = "serve.json"  # in the cache folder; written by ``dflash serve``


def attached(pair: Pair, load: LoadConfig, user: Settings, notify: Notify, own_url: str = "") -> AttachedSession | None:
    """The session of a running server that keeps this pair as it is to be loaded; None when there is none.

    A server of another model is left alone: switching it would take it from others. One that has the pair loaded with
    other options than those given is left alone, too, and the user is told; so is one that passes on the replies of a
    server of another program.

    Args:
        own_url: of the server that asks, which must not attach to itself.

    Raises:
        DFlashError: the server has the pair and cannot load it.
    """
    record = running_server(user) if user.attach else None
    if record is None or record["url"] == own_url or record.get("replies_from"):
        return None
    from dflash_local.remote import attached as remote

    server = remote.Server(str(record["url"]), user.environ.get("DFLASH_TOKEN") if record.get("token") else None)
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


def running_server(user: Settings) -> dict[str, Any] | None:
    """What the server wrote down when it started; it may be gone since."""
    try:
        found = json.loads((user.cache_dir / RECORD).read_text(encoding="utf-8")) if user.cache_dir else None
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("url"), str) else None


@contextmanager
def recorded(user: Settings, url: str, model: str, **more: Any) -> Iterator[None]:
    """Within, ``serve.json`` in the cache folder tells other commands of this process.

    Args:
        more: of the address; ``replies_from``: the server of another program whose replies it passes on.
    """
    from dflash_local.remote.attached import is_listening
    from dflash_local.store.kept import keep

    if user.cache_dir is None:
        yield
        return
    path = user.cache_dir / RECORD
    other = running_server(user)
    if other is not None and other["url"] != url and _stays(other, model, more) and is_listening(other["url"]):
        yield  # who wants this model, or one that is loaded here, finds it there
        return
    record = {"pid": os.getpid(), "url": url, "model": model, "started": time.time(), **more}
    keep(path, json.dumps(record, indent=2) + "\n")
    try:
        yield
    finally:
        with suppress(OSError, ValueError):
            if json.loads(path.read_text(encoding="utf-8")).get("pid") == os.getpid():
                path.unlink()


def _stays(other: dict[str, Any], model: str, more: dict[str, Any]) -> bool:
    """Whether another server's record is of more use: a pair that is loaded here can be attached to."""
    if other.get("replies_from"):
        return bool(more.get("replies_from")) and other.get("model") == model
    return bool(more.get("replies_from")) or other.get("model") == model


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
