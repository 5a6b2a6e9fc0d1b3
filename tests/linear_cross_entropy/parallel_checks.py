"""Checks of the vocabulary-parallel head, which each rank runs.

Each check compares with one process that has the whole weight. test_parallel.py starts the processes: by gloo three on
a CPU (kind "cpu") or two or four on one GPU ("shared"); by NCCL one for each of two or four GPUs ("gpu", "bits").
"""

import argparse
import contextlib
import datetime
import gc
import hashlib
import itertools
import json
import traceback
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import quackish
from quackish.cli import call_arguments
from quackish.device.kernel_device import substitute
from quackish.gpu import gpu_of
from quackish.ops.linear_cross_entropy.reference import linear_cross_entropy_forward
from quackish.ops.linear_cross_entropy.sharded.collectives import all_gather, sum_over_ranks
from quackish.parallel import VocabParallelHead, linear_cross_entropy
from tests import emulated_kernels as emulated
from tests.cuda_graphs import captured, no_synchronization
from tests.linear_cross_entropy.cases import IGNORED, OPTIONS, REDUCTIONS, SCHEDULES, make, norm_error, unit_roundoff

RANKS = 3
V = 11
SPLITS = {"chunk": (4, 4, 3), "unequal": (1, 7, 3), "empty": (6, 0, 5)}
PAIRS = {"two": (6, 5), "one of two": (11, 0)}
ON_GPUS = {
    2: {"large": (2560, 2440), "small": (512, 188), "one": (700, 0)},
    4: {"large": (1280, 1280, 1240, 1200), "small": (256, 188, 0, 256), "one": (0, 0, 700, 0)},
}
CHECKS = {"cpu": {}, "shared": {}, "gpu": {}, "bits": {}}


def check(*kinds):
    def add(function):
        for kind in kinds:
            CHECKS[kind][function.__name__] = function
        return function

    return add


class Ranks:
    """A group of the first ranks, and the number of classes on each."""

    def __init__(self, sizes):
        self.group, self.sizes = dist.new_group(list(range(len(sizes)))), sizes
        self.rank = dist.get_rank()
        self.start = sum(sizes[: self.rank])
        self.mine = slice(self.start, sum(sizes[: self.rank + 1]))

    def shard(self, t):
        return None if t is None else t.detach()[self.mine].clone().requires_grad_(t.requires_grad)

    def step(self, x, w, target, kw, loss_of, **options):
        """The outputs of the parallel head, and [dx, dw, db] of `loss_of(outputs)`."""
        kw = {name: self.shard(t) if name in ("weight", "linear_bias") else t for name, t in kw.items()}
        x, w = x.detach().clone().requires_grad_(), self.shard(w)
        leaves = [t for t in (x, w, kw.get("linear_bias")) if t is not None]
        return step(linear_cross_entropy, leaves, x, w, target, kw, loss_of, group=self.group, **options)


def step(function, leaves, x, w, target, kw, loss_of, **options):
    outputs = function(x, w, target, **kw, **options)
    outputs = flat(outputs)
    grads = torch.autograd.grad(loss_of(outputs), leaves)
    return [t.detach() for t in outputs], list(grads)


def flat(outputs):
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    first, second = outputs
    return [first, second] if isinstance(second, torch.Tensor) else [first, *second]


def total(outputs):
    """A scalar that depends on every differentiable output, with different weights per row."""
    sums = 0
    for i, t in enumerate(outputs[:4]):
        sums = sums + (t * torch.linspace(0.3, 1.7 + i, t.numel(), dtype=t.dtype, device=t.device).view(t.shape)).sum()
    return sums


def agree(ranks, x, w, target, kw, loss_of=total, close=1e-11, **options):
    """The parallel head and one process have the same outputs and gradients."""
    leaves = [t for t in (x, w, kw.get("linear_bias")) if t is not None]
    want, (dx, *true_grads) = step(quackish.linear_cross_entropy, leaves, x, w, target, kw, loss_of)
    got, grads = ranks.step(x, w, target, kw, loss_of, **options)
    true_grads = [dx, *(t[ranks.mine] for t in true_grads)]
    torch.testing.assert_close((got, grads), (want, true_grads), rtol=close, atol=close)
    for t in (*got, grads[0]):
        everyone = [torch.empty_like(t) for _ in ranks.sizes]
        dist.all_gather(everyone, t.contiguous(), group=ranks.group)
        assert all(torch.equal(t, other) for other in everyone), "ranks have different bits"
    return got, grads


@check("cpu")
def every_option(groups):
    """Each option with all reductions, splits, schedules and outputs, in three calls."""
    splits = [groups[split] for split in SPLITS]
    for i, options in enumerate(OPTIONS.values()):
        for j, reduction in enumerate(REDUCTIONS):
            x, w, target, kw = make(v=V, reduction=reduction, **options)
            kw |= [{}, {"return_lse": True}, {"return_stats": True}][(i // 3 + j) % 3]
            agree(splits[(i + j) % 3], x, w, target, kw, schedule=SCHEDULES[(2 * i + j) % 3], chunk_size=5)


@check("cpu")
def two_ranks(groups):
    x, w, target, kw = make(v=V, **OPTIONS["all"])
    kw |= {"return_stats": True, "num_items": torch.tensor(7)}
    for split in ("two", "one of two"):
        if dist.get_rank() < 2:
            agree(groups[split], x, w, target.int(), kw)
            with torch.autocast("cpu", torch.bfloat16):
                agree(groups[split], *make(v=V, dtype=torch.float32), close=1e-4)


@check("cpu")
def rows_in_special_cases(groups):
    ranks = groups["unequal"]
    for kw in ({}, {"return_stats": True, "label_smoothing": 0.1}):
        x, w, target, _ = make(v=V)
        agree(ranks, x, w, target.clamp(max=7), kw)  # the last rank has no target
        outputs, grads = agree(ranks, x, w, torch.full_like(target, IGNORED), kw)
        assert not any(t.any() for t in (outputs[0], *grads))
        agree(ranks, x[:0], w, target[:0], kw)
        agree(ranks, x[None, :, None], w, target[None, :, None], kw)  # (1, m, 1, h)
        w.data[8] = w.data[0]
        w.data[[0, 8], 0] += 100.0 * x.data[3, 0].sign()  # equal largest logits on different ranks: the first class
        agree(ranks, x, w, target, kw)
        infinite = torch.ones(V, dtype=torch.float64)
        infinite[0] = torch.inf  # no target has it, but ignored rows read some class's weight
        agree(ranks, x, w, target.where(target != 0, 1), kw | {"weight": infinite, "label_smoothing": 0.0})
        x.data[1] = float("nan")  # ignored
        agree(ranks, x, w, target, kw)
        x.data[2] = float("nan")
        outputs, grads = ranks.step(x, w, target, kw, total)
        assert outputs[0].isnan()
        assert torch.equal(grads[0].isnan().any(1), torch.arange(len(x)) == 2)
        assert not kw or outputs[4][2] == -1


@check("cpu")
def targets_that_are_no_class(groups):
    ranks = groups["empty"]
    for kw in ({}, {"return_stats": True, "label_smoothing": 0.1}, {"weight": torch.ones(V, dtype=torch.float64)}):
        x, w, target, _ = make(v=V)
        bad, good = [0, 5, 7], [2, 3, 4, 8, 9, 10, 12]
        kw = kw | {"reduction": "none"}
        want, want_grads = ranks.step(x, w, target, kw, total)
        target[bad] = torch.tensor([-1, V, 1 << 40])
        got, grads = ranks.step(x, w, target, kw, total)
        assert all(t.isnan().all() for t in (got[0][bad], grads[0][bad], grads[1]))
        for one, other in ((got[0], want[0]), (grads[0], want_grads[0])):
            assert torch.equal(one[good], other[good])


@check("cpu")
def which_gradients(groups):
    ranks = groups["chunk"]
    x, w, target, kw = make(v=V, bias=True)
    _, all_grads = ranks.step(x, w, target, kw, lambda outputs: outputs[0])
    for needs in ((True, False, False), (False, True, False), (False, False, True), (False, False, False)):
        leaves = x.detach().clone(), ranks.shard(w).detach(), ranks.shard(kw["linear_bias"]).detach()
        for leaf, need in zip(leaves, needs, strict=True):
            leaf.requires_grad_(need)
        loss = linear_cross_entropy(leaves[0], leaves[1], target, linear_bias=leaves[2], group=ranks.group)
        assert loss.requires_grad == any(needs)
        if not any(needs):
            continue
        wanted = [leaf for leaf, need in zip(leaves, needs, strict=True) if need]
        first = torch.autograd.grad(loss, wanted, torch.tensor(0.3), retain_graph=True)
        again = torch.autograd.grad(loss, wanted, torch.tensor(0.3))
        true = [0.3 * grad for grad, need in zip(all_grads, needs, strict=True) if need]
        torch.testing.assert_close(list(first), true)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@check("cpu")
def outputs_are_the_users(groups):
    """They may be modified, and backward works with an empty shard."""
    ranks = groups["empty"]
    x, w, target, _ = make(v=V, dtype=torch.float32)
    losses = linear_cross_entropy(x, ranks.shard(w), target, group=ranks.group, reduction="none")
    losses.mul_(2.0).sum().backward()
    assert x.grad.norm() > 0
    _, stats = linear_cross_entropy(x, ranks.shard(w), target, group=ranks.group, return_stats=True)
    (dx,) = torch.autograd.grad(1e9 * stats.entropy.sum(), x)
    assert dx.isfinite().all()


@check("cpu")
def buffers_of_weight_gradients(groups):
    ranks = groups["empty"]
    x, w, target, _ = make(m=12, v=V)
    shard = ranks.shard(w)
    for schedule in SCHEDULES:
        buffer = torch.ones(shard.shape, dtype=torch.float64)
        for part in (slice(0, 5), slice(5, 12)):
            loss = linear_cross_entropy(
                x[part], shard, target[part], reduction="sum", group=ranks.group, grad_weight_out=buffer,
                schedule=schedule,
            )  # fmt: skip
            loss.backward()
        assert shard.grad is None
        _, (_, dw) = ranks.step(x, w, target, {"reduction": "sum"}, lambda outputs: outputs[0])
        torch.testing.assert_close(buffer, 1 + dw)
    shard = groups["chunk"].shard(w)
    with pytest.raises(ValueError, match="grad_weight_out shares memory with weight_shard"):
        linear_cross_entropy(x, shard, target, group=groups["chunk"].group, grad_weight_out=shard.detach())


@check("cpu")
def parts_of_the_input(groups):
    """sequence_parallel, in (sequence, batch) order, and deterministic."""
    ranks = groups["chunk"]
    x, w, target, kw = make(m=24, v=V, **OPTIONS["all"])
    kw["return_lse"] = True
    (loss, lse), (dx, dw, db) = ranks.step(x, w, target, kw, total)
    for deterministic in (False, True):
        part = x.detach().view(6, 4, 8)[2 * ranks.rank :][:2].clone().requires_grad_()
        options = dict(sequence_parallel=True, deterministic=deterministic)
        got, grads = ranks.step(part, w, target.view(6, 4), kw, lambda o: total([o[0], o[1].flatten()]), **options)
        assert torch.equal(torch.cat([got[0].view(1), got[1].flatten()]), torch.cat([loss.view(1), lse]))
        dx_part = dx.view(6, 4, 8)[2 * ranks.rank :][:2]
        torch.testing.assert_close(grads, [dx_part, dw, db], rtol=1e-12, atol=1e-12)
    with torch.autocast("cpu", torch.bfloat16):
        x, w, target, kw = make(m=12, v=V, dtype=torch.float32)
        rows = slice(4 * ranks.rank, 4 * ranks.rank + 4)
        loss, (dx, _) = ranks.step(x, w, target, kw, total)
        got, grads = ranks.step(x[rows], w, target, kw, total, sequence_parallel=True)
        assert torch.equal(got[0], loss[0])
        torch.testing.assert_close(grads[0], dx[rows])
    x, w, target, kw = make(m=13, v=V)  # the ranks do not divide 13 rows
    agree(ranks, x, w, target, kw, deterministic=True)


@check("cpu")
def sums_in_rank_order(groups):
    group = groups["chunk"].group
    partial = torch.randn(13, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    first, second, third = all_gather(partial, group).view(RANKS, 13, 8)
    total = (first + second) + third
    assert not torch.equal(total, (third + second) + first)
    assert torch.equal(sum_over_ranks(partial, group, False, True), total)
    mine = sum_over_ranks(partial[:12], group, True, True)
    assert torch.equal(mine, total[4 * dist.get_rank() :][:4])


@check("cpu")
def what_ranks_disagree_about(groups):
    ranks = groups["chunk"]
    x, w, target, _ = make(v=V)
    shard, mine = ranks.shard(w), ranks.rank == 1
    rows = slice(0, 12 if mine else 13)
    other = (torch.float32, "meta") if mine else (torch.float64, "cpu")
    one = dict(group=ranks.group)
    for call, message in (
        (
            lambda: linear_cross_entropy(x[rows], shard, target[rows], **one),
            r"target's shape is \(13,\) on rank 0 .*12",
        ),
        (
            lambda: linear_cross_entropy(*(t.to(other[0]) for t in (x, shard)), target, **one),
            "input's dtype is torch.float64 on rank 0 .*torch.float32 on rank 1",
        ),
        (
            lambda: linear_cross_entropy(*(t.to(other[1]) for t in (x, shard, target)), **one),
            "input's device is cpu on rank 0 .*meta on rank 1",
        ),
        (lambda: linear_cross_entropy(x, shard, target, z_loss=0.1 * mine, **one), "z_loss is 0.0 on rank 0"),
        (lambda: linear_cross_entropy(x, shard, target, num_items=5 + mine, **one), "num_items is 5 on rank 0"),
        (lambda: linear_cross_entropy(x, shard, target, group="tp"), "group is 'tp', expected a process group"),
        (lambda: linear_cross_entropy(x, shard, target, vocab_start=4 * ranks.rank + mine, **one), "vocab_start is 5"),
        (lambda: linear_cross_entropy(x, shard[:0], target, **one), "expected at least one class"),
        (lambda: linear_cross_entropy(x, shard, target, memory_limit=10, **one), "memory_limit is 10 bytes"),
        (
            lambda: linear_cross_entropy(x, shard[:, :5] if mine else shard, target, **one),
            r"input has shape .*weight_shard"
            if mine
            else "arguments on rank 1 of the group are invalid: .*weight_shard",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    agree(ranks, x, w, target, {}, vocab_start=ranks.start, memory_limit=10**6)


@check("cpu")
def dtensors_and_the_module(groups):
    x, _, target, _ = make(v=V)
    for weight in (None, torch.linspace(0.1, 2.0, V, dtype=torch.float64)):
        torch.manual_seed(0)
        head = VocabParallelHead(8, V, bias=True, dtype=torch.float64, weight=weight, label_smoothing=0.1)
        want = head(x, target)
        dx, dw, db = torch.autograd.grad(want, [x, *head.linear.parameters()])
        mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
        parallelize_module(head, mesh, {"linear": ColwiseParallel()})
        assert head.linear.weight.placements == (Shard(0),)
        loss = head(distribute_tensor(x.detach(), mesh, [Replicate()]).requires_grad_(), target, return_lse=True)[0]
        torch.testing.assert_close(loss, want)
        x.grad = None
        head(x, target).backward()
        torch.testing.assert_close([x.grad, head.linear.bias.grad.full_tensor()], [dx, db])
        torch.testing.assert_close(head.linear.weight.grad.full_tensor(), dw)
    smaller = parallelize_module(VocabParallelHead(8, V - 1, dtype=torch.float64), mesh, {"linear": ColwiseParallel()})
    larger = parallelize_module(VocabParallelHead(8, V, dtype=torch.float64), mesh, {"linear": ColwiseParallel()})
    for head in (smaller, larger):  # the first two ranks have as many rows of each
        head(x, target.clamp(max=V - 2)).backward()


@check("cpu")
def placements_of_the_input(groups):
    """All give what the whole input gives. The gradient of equal parts of the rows is scattered, not summed whole."""
    ranks, mesh = groups["chunk"], dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    for shape, kw in (((4, 6, 8), {"return_lse": True}), ((2, 3, 4, 8), {"return_stats": True, "reduction": "none"})):
        x, w, target, options = make(m=24, v=V, **OPTIONS["all"])
        x, target, kw = x.view(shape), target.view(shape[:-1]), options | kw

        def loss_of(outputs):
            return total([t.flatten() for t in outputs])

        want, true_grads = ranks.step(x, w, target, kw, loss_of)
        parts = [Shard(1), Shard(1 - len(shape))]  # of 6 and 3, which 3 ranks divide; not of H
        for placement in (*map(Shard, range(len(shape))), parts[1], Replicate(), Partial()):
            for flags in ({}, {"sequence_parallel": True, "deterministic": True}):
                if placement == Partial():
                    distributed = DTensor.from_local(x.detach() / RANKS, mesh, [placement])
                else:
                    distributed = distribute_tensor(x.detach(), mesh, [placement])
                with CommDebugMode() as communication:
                    got, (dx_got, *grads) = ranks.step(distributed, w, target, kw, loss_of, **flags)
                scatters = any("reduce_scatter" in str(op) for op in communication.get_comm_counts())
                assert scatters == (not flags and placement in parts)
                assert placement == Partial() or dx_got.placements == distributed.placements
                got = got, [dx_got.full_tensor(), *grads]
                torch.testing.assert_close(got, (want, true_grads), rtol=1e-12, atol=1e-12)


@check("cpu")
def placements_that_are_refused(groups):
    ranks, mesh = groups["chunk"], dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    x, w, target, _ = make(m=24, v=V)
    x, target, bias = x.detach().view(4, 6, 8), target.view(4, 6), torch.zeros(V, dtype=torch.float64)
    sharded = distribute_tensor(w.detach(), mesh, [Shard(0)])
    mine = slice(2 * ranks.rank, 2 * ranks.rank + 2)
    for call, message in (
        (
            lambda: linear_cross_entropy(distribute_tensor(x, mesh, [Shard(1)]), sharded, target[:, mine]),
            r"target has shape \(4, 2\), expected \(4, 6\), all rows: input is a DTensor of shape \(4, 6, 8\) with "
            r"placements \(Shard\(dim=1\),\)",
        ),
        (
            lambda: linear_cross_entropy(x[:, mine], sharded, target, sequence_parallel=True),
            r"target has shape \(4, 6\), expected \(12, 2\), all rows: with sequence_parallel=True, input \(4, 2, 8\) "
            r"is this rank's part of dimension 0. .*such as DTensor.from_local\(input, mesh, \[Shard\(1\)\]\)",
        ),
        (
            lambda: linear_cross_entropy(x, distribute_tensor(w.detach(), mesh, [Shard(1)]), target),
            r"weight_shard is a DTensor with placements \(Shard\(dim=1\),\), expected Shard\(0\).*ColwiseParallel",
        ),
        (
            lambda: linear_cross_entropy(x, sharded, target, linear_bias=distribute_tensor(bias, mesh, [Replicate()])),
            r"linear_bias is a DTensor with placements \(Replicate\(\),\), expected Shard\(0\)",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@check("cpu")
def kernels(groups):
    """Emulated kernels, in memory initialized with NaN, compared with fp64."""
    device = emulated.device()
    k = emulated.counted(device)
    with substitute("cpu", device):
        torch.use_deterministic_algorithms(True, warn_only=True)
        ranks = Ranks((256, 0, 444))
        for i, options in enumerate(OPTIONS.values()):
            dtype = (torch.bfloat16, torch.float16)[i // 2 % 2]
            x, w, target, kw = make(300, 64, 700, dtype, reduction=REDUCTIONS[i % 3], **options)
            kw |= [{"return_lse": True}, {"return_stats": True}][i % 2]
            for schedule in ("stored", "recompute"):
                agree_with_truth(ranks, x, w, target, kw, schedule=schedule, deterministic=i % 2 == 0)
        x, w, target, kw = make(300, 64, 700, torch.bfloat16)
        k.calls.clear()
        before = ranks.step(x, w, target, kw, lambda outputs: outputs[0], schedule="stored")
        assert (k.calls["logits"], k.calls["dx"], k.calls["dw"]) == (1, 1, int(ranks.rank != 1))
        for buffer in (None, torch.float32, torch.bfloat16):
            out = None if buffer is None else torch.zeros(ranks.shard(w).shape, dtype=buffer)
            leaves = x.detach().requires_grad_(), ranks.shard(w)
            options = dict(group=ranks.group, schedule="stored", grad_weight_out=out)
            linear_cross_entropy(*leaves, target, **options).backward()
            dw = leaves[1].grad if out is None else out
            assert norm_error(dw, before[1][1].double()) <= (0.0 if out is None else unit_roundoff(torch.bfloat16))
        k.calls.clear()
        after = ranks.step(x, w, target, kw, lambda outputs: outputs[0], schedule="recompute")
        assert (k.calls["logits"], k.calls["dlogits"], k.calls["dx"]) == (1, 1, 1)
        assert torch.equal(before[0][0], after[0][0])
        ranks = Ranks((30, 0, 20))  # rows that PyTorch sorts by class, where a shard has a single one that stands in
        with mock.patch("quackish.ops.linear_cross_entropy.launches.MOST_ROWS_COUNTED", 100):
            for schedule in SCHEDULES:
                agree_with_truth(ranks, *make(300, 8, 50, torch.bfloat16, return_lse=True), schedule=schedule)
    torch.use_deterministic_algorithms(False)


def agree_with_truth(ranks, x, w, target, kw, **options):
    """Losses within fp32 rounding, gradients within a few dtype roundings, as in lce_cases."""
    x, w = ((t.detach() * scale).requires_grad_() for t, scale in ((x, 1.0), (w, w.shape[1] ** -0.5)))
    kw = {name: t.float() if name == "weight" else t for name, t in kw.items()}
    given = {n: t.detach().double() if isinstance(t, torch.Tensor) else t for n, t in kw.items() if "return" not in n}
    leaves = [t.detach().double().requires_grad_() for t in (x, w)]
    if "linear_bias" in given:
        leaves.append(given["linear_bias"].requires_grad_())
    loss, stats = linear_cross_entropy_forward(*leaves[:2], target, **given, return_stats=True)
    want = [loss, *(stats if "return_stats" in kw else stats[:1])]
    true_grads = torch.autograd.grad(total(want), leaves)
    got, grads = ranks.step(x, w, target, kw, total, **options)
    for one, true in zip(got, want, strict=True):
        torch.testing.assert_close(one.double(), true.detach().double(), rtol=1e-5, atol=1e-5)
    for one, true in zip(grads, (true_grads[0], *(t[ranks.mine] for t in true_grads[1:])), strict=True):
        assert norm_error(one, true) <= (1e-5 if x.dtype == torch.float32 else 4 * unit_roundoff(x.dtype))


def gpu_case(dtype=torch.bfloat16, m=1000, h=512, v=5000, **options):
    """Equal on all ranks."""
    x, w, target, kw = make(m, h, v, dtype, **options)
    kw = {
        name: t.cuda().detach().requires_grad_(t.requires_grad) if torch.is_tensor(t) else t for name, t in kw.items()
    }
    w = w.detach() * (3.0 * h**-0.5)
    return x.detach().cuda().requires_grad_(), w.cuda().requires_grad_(), target.cuda(), kw


@check("shared", "gpu")
def options_on_gpus(groups):
    """The CPU tests cover the options; these run different kernels."""
    for split in ("small", "one"):
        for i, (name, dtype) in enumerate(
            (
                ("plain", torch.bfloat16),
                ("plain", torch.float32),
                ("unsmoothed", torch.bfloat16),
                ("all", torch.float16),
            )
        ):
            case = gpu_case(dtype, 300, 64, 700, reduction=REDUCTIONS[i % 3], **OPTIONS[name])
            case[3].update([{"return_lse": True}, {"return_stats": True}][i % 2])
            for schedule in ("stored", "recompute"):
                agree_with_truth(groups[split], *case, schedule=schedule, deterministic=i % 2 == 0)


@check("shared", "gpu")
def bits_and_synchronization(groups):
    """Equal loss bits over runs, ranks, schedules and communication options; by NCCL, no host synchronization."""
    ranks = groups["large"]
    x, w, target, kw = gpu_case()
    first = None
    for schedule, deterministic in itertools.product(SCHEDULES, (False, True)):
        options, runs = dict(schedule=schedule, deterministic=deterministic, chunk_size=384), []
        for i in range(10):
            with no_synchronization() if i > 0 and dist.get_backend() == "nccl" else contextlib.nullcontext():
                runs.append(ranks.step(x, w, target, kw, lambda outputs: outputs[0], **options))
        first = first or runs[0]
        for (loss,), (dx, dw) in runs:
            assert torch.equal(loss, first[0][0])
            assert torch.equal(dw, runs[0][1][1])
            assert torch.equal(dx, runs[0][1][0]) or not (deterministic or len(ranks.sizes) == 2)
    got, (dx, dw) = first
    want, true_grads = step(quackish.linear_cross_entropy, [x, w], x, w, target, kw, lambda outputs: outputs[0])
    torch.testing.assert_close(got[0], want[0], rtol=1e-6, atol=0)
    assert norm_error(dx, true_grads[0].double()) <= 2 * unit_roundoff(dx.dtype)
    assert norm_error(dw, true_grads[1][ranks.mine].double()) <= 2 * unit_roundoff(dx.dtype)
    for t in (got[0], dx):
        everyone = all_gather(t.view(1, -1), ranks.group)
        assert all(torch.equal(everyone[0], other) for other in everyone)


def digest(t):
    return hashlib.sha256(t.detach().cpu().contiguous().view(torch.uint8).numpy()).hexdigest()


@check("shared", "gpu")
def parts_of_the_input_on_gpus(groups):
    ranks = groups["large"]
    x, w, target, kw = gpu_case()
    rows = len(x) // len(ranks.sizes)
    mine = slice(rows * ranks.rank, rows * ranks.rank + rows)
    for schedule, deterministic in itertools.product(("stored", "recompute"), (False, True)):
        options = dict(deterministic=deterministic, schedule=schedule)
        (loss,), (dx, dw) = ranks.step(x, w, target, kw, lambda outputs: outputs[0], **options)
        options["sequence_parallel"] = True
        got, grads = ranks.step(x[mine], w, target, kw, lambda outputs: outputs[0], **options)
        assert torch.equal(got[0], loss)
        assert torch.equal(grads[1], dw)
        assert norm_error(grads[0], dx[mine].double()) <= 2 * unit_roundoff(dx.dtype)
    # four sequences, of each of which every rank has a part
    rows = slice(ranks.rank * 248 // len(ranks.sizes), (ranks.rank + 1) * 248 // len(ranks.sizes))
    mesh = dist.device_mesh.DeviceMesh.from_group(ranks.group, "cuda")
    x, target, kw = x[:992].detach(), target[:992], kw | {"return_lse": True}
    (loss, lse), (dx, dw) = ranks.step(x, w, target, kw, lambda outputs: outputs[0])
    part = DTensor.from_local(x.view(4, 248, -1)[:, rows], mesh, [Shard(1)], run_check=False)
    got, (dx_part, dw_part) = ranks.step(part, w, target.view(4, 248), kw, lambda outputs: outputs[0])
    torch.testing.assert_close([got[0], got[1].flatten()], [loss, lse])
    for grad, true in ((dx_part.to_local(), dx.view(4, 248, -1)[:, rows]), (dw_part, dw)):
        assert norm_error(grad, true.double()) <= 4 * unit_roundoff(dx.dtype)


@check("gpu")
def a_cuda_graph_of_the_step(groups):
    ranks = groups["large"]
    whole, w, target, _ = gpu_case()
    part = whole.chunk(len(ranks.sizes))[ranks.rank]
    for sequence_parallel, deterministic in itertools.product((False, True), (False, True)):
        x, shard = (part if sequence_parallel else whole).detach().clone().requires_grad_(), ranks.shard(w)
        buffer = torch.zeros(shard.shape, device="cuda")
        options = dict(
            group=ranks.group, grad_weight_out=buffer, schedule="stored", sequence_parallel=sequence_parallel,
            deterministic=deterministic,
        )  # fmt: skip

        def one_step(x=x, shard=shard, options=options):
            loss = linear_cross_entropy(x, shard, target, **options)
            return loss.detach(), torch.autograd.grad(loss, [x])[0]

        graph, results = captured(one_step)
        for _ in range(3):
            x.data.copy_(x.data.roll(1, 0))
            target.copy_(target.roll(3))
            buffer.zero_()
            graph.replay()
            replayed = [t.clone() for t in (*results, buffer)]
            buffer.zero_()
            eager = [*one_step(), buffer]
            assert all(torch.equal(one, other) for one, other in zip(replayed[::2], eager[::2], strict=True))
            assert norm_error(replayed[1], eager[1].double()) <= unit_roundoff(x.dtype)
            assert torch.equal(replayed[1], eager[1]) or not (deterministic or len(ranks.sizes) == 2)


@check("gpu")
def memory_is_that_of_one_rank(groups):
    """The peak is that of the one-GPU operation on the shard, plus a few numbers per row and rank."""
    m, h, v, n = 4096, 1024, 32_000, dist.get_world_size()
    mine = slice(m // n * dist.get_rank(), m // n * (dist.get_rank() + 1))
    x, w = (torch.randn(rows, h, device="cuda").bfloat16().requires_grad_() for rows in (m, v // n))
    target = torch.randint(v, (m,), generator=torch.Generator("cuda").manual_seed(0), device="cuda")
    parser = argparse.ArgumentParser()
    call_arguments.add_arguments(parser)
    words = f"linear_cross_entropy {m}x{h}x{v // n} --reduction none"
    for schedule, sequence_parallel in (("stored", False), ("stored", True), ("recompute", False)):
        part = x.detach()[mine].clone().requires_grad_() if sequence_parallel else x
        options = dict(schedule=schedule, sequence_parallel=sequence_parallel)

        def one_step(part=part, options=options):
            return torch.autograd.grad(linear_cross_entropy(part, w, target, **options), [part, w])

        one_step()
        torch.cuda.synchronize()
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        one_step()
        torch.cuda.synchronize()
        shown = torch.cuda.max_memory_allocated() - before
        asked = parser.parse_args([*words.split(), "--schedule", schedule])
        formula = call_arguments.dry_run_call(asked, gpu_of(dist.get_rank())).peak_bytes
        also = (16 * n + 200) * m + (x.nbytes + part.nbytes if sequence_parallel else 0)  # all of x, and summed dX
        assert shown <= 1.01 * formula + also + (8 << 20), (schedule, sequence_parallel, shown, formula)


@check("bits")
def bits_of_dx(groups):
    """Returned to compare with other runs."""
    x, w, target, kw = gpu_case()
    _, (dx, _) = groups["large"].step(x, w, target, kw, lambda outputs: outputs[0], deterministic=True)
    return digest(dx)


def main(rank, ranks, store, results, kind):
    splits = SPLITS | PAIRS if kind == "cpu" else ON_GPUS[ranks]
    nccl = kind in ("gpu", "bits")
    if nccl:
        torch.cuda.set_device(rank)
    timeout = datetime.timedelta(seconds=60)
    store = dist.FileStore(store, ranks)
    dist.init_process_group("nccl" if nccl else "gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    groups = {split: Ranks(sizes) for split, sizes in splits.items()}
    torch.set_num_threads(1)
    done, failed = {}, False
    for name, function in CHECKS[kind].items():
        try:
            done[name] = function(groups) or ""
        except Exception:  # ranks are no longer in step
            done[name], failed = traceback.format_exc(), True
            break
    with open(results, "w") as file:
        json.dump(done, file)
    if not failed:
        dist.barrier()  # other ranks may still communicate
    dist.destroy_process_group()
