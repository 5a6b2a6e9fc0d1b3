"""The operations in plain PyTorch, on any device: the specification for tests, and the portable path."""
