"""Lists what is patched in a model, what is not, and why."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from torch import nn

from quackish.errors import describe
from quackish.integrations.plain import why_weights_unsupported
from quackish.integrations.transformers import experts, head, mlps, norms, residuals, rotaries, scaled_experts
from quackish.integrations.transformers.subclass import is_patched

Kind = Literal["norm", "loss", "experts", "mlp", "rotary", "residuals"]


@dataclass(frozen=True)
class Entry:
    """A module that quackish patched, could patch, or cannot patch."""

    name: str  # as in model.named_modules()
    module: nn.Module = field(repr=False)
    kind: Kind
    is_patched: bool
    reason: str = ""  # why it cannot be patched, or why calls of a patched one run Transformers' code

    @property
    def is_expected(self) -> bool:
        """False for LayerNorms, which quackish has no function for, and for MLPs and rotations of other forms."""
        return self.kind in ("loss", "experts") or "RMSNorm" in type(self.module).__name__


class Report(list[Entry]):
    """What `report` returns: a list of `Entry`. Printed, it has one line for each class and reason."""

    @property
    def patched(self) -> list[Entry]:
        return [entry for entry in self if entry.is_patched]

    @property
    def left(self) -> list[Entry]:
        return [entry for entry in self if not entry.is_patched]

    def __str__(self) -> str:
        groups: dict[tuple, list[Entry]] = {}
        for entry in self:
            state = entry.reason or "not patched; apply(model) can"
            if entry.is_patched:
                state = f"patched, but runs Transformers' code: {entry.reason}" if entry.reason else "patched"
            groups.setdefault((entry.kind, type(entry.module).__name__, state), []).append(entry)
        lines = []
        for (kind, name, state), entries in groups.items():
            where = entries[0].name or "the model"
            more = f" and {len(entries) - 1} more" if len(entries) > 1 else ""
            lines.append(f"{kind}: {name} ({where}{more}): {state}")
        return "\n".join(lines)


def report(model: nn.Module) -> Report:
    """Lists the norms, losses, MLPs, experts, rotations and layers of a model: patched, or with a reason. Print it.

    Works before `apply` too. Changes nothing. After FSDP shards the model, only patched modules are examined in full.
    """
    check_is_module("report", model)
    return Report(examine(model))


def check_is_module(function: str, model: nn.Module) -> None:
    """Raises TypeError for anything but a module, such as a model's name."""
    if not isinstance(model, nn.Module):
        hint = (
            f": load it first, with AutoModelForCausalLM.from_pretrained({model!r})" if isinstance(model, str) else ""
        )
        raise TypeError(f"{function}: model is {describe(model)}, expected a torch.nn.Module{hint}")


def is_experts(module: nn.Module) -> bool:
    """True for a module that may be patched as experts: it holds their weights, or is a block of them."""
    is_plain = experts.first_matrix(module) is not None and not scaled_experts.is_inner(module)
    return is_plain or scaled_experts.is_block(module)


def experts_form(module: nn.Module) -> experts.Form | str:
    """The form of a module for which `is_experts` holds, or why it has none."""
    return scaled_experts.form_of(module) if scaled_experts.is_block(module) else experts.form_of(module)


def _why_bypassed(model: nn.Module, name: str) -> str:
    """Says why the parent of experts does not call them; "" if it does.

    Kernels of a hub replace the forward of the parent, and read the weights of the experts there.
    """
    parent = model.get_submodule(name.rpartition(".")[0])
    if "forward" not in vars(parent):
        return ""
    return f"the forward of its {type(parent).__name__} was replaced on the instance"


def _why(proof: tuple | str) -> str:
    """The reason that a trial gave; "" if it gave a formula."""
    return proof if isinstance(proof, str) else ""


def _why_experts(patched: nn.Module) -> str:
    """Says why patched experts run Transformers' code; "" if they do not."""
    is_block = scaled_experts.is_block(patched)
    return scaled_experts.why_bypassed(patched.experts) if is_block else why_weights_unsupported(patched)


def _why_loss(patched: nn.Module) -> str:
    """Says why a patched model computes its loss with Transformers' code; "" if it does not."""
    head_name = type(patched).head_name
    why = head.why_bypassed(getattr(patched, head_name))
    return f"{head_name}: {why}" if why else ""


def examine(model: nn.Module, kinds: Sequence[Kind] = get_args(Kind)) -> Iterator[Entry]:
    """An entry for each norm, MLP, module of experts, attention with a rotation and layer, and one for the loss."""
    for name, module in model.named_modules():
        done = is_patched(module)
        if "norm" in kinds and norms.is_norm(module):
            reason = why_weights_unsupported(module) if done else _why(norms.formula_of(module))
            yield Entry(name, module, "norm", done, reason)
        if "experts" in kinds and is_experts(module):
            reason = _why_experts(module) if done else _why_bypassed(model, name) or _why(experts_form(module))
            yield Entry(name, module, "experts", done, reason)
        if "mlp" in kinds and mlps.is_mlp(module):
            reason = mlps.why_bypassed(module, type(module).mlp_form) if done else _why(mlps.form_of(module))
            yield Entry(name, module, "mlp", done, reason)
        if "rotary" in kinds and rotaries.called_by(module):
            reason = rotaries.why_bypassed(module) if done else _why(rotaries.forms_of(module))
            yield Entry(name, module, "rotary", done, reason)
        if "residuals" in kinds and residuals.is_layer(module):
            yield Entry(name, module, "residuals", done, residuals.why_unsupported(module))
    if "loss" in kinds:
        whole = head.base_model(model)
        name = next(name for name, module in model.named_modules() if module is whole)
        done = hasattr(type(whole), "head_name")  # a patched norm may be the whole model
        yield Entry(name, whole, "loss", done, _why_loss(whole) if done else head.why_unsupported(whole))
