"""Kinds that choose ids by the id before: a module drafts what the running drafter does, and what it learns is drafted
with.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from torch.nn import functional

from dflash_local.adapt import drafter_file
from dflash_local.adapt.dialogues import Dialogues
from dflash_local.adapt.drafter_file import LearningDrafter, new_module, read_fc, read_module
from dflash_local.adapt.kept_texts import DIALOGUES, KeptTexts, TargetTables, WrittenText, keep_tables, keep_texts
from dflash_local.adapt.low_rank import RANK, tables_by_id
from dflash_local.adapt.trainer import Recipe, Trainer
from dflash_local.adapt.windows import Windows, pack
from dflash_local.bench.trial import scored_target, write
from dflash_local.catalog.bundled import Pair
from dflash_local.drafters.dflash2.layout import PREDECESSORS, SELECTOR
from dflash_local.drafters.dspark.layout import EMBEDDING, FOLLOWING, HEAD, PREVIOUS
from dflash_local.engine import LoadConfig, load
from dflash_local.engine.sampling import Sampler
from dflash_local.models.adapted_drafter import adapted
from dflash_local.models.head_loss import head_loss
from dflash_local.models.pair import open_drafter
from dflash_local.request import Limits, Request, SamplingParams
from dflash_local.store.adaptations import Adaptation
from tests.dspark_checkpoints import VOCAB
from tests.engine.named_pairs import DSPARK, named_pair

CPU = LoadConfig(device="cpu", dtype="float32", engine="reference")
DFLASH2, OTHER = "qwen3-dflash2-b8", "qwen3-dflash2-b16"
CODEBOOK = f"{SELECTOR}.{PREDECESSORS}"
PROMPTS, REPLY = ([2], [9, 11, 30], [41, 7]), 48


def learner_of(pair: Pair) -> LearningDrafter:
    """The pair's drafter, to be trained."""
    assert pair.drafter is not None
    files = open_drafter(pair.drafter)
    return LearningDrafter(files, read_module(files), torch.float32)


class Lesson:
    """Greedy replies of a pair's target, kept for its drafter to learn from."""

    def __init__(self, pair: Pair, folder: Path) -> None:
        self.session = load(pair, CPU)
        self.target = scored_target(self.session)
        self.drafter = learner_of(pair)
        texts = [WrittenText((*prompt, *self.reply(prompt)), len(prompt)) for prompt in map(tuple, PROMPTS)]
        files = self.drafter.files
        keep_texts(folder, texts, 512, self.target, read_fc(files), lambda *_: None)
        ids = {each for text in texts for each in text.ids} | {self.drafter.config.mask_token_id}
        keep_tables(folder, ids, self.target, new_module(files), files)
        self.dialogues = Dialogues.load(folder / DIALOGUES)
        tables = TargetTables.load(folder, torch.device("cpu"))
        self.teacher = KeptTexts.open(folder, tables, len(self.dialogues.ids))

    def reply(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(write(self.session, Request(prompt_ids=prompt, limits=Limits(REPLY))).ids)

    def trainer(self) -> Trainer:
        recipe = Recipe(windows=2, length=64, anchors=24, rounds=1, matrix_rate=1e-2, norm_rate=1e-2, warm_up=1)
        return Trainer(self.teacher, self.drafter.module, recipe)


def with_others(folder: Path, *names: str) -> None:
    """Put noise in the place of tensors of a drafter."""
    tensors, draw = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(5)
    for name in names:
        tensors[name] = torch.randn(tensors[name].shape, generator=draw)
    save_file(tensors, folder / "model.safetensors")


def own_pair(name: str, folder: Path, *others: str) -> Pair:
    """A pair whose drafter lies in ``folder``, with noise in the place of some of its tensors."""
    pair = named_pair(name, folder / "drafter")
    assert pair.drafter is not None
    if pair.drafter != folder / "drafter":
        shutil.copytree(pair.drafter, folder / "drafter")
    with_others(folder / "drafter", *others)
    return replace(pair, drafter=folder / "drafter")


@pytest.mark.parametrize(
    ("name", "others"),
    [(DFLASH2, ()), (OTHER, ()), (DSPARK, (PREVIOUS, FOLLOWING)), (DSPARK, (PREVIOUS, FOLLOWING, EMBEDDING, HEAD))],
    ids=["dflash2", "dflash2 with factors", "dspark", "dspark with tables"],
)
@torch.inference_mode()
def test_it_drafts_what_the_running_drafter_does(name: str, others: tuple[str, ...], tmp_path: Path) -> None:
    lesson = Lesson(own_pair(name, tmp_path, *others), tmp_path / "kept")
    trainer, proposer = lesson.trainer(), lesson.session.runner.proposer
    config, module, dialogues = lesson.drafter.config, lesson.drafter.module, lesson.dialogues
    length = int(dialogues.length[0])
    ids = torch.from_numpy(dialogues.ids[:length])
    places = torch.arange(length)[None]
    windows = Windows(ids[None], ids[None], places, torch.zeros_like(places), places >= 0, places)
    lesson.target.clear()
    taps = lesson.target.prefill(ids, True).taps
    assert taps is not None
    anchors = torch.tensor([[1, 20, length - 1]])  # without a window's look back, within and beyond it
    sampler = Sampler(SamplingParams(), 0, lesson.target.vocab_size, ids)
    hidden = trainer._forward(module.packed, windows, lesson.teacher.taps_of(windows, ()), anchors)
    for part, anchor in zip(hidden.split(config.block_size - 1), anchors[0].tolist(), strict=True):
        proposer.truncate(0)
        proposer.extend(taps[:anchor], 0)
        drafts = proposer.propose(ids[: anchor + 1].tolist(), config.block_size - 1, sampler, None).ids
        own = proposer.drafter.draft_hidden(proposer._cache, proposer._block, anchor)[config.first_draft :]
        torch.testing.assert_close(part, own, atol=5e-5, rtol=1e-4)
        before, every = torch.cat((ids[anchor : anchor + 1], drafts[:-1])), torch.ones(len(drafts))
        assert torch.equal(module.loss(part, lesson.teacher.head, before, drafts, every)[1], drafts)
        unlike = module.loss(part, lesson.teacher.head, before + 1, drafts, every)[1]
        assert not torch.equal(unlike, drafts), "the ids before have a part in it"


def test_the_loss_of_a_markov_head_is_that_of_all_logits_together() -> None:
    draw = torch.Generator().manual_seed(0)
    hidden, head, rows, table = (torch.randn(shape, generator=draw) for shape in ((9, 16), (40, 16), (9, 4), (40, 4)))
    labels, weights = torch.arange(9), torch.rand(9, generator=draw) * (torch.arange(9) != 4)
    learnt = [each.clone().requires_grad_() for each in (hidden, rows, table)]
    logits = learnt[0] @ head.t() + learnt[1] @ learnt[2].t()
    wanted = (functional.cross_entropy(logits, labels, reduction="none") * weights).sum()
    found, likeliest = head_loss(labels, weights, learnt[0], head, learnt[1], learnt[2])
    torch.testing.assert_close(found, wanted)
    assert torch.equal(likeliest, logits.argmax(1))
    for left, right in zip(torch.autograd.grad(found, learnt), torch.autograd.grad(wanted, learnt), strict=True):
        torch.testing.assert_close(left, right)


def test_an_id_that_is_no_candidate_becomes_likelier(tmp_path: Path) -> None:
    drafter = learner_of(own_pair(DFLASH2, tmp_path))
    head, hidden = torch.eye(VOCAB, 64), torch.zeros(2, 64)
    hidden[0, :9] = torch.arange(9.0, 0.0, -1.0)  # eight candidates, of which 8 is none
    hidden[1, :9] = hidden[0, :9]
    hidden.requires_grad_()
    labels = torch.tensor([8, 3])
    loss, likeliest = drafter.module.loss(hidden, head, torch.tensor([1, 1]), labels, torch.tensor([1.0, 0.0]))
    loss.backward()
    assert hidden.grad is not None and hidden.grad[0, 8] < 0 < hidden.grad[0, 0]
    assert not hidden.grad[1].any(), "a weight of zero leaves a row out"
    assert bool((likeliest < 8).all()), "what is no candidate is never drafted"


@pytest.mark.parametrize(("name", "learnt"), [(DFLASH2, CODEBOOK), (DSPARK, FOLLOWING)])
def test_what_has_learnt_nothing_is_what_was_published(name: str, learnt: str, tmp_path: Path) -> None:
    drafter = learner_of(own_pair(name, tmp_path))
    tensors = drafter.tensors(drafter.module)
    stored = load_file(tmp_path / "drafter" / "model.safetensors")
    assert learnt in tensors and stored.keys() - tensors.keys() <= {
        *("fc.weight", EMBEDDING, HEAD, "confidence_head.proj.weight", "confidence_head.proj.bias"),
    }
    assert all(torch.equal(value, stored[each].bfloat16()) for each, value in tensors.items())


@pytest.mark.parametrize(
    ("name", "lost"), [(DFLASH2, (CODEBOOK,)), (DSPARK, (PREVIOUS, FOLLOWING))], ids=["dflash2", "dspark"]
)
def test_a_large_one_learns_pairs_in_what_chooses_its_ids(
    name: str, lost: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its selector or Markov head is noise at first; the text is the same before and after."""
    monkeypatch.setattr(drafter_file, "MOST_BYTES", 1000)
    torch.manual_seed(0)
    pair = own_pair(name, tmp_path, *lost)
    lesson = Lesson(pair, tmp_path / "kept")
    trainer = lesson.trainer()
    by_id = [each.shape for each in tables_by_id(lesson.drafter.module) if each.requires_grad]
    assert by_id == [(VOCAB, RANK)] * 2
    for _, windows in islice(pack(lesson.dialogues, 2, 64, 0), 40):
        trainer.step(windows)
    both = zip(trainer.drafter.parameters(), trainer.average.parameters(), strict=True)
    assert all((one is other) != one.requires_grad for one, other in both), "what is frozen is there once"
    assert len(trainer.state()["average"]) == sum(each.requires_grad for each in trainer.drafter.parameters())
    tensors = lesson.drafter.tensors(trainer.average)
    assert {f"{each}.{part}" for each in lost for part in ("up", "down")} <= tensors.keys()
    assert all(value.ndim != 2 or each.endswith((".up", ".down")) for each, value in tensors.items())
    assert not any(each.startswith("layers.0.") and each.endswith(".up") for each in tensors)
    file, published = tmp_path / "learnt.safetensors", load_file(tmp_path / "drafter" / "model.safetensors")
    file.write_bytes(save(tensors))
    stored, up, down = (each[lost[0] + part] for each, part in ((published, ""), (tensors, ".up"), (tensors, ".down")))
    merged = torch.zeros_like(stored)
    adapted(lesson.drafter.files, file).fill({lost[0]: [merged]})
    torch.testing.assert_close(merged, stored + up @ down)
    learnt = replace(pair, adaptation=Adaptation(file, {"made": "", "id": "tried"}))
    texts, cycles = zip(*(written(each, CPU) for each in (pair, learnt)), strict=True)
    assert texts[0] == texts[1] and cycles[1] < 0.8 * cycles[0], cycles
    assert written(learnt, replace(CPU, engine="fused")) == (texts[1], cycles[1])


def written(pair: Pair, config: LoadConfig) -> tuple[list[list[int]], int]:
    """What a pair answers, and in how many cycles."""
    session = load(pair, config)
    replies = [write(session, Request(prompt_ids=prompt, limits=Limits(REPLY))) for prompt in map(tuple, PROMPTS)]
    session.close()
    return [list(reply.ids) for reply in replies], sum(len(each.stats.acceptance_lengths) for each in replies)
