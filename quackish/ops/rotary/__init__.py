"""Rotary position embeddings of queries and keys, in one launch for both.

api.py        the public function, and checks of its arguments
reference.py  the same math in PyTorch: the specification, and the portable path
problems.py   what the kernel computes, how it is configured, and its description
kernels/      device code
plans.py      what depends on shapes, strides and options only, computed once per kind of call
operators.py  the launch and the gradient
tools.py      what explain, precompile, emulate and doctor know of it; measure.py, providers.py: for bench
"""
