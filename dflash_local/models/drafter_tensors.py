"""Names and shapes of a drafter's checkpoint against its configuration. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dflash_local.checkpoint_files.safetensors_folder import name_list
from dflash_local.checkpoint_files.tensor_info import GGML
from dflash_local.drafters.drafter import Drafter, Shapes
from dflash_local.errors import CheckpointError
from dflash_local.layout.linear import UNQUANTIZED, WeightFormat
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.stored_formats import MATRIX_NAMES, formats_in, stored_size

FLOATS = ("F32", "F16", "BF16", "F64")
WEIGHT = ".weight"
FC = "fc"  # the module that takes the taps


def stored_shapes(checkpoint: Checkpoint, config: Drafter, target_hidden: int) -> Shapes:
    """Return shapes of all its tensors by the names that the file has for them: experts may have a tensor each."""
    found: Shapes = {}
    for name, shape in config.tensors(target_hidden).items():
        if len(shape) < 3 or name in checkpoint.tensors:
            found[name] = shape
            continue
        experts, _, together = name.rpartition(".")
        parts = ("down",) if together == "down_proj" else ("gate", "up")
        count, rows, columns = shape
        for index in range(count):
            found |= {f"{experts}.{index}.{part}_proj{WEIGHT}": (rows // len(parts), columns) for part in parts}
    return found


def coded_matrices(checkpoint: Checkpoint, config: Drafter) -> dict[str, WeightFormat]:
    """Return the formats of the matrices that are stored as codes, by their modules; the file has the last word."""
    if config.quantization is None:
        return {}
    format_of = formats_in(checkpoint, config.quantization)
    shapes = stored_shapes(checkpoint, config, 1).items()
    modules = (name.removesuffix(WEIGHT) for name, shape in shapes if len(shape) == 2 and name.endswith(WEIGHT))
    return {module: form for module in modules if (form := format_of(module)) != UNQUANTIZED}


def codes_of(modules: Iterable[str], checkpoint: Checkpoint) -> list[str]:
    """Return names of the tensors of quantised modules; a bias is plain, and not among them."""
    wanted = set(modules)
    return [name for name in checkpoint.tensors if name.rpartition(".")[0] in wanted and not name.endswith(".bias")]


def check_tensors(checkpoint: Checkpoint, config: Drafter, target_hidden: int) -> None:
    """Refuse missing, unknown or misshapen tensors by name, before any allocation; biases that ``attention_bias`` does
    not announce are unknown, since dropping them would ruin acceptance silently. Those of quantised matrices are for
    ``drafter_codes.check_codes``.
    """
    shapes, coded = stored_shapes(checkpoint, config, target_hidden), coded_matrices(checkpoint, config)
    there = checkpoint.tensors.keys() - set(codes_of(coded, checkpoint))
    extra = {name: shape for name, shape in config.optional_tensors().items() if name in there}
    plain = {name: shape for name, shape in shapes.items() if name.removesuffix(WEIGHT) not in coded}
    _check_plain(checkpoint, {**plain, **extra}, there)


def _check_plain(checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]], there: Iterable[str]) -> None:
    where = checkpoint.path
    missing, unknown = expected.keys() - set(there), set(there) - expected.keys()
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
        info = checkpoint.tensors[name]
        if info.shape != shape:
            raise CheckpointError(
                f"{info.file}: tensor {name} has shape {list(info.shape)}, expected {list(shape)}",
                "config.json and weights do not belong together",
            )
        if info.dtype not in (*FLOATS, *GGML):
            raise CheckpointError(
                f"{info.file}: tensor {name} has dtype {info.dtype}, expected one of {', '.join(FLOATS)}"
            )


def fc_columns(checkpoint: Checkpoint, config: Drafter) -> int | None:
    """Return the features that ``fc`` takes of all taps together; None where its tensor is missing or no matrix."""
    form = coded_matrices(checkpoint, config).get(FC, UNQUANTIZED)
    stored = (checkpoint.tensors.get(f"{FC}.{name}") for name in MATRIX_NAMES)
    info = next(filter(None, stored), None)
    return None if info is None or len(info.shape) != 2 else stored_size(form, (info.shape[0], info.shape[1]))[1]


def target_hidden_of(checkpoint: Checkpoint, config: Drafter) -> int:
    """Return the target hidden size that ``fc`` was made for."""
    columns = fc_columns(checkpoint, config)
    if columns is None:
        raise CheckpointError(
            f"{checkpoint.path}: tensor fc.weight is missing or no matrix",
            "this is not a DFlash drafter's checkpoint",
        )
    if columns == 0 or columns % len(config.taps):
        raise CheckpointError(
            f"{checkpoint.path}: fc.weight takes {columns} features, no multiple of the {len(config.taps)} taps"
        )
    return columns // len(config.taps)
