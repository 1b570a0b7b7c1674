"""The fused engine's memory: the sum of what ``layout`` describes, and what a step takes beside it for a moment.

All of the planned context is reserved at load. Knows shapes and bytes, nothing of devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from dflash_local.config.features import AttentionConfig, ModelConfig
from dflash_local.config.module_names import HEAD
from dflash_local.drafters.drafter import Drafter
from dflash_local.layout import pair
from dflash_local.layout.buffer import HOST_GROUPS, ITEM_BYTES, Group
from dflash_local.layout.cycle import prompt_chunk
from dflash_local.layout.linear import DECODED_SLICE, DEQUANTIZED_BYTES, DEQUANTIZED_SLICE
from dflash_local.layout.part_layout import EngineSpec
from dflash_local.layout.target import part_layout, parts
from dflash_local.load_config import FREQUENT
from dflash_local.planner import memory
from dflash_local.planner.ledger import RINGS, Ledger, MemoryLine
from dflash_local.planner.load import Load
from dflash_local.planner.workspace import PHASES, Phase, choice_bytes

GAPS = 0.01  # between allocations: 0.4 % on an H200, where weights and caches are three hundred tensors


def engine_spec(drafter: Drafter | None, load: Load) -> EngineSpec:
    """Return what the sizes of the engine's buffers depend on."""
    return EngineSpec(
        dtype=load.dtype,
        context=load.context,
        block_size=1 if drafter is None else load.block,
        num_taps=0 if drafter is None else len(drafter.taps),
        kv_cache=load.kv_cache,
        exact=load.exact,
        precision=load.drafter_precision,
        offloaded=load.offloaded,
        prefill_chunk=load.prefill_chunk,
    )


@lru_cache(maxsize=4096)  # plans of one pair on several cards, and of one load with several offloads, ask for the same
def ledger(target: ModelConfig, drafter: Drafter | None, load: Load, spec: EngineSpec | None = None) -> Ledger:
    """Sum the memory of a pair whose context is reserved; lines of the fuller of prefill and decode. ``spec``: of
    layers whose drafter is elsewhere.
    """
    spec = spec or engine_spec(drafter, load)
    sums = pair.bytes_by_group(target, drafter, spec)
    held = _held(target, drafter, spec, sums)
    standing = Ledger(tuple(held), MemoryLine("loading", 0)).running or 0
    # The slice of the head that is held while its copy for drafting is made; a drafter's are made before the rest.
    copied = drafter is not None and spec.precision.head != "full"
    beside = max(_making_tables(target, drafter, spec), DEQUANTIZED_SLICE * DEQUANTIZED_BYTES if copied else 0)
    loading = _loading(target, held, standing + beside)
    moments = [Ledger((*held, *_moment(target, drafter, spec, load, phase)), loading) for phase in PHASES]
    fullest = max(moments, key=lambda moment: moment.running or 0)
    lines = tuple(line for line in fullest.lines if line.bytes != 0)
    # What lies in pinned host memory; the kernels read it, and copy it, where it is.
    embedding = sum(sums.get(group, 0) for group in HOST_GROUPS)
    copies = load.snapshots if "snapshots" in spec.offloaded else 0
    states = snapshot_bytes(target, spec)
    rings = ring_bytes(target, spec)
    if (states or rings) and drafter is not None:
        rings += drafter.snapshot_bytes(spec)
    host = (
        MemoryLine("embedding", embedding, f"{spec.dtype}, its rows are read inside the graph"),
        MemoryLine("state snapshots", states * copies, f"{copies} of them"),
        MemoryLine(RINGS, rings * load.snapshots, "as each snapshot has them"),
    )
    reserve = memory.reserve(load, fullest.peak, GAPS)
    return Ledger(lines, loading, reserve, tuple(line for line in host if line.bytes))


def _loading(target: ModelConfig, held: Sequence[MemoryLine], reserved: int) -> MemoryLine:
    """Return the fullest moment of loading: all that is reserved, or the last matrix that is rounded as it is read."""
    if target.quantization is not None and target.quantization.at_load:
        weights = sum(line.bytes or 0 for line in held if line.name in ("target weights", "head"))
        reading = weights + memory.quantizing_bytes(target)
        if reading > reserved:
            return MemoryLine("loading", reading, "the weights, and one while it is rounded")
    return MemoryLine("loading", reserved, "all that is reserved")


def _held(
    target: ModelConfig, drafter: Drafter | None, spec: EngineSpec, sums: Mapping[Group, int]
) -> list[MemoryLine]:
    """Return what stands from load to close."""
    fewer = ", fewer where a layer has a window"
    copied = f"rows of {FREQUENT:,} ids" if spec.precision.head == "frequent" else "8 bits"
    notes: dict[Group, str] = {
        "target weights": _format(target, spec),
        "head": _head_note(target, spec),
        "head for drafting": f"{copied}, beside the head",
        "drafter weights": _drafter_note(drafter, spec),
        "target KV": f"{spec.capacity} rows{fewer if ring_bytes(target, spec) else ''}",
        "drafter KV": f"at most {spec.drafter_capacity} rows",
        "rotation tables": "of every position",
        "recurrent state": "with two blocks' log",
        "attention partials": "split over the keys",
        "buffers": f"of {spec.rows} rows",
    }
    return [MemoryLine(group, sums.get(group, 0), note) for group, note in notes.items()]


def _format(target: ModelConfig, spec: EngineSpec) -> str:
    stored = target.quantization
    if stored is None:
        return spec.dtype
    return f"{stored.name}, {'rounded as they are read' if stored.at_load else 'as stored'}"


def _drafter_note(drafter: Drafter | None, spec: EngineSpec) -> str:
    rest = "8 bits" if spec.precision.weights == "8bit" else spec.dtype
    stored = "" if drafter is None else drafter.stored_name
    return f"{stored}, as stored; the rest {rest}" if stored else rest


def _head_note(target: ModelConfig, spec: EngineSpec) -> str:
    if target.tie_word_embeddings:
        return "the embedding's"
    stored = None if target.quantization is None else target.quantization.stored(HEAD)
    return spec.dtype if stored is None else f"{stored.name}, as stored"


def _making_tables(target: ModelConfig, drafter: Drafter | None, spec: EngineSpec) -> int:
    """Return what making the larger rotation table takes beside it: float32 angles, a cosine, its product."""
    wide = [
        spec.capacity * mixer.rotary_dim
        for mixer in {layer.mixer for layer in target.layer_kinds}
        if isinstance(mixer, AttentionConfig)
    ]
    if drafter is not None:
        wide.append(spec.drafter_capacity * drafter.rotation_size // 2)
    return 3 * 4 * max(wide, default=0)


def _moment(
    target: ModelConfig, drafter: Drafter | None, spec: EngineSpec, load: Load, phase: Phase
) -> list[MemoryLine]:
    """Return what a phase needs beside."""
    copies = load.snapshots - (phase == "prefill")  # the newest is taken when the prompt is done
    if "snapshots" in spec.offloaded:
        copies = 0
    if phase == "prefill":
        steps = prefill_steps(target, drafter, spec, load.device)
    else:
        steps = {"choice of tokens": choice_bytes(target, spec.rows)}
    note = max(steps, key=lambda name: steps[name])
    return [
        MemoryLine("state snapshots", snapshot_bytes(target, spec) * copies, f"{copies} of them"),
        MemoryLine("workspace", steps[note], note),
        MemoryLine("graphs and libraries", scratch_bytes(target, spec, load.device), "their scratch"),
    ]


def snapshot_bytes(target: ModelConfig, spec: EngineSpec) -> int:
    """Return a copy of all recurrent states."""
    item = ITEM_BYTES[spec.dtype]
    return sum(part_layout(layer.mixer).snapshot_bytes(item) * count for layer, count in target.layer_kinds.items())


def ring_bytes(target: ModelConfig, spec: EngineSpec) -> int:
    """Return what a snapshot has of the target's caches with a window."""
    return sum(part_layout(layer.mixer).ring_bytes(spec) * count for layer, count in target.layer_kinds.items())


def prefill_steps(target: ModelConfig, drafter: Drafter | None, spec: EngineSpec, device: str) -> dict[str, int]:
    """Return the steps of a prompt's chunk, each with what lives beside it."""
    item, rows = ITEM_BYTES[spec.dtype], prompt_chunk(target, spec.context, spec.prefill_chunk)
    beside = rows * target.hidden_size * (2 + spec.num_taps) * item  # the residual, its norm and the taps
    steps: dict[str, int] = {}
    for part in parts(target):
        name = f"{part.title} of a prompt chunk"
        taken = part.prefill_bytes(rows, target.hidden_size, item)
        if target.quantization is not None:
            taken += decoding_bytes(spec, device, part.decoded_at_once(rows, target.hidden_size, item))
        steps[name] = max(steps.get(name, 0), beside + taken)
    if drafter is not None:
        kept = target.hidden_size * (2 + spec.num_taps)  # a drafter's own rows are as wide as its target's
        taken = rows * (kept + drafter.prefill_size) * item
        coded = spec.precision.weights == "8bit"
        steps["drafter's rows of a prompt chunk"] = taken + (decoding_bytes(spec, device) if coded else 0)
    return steps


def scratch_bytes(target: ModelConfig, spec: EngineSpec, device: str) -> int:
    """Sum the scratch of the libraries, on the stream of the prompts and on the one that graphs are recorded on; and
    what
    in a recorded block hold for a moment.
    """
    if device != "cuda":
        return 0
    products = max(part.scratch_bytes(spec.rows, ITEM_BYTES[spec.dtype]) for part in parts(target))
    coded = target.quantization is not None or spec.precision.coded
    decoded = decoding_bytes(spec, device, 0) if coded else 0
    return 2 * memory.library_workspace(device) + products + decoded


def decoding_bytes(spec: EngineSpec, device: str, weights: int = DECODED_SLICE) -> int:
    """Return the slice of a quantised matrix that a product decodes at a time.

    Args:
        weights: that kernels decode at a time; none in a block of a graph, where they multiply the codes themselves.
    """
    if device == "cuda" and spec.dtype == "bfloat16":  # what the kernels are for
        return weights * ITEM_BYTES[spec.dtype]
    return DEQUANTIZED_SLICE * DEQUANTIZED_BYTES
