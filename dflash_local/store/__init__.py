"""Files this program writes: atomically, privately, and never two writers on one. Knows no torch."""
