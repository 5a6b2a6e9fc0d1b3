"""One TMA tensor for the rows of all groups, which clips loads and stores at a group's end."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

# One TMA tensor for the rows of all groups: address(r, c, i, j) = base + r * ld + c + i * (2^34 - ld) + j * ld. With
# i = EXTENT, i * 2^34 wraps to 0 in 64 bits, which leaves (r - EXTENT + j) * ld + c. With j = begin + length and
# r = EXTENT - length + row that is the group's row `row`, and rows past the group's end are past the extent: loads
# return 0 there, and nothing is stored.
EXTENT, UNBOUNDED = 2**30, 2**31 - 1


@cute.jit
def ragged(base: cute.Pointer, cols: Int32, ld: Int64, rows_first: cutlass.Constexpr[bool]):
    """A (rows, cols, i, j) or (cols, rows, i, j) tensor."""
    ld = cute.assume(ld, divby=8)
    back = cute.assume(Int64(2**34) - ld, divby=8)
    if const_expr(rows_first):
        return cute.make_tensor(base, cute.make_layout((EXTENT, cols, UNBOUNDED, UNBOUNDED), stride=(ld, 1, back, ld)))
    return cute.make_tensor(base, cute.make_layout((cols, EXTENT, UNBOUNDED, UNBOUNDED), stride=(1, ld, back, ld)))
