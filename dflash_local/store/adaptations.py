"""What drafters have learnt of their users' texts: a file for a pair, and what its header says of it. Torch-free."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from dflash_local.checkpoint_files.safetensors_header import metadata_of
from dflash_local.errors import CheckpointError
from dflash_local.json_text import parse_json
from dflash_local.settings import Settings
from dflash_local.store.paths import adaptations_folder, adapting_folder

FACTS = "dflash_adaptation"  # in the header's metadata
MOST_BYTES = 60 * 2**20  # of a file
SAME = "same.json"  # in the folder of an unfinished run: its pair, and what must be the same for it to go on
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


def of_targets(settings: Settings, names: Collection[str]) -> list[Path]:
    """List the files of what drafters of these pairs have learnt, and the folders of their unfinished runs. ``names``:
    of pairs, and where targets lie. A damaged file is of the pair whose name it has.
    """
    found, folders = list[Path](), (adaptations_folder(settings), adapting_folder(settings))
    for path in sorted(chain.from_iterable(folder.glob("*") for folder in folders if folder is not None)):
        try:
            facts = parse_json((path / SAME).read_text("utf-8")) if path.is_dir() else _facts(path)
            mine = facts["pair"] in names or facts["target"] in names
        except (OSError, LookupError, ValueError, TypeError, CheckpointError):
            mine = any(path.name.startswith(f"{_plain(name)}-") for name in names)
        found += [path] if mine else []
    return found


def path_of(settings: Settings, name: str) -> Path | None:
    """Return where that of a pair lies, ``name`` being ``Pair.drafting_name``; None when there is no home folder."""
    folder = adaptations_folder(settings)
    return folder and folder / f"{_plain(name)}-{hashlib.sha256(name.encode()).hexdigest()[:8]}.safetensors"


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[-48:]


def read(path: Path) -> Adaptation | None:
    """Read a file's header; None where there is none. CheckpointError: it is damaged, or no adaptation."""
    if not path.is_file():
        return None
    hint = "remove it, or run dflash adapt again"
    try:
        found = Adaptation(path, _facts(path))
        found.label, found.gain, found.facts["files"]  # noqa: B018  # what is asked of it must be there
    except CheckpointError as error:
        raise CheckpointError(error.message, hint) from error
    except (KeyError, ValueError, TypeError, ZeroDivisionError) as error:
        raise CheckpointError(f"{path} is no adaptation of a drafter", hint) from error
    return found


def _facts(path: Path) -> Any:
    return parse_json(metadata_of(path)[FACTS])


def metadata(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the header's metadata that says so."""
    return {FACTS: json.dumps(facts, ensure_ascii=True)}
