"""The tiles of a grouped GEMM, enumerated on the device: each tile's group, position, and number of steps along k."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from quackish.kernels.gemm.problem import TILE_K
from quackish.kernels.memory import load_at


@cute.jit
def uniform(x: Int32) -> Int32:
    """x, which all threads of a warp share, in a uniform register. Otherwise each WGMMA first moves its descriptors."""
    return cute.arch.warp_redux_sync(x, "max")


class Item(NamedTuple):
    """A cluster tile. Along m, the rows after the last group (the tail) form one more group."""

    group: Int32
    begin: Int32  # the group's first row
    length: Int32  # its rows
    tm: Int32  # the tile, in cluster tiles of the group
    tn: Int32
    steps: Int32  # along k, at least 1
    is_filled: Boolean  # D is Groups.fill, not a product: the tail, and everything with illegal offsets


class Groups(NamedTuple):
    """All groups. The tensors are in shared memory."""

    sBounds: cute.Tensor  # where each group begins, then the tail, then the number of rows
    # along m: the first cluster tile along m of group g, all groups counted in order; along k: the g-th longest group
    sOrder: cute.Tensor
    groups: Int32
    num_items: Int32
    tiles_m: Int32  # of each group, along k
    tiles_n: Int32
    k_steps: Int32  # along m
    fill: Float32  # 0, or NaN where offs decrease or pass the number of rows


class GroupWalk:
    def __init__(self, problem, config, raster):
        self.problem, self.config, self.raster = problem, config, raster
        self.along_m = problem.along == "m"
        self.cluster_rows = config.cluster_rows

    def allocate(self, smem):
        layout = cute.make_layout(self.problem.max_groups + 2)
        return [smem.allocate_tensor(Int32, layout, byte_alignment=16) for _ in range(2)]

    @cute.jit
    def begin(self, shared, args, tiles_m: Int32, tiles_n: Int32, k_steps: Int32) -> Groups:
        """Called by all threads of the CTA. k_steps, along m: of every tile; tiles_m, along k: of every group."""
        sBounds, sOrder = shared
        tid, _, _ = cute.arch.thread_idx()
        groups, threads = args.groups, const_expr(self.config.threads)
        for g in cutlass.range(tid, groups + 2, threads, unroll=1):
            bound = args.rows
            if g == 0:
                bound = Int32(0)
            elif g <= groups:
                if const_expr(args.offs is not None):  # else the only group has all rows
                    bound = load_at(args.offs, g - 1)
            sBounds[g] = bound
        cute.arch.sync_threads()
        # Each thread checks all bounds, and counts the tiles before (along m) or groups longer than (along k) its own.
        valid = Int32(1)
        for i in cutlass.range(groups + 1, unroll=4):
            if sBounds[i + 1] < sBounds[i]:  # a difference could wrap
                valid = Int32(0)
        for g in cutlass.range(tid, groups + 2, threads, unroll=1):
            before = Int32(0)
            if const_expr(self.along_m):
                for i in cutlass.range(g, unroll=4):
                    before += cute.ceil_div(sBounds[i + 1] - sBounds[i], self.cluster_rows)
                if valid == 0:  # all rows form the tail
                    before = Int32(0)
                    if g == groups + 1:
                        before = cute.ceil_div(args.rows, self.cluster_rows)
                sOrder[g] = before
            elif g < groups:
                mine = sBounds[g + 1] - sBounds[g]
                for i in cutlass.range(groups, unroll=4):
                    length = sBounds[i + 1] - sBounds[i]
                    if length > mine or (length == mine and i < g):
                        before += 1
                if valid == 0:
                    before = g
                sOrder[before] = g
        live = Int32(0)
        if const_expr(not self.along_m):
            for i in cutlass.range(groups, unroll=4):
                if sBounds[i + 1] > sBounds[i]:
                    live += 1
        cute.arch.sync_threads()
        if valid == 0:
            for g in cutlass.range(tid, groups + 1, threads, unroll=1):
                sBounds[g] = Int32(0)
            live = groups
        cute.arch.sync_threads()
        fill = Float32(0.0) if valid == 1 else Float32(float("nan"))
        if const_expr(self.along_m):
            num_items = sOrder[groups + 1] * tiles_n
        else:
            if const_expr(not self.problem.epilogue.accumulate):
                live = groups  # D of an empty group is set to 0
            num_items = live * tiles_m * tiles_n
        num_items = uniform(num_items)
        return Groups(sBounds, sOrder, groups, num_items, tiles_m, tiles_n, k_steps, fill)

    @cute.jit
    def item(self, j: Int32, w: Groups) -> Item:
        if const_expr(self.along_m):
            unit = j // w.tiles_n  # finds the group: its items start at a multiple of tiles_n
            g, half = Int32(0), const_expr(self.problem.max_groups)
            for _ in cutlass.range_constexpr(self.problem.max_groups.bit_length()):
                at = g + half
                if at <= w.groups:
                    if w.sOrder[at] <= unit:
                        g = at
                half = half // 2
            g = uniform(g)
            begin = uniform(w.sBounds[g])
            length = uniform(w.sBounds[g + 1]) - begin
            first = uniform(w.sOrder[g])
            tiles_m = uniform(w.sOrder[g + 1]) - first
            tm, tn = self.raster(j - first * w.tiles_n, tiles_m, w.tiles_n)
            is_filled = g == w.groups
            steps = Int32(1) if is_filled else w.k_steps
            return Item(g, begin, length, tm, tn, steps, is_filled)
        of_group = w.tiles_m * w.tiles_n
        g = uniform(w.sOrder[j // of_group])
        begin = uniform(w.sBounds[g])
        length = uniform(w.sBounds[g + 1]) - begin
        tm, tn = self.raster(j % of_group, w.tiles_m, w.tiles_n)
        steps = cutlass.max(cute.ceil_div(length, TILE_K), 1)
        return Item(g, begin, length, tm, tn, steps, w.fill != w.fill)
