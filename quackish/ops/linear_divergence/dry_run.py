"""The dry run of linear_divergence for the tools."""

import torch

from quackish.device.kernel_device import KernelDevice, substitute
from quackish.device.kernel_for import kernel_for
from quackish.errors import UnsupportedError
from quackish.gpu import Gpu
from quackish.ops.linear_divergence import api, checks, kernel_steps, operators, schedule
from quackish.ops.shared.dry_run import DryRun, Recorder
from quackish.ops.shared.for_tools import Args, Operation
from quackish.ops.shared.memory_counter import META


def dry_run(op: Operation, args: Args, gpu: Gpu, passes: tuple[str, ...]) -> DryRun:
    """Eager mode. Forward computes the gradients, unless the loss is per row."""
    defaults = dict(beta=0.0, temperature=1.0, reduction="mean", return_entropy=False, backend="cute")
    inputs = checks.Inputs(*map(args.get, checks.Inputs._fields))
    options = checks.Options(*(args.get(name, defaults.get(name)) for name in checks.Options._fields))
    dtype = checks.check(inputs, options)
    widths = inputs.linear_weight.shape[1], inputs.teacher_weight.shape[1]
    if why := kernel_steps.why_unsupported(dtype, inputs.linear_weight.shape[0], widths):
        raise UnsupportedError(why)
    with substitute(META, KernelDevice(gpu, kernel_for)):
        tensors, plan = api.prepared(inputs, options, dtype)
        sizes = operators.sizes_of(tensors, plan)
    tensors = operators.Tensors(*(None if t is None else t.detach() for t in tensors))
    dloss = torch.empty(len(tensors.x) if options.reduction == "none" else (), device=META)
    recorder = Recorder()
    recorder.ignore(*tensors, dloss)
    steps = kernel_steps.KernelSteps(recorder.device(gpu))
    with recorder:
        results = operators.forward(tensors, plan, steps)
        if any(plan.needs) and options.reduction == "none":
            recorder.phase = "backward"
            grads = operators.backward(dloss, results[-1], tensors, plan, steps)
            del grads  # held until here
        del results
    layout = schedule.Layout(plan.chunk, plan.block)
    text = f"gradients of logits of {layout.block} rows at once, logits of {layout.chunk}"
    limited = schedule.memory_of(layout, sizes)
    return DryRun(None, {"Blocks": text}, recorder.steps, recorder.peak, recorder.buffers(), [], limited)
