"""Attention with a bias or a mask on Hopper: arguments, problems, configs, and the descriptions of its kernels.

Lengths, batch, heads and strides are runtime arguments. Query head h uses key head h / (Hq / Hk). In tensors of
(B or 1, Hq or 1, Lq, Lk), a stride of 0 in the batch or head dimension means that the tensor is broadcast in it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from quackish.device.arguments import ALIGNED_F32, F32, Ptr
from quackish.device.spec import KernelSpec, on_hopper
from quackish.device.work import Sizes, Work, bytes_of, ceil_div
from quackish.errors import UnsupportedError
from quackish.gpu import Gpu

BLOCK = 64  # rows of a warp group's accumulator; queries and keys of a classified block of a mask
EMPTY, MIXED, FULL = range(3)  # classes of a block: no key, some keys or all keys take part
LARGE = 2.0**12  # an lse beyond it has lost digits in fp32: backward also reads its residual
ORDERED = 2 * BLOCK  # queries or keys of a tile that has a place in the order of a mask
MAX_D = 128
# Registers per thread of the producer and of the consumers, by number of consumer warp groups. All threads together may
# have no more than at launch, when each has 65,536 / threads, rounded down to a multiple of 8. Otherwise they hang.
REGISTERS = {2: (24, 240), 3: (32, 160)}


class Strided(NamedTuple):
    """A tensor (B, H, L, columns). Strides are in elements; columns are contiguous unless `column` is given."""

    base: Any = None
    batch: Any = "int64"
    head: Any = "int64"
    row: Any = "int64"
    column: Any = None  # for a bias or a mask that is not loaded by TMA


class ScoreArgs(NamedTuple):
    """What the scores depend on."""

    q: Any = None  # (B, Hq, Lq, d)
    k: Any = None  # (B, Hk, Lk, d)
    v: Any = None  # as k
    bias: Any = None  # (B or 1, Hq or 1, Lq, Lk)
    mask: Any = None  # (B or 1, Hq or 1, Lq, Lk) uint8
    classes: Any = None  # of the mask's blocks, uint8; a stride of 0 where the mask is broadcast; with mask
    order: Any = None  # (B or 1, Hq or 1, tiles, 1) int32: of ORDERED queries or keys, most work first; with `ordered`
    scale: Any = "float32"
    softcap: Any = None  # fp32
    left: Any = None  # int32: key j takes part in row i if i - left <= j <= i + right; with band
    right: Any = None
    batch: Any = "int32"
    heads: Any = "int32"  # Hq
    group: Any = "int32"  # Hq / Hk
    num_q: Any = "int32"  # Lq
    num_k: Any = "int32"  # Lk
    d: Any = "int32"
    max_ctas: Any = "int32"  # resident at once


class MaskArgs(NamedTuple):
    mask: Any = None  # (batches, heads, rows, columns) uint8: sizes are 1 where it is broadcast
    classes: Any = Ptr("uint8", aligned=False)  # (batches, heads, rows / BLOCK, columns / BLOCK) rounded up, written
    batches: Any = "int32"
    heads: Any = "int32"
    rows: Any = "int32"
    columns: Any = "int32"


class OrderArgs(NamedTuple):
    classes: Any = Strided(Ptr("uint8", aligned=False), column="int64")  # a stride of 0 where the mask is broadcast
    of_queries: Any = Ptr("int32", aligned=True)  # (batches, heads, num_q / ORDERED rounded up), written
    of_keys: Any = Ptr("int32", aligned=False)  # the same with num_k
    batches: Any = "int32"  # of the mask
    heads: Any = "int32"
    num_q: Any = "int32"
    num_k: Any = "int32"


class ForwardArgs(NamedTuple):
    scores: Any = ScoreArgs()
    o: Any = None  # (B, Hq, Lq, d), written
    lse: Any = F32  # (B, Hq, Lq), written
    lse_residual: Any = F32  # as lse, written: what rounding lse to fp32 dropped; 0 if |lse| <= LARGE


class RowsArgs(NamedTuple):
    o: Any = None  # (B, Hq, Lq, d)
    do: Any = None  # as o
    lse: Any = F32  # (B, Hq, Lq)
    lse_residual: Any = F32
    dlse: Any = None  # (B, Hq, Lq) fp32; if lse has a gradient
    stats: Any = ALIGNED_F32  # (4, B, Hq, stats_row), written: see kernels/attention/rows.py
    stats_row: Any = "int64"  # a multiple of 4
    batch: Any = "int32"
    heads: Any = "int32"  # Hq
    num_q: Any = "int32"  # Lq
    d: Any = "int32"


class KeysArgs(NamedTuple):
    scores: Any = ScoreArgs()
    do: Any = None  # (B, Hq, Lq, d)
    stats: Any = ALIGNED_F32
    stats_row: Any = "int64"
    dk: Any = None  # (B, Hk, Lk, d), written
    dv: Any = None  # as dk
    dbias: Any = None  # (B, Hq, Lq, Lk), written; with dbias


class QueriesArgs(NamedTuple):
    scores: Any = ScoreArgs()
    do: Any = None  # (B, Hq, Lq, d)
    stats: Any = ALIGNED_F32
    stats_row: Any = "int64"
    dq: Any = None  # as q, written


class ProductArgs(NamedTuple):
    scores: Any = ScoreArgs()  # without bias and mask
    ds: Any = None  # (B, Hq, Lq, Lk)
    dq: Any = None  # as q, written


class BiasArgs(NamedTuple):
    scores: Any = ScoreArgs()
    do: Any = None  # (B, Hq, Lq, d)
    stats: Any = ALIGNED_F32
    stats_row: Any = "int64"
    dbias: Any = None  # (parts, B or 1, Hq or 1, Lq, Lk), written; its strides: batch, head, row
    part: Any = "int64"  # stride of dbias's parts
    parts: Any = "int32"
    batches: Any = "int32"  # B or 1: the sizes of dbias
    bias_heads: Any = "int32"


@dataclasses.dataclass(frozen=True)
class AttentionMaskProblem:
    """The classes of a mask's blocks."""

    by_vectors: bool  # its rows start on 16 bytes, and have a multiple of 16 columns

    @property
    def args(self) -> MaskArgs:
        return MaskArgs(Strided(Ptr("uint8", self.by_vectors), column=None if self.by_vectors else "int64"))


@dataclasses.dataclass(frozen=True)
class AttentionMaskConfig:
    num_warps: int = 8  # not measured

    @property
    def threads(self) -> int:
        return 32 * self.num_warps


@dataclasses.dataclass(frozen=True)
class AttentionOrderProblem:
    """The order in which tiles of queries and of keys start: those with most blocks that are not EMPTY first."""

    @property
    def args(self) -> OrderArgs:
        return OrderArgs()


@dataclasses.dataclass(frozen=True)
class AttentionOrderConfig:
    threads: int = 1024  # not measured


@dataclasses.dataclass(frozen=True)
class AttentionProblem:
    """What all kernels of attention depend on."""

    dtype: str  # of q, k, v, o and their gradients: "bfloat16" or "float16"
    d: int  # columns of q, k and v, rounded up: 32, 64, 96 or 128
    bias_dtype: str | None = None  # "bfloat16", "float16" or "float32"
    bias_aligned: bool = True  # its rows start on 16 bytes, so that TMA can load it
    mask: bool = False
    mask_aligned: bool = True
    band: bool = False  # causality or a window
    softcap: bool = False

    @property
    def ordered(self) -> bool:
        """True if tiles start in an order that depends on the mask; with a band, it depends on the band."""
        return self.mask and not self.band

    @property
    def bias_by_tma(self) -> bool:
        return self.bias_dtype is not None and self.bias_aligned

    @property
    def mask_by_tma(self) -> bool:
        return self.mask and self.mask_aligned

    def _operand(self) -> Strided:
        return Strided(Ptr(self.dtype, aligned=True))

    def _scores(self) -> ScoreArgs:
        operand, bias, mask, classes, order = self._operand(), None, None, None, None
        if self.bias_dtype is not None:
            bias = Strided(Ptr(self.bias_dtype, self.bias_aligned), column=None if self.bias_aligned else "int64")
        if self.mask:
            mask = Strided(Ptr("uint8", self.mask_aligned), column=None if self.mask_aligned else "int64")
            classes = Strided(Ptr("uint8", aligned=False), column="int64")
        if self.ordered:
            order = Strided(Ptr("int32", aligned=False))
        bound = "int32" if self.band else None
        return ScoreArgs(
            q=operand, k=operand, v=operand, bias=bias, mask=mask, classes=classes, order=order,
            softcap="float32" if self.softcap else None, left=bound, right=bound,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class AttentionForwardProblem(AttentionProblem):
    own: ClassVar[tuple[str, ...]] = ("q",)
    loaded: ClassVar[tuple[str, ...]] = ("k", "v")

    @property
    def args(self) -> ForwardArgs:
        return ForwardArgs(scores=self._scores(), o=self._operand())


@dataclasses.dataclass(frozen=True)
class AttentionRowsProblem:
    """Numbers per row for the other kernels of backward: the shift of its scores, and delta."""

    dtype: str
    dlse: bool = False

    @property
    def args(self) -> RowsArgs:
        operand = Strided(Ptr(self.dtype, aligned=True))
        return RowsArgs(o=operand, do=operand, dlse=F32 if self.dlse else None)


@dataclasses.dataclass(frozen=True)
class AttentionRowsConfig:
    threads: int = 256  # per CTA; not measured
    rows_per_thread: int = 2  # 4 are slower at d 128


@dataclasses.dataclass(frozen=True)
class AttentionKeysProblem(AttentionProblem):
    """dk and dv, and dbias if the bias is not broadcast."""

    own: ClassVar[tuple[str, ...]] = ("k", "v")
    loaded: ClassVar[tuple[str, ...]] = ("q", "do")

    dbias: bool = False

    @property
    def ds_is_dbias(self) -> bool:
        """True if dbias holds ds as dq and dk are computed from it."""
        return self.dbias and self.bias_dtype == self.dtype and not self.softcap

    @property
    def args(self) -> KeysArgs:
        dbias = Strided(Ptr(self.bias_dtype, aligned=True)) if self.dbias else None
        return KeysArgs(
            scores=self._scores(), do=self._operand(), dk=self._operand(), dv=self._operand(), dbias=dbias
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class AttentionQueriesProblem(AttentionProblem):
    """dq, with ds computed again."""

    own: ClassVar[tuple[str, ...]] = ("q", "do")
    loaded: ClassVar[tuple[str, ...]] = ("k", "v")

    @property
    def args(self) -> QueriesArgs:
        return QueriesArgs(scores=self._scores(), do=self._operand(), dq=self._operand())


@dataclasses.dataclass(frozen=True)
class AttentionProductProblem(AttentionProblem):
    """dq from ds in memory. With a mask only the classes of its blocks are read."""

    own: ClassVar[tuple[str, ...]] = ()
    loaded: ClassVar[tuple[str, ...]] = ("k",)

    mask_by_tma = False

    @property
    def args(self) -> ProductArgs:
        return ProductArgs(scores=self._scores()._replace(mask=None), ds=self._operand(), dq=self._operand())


@dataclasses.dataclass(frozen=True)
class AttentionBiasProblem(AttentionProblem):
    """The gradient of a bias that is broadcast over batch, heads or both."""

    own: ClassVar[tuple[str, ...]] = ()
    loaded: ClassVar[tuple[str, ...]] = ("k", "v")

    ordered = False
    in_parts: bool = False  # in fp32, to be summed; else one part, in the dtype of the bias

    @property
    def args(self) -> BiasArgs:
        dbias = Strided(ALIGNED_F32 if self.in_parts else Ptr(self.bias_dtype, aligned=True))
        return BiasArgs(scores=self._scores(), do=self._operand(), dbias=dbias)


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Each consumer warp group has BLOCK rows of queries (of keys, for dk and dv); tiles of the other side are loaded.

    num_wgs: consumer warp groups
    tile: rows of a loaded tile of the other side, of queries for dk and dv, else of keys
    num_stages: loaded tiles in flight
    own_stages: items whose own tiles are in shared memory; with 2, the next item's are loaded during an item
    """

    num_wgs: int
    tile: int
    num_stages: int
    own_stages: int = 1

    @property
    def threads(self) -> int:
        return 128 * (1 + self.num_wgs)

    @property
    def rows(self) -> int:
        """Rows of a CTA's tile."""
        return BLOCK * self.num_wgs


# Per kernel: tiles kept by a warp group, and loaded per stage, of d columns in 16 bits
_OWN = {"forward": 1, "queries": 2, "product": 0, "keys": 2, "bias": 0}
_LOADED = {"forward": 2, "queries": 2, "product": 1, "keys": 2, "bias": 2}
_KIND = {
    AttentionForwardProblem: "forward",
    AttentionQueriesProblem: "queries",
    AttentionProductProblem: "product",
    AttentionKeysProblem: "keys",
    AttentionBiasProblem: "bias",
}


def attention_smem_bytes(problem: AttentionProblem, config: AttentionConfig) -> int:
    kind, rows = _KIND[type(problem)], config.rows
    total = _OWN[kind] * config.own_stages * rows * problem.d * 2 + 1024  # barriers and alignment
    stage = _LOADED[kind] * config.tile * problem.d * 2
    scores = config.tile * rows
    if problem.bias_by_tma:
        stage += scores * (4 if problem.bias_dtype == "float32" else 2)
    if problem.mask_by_tma:
        stage += scores
    if kind == "product":  # ds
        stage += 2 * scores
    if kind == "keys":  # shift and delta of the loaded rows, and dbias before it is stored
        stage += 8 * config.tile
        total += 2 * scores if getattr(problem, "dbias", False) and problem.bias_dtype != "float32" else 0
    if kind == "bias":  # both sides are loaded
        stage += 2 * rows * problem.d * 2 + 8 * rows
    return total + config.num_stages * stage


def _registers(problem: AttentionProblem, config: AttentionConfig) -> int:
    """About what a thread of the consumers needs: the accumulators and operands that are live at once, and some more.

    Configs up to the limit compile without spills (`tests/attention/test_config.py`).
    """
    kind, tile, d = _KIND[type(problem)], config.tile, problem.d
    unaligned = not (problem.bias_aligned and problem.mask_aligned)  # its values are loaded many at a time
    is_complex = problem.softcap or (problem.mask and problem.band) or unaligned
    is_wide = unaligned or problem.bias_dtype == "float32"
    of_keys = 0 if tile == 32 else 56 if is_wide else 16 * problem.mask + 8 * (problem.mask and problem.band)
    live = {
        "forward": tile // 2 + tile // 4 + d // 2 + 40 + tile * unaligned,
        "queries": tile + tile // 4 + d // 2 + 40 + tile // 4 * unaligned,
        "product": d // 2 + 40,
        "keys": tile + tile // 4 + d + 16 + of_keys,
        "bias": tile + tile // 2 + 40 + 16 * is_complex,
    }[kind]
    return live + (tile // 2 if problem.softcap and kind in ("queries", "keys") else 0)


def own_in_registers(problem: AttentionProblem, config: AttentionConfig) -> int:
    """How many of a warp group's own tiles are in registers during an item: as many as fit.

    WGMMAs of their scores then read only the other tile from shared memory.
    """
    if not (problem.bias_aligned and problem.mask_aligned):  # its values are loaded into these registers
        return 0
    tiles = _OWN[_KIND[type(problem)]]
    free = REGISTERS[config.num_wgs][1] - _registers(problem, config) - 8 * tiles
    return min(tiles, max(0, free) // (problem.d // 4))


def keys_ahead(problem: AttentionProblem, config: AttentionConfig) -> bool:
    """True if the kernel for dk and dv starts the next tile's scores before it ends this tile.

    That takes registers for ds beside the scores, which masks do not leave, and another stage.
    """
    needed = _registers(problem, config) + config.tile // 4
    return not problem.mask and config.num_stages > 1 and needed <= REGISTERS[config.num_wgs][1]


def attention_why_illegal(problem: AttentionProblem, config: AttentionConfig, gpu: Gpu) -> str | None:
    tiles = TILES[_KIND[type(problem)]]
    if config.own_stages not in ((1, 2) if _OWN[_KIND[type(problem)]] else (1,)):
        expected = "1 or 2" if _OWN[_KIND[type(problem)]] else "1: this kernel keeps no tiles"
        return f"own_stages is {config.own_stages}; expected {expected}"
    if config.num_wgs not in REGISTERS:
        return f"num_wgs is {config.num_wgs}; expected 2 or 3"
    if problem.ordered and config.rows != ORDERED:
        return (
            f"num_wgs is {config.num_wgs}; with a mask expected 2, because the order of tiles is one of {ORDERED} rows"
        )
    if config.tile not in tiles:
        return f"tile is {config.tile}; expected one of {', '.join(map(str, tiles))}"
    least = 2 if _KIND[type(problem)] == "queries" else 1  # it releases a stage after it has the next one
    if config.num_stages < least:
        return f"num_stages is {config.num_stages}; expected at least {least}"
    needed, registers = _registers(problem, config), REGISTERS[config.num_wgs][1]
    if needed > registers:
        return (
            f"tile is {config.tile} and num_wgs {config.num_wgs}: they need about {needed} registers per thread, of "
            f"{registers}; expected a smaller tile or fewer warp groups"
        )
    smem = attention_smem_bytes(problem, config)
    if smem > gpu.smem_bytes:
        return (
            f"num_stages is {config.num_stages}: {smem} bytes of shared memory, and {gpu.name} has {gpu.smem_bytes}; "
            f"expected fewer stages or a smaller tile{', or own_stages 1' if config.own_stages == 2 else ''}"
        )
    return None


TILES = {"forward": (128, 64), "queries": (128, 64), "product": (128, 64), "keys": (128, 64, 32), "bias": (128, 64)}


# (tile, smallest number of stages), the best first. H200, bf16, B 4, H 16, L 2048, bias (B, H, L, L), median ms, before
# own tiles were in registers. With them, (2, 64, 4) is still slower for dk and dv at d 64: 0.885 and 0.874 ms of a step
# on an H100.
_PREFERRED = {
    # H100, minima: d 64: (2, 128, 3) 0.227, (2, 128, 2) 0.227, (2, 64, 4) 0.240;
    # d 128: (2, 128, 2) 0.285, (2, 64, 3) 0.302
    "forward": ((128, 2), (64, 2)),
    # when it stored dbias: d 64: (2, 64, 4) 0.356, (2, 128, 2) 0.376; d 128: (2, 64, 3) 0.513, (2, 64, 2) 0.565
    "queries": ((128, 3), (64, 2)),
    # the whole backward, with dbias, minima: d 64: (2, 128, 2) 0.524, (2, 64, 4) 0.532, (2, 64, 5) 0.535;
    # d 128: (2, 64, 3) 0.674, (2, 64, 2) 0.706
    "keys": ((128, 2), (64, 2), (64, 1), (32, 2)),
    # the whole backward, with an older kernel for dk and dv:
    # d 64: (2, 128, 3) 0.547, (2, 64, 4) 0.549; d 128: (2, 128, 3) 0.827, (2, 64, 4) 0.831
    "product": ((128, 2), (64, 2)),
    # other configs were not measured
    "bias": ((128, 2), (64, 2), (64, 1)),
}


def attention_config(problem: AttentionProblem, gpu: Gpu) -> AttentionConfig:
    """Two consumer warp groups, as many stages as fit up to a limit, and a second stage of own tiles if it fits too."""
    kind = _KIND[type(problem)]
    # 4 stages fit some kernels at d 128, but were not measured there. For dq with a mask, 3 leave room for a second
    # stage of own tiles (H100, random half, d 64: 1.48 to 1.45 ms of a step). With neither bias nor mask: not measured.
    most = 3 if problem.d == MAX_D or kind == "queries" else 4
    for tile, least in _PREFERRED[kind]:
        for stages in range(most, least - 1, -1):
            for own_stages in (2, 1) if _OWN[kind] else (1,):
                config = AttentionConfig(2, tile, stages, own_stages)
                if attention_why_illegal(problem, config, gpu) is None:
                    return config
    raise UnsupportedError(f"scaled_dot_product_attention: no kernel for {problem} on {gpu.name}")


def bias_parts(summed: int, tensors: int, num_q: int, num_k: int, sm_count: int) -> int:
    """In how many parts the sum over `summed` heads for a broadcast bias is divided, to occupy the GPU.

    tensors: the number of (Lq, Lk) matrices of the bias.
    """
    tiles = tensors * -(-num_q // (2 * BLOCK)) * -(-num_k // BLOCK)
    return max(1, min(summed, 2 * sm_count // tiles))


# Descriptions --------------------------------------------------------------------------------------------------------


def _scores_work(p: AttentionProblem, s: Sizes, matmuls: int, rows: int) -> Work:
    """matmuls: of Lq x Lk x d. rows: tensors like q that are read and written, besides k and v."""
    scores = s["batch"] * s["heads"] * s["num_q"] * s["num_k"]
    of_bias, of_mask = (_matrices(s, of) * s["num_q"] * s["num_k"] for of in ("bias", "mask"))
    of_q, of_k = (s["batch"] * s["heads"] * s[n] * s["d"] * bytes_of(p.dtype) for n in ("num_q", "num_k"))
    read = of_bias * bytes_of(p.bias_dtype) + of_mask * p.mask + (rows - 1) * of_q + 2 * of_k // s["group"]
    notes = ["fewer bytes of a bias or mask that is the same for all queries or keys"] * (of_bias + of_mask > 0)
    notes += ["less work with causality or a window"] * p.band
    notes += ["less work where a mask leaves a tile empty"] * p.mask
    return Work(read, of_q, 2 * matmuls * scores * s["d"], "; ".join(notes))


def _mask_work(p: AttentionMaskProblem, s: Sizes) -> Work:
    read = s["batches"] * s["heads"] * s["rows"] * s["columns"]
    blocks = ceil_div(s["rows"], BLOCK) * ceil_div(s["columns"], BLOCK)
    return Work(read, s["batches"] * s["heads"] * blocks, 0)


def _order_work(p: AttentionOrderProblem, s: Sizes) -> Work:
    blocks_q, blocks_k = (ceil_div(s[n], BLOCK) for n in ("num_q", "num_k"))
    tiles = sum(ceil_div(s[n], ORDERED) for n in ("num_q", "num_k"))
    matrices = s["batches"] * s["heads"]
    return Work(matrices * blocks_q * blocks_k, 4 * matrices * tiles, 0)


def _forward_work(p: AttentionForwardProblem, s: Sizes) -> Work:
    return _scores_work(p, s, matmuls=2, rows=2)  # q, o


def _rows_work(p: AttentionRowsProblem, s: Sizes) -> Work:
    rows = s["batch"] * s["heads"] * s["num_q"]
    return Work(rows * (2 * s["d"] * bytes_of(p.dtype) + 4 + 4 * p.dlse), 8 * rows, 2 * rows * s["d"])


def _keys_work(p: AttentionKeysProblem, s: Sizes) -> Work:
    work = _scores_work(p, s, matmuls=4, rows=3)  # q, do
    of_k = s["batch"] * s["heads"] // s["group"] * s["num_k"] * s["d"] * bytes_of(p.dtype)
    dbias = s["batch"] * s["heads"] * s["num_q"] * s["num_k"] * bytes_of(p.bias_dtype) if p.dbias else 0
    return dataclasses.replace(work, bytes_written=2 * of_k + dbias)  # dk, dv


def _queries_work(p: AttentionQueriesProblem, s: Sizes) -> Work:
    return _scores_work(p, s, matmuls=3, rows=3)  # q, do, dq


def _product_work(p: AttentionProductProblem, s: Sizes) -> Work:
    work = _scores_work(p, s, matmuls=1, rows=1)  # dq
    ds, v = (s["batch"] * heads * s["num_k"] * columns * bytes_of(p.dtype)
             for heads, columns in ((s["heads"], s["num_q"]), (s["heads"] // s["group"], s["d"])))  # fmt: skip
    return dataclasses.replace(work, bytes_read=work.bytes_read + ds - v)


def _bias_work(p: AttentionBiasProblem, s: Sizes) -> Work:
    work = _scores_work(p, s, matmuls=2, rows=3)  # q, do
    itemsize = 4 if p.in_parts else bytes_of(p.bias_dtype)
    written = itemsize * s["parts"] * _matrices(s, "bias") * s["num_q"] * s["num_k"]
    return dataclasses.replace(work, bytes_written=written)


def _matrices(s: Sizes, of: str) -> int:
    """The number of matrices (num_q, num_k) of a bias or a mask."""
    return s.get(f"{of}_batch", 0) * s.get(f"{of}_heads", 0)


def _broadcast_sizes(args: Any) -> dict[str, int]:
    """Batch and heads of the bias and the mask, whose strides are 0 where they are broadcast."""
    sizes, scores = {}, args.scores
    for name in ("bias", "mask"):
        if hasattr(t := getattr(scores, name), "batch"):
            sizes[f"{name}_batch"] = scores.batch if t.batch else 1
            sizes[f"{name}_heads"] = scores.heads if t.head else 1
    return sizes


def _spec(kernel: str, name: str, sizes: tuple[str, ...], work: Any, sample: Any, *results: str) -> KernelSpec:
    """A kernel that computes scores. kernel: "module:class" in `kernels`. results: the arguments that it writes."""
    on = on_hopper(
        f"quackish.ops.attention.kernels.{kernel}",
        AttentionConfig,
        attention_config,
        attention_why_illegal,
        "quackish.ops.attention.tuning:TUNING",
    )
    return KernelSpec(name, WHO, type(sample), on, sizes, work, [sample], more_sizes=_broadcast_sizes, results=results)


def _small(
    kernel: str, name: str, sizes: tuple[str, ...], work: Any, sample: Any, config: Callable[[], Any]
) -> KernelSpec:
    """A kernel with one config."""
    on = on_hopper(f"quackish.ops.attention.kernels.{kernel}", config, lambda problem, gpu: config())
    return KernelSpec(name, WHO, type(sample), on, sizes, work, [sample])


WHO = "scaled_dot_product_attention"  # in messages
_SIZES = ("batch", "heads", "group", "num_q", "num_k", "d")
_B, _F = "bfloat16", "float32"
FORWARD_SPEC = _spec(
    "forward_sm90:AttentionForwardSm90", "attention_fwd", _SIZES, _forward_work,
    AttentionForwardProblem(_B, 64, mask=True, mask_aligned=False), "o", "lse",
)  # fmt: skip
SPECS = (
    _small(
        "mask_classes:AttentionMask", "attention_mask", ("batches", "heads", "rows", "columns"), _mask_work,
        AttentionMaskProblem(by_vectors=False), AttentionMaskConfig,
    ),
    _small(
        "tile_order:AttentionOrder", "attention_order", ("batches", "heads", "num_q", "num_k"), _order_work,
        AttentionOrderProblem(), AttentionOrderConfig,
    ),
    FORWARD_SPEC,
    _small(
        "backward_rows:AttentionRows", "attention_bwd_rows", ("batch", "heads", "num_q", "d"), _rows_work,
        AttentionRowsProblem(_B, dlse=True), AttentionRowsConfig,
    ),
    _spec(
        "backward_keys_sm90:AttentionKeysSm90", "attention_bwd_keys", _SIZES, _keys_work,
        AttentionKeysProblem(_B, 64, _F, band=True, softcap=True, dbias=True), "dk", "dv", "dbias",
    ),
    _spec(
        "backward_queries_sm90:AttentionQueriesSm90", "attention_bwd_queries", _SIZES, _queries_work,
        AttentionQueriesProblem(_B, 64, _F, softcap=True), "dq",
    ),
    _spec(
        "backward_product_sm90:AttentionProductSm90", "attention_bwd_product", _SIZES, _product_work,
        AttentionProductProblem(_B, 64), "dq",
    ),
    _spec(
        "backward_bias_sm90:AttentionBiasSm90", "attention_bwd_bias", (*_SIZES, "parts"), _bias_work,
        AttentionBiasProblem(_B, 64, _B), "dbias",
    ),
)  # fmt: skip
