"""What a checkout has beside the package; nothing of it is installed."""
