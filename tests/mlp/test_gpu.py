"""grouped_mlp on a GPU: many tiles, more than 2^31 elements, long sums, synchronization, CUDA graphs."""

import pytest
import torch

from quackish import grouped_mlp, grouped_mm
from quackish.device.kernel_device import device_of
from quackish.ops.mlp.kernel_steps import steps_of
from quackish.testing.errors import error, same_bits
from tests.mlp.cases import BF16, FP32, MANY, SIZES, assert_same, experts, frozen, in_fp64, make, mm_case, step


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["kernels-cuda"], indirect=True)
@pytest.mark.parametrize("sizes, h, i", MANY.values(), ids=MANY)
def test_many_tiles_steps_and_groups(sizes, h, i, where):
    """Clusters with several tiles, odd numbers of them too, and the config for deep products."""
    case, dy = make(sizes, h, i, device=where.device, dtype=BF16)
    want = {**step(experts, in_fp64(case), dy.double(), kept=BF16), "y": experts(**in_fp64(case))}
    got = where.run(case, dy)
    for name, truth in want.items():
        assert error(got[name], truth).norm <= 0.5 * torch.finfo(BF16).eps, name
    for _ in range(20):
        assert_same(where.run(case, dy), got)


@pytest.mark.gpu
def test_more_than_2_31_elements():
    """The last group's results are those of a call with that group alone."""
    h, i, sizes = 64, 3648, (300_000, 65)
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    x, dy, w1, w2 = normal(sum(sizes), h), normal(sum(sizes), h), normal(2, 2 * i, h), normal(2, h, i)
    scales = torch.rand(sum(sizes), generator=generator, device="cuda")
    assert 2 * i * x.shape[0] > 2**31

    def run(first_group):
        rows = slice(sum(sizes[:first_group]), None)
        leaves = [t.detach().requires_grad_() for t in (x[rows], w1[first_group:], w2[first_group:], scales[rows])]
        offs = torch.tensor(sizes[first_group:], device="cuda").cumsum(0, dtype=torch.int32)
        y = grouped_mlp(*leaves[:3], offs, scales=leaves[3], backend="cute")
        return y.detach(), *torch.autograd.grad(y, leaves, dy[rows])

    for name, got, want in zip(("y", "x", "w1", "w2", "scales"), run(0), run(1), strict=True):
        got = got[-want.shape[0] :]
        # PyTorch adds the parts of a scale's gradient, in an order that may depend on the number of rows.
        assert error(got, want.double()).norm <= 1e-5 if name == "scales" else same_bits(got, want), name


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [2**14, 2**20, 2**24])
def test_long_sums_stay_within_the_stated_bound(rows):
    """A weight gradient is one chain of fp32 sums: docs/internals/grouped_mlp.md."""
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.rand(rows, 64, generator=generator, device="cuda").bfloat16() for _ in range(2))
    offs = torch.tensor([rows], dtype=torch.int32, device="cuda")
    steps = steps_of(device_of(torch.device("cuda", torch.cuda.current_device())))
    got = steps.weight_gradient(a, b, offs, FP32)[0].double()
    truth = sum(x.double().T @ y.double() for x, y in zip(a.split(2**20), b.split(2**20), strict=True))
    worst = ((got - truth).abs() / truth).max()
    print(f"{rows} rows: {worst:.2e}")
    assert worst <= rows * 2.0**-27 + 2.0**-20


on_gpu_paths = pytest.mark.parametrize("where", ["portable-cuda", "kernels-cuda"], indirect=True)


@pytest.mark.gpu
@on_gpu_paths
def test_nothing_synchronizes(where):
    for dtype in where.dtypes:
        case, dy = make(h=72, i=88, dtype=dtype, device="cuda")
        a, b, offs = mm_case("2d2d", dtype, "cuda", m=72, k=88, n=40)
        outs = {f"grad_{name}_out": torch.zeros_like(case[name]) for name in ("w1", "w2")}
        where.run(case, dy, **outs)  # compiles
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            where.run(case, dy)
            where.run(case, dy, **outs)
            torch.autograd.grad(grouped_mm(a, b, offs, backend=where.backend).sum(), (a, b))
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@on_gpu_paths
def test_a_cuda_graph_with_other_offsets(where):
    case, dy = make(h=72, i=88, dtype=where.dtypes[-1], device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        where.run(case, dy)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = where.run(case, dy)
    for sizes in ((448, *[0] * 8), [0] * 9, [0] * 8 + [455], (1, 127, 128, 129, 0, 2, 40, 3, 4), SIZES):
        case["offs"].copy_(torch.tensor(sizes).cumsum(0, dtype=torch.int32))
        frozen(case)["x"].normal_()
        graph.replay()
        replayed = {name: t.clone() for name, t in static.items()}
        assert_same(where.run(case, dy), replayed)
    case["offs"][2] = 1 << 30
    graph.replay()
    assert all(t.isnan().all() for t in static.values())
