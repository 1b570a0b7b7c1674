"""One archive about this installation for a bug report: scrubbed of what is private, and read back elsewhere."""
