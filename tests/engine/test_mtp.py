"""A target's own layer for multi-token prediction: what it proposes is its recipe, and no text changes by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_local import settings
from dflash_local.app.resolve import Choice, resolve
from dflash_local.app.server_command import server_command
from dflash_local.bench.prompts import held_out
from dflash_local.bench.trial import write
from dflash_local.catalog import bundled
from dflash_local.drafters.engines import Drafts
from dflash_local.drafters.mtp.fused import MTPBlocks
from dflash_local.drafters.mtp.reference import MTPProposer
from dflash_local.engine import LoadConfig, Session, drafter_precision, load
from dflash_local.engine.cycle_records import CycleKey
from dflash_local.engine.fused_runner import FusedRunner
from dflash_local.engine.sampling import Sampler
from dflash_local.errors import UsageError
from dflash_local.events import Started, Step
from dflash_local.kernels.choose import GREEDY, Choosing, RowChooser, drawn
from dflash_local.layout import draft_head
from dflash_local.layout.buffer import distinct
from dflash_local.request import Limits, SamplingParams, user_request
from tests.engine_sessions import Reply, ask, random_prompt
from tests.mtp_checkpoints import FULL, Recipe, own_pair, save_quantized, save_target
from tests.planner.test_fused_ledger import held

CPU32 = LoadConfig(dtype="float32", device="cpu")
SIX = {"mtp_block_size": 6}
HOT = SamplingParams(temperature=0.8, seed=3)
PROMPT = random_prompt(24)
MORE = (pytest.param(family, marks=pytest.mark.slow) for family in ("qwen3_5_biased", "qwen3_5_wrapped"))
ENGINES = pytest.mark.parametrize("engine", ["reference", "fused"])
FAMILIES = ("qwen3_5", "qwen3_5_moe", *MORE)
Saved = Callable[..., Path]
recipe_of = cache(Recipe)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Targets as of ``save_target``, each made once, so that its plain texts and its recipe are as well."""
    made: dict[str, Path] = {}

    def save(family: str, keys: dict[str, Any] | None = None, **changes: Any) -> Path:
        key = repr((family, keys, changes))
        if key not in made:
            made[key] = save_target(family, tmp_path_factory.mktemp("target"), keys, **changes)
        return made[key]

    return save


class Watch:
    """Every proposal is compared with the recipe; what is handed on is partly right, as planted."""

    def __init__(self, recipe: Recipe, text: Sequence[int]) -> None:
        self.recipe, self.text, self.seen = recipe, list(text), list[int]()

    def planted(self, ids: Sequence[int], found: list[int], noise: torch.Tensor | None, heat: float) -> list[int]:
        count = len(found)
        assert found == self.recipe.drafts(ids, count, noise, heat), f"behind {len(ids)}"
        self.seen.append(count)
        right = len(self.seen) % (count + 1)  # drafts that are accepted, where the text is the known one
        known = self.text[len(ids) : len(ids) + count] if self.text[: len(ids)] == list(ids) else []
        return [*known[:right], *found[len(known[:right]) :]]


class Watched:
    """The reference engine's proposer under watch."""

    def __init__(self, inner: MTPProposer, watch: Watch) -> None:
        self.inner, self.watch = inner, watch

    @property
    def length(self) -> int:
        return self.inner.length

    def extend(self, taps: torch.Tensor, start: int) -> None:
        self.inner.extend(taps, start)

    def truncate(self, length: int) -> None:
        self.inner.truncate(length)

    def hold(self) -> Any:
        return self.inner.hold()

    def put(self, held: Any) -> None:
        self.inner.put(held)

    def propose(self, ids: Sequence[int], count: int, sampler: Sampler, noise: torch.Tensor | None) -> Drafts:
        found, margins = self.inner.propose(ids, count, sampler, noise)
        planted = self.watch.planted(ids, found.tolist(), noise, sampler.params.temperature)
        return Drafts(torch.tensor(planted), margins)


class WatchedBlocks(RowChooser):
    """The fused engine's blocks under watch. The text is what the device has."""

    def __init__(self, runner: FusedRunner, watch: Watch) -> None:
        self.inner, self.runner, self.watch = cast(Any, runner.proposer), runner, watch
        self.text: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def length(self) -> int:
        return int(self.inner.length)

    @length.setter
    def length(self, length: int) -> None:
        self.inner.length = length

    @property
    def selector(self) -> RowChooser:
        return self

    def write_context(self, taps: torch.Tensor, ids: torch.Tensor, start: int) -> None:
        self.inner.write_context(taps, ids, start)
        self.text |= dict(enumerate(ids.tolist(), start))

    def inject(self, taps: torch.Tensor) -> None:
        self.inner.inject(taps)
        target, chosen = self.runner.target, self.runner.progress.chosen[: len(taps)]
        self.text |= dict(enumerate((int(target.tokens[0]), *chosen.tolist()), int(target.start)))

    def choose(self, logits: torch.Tensor, out: torch.Tensor, how: Choosing = GREEDY) -> None:
        self.inner.choose(logits, out, how)
        noise, _, head_ids = how
        target = self.runner.target
        ids = [*(self.text[at] for at in range(int(target.start))), int(target.tokens[0])]
        drawn_noise, heat = (None, 1.0) if noise is None else (drawn(noise, logits, head_ids), float(noise[0]))
        out.copy_(torch.tensor(self.watch.planted(ids, out.tolist(), drawn_noise, heat)))


def watched(
    folder: Path, engine: str, text: Sequence[int] = (), normed: bool = True, twin: Path | None = None
) -> tuple[Session, Watch]:
    session = load(own_pair(folder), replace(CPU32, engine=engine))
    watch = Watch(recipe_of(twin or folder, normed), text)
    runner = cast(Any, session.runner)
    runner.target.prefill_chunk = 7
    if isinstance(runner, FusedRunner):
        assert isinstance(runner.proposer, MTPBlocks)
        runner.proposer = cast(Any, WatchedBlocks(runner, watch))
    else:
        runner.proposer = Watched(cast(MTPProposer, runner.proposer), watch)
    return session, watch


@cache
def plain(folder: Path, prompt: tuple[int, ...], sampling: SamplingParams, new: int = 30) -> list[int]:
    return ask(load(own_pair(folder), CPU32), list(prompt), new, sampling=sampling, mode="ar").ids


def lengths(reply: Reply) -> tuple[int, ...]:
    return reply.finished.stats.acceptance_lengths


@ENGINES
@pytest.mark.parametrize("sampling", [SamplingParams(), HOT], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", FAMILIES)
def test_proposals_are_those_of_the_recipe(family: str, sampling: SamplingParams, engine: str, saved: Saved) -> None:
    """Behind a prompt in chunks and behind cycles that were accepted whole, in part and not at all."""
    folder = saved(family, SIX)
    expected = plain(folder, tuple(PROMPT), sampling)
    session, watch = watched(folder, engine, [*PROMPT, *expected])
    counts = set()
    for block in (6, 5, 4, 3, 2) if family == "qwen3_5" else (6,):
        reply = ask(session, PROMPT, 30, sampling=sampling, block_size=block)
        assert reply.ids == expected
        assert {1, block} <= set(lengths(reply)), "nothing accepted, and all"
        counts |= set(watch.seen)
    assert counts >= ({1, 2, 3, 4, 5} if family == "qwen3_5" else {5})


@ENGINES
def test_hidden_states_may_be_taken_before_the_final_norm(engine: str, saved: Saved) -> None:
    folder = saved("qwen3_5", {"mtp_final_norm": False})
    session, watch = watched(folder, engine, normed=False)
    assert ask(session, PROMPT, 12).ids == plain(folder, tuple(PROMPT), SamplingParams(seed=1))[:12]
    behind = recipe_of(folder, True)
    before = [watch.recipe.drafts([*PROMPT[:-1], anchor], 4, None, 1.0) for anchor in range(6)]
    assert before != [behind.drafts([*PROMPT[:-1], anchor], 4, None, 1.0) for anchor in range(6)]


@pytest.mark.parametrize(
    ("family", "dialect"),
    [*(("qwen3_5", each) for each in ("fp8", "modelopt_nvfp4", "pack_quantized", "gptq")), ("qwen3_5_moe", "fp8")],
)
def test_the_fused_engine_drafts_by_codes_what_they_stand_for(family: str, dialect: str, tmp_path: Path) -> None:
    """And they take the memory that is planned."""
    coded, twin = save_quantized(family, dialect, tmp_path)
    expected = plain(twin, tuple(PROMPT), SamplingParams())
    session, watch = watched(coded, "fused", [*PROMPT, *expected], twin=twin)
    blocks = session.runner.proposer.inner
    assert any(not isinstance(each.weight, torch.Tensor) for each in blocks.matrices)
    planned = blocks.config.weights(64, "float32", blocks.config.formats)
    beside = sum(each.nbytes for each in distinct(planned).values()) - held(blocks._weights)
    assert beside == 0 if dialect == "fp8" else beside > 0, "in other codes published files have none"
    assert ask(session, PROMPT, 30, block_size=5).ids == expected and len(watch.seen) > 5


@ENGINES
def test_after_a_restored_snapshot_it_proposes_as_before(engine: str, saved: Saved) -> None:
    """Another id stands behind the last position that is kept: its row is another."""
    folder = saved("qwen3_5")
    session, watch = watched(folder, engine)
    runner = session.runner
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
                runner.collect()
    assert len(points) == 1 and len(watch.seen) >= 15


@ENGINES
def test_a_text_that_is_cut_back_and_goes_on_otherwise(engine: str, saved: Saved) -> None:
    folder = saved("qwen3_5", **FULL)
    session, watch = watched(folder, engine)
    text = [*PROMPT, *ask(session, PROMPT, 12).ids]
    for kept in (len(text) - 1, 30, 24, 23, 8, 1):
        begun = len(watch.seen)
        prompt = [*text[:kept], (text[kept] + 1) % 96, *random_prompt(kept % 3, kept)]
        assert ask(session, prompt, 6).ids == plain(folder, tuple(prompt), SamplingParams(seed=1))[:6]
        assert len(watch.seen) > begun
    session.runner.restart(0, None)
    assert session.runner.proposer.length == 0


@ENGINES
def test_another_anchor_at_the_same_place_is_another_proposal(engine: str, saved: Saved) -> None:
    folder = saved("qwen3_5")
    session, watch = watched(folder, engine)
    runner = session.runner
    sampler = Sampler(SamplingParams(), 0, runner.vocab_size, torch.tensor(PROMPT))
    runner.begin(sampler, frozenset(), 5, True)
    with torch.inference_mode():
        list(runner.prefill(PROMPT, 0))
        for anchor in (3, 50, 3):
            if isinstance(runner, FusedRunner):
                runner.set_tokens([anchor])
                runner.draft(CycleKey(5, 4, True, False, 64))
            else:
                runner.proposer.propose([*PROMPT, anchor], 4, sampler, None)
    assert watch.seen == [4, 4, 4]


@ENGINES
def test_a_chain_is_as_long_as_what_is_verified(engine: str, saved: Saved) -> None:
    """Its length is chosen before there is any confidence."""
    folder = saved("qwen3_5")
    expected = plain(folder, tuple(PROMPT), SamplingParams(seed=1))
    session, watch = watched(folder, engine, [*PROMPT, *expected])
    runner = session.runner
    assert engine == "fused" or runner.wait_ms == math.inf
    vars(runner).update(wait_ms=math.inf, costs={1: 1.0, 2: 1.1, 3: 1.2, 5: 4.0})
    reply = ask(session, PROMPT, 30)
    made = [step.rows - 1 for step in reply.find(Step) if step.rows > 1]
    assert reply.ids == expected and watch.seen[: len(made)] == made and {*made} <= {1, 2} and made


@pytest.mark.parametrize("sampling", [SamplingParams(), HOT], ids=["greedy", "sampled"])
def test_both_engines_are_as_sure_of_their_drafts(sampling: SamplingParams, saved: Saved) -> None:
    folder = saved("qwen3_5")
    one, two = (
        cast(Any, load(own_pair(folder), replace(CPU32, engine=each)).runner) for each in ("reference", "fused")
    )
    sampler = Sampler(sampling, 11, one.vocab_size, torch.tensor(PROMPT))
    with torch.inference_mode():
        for runner in (one, two):
            runner.begin(sampler, frozenset(), 5, True)
            list(runner.prefill(PROMPT, 0))
        two.set_tokens([3])
        two.draft(CycleKey(5, 4, True, not sampling.greedy, 64))
        expected = one.proposer.propose([*PROMPT, 3], 4, sampler, sampler.noise(len(PROMPT) + 1, 4))
    assert two.progress.tokens[1:5].tolist() == expected.ids.tolist()
    torch.testing.assert_close(two.progress.margins[:4], expected.confidences, atol=1e-4, rtol=1e-4)


@ENGINES
def test_tokens_that_were_decoded_plainly_are_caught_up_with(engine: str, saved: Saved) -> None:
    folder = saved("qwen3_5")
    session, watch = watched(folder, engine)
    first = ask(session, PROMPT, 10, block_size=1)  # proposes nothing, and keeps the context
    assert not watch.seen and session.runner.proposer.length >= len(PROMPT) + 8
    prompt = [*PROMPT, *first.ids, 5]
    assert ask(session, prompt, 8).ids == plain(folder, tuple(prompt), SamplingParams(seed=1))[:8]
    assert watch.seen


@pytest.mark.parametrize("family", FAMILIES)
def test_a_drafted_text_is_the_plain_one(family: str, saved: Saved) -> None:
    """And both engines accept the same drafts."""
    folder = saved(family, SIX)
    sessions = [load(own_pair(folder), replace(CPU32, engine=engine)) for engine in ("reference", "fused")]
    assert all(each.facts.block_size == 6 for each in sessions)
    for sampling in (SamplingParams(), HOT, replace(HOT, top_p=0.9, repetition_penalty=1.2)):
        for block in (None, 2, 4):
            one, two = (ask(session, PROMPT, 30, sampling=sampling, block_size=block) for session in sessions)
            assert one.ids == two.ids == plain(folder, tuple(PROMPT), sampling), f"{sampling}, block {block}"
            assert block is None or lengths(one) == lengths(two)


@pytest.mark.parametrize(
    "options",
    [{"exact": True}, {"drafter_precision": "8bit"}, {"drafter_precision": "8bit-frequent"}, {"kv_cache": "int8"}],
    ids=["exact", "eight bits", "frequent", "int8 keys"],
)
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_the_fused_engines_options_change_no_text(
    family: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, saved: Saved
) -> None:
    for room in (draft_head, drafter_precision):
        monkeypatch.setattr(room, "FREQUENT", 80)
    folder = saved(family, SIX)
    session = load(own_pair(folder), replace(CPU32, engine="fused", **options))
    assert session.runner.drafter_precision == options.get("drafter_precision", "full")
    for sampling in (SamplingParams(), HOT):
        one = ask(session, PROMPT, 20, sampling=sampling, mode="ar")
        for block in (3, 6):
            two = ask(session, PROMPT, 20, sampling=sampling, block_size=block)
            assert one.ids == two.ids, f"{sampling}, block {block}"


def test_a_chat_that_goes_on_keeps_all_that_it_has(saved: Saved) -> None:
    """The recurrent state cannot go back a token: the hidden state of the last one is there."""
    folder = saved("qwen3_5")
    session, watch = watched(folder, "fused")
    text = list(PROMPT)
    for turn in range(4):
        text += [7, turn]
        reply = ask(session, text, 9)
        (started,) = reply.find(Started)
        assert started.reused_tokens == (len(text) - 3 if turn else 0)
        text += reply.ids
    assert len(watch.seen) > 20


def test_a_trained_layer_is_accepted_as_its_recipe_is() -> None:
    """Of the bundled pair, ``--drafter mtp``: replies are the plain ones, and cycles as long as of the recipe."""
    pair = resolve("demo-hybrid", "mtp", settings.load(), lambda _: None)
    one, two = (load(pair, replace(CPU32, engine=engine)) for engine in ("reference", "fused"))
    recipe, seen = Recipe(pair.target), list[int]()
    for prompt in held_out(bundled.HELD_OUT)[::8]:
        for sampling in (SamplingParams(), HOT):
            asked = user_request(prompt.text, sampling=sampling, limits=Limits(32), mode="dflash", block_size=5)
            expected = write(one, replace(asked, mode="ar", block_size=None)).ids
            replies = [write(session, asked) for session in (one, two)]
            assert [each.ids for each in replies] == [expected] * 2
            found = [each.stats.acceptance_lengths for each in replies]
            assert found[0] == found[1]
            if sampling.greedy:
                text, at = [*one.render(asked).ids, *expected], len(one.render(asked).ids) + 1
                for length in found[0][:-1]:  # the last one ends with the reply
                    drafts = recipe.drafts(text[:at], 4, None, 1.0)
                    right = next((i for i in range(4) if drafts[i] != text[at + i]), 4)
                    assert length == right + 1
                    at += length
                seen += found[0]
    assert sum(seen) / len(seen) > 3


@ENGINES
def test_in_bfloat16_too(engine: str, tmp_path: Path) -> None:
    folder = save_target("qwen3_5", tmp_path / "target")
    file = folder / "model.safetensors"
    save_file({name: each.bfloat16() for name, each in load_file(file).items()}, file, metadata={"format": "pt"})
    session = load(own_pair(folder), replace(CPU32, engine=engine, dtype="bfloat16", draft_window=8))
    assert any("--draft-window" in notice for notice in session.facts.notices)
    assert len(ask(session, PROMPT, 12).ids) == 12


def test_servers_say_that_they_cannot(tmp_path: Path) -> None:
    folder = save_target("qwen3_5", tmp_path / "target")
    with pytest.raises(UsageError, match="vLLM runs no drafter of the kind mtp"):
        server_command("vllm", Choice("pair", folder, folder), settings.load())
