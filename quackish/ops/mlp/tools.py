"""The MLPs of a mixture of experts and of a dense model for the tools."""

import itertools
from typing import get_args

from quackish.literals import Activation
from quackish.ops.mlp.gemm_problems import GEMM_SPEC
from quackish.ops.shared.for_tools import Args, Imported, Maker, Operation, Options, SelfTest, flag, no_grad, value
from quackish.ops.shared.models import Model

_SHARES = (8, 0, 4, 2, 1)  # shares of the rows; one of five groups is empty
_dry_run = Imported("quackish.ops.mlp.dry_run", "dry_run")


def _weights(new: Maker, h: int, i: int, experts: tuple[int, ...], options: Options) -> Args:
    """The weights, and the biases and buffers that are asked for. Products have standard deviation 1.

    experts: their number, or nothing for a dense model.
    """
    from quackish.ops.mlp.reference import GATED

    gated = options.get("activation", "swiglu") in GATED
    width = i * (1 + gated)
    args = {"w1": new.rows(*experts, i if "w3" in options else width, h, seed=1).mul_(h**-0.5)}
    args["w2"] = new.rows(*experts, h, i, seed=2).mul_(i**-0.5)
    if "w3" in options:
        args["w3"] = new.rows(*experts, i, h, seed=5).mul_(h**-0.5)
    if "grad_weight_out" in options:
        args |= {f"grad_{name}_out": new.zeros(*w.shape) for name, w in args.items()}
    if "bias" in options:
        of_two = "w3" in options and not experts  # mlp has a bias per weight
        args["b1"], args["b2"] = (new.rows(*experts, n, seed=3) for n in (i if of_two else width, h))
        args |= {"b3": new.rows(i, seed=6)} if of_two else {}
    return args


def _make_grouped(new: Maker, shape: tuple[int, ...], options: Options) -> Args:
    """The last rows are in no group."""
    import torch

    rows, h, i, experts = shape
    shares = [_SHARES[expert % len(_SHARES)] for expert in range(experts)]
    ends = [rows * end // (sum(shares) + 1) for end in itertools.accumulate(shares)]
    offs = torch.tensor(ends, dtype=torch.int32, device=new.device)
    return {"x": new.rows(rows, h, seed=0), "offs": offs, **_weights(new, h, i, (experts,), options)}


GROUPED_MLP = Operation(
    name="grouped_mlp",
    title="Grouped MLP",
    function=Imported("quackish.ops.mlp.api", "grouped_mlp"),
    results=("y",),
    leaves=("x", "w1", "w2", "w3", "b1", "b2", "scales"),
    spec=GEMM_SPEC,
    dims=("R", "H", "I", "E"),
    example="131072x2048x768x128",
    small=(64, 64, 32, 4),
    model_shapes=Model.expert_shapes,
    make=_make_grouped,
    options={
        "bias": flag(None, "with a bias"),
        "activation": value("activation", ", ".join(get_args(Activation)), example="geglu"),
        "w3": flag(None, "gate and up projection are separate tensors"),
        "scales": flag(
            "scales", "with fp32 row scales", lambda new, r, *_: new.rows(r, seed=4, dtype="float32").sigmoid()
        ),
        "recompute": flag("recompute", "recompute the preactivation in backward"),
        "grad_weight_out": flag(None, "add the weight gradients to buffers"),
        "no_grad": no_grad(),
    },
    dry_run=_dry_run,
    self_tests={
        "": SelfTest((700, 256, 192, 5), dict(scales=True)),
        "two weights and biases": SelfTest(
            (700, 128, 200, 5), dict(w3=True, bias=True, scales=True, activation="clamped_swiglu")
        ),
        "buffers and recompute": SelfTest(
            (700, 256, 128, 5), dict(grad_weight_out=True, activation="geglu", recompute=True), "float16"
        ),
        "deep": SelfTest((300, 512, 4096, 5), dict(scales=True, activation="relu2")),
    },
    large_tests=[SelfTest((32_768, 2048, 768, 32), dict(scales=True))],
)


def _make_moe(new: Maker, shape: tuple[int, ...], options: Options) -> Args:
    """Some choices are dropped."""
    import torch

    tokens, h, i, experts, k = shape
    index = (torch.arange(tokens * k, device=new.device) * 7 % (experts + 1)).view(tokens, k)
    args = {"x": new.rows(tokens, h, seed=0), "top_k_index": index}
    args["top_k_weights"] = new.rows(tokens, k, seed=3).abs()
    return args | _weights(new, h, i, (experts,), options)


MOE_MLP = Operation(
    name="moe_mlp",
    title="Mixture of experts",
    function=Imported("quackish.ops.mlp.moe", "moe_mlp"),
    results=("out",),
    leaves=("x", "top_k_weights", "w1", "w2", "w3", "b1", "b2"),
    spec=GEMM_SPEC,
    dims=("T", "H", "I", "E", "K"),
    example="16384x2048x768x128x8",
    small=(32, 64, 32, 4, 2),
    model_shapes=Model.moe_shapes,
    make=_make_moe,
    options={name: option for name, option in GROUPED_MLP.options.items() if name != "scales"},
    has_dry_run=False,  # PyTorch sorts the choices, which the dry run of launches does not see
    self_tests={"": SelfTest((300, 256, 192, 8, 2))},
)


def _make_mlp(new: Maker, shape: tuple[int, ...], options: Options) -> Args:
    rows, h, i = shape
    return {"x": new.rows(rows, h, seed=0), **_weights(new, h, i, (), options)}


MLP = Operation(
    name="mlp",
    title="MLP",
    function=Imported("quackish.ops.mlp.dense", "mlp"),
    results=("y",),
    leaves=("x", "w1", "w2", "w3", "b1", "b3", "b2", "residual"),
    spec=GEMM_SPEC,
    dims=("M", "H", "I"),
    example="16384x2048x8192",
    small=(200, 64, 48),
    model_shapes=Model.mlp_shapes,
    make=_make_mlp,
    options={name: option for name, option in GROUPED_MLP.options.items() if name != "scales"}
    | {"add_residual": flag("residual", "add a residual to the result", lambda new, m, h, i: new.rows(m, h, seed=7))},
    dry_run=_dry_run,
    self_tests={
        "": SelfTest((700, 256, 192)),
        "everything": SelfTest((300, 128, 200), dict(w3=True, bias=True, add_residual=True, activation="geglu_erf")),
    },
)
FUNCTIONS = GROUPED_MLP, MOE_MLP, MLP
