"""dflash-local: DFlash speculative decoding on your own machine, exact and measured.

Importing the package imports nothing else: torch and transformers load only when a model does.
"""

from __future__ import annotations

from pathlib import Path

__version__ = "0.2.0"

# ``ui`` lies beside the package and is reached through a link. Git on a system without symbolic links writes a text
# file in its place: then the package is looked for beside it as well.
if not (Path(__file__).parent / "ui").is_dir():
    __path__.append(str(Path(__file__).parents[1]))
