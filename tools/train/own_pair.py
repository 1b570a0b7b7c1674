"""A drafter for any dense target that this program loads, trained on text that the target writes itself.

``generate`` has the target answer the held-out prompts and write dialogues, ``train`` trains by the clock, in one call
or in several (``--stop-at``, ``--resume``), and measures what it wrote. Both share the folder ``--work``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch

from dflash_local.adapt.dialogues import Dialogues
from dflash_local.adapt.drafter_file import read_module
from dflash_local.adapt.openings import frame_of, openings, prompt_ids
from dflash_local.adapt.trainer import Recipe, Trainer, train
from dflash_local.adapt.windows import ahead, pack
from dflash_local.bench.prompts import held_out
from dflash_local.chat.tokenizer import Tokenizer
from dflash_local.checkpoint_files.source import open_source
from dflash_local.errors import CheckpointError
from dflash_local.models.pair import open_drafter
from tools.train.acceptance import MOST, Walker, cut
from tools.train.frozen_target import FrozenTarget
from tools.train.own_export import config_json, new_drafter, save
from tools.train.own_text import HeldOutFilter, Keeper
from tools.train.slots import Limits, Slots, greedy_replies, write_dialogues

DIALOGUES, REPLIES, STATE, CURVE = "dialogues.npz", "replies.json", "state.pt", "curve.json"
Report = Callable[[str], None]
Kind = TypeVar("Kind", Limits, Recipe)


def generate(args: argparse.Namespace, report: Report) -> None:
    """Replies to the held-out prompts, and dialogues of ``--seconds``, into the work folder."""
    target, tokenizer = FrozenTarget.load(args.target, args.device), Tokenizer.load(open_source(args.target))
    if tokenizer is None:
        raise CheckpointError(f"{args.target} has no tokenizer", "take a target with tokenizer.json")
    frame, held = frame_of(tokenizer), [prompt for file in args.held_out for prompt in held_out(file)]
    prompts = [prompt_ids(tokenizer, each.text) for each in held]
    stop = frame.stop | target.facts.eos_ids
    args.work.mkdir(parents=True, exist_ok=True)
    replies = greedy_replies(target, prompts, stop, MOST)
    rows = [[each.kind, prompt, reply] for each, prompt, reply in zip(held, prompts, replies, strict=True)]
    (args.work / REPLIES).write_text(json.dumps(rows), encoding="utf-8")
    report(f"{len(rows)} held-out prompts answered")
    slots = Slots(target, frame, _options(args, Limits), args.seed)
    keeper = Keeper(tokenizer, HeldOutFilter(each.text for each in held))
    asked = openings(tokenizer, args.seed, args.greedy_share)
    write_dialogues(slots, asked, args.seconds, keeper.add)
    found = keeper.dialogues()
    found.save(args.work / DIALOGUES)
    facts = {**keeper.counts, "kept": len(found.length), "tokens": len(found.ids), "answer_tokens": found.answer_tokens}
    (args.work / "generated.json").write_text(json.dumps({**facts, "seconds": args.seconds}), encoding="utf-8")
    report(json.dumps(facts))


def train_drafter(args: argparse.Namespace, report: Report) -> None:
    """Train from the work folder's dialogues up to ``--stop-at`` seconds, leaving state, curve and exports there."""
    target = FrozenTarget.load(args.target, args.device)
    dialogues = Dialogues.load(args.work / DIALOGUES)
    config = config_json(target, layers=args.layers, taps=args.taps, block=args.block, mask_id=args.mask_id)
    recipe = _options(args, Recipe)
    hidden = target.head.shape[1]
    fresh = new_drafter(config, hidden, args.seed) if args.init is None else read_module(open_drafter(args.init))
    trainer = Trainer(target, fresh.to(target.device), recipe)
    curve: list[dict[str, Any]] = []
    if args.resume:
        trainer.load(args.work / STATE)
        curve = json.loads((args.work / CURVE).read_text(encoding="utf-8"))
    replies = json.loads((args.work / REPLIES).read_text(encoding="utf-8"))
    walker = Walker(target, [cut(*row) for row in replies])
    report(f"{dialogues.answer_tokens / 1e6:.2f} M answer tokens in {len(dialogues.length)} dialogues; {recipe}")

    def evaluate(trainer: Trainer, passes: float, loss: float) -> None:
        row = {"minutes": round(trainer.used / 60, 3), "updates": trainer.updates, "passes": round(passes, 3)}
        curve.append({**row, **walker.acceptance(trainer.average)})
        (args.work / CURVE).write_text(json.dumps(curve), encoding="utf-8")
        report(f"loss {loss:.3f}, {json.dumps(curve[-1])}")

    seed = args.seed + trainer.updates
    batches = ahead(pack(dialogues, recipe.windows, recipe.length, seed), target.device.type == "cuda")
    train(trainer, batches, min(args.stop_at or args.seconds, args.seconds), args.every, evaluate)
    torch.save(trainer.state(), args.work / STATE)
    for name, codes in (("bf16", False), ("int8", True)):
        save(trainer.average, config, args.work / name, codes=codes)
        written = read_module(open_drafter(args.work / name)).to(target.device)
        report(f"{name}: {json.dumps(walker.acceptance(written))}")


def _options(args: argparse.Namespace, kind: type[Kind]) -> Kind:
    """The options that are its fields."""
    return kind(**{each.name: getattr(args, each.name) for each in fields(kind)})  # type: ignore[arg-type]


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.train.own_pair", description=__doc__)
    chosen = parser.add_subparsers(required=True)
    shown = argparse.ArgumentDefaultsHelpFormatter
    first, second = (chosen.add_parser(name, formatter_class=shown) for name in ("generate", "train"))
    for each, run, own in ((first, generate, Limits), (second, train_drafter, Recipe)):
        each.set_defaults(run=run)
        each.add_argument("--target", type=Path, required=True)
        each.add_argument("--work", type=Path, required=True)
        each.add_argument("--device", default="auto")
        for field in fields(own):
            name = f"--{field.name.replace('_', '-')}"
            each.add_argument(name, type=type(field.default), default=field.default, help=f"see {own.__name__}")
    first.add_argument("--held-out", type=Path, nargs="+", required=True, help="JSON lists of {kind, prompt}")
    first.add_argument("--seconds", type=float, default=200.0)
    first.add_argument("--seed", type=int, default=1)
    first.add_argument("--greedy-share", type=float, default=0.7)
    second.add_argument("--layers", type=int, default=4)
    second.add_argument("--taps", type=lambda text: [int(each) for each in text.split(",")], required=True)
    second.add_argument("--block", type=int, default=8)
    second.add_argument("--mask-id", type=int, required=True)
    second.add_argument("--stop-at", type=float, help="seconds of the schedule at which this call ends")
    second.add_argument("--every", type=float, default=60.0, help="seconds of training between evaluations")
    second.add_argument("--init", type=Path, help="a drafter's folder to start from; its shape is the options'")
    second.add_argument("--resume", action="store_true", help="go on from the state in the work folder")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = _arguments(arguments)
    began = time.monotonic()

    def report(line: str) -> None:
        sys.stderr.write(f"[{time.monotonic() - began:6.1f} s] {line}\n")
        sys.stderr.flush()

    torch.backends.cuda.matmul.allow_tf32 = True
    args.run(args, report)


if __name__ == "__main__":
    main()
