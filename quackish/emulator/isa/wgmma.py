"""Warpgroup matrix multiplication (sm_90a)."""
