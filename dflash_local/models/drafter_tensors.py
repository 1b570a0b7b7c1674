"""Names and shapes of a drafter's checkpoint against its configuration. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping

from dflash_local.checkpoint_files.safetensors_header import TensorInfo
from dflash_local.config.drafter_config import DrafterConfig
from dflash_local.errors import CheckpointError
from dflash_local.models.checkpoint import name_list

FLOATS = ("F32", "F16", "BF16", "F64")


def check_tensors(tensors: Mapping[str, TensorInfo], config: DrafterConfig, target_hidden: int, where: str) -> None:
    """Refuse missing, unknown or misshapen tensors by name, before any allocation; biases that ``attention_bias`` does
    not announce are unknown, since dropping them would ruin acceptance silently.
    """
    expected = config.tensor_shapes(target_hidden)
    missing, unknown = expected.keys() - tensors.keys(), tensors.keys() - expected.keys()
    if missing:
        raise CheckpointError(
            f"{where}: {len(missing)} of {len(expected)} tensors are missing: {name_list(missing)}",
            "the checkpoint is incomplete or its config.json belongs to another one",
        )
    if unknown:
        raise CheckpointError(
            f"{where}: {len(unknown)} tensors that a DFlash drafter does not have: {name_list(unknown)}",
            "an unused tensor would ruin acceptance silently, so none is skipped",
        )
    for name, shape in expected.items():
        info = tensors[name]
        if info.shape != shape:
            raise CheckpointError(
                f"{info.file}: tensor {name} has shape {list(info.shape)}, expected {list(shape)}",
                "config.json and weights do not belong together",
            )
        if info.dtype not in FLOATS:
            raise CheckpointError(
                f"{info.file}: tensor {name} has dtype {info.dtype}, expected one of {', '.join(FLOATS)}"
            )


def target_hidden_of(tensors: Mapping[str, TensorInfo], config: DrafterConfig, where: str) -> int:
    """The target hidden size that ``fc.weight`` was made for."""
    info = tensors.get("fc.weight")
    if info is None:
        raise CheckpointError(f"{where}: tensor fc.weight is missing", "this is not a DFlash drafter's checkpoint")
    if len(info.shape) != 2 or info.shape[1] == 0 or info.shape[1] % len(config.taps):
        raise CheckpointError(
            f"{info.file}: fc.weight has shape {list(info.shape)}; its width is no multiple of the"
            f" {len(config.taps)} taps"
        )
    return info.shape[1] // len(config.taps)
