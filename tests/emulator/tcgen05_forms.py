"""Cases of the tcgen05 instructions: see emulator_forms.

A kernel of four warps per CTA allocates tensor memory, uses it, and frees it. Expected places of words are those of the
manual's figures of matrix fragments and data path layouts.
"""

import dataclasses
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from quackish.emulator import isa
from tests.emulator.forms import INIT, Case, case_name, random_of, words_of

GROUP = re.compile(r"cta_group::([12])")
SLOT, BARRIER, OPERANDS = 0, 8, 1024  # offsets in shared memory
COLUMNS = 512


def program(group: int, body: str, **forms: str) -> str:
    """A kernel's body between allocation and deallocation. `forms` replace opcodes of these.

    %d is the address of tensor memory, %mine that of this warp's lanes, %w the thread in its CTA.
    """
    opcodes = {
        "alloc": f"tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32",
        "dealloc": f"tcgen05.dealloc.cta_group::{group}.sync.aligned.b32",
        "relinquish": f"tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned",
        **forms,
    }
    slot = "[%slot]" if ".shared" in opcodes["alloc"] else "[%generic]"
    cluster = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" if group == 2 else "bar.sync 0;"
    return f"""
.reg .pred %first, %one, %q; .reg .b32 %w, %rank, %slot, %bar, %d, %mine, %n; .reg .b64 %generic, %wide, %state;
mov.u32 %w, %tid.x; mov.u32 %rank, %cluster_ctarank;
add.u32 %slot, %base, {SLOT}; add.u32 %bar, %base, {BARRIER};
cvt.u64.u32 %generic, %slot; cvta.shared.u64 %generic, %generic;
setp.lt.u32 %first, %w, 32; setp.eq.u32 %one, %w, 0; mov.b32 %n, {COLUMNS};
{cluster}
@!%first bra ALLOCATED;
{opcodes["alloc"]} {slot}, %n;
{opcodes["relinquish"]};
ALLOCATED:
@%one {INIT.format(1).split(";")[0]};
fence.mbarrier_init.release.cluster;
{cluster}
ld.shared.b32 %d, [%slot];
and.b32 %mine, %w, 96; shl.b32 %mine, %mine, 16; add.u32 %mine, %mine, %d;
{body}
{cluster}
@!%first bra FREE;
{opcodes["dealloc"]} %d, %n;
FREE:
"""


# Loads and stores. Word (lane, column) of tensor memory is lane * LANE + column * COLUMN; results are hashes of words.

LANE, COLUMN, HASH = 0x01000193, 0x9E3779B1, 31
MASK = (1 << 32) - 1


def place(shape: str, register: int, thread: int, half_offset: int) -> tuple[int, int]:
    """(lane, column) of a register of a thread, from the lane and column of the access. (Figures 183 to 187)"""
    quad, pair = thread // 4, thread % 4
    if shape == "32x32b":
        return thread, register
    if shape == "16x32bx2":
        return thread % 16, register + (half_offset if thread >= 16 else 0)
    if shape == "16x64b":
        return (quad + 8 if thread % 2 else quad), 2 * register + (1 if pair >= 2 else 0)
    if shape == "16x128b":
        return (quad + 8 if register % 2 else quad), 4 * (register // 2) + pair
    assert shape == "16x256b", shape
    return (quad + 8 if register % 4 >= 2 else quad), 8 * (register // 4) + 2 * pair + register % 2


class Access(NamedTuple):
    shape: str
    registers: int
    packed: bool
    half_offset: int

    @property
    def places(self) -> np.ndarray:
        """(128 threads, registers, 2 halves): lane * COLUMNS + column; both halves are the same if not packed."""
        found = np.zeros((128, self.registers, 2), np.int64)
        for thread, register in np.ndindex(128, self.registers):
            warp = thread // 32
            lane, column = place(self.shape, register, thread % 32, 0)
            if self.packed:
                column *= 2
            if self.shape == "16x32bx2" and thread % 32 >= 16:
                column += self.half_offset
            lane += 32 * warp + (16 * (warp % 2) if self.shape != "32x32b" else 0)
            found[thread, register] = lane * COLUMNS + column, lane * COLUMNS + column + self.packed
        return found

    @property
    def width(self) -> int:
        return int((self.places % COLUMNS).max()) + 1


def _access(form: isa.Form) -> Access:
    found = re.search(r"aligned\.(\w+)\.x(\d+)", form.opcode)
    assert found
    shape, count = found[1], int(found[2])
    registers = count * {"16x128b": 2, "16x256b": 4}.get(shape, 1)
    packed = "pack::16b" in form.opcode
    width = count * (2 if packed else 1)
    return Access(shape, registers, packed, min(width + 3, COLUMNS - width))


def _words() -> np.ndarray:
    lane, column = np.arange(128, dtype=np.uint64)[:, None], np.arange(COLUMNS, dtype=np.uint64)[None, :]
    return (lane * np.uint64(LANE) + column * np.uint64(COLUMN)) & np.uint64(MASK)


def _hashes(columns: np.ndarray) -> list[int]:
    """Of each row's words, in order."""
    result = np.zeros(len(columns), np.uint64)
    for column in columns.T:
        result = (result * np.uint64(HASH) + column) & np.uint64(MASK)
    return [int(value) for value in result]


def _listed(registers: int) -> str:
    return ", ".join(f"%r{i}" for i in range(registers))


def _loop(columns: int, label: str, step: str) -> str:
    """A step on 32 columns, repeated; %at is the address of the first."""
    return f"""mov.b32 %at, %mine; mov.b32 %i, 0;
{label}:
{step}
add.u32 %at, %at, 32; add.u32 %i, %i, 1; setp.lt.u32 %q, %i, {-(-columns // 32)};
@%q bra {label};
"""


def _fill(columns: int) -> str:
    values = "".join(f"add.u32 %r{i}, %r{i - 1}, {COLUMN};" for i in range(1, 32))
    step = f"{values} tcgen05.st.sync.aligned.32x32b.x32.b32 [%at], {{{_listed(32)}}}; add.u32 %r0, %r31, {COLUMN};"
    return f"mul.lo.u32 %r0, %w, {LANE};\n" + _loop(columns, "FILL", step) + "tcgen05.wait::st.sync.aligned;\n"


def _hash(registers: int) -> str:
    return "".join(f"mad.lo.u32 %out0, %out0, {HASH}, %r{i};" for i in range(registers))


def access_cases(form: isa.Form) -> Iterator[Case]:
    access = _access(form)
    words = _words().reshape(-1)
    half = f", {access.half_offset}" if access.shape == "16x32bx2" else ""
    # 16 lanes: those of odd warps begin at the second half of the warp's lanes
    head = f".reg .b32 %at, %i, %there; .reg .b32 %r<{max(access.registers, 32)}>; mov.b32 %out0, 0;\n"
    start = "mov.b32 %there, %mine;\n"
    if access.shape != "32x32b":
        start = "and.b32 %there, %w, 32; shl.b32 %there, %there, 15; add.u32 %there, %there, %mine;\n"
    places, registers = access.places, _listed(access.registers)
    if ".ld." in form.opcode:
        low, high = words[places[..., 0]], words[places[..., 1]]
        if access.packed:
            low = low & np.uint64(0xFFFF) | (high & np.uint64(0xFFFF)) << np.uint64(16)
        body = f"{_fill(access.width)}{form.opcode} {{{registers}}}, [%there]{half};\n"
        body += f"tcgen05.wait::ld.sync.aligned;\n{_hash(access.registers)}\n"
        expected = _hashes(low)
    else:
        values = np.arange(128)[:, None] * 0x10003 + np.arange(access.registers)[None, :] * 0x1000_0001
        values = values.astype(np.uint64) & np.uint64(MASK)
        after = words.copy()
        if access.packed:
            words &= np.uint64(0xFFFF)  # upper halves of what is unpacked are open, so the hash has lower halves alone
            after = words.copy()
            after[places[..., 0]], after[places[..., 1]] = values & np.uint64(0xFFFF), values >> np.uint64(16)
        else:
            after[places[..., 0]] = values
        source = "mul.lo.u32 %r0, %w, 0x10003;\n"
        source += "".join(f"add.u32 %r{i}, %r{i - 1}, 0x10000001;" for i in range(1, access.registers))
        lower = "".join(f"and.b32 %r{i}, %r{i}, 0xffff;" for i in range(32)) if access.packed else ""
        step = f"tcgen05.ld.sync.aligned.32x32b.x32.b32 {{{_listed(32)}}}, [%at]; tcgen05.wait::ld.sync.aligned;\n"
        body = f"{_fill(access.width)}{source}\n{form.opcode} [%there]{half}, {{{registers}}};\n"
        body += "tcgen05.wait::st.sync.aligned;\n" + _loop(access.width, "READ", step + lower + _hash(32))
        columns = -(-access.width // 32) * 32
        expected = _hashes(after.reshape(128, COLUMNS)[:, :columns])
    yield Case(case_name(form), form.opcode, program(1, head + start + body), [], [(32, expected)], 128)


# Products: D = A B, and then A B is added to D * 2^-scale. Each CTA of a pair has its rows of A and half of B's.

N = 16


class Product(NamedTuple):
    """Operands and types of a product, and how the instruction descriptor names them."""

    kind: str
    a: str
    b: str
    d: str = "f32"
    m: int = 128
    negate_a: bool = False
    negate_b: bool = False

    def descriptor(self, group: int) -> int:
        codes = {"f16": 0, "bf16": 1, "tf32": 2, "e4m3": 0, "e5m2": 1}
        bits = {"f16": 0, "f32": 1}[self.d] << 4 | codes[self.a] << 7 | codes[self.b] << 10
        bits |= self.negate_a << 13 | self.negate_b << 14
        return bits | N >> 3 << 17 | self.m * group >> 4 << 24


def _small(random: np.random.Generator, shape: tuple[int, int], element: str) -> tuple[np.ndarray, np.ndarray]:
    """(numbers, bits) of small integers, which every type has."""
    values = random.integers(-4, 5, shape).astype(np.float32)
    if element == "e5m2":  # the upper half of an fp16 number
        return values, (values.astype(np.float16).view(np.uint16) >> 8).astype(np.uint8)
    if element == "e4m3":  # an exponent with a bias of 7, 3 bits of mantissa
        exponent = np.floor(np.log2(np.maximum(np.abs(values), 1))).astype(int)
        mantissa = (np.abs(values) / 2.0**exponent - 1) * 8
        bits = np.where(values == 0, 0, exponent + 7 << 3 | mantissa.astype(int)) | (values < 0) << 7
        return values, bits.astype(np.uint8)
    if element == "bf16":
        return values, (values.view(np.uint32) >> 16).astype(np.uint16)
    return values, values.astype(np.float16) if element == "f16" else values


def _core_matrices(bits: np.ndarray) -> bytes:
    """K-major without a swizzle: 8 rows of 16 bytes, contiguous; two along k, then along rows."""
    rows = np.ascontiguousarray(bits).view(np.uint8).reshape(len(bits) // 8, 8, 2, 16)
    return rows.transpose(0, 2, 1, 3).tobytes()


COMMIT = {
    1: "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64",
    2: "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64",
}


def product_case(
    name: str, opcode: str, product: Product, group: int, signature: str, commit: str = "", **forms: str
) -> Case:
    """`opcode` is a tcgen05.mma; `signature` its operands as in the table."""
    random = random_of(opcode + repr(product))
    rows = product.m * group
    width = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1}[product.a]
    a, a_bits = _small(random, (rows, 32 // width), product.a)
    b, b_bits = _small(random, (N, 32 // width), product.b)
    d = (a * np.float32(-1 if product.negate_a != product.negate_b else 1)) @ b.T

    # scratch: for each CTA A in core matrices, B in core matrices, A in rows
    data, size = b"", product.m * 32 * 2 + N // group * 32
    for cta in range(group):
        mine = a_bits[cta * product.m : (cta + 1) * product.m]
        half = b_bits[cta * N // group : (cta + 1) * N // group]
        data += _core_matrices(mine) + _core_matrices(half) + np.ascontiguousarray(mine).tobytes()
    loads = -(-size // 1024)
    data += bytes(1024 * (loads + 1))
    a_in_tensor = "[u32], [u32]" in signature
    masked, scaled = "{b32*" in signature, "immediate" in signature
    mask = random.integers(0, 1 << 32, 4 * group, np.uint64) if masked else np.zeros(4 * group, np.uint64)
    scale = 3 if scaled else 0

    def issue(opcode: str, mask: list[int], adds: str) -> str:
        disabled = f"{{{', '.join(f'%m{i}' for i in range(4 * group))}}}, " if masked else ""
        a_operand = f"[%d+{COLUMNS // 2}]" if a_in_tensor else "%da"
        moves = "".join(f"mov.b32 %m{i}, {word};" for i, word in enumerate(mask))
        last = f", {scale}" if scaled else ""
        return f"{moves}\n{opcode} [%d], {a_operand}, %db, %idesc, {disabled}{adds}{last};"

    first = opcode
    for usage in "::use", "::lastuse":
        first = first.replace(f".collector::a{usage}", ".collector::a::fill")
    commit = commit or COMMIT[group]
    address = "[%bar]" if ".shared" in commit else "[%generic_bar]"
    pair = ", %both" if ".multicast" in commit else ""
    everybody = "" if group == 1 or pair else "setp.ne.u32 %q, %rank, 0; @%q bra SKIP;\n"
    mine = "".join(
        f"ld.global.b64 %c, [%from+{1024 * i}]; st.shared.b64 [%into+{1024 * i}], %c;\n" for i in range(loads)
    )
    registers = ", ".join(f"%r{i}" for i in range(16))
    to_tensor = "".join(f"ld.global.b32 %r{i}, [%row+{4 * i}];" for i in range(8))
    to_tensor += f"\ntcgen05.st.sync.aligned.32x32b.x8.b32 [%mine+{COLUMNS // 2}], {{{_listed(8)}}};\n"
    to_tensor += "tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync;\n"
    cluster = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" if group == 2 else "bar.sync 0;"
    body = f"""
.reg .b64 %from, %row, %c, %da, %db, %generic_bar; .reg .b32 %into, %at; .reg .b16 %both; .reg .pred %no, %yes;
.reg .b32 %r<16>; .reg .b32 %m<8>; .reg .b32 %idesc;
mov.b32 %idesc, {product.descriptor(group)}; mov.b16 %both, {3 if group == 2 else 1};
cvt.u64.u32 %generic_bar, %bar; cvta.shared.u64 %generic_bar, %generic_bar;
mad.wide.u32 %from, %rank, {size}, %scratch;
mad.wide.u32 %row, %w, 32, %from; add.u64 %row, %row, {size - product.m * 32};
mad.wide.u32 %from, %w, 8, %from; mad.lo.u32 %into, %w, 8, %base; add.u32 %into, %into, {OPERANDS};
{mine}fence.proxy.async.shared::cta;
{to_tensor if a_in_tensor else ""}
add.u32 %at, %base, {OPERANDS}; shr.u32 %at, %at, 4; and.b32 %at, %at, 0x3fff; cvt.u64.u32 %da, %at;
or.b64 %da, %da, {128 >> 4 << 16 | 256 >> 4 << 32 | 1 << 46}; add.u64 %db, %da, {product.m * 32 >> 4};
setp.ne.u32 %no, %base, %base; setp.eq.u32 %yes, %base, %base;
{cluster}
tcgen05.fence::after_thread_sync;
setp.ne.u32 %q, %w, 0; @%q bra WAIT;
setp.ne.u32 %q, %rank, 0; @%q bra WAIT;
{issue(first, [0] * 4 * group, "%no")}
{issue(opcode, [int(word) for word in mask], "%yes")}
{commit} {address}{pair};
WAIT:
{everybody}AGAIN: mbarrier.try_wait.parity.shared.b64 %q, [%bar], 0; @!%q bra AGAIN;
SKIP:
{cluster}
tcgen05.fence::after_thread_sync;
tcgen05.ld.sync.aligned.32x32b.x16.b32 {{{registers}}}, [%mine];
tcgen05.wait::ld.sync.aligned;
{"".join(f"mov.b32 %out{i}, %r{i};" for i in range(16))}
"""
    twice = d + d * np.float32(2.0**-scale)
    lanes: list[int | None] = [None] * (128 * group)  # the row that a lane has
    for row in range(rows):
        if (product.m, group) == (64, 1):  # layout F: 16 rows in each warp's lanes
            lanes[row // 16 * 32 + row % 16] = row
        else:
            lanes[row] = row
    if (product.m, group) == (64, 2):
        return _layout_b(name, opcode, body, d, twice, mask, data)
    outputs: list[tuple[int, list[int | None]]] = []
    for column in range(N):
        words: list[int | None] = []
        for lane, row in enumerate(lanes):
            disabled = int(mask[lane // 32]) >> lane % 32 & 1
            if row is None or (product.d == "f16"):
                words.append(None)
            else:
                words.append(int((d if disabled else twice)[row, column].view(np.uint32)))
        outputs.append((32, words))
    if product.d == "f16":
        body += "".join(f"and.b32 %out{i}, %out{i}, 0xffff;" for i in range(16))
        outputs = [(32, [int(x) for x in twice.astype(np.float16).view(np.uint16)[:, i]]) for i in range(N)]
    text = program(group, body, **forms)
    return Case(name, opcode, text, [], outputs, 128 * group, scratch=words_of(data), shared_bytes=16384, ctas=group)


def _layout_b(name, opcode, body, d, twice, mask, data) -> Case:
    """m = 128 by two CTAs: each has 64 rows, and the right half of their columns is in lanes 64 to 127."""
    outputs: list[tuple[int, list[int | None]]] = []
    for column in range(N):
        words: list[int | None] = []
        for lane in range(256):
            cta, inside = divmod(lane, 128)
            disabled = int(mask[lane // 32]) >> lane % 32 & 1
            right, row = divmod(inside, 64)
            value = (d if disabled else twice)[64 * cta + row, (N // 2 * right + column) % N]
            words.append(int(value.view(np.uint32)) if column < N // 2 else None)
        outputs.append((32, words))
    text = program(2, body)
    return Case(name, opcode, text, [], outputs, 256, scratch=words_of(data), shared_bytes=16384, ctas=2)


TYPES = {
    "f16": Product("f16", "f16", "f16"),
    "tf32": Product("tf32", "tf32", "tf32"),
    "f8f6f4": Product("f8f6f4", "e4m3", "e5m2"),
}
MORE_TYPES = {
    "f16": [
        Product("f16", "bf16", "bf16", negate_a=True),
        Product("f16", "f16", "bf16", negate_b=True),
        Product("f16", "f16", "f16", d="f16"),
        Product("f16", "f16", "f16", m=64),
    ],
    "tf32": [Product("tf32", "tf32", "tf32", negate_a=True, negate_b=True)],
    "f8f6f4": [Product("f8f6f4", "e5m2", "e4m3"), Product("f8f6f4", "e4m3", "e4m3", d="f16")],
}


def product_cases(form: isa.Form) -> Iterator[Case]:
    found, kind = GROUP.search(form.opcode), re.search(r"kind::(\w+)", form.opcode)
    assert found
    assert kind
    group, signature = int(found[1]), ", ".join(operand.strip() for operand in form.operands)
    yield product_case(case_name(form), form.opcode, TYPES[kind[1]], group, signature)
    if "collector" not in form.opcode and signature == "[u32], u64, u64, u32, pred":
        for product in MORE_TYPES[kind[1]]:
            yield product_case(f"{case_name(form)} {product}", form.opcode, product, group, signature)


# Copies of random words from shared memory. Lane: the row that it gets, by shape.

COPIED_ROWS = {
    "128x256b": list(range(128)),
    "128x128b": list(range(128)),
    "64x128b.warpx2::02_13": [*range(64), *range(64)],
    "64x128b.warpx2::01_23": [*range(32), *range(32), *range(32, 64), *range(32, 64)],
    "32x128b.warpx4": [*range(32)] * 4,
}


def copy_cases(form: isa.Form) -> Iterator[Case]:
    found = re.fullmatch(r"tcgen05\.cp\.cta_group::([12])\.(.*)", form.opcode)
    assert found
    group, rows = int(found[1]), COPIED_ROWS[found[2]]
    columns = 8 if "256b" in found[2] else 4
    words = random_of(form.opcode).integers(0, 1 << 32, (group, 128, 8), np.uint64).astype(np.uint32)
    cluster = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" if group == 2 else "bar.sync 0;"
    pair = ", %both" if group == 2 else ""
    size = 128 * 32
    mine = "".join(f"ld.global.b64 %c, [%from+{i}]; st.shared.b64 [%into+{i}], %c;\n" for i in range(0, size, 1024))
    registers = _listed(columns)
    body = f"""
.reg .b64 %from, %c, %da; .reg .b32 %into, %at; .reg .b16 %both; .reg .b32 %r<{columns}>;
mov.b16 %both, 3; mad.wide.u32 %from, %rank, {size}, %scratch; mad.wide.u32 %from, %w, 8, %from;
mad.lo.u32 %into, %w, 8, %base; add.u32 %into, %into, {OPERANDS};
{mine}fence.proxy.async.shared::cta;
add.u32 %at, %base, {OPERANDS}; shr.u32 %at, %at, 4; and.b32 %at, %at, 0x3fff; cvt.u64.u32 %da, %at;
or.b64 %da, %da, {128 >> 4 << 16 | 256 >> 4 << 32 | 1 << 46};
{cluster}
setp.ne.u32 %q, %w, 0; @%q bra WAIT;
setp.ne.u32 %q, %rank, 0; @%q bra WAIT;
{form.opcode} [%d], %da;
{COMMIT[group]} [%bar]{pair};
WAIT:
AGAIN: mbarrier.try_wait.parity.shared.b64 %q, [%bar], 0; @!%q bra AGAIN;
{cluster}
tcgen05.fence::after_thread_sync;
tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 {{{registers}}}, [%mine];
tcgen05.wait::ld.sync.aligned;
{"".join(f"mov.b32 %out{i}, %r{i};" for i in range(columns))}
"""
    outputs: list = [(32, [int(words[cta, row, i]) for cta in range(group) for row in rows]) for i in range(columns)]
    data = b"".join(map(_core_matrices, words))
    yield Case(
        case_name(form), form.opcode, program(group, body), [], outputs, 128 * group,
        scratch=words_of(data + bytes(4096)), shared_bytes=16384, ctas=group,
    )  # fmt: skip


def other_cases(form: isa.Form) -> Iterator[Case]:
    """Each of the instructions around a product, in its place."""
    found, name = GROUP.search(form.opcode), form.opcode.split(".")[1]
    group = int(found[1]) if found else 1
    forms = {name: form.opcode} if name in ("alloc", "dealloc", "relinquish_alloc_permit", "commit") else {}
    if "relinquish_alloc_permit" in forms:
        forms = {"relinquish": form.opcode}
    opcode = f"tcgen05.mma.cta_group::{group}.kind::f16"
    case = product_case(case_name(form), opcode, TYPES["f16"], group, "[u32], [u32], u64, u32, pred", **forms)
    yield dataclasses.replace(case, opcode=form.opcode)


def cases(form: isa.Form) -> Iterator[Case]:
    name = form.opcode.split(".")[1]
    yield from {"ld": access_cases, "st": access_cases, "mma": product_cases, "cp": copy_cases}.get(name, other_cases)(
        form
    )
