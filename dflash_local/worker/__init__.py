"""Child processes for work that may hang, crash or be hostile; knows nothing of what they do."""
