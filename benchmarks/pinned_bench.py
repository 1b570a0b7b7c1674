"""``dflash`` with the kernels' configurations pinned: written by the first run to FILE, read by those that follow.

    PYTHONPATH=TREE python3 benchmarks/pinned_bench.py FILE bench MODEL --weights random --json

Two versions of the engine are comparable only where both run the same kernels, and measuring picks among near-equals.
Versions that had kernels of their own for 8-bit drafters are compared with ``--drafter-precision full``.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

CHOICES = ("dflash_local.models.fused.kernel_choice", "dflash_local.models.fused.linear")
GEMM = (("dflash_local.kernels.skinny_gemm", "GemmConfig"), ("dflash_local.kernels.skinny_gemm", "Tile"))
GEMM_FIELDS = 4
FEW_ROW = (("dflash_local.kernels.few_row_gemm", "FewRowConfig"),)


def pin(file: Path) -> None:
    """Let every choice be the one of ``file``, and add what it has not yet."""
    module = next(found for name in CHOICES if (found := _module(name)) and hasattr(found, "_fastest"))
    measure: Callable[..., Any] = module._fastest
    pinned: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}

    def fastest(kind: Any, *rows: int) -> Any:
        first = (kind if isinstance(kind, list) else kind.members)[0]  # as older versions have it, too
        weight = first.weight
        key = f"{type(first).__name__} {weight.dtype} {weight.nbytes} bytes {tuple(weight.shape)}"
        if key not in pinned:
            pinned[key] = _values(measure(kind, *rows))
            file.write_text(json.dumps(pinned, indent=1))
        return _config(pinned[key])

    module._fastest = fastest  # type: ignore[attr-defined]


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


def _values(config: Any) -> Any:
    """A configuration as plain values in the order of its fields, whatever these are called."""
    return [_values(getattr(config, field.name)) for field in fields(config)] if is_dataclass(config) else config


def _config(values: Any) -> Any:
    if values is None:
        return None
    return _class(GEMM if len(values) == GEMM_FIELDS else FEW_ROW)(*values)


def _class(names: tuple[tuple[str, str], ...]) -> Any:
    return next(found for module, name in names if (found := getattr(_module(module), name, None)))


if __name__ == "__main__":
    pin(Path(sys.argv[1]))
    from dflash_local.__main__ import main

    sys.argv = ["dflash", *sys.argv[2:]]
    sys.exit(main())
