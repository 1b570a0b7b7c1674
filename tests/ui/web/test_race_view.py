"""A race as HTML: every character of both texts stands in it, and none of them is obeyed."""

from __future__ import annotations

import html
import re

import pytest

from dflash_local.events import Finished, Piece, Step, Usage
from dflash_local.service.race import Lane, Race
from dflash_local.ui.web.race_view import replayed
from tests.service.scripted import STATS

TEXT = "Look:\n```python\nx = '<script>'  # \"&\"\n```\n</div><img onerror=1> end"


@pytest.mark.parametrize("size", [1, 7, 100])
def test_no_character_of_the_texts_is_lost_or_obeyed(size: int) -> None:
    bits = [TEXT[at : at + size] for at in range(0, len(TEXT), size)]
    steps = tuple(Step((Piece(bit),), (at,), 0, 0, 0, at / 10) for at, bit in enumerate(bits))
    finished = Finished("stop", Usage(1, len(bits)), STATS)
    drawn = replayed(Race(1, Lane("ar", steps, finished), Lane("dflash", steps, finished)), [])
    said = re.findall(r'<div class="df-said" tabindex="0"><div>(.*?)</div></div>', drawn, re.S)
    assert [html.unescape(re.sub("<[^>]*>", "", lane)) for lane in said] == [TEXT, TEXT]
    assert "<script" not in drawn and "<img" not in drawn and 'class="df-code df-string"' in drawn
