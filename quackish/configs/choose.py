"""(kernel, problem, GPU) -> config: the one place that decides how a kernel runs.

In order of precedence: `with quackish.config(...)`, a row of the user's table (written by `quackish tune`),
the analytical rule. Nothing is measured at run time, so the same table gives the same configs and the same bits.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from quackish.configs import (
    attention,
    gemm,
    gemm_sm100,
    grouped_gemm,
    grouped_gemm_sm100,
    lce_rows,
    rms_norm,
    table,
    token_rows,
)
from quackish.errors import a, describe, did_you_mean, warn_once
from quackish.gpu import FAMILIES, Gpu


class Rule(NamedTuple):
    config: type
    analytical: Callable[[Any, Gpu], Any]  # (problem, gpu) -> config; raises UnsupportedError if there is none
    why_illegal: Callable[[Any, Any, Gpu], str | None]  # (problem, config, gpu) -> reason; None if legal


def _on_all(*rule: Any) -> dict[str, Rule]:
    return dict.fromkeys(FAMILIES, Rule(*rule))


def _on_blackwell(*rule: Any) -> dict[str, Rule]:
    return dict.fromkeys(("sm_100", "sm_103"), Rule(*rule))


_ATTENTION = Rule(attention.AttentionConfig, attention.attention_config, attention.attention_why_illegal)
# kernel -> GPU family -> rule, with the keys of the table in quackish/kernels/__init__.py
RULES: dict[str, dict[str, Rule]] = {
    "rms_norm_fwd": _on_all(rms_norm.RmsNormFwdConfig, rms_norm.rms_norm_fwd_config, rms_norm.rms_norm_fwd_why_illegal),
    "rms_norm_bwd": _on_all(rms_norm.RmsNormBwdConfig, rms_norm.rms_norm_bwd_config, rms_norm.rms_norm_bwd_why_illegal),
    "lce_gemm": {
        "sm_90": Rule(gemm.GemmConfig, gemm.gemm_config, gemm.gemm_why_illegal),
        **_on_blackwell(gemm_sm100.GemmSm100Config, gemm_sm100.gemm_sm100_config, gemm_sm100.gemm_sm100_why_illegal),
    },
    "grouped_gemm": {
        "sm_90": Rule(gemm.GemmConfig, grouped_gemm.grouped_gemm_config, grouped_gemm.grouped_gemm_why_illegal),
        **_on_blackwell(
            gemm_sm100.GemmSm100Config,
            grouped_gemm_sm100.grouped_gemm_sm100_config,
            grouped_gemm_sm100.grouped_gemm_sm100_why_illegal,
        ),
    },
    "attention_fwd": {"sm_90": _ATTENTION},
    "attention_bwd_keys": {"sm_90": _ATTENTION},
    "attention_bwd_queries": {"sm_90": _ATTENTION},
    "attention_bwd_product": {"sm_90": _ATTENTION},
    "attention_bwd_bias": {"sm_90": _ATTENTION},
}
# Kernels with one config per problem, which cannot be tuned or forced: (class of its problems, problem -> config)
FIXED: dict[str, tuple[type, Callable[[Any], Any]]] = {
    "attention_mask": (attention.AttentionMaskProblem, lambda problem: attention.AttentionMaskConfig()),
    "attention_order": (attention.AttentionOrderProblem, lambda problem: attention.AttentionOrderConfig()),
    "attention_bwd_rows": (attention.AttentionRowsProblem, lambda problem: attention.AttentionRowsConfig()),
    "token_rows": (token_rows.TokenRowsProblem, token_rows.token_rows_config),
    "lce_compact": (lce_rows.LceCompactProblem, lambda problem: lce_rows.LceCompactConfig()),
    "lce_gather": (lce_rows.LceGatherProblem, lce_rows.lce_gather_config),
    "lce_rows": (lce_rows.LceRowsProblem, lambda problem: lce_rows.LceRowsConfig()),
    "lce_sort": (lce_rows.LceSortProblem, lambda problem: lce_rows.LceSortConfig()),
    "lce_targets": (lce_rows.LceTargetsProblem, lambda problem: lce_rows.LceTargetsConfig()),
    "lce_bias": (lce_rows.LceBiasProblem, lce_rows.lce_bias_config),
    "lce_scatter": (lce_rows.LceScatterProblem, lambda problem: lce_rows.LceRowsConfig()),
    "lce_scale": (lce_rows.LceScaleProblem, lambda problem: lce_rows.LceScaleConfig()),
}

# User's name -> name of kernels.find(), for the kernels with a rule.
NAMES = {
    "rms_norm_forward": "rms_norm_fwd",
    "rms_norm_backward": "rms_norm_bwd",
    **dict.fromkeys(("lce_logits", "lce_dlogits", "lce_dx", "lce_dw"), "lce_gemm"),
    "grouped_gemm": "grouped_gemm",
    "attention_forward": "attention_fwd",
    "attention_backward_keys": "attention_bwd_keys",
    "attention_backward_queries": "attention_bwd_queries",
    "attention_backward_product": "attention_bwd_product",
    "attention_backward_bias": "attention_bwd_bias",
}
_GEMMS = {"softmax": "lce_logits", "dlogits": "lce_dlogits", "rows": "lce_dx", "store": "lce_dx"}


def name_of(kernel: str, problem: Any) -> str:
    """The user's name for the kernel of a problem, as in `quackish.config` and `tune`."""
    if kernel == "lce_gemm":
        return "lce_dw" if problem.live == "k" else _GEMMS[problem.epilogue]
    return kernel.replace("_fwd", "_forward").replace("_bwd", "_backward")


class Choice(NamedTuple):
    config: Any
    source: str  # "forced", "user table" or "analytical"
    reason: str  # a sentence


# Incremented whenever `choose` may return something else, and when calls get another device (ops/device.py). Every
# cache that depends on a choice or on a device has it in its key, read before both, so that no call uses outdated ones.
epoch = 0
_forced: tuple[dict[str, Any], ...] = ()  # one per block, outermost first: name -> config, or fields to replace
_lock = threading.Lock()  # guards both


def choose(kernel: str, problem: Any, gpu: Gpu) -> Choice:
    """The config for `problem` on `gpu`; `kernel` is a name of kernels.find().

    Raises UnsupportedError if the kernel does not cover the problem, and ValueError if a forced config is illegal for
    it, before anything is compiled or launched.
    """
    choice, name = unforced(kernel, problem, gpu), name_of(kernel, problem)
    overrides = [forced[name] for forced in _forced if name in forced]
    if not overrides:
        return choice
    config = choice.config
    for override in overrides:
        if reason := _why_unfit(override, type(config)):
            raise ValueError(f"quackish.config: {name}{reason}\n  for {problem} on {gpu.name}")
        config = dataclasses.replace(config, **override) if isinstance(override, dict) else override
    if reason := RULES[kernel][gpu.family].why_illegal(problem, config, gpu):
        raise ValueError(f"quackish.config: {name}: {reason}\n  {config}\n  for {problem} on {gpu.name}")
    return Choice(config, "forced", f"with quackish.config({name}=...)")


def unforced(kernel: str, problem: Any, gpu: Gpu) -> Choice:
    """The choice without `quackish.config`: from the table, else analytical."""
    choice = analytical(kernel, problem, gpu)
    row = table.find(kernel, problem, gpu) if kernel in RULES else None
    if row is None:
        return choice
    try:
        config = type(choice.config)(**row.config)
        reason = RULES[kernel][gpu.family].why_illegal(problem, config, gpu)
    except TypeError as error:  # the row has unknown fields or wrong types
        reason = str(error)
    if reason is None:
        return Choice(config, "user table", f"{row.measured}, in {table.path()}")
    warn_once(f"A row of {table.path()} is not used: {reason}; in {row.config} for {problem}.", RuntimeWarning)
    return choice


def analytical(kernel: str, problem: Any, gpu: Gpu) -> Choice:
    """The choice without a table."""
    if kernel in RULES:
        rule = RULES[kernel][gpu.family].analytical
        config, module = rule(problem, gpu), rule.__module__
    else:
        config = FIXED[kernel][1](problem)
        module = type(config).__module__
    return Choice(config, "analytical", f"by the rule in {module.replace('.', '/')}.py")


# Forcing -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def config(**forced: Any) -> Iterator[None]:
    """Forces configs for the kernels launched inside the block.

        with quackish.config(rms_norm_backward=dict(num_stages=4)):
            loss.backward()

    Names are kernels: `rms_norm_forward`, `rms_norm_backward`, linear cross entropy's GEMMs `lce_logits`,
    `lce_dlogits`, `lce_dx` and `lce_dw`, and `grouped_gemm` for all GEMMs of grouped_mlp and grouped_mm. A value is a
    dict of fields to replace in the config that would have been chosen, or a whole config (`quackish.configs`). Blocks
    nest; fields of inner blocks override those of outer ones.

    Raises ValueError for an unknown kernel or field or a wrong type. If a config is illegal for a problem, the call of
    the operation raises ValueError with the field, its value and what is legal, before anything is launched. Calls on
    the portable path are not affected.

    A block applies to the whole process, because backward runs in its own threads; two threads cannot force different
    configs at the same time. Put it around calls of compiled code (`torch.compile`), not inside. A CUDA graph keeps the
    configs it was captured with. The only cost is a new kernel lookup per call after a block starts or ends.
    """
    global _forced
    for name, changes in forced.items():
        _check(name, changes)
    with changing():
        _forced += (forced,)
    try:
        yield
    finally:
        with changing():
            _forced = tuple(block for block in _forced if block is not forced)  # by identity: two blocks may be equal


@contextlib.contextmanager
def changing() -> Iterator[None]:
    """Starts a new epoch when the block ends, which changes choices or the device of calls."""
    global epoch
    with _lock:
        yield
        epoch += 1  # after the change, so that a reader of the new epoch gets the new configs


def _check(name: str, changes: Any) -> None:
    if name not in NAMES:
        raise ValueError(
            f"quackish.config: no kernel {name!r}; expected one of {', '.join(NAMES)}{did_you_mean(name, NAMES)}"
        )
    classes = dict.fromkeys(rule.config for rule in RULES[NAMES[name]].values())
    reasons = [_why_unfit(changes, config_class) for config_class in classes]
    if all(reasons):  # not for the config of any GPU family
        raise ValueError(f"quackish.config: {name}{reasons[0]}")


def _why_unfit(changes: Any, config_class: type) -> str | None:
    """Why `changes` are no config_class or a dict of its fields, to be read after the kernel's name."""
    if isinstance(changes, config_class):
        changes = {field.name: getattr(changes, field.name) for field in dataclasses.fields(config_class)}
    if not isinstance(changes, dict):
        return f" is {describe(changes)}; expected a dict of fields, or {a(config_class)}"
    fields = {field.name: field.type for field in dataclasses.fields(config_class)}
    for field, value in changes.items():
        if field not in fields:
            return f" has no field {field!r}; expected one of {', '.join(fields)}{did_you_mean(str(field), fields)}"
        if type(value) is not fields[field]:
            return f": {field} is {describe(value)}; expected {a(fields[field])}"
    return None


def reload() -> None:
    """Rereads the table at its next use. Call after writing it or changing the config folder."""
    with changing():
        table.rows.cache_clear()
