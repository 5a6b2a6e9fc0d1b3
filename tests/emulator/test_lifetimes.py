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
