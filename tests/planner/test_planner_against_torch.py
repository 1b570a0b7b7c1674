"""The planner's figures against what torch, transformers and our own caches really allocate."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dflash_local.bench.random_pair import of_row  # noqa: E402
from dflash_local.catalog import registry  # noqa: E402
from dflash_local.config.features import ModelConfig  # noqa: E402
from dflash_local.config.read_model import read_model  # noqa: E402
from dflash_local.drafters.dflash.layout import DFlashConfig  # noqa: E402
from dflash_local.drafters.dflash.reference import DrafterModel  # noqa: E402
from dflash_local.engine import held_sequences  # noqa: E402
from dflash_local.engine.load_pair import DEFAULT_CONTEXT  # noqa: E402
from dflash_local.layout.quantized import quantized  # noqa: E402
from dflash_local.models import drafter_weights, load_target, rope, transformers_config, transformers_target  # noqa: E402
from dflash_local.models.transformers_target import TransformersTarget  # noqa: E402
from dflash_local.planner import formats, load, memory, parameters, plan  # noqa: E402
from tests.drafter_configs import read_decoder  # noqa: E402
from tests.expert_pairs import DRAFTER  # noqa: E402
from tests.families import FAMILIES, HIDDEN, VOCAB, random_model  # noqa: E402

RECORD = Path(__file__).resolve().parents[2] / "benchmarks/results/h200_memory_reference.json"
DENSE = ["llama", "mistral", "gemma2", "qwen3", "qwen3_5"]
LOADED = [family for family in FAMILIES if family != "qwen3_5_wrapped"]


@cache
def text_model(family: str) -> Any:
    return random_model(family)


def shape_of(family: str) -> ModelConfig:
    """As read from the config.json that transformers writes."""
    config = json.loads(text_model(family).config.to_json_string(use_diff=False))
    return read_model(config | {"architectures": [type(text_model(family)).__name__]}, family)


def drafter_of(biased: bool = False, second: bool = False) -> DFlashConfig:
    config = DRAFTER | {"attention_bias": biased}
    if second:
        parts = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4}
        config |= {"architectures": ["DFlash2DraftModel"], **parts}
    return read_decoder(config, Path("config.json"))


def test_the_rooms_agree_on_constants() -> None:
    assert transformers_target.KVCache().capacity == memory.FIRST_ROWS
    assert rope.FIRST_ROWS == memory.FIRST_TABLE_ROWS
    assert held_sequences.KEPT_SNAPSHOTS + 1 == load.SNAPSHOTS
    assert DEFAULT_CONTEXT == plan.DEFAULT_CONTEXT
    assert set(load_target.DTYPES) == set(formats.DTYPE_BYTES)


@pytest.mark.parametrize("family", LOADED)
def test_parameters_are_those_transformers_allocates(family: str) -> None:
    found = parameters.target_parameters(shape_of(family))
    assert found.total == sum(p.numel() for p in text_model(family).parameters())


@pytest.mark.parametrize("family", DENSE)
def test_quantised_weights_are_the_linear_layers_the_loader_names(family: str) -> None:
    found = parameters.target_parameters(shape_of(family))
    linear = {n: m for n, m in text_model(family).named_modules() if isinstance(m, torch.nn.Linear)}
    taken = {n: m for n, m in linear.items() if n.rpartition(".")[2] not in transformers_config.KEPT_WHOLE}
    assert found.quantisable == sum(m.weight.numel() for m in taken.values()) > 0
    own = quantized(shape_of(family), "fp8").quantization  # which any width divides
    assert own is not None and {name for name, _ in own.names} == {name.removeprefix("model.") for name in taken}


def test_a_multimodal_checkpoint_is_counted_as_its_text_model() -> None:
    tensors = text_model("qwen3_5_wrapped").state_dict()
    text = [tensor for name, tensor in tensors.items() if ".visual." not in name]
    assert len(text) < len(tensors)
    found = parameters.target_parameters(shape_of("qwen3_5_wrapped"))
    assert found.total == sum(tensor.numel() for tensor in text)


@pytest.mark.parametrize("family", LOADED)
def test_caches_hold_the_bytes_the_planner_says(family: str) -> None:
    read, target = shape_of(family), TransformersTarget(text_model(family), (0, 2))
    ids = torch.randint(0, VOCAB, (300,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        target.prefill(ids, True)
    held = sum(x.untyped_storage().nbytes() for layer in target.kv._rows for x in target.kv._rows[layer])
    assert held == memory.kv_bytes_per_token(read, "float32") * memory.cache_rows(300)
    point = target.snapshot()
    assert memory.state_bytes(read, "float32", held=True) == sum(copy.nbytes for copy in point.recurrent)


def test_the_log_of_a_block_is_counted() -> None:
    read, target = shape_of("qwen3_5"), TransformersTarget(text_model("qwen3_5"), ())
    with torch.inference_mode():
        target.prefill(torch.arange(5), False)
        target.verify(torch.arange(16), False)
    (held,) = target.recurrent
    log = (held._k, held._v, held._gates, held._inputs)
    said = memory._log(read, load.Load("float32", None, 100, 16))
    assert said == sum(x.untyped_storage().nbytes() for x in log)


@pytest.mark.parametrize(("biased", "second"), [(False, False), (True, False), (False, True), (True, True)])
def test_a_loaded_drafter_takes_what_the_planner_says(biased: bool, second: bool) -> None:
    config = drafter_of(biased, second)
    weights = drafter_weights.random_weights(config, HIDDEN, 0, torch.device("cpu"), torch.float32)
    assert weights.nbytes == 4 * parameters.drafter_resident(config, HIDDEN)
    in_file = sum(torch.Size(size).numel() for size in config.tensors(HIDDEN).values())
    assert parameters.drafter_parameters(config, HIDDEN) == in_file


@pytest.mark.parametrize("tokens", [1, 512, 513, 1025, 3000])
def test_the_drafters_cache_grows_as_the_planner_says(tokens: int) -> None:
    config = drafter_of()
    model = DrafterModel.random(config, target_hidden=4, seed=0)
    held, block = model.new_cache(), config.block_size
    for at in range(0, tokens, memory.PREFILL_CHUNK):
        rows = min(memory.PREFILL_CHUNK, tokens - at)
        model.write_context(held, torch.zeros(rows, 4 * len(config.taps)), at)
    assert held.capacity == memory.context_rows(tokens, tokens)
    held.truncate(tokens - 1)  # the last cycle's anchor
    model.draft_hidden(held, torch.zeros(block, config.hidden_size), tokens - 1)
    last = tokens - 1 + block
    assert held.capacity == memory.context_rows(tokens, last)
    assert held.nbytes == memory.context_bytes_per_token(config, "float32") * held.capacity
    tables = (model._rope._cos, model._rope._signed_sin)
    assert memory.rope_table_bytes(config, "float32", last) == sum(x.untyped_storage().nbytes() for x in tables)


@pytest.mark.parametrize("row", json.loads(RECORD.read_text(encoding="utf-8"))["rows"], ids=lambda row: "")
def test_the_recorded_peaks_of_an_h200_are_predicted(row: dict[str, Any]) -> None:
    known = registry.load().find(row["shape"])
    assert known is not None
    pair, drafts = of_row(known), row["mode"] == "dflash"
    loading = load.Load("bfloat16", None, row["context"], pair.config.block_size if drafts else 1, snapshots=1)
    found = memory.ledger(pair.model, pair.config if drafts else None, loading)
    assert found.running == pytest.approx(row["measured"]["peak"], rel=0.01)
    assert found.loading.bytes == pytest.approx(row["measured"]["loading_peak"], rel=0.01)
