"""What a GGUF file's metadata may say: what is told as a config.json tells it, what is refused and by which name."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_local.checkpoint_files.gguf_config import config_of, generation_of
from dflash_local.checkpoint_files.gguf_file import GgufFile
from dflash_local.checkpoint_files.gguf_header import GgufHeader, read_gguf
from dflash_local.checkpoint_files.gguf_names import hf_tensors
from dflash_local.checkpoint_files.gguf_rope import FACTORS
from dflash_local.checkpoint_files.tensor_info import TensorInfo
from dflash_local.drafters.dspark.layout import DSparkConfig
from dflash_local.errors import CheckpointError
from tests.drafter_configs import read_decoder

GGUF = Path(__file__).resolve().parents[1] / "golden" / "gguf"


def header(name: str, changes: dict[str, Any] | None = None) -> GgufHeader:
    """That of a file, with some of its keys changed; those of None are left out."""
    found = read_gguf(GGUF / f"{name}.gguf")
    changed = {**found.metadata, **(changes or {})}
    return replace(found, metadata={key: value for key, value in changed.items() if value is not None})


def with_tensor(found: GgufHeader, name: str, **changes: Any) -> GgufHeader:
    """A header with a tensor changed, or with one more."""
    info = found.tensors.get(name) or TensorInfo(name, "F32", (4,), found.file)
    return replace(found, tensors={**found.tensors, name: replace(info, **changes)})


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llama", "general.architecture", "gemma3"),
        ("llama", "general.type", "mmproj"),
        ("llama", "llama.expert_count", 8),
        ("llama", "llama.logit_scale", 0.5),
        ("llama", "llama.attention.temperature_scale", 0.1),
        ("llama", "llama.attention.causal", False),
        ("llama", "llama.attention.value_length", 8),
        ("llama", "llama.attention.head_count", [4, 2]),
        ("llama", "llama.rope.dimension_count", 8),
        ("llama", "llama.rope.scaling.type", "longrope"),
        ("qwen3", "qwen3.pooling_type", 4),
        ("qwen3", "qwen3.rope.freq_base_swa", 1e4),
        ("qwen3", "qwen3.rope.scaling.yarn_log_multiplier", 0.1),
        ("qwen3", "qwen3.attention.sliding_window", 64),
        ("qwen3moe", "qwen3moe.expert_gating_func", 2),
        ("qwen3moe", "qwen3moe.expert_weights_scale", 2.5),
        ("qwen3moe", "qwen3moe.expert_count", None),
        ("qwen35", "qwen35.ssm.group_count", None),
        ("gpt-oss", "gpt-oss.attention.sliding_window_pattern", "all"),
        ("drafter-qwen35-v2-swa-b8", "dflash.hidden_activation", "gelu"),
        ("drafter-qwen35-v2-swa-b8", "dflash.attention.value_scale", 0.5),
        ("drafter-qwen35-v2-swa-b8", "dflash.final_logit_softcapping", 30.0),
        ("drafter-qwen35-v2-swa-b8", "dflash.attention.sliding_window_pattern", [True]),
    ],
)
def test_what_a_config_json_cannot_say_is_refused_by_name(name: str, key: str, value: Any) -> None:
    with pytest.raises(CheckpointError) as error:
        config_of(header(name, {key: value}))
    assert str(GGUF / f"{name}.gguf") in error.value.message
    assert key.partition(".")[2] in error.value.message or str(value) in error.value.message


def test_kinds_of_rope() -> None:
    linear = {"qwen3.rope.scaling.type": "linear", "qwen3.rope.scaling.factor": 2.0}
    expected = {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}
    assert config_of(header("qwen3", linear))["rope_parameters"] == expected
    none = {"qwen3.rope.scaling.type": "none", "qwen3.rope.freq_base": None}
    assert config_of(header("qwen3", none))["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    factor = {"qwen3.rope.scaling.yarn_attn_factor": 1.25}
    assert config_of(header("qwen3", factor))["rope_parameters"]["attention_factor"] == 1.25


@pytest.mark.parametrize(
    "factors", [(1.0,) * 8, (1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0), (float("nan"),) * 8, (0.0,) * 8]
)
def test_factors_of_rope(tmp_path: Path, factors: tuple[float, ...]) -> None:
    (tmp_path / "factors").write_bytes(struct.pack("<8f", *factors))
    other = with_tensor(header("llama"), FACTORS, file=tmp_path / "factors", offset=0)
    if factors == (1.0,) * 8:
        assert config_of(other)["rope_parameters"] == {"rope_type": "default", "rope_theta": 500000.0}
    else:
        with pytest.raises(CheckpointError, match=FACTORS):
            config_of(other)


def test_llama_3_1_is_known_by_its_factors(tmp_path: Path) -> None:
    """As conversion/llama.py computes them, in float32, of the settings of Llama 3.1 8B and of Llama 3.2 1B."""
    torch = pytest.importorskip("torch")
    for factor, width in ((8.0, 128), (32.0, 64)):
        frequencies = 1.0 / (500000.0 ** (torch.arange(0, width, 2, dtype=torch.float32) / width))
        turns = 8192 / (2 * torch.pi / frequencies)
        smooth = ((turns - 1.0) / 3.0).clamp(0, 1)
        stored = 1 / ((1 - smooth) / factor + smooth)
        (tmp_path / "factors").write_bytes(struct.pack(f"<{width // 2}f", *stored.tolist()))
        keys = {
            f"llama.{key}": width for key in ("attention.key_length", "attention.value_length", "rope.dimension_count")
        }
        changed = {"file": tmp_path / "factors", "offset": 0, "shape": (width // 2,)}
        assert config_of(with_tensor(header("llama", keys), FACTORS, **changed))["rope_parameters"] == {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }


def test_ids_that_end_a_reply() -> None:
    """The file's own, and control tokens that end one by their text: the vocabulary of the files has two of those."""
    changes = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.bos_token_id": 1, "general.sampling.temp": 0.6}
    found = generation_of(header("qwen3", {**changes, "general.sampling.top_k": 20}))
    advised = {"do_sample": True, "temperature": 0.6, "top_k": 20}
    assert found == {"bos_token_id": 1, "eos_token_id": [0, 2, 7], **advised}
    plain = header("qwen3", {"tokenizer.ggml.token_type": [1] * 96})
    assert generation_of(plain)["eos_token_id"] == [2]


def _lacks(name: str) -> Callable[[GgufHeader], GgufHeader]:
    return lambda found: replace(found, tensors={key: info for key, info in found.tensors.items() if key != name})


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("llama", lambda found: with_tensor(found, "blk.0.attn_q.weight", shape=(48, 64)), "q_proj"),
        ("llama", lambda found: with_tensor(found, "blk.0.attn_rot_embd"), "attn_rot_embd"),
        ("llama", lambda found: with_tensor(found, "blk.7.attn_q.weight"), "blk.7.attn_q.weight"),
        ("llama", lambda found: with_tensor(found, "output_norm.bias"), "output_norm.bias"),
        ("llama", lambda found: with_tensor(found, "token_embd.weight", shape=()), "token_embd.weight"),
        ("llama", _lacks("token_embd.weight"), "token_embd.weight"),
        ("llama-biased", lambda found: with_tensor(found, "blk.0.attn_qkv.weight", shape=(64, 32)), "attn_qkv"),
        ("qwen3", lambda found: with_tensor(found, FACTORS, shape=(8,)), FACTORS),
        ("qwen3", lambda found: with_tensor(found, "blk.0.ffn_gate_exps.weight"), "ffn_gate_exps"),
        ("qwen3moe", lambda found: with_tensor(found, "blk.0.ffn_up_exps.scale"), "ffn_up_exps.scale"),
        ("llama-biased", lambda found: with_tensor(found, "blk.0.attn_q.weight", shape=(64, 32)), "two tensors"),
        ("qwen3moe", lambda found: with_tensor(found, "blk.0.ffn_up_exps.weight", shape=(32, 32)), "ffn_up_exps"),
        ("qwen3next", _lacks("blk.0.attn_gate.weight"), "in_proj_qkv"),
        ("qwen35", lambda found: with_tensor(found, "blk.0.ssm_out.weight", shape=(32,)), "out_proj"),
        ("qwen35", lambda found: with_tensor(found, "blk.0.ssm_a", shape=(4,)), "A_log"),
        ("drafter-qwen35-v2-swa-b8", lambda found: with_tensor(found, "d2t"), "d2t"),
        ("drafter-qwen35-v2-swa-b8", lambda found: with_tensor(found, "blk.0.attn_sinks.weight"), "attn_sinks"),
    ],
)
def test_tensors_that_are_not_known_or_do_not_fit_are_refused_by_name(
    name: str, change: Callable[[GgufHeader], GgufHeader], named: str
) -> None:
    with pytest.raises(CheckpointError, match=named):
        hf_tensors(change(header(name)))


def of(found: GgufHeader) -> GgufFile:
    file = GgufFile(found.file)
    file.__dict__["header"] = found
    return file


def test_weights_that_are_not_read_are_named_before_the_tensors_beside_them() -> None:
    """NVFP4 ones have a scale each, whose name is not known either."""
    coded = with_tensor(header("llama"), "blk.0.ffn_down.weight", dtype="NVFP4")
    with pytest.raises(CheckpointError, match="NVFP4 weights are not read") as refused:
        of(with_tensor(coded, "blk.0.ffn_down.scale")).config()
    assert refused.value.hint == "the nearest form that is: Q4_K_M"


@pytest.mark.parametrize("flags", [[], [True], ["x", {}], 7])
def test_layers_must_be_told_for_each(flags: Any) -> None:
    """An empty list tells nothing; others that do not fit are refused."""
    odd = header("qwen35", {"qwen35.attention.recurrent_layers": flags})
    if flags == []:
        assert config_of(odd)["layer_types"] == ["linear_attention", "full_attention"]
    else:
        with pytest.raises(CheckpointError):
            config_of(odd)


def test_a_dspark_drafter_is_known_by_its_markov_head() -> None:
    """Names and keys as conversion/qwen.py has them in DSparkModel."""
    found = header("drafter-qwen35-v2-swa-b8", {"dflash.sample_from_anchor": True, "dflash.has_confidence_head": True})
    for name, shape in {
        "markov_w1.weight": (96, 12),
        "markov_w2.weight": (96, 12),
        "conf_proj.weight": (1, 76),
    }.items():
        found = with_tensor(found, name, shape=shape)
    found.metadata.pop("dflash.attention.sliding_window")
    config = read_decoder(config_of(found), "x")
    assert isinstance(config, DSparkConfig)
    assert (config.markov_rank, config.confidence_inputs, config.vocab_size) == (12, 76, 96)
    assert {"markov_head.markov_w1.weight", "confidence_head.proj.weight"} <= hf_tensors(found).keys()
