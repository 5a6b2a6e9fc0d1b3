"""Checks of the vocabulary-parallel head, run by each of three processes: `parallel_checks.py RANK FILE_STORE RESULTS`.

Each check compares with one process that has the whole weight. test_parallel.py starts the processes.
"""

import datetime
import json
import sys
import traceback

import torch
import torch.distributed as dist
from lce_cases import OPTIONS, REDUCTIONS, SCHEDULES, make

import quackish
from quackish.parallel import linear_cross_entropy

RANKS = 3
V = 11
SPLITS = {"chunk": (4, 4, 3), "unequal": (1, 7, 3), "empty": (6, 0, 5)}
CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


class Ranks:
    """A group, and how many classes each of its ranks has."""

    def __init__(self, group, sizes):
        self.group, self.sizes, self.rank = group, sizes, group.rank()
        self.start = sum(sizes[: self.rank])
        self.mine = slice(self.start, self.start + sizes[self.rank])

    def shard(self, t):
        return None if t is None else t.detach()[self.mine].clone().requires_grad_(t.requires_grad)

    def step(self, x, w, target, kw, loss_of, **how):
        """The outputs' values and [dx, dw, db] of `loss_of(outputs)`, by the parallel head."""
        kw = {name: self.shard(t) if name in ("weight", "linear_bias") else t for name, t in kw.items()}
        x, w = x.detach().clone().requires_grad_(), self.shard(w)
        leaves = [t for t in (x, w, kw.get("linear_bias")) if t is not None]
        return step(linear_cross_entropy, leaves, x, w, target, kw, loss_of, group=self.group, **how)


def step(function, leaves, x, w, target, kw, loss_of, **how):
    outputs = function(x, w, target, **kw, **how)
    outputs = flat(outputs)
    grads = torch.autograd.grad(loss_of(outputs), leaves)
    return [t.detach() for t in outputs], list(grads)


def flat(outputs):
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    first, second = outputs
    return [first, second] if isinstance(second, torch.Tensor) else [first, *second]


def total(outputs):
    """A scalar to which every differentiable output contributes, each row differently."""
    sums = 0
    for i, t in enumerate(outputs[:4]):
        sums = sums + (t * torch.linspace(0.3, 1.7 + i, t.numel(), dtype=t.dtype).view(t.shape)).sum()
    return sums


def agree(ranks, x, w, target, kw, loss_of=total, close=1e-11, **how):
    """The parallel head and one process have the same outputs and gradients."""
    leaves = [t for t in (x, w, kw.get("linear_bias")) if t is not None]
    want, (dx, *true_grads) = step(quackish.linear_cross_entropy, leaves, x, w, target, kw, loss_of)
    got, grads = ranks.step(x, w, target, kw, loss_of, **how)
    true_grads = [dx, *(t[ranks.mine] for t in true_grads)]
    torch.testing.assert_close((got, grads), (want, true_grads), rtol=close, atol=close)
    for t in (*got, grads[0]):
        everyone = [torch.empty_like(t) for _ in ranks.sizes]
        dist.all_gather(everyone, t.contiguous(), group=ranks.group)
        assert all(torch.equal(t, other) for other in everyone), "ranks have different bits"
    return got, grads


def group_of(sizes, groups):
    return Ranks(groups[len(sizes)], sizes)


@check
def every_option(groups):
    for name, options in OPTIONS.items():
        for reduction in REDUCTIONS:
            for i, sizes in enumerate(SPLITS.values()):
                ranks = group_of(sizes, groups)
                case = make(v=V, reduction=reduction, **options)
                schedule = SCHEDULES[(i + len(name)) % 3]
                agree(ranks, *case, schedule=schedule, chunk_size=5)
                agree(ranks, *case[:3], {**case[3], "return_lse": True}, schedule=schedule)
                agree(ranks, *case[:3], {**case[3], "return_stats": True}, schedule=schedule)


def main(rank, store, results):
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS, timeout=datetime.timedelta(seconds=60)
    )
    groups = {RANKS: dist.group.WORLD, 2: dist.new_group([0, 1])}
    torch.set_num_threads(1)
    done = {}
    for name, function in CHECKS.items():
        try:
            function(groups)
        except Exception:  # the other ranks are at another place now
            done[name] = traceback.format_exc()
            break
        done[name] = ""
    with open(results, "w") as file:
        json.dump(done, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
