"""The screens look as they did: kept pictures against new ones, words and colours. ``make snapshots`` renews them."""

from __future__ import annotations

import pytest

from tests.ui.pictures import FOLDER, RENEW, SCENES, differences, draw, other_versions, rows

OTHERS = other_versions()


@pytest.mark.skipif(bool(OTHERS), reason=f"the pictures were drawn with other versions: {OTHERS}")
@pytest.mark.parametrize("name", SCENES)
def test_a_screen_looks_as_it_did(name: str) -> None:
    kept = FOLDER / f"{name}.svg"
    told = differences(kept.read_text(encoding="utf-8"), draw(SCENES[name]))
    assert not told, f"{kept.name} differs; look at it, and if it is meant: {RENEW}\n" + "\n".join(told)


def test_every_kept_picture_is_compared() -> None:
    assert {path.stem for path in FOLDER.glob("*.svg")} == set(SCENES)


def test_a_picture_is_read_by_rows() -> None:
    shown = rows((FOLDER / "chat-80x24.svg").read_text(encoding="utf-8"))
    assert shown.words[0].split() == "dflash · scripted · reference float32 cpu".split()
    assert "class Robot:" in shown.words[9] and len(shown.words) <= 24


def test_words_and_colours_that_changed_are_told_with_their_row() -> None:
    kept = (FOLDER / "chat-80x24.svg").read_text(encoding="utf-8")
    assert differences(kept, kept) == []
    told = differences(kept, kept.replace("reference", "reverence"))
    assert len(told) == 1 and told[0].startswith("row 0, words:") and "reverence" in told[0]
    title = next(fill for _, _, fill in rows(kept).grounds[0])
    told = differences(kept, kept.replace(f'fill="{title}"', 'fill="#123456"'))
    assert told[0].startswith("row 0, colours:") and title in told[0] and "#123456" in told[0]
    told = differences(kept, kept.replace("font-weight: bold", "font-style: italic"))
    assert told and all("colours" in line for line in told)
