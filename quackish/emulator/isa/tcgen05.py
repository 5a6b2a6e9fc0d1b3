"""Tensor memory and the matrix instructions that use it (sm_100a). (PTX: TensorCore 5th Generation Family)

A product reads its operands and updates tensor memory when a tcgen05.commit that tracks it completes; a load writes its
registers, and a store tensor memory, at tcgen05.wait. See `completion`.
"""

import numpy as np

from quackish.emulator import late_loads, matrices
from quackish.emulator.clocks import joined
from quackish.emulator.errors import Fault
from quackish.emulator.isa import action
from quackish.emulator.isa.synchronization import mbarrier_at
from quackish.emulator.isa.tensor_allocation import by_warp, check_group, shared_addresses, uniform
from quackish.emulator.memory import OFFSET_MASK, RANK_SHIFT
from quackish.emulator.tensor_memory import pair_of, share_of
from quackish.emulator.threads import VIEW_OF_TYPE, WARP

_U32 = VIEW_OF_TYPE["u32"]


# Products


def _operand_in_shared_memory(cta, bits, rows, element, mn_major):
    """A matrix as fp32, with its rows and 32 bytes of k."""
    descriptor = matrices.descriptor_sm100(bits)
    cta.shared.check(*matrices.extent(descriptor, rows, element, mn_major))
    views = cta.shared.views[matrices.ELEMENT_BYTES[element]]
    return matrices.in_shared_memory(views, descriptor, rows, element, mn_major)


def _granules(cta, bits, rows, element, mn_major):
    """The granules of shared memory that a matrix is in."""
    descriptor = matrices.descriptor_sm100(bits)
    cta.shared.check(*matrices.extent(descriptor, rows, element, mn_major))
    return cta.shared.races.shadow.of_chunks(matrices.chunks(descriptor, rows, element, mn_major))


class _Product:
    """One tcgen05.mma, with the values that it has read from registers when it is issued."""

    def __init__(self, cta, group, kind, d, a, b, descriptor, masks, adds, scale):
        self.shape = matrices.instruction_descriptor(descriptor, kind, group)
        self.ctas = [cta] if group == 1 else pair_of(cta)
        self.d, (self.a, self.a_is_address), self.b = matrices.tensor_address(d), a, b
        # disable-output-lane: "If a bit in the mask is 1, then the corresponding lane in the Tensor Memory for the
        # resultant matrix D will not be updated."
        mask = sum(word << 32 * i for i, word in enumerate(masks))
        self.disabled = [np.array([mask >> 128 * i + lane & 1 for lane in range(128)], bool) for i in range(group)]
        self.disabled = self.disabled if mask else None
        self.adds, self.scale = adds, np.float32(2.0**-scale)
        self._check()

    @property
    def k(self):
        """The size of the product along k: 32 bytes."""
        return 32 // matrices.ELEMENT_BYTES[self.shape.a]

    def _check(self):
        """Raises Fault if A or D is where no product can have it."""
        shape, ctas = self.shape, len(self.ctas)
        # Tensor Memory Datapath Lane Alignment: 0, and for layout F "0 or 16", "across matrices A, D"
        aligned = (0, 16) if (shape.m, ctas) == (64, 1) else (0,)
        if self.d.lane not in aligned:
            raise Fault(
                "tensor-memory-lanes", f"tcgen05.mma of m = {shape.m} into lane {self.d.lane}; valid are {aligned}"
            )
        if self.a_is_address and matrices.tensor_address(self.a).lane != self.d.lane:
            raise Fault(
                "tensor-memory-lanes",
                f"tcgen05.mma with A at {self.a:#x} and D at lane {self.d.lane}: the lanes must be the same",
            )
        for cta in self.ctas:
            share_of(cta).check(self.d.lane, self.d.column, shape.n // (2 if (shape.m, ctas) == (128, 2) else 1))

    def _rows_of_a(self, cta):
        """A CTA's rows of A as fp32, from shared memory or tensor memory."""
        shape, rows = self.shape, self.shape.m // len(self.ctas)
        if not self.a_is_address:
            return _operand_in_shared_memory(cta, self.a, rows, shape.a, shape.mn_major_a)
        address, share = matrices.tensor_address(self.a), share_of(cta)
        share.check(address.lane, address.column, 8)
        lanes = address.lane + matrices.lanes_of_rows(shape.m, len(self.ctas))
        return matrices.tensor_words_to_a(share.memory.words[lanes, address.column : address.column + 8], shape.a)

    def announce(self, cta, thread):
        """Tells `races` what the product will access."""
        races, shape, ctas = cta.grid.races, self.shape, self.ctas
        issuer = races.product_of(cta, thread)
        lanes = self.d.lane + (matrices.lanes_of_rows(64, 1) if (shape.m, len(ctas)) == (64, 1) else np.arange(128))
        columns = shape.n // (2 if (shape.m, len(ctas)) == (128, 2) else 1)
        for member in ctas:
            if self.a_is_address:
                address = matrices.tensor_address(self.a)
                member.tensor_races.read_later(member.tensor_races.granules(lanes, address.column, 8), *issuer)
            else:
                rows = shape.m // len(ctas)
                member.shared.races.read_later(_granules(member, self.a, rows, shape.a, shape.mn_major_a), *issuer)
            rows = shape.n // len(ctas)
            member.shared.races.read_later(_granules(member, self.b, rows, shape.b, shape.mn_major_b), *issuer)
            if self.adds and not member.tensor_races.are_written(lanes, self.d.column, columns):
                where = f"tensor memory from column {self.d.column} on of {member}"
                cta.grid.found(Fault("uninitialized", f"tcgen05.mma adds to {where}, which nothing wrote"))
            member.tensor_races.write_later(member.tensor_races.granules(lanes, self.d.column, columns), *issuer)

    def multiply(self):
        """Computes the product from memory as it is now, and updates D in each CTA."""
        shape, ctas = self.shape, self.ctas
        a = np.concatenate([self._rows_of_a(cta) for cta in ctas])
        b = np.concatenate(
            [_operand_in_shared_memory(cta, self.b, shape.n // len(ctas), shape.b, shape.mn_major_b) for cta in ctas]
        )
        sign = np.float32(-1 if shape.negate_a != shape.negate_b else 1)
        parts = matrices.accumulator_to_lanes((a * sign) @ b.T, len(ctas))
        for i, (cta, (lanes, product)) in enumerate(zip(ctas, parts, strict=True)):
            self._update(cta, lanes + self.d.lane, product, None if self.disabled is None else self.disabled[i])

    def _update(self, cta, lanes, product, disabled):
        """Stores or adds a CTA's part of D, except in disabled lanes."""
        share, columns = share_of(cta), slice(self.d.column, self.d.column + product.shape[1])
        share.check(self.d.lane, self.d.column, product.shape[1])
        words = share.memory.words[lanes, columns]
        if self.adds:
            old = words.view(np.float32) if self.shape.d == "f32" else _low_half_to_f32(words)
            product = product + old * self.scale
        # "if the type of elements of the matrix D is 16 bits then a Tensor Memory word would contain a single 16-bit
        # element in its lower 16 bits." The upper half is poison here.
        new = product.view(np.uint32) if self.shape.d == "f32" else _f16_words(product)
        if disabled is not None:
            new = np.where(disabled[lanes][:, None], words, new)
        share.memory.words[lanes, columns] = new


def _low_half_to_f32(words):
    return words.astype(np.uint16).view(np.float16).astype(np.float32)


def _f16_words(values):
    return values.astype(np.float16).view(np.uint16).astype(np.uint32) | np.uint32(0xFFFF0000)


def _multiply(lanes, group, kind, d, a, b, descriptors, masks, adds, scale, collector):
    """Issues a product for each thread: "tcgen05.mma has single thread semantics"."""
    check_group(lanes, group)
    cta = lanes.cta
    a_values, a_is_address = a
    for i, thread in enumerate(lanes.threads.tolist()):
        product = _Product(
            cta, group, kind, int(d[i]), (int(a_values[i]), a_is_address), int(b[i]), int(descriptors[i]),
            [int(mask[i]) for mask in masks], bool(adds[i]), scale,
        )  # fmt: skip
        _use_collector(cta, collector)
        cta.grid.mmas += 1
        cta.grid.flops += 2 * product.shape.m * product.shape.n * product.k
        product.announce(cta, thread)
        cta.grid.completion.queue(cta, thread, product.multiply)


def _use_collector(cta, usage):
    """Checks the use of the collector buffer, which keeps A for the next product.

    Hardware may read A from memory again all the same, as the emulator always does.
    """
    share = share_of(cta)
    # "This requires a previous fill to the collector buffer to be still valid."
    if usage in ("use", "lastuse") and not share.has_collected:
        raise Fault(
            "collector", f"tcgen05.mma with .collector::a::{usage}, and no A was filled into the collector buffer"
        )
    share.has_collected = usage in ("fill", "use")


def _declare_products(group, kind, collector, usage):
    opcode = f"tcgen05.mma.cta_group::{group}.kind::{kind}{collector}"
    mask = f"{{b32*{4 * group}}}"
    scales = ["", ", immediate"] if kind != "f8f6f4" else [""]  # "only valid for .kind::tf32 and .kind::f16"
    for a_operand in ("u64", "[u32]"):

        def multiply(lanes, d, a, b, descriptors, masks, adds, scale=0, a_is_address=a_operand == "[u32]"):
            # "The valid range of values for argument scale-input-d is [0, 15]."
            if not 0 <= scale <= 15:
                raise Fault("invalid-operand", f"tcgen05.mma with scale-input-d {scale}; valid are 0 to 15")
            _multiply(lanes, group, kind, d, (a, a_is_address), b, descriptors, masks, adds, scale, usage)

        def multiply_all_lanes(lanes, d, a, b, descriptors, adds, scale=0, multiply=multiply):
            multiply(lanes, d, a, b, descriptors, [], adds, scale)

        for scale in scales:
            action(opcode, f"[u32], {a_operand}, u64, u32, {mask}, pred{scale}")(multiply)
            action(opcode, f"[u32], {a_operand}, u64, u32, pred{scale}")(multiply_all_lanes)


for _group in (1, 2):
    for _kind in ("f16", "tf32", "f8f6f4"):
        _declare_products(_group, _kind, "", "discard")
        for _usage in ("fill", "use", "lastuse", "discard"):
            _declare_products(_group, _kind, f".collector::a::{_usage}", _usage)


# Copies from shared memory. (PTX, tcgen05.cp)

# Shape and multicast: (rows, bytes of a row, the first lane of each 32 rows in each of their places).
_COPIES = {
    "128x256b": (128, 32, ((0,), (32,), (64,), (96,))),
    "128x128b": (128, 16, ((0,), (32,), (64,), (96,))),
    "64x128b.warpx2::02_13": (64, 16, ((0, 64), (32, 96))),
    "64x128b.warpx2::01_23": (64, 16, ((0, 32), (64, 96))),
    "32x128b.warpx4": (32, 16, ((0, 32, 64, 96),)),
}


def _copy(lanes, group, shape, addresses, descriptors):
    """Issues the copy of each thread: "tcgen05.cp has single thread semantics", and is in order with tcgen05.mma."""
    check_group(lanes, group)
    rows, size, places = _COPIES[shape]
    cta = lanes.cta
    ctas = [cta] if group == 1 else pair_of(cta)
    for thread, bits, descriptor in zip(lanes.threads.tolist(), addresses.tolist(), descriptors.tolist(), strict=True):
        address = matrices.tensor_address(bits)
        if address.lane:
            raise Fault("tensor-memory-lanes", f"tcgen05.cp of .{shape} to lane {address.lane}; it begins at lane 0")
        for member in ctas:
            _announce_copy(cta, thread, member, descriptor, rows, size, address.column)

        def copy(address=address, descriptor=descriptor):
            for member in ctas:
                share_of(member).check(0, address.column, size // 4)
                words = matrices.rows_in_shared_memory(member.shared.views[4], descriptor, rows, size)
                for i, first_lanes in enumerate(places):
                    for first in first_lanes:
                        target = slice(first, first + 32), slice(address.column, address.column + size // 4)
                        share_of(member).memory.words[target] = words[32 * i : 32 * i + 32]

        cta.grid.completion.queue(cta, thread, copy)


def _announce_copy(cta, thread, member, descriptor, rows, size, column):
    """Checks a copy of one CTA, and tells `races` what it will access."""
    share_of(member).check(0, column, size // 4)
    issuer = cta.grid.races.product_of(cta, thread)
    chunks = matrices.row_chunks(descriptor, rows, size)
    member.shared.check(16 * int(chunks.min()), 16 * int(chunks.max()) + 16)
    member.shared.races.read_later(member.shared.races.shadow.of_chunks(chunks), *issuer)
    granules = member.tensor_races.granules(np.arange(128), column, size // 4)
    member.tensor_races.write_later(granules, *issuer)


def _declare_copy(group, shape):
    @action(f"tcgen05.cp.cta_group::{group}.{shape}", "[u32], u64")
    def copy(lanes, addresses, descriptors):
        _copy(lanes, group, shape, addresses, descriptors)


for _group in (1, 2):
    for _shape in _COPIES:
        _declare_copy(_group, _shape)


def _commit(lanes, group, addresses, masks=None):
    """ "an arrive-on operation, with the count argument of 1, is signaled on the mbarrier object." """
    check_group(lanes, group)
    cta = lanes.cta
    if group == 2:
        pair_of(cta)
    for i, thread in enumerate(lanes.threads.tolist()):
        address = int(addresses[i])
        if masks is not None:
            # "The mbarrier signal is multicast to the same offset as mbar in the shared memory of each destination
            # CTA."
            ranks = [rank for rank in range(16) if int(masks[i]) >> rank & 1]
        else:
            ranks = [address >> RANK_SHIFT]
        signaled = [mbarrier_at(lanes, rank << RANK_SHIFT | address & OFFSET_MASK) for rank in ranks]

        for barrier in signaled:
            cta.grid.races.commit_remotely(cta, thread, barrier)
        clock = cta.grid.races.commit_products(cta, thread)

        def signal(signaled=signaled, clock=clock):
            for barrier in signaled:
                barrier.arrived = joined(barrier.arrived, clock)
                barrier.arrive(1)

        cta.grid.completion.announce(cta, thread, signal)


def _declare_commit(group):
    opcode = f"tcgen05.commit.cta_group::{group}.mbarrier::arrive::one"

    @action(f"{opcode}.shared::cluster.b64", "[u32]")
    def commit(lanes, addresses):
        _commit(lanes, group, addresses)

    @action(f"{opcode}.b64", "[u64]")
    def commit_generic(lanes, addresses):
        _commit(lanes, group, shared_addresses(addresses))

    @action(f"{opcode}.shared::cluster.multicast::cluster.b64", "[u32], u16")
    def commit_multicast(lanes, addresses, masks):
        _commit(lanes, group, addresses, masks)

    @action(f"{opcode}.multicast::cluster.b64", "[u64], u16")
    def commit_multicast_generic(lanes, addresses, masks):
        _commit(lanes, group, shared_addresses(addresses), masks)


for _group in (1, 2):
    _declare_commit(_group)


# Loads and stores. "A lane of the Tensor Memory can be accessed by a single warp in the warpgroup."


def _place(warp, position, addresses, shape, fragment):
    """The (lane, column) of a warp's access. Raises Fault for lanes of another warp."""
    address = matrices.tensor_address(uniform(addresses, position, "taddr"))
    (number,) = warp.warps()
    first = 32 * (number % 4)
    if address.lane < 32 and first:
        # The warps of a warp group can access lanes 0 to 31, 32 to 63 and so on. (PTX, Access restrictions). On cards,
        # lanes of the first warp mean a warp's own lanes: there are kernels that give all warps the same address.
        what = f"warp {number} accesses tensor memory from lane {address.lane} on, which is the first warp's"
        warp.cta.grid.found(Fault("tensor-memory-first-lanes", f"{what}; its own lanes begin at {first}"))
        address = address._replace(lane=address.lane + first)
    starts = (first,) if shape == "32x32b" else (first, first + 16)
    if address.lane not in starts:
        raise Fault(
            "tensor-memory-lanes",
            f"warp {number} accesses tensor memory from lane {address.lane} on; its lanes are {first} to {first + 31}, "
            f"and .{shape} begins at {' or '.join(map(str, starts))}",
        )
    share_of(warp.cta).check(address.lane, address.column, fragment.width)
    return address


def _consecutive(indices):
    """Indices of registers, as a range if they are consecutive."""
    begin, end = indices[0], indices[0] + len(indices)
    return range(begin, end) if indices == tuple(range(begin, end)) else indices


def _load(lanes, rows, addresses, shape, fragment, packed):
    """Begins the load of each warp; see `late_loads`."""
    cta, rows = lanes.cta, _consecutive(rows)
    for warp, position in by_warp(lanes):
        address = _place(warp, position, addresses, shape, fragment)
        (number,) = warp.warps()
        load = _loader(warp, rows, address, fragment, packed)
        place = address.lane + fragment.lanes, address.column, fragment.width
        if not cta.tensor_races.are_written(*place):
            load = _marking(load, warp, rows, address, fragment)
        epoch = cta.tensor_races.load(number, *place)
        late_loads.begin(cta, number, (("b32", row) for row in rows), load, epoch)


def _loader(warp, rows, address, fragment, packed):
    """A function that copies tensor memory to the registers of one warp."""
    share, registers = share_of(warp.cta), warp.cta.registers.rows[_U32]
    lanes, columns = address.lane + fragment.lanes, address.column + fragment.columns
    target = slice(rows.start, rows.stop) if isinstance(rows, range) else list(rows)

    def load():
        share.check(address.lane, address.column, fragment.width)
        words = share.memory.words[lanes, columns]
        if packed:
            words = words & np.uint32(0xFFFF) | share.memory.words[lanes, columns + 1] << np.uint32(16)
        registers[target, warp.span] = words

    return load


def _marking(load, warp, rows, address, fragment):
    """Wraps the load of words of which nobody has written all."""
    cta = warp.cta
    unwritten = cta.tensor_races.unwritten(address.lane + fragment.lanes, address.column + fragment.columns)
    unwritten = np.broadcast_to(unwritten, (len(rows), WARP))
    what, place = f"tensor memory from column {address.column} on of {cta}", cta.grid.place()

    def load_and_mark():
        load()
        for row, words in zip(rows, unwritten, strict=True):
            differs = np.zeros(cta.num_threads, np.bool_)
            differs[warp.span] = words
            cta.uninitialized.mark(("b32", row), differs, what, place)

    return load_and_mark


def _store(lanes, values, addresses, shape, fragment, unpacked):
    """Issues the store of each warp, as a group of its own."""
    cta = lanes.cta
    for warp, position in by_warp(lanes):
        address = _place(warp, position, addresses, shape, fragment)
        (number,) = warp.warps()
        owner = cta, "tcgen05.st", number
        cta.tensor_races.store(number, address.lane + fragment.lanes, address.column, fragment.width)
        words = np.stack([value[position : position + WARP] for value in values]).view(np.uint32)
        cta.grid.completion.issue(owner, _writer(cta, words, address, fragment, unpacked))
        cta.grid.completion.commit(owner)


def _writer(cta, words, address, fragment, unpacked):
    """The store of one warp as work for `Completion.issue`. Its registers have been read."""
    share = share_of(cta)
    lanes, columns = address.lane + fragment.lanes, address.column + fragment.columns

    def write():
        share.check(address.lane, address.column, fragment.width)
        if unpacked:  # the upper halves of the words are poison, as those of D
            share.memory.words[lanes, columns] = words | np.uint32(0xFFFF0000)
            share.memory.words[lanes, columns + 1] = words >> np.uint32(16) | np.uint32(0xFFFF0000)
        else:
            share.memory.words[lanes, columns] = words

    return lambda: write


def _declare_accesses(shape, count):
    registers = count * matrices.TENSOR_SHAPES[shape]
    offset = ", immediate" if shape == "16x32bx2" else ""  # immHalfSplitoff
    for packed in (False, True):

        def load(lanes, rows, addresses, half_offset=0, packed=packed):
            fragment = matrices.tensor_fragment(shape, count, half_offset, packed)
            _load(lanes, rows, addresses, shape, fragment, packed)

        def store(lanes, addresses, values, packed=packed):
            fragment = matrices.tensor_fragment(shape, count, 0, packed)
            _store(lanes, values, addresses, shape, fragment, packed)

        def store_halves(lanes, addresses, half_offset, values, packed=packed):
            fragment = matrices.tensor_fragment(shape, count, half_offset, packed)
            _store(lanes, values, addresses, shape, fragment, packed)

        suffix = ".pack::16b" if packed else ""
        action(
            f"tcgen05.ld.sync.aligned.{shape}.x{count}{suffix}.b32", f"&{{b32*{registers}}}, [u32]{offset}", "warp",
            loads_late=True,
        )(load)  # fmt: skip
        suffix = ".unpack::16b" if packed else ""
        action(f"tcgen05.st.sync.aligned.{shape}.x{count}{suffix}.b32", f"[u32]{offset}, {{b32*{registers}}}", "warp")(
            store_halves if offset else store
        )


for _shape, _registers in matrices.TENSOR_SHAPES.items():
    for _count in (1, 2, 4, 8, 16, 32, 64, 128):
        if _count * _registers <= 128:
            _declare_accesses(_shape, _count)


@action("tcgen05.wait::ld.sync.aligned", "", converged="warp")
def wait_for_loads(lanes):
    if lanes.cta.pending_loads:
        late_loads.finish(lanes)


@action("tcgen05.wait::st.sync.aligned", "", converged="warp")
def wait_for_stores(lanes):
    for warp in lanes.warps():
        lanes.cta.grid.completion.wait((lanes.cta, "tcgen05.st", warp), 0)
        lanes.cta.tensor_races.stored(warp)


@action("tcgen05.fence::{before,after}_thread_sync", "")
def fence(lanes):
    """Orders tcgen05 operations with those of other threads, behind relaxed waits and before relaxed arrivals too.

    It waits for none. Here it orders other accesses as well.
    """
    races, opcode, clocks = lanes.cta.grid.races, lanes.cta.grid.opcode, lanes.cta.cluster.clocks
    warps = races.warps(lanes).tolist()
    if "before" in opcode:
        clocks.fence_before_sync(warps)
    races.fence(lanes, opcode)
    if "after" in opcode:
        clocks.fence_after_sync(warps)
