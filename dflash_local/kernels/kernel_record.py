"""What is known of the few-row kernels on one card, those of experts among them: which are right, and which was the
fastest for a product.

One JSON file beside the compiled kernels for each card, driver, version of NVRTC and source. Where it cannot be
written, all is found out again at the next start.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from dflash_local.kernels import cuda_driver, expert_gemm, few_row_gemm, nvrtc
from dflash_local.store.atomic import write_atomic
from dflash_local.store.paths import KERNEL_RECORD

# uncompiled: the compiler refused it. untried: its configuration failed with other rows, or so many others of its
# format failed that it was left out.
Verdict = Literal["right", "wrong", "fault", "hang", "uncompiled", "untried"]
LAUNCHING = ("few_row_gemm.py", "expert_gemm.py", "cuda_driver.py", "fragment_packing.py")
TRYING = ("product_check.py", "expert_check.py", "experts.py", "random_weight.py")


class KernelRecord:
    """Verdicts and choices by the names of kernels and products.

    Args:
        folder: where it is kept; None: nowhere. facts: what it holds for, JSON-able.
    """

    def __init__(self, folder: Path | None, facts: dict[str, Any]) -> None:
        self.facts = facts
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]
        self.path = folder / KERNEL_RECORD.format(digest) if folder else None
        self.verdicts: dict[str, Verdict] = {}
        self.choices: dict[str, str] = {}
        self.impossible = ""  # why no kernel could be tried since the start
        self.tried = 0  # kernels that were since the start
        self.used: set[str] = set()  # the products asked for since the start
        self._read()

    def is_right(self, kernel: str) -> bool:
        """True for a kernel that was tried and found right."""
        return self.verdicts.get(kernel) == "right"

    def chosen(self, product: str) -> str | None:
        """The configuration that was the fastest for a product, as ``repr`` spells it."""
        self.used.add(product)
        return self.choices.get(product)

    def choose(self, product: str, config: str) -> None:
        """Keep the fastest configuration of a product."""
        if self.choices.get(product) == config:
            return
        self.choices[product] = config
        self.save()

    def save(self) -> None:
        """Write it, together with what other processes have written meanwhile."""
        if self.path is None:
            return
        verdicts, choices = dict(self.verdicts), dict(self.choices)
        self._read()
        self.verdicts |= verdicts
        self.choices |= choices
        content = {**self.facts, "verdicts": self.verdicts, "choices": self.choices}
        with suppress(OSError):  # full or read-only
            write_atomic(self.path, json.dumps(content, indent=1) + "\n")

    def _read(self) -> None:
        """Whatever of the file is as it should be."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8")) if self.path else {}
        except (OSError, ValueError):
            return
        if not isinstance(content, dict):
            return
        for name, known in (("verdicts", get_args(Verdict)), ("choices", None)):
            entries = content.get(name)
            if isinstance(entries, dict):
                fit = {key: value for key, value in entries.items() if isinstance(value, str)}
                getattr(self, name).update(
                    {key: value for key, value in fit.items() if known is None or value in known}
                )


_records: dict[tuple[Path | None, str], KernelRecord] = {}


def record_of(device: torch.device | str) -> KernelRecord:
    """The record of a card, read once.

    Raises:
        MissingDependencyError: NVRTC is not installed.
    """
    folder, facts = nvrtc.cubin_folder(), card_facts(device)
    key = folder, json.dumps(facts)
    if key not in _records:
        _records[key] = KernelRecord(folder, facts)
    return _records[key]


def used_records() -> list[KernelRecord]:
    """Those of the cards that products were chosen on since the start."""
    return [record for record in _records.values() if record.used]


def forget_all() -> None:
    """Begin anew with every card, on the disk too."""
    _records.clear()
    folder = nvrtc.cubin_folder()
    for path in folder.glob(KERNEL_RECORD.format("*")) if folder else ():
        with suppress(OSError):
            path.unlink()


def card_facts(device: torch.device | str) -> dict[str, Any]:
    """What verdicts and choices hold for.

    Raises:
        MissingDependencyError: NVRTC is not installed.
    """
    return {
        "card": torch.cuda.get_device_name(device),
        "capability": list(torch.cuda.get_device_capability(device)),
        "driver": cuda_driver.driver_version(),
        "nvrtc": list(nvrtc.nvrtc().version),
        "source": source_digest(),
    }


def source_digest() -> str:
    """Of the kernels, of all that lays out and launches their arguments, and of what they are tried with."""
    return _digest(
        (
            few_row_gemm.FRAGMENTS,
            few_row_gemm.SOURCE,
            *expert_gemm.SOURCES.values(),
            *(Path(__file__).with_name(name) for name in (*LAUNCHING, *TRYING)),
        )
    )


@cache
def _digest(paths: tuple[Path, ...]) -> str:
    """Of files as this process found them first."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()
