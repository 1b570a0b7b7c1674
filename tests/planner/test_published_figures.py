"""Figures of the published models that the planner must reproduce, and where they come from.

Parameters, bytes per token (bfloat16) and of states are those that the shapes keep under ``_sizes``, computed apart
from this package (October 2026); sizes in GiB are those quoted for the files on the Hub.
"""

from __future__ import annotations

import json

import pytest

from dflash_local.catalog import registry
from dflash_local.catalog.shapes import FOLDER
from dflash_local.config.features import GatedDeltaNetConfig
from dflash_local.planner import formats, memory, parameters
from tests.drafter_configs import published_target

GIB = 2**30

SIZES = {path.stem.replace("--", "/"): json.loads(path.read_text())["_sizes"] for path in FOLDER.glob("*.json")}
TARGETS = sorted(repo for repo, sizes in SIZES.items() if sizes.get("text_params") is not None)
# Quoted sizes of files that hold a text model and little else, in the format they are published in.
QUOTED_GIB: dict[str, float] = {
    "Qwen/Qwen3-4B": 7.49,
    "Qwen/Qwen3-8B": 15.26,
    "openai/gpt-oss-20b": 12.82,
    "openai/gpt-oss-120b": 60.77,
    "moonshotai/Kimi-K2.5": 554.3,
    "meta-llama/Llama-3.1-8B-Instruct": 14.96,
}


@pytest.mark.parametrize("repo", TARGETS)
def test_figures_of_a_target_are_exact(repo: str) -> None:
    """Its parameters, keys and values of a token, and recurrent states, of which ours keep one column less."""
    read, sizes, states = published_target(repo), SIZES[repo], SIZES[repo]["recurrent_bytes"] or 0
    assert parameters.target_parameters(read).total == sizes["text_params"]
    assert sizes["kv_bytes_per_token"] in (None, memory.kv_bytes_per_token(read))
    assert memory.state_bytes(read) == states
    linear = [layer.mixer for layer in read.layers if isinstance(layer.mixer, GatedDeltaNetConfig)]
    assert memory.state_bytes(read, held=True) == states - sum(2 * part.conv_dim for part in linear)


def test_no_target_of_the_registry_lacks_figures_but_one() -> None:
    known = {row.target.id for row in registry.load().rows if row.target is not None} & set(SIZES)
    assert len(TARGETS) >= 17 and known - set(TARGETS) == {"moonshotai/Kimi-K2.5"}


def test_kimi_keeps_latent_keys_and_values() -> None:
    # 61 layers x (512 latent + 64 rope) x 2 bytes
    assert memory.kv_bytes_per_token(published_target("moonshotai/Kimi-K2.5")) == 61 * 576 * 2


@pytest.mark.parametrize("repo", QUOTED_GIB)
def test_a_text_models_files_are_of_the_quoted_size(repo: str) -> None:
    found = formats.published_bytes(published_target(repo))
    assert found is not None and found / GIB == pytest.approx(QUOTED_GIB[repo], rel=0.01)
