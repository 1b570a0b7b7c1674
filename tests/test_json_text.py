"""JSON of files and peers: numbers and depth are bounded, everything else is what ``json`` makes of it."""

from __future__ import annotations

import math

import pytest

from dflash_local.json_text import parse_json


def test_published_numbers_are_read() -> None:
    text = '{"model_max_length": 1000000000000000019884624838656, "limit": [0.0, Infinity], "scale": 1e-300, "n": -7}'
    expected = {"model_max_length": int(1e30), "limit": [0.0, math.inf], "scale": 1e-300, "n": -7}
    assert parse_json(text) == parse_json(text.encode()) == expected
    assert parse_json('{"a": 1, "a": 2}', list) == [("a", 1), ("a", 2)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f'{{"a": 1{"0" * 400}}}', "a number in it has 401 digits"),
        (f'{{"a": -1{"0" * 400}}}', "a number in it has 401 digits"),
        ("[" + "9" * 100_000 + "]", "a number in it has 100000 digits"),
        ("[1e400]", "a number in it is too large"),
        ("[" * 200_000, "nested too deeply"),
        ("[", "Expecting value"),
        (b'"\xff"', "decode"),
    ],
)
def test_what_is_too_large_is_a_value_error(text: str | bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_json(text)
