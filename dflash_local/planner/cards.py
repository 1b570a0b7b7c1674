"""Well-known accelerators by name, with the memory they report: for planning on a machine one does not have.

Nominal figures; a driver and a desktop take their share of them.
"""

from __future__ import annotations

import difflib
import re

from dflash_local.errors import UsageError

# Name -> GiB: the driver's own figure where it is known and less than what is printed on the box.
CARDS: dict[str, float] = {
    "RTX 3060": 12,
    "RTX 3060 Ti": 8,
    "RTX 3070": 8,
    "RTX 3080": 10,
    "RTX 3080 Ti": 12,
    "RTX 3090": 24,
    "RTX 3090 Ti": 24,
    "RTX 4060": 8,
    "RTX 4060 Ti": 16,
    "RTX 4070": 12,
    "RTX 4070 Ti": 12,
    "RTX 4070 Ti Super": 16,
    "RTX 4080": 16,
    "RTX 4080 Super": 16,
    "RTX 4090": 24,
    "RTX 5060 Ti": 15.9,
    "RTX 5070": 12,
    "RTX 5070 Ti": 15.9,
    "RTX 5080": 15.9,
    "RTX 5090": 31.8,
    "RTX A4000": 16,
    "RTX A5000": 24,
    "RTX A6000": 48,
    "RTX 6000 Ada": 48,
    "RTX PRO 6000": 95.6,
    "T4": 15,
    "A10": 22.5,
    "L4": 22.5,
    "L40S": 45,
    "A100 40GB": 40,
    "A100 80GB": 80,
    "H100": 79.6,
    "H200": 140.4,
    "B200": 179,
    "RX 7900 XTX": 24,
    "MI300X": 192,
}
FILLER = ("nvidia", "geforce", "amd", "radeon", "instinct", "tesla", "gpu", "graphics")


def card_memory(name: str) -> tuple[str, float]:
    """The table's name of a card and its GiB.

    Raises:
        UsageError: no such card; suggests the nearest.
    """
    keys = {_key(card): card for card in CARDS}
    wanted = _key(name)
    if wanted in keys:
        return keys[wanted], CARDS[keys[wanted]]
    close = difflib.get_close_matches(wanted, keys, n=3, cutoff=0.5)
    close += [key for key in keys if wanted and key.startswith(wanted) and key not in close]
    named = ", ".join(keys[key] for key in close)
    raise UsageError(
        f"unknown GPU {name!r}",
        (f"did you mean {named}? " if named else "") + "or give its memory: --gpu-memory GIB",
    )


def find_card(name: str) -> float | None:
    """GiB of a card by the name its driver gives (such as ``NVIDIA H100 80GB HBM3``), None when not listed."""
    wanted = _key(name)
    fitting = [card for card in CARDS if wanted.startswith(_key(card))]
    return CARDS[max(fitting, key=len)] if fitting else None


def _key(name: str) -> str:
    words = [word for word in re.split(r"[^a-z0-9.]+", name.lower()) if word not in FILLER]
    return re.sub(r"(\d)gb$", r"\1", "".join(words))
