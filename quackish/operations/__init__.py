"""The table of operations, which bench, explain, precompile, tune and doctor share: one file per operation.

A tool keeps for itself what it alone reads: `bench` its providers and roofs, `doctor` its self-tests.
"""

from quackish.operations.attention import ATTENTION
from quackish.operations.grouped_mlp import GROUPED_MLP
from quackish.operations.linear_cross_entropy import LINEAR_CROSS_ENTROPY
from quackish.operations.moe_mlp import MOE_MLP
from quackish.operations.rms_norm import RMS_NORM

OPERATIONS = {op.name: op for op in (RMS_NORM, LINEAR_CROSS_ENTROPY, GROUPED_MLP, MOE_MLP, ATTENTION)}
