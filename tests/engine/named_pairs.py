"""Small pairs of every kind by a name: bundled ones, golden ones, and a DSpark drafter with a ring."""

from __future__ import annotations

from pathlib import Path

from dflash_local.catalog import bundled
from dflash_local.catalog.bundled import Pair
from tests.dspark_checkpoints import TARGET, raw, save_drafter

GOLDEN, PARTS = Path(__file__).parent.parent / "golden", ("target", "drafter")
DSPARK = "dspark"


def named_pair(name: str, folder: Path) -> Pair:
    """Find a pair; ``folder``: where a drafter is written that no file holds."""
    if name.startswith("demo"):
        return bundled.find(name)
    if name == DSPARK:
        config = raw(layer_types=["sliding_attention", "full_attention"], sliding_window=24)
        return bundled.find(str(TARGET), str(save_drafter(folder, config)))
    return bundled.find(*(str(GOLDEN / name / part) for part in PARTS))
