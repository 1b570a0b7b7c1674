"""Which pairs exist and where their folders are. Knows no torch and no network."""
