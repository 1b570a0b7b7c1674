"""Kernels and their plain PyTorch twins. Knows tensors, nothing of models or of the engine."""
