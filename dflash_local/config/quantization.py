"""Which format each matrix of a checkpoint is stored in, as its ``quantization_config`` says: the quantisers' dialects.

What a file holds decides too, where there is one (``models.stored_formats``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Literal

from dflash_local.checkpoint_files.config_values import Fields, shown
from dflash_local.config.module_names import DECAY, HEAD, PREFIXES
from dflash_local.errors import CheckpointError

GROUP_SIZES = (32, 64, 128)
MAX_NAMES = 100_000  # modules that a configuration may name one by one
MAX_PATTERNS, MAX_PATTERN, MAX_REPEATS = 1000, 300, 6
NESTED_REPEAT = re.compile(r"[+*}][^()]*\)[+*{]")  # a repeated group that repeats inside: may never end
READ = "fp8 in blocks, and int4 as GPTQ, AutoRound, AWQ and compressed-tensors (pack-quantized) store it"

_GPTQ: Mapping[str, Any] = {"quant_method": "gptq", "bits": 4, "sym": True}
# Usual formats of published targets by a short name, as a ``quantization_config`` says them.
USUAL: Mapping[str, Mapping[str, Any]] = {
    "int4-g128": {**_GPTQ, "group_size": 128},
    "int4-g32": {**_GPTQ, "group_size": 32},
    "int4-g32-zeros": {**_GPTQ, "group_size": 32, "sym": False},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}

Int4Dialect = Literal["gptq", "gptq_v2", "awq", "pack-quantized"]


@dataclass(frozen=True, slots=True)
class StoredInt4:
    """Four bits each, and a scale for each group along the input.

    Attributes:
        dialect: how codes and zero points are packed; ``gptq`` stores zero points less one. zeros: groups have zero
            points; without, code 8 is zero.
    """

    dialect: Int4Dialect
    group_size: int
    zeros: bool = False

    @property
    def name(self) -> str:
        """For screens."""
        return f"int4 g{self.group_size}{' with zeros' if self.zeros else ''}"


@dataclass(frozen=True, slots=True)
class StoredFp8:
    """Eight bits each (e4m3), and a scale for each block of rows and columns."""

    block: tuple[int, int]

    @property
    def name(self) -> str:
        """For screens."""
        return f"fp8 {self.block[0]}x{self.block[1]}"


@dataclass(frozen=True, slots=True)
class StoredPlain:
    """In a plain dtype, and quantised as it is read. ``kept``: the format that it is kept in."""

    kept: StoredInt4 | StoredFp8

    @property
    def name(self) -> str:
        """For screens."""
        return self.kept.name


StoredFormat = StoredInt4 | StoredFp8 | StoredPlain
Rule = tuple[str, StoredFormat | None]  # None: stays in 16 bits


@dataclass(frozen=True)
class Quantization:
    """How a published checkpoint is quantised, or a plain one as it is read.

    Attributes:
        method: as its configuration calls it, or ``LoadConfig.quantize``. unread: what of it is not read here, in a few words; empty when all is.
        default: the format of a matrix that no rule names. names: modules or what they lie below; they come first.
        patterns: regular expressions in order, which match from the beginning of a module's name.
        below: only what lies below these is quantised; empty for everything.
        at_load: the checkpoint is plain.
    """

    method: str
    unread: str = ""
    default: StoredFormat | None = None
    names: tuple[Rule, ...] = ()
    patterns: tuple[Rule, ...] = ()
    below: tuple[str, ...] = ()
    at_load: bool = False

    @property
    def name(self) -> str:
        """For screens: the format of most matrices."""
        return self.method if self.default is None else self.default.name

    def stored(self, module: str) -> StoredFormat | None:
        """What a module's matrix is stored in; None for the plain dtype.

        Args:
            module: its name, below any of ``PREFIXES``.
        """
        if module.rpartition(".")[2] in DECAY:
            return None
        spellings = _spellings(module)
        for spelling in spellings:
            for run in _runs(spelling):
                if run in self._by_name:
                    return self._by_name[run]
        for pattern, stored in self.patterns:
            if any(_compiled(pattern).match(spelling) for spelling in spellings):
                return stored
        if self.below and not any(f"{name}.".startswith(f"{at}.") for name in spellings for at in self.below):
            return None
        return self.default

    @cached_property
    def _by_name(self) -> Mapping[str, StoredFormat | None]:
        return dict(self.names)


def kept_format(quantization: Quantization | None, engine: str) -> str | None:
    """The format that an engine keeps a target in as it is published; None for plain and for decoded weights."""
    if quantization is None or quantization.at_load or engine != "fused":
        return None
    return quantization.name


def _spellings(module: str) -> tuple[str, ...]:
    """A module's name as it is, and with the text model's other prefixes: a file and its configuration may differ."""
    rest = next((module.removeprefix(prefix) for prefix in PREFIXES if module.startswith(prefix)), None)
    if rest is None:
        return (module,)
    return tuple(dict.fromkeys((module, *(prefix + rest for prefix in PREFIXES))))


def _runs(name: str) -> Iterator[str]:
    """The name and its parts between dots, the longest first."""
    words = name.split(".")
    for length in range(len(words), 0, -1):
        for first in range(len(words) - length + 1):
            yield ".".join(words[first : first + length])


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


class _Unread(Exception):
    """A format that is not read here; its text names it."""


def read_quantization(settings: Fields) -> Quantization | None:
    """A ``quantization_config``; None when there is none. What is not read here is said in ``unread``.

    Raises:
        CheckpointError: a value is of the wrong type or out of its bounds.
    """
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
        found = read(settings)
        if found.stored(HEAD) is not None:
            raise _Unread(f"{method} with a quantised lm_head")
        return found
    except _Unread as unread:
        return Quantization(method, unread=str(unread))


def _fp8(settings: Fields) -> Quantization:
    block = settings.optional_list("weight_block_size", 2)
    if block is None:
        raise _Unread("fp8 with a scale for each tensor")
    if len(block) != 2:
        raise CheckpointError(f"{settings.where}: weight_block_size must be two numbers, got {shown(block)}")
    rows, columns = (settings.check_integer("weight_block_size", size, 1, 2**20) for size in block)
    kept = [
        *_names(settings, "modules_to_not_convert"),
        *_names(settings, "ignored_layers"),
        HEAD,
    ]
    return Quantization("fp8", default=StoredFp8((rows, columns)), names=tuple((name, None) for name in kept))


def _gptq(settings: Fields) -> Quantization:
    version = settings.values.get("checkpoint_format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise _Unread(f"gptq in the layout {shown(version)}")
    if settings.values.get("rotation"):
        raise _Unread("gptq with rotated activations")
    dialect: Int4Dialect = "gptq_v2" if version == "gptq_v2" else "gptq"
    default = _int4(settings, "gptq", dialect)
    patterns: list[Rule] = []
    for key, changes in settings.inner("dynamic").items():
        sign, pattern = (key[:2], key[2:]) if key[:2] in ("-:", "+:") else ("+:", key)
        if sign == "+:" and not isinstance(changes, Mapping):
            raise CheckpointError(f"{settings.where}: dynamic {shown(key)} must be an object, got {shown(changes)}")
        changed = Fields({**settings.values, **changes}, settings.where) if sign == "+:" else None
        patterns.append((_pattern(settings, pattern), None if changed is None else _int4(changed, "gptq", dialect)))
    head = () if settings.optional_flag("lm_head") else ((HEAD, None),)
    return Quantization("gptq", default=default, names=head, patterns=tuple(_few(settings, patterns)))


def _auto_round(settings: Fields) -> Quantization:
    packing = str(settings.values.get("packing_format") or "auto_round")
    if not re.fullmatch(r"auto_round(:(auto_)?gptq(v2)?)?", packing):
        raise _Unread(f"auto-round in the layout {shown(packing)}")
    dialect: Int4Dialect = "gptq_v2" if packing.endswith("v2") else "gptq"
    default = _int4(settings, "auto-round", dialect)
    if default.zeros and packing == "auto_round":
        raise _Unread("auto-round with zero points in the layout 'auto_round'")
    names: list[Rule] = []
    patterns: list[Rule] = []
    for key, changes in settings.inner("extra_config").items():
        if not isinstance(changes, Mapping):
            raise CheckpointError(
                f"{settings.where}: extra_config {shown(key)} must be an object, got {shown(changes)}"
            )
        changed = Fields({**settings.values, **changes}, settings.where)
        whole = changed.integer("bits", 1, 32) >= 16
        stored = None if whole else _int4(changed, "auto-round", dialect)
        if re.fullmatch(r"[\w.\-]+", key):
            names.append((key, stored))
        else:
            patterns.append((_pattern(settings, key), stored))
    if HEAD not in dict(names):
        names.append((HEAD, None))
    blocks = settings.values.get("block_name_to_quantize") or []
    below = [each.strip() for each in blocks.split(",")] if isinstance(blocks, str) else blocks
    if not isinstance(below, list) or not all(isinstance(name, str) for name in below):
        raise CheckpointError(f"{settings.where}: block_name_to_quantize must be names, got {shown(blocks)}")
    return Quantization("auto-round", "", default, tuple(names), tuple(_few(settings, patterns)), tuple(below))


def _awq(settings: Fields) -> Quantization:
    version = str(settings.values.get("version") or "gemm").lower()
    if version != "gemm":
        raise _Unread(f"awq in the layout {shown(version)}")
    if settings.optional_flag("zero_point") is False:
        raise _Unread("awq without zero points")
    default = replace(_int4(settings, "awq", "awq"), zeros=True)
    kept = (*_names(settings, "modules_to_not_convert"), HEAD)
    return Quantization("awq", default=default, names=tuple((name, None) for name in kept))


def _int4(settings: Fields, method: str, dialect: Int4Dialect) -> StoredInt4:
    """The numbers of GPTQ, AutoRound and AWQ."""
    bits = settings.integer("bits", 1, 32)
    if bits != 4:
        raise _Unread(f"{method} in {bits} bits")
    if settings.optional_flag("desc_act"):
        raise _Unread(f"{method} with desc_act, which scatters the groups")
    size = settings.integer("group_size", -1, 2**20) if settings.present("group_size") else 128
    symmetric = settings.optional_flag("sym")
    return StoredInt4(dialect, _group(size, method), symmetric is False)


def _group(size: int, method: str) -> int:
    if size not in GROUP_SIZES:
        raise _Unread(f"{method} with {f'groups of {size}' if size > 0 else 'one group for each row'}")
    return size


def _compressed_tensors(settings: Fields) -> Quantization:
    names: list[Rule] = []
    patterns: list[Rule] = []

    def rule(target: object, stored: StoredFormat | None) -> None:
        if not isinstance(target, str):
            raise CheckpointError(f"{settings.where}: targets and ignore must be names, got {shown(target)}")
        if target.startswith("re:"):
            patterns.append((_pattern(settings, target[3:]), stored))
        else:
            names.append((target, stored))

    default: StoredFormat | None = None
    for target in settings.optional_list("ignore", MAX_NAMES) or []:
        rule(target, None)
    ignored = {name for name, _ in names}
    if settings.values.get("transform_config"):
        raise _Unread("compressed-tensors with transforms of its activations")
    groups = settings.inner("config_groups")
    if not groups:
        raise _Unread("compressed-tensors without config_groups")
    for name in groups:
        group = Fields(Fields(groups, settings.where).inner(name), settings.where)
        stored = _pack_quantized(group, str(group.values.get("format") or settings.values.get("format")))
        for target in group.optional_list("targets", MAX_NAMES) or []:
            if target == "Linear":
                default = stored
            elif target not in ignored:
                rule(target, stored)
    return Quantization(
        "compressed-tensors", default=default, names=tuple(names), patterns=tuple(_few(settings, patterns))
    )


def _pack_quantized(group: Fields, layout: str) -> StoredInt4:
    if layout != "pack-quantized":
        raise _Unread(f"compressed-tensors {shown(layout)[1:-1]}")
    weights = Fields(group.inner("weights"), group.where)
    bits = weights.integer("num_bits", 1, 32)
    if bits != 4 or weights.values.get("type", "int") != "int":
        raise _Unread(f"compressed-tensors pack-quantized in {bits} bits")
    if weights.values.get("actorder") not in (None, False, "static", "weight"):
        raise _Unread("compressed-tensors with actorder group, which scatters the groups")
    size = weights.optional_integer("group_size", -1, 2**20)
    symmetric = weights.optional_flag("symmetric")
    return StoredInt4("pack-quantized", _group(size or -1, "compressed-tensors"), symmetric is False)


DIALECTS: Mapping[str, Callable[[Fields], Quantization]] = {
    "fp8": _fp8,
    "gptq": _gptq,
    "auto-round": _auto_round,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
}


def _names(settings: Fields, key: str) -> list[str]:
    names: list[Any] = settings.optional_list(key, MAX_NAMES) or []
    if not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{settings.where}: {key} must be names, got {shown(names)}")
    return names


def _pattern(settings: Fields, pattern: str) -> str:
    """A regular expression of a configuration that is known to compile, and to end.

    Raises:
        CheckpointError: it is not.
    """
    where = f"{settings.where}: the pattern {shown(pattern)} of quantization_config"
    repeats = len(re.findall(r"(?<!\\)[+*{]", pattern))
    if len(pattern) > MAX_PATTERN or repeats > MAX_REPEATS or NESTED_REPEAT.search(pattern):
        raise CheckpointError(f"{where} is too long or repeats too much", "name the modules by a simpler one")
    try:
        _compiled(pattern)
    except re.error as error:
        raise CheckpointError(f"{where} is no regular expression: {error}") from None
    return pattern


def _few(settings: Fields, patterns: list[Rule]) -> list[Rule]:
    if len(patterns) > MAX_PATTERNS:
        raise CheckpointError(
            f"{settings.where}: quantization_config has {len(patterns)} patterns, at most {MAX_PATTERNS} are read"
        )
    return patterns
