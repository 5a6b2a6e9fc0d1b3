"""The GEMMs of linear cross entropy: their description."""

from quackish.device.spec import KernelSpec, on_blackwell, on_hopper
from quackish.device.work import Sizes, Work, bytes_of, ceil_div, returns_at_once
from quackish.kernels.gemm.problem import SOFTMAX_TILE_N, GemmConfig, GemmProblem, gemm_config, gemm_why_illegal
from quackish.kernels.gemm.sm100_config import GemmSm100Config, gemm_sm100_config, gemm_sm100_why_illegal


def _work(p: GemmProblem, s: Sizes) -> Work:
    m, n, k = s["m"], s["n"], s["k"]
    if p.recompute_flagged:
        return returns_at_once("returns at once if no row was flagged")
    read = (m * k + n * k) * bytes_of(p.dtype)
    written = m * n * bytes_of(p.out_dtype)
    if p.accumulate:
        read += written
    if p.epilogue == "softmax":
        # sums per row and tile of Hopper; Blackwell's are wider
        written += m * ceil_div(n, SOFTMAX_TILE_N["sm_90"]) * 4 * (1 + p.smoothing + p.return_stats)
    if p.rounding_residual:
        written += min(m, k) * n * 2  # for at most min(m, k) rows
    return Work(read, written, 2 * m * n * k)


_NAMES = {"softmax": "lce_logits", "dlogits": "lce_dlogits", "rows": "lce_dx", "store": "lce_dx"}


def _public_name(problem: GemmProblem) -> str:
    return "lce_dw" if problem.live == "k" else _NAMES[problem.epilogue]


_B = "bfloat16"
GEMM_SPEC = KernelSpec(
    name="lce_gemm",
    operation="linear_cross_entropy",
    problem=GemmProblem,
    on={
        **on_hopper(
            "quackish.kernels.gemm.sm90:GemmSm90",
            GemmConfig,
            gemm_config,
            gemm_why_illegal,
            "quackish.ops.linear_cross_entropy.tuning:GEMM",
        ),
        **on_blackwell(
            "quackish.kernels.gemm.sm100:GemmSm100",
            GemmSm100Config,
            gemm_sm100_config,
            gemm_sm100_why_illegal,
            "quackish.ops.linear_cross_entropy.tuning:GEMM_SM100",
        ),
    },
    sizes=("m", "n", "k"),
    work=_work,
    samples=[
        GemmProblem("softmax", _B, _B),
        GemmProblem("dlogits", _B, _B, smoothing=True),
        GemmProblem("rows", _B, _B, b_major="n"),
        GemmProblem("store", _B, "float32", live="k"),
    ],
    cublas="quackish.ops.linear_cross_entropy.tuning:cublas",
    public_name=_public_name,
    public_names=("lce_logits", "lce_dlogits", "lce_dx", "lce_dw"),
)
