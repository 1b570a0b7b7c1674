"""Quantised tensors as plain ones: what their codes stand for, in the dtype that is computed in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dflash_local.checkpoint_files.tensor_info import GGML, TensorInfo
from dflash_local.config.features import ModelConfig, MoEConfig
from dflash_local.config.module_names import EXPERT, HEAD, experts_of
from dflash_local.errors import CheckpointError
from dflash_local.kernels.allocate import Tensors, dtype_name
from dflash_local.kernels.quantize_weight import quantize
from dflash_local.layout.linear import UNQUANTIZED, FormatOf, MatrixPart, QuantizedAtLoad, WeightFormat, unquantized
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.fill_places import fill_places, text_tensors
from dflash_local.models.fused.formats import FORMATS
from dflash_local.models.fused.quantized_formats import decode
from dflash_local.models.place import Conversion, Places
from dflash_local.models.stored_formats import MATRIX_NAMES, formats_in, stored_size
from dflash_local.models.target_facts import TargetFacts
from dflash_local.models.weight_stream import WIDE

PARTS = 3  # of an expert


class FusedExperts:
    """``gate_up_proj`` [E, 2 I, H], the gate's rows first, and ``down_proj`` [E, H, I] of each layer that has them; of
    interleaved mixtures [E, H, 2 I], gate and up by turns, and [E, I, H]. Biases [E, 2 I] and [E, H] beside them.
    """

    def __init__(self, model: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._model, self._device, self._dtype = model, device, dtype
        self._tensors: dict[str, torch.Tensor] = {}
        self._filled: dict[str, tuple[int, set[str]]] = {}  # by mixture: how many tensors it has, and which were given

    def place(self, module: str, bias: bool = False) -> torch.Tensor | None:
        """Return the place of an expert's matrix [rows, columns] or bias [rows], or None. CheckpointError: no such
        expert.
        """
        found = EXPERT.fullmatch(module)
        if found is None:
            return None
        layers = self._model.layers
        mixture = layers[int(found[2])].mlp if int(found[2]) < len(layers) else None
        if (
            not isinstance(mixture, MoEConfig)
            or int(found[3]) >= mixture.num_experts
            or (bias and not mixture.expert_bias)
        ):
            raise CheckpointError(
                f"{module} is in the files, and config.json describes no such expert",
                "config.json and weights do not belong together: download the target again",
            )
        experts, index, part = found[1], int(found[3]), found[4]
        inner, hidden = mixture.intermediate_size, self._model.hidden_size
        expected = PARTS * mixture.num_experts * (1 + mixture.expert_bias)
        self._filled.setdefault(experts, (expected, set()))[1].add(f"{module}.bias" if bias else module)
        rows, columns = (hidden, inner) if part == "down" else (2 * inner, hidden)
        name = f"{experts}.{'down' if part == 'down' else 'gate_up'}_proj"
        if bias:
            place = self._tensor(f"{name}_bias", mixture.num_experts, rows)[index]
        elif mixture.interleaved:
            place = self._tensor(name, mixture.num_experts, columns, rows)[index].t()
        else:
            place = self._tensor(name, mixture.num_experts, rows, columns)[index]
        if part == "down":
            return place
        if mixture.interleaved:
            return place[int(part == "up") :: 2]
        return place[:inner] if part == "gate" else place[inner:]

    def _tensor(self, name: str, *shape: int) -> torch.Tensor:
        if name not in self._tensors:
            self._tensors[name] = torch.empty(shape, device=self._device, dtype=self._dtype)
        return self._tensors[name]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all of them by their names. Raises CheckpointError: a matrix of an expert is missing."""
        for experts, (count, filled) in self._filled.items():
            if len(filled) != count:
                raise CheckpointError(
                    f"{experts} has {len(filled)} tensors in the files, expected {count}",
                    "the checkpoint is incomplete; pull it again",
                )
        return self._tensors


def decoded_tensors(
    checkpoint: Checkpoint, facts: TargetFacts, device: torch.device, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return the text model's tensors under the names that transformers has for them; see ``decoded``."""
    found = decoded(checkpoint, text_tensors(checkpoint, facts), facts.model, device, dtype)
    return {_own_name(name, facts.prefix): tensor for name, tensor in found.items()}


def decoded(
    checkpoint: Checkpoint, names: Iterable[str], model: ModelConfig, device: torch.device, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return tensors by their names, those of each mixture's experts together.

    Beside them the codes of one matrix are held, or those of a layer's experts, which are many and small.

    Raises:
        CheckpointError: a tensor is missing, left over, of the wrong shape or dtype, or not finite.
    """
    quantization = model.quantization
    in_blocks = quantization is not None and quantization.exact  # which are decoded as they are read
    format_of = unquantized if in_blocks else formats_in(checkpoint, quantization)
    modules: dict[str, list[str]] = {}
    for name in names:
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    plain, stacked, coded = list[str](), list[str](), dict[str, list[_Coded]]()
    for module, own in modules.items():
        form = format_of(module)
        codes = next(
            (checkpoint.tensors[each] for each in own if each.rpartition(".")[2] in MATRIX_NAMES),
            None,
        )
        if f"{module}.gate_up_proj" in own and any(
            isinstance(format_of(f"{module}.0.{name}_proj"), QuantizedAtLoad) for name in ("gate", "down")
        ):
            stacked += own
        elif form == UNQUANTIZED or codes is None:
            plain += own
        else:
            biases = [name for name in own if name.endswith(".bias")]
            plain += biases
            own = [name for name in own if name not in biases]
            coded.setdefault(experts_of(module) or module, []).append(_Coded(module, own, form, codes))
    experts, found = FusedExperts(model, device, dtype), dict[str, torch.Tensor]()
    for together in coded.values():
        found |= _decoded(checkpoint, together, experts, device, dtype)
    for name in stacked:
        found[name] = _rounded(checkpoint, name, format_of, device, dtype)
    for name in plain:
        if checkpoint.tensors[name].dtype not in (*WIDE, *GGML):
            info = checkpoint.tensors[name]
            raise CheckpointError(f"{info.file}: tensor {name} is stored as {info.dtype}, expected {dtype}")
    for name, tensor in checkpoint.read(device, dtype, plain):
        module, _, kind = name.rpartition(".")
        place = experts.place(module, kind == "bias") if kind in ("weight", "bias") else None
        if place is None:
            found[name] = tensor
        else:
            _fitting(place, tensor.shape, checkpoint.tensors[name]).copy_(tensor)
    return {**found, **experts.tensors()}


@dataclass(frozen=True, slots=True)
class _Coded:
    """A quantised matrix of the checkpoint. ``names``: of its tensors; ``codes``: the one that determines its size."""

    module: str
    names: list[str]
    form: WeightFormat
    codes: TensorInfo


def coded_weight(
    module: str, form: WeightFormat, shape: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> tuple[Any, Places]:
    """Allocate the codes of a matrix [rows, columns] for weights in ``dtype``; also returns where each of its tensors
    goes. Raises CheckpointError: its groups do not divide it.
    """
    buffers = form.buffers(module, *shape, dtype_name(dtype), "target weights")
    kind = FORMATS[type(form)]
    weight = kind.weight(form, Tensors(buffers, device).take(buffers), dtype)
    return weight, kind.places(weight, form, [MatrixPart(module, shape[0])])


def _decoded(
    checkpoint: Checkpoint, together: Sequence[_Coded], experts: FusedExperts, device: torch.device, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Read matrices that lie together; those of experts go to their places."""
    weights: list[Any] = []
    places: Places = {}
    for each in together:
        weight, own = coded_weight(each.module, each.form, _size(each.form, each.codes), device, dtype)
        weights.append(weight)
        places |= own
    fill_places(checkpoint, [name for each in together for name in each.names], places)
    found: dict[str, torch.Tensor] = {}
    for each, weight in zip(together, weights, strict=True):
        place = experts.place(each.module)
        if place is None:
            place = found[f"{each.module}.weight"] = torch.empty(weight.shape, dtype=dtype, device=device)
        decode(weight, _fitting(place, weight.shape, each.codes))
    return found


def _rounded(
    checkpoint: Checkpoint, name: str, format_of: FormatOf, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Round a tensor [E, N, K] of all experts of a layer as the fused engine does."""
    info = checkpoint.tensors[name]
    module, _, matrix = name.rpartition(".")
    if len(info.shape) != 3:
        raise CheckpointError(f"{info.file}: tensor {name} has shape {list(info.shape)}, expected one of three axes")
    form = format_of(f"{module}.0.{'down' if matrix == 'down_proj' else 'gate'}_proj")
    if form == UNQUANTIZED:
        out = torch.empty(info.shape, device=device, dtype=dtype)
        fill_places(checkpoint, [name], {name: out})
        return out
    rows, columns = info.shape[0] * info.shape[1], info.shape[2]
    buffers = form.buffers(name, rows, columns, dtype_name(dtype), "target weights")
    weight = FORMATS[type(form)].weight(form, Tensors(buffers, device).take(buffers), dtype)
    take = Conversion(info.shape, dtype, lambda stored: quantize(stored.flatten(0, 1), weight))
    fill_places(checkpoint, [name], {name: take})
    # What the codes stand for needs room only now, when the tensor as it was stored is gone.
    return decode(weight, torch.empty(rows, columns, device=device, dtype=dtype)).view(info.shape)


def _fitting(place: torch.Tensor, shape: torch.Size, info: TensorInfo) -> torch.Tensor:
    if place.shape != shape:
        raise CheckpointError(
            f"{info.file}: tensor {info.name} is of a matrix of shape {list(shape)}, expected {list(place.shape)}"
        )
    return place


def _size(form: WeightFormat, codes: TensorInfo) -> tuple[int, int]:
    if len(codes.shape) != 2:
        raise CheckpointError(f"{codes.file}: tensor {codes.name} has shape {list(codes.shape)}, expected a matrix")
    return stored_size(form, codes.shape)


def _own_name(name: str, prefix: str) -> str:
    """Return the text model's own names, without its wrapper's."""
    if name.endswith(f"{HEAD}.weight"):
        return f"{HEAD}.weight"
    return f"model.{name.removeprefix(prefix)}"
