"""How attention's kernels are configured: the config, what it takes of an SM, which ones are legal, and the rule.

The numbers that differ between kernels are class attributes of their problems.
"""

import dataclasses

from quackish.device.work import ceil_div
from quackish.errors import UnsupportedError
from quackish.gpu import Gpu
from quackish.ops.attention.arguments import BLOCK, MAX_D, ORDERED
from quackish.ops.attention.score_problems import AttentionProblem

# Registers per thread of the producer and of the consumers, by number of consumer warp groups. All threads together may
# have no more than at launch, when each has 65,536 / threads, rounded down to a multiple of 8. Otherwise they hang.
REGISTERS = {2: (24, 240), 3: (32, 160)}


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


@dataclasses.dataclass(frozen=True)
class AttentionMaskConfig:
    num_warps: int = 8  # not measured

    @property
    def threads(self) -> int:
        return 32 * self.num_warps


@dataclasses.dataclass(frozen=True)
class AttentionOrderConfig:
    threads: int = 1024  # not measured


@dataclasses.dataclass(frozen=True)
class AttentionRowsConfig:
    threads: int = 256  # per CTA; not measured
    rows_per_thread: int = 2  # 4 are slower at d 128


def attention_smem_bytes(problem: AttentionProblem, config: AttentionConfig) -> int:
    rows = BLOCK * config.num_wgs
    own = config.own_stages * problem.own_bytes(rows, config.tile)
    stages = config.num_stages * problem.stage_bytes(rows, config.tile)
    return own + stages + problem.result_bytes(rows, config.tile) + 1024  # barriers and alignment


def own_in_registers(problem: AttentionProblem, config: AttentionConfig) -> int:
    """How many of a warp group's own tiles are in registers during an item: as many as fit.

    WGMMAs of their scores then read only the other tile from shared memory.
    """
    if problem.has_unaligned:  # its values are loaded into these registers
        return 0
    tiles = len(problem.own)
    free = REGISTERS[config.num_wgs][1] - problem.live_registers(config.tile) - 8 * tiles
    return min(tiles, max(0, free) // (problem.d // 4))


def keys_ahead(problem: AttentionProblem, config: AttentionConfig) -> bool:
    """True if the kernel for dk and dv starts the next tile's scores before it ends this tile.

    That takes registers for ds beside the scores, which masks of scores do not leave, and another stage.
    """
    needed = problem.live_registers(config.tile) + config.tile // 4
    masks = problem.mask and not problem.mask_of_keys
    return not masks and config.num_stages > 1 and needed <= REGISTERS[config.num_wgs][1]


def attention_why_illegal(problem: AttentionProblem, config: AttentionConfig, gpu: Gpu) -> str | None:
    if config.own_stages not in problem.own_stages:
        expected = "1 or 2" if len(problem.own_stages) > 1 else "1: this kernel keeps no tiles"
        return f"own_stages is {config.own_stages}; expected {expected}"
    if config.num_wgs not in problem.num_wgs:
        return f"num_wgs is {config.num_wgs}; expected {' or '.join(map(str, problem.num_wgs))}"
    if problem.ordered and BLOCK * config.num_wgs != ORDERED:
        return (
            f"num_wgs is {config.num_wgs}; with a mask expected 2, because the order of tiles is one of {ORDERED} rows"
        )
    if config.tile not in problem.tiles:
        return f"tile is {config.tile}; expected one of {', '.join(map(str, problem.tiles))}"
    if config.num_stages < problem.min_stages:
        return f"num_stages is {config.num_stages}; expected at least {problem.min_stages}"
    needed, registers = problem.live_registers(config.tile), REGISTERS[config.num_wgs][1]
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


def attention_config(problem: AttentionProblem, gpu: Gpu) -> AttentionConfig:
    """Two warp groups, three if wide; as many stages as fit up to a limit, and a second one of own tiles if it fits."""
    # 4 stages fit some kernels at d 128, but were not measured there.
    most = 3 if problem.d == MAX_D else problem.max_stages
    num_wgs = 3 if problem.wide else 2
    for tile, least in problem.choices:
        for stages in range(most, least - 1, -1):
            for own_stages in reversed(problem.own_stages):
                config = AttentionConfig(num_wgs, tile, stages, own_stages)
                if attention_why_illegal(problem, config, gpu) is None:
                    return config
    raise UnsupportedError(f"scaled_dot_product_attention: no kernel for {problem} on {gpu.name}")


MIN_DIVIDED = 4  # heads that a sum in parts has at least: adding parts takes two more kernels. Not measured


def parts_of_workers(summed: int, tiles: int, workers: int, cost: int = 4) -> int:
    """In how many parts workers walk over the `summed` heads that share one of `tiles` of the bias.

    cost: how many heads take as long as a part itself, whose sum is written and read; not measured
    """
    if summed < MIN_DIVIDED:
        return 1

    def heads_in_turn(parts: int) -> int:
        """The heads of the busiest worker."""
        return ceil_div(tiles * parts, workers) * (ceil_div(summed, parts) + cost)

    return min(range(1, max(1, min(summed, 8 * workers // tiles)) + 1), key=heads_in_turn)


def bias_parts(summed: int, tensors: int, num_q: int, num_k: int, d: int, sm_count: int) -> int:
    """In how many parts the kernel for dbias alone divides its sum over `summed` heads.

    tensors: the number of (Lq, Lk) matrices of the bias
    """
    tiles_q = tensors * ceil_div(num_q, 2 * BLOCK)
    if d > 32:
        most = min(summed, 2 * sm_count // (tiles_q * ceil_div(num_k, BLOCK)))
        most = 1 if summed < MIN_DIVIDED else max(1, most)
        return ceil_div(summed, ceil_div(summed, most))  # no part is empty
    return parts_of_workers(summed, tiles_q * ceil_div(num_k, 2 * BLOCK), sm_count, cost=6)


def resident_clusters(ctas: int, sm_count: int) -> int:
    """About how many clusters run at once, of CTAs that need an SM each.

    A cluster's SMs are in one GPC, which may leave some over: an H200 runs 30 clusters of four on 132 SMs (Nsight
    Compute); three and five are taken to leave as many. It only guides the division into parts. RMSNorm's cooperative
    launches would fail with one cluster too many, so `max_clusters` there is lower.
    """
    return max(1, sm_count // ctas if ctas < 3 else sm_count * 10 // 11 // ctas)


def cluster_of_keys(num_k: int) -> tuple[int, int] | None:
    """(CTAs, blocks of keys of each) of the clusters with dq and dbias; None if there are too many keys.

    With least room beyond num_k keys and SMs without a cluster, and then with fewest CTAs.
    """

    def time(choice: tuple[int, int]) -> tuple[int, int]:
        ctas, blocks = choice
        return ctas * blocks * (10 if ctas < 3 else 11), ctas

    # Five CTAs with three blocks take 5.06 ms for 960 keys, about what two kernels do at their speed for 768 (H200).
    choices = [(1, 3), (2, 2), (2, 3), (3, 3), (4, 2), (4, 3), (5, 2)]
    choices = [(ctas, blocks) for ctas, blocks in choices if ctas * blocks * BLOCK >= num_k]
    return min(choices, key=time, default=None)
