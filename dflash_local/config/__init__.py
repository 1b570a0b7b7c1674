"""Say what a model is, read once from its config.json: features of each layer, never a family's name."""
