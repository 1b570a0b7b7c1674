"""Quantised tensors as plain ones: what their codes stand for, in the dtype that is computed in."""

from __future__ import annotations

import torch

from dflash_local.checkpoint_files.safetensors_header import TensorInfo
from dflash_local.config.module_names import HEAD
from dflash_local.errors import CheckpointError
from dflash_local.kernels.allocate import Tensors, dtype_name
from dflash_local.layout.linear import UNQUANTIZED, Part, WeightFormat
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.fill_places import fill_places, text_tensors
from dflash_local.models.fused.formats import FORMATS
from dflash_local.models.fused.quantized_formats import decode, stored_size
from dflash_local.models.stored_formats import formats_in
from dflash_local.models.target_facts import TargetFacts
from dflash_local.models.weight_stream import WIDE


def decoded_tensors(
    checkpoint: Checkpoint, facts: TargetFacts, device: torch.device, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The text model's tensors under the names that transformers has for them; beside them one matrix's codes are held.

    Raises:
        CheckpointError: a tensor is missing, left over, of the wrong shape or dtype, or not finite.
    """
    format_of = formats_in(checkpoint, facts.model.quantization)
    modules: dict[str, list[str]] = {}
    for name in text_tensors(checkpoint, facts):
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    plain, found = list[str](), dict[str, torch.Tensor]()
    for module, names in modules.items():
        form = format_of(module)
        codes = next((checkpoint.tensors[each] for each in names if _holds_codes(each)), None)
        if form == UNQUANTIZED or codes is None:
            plain += names
        else:
            biases = [name for name in names if name.endswith(".bias")]
            plain += biases
            coded = [name for name in names if name not in biases]
            found[f"{module}.weight"] = _decoded(checkpoint, module, coded, form, codes, device, dtype)
    for name in plain:
        if checkpoint.tensors[name].dtype not in WIDE:
            info = checkpoint.tensors[name]
            raise CheckpointError(f"{info.file}: tensor {name} is stored as {info.dtype}, expected {dtype}")
    found |= dict(checkpoint.read(device, dtype, plain))
    return {_renamed(name, facts.prefix): tensor for name, tensor in found.items()}


def _holds_codes(name: str) -> bool:
    return name.endswith((".weight", ".qweight", ".weight_packed"))


def _decoded(
    checkpoint: Checkpoint,
    module: str,
    names: list[str],
    form: WeightFormat,
    codes: TensorInfo,
    device: torch.device,
    dtype: torch.dtype,
) -> torch.Tensor:
    rows, columns = _size(form, codes)
    buffers = form.buffers(module, rows, columns, dtype_name(dtype), "target weights")
    kind = FORMATS[type(form)]
    weight = kind.weight(form, Tensors(buffers, device).take(buffers), dtype)
    fill_places(checkpoint, names, kind.places(weight, form, [Part(module, rows)]))
    return decode(weight, torch.empty(rows, columns, dtype=dtype, device=device))


def _size(form: WeightFormat, codes: TensorInfo) -> tuple[int, int]:
    """Rows and columns of the matrix."""
    if len(codes.shape) != 2:
        raise CheckpointError(f"{codes.file}: tensor {codes.name} has shape {list(codes.shape)}, expected a matrix")
    return stored_size(form, codes.shape)


def _renamed(name: str, prefix: str) -> str:
    """The text model's own names, without its wrapper's."""
    if name.endswith(f"{HEAD}.weight"):
        return f"{HEAD}.weight"
    return f"model.{name.removeprefix(prefix)}"
