"""What drafters have learnt of their users' texts: a file for a pair, and what its header says of it. Torch-free."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_local.checkpoint_files.safetensors_header import metadata_of
from dflash_local.errors import CheckpointError
from dflash_local.json_text import parse_json
from dflash_local.settings import Settings
from dflash_local.store.paths import adaptations_folder

FACTS = "dflash_adaptation"  # in the header's metadata
MOST_BYTES = 60 * 2**20  # of a file
DOWN, UP = ".down", ".up"  # of a matrix's name: the pair of a low rank that is added to it


@dataclass(frozen=True, slots=True)
class Adaptation:
    """One that was kept.

    Attributes:
        facts: recipe, amounts, curve, acceptance before and after, versions; ``files``: the state of target and drafter
            that it was made for.
    """

    path: Path
    facts: Mapping[str, Any]

    @property
    def label(self) -> str:
        """Return what tells it from another one of the pair."""
        return f"adapted {self.facts['made'][:10]} {self.facts['id']}"

    @property
    def gain(self) -> float:
        """Return held-out tokens a cycle after over before."""
        return float(self.facts["total"]["ratio"])


def path_of(settings: Settings, name: str) -> Path | None:
    """Return where that of a pair lies, ``name`` being ``Pair.drafting_name``; None when there is no home folder."""
    folder = adaptations_folder(settings)
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[-48:]
    return folder and folder / f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}.safetensors"


def read(path: Path) -> Adaptation | None:
    """Read a file's header; None where there is none. CheckpointError: it is damaged, or no adaptation."""
    if not path.is_file():
        return None
    hint = "remove it, or run dflash adapt again"
    try:
        found = Adaptation(path, parse_json(metadata_of(path)[FACTS]))
        found.label, found.gain, found.facts["files"]  # noqa: B018  # what is asked of it must be there
    except CheckpointError as error:
        raise CheckpointError(error.message, hint) from error
    except (KeyError, ValueError, TypeError, ZeroDivisionError) as error:
        raise CheckpointError(f"{path} is no adaptation of a drafter", hint) from error
    return found


def metadata(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the header's metadata that says so."""
    return {FACTS: json.dumps(facts, ensure_ascii=True)}
