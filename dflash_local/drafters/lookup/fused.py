"""Lookup drafts for the fused engine: the host makes them, as it knows the text."""

from __future__ import annotations

from dflash_local.drafters.lookup.layout import TextIndex

HOST_DRAFTER = TextIndex
