"""The base of attention's kernels that compute scores: set-up on the host and in a CTA, and the roles of its warps.

A CTA has a tile of queries and walks over tiles of keys, or the reverse. Its own tiles are those of the side that it
keeps, one per consumer warp group; a producer warp loads tiles of the other side. The accumulator of q k^T has rows of
queries (`rows_are_queries`) or of keys.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, pipeline

from quackish.kernels.arguments import DTYPES, fake_args
from quackish.kernels.dependent_launch import after_previous
from quackish.ops.attention.arguments import BLOCK
from quackish.ops.attention.config import REGISTERS, AttentionConfig, own_in_registers
from quackish.ops.attention.kernels.cta import Cta, PerTensor
from quackish.ops.attention.kernels.items import AttentionItems
from quackish.ops.attention.kernels.loads import TileLoads
from quackish.ops.attention.kernels.matmuls import Matmuls
from quackish.ops.attention.kernels.own_tiles import OwnTiles
from quackish.ops.attention.kernels.results import Results
from quackish.ops.attention.kernels.scores import AttentionScores
from quackish.ops.attention.kernels.swizzled_tile import SwizzledTile


class Tiles(NamedTuple):
    """Tiles of a tensor in shared memory."""

    tile: SwizzledTile
    count: int


class AttentionSm90(AttentionItems, OwnTiles, TileLoads, Matmuls, AttentionScores, Results):
    """A kernel has `__call__`, `load_tile` and `consume`, and sets what differs from these.

    Call: `launch` on the host, `kernel` in a CTA, and `produce`, `produce_own` and `consume` in its warps.
    """

    rows_are_queries: bool
    pingpong = False
    stats_of: str | None = None  # "loaded" or "own": the tiles of queries whose shift and delta are loaded with them
    v_has_pipeline = False  # True if tiles of v have a pipeline of their own
    staged: SwizzledTile | None = None  # a warp group's dbias in shared memory before TMA stores it
    keeps_bias = False  # True if an item has one tile of the bias
    cluster = 1  # CTAs of a cluster
    least_tiles = 0  # 1 if an item has one tile even where a mask leaves it none

    def __init__(self, problem, config: AttentionConfig):
        self.problem, self.config = problem, config
        self.dtype, self.d = DTYPES[problem.dtype], problem.d
        self.own_in_registers = own_in_registers(problem, config)
        self.tile_q, self.tile_k = self.tile_sizes()
        other = config.tile
        self.block_q, self.block_k = (BLOCK, other) if self.rows_are_queries else (other, BLOCK)
        # A mask of keys leaves all scores of a key or none: the kernel for dk and dv clears rows of its results.
        self.masks_scores = problem.mask and (self.rows_are_queries or not problem.mask_of_keys)
        self.walks = self.masks_scores  # leaves out tiles without keys
        # Waits for x and dp together: both take little time, and the exponentials then overlap with what follows them.
        # At d 32 the kernels for dbias and for dk and dv take 6 % less time so, and that for dq 2 % more (H200).
        self.waits_once = self.d == 32
        self.own = SwizzledTile(self.dtype, BLOCK, self.d)
        self.other = SwizzledTile(self.dtype, config.tile, self.d)
        self.bias = self.mask = None
        if problem.bias_by_tma:
            self.bias = SwizzledTile(DTYPES[problem.bias_dtype], self.tile_q, self.tile_k)
        if problem.mask_by_tma:
            self.mask = SwizzledTile(cutlass.Uint8, self.tile_q, self.tile_k)
        self.tiles = self.shared_tiles()

    def tile_sizes(self) -> tuple[int, int]:
        """(queries, keys) of a tile of scores"""
        rows, other = BLOCK * self.config.num_wgs, self.config.tile
        return (rows, other) if self.rows_are_queries else (other, rows)

    def shared_tiles(self) -> dict[str, Tiles]:
        """By the names in `PerTensor`, in the order in which they are allocated."""
        stages = self.config.num_stages
        scores = {"mask": self.mask} if self.keeps_bias else {"bias": self.bias, "mask": self.mask}
        return {
            **{name: Tiles(self.own, self.num_own) for name in self.problem.own},
            **{name: Tiles(self.other, stages) for name in self.problem.loaded},
            **{name: Tiles(tile, stages) for name, tile in scores.items() if tile is not None},
        }

    @property
    def stage_bytes(self) -> int:
        """The bytes that are loaded per stage of `Cta.loaded`."""
        of_values = self.other.bytes if self.v_has_pipeline else 0
        return self.problem.stage_bytes(BLOCK * self.config.num_wgs, self.config.tile) - of_values

    @property
    def rows_of_stats(self) -> int:
        return BLOCK if self.stats_of == "own" else self.tile_q

    @property
    def registers(self) -> tuple[int, int]:
        """(registers per thread of the producer, registers per thread of the consumers)"""
        return REGISTERS[self.config.num_wgs]

    def ctas(self, args) -> Int32:
        return cutlass.min(self.items(args), args.scores.max_ctas)

    def fake_args(self):
        return fake_args(self.problem)

    # Host

    @cute.jit
    def launch(self, tensors: dict, args, stream):
        """Launches the kernel with TMA atoms for all tensors, in the order of `tensors`: it is that of its parameters.

        tensors: (rows, columns, heads, batch), by the names in `PerTensor`, without statistics, bias, mask and dbias
        """
        s = args.scores
        tma = {name: self.tma(self.tiles[name].tile, tensor) for name, tensor in tensors.items()}
        if const_expr(self.stats_of is not None):
            tma["stats"] = self.tma_of_stats(args)
        if const_expr(self.bias is not None):
            tma["bias"] = self.tma(self.bias, self.broadcast_scores(s.bias, s))
        if const_expr(self.mask is not None):
            tma["mask"] = self.tma(self.mask, self.broadcast_scores(s.mask, s))
        if const_expr(self.staged is not None):
            tma["dbias"] = self.tma(self.staged, self.like_scores(args.dbias, s), stores=True)
        self.kernel(tma, args).launch(
            grid=[self.ctas(args), 1, 1], block=[self.config.threads, 1, 1], min_blocks_per_mp=1, stream=stream,
            use_pdl=True, cluster=[self.cluster, 1, 1] if self.cluster > 1 else None,
        )  # fmt: skip

    # Device

    @cute.kernel
    def kernel(self, tma: dict, args):
        tid, _, _ = cute.arch.thread_idx()
        wg = cute.arch.make_warp_uniform(tid // 128)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        # shared memory and barriers
        cta = self.allocate(PerTensor(**tma), args)
        pipeline.pipeline_init_arrive(cluster_shape_mn=(self.cluster, 1), is_relaxed=True)
        self.wait_at_start()
        pipeline.pipeline_init_wait(cluster_shape_mn=(self.cluster, 1))

        # warps 0 and 1 load, and the consumer warp groups compute
        if wg == 0:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp == 0:
                self.produce(cta)
            elif warp == 1:
                self.produce_in_second_warp(cta)
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            self.consume(cta, wg - 1, tid % 128)
        self.wait_at_end()

    def allocate(self, tma: PerTensor, args) -> Cta:
        """Allocates shared memory and makes pipelines.

        Own tiles: (BLOCK, d, own stages). Loaded tiles: (tile, d, stages). Bias and mask: (tile_q, tile_k, stages).
        Statistics: (rows_of_stats, 2, stages) fp32.
        """
        c, smem, own = self.config, cutlass.memory.SmemAllocator(), self.problem.own
        walk, items = self.allocate_walk(smem), self.allocate_items(smem) if own else None
        shared = {name: tile.allocate(smem, count) for name, (tile, count) in self.tiles.items()}
        if self.stats_of is not None:
            stages = self.num_own if self.stats_of == "own" else c.num_stages
            layout = cute.make_layout((self.rows_of_stats, 2, stages))
            shared["stats"] = smem.allocate_tensor(Float32, layout, 128)
        return Cta(
            args=args, tma=tma, shared=PerTensor(**shared), walk=walk, items=items,
            own=self.pipeline(self.num_own, self.own_stage_bytes, 1) if own else None,
            loaded=self.pipeline(c.num_stages, self.stage_bytes, c.num_wgs),
            values=self.pipeline(c.num_stages, self.other.bytes, c.num_wgs) if self.v_has_pipeline else None,
            biases=self.pipeline(c.own_stages, self.bias.bytes, c.num_wgs) if self.keeps_bias else None,
            exchange=self.allocate_exchange(smem),
        )  # fmt: skip

    def allocate_exchange(self, smem):
        """What the CTAs of a cluster exchange, if there is one."""

    def pipeline(self, num_stages: int, num_bytes: int, num_wgs: int):
        """num_wgs: the warp groups that read each stage."""
        return pipeline.PipelineTmaAsync.create(
            num_stages=num_stages, tx_count=num_bytes, cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 4 * num_wgs), defer_sync=True,
        )  # fmt: skip

    def wait_at_start(self):
        """Waits for the previous kernel, while the barriers are initialized."""
        after_previous()

    def wait_at_end(self):
        """Waits for the previous kernel if `wait_at_start` did not."""

    def produce_in_second_warp(self, cta: Cta):
        if self.problem.own:
            self.produce_own(cta)

    @cute.jit
    def produce(self, cta: Cta):
        """Loads the tiles of the other side for all items of the CTA, in one warp."""
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.config.num_stages)
        cta = cta._replace(bias_policy=self.bias_policy(cta.args.scores))
        for turn in cutlass.range(self.turns(cta.args), unroll=1):
            item = self.item(turn, cta.args)
            self.load_kept_bias(cta, item, turn)
            state = self.load_item(cta, item, state)
        cta.loaded.producer_tail(state.clone())
        if const_expr(cta.values is not None):
            cta.values.producer_tail(state)

    def load_kept_bias(self, cta: Cta, item: Any, turn: Int32):
        """Loads the tile of the bias that is kept during an item, if there is one."""

    def load_tile(self, cta: Cta, item: Any, n: Int32, state, is_full):
        """Loads tile n of an item into a stage. is_full: 1 if the mask leaves all keys, else 0; None without a mask."""
        raise NotImplementedError

    def consume(self, cta: Cta, wg: Int32, thread: Int32):
        """Computes all items of the CTA, in consumer warp group wg, from 0."""
        raise NotImplementedError

    def loaded_state(self):
        """A consumer's state in `Cta.loaded`."""
        return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.config.num_stages)
