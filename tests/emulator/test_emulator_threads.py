"""Control flow, barriers, residency and faults of the emulator, with PTX written by hand."""

import dataclasses

import numpy as np
import pytest

from quackish.emulator import Fault, PtxError
from quackish.gpu import H200
from tests.emulator.ptx import execute, kernel, launch, record

U32 = np.uint32
LANES = np.arange(32, dtype=U32)
ONE_SM = dataclasses.replace(H200, sm_count=1)
completions = pytest.mark.parametrize("completion", ["at_once", "late"])
seeds = pytest.mark.parametrize("seed", range(8))


def zeros(n, dtype=U32):
    return np.zeros(n, dtype)


# Threads


def test_threads_diverge_and_come_together():
    out = execute(
        """
        setp.lt.u32 %p, %lane, 10;
        @%p bra LOW;
        mul.lo.u32 %d, %a, 3;
        bra DONE;
        LOW:
        add.u32 %d, %a, 100;
        DONE:
        shfl.sync.bfly.b32 %e, %d, 1, 31, -1;
        """,
        {"d": U32, "e": U32},
        registers=".reg .pred %p;",
        a=LANES,
    )
    expected = np.where(LANES < 10, LANES + 100, LANES * 3)
    assert (out["d"] == expected).all()
    assert (out["e"] == expected[LANES ^ 1]).all()


def test_a_shuffle_waits_for_its_members():
    """Half of the warp comes to the shuffle at once, the other half by a detour."""
    for members in ("-1", "%m"):  # known when decoding, and not
        out = execute(
            f"""
            mov.u32 %d, 0; mov.u32 %m, 0xFFFFFFFE; or.b32 %m, %m, 1;
            setp.lt.u32 %p, %lane, 16;
            @%p bra DETOUR;
            JOIN:
            shfl.sync.bfly.b32 %e, %d, 16, 31, {members};
            bra DONE;
            DETOUR:
            add.u32 %d, %lane, 7;
            bra JOIN;
            DONE:
            """,
            {"e": U32},
            registers=".reg .pred %p; .reg .b32 %d; .reg .b32 %m;",
        )
        assert out["e"].tolist() == [0] * 16 + list(range(7, 23))


@seeds
def test_groups_of_a_warp_with_different_member_masks(seed):
    """Each group of threads is on its own, also where both are at the same instruction."""
    out = execute(
        """
        setp.lt.u32 %p, %lane, 10; selp.b32 %m, 0x3ff, 0xfffffc00, %p;
        redux.sync.add.u32 %d, %lane, %m;
        vote.sync.ballot.b32 %e, %p, %m;
        elect.sync %f|%p, %m;
        """,
        {"d": U32, "e": U32, "f": U32},
        registers=".reg .pred %p; .reg .b32 %m;",
        seed=seed,
    )
    assert out["d"].tolist() == [sum(range(10))] * 10 + [sum(range(10, 32))] * 22
    assert out["e"].tolist() == [0x3FF] * 10 + [0] * 22
    assert out["f"].tolist() == [0] * 10 + [10] * 22


def test_loops_of_different_lengths():
    out = execute(
        """
        mov.u32 %d, 0; mov.u32 %i, 0;
        LOOP:
        setp.ge.u32 %p, %i, %lane;
        @%p bra DONE;
        add.u32 %d, %d, %i;
        add.u32 %i, %i, 1;
        bra LOOP;
        DONE:
        """,
        {"d": U32},
        registers=".reg .pred %p; .reg .b32 %i;",
    )
    assert (out["d"] == LANES * (LANES - 1) // 2).all()


def test_predicated_instructions_and_scopes():
    out = execute(
        """
        mov.u32 %d, 7;
        { .reg .pred p; setp.gt.u32 p, %a, 5; @p add.u32 %d, %d, 1; @!p bra SKIP; add.u32 %d, %d, 10; SKIP: }
        { .reg .pred p; setp.gt.u32 p, %a, 20; @!p bra SKIP; add.u32 %d, %d, 100; SKIP: }
        """,
        {"d": U32},
        a=LANES,
    )
    assert (out["d"] == 7 + 11 * (LANES > 5) + 100 * (LANES > 20)).all()


def test_exited_threads_are_not_waited_for():
    text = kernel(
        """
        mov.u32 %t, %tid.x;
        setp.lt.u32 %p, %t, 8;
        @%p ret;
        shfl.sync.idx.b32 %v, %t, 9, 31, -1;
        bar.sync 0;
        mad.wide.u32 %address, %t, 4, %out;
        st.global.u32 [%address], %v;
        """,
        "out",
        ".reg .b32 %t; .reg .b32 %v; .reg .pred %p; .reg .b64 %address;",
    )
    out = zeros(64)
    launch(text, out, block=(64, 1, 1))
    assert out.tolist() == [0] * 8 + [9] * 24 + [41] * 32


def test_special_registers():
    text = kernel(
        """
        mov.u32 %x, %tid.x; mov.u32 %y, %tid.y; mov.u32 %c, %ctaid.x; mov.u32 %r, %cluster_ctarank;
        mov.u32 %n, %ntid.x;
        mad.lo.u32 %i, %y, %n, %x;
        mad.lo.u32 %i, %c, 64, %i;
        mad.lo.u32 %v, %r, 1000, %y;
        mad.wide.u32 %address, %i, 4, %out;
        st.global.u32 [%address], %v;
        """,
        "out",
        ".reg .b32 %x; .reg .b32 %y; .reg .b32 %c; .reg .b32 %r; .reg .b32 %n; .reg .b32 %i; .reg .b32 %v;"
        ".reg .b64 %address;",
    )
    out = zeros(256)
    launch(text, out, grid=(4, 1, 1), block=(16, 4, 1), cluster=(2, 1, 1))
    expected = [1000 * (cta % 2) + thread // 16 for cta in range(4) for thread in range(64)]
    assert out.tolist() == expected


# What the emulator does not know


def test_unknown_instructions_are_refused():
    for body in ("add.rn.magic.f32 %d, %a, %a;", "add.sat.f32 %d, %a, %a;", "bfi.b32 %d, %a, %a, 1, 2;"):
        with pytest.raises(PtxError, match=r"unknown instruction: (.|\n)*PTX line \d+"):
            execute(body, {"d": U32}, a=LANES)


def test_wrong_operands_are_refused():
    with pytest.raises(PtxError, match="operands fit none of the known forms"):
        execute("add.f32 %d, %a;", {"d": U32}, a=LANES)
    with pytest.raises(PtxError, match="operands fit none of the known forms"):  # registers of another width
        execute("add.u64 %d, %a, %a;", {"d": U32}, a=LANES)


def test_unknown_special_registers_are_refused():
    with pytest.raises(PtxError, match="special register %clock"):
        execute("mov.u32 %d, %clock;", {"d": U32})


def test_a_fault_says_where():
    text = (
        kernel(
            """
        .loc 1 42 7
        st.global.u32 [%out+64], 1;
        """,
            "out",
        )
        + '.file 1 "/somewhere/kernel.py"\n'
    )
    line = next(i for i, content in enumerate(text.splitlines(), 1) if "st.global" in content)
    with pytest.raises(Fault) as error:
        launch(text, zeros(4), seed=5, completion="late")
    message = str(error.value)
    for part in (
        f"PTX line {line}, /somewhere/kernel.py:42: st.global.u32", "kernel test", "CTA (0, 0, 0)", "warp 0",
        "H200", "completion='late'", "seed=5", "outside every tensor",
        "to repeat it: the same call with emulator.record(",
    ):  # fmt: skip
        assert part in message, (part, message)


def test_a_mistake_of_the_emulator_is_no_fault(monkeypatch):
    """Also not one that numpy reports as a ValueError."""

    def fail(*args):
        raise ValueError("shapes do not match")

    monkeypatch.setattr("quackish.emulator.memory.GlobalMemory.store", fail)
    with pytest.raises(
        RuntimeError, match=r"the emulator failed: ValueError: shapes do not match(.|\n)*PTX line"
    ) as error:
        launch(kernel("st.global.u32 [%out], 1;", "out"), zeros(4))
    assert not isinstance(error.value, Fault)


def test_what_the_emulator_lacks_is_named():
    body = """
        setp.eq.u32 %p, 0, 0; mov.b64 %d, 0x4002000000000040;
        wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%a, %b, %c, %e}, %d, %d, %p, 1, 1, 0, 0;
    """
    registers = ".reg .pred %p; .reg .b64 %d; .reg .b32 %a; .reg .b32 %b; .reg .b32 %c; .reg .b32 %e;"
    with pytest.raises(RuntimeError, match=r"does not support this: matrix .* with base offset 1(.|\n)*PTX line"):
        launch(kernel(body, registers=registers), block=(128, 1, 1))


def test_a_product_of_half_a_warp_group_is_a_fault():
    body = """
        setp.eq.u32 %p, 0, 0; mov.b64 %d, 0;
        wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%a, %b, %c, %e}, %d, %d, %p, 1, 1, 0, 0;
    """
    registers = ".reg .pred %p; .reg .b64 %d; .reg .b32 %a; .reg .b32 %b; .reg .b32 %c; .reg .b32 %e;"
    for completion in ("at_once", "late"):
        with pytest.raises(Fault, match="wgmma by 64 threads; it needs the 128 threads of a warp group"):
            launch(kernel(body, registers=registers), block=(64, 1, 1), completion=completion)


# Memory


def test_accesses_outside_tensors_are_faults():
    for offset in (-4, 128):
        text = kernel(f"ld.global.u32 %v, [%out+{offset}];", "out", ".reg .b32 %v;")
        with pytest.raises(Fault, match="outside every tensor"):
            launch(text, zeros(32))
    launch(kernel("ld.global.u32 %v, [%out+124];", "out", ".reg .b32 %v;"), zeros(32))


def test_threads_load_parameters_at_addresses_of_their_own():
    """ "The address of a kernel parameter may be moved into a register" (PTX, Kernel Function Parameters)"""
    body = """
        mov.u32 %t, %laneid; mul.lo.u32 %t, %t, 4; cvt.u64.u32 %i, %t; add.u64 %o, %out, %i;
        and.b64 %i, %i, 12; mov.b64 %a, p_first; add.u64 %a, %a, %i;
        ld.param.u32 %v, [%a]; st.global.u32 [%o], %v;
    """
    registers = ".reg .b32 %t; .reg .b32 %v; .reg .b64 %i; .reg .b64 %a; .reg .b64 %o;"
    out = zeros(32)
    launch(kernel(body, "out first second", registers), out, 1 | 2 << 32, 3 | 4 << 32)
    assert out.tolist() == [1, 2, 3, 4] * 8
    outside = kernel(body.replace("and.b64 %i, %i, 12;", "and.b64 %i, %i, 28;"), "out first second", registers)
    with pytest.raises(Fault, match="of 4 bytes at byte 36 of 24 bytes of parameters"):
        launch(outside, out, 1, 3)


def test_misaligned_accesses_are_faults():
    memory = np.zeros(64, np.uint64)
    for access in ("ld.global.u32 %v, [%out+2];", "ld.global.v2.u32 {%v, %v}, [%out+4];"):
        with pytest.raises(Fault, match=r"misaligned access of \d bytes of global memory"):
            launch(kernel(access, "out", ".reg .b32 %v;"), memory)
    with pytest.raises(Fault, match="misaligned access of 4 bytes of shared memory"):
        launch(
            kernel(
                "mov.u32 %v, buffer; ld.shared.u32 %v, [%v+1];", "", ".reg .b32 %v;", ".shared .align 4 .b8 buffer[64];"
            )
        )


@pytest.mark.parametrize("offset", [-4, 64])
def test_accesses_outside_shared_memory_are_faults(offset):
    text = kernel(
        f"mov.u32 %v, buffer; st.shared.u32 [%v+{offset}], 1;", "", ".reg .b32 %v;", ".shared .align 4 .b8 buffer[64];"
    )
    with pytest.raises(Fault, match="access of shared memory"):
        launch(text)


@pytest.mark.parametrize("count", [1, 2])
def test_matrices_have_addresses_in_their_first_threads_alone(count):
    """Rows are at the addresses of threads 0 to 7, or 0 to 15. (PTX, ldmatrix)"""
    loaded, stored = (", ".join(names[:count]) for names in (("%d", "%e"), ("%lane", "%lane")))
    out = execute(
        f"""
        mov.u32 %a, buffer; mad.lo.u32 %a, %lane, 16, %a;
        setp.ge.u32 %p, %lane, {8 * count}; @%p mov.u32 %a, 0xffffffff;
        stmatrix.sync.aligned.m8n8.x{count}.shared.b16 [%a], {{{stored}}};
        ldmatrix.sync.aligned.m8n8.x{count}.shared.b16 {{{loaded}}}, [%a];
        """,
        {"d": U32},
        registers=".reg .pred %p; .reg .b32 %a; .reg .b32 %e; .shared .align 16 .b8 buffer[256];",
    )
    assert (out["d"] == LANES).all()


def test_shared_memory_is_poisoned():
    text = kernel(
        "mov.u32 %v, buffer; ld.shared.u32 %v, [%v]; st.global.u32 [%out], %v;",
        "out",
        ".reg .b32 %v;",
        ".shared .align 4 .b8 buffer[64];",
    )
    out = zeros(1)
    record(text, out, all_races=True)
    assert np.isnan(out.view(np.float32)[0])


def test_bytes_are_counted():
    text = kernel(
        """
        mov.u32 %t, %laneid; mad.wide.u32 %i, %t, 16, %in; mad.wide.u32 %o, %t, 4, %out;
        ld.global.v4.u32 {%a, %b, %c, %d}, [%i]; setp.lt.u32 %p, %t, 10; @%p st.global.u32 [%o], %c;
        """,
        "in out",
        ".reg .b32 %t; .reg .b32 %a; .reg .b32 %b; .reg .b32 %c; .reg .b32 %d; .reg .b64 %i; .reg .b64 %o;"
        ".reg .pred %p;",
    )
    out = zeros(32)
    report = launch(text, np.arange(128, dtype=U32), out)
    assert out.tolist() == [4 * i + 2 for i in range(10)] + [0] * 22
    assert (report.bytes_read, report.bytes_written) == (512, 40)


@completions
@seeds
def test_counts_of_a_spin_lock_are_those_of_every_seed(completion, seed):
    """How often atom.cas finds the lock taken depends on the order."""
    text = kernel(
        """
        LOOP: atom.global.cas.b32 %v, [%lock], 0, 1; setp.ne.u32 %p, %v, 0; @%p bra LOOP;
        fence.acq_rel.gpu; ld.global.u32 %v, [%lock+4]; add.u32 %v, %v, 1; st.global.u32 [%lock+4], %v;
        st.release.gpu.global.u32 [%lock], 0;
        """,
        "lock",
        ".reg .b32 %v; .reg .pred %p;",
    )
    lock = zeros(2)
    report = launch(text, lock, grid=(8, 1, 1), block=(1, 1, 1), completion=completion, seed=seed)
    assert lock.tolist() == [0, 8]
    assert (report.bytes_read, report.bytes_written) == (8 * 4, 8 * 2 * 4)


# Barriers

SUM_OF_SHARED = """
    mov.u32 %t, %tid.x; mov.u32 %s, buffer;
    mad.lo.u32 %a, %t, 4, %s;
    add.u32 %v, %t, 1;
    st.shared.u32 [%a], %v;
    {barrier}
    xor.b32 %b, %t, 32;
    mad.lo.u32 %a, %b, 4, %s;
    ld.shared.u32 %v, [%a];
    mad.wide.u32 %o, %t, 4, %out;
    st.global.u32 [%o], %v;
"""
SUM_REGISTERS = ".reg .b32 %t; .reg .b32 %s; .reg .b32 %a; .reg .b32 %b; .reg .b32 %v; .reg .b64 %o;"
BUFFER = ".shared .align 16 .b8 buffer[2048];"


def exchange(barrier, seed):
    out = zeros(128)
    launch(
        kernel(SUM_OF_SHARED.format(barrier=barrier), "out", SUM_REGISTERS, BUFFER), out, block=(128, 1, 1), seed=seed
    )
    return (out == (np.arange(128, dtype=U32) ^ 32) + 1).all()


@seeds
def test_threads_exchange_numbers(seed):
    """Without a barrier it is a race: see test_emulator_hazards.py."""
    assert exchange("bar.sync 0;", seed)
    assert exchange("bar.sync 1, 128;", seed)


def test_a_seed_repeats_a_run():
    def run(seed):
        """Warps add to a number, and see in which order they did."""
        text = kernel(
            """
            mov.u32 %t, %tid.x; shr.u32 %w, %t, 5; and.b32 %l, %t, 31; setp.eq.u32 %p, %l, 0;
            @%p atom.global.add.u32 %v, [%count], 1;
            mad.wide.u32 %o, %w, 4, %out;
            @%p st.global.u32 [%o], %v;
            """,
            "count out",
            ".reg .b32 %t; .reg .b32 %w; .reg .b32 %l; .reg .b32 %v; .reg .b64 %o; .reg .pred %p;",
        )
        count, out = zeros(1), zeros(16)
        launch(text, count, out, block=(512, 1, 1), seed=seed)
        assert sorted(out.tolist()) == list(range(16))
        return tuple(out.tolist())

    orders = [run(seed) for seed in range(10)]
    assert orders == [run(seed) for seed in range(10)]
    assert len(set(orders)) > 1


@pytest.mark.parametrize(
    "barrier, message",
    [
        ("setp.lt.u32 %p, %t, 64; @%p bar.sync 1, 128;", "barrier 1 of CTA .* 64 of 128 threads arrived"),
        ("bar.sync 1, 100;", "not a multiple of 32"),
        ("bar.sync 16;", "barrier number 16"),
        ("setp.lt.u32 %p, %t, 64; @%p bar.arrive 1, 96; @!%p bar.sync 1, 128;", "a thread expects (96|128) threads"),
        ("setp.lt.u32 %p, %t, 32; @%p bar.sync 1, 32; @!%p bar.sync 1, 64;", "expects"),
    ],
)
def test_wrong_barriers(barrier, message):
    text = kernel(f"mov.u32 %t, %tid.x; {barrier}", "", ".reg .b32 %t; .reg .pred %p;")
    with pytest.raises(Fault, match=message):
        launch(text, block=(128, 1, 1))


def test_warps_that_arrive_do_not_wait():
    text = kernel(
        """
        mov.u32 %t, %tid.x; setp.ge.u32 %p, %t, 32;
        @%p bra CONSUMER;
        st.global.u32 [%out], 5;
        bar.arrive 1, 64;
        ret;
        CONSUMER:
        bar.sync 1, 64;
        ld.global.u32 %t, [%out];
        st.global.u32 [%out+4], %t;
        """,
        "out",
        ".reg .b32 %t; .reg .pred %p;",
    )
    for seed in range(8):
        out = zeros(2)
        launch(text, out, block=(64, 1, 1), seed=seed)
        assert out.tolist() == [5, 5]


# mbarriers

MBARRIER = """
    mov.u32 %t, %tid.x; mov.u32 %m, buffer; setp.eq.u32 %leader, %t, 0;
    @%leader mbarrier.init.shared.b64 [%m], {count};
    bar.sync 0;
    {use}
"""
MBARRIER_REGISTERS = ".reg .b32 %t; .reg .b32 %m; .reg .pred %leader; .reg .pred %p; .reg .b64 %state; .reg .b32 %a;"
WAIT = "WAIT: mbarrier.try_wait.parity.shared.b64 %p, [%m], 0; @!%p bra WAIT;"


def mbarrier(use, count=1, **options):
    launch(kernel(MBARRIER.format(count=count, use=use), "", MBARRIER_REGISTERS, BUFFER), block=(64, 1, 1), **options)


@completions
@pytest.mark.parametrize("seed", range(4))
def test_a_wait_repeats_nothing_in_front_of_it(completion, seed):
    use = """
        mov.u32 %a, %t; @%leader bra ARRIVE;
        add.u32 %a, %a, 1000;
        mbarrier.try_wait.parity.shared.b64 %p, [%m], 0; @%p bra DONE;
        WAIT: mbarrier.try_wait.parity.shared.b64 %p, [%m], 0; @!%p bra WAIT;
        bra DONE;
        ARRIVE: mbarrier.arrive.shared.b64 %state, [%m];
        DONE: mad.wide.u32 %state, %t, 4, %out; st.global.u32 [%state], %a;
    """
    out = zeros(64)
    text = kernel(MBARRIER.format(count=1, use=use), "out", MBARRIER_REGISTERS, BUFFER)
    launch(text, out, block=(64, 1, 1), completion=completion, seed=seed)
    assert out.tolist() == [0, *range(1001, 1064)]


@completions
@pytest.mark.parametrize("seed", range(4))
def test_mbarriers(completion, seed):
    mbarrier(f"mbarrier.arrive.shared.b64 %state, [%m]; {WAIT}", 64, completion=completion, seed=seed)


@completions
@pytest.mark.parametrize(
    "use, count, message",
    [
        ("@%leader mbarrier.arrive.shared.b64 _, [%m], 2;", 1, "2 arrivals at an mbarrier that expects 1 more"),
        ("@%leader mbarrier.arrive.shared.b64 _, [%m], 3;", 2, "3 arrivals at an mbarrier that expects 2 more"),
        ("@%leader mbarrier.arrive.shared.b64 _, [%m+8];", 2, "no initialized mbarrier at"),
        ("", 0, "mbarrier.init with a count of 0"),
        ("@%leader mbarrier.arrive.expect_tx.shared.b64 _, [%m], 2000000;", 2, "transaction bytes outside"),
        (
            f"@%leader mbarrier.arrive.expect_tx.shared.b64 _, [%m], 16; {WAIT}",
            1,
            "0 of 1 arrivals and 16 bytes pending",
        ),
        (f"@%leader mbarrier.arrive.shared.b64 _, [%m]; {WAIT}", 2, "1 of 2 arrivals"),
    ],
)
def test_wrong_uses_of_mbarriers(use, count, message, completion):
    with pytest.raises(Fault, match=message):
        mbarrier(use, count, completion=completion)


@completions
@pytest.mark.parametrize(
    "use",
    [
        # Two looks at barriers that only this thread completes, afterwards.
        f"""
        @!%leader ret;
        mbarrier.try_wait.parity.shared.b64 %p, [%m], 0; mbarrier.try_wait.parity.shared.b64 %p, [%m+8], 0;
        mbarrier.arrive.shared.b64 %state, [%m]; {WAIT}
        """,
        # A loop that waits for either of two barriers. The second one completes.
        """
        setp.eq.u32 %p, %t, 32; @%p mbarrier.arrive.shared.b64 %state, [%m+8];
        @!%leader ret;
        LOOP: mbarrier.try_wait.parity.shared.b64 %p, [%m], 0; @%p ret;
        mbarrier.try_wait.parity.shared.b64 %p, [%m+8], 0; @!%p bra LOOP;
        """,
    ],
)
def test_a_wait_has_a_time_limit(use, completion):
    mbarrier("@%leader mbarrier.init.shared.b64 [%m+8], 1; bar.sync 0;" + use, completion=completion)


def test_mbarriers_are_aligned():
    with pytest.raises(Fault, match="not a multiple of 8"):
        mbarrier("@%leader mbarrier.init.shared.b64 [%m+12], 1;")


def test_a_deadlock_is_reported():
    with pytest.raises(Fault, match="deadlock: no thread can go on") as error:
        mbarrier(WAIT, 1)
    for part in ("phase 0, 1 of 1 arrivals and 0 bytes pending", "parity 0", "warps 0, 1", "try_wait", "PTX line"):
        assert part in str(error.value), error.value


# Bulk copies

COPY = """
    mov.u32 %t, %tid.x; mov.u32 %m, buffer; add.u32 %a, %m, 1024; setp.eq.u32 %leader, %t, 0;
    @!%leader bra READY;
    mbarrier.init.shared.b64 [%m], 1;
    mbarrier.arrive.expect_tx.shared.b64 _, [%m], {expected};
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%a], [%in], 256, [%m];
    READY:
    bar.sync 0;
    {wait}
    mad.lo.u32 %a, %t, 4, %a;
    ld.shared.u32 %v, [%a];
    mad.wide.u32 %o, %t, 4, %out;
    st.global.u32 [%o], %v;
"""


def copy(wait=WAIT, expected=256, **options):
    out, source = zeros(64), np.arange(64, dtype=U32)
    registers = MBARRIER_REGISTERS + ".reg .b32 %v; .reg .b64 %o;"
    text = kernel(COPY.format(wait=wait, expected=expected), "in out", registers, BUFFER)
    launch(text, source, out, block=(64, 1, 1), **options)
    return (out == source).all()


def test_copies_are_late_or_at_once():
    assert copy()
    assert copy(completion="late")
    assert has_copied("", "at_once")
    assert not has_copied("", "late")


def has_copied(wait, completion):
    """Whether a copy has ended, some time after it was issued."""
    out, source = zeros(64), np.arange(64, dtype=U32)
    registers = MBARRIER_REGISTERS + ".reg .b32 %v; .reg .b64 %o;"
    wait += "mbarrier.test_wait.parity.shared.b64 %p, [%m], 0; selp.u32 %v, 1, 0, %p;"
    wait += f"@%leader st.global.u32 [%out], %v; {WAIT} ret;"  # no CTA exits before its copies have ended
    launch(
        kernel(COPY.format(wait=wait, expected=256), "in out", registers, BUFFER), source, out, block=(64, 1, 1),
        completion=completion,
    )  # fmt: skip
    return bool(out[0])


@completions
@pytest.mark.parametrize("expected", [240, 272])
def test_wrong_transaction_bytes_deadlock(expected, completion):
    with pytest.raises(Fault, match=rf"deadlock(.|\n)*{expected - 256} bytes pending"):
        copy(expected=expected, completion=completion)


def test_misaligned_bulk_copies_are_faults():
    text = COPY.replace("[%a], [%in], 256", "[%a+8], [%in], 256")
    registers = MBARRIER_REGISTERS + ".reg .b32 %v; .reg .b64 %o;"
    with pytest.raises(Fault, match="must be multiples of 16"):
        launch(
            kernel(text.format(wait=WAIT, expected=256), "in out", registers, BUFFER),
            zeros(64), zeros(64), block=(64, 1, 1),
        )  # fmt: skip


STORE = """
    mov.u32 %a, buffer;
    st.shared.u32 [%a], 1; st.shared.u32 [%a+4], 2; st.shared.u32 [%a+8], 3; st.shared.u32 [%a+12], 4;
    fence.proxy.async;
    cp.async.bulk.global.shared::cta.bulk_group [%out], [%a], 16;
    cp.async.bulk.commit_group;
    {wait}
    st.shared.u32 [%a], 9;
    ld.global.u32 %v, [%out+12]; st.global.u32 [%out+16], %v;
"""


def test_stores_are_late_or_at_once():
    def store(wait, completion):
        out = zeros(5)
        text = kernel(STORE.format(wait=wait), "out", ".reg .b32 %a; .reg .b32 %v;", BUFFER)
        launch(text, out, block=(1, 1, 1), completion=completion)
        return out.tolist()

    assert store("cp.async.bulk.wait_group 0;", "at_once") == [1, 2, 3, 4, 4]
    for completion in ("at_once", "late"):
        with pytest.raises(Fault, match=r"race: warp 0 reads global memory(.|\n)*wait_group, without .read"):
            store("cp.async.bulk.wait_group.read 0;", completion)
    assert store("cp.async.bulk.wait_group 0;", "late") == [1, 2, 3, 4, 4]


# Clusters and residency

TO_NEIGHBOR = """
    mov.u32 %r, %cluster_ctarank; {neighbor} mov.u32 %m, buffer;
    mbarrier.init.shared.b64 [%m], 1;
    mbarrier.arrive.expect_tx.shared.b64 _, [%m], 4;
    {sync}
    mapa.shared::cluster.u32 %a, %m, %n;
    add.u32 %b, %a, 8; add.u32 %v, %r, 70;
    st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%b], %v, [%a];
    WAIT: mbarrier.try_wait.parity.shared.b64 %p, [%m], 0; @!%p bra WAIT;
    ld.shared.u32 %v, [%m+8];
    mad.wide.u32 %o, %r, 4, %out;
    st.global.u32 [%o], %v;
"""
NEIGHBOR_REGISTERS = (
    ".reg .b32 %r; .reg .b32 %n; .reg .b32 %m; .reg .b32 %a; .reg .b32 %b; .reg .b32 %v; .reg .b64 %o; .reg .pred %p;"
)


def to_neighbor(sync, neighbor="xor.b32 %n, %r, 1;", ctas=2, **options):
    out = zeros(2)
    body = TO_NEIGHBOR.format(sync=sync, neighbor=neighbor)
    text = kernel(body, "out", NEIGHBOR_REGISTERS, BUFFER)
    launch(text, out, grid=(ctas, 1, 1), block=(1, 1, 1), cluster=(ctas, 1, 1), **options)
    return out.tolist()


@completions
@pytest.mark.parametrize("seed", range(4))
def test_clusters(completion, seed):
    both = "fence.mbarrier_init.release.cluster; barrier.cluster.arrive.relaxed; barrier.cluster.wait;"
    assert to_neighbor(both, completion=completion, seed=seed) == [71, 70]


def test_asynchronous_stores_need_a_cluster_of_two():
    with pytest.raises(Fault, match=r"st\.async in a cluster of one CTA"):
        to_neighbor("", neighbor="mov.u32 %n, 0;", ctas=1)


def test_loads_and_stores_of_shared_memory_of_several_ctas():
    """Thread t stores 10 r + t in word t of CTA t mod 2, where r is the other CTA, and reads it, or nothing, there."""
    out = zeros(8)
    both = "barrier.cluster.arrive; barrier.cluster.wait;"
    body = f"""
        mov.u32 %t, %tid.x; mov.u32 %r, %cluster_ctarank; mov.u32 %m, buffer; mad.lo.u32 %m, %t, 4, %m;
        and.b32 %n, %t, 1; mapa.shared::cluster.u32 %a, %m, %n; mad.lo.u32 %v, %r, 10, %t;
        setp.eq.u32 %p, %r, %n;
        @%p st.shared.u32 [%m], 99; {both}
        @!%p st.shared::cluster.u32 [%a], %v; {both}
        xor.b32 %n, %n, %r; mapa.shared::cluster.u32 %a, %m, %n; ld.shared::cluster.u32 %v, [%a];
        mad.lo.u32 %t, %r, 4, %t; mad.wide.u32 %o, %t, 4, %out; st.global.u32 [%o], %v; {both}"""
    report = record(
        kernel(body, "out", NEIGHBOR_REGISTERS + ".reg .b32 %t;", BUFFER), out,
        grid=(2, 1, 1), block=(4, 1, 1), cluster=(2, 1, 1), all_races=True,
    )  # fmt: skip
    assert [finding.rule for finding in report.findings] == ["uninitialized"]
    poison = out.tolist()[4]
    # CTA 0 reads what CTA 1 stored in words 0 and 2, and its own words 1 and 3 in CTA 1; CTA 1 reads the other words.
    assert out.tolist() == [10, 1, 12, 3, poison, poison, poison, poison]
    assert poison not in (10, 1, 12, 3, 99)


def test_a_missing_cluster_barrier_shows_for_some_seed():
    def fails(seed):
        try:
            return to_neighbor("", seed=seed) != [71, 70]
        except Fault as fault:
            return "mbarrier" in str(fault)

    assert any(fails(seed) for seed in range(8))


def test_arriving_twice_at_the_barrier_of_a_cluster():
    with pytest.raises(Fault, match="have arrived and not waited"):
        to_neighbor("barrier.cluster.arrive; barrier.cluster.arrive; barrier.cluster.wait;")


ALL_CTAS_MEET = """
    atom.global.add.u32 %v, [%count], 1;
    LOOP: ld.acquire.gpu.global.u32 %v, [%count]; setp.lt.u32 %p, %v, {ctas}; @%p bra LOOP;
"""


def meet(ctas, gpu, **options):
    launch(
        kernel(ALL_CTAS_MEET.format(ctas=ctas), "count", ".reg .b32 %v; .reg .pred %p;"), zeros(1),
        grid=(ctas, 1, 1), block=(1, 1, 1), gpu=gpu, **options,
    )  # fmt: skip


@completions
def test_residency(completion):
    meet(2, ONE_SM, shared_bytes=100_000, completion=completion)
    with pytest.raises(Fault, match=r"deadlock: threads loop(.|\n)*1 CTAs have not begun, because only 2 fit at once"):
        meet(3, ONE_SM, shared_bytes=100_000, completion=completion)
    meet(32, ONE_SM)
    with pytest.raises(Fault, match="1 CTAs have not begun, because only 32 fit"):
        meet(33, ONE_SM)
    meet(33, dataclasses.replace(H200, sm_count=2))


def test_bounded_polling_is_no_deadlock():
    text = kernel(
        """
        mov.u32 %i, 0;
        LOOP: ld.acquire.gpu.global.u32 %v, [%count]; add.u32 %i, %i, 1; setp.ge.u32 %p, %i, 1000; @%p bra DONE;
        setp.eq.u32 %p, %v, 0; @%p bra LOOP;
        DONE: st.global.u32 [%count+4], %i;
        """,
        "count",
        ".reg .b32 %v; .reg .b32 %i; .reg .pred %p;",
    )
    out = zeros(2)
    launch(text, out)
    assert out.tolist() == [0, 1000]


def test_endless_loops_are_reported():
    text = kernel("LOOP: xor.b32 %v, %v, 1; bra LOOP;", registers=".reg .b32 %v;")
    with pytest.raises(Fault, match="deadlock"):
        launch(text)


def test_copies_wait_for_threads_that_compute():
    """A late copy is later than any computation that does not need it."""
    loop = "mov.u32 %v, 0; LOOP: add.u32 %v, %v, 1; setp.lt.u32 %p, %v, 3000; @%p bra LOOP;"
    assert not has_copied(loop, "late")


TAKE_REGISTERS = """
    .reg .pred %p; .reg .b32 %t; mov.u32 %t, %tid.x; setp.lt.u32 %p, %t, 128; @%p bra PRODUCER;
    setmaxnreg.inc.sync.aligned.u32 {}; ret;
    PRODUCER: setmaxnreg.dec.sync.aligned.u32 24;
"""


@pytest.mark.parametrize(
    "directives, threads, most",  # registers per thread: 64, 65,536 / 384 rounded down to a multiple of 8, 65,536 / 512
    [(".maxnreg 64", 256, 104), (".minnctapersm 1", 384, 240), (".minnctapersm 2", 256, 232)],
)
@pytest.mark.parametrize("seed", range(4))
def test_warp_groups_take_registers_that_others_gave_back(directives, threads, most, seed):
    directives += f" .reqntid {threads}, 1, 1"
    launch(kernel(TAKE_REGISTERS.format(most), directives=directives), block=(threads, 1, 1), seed=seed)
    with pytest.raises(
        Fault, match=rf"deadlock(.|\n)*{most + 8} instead of \d+ per thread take \d+ from the CTA's pool"
    ):
        launch(kernel(TAKE_REGISTERS.format(most + 8), directives=directives), block=(threads, 1, 1), seed=seed)


def test_setmaxnreg_has_no_effect_without_a_limit_of_registers():
    text = kernel(TAKE_REGISTERS.format(256), directives=".reqntid 384, 1, 1")
    launch(text, block=(384, 1, 1))


def test_launches_that_no_gpu_takes():
    text = kernel("", directives=".reqntid 64, 1, 1")
    with pytest.raises(Fault, match="requires"):
        launch(text)
    with pytest.raises(Fault, match="shared memory; at most"):
        launch(kernel(""), shared_bytes=240_000)
    with pytest.raises(Fault, match="do not divide"):
        launch(kernel(""), grid=(3, 1, 1), cluster=(2, 1, 1))
    with pytest.raises(Fault, match="a CTA of 2048 threads"):
        launch(kernel(""), block=(2048, 1, 1))
    with pytest.raises(Fault, match=r"a cluster of \(32, 1, 1\) CTAs; at most 16"):
        launch(kernel(""), grid=(32, 1, 1), cluster=(32, 1, 1))
    with pytest.raises(Fault, match=r"a cooperative launch of \(3, 1, 1\) CTAs does not fit"):
        launch(kernel(""), grid=(3, 1, 1), shared_bytes=100_000, gpu=ONE_SM, cooperative=True)
    with pytest.raises(Fault, match="does not fit"):
        launch(kernel(""), grid=(4, 1, 1), cluster=(4, 1, 1), shared_bytes=200_000, gpu=ONE_SM)


PREDICATED = """
    setp.ge.u32 %p, %lane, 4; setp.lt.u32 %q, %lane, 16; and.pred %p, %p, %q;
    mov.u32 %d, 0;
    @%p redux.sync.add.u32 %d, %lane, 0xfff0;
"""


@seeds
def test_threads_with_a_false_predicate_are_not_in_the_member_mask(seed):
    out = execute(PREDICATED, {"d": U32}, registers=".reg .pred %p; .reg .pred %q;", seed=seed)
    assert out["d"].tolist() == [0] * 4 + [sum(range(4, 16))] * 12 + [0] * 16


def test_members_with_a_false_predicate_deadlock():
    """All threads are in the mask, and some do not execute the instruction."""
    with pytest.raises(
        Fault, match=r"absent-lanes: lanes 0xfff0 of warp 0 alone(.|\n)*the threads of their member mask"
    ):
        text = PREDICATED.replace("0xfff0", "-1") + "bar.sync 0;"  # otherwise the others exit, and are not waited for
        execute(text, {"d": U32}, registers=".reg .pred %p; .reg .pred %q;")


def test_a_fault_at_a_barrier_names_the_barrier():
    body = "mov.u32 %t, %tid.x; bar.arrive 1, 64; bar.sync 1, 96;"
    with pytest.raises(Fault, match=r"expects 96 threads, others 64(.|\n)*: bar\.sync 1, 96"):
        launch(kernel(body, registers=".reg .b32 %t;"))


@pytest.mark.parametrize(
    "mangled, name",
    [
        ("kernel_cutlass_kernel_quackishkernelsgemm_sm90GemmSm90_object_at__cutlasscuteatomCopyAtom_0", "GemmSm90"),
        ("kernel_cutlass_double_it_tensorptrf32gmemo321__0", "double_it"),
        ("my_kernel", "my_kernel"),
    ],
)
def test_kernels_have_the_names_of_their_sources(mangled, name):
    with pytest.raises(PtxError, match=rf"kernel {name}$"):
        launch(kernel("add.f16 %a, %a, %a;").replace("test(", f"{mangled}("))


def test_masks_of_lanes_and_sizes():
    masks = ("eq", "lt", "le", "ge", "gt")
    body = "".join(f"mov.u32 %{mask}, %lanemask_{mask};" for mask in masks) + "mov.u32 %warps, %nwarpid;"
    got = execute(body, dict.fromkeys([*masks, "warps"], np.uint32))
    for lane in range(32):
        expected = {"eq": range(lane, lane + 1), "lt": range(lane), "le": range(lane + 1)}
        expected |= {"ge": range(lane, 32), "gt": range(lane + 1, 32)}
        for mask in masks:
            assert got[mask][lane] == sum(1 << other for other in expected[mask]), (mask, lane)
    assert set(got["warps"]) == {1}
    out = zeros(1)
    text = kernel("mov.u32 %v, %dynamic_smem_size; st.global.u32 [%out], %v;", "out", ".reg .b32 %v;")
    launch(text, out, block=(1, 1, 1), shared_bytes=48)
    assert out[0] == 48
