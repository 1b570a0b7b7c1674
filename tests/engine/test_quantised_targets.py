"""Pairs with a quantised target: the text is that of the decoded weights, in both engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.quantised_pairs import STORED, check_text_of_decoded_weights


@pytest.mark.parametrize(("name", "dialect", "stored"), STORED)
def test_a_quantised_pair_writes_what_its_decoded_weights_write(
    name: str, dialect: str, stored: str, tmp_path: Path
) -> None:
    check_text_of_decoded_weights(name, dialect, stored, "cpu", tmp_path)
