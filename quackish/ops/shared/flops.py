"""FLOPs of the operators, for torch.utils.flop_counter: 2 * m * n * k per matrix product, and nothing else.

Formulas see only shapes: rows that are ignored, dropped or of no group count too. Attention has PyTorch's formulas,
without a discount for masks and causality. `add_flop_formulas` imports this module only where a program has loaded
torch.utils.flop_counter, which imports Triton (80 ms).
"""

import math

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import (
    FlopCounterMode,
    flop_registry,
    register_flop_formula,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

import quackish.ops.attention.autograd  # noqa: F401  # defines operators, as the modules below do
from quackish.ops.linear_cross_entropy.calls import GradOutputs, GradsNeeded, Plan, unpack
from quackish.ops.linear_cross_entropy.checks import Inputs
from quackish.ops.linear_cross_entropy.operators import Saved
from quackish.ops.linear_cross_entropy.schedules import grads_in_forward
from quackish.ops.mlp.autograd import Dtypes


def _grouped_mlp_fwd(x, w1, w3, b1, w2, *_, out_shape=None):
    return _matmul(x, w1) + _matmul(x, w3) + _matmul(x, w2)


def _grouped_mlp_bwd(dy, preactivation, x, w1, w3, b1, w2, b2, scales, offs, activation, *options, out_shape=None):
    needed = Dtypes(*options[: len(Dtypes._fields)])
    up, flops = _matmul(x, w1) + _matmul(x, w3), 0
    if preactivation is None and needed.need_preactivation():
        flops += up
    if any((needed.x, needed.w1, needed.w3, needed.b1, needed.scales)):  # the activation's gradient
        flops += _matmul(x, w2)
    if needed.x:
        flops += up
    pairs = (w1, needed.w1), (w3, needed.w3), (w2, needed.w2)
    return flops + sum(_matmul(x, weight) for weight, need in pairs if need)


def _grouped_rows(a, w, *_, out_shape=None):
    return _matmul(a, w)


def _grouped_sum(a, b, *_, out_shape=None):
    return 2 * a[0] * a[1] * b[1]


def _matmul(rows, weights):
    """Each row with the matrix of its group."""
    return 0 if weights is None else 2 * rows[0] * weights[1] * weights[2]


def _linear_cross_entropy_fwd(*args, out_shape=None):
    inputs, plan, (needs,) = unpack(args, Inputs, Plan)
    dx, dw, _ = grads_in_forward(plan, GradsNeeded(*needs))
    return 2 * math.prod(inputs.input) * inputs.linear_weight[0] * (1 + bool(dx) + bool(dw))


def _linear_cross_entropy_bwd(*args, out_shape=None):
    grads, saved, inputs, plan, ((dx, dw, _),) = unpack(args, GradOutputs, Saved, Inputs, Plan)
    v, h = inputs.linear_weight
    m = math.prod(inputs.input[:-1])
    kept = 0 if saved.exp_logits is None else saved.exp_logits[0]
    if grads.entropy is not None and plan.why_portable is None:
        kept = 0  # kernels recompute all logits
    return 2 * v * h * (m * (dx + dw) + m - kept)


def _attention_fwd(q, k, v, *_, out_shape=None):
    return sdpa_flop_count(q, *_one_per_query_head(q, k, v))


def _attention_bwd(d_o, dlse, o, lse, lse_residual, plan, q, k, v, *_, out_shape=None):
    return sdpa_backward_flop_count(o, q, *_one_per_query_head(q, k, v))


def _one_per_query_head(q, *shapes):
    """Older versions of PyTorch's formulas require as many heads of keys as of queries."""
    return [(shape[0], q[1], *shape[2:]) for shape in shapes]


_FORMULAS = {
    getattr(torch.ops.quackish, formula.__name__[1:]): formula
    for formula in (
        _grouped_mlp_fwd, _grouped_mlp_bwd, _grouped_rows, _grouped_sum, _linear_cross_entropy_fwd,
        _linear_cross_entropy_bwd, _attention_fwd, _attention_bwd,
    )
}  # fmt: skip
for _op, _formula in _FORMULAS.items():
    if _op not in flop_registry:
        register_flop_formula(_op)(_formula)


def add_to_active_counters() -> None:
    """A counter copies the registry when it is created, which may have been before this module was imported."""
    for mode in _get_current_dispatch_mode_stack():
        counter = getattr(mode, "counter", None)
        if isinstance(counter, FlopCounterMode):
            for op in _FORMULAS:
                counter.flop_registry.setdefault(op, flop_registry[op])
