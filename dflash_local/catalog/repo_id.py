"""Which texts can name a repository on the Hub. Knows no network: a good name may still not exist."""

from __future__ import annotations

import re

from dflash_local.errors import UsageError

MAX_LENGTH = 96
# Letters, digits, "_", "-" and "."; a letter, digit or "_" at both ends, so nothing reads as an option.
PART = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")
RULE = "a repository is named owner/name with letters, digits, '-', '_' and '.'"


def check_repo_id(text: str) -> str:
    """``text`` itself when it is a well-formed ``owner/name``.

    The rules of the Hub (no "--", no "..", no ".git" at the end, each part at most 96 long) and one more:
    exactly one slash.

    Raises:
        UsageError: it is not; the offending text is shown escaped.
    """
    reason = _fault(text)
    if reason:
        shown = text if len(text) <= MAX_LENGTH else f"{text[:40]}..."
        raise UsageError(f"{shown!r} is not a repository: {reason}", RULE)
    return text


def is_repo_id(text: str) -> bool:
    """True when ``check_repo_id`` accepts it."""
    return not _fault(text)


def _fault(text: str) -> str:
    parts = text.split("/")
    if len(parts) != 2:
        return f"{len(parts) - 1} slashes, there must be one"
    for mark in ("--", ".."):
        if mark in text:
            return f"{mark!r} is not allowed"
    if text.endswith(".git"):
        return "'.git' at the end is not allowed"
    for part, what in zip(parts, ("owner", "name")):
        if len(part) > MAX_LENGTH:
            return f"the {what} has {len(part)} characters, at most {MAX_LENGTH} are allowed"
        if not PART.fullmatch(part):
            return f"the {what} {part!r} has characters or ends that are not allowed" if part else f"no {what}"
    return ""
