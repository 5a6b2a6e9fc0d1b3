"""grouped_mlp and mlp on a GPU: many tiles, more than 2^31 elements, long sums, synchronization, CUDA graphs."""

import pytest
import torch

from quackish import grouped_mlp, grouped_mm, mlp
from quackish.device.kernel_device import device_of
from quackish.ops.mlp.kernel_steps import steps_of
from quackish.testing.errors import error, same_bits
from tests.cuda_graphs import captured, no_synchronization
from tests.mlp import test_dense as dense
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


# mlp ------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("rows, h, i", [(1000, 520, 1032), (4099, 1024, 4104), (700, 64, 2056)])
def test_mlp_of_many_tiles(rows, h, i):
    args, dy = dense.dense(rows, h, i, split=True, dtype=BF16, device="cuda")
    got = dense.step(mlp, args, dy, backend="cute")
    dense.assert_close(got, args, dy)
    for _ in range(20):
        assert_same(dense.step(mlp, args, dy, backend="cute"), got)
    part = {n: t.detach()[7:300].requires_grad_() if n in ("x", "residual") else t for n, t in args.items()}
    some = dense.step(mlp, part, dy[7:300], backend="cute")
    assert all(same_bits(some[name], got[name][7:300]) for name in ("y", "x"))


@pytest.mark.gpu
def test_mlp_of_more_than_2_31_elements():
    """The last rows' results are those of a call with these rows alone."""
    h, i, rows = 64, 3648, 300_065
    args, dy = dense.dense(65, h, i, biases=False, residual=True, dtype=BF16, device="cuda")
    assert 2 * i * rows > 2**31
    tail = dense.step(mlp, args, dy, backend="cute")

    def below_zeros(t):
        return torch.cat([t.new_zeros(rows - 65, h), t.detach()])

    many = {n: below_zeros(t).requires_grad_() if n in ("x", "residual") else t for n, t in args.items()}
    got = dense.step(mlp, many, below_zeros(dy), backend="cute")
    for name in ("y", "x", "residual"):
        assert same_bits(got[name][-65:], tail[name]), name
        assert not got[name][:-65].count_nonzero()
    for name in ("w1", "w2"):  # rows of zeros add nothing; the order of the sum is another one
        assert error(got[name], tail[name].double()).norm <= 1e-2, name


@pytest.mark.gpu
def test_mlp_in_a_cuda_graph_and_without_synchronization():
    args, dy = dense.dense(lead=(7, 10), split=True, dtype=BF16, device="cuda")
    out = torch.zeros_like(args["w1"], dtype=FP32)

    def run():
        return dense.step(mlp, args, dy, backend="cute")

    def run_into_a_buffer():
        mlp(**args, grad_w1_out=out, recompute=True, backend="cute").backward(dy)

    run(), run_into_a_buffer()  # compiles
    with no_synchronization():
        run(), run_into_a_buffer()
    graph, results = captured(run)
    for seed in range(2):
        with torch.no_grad():
            args["x"].normal_(generator=torch.Generator("cuda").manual_seed(seed))
        graph.replay()
        assert_same({name: t.clone() for name, t in results.items()}, run())
