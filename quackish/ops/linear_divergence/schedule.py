"""The order of the steps: chunks of rows for the logits, blocks of rows for the gradients.

A block's gradients of logits are kept in x's dtype, so that dx and dw of a block take one matrix product each. Its rows
are computed in chunks, of which both models' logits are in memory in fp32. dw of several blocks is summed in fp32 and
rounded once.

Rows that count ("live") come first: `order` lists them, then the others. Kernels read their number on the device.
"""

from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from quackish.ops.linear_divergence import kernel_steps, reference
from quackish.ops.linear_divergence.problems import padded
from quackish.ops.linear_divergence.reference import RowOptions, RowResults, Side
from quackish.ops.shared.matmul import accumulate_dtype

Steps = ModuleType | kernel_steps.KernelSteps  # `reference` or kernels


class Layout(NamedTuple):
    """In rows."""

    chunk: int
    block: int


class Rows(NamedTuple):
    """The rows of a call. Those that do not count come last, and are 0."""

    x: Tensor  # (M, H) the student's
    teacher: Tensor  # (M, Ht)
    num_live: Tensor | None = None  # (1,) int32; None: all
    order: Tensor | None = None  # (M,) int64: the row of the user's tensors that row i is; None: i


class Models(NamedTuple):
    w: Tensor  # (V, H)
    student: Side
    teacher_w: Tensor  # (V, Ht)
    teacher: Side


class Needed(NamedTuple):
    """The dtypes of the gradients to compute, None for those not needed; dbias is fp32 (fp64)."""

    dx: torch.dtype | None
    dw: torch.dtype | None
    db: torch.dtype | None


class Grads(NamedTuple):
    dx: Tensor | None = None  # (M, H)
    dw: Tensor | None = None  # (V, H)
    db: Tensor | None = None  # (V,)


class Results(NamedTuple):
    loss: Tensor  # (M,) in the user's order
    entropy: Tensor | None  # (M,)
    grads: Grads
    dlogits: Tensor | None  # (M, V) in the order of Rows


# Layouts --------------------------------------------------------------------------------------------------------------

BLOCKS = 8192, 4096, 2048, 1024, 512, 256, 128
CHUNKS = 1024, 768, 512, 256, 128


def default_layout(h: int) -> Layout:
    """Chunks whose logits fit the memory that dw takes later, in 16 bits: h / 4 rows, but at least 768."""
    return Layout(next(rows for rows in CHUNKS if rows <= max(h // 4, 768)), BLOCKS[0])


class Sizes(NamedTuple):
    """What the memory of a call depends on, besides its layout."""

    m: int
    v: int
    h: int
    dtype: torch.dtype  # of the matrix products' operands
    needed: Needed
    per_row: bool  # reduction "none"
    masked: bool
    portable: str  # the type of the device that the portable path runs on, "" on kernels


def memory_of(layout: Layout, sizes: Sizes) -> int:
    """Bytes at the peak in addition to inputs, gradients and copies of inputs: at least what a call takes."""
    m, v, h, dtype, needed, per_row, masked, portable = sizes
    wide, chunk, block = accumulate_dtype(dtype).itemsize, min(layout.chunk, m), min(layout.block, m)
    stride, several = v if portable else padded(v), block < m

    # at any time: vectors of rows and classes, and what PyTorch's allocator adds to some tensors and to each block's dx
    always = (32 * m + 8 * v) * wide
    always += 0 if portable else (6 + several * -(-m // max(block, 1))) << 20

    # logits to dlogits
    logits = 2 * chunk * stride * wide + (reference.bytes_of_rows(chunk, v, wide, portable) if portable else 0)
    if not any(needed):
        return logits + always
    dlogits, dx = block * stride * dtype.itemsize, m * h * (needed.dx.itemsize if needed.dx else 0)
    dw = v * h * needed.dw.itemsize if needed.dw else 0
    rounds_dw = needed.dw != accumulate_dtype(dtype)
    sums = v * h * wide if dw and several and rounds_dw else 0
    rows = logits if several else max(logits - dw, 0)  # the first block's dw is allocated after the logits

    # dlogits to dx and dw
    products = SCRATCH if dw else 0
    if portable:
        products = (v * h * wide if dw and (several or rounds_dw) else 0) + block * h * wide
        products += block * v * wide if dtype.itemsize < wide else 0  # a CPU's operands in fp32
    if per_row:  # x times the rows' gradients, and dx before and after that
        products += 3 * m * h * wide

    end = dx * (several + 2 * masked)  # joined, and in the user's order
    scaled = dw + dx if portable and not per_row else 0  # by the gradient of the loss, in backward
    return max(dlogits + sums + max(rows, products, end), scaled) + always


SCRATCH = 24 << 20  # at least that of dw's matmul, whose last tiles are sums of parts: 18.4 MB on 132 SMs


def layout_within(limit: int, sizes: Sizes) -> Layout:
    """The layout with the largest blocks, then the largest chunks, within `limit` bytes. ValueError if none is."""
    chunks = [rows for rows in CHUNKS if rows <= default_layout(sizes.h).chunk]
    layouts = [Layout(chunk, block) for block in BLOCKS for chunk in chunks if chunk <= block]
    bytes_of = {layout: memory_of(layout, sizes) for layout in layouts}
    for layout, taken in bytes_of.items():
        if taken <= limit:
            return layout
    raise ValueError(
        f"linear_divergence: memory_limit is {limit} bytes, expected at least {min(bytes_of.values())}, the lowest "
        "peak of any block size, in addition to inputs, their copies and gradients"
    )


# Rows -----------------------------------------------------------------------------------------------------------------


def live_first(x: Tensor, teacher: Tensor, mask: Tensor | None) -> Rows:
    """Rows with the live ones first. A mask is not read on the host."""
    if mask is None:
        return Rows(x, teacher)
    order = torch.sort(~mask, stable=True).indices
    dead = ~mask[order][:, None]
    x, teacher = (t.index_select(0, order).masked_fill_(dead, 0) for t in (x, teacher))
    return Rows(x, teacher, mask.sum(dtype=torch.int32).view(1), order)


def in_users_order(t: Tensor, rows: Rows) -> Tensor:
    """A tensor with a row for each of `rows`, in the order of the user's rows; 0 in rows that do not count."""
    if rows.order is None or rows.num_live is None:
        return t
    dead = torch.arange(len(t), device=t.device) >= rows.num_live
    t.masked_fill_(dead.view(-1, *[1] * (t.dim() - 1)), 0)
    return torch.empty_like(t).index_copy_(0, rows.order, t)


# Steps ----------------------------------------------------------------------------------------------------------------


def run(
    steps: Steps, rows: Rows, models: Models, options: RowOptions, layout: Layout, needed: Needed,
    row_grads: Tensor | None = None, factor: Tensor | None = None, keep: bool = False,
) -> Results:  # fmt: skip
    """Losses and entropies, and the gradients of the sum of row_grads * loss (row_grads None: 1), times `factor`.

    row_grads: (M,) in the order of `rows`. factor: (1,) fp32 (fp64). keep: returns the gradients of the logits of all
    rows, which are one block, instead of those of x and w.
    """
    m, v = rows.x.shape[0], models.w.shape[0]
    dlogits, sums = None, Products(m <= layout.block, needed, [], None, None)
    options = options._replace(dlogits=keep or any(needed))
    if options.dlogits:
        dlogits = steps.matrix(min(layout.block, m), v, rows.x.dtype, rows.x.device)
    found: list[RowResults] = []
    for start in range(0, m, layout.block):
        size = min(layout.block, m - start)
        of_block = None if dlogits is None else dlogits[:size]
        found += of_chunks(steps, rows, models, options, layout.chunk, row_grads, range(start, start + size), of_block)
        if of_block is not None and not keep:
            sums = multiply(steps, of_block, rows, models, start, factor, sums)
    loss = in_users_order(torch.cat([part.loss for part in found]), rows)
    entropy = in_users_order(torch.cat([part.entropy for part in found]), rows) if options.entropy else None
    return Results(loss, entropy, finish(sums, rows, factor), dlogits if keep else None)


def of_chunks(
    steps: Steps, rows: Rows, models: Models, options: RowOptions, chunk: int, row_grads: Tensor | None, block: range,
    dlogits: Tensor | None,
) -> Iterator[RowResults]:  # fmt: skip
    """The results of a block's rows, whose gradients of logits go to `dlogits`."""
    for first in block[::chunk]:
        part = slice(first, min(first + chunk, block.stop))
        out = None if dlogits is None else dlogits[part.start - block.start : part.stop - block.start]
        student = steps.logits(rows.x[part], models.w, rows.num_live, first)
        teacher = steps.logits(rows.teacher[part], models.teacher_w, rows.num_live, first)
        grads = None if row_grads is None else row_grads[part]
        yield steps.rows(
            student, teacher, models.student, models.teacher, options, grads, rows.num_live, first, out
        )._replace(dlogits=None)
        del student, teacher  # frees the logits before the next ones


class Products(NamedTuple):
    """The gradients of the blocks so far."""

    is_one_block: bool
    needed: Needed
    dx: list[Tensor]
    dw: Tensor | None
    db: Tensor | None


def multiply(
    steps: Steps, dlogits: Tensor, rows: Rows, models: Models, start: int, factor: Tensor | None, sums: Products
) -> Products:
    """Adds the gradients of a block, whose first row is `start`."""
    size, v = dlogits.shape
    x, (dx_dtype, dw_dtype, db_dtype), dw, db = rows.x[start : start + size], sums.needed, sums.dw, sums.db
    if dx_dtype is not None:
        sums.dx.append(steps.dx(dlogits, models.w, rows.num_live, start, factor, dx_dtype))
    if dw_dtype is not None:
        if dw is None:
            dtype = dw_dtype if sums.is_one_block else accumulate_dtype(x.dtype)
            dw = torch.empty((v, x.shape[1]), dtype=dtype, device=x.device)
        steps.dw(dlogits, x, rows.num_live, start, factor, dw, start > 0)
    if db_dtype is not None:
        of_block = dlogits.sum(0, dtype=accumulate_dtype(x.dtype))
        db = of_block if db is None else db.add_(of_block)
    return sums._replace(dw=dw, db=db)


def finish(sums: Products, rows: Rows, factor: Tensor | None) -> Grads:
    """The gradients of all blocks, in their dtypes."""
    _, (_, dw_dtype, db_dtype), dxs, dw, db = sums
    dx = in_users_order(torch.cat(dxs) if len(dxs) > 1 else dxs[0], rows) if dxs else None
    if db is not None:
        db = (db if factor is None else db * factor).to(db_dtype)
    return Grads(dx, None if dw is None else dw.to(dw_dtype), db)


def gradients_of(
    steps: Steps, rows: Rows, models: Models, dlogits: Tensor, needed: Needed, row_grads: Tensor, factor: Tensor | None
) -> Grads:
    """The gradients, from those of the logits of all rows in one block: see `run`. They scale rows of dx and of x."""
    (dx_dtype, dw_dtype, db_dtype), by_row = needed, row_grads[:, None]
    wide = accumulate_dtype(rows.x.dtype)
    scaled_x = rows._replace(x=(rows.x * by_row).to(rows.x.dtype))
    products = Products(True, Needed(wide if dx_dtype else None, dw_dtype, None), [], None, None)
    products = multiply(steps, dlogits, scaled_x, models, 0, factor, products)
    dx, db = [(found * by_row).to(dx_dtype) for found in products.dx], None
    if db_dtype is not None:
        db = sum_of_rows(steps, dlogits, row_grads, rows)
    return finish(products._replace(needed=needed, dx=dx, db=db), rows, factor)


def sum_of_rows(steps: Steps, dlogits: Tensor, row_grads: Tensor, rows: Rows) -> Tensor:
    """The sum of row_grads * dlogits, (V,) fp32 (fp64), as a product with row_grads' parts in dlogits' dtype."""
    parts, wide = dlogits.new_zeros((len(dlogits), 8)), row_grads.dtype  # kernels need 8 columns
    for i in range(3):  # 16 bits hold 8 or 11 of 24 bits
        parts[:, i] = row_grads
        row_grads = row_grads - parts[:, i].to(wide)
    out = torch.empty((dlogits.shape[1], 8), dtype=wide, device=dlogits.device)
    steps.dw(dlogits, parts, rows.num_live, 0, None, out, False)
    return out.sum(1)
