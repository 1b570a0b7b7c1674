"""The files of a checkpoint on disk: opened, bounded and typed before anything else sees them. Torch-free."""
