"""Branches, exits, setmaxnreg and dependent launches."""

from quackish.emulator.isa import action, control


@control("bra{,.uni}", "symbol")
def branch(lanes, following, writers):
    """The decoder makes branches itself: their operand is a block."""
    raise AssertionError


@control("{ret,exit}", "")
def end(lanes, following, writers):
    lanes.cta.exit(lanes.mask)


# "The same setmaxnreg instruction must be executed by all warps in a warpgroup." (PTX) Here each warp executes it by
# itself: flash-attn-4's warps of a warp group come to it at different places, and run on cards.


@action("setmaxnreg.dec.sync.aligned.u32", "immediate", converged="warp")
def give_registers_back(lanes, count):
    lanes.cta.register_pool.decrease(lanes, count)


@control("setmaxnreg.inc.sync.aligned.u32", "immediate", converged="warp")
def take_registers(lanes, following, writers, count):
    lanes.cta.register_pool.increase(lanes, count, following)


# Launches run one after another here, so the launch in front has ended. `dependent_launches` checks that threads wait
# for it.


@action("griddepcontrol.wait", "")
def wait_for_previous_launch(lanes):
    lanes.cta.grid.waits_for_previous = True
    if not lanes.cta.lets_next_begin:
        lanes.cta.grid.waits_first = True
    lanes.cta.grid.races.wait_for_launch_before(lanes)


@action("griddepcontrol.launch_dependents", "")
def let_next_launch_begin(lanes):
    lanes.cta.grid.lets_next_begin = lanes.cta.lets_next_begin = True


@action("nanosleep.u32", "u32", polls=True)
def nanosleep(lanes, duration):
    pass
