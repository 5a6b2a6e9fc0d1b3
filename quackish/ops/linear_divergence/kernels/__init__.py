"""The kernels of linear_divergence."""
