"""Reads a checkpoint's tensors to their places, every tensor accounted for."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dflash_local.checkpoint_files.gguf_quantization import keeps_blocks
from dflash_local.checkpoint_files.safetensors_folder import name_list
from dflash_local.checkpoint_files.tensor_info import GGML, TensorInfo
from dflash_local.config.module_names import HEAD_MODULES
from dflash_local.errors import CheckpointError
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.place import Conversion, Place, Places
from dflash_local.models.target_facts import TargetFacts
from dflash_local.models.weight_stream import DTYPES, WIDE

# Recomputed from the configuration; and scales of a quantised cache, which is asked for by an option of its own.
UNUSED = ("rotary_emb.inv_freq", ".k_scale", ".v_scale")


def text_tensors(checkpoint: Checkpoint, facts: TargetFacts) -> list[str]:
    """Return names of the text model's tensors; towers and further heads of a checkpoint are left alone."""
    return [name for name in checkpoint.tensors if _is_text(name, facts)]


def _is_text(name: str, facts: TargetFacts) -> bool:
    if name.rpartition(".")[0] in HEAD_MODULES:
        return not facts.model.tie_word_embeddings
    return name.startswith(facts.prefix) and not name.endswith(UNUSED)


def fill_places(
    checkpoint: Checkpoint, names: Iterable[str], places: Places, on_fraction: Callable[[float], None] = lambda _: None
) -> None:
    """Read the tensors ``names`` to their places. Raises CheckpointError: one is missing, left over or wrong."""
    read = check_places(checkpoint, names, places)
    checkpoint.fill({name: [place] for name, place in read.items()}, on_fraction=on_fraction)


def check_places(checkpoint: Checkpoint, names: Iterable[str], places: Places) -> dict[str, Place]:
    """Return the places that are read to, by headers alone. Raises CheckpointError as ``fill_places`` does."""
    there = set(names)
    optional = (name for name, place in places.items() if isinstance(place, Conversion) and place.optional)
    required = {name for name, place in places.items() if place is not None} - {*optional}
    missing, left = required - there, there - set(places)
    if missing:
        raise CheckpointError(f"{checkpoint.path} lacks the tensor {name_list(missing)}")
    if left:
        raise CheckpointError(f"{checkpoint.path} has tensors that this family does not know: {name_list(left)}")
    read = {name: place for name, place in places.items() if place is not None and name in there}
    for name, place in read.items():
        _check(checkpoint.tensors[name], place)
    return read


def _check(info: TensorInfo, place: Place) -> None:
    """Refuse a tensor without its place's shape. Numbers are cast to a place's of another width; codes never."""
    fits = place.takes(info.shape) if isinstance(place, Conversion) else info.shape == tuple(place.shape)
    if not fits:
        raise CheckpointError(
            f"{info.file}: tensor {info.name} has shape {list(info.shape)}, expected {list(place.shape)}"
        )
    if isinstance(place, Conversion) and place.blocks:
        if info.dtype != place.blocks or not keeps_blocks(info):
            raise CheckpointError(f"{info.file}: tensor {info.name} is stored as {info.dtype}, expected {place.blocks}")
        return
    numbers = (info.dtype in WIDE or info.dtype in GGML) and place.dtype in WIDE.values()
    if not numbers and DTYPES.get(info.dtype) != place.dtype:
        raise CheckpointError(f"{info.file}: tensor {info.name} is stored as {info.dtype}, expected {place.dtype}")
