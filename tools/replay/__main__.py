"""Print a report of any machine, and what the installed version makes of it, as JSON: python -m tools.replay FILE.

Plans are made again for the reported memory, and failed kernels are compiled for their card, which need not be here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from dflash_local import settings
from dflash_local.app.fitting import Shapes, row_choice, shapes
from dflash_local.app.models import model_store, registry
from dflash_local.errors import DFlashError
from tools.replay.replayed import replayed
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
    if found["kernels"]:
        from tools.replay.recompile import recompiled  # torch

        for one in found["kernels"][:MOST_COMPILED]:
            one["here"] = recompiled(str(one["kernel"]), one["capability"])
    print(json.dumps(found, indent=1))  # in ASCII: nothing of a report reaches the terminal as it is


def _known(user: settings.Settings) -> Callable[[str], Shapes | None]:
    """The shapes of a pair by its name, as the registry or the files here tell them."""
    rows, store = registry(user), model_store(user)

    def known(model: str) -> Shapes | None:
        try:
            row = rows.find(model)
            return None if row is None else shapes(row_choice(row, user), store)
        except DFlashError:
            return None

    return known


if __name__ == "__main__":
    main()
