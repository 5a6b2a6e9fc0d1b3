"""Access to global memory: vectors, single elements, rows, a counter."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr
from cutlass.experimental import primitives as prims


@cute.jit
def vector_at(base: cute.Pointer, offset, vec: cutlass.Constexpr[int]) -> cute.Tensor:
    """`vec` contiguous elements at base + offset, with the alignment that a vector access needs."""
    dtype = base.dtype
    align = min(16, vec * dtype.width // 8)
    ptr = cute.make_ptr(dtype, (base + offset).toint(), base.memspace, assumed_align=align)
    return cute.make_tensor(ptr, cute.make_layout(vec))


@cute.jit
def store_streaming(base: cute.Pointer, offset, values):
    """Stores a vector that is not read soon. A 16-byte store is marked evict-first in the L2."""
    out = vector_at(base, offset, cute.size(values.shape))
    raw = cute.make_rmem_tensor(out.layout, base.dtype)
    raw.store(values)
    if const_expr(cute.size(out) * base.dtype.width == 128):
        words = cute.recast_tensor(raw, Int32)
        cute.arch.inline_ptx(
            "st.global.cs.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
            read_only_args=[out.iterator.toint(), words[0], words[1], words[2], words[3]],
        )
    else:
        out.store(values)


@cute.jit
def load_at(base: cute.Pointer, at):
    return cute.make_tensor(base + at, cute.make_layout(1))[0]


@cute.jit
def load_eight(base: cute.Pointer, at, aligned: cutlass.Constexpr[bool]):
    """Loads eight elements: one vector access if aligned to 16 bytes, else one by one."""
    if const_expr(aligned):
        return vector_at(base, at, 8).load()
    raw = cute.make_rmem_tensor((8,), base.dtype)
    for k in cutlass.range_constexpr(8):
        raw[k] = load_at(base, at + k)
    return raw.load()


@cute.jit
def store_at(base: cute.Pointer, at, value):
    cute.make_tensor(base + at, cute.make_layout(1))[0] = value.to(base.dtype)


@cute.jit
def fill_row(row: cute.Pointer, n: cutlass.Constexpr[int], lane, value: cutlass.Constexpr[float]):
    """A warp fills n elements; n is a multiple of 8."""
    vec = const_expr(128 // row.dtype.width)
    filled = cute.make_rmem_tensor((vec,), row.dtype)
    filled.fill(value)
    for v in cutlass.range(lane, n // vec, 32, unroll=4):
        vector_at(row, v * vec, vec).store(filled.load())


@cute.jit
def convert_row(row: cute.Pointer, out: cute.Pointer, n: cutlass.Constexpr[int], lane, factor, batch):
    """A warp computes out = row * factor (None: 1) for n elements, a multiple of 8. Both may be the same memory.

    Each thread has `batch` vectors in flight.
    """
    num_vectors = const_expr(n // 8)
    whole = const_expr(num_vectors // (32 * batch) * (32 * batch))
    raw = cute.make_rmem_tensor((8, batch), row.dtype)
    for first in cutlass.range(0, whole, 32 * batch, unroll=1):
        for b in cutlass.range_constexpr(batch):
            raw[None, b].store(vector_at(row, (first + b * 32 + lane) * 8, 8).load())
        for b in cutlass.range_constexpr(batch):
            store_scaled(raw[None, b], out, (first + b * 32 + lane) * 8, factor)
    for b in cutlass.range_constexpr(batch):  # remainder
        if const_expr(whole + b * 32 < num_vectors):
            if whole + b * 32 + lane < num_vectors:
                raw[None, b].store(vector_at(row, (whole + b * 32 + lane) * 8, 8).load())
    for b in cutlass.range_constexpr(batch):
        if const_expr(whole + b * 32 < num_vectors):
            if whole + b * 32 + lane < num_vectors:
                store_scaled(raw[None, b], out, (whole + b * 32 + lane) * 8, factor)


@cute.jit
def store_scaled(raw: cute.Tensor, out: cute.Pointer, at, factor):
    values = raw.load().to(Float32)
    if const_expr(factor is not None):
        values = values * factor
    vector_at(out, at, cute.size(raw)).store(values.to(out.dtype))


@cute.jit
def increment(counter: cute.Pointer, limit: Int32) -> Int32:
    """Atomic increment that returns the old value; the `limit`-th call resets the counter to 0."""
    order, scope = prims.MemOrder.RELAXED, prims.MemScope.GPU
    return Int32(
        prims.atomicrmw(prims.AtomicOp.INC, counter.to_llvm_ptr(), Uint32(limit - 1), mem_order=order, syncscope=scope)
    )
