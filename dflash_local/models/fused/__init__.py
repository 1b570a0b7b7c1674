"""Models whose whole cycle is a fixed list of launches over static buffers. Knows no text and no requests."""
