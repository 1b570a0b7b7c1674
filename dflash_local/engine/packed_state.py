"""A sequence's state as JSON and bytes: dataclasses, caches, tuples and lists of tensors, for a file."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from mmap import mmap
from typing import Any

import torch

from dflash_local.kernels.allocate import dtype_name
from dflash_local.models.drafter_context import ContextCache
from dflash_local.models.transformers_target import KVCache

ALIGNMENT = 64  # bytes; each tensor begins at a multiple
CACHES = (KVCache, ContextCache)
PACKAGE = __name__.partition(".")[0] + "."


@dataclass(frozen=True, slots=True)
class PackedState:
    """What ``unpack`` makes the state of.

    Attributes:
        content: JSON-able. body: the bytes of all tensors, with gaps of zeros.
    """

    content: dict[str, Any]
    body: list[memoryview]


def pack(value: Any, drafters: Sequence[Any]) -> PackedState:
    """Describe a state. Tensors must be on the host, and are not copied.

    Args:
        drafters: objects that are not a part of it: the reader has them, in the same order.

    Raises:
        TypeError: something in it cannot be described.
    """
    tensors: list[torch.Tensor] = []
    state = _described(value, drafters, tensors)
    places, body, end = [], [], 0
    for tensor in tensors:
        numbers: Any = tensor.contiguous().flatten().view(torch.uint8).numpy()
        raw = memoryview(numbers)
        places.append([dtype_name(tensor.dtype), list(tensor.shape), end])
        body += [raw, memoryview(bytes(-raw.nbytes % ALIGNMENT))]
        end += raw.nbytes + body[-1].nbytes
    return PackedState({"state": state, "tensors": places}, body)


def unpack(content: Mapping[str, Any], body: mmap, drafters: Sequence[Any]) -> Any:
    """Make the state of what ``pack`` gave; its tensors lie in ``body``.

    Raises:
        ValueError, TypeError, LookupError, AttributeError, RuntimeError: it is of another version.
    """
    tensors = []
    for name, shape, start in content["tensors"]:
        dtype, count = getattr(torch, name), torch.Size(shape).numel()
        flat = torch.frombuffer(body, dtype=dtype, count=count, offset=start) if count else torch.empty(0, dtype=dtype)
        tensors.append(flat.view(shape))
    return _made(content["state"], drafters, tensors)


def _described(value: Any, drafters: Sequence[Any], tensors: list[torch.Tensor]) -> Any:
    def described(inner: Any) -> Any:
        return _described(inner, drafters, tensors)

    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    for kind in (tuple, list):
        if type(value) is kind:
            return {kind.__name__: [described(each) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[described(key), described(each)] for key, each in value.items()]}
    for index, drafter in enumerate(drafters):
        if value is drafter:
            return {"drafter": index}
    if isinstance(value, CACHES) or is_dataclass(value):
        made_of = {name: described(getattr(value, name)) for name in _parts(value)}
        return {"class": [type(value).__module__, type(value).__qualname__], "parts": made_of}
    raise TypeError(f"{type(value).__name__} is no part of a state")


def _parts(value: Any) -> Sequence[str]:
    """Name the attributes that hold what an object is."""
    if is_dataclass(value):
        return [each.name for each in fields(value)]
    slots: Sequence[str] | None = getattr(value, "__slots__", None)
    return list(vars(value)) if slots is None else slots


def _made(described: Any, drafters: Sequence[Any], tensors: Sequence[torch.Tensor]) -> Any:
    def made(inner: Any) -> Any:
        return _made(inner, drafters, tensors)

    if not isinstance(described, dict):
        return described
    if "tensor" in described:
        return tensors[described["tensor"]]
    if "drafter" in described:
        return drafters[described["drafter"]]
    if "dict" in described:
        return {made(key): made(each) for key, each in described["dict"]}
    if "class" not in described:
        ((kind, items),) = described.items()
        return {"tuple": tuple, "list": list}[kind](made(each) for each in items)
    module, name = described["class"]
    kind = getattr(sys.modules[module], name)
    if not module.startswith(PACKAGE) or not (kind in CACHES or is_dataclass(kind)):
        raise ValueError(f"{module}.{name} is no part of a state")
    value = object.__new__(kind)
    for part, inner in described["parts"].items():
        object.__setattr__(value, part, made(inner))
    return value
