"""Measuring: the exactness certificate, and AR against DFlash. Knows sessions and reports, no screens."""
