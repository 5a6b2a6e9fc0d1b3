"""A warp group's own tiles: those of an item, which it keeps while it walks over the tiles of the other side."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, pipeline

from quackish.ops.attention.kernels.items import Head
from quackish.ops.attention.kernels.mask_walk import read_word


class OwnTiles:
    """A producer warp loads them, and writes to shared memory which item each warp group has."""

    def allocate_items(self, smem):
        """(words, stages of `own_pipeline`): items, as `produce_own` writes them. In front of the first tile."""
        words = len(Head._fields) + 2
        return smem.allocate_tensor(Int32, cute.make_layout((words, self.num_own)), 16)

    @property
    def num_own(self) -> int:
        """Stages of `own_pipeline`."""
        return self.config.num_wgs * self.config.own_stages

    def own_pipeline(self, tiles: int):
        """A stage has the `tiles` own tiles of an item and a warp group, which waits for no other warp group."""
        return self.pipeline(self.num_own, tiles * self.own.bytes, 1)

    @cute.jit
    def produce_own(self, loads, own, sItems, args, at_least: cutlass.Constexpr[int]):
        """Loads the own tiles of all items. loads: [(atom, shared memory)]; at_least: see `last_of`."""
        wgs = self.config.num_wgs
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.num_own)
        for turn in cutlass.range(self.turns(args), unroll=1):
            item = self.item(turn, args)
            words = (*item.head, item.tile, self.last_of(item, args, at_least))
            head = item.head.query_head if const_expr(self.rows_are_queries) else item.head.key_head
            parts = [self.part(atom, to, self.of_head(atom[1], head, item.head.batch), self.own) for atom, to in loads]
            for w in cutlass.range_constexpr(wgs):
                own.sync_object_empty.wait(state.index, state.phase)
                with cute.arch.elect_one():
                    for i in cutlass.range_constexpr(len(words)):
                        sItems[i, state.index] = words[i]
                    barrier = own.producer_get_barrier(state)
                    cute.arch.mbarrier_arrive_and_expect_tx(barrier, len(loads) * self.own.bytes)
                for a in cutlass.range_constexpr(len(loads)):
                    barrier = own.producer_get_barrier(state)
                    self.load(loads[a][0], parts[a], item.tile * wgs + w, 0, state.index, barrier)
                state.advance()
        own.producer_tail(state)

    def own_state(self, wg: Int32):
        """A consumer's state in `own_pipeline`."""
        return pipeline.PipelineState(self.num_own, Int32(0), wg, Int32(0))

    @cute.jit
    def own_item(self, args, sItems: cute.Tensor, own, state):
        """A consumer's next item, once its own tiles are loaded; its last tile is that of `last_of`."""
        own.consumer_wait(state)
        *head, tile, last = (read_word(sItems[i, None], state.index) for i in range(len(Head._fields) + 2))
        return self.item_at(tile, Head(*head), args.scores)._replace(last=last)

    def own_operands(self, n: int, shared: list) -> list:
        """[(MMAs of n columns, registers or fragments of all stages)] for `load_own`: as many registers as fit."""
        operands = []
        for i, tiles in enumerate(shared):
            in_registers = i < self.own_in_registers
            mmas = [self.mma_of_scores(n, add, in_registers) for add in (False, True)]
            if in_registers:
                operands.append((mmas, self.operand(self.d)))
            else:
                fragments = mmas[0].make_fragment_A(mmas[0].get_slice(0).partition_A(tiles))
                operands.append((mmas, fragments))
        return operands

    @cute.jit
    def load_own(self, operands: list, shared: list, stage: Int32, thread: Int32):
        """[(MMAs, operand)] of the item in a stage. Loads the own tiles that are kept in registers.

        Their stage is released at the item's end nevertheless: when it was released right here, the next item's tile
        overwrote rows before they were loaded, in the first items of a launch (`test_calls_in_a_row`).
        """
        for (_, operand), tiles in zip(operands[: self.own_in_registers], shared, strict=False):
            base = self.own.rows_base(tiles[None, None, stage].iterator, Int32(0), thread)
            for j in cutlass.range_constexpr(0, self.d // 8, 2):
                values = self.own.load(self.own.rows_at(base, j), False)
                for i in cutlass.range_constexpr(8):
                    operand[4 * j + i] = values[i]
        loaded = self.own_in_registers
        of_stage = [(mmas, fragments[None, None, None, stage]) for mmas, fragments in operands[loaded:]]
        return [*operands[:loaded], *of_stage]

    @cute.jit
    def release_own(self, own, state):
        """Returns the state for the next item."""
        self.release(own, state)
        for _ in cutlass.range_constexpr(self.config.num_wgs):
            state.advance()
        return state
