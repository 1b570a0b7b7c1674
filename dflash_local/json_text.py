"""JSON of files and peers, with a bound on its numbers: longer ones fail later, far from the file that holds them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

MAX_DIGITS = 100  # published configurations have up to 31; a float ends at 308


def parse_json(text: str | bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Return the value of a JSON document; NaN and Infinity are read, as published configurations have them.

    Args:
        pairs: makes an object of its keys and values.

    Raises:
        ValueError: no JSON, nested too deeply, or with a number that is too large. UnicodeDecodeError is one.
    """
    try:
        return json.loads(text, object_pairs_hook=pairs, parse_int=_integer, parse_float=_float)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number in it has {len(digits.lstrip('-'))} digits, at most {MAX_DIGITS} are read")
    return int(digits)


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number in it is too large")
    return value
