"""Likely values in place of nulls: only there, at the place that is named, and without a mark on what was given."""

from __future__ import annotations

import copy

from dflash_local.config.values import fill


def test_nulls_are_filled_where_the_names_say() -> None:
    given = {"a": None, "b": {"c": None, "d": 1}, "e": 5, "_inferred": {"a": 2, "b.c": 3, "b.d": 9, "e": 9, "f": 4}}
    before = copy.deepcopy(given)
    assert fill(given) == ({"a": 2, "b": {"c": 3, "d": 1}, "e": 5, "f": 4}, {"a", "c", "f"})
    assert given == before


def test_what_is_no_object_fills_nothing() -> None:
    assert fill({"a": None, "_inferred": 5}) == ({"a": None}, frozenset())
    assert fill({"b": 5, "_inferred": {"b.c": 3}}) == ({"b": 5}, frozenset())
