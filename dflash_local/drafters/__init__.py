"""Drafters: a folder for each kind, and the table of kinds."""
