"""FLOP counters and selective checkpointing, which see the operators of every public operation."""

import functools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import quackish
import quackish.parallel
from quackish.device.choose import choose
from quackish.device.kernel_device import KernelDevice, substitute
from quackish.device.kernel_for import CompiledKernel
from quackish.gpu import H200
from quackish.testing.errors import same_bits
from tests import emulated_kernels

M, H, V = 160, 32, 128  # rows, hidden size and classes of the losses
R, E, I = 24, 4, 16  # rows, experts and intermediate size of the experts  # noqa: E741
B, HEADS, KEYS, Q, D = 2, 4, 2, 16, 24  # of attention: batch, heads of queries, of keys, queries, columns
LOGITS, UP, DOWN = 2 * M * H * V, 2 * R * H * 2 * I, 2 * R * H * I  # FLOPs of one matrix product
SCORES = 2 * B * HEADS * Q * (Q + 8) * D


def normal(*shape, seed=0, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_()


def integers(low, high, *shape):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(7))


def losses(**options):
    return lambda x, w, bias=None: quackish.linear_cross_entropy(x, w, TARGET, linear_bias=bias, **options)


def in_shards(**options):
    return lambda x, w, bias=None: quackish.parallel.linear_cross_entropy(x, w, TARGET, linear_bias=bias, **options)


def experts(x, w1, w2, w3=None, **options):
    return quackish.grouped_mlp(x, w1, w2, OFFS, w3=w3, **options)


def moe(x, weights, w1, w2, b2=None):
    return quackish.moe_mlp(x, CHOICES, weights, w1, w2, b2=b2)


def mm(a, b):
    return quackish.grouped_mm(a, b, OFFS)


def attention(q, k, v, bias):
    mask = torch.arange(Q * (Q + 8)).view(Q, -1) % 3 > 0
    return quackish.scaled_dot_product_attention(q, k, v, mask, attn_bias=bias, enable_gqa=True, window=(9, None))


def rotated(q, k):
    return torch.cat(quackish.rotary(q, k, *TABLES), 1)


def statistics(function):
    return lambda *inputs: function(*inputs)[1].entropy


TARGET, CHOICES, OFFS = integers(0, V, M), integers(-1, E + 1, R // 2, 2), torch.tensor([3, 3, 9, 20]).int()
TARGET[::5] = -100
HEAD = normal(M, H), normal(V, H, seed=1)
ROWS = normal(R, H), normal(E, 2 * I, H, seed=1), normal(E, H, I, seed=2)
SPLIT = ROWS[0], normal(E, I, H, seed=1), ROWS[2], normal(E, I, H, seed=4)
TOKENS = normal(R // 2, H), normal(R // 2, 2, seed=3), *ROWS[1:]
ATTENDED = (
    normal(B, HEADS, Q, D), normal(B, KEYS, Q + 8, D, seed=1), normal(B, KEYS, Q + 8, D, seed=2),
    normal(1, HEADS, Q, Q + 8, seed=3),
)  # fmt: skip

TABLES = torch.rand(2, Q, D)

# {name: (function, its tensors, FLOPs of forward and backward)}, the FLOPs as (portable, kernels) if they differ
CASES = {
    "chunked": (losses(), HEAD, 3 * LOGITS),
    "two chunks": (losses(chunk_size=128), HEAD, 3 * LOGITS),
    "frozen weight": (losses(), (HEAD[0], HEAD[1].detach()), 2 * LOGITS),
    "stored": (losses(schedule="stored", reduction="none"), HEAD, 3 * LOGITS),
    "stored, entropy": (statistics(losses(schedule="stored", return_stats=True)), HEAD, (3 * LOGITS, 4 * LOGITS)),
    "recompute": (losses(schedule="recompute"), HEAD, 4 * LOGITS),
    "recompute, none": (losses(schedule="recompute", reduction="none"), HEAD, 4 * LOGITS),
    "smooth": (
        losses(label_smoothing=0.1, softcap=20.0, num_items=7), (*HEAD, normal(V)), (3 * LOGITS, 4 * LOGITS)
    ),
    "in shards": (in_shards(), HEAD, 3 * LOGITS),
    "in shards, entropy": (
        statistics(in_shards(sequence_parallel=True, return_stats=True, schedule="recompute")), (*HEAD, normal(V)),
        4 * LOGITS,
    ),
    "grouped_mlp": (experts, ROWS, 3 * (UP + DOWN)),
    "w3, recompute": (functools.partial(experts, recompute=True), SPLIT, 4 * UP + 3 * DOWN),
    "frozen experts": (experts, (ROWS[0], ROWS[1].detach(), ROWS[2].detach()), 2 * (UP + DOWN)),
    "moe_mlp": (moe, TOKENS, 3 * (UP + DOWN)),
    "moe_mlp, b2": (moe, (*TOKENS, normal(E, H, seed=5)), 3 * (UP + DOWN)),
    "rows": (lambda a, b: mm(a, b.mT), ROWS[:2], 3 * UP),
    "columns": (lambda a, b: mm(a, b.mT), (ROWS[1], ROWS[0]), 3 * UP),
    "sums": (lambda a, b: mm(a.mT, b), (ROWS[0], normal(R, 2 * I)), 3 * UP),
    "rms_norm": (quackish.rms_norm, (HEAD[0], normal(H)), 0),
    "attention": (attention, ATTENDED, 7 * SCORES),
    "rotary": (rotated, (ATTENDED[0], normal(B, KEYS, Q, D, seed=1)), 0),
}  # fmt: skip
each_case = pytest.mark.parametrize("name", CASES)


def step(function, inputs):
    """[the result, and the gradients]"""
    out = function(*inputs)
    return [out.detach(), *torch.autograd.grad(out.sum(), [t for t in inputs if t.requires_grad])]


@pytest.fixture(autouse=True, scope="module")
def group():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def launched():
    """Kernels that do nothing; the FLOPs of their matrix products: [number, ...]."""
    flops = []

    def kernel_for(problem, gpu):
        def launch(*args):
            spec = problem.spec
            if spec.cublas:
                flops.append(spec.work(problem, spec.sizes_of(args[0])).flops)

        return CompiledKernel(launch, choose(problem, gpu).config)

    def zeros(shape, strides, dtype):  # indices that kernels would write must be legal
        return torch.empty_strided(shape, strides, dtype=dtype).zero_()

    with substitute("cpu", KernelDevice(H200, kernel_for, zeros)):
        yield flops


def counted(name):
    function, inputs, _ = CASES[name]
    counter = FlopCounterMode(display=False)
    for op in [op for op in counter.flop_registry if str(op).startswith("quackish")]:
        del counter.flop_registry[op]  # as if it was created before the first call of an operation
    with counter:
        step(function, inputs)
    return counter.get_total_flops()


@each_case
def test_flops_of_the_portable_path(name):
    expected = CASES[name][2]
    assert counted(name) == (expected[0] if isinstance(expected, tuple) else expected)


@each_case
def test_flops_of_kernels(name, launched):
    expected, flops = CASES[name][2], counted(name)
    assert flops == (expected[1] if isinstance(expected, tuple) else expected)
    if name not in ("attention", "moe_mlp, b2"):  # other products than PyTorch's seven; a GEMM sums the bias's gradient
        assert flops == sum(launched)


@pytest.mark.parametrize("name", ["grouped_mlp", "rows", "attention", "stored"])
def test_flops_of_a_backward_alone(name):
    function, inputs, flops = CASES[name]
    out = function(*inputs)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(out.sum(), inputs)
    assert counter.get_total_flops() == (5 * flops // 7 if name == "attention" else 2 * flops // 3)


def test_flops_of_rows_whose_logits_are_kept(limits, launched):
    limits(STORED_BYTES=0, rows_to_keep=lambda *args: 128)
    x, w = normal(2 * M, H), HEAD[1]
    target = TARGET.repeat(2)
    with FlopCounterMode(display=False) as counter:
        step(lambda x, w: quackish.linear_cross_entropy(x, w, target, reduction="none"), (x, w))
    assert counter.get_total_flops() == sum(launched) == 2 * H * V * (4 * 2 * M - 128)


def save_everything(_, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE


def assert_checkpoints(name):
    function, inputs, _ = CASES[name]
    contexts = functools.partial(create_selective_checkpoint_contexts, save_everything)
    checkpointed = functools.partial(checkpoint, function, use_reentrant=False, context_fn=contexts)
    assert all(map(same_bits, step(checkpointed, inputs), step(function, inputs)))


@each_case
def test_a_checkpoint_that_saves_every_operator(name):
    assert_checkpoints(name)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("rms_norm", "attention", "rotary")])
def test_a_checkpoint_that_saves_every_operator_of_kernels(name):
    with substitute("cpu", KernelDevice(H200, emulated_kernels.kernel_for)):
        assert_checkpoints(name)


FRESH = """
import torch
import torch.utils.flop_counter
import quackish
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    quackish.rms_norm(torch.ones(4, 8), None)
a, w = torch.ones(4, 8), torch.ones(2, 8, 6)
quackish.grouped_mm(a, w, torch.tensor([1, 4], dtype=torch.int32))
with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
    quackish.linear_cross_entropy(a, torch.ones(5, 8), torch.arange(4))
print(counter.get_total_flops())
"""


@pytest.mark.exhaustive
def test_a_process_with_few_operators():
    """Names of quackish are imported when they are used: formulas need operators that this program does not use."""
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 2 * 4 * 8 * 5
