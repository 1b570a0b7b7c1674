"""The same events from a pair that another process has loaded. Knows no models."""
