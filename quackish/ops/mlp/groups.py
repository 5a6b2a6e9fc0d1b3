"""Groups of rows without kernels: matrix products of each group's rows, without a synchronization on a GPU."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from quackish.ops.shared.matmul import accumulate_dtype, mm, operand_dtype

ALL = slice(None)
_BATCH_BYTES = 2**28  # of the operands and results of one batched matrix product. No other size was measured.


def is_on_gpu(t: Tensor) -> bool:
    return t.device.type != "cpu"


class Groups:
    """The groups of rows, in blocks of a fixed number of rows of one group.

    On a GPU, where the host does not know the sizes of groups, the number of blocks depends on shapes only. Free slots
    of a block, and all slots of blocks without rows, are row R: zeros that are added for reading and cut off after
    writing. The first blocks of all groups are multiplied by the weights in place, further blocks by copies of them.
    """

    # Not F.grouped_mm: it rounds to 16 bits before the activation; without sm_90 or sm_100 it reads offs on the host.

    def __init__(self, offs: Tensor, num_rows: int):
        on_gpu, num_groups = is_on_gpu(offs), offs.shape[0]
        # Illegal offsets: stay within bounds, and make all results NaN.
        starts = F.pad(offs, (1, 0)).long()
        is_bad = (starts.diff() < 0).any() | (starts[-1] > num_rows)
        bounds = starts.clamp(0, num_rows).cummax(0).values
        starts, ends = bounds[:-1], bounds[1:]
        row = torch.arange(num_rows, device=offs.device)
        self.of_row = torch.searchsorted(ends, row, right=True).clamp(max=num_groups - 1)
        self.is_live = (row < ends[-1]) & ~is_bad
        self.has_rows = (ends > starts) | is_bad
        self.fill = torch.zeros((), device=offs.device).masked_fill(is_bad, torch.nan)

        # On a GPU a block has room for twice the mean of a group's rows: smaller ones copy more weights, larger ones
        # multiply more zeros. With fewer rows than groups, most first blocks would be zeros.
        size = 64 * min(8, -(-num_rows // (32 * num_groups)) or 1) if on_gpu else 32
        num_first = num_groups if on_gpu and num_rows >= num_groups else 0
        self.batch_bytes = _BATCH_BYTES if on_gpu else 0

        def slots_of(groups: Tensor | slice, nth: Tensor | int) -> Tensor:
            """(blocks, size): the rows of the nth blocks of groups."""
            slots = (starts[groups] + nth * size)[:, None] + torch.arange(size, device=offs.device)
            return slots.masked_fill_((slots >= ends[groups, None]) | is_bad, num_rows)

        self.first = slots_of(slice(num_first), 0)
        blocks = (ends - starts + size - 1) // size
        more = blocks.sub_(1).clamp_(min=0) if num_first else blocks
        last = more.cumsum(0)
        most = num_rows // size + (0 if num_first else min(num_rows, num_groups))
        block = torch.arange(most if on_gpu else int(last[-1]), device=offs.device)
        self.group_of_more = torch.searchsorted(last, block, right=True).clamp(max=num_groups - 1)
        nth = block - (last - more)[self.group_of_more]
        self.more = slots_of(self.group_of_more, nth + 1 if num_first else nth)

    def batches(self, bytes_per_block: int) -> Iterator[tuple[slice | Tensor, Tensor]]:
        """(groups, slots) of some blocks at a time. The groups of first blocks are a slice, those of others indices."""
        count = max(1, self.batch_bytes // bytes_per_block)
        for part in (slice(i, i + count) for i in range(0, len(self.first), count)):
            yield part, self.first[part]
        for part in (slice(i, i + count) for i in range(0, len(self.more), count)):
            yield self.group_of_more[part], self.more[part]

    def padded(self, t: Tensor) -> Tensor:
        """t (R, n) with row R: 0, or NaN if the offsets are illegal."""
        return torch.cat([t, self.fill.to(t.dtype).expand(1, t.shape[1])])

    def defined(self, t: Tensor) -> Tensor:
        """t (R, ...), in place with 0 in rows of no group, and all NaN if the offsets are illegal."""
        return torch.where(self.is_live.view(-1, *[1] * (t.dim() - 1)), t, self.fill.to(t.dtype), out=t)

    def per_row(self, b: Tensor, rows: slice = ALL) -> Tensor:
        """(R, n): b (E, n) of each row's group, for some rows."""
        return b.index_select(0, self.of_row[rows])

    def rows_times(self, a: Tensor, *weights: Tensor) -> Tensor:
        """a @ w[g].T of a (R, k) and each w (E, n, k), side by side in fp32 (fp64). Rows of no group are arbitrary."""
        dtype, k, sizes = operand_dtype(a.dtype, a.device.type), a.shape[1], [w.shape[1] for w in weights]
        padded, size, n = self.padded(a), self.first.shape[1], sum(sizes)
        out = a.new_empty((padded.shape[0], n), dtype=accumulate_dtype(a.dtype))
        for groups, slots in self.batches((size + n) * k * a.itemsize + size * n * out.itemsize):
            rows = padded[slots].to(dtype)
            for w, columns in zip(weights, out.split(sizes, 1), strict=True):
                product = out.new_empty((*slots.shape, w.shape[1]))
                of_groups = w.mT[groups] if w.mT.is_contiguous() else w[groups].mT  # copied in the order of memory
                mm(rows, of_groups.to(dtype), product)
                columns.index_copy_(0, slots.flatten(), product.flatten(0, 1))
        return out[:-1]

    def sum_of_products(self, a: Tensor, b: Tensor) -> Tensor:
        """a[g].T @ b[g] of a (R, n) and b (R, k), (E, n, k) in fp32 (fp64). Blocks are summed in the order of rows."""
        dtype, wide, (n, k) = operand_dtype(a.dtype, a.device.type), accumulate_dtype(a.dtype), (a.shape[1], b.shape[1])
        total = a.new_empty((len(self.has_rows), n, k), dtype=wide)
        if not len(self.first):
            total.copy_(self.fill)
        a, b, size = self.padded(a), self.padded(b), self.first.shape[1]
        for groups, slots in self.batches(n * k * total.itemsize + size * (n + k) * a.itemsize):
            rows_a, rows_b = (t[slots].to(dtype) for t in (a, b))
            if isinstance(groups, slice):
                mm(rows_a.mT, rows_b, total[groups])
                continue
            product = total.new_empty((len(slots), n, k))
            mm(rows_a.mT, rows_b, product)
            for i in range(len(slots)):  # one at a time: index_add_ adds those of one group in any order
                total.index_add_(0, groups[i : i + 1], product[i : i + 1])
        return total

    def add(self, total: Tensor, out: Tensor) -> None:
        """Adds total (E, n, k) to out, but for groups without rows."""
        out.copy_(torch.where(self.has_rows[:, None, None], out + total, out))


class OneGroup:
    """All rows in one group: the methods of `Groups` that steps call. PyTorch's own matmuls."""

    def per_row(self, b: Tensor, rows: slice = ALL) -> Tensor:
        return b

    def defined(self, t: Tensor) -> Tensor:
        return t

    def rows_times(self, a: Tensor, *weights: Tensor) -> Tensor:
        dtype, sizes = operand_dtype(a.dtype, a.device.type), [w.shape[0] for w in weights]
        out = a.new_empty((a.shape[0], sum(sizes)), dtype=accumulate_dtype(a.dtype))
        for w, columns in zip(weights, out.split(sizes, 1), strict=True):
            mm(a.to(dtype), w.to(dtype).t(), columns)
        return out

    def sum_of_products(self, a: Tensor, b: Tensor) -> Tensor:
        dtype = operand_dtype(a.dtype, a.device.type)
        out = a.new_empty((a.shape[1], b.shape[1]), dtype=accumulate_dtype(a.dtype))
        mm(a.to(dtype).t(), b.to(dtype), out)
        return out

    def add(self, total: Tensor, out: Tensor) -> None:
        out.copy_(out + total)


def groups_of(offs: Tensor | None, num_rows: int) -> Groups | OneGroup:
    return OneGroup() if offs is None else Groups(offs, num_rows)
