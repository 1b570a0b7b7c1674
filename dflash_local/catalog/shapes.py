"""Shapes of every target and drafter of the registry, as far as known before any download.

Each file of ``shapes/`` looks like the repository's config.json; null is "not known". Our own keys start with "_":
``_inferred`` (likely values of nulls, to be labelled as such), ``_sizes`` and ``_source``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflash_local.catalog.repo_id import is_repo_id

FOLDER = Path(__file__).resolve().parent / "shapes"


def shape(repo_id: str) -> dict[str, Any] | None:
    """Return the shape kept for a repository; None when there is none. The caller owns the returned dict."""
    if not is_repo_id(repo_id):
        return None
    try:
        text = (FOLDER / f"{repo_id.replace('/', '--')}.json").read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    found = json.loads(text)
    return found if isinstance(found, dict) else None
