"""A warp group's own tiles: those of an item, which it keeps while it walks over the tiles of the other side."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, pipeline

from quackish.ops.attention.arguments import BLOCK
from quackish.ops.attention.kernels.cta import Cta
from quackish.ops.attention.kernels.items import Head
from quackish.ops.attention.kernels.mask_walk import read_word
from quackish.ops.attention.score_problems import STATS_BYTES


class Operand(NamedTuple):
    """The first operand of scores."""

    mmas: list  # of `multiply`: [overwrite, add]
    fragments: cute.Tensor  # in registers, or in shared memory


class OwnTiles:
    """A producer warp loads them, and writes to shared memory which item each warp group has."""

    def allocate_items(self, smem):
        """(words, stages of `Cta.own`): items, as `produce_own` writes them. In front of the first tile."""
        words = len(Head._fields) + 2
        return smem.allocate_tensor(Int32, cute.make_layout((words, self.num_own)), 16)

    @property
    def num_own(self) -> int:
        """Stages of `Cta.own`. Each is that of one warp group, which waits for no other."""
        return self.config.num_wgs * self.config.own_stages

    @property
    def own_stage_bytes(self) -> int:
        return len(self.problem.own) * self.own.bytes + BLOCK * STATS_BYTES * (self.stats_of == "own")

    def own_tiles(self, cta: Cta) -> list:
        """In shared memory: (BLOCK, d, stages of `Cta.own`) of each tensor."""
        return [getattr(cta.shared, name) for name in self.problem.own]

    @cute.jit
    def produce_own(self, cta: Cta):
        """Loads the own tiles of all items."""
        args, own, items, wgs = cta.args, cta.own, cta.items, self.config.num_wgs
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.num_own)
        for turn in cutlass.range(self.turns(args), unroll=1):
            item = self.item(turn, args)
            words = (*item.head, item.tile, self.last_of(item, args))
            head = item.head.query_head if const_expr(self.rows_are_queries) else item.head.key_head
            for w in cutlass.range_constexpr(wgs):
                own.sync_object_empty.wait(state.index, state.phase)
                with cute.arch.elect_one():
                    for i in cutlass.range_constexpr(len(words)):
                        items[i, state.index] = words[i]
                    barrier = own.producer_get_barrier(state)
                    cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.own_stage_bytes)
                row = item.tile * wgs + w
                for name in self.problem.own:
                    part = self.part(cta, name, head, item.head.batch)
                    self.load(part, row, 0, state.index, own.producer_get_barrier(state))
                if const_expr(self.stats_of == "own"):
                    self.load_stats(cta, item.head, row, state.index, own.producer_get_barrier(state))
                state.advance()
        own.producer_tail(state)

    def own_state(self, wg: Int32):
        """A consumer's state in `Cta.own`."""
        return pipeline.PipelineState(self.num_own, Int32(0), wg, Int32(0))

    @cute.jit
    def own_item(self, cta: Cta, state):
        """A consumer's next item, once its own tiles are loaded; its last tile is that of `last_of`."""
        cta.own.consumer_wait(state)
        *head, tile, last = (read_word(cta.items[i, None], state.index) for i in range(len(Head._fields) + 2))
        return self.item_at(tile, Head(*head), cta.args.scores)._replace(last=last)

    def own_operands(self, n: int, cta: Cta) -> list:
        """The own tiles as `Operand`s of `load_own`, of MMAs of n columns: in registers, or fragments of all stages."""
        operands = []
        for i, tiles in enumerate(self.own_tiles(cta)):
            in_registers = i < self.own_in_registers
            mmas = [self.mma_of_scores(n, add, in_registers) for add in (False, True)]
            operands.append(Operand(mmas, self.operand(self.d) if in_registers else self.fragments_a(mmas[0], tiles)))
        return operands

    @cute.jit
    def load_own(self, operands: list, cta: Cta, stage: Int32, thread: Int32):
        """The `Operand`s of the item in a stage. Loads the own tiles that are kept in registers. stage: of `Cta.own`.

        Their stage is released at the item's end nevertheless: when it was released right here, the next item's tile
        overwrote rows before they were loaded, in the first items of a launch (`test_calls_in_a_row`).
        """
        loaded = self.own_in_registers
        for (_, operand), tiles in zip(operands[:loaded], self.own_tiles(cta), strict=False):
            base = self.own.rows_base(tiles[None, None, stage].iterator, Int32(0), thread)
            for j in cutlass.range_constexpr(0, self.d // 8, 2):
                values = self.own.load(self.own.rows_at(base, j), False)
                for i in cutlass.range_constexpr(8):
                    operand[4 * j + i] = values[i]
        of_stage = [Operand(mmas, fragments[None, None, None, stage]) for mmas, fragments in operands[loaded:]]
        return [*operands[:loaded], *of_stage]

    @cute.jit
    def release_own(self, own, state):
        """Returns the state for the next item."""
        self.release(own, state)
        for _ in cutlass.range_constexpr(self.config.num_wgs):
            state.advance()
        return state
