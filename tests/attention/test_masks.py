"""Bool masks of attention in the emulator: classes of blocks, tiles that are skipped, numbers and bits."""

import itertools

import pytest
import torch

import quackish
from quackish.device.kernel_device import device_of
from quackish.ops.attention.arguments import BLOCK, EMPTY, FULL, MIXED, OrderArgs, Strided
from quackish.ops.attention.kernel_steps import steps_of
from quackish.ops.attention.mask_plan import layout_of_plan, unknown_plan
from quackish.ops.attention.problems import AttentionOrderProblem
from quackish.ops.attention.reference import Inputs, Options
from quackish.testing.errors import same_bits
from tests.attention.cases import FP16, FP32, assert_right, case, step, truth
from tests.emulator_cases import HOPPER, QUICK, emulated

CPU = torch.device("cpu")


def of_classes(classes, num_q, num_k, seed=0):
    """A mask (1, 1, num_q, num_k) whose blocks have these classes."""
    classes = torch.as_tensor(classes).repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)[:num_q, :num_k]
    some = torch.rand(num_q, num_k, generator=torch.Generator().manual_seed(seed)) < 0.5
    return torch.where(classes == MIXED, some, classes == FULL)[None, None]


# Plans ----------------------------------------------------------------------------------------------------------------


def classes_of(mask):
    blocks = (-(-size // BLOCK) for size in mask.shape[2:])
    classes = torch.empty(*mask.shape[:2], *blocks, dtype=torch.uint8)
    for i in range(classes.shape[2]):
        for j in range(classes.shape[3]):
            block = mask[:, :, BLOCK * i : BLOCK * (i + 1), BLOCK * j : BLOCK * (j + 1)].flatten(2)
            classes[:, :, i, j] = torch.where(block.all(2), FULL, torch.where(block.any(2), MIXED, EMPTY))
    return classes


def random_classes(*shape):
    batches, heads, rows, columns = shape
    generator = torch.Generator().manual_seed(0)
    blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
    masks = [
        of_classes(torch.randint(0, 3, blocks, generator=generator), rows, columns, i) for i in range(batches * heads)
    ]
    return torch.cat(masks).view(shape)


def nearly(value, row, column):
    """Two blocks of `value`, but for one element of the second one."""
    mask = torch.full((1, 1, BLOCK, 2 * BLOCK), value)
    mask[0, 0, row, BLOCK + column] = not value
    return mask


MASKS = {
    "vectors": random_classes(2, 3, 130, 208),
    "vectors of a larger tensor": random_classes(1, 1, 200, 208)[:, :, 3:, 16:176],
    "columns that are no multiple of 16": random_classes(2, 1, 130, 145),
    "transposed": random_classes(1, 1, 200, 208).mT,
    "broadcast over queries": random_classes(2, 1, 1, 300),
    "broadcast over keys": random_classes(1, 2, 300, 1),
    "one element": torch.ones(1, 1, 1, 1, dtype=torch.bool),
    **{f"one {not v} at {at}": nearly(v, *at) for v in (False, True) for at in ((0, 0), (37, 15), (63, 63))},
}


def orders_of(classes, num_q, num_k):
    """The order of tiles of queries, and that of tiles of keys. A tile is two blocks; most work comes first."""
    used = (classes != EMPTY).expand(-1, -1, -(-num_q // BLOCK), -(-num_k // BLOCK)).flatten(0, 1)
    for blocks in (used, used.mT):
        work = torch.nn.functional.pad(blocks.sum(2), (0, blocks.shape[1] % 2)).unflatten(1, (-1, 2)).sum(2)
        yield work.argsort(dim=1, descending=True, stable=True).int()


def assert_plan(plan, mask, num_q, num_k):
    layout, classes = layout_of_plan(mask.shape, num_q, num_k), classes_of(mask)
    assert same_bits(plan[layout.classes :], classes.flatten())
    if mask.shape[2] > 1:  # a mask of keys needs no order
        want = torch.cat([order.flatten() for order in orders_of(classes, num_q, num_k)])
        assert same_bits(plan[: layout.classes].view(torch.int32), want)


def inputs_of(mask, num_q, num_k):
    q, k = (torch.empty(1, 1, length, 64) for length in (num_q, num_k))
    return Inputs(q, k, k, None, mask)


@pytest.mark.parametrize("where", [QUICK, pytest.param(HOPPER[1], marks=pytest.mark.exhaustive)])
def test_plans(where):
    with emulated(where):
        steps = steps_of(device_of(CPU))
        for mask in MASKS.values():
            num_q, num_k = (n if n > 1 else 200 + i for i, n in enumerate(mask.shape[2:]))
            assert_plan(steps.plan(inputs_of(mask, num_q, num_k), Options(1.0)), mask, num_q, num_k)


def test_plan_of_the_portable_path():
    """Every tile is once in each order."""
    inputs = inputs_of(MASKS["vectors"], 130, 208)
    layout = layout_of_plan(inputs.mask.shape, 130, 208)
    plan = unknown_plan(inputs)
    assert (plan[layout.classes :] == MIXED).all()
    assert plan[: layout.classes].view(torch.int32).tolist() == [0, 1] * 12


@pytest.mark.exhaustive
def test_order_of_more_tiles_than_a_cta_ranks():
    tiles, most = 1030, 1024
    classes = torch.randint(0, 3, (1, 1, 2 * tiles, 1), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    out = [torch.empty(n, dtype=torch.int32) for n in (tiles, 1)]
    args = OrderArgs(
        Strided(classes.data_ptr(), *classes.stride()), *(t.data_ptr() for t in out), 1, 1, 2 * tiles * BLOCK, BLOCK
    )
    with emulated(QUICK):
        device = device_of(CPU)
        device.kernel_for(AttentionOrderProblem(), device.gpu).launch(args, device.stream())
    for first in (0, most):
        part = classes[:, :, 2 * first : 2 * (first + most)]
        want = next(orders_of(part, part.shape[2] * BLOCK, BLOCK))[0]
        assert same_bits(out[0][first : first + most], want + first)


# Tiles ----------------------------------------------------------------------------------------------------------------

# A tile of forward has 2 x 2 blocks. The first row of tiles has an empty, a full and a mixed one, the second row none.
ROWS = [[0, 0, 2, 2, 1, 0], [0, 0, 2, 2, 0, 0], [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]]


def forward(args, where):
    """(o and lse, the launch)"""
    with emulated(where) as report, torch.no_grad():
        out, lse = quackish.scaled_dot_product_attention(**args, return_lse=True, backend="cute")
    assert [launch.kernel for launch in report.launches] == ["attention_mask", "attention_order", "attention_fwd"]
    return dict(o=out, lse=lse), report.launches[2]


def bytes_of(tiles, masks):
    """What forward reads for two tiles of queries and `tiles` tiles of scores, `masks` of them with the mask."""
    return (2 + 2 * tiles) * 128 * 64 * 2 + masks * 128 * 128


@pytest.mark.exhaustive
def test_skipped_tiles():
    """NaN in an empty tile reaches nothing, and a full tile's mask is not read. A row of tiles has at least one."""
    args = case(1, 1, 256, 384) | dict(attn_mask=of_classes(ROWS, 256, 384))
    want = truth(args)
    with torch.no_grad():
        for name in ("key", "value"):
            args[name][:, :, :128] = torch.nan
    got, launch = forward(args, QUICK)
    assert_right(got, {name: want[name] for name in got})
    args["attn_mask"] = torch.ones_like(args["attn_mask"])
    _, of_all = forward(args, QUICK)
    assert launch.mmas * 6 == of_all.mmas * 3
    classes = 4096  # more than the bytes of classes that are read
    assert bytes_of(3, 2) < launch.bytes_read < bytes_of(3, 2) + classes
    assert bytes_of(6, 0) < of_all.bytes_read < bytes_of(6, 0) + classes


@pytest.mark.exhaustive
@pytest.mark.parametrize("bias", [None, (1, 1, 256, 384)])
def test_backward_skips_tiles(bias):
    """The same there. A bias's gradient is 0 in empty tiles, and gives dq."""
    args = case(1, 1, 256, 384, 32, bias=bias) | dict(attn_mask=of_classes(ROWS, 256, 384))
    want = truth(args)
    with torch.no_grad():
        for name in ("key", "value"):
            args[name][:, :, :128] = torch.nan
    with emulated(QUICK) as report:
        assert_right(step(args), want)
    args["attn_mask"] = torch.ones_like(args["attn_mask"])
    with torch.no_grad():
        for name in ("key", "value"):
            args[name].nan_to_num_()
    with emulated(QUICK) as of_all:
        step(args)
    of_dq = "attention_bwd_product" if bias else "attention_bwd_queries"
    assert [launch.kernel for launch in report.launches[-2:]] == ["attention_bwd_keys", of_dq]
    for some, every in zip(report.launches[-2:], of_all.launches[-2:], strict=True):
        assert 0 < some.mmas < every.mmas * 0.7, some.kernel


@pytest.mark.exhaustive
def test_more_tiles_than_lanes():
    keys = 128 * 33 + 5
    args = case(1, 1, 64, keys, 32) | dict(attn_mask=(torch.arange(keys) >= 128 * 33).repeat(1, 1, 64, 1))
    want = truth(args)
    with torch.no_grad():
        args["value"][:, :, : 128 * 33] = torch.nan
    got, _ = forward(args, QUICK)
    assert_right(got, {name: want[name] for name in got})


@pytest.mark.exhaustive
def test_bits_do_not_depend_on_what_is_skipped():
    q, k, v, mask = (case(1, 2, 200, 272) | dict(attn_mask=random_classes(1, 2, 200, 272))).values()
    inputs, options = Inputs(q.detach(), k.detach(), v.detach(), None, mask), Options(0.125)
    with emulated(QUICK):
        steps = steps_of(device_of(CPU))
        skipped, computed = (
            steps.forward(inputs, options, plan) for plan in (steps.plan(inputs, options), unknown_plan(inputs))
        )
    assert all(same_bits(a, b) for a, b in zip(skipped, computed, strict=True))


CASES = {
    "no key": dict(case(1, 1, 200, 272), attn_mask=of_classes([[0] * 5] * 4, 200, 272)),
    "unaligned, GQA, causal": dict(
        case(2, 4, 200, 275, kv_heads=2, bias=(1, 1, 200, 275), is_causal=True),
        attn_mask=of_classes([[1, 0, 0, 0, 0], [2, 2, 0, 0, 0], [0, 0, 2, 0, 0], [0, 1, 1, 2, 0]], 200, 275),
    ),
    "padding": dict(
        case(2, 2, 70, 275, dtype=FP16, softcap=2.0),
        attn_mask=(torch.arange(275) < torch.tensor([100, 275])[:, None])[:, None, None],
    ),
    "rows": dict(case(1, 2, 200, 80), attn_mask=(torch.arange(200) < 100)[None, None, :, None]),
    "a batch entry": dict(case(2, 1, 70, 80), attn_mask=torch.tensor([True, False])[:, None, None, None]),
    "negative scale": dict(case(1, 1, 70, 144, 32, scale=-0.2), attn_mask=random_classes(1, 1, 70, 144)),
    "scale of 0": dict(case(1, 1, 70, 144, 32, scale=0.0), attn_mask=random_classes(1, 1, 70, 144)),
    "a mask of each head, expanded": dict(
        case(2, 2, 130, 144, 128, bias=(2, 1, 130, 144), bias_dtype=FP32),
        attn_mask=random_classes(1, 2, 130, 144).expand(2, 2, 130, 144),
    ),
}  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind, where", list(zip(CASES, itertools.cycle(HOPPER), strict=False)))
def test_numbers_of_masks(kind, where):
    args = CASES[kind]
    with emulated(where):
        got = step(args)
    assert_right(got, truth(args), args["query"].dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", CASES)
def test_numbers_and_bits_of_masks_on_gpu(kind):
    args = {
        name: arg.detach().cuda().requires_grad_(arg.requires_grad) if isinstance(arg, torch.Tensor) else arg
        for name, arg in CASES[kind].items()
    }
    got = step(args)
    assert_right(got, truth(args), args["query"].dtype)
    for _ in range(19):
        assert all(same_bits(t, got[name]) for name, t in step(args).items())
