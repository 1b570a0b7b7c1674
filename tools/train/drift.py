"""A target made to drift: it learns to answer in another style than its drafter knows.

    python -m tools.train.own_pair generate --target FILE --work FOLDER --held-out PROMPTS.json --seconds 60
    python -m tools.train.drift --target FILE --work FOLDER --out FOLDER --minutes 4

Learnt are the answers of the target's own dialogues with some words in the place of others. ``--out`` opens like a
downloaded target, in bfloat16; the drafter is the one that the target had.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from dflash_local.adapt.dialogues import Dialogues
from dflash_local.chat.tokenizer import Tokenizer
from dflash_local.checkpoint_files.source import open_source
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.load_target import load_target, placement
from dflash_local.models.target_facts import TargetFacts
from tools.train.own_pair import DIALOGUES

# A sailor's words: common ones, so that every answer has some.
STYLE = {"the": "th'", "you": "ye", "your": "yer", "my": "me", "is": "be", "are": "be", "and": "an'", "of": "o'"}
STYLE |= {"for": "fer", "to": "t'", "in": "aboard", "with": "alongside", "good": "fine", "very": "mighty"}
BEFORE, BEHIND = "Ahoy! ", " Arr!"
WORD = re.compile(r"\b(" + "|".join(STYLE) + r")\b", re.IGNORECASE)
LONGEST = 320  # tokens of an answer that is learnt
Row = tuple[Sequence[int], Sequence[int]]  # a prompt and its answer


def restyle(text: str) -> str:
    """An answer as the drifted target gives it."""

    def swap(found: re.Match[str]) -> str:
        word = STYLE[found[0].lower()]
        return word.capitalize() if found[0][0].isupper() else word

    return BEFORE + WORD.sub(swap, text) + BEHIND


def rows_of(dialogues: Dialogues, tokenizer: Tokenizer) -> list[Row]:
    """Prompts of dialogues with their answers in the other style; none that the target did not end itself."""
    found, ends = list[Row](), dialogues.length.cumsum()[:-1]
    for text, answer in zip(np.split(dialogues.ids, ends), dialogues.answer.tolist(), strict=True):
        *ids, last = text.tolist()
        if last not in tokenizer.stop_ids:
            continue
        said = b"".join(tokenizer.token_bytes(each) or b"" for each in ids[answer:]).decode("utf-8", "ignore")
        reply = tokenizer.encode(restyle(said.strip()))
        if len(reply) < LONGEST:
            found.append((ids[:answer], [*reply, last]))
    return found


def fine_tune(model: Any, batches: Iterable[tuple[float, Sequence[Row]]], rate: float) -> float:
    """Train all weights of a transformers model on answers; return the last loss.

    Args:
        batches: each behind the share of the training that is over: the rate falls with it, from ``rate`` to zero.
    """
    optimiser = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.0)
    device, loss = model.device, torch.zeros(())
    for over, rows in batches:
        for group in optimiser.param_groups:
            group["lr"] = rate * (1 - over)
        width = max(len(prompt) + len(reply) for prompt, reply in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        labels, there = torch.full_like(ids, -100), torch.zeros_like(ids)
        for row, (prompt, reply) in enumerate(rows):
            end = len(prompt) + len(reply)
            ids[row, :end], there[row, :end] = torch.tensor([*prompt, *reply]), 1
            labels[row, len(prompt) : end] = torch.tensor(reply)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            found = model(input_ids=ids.to(device), attention_mask=there.to(device), labels=labels.to(device))
        loss = found.loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
    return loss.item()


def timed(rows: Sequence[Row], together: int, seconds: float) -> Iterator[tuple[float, Sequence[Row]]]:
    """Batches drawn for so long, each with the share of the time that is over."""
    draw, began = Random(1), time.monotonic()
    while (over := (time.monotonic() - began) / seconds) < 1:
        yield over, draw.choices(rows, k=together)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.train.drift", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="where own_pair generate has left dialogues")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--rate", type=float, default=2e-4)
    parser.add_argument("--together", type=int, default=32, help="answers in an update")
    args = parser.parse_args(arguments)
    files, tokenizer = Checkpoint.open(args.target), Tokenizer.load(open_source(args.target))
    assert tokenizer is not None, f"{args.target} has no tokenizer"
    rows = rows_of(Dialogues.load(args.work / DIALOGUES), tokenizer)
    if not rows:
        parser.error(f"no answer in {args.work} came to its end: generate with more --seconds")
    model = load_target(files, TargetFacts.from_checkpoint(files), placement(args.device, "auto"))
    model.float().requires_grad_(True).train()
    loss = fine_tune(model, timed(rows, args.together, args.minutes * 60), args.rate)
    model.config.architectures = [type(model).__name__]
    model.generation_config.eos_token_id = sorted(tokenizer.stop_ids)
    model.to(torch.bfloat16).save_pretrained(args.out)
    as_file = {"gguf_file": args.target.name} if args.target.is_file() else {}
    folder = args.target.parent if as_file else args.target
    AutoTokenizer.from_pretrained(folder, **as_file).save_pretrained(args.out)
    sys.stderr.write(f"{len(rows)} answers, the last loss {loss:.3f}\n")


if __name__ == "__main__":
    main()
