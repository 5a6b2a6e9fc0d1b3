"""Control flow."""

from quackish.emulator.errors import Fault
from quackish.emulator.isa import action, control


@control("bra{,.uni}", "symbol")
def branch(lanes, following, writers):
    """The decoder makes branches itself: their operand is a block."""
    raise AssertionError


@control("{ret,exit}", "")
def end(lanes, following, writers):
    lanes.cta.exit(lanes.mask)


@action("setmaxnreg.{inc,dec}.sync.aligned.u32", "immediate", converged="warp")
def set_max_registers(lanes, count):
    # The count is a multiple of 8 from 24 to 256. (PTX, setmaxnreg)
    if not 24 <= count <= 256 or count % 8:
        raise Fault(f"setmaxnreg of {count} registers; valid are multiples of 8 from 24 to 256")


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
