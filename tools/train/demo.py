"""`python -m tools.train.demo`: makes the demo pairs from a seed and says how good they are."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

import tokenizers
import torch
import transformers
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from tools.train.corpus import Corpus, build_corpus
from tools.train.data import DEMO_PROMPTS, HELDOUT_COUNTS, conversations, held_out_turns
from tools.train.drafter import DraftModule, save_drafter, train_drafter
from tools.train.measure import answer, prompt_ids, right_answers, stop_id
from tools.train.shapes import HIDDEN, PAIRS, PairShape, Schedule
from tools.train.target import Report, build_target, save_target, train_target
from tools.train.vocabulary import save_vocabulary, train_vocabulary

SEED = 7
HELDOUT_SEED = 40
PACKAGE = Path(__file__).parents[2] / "dflash_local"
CONVERSATIONS = 100_000
LIMIT = 480
TOY = "A toy, trained on generated text in minutes: first-run and test material, never a speed claim."


def write_prompts(out: Path) -> None:
    """heldout.json (forty prompts with their answers) and prompts.json (those that the program shows)."""
    out.mkdir(parents=True, exist_ok=True)
    turns = held_out_turns(HELDOUT_SEED, HELDOUT_COUNTS)
    rows = [{"kind": turn.kind, "prompt": turn.prompt, "answer": turn.answer} for turn in turns]
    (out / "heldout.json").write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    shown = {name: prompt for name, (prompt, _) in DEMO_PROMPTS.items()}
    (out / "prompts.json").write_text(json.dumps(shown, indent=1) + "\n", encoding="utf-8")


def score(
    model: PreTrainedModel, drafter: DraftModule, tokenizer: Tokenizer, per_kind: int, report: Report
) -> dict[str, float]:
    """Share of exact answers and mean acceptance on held-out prompts other than heldout.json, per kind and overall."""
    turns = held_out_turns(HELDOUT_SEED + 1, dict.fromkeys(HELDOUT_COUNTS, per_kind))
    got = answer(model, drafter, [prompt_ids(tokenizer, t.prompt) for t in turns], stop_id(tokenizer), LIMIT)
    right = right_answers(tokenizer, turns, got)
    result = {"right": sum(right) / len(right), "acceptance": got.mean_acceptance()}
    for kind in HELDOUT_COUNTS:
        rows = [i for i, turn in enumerate(turns) if turn.kind == kind]
        lengths = [length for i in rows for length in got.cycles[i]]
        share, mean = sum(right[i] for i in rows) / len(rows), sum(lengths) / max(1, len(lengths))
        result |= {f"right {kind}": share} | ({f"acceptance {kind}": mean} if lengths else {})
        wrong = [f"{turns[i].prompt!r} -> {tokenizer.decode(got.ids[i])[-160:]!r}" for i in rows if not right[i]]
        report(f"  {kind:9} right {share:.3f} acceptance {mean:.2f} {'e.g. ' + wrong[0] if wrong else ''}")
    report(f"  all       right {result['right']:.3f} acceptance {result['acceptance']:.2f}")
    return {name: round(value, 4) for name, value in result.items()}


def scaled(schedule: Schedule, factor: float) -> Schedule:
    """The schedule with its steps (not its batch) scaled."""
    return dataclasses.replace(schedule, steps=max(1, int(schedule.steps * factor)))


def make_pair(
    shape: PairShape, tokenizer: Tokenizer, corpus: Corpus, out: Path, factor: float, per_kind: int, report: Report
) -> None:
    """Train and save one pair under out/<name>/, with training.json beside the weights."""
    folder, began = out / shape.name, time.monotonic()
    model = build_target(shape, tokenizer, SEED)
    target_log = train_target(model, corpus, scaled(shape.target_schedule, factor), SEED, report)
    save_target(model, folder / "target")
    save_vocabulary(tokenizer, folder / "target")
    target_seconds = time.monotonic() - began
    report(f"{shape.name}: target trained in {target_seconds:.0f} s")
    torch.manual_seed(SEED + 1)
    drafter = DraftModule(shape.drafter_config, HIDDEN)
    began = time.monotonic()
    drafter_log = train_drafter(model, drafter, corpus, scaled(shape.drafter_schedule, factor), SEED + 2, report)
    save_drafter(drafter, shape, folder / "drafter")
    drafter_seconds = time.monotonic() - began
    report(f"{shape.name}: drafter trained in {drafter_seconds:.0f} s; held-out answers in blocks:")
    facts = {
        "what": TOY,
        "seed": SEED,
        "conversations": CONVERSATIONS,
        "device": corpus.device.type,
        "target_steps": target_log[-1][0],
        "drafter_steps": drafter_log[-1][0],
        "target_seconds": round(target_seconds),
        "drafter_seconds": round(drafter_seconds),
        "held_out": score(model, drafter, tokenizer, per_kind, report),
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
        "target_loss": target_log,
        "drafter_loss_and_acceptance": drafter_log,
    }
    (folder / "training.json").write_text(json.dumps(facts) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Parse, prepare tokenizer and corpus once, make the asked pairs."""
    parser = argparse.ArgumentParser(prog="python -m tools.train.demo", description=__doc__)
    parser.add_argument("--pair", choices=[*PAIRS, "all"], default="all")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--out", type=Path, default=PACKAGE / "demo")
    parser.add_argument("--steps-scale", type=float, default=1.0, help="scales the training steps")
    parser.add_argument("--conversations", type=int, default=CONVERSATIONS)
    parser.add_argument("--per-kind", type=int, default=40, help="held-out prompts of each kind for the scores")
    args = parser.parse_args(arguments)
    began = time.monotonic()

    def report(line: str) -> None:
        sys.stderr.write(f"[{time.monotonic() - began:6.1f} s] {line}\n")
        sys.stderr.flush()

    name = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
    write_prompts(args.out)
    tokenizer = train_vocabulary(conversations(SEED, min(20_000, args.conversations)))
    corpus = build_corpus(tokenizer, SEED, args.conversations, torch.device(name))
    report(f"corpus ready: {sum(int(rows.real.sum()) for rows in corpus.rows.values())} ids on {name}")
    for shape in PAIRS.values():
        if args.pair in (shape.name, "all"):
            make_pair(shape, tokenizer, corpus, args.out, args.steps_scale, args.per_kind, report)


if __name__ == "__main__":
    main()
