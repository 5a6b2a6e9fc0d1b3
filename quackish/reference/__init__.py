"""The operations in plain PyTorch, on any device: the spec that tests compare with, and what the portable path runs."""
