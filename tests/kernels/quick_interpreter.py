"""Triton's interpreter without what it does anew for each call and each number: results are the same, in less time."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from triton.language import core, semantic
from triton.runtime import interpreter


def patch_once() -> None:
    """For the rest of this process, whose kernels are all interpreted.

    Its language is prepared at each launch, and at each call that a kernel makes of another function; the table of
    numpy's types is written at each look-up; types of blocks and shapes of tensors are made for each number that is
    computed; and sums and products of integers are computed once more in 64 bits, for a check that is dropped where
    nothing is debugged. Where another Triton has these otherwise nothing is changed.
    """
    module: Any = interpreter
    prepare, dtype_of = getattr(module, "_patch_lang", None), getattr(module, "_get_np_dtype", None)
    scope = getattr(module, "_LangPatchScope", None)
    builder = getattr(module, "interpreter_builder", None)
    if builder is not None and getattr(builder.options, "sanitize_overflow", False) and not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    if prepare is not None and scope is not None:
        prepared: dict[int, Any] = {}  # by the names of a module, which decide what of the language is prepared

        def prepared_once(function: Any) -> Any:
            names = function.__globals__
            if id(names) not in prepared:
                prepared[id(names)] = names, prepare(function)
            return scope()  # nothing to put back

        module._patch_lang = prepared_once
    if dtype_of is not None:
        found: dict[Any, Any] = {}

        def looked_up_once(dtype: Any) -> Any:
            key = dtype.scalar.name  # of a block, that of its numbers
            if key not in found:
                found[key] = dtype_of(dtype)
            return found[key]

        module._get_np_dtype = looked_up_once
    if all(hasattr(core, name) for name in ("tensor", "tuple", "constexpr", "block_type")):
        _make_shapes_once()


def _make_shapes_once() -> None:
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}  # sizes -> their product and themselves, as tensors have them
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}  # elements and sizes -> fields of a type
    make_block, broadcast = core.block_type.__init__, semantic.TritonSemantic.broadcast_impl_value

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes not in shapes:
            shapes[sizes] = core.constexpr(prod(sizes)), core.tuple([core.constexpr(size) for size in sizes])
        self.numel, self.shape = shapes[sizes]

    def make_block_once(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(getattr(size, "value", size) for size in shape)
        key = element_ty.name, element_ty.__class__, sizes
        if key not in blocks or blocks[key]["element_ty"] != element_ty:
            make_block(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        else:
            vars(self).update(blocks[key])

    def broadcast_unlike(self: Any, lhs: Any, rhs: Any) -> Any:
        one, two = lhs.type, rhs.type
        alike = one.is_block() and two.is_block() and one.shape.values == two.shape.values
        return (lhs, rhs) if alike else broadcast(self, lhs, rhs)

    core.tensor.__init__ = make_tensor
    core.block_type.__init__ = make_block_once
    semantic.TritonSemantic.broadcast_impl_value = broadcast_unlike
