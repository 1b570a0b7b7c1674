"""A conversation as a drafter learns from it: what was asked, turn by turn; what was replied is the target's to say."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from dflash_local.request import Message

HELD_OUT = 5  # one conversation of so many is never trained on


@dataclass(frozen=True, slots=True)
class SourceConversation:
    """Its prompts, each all messages before a reply, and the kind of text that it is counted with."""

    kind: str
    prompts: tuple[tuple[Message, ...], ...]

    @property
    def digest(self) -> str:
        """Return a hash of what it says; none of its words can be read from it."""
        told = "\0".join(f"{each.role}\0{each.content}" for prompt in self.prompts for each in prompt)
        return hashlib.sha256(told.encode("utf-8", "replace")).hexdigest()

    @property
    def held_out(self) -> bool:
        """Return whether it belongs to the fifth that is never trained on; the same in every run."""
        first = "\0".join(each.content for each in self.prompts[0])
        return int(hashlib.sha256(first.encode("utf-8", "replace")).hexdigest()[:8], 16) % HELD_OUT == 0
