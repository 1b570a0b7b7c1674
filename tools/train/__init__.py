"""Training: makes the tiny demo pairs from nothing. Knows nothing of screens, the registry or the network."""
