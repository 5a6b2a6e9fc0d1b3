"""Who besides autograd wants to see what is computed: torch.compile, tracing, modes, torch.func."""

import torch

is_compiling = torch.compiler.is_dynamo_compiling
num_dispatch_modes = torch._C._len_torch_dispatch_stack
has_function_modes = torch._C._is_torch_function_mode_enabled
functorch_level = torch._C._functorch.peek_interpreter_stack
jit_trace = torch._C._get_tracing_state
forward_ad = torch.autograd.forward_ad


def is_plain() -> bool:
    """Whether nobody but autograd has to know what is computed, so that kernels may be launched past the dispatcher.

    `rms_norm` has the same list written out.
    """
    return not (
        is_compiling()  # first: the others are not for torch.compile to look into
        or num_dispatch_modes()
        or has_function_modes()
        or functorch_level() is not None
        or forward_ad._current_level >= 0
        or jit_trace() is not None
    )
