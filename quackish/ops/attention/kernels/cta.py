"""What the threads of a CTA of attention's kernels share: arguments, TMA, shared memory and pipelines."""

from typing import Any, NamedTuple

import cutlass.cute as cute


class TmaTensor(NamedTuple):
    """A tensor whose tiles TMA loads or stores."""

    atom: cute.CopyAtom
    coordinates: cute.Tensor  # (rows, columns, heads, batch)


class PerTensor(NamedTuple):
    """Something for each tensor that TMA copies or shared memory keeps; None for the others."""

    q: Any = None
    do: Any = None
    o: Any = None
    k: Any = None
    v: Any = None
    ds: Any = None
    stats: Any = None
    bias: Any = None
    mask: Any = None
    dbias: Any = None


class Cta(NamedTuple):
    """What is passed to the functions of a kernel."""

    args: NamedTuple  # of the kernel
    tma: PerTensor  # of `TmaTensor`s
    shared: PerTensor  # tiles in shared memory, (rows, columns, stages): see `AttentionSm90.allocate`
    walk: cute.Tensor | None  # (words, stages) int32: see `MaskWalk`
    items: cute.Tensor | None  # (words, own stages) int32: see `OwnTiles`
    own: Any  # pipeline of own tiles, or None
    loaded: Any  # pipeline of loaded tiles
    values: Any  # pipeline of v's tiles where they have their own, or None
    biases: Any  # pipeline of tiles of the bias that are kept during an item, or None
    exchange: Any = None  # a `ClusterSum`, or None
    bias_stage: Any = None  # the stage of the bias's tile, where an item keeps it
    bias_policy: Any = None  # the L2 cache policy for the bias, in the warp that loads it
