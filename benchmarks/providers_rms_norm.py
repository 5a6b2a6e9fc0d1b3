"""Who computes RMSNorm: quackish and every installed peer, each at its best public entry, behind one pair of calls.

Every forward returns y and the rstd that a backward needs, every backward returns the whole dx and dweight, none
writes its inputs. Peers are imported when they are asked for, and their kernels compile on the first call.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

EPS = 1e-6
# On a GPU a shape that no kernel covers shall fail and be named, not run the portable path.
BACKEND = "cute" if torch.cuda.is_available() else "auto"


@dataclasses.dataclass(frozen=True)
class Provider:
    name: str
    forward: Callable[..., tuple[Tensor, Tensor]] | None  # (x, weight) -> (y, rstd)
    backward: Callable[..., tuple[Tensor, Tensor]]  # (dy, x, weight, rstd) -> (dx, dweight)


def _quackish() -> Provider:
    from quackish.ops.rms_norm import rms_norm_backward, rms_norm_forward

    def forward(x, weight):
        y, _, rstd = rms_norm_forward(x, weight, eps=EPS, backend=BACKEND)
        return y, rstd

    def backward(dy, x, weight, rstd):
        return rms_norm_backward(dy, x, weight, rstd, backend=BACKEND)[:2]

    return Provider("quackish", forward, backward)


def with_config(changes: str) -> Provider:
    """quackish's backward with fields of the config that its heuristics choose replaced: "num_stages=4,threads=256"."""
    from quackish.configs.rms_norm import RmsNormBwdConfig, rms_norm_bwd_config
    from quackish.ops.rms_norm_plans import BackwardPlan, find_kernel

    values = _parse(changes, RmsNormBwdConfig)
    plans: dict[tuple, BackwardPlan] = {}

    def make_config(problem, gpu):
        return dataclasses.replace(rms_norm_bwd_config(problem, gpu), **values)

    class Plan(BackwardPlan):
        def find(self, problem):
            return find_kernel("rms_norm_bwd", make_config, problem, self.m, self.device, self.backend)

    def backward(dy, x, weight, rstd):
        key = (x.shape, x.dtype)
        if key not in plans:
            plans[key] = Plan(dy, x, weight, rstd, None, 0.0, x.dtype, None, weight.dtype, None, BACKEND)
        dx, _, dweight, _ = plans[key].run(dy, x, weight, rstd, None)
        return dx, dweight

    return Provider(f"quackish[{changes}]", None, backward)


def _parse(changes: str, config_class: type) -> dict[str, object]:
    """{"num_stages": 4} of "num_stages=4": values are ints, True, False, or strings."""
    fields = {field.name for field in dataclasses.fields(config_class)}
    values = {}
    for change in changes.split(","):
        name, _, value = change.partition("=")
        if name not in fields:
            raise ValueError(f"{changes}: {config_class.__name__} has no field {name!r}; it has {', '.join(fields)}")
        words = {"True": True, "False": False}
        values[name] = words[value] if value in words else int(value) if value.lstrip("-").isdigit() else value
    return values


def _quack() -> Provider:
    from quack.rmsnorm import rmsnorm_bwd, rmsnorm_fwd

    # rmsnorm_bwd is kernel, sum of the partial dweights and cast: what its autograd function runs.
    def forward(x, weight):
        y, _, rstd = rmsnorm_fwd(x, weight, eps=EPS, store_rstd=True)
        return y, rstd

    def backward(dy, x, weight, rstd):
        return rmsnorm_bwd(x, weight, dy, rstd)[:2]

    return Provider("quack", forward, backward)


def _liger_cute() -> Provider:
    # What liger_kernel.functional.rms_norm(..., impl="nvidia-cutedsl") runs; it has no name for the two halves alone.
    from liger_kernel.ops._nvidia_shared import CASTING_MODE_LLAMA
    from liger_kernel.ops.backends._cutedsl.rms_norm import _rms_norm_cutedsl_backward, _rms_norm_cutedsl_forward

    def forward(x, weight):
        y, _, _, rstd = _rms_norm_cutedsl_forward(x, weight, EPS, 0.0, CASTING_MODE_LLAMA)
        return y, rstd

    def backward(dy, x, weight, rstd):
        dx, dweight = _rms_norm_cutedsl_backward(dy, x, weight, rstd, False, CASTING_MODE_LLAMA)
        return dx, dweight.to(weight.dtype)

    return Provider("liger-cute", forward, backward)


def _liger_triton() -> Provider:
    from liger_kernel.ops._nvidia_shared import CASTING_MODE_LLAMA
    from liger_kernel.ops.rms_norm import rms_norm_backward, rms_norm_forward
    from liger_kernel.ops.utils import calculate_settings

    def forward(x, weight):
        y, _, rstd, *_ = rms_norm_forward(x, weight, EPS, 0.0, CASTING_MODE_LLAMA, None)
        return y, rstd

    def backward(dy, x, weight, rstd):
        # in_place=False, as liger_kernel.functional.rms_norm has it: True would overwrite dy and save a fill of dx.
        settings = calculate_settings(x.shape[-1])
        return rms_norm_backward(dy, x, weight, rstd, 0.0, CASTING_MODE_LLAMA, *settings, False, None)

    return Provider("liger-triton", forward, backward)


def _torch() -> Provider:
    def forward(x, weight):
        return torch.ops.aten._fused_rms_norm(x, [x.shape[-1]], weight, EPS)

    def backward(dy, x, weight, rstd):
        n = x.shape[-1]
        return torch.ops.aten._fused_rms_norm_backward(dy, x, [n], rstd.view(-1, 1), weight, [True, True])

    return Provider("torch", forward, backward)


# quackish comes first: importing QuACK patches the DSL's tensor classes, which must not reach what quackish compiles.
PROVIDERS: dict[str, Callable[[], Provider]] = {
    "quackish": _quackish,
    "quack": _quack,
    "liger-cute": _liger_cute,
    "liger-triton": _liger_triton,
    "torch": _torch,
}


def load(names: Sequence[str]) -> tuple[list[Provider], dict[str, str]]:
    """The providers of these names that can be imported, and for each other one the reason why not."""
    providers, missing = [], {}
    for name in names:
        try:
            providers.append(PROVIDERS[name]())
        except Exception as error:  # a peer that is broken here must not stop the others
            missing[name] = f"{type(error).__name__}: {error}"
    return providers, missing
