"""The table of `benchmarks/memory.py`: predicted and real peaks side by side, and how far they are apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dflash_local.bench import report

BOUND = 0.05  # the error that a prediction may have
GIB = 2**30
COLUMNS = (
    "shape",
    "mode",
    "context",
    "predicted",
    "peak",
    "error",
    "load pred.",
    "load",
    "error",
    "reserved",
    "device",
)


def error(row: dict[str, Any], predicted: str, measured: str) -> float | None:
    """Predicted over real, less one."""
    real = row["measured"][measured]
    said = row["predicted"][predicted]
    said = said["bytes"] if isinstance(said, dict) else said
    return None if real is None or said is None else said / real - 1


def lines(results: dict[str, Any]) -> Iterator[str]:
    """The table."""
    gpus = ", ".join(gpu["name"] for gpu in results["machine"]["gpus"]) or "CPU: nothing measured"
    yield f"reference engine, bfloat16, random weights, on {gpus}; GiB of torch's allocator"
    rows = []
    for row in results["rows"]:
        cells = [row["shape"], row["mode"], str(row["context"])]
        for said, real in (("running", "peak"), ("loading", "loading_peak")):
            value = row["predicted"][said]
            off = error(row, said, real)
            cells += [
                _gib(value["bytes"] if isinstance(value, dict) else value),
                _gib(row["measured"][real]),
                "-" if off is None else f"{100 * off:+.1f} %",
            ]
        rows.append((*cells, _gib(row["measured"]["reserved"]), _gib(row["measured"]["device_used"])))
    yield from report.table(COLUMNS, rows)
    for row in results["rows"]:
        if row.get("margin_needed") is not None:
            margin = f"{100 * row['margin_needed']:.0f} % over the prediction"
            yield f"{row['shape']}, {row['context']} tokens: a reply is whole on a device of {margin}"
    yield f"{results['elapsed_s']:.0f} s in all; {results['verdict']}"


def _gib(count: int | None) -> str:
    return "-" if count is None else f"{count / GIB:.2f}"


def verdict(rows: Sequence[dict[str, Any]]) -> str:
    """Whether every prediction is within the bound."""
    errors = [error(row, *names) for row in rows for names in (("running", "peak"), ("loading", "loading_peak"))]
    known = [abs(off) for off in errors if off is not None]
    if not known:
        return "nothing measured"
    worst = max(known)
    return f"largest error {100 * worst:.1f} %, {'within' if worst <= BOUND else 'OUTSIDE'} {100 * BOUND:.0f} %"
