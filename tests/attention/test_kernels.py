"""Attention's kernels in the emulator and on a GPU: numbers, bits, skipped tiles, CUDA graphs, compilation."""

import contextlib

import pytest
import torch

import quackish
from quackish.device.kernel_device import KernelDevice, substitute
from quackish.device.kernel_for import kernel_for
from quackish.errors import UnsupportedError
from quackish.gpu import H200
from quackish.testing.errors import error, same_bits
from tests.attention.cases import (
    BF16,
    FP16,
    FP32,
    FP64,
    GRADS,
    LARGE,
    assert_large_right,
    assert_right,
    case,
    large_case,
    large_products,
    step,
    truth,
)
from tests.cuda_graphs import captured, no_synchronization
from tests.emulator_cases import HOPPER, QUICK, emulated
from tests.fake_strides import ChecksFakes
from tests.variants import one_per

attention = quackish.scaled_dot_product_attention
CPU = torch.device("cpu")

SLOW, ON_CUDA = pytest.param(QUICK, marks=pytest.mark.exhaustive), pytest.param("cuda", marks=pytest.mark.gpu)

# In the emulator ------------------------------------------------------------------------------------------------------


def launches(report):
    return [launch.kernel for launch in report.launches]


def test_bias_and_mask_emulated():
    """A bias with a gradient of its own for each head, and rows without keys."""
    args = case(1, 1, 70, 72, bias=(1, 1, 70, 72), mask=(1, 1, 70, 72))
    with emulated(QUICK) as report:
        got = step(args)
    of_backward = ["attention_bwd_rows", "attention_bwd_keys", "attention_bwd_product"]
    assert launches(report) == ["attention_mask", "attention_fwd", *of_backward]
    assert_right(got, truth(args))


@pytest.mark.exhaustive
def test_negative_bit_emulated():
    """A tensor that PyTorch negates when it is read: kernels read memory."""
    args = case(1, 1, 20, 24, 16)
    bias = torch.randn(1, 1, 20, 24, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)).conj().imag
    assert bias.is_neg()
    with emulated(QUICK):
        found = [attention(**args, attn_bias=b) for b in (bias, bias.resolve_neg())]
    assert torch.equal(*found)


UNREADABLE = {  # views of (2, 33, 2, 25), in the order (batch, head, row, column), that TMA cannot read
    "rows of 25": lambda t: t.transpose(1, 2)[..., 1:],
    "a head for all": lambda t: t[:, :, :1, :24].transpose(1, 2).expand(2, 2, 33, 24),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", UNREADABLE)
def test_copied_inputs_emulated(kind):
    """Compiled code relies on the strides of results and gradients."""
    args, generator = case(2, 2, 33, d=24, bias=(1, 2, 33, 33)), torch.Generator().manual_seed(2)
    for name in ("query", "key", "value"):
        t = torch.randn(2, 33, 2, 25, generator=generator).bfloat16()
        args[name] = UNREADABLE[kind](t).requires_grad_()
    with emulated(QUICK), ChecksFakes() as fakes:
        got = step(args)
    assert fakes.checked == ["attention_fwd", "attention_bwd"]
    assert_right(got, truth(args))


@pytest.mark.exhaustive
@pytest.mark.parametrize("where", HOPPER)
def test_broadcast_bias_emulated(where):
    args = case(2, 2, 20, 33, 40, kv_heads=1, bias=(1, 2, 20, 33), bias_dtype=FP32, dtype=FP16, softcap=2.0)
    with emulated(where) as report:
        got = step(args)
    assert launches(report)[-1] == "attention_bwd_bias"
    assert_right(got, truth(args), FP16)


def mask_of_keys_case(batch, heads, num_q, num_k, d, **options):
    """A mask of keys that leaves no keys to one batch, and all or no keys of some tiles to others."""
    args = case(batch, heads, num_q, num_k, d, mask=(batch, 1, 1, num_k), **options)
    keep = args["attn_mask"]
    keep[0], keep[1, ..., :128], keep[2, ..., :128] = False, False, True
    return args


BROADCAST = {  # a bias of all batches at d 32
    "mask of keys": lambda: mask_of_keys_case(3, 2, 70, 136, 32, bias=(1, 2, 70, 136)),
    "GQA, causal, softcap, fp32 bias of all heads": lambda: case(
        2, 2, 70, 200, 16, kv_heads=1, bias=(1, 1, 70, 200), bias_dtype=FP32, is_causal=True, softcap=2.0
    ),
    "causal, mask of keys": lambda: mask_of_keys_case(3, 2, 70, 136, 32, bias=(1, 2, 70, 136), is_causal=True),
    "wide, mask of keys": lambda: mask_of_keys_case(3, 1, 136, 184, 32, bias=(1, 1, 136, 184)),
    "wide, its own bias": lambda: case(1, 2, 136, 192, 32, bias=(1, 2, 136, 192)),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", BROADCAST)
def test_bias_of_all_batches_emulated(kind):
    args = BROADCAST[kind]()
    with emulated(QUICK) as report:
        got = step(args)
    assert "attention_order" not in launches(report)  # a mask of keys leaves equal work
    (forward,) = [launch for launch in report.launches if launch.kernel == "attention_fwd"]
    assert forward.block[0] == 128 * (4 if "wide" in kind else 3)  # a producer warp group, and three or two consumers
    assert_right(got, truth(args))


def padded_case(batch, num_q, num_k, **options):
    """A bias of all batches, of which the even ones and the last two have no keys, and others the first 20 or all."""
    args = case(batch, 1, num_q, num_k, 16, bias=(1, 1, num_q, num_k), mask=(batch, 1, 1, num_k), **options)
    keep = args["attn_mask"]
    keep[:] = False
    keep[1:-2:4, ..., :20] = keep[3:-2:4] = True
    return args


CLUSTERS = {  # dq and dbias in one kernel: CTAs of a cluster, and the call
    "two CTAs": (2, lambda: case(3, 1, 20, 200, 32, bias=(1, 1, 20, 200))),
    "a CTA": (1, lambda: case(3, 1, 70, 176, 24, bias=(1, 1, 70, 176))),
    "two CTAs, bias of all heads": (2, lambda: case(2, 2, 129, 336, 32, bias=(1, 1, 129, 336), dtype=FP16)),
    "four CTAs, mask of keys": (4, lambda: mask_of_keys_case(3, 1, 40, 456, 32, bias=(1, 1, 40, 456))),
    "three CTAs, which own a sum twice or more": (3, lambda: case(8, 1, 10, 528, 8, bias=(1, 1, 10, 528))),
    "two CTAs, more heads than a warp has lanes, without keys first and last": (2, lambda: padded_case(37, 20, 264)),
    "a CTA, padded": (1, lambda: padded_case(5, 70, 176)),
    "five CTAs, GQA": (5, lambda: case(2, 2, 20, 600, 16, kv_heads=1, bias=(1, 2, 20, 600))),
}


@pytest.mark.parametrize("kind", one_per(lambda kind: 0, CLUSTERS))
def test_clusters_emulated(kind):
    ctas, make = CLUSTERS[kind]
    args = make()
    with emulated(QUICK, sm_count=2 if "lanes" in kind else 5) as report:  # all heads in one part, or several
        got = step(args)
    assert launches(report)[-1] == "attention_bwd_queries_bias"
    assert report.launches[-1].cluster[0] == ctas
    assert_right(got, truth(args))


@pytest.mark.exhaustive
def test_zeros_of_heads_without_keys_have_one_sign():
    """Whatever other heads a CTA leaves out before."""
    with emulated(QUICK, sm_count=2):
        got = step(padded_case(5, 20, 136, scale=-0.2))
    for batch in (0, 2, 3, 4):  # 3 and 4 are the last two
        assert same_bits(got["query"][batch], torch.zeros_like(got["query"][batch]))


SMALL = {  # the whole backward in one kernel, and some forwards; one to three heads for each worker
    "windows": lambda: case(3, 2, 49, 49, 24, bias=(1, 2, 49, 49)),
    "own bias": lambda: case(1, 5, 64, 40, 32, bias=(1, 5, 64, 40)),
    "own bias, two blocks": lambda: case(1, 2, 100, 128, 32, bias=(1, 2, 100, 128)),
    "fp32 bias of all heads and batches, causal": lambda: case(
        2, 3, 100, 72, 16, bias=(1, 1, 100, 72), bias_dtype=FP32, is_causal=True
    ),
    "unaligned fp32 bias, two blocks": lambda: case(3, 1, 30, 101, 16, bias=(1, 1, 30, 101), bias_dtype=FP32),
    "mask alone": lambda: case(2, 2, 49, 60, 32, mask=(2, 1, 49, 60)),
    "mask and bias, window": lambda: case(2, 1, 66, 70, 32, bias=(2, 1, 66, 70), mask=(1, 1, 66, 70), window=(9, 20)),
    "mask of keys": lambda: mask_of_keys_case(3, 2, 64, 60, 32, bias=(3, 1, 64, 60)),
    "mask of keys, two blocks": lambda: mask_of_keys_case(3, 1, 70, 128, 32, bias=(1, 1, 70, 128)),
    "parts": lambda: case(9, 2, 20, 24, 8, bias=(1, 1, 20, 24)),
}


@pytest.mark.parametrize("kind", one_per(lambda kind: 0, SMALL))
def test_small_emulated(kind):
    args = SMALL[kind]()
    with emulated(QUICK) as report:
        got = step(args)
    num_q, num_k = args["query"].shape[2], args["key"].shape[2]
    has_forward = max(num_q, num_k) <= 64 or num_k % 8 != 0
    assert launches(report)[-1] == "attention_small_bwd"
    assert "attention_bwd_rows" not in launches(report)
    assert ("attention_small_fwd" in launches(report)) == has_forward
    assert ("attention_mask" in launches(report)) == ("attn_mask" in args and not has_forward)
    assert_right(got, truth(args))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "sizes, options, is_small",
    [
        ((1, 2, 64, 65, 32), {}, True),
        ((1, 2, 2, 128, 8), {}, True),
        ((1, 2, 128, 1, 32), {}, True),
        ((1, 2, 64, 129, 32), {}, False),
        ((1, 2, 64, 64, 40), {}, False),
        ((1, 2, 64, 64, 32), dict(softcap=2.0), False),
        ((1, 2, 64, 64, 32), dict(kv_heads=1), False),
    ],
)
def test_which_calls_are_small(sizes, options, is_small):
    """Without gradients of the bias and of lse, and of transposed tensors."""
    args = case(*sizes, bias=(1, 1, *sizes[2:4]), **options)
    for name in ("query", "key", "value"):
        args[name] = args[name].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    with emulated(QUICK) as report:
        out = attention(**args | dict(attn_bias=args["attn_bias"].detach()), backend="cute")
        got = torch.autograd.grad(out, [args[name] for name in GRADS[:3]], 2 * out)
    assert ("attention_small_bwd" in launches(report)) == is_small
    exact = {name: args[name].detach().double().requires_grad_() for name in GRADS}
    out = attention(**args | exact, backend="reference")
    want = torch.autograd.grad(out, [exact[name] for name in GRADS[:3]], 2 * out)
    for ours, right in zip(got, want, strict=True):
        assert error(ours, right).norm <= 2**-7


@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes, bias_heads", [((49, 49), 2), ((100, 100), 2), ((20, 256), 1)])
def test_a_head_does_not_depend_on_the_batch_emulated(sizes, bias_heads):
    """Small calls, and a bias of all heads whose gradient a kernel computes with dq."""
    args = case(4, 2, *sizes, d=32, bias=(1, bias_heads, *sizes), dtype=FP16)
    heads = slice(bias_heads - 1, 2)  # a bias of all heads stays broadcast
    one = {name: t[-1:, heads if t.shape[1] > 1 else slice(None)] for name, t in args.items()}
    one = {name: t.detach().requires_grad_(t.requires_grad) for name, t in one.items()}
    with emulated(QUICK):
        many, alone = step_without_cpu(args), step_without_cpu(one)
    for name in ("o", *GRADS[:3]):
        assert same_bits(many[name][-1:, heads], alone[name]), name


@pytest.mark.exhaustive
@pytest.mark.parametrize("bias", [(3, 2, 70, 136), None, (3, 1, 70, 141)])
def test_mask_of_keys_emulated(bias):
    """Its own bias, with dbias in memory; no bias; a broadcast bias that TMA cannot load."""
    args = mask_of_keys_case(3, 2, 70, bias[-1] if bias else 200, 64, bias=bias)
    with emulated(QUICK):
        assert_right(step(args), truth(args))


@pytest.mark.parametrize("where", [SLOW, ON_CUDA])
def test_large_scores(where):
    """Biases of -1e9 for all keys of the first tile, of 1e30 and others: as exact as scores in fp32.

    On a GPU a product and a sum may be one multiply-add, which rounds differently; in the emulator they are not.
    """
    device = "cpu" if where == QUICK else where
    args = case(1, 1, 64, 200, bias=(1, 1, 64, 200), bias_dtype=FP32, dtype=FP16, device=device)
    with torch.no_grad():
        bias = args["attn_bias"][0, 0]
        bias[:20, :130] -= 1e9
        bias[20:30, :130] -= 1e30
        bias[30:40] -= 1e9  # all keys of these rows
        bias[40:50, 150:] += 1e30
        bias[50:60, 140:] = torch.finfo(FP32).min
        want = attention(**args, backend="reference")
        with emulated(QUICK) if where == QUICK else contextlib.nullcontext():
            got = attention(**args, backend="cute")
    assert error(got, want.double()).within(norm=2**-10, worst=2**-7)


def device_in(where):
    return ("cuda", contextlib.nullcontext()) if where == "cuda" else ("cpu", emulated(where))


@pytest.mark.parametrize("where", [SLOW, ON_CUDA])
@pytest.mark.parametrize("kind", LARGE)
def test_large_biases(kind, where):
    """On a GPU a multiply and an add may be one instruction, which rounds once; in the emulator they are not."""
    device, context = device_in(where)
    args = large_case(device, **LARGE[kind])
    with context:
        assert_large_right(step(args), args)


@pytest.mark.parametrize("where", [SLOW, ON_CUDA])
@pytest.mark.parametrize("scale, d", [(2.0**12, 64), (-(2.0**12), 64), (-(2.0**12), 32)])
def test_large_products(scale, d, where):
    device, context = device_in(where)
    args = large_products(scale, d, device)
    with context:
        assert_large_right(step(args), args)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sizes",
    [
        (16, 16, 512, 512, 128),
        (2, 4, 1100, 700, 64),
        (33, 4, 384, 384, 32),
        (700, 4, 49, 49, 32),
        (300, 4, 128, 96, 24),
    ],
)
def test_calls_in_a_row(sizes):
    """Bits, where nothing waits between calls: launches start while the ones before them end."""
    batch, heads, num_q, num_k, d = sizes
    args = case(batch, heads, num_q, num_k, d, bias=(1, 1, num_q, num_k), device="cuda")
    mask = torch.rand(batch, 1, num_q, num_k, device="cuda") < 0.5
    do = torch.randn_like(args["query"])

    def call(names, **options):
        leaves = [args[name] for name in names]
        out = attention(**dict(zip(names, leaves, strict=True)), **options, backend="cute")
        return out.detach(), *torch.autograd.grad(out, leaves, do)

    biased, masked = lambda: call(GRADS), lambda: call(GRADS[:3], attn_mask=mask)
    for run in (biased, masked):
        want = run()
        for i in range(100):
            for _ in range(i % 4):
                biased()
                run()
            assert all(map(same_bits, run(), want)), i


@pytest.mark.exhaustive
def test_one_stage_emulated():
    args = case(1, 1, 70, 200, 128, bias=(1, 1, 70, 200))
    small = case(3, 3, 49, d=32, bias=(1, 3, 49, 49))
    kernels = ("forward", "backward_keys", "backward_product", "small_forward", "small_backward")
    with quackish.config(**{f"attention_{name}": dict(num_stages=1) for name in kernels}), emulated(QUICK):
        for one in (args, small):
            assert_right(step(one), truth(one))


@pytest.mark.exhaustive
def test_nan_in_a_skipped_tile():
    """Causal: NaN in keys of tiles past the last row reaches nothing."""
    args = case(1, 1, 64, 300, bias=(1, 1, 64, 300), is_causal=True)
    want = truth(args)
    with torch.no_grad():
        for name in ("key", "value"):
            args[name][:, :, 128:] = torch.nan
        args["attn_bias"][..., 128:] = torch.nan
    with emulated(QUICK):
        got = step(args)
    assert_right(got, want)


# Which calls have kernels ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, change, reason",
    [
        (dict(dtype=FP32), {}, "torch.float32; supported: torch.bfloat16, torch.float16"),
        (dict(d=136), {}, "a head dimension of 136; expected a multiple of 8 up to 128"),
        (dict(d=20), {}, "a head dimension of 20; expected a multiple of 8 up to 128"),
        ({}, dict(value=torch.zeros(1, 2, 70, 32, dtype=BF16)), "head dimensions 64 of query and 32 of value"),
        (dict(bias_dtype=FP64), {}, "a bias of torch.float64"),
        (dict(num_q=1, num_k=70), {}, "a single query"),
    ],
)
def test_why_no_kernel(fields, change, reason):
    num_q = fields.get("num_q", 70)
    args = case(bias=(1, 2, num_q, 70), **fields) | change
    with substitute("cpu", KernelDevice(H200, kernel_for)), pytest.raises(UnsupportedError, match=reason):
        attention(**args, backend="cute")


# On a GPU -------------------------------------------------------------------------------------------------------------

ON_GPU = {
    **{f"length {n}": dict(num_q=max(n, 2), num_k=n, bias=(2, 2, max(n, 2), n)) for n in (1, 63, 64, 65, 127, 129)},
    "Lq != Lk, GQA": dict(heads=4, kv_heads=2, num_q=300, num_k=520, bias=(1, 4, 300, 520)),
    "causal, GQA": dict(heads=4, kv_heads=2, num_q=300, num_k=520, bias=(2, 4, 300, 520), is_causal=True),
    "d 128, mask": dict(num_q=512, d=128, bias=(2, 2, 512, 512), mask=(2, 1, 512, 512)),
    "d 32, fp32 bias of all heads": dict(num_q=200, num_k=264, d=32, bias=(1, 1, 200, 264), bias_dtype=FP32),
    "window, softcap": dict(num_q=512, d=96, bias=(2, 2, 512, 512), window=(100, 20), softcap=2.0),
    "causal, fp32 bias": dict(num_q=512, bias=(2, 2, 512, 512), bias_dtype=FP32, is_causal=True),
    "mask alone": dict(num_q=400, mask=(1, 1, 400, 400)),
    "mask of keys": dict(heads=4, kv_heads=1, num_q=70, num_k=1000, d=40, mask=(2, 1, 1, 1000)),
    "window alone": dict(num_q=600, window=(64, 0)),
    "bias of all batches": dict(batch=3, num_q=300, num_k=520, d=32, bias=(1, 2, 300, 520), mask=(3, 1, 1, 520)),
    "small, bias of all batches": dict(batch=5, num_q=49, d=32, bias=(1, 2, 49, 49)),
    "small, bias of all heads": dict(heads=5, num_q=100, num_k=72, d=24, bias=(2, 1, 100, 72), is_causal=True),
    "small, own bias": dict(num_q=30, num_k=128, d=32, bias=(2, 2, 30, 128)),
    "small, own fp32 bias, mask of keys": dict(
        num_q=128, d=16, bias=(2, 2, 128, 128), bias_dtype=FP32, mask=(2, 1, 1, 128)
    ),
    "small, mask": dict(num_q=64, d=32, mask=(1, 2, 64, 64)),
    "small, parts": dict(batch=300, heads=3, num_q=64, d=32, bias=(1, 3, 64, 64)),
    "clusters": dict(batch=40, heads=4, num_q=300, num_k=384, d=32, bias=(1, 4, 300, 384)),
    "clusters, mask of keys": dict(batch=9, num_q=200, num_k=768, d=32, bias=(1, 1, 200, 768), mask=(9, 1, 1, 768)),
    "five CTAs": dict(batch=7, num_q=260, num_k=640, d=24, bias=(1, 2, 260, 640)),
    "small, window": dict(num_q=127, d=32, bias=(1, 1, 127, 127), window=(20, 5)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ON_GPU)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_numbers_and_bits_on_gpu(kind, dtype):
    args = case(**dict(batch=2, dtype=dtype, device="cuda") | ON_GPU[kind])
    got = step(args)
    assert_right(got, truth(args), dtype)
    for _ in range(19):
        again = step(args)
        assert all(same_bits(again[name], t) for name, t in got.items())


@pytest.mark.gpu
def test_a_row_does_not_depend_on_the_batch_on_gpu():
    args = case(3, 4, 200, 264, bias=(3, 4, 200, 264), mask=(3, 4, 200, 264), device="cuda")
    one = {name: t[1:2, 2:3].detach().requires_grad_(t.requires_grad) for name, t in args.items()}
    with torch.no_grad():
        assert same_bits(attention(**args, backend="cute")[1:2, 2:3], attention(**one, backend="cute"))


@pytest.mark.gpu
def test_transposed_tensors_are_read_in_place_on_gpu():
    args = case(2, 3, 150, bias=(2, 3, 150, 150), device="cuda")
    want = step(args)
    for name in ("query", "key", "value"):
        args[name] = args[name].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    got = step(args)
    assert got["o"].stride() == args["query"].stride()
    assert all(same_bits(got[name], t) for name, t in want.items())


@pytest.mark.gpu
def test_no_batch_on_gpu():
    args = case(0, 2, 65, bias=(1, 2, 65, 65), device="cuda")
    assert not step(args, backend="auto")["attn_bias"].any()


@pytest.mark.gpu
def test_graph_with_another_mask_on_gpu():
    args = case(2, 2, 129, 200, bias=(1, 2, 129, 200), mask=(2, 1, 129, 200), device="cuda")
    graph, got = captured(lambda: step_without_cpu(args))
    for seed in range(3):
        torch.manual_seed(seed)
        with torch.no_grad():
            args["attn_mask"].copy_(torch.rand(2, 1, 129, 200) < 0.3)
            args["attn_bias"].copy_(torch.randn(1, 2, 129, 200))
        graph.replay()
        for name, t in step_without_cpu(args).items():
            assert same_bits(got[name], t), name


def step_without_cpu(args):
    """As `step`, without tensors on the CPU."""
    out = attention(**args, backend="cute")
    names = [name for name in ("query", "key", "value", "attn_bias") if name in args]
    grads = torch.autograd.grad(out, [args[name] for name in names], torch.ones_like(out))
    return {"o": out.detach(), **dict(zip(names, grads, strict=True))}


@pytest.mark.gpu
def test_nothing_synchronizes_on_gpu():
    for bias in ((2, 2, 129, 129), (1, 2, 129, 129)):
        args = case(2, 2, 129, bias=bias, mask=(2, 1, 129, 129), device="cuda")
        step_without_cpu(args)  # compiles
        with no_synchronization():
            step_without_cpu(args)


@pytest.mark.gpu
def test_compiles_for_two_lengths_on_gpu():
    torch.compiler.reset()
    compiled = torch.compile(attention, fullgraph=True, dynamic=True)
    for length in (129, 200):
        args = case(2, 2, length, bias=(1, 2, length, length), mask=(2, 1, length, length), device="cuda")
        got, want = (step(args, function) for function in (compiled, attention))
        assert all(same_bits(got[name], t) for name, t in want.items())
