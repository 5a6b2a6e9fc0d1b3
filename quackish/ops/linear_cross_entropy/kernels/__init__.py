"""The kernels of linear cross entropy around its GEMMs, one per file.

compact.py   lists the live rows and computes the divisor of "mean"
gather.py    gathers the live rows of a chunk, their targets and row shifts
rows.py      computes each row's statistics, loss and gradient coefficients
sort.py      sorts the rows of a chunk by class and takes the target entries out of exp_logits
targets.py   adds the target entries' part to the weight gradient
bias.py      computes the bias gradient
scatter.py   scatters rows of the input gradient
scale.py     multiplies gradients by the incoming gradient, in place
"""
