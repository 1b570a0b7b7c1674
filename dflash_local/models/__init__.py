"""Models: checkpoints, drafters, targets and their caches. Knows nothing of text, registry or network."""
