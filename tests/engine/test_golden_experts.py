"""Golden pairs of mixtures of experts: both engines give transformers' own ids and the drafter's own acceptance."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from dflash_local.engine.load_pair import load
from dflash_local.engine.session import Session
from dflash_local.load_config import LoadConfig
from dflash_local.request import SamplingParams
from tests.engine_sessions import ask
from tests.golden_experts import BLOCKS, FAMILIES, NEW, PROMPTS, GoldenPair, write_pair

ENGINES = ("fused", "reference")


@cache
def loaded(family: str) -> tuple[GoldenPair, dict[str, Session]]:
    """The pair, and a session of it by each engine."""
    with TemporaryDirectory() as folder:
        golden = write_pair(family, Path(folder))
        config = {engine: LoadConfig(dtype="float32", device="cpu", engine=engine, context=128) for engine in ENGINES}
        return golden, {engine: load(golden.pair, config[engine]) for engine in ENGINES}


# A mixture beside a recurrence and a shared expert is in both of Qwen's hybrids, one beside attention in gpt_oss, too;
# what is left out here is in the long tests.
EACH = pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=pytest.mark.slow if each in ("qwen3_moe", "qwen3_next") else ()) for each in FAMILIES],
)


@EACH
def test_both_engines_give_the_golden_answers(family: str) -> None:
    golden, sessions = loaded(family)
    assert len(golden.answers) == PROMPTS
    for name, session in sessions.items():
        assert session.facts.engine == name
        for answer, block in zip(golden.answers, BLOCKS * PROMPTS):  # each block for every other prompt
            assert ask(session, answer.prompt, NEW, mode="ar").ids == answer.output
            reply = ask(session, answer.prompt, NEW, mode="dflash", block_size=block)
            assert reply.ids == answer.output, (name, block)
            assert list(reply.finished.stats.acceptance_lengths) == answer.acceptance_lengths[block], (name, block)


@EACH
def test_golden_answers_are_no_easy_ones(family: str) -> None:
    """Texts that do not loop, drafts of which many are accepted and some refused."""
    answers = loaded(family)[0].answers
    assert sum(len(set(answer.output)) for answer in answers) > PROMPTS * NEW / 2
    for block in BLOCKS:
        lengths = [length for answer in answers for length in answer.acceptance_lengths[block]]
        assert sum(lengths) / len(lengths) > 1.5 and len(set(lengths)) >= 3 and min(lengths) < block / 2


@EACH
def test_sampled_ids_are_the_definitions_own(family: str) -> None:
    golden, sessions = loaded(family)
    sampling, prompt = SamplingParams(temperature=0.8, seed=5), golden.answers[-1].prompt
    want = ask(sessions["reference"], prompt, NEW, sampling=sampling, mode="ar").ids
    assert golden.chosen(prompt, want, 0.8, 5) == want != golden.answers[-1].output
    replies = [ask(each, prompt, NEW, sampling=sampling) for each in sessions.values()]
    lengths = [reply.finished.stats.acceptance_lengths for reply in replies]
    assert [reply.ids for reply in replies] == [want, want] and lengths[0] == lengths[1]
