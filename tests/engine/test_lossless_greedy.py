"""L1: with any drafter and block size the ids equal the target's own, float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch

from dflash_local.catalog.bundled import Pair
from dflash_local.engine import LoadConfig, load
from dflash_local.models.packed_linear import can_pack
from dflash_local.models.transformers_target import TransformersTarget
from tests.families import FAMILIES, VOCAB, random_model, save_model
from tests.proposers import Oracle, Planted, RandomDrafts, ZeroDrafts, decode

GOLDEN = Path(__file__).parents[1] / "golden"
NEW, MANY = 24, 40  # tokens: three blocks of 8 or windows of 8, and more of both in the long tests
LIKELY = ("oracle", "mostly right")  # of what they draft most is accepted
KNOWING = (*LIKELY, "never right")
ALL = (*KNOWING, "random", "zero")
FULL_GRID = ("qwen3", "qwen3_5")


@cache
def target_of(family: str) -> TransformersTarget:
    return TransformersTarget(random_model(family), (0, 2))


@cache
def autoregressive(family: str, prompt: tuple[int, ...], new: int = NEW) -> tuple[int, ...]:
    """The target's own text, by transformers' plain forward over the whole sequence, no cache."""
    model, ids = random_model(family), list(prompt)
    with torch.inference_mode():
        for _ in range(new + 16):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return tuple(ids)


def prompt_of(length: int) -> tuple[int, ...]:
    return tuple(torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist())


def drafters(text: Sequence[int]) -> dict[str, Planted]:
    return {
        "oracle": Oracle(VOCAB, text),
        "mostly right": Oracle(VOCAB, text, wrong_every=5),
        "never right": Oracle(VOCAB, text, wrong_every=1),
        "random": RandomDrafts(VOCAB),
        "zero": ZeroDrafts(VOCAB),
    }


def check(family: str, prompt_length: int, blocks: Mapping[int, Sequence[str]], new: int = NEW) -> None:
    """``blocks``: by their size the drafters that draft them."""
    prompt = prompt_of(prompt_length)
    text = autoregressive(family, prompt, new)
    want = list(text[: prompt_length + new])
    target = target_of(family)
    assert decode(target, prompt, new)[0] == want, "autoregressive"
    for block, names in blocks.items():
        for name in names:
            drafter = drafters(text)[name]
            ids, cycles = decode(target, prompt, new, drafter, block)
            assert ids == want, f"{family}, prompt of {prompt_length}, block {block}, drafter {name}"
            if name == "never right":
                assert all(c.accepted == 0 for c in cycles)
            if name == "oracle":  # everything accepted, and the bonus token is right
                assert all(c.accepted == c.drafted == block - 1 for c in cycles)


# Layers of each kind of cache: full, windows, recurrent, latent. A mixture is no cache: theirs are in the long tests.
CACHES = ("llama", "mistral", "gpt_oss", "qwen3_next", "qwen3_5", "deepseek_v3")


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=() if family in CACHES else pytest.mark.slow) for family in FAMILIES]
)
def test_l1_greedy_equals_the_target_on_every_family(family: str) -> None:
    # Drafts that are all refused cost a cycle for each token, and leave the same behind in a block of any size.
    check(family, 11, {2: LIKELY, 8: ALL, 16: LIKELY})


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_l1_greedy_with_every_drafter_on_every_family(family: str) -> None:
    check(family, 11, dict.fromkeys((2, 8, 16), ALL), MANY)
    for prompt_length in (1, 7, 8, 9):
        check(family, prompt_length, {8: ALL}, MANY)


# At a block of 8 and windows of 8 and beyond; before them in the long tests.
@pytest.mark.parametrize("prompt_length", [8, 9, *(pytest.param(each, marks=pytest.mark.slow) for each in (1, 7))])
def test_l1_greedy_around_block_and_window_edges(prompt_length: int) -> None:
    for family in (*FULL_GRID, "gpt_oss"):  # full, recurrent, and windows beside full; the others in the long tests
        check(family, prompt_length, {8: KNOWING})


@pytest.mark.slow
@pytest.mark.parametrize("family", FULL_GRID)
@pytest.mark.parametrize("prompt_length", [1, 2, 7, 8, 9, 15, 16, 17, 63, 64, 65])
def test_l1_greedy_full_grid(family: str, prompt_length: int) -> None:
    check(family, prompt_length, dict.fromkeys(range(1, 17), ALL), MANY)


@pytest.mark.parametrize("family", FULL_GRID)
def test_state_after_all_or_nothing_equals_the_autoregressive_one(family: str) -> None:
    prompt = prompt_of(9)
    text, target = autoregressive(family, prompt), target_of(family)

    def caches() -> list[torch.Tensor]:
        kv = [x.clone() for layer in sorted(target.kv._rows) for x in target.kv.rows(layer)]
        return kv + [c.state.clone() for c in target.recurrent] + [c.conv.clone() for c in target.recurrent]

    decode(target, prompt, NEW)
    want = caches()
    for wrong_every in (0, 1):
        decode(target, prompt, NEW, Oracle(VOCAB, text, wrong_every), 8)
        for got, expected in zip(caches(), want, strict=True):
            # GEMMs of one row and of eight may differ in the last bits on a CPU.
            assert (got - expected).abs().max() < 1e-5


@pytest.mark.skipif(
    not can_pack(torch.device("cpu"), torch.bfloat16), reason="oneDNN does not multiply bfloat16 on this processor"
)
@pytest.mark.parametrize("name", ["qwen3-v1-b8", "llama31-v1-b10", "mistral"])
def test_rows_of_a_verify_are_single_steps_in_every_bit_in_bfloat16(name: str, tmp_path: Path) -> None:
    if name == "mistral":  # whose window ends within the rows
        folder = save_model(name, tmp_path / name, head_dim=64)
    else:
        folder = GOLDEN / name / "target"
    session = load(Pair(name, folder, None, False), LoadConfig(dtype="bfloat16", device="cpu"))
    target, steps = session.runner.target, []
    ids = torch.randint(0, target.vocab_size, (300,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        target.prefill(ids[:260], False)
        for start in range(260, 300):
            steps.append(target.verify(ids[start : start + 1], False).hidden)
            target.commit(1)
        target.truncate(260)
        for rows in (8, 3, 5, 2, 7, 4, 8, 3):
            start = target.length
            found = target.verify(ids[start : start + rows], False).hidden
            assert torch.equal(found, torch.cat(steps[start - 260 :][:rows])), f"{rows} rows at {start}"
            target.commit(rows)
