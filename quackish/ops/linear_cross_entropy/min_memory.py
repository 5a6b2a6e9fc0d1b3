"""Linear cross entropy, `recompute` with a chunk_size: next to no memory but that of the gradients."""

import torch
from torch import Tensor

from quackish.configs.linear_cross_entropy import E_ITEMSIZE, OFFSET_MULTIPLE, even_chunks, round_up
from quackish.configs.linear_cross_entropy_lean import LeanBlock, LeanProblem, lean_blocks
from quackish.ops.linear_cross_entropy.exp_logits import Block, E, inside, matrix, padded, padded_strides, vector
from quackish.ops.linear_cross_entropy.schedules import (
    Call,
    Chunk,
    Forward,
    GradOutputs,
    Grads,
    GradsNeeded,
    begin,
    gather,
    run_rows,
)


def lean_problem(k, call: Call, wanted: GradsNeeded, chunk_rows: int) -> LeanProblem:
    (m, h), v = call.x.shape, call.w.shape[0]
    return LeanProblem(m, v, h, wanted.dw.itemsize, even_chunks(m, chunk_rows), k.num_tiles(v))


def lean_forward(k, call: Call, wanted: GradsNeeded, problem: LeanProblem) -> Forward:
    """loss, lse and dx; what they take lies in as much memory as dw, which backward makes there, has.

    Where the problem has `forward_rows`.
    """
    m, v, h, tiles = problem.m, problem.v, problem.h, problem.tiles
    rows, dtype = problem.forward_rows, call.x.dtype
    dx, there = matrix(call.x, m, h, wanted.dx), matrix(call.x, v, h, wanted.dw)
    ld = padded_strides(v)[0]
    e = inside(there, 0, rows, ld, dtype)[:, :v]
    x_at = round_up(rows * ld * E_ITEMSIZE, OFFSET_MULTIPLE)
    xc = inside(there, x_at, rows, h, dtype)
    part_sum = inside(there, round_up(x_at + rows * h * E_ITEMSIZE, OFFSET_MULTIPLE), rows, tiles, torch.float32)
    out = begin(k, call)
    for start in range(0, m, rows):
        here = slice(0, min(rows, m - start))
        chunk = Chunk(k, call, out, start, rows, dx, xc[here], part_sum=part_sum[here])
        its_e = E([Block(e[here], 0, v)])
        chunk.statistics_and_scale(its_e, None, None)
        its_e.dx(k, call.w, chunk.row_scale, out.rows, start, dx, None)
        del chunk  # what it allocated is gone before the next one allocates
    return out._replace(grads=Grads(dx))


def lean_backward(k, call: Call, kept: Forward, incoming: GradOutputs, wanted: GradsNeeded, chunk_rows: int) -> Grads:
    """dw, and db, with little memory: see configs/linear_cross_entropy/min_memory.py."""
    (m, h), v, rows = call.x.shape, call.w.shape[0], kept.rows
    dw = matrix(call.x, v, h, wanted.dw)
    db = vector(call.x, v, torch.float32) if wanted.db else None
    coefs = matrix(call.x, m, 4, torch.float32)
    run_rows(k, call, kept, 0, m, "coefs", incoming, coefs=coefs)
    problem = lean_problem(k, call, wanted, chunk_rows)
    scratch = _LeanScratch(call.x, problem)
    for block in lean_blocks(problem):
        v0, v1, part_rows, _, _ = block
        w, bias = call.w[v0:v1], None if call.bias is None else call.bias[v0:v1]
        xc, e, acc = scratch.of(block, dw)
        for start in range(0, m, part_rows):
            here = min(part_rows, m - start)
            part = slice(start, start + here)
            gather(k, call, rows, start, xc[:here])
            k.dlogits(
                xc[:here], w, bias, coefs[part], rows.slot_target[part], rows.num_live, start, None, call.softcap,
                False, v0, e[:here],
            )  # fmt: skip
            k.dw(e[:here], xc[:here], rows.num_live, start, acc, start > 0)
            if db is not None:
                k.bias_sum(e[:here], None, rows.num_live, start, db[v0:v1], start > 0)
        if acc.dtype != dw.dtype:
            _round_into(dw[v0:v1], acc, in_place=block.e_at is not None)
    return Grads(None, dw, db)


class _LeanScratch:
    """Made when it is first asked for: until then what is gathered beside the rows of x may have its place."""

    def __init__(self, like: Tensor, problem: LeanProblem):
        self.like, self.problem = like, problem
        self._x: Tensor | None = None
        self._e: tuple[Tensor, Tensor | None] | None = None

    def of(self, block: LeanBlock, dw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A part's rows of x and dlogits, and where the block's gradient is summed."""
        v0, v1, part_rows, e_at, x_at = block
        n, h, dtype = v1 - v0, dw.shape[1], self.like.dtype
        sums = self.problem.has_sums(part_rows)
        xc = self.x() if x_at is None else inside(dw, x_at, part_rows, h, dtype)
        if e_at is None:
            e, acc = self.e()
            return xc, e[:, :n], acc[:n] if sums else dw[v0:v1]
        acc = inside(dw, v0 * h * dw.itemsize, n, h, torch.float32) if sums else dw[v0:v1]
        return xc, inside(dw, e_at, part_rows, n, dtype), acc

    def x(self) -> Tensor:
        if self._x is None:
            self._x = matrix(self.like, self.problem.scratch_rows, self.problem.h, self.like.dtype)
        return self._x

    def e(self) -> tuple[Tensor, Tensor | None]:
        """dlogits and sums."""
        if self._e is None:
            rows, columns = self.problem.scratch_rows, self.problem.scratch_columns
            sums = None
            if self.problem.has_sums(rows):
                sums = matrix(self.like, columns, self.problem.h, torch.float32)
            self._e = padded(self.like, rows, columns, self.like.dtype), sums
        return self._e


def _round_into(out: Tensor, acc: Tensor, in_place: bool) -> None:
    """out = acc, 16 bits for 32; `in_place`: both begin at the same byte."""
    if not in_place:
        out.copy_(acc)
        return
    # Row i of out lies over row i // 2 of acc: rows [i, 2 i) may be written when those before i have been read.
    out[:1] = acc[:1].to(out.dtype)
    i = 1
    while i < len(out):
        out[i : 2 * i] = acc[i : 2 * i]
        i *= 2
