"""The base of attention's kernels for d 32 and at most 2 * BLOCK queries and keys.

A worker computes the scores of one head after another, of those that share a matrix of the bias. For at most BLOCK
queries and keys, each of the two consumer warp groups is a worker with a producer warp of its own, so that a CTA has a
pair of heads at a time. For more, both are one worker, and each has a block of rows. A bias that TMA cannot load is
copied to shared memory once per item.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, pipeline

from quackish.kernels.memory import load_at, vector_at
from quackish.ops.attention.arguments import BLOCK
from quackish.ops.attention.kernels.base_sm90 import AttentionSm90, Tiles
from quackish.ops.attention.kernels.bias_items import BiasItem, BiasItems
from quackish.ops.attention.kernels.cta import Cta, PerTensor
from quackish.ops.attention.kernels.items import Head
from quackish.ops.attention.kernels.scores import AttentionScores, ScoreBlock

VECTOR = 4  # values of the kept bias in 16 bytes


class SmallAttentionSm90(BiasItems, AttentionSm90):
    """A kernel has `__call__`, `score_blocks` and `consume`."""

    def __init__(self, problem, config):
        self.blocks = problem.blocks  # of queries and of keys: also the warp groups of a worker
        self.workers = config.num_wgs // self.blocks
        super().__init__(problem, config)
        self.other = self.own
        self.walks = False
        self.keeps_values = problem.bias_dtype is not None and self.bias is None

    def tile_sizes(self) -> tuple[int, int]:
        return self.blocks * BLOCK, self.blocks * BLOCK

    def shared_tiles(self) -> dict[str, Tiles]:
        """Each stage of a worker has `blocks` tiles of each tensor, and one of the bias."""
        stages = self.workers * self.config.num_stages
        tiles = {name: Tiles(self.own, self.blocks * stages) for name in self.problem.loaded}
        return tiles if self.bias is None else {**tiles, "bias": Tiles(self.bias, stages)}

    @property
    def stage_bytes(self) -> int:
        of_bias = 0 if self.bias is None else self.bias.bytes
        return len(self.problem.loaded) * self.blocks * self.own.bytes + of_bias

    def allocate(self, tma: PerTensor, args) -> Cta:
        """As in the base class. A bias that TMA cannot load: fp32, (VECTOR, threads, vectors of a thread)."""
        c, smem = self.config, cutlass.memory.SmemAllocator()
        shared = {name: tile.allocate(smem, count) for name, (tile, count) in self.tiles.items()}
        if self.keeps_values:
            layout = cute.make_layout((VECTOR, 128 * c.num_wgs, self.tile_q // 2 // VECTOR))
            shared["bias"] = smem.allocate_tensor(Float32, layout, 16)
        if self.problem.needs_stats:
            shared["stats"] = smem.allocate_tensor(Float32, cute.make_layout((BLOCK, 2, c.num_wgs)), 16)
        loaded = self.pipeline(self.workers * c.num_stages, self.stage_bytes, self.blocks)
        return Cta(
            args=args, tma=tma, shared=PerTensor(**shared), walk=None, items=None, own=None, loaded=loaded,
            values=None, biases=None,
        )  # fmt: skip

    # Workers

    def worker_of(self, wg: Int32) -> Int32:
        return wg if self.workers > 1 else Int32(0)

    def rows_of_wg(self, wg: Int32) -> Int32:
        return wg if self.blocks > 1 else Int32(0)

    def first_item(self, worker: Int32) -> Int32:
        """A worker has every `num_workers`-th item."""
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        return worker * ctas + cta

    def num_workers(self) -> Int32:
        ctas, _, _ = cute.arch.grid_dim()
        return ctas * self.workers

    def worker_state(self, worker: Int32, produces: bool = False):
        """In `Cta.loaded`, whose stages the workers have in turn."""
        return pipeline.PipelineState(self.workers * self.config.num_stages, Int32(0), worker, Int32(produces))

    def advanced(self, state):
        """The state of a worker's next stage."""
        for _ in range(self.workers):
            state.advance()
        return state

    # Producers

    def produce(self, cta: Cta):
        self.produce_for(cta, Int32(0))

    def produce_in_second_warp(self, cta: Cta):
        if self.workers > 1:
            self.produce_for(cta, Int32(1))

    @cute.jit
    def produce_for(self, cta: Cta, worker: Int32):
        """Loads all tiles of a worker, in one warp."""
        args, loaded, state = cta.args, cta.loaded, self.worker_state(worker, produces=True)
        cta = cta._replace(bias_policy=self.bias_policy(args.scores))
        for i in cutlass.range(self.first_item(worker), self.items(args), self.num_workers(), unroll=1):
            item = self.bias_item(i, args)
            for n in cutlass.range(item.first, item.last, unroll=1):
                loaded.producer_acquire(state)
                head, barrier = self.head_at(n, args, item.head), loaded.producer_get_barrier(state)
                for name in self.problem.loaded:
                    of_keys = const_expr(name in ("k", "v"))
                    part = self.part(cta, name, head.key_head if of_keys else head.query_head, head.batch)
                    for b in cutlass.range_constexpr(self.blocks):
                        self.load(part, b, 0, state.index * self.blocks + b, barrier)
                self.load_scores(cta, head, Int32(0), Int32(0), state, None)
                state = self.advanced(state)

    # Scores. A warp group has `score_blocks`, one accumulator of `tile` columns each.

    def score_blocks(self, head: Head, row_wg: Int32, thread: Int32) -> list[ScoreBlock]:
        """A warp group's blocks of a matrix of scores, by `tile` rows of queries or keys."""
        raise NotImplementedError

    def of_block(self, cta: Cta, b: int, tid: Int32) -> Cta:
        """cta with the bias of a consumer thread's b-th block, as `add_terms` expects it."""
        bias, tile = cta.shared.bias, self.config.tile
        if self.keeps_values:
            vectors = tile // 2 // VECTOR
            bias = cute.make_tensor(bias[None, tid, b * vectors].iterator, bias[None, tid, None].layout)
        elif self.bias is not None and b > 0:
            bias = cute.make_tensor(bias.iterator + b * tile * self.bias.span // self.bias.itemsize, bias.layout)
        return cta._replace(shared=cta.shared._replace(bias=bias))

    @cute.jit
    def keep_bias(self, cta: Cta, item: BiasItem, row_wg: Int32, thread: Int32, tid: Int32):
        """Copies the thread's values of a bias that TMA cannot load, for an item; 0 outside of the matrix."""
        if const_expr(self.keeps_values):
            s = cta.args.scores
            base = self.start(s.bias, item.head)
            blocks = [self.opaque(block) for block in self.score_blocks(item.head, row_wg, thread)]
            for b in cutlass.range_constexpr(len(blocks)):
                values, of_block = cute.make_rmem_tensor((self.config.tile // 2,), Float32), self.of_block(cta, b, tid)
                for i in cutlass.range_constexpr(cute.size(values)):
                    q, k = self.position(blocks[b], i)
                    values[i] = Float32(0.0)
                    if (q < s.num_q) & (k < s.num_k):
                        values[i] = load_at(base, Int64(q) * s.bias.row + Int64(k) * s.bias.column).to(Float32)
                for i in cutlass.range_constexpr(cute.size(values)):
                    self.kept_vector(of_block, i)[i % VECTOR] = values[i]

    def kept_vector(self, cta: Cta, i: int) -> cute.Tensor:
        """The VECTOR values with value i. cta: of `of_block`."""
        return vector_at(cta.shared.bias[None, i // VECTOR].iterator, 0, VECTOR)

    @cute.jit
    def add_terms(self, acc: cute.Tensor, factor: Float32, cta: Cta, stage: Int32, block: ScoreBlock, shift):
        if const_expr(not self.keeps_values):
            AttentionScores.add_terms(self, acc, factor, cta, stage, block, shift)
        else:
            for i in cutlass.range_constexpr(0, cute.size(acc), VECTOR):
                values = self.kept_vector(cta, i).load()
                for n in cutlass.range_constexpr(VECTOR):
                    self.add(acc, i + n, factor, values[n], shift)

    @cute.jit
    def add_fp32_bias(self, acc: cute.Tensor, factor: Float32, bias: cute.Pointer, block: ScoreBlock, shift):
        AttentionScores.add_fp32_bias(self, acc, factor, bias, self.opaque(block), shift)

    @cute.jit
    def mask_out(self, acc: cute.Tensor, cta: Cta, stage, block: ScoreBlock, kept):
        AttentionScores.mask_out(self, acc, cta, stage, self.opaque(block), kept)
