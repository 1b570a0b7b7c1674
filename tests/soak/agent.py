"""An agent's conversation on one pair: it grows to the end of the context again and again, side requests come between
its turns, and some replies are cancelled. Does memory grow, and is any step slower than its context explains?

    python -m tests.soak.agent [PAIR] [--context 100000] [--minutes 60] [--device cpu] [--kv-cache int8]

PAIR: a folder with ``target`` and ``drafter``, as ``benchmarks/random_checkpoint.py`` writes it, or a bundled toy,
whose positions are then as many as the context. Texts are random ids.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil
import torch

from dflash_local.bench import report
from dflash_local.catalog import bundled
from dflash_local.catalog.bundled import Pair
from dflash_local.engine import LoadConfig, Session, load
from dflash_local.events import Started, Step
from dflash_local.request import Limits, Request

RESULT = 200, 1500  # tokens of a tool's result, at least and at most
REPLY, SIDE_REPLY = 48, 16  # tokens
SIDE_PROMPT = 300
SIDE_EVERY, CANCELLED_EVERY = 12, 8  # turns, about
BINS = 5  # of the context, each with a row
Cycles = Mapping[int, Sequence[float]]


@dataclass(frozen=True, slots=True)
class Turn:
    """A reply of the conversation.

    Attributes:
        conversation: its number. context: tokens before it. reused: of these, those that were in the caches.
        cycles: their milliseconds, by verified rows. memory: bytes of torch's allocator on a GPU, of the process
            elsewhere.
    """

    conversation: int
    context: int
    reused: int
    cycles: Cycles
    memory: int


def with_positions(name: str, context: int, folder: Path) -> Pair:
    """A bundled pair whose models know so many positions."""
    pair = bundled.find(name)
    assert pair.drafter is not None
    for part, source in (("target", pair.target), ("drafter", pair.drafter)):
        (folder / part).mkdir()
        for file in source.iterdir():
            (folder / part / file.name).symlink_to(file)
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        (folder / part / "config.json").unlink()
        told = {**config, "max_position_embeddings": max(context, config["max_position_embeddings"])}
        (folder / part / "config.json").write_text(json.dumps(told), encoding="utf-8")
    return Pair(name, folder / "target", folder / "drafter", bundled=False)


def reply(session: Session, ids: Sequence[int], most: int, stop_after: int = 0) -> tuple[list[int], int, Cycles]:
    """Ids of a drafted reply, cancelled after so many cycles if any; prompt tokens that were in the caches; and its
    cycles.
    """
    request = Request(prompt_ids=tuple(ids), limits=Limits(most))
    found, cycles, reused, began = list[int](), defaultdict[int, list[float]](list), 0, time.perf_counter()

    def stopped() -> bool:
        return 0 < stop_after <= sum(map(len, cycles.values()))

    for event in session.generate(request, stopped):
        now = time.perf_counter()
        if isinstance(event, Started):
            reused = event.reused_tokens
        elif isinstance(event, Step):
            found += event.token_ids
            if event.rows:
                cycles[event.rows].append(1e3 * (now - began))
        began = now
    return found, reused, cycles


def memory_of(session: Session) -> int:
    if session.runner.device.type == "cuda":
        return torch.cuda.memory_reserved(session.runner.device)
    return int(psutil.Process().memory_info().rss)


def converse(session: Session, seconds: float, told: Callable[[str], None]) -> Iterator[Turn]:
    """Yield turns of conversations for so long; each begins anew at the context's end."""
    draw, turns, number, text = random.Random(1), 0, 0, list[int]()
    until = time.monotonic() + seconds

    def ids(count: int) -> list[int]:
        return [draw.randrange(3, session.runner.vocab_size) for _ in range(count)]

    while time.monotonic() < until:
        more = ids(draw.randrange(*RESULT))
        if len(text) + len(more) + REPLY > session.facts.context:
            number, text = number + 1, []
            told(f"{turns} turns, {number} conversations, {memory_of(session) / 2**20:.0f} MiB")
        text += more
        stopped = draw.randrange(1, 6) if draw.randrange(CANCELLED_EVERY) == 0 else 0
        said, reused, cycles = reply(session, text, REPLY, stopped)
        turns += 1
        yield Turn(number, len(text), reused, cycles, memory_of(session))
        text += said
        if draw.randrange(SIDE_EVERY) == 0:
            reply(session, ids(SIDE_PROMPT), SIDE_REPLY)


def rows_of(turns: Sequence[Turn], context: int) -> Iterator[tuple[str, ...]]:
    """Medians by context: of the first conversation, of the later ones, and how they compare. Of cycles with as many
    rows, those that the first one had most of.
    """
    groups: dict[int, tuple[list[Turn], list[Turn]]] = defaultdict(lambda: ([], []))
    for turn in turns:
        groups[BINS * turn.context // context][turn.conversation > 0].append(turn)
    for place, parts in sorted(groups.items()):
        if all(parts):
            first, later = (pooled(part) for part in parts)
            memory = (f"{max(turn.memory for turn in part) / 2**20:.0f}" for part in parts)
            times = ("", "", "", "")  # where no cycles had as many rows
            if shared := first.keys() & later.keys():
                rows = max(shared, key=lambda each: len(first[each]))
                before, after = median(first[rows]), median(later[rows])
                times = str(rows), f"{before:.2f}", f"{after:.2f}", f"{after / before:.2f}"
            yield f"{context * place // BINS:,}", *times, str(len(parts[1])), *memory


def pooled(turns: Sequence[Turn]) -> Cycles:
    found = defaultdict[int, list[float]](list)
    for turn in turns:
        for rows, spans in turn.cycles.items():
            found[rows] += spans
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", nargs="?", default="demo-hybrid")
    parser.add_argument("--context", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kv-cache", default="auto")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        if args.pair in bundled.BUNDLED:
            pair = with_positions(args.pair, args.context, Path(folder))
        else:
            pair = Pair(args.pair, Path(args.pair, "target"), Path(args.pair, "drafter"), bundled=False)
        asked = LoadConfig(device=args.device, context=args.context, kv_cache=args.kv_cache, skip_check=True)
        session = load(pair, asked)
        session.stop_ids = frozenset()  # of random weights any reply could end at once
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        turns = list[Turn]()
        with suppress(KeyboardInterrupt):  # the table is of what was held until then
            for turn in converse(session, 60.0 * args.minutes, lambda line: print(line, file=sys.stderr, flush=True)):
                turns.append(turn)
        session.close()
    count, kept = turns[-1].conversation + 1, sum(turn.reused for turn in turns) / sum(turn.context for turn in turns)
    print(f"{len(turns)} turns in {count} conversations, {kept:.0%} of their prompts were in the caches")
    heads = ("context from", "rows", "first, ms a cycle", "later, ms", "ratio", "turns", "first, MiB", "later, MiB")
    print("\n".join(report.table(heads, list(rows_of(turns, args.context)))))


if __name__ == "__main__":
    main()
