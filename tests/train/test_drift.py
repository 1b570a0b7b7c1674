"""A target that is made to drift says what it said in other words, and opens like any other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from dflash_local.adapt.dialogues import Dialogues
from dflash_local.adapt.openings import prompt_ids
from dflash_local.catalog import bundled
from dflash_local.chat.tokenizer import Tokenizer
from dflash_local.checkpoint_files.source import open_source
from tools.train import drift
from tools.train.own_pair import DIALOGUES

TARGET = bundled.FOLDER / "demo" / "target"


def loss(folder: Path, row: drift.Row) -> float:
    prompt, reply = row
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    labels = [*[-100] * len(prompt), *reply]
    return model(input_ids=torch.tensor([[*prompt, *reply]]), labels=torch.tensor([labels])).loss.item()


def test_a_target_learns_other_words(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(open_source(TARGET))
    assert tokenizer is not None
    prompt, said = prompt_ids(tokenizer, "Count from 2 to 3."), tokenizer.encode("The sum of 2 and 3 is 5.")
    stop = min(tokenizer.stop_ids)
    whole, cut = [*prompt, *said, stop], [*prompt, *said]
    ids, length = np.array([*cut, *whole]), np.array([len(cut), len(whole)])
    dialogues = Dialogues(ids, ids, length, np.full(2, len(prompt)))
    (tmp_path / "work").mkdir()
    dialogues.save(tmp_path / "work" / DIALOGUES)
    (row,) = drift.rows_of(dialogues, tokenizer)
    assert row[0] == prompt and tokenizer.decode(row[1][:-1]) == "Ahoy! Th' sum o' 2 an' 3 be 5. Arr!"
    out = tmp_path / "out"
    named = ["--target", str(TARGET), "--work", str(tmp_path / "work"), "--out", str(out)]
    drift.main([*named, "--device", "cpu", "--minutes", "0.03", "--together", "1"])
    assert loss(out, row) < loss(TARGET, row)
    learnt = Tokenizer.load(open_source(out))
    assert learnt is not None and learnt.stop_ids == tokenizer.stop_ids
    assert prompt_ids(learnt, "hi") == prompt_ids(tokenizer, "hi")
