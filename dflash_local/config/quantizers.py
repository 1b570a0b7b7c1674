"""Reads a ``quantization_config``: each quantiser has a dialect of its own, and a function here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dflash_local.checkpoint_files.config_values import ConfigFields, shown
from dflash_local.config.module_names import HEAD
from dflash_local.config.module_pattern import PatternError, compiled, parts
from dflash_local.config.quantization import (
    BITSANDBYTES,
    FP4_GROUP_SIZES,
    GGUF_TYPES,
    MXFP4,
    WHOLE,
    Fp4Dialect,
    IntDialect,
    Quantization,
    Rule,
    StoredFormat,
    StoredFp4,
    StoredFp8,
    StoredGguf,
    StoredInt,
)
from dflash_local.errors import CheckpointError

GROUP_SIZES = (32, 64, 128)
LONGEST = 2**20  # of a group or a block
MAX_NAMES = 100_000  # modules that a configuration may name one by one
MAX_PATTERNS, MAX_PARTS = 1000, 5000  # one pattern for each matrix of 64 layers takes half of both
READ = "fp8, int8, int4, NVFP4 or MXFP4 as GPTQ, AutoRound, AWQ, compressed-tensors or ModelOpt store it"

_GPTQ: Mapping[str, Any] = {"quant_method": "gptq", "bits": 4, "sym": True}
_PLAIN = {r".*[.](gate|shared_expert_gate|router|in_proj_a|in_proj_b|in_proj_ba)$": None}
# Usual formats of published targets by a short name, as a ``quantization_config`` says them.
USUAL: Mapping[str, Mapping[str, Any]] = {
    "int4-g128": {**_GPTQ, "group_size": 128},
    "int4-g32": {**_GPTQ, "group_size": 32},
    "int4-g32-zeros": {**_GPTQ, "group_size": 32, "sym": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "int8-g128": {**_GPTQ, "bits": 8, "group_size": 128},
    "int8": {**_GPTQ, "bits": 8, "group_size": -1},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "fp8-tensor": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": [HEAD]},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": [HEAD]},
    "mxfp4": {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float"}}},
        "ignore": [HEAD],
    },
    # GGUF: routers and decay projections stay plain; about half of the values' and of down projections have more bits.
    "q4_1": {"quant_method": "gguf", "type": "Q4_1", "modules": {HEAD: "Q8_0"}, "experts": _PLAIN},
    "q4_0": {"quant_method": "gguf", "type": "Q4_0", "modules": {HEAD: "Q6_K"}, "experts": _PLAIN},
    "q8_0": {"quant_method": "gguf", "type": "Q8_0", "experts": _PLAIN},
    "q4_k_m": {
        "quant_method": "gguf",
        "type": "Q4_K",
        "modules": {HEAD: "Q6_K"},
        "experts": {**_PLAIN, r".*layers[.]\d*[13579][.].*[.](v_proj|in_proj_z|down_proj)$": "Q6_K"},
    },
}


class _Unread(Exception):
    """A format that is not read here; its text names it."""


def read_quantization(settings: ConfigFields) -> Quantization | None:
    """Return a ``quantization_config``; None when there is none. Raises CheckpointError: a value is wrong."""
    if not settings.values:
        return None
    method = settings.values.get("quant_method") or "unknown"
    if not isinstance(method, str):
        raise CheckpointError(f"{settings.where}: quant_method must be a word, got {shown(method)}")
    method = shown(method)[1:-1]
    try:
        read = DIALECTS.get(method)
        if read is None:
            raise _Unread(method)
        return read(settings)
    except _Unread as unread:
        return Quantization(method, unread=str(unread))


def _fp8(settings: ConfigFields) -> Quantization:
    if settings.values.get("fmt") not in (None, "e4m3", "float8_e4m3fn"):
        raise _Unread(f"fp8 as {shown(settings.values['fmt'])}")
    kept = (*_names(settings, "modules_to_not_convert"), *_names(settings, "ignored_layers"), HEAD)
    return Quantization(
        "fp8",
        default=StoredFp8(_block(settings, "weight_block_size") or (WHOLE, WHOLE)),
        names=tuple((name, None) for name in kept),
        ignored=_ignored([8] if settings.values.get("activation_scheme") else [], settings.values),
    )


def _block(settings: ConfigFields, key: str) -> tuple[int, int] | None:
    block = settings.optional_list(key, 2)
    if block is None:
        return None
    if len(block) != 2:
        raise CheckpointError(f"{settings.where}: {key} must be two numbers, got {shown(block)}")
    rows, columns = (settings.check_integer(key, size, 1, LONGEST) for size in block)
    return rows, columns


def _gptq(settings: ConfigFields) -> Quantization:
    version = settings.values.get("checkpoint_format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise _Unread(f"gptq in the layout {shown(version)}")
    if settings.values.get("rotation"):
        raise _Unread("gptq with rotated activations")
    dialect: IntDialect = "gptq_v2" if version == "gptq_v2" else "gptq"
    default = _int(settings, "gptq", dialect)
    patterns: list[Rule] = []
    for key, changes in settings.inner("dynamic").items():
        sign, pattern = (key[:2], key[2:]) if key[:2] in ("-:", "+:") else ("+:", key)
        if sign == "+:" and not isinstance(changes, Mapping):
            raise CheckpointError(f"{settings.where}: dynamic {shown(key)} must be an object, got {shown(changes)}")
        changed = ConfigFields({**settings.values, **changes}, settings.where) if sign == "+:" else None
        patterns.append((pattern, None if changed is None else _int(changed, "gptq", dialect)))
    head = () if settings.optional_flag("lm_head") else ((HEAD, None),)
    return Quantization("gptq", default=default, names=head, patterns=_checked(settings, patterns))


def _auto_round(settings: ConfigFields) -> Quantization:
    packing = str(settings.values.get("packing_format") or settings.values.get("backend") or "auto_round")
    if not re.fullmatch(r"auto_round(:(auto_)?(gptq(v2)?|awq))?", packing):
        raise _Unread(f"auto-round in the layout {shown(packing)}")
    dialect: IntDialect = "awq" if packing.endswith("awq") else "gptq_v2" if packing.endswith("v2") else "gptq"

    def stored(values: ConfigFields) -> StoredInt | None:
        if values.integer("bits", 1, 32) >= 16:
            return None
        if (kind := values.values.get("data_type") or "int") != "int":
            raise _Unread(f"auto-round of the type {shown(kind)}")
        return _int(values, "auto-round", dialect)

    default = stored(settings)
    if default is not None and default.zeros and packing == "auto_round":
        raise _Unread("auto-round with zero points in the layout 'auto_round'")
    names: list[Rule] = []
    patterns: list[Rule] = []
    for key, changes in settings.inner("extra_config").items():
        if not isinstance(changes, Mapping):
            raise CheckpointError(
                f"{settings.where}: extra_config {shown(key)} must be an object, got {shown(changes)}"
            )
        changed = stored(ConfigFields({**settings.values, **changes}, settings.where))
        if re.fullmatch(r"[\w.\-]+", key):
            names.append((key, changed))
        else:
            patterns.append((key, changed))
    if HEAD not in dict(names):
        names.append((HEAD, default if settings.optional_flag("quant_lm_head") else None))
    blocks = settings.values.get("block_name_to_quantize") or []
    below = [each.strip() for each in blocks.split(",")] if isinstance(blocks, str) else blocks
    if not isinstance(below, list) or not all(isinstance(name, str) for name in below):
        raise CheckpointError(f"{settings.where}: block_name_to_quantize must be names, got {shown(blocks)}")
    bits = settings.optional_integer("act_bits", 1, 32) or 16
    ignored = _ignored([bits] if bits < 16 else [], settings.values)
    return Quantization(
        "auto-round", "", default, tuple(names), _checked(settings, patterns), tuple(below), ignored=ignored
    )


def _awq(settings: ConfigFields) -> Quantization:
    version = str(settings.values.get("version") or "gemm").lower()
    if version != "gemm":
        raise _Unread(f"awq in the layout {shown(version)}")
    kept = (*_names(settings, "modules_to_not_convert"), HEAD)
    return Quantization("awq", default=_int(settings, "awq", "awq"), names=tuple((name, None) for name in kept))


def _int(settings: ConfigFields, method: str, dialect: IntDialect) -> StoredInt:
    bits = settings.integer("bits", 1, 32)
    if bits not in ((4,) if dialect == "awq" else (4, 8)):
        raise _Unread(f"{method} in {bits} bits")
    if settings.optional_flag("desc_act"):
        raise _Unread(f"{method} with desc_act, which scatters the groups")
    size = settings.integer("group_size", -1, LONGEST) if settings.present("group_size") else 128
    asymmetric = settings.optional_flag("sym") is False
    return StoredInt(dialect, _group(size, method), dialect == "awq" or asymmetric, bits)  # AWQ always stores zeros


def _group(size: int, method: str) -> int:
    if size == -1:
        return WHOLE
    if size not in GROUP_SIZES:
        raise _Unread(f"{method} with groups of {size}")
    return size


def _compressed_tensors(settings: ConfigFields) -> Quantization:
    names: list[Rule] = []
    patterns: list[Rule] = []

    def rule(target: object, stored: StoredFormat | None) -> None:
        if not isinstance(target, str):
            raise CheckpointError(f"{settings.where}: targets and ignore must be names, got {shown(target)}")
        if target.startswith("re:"):
            patterns.append((target[3:], stored))
        else:
            names.append((target, stored))

    default: StoredFormat | None = None
    for target in settings.optional_list("ignore", MAX_NAMES) or []:
        rule(target, None)
    kept = {name for name, _ in names}
    if settings.values.get("transform_config"):
        raise _Unread("compressed-tensors with transforms of its activations")
    if (sparse := settings.inner("sparsity_config").get("format") or "dense") != "dense":
        raise _Unread(f"compressed-tensors {shown(sparse)[1:-1]}")
    groups = settings.inner("config_groups")
    if not groups:
        raise _Unread("compressed-tensors without config_groups")
    activations: list[int] = []
    for name in groups:
        group = ConfigFields(ConfigFields(groups, settings.where).inner(name), settings.where)
        weights = ConfigFields(group.inner("weights"), group.where)
        if inputs := ConfigFields(group.inner("input_activations"), group.where).optional_integer("num_bits", 1, 32):
            activations.append(inputs)
        layout = shown(str(group.values.get("format") or settings.values.get("format")))[1:-1]
        if layout == "mixed-precision":
            layout = _usual_layout(weights, bool(inputs))
        if layout not in COMPRESSED:
            raise _Unread(f"compressed-tensors {layout}")
        stored = COMPRESSED[layout](weights, layout)
        for target in group.optional_names("targets", MAX_NAMES) or []:
            if target == "Linear":
                default = stored
            elif target not in kept:
                rule(target, stored)
    ignored = _ignored(activations, settings.values)
    return Quantization("compressed-tensors", "", default, tuple(names), _checked(settings, patterns), ignored=ignored)


def _usual_layout(weights: ConfigFields, activations: bool) -> str:
    kind, bits = weights.values.get("type", "int"), weights.integer("num_bits", 1, 32)
    if kind == "float" and bits == 4:
        return "nvfp4-pack-quantized" if weights.values.get("group_size") == 16 else "mxfp4-pack-quantized"
    if kind == "float":
        return "float-quantized"
    return "int-quantized" if activations and bits == 8 else "pack-quantized"


def _compressed_int(weights: ConfigFields, layout: str) -> StoredInt:
    bits, packed = weights.integer("num_bits", 1, 32), layout == "pack-quantized"
    if bits not in ((4, 8) if packed else (8,)) or weights.values.get("type", "int") != "int":
        raise _Unread(f"compressed-tensors {layout} in {bits} bits")
    if weights.values.get("actorder") not in (None, False, "static", "weight"):
        raise _Unread("compressed-tensors with actorder group, which scatters the groups")
    size = _group(weights.optional_integer("group_size", -1, LONGEST) or -1, "compressed-tensors")
    zeros = weights.optional_flag("symmetric") is False
    return StoredInt("pack-quantized" if packed else "int-quantized", size, zeros, bits)


def _compressed_fp8(weights: ConfigFields, layout: str) -> StoredFp8:
    bits = weights.integer("num_bits", 1, 32)
    if bits != 8 or weights.values.get("type") != "float":
        raise _Unread(f"compressed-tensors {layout} in {bits} bits")
    size = weights.optional_integer("group_size", -1, LONGEST) or -1
    strategy = weights.values.get("strategy") or ("tensor" if size == -1 else "group")
    if strategy == "block":
        return StoredFp8(_block(weights, "block_structure") or (128, 128))
    blocks = {"tensor": (WHOLE, WHOLE), "channel": (1, WHOLE), "group": (1, size if size > 0 else WHOLE)}
    if not isinstance(strategy, str) or strategy not in blocks:
        raise _Unread(f"compressed-tensors {layout} with the strategy {shown(strategy)}")
    return StoredFp8(blocks[strategy])


def _compressed_fp4(weights: ConfigFields, layout: str) -> StoredFp4:
    kinds: Mapping[str, Fp4Dialect] = {kind: kind for kind in FP4_GROUP_SIZES}
    return _fp4(kinds[layout], weights, f"compressed-tensors {layout}")


def _naive(weights: ConfigFields, layout: str) -> StoredFormat:
    """Return what a byte each was called before integers and floats had names of their own."""
    return (_compressed_fp8 if weights.values.get("type") == "float" else _compressed_int)(weights, layout)


def _fp4(dialect: Fp4Dialect, settings: ConfigFields, method: str) -> StoredFp4:
    stored = StoredFp4(dialect)
    size = settings.optional_integer("group_size", -1, LONGEST) or stored.group_size
    if size != stored.group_size:
        raise _Unread(f"{method} with groups of {size}")
    return stored


COMPRESSED: Mapping[str, Callable[[ConfigFields, str], StoredFormat]] = {
    "pack-quantized": _compressed_int,
    "int-quantized": _compressed_int,
    "float-quantized": _compressed_fp8,
    "naive-quantized": _naive,
    "nvfp4-pack-quantized": _compressed_fp4,
    "mxfp4-pack-quantized": _compressed_fp4,
}


def _modelopt(settings: ConfigFields) -> Quantization:
    """Read settings as in config.json, or nested as in hf_quant_config.json."""
    inner = ConfigFields({**settings.values, **settings.inner("quantization")}, settings.where)
    kept = [name for key in ("ignore", "exclude_modules", "modules_to_not_convert") for name in _names(inner, key)]
    names: list[Rule] = [(name, None) for name in kept if "*" not in name]
    wildcards = [".*".join(map(re.escape, name.split("*"))) + "$" for name in kept if "*" in name]
    patterns: list[Rule] = [(wildcard, None) for wildcard in wildcards]
    algorithms: set[str] = set()

    def stored(values: ConfigFields) -> StoredFormat:
        if not values.present("quant_algo"):
            raise _Unread("modelopt without quant_algo")
        algorithm = str(values.values["quant_algo"]).upper()
        if algorithm not in MODELOPT:
            raise _Unread(f"modelopt {shown(algorithm)[1:-1]}")
        algorithms.add(algorithm)
        found = MODELOPT[algorithm][0]
        return _fp4(found.dialect, values, f"modelopt {algorithm}") if isinstance(found, StoredFp4) else found

    default: StoredFormat | None = None
    if str(inner.values.get("quant_algo")).upper() == "MIXED_PRECISION":
        layers = ConfigFields(inner.inner("quantized_layers"), inner.where)
        layers = ConfigFields(layers.inner("quantized_layers") or layers.values, inner.where)
        if not layers.values:
            raise _Unread("modelopt MIXED_PRECISION without quantized_layers")
        out = Quantization("", names=tuple(names), patterns=_checked(inner, patterns), default=StoredFp4("nvfp4"))
        names += [
            (name, stored(ConfigFields(layers.inner(name), inner.where))) for name in layers.values if out.stored(name)
        ]
    else:
        default = stored(inner)
    activations = (MODELOPT[algorithm][1] for algorithm in algorithms)
    ignored = _ignored([bits for bits in activations if bits < 16], inner.values)
    return Quantization("modelopt", "", default, tuple(names), _checked(inner, patterns), ignored=ignored)


# What ModelOpt's algorithms store, and the bits of the activations that they are meant for.
MODELOPT: Mapping[str, tuple[StoredFp8 | StoredFp4, int]] = {
    "FP8": (StoredFp8((WHOLE, WHOLE)), 8),
    "FP8_PER_CHANNEL_PER_TOKEN": (StoredFp8((1, WHOLE)), 8),
    "FP8_PB_WO": (StoredFp8((128, 128)), 16),
    "NVFP4": (StoredFp4("nvfp4"), 4),
    "W4A16_NVFP4": (StoredFp4("nvfp4"), 16),
}


def _bitsandbytes(settings: ConfigFields) -> Quantization:
    """Refuse to read: bitsandbytes itself computes with what it has stored."""
    kind = "int8" if settings.optional_flag("load_in_8bit") else settings.values.get("bnb_4bit_quant_type")
    if f"bnb-{kind}" not in BITSANDBYTES:
        raise _Unread("bitsandbytes" if kind is None else f"bitsandbytes {shown(kind)[1:-1]}")
    return Quantization(f"bnb-{kind}", unread=f"bnb-{kind}")


def _mxfp4(settings: ConfigFields) -> Quantization:
    return Quantization(MXFP4, patterns=((r".*[.]experts[.]\d+[.](gate|up|down)_proj$", StoredFp4("mxfp4")),))


def _gguf(settings: ConfigFields) -> Quantization:
    """Read what ``checkpoint_files.gguf_quantization`` makes of a file's own tensors."""

    def stored(kind: object) -> StoredGguf | None:
        if kind is not None and kind not in GGUF_TYPES:
            raise _Unread(f"GGUF {shown(kind)[1:-1]}")
        return None if kind is None else StoredGguf(str(kind))

    names, patterns = (
        tuple((name, stored(kind)) for name, kind in settings.inner(key).items()) for key in ("modules", "experts")
    )
    return Quantization("gguf", "", stored(settings.values.get("type")), names, patterns, exact=True)


DIALECTS: Mapping[str, Callable[[ConfigFields], Quantization]] = {
    MXFP4: _mxfp4,
    "bitsandbytes": _bitsandbytes,
    "fp8": _fp8,
    "gguf": _gguf,
    "gptq": _gptq,
    "auto-round": _auto_round,
    "intel/auto-round": _auto_round,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "modelopt_fp8": _modelopt,
    "modelopt_fp4": _modelopt,
    "modelopt_mixed": _modelopt,
}


def _ignored(activations: Iterable[int], values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what is quantised beside the weights: activations in so many bits, and the KV cache."""
    found = [f"activations in {bits} bits" for bits in sorted(set(activations))]
    cache = values.get("kv_cache_scheme") or values.get("kv_cache_quant_algo")
    return (*found, "KV cache in fewer bits") if cache else tuple(found)


def _names(settings: ConfigFields, key: str) -> list[str]:
    return settings.optional_names(key, MAX_NAMES) or []


def _checked(settings: ConfigFields, patterns: list[Rule]) -> tuple[Rule, ...]:
    """Return the patterns, known to be few, short and of what is read. Raises CheckpointError: they are not."""
    count = sum(parts(pattern) for pattern, _ in patterns)
    if len(patterns) > MAX_PATTERNS or count > MAX_PARTS:
        most = f"at most {MAX_PATTERNS} of {MAX_PARTS} are read"
        raise CheckpointError(
            f"{settings.where}: quantization_config has {len(patterns)} patterns of {count} parts, {most}"
        )
    for pattern, _ in patterns:
        try:
            compiled(pattern)
        except PatternError as error:
            where = f"{settings.where}: the pattern {shown(pattern)} of quantization_config"
            raise CheckpointError(f"{where} is not read: it has {error}", "name the modules by a simpler one") from None
    return tuple(patterns)
