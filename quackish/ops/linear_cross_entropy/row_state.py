"""RowState: numbers per row of a call of linear cross entropy, in one allocation. Forward fills it, backward reads it.

The host and the kernels compute the addresses of its parts with `parts_at`.
"""

from typing import Any, NamedTuple

from quackish.kernels.gemm.problem import NUM_TICKETS


class Part(NamedTuple):
    dtype: str  # of 4 bytes
    by_slot: bool = False  # in a kernel, the pointer is to the first slot of the chunk


class RowStateParts(NamedTuple):
    """The parts in the order of memory: addresses on the host, pointers in kernels. A default describes the part.

    The parts after inv_divisor are vectors of m numbers, each aligned to 16 bytes.
    """

    tickets: Any = Part("int32")  # (NUM_TICKETS,), for split_k_tail; the last one for wave_sync. 0 between GEMMs
    num_live: Any = Part("int32")  # (1,)
    inv_divisor: Any = Part("float32")  # (1,)
    order: Any = Part("int32")  # the row of each slot, live rows first
    lse: Any = Part("float32")  # by row
    slot_target: Any = Part("int32", by_slot=True)  # -1 if the target is not a class
    row_max_bits: Any = Part("int32", by_slot=True)  # encoded
    target_logit: Any = Part("float32", by_slot=True)
    row_sum: Any = Part("float32", by_slot=True)
    # Backward does not read these: it recomputes them.
    row_shift: Any = Part("float32", by_slot=True)
    row_scale: Any = Part("float32", by_slot=True)
    # The target terms of live rows, sorted by class: sorted_grad * x[sorted_row] is added to dw[sorted_target].
    sorted_target: Any = Part("int32", by_slot=True)
    sorted_row: Any = Part("int32", by_slot=True)
    sorted_grad: Any = Part("float32", by_slot=True)
    flags: Any = Part("int32")  # (1 + ceil(rows / ROW_TILE),) of a chunk: whether any tile of rows is flagged; which
    # By row, and only with return_stats. Backward reads the entropy.
    log_prob: Any = Part("float32")
    entropy: Any = Part("float32")
    predicted: Any = Part("int32")


DESCRIPTIONS = RowStateParts()
_HEADER = NUM_TICKETS + 4  # in 4 bytes: the tickets, the two numbers, padding to 16 bytes
_VECTORS = RowStateParts._fields[RowStateParts._fields.index("order") :]
_WITHOUT_STATS = _VECTORS.index("log_prob")


def size(m: int, return_stats: bool) -> int:
    """The size of the allocation in 4 bytes."""
    return _HEADER + (len(_VECTORS) if return_stats else _WITHOUT_STATS) * -(-m // 4) * 4


def parts_at(address: Any, m: Any) -> RowStateParts:
    """The addresses of the parts of an allocation at `address`: int on the host, Int64 in kernels."""
    num_live, first, step = address + 4 * NUM_TICKETS, address + 4 * _HEADER, (m + 3) // 4 * 16
    return RowStateParts(address, num_live, num_live + 4, *[first + i * step for i in range(len(_VECTORS))])
