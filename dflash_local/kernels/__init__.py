"""Kernels and their plain PyTorch references. Knows tensors, nothing of models or of the engine."""
