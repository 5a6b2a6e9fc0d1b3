"""Kernels that operations share."""
