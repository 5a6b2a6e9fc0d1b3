"""Uses of instructions that the PTX manual forbids: each is a Fault that says what is wrong."""

import numpy as np
import pytest

from quackish.emulator import Fault
from quackish.gpu import B200, H200
from tests.emulator.ptx import kernel, launch

REGISTERS = """
.reg .pred %p, %first; .reg .b16 %h; .reg .b32 %tid, %rank, %base, %bar, %far, %a, %b, %c, %e; .reg .b64 %d, %at, %s;
.reg .b32 %u<8>;
"""
SHARED = ".shared .align 128 .b8 buffer[1024];"
# %far is %base in the other CTA of a cluster; %p: whether this is the second CTA
BEGIN = """
mov.u32 %tid, %tid.x; mov.u32 %rank, %cluster_ctarank; mov.b32 %base, buffer; add.u32 %bar, %base, 512;
setp.eq.u32 %first, %tid, 0; setp.ne.u32 %p, %rank, 0;
@%first mbarrier.init.shared.b64 [%bar], 1;
fence.mbarrier_init.release.cluster; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
xor.b32 %a, %rank, 1; mapa.shared::cluster.u32 %far, %base, %a;
"""
WAIT_A_LITTLE = "mov.b32 %a, 10000; LOOP: add.u32 %a, %a, -1; setp.gt.s32 %first, %a, 0; @%first bra LOOP;\n"


def refused(message, body, block, cluster, target, gpu, seed=0):
    text = kernel(BEGIN + body, "x", REGISTERS, SHARED, target)
    with pytest.raises(Fault, match=message):
        launch(
            text, np.zeros(64, np.uint64), grid=(cluster, 1, 1), block=(block, 1, 1), cluster=(cluster, 1, 1), gpu=gpu,
            seed=seed,
        )  # fmt: skip


WGMMA = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%a, %b, %c, %e}}, {}, %d, %p, {}, 1, 0, 0;"
PENDING = "wgmma.fence.sync.aligned; mov.b64 %d, 0x40; " + WGMMA.format("%d", 1)
STORE = "@%first st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [{}], %tid, [{}];"
LOAD = (
    "@%first cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes [%base], [{}, {{%a}}], [{}];"
)


@pytest.mark.parametrize(
    "message, body, block, cluster",
    [
        ("st.async: the mbarrier is not in the CTA of the destination", STORE.format("%far", "%bar"), 32, 2),
        ("misaligned access of 4 bytes of shared memory", STORE.format("%far+2", "%far+512"), 32, 2),
        ("with an mbarrier of another CTA", LOAD.format("%x", "%far+512"), 32, 2),
        ("a tensor map at .*, which is not a multiple of 64", "or.b64 %at, %x, 8;" + LOAD.format("%at", "%bar"), 32, 1),
        ("a shared::cta access of .*, which is in the CTA of rank", "ld.shared.b32 %a, [%far];", 32, 2),
        ("misaligned access of 4 bytes of parameters at byte 2", "ld.param.b32 %a, [p_x+2];", 32, 1),
        ("setmaxnreg of 250 registers", "setmaxnreg.dec.sync.aligned.u32 250;", 128, 1),
        ("different thread counts", "mul.lo.u32 %a, %tid, 32; add.u32 %a, %a, 32; bar.sync 1, %a;", 32, 1),
        ("not in the member mask", "shfl.sync.bfly.b32 %a, %tid, 1, 31, 0xfffffffe;", 32, 1),
        ("not in the member mask", "@%first bar.warp.sync 2;", 32, 1),
        ("must be the same", "cvt.u64.u32 %s, %tid; mov.b64 %d, 0; " + WGMMA.format("%s", 1), 128, 1),
        ("wgmma with a scale of 2", "mov.b64 %d, 0; " + WGMMA.format("%d", 2), 128, 1),
        (
            "a register of a wgmma that may not be complete is accessed",
            PENDING + "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%u0, %u1, %u2, %u3}, {%a, %b, %c, %e},"
            " %d, %p, 1, 1, 0;", 128, 1,
        ),
        (
            "a wgmma of shape m64n16 uses the accumulator of a pending one of shape m64n8",
            PENDING + "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%a, %b, %c, %e, %u0, %u1, %u2, %u3},"
            " %d, %d, %p, 1, 1, 0, 0;", 128, 1,
        ),
        (
            "16 threads execute an instruction for whole warps",
            "setp.lt.u32 %first, %tid, 16; @%first ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%a}, [%base];", 32, 1,
        ),
    ],
)  # fmt: skip
def test_hopper(message, body, block, cluster):
    refused(message, body, block, cluster, "sm_90a", H200)


@pytest.mark.parametrize("seed", range(8))
def test_warps_that_write_the_same_memory(seed):
    """With some seeds they execute the store together."""
    refused(
        "race: thread (0|32) (and warp [01] of CTA .* write|writes) ", "st.shared.b32 [%base], %tid;", 64, 1, "sm_90a",
        H200, seed,
    )  # fmt: skip


ALLOCATE = "tcgen05.alloc.cta_group::{}.sync.aligned.shared::cta.b32 [%base], {}; ld.shared.b32 %c, [%base];\n"
CANCEL = "@%first clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes{}.b128 [{}], [%bar];"
DESCRIPTOR = 1 << 4 | 1 << 7 | 1 << 10 | 64 >> 3 << 17 | 128 >> 4 << 24  # fp32 = bf16 x bf16, 128 x 64
PRODUCT = (
    ALLOCATE.format(1, 64) + f"mov.b32 %b, {DESCRIPTOR}; mov.b64 %d, 0x4000004000010000; add.u32 %a, %c, 0x100000;\n"
    "@%first tcgen05.mma.cta_group::1.kind::f16{} [%c], {}, %d, %b, %p{};"
)


@pytest.mark.parametrize(
    "message, body, block, cluster",
    [
        ("a response at .*, not a multiple of 16", CANCEL.format("", "%base+8"), 32, 1),
        (
            "after a CTA of the cluster has exited",
            "@%p ret;" + WAIT_A_LITTLE + "setp.eq.u32 %first, %tid, 0;"
            + CANCEL.format(".multicast::cluster::all", "%base"), 32, 2,
        ),
        ("a pair allocate (32 and 64|64 and 32) columns", "selp.b32 %a, 32, 64, %p;" + ALLOCATE.format(2, "%a"), 32, 2),
        ("a second warp of CTA .* executes tcgen05.alloc", "@%p ret;" + ALLOCATE.format(2, 32), 64, 2),
        (
            "generic address 0x40 is not one of shared memory",
            "mov.b64 %at, 64; tcgen05.alloc.cta_group::1.sync.aligned.b32 [%at], 32;", 32, 1,
        ),
        ("scale-input-d 16; valid are 0 to 15", PRODUCT.format("", "%d", ", 16"), 32, 1),
        ("A at 0x100000 and D at lane 0: the lanes must be the same", PRODUCT.format("", "[%a]", ""), 32, 1),
        ("no A was filled into the collector", PRODUCT.format(".collector::a::use", "%d", ""), 32, 1),
    ],
)  # fmt: skip
def test_blackwell(message, body, block, cluster):
    refused(message, body, block, cluster, "sm_100a", B200)
