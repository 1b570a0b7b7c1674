"""A drafter of true shape that learns, random weights: memory beside its plan, and a cycle before and after.

    PYTHONPATH=. python benchmarks/adapted_pair.py qwen3.5-9b --stored int4-g128 --cap 24 --minutes 2

A whole adaptation runs as ``dflash adapt`` runs it, of prompts that are ids, as random weights have no tokenizer; what
it learns is worth nothing. The pair is written into memory (``--at``), layers that are alike with the same numbers, and
removed in the end. ``--cap`` lets torch's allocator take so many GiB only, as on a smaller card, which is planned for.
Cycles are those of ``dflash bench``, of the published drafter and of what was learnt.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.loaded_pair import GIB, card, peaks, timing
from benchmarks.random_checkpoint import add_options, add_place, build
from dflash_local import settings
from dflash_local.adapt import run
from dflash_local.adapt.asked import AskedPrompt
from dflash_local.adapt.trainer import Trainer
from dflash_local.app import load_planning
from dflash_local.app.adaptation_plan import plan_adaptation
from dflash_local.app.loading import engine_session
from dflash_local.bench.provenance import machine, versions
from dflash_local.catalog.bundled import Pair
from dflash_local.engine import LoadConfig, Session
from dflash_local.events import Notice
from dflash_local.settings import Settings
from dflash_local.transcripts.source_conversation import HELD_OUT

PROMPT = 200  # tokens


def asked(session: Session) -> Iterator[AskedPrompt]:
    """Prompts without end, in the place of the target's own questions."""
    draw, vocab = random.Random(1), session.runner.target.vocab_size
    for number in count():
        ids, held_out = tuple(draw.randrange(vocab) for _ in range(PROMPT)), draw.randrange(HELD_OUT) == 0
        yield AskedPrompt(ids, "ids", str(number), held_out)


class Watched:
    """Opens a pair for ``run.adapt``, which opens it before the drafter learns and behind that.

    Attributes:
        loaded, learning: peaks of torch's allocator in bytes while the pair is loaded, and while it is not. timings:
            of a cycle, before and after.
    """

    def __init__(self, config: LoadConfig, user: Settings, context: int) -> None:
        self._config, self._user, self._context = config, user, context
        self.loaded: list[int] = []
        self.learning = 0
        self.timings: list[Any] = []

    @contextmanager
    def __call__(self, pair: Pair) -> Iterator[Session]:
        device = self._config.device
        self.learning = max(peaks(device))
        with engine_session(pair, self._config, self._user, noted) as session:
            yield session
            self.loaded += peaks(device)  # the timing is no part of it
            self.timings.append(timing(session, self._context))
        del session
        peaks(device)


def noted(event: object) -> None:
    if isinstance(event, Notice):
        print(event.text, flush=True)


def tell(found: dict[str, Any]) -> None:
    """Print plan and measurements beside each other."""
    for name in ("loaded", "learning"):
        planned, held = found["planned"][name], found[name]
        off = f", off by {planned / held - 1:+.2%}" if held else ""
        print(f"{name}: planned {planned / GIB:.3f} GiB, measured {held / GIB:.3f} GiB{off}")
    print(f"{found['steps']} steps, {found['seconds_a_step']:.3f} s each; {found['texts']}")
    print(f"held-out tokens a cycle: {found['curve']}; {found['refusal'] or 'kept'}")
    before, after = found["timings"]
    for name in before["cycle"]:
        first, then = (each["cycle"][name]["ms"] for each in (before, after))
        print(f"cycle of {name} rows: {first:.3f} ms before, {then:.3f} ms after, {then / first:.4f}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", help="a name of the registry")
    add_options(parser)
    add_place(parser)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--cap", type=float, metavar="GIB", action="append", help="what torch's allocator may take")
    parser.add_argument("--timing", type=int, default=1024, metavar="TOKENS")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="adapted-", dir=args.at)))
        shape = {"layers": args.layers, "tiny": args.tiny, "stored": args.stored, "tiled": True}
        build(args.pair, folder, device=args.device, **shape)
        where = card(args.cap or [], args.device)
        user = settings.load({**settings.environment(), "DFLASH_HOME": str(folder / "home")})
        pair = Pair(args.pair, folder / "target", folder / "drafter", bundled=False)
        asked_load = LoadConfig(engine="fused", device=args.device, drafter_precision="full")
        stack.enter_context(mock.patch.object(load_planning, "machine", lambda *_words, **_more: where))
        plan = plan_adaptation(pair, asked_load, args.minutes, user, noted)
        print(f"{asdict(plan.load)}\n{plan.told}", flush=True)
        opened, steps = Watched(plan.load, user, args.timing), 0
        step = Trainer.step

        def counted(trainer: Trainer, *words: Any) -> Any:
            nonlocal steps
            steps += 1
            return step(trainer, *words)

        stack.enter_context(mock.patch.object(run, "of_itself", asked))
        stack.enter_context(mock.patch.object(Trainer, "step", counted))
        work, kept = folder / "work", folder / "kept.safetensors"
        learnt = run.adapt(pair, None, args.minutes, plan.load, work, kept, opened, lambda _what, _share: None)
    curve = learnt.facts["curve"]
    found = {"planned": plan.as_dict(), "loaded": max(opened.loaded), "learning": opened.learning, "steps": steps}
    found |= {"seconds_a_step": 60 * curve[-1]["minutes"] / max(1, steps - 2), "texts": learnt.facts["texts"]}
    found |= {"curve": [point["held_out"] for point in curve], "refusal": learnt.refusal, "timings": opened.timings}
    tell(found)
    if args.out is not None:
        record = {"what": "random weights of true shapes", "pair": args.pair, "layout": args.stored}
        record |= {"cap_gib": args.cap, "minutes": args.minutes, "load": asdict(plan.load), **found}
        text = json.dumps(record | {"machine": machine(), "versions": versions()}, indent=2)
        args.out.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
