"""Measuring: the exactness certificate, and plain against DFlash. Knows sessions and reports, no screens."""
