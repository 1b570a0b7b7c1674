"""What a ``dflash serve`` or ``dflash web`` on this machine says of itself."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from dflash_local.errors import DFlashError, UsageError
from dflash_local.loaded import SessionFacts
from dflash_local.remote.endpoint import ServerEndpoint, read_object, within

ANSWER_S = 5.0
CONNECT_S = 0.1


def status_of(url: str, token: str | None) -> dict[str, Any] | None:
    """Its status; None when nobody, or another program, answers there."""
    try:
        code, raw = ServerEndpoint(url, token).fetch("GET", "/dflash/v1/status", within(ANSWER_S))
    except DFlashError:
        return None
    answer = read_object(raw) if code == http.client.OK else None
    named = answer is not None and isinstance(answer.get("model"), str) and isinstance(answer.get("state"), str)
    return answer if named else None


def facts_of(status: Mapping[str, Any]) -> SessionFacts | None:
    """What a server says that it has loaded; None when that is nothing, or said in the words of another version."""
    facts = status.get("facts")
    try:
        return SessionFacts.from_dict(facts) if isinstance(facts, dict) else None
    except (ValueError, UsageError):
        return None


def is_listening(url: str) -> bool:
    """Whether anybody answers at the address; quick, where a whole request would wait."""
    address = urlsplit(url)
    try:
        with socket.create_connection((address.hostname or "", address.port or 80), timeout=CONNECT_S):
            return True
    except OSError:
        return False
