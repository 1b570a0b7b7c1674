"""The fused engine's ledger against the tensors that it really holds, on a CPU; and against peaks of an H200."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="holds the planner to the engine, and torch is not installed here")

import torch  # noqa: E402

from dflash_local.catalog.bundled import FOLDER, find  # noqa: E402
from dflash_local.catalog.shapes import shape as known_shape  # noqa: E402
from dflash_local.config.drafter_config import DrafterConfig  # noqa: E402
from dflash_local.config.features import ModelConfig  # noqa: E402
from dflash_local.config.read_model import read_model  # noqa: E402
from dflash_local.engine.fused import RING, FusedRunner  # noqa: E402
from dflash_local.engine.load import load  # noqa: E402
from dflash_local.kernels import accept, choose, decode_attention, delta_chunk, split_kv  # noqa: E402
from dflash_local.load_config import LoadConfig  # noqa: E402
from dflash_local.models.fused import target as fused_target  # noqa: E402
from dflash_local.planner import fused_memory, fused_sizes, fused_workspace  # noqa: E402
from dflash_local.planner.fused_sizes import Sizes  # noqa: E402
from dflash_local.planner.load import Load  # noqa: E402

CONTEXT = 300


def tensors_of(thing: object, seen: set[int]) -> Iterator[torch.Tensor]:
    """Every tensor that can be reached from an object of ours through its attributes."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        yield thing
        return
    inner: list[object] = []
    if isinstance(thing, (list, tuple)):
        inner = list(thing)
    elif isinstance(thing, dict):
        inner = list(thing.values())
    elif type(thing).__module__.startswith("dflash_local"):
        names = {name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())}
        inner = [getattr(thing, name) for name in {*names, *getattr(thing, "__dict__", {})} if hasattr(thing, name)]
    for part in inner:
        yield from tensors_of(part, seen)


def held(*things: object) -> int:
    """Bytes of the memory behind them, each piece counted once."""
    seen: set[int] = set()
    found = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for thing in things
        for t in tensors_of(thing, seen)
    }
    return sum(found.values())


def shapes_of(name: str) -> tuple[ModelConfig, DrafterConfig]:
    configs = [json.loads((FOLDER / name / part / "config.json").read_text()) for part in ("target", "drafter")]
    target = read_model(configs[0], name)
    return target, DrafterConfig.from_shape(configs[1], "drafter")


def runner_of(name: str, dtype: str, draft: bool = True, **options: Any) -> FusedRunner:
    wish = LoadConfig(device="cpu", engine="fused", dtype=dtype, context=CONTEXT, draft=draft, **options)
    runner = load(find(name), wish).runner
    assert isinstance(runner, FusedRunner)
    return runner


@pytest.mark.parametrize("name", ["demo", "demo-hybrid"])
@pytest.mark.parametrize(
    ("dtype", "draft", "exact", "side"),
    [
        ("float32", True, False, "full"),
        ("bfloat16", True, False, "8bit-head"),
        ("bfloat16", True, True, "8bit"),
        ("bfloat16", True, False, "8bit-drafter"),
        ("bfloat16", False, False, "full"),
    ],
)
def test_every_line_is_what_the_engine_holds(name: str, dtype: str, draft: bool, exact: bool, side: str) -> None:
    runner = runner_of(name, dtype, draft, exact=exact, drafter_precision=side)
    target, drafter = runner.target, runner.proposer
    read, read_drafter = shapes_of(name)
    block = drafter.config.block_size if drafter is not None else 1
    wish = Load.of("cpu", LoadConfig(dtype=dtype, exact=exact, drafter_precision=side), CONTEXT, block)
    sizes = Sizes(read, read_drafter if draft else None, wish)
    said = {line.name: line.bytes for line in fused_memory.ledger(sizes.target, sizes.drafter, sizes.load).lines}
    assert target.capacity == sizes.capacity
    assert said["target weights"] + said.get("head", 0) == held(target.weights)
    assert said["target KV"] == held(target.keys, target.values)
    tables, pieces = [target.rotation], [target._partials]
    drafter_weights: list[object] = []
    if drafter is not None:
        drafter_weights = [drafter._layers, drafter._fc, drafter._context_kv]
        drafter_weights += [drafter._norm, drafter._hidden_norm, drafter._context_key_norm]
        assert said["drafter weights"] == held(*drafter_weights)
        assert said["drafter KV"] == held(drafter.keys, drafter.values)
        if sizes.narrow_head:
            assert said["head for drafting"] == held(drafter.head)
            drafter_weights.append(drafter.head)
        tables, pieces = [*tables, drafter._rotation], [*pieces, drafter._partials]
    assert said["rotation tables"] == held(*tables)
    assert said["attention pieces"] == held(*pieces)
    counters = held(target.start)  # shared with the states
    states = held(list(target.states.values())) - counters if target.states else 0
    assert said.get("recurrent state", 0) == states
    if target.states:
        assert fused_memory.snapshot_bytes(sizes) == held(*target.snapshot().recurrent)
    standing = [target.weights, target.keys, target.values, *tables, *pieces, *drafter_weights]
    if drafter is not None:
        standing += [drafter.keys, drafter.values]
    rest = held(runner) - held(*standing) - states
    assert said["buffers"] == pytest.approx(rest, rel=0.01, abs=512)  # the records' copies on the host are not counted


def test_the_rooms_agree_on_constants() -> None:
    assert fused_sizes.EXACT_ROWS == fused_target.EXACT_ROWS
    assert (fused_memory.PIECES, fused_memory.FEWEST) == (split_kv.MAX_SPLITS, split_kv.MIN_SPLIT_SIZE)
    assert (fused_memory.LEAST, fused_memory.OCTAVE) == (split_kv.FIXED_SPLIT_SIZE, split_kv.SPLITS_PER_DOUBLING)
    assert fused_memory.CHOICE == choose.BLOCK and fused_workspace.CHUNK == delta_chunk.CHUNK
    assert (fused_memory.RING, fused_memory.RECORD_HEAD, fused_memory.STOPS) == (
        RING,
        accept.HEADER_WORDS,
        accept.MAX_STOPS,
    )


@pytest.mark.parametrize("capacity", [1, 17, 100, 128, 1000, 1025, 4096, 4097, 8192, 8193, 32800, 131073, 262176])
def test_pieces_are_cut_as_attention_cuts_them(capacity: int) -> None:
    even, fixed = (
        len(decode_attention.SplitKV.allocate(3, 2, 8, capacity, torch.device("meta"), kind).outputs)
        for kind in (False, True)
    )
    assert (fused_memory.even_pieces(capacity), fused_memory.fixed_pieces(capacity)) == (even, fixed)


@pytest.mark.parametrize(
    ("target_id", "drafter_id", "block", "context", "peak_gib"),
    [
        ("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16", 16, 8256, 18.704),
        ("Qwen/Qwen3.5-27B", "z-lab/Qwen3.5-27B-DFlash", 16, 1088, 54.619),
        ("meta-llama/Llama-3.1-8B-Instruct", "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat", 10, 1088, 17.221),
    ],
)
def test_measured_peaks_of_an_h200_are_predicted(
    target_id: str, drafter_id: str, block: int, context: int, peak_gib: float
) -> None:
    """Of random weights and cycles alone, no prompt (torch 2.11): what stands, and the scratch of the libraries."""
    configs = [known_shape(repo) for repo in (target_id, drafter_id)]
    assert configs[0] is not None and configs[1] is not None
    target = read_model(configs[0], target_id)
    drafter = DrafterConfig.from_shape(configs[1], "drafter")
    sizes = Sizes(target, drafter, Load("bfloat16", None, context, block))
    standing = sum(line.bytes or 0 for line in fused_memory._held(sizes))
    assert standing + fused_workspace.scratch_bytes(sizes) == pytest.approx(peak_gib * 2**30, rel=0.002)


def test_narrow_formats_take_what_they_say() -> None:
    """Of the drafter of Qwen3.5-9B: a byte for each of its weights; the head's copy a byte for each of its own."""
    configs = [known_shape(repo) for repo in ("Qwen/Qwen3.5-9B", "z-lab/Qwen3.5-9B-DFlash")]
    assert configs[0] is not None and configs[1] is not None
    target = read_model(configs[0], "target")
    drafter = DrafterConfig.from_shape(configs[1], "drafter")

    def lines(**narrow: Any) -> dict[str, int | None]:
        book = fused_memory.ledger(target, drafter, Load.of("cuda", LoadConfig(**narrow), 32768, 16))
        return {line.name: line.bytes for line in book.lines}

    wide, narrow = lines(), lines(drafter_precision="8bit", kv_cache="fp8")
    assert narrow["drafter weights"] == pytest.approx((wide["drafter weights"] or 0) / 2, rel=0.002)
    assert narrow["head for drafting"] == 248320 * (4096 + 4) and "head for drafting" not in wide
    for name in ("target KV", "drafter KV"):
        assert 2 * (narrow[name] or 0) == wide[name]
    assert narrow["target weights"] == wide["target weights"] and narrow["head"] == wide["head"]
