"""A tile in shared memory as TMA loads and stores it, and each thread's part of it in the layout of an accumulator.

A tile (rows, columns) consists of blocks of `span` bytes of each row, one block after the other. In a block, chunks of
16 bytes are swizzled. In the accumulator of a warp group, thread t has rows 16 (t / 32) + (t % 32) / 4 + 8 r and
columns 8 j + 2 (t % 4) + c, as value c + 2 r + 4 j.
"""

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, BFloat16, Float32, Int32, const_expr
from cutlass.experimental import primitives as prims
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90


class SwizzledTile:
    def __init__(self, dtype, rows: int, columns: int):
        self.dtype, self.rows, self.columns = dtype, rows, columns
        self.itemsize = dtype.width // 8
        width = columns * self.itemsize
        self.span = next(span for span in (128, 64, 32) if width % span == 0)
        self.block = rows * self.span  # bytes
        self.bytes = rows * width

    def layout(self, count: int):
        """Of `count` tiles: (rows, columns, count)."""
        return sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (self.rows, 64, self.columns), self.dtype, count)

    def allocate(self, smem, count: int):
        """`count` tiles in shared memory: (rows, columns, count)."""
        layout = self.layout(count)
        return smem.allocate_tensor(self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)

    def _swizzle(self, row):
        return (((row * self.span) >> 7) & (self.span // 16 - 1)) << 4

    def _pointer(self, address, dtype, align: int):
        return cute.make_ptr(dtype, address, AddressSpace.smem, assumed_align=align)

    # 16 bits: 16 columns at a time, by ldmatrix and stmatrix. `base` is a result of rows_base or columns_base.

    @cute.jit
    def rows_base(self, tile: cute.Pointer, row0: Int32, thread: Int32) -> Int32:
        """For an accumulator of rows row0... of the tile. tile: address of the tile."""
        lane = thread % 32
        row = row0 + thread // 32 * 16 + lane % 16
        return tile.toint() + row * self.span + (((lane // 16) << 4) ^ self._swizzle(row))

    def rows_at(self, base: Int32, j: int) -> Int32:
        """The address of this thread's row for columns 8 j to 8 j + 15; j is even."""
        per_block = self.span // 16
        return (base ^ (j % per_block << 4)) + j // per_block * self.block

    @cute.jit
    def columns_base(self, tile: cute.Pointer, column0: Int32, thread: Int32) -> Int32:
        """For an accumulator of columns column0... of the tile, transposed: its rows are the tile's columns."""
        lane = thread % 32
        row = lane // 16 * 8 + lane % 8
        chunk = (column0 + thread // 32 * 16) // 8 + lane // 8 % 2
        per_block = const_expr(self.span // 16)
        within = (chunk % per_block << 4) ^ self._swizzle(row)
        return tile.toint() + chunk // per_block * self.block + row * self.span + within

    def columns_at(self, base: Int32, j: int) -> Int32:
        return base + j * 8 * self.span

    @cute.jit
    def load(self, address: Int32, transposed: cutlass.Constexpr[bool]):
        """Eight values, c + 2 r + 4 (j % 2)."""
        return cute.recast_tensor(self._words(address, transposed), self.dtype).load()

    @cute.jit
    def load_fp32(self, address: Int32, transposed: cutlass.Constexpr[bool]):
        """The same in fp32, with one instruction per value of bf16. The compiler takes two for every second one."""
        if const_expr(self.dtype is not BFloat16):
            return self.load(address, transposed).to(Float32)
        words, values = self._words(address, transposed), cute.make_rmem_tensor((8,), Float32)
        for i in cutlass.range_constexpr(4):
            values[2 * i] = (words[i] << 16).bitcast(Float32)
            values[2 * i + 1] = (words[i] & -0x10000).bitcast(Float32)
        return values.load()

    def _words(self, address: Int32, transposed: bool):
        """The eight values of `load`, two in a word."""
        layout = prims.MMALayout.COL if transposed else prims.MMALayout.ROW
        words = prims.ldmatrix(self._pointer(address, Int32, 16).to_llvm_ptr(), 4, layout)
        loaded = cute.make_rmem_tensor((4,), Int32)
        for i in range(4):
            loaded[i] = Int32(words[i])
        return loaded

    @cute.jit
    def store(self, address: Int32, values: cute.Tensor, transposed: cutlass.Constexpr[bool] = False):
        """values: eight, of 16 bits, as `load` returns them."""
        words = cute.recast_tensor(values, Int32)
        layout = prims.MMALayout.COL if const_expr(transposed) else prims.MMALayout.ROW
        prims.stmatrix(self._pointer(address, Int32, 16).to_llvm_ptr(), [words[i] for i in range(4)], layout)

    # Other sizes: element by element

    @cute.jit
    def element(self, tile: cute.Pointer, row: Int32, column: Int32, count: cutlass.Constexpr[int]):
        """A tensor of `count` contiguous elements at (row, column)."""
        at = column * self.itemsize
        address = tile.toint() + at // self.span * self.block + row * self.span + (at % self.span ^ self._swizzle(row))
        return cute.make_tensor(self._pointer(address, self.dtype, count * self.itemsize), cute.make_layout(count))
