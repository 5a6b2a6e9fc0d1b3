"""Asynchronous instructions of the emulator whose meaning needs several CTAs, or a wait that is missing."""

import dataclasses
import functools
import re

import numpy as np
import pytest

from quackish import emulator
from quackish.gpu import B200
from tests.emulator.ptx import kernel, launch, record

ONE_SM = dataclasses.replace(B200, sm_count=1)
REGISTERS = (
    ".reg .pred %p, %q, %first;\n.reg .b32 %tid, %cta, %base, %bar, %a, %b, %c;\n.reg .b64 %at, %low, %high, %s;"
)
SHARED = ".shared .align 128 .b8 buffer[1024];"
BEGIN = "mov.u32 %tid, %tid.x; mov.u32 %cta, %ctaid.x; mov.b32 %base, buffer; setp.eq.u32 %first, %tid, 0;\n"


def run(body, *arrays, grid=1, cluster=1, block=32, gpu=B200, completion="late", seed=0, shared_bytes=0):
    names = " ".join(f"p{i}" for i in range(len(arrays)))
    text = kernel(BEGIN + body, names, REGISTERS, SHARED, "sm_100a")
    return launch(
        text, *arrays, grid=(grid, 1, 1), block=(block, 1, 1), cluster=(cluster, 1, 1), gpu=gpu, completion=completion,
        seed=seed, shared_bytes=shared_bytes,
    )  # fmt: skip


def findings(body, *arrays, **settings):
    """The (rule, severity) of what a run finds and does not raise."""
    names = " ".join(f"p{i}" for i in range(len(arrays)))
    report = record(kernel(BEGIN + body, names, REGISTERS, SHARED, "sm_100a"), *arrays, gpu=B200, **settings)
    return {(found.rule, found.severity) for found in report.findings}


# Launch control: a CTA does the work of those that it cancels.

WORKER = """
add.u32 %bar, %base, 64;
@%first mbarrier.init.shared.b64 [%bar], 1;
fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
mov.u32 %a, %cluster_ctarank; mov.b32 %c, 0;
WORK:
mad.wide.u32 %at, %cta, 4, %p0;
@%first red.relaxed.gpu.global.add.u32 [%at], 1;
@%first mbarrier.arrive.expect_tx.shared.b64 %s, [%bar], 16;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
setp.eq.and.u32 %p, %a, 0, %first;
@%p clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.multicast::cluster::all.b128
    [%base], [%bar];
WAIT: mbarrier.try_wait.parity.shared.b64 %q, [%bar], %c; @!%q bra WAIT;
xor.b32 %c, %c, 1;
ld.shared.v2.b64 {%low, %high}, [%base];
{ .reg .b128 %w; mov.b128 %w, {%low, %high};
clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %q, %w;
clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %b, %w; }
add.u32 %cta, %b, %a;
bar.warp.sync -1;
@%q bra WORK;
"""


@pytest.mark.parametrize("completion", ["at_once", "late"])
@pytest.mark.parametrize("cluster", [1, 2])
def test_clusters_take_the_work_of_canceled_ones(completion, cluster):
    done, gpu = np.zeros(12, np.uint32), dataclasses.replace(B200, sm_count=2)
    for seed in range(3):
        run(WORKER, done, grid=12, cluster=cluster, gpu=gpu, completion=completion, seed=seed, shared_bytes=200_000)
    assert (done == 3).all()


def test_canceling_ends_with_the_first_refusal():
    again = re.sub(r"@%first red[^;]*;", "", WORKER.replace("@%q bra WORK;", "bra WORK;"))
    with pytest.raises(emulator.Fault, match="after a response that no cluster was canceled"):
        run(again, np.zeros(64, np.uint32), grid=2, gpu=ONE_SM, shared_bytes=200_000)


# cp.async

COPY = "mad.wide.u32 %at, %tid, 16, %p0; mad.lo.u32 %a, %tid, 16, %base;\ncp.async.cg.shared.global [%a], [%at], 16;\n"
STORE = "mad.wide.u32 %at, %tid, 4, %p1; ld.shared.b32 %b, [%a]; st.global.b32 [%at], %b;"


@pytest.mark.parametrize(
    "wait, arrives",
    [
        ("cp.async.commit_group; cp.async.wait_group 0;", True),
        ("cp.async.commit_group; cp.async.commit_group; cp.async.wait_group 1;", True),
        ("cp.async.commit_group; cp.async.wait_group 1;", False),
        ("cp.async.wait_group 0;", False),  # of no group
        ("", False),
        ("setp.lt.u32 %p, %tid, 8; @%p cp.async.wait_all;", None),  # some threads of the warp
    ],
)
def test_copies_of_threads_are_late_until_they_wait(wait, arrives):
    source, got = np.arange(128, dtype=np.uint32), np.zeros(32, np.uint32)
    run(COPY + wait + STORE, source, got)
    waited = np.arange(32) < 8 if arrives is None else np.full(32, arrives)
    assert (got == np.where(waited, source[::4], 0xFFFFFFFF)).all()
    run(COPY + wait + STORE, source, got, completion="at_once")
    assert (got == source[::4]).all()


def test_copies_of_threads_that_a_bulk_store_reads_without_a_fence():
    """Cards run this, but not a store of a thread in place of the copy."""
    body = """cp.async.wait_all; {} bar.sync 0;
        @%first cp.async.bulk.global.shared::cta.bulk_group [%p1], [%base], 512; cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0;"""
    arrays = np.zeros(128, np.uint32), np.zeros(128, np.uint32)
    assert findings(COPY + body.format("fence.proxy.async.shared::cta;"), *arrays) == set()
    assert findings(COPY + body.format(""), *arrays) == {("proxy-fence-of-copy", "formal")}
    with pytest.raises(emulator.Fault, match="proxy-fence: "):
        findings(COPY + body.format("bar.sync 0; @%first st.shared.b32 [%base+256], %tid;"), *arrays)


@pytest.mark.parametrize(
    "copy, message",
    [
        ("cp.async.ca.shared.global [%base], [%p0], 12;", "cp.async.ca of 12 bytes; valid are 4, 8, 16"),
        ("cp.async.cg.shared.global [%base], [%p0], 8;", "cp.async.cg of 8 bytes; valid are 16"),
        ("cp.async.ca.shared.global [%base], [%p0], 8, 9;", "src-size larger than cp-size"),
        ("cp.async.ca.shared.global [%base+4], [%p0], 8;", "not a multiple of 8"),
        ("cp.async.ca.shared.global [%base], [%p0+2], 4;", "not a multiple of 4"),
        ("cp.async.ca.shared.global [%base+1024], [%p0], 4;", "access of shared memory"),
    ],
)
def test_copies_of_threads_that_are_refused(copy, message):
    with pytest.raises(emulator.Fault, match=message):
        run(copy, np.zeros(4, np.uint32))


# Tensor memory

ALLOCATE = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%base], {};\n"
FREE = "ld.shared.b32 %b, [%base]; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %b, {};\n"


def test_ctas_of_an_sm_share_its_tensor_memory():
    """Four CTAs are resident, and two of them at a time have columns."""
    body = ALLOCATE.format(256) + "mad.wide.u32 %at, %cta, 4, %p0; ld.shared.b32 %a, [%base]; st.global.b32 [%at], %a;"
    columns = np.zeros(4, np.uint32)
    report = run(body + FREE.format(256), columns, grid=4, gpu=ONE_SM)
    assert set(columns.tolist()) <= {0, 256}
    assert report.tensor_memory_columns == 256
    body += "membar.gl; LOOP: ld.volatile.global.b32 %a, [%p1]; add.u32 %a, %a, 1; setp.ne.u32 %p, %a, 1; bra LOOP;"
    with pytest.raises(emulator.Fault, match="waits for 256 columns of tensor memory of SM 0"):
        run(body, columns, np.zeros(1, np.uint32), grid=4, gpu=ONE_SM)


STARTED = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n"  # both CTAs
PAIR = (
    STARTED
    + ALLOCATE.format(64)
    + """
mov.u32 %a, %clusterid.x; setp.eq.u32 %p, %a, 2; selp.b32 %a, 1000, 1, %p;
LOOP: add.u32 %a, %a, -1; setp.gt.s32 %p, %a, 0; @%p bra LOOP;
ld.shared.b32 %b, [%base];
tcgen05.st.sync.aligned.32x32b.x1.b32 [%b], {%tid}; tcgen05.wait::st.sync.aligned;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
"""
    + FREE.format(64)
).replace("::1", "::2")


def test_the_ctas_of_a_pair_are_on_different_sms():
    """Of three clusters on three SMs, the third one runs for longer than the others."""
    for seed in range(4):
        run(PAIR, grid=8, cluster=2, gpu=dataclasses.replace(B200, sm_count=3), seed=seed, shared_bytes=100_000)
    with pytest.raises(emulator.Fault, match=r"both CTAs of a pair are on SM 0; .* two or more SMs"):
        run(PAIR, grid=2, cluster=2, gpu=ONE_SM)


def test_a_pair_that_allocates_before_both_ctas_have_started():
    """Cards run this."""
    for seed in range(4):
        assert findings(PAIR, grid=(2, 1, 1), cluster=(2, 1, 1), seed=seed) == set()
        wrong = findings(PAIR.removeprefix(STARTED), grid=(2, 1, 1), cluster=(2, 1, 1), seed=seed)
        assert wrong == {("cta-pair-start", "formal")}


COMMITS = (
    ALLOCATE.format(32)
    + """
add.u32 %bar, %base, 64; @%first mbarrier.init.shared.b64 [%bar], 1; @%first mbarrier.init.shared.b64 [%bar+8], 1;
TOGETHER
mov.u32 %a, %cluster_ctarank; setp.ne.u32 %p, %a, 0; @%p bra OTHER;
mapa.shared::cluster.u32 %c, %bar, 1; ld.shared.b32 %b, [%base];
add.u32 %a, %base, 512; shr.u32 %a, %a, 4; cvt.u64.u32 %low, %a; or.b64 %low, %low, 0x400800000000;
@%first tcgen05.cp.cta_group::1.32x128b.warpx4 [%b], %low;
@%first tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%c];
@%first tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%bar];
@%first tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%c+8];
ISSUED
OWN: mbarrier.try_wait.parity.shared.b64 %q, [%bar], 0; @!%q bra OWN;
bra END;
OTHER: ISSUED
WAIT
END:
"""
    + FREE.format(32)
).replace("TOGETHER", STARTED)


def test_a_cta_that_exits_before_the_signal_of_a_commit():
    """Formal if it knows that the products are complete, as in flash-attn-4's backward."""
    pair = dict(grid=(2, 1, 1), cluster=(2, 1, 1))
    first, last = (f"W{i}: mbarrier.try_wait.parity.shared.b64 %q, [%bar+{i}], 0; @!%q bra W{i};" for i in (0, 8))
    for completion in ("at_once", "late"):
        for seed in range(4):
            found = functools.partial(findings, completion=completion, seed=seed, **pair)
            body = COMMITS.replace("ISSUED", STARTED)
            assert found(body.replace("WAIT", last)) == set()
            assert found(body.replace("WAIT", first)) == {("exit-before-signal", "formal")}
            for wrong in COMMITS.replace("WAIT", first).replace("ISSUED", ""), body.replace("WAIT", ""):
                with pytest.raises(emulator.Fault, match="exited-cta"):
                    found(wrong)


ISSUE = """
add.u32 %bar, %base, 64;
@%first mbarrier.init.shared.b64 [%bar], 1;
mov.u32 %a, %cluster_ctarank; setp.ne.u32 %p, %a, 0;
EXIT
mov.b32 %a, 10000;
LOOP: add.u32 %a, %a, -1; setp.gt.s32 %q, %a, 0; @%q bra LOOP;
setp.eq.and.u32 %q, %tid, 0, !%p;
@%q tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.b64 [%bar];
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
"""


def test_a_cta_that_leaves_before_its_peer():
    """One that exits at the end of the cluster's barrier is right."""
    pair = (STARTED + ALLOCATE.format(64) + FREE.format(64)).replace("::1", "::2")
    for seed in range(4):
        run(pair + ISSUE.replace("EXIT", ""), grid=2, cluster=2, seed=seed)
        with pytest.raises(emulator.Fault, match=r".cta_group::2 in CTA \(0, 0, 0\).*, whose peer CTA has exited"):
            run(pair + ISSUE.replace("EXIT", "@%p ret;"), grid=2, cluster=2, seed=seed)


@pytest.mark.parametrize(
    "body, message",
    [
        (ALLOCATE.format(48), "alloc of 48 columns"),
        (ALLOCATE.format(16), "alloc of 16 columns"),
        (ALLOCATE.format(1024), "alloc of 1024 columns"),
        (ALLOCATE.format(32) + ALLOCATE.format(64), "alloc of 64 columns after one of 32"),
        (
            ALLOCATE.format(32) + FREE.format(32).replace("b32 %b, 32", "b32 64, 32"),
            "tcgen05.dealloc of 32 columns at 64",
        ),
        (ALLOCATE.format(32).replace("::1", "::2"), "which has no peer CTA"),
        (ALLOCATE.format(32) + "tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;", "after one with .cta_gr"),
        (
            ALLOCATE.format(64) + "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%a}, [%tid];",
            "threads of a warp have different values of taddr",
        ),
        (
            ALLOCATE.format(64) + "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%a}, [64];",
            "columns 64 to 64, of CTA .*; it has allocated columns 0 to 63",
        ),
        (
            ALLOCATE.format(64) + "tcgen05.ld.sync.aligned.16x64b.x1.b32 {%a}, [0x180000];",
            "its lanes are 0 to 31, and .16x64b begins at 0 or 16",
        ),
        (ALLOCATE.format(64) + "@%first ret; " + FREE.format(64), "of which a thread has exited"),
    ],
)
def test_uses_of_tensor_memory_that_are_refused(body, message):
    with pytest.raises(emulator.Fault, match=message):
        run(body)


ROUND = """
ld.shared.b32 %b, [%base];
add.u32 %c, %tid, 100;
tcgen05.st.sync.aligned.32x32b.x1.b32 [%b], {%c};
STORED
tcgen05.ld.sync.aligned.32x32b.x1.b32 {%a}, [%b];
LOADED
mad.wide.u32 %at, %tid, 4, %p0;
st.global.b32 [%at], %a;
"""


@pytest.mark.parametrize(
    "stored, loaded, arrives",
    [
        ("tcgen05.wait::st.sync.aligned;", "tcgen05.wait::ld.sync.aligned;", True),
        ("tcgen05.wait::st.sync.aligned;", "", True),  # "true register dependency will be respected"
        ("", "tcgen05.wait::ld.sync.aligned;", False),
        ("tcgen05.wait::ld.sync.aligned;", "", False),
    ],
)
def test_stores_to_tensor_memory_are_late_until_they_wait(stored, loaded, arrives):
    got, expected = np.zeros(32, np.uint32), np.arange(100, 132)
    body = ROUND.replace("STORED", stored).replace("LOADED", loaded)
    body = (
        ALLOCATE.format(32) + body + "tcgen05.wait::st.sync.aligned; tcgen05.wait::ld.sync.aligned;" + FREE.format(32)
    )
    for completion in ("late", "at_once"):
        if arrives:
            run(body, got, completion=completion)
            assert (got == expected).all()
        else:
            with pytest.raises(emulator.Fault, match=r"race: asynchronous work reads tensor memory(.|\n)*tcgen05.st"):
                run(body, got, completion=completion)


@pytest.mark.parametrize("ctas", [1, 2])
@pytest.mark.parametrize("access", ["tcgen05.st.sync.aligned.32x32b.x1.b32 [%b], {%tid};", "LOAD"])
def test_tensor_memory_freed_too_early(access, ctas):
    access = access.replace("LOAD", "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%a}, [%b];")
    wait = f"tcgen05.wait::{'st' if '.st.' in access else 'ld'}.sync.aligned;"
    body, free = STARTED + ALLOCATE.format(32) + "ld.shared.b32 %b, [%base];" + access, FREE.format(32)
    body, free = (part.replace("::1", f"::{ctas}") for part in (body, free))
    run(body + wait + free, grid=ctas, cluster=ctas)
    with pytest.raises(emulator.Fault, match=r"tcgen05.dealloc of tensor memory(.|\n)*end of work that accesses it"):
        run(body + free, grid=ctas, cluster=ctas)
