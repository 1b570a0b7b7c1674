"""Say what the first run takes: the installed libraries as measured on this disk, the model to download.

python -m tools.first_run
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

from dflash_local import settings
from dflash_local.app.default_model import SMALL, is_here, small_pair
from dflash_local.app.resolve import size_gib
from dflash_local.errors import DFlashError
from dflash_local.tables import GIB, amount

LARGE = ("torch", "nvidia", "triton", "transformers")  # folders that are named


def main() -> None:
    libraries = Path(sysconfig.get_paths()["purelib"])
    sizes = {name: bytes_below(libraries / name) for name in LARGE}
    named = ", ".join(f"{name} {amount(size)}" for name, size in sizes.items() if size)
    installed = bytes_below(libraries)
    print(f"installed in {libraries}: {amount(installed)} on disk ({named or 'none of the large libraries'})")
    model = to_download()
    line = f"{SMALL} to download: {amount(model)}; in all" if model else "nothing to download; in all"
    print(f"{line}: {amount(installed + model)}")


def to_download() -> int:
    """Bytes of the model that ``dflash race --pull`` brings; 0 where it is here or cannot be had."""
    user = settings.load()
    try:
        choice = small_pair(user)
        if choice is None or user.hub.offline or is_here(choice, user):
            return 0
    except DFlashError as error:  # the demonstration tells it again
        print(error, file=sys.stderr)
        return 0
    return round((size_gib(choice, choice.roles) or 0.0) * GIB)


def bytes_below(folder: Path) -> int:
    """Of the files in a folder and below, links not followed."""
    return sum(os.lstat(os.path.join(place, name)).st_size for place, _, names in os.walk(folder) for name in names)


if __name__ == "__main__":
    main()
