"""The engine: load a pair, generate events. Knows files only as the snapshot it is given."""

from __future__ import annotations

from dflash_local.engine.load_pair import load
from dflash_local.engine.session import Session
from dflash_local.load_config import LoadConfig
from dflash_local.loaded import SessionFacts

__all__ = ["LoadConfig", "Session", "SessionFacts", "load"]
