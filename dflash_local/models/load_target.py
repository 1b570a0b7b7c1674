"""Loads a target folder through transformers: dtype, devices, bitsandbytes, and what must not slip through.

Never runs code from a checkpoint, opens a pickle, or follows its configuration to another file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any

import torch

from dflash_local.config.quantization import MXFP4
from dflash_local.config.quantizers import READ
from dflash_local.errors import CheckpointError, UsageError
from dflash_local.load_config import BALANCED, LOAD_OPTIONS, gpus_named, takes_several
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.decoded_tensors import decoded_tensors
from dflash_local.models.target_facts import TargetFacts, settings_of
from dflash_local.models.transformers_config import (
    BUILD_ERRORS,
    check_kept,
    config_at_load,
    stored_config,
    text_model_config,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MXFP4_FAMILIES = ("gpt_oss",)  # whose weights in this format transformers decodes
ADAPTER = "adapter_config.json"
ALLOWED = LOAD_OPTIONS["device"].allowed
RANK_SHARD = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")


@dataclass(frozen=True, slots=True)
class Placement:
    """A device of ``LoadConfig`` but ``auto``, a dtype, and the format ``bitsandbytes`` makes of plain weights."""

    device: str
    dtype: torch.dtype
    bitsandbytes: str | None = None

    @property
    def gpus(self) -> tuple[int, ...]:
        """Return the indices of the GPUs that layers are spread over; none for one device."""
        if self.device == BALANCED:
            return tuple(range(torch.cuda.device_count()))
        return gpus_named(self.device) if takes_several(self.device) else ()

    @property
    def home(self) -> str:
        """Return the device as torch names it, of several GPUs the first one."""
        if not takes_several(self.device):
            return self.device
        return f"cuda:{next(iter(gpus_named(self.device)), 0)}"


def placement(device: str, dtype: str, bitsandbytes: str | None = None) -> Placement:
    """Resolve ``auto`` and refuse what this machine does not have.

    A dtype ``auto`` is bfloat16, on a CPU float32; what it is there for a target, ``planner.formats.cpu_dtype`` tells.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if device == BALANCED and not torch.cuda.is_available():
        raise UsageError("device 'balanced' spreads a target over several GPUs; none is visible here", "use cpu")
    if takes_several(device):
        for index in gpus_named(device):
            _check_device(f"cuda:{index}")
    else:
        _check_device(device)
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    return Placement(device, DTYPES[dtype], bitsandbytes)


def _check_device(device: str) -> None:
    try:
        kind = torch.device(device)
    except RuntimeError:
        raise UsageError(f"unknown device {device!r}", f"use {ALLOWED}") from None
    if kind.type not in ("cpu", "cuda", "mps"):
        raise UsageError(f"device {device!r} is not supported", f"use {ALLOWED}")
    if kind.type == "cuda" and (not torch.cuda.is_available() or (kind.index or 0) >= torch.cuda.device_count()):
        raise UsageError(
            f"device {device!r} is not there", "dflash doctor lists what torch sees; --device cpu works anywhere"
        )
    if kind.type == "mps" and not torch.backends.mps.is_available():
        raise UsageError("device 'mps' is not there", "--device cpu works anywhere")


def load_target(files: Checkpoint, facts: TargetFacts, where: Placement) -> Any:
    """Return the transformers model in eval mode, every weight accounted for and finite.

    Args:
        files: of which ``facts`` were read.

    Raises:
        CheckpointError: a tensor is missing, left over, of the wrong shape, or not finite; the configuration is
            one that transformers does not take, or needs what this program does not do.
        UsageError: bitsandbytes cannot take it.
        MissingDependencyError: bitsandbytes is wanted and not installed.
    """
    from transformers.utils import logging

    logging.set_verbosity_error()
    getLogger("bitsandbytes").setLevel(ERROR)  # it announces which of its CPU kernels it could not fetch
    logging.disable_progress_bar()
    folder = files.path
    _refuse_what_stands_beside(folder)
    quantization = _quantization(folder, facts, where)
    try:
        coded = facts.model.quantization is not None and not facts.model.quantization.unread
        foreign = any(info.file.suffix != ".safetensors" for info in files.tensors.values())
        if foreign or (coded and not _decoded_by_transformers(facts)):
            model, info = _built_of_codes(files, facts, where, quantization)
        else:
            model, info = _built(files, facts, where, quantization)
    except torch.cuda.OutOfMemoryError:
        raise
    except BUILD_ERRORS as error:
        raise CheckpointError(
            f"{folder}: transformers cannot load this target: {_first_line(error)}",
            "its config.json and its weights may not belong together: download the target again",
        ) from error
    _check_loading(folder, info)
    _check_finite(folder, model)
    stored = facts.model.quantization
    made = where.bitsandbytes or (None if stored is None else stored.bitsandbytes)
    if made is None:
        # transformers 5.17 decodes MXFP4 experts to bf16 whatever was asked for; later versions to the dtype.
        for name, parameter in model.named_parameters():
            if ".experts." in name and parameter.is_floating_point() and parameter.dtype != where.dtype:
                parameter.data = parameter.data.to(where.dtype)
    else:
        _check_quantised(model, facts, made, where.device)
    return model.eval().requires_grad_(False)


def _built(files: Checkpoint, facts: TargetFacts, where: Placement, quantization: Any) -> tuple[Any, dict[str, Any]]:
    """Return the model, and what transformers says of the weights it found."""
    from transformers import AutoModelForCausalLM

    stored: dict[str, Any] | None = None
    quantized = facts.model.quantization
    if quantized is not None and quantized.bitsandbytes:
        stored = stored_config(settings_of(files), where.dtype)
    elif quantized is not None:
        check_kept(facts.kept_whole, str(files.path))
        stored = {"quant_method": quantized.method, "modules_to_not_convert": list(facts.kept_whole)}
    config = text_model_config(facts.model.family, facts.text_config, stored)
    if stored is None:
        _check_size(files, config)
    found: tuple[Any, dict[str, Any]] = AutoModelForCausalLM.from_pretrained(
        files.path, config=config, **_options(where, quantization)
    )
    return found


def _built_of_codes(
    files: Checkpoint, facts: TargetFacts, where: Placement, quantization: Any
) -> tuple[Any, dict[str, Any]]:
    """Return the model of the tensors of ``files``; quantised weights are decoded one after the other."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config = text_model_config(facts.model.family, facts.text_config)
    if facts.model.quantization is not None and facts.model.quantization.at_load:
        _check_size(files, config)
    home = torch.device("cpu" if where.gpus else where.device)
    tensors = decoded_tensors(files, facts, home, where.dtype)
    found: tuple[Any, dict[str, Any]] = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
        None, config=config, state_dict=tensors, **_options(where, quantization)
    )
    return found


def _options(where: Placement, quantization: Any) -> dict[str, Any]:
    """Return the options of from_pretrained."""
    from transformers import GenerationConfig

    options: dict[str, Any] = {"dtype": where.dtype, "local_files_only": True, "use_safetensors": True}
    options["trust_remote_code"] = False
    options["generation_config"] = GenerationConfig()  # or it would read the checkpoint's own
    options["ignore_mismatched_sizes"] = True  # so that the tensor is named, in _check_loading
    options["device_map"] = BALANCED if where.gpus else {"": where.device}
    if where.gpus and where.device != BALANCED:  # transformers takes all GPUs unless it is told of these alone
        options["max_memory"] = {index: torch.cuda.mem_get_info(index)[0] for index in where.gpus}
    options["output_loading_info"] = True
    if quantization is not None:
        options["quantization_config"] = quantization
    return options


def _check_size(files: Checkpoint, config: Any) -> None:
    """Refuse a model much larger than its weights before memory is taken: what is missing would be filled."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    wanted = sum(parameter.numel() for parameter in model.parameters())
    if wanted > files.nbytes:  # a plain weight has two bytes at least
        raise CheckpointError(
            f"{files.path}: config.json describes {wanted:,} weights, the files hold {files.nbytes:,} bytes",
            "config.json and weights do not belong together: download the target again",
        )


def _refuse_what_stands_beside(folder: Path) -> None:
    """Refuse files that transformers would take up, unasked, beside or instead of the checked weights."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name == ADAPTER:
            raise CheckpointError(
                f"{folder} holds an adapter ({ADAPTER}), which is not loaded", "merge it into the weights"
            )
        if RANK_SHARD.fullmatch(path.name):
            raise CheckpointError(
                f"{folder} holds {path.name}, a part of a distributed checkpoint, which is not read",
                "save it as one checkpoint, or move these files away",
            )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _quantization(folder: Path, facts: TargetFacts, where: Placement) -> Any:
    """Return the quantization_config to pass to from_pretrained; None for plain weights that stay plain."""
    stored = facts.model.quantization
    if stored is not None and stored.bitsandbytes:
        return None  # told by the model's own configuration
    if stored is not None and stored.unread and not _decoded_by_transformers(facts):
        raise CheckpointError(
            f"{folder}: weights of {facts.model_type} in the format {stored.unread} are not supported",
            f"take the plain weights (--quantize int4 or int8 makes them smaller as they are loaded) or {READ}",
        )
    if stored is not None and _decoded_by_transformers(facts):
        from transformers import Mxfp4Config

        # Decoded to bf16 at load: every fp4 x 2^e value is a bf16 value, so nothing is lost.
        return Mxfp4Config(dequantize=True)
    return None if where.bitsandbytes is None else config_at_load(where.bitsandbytes, where.dtype)


def _decoded_by_transformers(facts: TargetFacts) -> bool:
    stored = facts.model.quantization
    return stored is not None and stored.method == MXFP4 and facts.model.family in MXFP4_FAMILIES


def _check_loading(folder: Path, info: dict[str, Any]) -> None:
    """Raise where transformers filled missing tensors with random numbers, of which it only warns."""
    for key, what in (("missing_keys", "is missing"), ("mismatched_keys", "has a wrong shape")):
        names = sorted(str(n[0] if isinstance(n, (tuple, list)) else n) for n in info.get(key) or ())
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(f"{folder}: tensor {names[0]}{more} {what}", "download the target again")
    extra = sorted(info.get("unexpected_keys") or ())
    if extra:
        raise CheckpointError(
            f"{folder}: tensor {extra[0]} belongs to no part of {folder.name}'s architecture",
            f"{len(extra)} tensors are not claimed; the configuration may be another model's",
        )


def _check_quantised(model: Any, facts: TargetFacts, made: str, device: str) -> None:
    """Run one token through quantised weights: some of bitsandbytes' kernels refuse some widths, at run time only."""
    first = torch.zeros(1, 1, dtype=torch.long, device=model.get_input_embeddings().weight.device)
    try:
        with torch.inference_mode():
            model(input_ids=first, use_cache=False)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        if isinstance(error, torch.cuda.OutOfMemoryError):
            raise
        raise UsageError(
            f"bitsandbytes cannot run this {facts.model_type} target in {made} on {device}: {_first_line(error)}",
            "its kernels need widths that are multiples of 64; take the plain weights without --quantize",
        ) from error


def _check_finite(folder: Path, model: Any) -> None:
    """Check the extremes: NaN passes through them, and no copy of a large tensor is made as ``isfinite`` would."""
    for name, tensor in model.named_parameters():
        if tensor.is_floating_point() and not all(bool(torch.isfinite(end)) for end in torch.aminmax(tensor)):
            hint = "it may be too large for float16: give --dtype bfloat16; else " * (tensor.dtype == torch.float16)
            raise CheckpointError(
                f"{folder}: tensor {name} holds NaN or infinite values", f"{hint}download the target again"
            )
