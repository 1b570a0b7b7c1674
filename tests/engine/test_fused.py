"""The fused engine against the reference one: the same ids, the same cycles, on the CPU without kernels."""

from __future__ import annotations

import json
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch

from dflash_local.catalog import bundled
from dflash_local.catalog.bundled import Pair
from dflash_local.engine.fused_runner import AHEAD, FusedRunner
from dflash_local.engine.load_pair import load
from dflash_local.engine.sampling import Sampler
from dflash_local.engine.session import Session
from dflash_local.errors import UsageError
from dflash_local.load_config import LoadConfig
from dflash_local.models.transformers_target import TransformersTarget
from dflash_local.request import Limits, SamplingParams, user_request
from tests.engine.fused_sessions import fused_session, fused_target_of
from tests.engine_sessions import BLOCK, Reply, ask, random_prompt, text_of
from tests.families import VOCAB, random_model
from tests.fused_models import FAMILIES, TAPS, fused_target
from tests.proposers import Oracle, RandomDrafts, decode

GOLDEN = Path(__file__).parent.parent / "golden"
NEW = 24  # tokens of a reply: three blocks of eight
# Both engines beside each other: a pair with windows, one with a recurrence, and a drafter with a selector. Golden
# answers are held for all; the demo pairs have the layers of golden ones, and more of them.
HERE = ("qwen3-v2-swa-b16", "qwen35-v2-swa-b8", "qwen3-dflash2-b16")
FIRST = "qwen3-v1-b8"
GOLDEN_PAIRS = (FIRST, "llama31-v1-b10", "qwen3-dflash2-b8", *HERE)
LONG = (*GOLDEN_PAIRS[:3], "demo", "demo-hybrid")


@cache
def session_of(name: str, engine: str) -> Session:
    folder = GOLDEN / name
    pair = bundled.find(name) if name.startswith("demo") else Pair(name, folder / "target", folder / "drafter", False)
    return load(pair, LoadConfig(dtype="float32", device="cpu", engine=engine))


# Drafts that are all refused cost a cycle for each token, and leave the same behind in a block of any size.
# Keys and values, a window of them, a recurrence, and one beside a mixture; what else a family has shows in the hidden
# states below, and in the long tests here.
CACHES = ("qwen3", "gpt_oss_dense", "qwen3_5", "qwen3_5_moe")
EACH_CACHE = [pytest.param(family, marks=() if family in CACHES else pytest.mark.slow) for family in FAMILIES]


@pytest.mark.parametrize("refusing", [(8,), pytest.param((2, 8, 16), marks=pytest.mark.slow)], ids=["one", "every"])
@pytest.mark.parametrize("family", EACH_CACHE)
def test_l1_a_block_and_its_commit_equal_the_targets_own_text(family: str, refusing: tuple[int, ...]) -> None:
    """``refusing``: the blocks that are also drafted by what is never right."""
    prompt = random_prompt(11)
    target, text = fused_target(family, 400), text_of(family, tuple(prompt))
    want = list(text[: 11 + NEW])
    assert decode(target, prompt, NEW)[0] == want  # type: ignore[arg-type]
    for block in (2, 8, 16):
        drafters = [Oracle(VOCAB, text), Oracle(VOCAB, text, 5)]
        refused = [Oracle(VOCAB, text, 1), RandomDrafts(VOCAB)]
        for drafter in [*drafters, *refused] if block in refusing else drafters:
            assert decode(target, prompt, NEW, drafter, block)[0] == want  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_l1_hidden_states_equal_the_reference_engines(family: str) -> None:
    """Of a prompt, of a chunk behind it, and of a block: what a feature adds may be too small to change a token."""
    text, found = torch.tensor(random_prompt(40)), []
    for target in (fused_target(family, 100), TransformersTarget(random_model(family), TAPS)):
        with torch.inference_mode():
            chunks = [target.prefill(text[:7], True), target.prefill(text[7:31], True), target.verify(text[31:], True)]
        found.append([part for chunk in chunks for part in (chunk.hidden, chunk.taps)])
    for one, two in zip(*found, strict=True):
        assert one is not None and two is not None
        torch.testing.assert_close(one, two, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_part_adds_a_prompts_rows_to_the_residual(family: str) -> None:
    target, generator = fused_target(family, 100), torch.Generator().manual_seed(0)
    x = torch.randn(40, target.hidden_size, generator=generator)
    for layer in target.layers:
        for part in (layer.mixer, layer.mlp):
            target.clear()
            want = x + part.prefill(x)
            target.clear()
            residual = x.clone()
            assert part.prefill(x, residual) is residual
            torch.testing.assert_close(residual, want, rtol=1e-4, atol=2e-5)


# A drafter of the first kind, and its targets without a window, are those of llama31-v1-b10, too.
@pytest.mark.parametrize("engine", ["reference", "fused"])
@pytest.mark.parametrize("pair", [pytest.param(FIRST, marks=pytest.mark.slow), *GOLDEN_PAIRS[1:]])
def test_golden_answers_are_reproduced(pair: str, engine: str) -> None:
    for case in json.loads((GOLDEN / pair / "expected.json").read_text())["cases"]:
        reply = ask(session_of(pair, engine), case["prompt_ids"], 72)
        assert reply.ids == case["output_ids"]
        assert list(reply.finished.stats.acceptance_lengths) == case["acceptance_lengths"]


SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=5),
    SamplingParams(temperature=0.9, top_k=7, top_p=0.9, seed=6),
    SamplingParams(repetition_penalty=1.3, frequency_penalty=0.2),
)
MODES = (("ar", None), ("dflash", None), ("dflash", 3))
# How a token is chosen and how many rows a cycle has do not know of each other: each of both is there in one of these,
# but for what is golden.
APART = [
    *((sampling, MODES[1]) for sampling in SAMPLINGS[1:]),
    *((SAMPLINGS[0], mode) for mode in MODES[::2]),
    *((SAMPLINGS[3], mode) for mode in MODES[::2]),
]


@pytest.mark.parametrize(
    "ways", [APART, pytest.param(list(product(SAMPLINGS, MODES)), marks=pytest.mark.slow)], ids=["apart", "all"]
)
@pytest.mark.parametrize("pair", [*HERE, *(pytest.param(pair, marks=pytest.mark.slow) for pair in LONG)])
def test_golden_pairs_give_the_reference_engines_ids_and_cycles(
    pair: str, ways: list[tuple[SamplingParams, tuple[str, int | None]]]
) -> None:
    fused, reference = session_of(pair, "fused"), session_of(pair, "reference")
    assert (fused.facts.engine, reference.facts.engine) == ("fused", "reference")
    prompt = random_prompt(13)
    for sampling, (mode, block) in ways:
        replies = [
            ask(session, prompt, NEW, sampling=sampling, mode=mode, block_size=block) for session in (fused, reference)
        ]
        assert replies[0].ids == replies[1].ids, (sampling, mode, block)
        lengths = [reply.finished.stats.acceptance_lengths for reply in replies]
        assert lengths[0] == lengths[1], (sampling, mode, block)


@pytest.mark.parametrize("pair", [pytest.param("demo", marks=pytest.mark.slow), "demo-hybrid"])
def test_a_stop_string_found_late_is_undone(pair: str) -> None:
    """The host learns of a cycle when others have begun; what they wrote must not be in the next turn's caches."""
    fused, reference = session_of(pair, "fused"), session_of(pair, "reference")
    for stop in ("8", "9, 10"):
        request = user_request("Count from 3 to 17.", limits=Limits(max_new_tokens=120, stop=(stop,)))
        replies = [Reply(list(session.generate(request))) for session in (fused, reference)]
        assert replies[0].ids == replies[1].ids
        assert fused.runner.committed == reference.runner.committed
        assert int(fused.runner.target.start) == len(fused.runner.committed)
        after = user_request('Spell the word "bridge" with dashes.', limits=Limits(max_new_tokens=20))
        replies = [Reply(list(session.generate(after))) for session in (fused, reference)]
        assert replies[0].ids == replies[1].ids


def test_the_host_stays_behind_the_device() -> None:
    """What makes the loop fast on a GPU: cycles are on their way while an older one is read."""
    target = fused_target("qwen3", 300, BLOCK)
    runner = FusedRunner(target, None, 300)
    runner.begin(Sampler(SamplingParams(), 1, target.vocab_size, torch.tensor([0])), frozenset(), 1, False)
    for _ in runner.prefill(random_prompt(9), 0):
        pass
    heard = []
    for _ in range(6):
        runner.launch()
        heard.append(len(runner.collect()))
    assert heard == [0] * AHEAD + [1] * (6 - AHEAD)
    assert int(target.start) == 9 + 6, "all six have run"
    runner.rewind(11)
    assert int(target.start) == 10 and len(runner.ids) == 11


def test_what_it_cannot_run_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="--engine 'quick' is unknown"):
        load(bundled.find("demo"), LoadConfig(device="cpu", engine="quick"))
    with pytest.raises(UsageError, match="fused engine cannot run this: it runs in bfloat16 or float32"):
        load(bundled.find("demo"), LoadConfig(device="cpu", engine="fused", dtype="float16"))
    assert load(bundled.find("demo"), LoadConfig(device="cpu")).facts.engine == "reference"


@pytest.mark.parametrize("name", ["qwen3-v2-swa-b16", "qwen35-v2-swa-b8"])
def test_what_lies_in_host_memory_changes_no_bit(name: str) -> None:
    """Without CUDA it is the same memory, and the list of launches is tried."""
    pair, prompt = Pair(name, GOLDEN / name / "target", GOLDEN / name / "drafter", False), random_prompt(40)
    found = []
    for offload in ("none", "all"):
        session = load(pair, LoadConfig(device="cpu", engine="fused", dtype="float32", offload=offload))
        assert session.facts.load.offload == offload
        found.append([ask(session, each, 20).ids for each in (prompt, prompt[:30])])
    assert found[0] == found[1]


@pytest.mark.parametrize(("length", "context"), [(9, 77), (2019, 2087)])
def test_a_reply_fills_the_context_to_its_last_token(length: int, context: int) -> None:
    """Contexts that are no multiple of anything; the second crosses the first bucket of recorded launches."""
    prompt = random_prompt(length)
    plain = ask(fused_session("qwen3", None, context), prompt, context, mode="ar")
    assert len(plain.ids) == context - length and plain.finished.reason == "length"
    behind: list[int] = []  # positions between a cycle's last row and the bound that its launches were given
    session = fused_session("qwen3", Oracle(VOCAB, [*prompt, *plain.ids], 5), context)
    target, blocks = fused_target_of(session), session.runner.proposer
    run, draft = target.finish, blocks.block

    def verified(rows: int, max_seq_len: int, with_taps: bool) -> None:
        behind.append(max_seq_len - int(target.start) - rows)
        run(rows, max_seq_len, with_taps)

    def drafted(_max_seq_len: int) -> None:
        behind.append(_max_seq_len - int(target.start) - BLOCK)
        draft(_max_seq_len)

    target.finish, blocks.block = verified, drafted  # type: ignore[method-assign]
    assert ask(session, prompt, context).ids == plain.ids
    assert behind and min(behind) >= 0, "a row would not see the keys behind the bound"
