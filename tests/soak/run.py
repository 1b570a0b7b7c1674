"""A long mixed load on ``dflash serve``: do memory, descriptors or threads grow, and is any text wrong?

    python -m tests.soak.run [--minutes 60] [--model demo] [--out FILE]

Starts the server on a free loopback port, records what it says without drafting, and then compares every reply with
that under clients of all kinds (``load``). Exits with 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflash_local.bench import provenance, report
from dflash_local.store.atomic import write_atomic
from tests.serve_process import served
from tests.soak.load import Client, Load
from tests.soak.watch import Sample, Watch, complaints, points

CLIENTS = 5
BURST = 14  # at once: one runs, eight wait, the rest is told to come again
BURST_EVERY_S = 20.0
WATCH_EVERY_S = 1.0
SAMPLES = 600
KEPT = 60  # of them in the file
QUIET_S = 40.0  # for connections that are still to be cut off


def play(client: Client, load: Load, seconds: float, pid: int) -> tuple[list[Sample], Sample, Sample]:
    """The load for so long: samples, and the idle server before and after."""
    with Watch(pid, min(5.0, max(0.5, seconds / SAMPLES))) as watch:
        before = _idle(client, watch)
        until = time.monotonic() + seconds
        began = len(watch.samples)
        threads = [threading.Thread(target=load.work, args=(n, until), daemon=True) for n in range(CLIENTS)]
        threads += [
            threading.Thread(target=load.watch, args=(until, WATCH_EVERY_S), daemon=True),
            threading.Thread(target=load.burst, args=(until, BURST_EVERY_S, BURST), daemon=True),
            threading.Thread(target=load.half_open, args=(until,), daemon=True),
        ]
        for thread in threads:
            thread.start()
        while time.monotonic() < until:
            time.sleep(min(60.0, max(0.0, until - time.monotonic())))
            print(_progress(watch.samples, load), file=sys.stderr, flush=True)
        ended = len(watch.samples)
        for thread in threads:
            thread.join(QUIET_S)
        after = _idle(client, watch)
    samples = watch.samples[began:ended]
    return [Sample(**{**asdict(one), "at": one.at - samples[0].at}) for one in samples], before, after


def _idle(client: Client, watch: Watch) -> Sample:
    """The server once nothing runs, nothing waits, and idle connections are gone."""
    until = time.monotonic() + QUIET_S
    while time.monotonic() < until:
        health = json.loads(client.ask("/health")[1])
        if not health["running"] and not health["waiting"]:
            break
        time.sleep(0.2)
    time.sleep(6.0)  # uvicorn keeps a quiet connection for five seconds
    return watch.look()


def _progress(samples: Sequence[Sample], load: Load) -> str:
    last = samples[-1]
    return (
        f"{last.at / 60:5.1f} min  {last.resident / 1e6:8.2f} MB  {last.descriptors} descriptors  {last.threads} "
        f"threads  {sum(load.counts.values())} requests  {load.wrong} wrong  {load.faulty} faults"
    )


def lines(found: dict[str, Any]) -> Iterator[str]:
    """The tables of a run."""
    yield f"{found['model']}: {found['minutes']:g} minutes of mixed load, {found['clients']} clients and bursts"
    rows = [
        (name, f"{one['resident'] / 1e6:.2f}", *(f"{one[key]:g}" for key in ("descriptors", "threads", "processes")))
        for name, one in found["points"].items()
    ]
    yield from report.table(("server and its children", "resident MB", "descriptors", "threads", "processes"), rows)
    yield f"growth in the last half: {found['growth_bytes'] / 1e6:.2f} MB by medians"
    yield ""
    yield from report.table(
        ("request", "status", "count"), [(kind, status, str(count)) for kind, status, count in found["requests"]]
    )
    yield ""
    yield f"{found['compared']} texts compared with those recorded without drafting, {found['wrong']} wrong"
    yield from (f"fault: {fault}" for fault in found["faults"])
    yield from (f"MISSED: {one}" for one in found["missed"])
    yield "all bars met" if not found["missed"] else f"{len(found['missed'])} bars missed"


def measured(model: str, minutes: float) -> dict[str, Any]:
    """One run and its figures.

    Raises:
        ValueError: the server does not answer what is to be compared, or the run was too short for a figure.
    """
    token = secrets.token_hex(16)
    with served(model, {"DFLASH_TOKEN": token}) as url:
        client = Client(url, model, token)
        load = Load(client)
        pid = json.loads(client.ask("/dflash/v1/status")[1])["pid"]
        samples, before, after = play(client, load, 60.0 * minutes, pid)
    start, middle, end = points(samples)
    missed = list(complaints(samples, before, after))
    missed += [f"{load.wrong} of {load.compared} texts are wrong"] if load.wrong else []
    missed += [f"{load.faulty} requests went wrong"] if load.faulty else []
    missed += [] if load.compared else ["no text was compared"]
    return {
        "report": "soak",
        "model": model,
        "minutes": minutes,
        "clients": CLIENTS,
        "machine": provenance.machine(),
        "versions": provenance.versions(),
        "points": {
            "idle before": asdict(before),
            "start": asdict(start),
            "half": asdict(middle),
            "end": asdict(end),
            "idle after": asdict(after),
        },
        "growth_bytes": end.resident - middle.resident,
        "requests": [[kind, status, count] for (kind, status), count in sorted(load.counts.items())],
        "compared": load.compared,
        "wrong": load.wrong,
        "faults": load.faults,
        "missed": missed,
        "samples": [asdict(one) for one in samples[:: max(1, len(samples) // KEPT)]],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    args = parser.parse_args(arguments)
    found = measured(args.model, args.minutes)
    print("\n".join(lines(found)))
    if args.out:
        write_atomic(args.out, json.dumps(found, indent=1) + "\n", 0o644)
    return 1 if found["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
