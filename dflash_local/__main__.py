"""``python -m dflash_local``: the same program as ``dflash``."""

import sys

from dflash_local.import_path import without_current_folder

if __name__ == "__main__":
    sys.path[:] = without_current_folder(sys.path)  # ``-m`` put it first: a json.py there must not run

    from dflash_local.cli.main import main

    sys.exit(main())
