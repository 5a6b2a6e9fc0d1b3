"""The dry run of grouped_mlp and mlp for the tools."""

import torch

from quackish.errors import UnsupportedError
from quackish.gpu import Gpu
from quackish.ops.mlp import checks, dense, kernel_steps, operators
from quackish.ops.shared.dry_run import DryRun, Recorder
from quackish.ops.shared.for_tools import Args, Operation


def dry_run(op: Operation, args: Args, gpu: Gpu, passes: tuple[str, ...]) -> DryRun:
    """Eager mode."""
    inputs = checks.Inputs(*map(args.get, checks.Inputs._fields))
    activation, recompute = args.get("activation", "swiglu"), args.get("recompute", False)
    if op.name == "mlp":
        inputs = dense.as_rows(inputs, args.get("b1"), args.get("b3"))
    checks.check_mlp(inputs, op.name, activation, recompute, "cute")
    *groups, _, i = inputs.w2.shape
    if why := kernel_steps.why_unsupported(op.name, inputs.x, i, *groups):
        raise UnsupportedError(why)
    grad, dy = inputs.x.requires_grad, torch.empty_like(inputs.x)
    inputs = checks.Inputs(*[None if t is None else t.detach() for t in inputs])
    recorder = Recorder()
    recorder.ignore(*inputs, dy)
    steps = kernel_steps.steps_of(recorder.device(gpu))
    with recorder:
        y, preactivation = operators.forward(steps, inputs, activation, grad and not recompute)
        if grad:
            recorder.phase = "backward"
            dtypes = operators.Dtypes._make(None if t is None else t.dtype for t in inputs.leaves())
            grads = operators.gradients(steps, dy, inputs, preactivation, activation, dtypes, overwrite=True)
            del y, grads  # held until here
    notes = ["Bytes and FLOPs assume that every group is used and every row is in one: only the GPU knows the groups."]
    notes = notes if groups else []
    return DryRun(None, {}, recorder.steps, recorder.peak, recorder.buffers(), notes)
