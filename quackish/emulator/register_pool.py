"""The registers of a CTA, which `setmaxnreg` moves between warps."""

from typing import Any

from quackish.emulator.errors import Fault

WARP = 32
MOST = 256  # registers per thread


def registers_at_launch(directives: dict[str, tuple[int, ...]], num_threads: int, gpu: Any) -> int | None:
    """Registers that each thread of a kernel with setmaxnreg has at launch: as many as its directives permit.

    None if they state no limit: then setmaxnreg "may have no effect" (PTX), and ptxas ignores it.
    """
    if "maxnreg" in directives:
        return min(directives["maxnreg"][0] // 8 * 8, MOST)
    if "minnctapersm" in directives:
        return min(gpu.registers_per_sm // (num_threads * directives["minnctapersm"][0]) // 8 * 8, MOST)
    return None


class RegisterPool:
    """What the warps of a CTA have given back, and others have not taken.

    "A pool of available registers is maintained per-CTA." (PTX, setmaxnreg). It is empty at launch.
    """

    def __init__(self, cta: Any, at_launch: int | None):
        self.cta, self.at_launch = cta, at_launch
        self.free = 0
        self.owned: dict[int, int] = {}  # warp -> registers per thread, once they have changed
        self.waiting: list[tuple[int, int, Any]] = []  # (warp, registers per thread, its Parked)

    def decrease(self, lanes: Any, count: int) -> None:
        """Gives registers back, for which warps may wait. count: registers per thread from now on."""
        _check(count)
        if self.at_launch is None:
            return
        for warp in lanes.warps():
            self._set(warp, min(count, self._owned(warp)))
        for warp, wanted, parked in list(self.waiting):
            if self._needs(warp, wanted) <= self.free:
                self._set(warp, wanted)
                self.waiting.remove((warp, wanted, parked))
                parked.release()

    def increase(self, lanes: Any, count: int, following: int) -> None:
        """The threads go on at block `following` once the pool has enough for their warp."""
        _check(count)
        for warp in lanes.warps():
            mask = lanes.mask & (1 << WARP) - 1 << WARP * warp
            if self.at_launch is None or self._needs(warp, count) <= self.free:
                if self.at_launch is not None:
                    self._set(warp, max(count, self._owned(warp)))
                self.cta.add(following, mask)
            else:
                parked = self.cta.park(mask, following, lambda warp=warp: self._reason(warp, count))
                self.waiting.append((warp, count, parked))

    def _owned(self, warp: int) -> int:
        assert self.at_launch is not None
        return self.owned.get(warp, self.at_launch)

    def _needs(self, warp: int, count: int) -> int:
        """The registers that a warp takes from the pool; negative if it gives some back."""
        return WARP * (count - self._owned(warp))

    def _set(self, warp: int, count: int) -> None:
        self.free -= self._needs(warp, count)
        self.owned[warp] = count
        self.cta.grid.num_events += 1

    def _reason(self, warp: int, count: int) -> str:
        return (
            f"waits for registers: {count} instead of {self._owned(warp)} per thread take {self._needs(warp, count)} "
            f"from the CTA's pool, which has {self.free}; at launch a thread has {self.at_launch}"
        )


def _check(count: int) -> None:
    if not 24 <= count <= MOST or count % 8:  # PTX, setmaxnreg
        raise Fault("invalid-operand", f"setmaxnreg of {count} registers; valid are multiples of 8 from 24 to {MOST}")
