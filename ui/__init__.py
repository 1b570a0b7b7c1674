"""Screens over the service: a terminal application. They know events, never a model."""
