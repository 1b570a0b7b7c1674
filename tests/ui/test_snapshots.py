"""The screens look as they did: kept pictures against new ones, words and colours. ``make snapshots`` renews them."""

from __future__ import annotations

import pytest

from tests.ui.pictures import FOLDER, RENEW, SCENES, differences, draw, other_versions

OTHERS = other_versions()


@pytest.mark.skipif(bool(OTHERS), reason=f"the pictures were drawn with other versions: {OTHERS}")
@pytest.mark.parametrize("name", SCENES)
def test_a_screen_looks_as_it_did(name: str) -> None:
    kept = FOLDER / f"{name}.svg"
    told = differences(kept.read_text(encoding="utf-8"), draw(SCENES[name]))
    assert not told, f"{kept.name} differs; look at it, and if it is meant: {RENEW}\n{told}"


def test_every_kept_picture_is_compared() -> None:
    assert {path.stem for path in FOLDER.glob("*.svg")} == set(SCENES)
