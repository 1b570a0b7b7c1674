"""Whether a ``dflash serve`` on this machine has the wanted pair already, so that a command need not load it again."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from dflash_local.catalog.bundled import Pair
from dflash_local.cli.console import Console
from dflash_local.settings import Settings

if TYPE_CHECKING:
    from dflash_local.cli.session import LoadWish
    from dflash_local.remote.attached import AttachedSession

RECORD = "serve.json"  # in the cache folder; written by ``dflash serve``


def attached(pair: Pair, wish: LoadWish, console: Console, own_url: str = "") -> AttachedSession | None:
    """The session of a running server that keeps this pair as it is wished; None when there is none.

    A server of another model is left alone: switching it would take it from others.

    Args:
        own_url: of the server that asks, which must not attach to itself.

    Raises:
        DFlashError: the server has the pair and cannot load it.
    """
    user = wish.user
    record = running_server(user) if user is not None and user.attach else None
    if user is None or record is None or record["url"] == own_url:
        return None
    from dflash_local.remote import attached as remote

    server = remote.Server(str(record["url"]), user.environ.get("DFLASH_TOKEN") if record.get("token") else None)
    status = server.status() if remote.is_listening(server.url) else None
    if status is None or not _is_ours(pair, wish, status):
        return None
    session = remote.attach(server, str(status["model"]))
    if not _is_as_wished(pair, wish, session.facts):
        return None
    console.note(f"using the pair that dflash serve keeps loaded at {server.url} (process {status.get('pid')})", "dim")
    return session


def running_server(user: Settings) -> dict[str, Any] | None:
    """What the server wrote down when it started; it may be gone since."""
    try:
        found = json.loads((user.cache_dir / RECORD).read_text(encoding="utf-8")) if user.cache_dir else None
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("url"), str) else None


def _is_ours(pair: Pair, wish: LoadWish, status: dict[str, Any]) -> bool:
    """The same name, and nothing known that speaks against it."""
    names = {str(name).casefold() for name in (status["model"], *status.get("aliases", ()))}
    if pair.name.casefold() not in names or status["state"] in ("broken", "stopping"):
        return False
    facts = status.get("facts")
    return not isinstance(facts, dict) or _is_as_wished(pair, wish, _Loaded(facts))


class _Loaded:
    """The facts of a status by name."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self._facts = facts

    def __getattr__(self, name: str) -> Any:
        return self._facts.get(name)


def _is_as_wished(pair: Pair, wish: LoadWish, facts: Any) -> bool:
    """True when loading here would bring the same: the same folders, and every option that was given."""
    target = pair.name if pair.bundled else str(pair.target)
    drafter = f"{pair.name} (bundled)" if pair.bundled else str(pair.drafter)
    same = facts.target == target and (not wish.draft or facts.drafter == drafter)
    format_ = wish.quantize or (None if wish.dtype == "auto" else wish.dtype)
    return (
        same
        and not wish.allow_mismatch
        and wish.draft_window is None
        and wish.draft_side == "auto"
        and wish.kv_cache in ("auto", facts.kv_cache)
        and (not wish.exact or bool(facts.exact))
        and format_ in (None, facts.dtype)
        and wish.device in ("auto", facts.device)
        and wish.engine in ("auto", facts.engine)
        and (wish.context is None or wish.context == facts.context)
    )
