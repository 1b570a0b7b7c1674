"""The OpenAI-compatible endpoint and the guard before it. Knows no torch, no models, no kernels."""
