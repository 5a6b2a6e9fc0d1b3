"""Hazards that the emulator finds for every seed, with PTX written by hand: each mistake beside the right kernel.

Mistakes in a whole GEMM are in test_mistakes.py.
"""

import dataclasses
import functools
import gc
import re
import struct
from typing import NamedTuple

import numpy as np
import pytest
import torch

import quackish
from quackish import emulation, emulator
from quackish.device.kernel_device import KernelDevice, substitute
from quackish.device.kernel_for import CompiledKernel, request_for
from quackish.emulator import Fault, decode, grid, ptx
from quackish.gpu import H200
from tests.emulator.ptx import kernel, launch, record

U32 = np.uint32
SEEDS = range(3)
REGISTERS = (
    ".reg .b32 %t; .reg .b32 %s; .reg .b32 %a; .reg .b32 %b; .reg .b32 %m; .reg .b32 %n; .reg .b32 %r; .reg .b32 %v;"
    ".reg .b64 %o; .reg .pred %p; .reg .pred %first;"
)
SHARED = ".shared .align 128 .b8 buffer[2048];"


def run(body, threads=64, ctas=1, completion="at_once", seed=0):
    """Runs `body`, in which %t is the thread and %s the address of shared memory. `%out` has 64 numbers."""
    start = "mov.u32 %t, %tid.x; mov.u32 %s, buffer; setp.eq.u32 %first, %t, 0; mad.lo.u32 %a, %t, 4, %s;\n"
    out = np.zeros(64, U32)
    launch(
        kernel(start + body, "out", REGISTERS, SHARED), out, grid=(ctas, 1, 1), cluster=(ctas, 1, 1),
        block=(threads, 1, 1), completion=completion, seed=seed,
    )  # fmt: skip
    return out


def findings(body, threads, completion, seed):
    """What a run of `run` finds, or the Fault that ends it."""
    start = "mov.u32 %t, %tid.x; mov.u32 %s, buffer; setp.eq.u32 %first, %t, 0; mad.lo.u32 %a, %t, 4, %s;\n"
    text, settings = kernel(start + body, "out", REGISTERS, SHARED), dict(completion=completion, seed=seed)
    try:
        return record(text, np.zeros(64, U32), block=(threads, 1, 1), **settings).findings
    except Fault as fault:
        return [fault]


def check(right, wrong, message, **options):
    """The right kernel has no fault, and the wrong one has this fault, with every seed."""
    for completion in ("at_once", "late"):
        for seed in SEEDS:
            run(right, completion=completion, seed=seed, **options)
            with pytest.raises(Fault, match=message):
                run(wrong, completion=completion, seed=seed, **options)


# Threads


@pytest.mark.parametrize("barrier", ["bar.sync 0;", "bar.sync 1, 64;", "barrier.cluster.arrive; barrier.cluster.wait;"])
def test_a_number_of_another_warp(barrier):
    body = "st.shared.u32 [%a], %t; {} xor.b32 %b, %t, 32; mad.lo.u32 %b, %b, 4, %s; ld.shared.u32 %v, [%b];"
    wrong = "race: thread \\d+ (reads|writes) shared memory at 0x\\w+ of CTA .*puts this after the (write|read) of it"
    check(body.format(barrier), body.format(""), wrong)


def test_a_relaxed_arrival_orders_nothing():
    body = "st.shared.u32 [%a], %t; {} xor.b32 %b, %t, 32; mad.lo.u32 %b, %b, 4, %s; ld.shared.u32 %v, [%b];"
    relaxed = "barrier.cluster.arrive.relaxed; barrier.cluster.wait;"
    check(body.format("fence.acq_rel.cluster;" + relaxed), body.format(relaxed), "race: ")
    with pytest.raises(Fault, match="race: "):
        run(body.format("fence.mbarrier_init.release.cluster;" + relaxed))


def test_a_relaxed_mbarrier_orders_behind_fences():
    """The second warp reads what the first one has written before a relaxed arrival."""
    begin = "@%first mbarrier.init.shared.b64 [%s+1024], 32; bar.sync 0; setp.lt.u32 %p, %t, 32;"
    body = f"""{begin} @!%p bra WAIT; st.shared.u32 [%a], %t; {{}}
.reg .b64 %state; mbarrier.arrive.relaxed.cta.shared.b64 %state, [%s+1024]; bra END;
WAIT: mbarrier.try_wait.parity.relaxed.cta.shared.b64 %p, [%s+1024], 0; @!%p bra WAIT;
{{}} ld.shared.u32 %v, [%a+-128]; END:"""
    release, acquire = (
        "fence.release.sync_restrict::shared::cta.cluster;",
        "fence.acquire.sync_restrict::shared::cluster.cluster;",
    )
    race = "race: thread \\d+ reads shared memory"
    check(body.format(release, acquire), body.format(release, ""), race)
    check(body.format(release, acquire), body.format("", acquire), race)


def test_atomic_operations_of_two_warps():
    """They need no order among themselves, but what is not atomic does."""
    begin = "@%first st.shared.u32 [%s], 0; bar.sync 0; atom.shared.add.u32 %v, [%s], 1;"
    race = "race: thread \\d+ (reads|writes|changes) shared memory"
    check(f"{begin} bar.sync 0; ld.shared.u32 %v, [%s];", f"{begin} ld.shared.u32 %v, [%s];", race)
    check(begin, begin.replace("bar.sync 0;", ""), race)


def test_memory_written_again_before_others_have_read():
    body = "st.shared.u32 [%a], %t; bar.sync 0; ld.shared.u32 %v, [%s]; {} @%first st.shared.u32 [%s], 7;"
    check(body.format("bar.sync 0;"), body.format(""), "race: ")


def test_a_number_of_another_lane():
    body = "st.shared.u32 [%a], %t; {} xor.b32 %b, %t, 1; mad.lo.u32 %b, %b, 4, %s; ld.shared.u32 %v, [%b];"
    check(body.format("bar.warp.sync -1;"), body.format(""), "race: thread \\d+ reads", threads=32)


def test_neighbors_in_one_word_are_no_race():
    """Two warps write the two halves of a word."""
    body = "mad.lo.u32 %a, %t, 2, %s; shr.u32 %b, %t, 5; and.b32 %v, %t, 31; shl.b32 %v, %v, 2; add.u32 %v, %v, %s;"
    body += "mad.lo.u32 %v, %b, 2, %v; cvt.u16.u32 %h, %t; st.shared.u16 [%v], %h; bar.sync 0; ld.shared.u32 %b, [%s];"
    run(".reg .b16 %h;" + body)


MBARRIER = """
    @!%first bra READY;
    mbarrier.init.shared.b64 [%s], 1;
    READY:
    {sync}
    add.u32 %a, %a, 1024; add.u32 %b, %s, 1024;
    @!%first bra WAIT;
    st.shared.u32 [%b], 7;
    mbarrier.arrive.shared.b64 _, [%s];
    {after}
    WAIT: mbarrier.try_wait.parity.shared.b64 %p, [%s], 0; @!%p bra WAIT;
    ld.shared.u32 %v, [%b];
"""


def test_an_mbarrier_orders_what_precedes_the_arrival():
    right = MBARRIER.format(sync="bar.sync 0;", after="")
    check(right, MBARRIER.format(sync="bar.sync 0;", after="st.shared.u32 [%b], 8;"), "race: ")


def test_an_mbarrier_used_before_all_know_it():
    with pytest.raises(
        Fault, match=r"mbarrier before its mbarrier.init: a barrier such as bar.sync|no initialized mbar"
    ):
        run(MBARRIER.format(sync="", after=""))


PRODUCER = """
setp.ge.u32 %p, %t, 32; @%p bra CONSUMER;
bar.arrive 2, 64; {0} bar.arrive 2, 64; bra END;
CONSUMER: bar.sync 2, 64; {0} bar.sync 2, 64;
END:
"""


@pytest.mark.parametrize(
    "right, wrong, threads",
    [
        # Two pairs of warps, with one barrier each or with the same one.
        ("bar.sync %b, 64;", "bar.sync 1, 64;", 128),
        ("setp.lt.u32 %p, %t, 64; @%p bar.sync 1, 64; @!%p bar.sync 2, 96;",
         "setp.lt.u32 %p, %t, 64; @%p bar.sync 1, 64; @!%p bar.sync 1, 96;", 160),
        # A lane of each warp releases an accumulator. Then all lanes of one do.
        ("@%p mbarrier.arrive.shared.b64 _, [%s];", "@%p mbarrier.arrive.shared.b64 _, [%s+8];", 128),
        ("mbarrier.arrive.shared.b64 _, [%s+16];", "mbarrier.arrive.shared.b64 _, [%s];", 32),
        # Each warp has an mbarrier, or two of them have the same one.
        ("mbarrier.arrive.shared.b64 _, [%m];", "mbarrier.arrive.shared.b64 _, [%s+32];", 64),
        # The producer arrives again, and waits for the consumer before or not.
        (PRODUCER.format("bar.sync 1, 64;"), PRODUCER.format(""), 64),
    ],
)  # fmt: skip
def test_groups_that_may_arrive_in_one_phase(right, wrong, threads):
    """Whichever group comes first in this run. The mbarriers expect 4 arrivals, 1, 32, 32 and 32."""
    begin = """
        @%first mbarrier.init.shared.b64 [%s], 4; @%first mbarrier.init.shared.b64 [%s+8], 1;
        @%first mbarrier.init.shared.b64 [%s+16], 32; @%first mbarrier.init.shared.b64 [%s+32], 32;
        @%first mbarrier.init.shared.b64 [%s+40], 32; bar.sync 0;
        shr.u32 %m, %t, 5; mad.lo.u32 %m, %m, 8, %s; add.u32 %m, %m, 32;
        shr.u32 %b, %t, 6; add.u32 %b, %b, 1; and.b32 %a, %t, 31; setp.eq.u32 %p, %a, 0;"""
    check(begin + right, begin + wrong, "barrier-(phase|count)", threads=threads)


def test_a_wait_that_may_come_a_phase_too_late():
    """The second warp waits for the first phase, and the first warp ends two."""
    body = """
        @%first mbarrier.init.shared.b64 [%s], 32; @%first mbarrier.init.shared.b64 [%s+8], 32; bar.sync 0;
        setp.ge.u32 %p, %t, 32; @%p bra WAITER;
        mbarrier.arrive.shared.b64 _, [%s]; {} mbarrier.arrive.shared.b64 _, [%s]; bra END;
        WAITER: {} A: mbarrier.try_wait.parity.shared.b64 %p, [%s], 0; @!%p bra A;
        {} END:
    """
    later = "mov.u32 %v, 500; LOOP: sub.u32 %v, %v, 1; setp.ne.u32 %p, %v, 0; @%p bra LOOP;"  # in this run
    answer = "B: mbarrier.try_wait.parity.shared.b64 %p, [%s+8], 0; @!%p bra B;"
    message = "barrier-phase: a wait has passed before the end of phase 1"
    arrive = "mbarrier.arrive.shared.b64 _, [%s+8];"
    check(body.format(answer, "", arrive), body.format(later, "", arrive), message)
    check(body.format(answer, "", arrive), body.format(answer + later, arrive, ""), message)


ARRIVE_ALONE = """
    @%first mbarrier.init.shared.b64 [%s], 1; bar.sync 0; add.u32 %a, %a, 1024; setp.ge.u32 %p, %t, 32; @%p bra WAIT;
    {before} {sync} @%first mbarrier.arrive.shared.b64 _, [%s]; bra END;
    WAIT: mbarrier.try_wait.parity.shared.b64 %p, [%s], 0; @!%p bra WAIT; {after} END:
"""
WAIT_ALONE = """
    @%first mbarrier.init.shared.b64 [%s], 32; bar.sync 0; add.u32 %a, %a, 1024; setp.lt.u32 %p, %t, 32; @%p bra WRITE;
    setp.ne.u32 %p, %t, 32; @%p bra JOIN;
    WAIT: mbarrier.try_wait.parity.shared.b64 %p, [%s], 0; @!%p bra WAIT;
    JOIN: {sync} ld.shared.u32 %v, [%a+-128]; bra END;
    WRITE: st.shared.u32 [%a], %t; mbarrier.arrive.shared.b64 _, [%s]; END:
"""
STORE_ALONE = """
    st.shared.u32 [%a], %t; fence.proxy.async.shared::cta; {sync} @!%first bra END;
    cp.async.bulk.global.shared::cta.bulk_group [%out], [%s], 128;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; END:
"""


@pytest.mark.parametrize(
    "body, message",
    [
        (
            ARRIVE_ALONE.replace("{before}", "st.shared.u32 [%a], %t;").replace(
                "{after}", "ld.shared.u32 %v, [%a+-128];"
            ),
            "lane-race: another lane of warp 0 .* has arrived",
        ),
        (
            ARRIVE_ALONE.replace("{before}", "ld.shared.u32 %v, [%a];").replace(
                "{after}", "st.shared.u32 [%a+-128], 7;"
            ),
            "lane-race: another lane of warp 0 .* has arrived",
        ),
        (WAIT_ALONE, "lane-race: another lane than .* has waited|shared-race"),
        (STORE_ALONE, "lane-race: lane 0 issues work"),
    ],
)
def test_one_lane_acts_for_its_warp(body, message):
    """Formal: cards run what CUTLASS's pipelines do so."""
    for completion in ("at_once", "late"):
        for seed in SEEDS:
            settings = dict(threads=32 if "bulk" in body else 64, completion=completion, seed=seed)
            assert not findings(body.format(sync="bar.warp.sync -1;"), **settings)
            found = {(each.rule, each.severity, each.message) for each in findings(body.format(sync=""), **settings)}
            assert any(re.match(message, f"{rule}: {text}") for rule, _, text in found)
            assert ("lane-race", "fault") not in {each[:2] for each in found}


def test_one_lane_acts_for_itself():
    """It need not wait for the other lanes, which access nothing."""
    alone = ARRIVE_ALONE.replace("{before}", "@%first st.shared.u32 [%a], %t;").replace("{sync}", "")
    read = "setp.eq.u32 %p, %t, 32; @%p ld.shared.u32 %v, [%a+-128];"
    for seed in SEEDS:
        run(alone.replace("{after}", read), seed=seed)


# Clusters

REMOTE = """
    mov.u32 %r, %cluster_ctarank; xor.b32 %n, %r, 1;
    mbarrier.init.shared.b64 [%s], 1;
    mbarrier.arrive.expect_tx.shared.b64 _, [%s], 4;
    {read}
    {sync}
    mapa.shared::cluster.u32 %m, %s, %n;
    add.u32 %b, %m, 64; add.u32 %v, %r, 70;
    st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%b], %v, [%m];
    WAIT: mbarrier.try_wait.parity.shared.b64 %p, [%s], 0; @!%p bra WAIT;
    ld.shared.u32 %v, [%s+64];
"""


def test_mbarriers_of_other_ctas_need_their_fence():
    barrier = "barrier.cluster.arrive.relaxed; barrier.cluster.wait;"
    right = "fence.mbarrier_init.release.cluster;" + barrier
    message = "fence.mbarrier_init and a barrier of the cluster"
    check(REMOTE.format(sync=right, read=""), REMOTE.format(sync=barrier, read=""), message, threads=1, ctas=2)
    run(REMOTE.format(sync="barrier.cluster.arrive; barrier.cluster.wait;", read=""), threads=1, ctas=2)


def test_a_store_to_another_cta_which_still_reads():
    read = "ld.shared.u32 %v, [%s+64];"
    relaxed = "fence.mbarrier_init.release.cluster; barrier.cluster.arrive.relaxed; barrier.cluster.wait;"
    right = REMOTE.format(sync="barrier.cluster.arrive; barrier.cluster.wait;", read=read)
    wrong = REMOTE.format(sync=relaxed, read=read)
    check(right, wrong, "race: asynchronous work writes shared memory(.|\n)*ld.shared", threads=1, ctas=2)


def test_a_number_in_another_cta():
    body = """
        mov.u32 %r, %cluster_ctarank; xor.b32 %n, %r, 1; mapa.shared::cluster.u32 %b, %a, %n;
        {} st.shared::cluster.u32 [%b], %r; {}
        ld.shared.u32 %v, [%a];
        barrier.cluster.arrive; barrier.cluster.wait;
    """
    sync = "barrier.cluster.arrive; barrier.cluster.wait;"
    check(body.format("", sync), body.format("", ""), r"race: thread \d+ (reads|writes)", ctas=2)
    check(
        body.format("", sync), body.format("ld.shared.u32 %v, [%a];", sync), r"race: thread \d+ (reads|writes)", ctas=2
    )


def test_fences_of_the_cta_at_barriers_of_the_cluster():
    """Behind relaxed arrivals and waits."""
    body = """
        mov.u32 %r, %cluster_ctarank; xor.b32 %n, %r, 1; mapa.shared::cluster.u32 %b, %a, %n;
        st.shared::cluster.u32 [%b], %r; fence.acq_rel.{}; barrier.cluster.arrive.relaxed; barrier.cluster.wait;
        ld.shared.u32 %v, [%a];
    """
    check(body.format("cluster"), body.format("cta"), r"race: thread \d+ reads", threads=32, ctas=2)
    body = """
        @%first mbarrier.init.shared.b64 [%s+1024], 32; fence.mbarrier_init.release.cluster;
        barrier.cluster.arrive; barrier.cluster.wait;
        mov.u32 %r, %cluster_ctarank; xor.b32 %n, %r, 1; mapa.shared::cluster.u32 %b, %a, %n;
        mapa.shared::cluster.u32 %m, %s, %n; st.shared::cluster.u32 [%b], %r; fence.acq_rel.{};
        mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%m+1024];
        WAIT: mbarrier.try_wait.parity.relaxed.cluster.shared.b64 %p, [%s+1024], 0; @!%p bra WAIT;
        fence.acq_rel.{}; ld.shared.u32 %v, [%a]; barrier.cluster.arrive; barrier.cluster.wait;
    """
    for wrong in ("cta", "cluster"), ("cluster", "cta"):
        check(body.format("cluster", "cluster"), body.format(*wrong), r"race: thread \d+ reads", threads=32, ctas=2)


# The async proxy

STORE = """
    st.shared.u32 [%a], %t;
    {fence}
    bar.sync 0;
    @!%first bra DONE;
    {late_fence}
    cp.async.bulk.global.shared::cta.bulk_group [%out], [%s], 256;
    cp.async.bulk.commit_group;
    {wait}
    st.shared.u32 [%s], 9;
    DONE:
"""
FENCE, WAIT = "fence.proxy.async.shared::cta;", "cp.async.bulk.wait_group.read 0;"


def test_generic_writes_that_a_bulk_store_reads():
    right, wrong = (STORE.format(fence=fence, late_fence="", wait=WAIT) for fence in (FENCE, ""))
    check(right, wrong, "the async proxy reads shared memory(.|\n)*no fence.proxy.async(.|\n)*st.shared")
    run(STORE.format(fence="", late_fence=FENCE, wait=WAIT))  # the fence is on the path from the writes to the store
    with pytest.raises(Fault, match=r"no fence.proxy.async"):
        run(STORE.format(fence="fence.proxy.async.global;", late_fence="", wait=WAIT))


def test_memory_reused_while_a_bulk_store_reads_it():
    right, wrong = (STORE.format(fence=FENCE, late_fence="", wait=wait) for wait in (WAIT, ""))
    check(right, wrong, "race: thread 0 writes(.|\n)*nothing has waited(.|\n)*cp.async.bulk.global")
    with pytest.raises(Fault, match="race: thread 0 writes"):
        run(STORE.format(fence=FENCE, late_fence="", wait="cp.async.bulk.wait_group.read 1;"))


def test_many_threads_store_the_same_memory():
    """Each is a reader of its own: the shadow of memory grows."""
    body = """
        @%first st.shared.u32 [%s], 7;
        fence.proxy.async.shared::cta; bar.sync 0;
        cp.async.bulk.global.shared::cta.bulk_group [%out], [%s], 16;
        cp.async.bulk.commit_group;
        {}
        bar.sync 0;
        @%first st.shared.u32 [%s], 8;
    """
    check(body.format(WAIT), body.format("setp.eq.u32 %p, %t, 37; @!%p " + WAIT), "race: thread 0 writes")


def test_a_bulk_load_of_what_threads_wrote():
    body = """
        @!%first bra DONE;
        mbarrier.init.shared.b64 [%s], 1;
        mbarrier.arrive.expect_tx.shared.b64 _, [%s], 16;
        st.global.u32 [%out], 7;
        {}
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%s+16], [%out], 16, [%s];
        WAIT: mbarrier.try_wait.parity.shared.b64 %p, [%s], 0; @!%p bra WAIT;
        DONE:
    """
    check(body.format("fence.proxy.async.global;"), body.format(""), "the async proxy reads global memory")


# Global memory of other CTAs

MESSAGE = """
    mov.u32 %r, %ctaid.x; setp.eq.u32 %p, %r, 0;
    @!%p bra READER;
    mad.wide.u32 %o, %t, 4, %out; st.global.u32 [%o+128], 7;
    {barrier}
    @%first {send}
    bra DONE;
    READER:
    @!%first bra READY;
    WAIT: {receive}
    setp.eq.u32 %p, %v, 0; @%p bra WAIT;
    {after}
    READY:
    bar.sync 0;
    mad.wide.u32 %o, %t, 4, %out; ld.global.u32 %v, [%o+128];
    DONE:
"""
RELEASE, ACQUIRE = "red.release.gpu.global.add.u32 [%out], 1;", "ld.acquire.gpu.global.u32 %v, [%out];"
RELAXED_RED, RELAXED_LOAD = RELEASE.replace("release", "relaxed"), ACQUIRE.replace("acquire", "relaxed")
FENCED = "bar.sync 0; fence.acq_rel.gpu;"


def send(barrier="bar.sync 0;", send=RELEASE, receive=ACQUIRE, after="", cluster=1, seed=0, all_races=False):
    body = MESSAGE.format(barrier=barrier, send=send, receive=receive, after=after)
    text = kernel("mov.u32 %t, %tid.x; setp.eq.u32 %first, %t, 0;" + body, "out", REGISTERS, SHARED)
    how = dict(grid=(2, 1, 1), block=(64, 1, 1), cluster=(cluster, 1, 1), seed=seed, all_races=all_races)
    return record(text, np.zeros(96, U32), **how).findings


@pytest.mark.parametrize("seed", SEEDS)
def test_a_release_and_an_acquire_order_ctas(seed):
    send(seed=seed)
    send(barrier=FENCED, send=RELAXED_RED, seed=seed)
    send(receive=RELAXED_LOAD, after="fence.acq_rel.gpu;", seed=seed)
    send(
        send="atom.global.acq_rel.inc.u32 %v, [%out], 5;",
        receive="atom.global.acquire.or.b32 %v, [%out], 0;",
        seed=seed,
    )
    for mistake in (
        {"send": RELAXED_RED},
        {"receive": RELAXED_LOAD},
        {"barrier": ""},  # only what the sender itself wrote is released
        {"barrier": "fence.acq_rel.gpu;", "send": RELAXED_RED},
        {"send": RELAXED_RED, "after": "fence.acq_rel.gpu;"},
        {"barrier": FENCED.replace("gpu", "cta"), "send": RELAXED_RED},
        {"barrier": "bar.sync 0; membar.cta;", "send": RELAXED_RED},
        {"barrier": FENCED.replace("gpu", "cluster"), "send": RELAXED_RED},
        {"receive": RELAXED_LOAD, "after": "fence.acq_rel.cta;"},
    ):
        with pytest.raises(Fault, match=r"race: warp \d reads global memory(.|\n)*release(.|\n)*st.global"):
            send(**mistake, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_scopes_that_lack_a_thread(seed):
    """Of an operation or of a fence, on the side that releases or on the one that acquires."""
    for narrow, cluster in ("cta", 1), ("cta", 2), ("cluster", 1):
        reaches = "gpu" if cluster == 1 else "cluster"
        red, load, fence, stronger_red, stronger_load = (
            text.replace("gpu", narrow) for text in (RELAXED_RED, RELAXED_LOAD, "fence.acq_rel.gpu;", RELEASE, ACQUIRE)
        )
        for right in (
            {"send": RELEASE.replace("gpu", reaches), "receive": ACQUIRE.replace("gpu", reaches)},
            {"barrier": FENCED.replace("gpu", reaches), "send": RELAXED_RED},
            {"receive": RELAXED_LOAD, "after": f"fence.acq_rel.{reaches};"},
        ):
            send(**right, cluster=cluster, seed=seed)
        for wrong in (
            {"send": stronger_red},
            {"receive": stronger_load},
            {"barrier": "bar.sync 0;" + fence, "send": RELAXED_RED},
            {"barrier": FENCED, "send": red},
            {"receive": RELAXED_LOAD, "after": fence},
            {"receive": load, "after": "fence.acq_rel.gpu;"},
        ):
            with pytest.raises(Fault, match=r"global-race: warp . (reads global|accesses .*the scope of this or)"):
                send(**wrong, cluster=cluster, seed=seed)
        for side in {"send": stronger_red}, {"receive": stronger_load}:  # the numbers have no order either
            found = send(**side, cluster=cluster, seed=seed, all_races=True)
            assert any("reads global memory" in finding.message for finding in found)


def test_tickets_of_a_scope_that_lacks_a_cta():
    body = "@%first atom.acq_rel.{}.global.add.u32 %v, [%out], 1;"
    check(
        body.format("cluster"), body.format("cta"), "global-race: .* the scope of this or of the strong write", ctas=2
    )
    run(body.format("cta"), ctas=1)


def test_a_non_coherent_load_of_what_the_launch_has_written():
    body = "mad.wide.u32 %o, %t, 4, %out; st.global.u32 [%o], %t; bar.sync 0; {} %v, [%out];"
    wrong = body.format("ld.global.nc.u32")
    check(body.format("ld.global.u32"), wrong, "non-coherent-load: (.|\n)*the write is of(.|\n)*st.global")
    run(body.replace("[%o]", "[%o+128]").format("ld.global.nc.u32"), threads=32)  # other bytes of the tensor


def test_a_fence_of_the_cta_orders_warps_of_the_cta():
    body = """
        mad.wide.u32 %o, %t, 4, %out; setp.lt.u32 %p, %t, 32; @!%p bra READER;
        st.global.u32 [%o+128], %t; bar.warp.sync -1; {} st.relaxed.gpu.global.u32 [%out], 1;
        bra DONE;
        READER: ld.relaxed.gpu.global.u32 %v, [%out]; setp.eq.u32 %p, %v, 0; @%p bra READER;
        {} ld.global.u32 %v, [%o];
        DONE:
    """
    fence, wrong = "fence.acq_rel.cta;", "global-race: warp 1 reads"
    check(body.format(fence, fence), body.format(fence, ""), wrong)
    check(body.format(fence, fence), body.format("", fence), wrong)
    run(body.format("", "").replace("st.relaxed.gpu", "st.release.cta").replace("ld.relaxed.gpu", "ld.acquire.cta"))


WRITES = "setp.ge.u32 %p, %t, 32; shr.u32 %v, %t, {shift}; and.b32 %a, %t, 31; mad.wide.u32 %o, %a, 4, %out;"


@pytest.mark.parametrize("ctas", [1, 2])
def test_global_memory_written_before_others_have_read(ctas):
    """By a thread or a bulk store of another warp or CTA: whichever access this seed's run comes to first."""
    one, other = ("%t, 32", "%t, 32") if ctas == 1 else ("%r, 1", "%r, 1")
    body = f"""
        mov.u32 %r, %ctaid.x; st.shared.u32 [%a], %t; fence.proxy.async.shared::cta; bar.sync 0;
        setp.lt.u32 %p, {one}; @%p ld.global.u32 %v, [%out]; {{}}
        setp.eq.and.u32 %p, {other}, %q; {{}}"""
    barrier = "bar.sync 0;" if ctas == 1 else "barrier.cluster.arrive; barrier.cluster.wait;"
    start = ".reg .pred %q; setp.eq.u32 %q, %t, 32;"
    store = "@%p st.global.u32 [%out], 7;"
    bulk = "@%p cp.async.bulk.global.shared::cta.bulk_group [%out], [%s], 16; @%p cp.async.bulk.commit_group; "
    for write in store, bulk + "@%p cp.async.bulk.wait_group 0;":
        right, wrong = (start + body.format(order, write) for order in (barrier, ""))
        check(right, wrong, r"global-race: .*(read|write)s global memory", ctas=ctas)


def test_two_writes_of_global_memory():
    """Both warps write the same words. If they write the same numbers, it makes no difference."""
    body = WRITES.format(shift=5) + "@!%p st.global.u32 [%o], %v; {} @%p st.global.u32 [%o], %v;"
    check(body.format("bar.sync 0;"), body.format(""), r"global-race: warp \d writes global(.|\n)*the write is of")
    run(body.format("").replace("%t, 5;", "%t, 6;"))
    run(body.format("").replace("st.global", "st.relaxed.gpu.global"))


def test_a_bulk_store_to_what_another_warp_writes():
    body = STORE.format(fence=FENCE, late_fence="", wait=WAIT)
    other = "xor.b32 %v, %t, 32; mad.wide.u32 %o, %v, 4, %out; st.global.u32 [%o], 9;"
    check(other + body, body.replace("bar.sync 0;", "bar.sync 0;" + other), "global-race: ")
    add = body.replace("cp.async.bulk.global", "cp.reduce.async.bulk.global").replace("group [", "group.add.u32 [")
    run(add.replace("bar.sync 0;", "bar.sync 0; red.global.add.u32 [%out], 9;"))  # additions need no order


LAST = "atom.acq_rel.gpu.global.inc.u32 %v, [%out+4], 2;"  # after three CTAs it is 0 again


@pytest.mark.parametrize("seed", range(6))
def test_a_ticket_that_is_reset_while_others_poll_it(seed):
    """Each CTA waits until all three have taken a ticket. Then one of them resets it."""
    wait = "WAIT: ld.acquire.gpu.global.u32 %v, [%out]; setp.ne.u32 %p, %v, 3; @%p bra WAIT;"
    reset = "setp.eq.u32 %p, %v, 2; @%p st.relaxed.gpu.global.u32 [%out], 0;"
    relaxed = LAST.replace("acq_rel", "relaxed")

    def run_twice(body):
        out = np.zeros(2, U32)
        for _ in range(2):
            text = kernel(one + "red.release.gpu.global.add.u32 [%out], 1;" + body, "out", REGISTERS)
            launch(text, out, grid=(3, 1, 1), block=(64, 1, 1), seed=seed)
        assert not out.any()

    one = "setp.ne.u32 %p, %tid.x, 0; @%p bra END;"
    run_twice(wait + LAST + reset + "END:")
    run_twice(wait + relaxed + reset + "END:")  # each CTA counts itself behind its wait
    for wrong in (
        wait + "mov.u32 %v, %ctaid.x;" + reset,  # CTA 2, which may be ahead of the others
        relaxed.replace("%v", "%r") + wait + "mov.u32 %v, %r;" + reset,  # the last to count, before the wait
    ):
        with pytest.raises(Fault, match=r"global-race: byte 0 of 8 at .* is set from 3 to 0, .*the load|deadlock"):
            run_twice(wrong + "END:")


def test_a_lock_is_no_ticket():
    """Threads that find it taken load it again."""
    body = """
        setp.ne.u32 %p, %t, 0; @%p bra END;
        AGAIN: ld.relaxed.gpu.global.u32 %v, [%out]; setp.ne.u32 %p, %v, 0; @%p bra AGAIN;
        atom.acquire.gpu.global.cas.b32 %v, [%out], 0, 1; setp.ne.u32 %p, %v, 0; @%p bra AGAIN;
        ld.global.u32 %v, [%out+4]; add.u32 %v, %v, 1; st.global.u32 [%out+4], %v;
        st.release.gpu.global.u32 [%out], 0;
        END:
    """
    for seed in range(6):
        assert run(body, ctas=4, seed=seed)[1] == 4


# Tickets of our kernels

ROWS = 64
TICKETS = {
    "red.release": "red.relaxed",
    "ld.acquire": "ld.relaxed",
}


def backward_with(workspace, old, new):
    """kernel_for of a KernelDevice: in the backward of rms_norm `old` is replaced by `new`."""

    @functools.cache
    def kernel_for(problem, gpu):
        request = request_for(problem, gpu)
        exported = emulation._obtain(request)
        if problem.spec.name == "rms_norm_bwd" and old:
            assert old in exported.ptx
            exported = exported._replace(ptx=exported.ptx.replace(old, new))
        name = problem.spec.name
        return CompiledKernel(workspace.checked(emulator.Kernel(exported, gpu, name), name), request.config)

    return kernel_for


def norm(old="", new=""):
    torch.manual_seed(0)
    x, w = torch.randn(ROWS, 256).bfloat16().requires_grad_(), torch.ones(256).bfloat16().requires_grad_()
    gpu = dataclasses.replace(H200, sm_count=2)
    workspace = emulation.Workspace()
    kernel_for = backward_with(workspace, old, new)
    device = KernelDevice(gpu, kernel_for, emulation._empty, workspace=workspace.take, must_cover=True)
    with emulator.record("late", 0), substitute("cpu", device):
        quackish.rms_norm(x, w, eps=1e-6).sum().backward()


def test_the_sum_over_columns_has_its_tickets():
    norm()
    for old, new in TICKETS.items():
        with pytest.raises(Fault, match=r"race: warp \d+ reads global memory"):
            norm(old, new)


def test_tickets_are_reset():
    """The last CTA resets the first ticket. It is known by the second one, which counts from its limit to 0 again."""
    for old, new, message in (
        ("st.relaxed.gpu.global.b32", "red.relaxed.gpu.global.add.u32", "launch-state: .* leaves .* in ticket 0 of"),
        ("inc.u32", "add.u32", "global-race: .* is set from 4 to 0, .*went on"),  # the second CTA finds the limit
    ):
        with pytest.raises(Fault, match=message):
            norm(old, new)


# Launches that begin early


class Early(NamedTuple):
    kernel: str
    grid: tuple
    block: tuple
    cluster: tuple
    shared_bytes: int
    programmatic: bool


def in_turn(*bodies, between=None, programmatic=True):
    """Launches in one stream, of which each may begin early. `between` is called in front of the last one."""
    out = np.zeros(128, U32)
    with emulator.register(out.ctypes.data, out.nbytes), emulator.record():
        for i, body in enumerate(bodies):
            (entry,) = ptx.parse(kernel("mov.u32 %t, %tid.x;" + body, "out", REGISTERS, SHARED)).entries.values()
            if between and i == len(bodies) - 1:
                between(out)
            settings = Early("test", (1, 1, 1), (64, 1, 1), (1, 1, 1), 0, programmatic)
            emulator.run(decode.decode(entry), settings, struct.pack("<Q", out.ctypes.data), H200)


LET, AWAIT = "griddepcontrol.launch_dependents;", "griddepcontrol.wait;"
WRITE, READ = "mad.wide.u32 %o, %t, 4, %out; st.global.u32 [%o], %t;", "ld.global.u32 %v, [%out];"
TOO_EARLY = (
    r"race: a thread (reads|writes) global memory that an earlier launch(.|\n)*griddepcontrol.wait(.|\n)*st.global"
)


def test_memory_of_the_launch_before():
    first = AWAIT + LET + WRITE
    in_turn(first, AWAIT + READ)
    in_turn(first, READ + AWAIT, programmatic=False)
    in_turn(AWAIT + WRITE, READ + AWAIT)  # the first one does not let it begin early
    in_turn(first, "setp.lt.u32 %p, %t, 32; @!%p bra READY; " + AWAIT + " READY: bar.sync 0; " + READ)
    pointer = READ.replace("ld.global.u32 %v", "ld.global.u64 %o") + AWAIT + "ld.global.u32 %v, [%o];"
    for early in (
        READ + AWAIT,
        WRITE + AWAIT,
        pointer,
        "setp.lt.u32 %p, %t, 32; @!%p bra READY; " + AWAIT + " READY: " + READ,
    ):
        with pytest.raises(Fault, match=TOO_EARLY):
            in_turn(first, early)


BULK_READ = """
    mov.u32 %s, buffer; setp.ne.u32 %p, %t, 0; @%p bra DONE;
    mbarrier.init.shared.b64 [%s+64], 1; mbarrier.arrive.expect_tx.shared.b64 _, [%s+64], 16;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%s], [%out], 16, [%s+64];
    LOOP: mbarrier.try_wait.parity.shared.b64 %p, [%s+64], 0; @!%p bra LOOP;
    DONE:
"""


@pytest.mark.parametrize("read", [READ, READ + "bar.sync 0;" + WRITE, BULK_READ])
def test_memory_that_the_launch_before_reads(read):
    first = AWAIT + LET + read
    in_turn(first, AWAIT + WRITE)
    in_turn(first, WRITE.replace("[%o]", "[%o+256]") + AWAIT)
    with pytest.raises(Fault, match=r"launch-race: a thread writes .* may still (read|write); it has not"):
        in_turn(first, WRITE + AWAIT)


def test_memory_of_the_launch_before_the_one_before():
    first = AWAIT + LET + WRITE
    in_turn(first, AWAIT + LET, READ + AWAIT)  # it began after the second one had waited for the first one
    with pytest.raises(Fault, match=TOO_EARLY):
        in_turn(first, LET + AWAIT, READ + AWAIT)
    with pytest.raises(Fault, match=r"no thread executes griddepcontrol.wait"):
        in_turn(first, "", AWAIT + READ)


def test_launches_share_scratch():
    """A launch that begins early must not write it while the one before may."""
    workspace = emulation.Workspace()

    def twice(body):
        with emulator.record():
            for _ in range(2):
                _, scratch, memory = workspace.take(0, 64)
                assert memory.isnan().all()
                (entry,) = ptx.parse(kernel("mov.u32 %t, %tid.x;" + body, "out", REGISTERS)).entries.values()
                settings = Early("test", (1, 1, 1), (64, 1, 1), (1, 1, 1), 0, True)
                emulator.run(decode.decode(entry), settings, struct.pack("<Q", scratch), H200)

    twice(LET + AWAIT + WRITE)
    with pytest.raises(Fault, match=TOO_EARLY):
        twice(LET + WRITE + AWAIT)


def test_launches_of_the_past_are_forgotten():
    """A grid stays alive for messages about the next launches, but not longer."""
    alive = []

    def count(out):
        gc.collect()
        alive.append(sum(type(thing) is grid.Grid for thing in gc.get_objects()))

    in_turn(*[AWAIT + LET + WRITE] * 3, between=count)
    in_turn(*[AWAIT + LET + WRITE] * 8, between=count)
    assert alive[0] == alive[1]


def test_an_operation_between_launches_ends_the_first_one():
    """It is noticed by what it writes."""
    first, second = AWAIT + LET + WRITE, READ + AWAIT
    in_turn(first, second, between=lambda out: out.fill(3))
    with pytest.raises(Fault, match=TOO_EARLY):
        in_turn(first, second, between=lambda out: out.sum())


def test_shared_memory_of_a_cta_that_has_exited():
    """CTA 1 says that it ends, and CTA 0 then stores in its shared memory."""
    body = """
        mov.u32 %r, %cluster_ctarank; setp.eq.u32 %p, %r, 0; @%p bra WAIT;
        st.volatile.global.u32 [%flag], 1; {}
        bra END;
        WAIT: ld.volatile.global.u32 %r, [%flag]; setp.eq.u32 %p, %r, 0; @%p bra WAIT;
        mov.u32 %r, word; mapa.shared::cluster.u32 %r, %r, 1; st.shared::cluster.u32 [%r], 5; {}
        END:
    """
    ends = "barrier.cluster.arrive; barrier.cluster.wait;"
    settings = dict(grid=(2, 1, 1), cluster=(2, 1, 1))
    text = functools.partial(
        kernel, parameters="flag", registers=".reg .b32 %r; .reg .pred %p;", shared=".shared .b32 word;"
    )
    launch(text(body.format(ends, ends)), np.zeros(1, np.uint32), **settings)
    with pytest.raises(Fault, match=r"CTA \(0, 0, 0\) accesses shared memory of CTA \(1, 0, 0\), which has exited"):
        launch(text(body.format("", "")), np.zeros(1, np.uint32), **settings)
