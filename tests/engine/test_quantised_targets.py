"""Pairs with a quantised target: the text is that of the decoded weights, in both engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.quantised_pairs import STORED, check_text_of_decoded_weights

# A format of each width with what sets it apart, zeros, blocks or two scales; the others in the long tests.
HERE = ("pack_quantized_zeros", "fp8", "modelopt_nvfp4")


@pytest.mark.parametrize(
    ("name", "dialect", "stored"),
    [pytest.param(*each, marks=() if each[1] in HERE else pytest.mark.slow) for each in STORED],
)
def test_a_quantised_pair_writes_what_its_decoded_weights_write(
    name: str, dialect: str, stored: str, tmp_path: Path
) -> None:
    check_text_of_decoded_weights(name, dialect, stored, "cpu", tmp_path)
