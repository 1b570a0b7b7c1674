"""Record of skinny GEMM kernels on one card, those of experts among them: which are right, which is the fastest.

One JSON file beside the compiled kernels for each card, driver, NVRTC and source; else found out again at each start.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch

from dflash_local.errors import MissingDependencyError
from dflash_local.json_text import parse_json
from dflash_local.kernels import cuda_driver, expert_gemm, fragment_gemm, nvrtc
from dflash_local.store.kept import keep
from dflash_local.store.paths import KERNEL_RECORD

# uncompiled: the compiler refused it. untried: its configuration failed with other rows, or so many others of its
# format failed that it was left out.
Verdict = Literal["right", "wrong", "fault", "hang", "uncompiled", "untried"]
LAUNCHING = ("fragment_gemm.py", "expert_gemm.py", "cuda_driver.py", "fragment_packing.py", "fragment_order.py")
TRYING = ("product_check.py", "expert_check.py", "experts.py", "random_weight.py")


FITS: Mapping[str, Callable[[Any], bool]] = {  # of an entry in the file
    "verdicts": lambda value: value in get_args(Verdict),
    "choices": lambda value: isinstance(value, str),
    "microseconds": lambda value: isinstance(value, (int, float)) and 0 < value < float("inf"),
}


class KernelChoice(NamedTuple):
    """The fastest configuration of a product, as ``repr`` spells it, and the microseconds that it took."""

    config: str
    us: float


class KernelRecord:
    """Verdicts and choices by the names of kernels and products. ``folder``: None: nowhere. ``facts``: for JSON."""

    def __init__(self, folder: Path | None, facts: dict[str, Any]) -> None:
        self.facts = facts
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]
        self.path = folder / KERNEL_RECORD.format(digest) if folder else None
        self.verdicts: dict[str, Verdict] = {}
        self.choices: dict[str, str] = {}
        self.microseconds: dict[str, float] = {}  # of each choice, when it was made
        self.impossible = ""  # why no kernel could be tried since the start
        self.tried = 0  # kernels that were since the start
        self.used: set[str] = set()  # the products asked for since the start
        self._read()

    def is_right(self, kernel: str) -> bool:
        return self.verdicts.get(kernel) == "right"

    def chosen(self, product: str) -> KernelChoice | None:
        """Return configuration that was the fastest for a product; None, too, where it is not known how fast it was."""
        self.used.add(product)
        if product not in self.choices or product not in self.microseconds:
            return None
        return KernelChoice(self.choices[product], self.microseconds[product])

    def choose(self, product: str, config: str, us: float) -> None:
        self.choices[product], self.microseconds[product] = config, round(us, 2)
        self.save()

    def save(self) -> None:
        """Write it, together with what other processes have written meanwhile."""
        if self.path is None:
            return
        own = [dict(entries) for entries in self._entries.values()]
        self._read()
        for entries, newer in zip(self._entries.values(), own, strict=True):
            entries |= newer
        content = {**self.facts, **self._entries}
        keep(self.path, json.dumps(content, indent=1) + "\n")

    def _read(self) -> None:
        """Read whatever of the file is as it should be."""
        try:
            content = parse_json(self.path.read_text(encoding="utf-8")) if self.path else {}
        except (OSError, ValueError):
            return
        if not isinstance(content, dict):
            return
        for name, entries in self._entries.items():
            found = content.get(name)
            if isinstance(found, dict):
                entries |= {key: value for key, value in found.items() if FITS[name](value)}

    @property
    def _entries(self) -> dict[str, dict[str, Any]]:
        """Return all that is kept beside the facts, by its name in the file."""
        return {"verdicts": self.verdicts, "choices": self.choices, "microseconds": self.microseconds}


_records: dict[tuple[Path | None, str], KernelRecord] = {}


def record_of(device: torch.device | str) -> KernelRecord:
    """Return the record of a card, read once."""
    folder, facts = nvrtc.cubin_folder(), card_facts(device)
    key = folder, json.dumps(facts)
    if key not in _records:
        _records[key] = KernelRecord(folder, facts)
    return _records[key]


def used_records() -> list[KernelRecord]:
    """List the records of the cards that products were chosen on since the start."""
    return [record for record in _records.values() if record.used]


def forget_all() -> None:
    """Begin anew with every card, on the disk too."""
    _records.clear()
    folder = nvrtc.cubin_folder()
    for path in folder.glob(KERNEL_RECORD.format("*")) if folder else ():
        with suppress(OSError):
            path.unlink()


def card_facts(device: torch.device | str) -> dict[str, Any]:
    """Return what verdicts and choices hold for; without NVRTC there are those of Triton and the library."""
    try:
        version = list(nvrtc.nvrtc().version)
    except MissingDependencyError:
        version = None
    return {
        "card": torch.cuda.get_device_name(device),
        "capability": list(torch.cuda.get_device_capability(device)),
        "driver": cuda_driver.driver_version(),
        "nvrtc": version,
        "source": source_digest(),
    }


def source_digest() -> str:
    """Digest the kernels, all that lays out and launches their arguments, and what they are tried with."""
    return _digest(
        (
            fragment_gemm.FRAGMENTS,
            fragment_gemm.SOURCE,
            *expert_gemm.SOURCES.values(),
            *(Path(__file__).with_name(name) for name in (*LAUNCHING, *TRYING)),
        )
    )


@cache
def _digest(paths: tuple[Path, ...]) -> str:
    """Digest files as this process found them first."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()
