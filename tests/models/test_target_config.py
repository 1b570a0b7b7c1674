"""What a target's config.json may decide: its shape, within bounds. What else it says is refused by name or dropped."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dflash_local.checkpoint_files.text_config import ACTIVATION_KEYS, FLAGS, INTEGERS, NEUTRAL, NUMBERS, text_values
from dflash_local.config.families import TABLE
from dflash_local.errors import CheckpointError
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.load_target import load_target, placement
from dflash_local.models.target_facts import TargetFacts
from dflash_local.models.transformers_config import text_model_config
from tests.models.hostile_checkpoints import make
from tests.models.hostile_fields import KERNELS, Case, put

# Fields of transformers' configurations that shape no weight and change no logits of an evaluated model.
NO_SHAPE = {
    *("initializer_range", "use_cache", "attention_dropout", "pretraining_tp", "num_mtp_layers"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "output_router_logits", "router_aux_loss_coef"),
}
OBJECTS = {*ACTIVATION_KEYS, *NEUTRAL, "layer_types", "mlp_only_layers", "rope_parameters"}


@pytest.fixture
def pair(tmp_path: Path) -> Callable[..., Path]:
    """A copy of the demo pair, keys of its target's config.json changed."""

    def build(part: str = "target", **changes: Any) -> Path:
        def change(folder: Path) -> None:
            for key, value in changes.items():
                put(part, key, value)(folder)

        return make(Case("", "", change), tmp_path / str(len(list(tmp_path.iterdir()))))

    return build


def load(folder: Path) -> Any:
    files = Checkpoint.open(folder / "target")
    return load_target(files, TargetFacts.from_checkpoint(files), placement("cpu", "auto", None))


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert caught.value.exit_code == 6 and caught.value.hint
    return caught.value.message


@pytest.mark.parametrize("model_type", [family.model_types[0] for family in TABLE])
def test_every_field_of_transformers_configurations_is_in_the_tables_or_shapes_nothing(model_type: str) -> None:
    """A field that a later transformers adds must be looked at: what is in no table never reaches a model."""
    config = transformers.CONFIG_MAPPING[model_type]
    common = {field.name for field in dataclasses.fields(transformers.PreTrainedConfig)}
    fields = {field.name for field in dataclasses.fields(config)} - common
    assert fields - {*INTEGERS, *NUMBERS, *FLAGS} - OBJECTS - NO_SHAPE == set()


FOREIGN = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"}


@pytest.mark.parametrize("model_type", ["foreign_words", "qwen3"])
def test_code_of_a_target_is_refused_by_name_and_never_runs(pair: Callable[..., Path], model_type: str) -> None:
    folder = pair(model_type=model_type, auto_map=FOREIGN)
    (folder / "target" / "evil.py").write_text("raise SystemExit('the code of the checkpoint ran')")
    assert "auto_map names code of the checkpoint's own" in refusal(folder) and "evil.EvilConfig" in refusal(folder)
    assert "evil" not in sys.modules


OURS = {"trust_remote_code": False, "local_files_only": True, "use_safetensors": True}


PUBLIC, *PRIVATE = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")


@pytest.mark.parametrize(("key", "named"), [*product([PUBLIC], KERNELS), *product(PRIVATE, KERNELS[:1])], ids=repr)
def test_the_attention_function_is_ours_whatever_a_configuration_names(
    pair: Callable[..., Path], key: str, named: object
) -> None:
    assert load(pair(**{key: named})).config._attn_implementation == "sdpa"


def test_what_has_nothing_to_do_with_a_shape_is_dropped(
    pair: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    plain = transformers.AutoModelForCausalLM.from_pretrained

    def spied(folder: Path, **options: Any) -> Any:
        seen.append(options)
        return plain(folder, **options)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", spied)
    odd = {"transformers_weights": "other.safetensors", "fusion_config": {"x": True}, "get_text_config": 5}
    odd |= {"experts_implementation": "evil/moe", "dtype": "save", "torch_dtype": 5, "per_layer_config": {"0": {}}}
    odd |= {"use_kernels": True, "id2label": 5, "num_labels": 10**90, "output_attentions": True, "custom_pipelines": 5}
    model = load(pair(**odd))
    assert seen[0] | OURS == seen[0]
    assert not {key for key in odd if key in vars(seen[0]["config"]) and vars(seen[0]["config"])[key] == odd[key]}
    assert torch.equal(model.lm_head.weight, load(pair()).lm_head.weight)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors", "mxfp4", "evil"])
def test_a_stored_format_that_is_not_read_is_named(pair: Callable[..., Path], method: str) -> None:
    message = refusal(pair(quantization_config={"quant_method": method, "bits": 3}))
    assert f"in the format {method}" in message and "are not supported" in message


@pytest.mark.parametrize(
    ("name", "said"),
    [("adapter_config.json", "holds an adapter"), ("shard-00001-model-00001-of-00002.safetensors", "distributed")],
)
def test_what_transformers_would_take_up_beside_the_weights_is_refused(
    pair: Callable[..., Path], name: str, said: str
) -> None:
    folder = pair()
    (folder / "target" / name).write_text('{"base_model_name_or_path": "somebody/else"}')
    assert said in refusal(folder) and name in refusal(folder)


def test_a_model_far_larger_than_its_weights_is_refused_before_it_takes_memory(pair: Callable[..., Path]) -> None:
    assert "config.json describes" in refusal(pair(intermediate_size=2**20))
    many = pair(num_hidden_layers=1000, layer_types=None)
    assert "tensors of layer 999 are missing, its config.json counts 1000 layers" in refusal(many)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "num_attention_heads 6 is not a multiple of"),
        ({"num_experts": 4, "num_experts_per_tok": 8}, "num_experts_per_tok 8 is more than there are"),
        ({"layer_types": ["full_attention"] * 3, "num_hidden_layers": 4}, "layer_types has 3 entries for 4 layers"),
        ({"rope_parameters": {"a": {"rope_theta": 1e4}, "b": {"rope_theta": 1e5}}}, "differ by layer type"),
        ({"rope_scaling": {"type": "evil"}}, "type 'evil' is not supported"),
        ({"hidden_size": 10**400}, "hidden_size an integer of 1329 bits is outside"),
    ],
)
def test_values_are_checked_by_themselves_and_together(values: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match="^x: ") as caught:
        text_values(values, "x")
    assert said in caught.value.message


def test_a_null_that_means_something_reaches_transformers() -> None:
    assert text_model_config("deepseek_v3", text_values({"q_lora_rank": None}, "x")).q_lora_rank is None
    assert text_model_config("gpt_oss", text_values({}, "x"))._attn_implementation == "eager"
