"""Reads what ``dflash doctor --report`` wrote on another machine: python -m tools.replay FILE."""
