"""The README's moving picture of a race: what stands still in it is the end of the recording."""

from __future__ import annotations

from xml.dom import minidom

from dflash_local.report.race_file import SAVED
from tests.report.test_race_file import ABOUT, hostile
from tests.ui.make_race_picture import moving


def test_without_motion_the_end_is_shown_and_text_stays_text() -> None:
    picture = minidom.parseString(moving(SAVED[".cast"](hostile(), ABOUT).decode("ascii")))
    texts = list(picture.getElementsByTagName("text"))
    past = [text for text in texts if text.parentNode.nodeName == "g" and not text.parentNode.getAttribute("class")]
    shown = "".join(text.firstChild.data for text in texts if text not in past)
    assert " 2.0x " in shown and "120 tok/s" in shown and "done" in shown
    assert past and " 2.0x " not in "".join(text.firstChild.data for text in past)
    assert "</script>" in shown and not picture.getElementsByTagName("script")
