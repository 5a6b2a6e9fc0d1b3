"""Values that nobody wrote: reading them is allowed, until something depends on them."""

import numpy as np
import pytest

from quackish import emulator
from quackish.gpu import B200
from tests.emulator.ptx import kernel, record

REGISTERS = ".reg .b32 %t, %s, %a, %v, %w, %x, %y; .reg .b64 %at; .reg .pred %p, %first, %never;"
SHARED = ".shared .align 128 .b8 buffer[2048];"
# Of 32 threads the first one writes its word of shared memory. %a and %at are a thread's words.
BEGIN = """
mov.u32 %t, %tid.x; mov.u32 %s, buffer; setp.eq.u32 %first, %t, 0;
mad.lo.u32 %a, %t, 4, %s; mad.wide.u32 %at, %t, 4, %out;
@%first st.shared.u32 [%s], %t; bar.warp.sync -1;
"""
LOAD = "ld.shared.u32 %v, [%a];"
STORE = "st.global.u32 [%at], %v;"
BRANCH = "setp.lt.u32 %p, %v, 7; @%p bra END; END:"


def run(body, begin=BEGIN, **settings):
    text = kernel(begin + body, "out", REGISTERS, SHARED, "sm_100a")
    return record(text, np.zeros(64, np.uint32), gpu=B200, **settings)


def check(right, wrong, message, **options):
    """The right kernel has no fault, and the wrong one has this fault."""
    for completion in ("at_once", "late"):
        assert not run(right, completion=completion, **options).findings
        with pytest.raises(emulator.Fault, match=f"uninitialized: {message}"):
            run(wrong, completion=completion, **options)


SHARED_MEMORY = r"shared memory at 0x404 of CTA \(0, 0, 0\) that nothing wrote, in thread"


@pytest.mark.parametrize(
    "right, wrong, does",
    [
        (LOAD, f"{LOAD} {STORE}", "global memory gets"),
        (f"{LOAD} @%first {STORE}", f"{LOAD} @!%first {STORE}", "global memory gets"),
        (f"@!%first bra END; {LOAD} {BRANCH}", f"{LOAD} {BRANCH}", "a branch or a predicate depends on"),
        (f"{LOAD} selp.u32 %v, %v, 1, %first; {STORE}", f"{LOAD} add.u32 %v, %v, 1; {STORE}", "global memory gets"),
        (
            f"{LOAD} setp.lt.and.u32 %p, %v, 7, %first; @%p bra END; END:",
            f"{LOAD} setp.lt.or.u32 %p, %v, 7, %first; @%p bra END; END:",
            "a branch or a predicate depends on",
        ),
        (
            f"{LOAD} and.b32 %v, %v, 0; add.u32 %a, %a, %v; ld.shared.u32 %v, [%a];",
            f"{LOAD} and.b32 %v, %v, 4; add.u32 %a, %a, %v; ld.shared.u32 %v, [%a];",
            "an address depends on",
        ),
        (
            f"{LOAD} shfl.sync.idx.b32 %v, %v, 0, 31, -1; {STORE}",
            f"{LOAD} shfl.sync.idx.b32 %v, %v, 3, 31, -1; {STORE}",
            "global memory gets",
        ),
        (
            f"@%first ld.shared.v2.u32 {{%v, %w}}, [%s]; @%first {STORE}",
            f"@%first ld.shared.v2.u32 {{%w, %v}}, [%s]; @%first {STORE}",
            "global memory gets",
        ),
        (
            f"{LOAD} mov.u32 %w, %v; @%first add.u32 %v, %w, 1; @%first {STORE}",
            f"{LOAD} mov.u32 %w, %v; @%first add.u32 %v, %w, 1; {STORE}",
            "global memory gets",
        ),
        (
            "mul.wide.u32 %at, %t, 8; add.u64 %at, %at, %out; @%first ld.shared.v2.u32 {%v, %w}, [%s];"
            "@%first st.global.v2.u32 [%at], {%v, %w};",  # the end of a row
            f"{LOAD} mul.wide.u32 %at, %t, 8; add.u64 %at, %at, %out; st.global.v2.u32 [%at], {{%v, %v}};",
            "global memory gets",
        ),
        (f"{LOAD} mov.u32 %v, 1; {STORE}", f"{LOAD} @%first mov.u32 %v, 1; {STORE}", "global memory gets"),
    ],
)
def test_what_depends_on_shared_memory(right, wrong, does):
    where = SHARED_MEMORY if "shared.v2" not in wrong else SHARED_MEMORY.replace("0x404", "0x400")
    check(right, wrong, f"{does} {where}(.|\n)*a barrier is missing")


def test_a_register_that_no_path_writes():
    """Half of a packed number may be one, if no instruction takes it out again."""
    pack = ".reg .b64 %wide; mov.u32 %x, 5; mov.b64 %wide, {%x, %y}; shl.b64 %wide, %wide, 1;"
    check(
        f"{pack} mov.b64 {{%v, %w}}, %wide; {STORE}",
        f"{pack} mov.b64 {{%w, %v}}, %wide; {STORE}",
        "global memory gets a register that nothing wrote, in thread 0",
    )
    loop = "mov.u32 %x, 0; LOOP: {} add.u32 %x, %x, 1; setp.lt.u32 %p, %x, 3; @%p bra LOOP;"
    first, add = "setp.eq.u32 %p, %x, 0; @%p mov.u32 %v, 0;", "add.u32 %v, %v, 1;"
    check(f"{loop.format(first + add)} {STORE}", f"{loop.format(add)} {STORE}", "global memory gets a register")


ALLOCATE = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%s+64], 32; ld.shared.b32 %t, [%s+64];"
FREE = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %t, 32;"
WRITE_ONE = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%t], {%a}; tcgen05.wait::st.sync.aligned;"
READ_TWO = "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%v, %w}, [%t]; {} tcgen05.wait::ld.sync.aligned;"


def test_what_depends_on_tensor_memory():
    """Also through moves, which an assembler removes; and words of an earlier allocation."""
    where = r"global memory gets tensor memory from column 0 on of CTA \(0, 0, 0\) that nothing wrote"
    move, write = "mov.b32 %y, {};", f"{ALLOCATE} {WRITE_ONE}"
    store = "st.global.u32 [%at], %y;"
    read = write + READ_TWO.replace("{}", "") + FREE
    check(read, read + "st.global.u32 [%at], %w;", where)
    first, second = (write + READ_TWO.replace("{}", move.format(register)) + store + FREE for register in ("%v", "%w"))
    check(first, second, where)
    again, reads = f"{write} {FREE} bar.warp.sync -1;", READ_TWO.replace("{}", "") + STORE + FREE
    check(again + write + reads, again + ALLOCATE + reads, where)
