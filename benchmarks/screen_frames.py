"""How long the chat screen holds its event loop while a reply streams in at a given rate.

    PYTHONPATH=. python3 benchmarks/screen_frames.py [--rate 1000] [--seconds 10] [--out FILE]

Plays a synthetic event stream (no model) of blocks at the rate, and asks the loop every few milliseconds
how late it is: the longest lateness is the longest time without a frame or a key. Beside it stands the
processor time that the loop took between two of these questions, which says the same on a busy machine.
"At the end" is the moment after the reply, when the screen collects Python's garbage that it held back before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from textual.pilot import Pilot
from textual.screen import Screen

from dflash_local.bench import provenance, report
from dflash_local.errors import DFlashError
from dflash_local.events import Piece, Step
from dflash_local.store.atomic import write_atomic
from dflash_local.ui.tui.app import ChatApp
from tests.service.scripted import ScriptedSession
from tests.ui.stage import Stage, play

BLOCK = 8
ASK_S = 0.005
AFTER_S = 0.5  # after loading, and watched after the reply
SIZES = {"80x24": (80, 24), "120x36": (120, 36), "200x50": (200, 50)}
COLUMNS = {
    "median": "median_ms",
    "p99": "p99_ms",
    "longest": "max_ms",
    "at the end": "end_ms",
    "CPU p99": "cpu_p99_ms",
    "CPU longest": "cpu_max_ms",
    "CPU at the end": "cpu_end_ms",
    "CPU s": "cpu_s",
    "wall s": "seconds",
}
PROSE = ("the ", "target ", "agrees ", "with **most** ", "of ", "what ", "is `drafted`", ". ")
CODE = ("    ", "value", " = ", "compute", "(", "value", ")", "\n")


def steps(count: int) -> list[Step]:
    """Paragraphs and code blocks in turn, a block of tokens per step."""
    found = []
    for index in range(count):
        section, place = divmod(index, 24)
        text = list(CODE if section % 2 else PROSE)
        if place == 0:
            text[0] = "\n\n```python\n" if section % 2 else ("\n```\n\n" if section else "")
        pieces = (Piece("".join(text[:-1]), origin="accepted"), Piece(text[-1]))
        found.append(Step(pieces, tuple(range(BLOCK)), BLOCK - 1, BLOCK - 1, BLOCK, index * 1e-3))
    return found


def write_as_a_terminal_would(app: ChatApp) -> None:
    """Off screen, Textual leaves out the escape sequences of a frame; make them too, they are part of its time."""
    display = app._display

    def written(screen: Screen[Any], renderable: Any) -> None:
        display(screen, renderable)
        if renderable is not None and not app._batch_count:
            renderable.render_segments(app.console)

    app._display = written  # type: ignore[method-assign]


def measured(rate: float, seconds: float, size: tuple[int, int]) -> dict[str, float]:
    """Lateness of the loop, in milliseconds, while one reply of ``rate`` tokens per second is shown."""
    count = int(rate * seconds / BLOCK)
    stepped: list[float] = []

    def pace(index: int) -> None:
        stepped.append(time.perf_counter())
        time.sleep(max(0.0, stepped[0] + index * BLOCK / rate - stepped[-1]))

    asked: list[tuple[float, float, float]] = []

    async def watch() -> None:
        while True:
            due, spent = time.perf_counter() + ASK_S, time.thread_time()
            await asyncio.sleep(ASK_S)
            asked.append((due, 1e3 * (time.perf_counter() - due), 1e3 * (time.thread_time() - spent)))

    async def act(stage: Stage, pilot: Pilot[DFlashError]) -> None:
        write_as_a_terminal_would(stage.app)
        await asyncio.sleep(AFTER_S)
        watcher = asyncio.create_task(watch())
        stage.chat.composer.put("go")
        await pilot.press("enter")
        deadline = time.monotonic() + 10 * seconds
        while time.monotonic() < deadline and (stage.chat.busy or not stage.session.requests):
            await asyncio.sleep(ASK_S)  # the pilot's own waiting asks every widget: it would be most of the load
        await asyncio.sleep(AFTER_S)
        watcher.cancel()

    play(act, ScriptedSession(steps=steps(count), on_step=pace), size=size)
    late = sorted(ms for due, ms, _ in asked if due <= stepped[-1])
    cpu = sorted(ms for due, _, ms in asked if due <= stepped[-1])
    return {
        "tokens": count * BLOCK,
        "seconds": stepped[-1] - stepped[0],
        "median_ms": late[len(late) // 2],
        "p99_ms": late[int(0.99 * len(late))],
        "max_ms": late[-1],
        "end_ms": max(ms for due, ms, _ in asked if due > stepped[-1]),
        "cpu_p99_ms": cpu[int(0.99 * len(cpu))],
        "cpu_max_ms": cpu[-1],
        "cpu_end_ms": max(ms for due, _, ms in asked if due > stepped[-1]),
        "cpu_s": sum(cpu) / 1e3,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rate", type=float, default=1000.0, help="tokens per second")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    args = parser.parse_args(arguments)
    # A process for each: one that showed a long reply before has more garbage to look through.
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        figures = pool.starmap(measured, [(args.rate, args.seconds, size) for size in SIZES.values()], chunksize=1)
    found: dict[str, Any] = dict(zip(SIZES, figures, strict=True))
    print(f"{args.rate:g} tok/s for {args.seconds:g} s, synthetic events; how late the screen's loop is, in ms")
    rows = [(name, *(f"{row[key]:.1f}" for key in COLUMNS.values())) for name, row in found.items()]
    print("\n".join(report.table(("screen", *COLUMNS), rows)))
    if args.out:
        results = {"report": "screen frames", "rate": args.rate, "machine": provenance.machine(), "screens": found}
        write_atomic(args.out, json.dumps(results, indent=1) + "\n", 0o644)
    return 0


if __name__ == "__main__":
    sys.exit(main())
