"""The kernels of linear cross entropy around its GEMMs, one per file.

compact.py   which rows are live, and the divisor of "mean"
gather.py    the live rows of a chunk, next to each other; their targets and row shifts
rows.py      each row's statistics and loss, and the factors of its gradients
sort.py      the rows of a chunk by class, with their targets' part of the weight gradient
targets.py   adds that part to the weight gradient
bias.py      the bias gradient
scatter.py   rows of the input gradient to where they belong
scale.py     gradients times the incoming gradient, in place
exp.py, rescale.py, clear.py   what the GEMM's epilogues do, between cuBLAS's GEMMs
"""
