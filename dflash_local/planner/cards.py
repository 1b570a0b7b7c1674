"""Well-known accelerators by name, with the memory they report and the bandwidth they are specified for.

For planning on a machine one does not have: nominal figures, of which a driver and a desktop take their share.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from functools import lru_cache

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
# What people call a card -> the driver's name, of which the speed is known: the faster kind where there are two.
SPOKEN = {
    "RTX 6000 Ada": "RTX 6000 Ada Generation",
    "RTX PRO 6000": "RTX PRO 6000 Blackwell Workstation Edition",
    "A100 40GB": "A100-SXM4-40GB",
    "A100 80GB": "A100-SXM4-80GB",
    "H100": "H100 80GB HBM3",
}
# Of each usual size a card whose bandwidth is known, and its GiB: it stands for that size where no name is given.
TYPICAL = (
    ("RTX 4060", 8.0),
    ("RTX 4070 Ti", 12.0),
    ("RTX 4080", 16.0),
    ("RTX 4090", 24.0),
    ("RTX 5090", 31.8),
    ("RTX A6000", 48.0),
    ("H100 80GB HBM3", 79.6),
)
# Names as drivers give them -> GB/s, multiprocessors and their boost clock in GHz, from the makers' data sheets; cards
# sold with several memories under one name are left out.
DATA_SHEETS: dict[str, tuple[float, int, float]] = {
    "RTX 3070": (448, 46, 1.725),
    "RTX 3080 Ti": (912, 80, 1.665),
    "RTX 3090": (936, 82, 1.695),
    "RTX 3090 Ti": (1008, 84, 1.86),
    "RTX 4060": (272, 24, 2.46),
    "RTX 4060 Ti": (288, 34, 2.535),
    "RTX 4070 Super": (504, 56, 2.475),
    "RTX 4070 Ti": (504, 60, 2.61),
    "RTX 4070 Ti Super": (672, 66, 2.61),
    "RTX 4080": (717, 76, 2.505),
    "RTX 4080 Super": (736, 80, 2.55),
    "RTX 4090": (1008, 128, 2.52),
    "RTX 5060 Ti": (448, 36, 2.57),
    "RTX 5070": (672, 48, 2.51),
    "RTX 5070 Ti": (896, 70, 2.45),
    "RTX 5080": (960, 84, 2.62),
    "RTX 5090": (1792, 170, 2.41),
    "RTX A4000": (448, 48, 1.56),
    "RTX A5000": (768, 64, 1.695),
    "RTX A6000": (768, 84, 1.8),
    "RTX 6000 Ada Generation": (960, 142, 2.505),
    "RTX PRO 6000 Blackwell Workstation Edition": (1792, 188, 2.617),
    "A10": (600, 72, 1.695),
    "L4": (300, 58, 2.04),
    "L40S": (864, 142, 2.52),
    "A100-SXM4-40GB": (1555, 108, 1.41),
    "A100-PCIE-40GB": (1555, 108, 1.41),
    "A100-SXM4-80GB": (2039, 108, 1.41),
    "A100 80GB PCIe": (1935, 108, 1.41),
    "H100 PCIe": (2000, 114, 1.755),
    "H100 80GB HBM3": (3350, 132, 1.98),
    "H200": (4800, 132, 1.98),
    "B200": (8000, 148, 1.965),
}
# Names of NVIDIA's cards for workstations begin so; of the other RTX ones, the GeForce, the driver makes no peers.
WORKSTATION = ("RTX A", "RTX 6000 Ada", "RTX PRO")
# Operations of bfloat16 matrices, with sums in float32, of a multiprocessor in a cycle: the first name that begins so.
# Of GeForce cards half of what the same chips do under other names; of Hopper what the library reaches of 4,096.
MATRIX_OPERATIONS = (
    *(*((name, 1024) for name in WORKSTATION), ("RTX", 512)),
    *(("A100", 2048), ("A10", 1024), ("L4", 1024), ("H", 2450), ("B200", 8192)),
)
# Sold before bfloat16 was in the tensor cores (compute capability below 8.0), and AMD's, where nobody has tried them.
WITHOUT_KERNELS = (
    *("T4", "V100", "P100", "P40", "TITAN", "GTX", "RTX 2060", "RTX 2070", "RTX 2080", "Quadro"),
    *("RX", "MI"),
)
FILLER = ("nvidia", "geforce", "amd", "radeon", "instinct", "tesla", "gpu", "graphics")


def card_memory(name: str) -> tuple[str, float]:
    """Return the driver's name of a card, or the table's, and its GiB.

    Raises:
        UsageError: no such card; suggests the nearest.
    """
    keys = {_key(card): card for card in CARDS}
    wanted = _key(name)
    if wanted in keys:
        card = keys[wanted]
        return SPOKEN.get(card, card), CARDS[card]
    close = difflib.get_close_matches(wanted, keys, n=3, cutoff=0.5)
    close += [key for key in keys if wanted and key.startswith(wanted) and key not in close]
    named = ", ".join(keys[key] for key in close)
    raise UsageError(
        f"unknown GPU {name!r}",
        (f"did you mean {named}? " if named else "") + "or give its memory: --gpu-memory GIB",
    )


def typical_card(gib: float) -> tuple[str, float]:
    """Return the typical card with about so much memory, else the next smaller one, and GiB.

    Those are what the card's driver tells where its usual size was given, as 80; else what was given.
    """
    name, own = next((card for card in reversed(TYPICAL) if round(card[1]) <= round(gib)), TYPICAL[0])
    return name, own if round(own) == gib else gib


def find_card(name: str) -> float | None:
    """Return GiB of a card by the name its driver gives (such as ``NVIDIA H100 80GB HBM3``), None when not listed."""
    wanted = _key(name)
    fitting = [card for card in CARDS if wanted.startswith(_key(card))]
    return CARDS[max(fitting, key=len)] if fitting else None


def lacks_kernels(name: str) -> bool:
    """Return True for a card by whose name it is known that the fused engine does not run there."""
    return any(_key(name).startswith(_key(start)) for start in WITHOUT_KERNELS)


def find_bandwidth(name: str) -> float | None:
    """Return specified GB/s of a card by its driver's whole name; None when not listed, or sold in several kinds."""
    found = _data_sheet(name)
    return None if found is None else found[0]


def find_clock_rate(name: str) -> float | None:
    """Return specified cycles of all multiprocessors in a nanosecond; None as of ``find_bandwidth``."""
    found = _data_sheet(name)
    return None if found is None else found[1] * found[2]


def find_matrix_rate(name: str) -> float | None:
    """Return specified 1e9 operations of bfloat16 matrices a second; None as of ``find_bandwidth``."""
    rate = find_clock_rate(name)
    cycle = next((count for start, count in MATRIX_OPERATIONS if _key(name).startswith(_key(start))), None)
    return None if rate is None or cycle is None else rate * cycle


def has_peers(name: str) -> bool:
    """Say whether a card of this name copies to another such card by itself, without the main memory in between."""
    begins = _key(name).startswith
    return not begins(_key("RTX")) or any(begins(_key(each)) for each in WORKSTATION)


def _data_sheet(name: str) -> tuple[float, int, float] | None:
    wanted = _key(name)
    return next((figures for card, figures in DATA_SHEETS.items() if _key(card) == wanted), None)


def same_card(one: str, other: str) -> bool:
    """Return True for two names of a card, such as ``H200`` and the driver's ``NVIDIA H200``."""
    return _key(one) == _key(other)


def names_together(names: Sequence[str]) -> str:
    """Name GPUs that are used together: ``2 x RTX 4090``, or each where they are unlike."""
    if len(names) == 1:
        return names[0]
    return f"{len(names)} x {names[0]}" if len(set(names)) == 1 else " and ".join(names)


def file_stem(name: str) -> str:
    """Name the files that hold what was measured on a card."""
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower() or "card"


@lru_cache(maxsize=1024)  # a list of pairs asks hundreds of times for each name of the tables
def _key(name: str) -> str:
    words = [word for word in re.split(r"[^a-z0-9.]+", name.lower()) if word not in FILLER]
    return re.sub(r"(\d)gb$", r"\1", "".join(words))
