"""Training: makes drafters of a target's own text. Knows nothing of screens, the registry or the network."""
