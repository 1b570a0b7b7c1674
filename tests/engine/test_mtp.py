"""A target's own layer for multi-token prediction: what it proposes is its recipe, and no text changes by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_local import settings
from dflash_local.app.resolve import Choice
from dflash_local.app.server_command import server_command
from dflash_local.drafters.engines import Drafts
from dflash_local.drafters.mtp.reference import MTPProposer
from dflash_local.engine import LoadConfig, Session, load
from dflash_local.engine.reference_runner import ReferenceRunner
from dflash_local.engine.sampling import Sampler
from dflash_local.errors import UsageError
from dflash_local.request import SamplingParams
from tests.engine_sessions import Reply, ask, random_prompt
from tests.mtp_checkpoints import FULL, Recipe, own_pair, save_target

CPU32 = LoadConfig(dtype="float32", device="cpu")
SIX = {"mtp_block_size": 6}
HOT = SamplingParams(temperature=0.8, seed=3)
PROMPT = random_prompt(24)
MORE = (pytest.param(family, marks=pytest.mark.slow) for family in ("qwen3_5_biased", "qwen3_5_wrapped"))
FAMILIES = ("qwen3_5", "qwen3_5_moe", *MORE)


class Watched:
    """The proposer, whose every proposal is compared with the recipe; what it hands on is partly right, as planted."""

    def __init__(self, inner: MTPProposer, recipe: Recipe, text: Sequence[int]) -> None:
        self.inner, self.recipe, self.text = inner, recipe, list(text)
        self.seen: list[int] = []

    @property
    def length(self) -> int:
        return self.inner.length

    def extend(self, taps: torch.Tensor, start: int) -> None:
        self.inner.extend(taps, start)

    def truncate(self, length: int) -> None:
        self.inner.truncate(length)

    def propose(self, ids: Sequence[int], count: int, sampler: Sampler, noise: torch.Tensor | None) -> Drafts:
        found, margins = self.inner.propose(ids, count, sampler, noise)
        assert found.tolist() == self.recipe.drafts(ids, count, noise, sampler.params.temperature), f"behind {len(ids)}"
        self.seen.append(count)
        right = len(self.seen) % (count + 1)  # drafts that are accepted, where the text is the known one
        known = self.text[len(ids) : len(ids) + count] if self.text[: len(ids)] == list(ids) else []
        planted = known[:right]
        return Drafts(torch.tensor([*planted, *found.tolist()[len(planted) :]]), margins)


def watched(folder: Path, text: Sequence[int] = (), normed: bool = True) -> tuple[Session, Watched]:
    session = load(own_pair(folder), CPU32)
    runner = cast(ReferenceRunner, session.runner)
    runner.target.prefill_chunk = 7
    proposer = Watched(cast(MTPProposer, runner.proposer), Recipe(folder, normed), text)
    runner.proposer = proposer
    return session, proposer


@cache
def plain(folder: Path, prompt: tuple[int, ...], sampling: SamplingParams, new: int = 30) -> list[int]:
    return ask(load(own_pair(folder), CPU32), list(prompt), new, sampling=sampling, mode="ar").ids


def lengths(reply: Reply) -> tuple[int, ...]:
    return reply.finished.stats.acceptance_lengths


@pytest.mark.parametrize("sampling", [SamplingParams(), HOT], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", FAMILIES)
def test_proposals_are_those_of_the_recipe(family: str, sampling: SamplingParams, tmp_path: Path) -> None:
    """Behind a prompt in chunks and behind cycles that were accepted whole, in part and not at all."""
    folder = save_target(family, tmp_path / "target", SIX)
    expected = plain(folder, tuple(PROMPT), sampling)
    session, proposer = watched(folder, [*PROMPT, *expected])
    counts = set()
    for block in (6, 5, 4, 3, 2) if family == "qwen3_5" else (6,):
        reply = ask(session, PROMPT, 30, sampling=sampling, block_size=block)
        assert reply.ids == expected
        assert {1, block} <= set(lengths(reply)), "nothing accepted, and all"
        counts |= set(proposer.seen)
    assert counts >= ({1, 2, 3, 4, 5} if family == "qwen3_5" else {5})


def test_hidden_states_may_be_taken_before_the_final_norm(tmp_path: Path) -> None:
    folder = save_target("qwen3_5", tmp_path / "target", {"mtp_final_norm": False})
    session, proposer = watched(folder, normed=False)
    assert ask(session, PROMPT, 12).ids == plain(folder, tuple(PROMPT), SamplingParams(seed=1))[:12]
    behind = Recipe(folder)
    before = [proposer.recipe.drafts([*PROMPT[:-1], anchor], 4, None, 1.0) for anchor in range(6)]
    assert before != [behind.drafts([*PROMPT[:-1], anchor], 4, None, 1.0) for anchor in range(6)]


def test_after_a_restored_snapshot_it_proposes_as_before(tmp_path: Path) -> None:
    """Another id stands behind the last position that is kept: its row is another."""
    folder = save_target("qwen3_5", tmp_path / "target")
    session, proposer = watched(folder)
    runner = cast(ReferenceRunner, session.runner)
    ask(session, PROMPT, 16)
    session.reset()
    sampler = Sampler(SamplingParams(), 0, runner.vocab_size, torch.tensor(PROMPT))
    points: list[Any] = []
    for tail in (random_prompt(9, 1), random_prompt(9, 2), random_prompt(1, 3)):
        runner.restart(*((len(PROMPT), points[0]) if points else (0, None)))
        runner.begin(sampler, frozenset(), 5, True)
        with torch.inference_mode():
            points += [step.point for step in runner.prefill([*PROMPT, *tail], len(PROMPT)) if step.point is not None]
            for _ in range(5):
                runner.launch()
    assert len(points) == 1 and len(proposer.seen) >= 15


def test_a_text_that_is_cut_back_and_goes_on_otherwise(tmp_path: Path) -> None:
    folder = save_target("qwen3_5", tmp_path / "target", **FULL)
    session, proposer = watched(folder)
    text = [*PROMPT, *ask(session, PROMPT, 12).ids]
    for kept in (len(text) - 1, 30, 24, 23, 8, 1):
        begun = len(proposer.seen)
        prompt = [*text[:kept], (text[kept] + 1) % 96, *random_prompt(kept % 3, kept)]
        assert ask(session, prompt, 6).ids == plain(folder, tuple(prompt), SamplingParams(seed=1))[:6]
        assert len(proposer.seen) > begun
    runner = cast(ReferenceRunner, session.runner)
    runner.restart(0, None)
    assert proposer.length == 0


def test_another_anchor_at_the_same_place_is_another_proposal(tmp_path: Path) -> None:
    folder = save_target("qwen3_5", tmp_path / "target")
    session, proposer = watched(folder)
    runner = cast(ReferenceRunner, session.runner)
    sampler = Sampler(SamplingParams(), 0, runner.vocab_size, torch.tensor(PROMPT))
    runner.begin(sampler, frozenset(), 5, True)
    with torch.inference_mode():
        list(runner.prefill(PROMPT, 0))
        for anchor in (3, 50, 3):
            proposer.propose([*PROMPT, anchor], 4, sampler, None)
    assert proposer.seen == [4, 4, 4]


def test_tokens_that_were_decoded_plainly_are_caught_up_with(tmp_path: Path) -> None:
    folder = save_target("qwen3_5", tmp_path / "target")
    session, proposer = watched(folder)
    first = ask(session, PROMPT, 10, block_size=1)  # proposes nothing, and keeps the context
    assert not proposer.seen and proposer.length >= len(PROMPT) + 8
    prompt = [*PROMPT, *first.ids, 5]
    assert ask(session, prompt, 8).ids == plain(folder, tuple(prompt), SamplingParams(seed=1))[:8]
    assert proposer.seen


@pytest.mark.parametrize("family", FAMILIES)
def test_a_drafted_text_is_the_plain_one(family: str, tmp_path: Path) -> None:
    folder = save_target(family, tmp_path / "target", SIX)
    session = load(own_pair(folder), CPU32)
    assert session.facts.block_size == 6 and session.facts.engine == "reference"
    for sampling in (SamplingParams(), HOT, replace(HOT, top_p=0.9, repetition_penalty=1.2)):
        for block in (None, 2, 4):
            found = ask(session, PROMPT, 30, sampling=sampling, block_size=block)
            assert found.ids == plain(folder, tuple(PROMPT), sampling), f"{sampling}, block {block}"


def test_a_layer_that_says_the_targets_own_ids_is_accepted(tmp_path: Path) -> None:
    """Each id has the target's likeliest next one by heart: the drafts are right where the text is."""
    folder = save_target("qwen3_5", tmp_path / "target")
    session = load(own_pair(folder), CPU32)
    proposer = cast(MTPProposer, cast(ReferenceRunner, session.runner).proposer)
    expected = plain(folder, tuple(PROMPT), SamplingParams())
    text = [*PROMPT, *expected]
    known = {text[i]: text[i + 1] for i in range(len(PROMPT) - 1, len(text) - 1)}
    head, embedding = (cast(Any, proposer.target)._head.weight, cast(Any, proposer.target)._embed.weight)
    with torch.no_grad():
        table = {tuple(embedding[one].tolist()): head[two] for one, two in known.items()}

    def by_heart(embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return torch.stack([table.get(tuple(row.tolist()), row) for row in embeddings])

    proposer.layer.join = by_heart  # type: ignore[method-assign]
    proposer.layer.forward = lambda x, inputs, cache: 100 * x  # type: ignore[method-assign]
    reply = ask(session, PROMPT, 30, sampling=SamplingParams())
    assert reply.ids == expected and max(lengths(reply)) > 2


def test_in_bfloat16_too(tmp_path: Path) -> None:
    folder = save_target("qwen3_5", tmp_path / "target")
    file = folder / "model.safetensors"
    save_file({name: each.bfloat16() for name, each in load_file(file).items()}, file, metadata={"format": "pt"})
    session = load(own_pair(folder), replace(CPU32, dtype="bfloat16", draft_window=8))
    assert any("--draft-window" in notice for notice in session.facts.notices)
    assert len(ask(session, PROMPT, 12).ids) == 12


def test_the_fused_engine_and_servers_say_that_they_cannot(tmp_path: Path) -> None:
    folder = save_target("qwen3_5", tmp_path / "target")
    with pytest.raises(UsageError, match="its drafter is of the kind mtp") as caught:
        load(own_pair(folder), replace(CPU32, engine="fused"))
    assert caught.value.hint == "use --engine reference"
    with pytest.raises(UsageError, match="vLLM runs no drafter of the kind mtp"):
        server_command("vllm", Choice("pair", folder, folder), settings.load())
