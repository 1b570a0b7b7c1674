"""``python -m dflash_local``: the same program as ``dflash``."""

from __future__ import annotations

import sys

from dflash_local.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
