"""Losses of language models: which forwards work without logits, by trial, and the patched classes."""

import copy
import dataclasses
import functools
import inspect
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils import ModelOutput

import quackish
from quackish.errors import UnsupportedError, a
from quackish.integrations.plain import warn_unless_compiling, why_output_differs, why_weights_unsupported
from quackish.integrations.transformers.logits import Logits, WithoutLogits
from quackish.integrations.transformers.sharded_head import loss_of_sharded_head
from quackish.integrations.transformers.subclass import subclass, unpatched_class
from quackish.integrations.transformers.trial import Random, difference, isolated, reason, shell
from quackish.once import once


class HeadOptions(NamedTuple):
    """Options of `quackish.linear_cross_entropy`."""

    schedule: str = "auto"
    chunk_size: int | None = None
    memory_limit: int | None = None


@functools.cache
def head_class(options: HeadOptions) -> type:
    """A subclass of nn.Linear whose forward returns the loss if it gets a target. Cached."""

    def forward(self, input: Tensor, target: Tensor | None = None, **kwargs) -> Tensor:
        """The logits; with a target the loss. It is computed here because FSDP gathers the weight for this forward."""
        if target is None:
            return nn.Linear.forward(self, input)
        weight = self.weight  # read once: a parametrization computes it, and may change its state
        is_sharded = all(type(t).__name__ == "DTensor" for t in (input, weight))
        loss_function = loss_of_sharded_head if is_sharded else quackish.linear_cross_entropy
        return loss_function(input, weight, target, linear_bias=self.bias, **options._asdict(), **kwargs)

    return subclass(nn.Linear, forward, (head_class, options), computes_loss=True)


@functools.cache
def model_class(base: type, head_name: str, options: HeadOptions) -> type:
    """A subclass of a language model whose forward computes the loss without logits. Cached."""
    names = list(inspect.signature(base.forward).parameters)[1:]  # without self

    def forward(self, *args, skip_logits: bool | None = None, use_token_scaling: bool = False, **kwargs):
        if use_token_scaling:
            raise UnsupportedError("use_token_scaling is True, expected False: TRL's dft loss is not supported")
        named = dict(zip(names[: len(args)], args, strict=True), **kwargs)
        if _skips_logits(self, head_name, skip_logits, named):
            return _forward_without_logits(base, self, head_name, **named)
        return base.forward(self, *args, **kwargs)

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Patches the new head of resize_token_embeddings."""
        base.set_output_embeddings(self, new_embeddings)
        if type(new_embeddings) is nn.Linear:
            new_embeddings.__class__ = head_class(options)

    made_by = model_class, base, head_name, options
    return subclass(base, forward, made_by, head_name=head_name, set_output_embeddings=set_output_embeddings)


def _skips_logits(model: nn.Module, head_name: str, skip_logits: bool | None, named: dict) -> bool:
    """True if this call computes the loss without logits. named: the arguments of forward."""
    if skip_logits is None:
        logits_to_keep = named.get("logits_to_keep", 0)  # any other value requests logits
        skip_logits = model.training and isinstance(logits_to_keep, int) and logits_to_keep == 0
    has_labels = named.get("labels") is not None or named.get("shift_labels") is not None
    if not skip_logits or not has_labels or model.loss_function is not ForCausalLMLoss:
        return False
    # An attribute of the instance: PEFT's modules_to_save and FSDP forward arguments and attributes to what they wrap.
    why = why_bypassed(getattr(model, head_name))
    if why:
        warn_unless_compiling(f"{head_name}: {why}. The loss is computed from full logits.")
    return not why


# Modules that call the module they wrap with all arguments, and return what it returns.
_WRAPPERS = (
    "peft.utils.other.ModulesToSaveWrapper",
    "torch._dynamo.eval_frame.OptimizedModule",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel",
    "torch.nn.modules.container.ModuleDict",  # in ModulesToSaveWrapper
)


def why_bypassed(head: nn.Module) -> str:
    """Says why a patched model computes the loss without its head; "" if it uses it.

    This is called in every step.
    """
    kind = type(head)
    if getattr(kind, "computes_loss", False):
        return why_output_differs(head) or why_weights_unsupported(head)
    name = f"{kind.__module__}.{kind.__name__}"
    if name in _WRAPPERS:
        is_compiled = kind.__name__ == "OptimizedModule"  # which has a forward of its own on each instance
        whys = [why_bypassed(child) for child in head.children()]
        return next(filter(None, whys), "" if is_compiled else why_output_differs(head))
    if is_adapted(head):
        return f"it is {name}; leave it out of PEFT's target_modules to use quackish.linear_cross_entropy"
    return f"it is {name}, expected the patched head; call revert(model) and apply(model) after it is replaced"


def is_adapted(head: nn.Module) -> bool:
    """True if PEFT's LoRA or another adapter changes the logits, so that the loss needs full logits."""
    return hasattr(head, "base_layer")


def _forward_without_logits(
    base: type,
    model: nn.Module,
    head_name: str,
    *,
    labels: Tensor | None = None,
    return_dict: bool | None = None,
    return_token_accuracy: bool = False,
    **kwargs,
):
    """The output of the original forward, without logits."""
    view = WithoutLogits(model, head_name, return_token_accuracy)
    if labels is None:
        labels = kwargs["shift_labels"]  # the forward computes the loss if there are labels
    output = base.forward(view, labels=labels, return_dict=True, **kwargs)
    fields = {name: value for name, value in output.items() if not isinstance(value, Logits)}
    if return_token_accuracy:
        fields["token_accuracy"] = view.token_accuracy
    output = _without_logits(type(output), return_token_accuracy)(**fields)
    return_dict = model.config.return_dict if return_dict is None else return_dict
    return output if return_dict else output.to_tuple()


_output_classes: dict[tuple, type[ModelOutput]] = {}


def _without_logits(kind: type[ModelOutput], has_token_accuracy: bool) -> type[ModelOutput]:
    """A class of outputs whose tuples have None in the place of logits, where others leave None out.

    So output[1], and with return_dict=False what is second, is None instead of the next field, such as the cache.
    """
    key = kind, has_token_accuracy
    if torch.compiler.is_compiling():  # it cannot trace the making of a class, which a trial has made
        return _output_classes.get(key, kind)
    return once(_output_classes, key, _make_output_class, kind, has_token_accuracy)


def _make_output_class(kind: type[ModelOutput], has_token_accuracy: bool) -> type[ModelOutput]:
    def to_tuple(self):
        names = [f.name for f in dataclasses.fields(self)]
        return tuple(getattr(self, name) for name in names if name in self or name == "logits")

    fields, methods = [("token_accuracy", Tensor | None, None)], dict(to_tuple=to_tuple)
    if not has_token_accuracy:
        fields, methods["__reduce__"] = [], lambda self: kind(**self).__reduce__()  # a class that pickle finds
    return dataclasses.make_dataclass(kind.__name__, fields, bases=(kind,), namespace=methods)


# Trials ---------------------------------------------------------------------------------------------------------------


def base_model(model: nn.Module) -> nn.Module:
    """The model that PEFT wraps; any other model as it is."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


_trials: dict[tuple, str] = {}


def head_name_of(model: nn.Module) -> str | None:
    """The attribute of a model that holds its head; None if the head is no submodule of its own."""
    head = model.get_output_embeddings()
    return next((name for name, child in model.named_children() if child is head), None)


def why_unsupported(model: nn.Module) -> str:
    """Says why a model's loss is left to Transformers; "" if quackish can compute it.

    model: without PEFT's wrapper.
    """
    if not isinstance(model, PreTrainedModel):
        return f"{a(type(model))} is no model of Transformers"
    head_name = head_name_of(model)
    if head_name is None:
        return "it has no output embeddings as a submodule of its own"
    if "forward" in vars(model):
        return "its forward was replaced on the instance, as hooks of accelerate do"
    if model.loss_function is not ForCausalLMLoss:
        return f"its loss_function is {model.loss_function}, expected ForCausalLMLoss"
    head = getattr(model, head_name)
    linears = linears_of(head)
    if is_adapted(head):
        return f"{head_name} is adapted by PEFT, expected a torch.nn.Linear: leave it out of PEFT's target_modules"
    if not linears:
        return f"{head_name} is {a(type(head))}, expected a torch.nn.Linear"
    for module in (head, *linears):
        if why := why_output_differs(module, ignored=()) or why_weights_unsupported(module):
            return f"{head_name}: {why}"
    base, classes, has_bias = unpatched_class(model), linears[0].out_features, linears[0].bias is not None
    key = base, base.forward, head_name, classes, has_bias, model.config.to_json_string()
    if key not in _trials:
        try:
            with isolated():
                _trials[key] = _try(model, base, head_name, classes, has_bias)
        except Exception as error:  # anything a class's forward may raise
            return reason(error)
    return _trials[key]


def linears_of(head: nn.Module) -> list[nn.Module]:
    """The linear layers that compute the logits: several in PEFT's modules_to_save, none in other wrappers."""
    is_choice = "modules_to_save" in head._modules
    return [m for m in (head.modules() if is_choice else (head,)) if unpatched_class(m) is nn.Linear]


class _Backbone(nn.Module):
    """Stands for a part of a model that is not its head: returns the same hidden states in every call.

    Its attributes are the part's, with a `_Backbone` for each submodule.
    """

    def __init__(self, part: nn.Module, hidden: Tensor):
        super().__init__()
        self.__dict__.update(_part=part, _hidden=hidden)

    def forward(self, *args, **kwargs):
        return _BackboneOutput(last_hidden_state=self._hidden)

    def __getattr__(self, name: str):
        value = getattr(self._part, name)
        return _Backbone(value, self._hidden) if isinstance(value, nn.Module) else value


@dataclasses.dataclass
class _BackboneOutput(ModelOutput):
    last_hidden_state: Tensor | None = None

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return None  # no cache, attentions or router logits


def _try(model: nn.Module, base: type, head_name: str, classes: int, has_bias: bool) -> str:
    """Says how the patched loss of a small model, or a gradient, differs from its own; "" if none does."""
    random, batch, length, size = Random(), 2, 5, 8
    hidden = random.normal(batch, length, size).requires_grad_()
    small = shell(model, base)
    small.config = _without_router_logits(model.config)
    for name, child in model.named_children():
        if name not in small._modules:
            small.add_module(name, _Backbone(child, hidden))
    head = nn.Linear(size, classes, bias=has_bias, device="meta")
    head.weight = nn.Parameter(random.normal(classes, size))
    if has_bias:
        head.bias = nn.Parameter(random.normal(classes))
    setattr(small, head_name, head)

    ids = random.integers(min(classes, 50), batch, length)
    labels = random.integers(classes, batch, length)
    labels[0, 1:3] = -100
    leaves = [hidden, *head.parameters()]

    def run(patched: bool, training: bool, **arguments) -> tuple[ModelOutput, list[Tensor]]:
        small.__class__ = model_class(base, head_name, HeadOptions()) if patched else base
        head.__class__ = head_class(HeadOptions()) if patched else nn.Linear
        output = small.train(training)(input_ids=ids, labels=labels, **arguments)
        return output, [output.loss, *torch.autograd.grad(output.loss, leaves)]

    for arguments in (dict(), dict(num_items_in_batch=torch.tensor(3)), dict(shift_labels=labels.flip(1))):
        output, ours = run(patched=True, training=True, **arguments)
        for training in (True, False):
            _, theirs = run(patched=False, training=training, **arguments)
            worst = max(difference(a, b) for a, b in zip(ours, theirs, strict=True))
            if not worst <= 1e-4:
                return f"its loss is not the cross entropy of lm_head's logits: it or a gradient differs by {worst:.1g}"
        if output.get("logits") is not None:
            return f"its forward does not compute logits with self.{head_name}, or not the loss with self.loss_function"
    return ""


def _without_router_logits(config):
    """A copy of the config without router logits, which a `_Backbone` does not have."""
    config = copy.deepcopy(config)
    for part in (config, config.get_text_config()):
        if getattr(part, "output_router_logits", None):
            part.output_router_logits = False
    return config
