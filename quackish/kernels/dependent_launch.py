"""Programmatic dependent launch: a kernel starts before the previous one ends."""

import cutlass.cute as cute


@cute.jit
def after_previous():
    """Programmatic dependent launch: waits for the previous kernel, then lets CTAs of the next kernel start early.

    Every CTA must call this, on every path. When a CTA starts, all kernels before the previous one are complete,
    because the previous kernel waited here. (PyTorch's kernels never launch early.) Their results may be read before
    this call, after a fence, which invalidates the L1. Nothing that the previous kernel uses may be written before this
    call, because that kernel may still run.
    """
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
