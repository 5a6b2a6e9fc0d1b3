"""The bars of linear cross entropy, and whether they are kept."""

import math

from benchmarks.results_linear_cross_entropy import Key, Results
from quackish.bench.measure_linear_cross_entropy import GEMMS, NONE_IGNORED, THREE_GEMMS
from quackish.bench.measured import A_LAUNCH, OURS, is_ours

HEADLINE = (8192, 4096, 128256)
# of three bare GEMMs, and GB above inputs
HEADLINE_BARS = {"stored": (1.00, None), "chunked": (1.02, 3.0), "recompute": (1.36, 1.30)}
SHAPES = ((4096, 2048, 32000), (8192, 2048, 151936), (16384, 4096, 128256), (65536, 4096, 128256))
SHAPES_BAR = 1.02
# Shapes and data where every provider is measured at several settings.
AGAINST_MEMORY = ((HEADLINE, "normal"), (HEADLINE, "confident"), (SHAPES[-1], "normal"))
SMALL = (1024, 4096, 128256)
LOSS_BAR = 1.03  # of one logits GEMM
IGNORED_BAR = 0.35  # of the time with no row ignored, at 80 % ignored
CONFIDENT_BAR = 0.5  # of torch's error
HOST_BAR_US, LAUNCH_BAR_US = 150, 15  # of a call; of a launch, once its arguments are there

Verdict = tuple[str, str]  # PASS or FAIL, and what was found


def verdicts(results: Results) -> list[Verdict]:
    """One for every bar that something was measured for."""
    lines = [*_headline(results), *_shapes(results), *_small(results), *_dominated(results)]
    return [*lines, *_loss_only(results), *_ignored(results), *_errors(results), *_host(results)]


def _verdict(kept: bool, text: str) -> Verdict:
    return "PASS" if kept else "FAIL", text


def _at_most(value: float | None, bar: float, text: str, unit: str = "") -> list[Verdict]:
    return [] if value is None else [_verdict(value <= bar, f"{text}: {value:.4f}{unit}, bar {bar:g}{unit}")]


def _headline(results: Results) -> list[Verdict]:
    key, lines = results.train(HEADLINE), []
    for schedule, (of_gemms, gb) in HEADLINE_BARS.items():
        name = f"{OURS}-{schedule}"
        lines += _at_most(results.ratio(key, name, THREE_GEMMS), of_gemms, f"{key} {schedule}: time / 3 GEMMs")
        if gb:
            lines += _at_most(results.value(key, name, "peak_gb"), gb, f"{key} {schedule}: peak above inputs", " GB")
        points = results.points(key)
        if mine := points.get(name):
            rivals = {n: p for n, p in points.items() if not is_ours(n) and p[1] <= mine[1]}
            text = f"{key} {schedule}: faster than every peer that uses no more memory"
            lines += _faster(mine[0], {n: ms for n, (ms, _) in rivals.items()}, text)
    return lines


def _faster(ours: float, peers: dict[str, float], text: str) -> list[Verdict]:
    if not peers:
        return []
    best = min(peers, key=peers.__getitem__)
    found = f"{ours:.3f} ms, {best} {peers[best]:.3f} ms"
    return [_verdict(ours < peers[best], f"{text}: {found} ({ours / peers[best]:.3f}), of {len(peers)}")]


def _faster_than_every_peer(results: Results, key: Key) -> list[Verdict]:
    peers = {n: results.ms(key, n) for n in results.providers([key]) if not is_ours(n)} if key in results.cases else {}
    if OURS not in results.cases.get(key, {}):
        return []
    return _faster(results.ms(key, OURS) or math.inf, peers, f"{key}: faster than every peer")


def _shapes(results: Results) -> list[Verdict]:
    lines = []
    for key in map(results.train, SHAPES):
        lines += _at_most(results.ratio(key, OURS, THREE_GEMMS), SHAPES_BAR, f"{key}: time / 3 GEMMs")
        lines += _faster_than_every_peer(results, key)
    return lines


def _small(results: Results) -> list[Verdict]:
    return _faster_than_every_peer(results, results.train(SMALL))


def _dominated(results: Results) -> list[Verdict]:
    """Whether for every peer's point one of ours is no slower and no larger, where all settings are measured."""
    lines = []
    for key in map(results.train, *zip(*AGAINST_MEMORY, strict=True)):
        peers, free = results.peers(key), results.not_dominated(key)
        if not peers or len(peers) == len(results.points(key)):
            continue
        data = "" if key.data == "normal" else f", {key.data} data"
        text = f"{key}{data}: time against memory: {len(peers) - len(free)} of {len(peers)} peers' points dominated"
        lines.append(_verdict(not free, f"{text} by one of ours" + (f"; not {', '.join(free)}" if free else "")))
    return lines


def _loss_only(results: Results) -> list[Verdict]:
    lines = []
    for key in sorted(key for key in results.cases if key.mode == "loss"):
        lines += _at_most(results.ratio(key, OURS, GEMMS[0]), LOSS_BAR, f"{key} loss only: time / logits GEMM")
    return lines


def _ignored(results: Results) -> list[Verdict]:
    lines = []
    for key in sorted(key for key in results.cases if key.mode == "train" and key.ignored >= 0.8):
        text = f"{key}, {key.ignored:.0%} ignored: time / none ignored"
        lines += _at_most(results.ratio(key, OURS, NONE_IGNORED), IGNORED_BAR, text)
    return lines


def _errors(results: Results) -> list[Verdict]:
    """Of each of our variants against torch's eager bf16, on each kind of data: the worst ratio of all shapes."""
    lines = []
    for data, bar in (("normal", 1.0), ("confident", CONFIDENT_BAR)):
        keys = [key for key in results.cases if key.mode == "train" and key.data == data]
        for column, what in (("err_dx", "dX"), ("err_dw", "dW")):
            ratios = {}
            for key in keys:
                for name in results.providers([key]):
                    mine, theirs = results.value(key, name, column), results.value(key, "torch", column)
                    if is_ours(name) and mine is not None and theirs:
                        ratios[f"{name} at {key}"] = math.inf if math.isnan(mine) else mine / theirs
            if ratios:
                worst = max(ratios, key=ratios.__getitem__)
                text = f"{data} data, error of {what} / torch eager's: worst {ratios[worst]:.4f}, {worst}, bar {bar:g}"
                lines.append(_verdict(ratios[worst] <= bar, text))
    return lines


def _host(results: Results) -> list[Verdict]:
    lines = []
    for key in sorted(key for key in results.cases if key.mode == "host"):
        if (ms := results.ms(key, OURS)) is None:
            continue
        lines += _at_most(1e3 * ms, HOST_BAR_US, f"{key}: host, forward + backward", " us")
        if (ms := results.ms(key, A_LAUNCH)) is not None:
            lines += _at_most(1e3 * ms, LAUNCH_BAR_US, f"{key}: host, the slowest launch", " us")
    return lines
