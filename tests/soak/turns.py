"""Four clients at once on one ``dflash serve``: does anybody wait longer than the bound of ``service/turns.py``?

    python -m tests.soak.turns [--minutes 30] [--model demo]

One asks for long replies, one has long prompts, one asks short questions, one leaves in the middle. A wait is the time
from a request, or from an event of its reply, to the next event, as the client sees it. A border, the longest that a
client waits alone, is measured first. Exits with 1 where the bound is missed, or a text is another than alone.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from random import Random
from typing import Any

from dflash_local.bench import report
from dflash_local.service.turns import SLICE_S
from tests.serve_process import served
from tests.soak.load import Client, frames, streamed
from tests.soak.requests import CHAT

CLIENTS = 4
SWITCH_S = 0.25  # the toy's take milliseconds; what a busy machine adds
PAUSE_S = 0.5  # between two requests of one client, at most
NEVER_ENDS = {"temperature": 0, "frequency_penalty": -2.0, "mode": "ar"}  # it repeats one token
PROMPT_WORDS = 450


@dataclass(slots=True)
class Kind:
    """A kind of request, and what came of it.

    Attributes:
        body: of the request with this number. leaves: after so many events, of a draw. texts: by body, what was said.
        waits, wholes: seconds.
    """

    body: Callable[[int], Mapping[str, Any]]
    leaves: int = 0
    texts: dict[str, str] = field(default_factory=dict)
    waits: list[float] = field(default_factory=list)
    wholes: list[float] = field(default_factory=list)
    wrong: int = 0


def _chat(text: str, **fields: Any) -> Mapping[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}


def kinds() -> dict[str, Kind]:
    short = ("What is 3 + 4?", "Spell the word tree.", "Count from 3 to 7.")
    return {
        "long reply": Kind(lambda _: _chat("Count from 1 to 99.", **NEVER_ENDS, max_tokens=900)),
        "long prompt": Kind(
            lambda number: _chat(f"{number} " + "word " * PROMPT_WORDS, max_tokens=200, **NEVER_ENDS),
        ),
        "short": Kind(lambda number: _chat(short[number % len(short)], max_tokens=24)),
        "leaves": Kind(lambda _: _chat("Count from 10 to 99.", **NEVER_ENDS, max_tokens=900), leaves=60),
    }


def ask(client: Client, kind: Kind, number: int, draw: Random) -> None:
    """One request, by which ``kind`` is filled."""
    body = kind.body(number)
    began = last = time.monotonic()
    connection, response = client.open(CHAT, client.body(body, stream=True))
    with closing(connection), closing(response):
        if response.status != 200:
            raise ValueError(f"{response.status} {response.read(200)!r}")
        chunks = list[dict[str, Any]]()
        most = draw.randrange(1, kind.leaves) if kind.leaves else sys.maxsize
        for chunk in frames(response):
            now = time.monotonic()
            kind.waits.append(now - last)
            last = now
            chunks.append(chunk)
            if len(chunks) == most:
                break
    kind.wholes.append(time.monotonic() - began)
    said, known = streamed(iter(chunks))[0], kind.texts.get(json.dumps(body))
    if known is None and not kind.leaves:
        kind.texts[json.dumps(body)] = said
    elif known is not None:
        kind.wrong += not known.startswith(said) if kind.leaves else known != said


def play(client: Client, seconds: float) -> tuple[dict[str, Kind], float, list[str]]:
    """All kinds at once for so long; the longest wait alone, and what went wrong."""
    found, alone, faults = kinds(), kinds(), list[str]()
    ask(client, kinds()["short"], 0, Random(0))  # which loads the model
    for name, kind in alone.items():
        kind.leaves = 0
        for number in range(3):
            ask(client, kind, number, Random(0))
        found[name].texts = kind.texts
    until = time.monotonic() + seconds

    def work(name: str) -> None:
        draw, number = Random(name), 0
        while time.monotonic() < until:
            try:
                ask(client, found[name], number, draw)
            except (OSError, ValueError) as error:
                faults.append(f"{name}: {type(error).__name__}: {error}")
            number += 1
            time.sleep(draw.uniform(0.0, PAUSE_S))

    threads = [threading.Thread(target=work, args=(name,)) for name in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found, max(wait for kind in alone.values() for wait in kind.waits), faults


def lines(found: Mapping[str, Kind], bound: float, border: float) -> Iterator[str]:
    yield f"bound: {CLIENTS - 1} x (a slice of {SLICE_S:g} s + a border + a switch) + a border = {bound:.2f} s"
    yield f"a border, the longest wait alone, took {border:.2f} s; for a switch {SWITCH_S:g} s are allowed"
    rows = [
        (name, str(len(kind.wholes)), f"{max(kind.waits):.2f}", f"{max(kind.wholes):.2f}", str(kind.wrong))
        for name, kind in found.items()
    ]
    yield from report.table(("request", "count", "longest wait, s", "longest in all, s", "wrong texts"), rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--minutes", type=float, default=30.0)
    args = parser.parse_args(arguments)
    token = secrets.token_hex(16)
    with served(args.model, {"DFLASH_TOKEN": token}) as url:
        found, border, faults = play(Client(url, args.model, token), 60.0 * args.minutes)
    bound = (CLIENTS - 1) * (SLICE_S + border + SWITCH_S) + border
    print("\n".join([*lines(found, bound, border), *faults]))
    longest, wrong = max(max(kind.waits) for kind in found.values()), sum(kind.wrong for kind in found.values())
    return 1 if faults or wrong or longest > bound else 0


if __name__ == "__main__":
    sys.exit(main())
