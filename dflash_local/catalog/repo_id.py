"""Which texts can name a repository on the Hub. Knows no network: a good name may still not exist."""

from __future__ import annotations

import re

# The rules of the Hub: a letter, digit or "_" at both ends of each part, so nothing reads as an option either.
_PART = r"(?=[^/]{1,96}(?:/|$))[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
REPO_ID = rf"^(?!.*(?:--|\.\.|\.git$)){_PART}/{_PART}$(?!\n)"
REPO_RULE = "a repository, owner/name: letters, digits, single '-', '_' and '.', 96 each, no '.git'"
_MATCHER = re.compile(REPO_ID)


def is_repo_id(text: str) -> bool:
    """Return whether the text is a well-formed ``owner/name``."""
    return bool(_MATCHER.match(text))
