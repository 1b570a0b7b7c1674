"""Print a report of any machine, and what the installed version makes of it, as JSON: python -m tools.replay FILE.

Plans are made again for the reported memory, and failed kernels are compiled for their card, which need not be here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_local import settings
from dflash_local.app.fitting import row_choice, shapes
from dflash_local.app.models import model_store, registry
from dflash_local.errors import DFlashError
from tools.replay.replayed import Shapes, replayed
from tools.replay.unpack import Damaged, unpack

MOST_COMPILED = 6  # a kernel takes a second or two


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.replay", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, help="what dflash doctor --report wrote")
    given = parser.parse_args()
    try:
        found = replayed(unpack(given.file), _known(settings.load()))
    except (Damaged, OSError, DFlashError) as error:
        sys.exit(f"error: {error}")
    _compile_again(found["kernels"])
    print(json.dumps(found, indent=1))  # in ASCII: nothing of a report reaches the terminal as it is


def _compile_again(kernels: list[dict[str, Any]]) -> None:
    """Enter under ``here`` whether each of the first failed kernels compiles here for its card."""
    if not kernels:
        return
    from tools.replay.recompile import recompiled  # torch

    for one in kernels[:MOST_COMPILED]:
        capability = one["capability"]
        if isinstance(capability, list) and len(capability) == 2 and all(type(part) is int for part in capability):
            one["here"] = recompiled(str(one["kernel"]), (capability[0], capability[1]))


def _known(user: settings.Settings) -> Callable[[str], Shapes | None]:
    """The shapes of a pair by its name, as the registry or the files here tell them."""
    rows, store = registry(user), model_store(user)

    def known(model: str) -> Shapes | None:
        try:
            row = rows.find(model)
            found = None if row is None else shapes(row_choice(row, user), store)
        except DFlashError:
            return None
        return None if found is None else (found.target, found.drafter)

    return known


if __name__ == "__main__":
    main()
