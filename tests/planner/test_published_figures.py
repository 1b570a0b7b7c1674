"""Figures of the published models that the planner must reproduce, and where they come from.

Parameters, bytes per token and state come from the published shapes and were computed apart from
this package (registry facts, October 2026); sizes in GiB are those quoted for the files on the Hub.
"""

from __future__ import annotations

from typing import Any

import pytest

from dflash_local.catalog.shapes import shape
from dflash_local.checkpoint_files.config_values import UnknownValue
from dflash_local.config.drafter_config import DrafterConfig
from dflash_local.config.features import AttentionConfig, GatedDeltaNetConfig, ModelConfig
from dflash_local.config.read_model import read_model
from dflash_local.planner import formats, memory, parameters

GIB = 2**30

# target: text parameters, MTP parameters, KV bytes per token (bf16), recurrent and conv state bytes (bf16 conv)
TARGETS: dict[str, tuple[int, int, int | None, int]] = {
    "Qwen/Qwen3.5-4B": (4205751296, 120599552, 32768, 51904512),
    "Qwen/Qwen3.5-9B": (8953803264, 243290624, 32768, 51904512),
    "Qwen/Qwen3.5-27B": (26895998464, 424699392, 65536, 154927104),
    "Qwen/Qwen3.6-27B": (26895998464, 424699392, 65536, 154927104),
    "Qwen/Qwen3.8-27B": (26895998464, 424699392, 65536, 154927104),
    "Qwen/Qwen3.5-35B-A3B": (34660610688, 844640768, 20480, 64880640),
    "Qwen/Qwen3.6-35B-A3B": (34660610688, 844640768, 20480, 64880640),
    "Qwen/Qwen3.5-122B-A10B": (122111526912, 2523679232, 24576, 154533888),
    "Qwen/Qwen3.5-397B-A17B": (396346350336, 6595568128, 30720, 193167360),
    "Qwen/Qwen3-4B": (4022468096, 0, 147456, 0),
    "Qwen/Qwen3-8B": (8190735360, 0, 147456, 0),
    "Qwen/Qwen3-14B": (14768307200, 0, 163840, 0),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": (30532122624, 0, 98304, 0),
    "Qwen/Qwen3-Coder-Next": (79674391296, 0, 24576, 77856768),
    "openai/gpt-oss-20b": (20914757184, 0, None, 0),
    "openai/gpt-oss-120b": (116829156672, 0, None, 0),
    "meta-llama/Llama-3.1-8B-Instruct": (8030261248, 0, 131072, 0),
}
# Quoted sizes of the files, in the format they are published in.
QUOTED_GIB: dict[str, float] = {
    "Qwen/Qwen3.5-4B": 8.68,
    "Qwen/Qwen3.5-9B": 17.98,
    "Qwen/Qwen3.5-27B": 51.75,
    "Qwen/Qwen3.6-27B": 51.75,
    "Qwen/Qwen3.5-35B-A3B": 66.97,
    "Qwen/Qwen3.5-397B-A17B": 751.6,
    "Qwen/Qwen3-4B": 7.49,
    "Qwen/Qwen3-8B": 15.26,
    "openai/gpt-oss-20b": 12.82,
    "openai/gpt-oss-120b": 60.77,
    "moonshotai/Kimi-K2.5": 554.3,
    "meta-llama/Llama-3.1-8B-Instruct": 14.96,
}
# Vision towers, downloaded with Qwen3.5 and 3.6 and not loaded: (depth, width, MLP width). 27 x 1152 is the
# default of transformers' Qwen3_5VisionConfig, 24 x 1024 what the 4B quotes.
VISION_LARGE, VISION_SMALL = (27, 1152, 4304), (24, 1024, 4096)
# drafter: its target, parameters, quoted GiB
DRAFTERS: dict[str, tuple[str, int, float]] = {
    "z-lab/Kimi-K2.5-DFlash": ("moonshotai/Kimi-K2.5", 3479277056, 6.48),
    "z-lab/Qwen3.5-4B-DFlash": ("Qwen/Qwen3.5-4B", 634425856, 1.18),
    "z-lab/Qwen3.5-9B-DFlash": ("Qwen/Qwen3.5-9B", 1291904512, 2.41),
    "z-lab/Qwen3.5-27B-DFlash": ("Qwen/Qwen3.5-27B", 2128682496, 3.96),
    "z-lab/Qwen3.5-35B-A3B-DFlash": ("Qwen/Qwen3.5-35B-A3B", 385906176, 0.72),
    "z-lab/Qwen3.5-122B-A10B-DFlash": ("Qwen/Qwen3.5-122B-A10B", 773893632, 1.44),
    "z-lab/Qwen3.6-27B-DFlash": ("Qwen/Qwen3.6-27B", 1730213120, 3.22),
    "z-lab/Qwen3.6-35B-A3B-DFlash": ("Qwen/Qwen3.6-35B-A3B", 385906176, 0.72),
    "z-lab/Qwen3-Coder-Next-DFlash": ("Qwen/Qwen3-Coder-Next", 473995264, 0.88),
    "z-lab/Qwen3-Coder-30B-A3B-DFlash": ("Qwen/Qwen3-Coder-30B-A3B-Instruct", 473995264, 0.88),
    "z-lab/gpt-oss-20b-DFlash": ("openai/gpt-oss-20b", 784767104, 1.46),
    "z-lab/gpt-oss-120b-DFlash": ("openai/gpt-oss-120b", 784767104, 1.46),
    "z-lab/Qwen3-4B-DFlash-b16": ("Qwen/Qwen3-4B", 537427200, 1.0),
    "z-lab/Qwen3-8B-DFlash-b16": ("Qwen/Qwen3-8B", 1048626432, 1.95),
    "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat": ("meta-llama/Llama-3.1-8B-Instruct", 1048626432, 1.95),
    "z-lab/Qwen3.5-397B-A17B-DFlash": ("Qwen/Qwen3.5-397B-A17B", 1291904512, 2.41),
    "z-lab/Qwen3.8-27B-DFlash2": ("Qwen/Qwen3.8-27B", 1924404480, 3.59),
}


def published(repo: str) -> dict[str, Any]:
    found = shape(repo)
    assert found is not None, f"the registry has no shape of {repo}"
    return found


def target(repo: str) -> ModelConfig:
    return read_model(published(repo), repo)


def drafter(repo: str) -> DrafterConfig:
    return DrafterConfig.from_shape(published(repo), repo)


def mtp_parameters(model: ModelConfig) -> int:
    """One published multi-token-prediction layer of Qwen3.5: an attention layer, fc, and three norms of its own."""
    if model.family not in ("qwen3_5", "qwen3_5_moe"):
        return 0
    layer = next(layer for layer in model.layers if isinstance(layer.mixer, AttentionConfig))
    hidden = model.hidden_size
    return parameters.layer_parameters(layer, hidden).total + 2 * hidden * hidden + 3 * hidden


def vision_parameters(depth: int, width: int, wide: int, out: int) -> int:
    """Qwen3.5's vision tower: blocks, patches and positions, merger of 2 x 2 patches."""
    block = 4 * (width * width + width) + 2 * width * wide + wide + width + 4 * width
    patches = 3 * 2 * 16 * 16 * width + width + 2304 * width
    merged = 4 * width
    return depth * block + patches + 2 * width + merged * merged + merged + merged * out + out


@pytest.mark.parametrize("repo", TARGETS)
def test_parameters_of_a_target_are_exact(repo: str) -> None:
    assert parameters.target_parameters(target(repo)).total == TARGETS[repo][0]


@pytest.mark.parametrize("repo", TARGETS)
def test_the_mtp_layer_is_exact(repo: str) -> None:
    assert mtp_parameters(target(repo)) == TARGETS[repo][1]


@pytest.mark.parametrize("repo", [repo for repo, figures in TARGETS.items() if figures[2] is not None])
def test_keys_and_values_per_token_are_exact(repo: str) -> None:
    assert memory.kv_bytes_per_token(target(repo)) == TARGETS[repo][2]


@pytest.mark.parametrize("repo", TARGETS)
def test_recurrent_state_is_exact_and_ours_keeps_one_column_less(repo: str) -> None:
    read = target(repo)
    assert memory.state_bytes(read) == TARGETS[repo][3]
    linear = [layer.mixer for layer in read.layers if isinstance(layer.mixer, GatedDeltaNetConfig)]
    less = sum(2 * part.conv_dim for part in linear)
    assert memory.state_bytes(read, held=True) == TARGETS[repo][3] - less


def test_kimi_keeps_latent_keys_and_values() -> None:
    # 61 layers x (512 latent + 64 rope) x 2 bytes
    assert memory.kv_bytes_per_token(target("moonshotai/Kimi-K2.5")) == 61 * 576 * 2


@pytest.mark.parametrize("repo", DRAFTERS)
def test_parameters_of_a_drafter_are_exact_and_its_file_has_the_quoted_size(repo: str) -> None:
    found = parameters.drafter_parameters(drafter(repo), target(DRAFTERS[repo][0]).hidden_size)
    assert found == DRAFTERS[repo][1]
    assert found * 2 / GIB == pytest.approx(DRAFTERS[repo][2], abs=0.006)


@pytest.mark.parametrize("repo", [repo for repo in QUOTED_GIB if "Qwen3." not in repo])
def test_a_text_models_files_are_of_the_quoted_size(repo: str) -> None:
    # Text model alone, in its published format: the files hold little else.
    found = formats.published_bytes(target(repo))
    assert found is not None and found / GIB == pytest.approx(QUOTED_GIB[repo], rel=0.01)


@pytest.mark.parametrize("repo", [repo for repo in QUOTED_GIB if "Qwen3." in repo])
def test_a_multimodal_download_is_text_mtp_and_vision(repo: str) -> None:
    # The files hold the MTP layer and the vision tower too; the planner counts the text model, which is what loads.
    read = target(repo)
    text = formats.published_bytes(read)
    assert text is not None
    vision = vision_parameters(*(VISION_SMALL if repo.endswith("-4B") else VISION_LARGE), read.hidden_size)
    assert (text + 2 * (mtp_parameters(read) + vision)) / GIB == pytest.approx(QUOTED_GIB[repo], rel=0.001)


def test_a_null_that_is_needed_is_taken_from_what_is_likely_or_is_unknown() -> None:
    config = published("z-lab/Qwen3.5-397B-A17B-DFlash")
    assert DrafterConfig.from_shape(config, "x").inferred == ("attention_bias", "intermediate_size")
    del config["_inferred"]
    with pytest.raises(UnknownValue, match="x: intermediate_size is missing"):
        DrafterConfig.from_shape(config, "x")
