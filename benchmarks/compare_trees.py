"""Two versions of the fused engine on one GPU, run by turns with the same kernel configurations.

    python3 benchmarks/compare_trees.py BEFORE AFTER [--model qwen3.5-9b] [--runs 3] [--out FILE] [-- OPTIONS]

BEFORE and AFTER are checkouts; OPTIONS go to ``dflash bench``. Prints the median of each time and the medians' ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent


def run(tree: Path, pins: Path, model: str, options: list[str]) -> dict[str, Any]:
    """One report of ``dflash bench --weights random`` of a checkout."""
    command = [
        sys.executable,
        str(HERE / "pinned_bench.py"),
        str(pins),
        "bench",
        model,
        "--weights",
        "random",
        "--json",
    ]
    env = {**os.environ, "PYTHONPATH": str(tree)}
    found = subprocess.run([*command, *options], env=env, capture_output=True, text=True)
    if found.returncode:
        raise SystemExit(f"{tree}: {found.stderr[-2000:]}")
    report: dict[str, Any] = json.loads(found.stdout)
    return report


def times(report: dict[str, Any]) -> dict[str, float]:
    """Milliseconds by name, of all that was measured."""
    return dict(_numbers(report["measured"], ""))


def _numbers(found: Any, name: str) -> list[tuple[str, float]]:
    if isinstance(found, dict):
        return [pair for key, inner in found.items() for pair in _numbers(inner, f"{name} {key}".strip())]
    if isinstance(found, list):
        return [pair for index, inner in enumerate(found) for pair in _numbers(inner, f"{name} {index}")]
    return [(name, float(found))] if isinstance(found, (int, float)) and not isinstance(found, bool) else []


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Our own words, and those behind ``--``, which are ``dflash bench``'s."""
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def main() -> None:
    """Parse, measure by turns, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--model", default="qwen3.5-9b")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path)
    own, options = _split(sys.argv[1:])
    args = parser.parse_args(own)
    with tempfile.TemporaryDirectory() as folder:
        pins = Path(folder) / "pins.json"
        reports: dict[str, list[dict[str, Any]]] = {"before": [], "after": []}
        for _ in range(args.runs):
            for side, tree in (("before", args.before), ("after", args.after)):
                reports[side].append(run(tree.resolve(), pins, args.model, options))
        pinned = json.loads(pins.read_text())
    sides = {side: [times(report) for report in found] for side, found in reports.items()}
    names = [name for name in sides["before"][0] if all(name in one for found in sides.values() for one in found)]
    rows = {name: {side: [one[name] for one in found] for side, found in sides.items()} for name in names}
    for name, row in rows.items():
        before, after = median(row["before"]), median(row["after"])
        print(f"{name:60s} {before:14.5g} {after:14.5g} {after / before if before else 1.0:8.4f}")
    if args.out:
        args.out.write_text(json.dumps({"pins": pinned, "times": rows, "reports": reports}, indent=1))


if __name__ == "__main__":
    main()
