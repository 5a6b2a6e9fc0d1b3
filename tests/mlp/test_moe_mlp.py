"""moe_mlp, from a router's choice to the sum of the experts' results: against a loop over tokens, in fp64."""

import contextlib
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import quackish
from quackish.device.kernel_device import KernelDevice, device_of, substitute
from quackish.device.kernel_for import CompiledKernel
from quackish.errors import UnsupportedError
from quackish.gpu import B200, H200
from quackish.ops.mlp.kernel_steps import steps_of
from quackish.ops.mlp.problems import TokenRowsProblem, token_rows_config
from quackish.testing import assert_close_to_fp64, assert_deterministic
from quackish.testing.errors import same_bits
from tests import emulated_kernels
from tests.emulator_cases import BLACKWELL, HOPPER, emulated
from tests.variants import check_compiles, one_per

T, K, E, H, I = 40, 3, 5, 24, 16  # noqa: E741
exhaustive_settings = [pytest.param(name, marks=pytest.mark.exhaustive) for name in (HOPPER[1], BLACKWELL[0])]
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def make(dtype=torch.float64, device="cpu", index_dtype=torch.int64, tokens=T):
    """x, top_k_index, top_k_weights, w1, w2. Expert 1 gets no token, and some choices are dropped."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape, scale=1.0):
        t = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
        return t.to(device, dtype).requires_grad_()

    index = torch.rand(tokens, E, generator=generator).topk(K).indices
    index[index == 1] = 3  # twice in some tokens
    index[::7, 0], index[3::7, 2], index[5::11] = E, -1, E + 4
    weights = torch.rand(tokens, K, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()
    index = index.to(device, index_dtype)
    return normal(tokens, H), index, weights, normal(E, 2 * I, H, scale=0.3), normal(E, H, I, scale=I**-0.5)


def by_loop(x, index, weights, w1, w2, b1=None, b2=None):
    """The formula, token by token."""
    sums = []
    for token, chosen, weight in zip(x, index.tolist(), weights, strict=True):
        total = torch.zeros_like(token)
        for g, w in zip(chosen, weight, strict=True):
            if 0 <= g < len(w2):
                gate, up = (w1[g] @ token + (0 if b1 is None else b1[g])).chunk(2)
                total = total + w * (w2[g] @ (F.silu(gate) * up) + (0 if b2 is None else b2[g]))
        sums.append(total)
    return torch.stack(sums)


@pytest.fixture
def launched(poisoned):
    """Runs CPU tensors on emulated kernels; returns the names of those launched."""
    names = []

    def kernel_for(problem, gpu):
        launch, config = emulated_kernels.kernel_for(problem, gpu)
        return CompiledKernel(lambda *args: (names.append(problem.spec.name), launch(*args)), config)

    with substitute("cpu", KernelDevice(H200, kernel_for)):
        yield names


def gradients(inputs, **options):
    """(out, the gradients of x, weights, w1 and w2)"""
    out = quackish.moe_mlp(*inputs, **options)
    dy = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)
    return out, *torch.autograd.grad(out, [t for t in inputs if t.requires_grad], dy)


@on_devices
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("dtype, index_dtype", [(torch.float64, torch.int64), (torch.bfloat16, torch.int32)])
def test_against_a_loop_over_tokens(dtype, index_dtype, biases, device):
    inputs = make(dtype, device, index_dtype)
    if biases:
        generator = torch.Generator().manual_seed(1)
        shapes = (E, 2 * I), (E, H)
        inputs += tuple(torch.randn(s, generator=generator).to(device, dtype).requires_grad_() for s in shapes)

    def function(x, index, weights, w1, w2, b1=None, b2=None):
        return quackish.moe_mlp(x, index, weights, w1, w2, b1=b1, b2=b2)

    assert_close_to_fp64(function, by_loop, *inputs, slack=8.0)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_device_other_than_the_current_one():
    want = gradients(make(torch.bfloat16, "cuda:0"), backend="cute")
    inputs = make(torch.bfloat16, "cuda:1")
    torch.cuda.synchronize("cuda:1")  # the copies are on its default stream
    with torch.cuda.stream(torch.cuda.Stream("cuda:1")), torch.cuda.device(0):
        got = gradients(inputs, backend="cute")
    torch.cuda.synchronize("cuda:1")
    assert torch.cuda.current_device() == 0
    assert all(t.device == torch.device("cuda:1") for t in got)
    assert all(same_bits(a.cpu(), b.cpu()) for a, b in zip(got, want, strict=True))


def test_leading_dimensions_and_autocast():
    x, index, weights, w1, w2 = make(torch.float32)
    want = quackish.moe_mlp(x, index, weights, w1, w2, recompute=True)
    batched = [t.unflatten(0, (2, -1)) for t in (x, index, weights)]
    assert same_bits(quackish.moe_mlp(*batched, w1, w2), want.unflatten(0, (2, -1)))
    assert quackish.moe_mlp(x[:0], index[:0], weights[:0], w1, w2).shape == (0, H)
    with torch.autocast("cpu", torch.bfloat16):
        got = quackish.moe_mlp(x, index, weights, w1, w2)
    want = quackish.moe_mlp(x.bfloat16(), index, weights, w1.bfloat16(), w2.bfloat16())
    assert same_bits(got, want)
    grads = [torch.autograd.grad(out.sum(), (x, weights, w1, w2)) for out in (got, want)]
    assert all(map(same_bits, *grads))


@pytest.mark.parametrize("bias", [False, True])
def test_a_dropped_choice_reaches_nothing(bias):
    x, index, weights, w1, w2 = make()
    b2 = torch.ones(E, H, dtype=torch.float64) if bias else None
    out = quackish.moe_mlp(x, index, weights, w1, w2, b2=b2)
    want = torch.autograd.grad(out.sum(), (x, weights, w1, w2))
    is_dropped = (index < 0) | (index >= E)
    bad = weights.detach().masked_fill(is_dropped, torch.nan).requires_grad_()
    again = quackish.moe_mlp(x, index, bad, w1, w2, b2=b2)
    got = torch.autograd.grad(again.sum(), (x, bad, w1, w2))
    assert same_bits(again, out)
    assert all(map(same_bits, got, want))
    assert got[1][is_dropped].count_nonzero() == 0
    assert got[1][~is_dropped].all()
    without_any = is_dropped.all(1)
    assert without_any.any()
    assert got[0][without_any].count_nonzero() == 0


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.seen.add(op.overloadpacket.__name__)
        return op(*args, **kwargs or {})


@on_devices
def test_the_same_bits_on_every_run(device):
    x, index, weights, w1, w2 = make(torch.bfloat16, device, tokens=40 if device == "cpu" else 4096)

    def call(x, weights, w1, w2):
        return quackish.moe_mlp(x, index, weights, w1, w2)

    assert_deterministic(call, x, weights, w1, w2, runs=20)
    # No gradient of a gather of torch's own: index_add adds with atomics, index_put sorts the indices again.
    with Names() as names:
        call(x, weights, w1, w2).sum().backward()
    assert "grouped_mlp_bwd" in names.seen
    assert not {name for name in names.seen if "index_" in name or "scatter_add" in name} - {"index_select"}


@pytest.mark.parametrize("experts", [5, 2**15 - 1, 2**15])  # sorted as int16 below 2**15
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_choices_far_outside_the_experts_are_dropped(dtype, experts):
    x, index, weights, _, _ = (t.detach() for t in make(torch.bfloat16, index_dtype=dtype))
    w1, w2 = torch.randn(experts, 2, H, dtype=torch.bfloat16), torch.randn(experts, H, 1, dtype=torch.bfloat16)
    limits = torch.iinfo(dtype)
    far = torch.tensor([limits.min, limits.max, 2**16 + 1, 1 - 2**16, -(2**15), experts], dtype=dtype)
    index[: len(far), 0] = -1
    index[-1, -1] = experts - 1
    want = quackish.moe_mlp(x, index, weights, w1, w2)
    index[: len(far), 0] = far
    assert same_bits(quackish.moe_mlp(x, index, weights, w1, w2), want)


def test_kernels_against_a_loop_over_tokens(launched):
    assert_close_to_fp64(quackish.moe_mlp, by_loop, *make(torch.bfloat16), slack=8.0)
    assert launched.count("token_rows") == 4 * launched.count("grouped_gemm") // 6


@pytest.mark.parametrize("setting", exhaustive_settings)  # each kernel has emulated tests of its own
def test_a_loop_over_tokens_in_the_emulator(setting):
    inputs = make(torch.bfloat16)
    with emulated(setting) as report:
        assert_close_to_fp64(quackish.moe_mlp, by_loop, *inputs, slack=8.0)
    names = [launch.kernel for launch in report.launches]
    assert names.count("token_rows") == 4 * names.count("grouped_gemm") // 6 > 0


def test_saved_tensors_of_other_strides(launched):
    inputs = make(torch.bfloat16)
    want = gradients(inputs)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.mT.contiguous() if t.dim() == 2 else t, _columns):
        assert all(map(same_bits, gradients(inputs), want))


def _columns(t):
    return t.mT if t.dim() == 2 else t


def test_freed_tokens_are_refused(launched):
    x, *others = make(torch.bfloat16)
    x = x.detach().clone()
    x.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"moe_mlp: x has shape \(40, 24\) but no memory"):
        quackish.moe_mlp(x, *others)


def test_second_derivatives_are_refused():
    """The weights' gradient, which with b2 does not pass through grouped_mlp."""
    inputs = [t if t.dim() == 2 and t.shape[1] == K else t.detach() for t in make()]
    out = quackish.moe_mlp(*inputs, b2=torch.ones(E, H, dtype=torch.float64))
    with pytest.raises(RuntimeError, match=r"moe_mlp: create_graph=True \(double backward\) is not supported"):
        torch.autograd.grad(out.sum(), inputs[2], create_graph=True)
    with pytest.raises(RuntimeError, match=r"moe_mlp: vmap over gradients"):
        torch.autograd.grad(out, inputs[2], torch.ones(2, *out.shape, dtype=out.dtype), is_grads_batched=True)


def test_compiles_with_a_number_of_tokens_that_depends_on_data():
    x, index, weights, w1, w2 = make(torch.bfloat16)

    def function(chosen):
        tokens = chosen.nonzero()[:, 0]
        return quackish.moe_mlp(x[tokens], index[tokens], weights[tokens], w1, w2)

    chosen = torch.arange(T) % 2 == 0
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        got = torch.compile(function, fullgraph=True, backend="aot_eager")(chosen)
    assert same_bits(got, function(chosen))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_autocast_on_a_gpu(backend):
    with torch.autocast("cuda", torch.bfloat16):  # torch's sum returns fp32 here
        out = quackish.moe_mlp(*make(torch.float32, "cuda"), backend=backend)
    assert out.dtype == torch.bfloat16


def test_compiles_without_a_graph_break():
    inputs = make(torch.bfloat16)
    results = []
    for function in (quackish.moe_mlp, torch.compile(quackish.moe_mlp, fullgraph=True, backend="aot_eager")):
        out = function(*inputs)
        results.append((out, *torch.autograd.grad(out.square().sum(), (inputs[0], *inputs[2:]))))
    assert all(map(same_bits, *results))


def test_compiled_code_does_not_fuse_the_routing():
    from torch._dynamo.backends.common import aot_autograd

    seen = []

    def record(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    inputs = [t.detach() for t in make(torch.bfloat16)]
    torch.compile(quackish.moe_mlp, fullgraph=True, backend=aot_autograd(fw_compiler=record))(*inputs)
    assert "quackish.moe_order.default" in seen
    assert not [name for name in seen if "sort" in name or "scatter" in name]


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [None, True])
def test_inductor_with_many_numbers_of_tokens(dynamic):
    _, _, _, w1, w2 = make(torch.bfloat16, "cuda")

    def function(x, r, scores):
        index = torch.stack([r.remainder(E), (r + 1).remainder(E)], 1).view(-1, 2)
        return quackish.moe_mlp(x, index, scores.softmax(-1), w1, w2)

    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
    for tokens in (7, 8, 9, 33, 1, 2, 0):
        x = torch.randn(tokens, H, device="cuda").bfloat16().requires_grad_()
        scores = torch.randn(tokens, 2, device="cuda", requires_grad=True)
        r, results = torch.arange(tokens, device="cuda") * 7 % 11, []
        for one in (function, compiled):
            out = one(x, r, scores)
            results.append([out, *torch.autograd.grad(out.float().square().sum(), (x, scores, w1, w2))])
        for want, got in zip(*results, strict=True):  # compiled code sums a token's rows with fewer roundings
            assert (got.float() - want.float()).norm() <= 0.02 * want.float().norm()


@pytest.mark.gpu
def test_nothing_synchronizes():
    inputs = make(torch.bfloat16, "cuda")
    quackish.moe_mlp(*inputs).sum().backward()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        quackish.moe_mlp(*inputs).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_cuda_graph_with_other_choices():
    x, index, weights, w1, w2 = make(torch.bfloat16, "cuda")

    def step():
        out = quackish.moe_mlp(x, index, weights, w1, w2)
        return out, *torch.autograd.grad(out.float().square().sum(), (x, weights, w1, w2))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    for _ in range(2):
        index.copy_(torch.randint_like(index, -1, E + 1))
        graph.replay()
        assert all(map(same_bits, captured, step()))


TOKEN_ROWS = [(24, 3), (64, 1), (2048, 8), (2880, 4), (4096, 19)]  # columns, rows per token


TO_COMPILE = [*itertools.product([H200], [n for n, _ in TOKEN_ROWS], ["copy", "sum"])]
TO_COMPILE += [(B200, 64, "copy"), (B200, 2880, "sum")]  # the same source


@pytest.mark.parametrize("gpu, n, op", one_per(lambda gpu, n, op: op, TO_COMPILE), ids=str)
def test_token_rows_compiles(gpu, n, op):
    problem = TokenRowsProblem(op, n, "bfloat16")
    config = token_rows_config(problem, gpu)
    ctas = config.ctas_per_token(n)
    assert 0 <= ctas * config.threads - n // 8 < 32 * ctas  # few threads are idle
    check_compiles("token_rows", problem, config, gpu)


def token_rows():
    """(columns, rows per token, dtype, where): in the emulator, each number of columns in one dtype."""
    for i, (n, k) in enumerate(TOKEN_ROWS):
        dtypes = torch.bfloat16, torch.float16
        yield from (pytest.param(n, k, dtype, "cuda", marks=pytest.mark.gpu) for dtype in dtypes)
        yield pytest.param(n, k, dtypes[i % 2], *exhaustive_settings[0].values, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize("n, k, dtype, where", list(token_rows()))
def test_token_rows_are_copied_and_summed_in_order(n, k, dtype, where):
    on_gpu = where == "cuda"
    device, m = ("cuda", 100) if on_gpu else ("cpu", 9)
    tokens = torch.randn(m, n, device=device).to(dtype)
    rows = torch.randperm(m * k, device=device).view(m, k)
    x = torch.randn(m * k, n, device=device).to(dtype)
    if k > 2:  # each order rounds other small rows to the last bits of the two large ones, which cancel
        x *= 2.0**-10
        x[rows[:, 1]] *= 2.0**20
        x[rows[:, 2]] = -x[rows[:, 1]]
    with contextlib.nullcontext() if on_gpu else emulated(where):
        steps = steps_of(device_of(tokens.device))
        copies, sums = steps.copy_rows(tokens, rows), steps.sum_rows(x, rows)
    assert same_bits(copies[rows], tokens[:, None].expand(-1, k, -1))
    total = torch.zeros(m, n, device=device)
    for one in rows.unbind(1):
        total += x[one].float()
    assert same_bits(sums, total.to(dtype))


WRONG = {
    r"x is \(24,\); expected \(\.\.\., H\)": dict(x=torch.zeros(H)),
    r"top_k_index is \(40,\) but x is \(40, 24\); expected \(40, K\), K >= 1": dict(index=torch.zeros(T)),
    r"top_k_index is \(40, 0\)": dict(index=torch.zeros(T, 0, dtype=torch.int64)),
    r"top_k_index is torch.float32; expected torch.int32 or torch.int64": dict(index=torch.zeros(T, K)),
    r"top_k_weights is \(40, 2\); expected top_k_index's \(40, 3\)": dict(weights=torch.zeros(T, 2)),
    r"top_k_weights is torch.int64; expected bfloat16": dict(weights=torch.zeros(T, K, dtype=torch.int64)),
    r"top_k_index is on meta but x is on cpu": dict(index=torch.zeros(T, K, device="meta")),
    r"w2 is \(5, 24\) but x is \(40, 24\); expected \(E, 24, I\)": dict(w2=torch.zeros(E, H)),
    r"w1 is \(5, 30, 24\) but x is \(40, 24\)": dict(w1=torch.zeros(E, 30, H)),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments(message):
    names = ("x", "index", "weights", "w1", "w2")
    with pytest.raises((ValueError, TypeError), match=f"moe_mlp: {message}"):
        quackish.moe_mlp(*(dict(zip(names, make(), strict=True)) | WRONG[message]).values())
    with pytest.raises(TypeError, match=r"moe_mlp\(\) got an unexpected keyword argument 'scales'"):
        quackish.moe_mlp(*make(), scales=torch.ones(T * K))


def test_transforms_are_refused():
    x, *others = make()
    with pytest.raises(UnsupportedError, match=r"moe_mlp: torch\.func transforms and forward-mode AD"):
        torch.func.grad(lambda x: quackish.moe_mlp(x, *others).sum())(x)
