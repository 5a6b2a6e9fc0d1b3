"""The rules that the emulator checks: the name of each, how severe a breach is, and what it says."""

from typing import NamedTuple

FAULT = "fault"  # a card may trap, hang, or give other numbers
FORMAL = "formal"  # the manual does not allow it, and cards run it
NOTE = "note"  # allowed, and worth a look
SEVERITIES = (FAULT, FORMAL, NOTE)


class Rule(NamedTuple):
    meaning: str  # what breaks the rule
    severity: str = FAULT
    goes_on: bool = False  # a run can go on behind a fault, so it can be collected or suppressed


RULES = {
    # What nothing orders
    "shared-race": Rule("Two accesses of shared memory that nothing orders.", goes_on=True),
    "lane-race": Rule("A lane that arrives or stores for others of its warp without `bar.warp.sync`.", FORMAL, True),
    "global-race": Rule("Two accesses of global memory that nothing orders.", goes_on=True),
    "non-coherent-load": Rule("`ld.global.nc` of what the same launch has written.", goes_on=True),
    "tensor-race": Rule("Two accesses of tensor memory that nothing orders.", goes_on=True),
    "launch-race": Rule("An access that may come before the end of an earlier launch.", goes_on=True),
    "mbarrier-init-race": Rule("A use of an mbarrier that nothing orders after its initialization.", goes_on=True),
    "proxy-fence": Rule("No `fence.proxy.async` between a write and a read by the async proxy.", goes_on=True),
    "proxy-fence-of-copy": Rule("No `fence.proxy.async` between `cp.async` and the async proxy.", FORMAL, True),
    "tensor-map-fence": Rule("No fence of the tensor map's proxy between a change of it and a copy."),
    "tensor-memory-fence": Rule("No `tcgen05.fence` at a barrier that hands over tensor memory.", FORMAL, True),
    "wgmma-registers": Rule("An access of a register that a pending `wgmma` uses.", goes_on=True),
    "wgmma-fence": Rule("No `wgmma.fence` between an access of registers and their `wgmma`.", goes_on=True),
    # Barriers
    "deadlock": Rule("No thread can go on, or threads poll what no thread will change."),
    "barrier-count": Rule("Counts of threads at a barrier that differ, or that it does not expect."),
    "barrier-phase": Rule(
        "Arrivals at a barrier that nothing orders after its last phase, or waits before the end of the next.",
        goes_on=True,
    ),
    "mbarrier-count": Rule("Arrivals or bytes at an mbarrier that its phase does not expect."),
    "mbarrier-uninitialized": Rule("A use of an mbarrier that is not initialized."),
    "mbarrier-memory": Rule("An access of memory that holds an mbarrier, or `mbarrier.init` of one that was used."),
    "mbarrier-init-twice": Rule("`mbarrier.init` of an mbarrier that is initialized and unused.", FORMAL, True),
    # Values and addresses
    "uninitialized": Rule("A branch, an address or a store that depends on what nobody wrote.", goes_on=True),
    "out-of-bounds": Rule("An access outside of tensors, parameters, or what a CTA or thread has of other memory."),
    "misaligned": Rule("An address or a size that is not a multiple of what the instruction needs."),
    "wrong-cta": Rule("An address in a CTA that the instruction cannot access."),
    "exited-cta": Rule("An access of shared memory of a CTA that has exited, or may have."),
    "exit-with-work": Rule("A CTA that exits while asynchronous work writes its shared memory.", goes_on=True),
    "exit-with-read": Rule("A CTA that exits while asynchronous work reads its shared memory.", FORMAL, True),
    "exit-before-signal": Rule(
        "A CTA that exits before the signal of a peer's `tcgen05.commit`, whose products are complete.", FORMAL, True
    ),
    "tensor-memory-lanes": Rule("An access of lanes of tensor memory that the warp or the product cannot access."),
    "tensor-memory-first-lanes": Rule(
        "An address of tensor memory in lanes of the first warp, for those of another warp.", FORMAL, True
    ),
    # Threads
    "member-mask": Rule("A member mask without a thread that executes the instruction."),
    "absent-lanes": Rule("Lanes that a member mask names, and that wait at another instruction of the whole warp."),
    "missing-threads": Rule("Threads missing from an instruction of a whole warp or warp group."),
    "non-uniform": Rule("Threads that give different values of an operand that must be the same."),
    # Operands
    "invalid-operand": Rule("An operand outside of its valid values."),
    "matrix-descriptor": Rule("A descriptor of a matrix or of an instruction that is not valid."),
    "tensor-map": Rule("A tensor map, or coordinates in it, that are not valid."),
    # Tensor memory and launches
    "tensor-allocation": Rule("An allocation of tensor memory that is not valid or never freed."),
    "cta-pair": Rule("An instruction of a pair of CTAs without a peer that runs, or with another group size."),
    "cta-pair-start": Rule("An allocation by a pair of CTAs of which one may not have started.", FORMAL, True),
    "collector": Rule("A use of A in the collector buffer, which has none."),
    "launch-control": Rule("`clusterlaunchcontrol.try_cancel` after one has failed, or after a CTA has exited."),
    "launch-state": Rule("Memory that a launch must leave as it was for the next one."),
    "launch-config": Rule("A launch that a GPU refuses."),
    "host-call": Rule("A call of CUDA by the host code that fails."),
}  # fmt: skip
