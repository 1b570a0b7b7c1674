"""Whether replies think before they answer: as asked, or as the drafter was trained."""

from __future__ import annotations

from dflash_local.app.notices import Notify
from dflash_local.catalog.bundled import Pair
from dflash_local.events import Notice
from dflash_local.settings import Settings


def default_thinking(pair: Pair) -> bool:
    """Whether a reply thinks when nobody says: as the drafter was trained."""
    return pair.thinking == "required"


def thinks(pair: Pair, asked: bool | None, user: Settings, notify: Notify) -> bool:
    """Whether replies think: as asked, else as the user's settings say, else as the drafter was trained.

    Warns when the answer does not suit the drafter.
    """
    chosen = asked if asked is not None else user.thinking
    thinking = default_thinking(pair) if chosen is None else chosen
    notice = thinking_notice(pair, thinking)
    if notice:
        notify(Notice(notice, "warning"))
    return thinking


def thinking_notice(pair: Pair, thinking: bool) -> str:
    """What to say when the user wants it otherwise; empty when it suits the drafter."""
    if pair.thinking == "off" and thinking:
        return "this drafter was trained without thinking: expect shorter acceptance lengths with --think"
    if pair.thinking == "required" and not thinking:
        return "this drafter was trained on replies that think: expect shorter acceptance lengths with --no-think"
    return ""
