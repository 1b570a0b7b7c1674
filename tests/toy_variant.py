"""A pair on the fake hub with a published quantized target; plans take it for Qwen3-8B and its drafter."""

from __future__ import annotations

import shutil
from pathlib import Path

from dflash_local.catalog import bundled
from tests.cli.conftest import DRAFTER, OVERLAY, TARGET, write_overlay
from tests.fake_hub import FakeHub
from tests.quantized_checkpoints import quantize_checkpoint

VARIANT = "toys/Toy-9B-GPTQ-Int4"
STANDS_FOR = {TARGET: "Qwen/Qwen3-8B", DRAFTER: "z-lab/Qwen3-8B-DFlash-b16"}
CARD_GIB = 8  # of a card on which only four bits of it fit, all of its context with 8-bit keys and values alone


def publish_variant(hub: FakeHub, home: Path, folder: Path) -> None:
    """A GPTQ of the toy's target on the hub, and a row for it in the registry of that home."""
    plain = folder / "plain"
    folder.mkdir(exist_ok=True)
    shutil.copytree(bundled.FOLDER / "demo" / "target", plain)
    quantize_checkpoint(plain, folder / "gptq", "gptq")
    hub.add_folder(VARIANT, folder / "gptq")
    row = f"{{repo: {VARIANT}, format: gptq-int4, group_size: 128, kept_16_bits: [], size_gib: 0.01}}"
    write_overlay(home, f"{OVERLAY}    variants:\n      - {row}\n")
