"""mov, loads and stores of registers, conversion of addresses, ldmatrix and stmatrix."""

import numpy as np

from quackish.emulator.errors import Fault
from quackish.emulator.isa import action, instruction
from quackish.emulator.memory import (
    CONSTANT_WINDOW,
    LOCAL_WINDOW,
    OFFSET_MASK,
    PARAMETER_WINDOW,
    RANK_SHIFT,
    SHARED_WINDOW,
)
from quackish.emulator.threads import U128

# mov


@instruction("mov.{pred,b16,u16,s16,b32,u32,s32,f32,b64,u64,s64,f64}", "T = T")
def mov(a):
    return a


@instruction("mov.b32", "b32 = {b16*2}")
def pack_16(low, high):
    return np.asarray(low).astype(np.uint32) | np.asarray(high).astype(np.uint32) << np.uint32(16)


@instruction("mov.b64", "b64 = {b32*2}")
def pack_32(low, high):
    return np.asarray(low).astype(np.uint64) | np.asarray(high).astype(np.uint64) << np.uint64(32)


@instruction("mov.b128", "b128 = {b64*2}")
def pack_64(low, high):
    packed = np.empty(np.broadcast_shapes(np.shape(low), np.shape(high)), U128)
    packed["low"], packed["high"] = low, high
    return packed


@instruction("mov.b128", "{b64*2} = b128")
def unpack_64(a):
    return a["low"], a["high"]


@instruction("mov.b64", "b64 = {b16*4}")
def pack_four(a, b, c, d):
    return pack_32(pack_16(a, b), pack_16(c, d))


@instruction("mov.b32", "{b16*2} = b32")
def unpack_16(a):
    a = np.asarray(a)
    return a.astype(np.uint16), (a >> np.uint32(16)).astype(np.uint16)


@instruction("mov.b64", "{b32*2} = b64")
def unpack_32(a):
    a = np.asarray(a)
    return a.astype(np.uint32), (a >> np.uint64(32)).astype(np.uint32)


@instruction("mov.b64", "{b16*4} = b64")
def unpack_four(a):
    low, high = unpack_32(a)
    return *unpack_16(low), *unpack_16(high)


# Addresses


@instruction("cvta.shared.u64", "u64 = u64")
def shared_to_generic(a):
    return a + np.uint64(SHARED_WINDOW)


@instruction("cvta.to.shared{,::cta,::cluster}.u64", "u64 = u64")
def generic_to_shared(a):
    return a - np.uint64(SHARED_WINDOW)


@instruction("cvta.param.u64", "u64 = u64")
def parameter_to_generic(a):
    return a + np.uint64(PARAMETER_WINDOW)


@instruction("cvta.local.u64", "u64 = u64")
def local_to_generic(a):
    return a + np.uint64(LOCAL_WINDOW)


@instruction("cvta{,.to}.global.u64", "u64 = u64")
def same_address(a):
    return a


@instruction("mapa.shared::cluster.u32", "u32 = u32, u32")
def mapa(a, rank):
    """The address of the same variable in another CTA of the cluster."""
    return a & np.uint32(OFFSET_MASK) | rank << np.uint32(RANK_SHIFT)


# Parameters


def _width(type_):
    """The bytes of a type such as u32."""
    return int(type_[1:]) // 8


def _dtype(type_):
    return np.dtype({"b": "u", "u": "u", "s": "i", "f": "f"}[type_[0]] + str(_width(type_)))


_TYPES = ("b8", "u8", "s8", "b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64")


def _declare_parameter_load(type_, count):
    vector, result = ("", f"~{type_}") if count == 1 else (f".v{count}", f"{{~{type_}*{count}}}")
    dtype = _dtype(type_)
    size = dtype.itemsize * count

    @action(f"ld.param{vector}.{type_}", f"{result} = [u64]")
    def load(lanes, addresses):
        data = np.frombuffer(lanes.cta.grid.parameters, np.uint8)
        misaligned = addresses[addresses % np.uint64(size) != 0]
        if misaligned.size:
            raise Fault("misaligned", f"misaligned access of {size} bytes of parameters at byte {misaligned[0]}")
        last = int(addresses.max())
        if last + size > len(data):
            raise Fault("out-of-bounds", f"ld.param of {size} bytes at byte {last} of {len(data)} bytes of parameters")
        values = data[addresses[:, None].astype(np.intp) + np.arange(size)].view(dtype)
        return values[:, 0] if count == 1 else values.T


for _type in _TYPES:
    for _count in (1, 2, 4):
        if _width(_type) * _count <= 16:
            _declare_parameter_load(_type, _count)


# Global and shared memory. Bytes are loaded and stored as they are: writers extend what is narrower than its register.

# .cs ("likely to be accessed once"), .cg, .ca and the priorities of eviction are hints for caches.
_LOADS = ("ld.global", "ld.global.nc", "ld.global.L1::no_allocate", "ld.global.nc.L1::no_allocate")
# Other threads may have to run before such a load returns what a loop waits for. How often a loop loads depends on the
# order of threads, so these bytes are not counted.
_POLLING_LOADS = ("ld.acquire.gpu.global", "ld.relaxed.gpu.global", "ld.volatile.global")
_STORES = (
    "st.global",
    "st.global.cs",
    "st.relaxed.gpu.global",
    "st.release.gpu.global",
    "st.volatile.global",
)

_WORDS, _OTHER_SCOPES = ("b32", "u32", "b64", "u64"), "{cta,cluster,sys}"  # of flags that threads poll


def offsets_in_cta(lanes, addresses):
    """Offsets of shared::cta addresses. Raises Fault for an address in another CTA."""
    ranks = addresses >> np.uint32(RANK_SHIFT)
    if (ranks != lanes.cta.rank).any():
        other = int(addresses[ranks != lanes.cta.rank][0])
        raise Fault(
            "wrong-cta", f"a shared::cta access of {other:#x}, which is in the CTA of rank {other >> RANK_SHIFT}"
        )
    return addresses & np.uint32(OFFSET_MASK)


def cta_of(lanes, address):
    """The CTA that a shared::cluster address is in."""
    rank = address >> RANK_SHIFT
    if rank >= lanes.cta.cluster.size:
        raise Fault("wrong-cta", f"an address of rank {rank} in a cluster of {lanes.cta.cluster.size}")
    target = lanes.cta.cluster.ctas[rank]
    check_present(target, lanes.cta)
    return target


def check_present(target, user):
    """Raises Fault if a CTA accesses shared memory of another one that has exited."""
    # All operations on distributed shared memory must happen before the exit of the block that it belongs to.
    # (CUDA Programming Guide, Distributed Shared Memory)
    if target is not user and not target.live:
        raise Fault("exited-cta", f"{user} accesses shared memory of {target}, which has exited")


_OF_OTHER_CTAS = ("b32", "u32", "s32", "f32", "b64", "u64")  # types in shared::cluster


def by_cta(lanes, addresses):
    """Yields (shared memory, which addresses are in it, their offsets) for each CTA that addresses name.

    Meanwhile the threads that execute are those with these addresses. The addresses are of shared::cluster.
    """
    ranks, grid = addresses >> np.uint32(RANK_SHIFT), lanes.cta.grid
    for rank in np.unique(ranks).tolist():
        chosen = ranks == rank
        grid.executing = lanes.cta.lanes(lanes.subset_of_active(chosen))
        yield cta_of(lanes, rank << RANK_SHIFT).shared, chosen, addresses[chosen] & np.uint32(OFFSET_MASK)
    grid.executing = lanes


def _declare_loads(type_, count, only_global=False):
    vector, result = ("", f"~{type_}") if count == 1 else (f".v{count}", f"{{~{type_}*{count}}}")
    width, dtype = _width(type_), _dtype(type_)

    def load_global(lanes, addresses, counted=True):
        values = lanes.cta.grid.memory.load(addresses, width, count, counted).view(dtype)
        return values[:, 0] if count == 1 else values.T

    def poll_global(lanes, addresses):
        return load_global(lanes, addresses, counted=False)

    def load_shared(lanes, addresses):
        values = lanes.cta.shared.load(offsets_in_cta(lanes, addresses), width, count).view(dtype)
        return values[:, 0] if count == 1 else values.T

    def load_cluster(lanes, addresses):
        values = np.empty((len(addresses), count), dtype)
        for shared, chosen, offsets in by_cta(lanes, addresses):
            values[chosen] = shared.load(offsets, width, count).view(dtype)
        return values[:, 0] if count == 1 else values.T

    for opcode in _LOADS:
        action(f"{opcode}{vector}.{type_}", f"{result} = [u64]")(load_global)
    for opcode in _POLLING_LOADS:
        action(f"{opcode}{vector}.{type_}", f"{result} = [u64]", polls=True)(poll_global)
    if type_ in _WORDS and count == 1:
        # The second is as inline assembly writes it.
        for opcode in f"ld.{{acquire,relaxed}}.{_OTHER_SCOPES}.global", "ld.global.acquire.gpu":
            action(f"{opcode}.{type_}", f"{result} = [u64]", polls=True)(poll_global)
    if only_global:
        return
    action(f"ld.shared{{,::cta}}{vector}.{type_}", f"{result} = [u32]")(load_shared)
    if count == 1 and type_ in _OF_OTHER_CTAS:
        action(f"ld.shared::cluster{vector}.{type_}", f"{result} = [u32]")(load_cluster)


def _declare_stores(type_, count, only_global=False):
    vector, operand = ("", f"~{type_}") if count == 1 else (f".v{count}", f"{{~{type_}*{count}}}")
    unsigned = np.dtype(f"u{_width(type_)}")

    def bits(values):
        return [value.astype(unsigned) if value.dtype.kind == "u" else value.view(unsigned) for value in values]

    def store_global(lanes, addresses, values):
        lanes.cta.grid.num_events += 1
        lanes.cta.grid.memory.store(addresses, bits([values] if count == 1 else values))

    def store_shared(lanes, addresses, values):
        lanes.cta.grid.num_events += 1
        lanes.cta.shared.store(offsets_in_cta(lanes, addresses), bits([values] if count == 1 else values))

    def store_cluster(lanes, addresses, values):
        lanes.cta.grid.num_events += 1
        words = bits([values] if count == 1 else values)
        for shared, chosen, offsets in by_cta(lanes, addresses):
            shared.store(offsets, [word[chosen] for word in words])

    # Compilers make stores with this hint of bits alone.
    for opcode in (*_STORES, "st.global.L1::no_allocate") if type_[0] == "b" else _STORES:
        action(f"{opcode}{vector}.{type_}", f"[u64], {operand}")(store_global)
    if type_ in _WORDS and count == 1:
        action(f"st.{{relaxed,release}}.{_OTHER_SCOPES}.global.{type_}", f"[u64], {operand}")(store_global)
    if only_global:
        return
    action(f"st.shared{{,::cta}}{vector}.{type_}", f"[u32], {operand}")(store_shared)
    if count == 1 and type_ in _OF_OTHER_CTAS:
        action(f"st.shared::cluster{vector}.{type_}", f"[u32], {operand}")(store_cluster)


for _type in _TYPES:
    for _count in (1, 2, 4):
        if _width(_type) * _count <= 16:
            _declare_loads(_type, _count)
            _declare_stores(_type, _count)


# The memory of a thread alone: arrays of registers with an index that is not constant. st.param gives a call its
# parameters.


def _declare_local(type_, count):
    vector, value = ("", f"~{type_}") if count == 1 else (f".v{count}", f"{{~{type_}*{count}}}")
    dtype = _dtype(type_)

    @action(f"ld.local{vector}.{type_}", f"{value} = [u64]")
    def load(lanes, addresses):
        values = lanes.cta.local.load(lanes.threads, addresses, dtype.itemsize * count).view(dtype)
        return values[:, 0] if count == 1 else values.T

    @action(f"st.local{vector}.{type_}", f"[u64], {value}")
    def store(lanes, addresses, values):
        words = np.stack([value.astype(dtype) for value in ([values] if count == 1 else values)], axis=1)
        lanes.cta.local.store(lanes.threads, addresses, words.view(np.uint8))

    if count == 1:
        action(f"st.param.{type_}", f"[u64], {value}")(store)


for _type in ("b8", "b16", "b32", "b64"):
    for _count in (1, 2, 4):
        if _width(_type) * _count <= 16:
            _declare_local(_type, _count)


# Generic addresses, by the windows of `memory`

_WINDOWS = (PARAMETER_WINDOW, SHARED_WINDOW, LOCAL_WINDOW, CONSTANT_WINDOW)


def _by_window(lanes, addresses):
    """Yields (window, the Lanes with addresses in it, which they are, their addresses in it); 0: global memory.

    Meanwhile these are the threads that execute.
    """
    grid = lanes.cta.grid
    windows = np.zeros_like(addresses)
    for window in reversed(_WINDOWS):  # the largest that is not beyond an address
        windows[addresses >= np.uint64(window)] = window
    for window in np.unique(windows).tolist():
        chosen = windows == window
        grid.executing = lanes.cta.lanes(lanes.subset_of_active(chosen))
        yield window, grid.executing, chosen, addresses[chosen] - np.uint64(window)
    grid.executing = lanes


def _words_in(window, lanes, addresses, width, count):
    """Loads words of a thread's window: an unsigned array (threads, count)."""
    if window == 0:
        return lanes.cta.grid.memory.load(addresses, width, count)
    if window == LOCAL_WINDOW:
        return lanes.cta.local.load(lanes.threads, addresses, width * count).view(f"u{width}")
    if window != SHARED_WINDOW:
        raise NotImplementedError(f"a generic load of parameters or constants, at {window + int(addresses[0]):#x}")
    words = np.empty((len(addresses), count), f"u{width}")
    for shared, chosen, offsets in by_cta(lanes, addresses.astype(np.uint32)):
        words[chosen] = shared.load(offsets, width, count)
    return words


def _store_words_in(window, lanes, addresses, words):
    """Stores words, an unsigned array (threads, count), in a thread's window."""
    columns = list(np.ascontiguousarray(words.T))
    if window == 0:
        lanes.cta.grid.memory.store(addresses, columns)
    elif window == LOCAL_WINDOW:
        lanes.cta.local.store(lanes.threads, addresses, np.ascontiguousarray(words).view(np.uint8))
    elif window == SHARED_WINDOW:
        for shared, chosen, offsets in by_cta(lanes, addresses.astype(np.uint32)):
            shared.store(offsets, [column[chosen] for column in columns])
    else:
        raise Fault("out-of-bounds", f"a generic store to parameters or constants, at {window + int(addresses[0]):#x}")


def _declare_generic(type_, count):
    vector, value = ("", f"~{type_}") if count == 1 else (f".v{count}", f"{{~{type_}*{count}}}")
    width = _width(type_)

    @action(f"ld{vector}.{type_}", f"{value} = [u64]")
    def load(lanes, addresses):
        values = np.empty((lanes.count, count), f"u{width}")
        for window, part, chosen, there in _by_window(lanes, addresses):
            values[chosen] = _words_in(window, part, there, width, count)
        return values[:, 0] if count == 1 else values.T

    @action(f"st{vector}.{type_}", f"[u64], {value}")
    def store(lanes, addresses, values):
        lanes.cta.grid.num_events += 1
        words = np.stack([value.astype(f"u{width}") for value in ([values] if count == 1 else values)], axis=1)
        for window, part, chosen, there in _by_window(lanes, addresses):
            _store_words_in(window, part, there, words[chosen])


for _type in ("b8", "b16", "b32", "b64"):  # as compilers write them
    for _count in (1, 2, 4):
        if _width(_type) * _count <= 16:
            _declare_generic(_type, _count)


# 256 bits (sm_100)
for _type, _count in (("b32", 8), ("u32", 8), ("f32", 8), ("b64", 4), ("u64", 4)):
    _declare_loads(_type, _count, only_global=True)
    _declare_stores(_type, _count, only_global=True)


# Prefetches change nothing but times.


@action("prefetch.global.{L1,L2}", "[u64]")
@action("prefetch{,.param}.tensormap", "[u64]")
def prefetch(lanes, addresses):
    pass


# 8 x 8 matrices of 16-bit elements. Threads 8 i to 8 i + 7 of a warp have the addresses of
# matrix i, and thread t holds elements 2 (t mod 4) and the next one of row t / 4 of each. (PTX, ldmatrix)


def _by_warp(lanes, values):
    """Reshapes values of threads to (warps, 32). Raises Fault if a warp is not complete."""
    if lanes.count % 32:
        raise Fault("missing-threads", f"{lanes.count} threads execute an instruction for whole warps")
    return values.reshape(-1, 32)


def _rows(lanes, addresses, count):
    """The offsets of the matrices' rows. Addresses of threads that give no row may be anything since sm_80."""
    return offsets_in_cta(lanes, _by_warp(lanes, addresses)[:, : 8 * count].reshape(-1))


def _declare_matrices(count, transposed):
    # ptxas takes the shape and the number in either order.
    suffix = f"{{m8n8.x{count},x{count}.m8n8}}{'.trans' if transposed else ''}.shared{{,::cta}}.b16"

    @action(f"ldmatrix.sync.aligned.{suffix}", f"{{b32*{count}}} = [u32]", converged="warp")
    def load(lanes, addresses):
        rows = _rows(lanes, addresses, count)
        matrices = lanes.cta.shared.load(rows, 8, 2).view(np.uint16).reshape(-1, count, 8, 8)
        if transposed:
            matrices = np.ascontiguousarray(matrices.swapaxes(2, 3))
        return matrices.view(np.uint32).reshape(-1, count, 32).swapaxes(0, 1).reshape(count, -1)

    @action(f"stmatrix.sync.aligned.{suffix}", f"[u32], {{b32*{count}}}", converged="warp")
    def store(lanes, addresses, registers):
        rows = _rows(lanes, addresses, count)
        fragments = np.stack([_by_warp(lanes, register) for register in registers], axis=1)  # (warps, matrices, 32)
        matrices = fragments.view(np.uint16).reshape(-1, 8, 8)
        if transposed:
            matrices = np.ascontiguousarray(matrices.swapaxes(1, 2))
        halves = matrices.reshape(-1, 8).view(np.uint64)
        lanes.cta.grid.num_events += 1
        # rows of 16 bytes: aligned to 16, stored as two words
        lanes.cta.shared.store(rows, [halves[:, 0], halves[:, 1]])


for _count in (1, 2, 4):
    for _transposed in (False, True):
        _declare_matrices(_count, _transposed)


# Matrices of 16 x 8 bytes, which are stored by columns (sm_100a). Byte e of thread t's register is in row
# t / 4 + 8 (e / 2) and column 2 (t mod 4) + e mod 2; threads 8 i to 8 i + 7 have the addresses of matrix i's columns.


def _declare_byte_matrices(count):
    @action(
        f"stmatrix.sync.aligned.m16n8.x{count}.trans.shared{{,::cta}}.b8", f"[u32], {{b32*{count}}}", converged="warp"
    )
    def store(lanes, addresses, registers):
        columns = _rows(lanes, addresses, count)
        fragments = np.stack([_by_warp(lanes, register) for register in registers], axis=1)
        # t / 4, t mod 4, row's half, column's half -> column, row
        matrices = fragments.view(np.uint8).reshape(-1, 8, 4, 2, 2).transpose(0, 2, 4, 3, 1)
        halves = np.ascontiguousarray(matrices).reshape(-1, 16).view(np.uint64)
        lanes.cta.grid.num_events += 1
        lanes.cta.shared.store(columns, [halves[:, 0], halves[:, 1]])


for _count in (1, 2, 4):
    _declare_byte_matrices(_count)
