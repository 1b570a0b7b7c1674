"""The ledger: lines add up, growth is by doubling, and more context never needs less."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dflash_local.planner import formats, memory
from dflash_local.planner.ledger import Ledger, MemoryLine
from dflash_local.planner.memory import Load
from tests.drafter_configs import published_drafter, published_target

PAIRS = {
    "Qwen/Qwen3-8B": "z-lab/Qwen3-8B-DFlash-b16",
    "Qwen/Qwen3.5-9B": "z-lab/Qwen3.5-9B-DFlash",
    "Qwen/Qwen3.5-35B-A3B": "z-lab/Qwen3.5-35B-A3B-DFlash",
    "openai/gpt-oss-20b": "z-lab/gpt-oss-20b-DFlash",
}


def of(repo: str, context: int = 4096, *, draft: bool = True, **changes: Any) -> Ledger:
    target, drafter = published_target(repo), published_drafter(PAIRS[repo])
    load: dict[str, Any] = {"dtype": "bfloat16", "bitsandbytes": None, "context": context, "block": 16 if draft else 1}
    return memory.ledger(target, drafter if draft else None, Load(**(load | changes)))


def line(ledger: Ledger, name: str) -> int:
    (found,) = [entry.bytes for entry in ledger.lines if entry.name == name]
    assert found is not None
    return found


def test_the_sums_are_the_sums() -> None:
    ledger = Ledger((MemoryLine("a", 5), MemoryLine("b", 7)), MemoryLine("loading", 20), MemoryLine("reserve", 3))
    assert (ledger.running, ledger.peak, ledger.total) == (12, 20, 23)
    assert Ledger((MemoryLine("a", 25),), MemoryLine("loading", 20), MemoryLine("reserve", 3)).total == 28


@pytest.mark.parametrize(
    "ledger",
    [
        Ledger((MemoryLine("a", None), MemoryLine("b", 7)), MemoryLine("loading", 1)),
        Ledger((MemoryLine("a", 1),), MemoryLine("loading", None)),
        Ledger((MemoryLine("a", 1),), MemoryLine("loading", 1), MemoryLine("reserve", None)),
    ],
)
def test_a_sum_with_something_unknown_is_unknown(ledger: Ledger) -> None:
    assert ledger.total is None
    assert json.loads(json.dumps(ledger.as_dict()))["total"] is None


def test_a_tied_head_lies_twice_where_a_cpu_multiplies() -> None:
    model = published_target("Qwen/Qwen3-4B")
    loads = {dtype: Load(dtype, None, 4096, 1, "cpu") for dtype in ("float32", "bfloat16", "float16")}
    found = {dtype: memory.ledger(model, None, load) for dtype, load in loads.items()}
    assert [line(found[dtype], "head") for dtype in ("float32", "bfloat16")] == [151936 * 2560 * 4, 151936 * 2560 * 2]
    assert "head" not in [entry.name for entry in found["float16"].lines]  # which no product is laid out for


@pytest.mark.parametrize(("tokens", "rows"), [(1, 256), (256, 256), (257, 512), (8192, 8192), (8193, 16384)])
def test_the_targets_cache_doubles(tokens: int, rows: int) -> None:
    assert memory.cache_rows(tokens) == rows
    each = memory.kv_bytes_per_token(published_target("Qwen/Qwen3-8B"))
    assert line(of("Qwen/Qwen3-8B", tokens), "target KV") == each * rows


def test_quantised_weights_leave_head_embedding_and_norms_whole() -> None:
    target = published_target("Qwen/Qwen3-8B")
    whole, small = formats.weight_bytes(target, "bfloat16", None), formats.weight_bytes(target, "bfloat16", "bnb-nf4")
    embedding = 151936 * 4096
    linear = 8190735360 - 2 * embedding - 36 * (2 * 4096 + 2 * 128) - 4096
    assert whole - small == pytest.approx(linear * (2 - formats.NF4_BYTES), abs=1)
    assert formats.head_bytes(target, "bfloat16") == 2 * embedding
    eight = formats.weight_bytes(target, "bfloat16", "bnb-int8")
    assert small < eight < whole


def test_mxfp4_is_decoded_at_load() -> None:
    target = published_target("openai/gpt-oss-20b")
    held = formats.weight_bytes(target, "bfloat16", None) + formats.head_bytes(target, "bfloat16")
    stored = formats.published_bytes(target)
    assert held == 2 * 20914757184
    assert stored is not None and stored < held / 3


@pytest.mark.parametrize("draft", [True, False])
def test_loading_is_the_weights_and_of_quantised_ones_a_matrix_before_it_is_packed(draft: bool) -> None:
    matrix = formats.largest_matrix(published_target("Qwen/Qwen3-8B"))
    for quantize, more in ((None, 0), ("bnb-nf4", 2 * matrix)):
        ledger = of("Qwen/Qwen3-8B", draft=draft, bitsandbytes=quantize)
        weights = [entry.bytes or 0 for entry in ledger.lines if "weights" in entry.name or entry.name == "head"]
        assert ledger.loading.bytes == sum(weights) + more


def test_what_a_prompt_takes_beside_its_caches_is_worked_out_by_hand() -> None:
    """Qwen3-8B is 4,096 wide, 12,288 in its feed-forward, and its drafter reads five taps."""
    found = next(entry for entry in of("Qwen/Qwen3-8B", 1024).lines if entry.name == "workspace")
    beside = 1024 * 4096 * (2 + 5) * 2  # the residual, its norm and the taps, in bfloat16
    assert found.note == "feed-forward of a prompt chunk"
    assert found.bytes == beside + 3 * 1024 * 12_288 * 2 + memory.LIBRARY_WORKSPACE
    later = next(entry for entry in of("Qwen/Qwen3-8B", 1024, draft=False).lines if entry.name == "workspace")
    assert found.bytes - (later.bytes or 0) == 5 * 1024 * 4096 * 2
