"""Writes what a real drafter said of its drafts, and how many were right: a trace for ``planted_regimes.py --trace``.

    PYTHONPATH=. python benchmarks/record_trace.py [smollm2] > FILE.json

Greedy replies of the pair to prompts that it was not trained on, on this CPU, by kind in turns of a few prompts each;
all drafts of each block are verified. JSON of [[confidences, accepted], ...], cycle by cycle.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter

from benchmarks.real_pair import HELD_OUT
from dflash_local import settings
from dflash_local.app.loading import open_session
from dflash_local.app.resolve import resolve
from dflash_local.bench.prompts import held_out
from dflash_local.bench.trial import prompt_ids, write
from dflash_local.engine.runner import Cycle
from dflash_local.load_config import LoadConfig
from dflash_local.request import Limits, Request

IN_A_ROW = 2  # prompts of a kind, before those of the next one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--tokens", type=int, default=96, help="of a reply at most")
    parser.add_argument("--cycles", type=int, default=1200, help="that are written")
    args = parser.parse_args()
    pair = resolve(args.model, None, settings.load(), lambda _event: None)
    session = open_session(pair, LoadConfig(device="cpu", engine="reference"))
    runner, found, collect = session.runner, list[Cycle](), session.runner.collect

    def noted() -> list[Cycle]:
        cycles = collect()
        found.extend(cycles)
        return cycles

    runner.collect = noted  # type: ignore[method-assign]
    seen = Counter[str]()
    turns = []
    for prompt in held_out(HELD_OUT):
        turns.append((seen[prompt.kind] // IN_A_ROW, prompt))
        seen[prompt.kind] += 1
    for _, prompt in sorted(turns, key=lambda turn: (turn[0], turn[1].kind)):
        if len(found) >= args.cycles:
            break
        ids = prompt_ids(session, prompt, thinking=False)
        write(session, Request(prompt_ids=ids, limits=Limits(args.tokens), block_size=session.facts.block_size))
        found[:] = [cycle for cycle in found if cycle.confidences]
    trace = [[[round(each, 3) for each in cycle.confidences], cycle.accepted] for cycle in found[: args.cycles]]
    print(json.dumps(trace, separators=(",", ":")))


if __name__ == "__main__":
    main()
