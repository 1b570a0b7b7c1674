"""Figures of the published models that the planner must reproduce, and where they come from.

Parameters, bytes per token and state come from the published shapes and were computed apart from
this package (registry facts, October 2026); sizes in GiB are those quoted for the files on the Hub.
"""

from __future__ import annotations

import pytest

from dflash_local.config.features import GatedDeltaNetConfig
from dflash_local.planner import formats, memory, parameters
from tests.drafter_configs import published_target

GIB = 2**30

# target: parameters of the text model, KV bytes per token (bf16), recurrent and conv state bytes (bf16 conv)
TARGETS: dict[str, tuple[int, int | None, int]] = {
    "Qwen/Qwen3.5-4B": (4205751296, 32768, 51904512),
    "Qwen/Qwen3.5-9B": (8953803264, 32768, 51904512),
    "Qwen/Qwen3.5-27B": (26895998464, 65536, 154927104),
    "Qwen/Qwen3.6-27B": (26895998464, 65536, 154927104),
    "Qwen/Qwen3.8-27B": (26895998464, 65536, 154927104),
    "Qwen/Qwen3.5-35B-A3B": (34660610688, 20480, 64880640),
    "Qwen/Qwen3.6-35B-A3B": (34660610688, 20480, 64880640),
    "Qwen/Qwen3.5-122B-A10B": (122111526912, 24576, 154533888),
    "Qwen/Qwen3.5-397B-A17B": (396346350336, 30720, 193167360),
    "Qwen/Qwen3-4B": (4022468096, 147456, 0),
    "Qwen/Qwen3-8B": (8190735360, 147456, 0),
    "Qwen/Qwen3-14B": (14768307200, 163840, 0),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": (30532122624, 98304, 0),
    "Qwen/Qwen3-Coder-Next": (79674391296, 24576, 77856768),
    "openai/gpt-oss-20b": (20914757184, None, 0),
    "openai/gpt-oss-120b": (116829156672, None, 0),
    "meta-llama/Llama-3.1-8B-Instruct": (8030261248, 131072, 0),
}
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
    read, (count, per_token, states) = published_target(repo), TARGETS[repo]
    assert parameters.target_parameters(read).total == count
    assert per_token in (None, memory.kv_bytes_per_token(read)) and memory.state_bytes(read) == states
    linear = [layer.mixer for layer in read.layers if isinstance(layer.mixer, GatedDeltaNetConfig)]
    assert memory.state_bytes(read, held=True) == states - sum(2 * part.conv_dim for part in linear)


def test_kimi_keeps_latent_keys_and_values() -> None:
    # 61 layers x (512 latent + 64 rope) x 2 bytes
    assert memory.kv_bytes_per_token(published_target("moonshotai/Kimi-K2.5")) == 61 * 576 * 2


@pytest.mark.parametrize("repo", QUOTED_GIB)
def test_a_text_models_files_are_of_the_quoted_size(repo: str) -> None:
    found = formats.published_bytes(published_target(repo))
    assert found is not None and found / GIB == pytest.approx(QUOTED_GIB[repo], rel=0.01)
