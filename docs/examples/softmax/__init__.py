"""Softmax, the worked example of docs/adding_an_operation.md: a folder that can be copied to quackish/ops.

api.py        the public function
reference.py  the same math in PyTorch: the specification, and the portable path
problems.py   what the kernels compute, how they are configured, and their descriptions
kernels/      device code
operators.py  launches and the gradient
tools.py      what explain, precompile, emulate and doctor know of it; measure.py: what bench does
"""
