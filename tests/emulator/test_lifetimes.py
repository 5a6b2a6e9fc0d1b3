"""How long an mbarrier and a CTA have their shared memory: each mistake beside a right kernel."""

import numpy as np
import pytest

from quackish.emulator import Fault
from tests.emulator.ptx import kernel, record
from tests.emulator.test_hazards import REGISTERS, SHARED, check

# mbarriers

INIT, INVALIDATE = "mbarrier.init.shared.b64 [%s], 1;", "mbarrier.inval.shared.b64 [%s];"
BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%s], [%out], 16, [%s+64];"
WITH_A_COPY = f"""
    @!%first bra DONE;
    mbarrier.init.shared.b64 [%s+64], 1; mbarrier.arrive.expect_tx.shared.b64 _, [%s+64], 16;
    {INIT} {{}} {BULK}
    WAIT: mbarrier.try_wait.parity.shared.b64 %p, [%s+64], 0; @!%p bra WAIT;
    DONE:
"""


@pytest.mark.parametrize(
    "access",
    ["ld.shared.u32 %v, [%s];", "ld.shared.u8 %v, [%s+7];", "st.shared.v4.u32 [%s+-8], {%t, %t, %t, %t};",
     "atom.shared.add.u32 %v, [%s+4], 1;"],
)  # fmt: skip
def test_an_access_of_a_live_mbarrier(access):
    """The same access beside the mbarrier, and behind its end, is right."""
    body = "add.u32 %s, %s, 72; @!%first bra DONE; " + INIT + "BETWEEN " + access + " DONE:"
    wrong = body.replace("BETWEEN", "")
    for between in (INVALIDATE, "add.u32 %s, %s, 16;"):
        check(body.replace("BETWEEN", between), wrong, "mbarrier-memory: an access of shared memory at", threads=32)


def test_a_copy_to_a_live_mbarrier():
    check(WITH_A_COPY.format(INVALIDATE), WITH_A_COPY.format(""), "mbarrier-memory: an access of")


USED = f"@!%first bra DONE; {INIT} mbarrier.arrive.shared.b64 _, [%s]; {{}} {INIT} DONE:"


def test_an_mbarrier_that_is_initialized_again():
    check(USED.format(INVALIDATE), USED.format(""), "mbarrier-memory: mbarrier.init with a count of 1 where")


def test_an_unused_mbarrier_that_is_initialized_again():
    """Cards run this: the second one writes what is there."""
    start = "mov.u32 %s, buffer;"

    def findings(body):
        text = kernel(start + body, "out", REGISTERS, SHARED)
        return record(text, np.zeros(1), block=(1, 1, 1)).findings

    assert [(found.rule, found.severity) for found in findings(INIT + INIT)] == [("mbarrier-init-twice", "formal")]
    assert not findings(INIT + INVALIDATE + INIT)
    with pytest.raises(Fault, match="mbarrier-memory"):
        findings(INIT + INIT.replace("1;", "2;"))


# The end of a CTA

STORED = """
    fence.proxy.async.shared::cta; @!%first bra DONE;
    cp.async.bulk.global.shared::cta.bulk_group [%out], [%s], 16; cp.async.bulk.commit_group; {}
    DONE:
"""
LOADED = f"""
    @!%first bra DONE;
    mbarrier.init.shared.b64 [%s+64], 1; mbarrier.arrive.expect_tx.shared.b64 _, [%s+64], 16; {BULK}
    {{}}
    DONE:
"""
WAIT = "WAIT: mbarrier.try_wait.parity.shared.b64 %p, [%s+64], 0; @!%p bra WAIT;"


@pytest.mark.parametrize("wait", ["cp.async.bulk.wait_group.read 0;", "cp.async.bulk.wait_group 0;"])
def test_a_cta_that_exits_before_its_stores_are_read(wait):
    """Which cards run: flash-attn-4's backward for Blackwell does so."""

    def findings(wait):
        start = "mov.u32 %t, %tid.x; mov.u32 %s, buffer; setp.eq.u32 %first, %t, 0;"
        text = kernel(start + STORED.format(wait), "out", REGISTERS, SHARED)
        report = record(text, np.zeros(64, np.uint32), block=(64, 1, 1))
        return [(found.rule, found.severity) for found in report.findings]

    assert findings(wait) == []
    assert findings("") == [("exit-with-read", "formal")]


def test_a_cta_that_exits_before_its_loads_are_complete():
    message = "exit-with-work: CTA .* exits, and no thread of it has waited for .* work that writes shared"
    check(LOADED.format(WAIT), LOADED.format(""), message)
    check(LOADED.format(WAIT), LOADED.format("bar.sync 1, 32;"), message, threads=32)  # a barrier does not wait for it


TO_CTA_1 = """
    mbarrier.init.shared.b64 [%s+64], COUNT; mbarrier.arrive.expect_tx.shared.b64 _, [%s+64], BYTES;
    barrier.cluster.arrive; barrier.cluster.wait;
    mov.u32 %r, %cluster_ctarank; setp.eq.u32 %p, %r, 1; mapa.shared::cluster.u32 %n, %s, 1; add.u32 %m, %n, 64;
    @%p bra OWNER;
    ACCESS
    bra END;
    OWNER: AWAIT
    END:
"""
TOGETHER = "barrier.cluster.arrive; barrier.cluster.wait;"
ARRIVE = "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%m];"
COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%m];"
COPY = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%n], [%s], 16, [%m];"


@pytest.mark.parametrize(
    "access, count, size, right",
    [
        ("st.shared::cluster.u32 [%n], 5;", 1, 0, {"end": TOGETHER}),
        ("ld.shared::cluster.u32 %v, [%n];", 1, 0, {"end": TOGETHER}),
        (ARRIVE, 2, 0, {"end": TOGETHER}),
        (ARRIVE, 2, 0, {"wait": WAIT}),
        (ARRIVE.replace("release", "relaxed"), 2, 0, {"wait": WAIT}),
        (COMMIT, 2, 0, {"wait": WAIT}),
        ("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%n], 5, [%m];", 1, 4, {"wait": WAIT}),
        (COPY, 1, 16, {"wait": WAIT, "end": TOGETHER}),  # the CTA of the source must stay as long
    ],
)
def test_a_cta_that_exits_before_another_one_uses_its_memory(access, count, size, right):
    """Which of them comes first depends on the seed; the rule does not."""

    def body(wait="", end=""):
        text = TO_CTA_1.replace("COUNT", str(count)).replace("BYTES", str(size))
        return text.replace("ACCESS", access).replace("AWAIT", wait) + end

    message = "exited-cta: CTA .* (which has exited|may exit before)|exit-with-work"
    check(body(**right), body(), message, threads=1, ctas=2)
