"""Triton's interpreter without what it does anew for each call and each number: results are the same, in less time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from triton.runtime import interpreter


def patch_once() -> None:
    """For the rest of this process, whose kernels are all interpreted.

    Its language is prepared at each launch, and at each call that a kernel makes of another function; the table of
    numpy's types is written at each look-up; and sums and products of integers are computed once more in 64 bits, for a
    check that is dropped where nothing is debugged. Where another Triton has these otherwise nothing is changed.
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
