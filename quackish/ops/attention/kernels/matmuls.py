"""The matmuls of one consumer warp group, by WGMMA, and the ping-pong of warp groups."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from quackish.ops.attention.arguments import BLOCK

PINGPONG = 4  # the first of the named barriers for it


class Matmuls:
    def mma_of_scores(self, n: int, accumulate: bool, in_registers: bool = False):
        """(BLOCK, k) @ (n, k)^T, in shared memory with contiguous k; the first one may be in registers."""
        return self._mma(OperandMajorMode.K, n, accumulate, in_registers)

    def mma_of_rows(self, in_registers: bool = True):
        """(BLOCK, k) in registers @ (k, d) in shared memory with contiguous d, added to the accumulator."""
        return self._mma(OperandMajorMode.MN, self.d, True, in_registers)

    def _mma(self, major_b: OperandMajorMode, n: int, accumulate: bool, in_registers: bool):
        source = warpgroup.OperandSource.RMEM if in_registers else warpgroup.OperandSource.SMEM
        mma = sm90.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, major_b, Float32, (1, 1, 1), tiler_mn=(BLOCK, n),
            a_source=source,
        )  # fmt: skip
        mma.set(warpgroup.Field.ACCUMULATE, accumulate)
        return mma

    def transposed(self, tiles: cute.Tensor):
        """(d, rows, count) of loaded tiles (rows, d, count)."""
        shape = (BLOCK, self.d, self.other.rows)
        layout = sm90.make_smem_layout_b(LayoutEnum.COL_MAJOR, shape, self.dtype, cute.size(tiles, mode=[2]))
        return cute.make_tensor(tiles.iterator, layout.outer)

    def fragments_a(self, mma, tiles: cute.Tensor):
        return mma.make_fragment_A(mma.get_slice(0).partition_A(tiles))

    def fragments_b(self, mma, tiles: cute.Tensor):
        return mma.make_fragment_B(mma.get_slice(0).partition_B(tiles))

    def accumulator(self, n: int):
        """Registers for a (BLOCK, n) accumulator: a thread's value c + 2 r + 4 j is as `SwizzledTile` says."""
        return cute.make_rmem_tensor(self.mma_of_scores(n, True).get_slice(0).partition_shape_C((BLOCK, n)), Float32)

    def operand(self, k: int):
        """Registers for a (BLOCK, k) operand. Value i is that of an accumulator of k columns."""
        shape = self.mma_of_rows().get_slice(0).partition_shape_A((BLOCK, k))
        return cute.make_rmem_tensor(shape, self.dtype)

    @cute.jit
    def round_to_operand(self, operand: cute.Tensor, acc: cute.Tensor):
        """operand = acc. The compiler would move its own conversions past the fence of the WGMMA that reads them."""
        words = cute.recast_tensor(operand, Int32)
        for i in cutlass.range_constexpr(cute.size(words)):
            words[i] = cute.arch.inline_ptx(
                "cvt.rn.%sx2.f32 {$w0}, {$r0}, {$r1};" % ("bf16" if self.dtype is BFloat16 else "f16"),
                write_only_types=[Int32], read_only_args=[acc[2 * i + 1], acc[2 * i]],
            )  # fmt: skip

    def multiply(self, acc, mmas, rA, rB):
        """Issues acc = A @ B for fragments (.., k blocks); mmas: [overwrite, add] or [add]."""
        warpgroup.fence()
        for kb in range(cute.size(rA, mode=[2])):
            cute.gemm(mmas[0] if kb == 0 else mmas[-1], acc, rA[None, None, kb], rB[None, None, kb], acc)
        warpgroup.commit_group()

    def multiply_tiles(self, acc, mma, rA, tiles: list):
        """Issues acc += A @ B, for B in tiles of equally many rows, one below the other."""
        warpgroup.fence()
        per_tile = cute.size(tiles[0], mode=[2])
        for t, rB in enumerate(tiles):
            for kb in range(per_tile):
                cute.gemm(mma, acc, rA[None, None, t * per_tile + kb], rB[None, None, kb], acc)
        warpgroup.commit_group()

    # Ping-pong: warp groups issue the WGMMAs of scores one after another, so that one has the tensor cores while the
    # others have their exponentials. All have equally many tiles.

    @cute.jit
    def start_pingpong(self, wg: Int32):
        if wg == self.config.num_wgs - 1:
            self.let_next_issue(wg)

    @cute.jit
    def wait_to_issue(self, wg: Int32):
        if const_expr(self.pingpong):
            cute.arch.barrier(barrier_id=PINGPONG + wg, number_of_threads=256)

    @cute.jit
    def let_next_issue(self, wg: Int32):
        if const_expr(self.pingpong):
            cute.arch.barrier_arrive(barrier_id=PINGPONG + (wg + 1) % self.config.num_wgs, number_of_threads=256)

    @cute.jit
    def end_pingpong(self, wg: Int32):
        if wg == 0:
            self.wait_to_issue(wg)
