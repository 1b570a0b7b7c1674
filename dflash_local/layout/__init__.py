"""Every tensor that the fused engine holds, as data: the engine allocates it, the planner sums it. Torch-free."""
