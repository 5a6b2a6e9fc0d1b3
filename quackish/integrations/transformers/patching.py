"""apply, revert and applied. Patching changes the class of a module, and the order of gpt-oss's expert weights."""

import contextlib
from collections.abc import Iterator
from typing import TypedDict, TypeVar

from torch import nn
from typing_extensions import Unpack

from quackish.errors import UnsupportedError, a, check_bool, refuse_unknown, warn_once
from quackish.integrations.loss_options import check_loss_options
from quackish.integrations.transformers import experts as experts_patches
from quackish.integrations.transformers import head as head_patches
from quackish.integrations.transformers import mlps as mlp_patches
from quackish.integrations.transformers import norms as norm_patches
from quackish.integrations.transformers import residuals as residual_patches
from quackish.integrations.transformers import rotaries, scaled_experts
from quackish.integrations.transformers.reports import Entry, Report, check_is_module, examine
from quackish.integrations.transformers.subclass import is_patched
from quackish.types import Schedule

Model = TypeVar("Model", bound=nn.Module)


class _ApplyOptions(TypedDict, total=False):
    """The keywords of `apply`, for `applied`."""

    norms: bool
    head: bool
    mlp: bool
    rotary: bool
    residuals: bool
    experts: bool
    strict: bool
    schedule: Schedule
    chunk_size: int | None
    memory_limit: int | None


def apply(
    model: Model,
    *,
    norms: bool = True,
    head: bool = True,
    mlp: bool = True,
    rotary: bool = True,
    residuals: bool = True,
    experts: bool = False,
    strict: bool = False,
    schedule: Schedule = "auto",
    chunk_size: int | None = None,
    memory_limit: int | None = None,
) -> Model:
    """Patches `model` to run quackish's RMSNorm, linear cross entropy, MLP and rotary embeddings; returns `model`.

    A module is patched if a trial shows that its class computes what quackish computes: results and gradients agree,
    on small random CPU tensors, up to the roundings that docs/guides/transformers.md lists. Modules that do not are
    left, with a warning, and `report(model)` says why. Call it before the model is wrapped in DDP, FSDP or
    `torch.compile`, and before or after PEFT wraps it. Parameters, the state dict and `forward`'s signature do not
    change.

    Args:
        model: a model of Transformers with a language model head, or a PEFT model of one. With head=False any module.
        norms: patch RMSNorms, including Q/K norms and torch.nn.RMSNorm. torch.compile still uses the original ones, and
            fuses them.
        head: patch the loss. In training mode with labels, the output has `loss`, and `logits` is None. In a call,
            `skip_logits=False` computes logits too, `skip_logits=True` skips them in evaluation mode too, and
            `return_token_accuracy=True` adds `token_accuracy` to an output without logits.
        mlp: run MLPs with `quackish.mlp`, while their linears are plain: not adapted, quantized, hooked or sharded.
            torch.compile still uses the original ones.
        rotary: rotate queries and keys with `quackish.rotary` in attention modules. torch.compile still uses the
            original code.
        residuals: add residuals inside patched RMSNorms and MLPs, which saves memory traffic. torch.compile still uses
            the original code.
        experts: run mixtures of experts with `quackish.moe_mlp`.
        strict: raise if an RMSNorm, the loss or, with experts=True, experts would be left.
        schedule, chunk_size, memory_limit: as in `quackish.linear_cross_entropy`.

    Raises:
        TypeError: model is no torch.nn.Module.
        ValueError: the model is patched already or sharded by FSDP; nothing of it can be patched; with strict=True,
            an RMSNorm or the loss would be left. Nothing is patched.
        UnsupportedError: strict=True and experts would be left, or there are none. Nothing is patched.
    """
    options = head_patches.HeadOptions(schedule, chunk_size, memory_limit)
    check_loss_options("apply", **options._asdict())
    check_bool("apply", norms=norms, head=head, mlp=mlp, rotary=rotary)
    check_bool("apply", residuals=residuals, experts=experts, strict=strict)
    check_is_module("apply", model)
    _check_is_whole(model)
    chosen = dict(norm=norms, loss=head, mlp=mlp, rotary=rotary, experts=experts)
    chosen["residuals"] = residuals and (norms or mlp)
    kinds = [kind for kind, is_chosen in chosen.items() if is_chosen]
    entries = list(examine(model, kinds))
    if any(entry.is_patched for entry in entries):
        raise ValueError("apply: the model is patched by quackish already; revert(model) first")
    left = [entry for entry in entries if entry.reason]
    wanted = [entry for entry in left if entry.is_expected]
    if strict and wanted:
        raise _error(wanted, f"strict=True and quackish cannot patch: {Report(wanted)}")
    if strict and experts and not any(entry.kind == "experts" for entry in entries):
        raise UnsupportedError(f"apply: strict=True, experts=True and {a(type(model))} has no experts")
    if len(left) == len(entries):
        switches = f"{norms=}, {head=}, {mlp=}, {rotary=}, {residuals=} and {experts=}"
        what = f"nothing to patch in {a(type(model))} with {switches}"
        raise _error(left, f"{what}: {Report(left)}" if left else what)
    if wanted:
        warn_once(f"apply left to Transformers: {Report(wanted)}\nreport(model) lists what was patched and what not.")
    for entry in entries:
        if not entry.reason:
            _patch(entry, model, options)
    return model


def _check_is_whole(model: nn.Module) -> None:
    """Raises ValueError for a model that FSDP has sharded."""
    sharded = [a(type(module)) for module in model.modules() if type(module).__name__.startswith("FSDP")]
    if sharded:
        raise ValueError(f"apply: the model has {sharded[0]}, expected a model before FSDP shards it")


def _error(entries: list[Entry], message: str) -> ValueError | UnsupportedError:
    """An UnsupportedError if only experts cannot be patched, else a ValueError."""
    kind = UnsupportedError if entries and all(entry.kind == "experts" for entry in entries) else ValueError
    return kind(f"apply: {message}")


def _patch(entry: Entry, model: nn.Module, options: head_patches.HeadOptions) -> None:
    """Changes the class of an entry's module and, for the loss, of its head."""
    module = entry.module
    if entry.kind == "norm":
        module.__class__ = norm_patches.norm_class(type(module), norm_patches.formula_of(module))
    elif entry.kind == "mlp":
        module.__class__ = mlp_patches.mlp_class(type(module), mlp_patches.form_of(module))
    elif entry.kind == "rotary":
        module.__class__ = rotaries.attention_class(type(module), rotaries.forms_of(module))
    elif entry.kind == "residuals":
        module.__class__ = residual_patches.layer_class(type(module))
    elif entry.kind == "experts":
        patches = scaled_experts if scaled_experts.is_block(module) else experts_patches
        patches.patch(module, patches.form_of(module))
    else:
        head_name = head_patches.head_name_of(module)
        head = getattr(module, head_name)
        module.__class__ = head_patches.model_class(type(module), head_name, options)
        for linear in head_patches.linears_of(head):
            linear.__class__ = head_patches.head_class(options)


def revert(model: Model) -> Model:
    """Undoes `apply`; returns `model`. Does nothing to a model without patches."""
    check_is_module("revert", model)
    _unpatch(_patched(model))
    return model


@contextlib.contextmanager
def applied(model: Model, **options: Unpack[_ApplyOptions]) -> Iterator[Model]:
    """Context manager: `apply(model, **options)`, reverted on exit. Earlier patches stay."""
    refuse_unknown("applied", options, _ApplyOptions.__annotations__)
    check_is_module("applied", model)
    before = _patched(model)
    apply(model, **options)
    try:
        yield model
    finally:
        _unpatch(_patched(model) - before)


def _patched(model: nn.Module) -> set[nn.Module]:
    return {module for module in model.modules() if is_patched(module)}


def _unpatch(modules: set[nn.Module]) -> None:
    """Restores classes and weights. Raises ValueError, before any change, if that is impossible."""
    for module in modules:
        if "_quackish_unpatched" not in vars(type(module)):  # as FSDP2 and parametrizations subclass it
            raise ValueError(
                f"revert: {a(type(module))} was wrapped after apply(); expected the model before "
                "fully_shard, and without parametrizations"
            )
    for module in modules:
        experts_patches.restore_weights(module)
        module.__class__ = type(module)._quackish_unpatched
