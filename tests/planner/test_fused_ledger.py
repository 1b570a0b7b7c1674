"""The fused engine's ledger against the tensors that it really holds, on a CPU; and against peaks of an H200."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("torch", reason="holds the planner to the engine, and torch is not installed here")

import torch  # noqa: E402

from dflash_local.bench.random_pair import RandomPair, of_row, read_pair  # noqa: E402
from dflash_local.catalog import registry  # noqa: E402
from dflash_local.catalog.bundled import find  # noqa: E402
from dflash_local.catalog.shapes import shape  # noqa: E402
from dflash_local.checkpoint_files.config_values import ConfigFields  # noqa: E402
from dflash_local.config.features import AttentionConfig, LayerConfig, ModelConfig  # noqa: E402
from dflash_local.config.quantizers import USUAL, read_quantization  # noqa: E402
from dflash_local.drafters.dflash.fused import DFlashBlocks  # noqa: E402
from dflash_local.drafters.drafter import Drafter  # noqa: E402
from dflash_local.drafters.engines import blocks_of  # noqa: E402
from dflash_local.engine import drafter_precision  # noqa: E402
from dflash_local.engine.fused_runner import FusedRunner  # noqa: E402
from dflash_local.engine.load_pair import load  # noqa: E402
from dflash_local.errors import DFlashError  # noqa: E402
from dflash_local.layout import pair as layout  # noqa: E402
from dflash_local.layout.buffer import distinct  # noqa: E402
from dflash_local.layout.linear import DECODED_SLICE, DEQUANTIZED_BYTES, DEQUANTIZED_SLICE, stored_formats  # noqa: E402
from dflash_local.layout.part_layout import EngineSpec  # noqa: E402
from dflash_local.layout.quantized import quantized  # noqa: E402
from dflash_local.layout.target import weight_buffers  # noqa: E402
from dflash_local.load_config import DRAFTER_PRECISIONS, FREQUENT, QUANTIZED, LoadConfig  # noqa: E402
from dflash_local.models import drafter_weights  # noqa: E402
from dflash_local.models.fused import linear  # noqa: E402
from dflash_local.models.fused import weights as target_weights  # noqa: E402
from dflash_local.models.fused.target import FusedTarget  # noqa: E402
from dflash_local.planner import fused_memory  # noqa: E402
from dflash_local.planner.load import Load  # noqa: E402
from dflash_local.planner.parameters import target_parameters  # noqa: E402
from tests.drafter_configs import decoder

CONTEXT = 300
META = torch.device("meta")


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
    storages = [tensor.untyped_storage() for thing in things for tensor in tensors_of(thing, seen)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def room_behind(model: ModelConfig) -> int:
    """Bytes behind coded weights that do not consist of whole tiles and steps."""
    formats = stored_formats(model.quantization)
    buffers = distinct(weight_buffers(model, "model.", model.vocab_size, "bfloat16", formats)).values()
    return sum(buffer.nbytes - replace(buffer, room=None).nbytes for buffer in buffers)


def attention(layer: LayerConfig) -> AttentionConfig:
    assert isinstance(layer.mixer, AttentionConfig)
    return layer.mixer


def covered(*things: object) -> int:
    """Bytes that the tensors themselves reach, each counted once: parts of a memory that others share."""
    seen: set[int] = set()
    ranges: dict[int, set[tuple[int, int]]] = {}
    for tensor in (tensor for thing in things for tensor in tensors_of(thing, seen)):
        size, begin = tensor.element_size(), int(tensor.storage_offset()) * tensor.element_size()
        reach = int(sum((count - 1) * step for count, step in zip(tensor.shape, tensor.stride()))) + 1
        ranges.setdefault(tensor.untyped_storage()._cdata, set()).add((begin, begin + reach * size))
    total = 0
    for found in ranges.values():
        end = 0
        for begin, stop in sorted(found):
            total += max(0, stop - max(begin, end))
            end = max(end, stop)
    return total


def fused_rows() -> dict[str, RandomPair]:
    """Every pair of the registry that the fused engine takes, by its target."""
    found = {}
    for row in registry.load().rows:
        try:
            found[row.name] = of_row(row)
        except DFlashError:
            continue  # a server's, a drafter of another kind
        for other in row.other_drafters:
            config, target = shape(other.repo), shape(row.name)
            if other.kind == row.kind and config is not None and target is not None:
                found[f"{row.name} with {other.repo}"] = read_pair((row.name, target), (other.repo, config))
    return found


PAIRS = fused_rows()
# Dense, hybrid, Llama's rotation; then experts beside a recurrence, sinks and biases, a second drafter that is stored.
EVERY_WAY = ("Qwen/Qwen3-8B", "Qwen/Qwen3.5-9B", "meta-llama/Llama-3.1-8B-Instruct")
ONE_WAY = ("Qwen/Qwen3-Coder-Next", "openai/gpt-oss-20b", "Qwen/Qwen3.8-27B with syvai/Qwen3.8-27B-DFlash2-W4A16")
WAYS = [
    ("bfloat16", False, "full", "auto"),
    ("float32", True, "8bit-head", "auto"),
    ("bfloat16", False, "8bit", "int8"),
    ("bfloat16", False, "8bit-frequent", "auto"),
]
HERE = [(name, WAYS[0]) for name in ONE_WAY]


def on_meta(pair: RandomPair, context: int, dtype: torch.dtype, precision: str, **options: Any) -> FusedRunner:
    """The engine of a pair's true sizes, without memory."""
    formats = stored_formats(pair.model.quantization)
    weights = target_weights.allocate(pair.model, "model.", pair.model.vocab_size, META, dtype, formats)
    target = FusedTarget(weights, pair.model, pair.config.taps, context, pair.config.block_size, **options)
    stored = stored_formats(pair.config.quantization)
    parts = drafter_weights.allocate(decoder(pair.config), pair.model.hidden_size, META, dtype, stored).finished()
    drafter = blocks_of(pair.config)(pair.config, parts, target)
    with mock.patch.object(linear, "quantize"):  # no memory, no numbers
        drafter_precision.apply(drafter, DRAFTER_PRECISIONS[precision])
    return FusedRunner(target, drafter, context)


def host_copies(runner: FusedRunner) -> int:
    """The copies of records and margins, which lie on the host."""
    return held(runner._records._host, runner._records._host_experts, runner._margins._host)


def lines(model: ModelConfig, drafter: Drafter | None, load: Load) -> dict[str, int]:
    book = fused_memory.ledger(model, drafter, load)
    return {line.name: line.bytes or 0 for line in book.lines}


def standing(found: dict[str, int]) -> int:
    """Of a ledger's lines, what stands from load to close."""
    return sum(
        size for name, size in found.items() if name not in ("state snapshots", "workspace", "graphs and libraries")
    )


def check_ledger(pair: RandomPair, config: LoadConfig) -> tuple[dict[str, int], FusedRunner]:
    """Hold the ledger of a pair to what the engine allocates, to the byte; its lines, and the engine."""
    dtype = torch.bfloat16 if config.dtype == "auto" else getattr(torch, config.dtype)
    runner = on_meta(pair, 4099, dtype, config.drafter_precision, exact=config.exact, kv_cache=config.kv_cache)
    found = lines(pair.model, pair.config, Load.of("cuda", config, 4099, pair.config.block_size))
    assert standing(found) == held(runner) - host_copies(runner)
    assert found["target weights"] + found.get("head", 0) == covered(runner.target.weights) + room_behind(pair.model)
    return found, runner


@pytest.mark.parametrize(
    ("name", "dtype", "exact", "precision", "kv_cache"),
    [
        pytest.param(name, *ways, marks=() if name in EVERY_WAY or (name, ways) in HERE else pytest.mark.slow)
        for name in PAIRS
        for ways in WAYS
    ],
)
def test_the_ledger_is_what_the_engine_allocates(
    name: str, dtype: str, exact: bool, precision: str, kv_cache: str
) -> None:
    """To the byte, for every pair of the registry that the fused engine takes, at its true size."""
    config = LoadConfig(dtype=dtype, exact=exact, drafter_precision=precision, kv_cache=kv_cache)
    found, runner = check_ledger(PAIRS[name], config)
    caches = [layer.mixer.cache for layer in runner.target.layers if hasattr(layer.mixer, "cache")]
    assert found["target KV"] == covered(caches)
    drafter = runner.proposer
    assert isinstance(drafter, DFlashBlocks) and found["drafter KV"] == held(*drafter.cache)
    chosen_by = [getattr(drafter.selector, name, ()) for name in ("codebooks", "weights")]
    matrices = held(*drafter.matrices, *chosen_by)
    assert matrices < found["drafter weights"] < 1.01 * matrices, "norms are small"


# A hybrid in every format; experts, which take long for their number, in one that is stored and one that is made.
DENSE, EXPERTS, SHARED = "Qwen/Qwen3.5-9B", "Qwen/Qwen3-Coder-30B-A3B-Instruct", "Qwen/Qwen3.5-35B-A3B"
LONG = ((SHARED, "stored", "int4-g128"), (EXPERTS, "stored", "int4-g32-zeros"), (SHARED, "stored", "nvfp4"))
CODED = [
    *((DENSE, "stored", how) for how in USUAL),
    *((DENSE, "at load", how) for how in QUANTIZED),
    *((EXPERTS, "stored", "fp8"), (SHARED, "at load", "int4")),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in LONG),
]
BITS = {"fp8": 8, "int8": 8, "int4": 4 + 16 / 128, "int4-g128": 4 + 16 / 128, "int4-g32-zeros": 4.75, "nvfp4": 4.5}


@pytest.mark.parametrize(("name", "when", "how"), CODED)
def test_the_ledger_of_coded_matrices_is_what_is_allocated(name: str, when: str, how: str) -> None:
    """They count in the bits that they are published in, or rounded to as they are read."""
    pair, at_load = PAIRS[name], when == "at load"
    stored = None if at_load else read_quantization(ConfigFields(USUAL[how], name))
    model = replace(pair.model, layers=pair.model.layers[:8])  # which repeat; those of a target are too many experts
    taps = tuple(range(len(pair.config.taps)))
    model = quantized(model, how) if at_load else replace(model, quantization=stored)
    pair = replace(pair, model=model, config=replace(pair.config, taps=taps))
    _, runner = check_ledger(pair, LoadConfig(quantize=how if at_load else None, drafter_precision="full"))
    counts, target = target_parameters(pair.model), runner.target.weights
    if name == DENSE:
        coded, of = [product.weight.nbytes for product in target.products], counts.quantisable
    else:
        experts: list[Any] = [layer.mlp.experts for layer in target.layers]  # type: ignore[attr-defined]
        coded = [weight.weight.nbytes for each in experts for weight in (each.gate_up, each.down)]
        of = counts.experts + counts.mlp
    if how in BITS:
        assert 8 * sum(coded) == pytest.approx(BITS[how] * of, rel=0.02)


@pytest.mark.parametrize("precision", ["full", "8bit-head", "8bit-frequent"])
@pytest.mark.parametrize("stored", [{**USUAL["int4-g128"], "lm_head": True}, {**USUAL["nvfp4"], "ignore": []}])
def test_a_quantised_head_is_drafted_with_as_it_is(stored: Any, precision: str) -> None:
    name = "Qwen/Qwen3-8B"
    pair = PAIRS[name]
    pair = replace(pair, model=replace(pair.model, quantization=read_quantization(ConfigFields(stored, name))))
    found, runner = check_ledger(pair, LoadConfig(drafter_precision=precision))
    assert found["head"] == covered(runner.target.weights.head)
    rows = FREQUENT * pair.model.hidden_size if precision == "8bit-frequent" else 0
    assert rows <= found.get("head for drafting", 0) <= 1.01 * rows, "rows that lie apart are coded anew"


def test_loading_a_target_that_is_quantised_at_load_takes_one_tensor_more() -> None:
    """With little context the last matrix as it is stored is the fullest moment; with much, all that is reserved."""
    model = quantized(PAIRS["Qwen/Qwen3.5-27B"].model, "int4")
    few, many = (fused_memory.ledger(model, None, Load("bfloat16", None, each, 1)) for each in (300, 65536))
    weights = sum(line.bytes or 0 for line in few.lines if line.name in ("target weights", "head"))
    matrix = 2 * 17408 * 5120
    assert few.loading.bytes == weights + matrix + DEQUANTIZED_SLICE * DEQUANTIZED_BYTES
    assert "rounded" in few.loading.note and many.loading.note == "all that is reserved"


@pytest.mark.parametrize("name", ["demo", "demo-hybrid"])
@pytest.mark.parametrize(
    ("dtype", "draft", "exact", "precision"),
    [
        ("float32", True, False, "full"),
        ("bfloat16", True, False, "8bit-head"),
        ("bfloat16", True, True, "8bit"),
        ("bfloat16", True, False, "8bit-drafter"),
        ("bfloat16", False, False, "full"),
    ],
)
def test_a_loaded_pair_holds_what_the_ledger_says(
    name: str, dtype: str, draft: bool, exact: bool, precision: str
) -> None:
    wanted = LoadConfig(
        device="cpu",
        engine="fused",
        dtype=dtype,
        context=CONTEXT,
        draft=draft,
        exact=exact,
        drafter_precision=precision,
    )
    runner = load(find(name), wanted).runner
    assert isinstance(runner, FusedRunner)
    target, drafter = runner.target, runner.proposer
    config = drafter.config if drafter is not None else None
    block = config.block_size if config is not None else 1
    request = Load.of("cpu", wanted, CONTEXT, block)
    found = lines(target.config, config, request)
    assert standing(found) == held(runner) - host_copies(runner)
    if target.states:
        spec = fused_memory.engine_spec(config, request)
        assert fused_memory.snapshot_bytes(target.config, spec) == held(*target.snapshot().recurrent)


@pytest.mark.parametrize(
    ("name", "context", "peak_gib"),
    [
        ("Qwen/Qwen3-8B", 8256, 18.704),
        ("Qwen/Qwen3.5-27B", 1088, 54.619),
        ("meta-llama/Llama-3.1-8B-Instruct", 1088, 17.221),
    ],
)
def test_measured_peaks_of_an_h200_are_predicted(name: str, context: int, peak_gib: float) -> None:
    """Of random weights and cycles alone, no prompt (torch 2.11): what stands, and the scratch of the libraries."""
    pair = PAIRS[name]
    spec = EngineSpec("bfloat16", context, pair.config.block_size, len(pair.config.taps))
    stands = sum(layout.bytes_by_group(pair.model, pair.config, spec).values())
    scratch = fused_memory.scratch_bytes(pair.model, spec, "cuda")
    assert stands + scratch == pytest.approx(peak_gib * 2**30, rel=0.002)


def test_room_to_decode_a_slice_of_a_drafter_in_eight_bits_is_counted() -> None:
    """Its products with a prompt's taps decode two bytes for each; a copy of the head is for a few rows alone."""
    pair = PAIRS["Qwen/Qwen3-8B"]
    own = "drafter's rows of a prompt chunk"

    def spec_of(precision: str, dtype: str = "bfloat16") -> EngineSpec:
        load = Load.of("cuda", LoadConfig(drafter_precision=precision, dtype=dtype), 8256, 16)
        return fused_memory.engine_spec(pair.config, load)

    def steps(precision: str) -> dict[str, int]:
        return fused_memory.prefill_steps(pair.model, pair.config, spec_of(precision), "cuda")

    assert steps("8bit-head") == steps("full")
    assert steps("8bit-drafter") == {**steps("full"), own: steps("full")[own] + 2 * DECODED_SLICE}

    def scratch(precision: str, dtype: str) -> int:
        return fused_memory.scratch_bytes(pair.model, spec_of(precision, dtype), "cuda")

    assert scratch("8bit-head", "bfloat16") == scratch("full", "bfloat16"), "kernels multiply a block with the codes"
    assert scratch("8bit-head", "float32") - scratch("full", "float32") == DEQUANTIZED_SLICE * DEQUANTIZED_BYTES


def test_a_prompt_of_a_coded_mixture_takes_its_decoded_experts() -> None:
    name, spec = "experts of a prompt chunk", EngineSpec("bfloat16", 8192, 8, 8, prefill_chunk=4096)
    target = of_row(found).model if (found := registry.load().find("gpt-oss-20b")) else None
    assert target is not None
    coded, plain = (
        fused_memory.prefill_steps(each, None, spec, "cuda")[name]
        for each in (target, replace(target, quantization=None))
    )
    assert coded - plain == 4 * 2 * 2880 * 2880 * 2, "four of them at a time, in bfloat16"


def test_what_a_prompt_takes_beside_what_stands_is_worked_out_by_hand() -> None:
    """Qwen3.5-9B is 4,096 wide, 12,288 in its feed-forward; it has eight taps, and two states while it prefills."""
    pair = PAIRS["Qwen/Qwen3.5-9B"]
    state = 52_690_944  # 24 layers, float32 matrices and the convolution's inputs

    def book(context: int) -> tuple[dict[str, int], int]:
        load = Load.of("cuda", LoadConfig(drafter_precision="full"), context, 16)
        made = fused_memory.ledger(pair.model, pair.config, load)
        return {line.name: line.bytes or 0 for line in made.lines}, made.loading.bytes or 0

    (long, loading), (short, _) = book(8192), book(64)
    assert long["state snapshots"] == 2 * state, "the newest is taken when the prompt is done"
    assert short["state snapshots"] == 3 * state, "a block is the fuller moment of a short context"
    assert loading - standing(long) == 3 * 4 * 8240 * 128, "angles, cosines and products of the drafter's longer table"
    steps = fused_memory.prefill_steps(
        pair.model, pair.config, fused_memory.engine_spec(pair.config, Load("bfloat16", None, 8192, 16)), "cuda"
    )
    rows = 1024
    beside = rows * 4096 * (2 + 8) * 2  # the residual, its norm and eight taps
    assert steps["feed-forward of a prompt chunk"] == beside + 3 * rows * 12_288 * 2
    assert steps["drafter's rows of a prompt chunk"] == beside + rows * 12_288 * 2
    assert long["workspace"] == max(steps.values())
    for chunk, rows in ((4096, 4096), (32_768, 8192)):  # at most the context
        load = Load("bfloat16", None, 8192, 16, prefill_chunk=chunk)
        larger = fused_memory.prefill_steps(
            pair.model, pair.config, fused_memory.engine_spec(pair.config, load), "cuda"
        )
        assert larger["feed-forward of a prompt chunk"] == rows * (4096 * (2 + 8) + 3 * 12_288) * 2
