"""quackish's RMSNorm, linear cross entropy and experts in Hugging Face Transformers.

    from quackish.integrations.transformers import apply

    apply(model)

Patching a module changes its class to a subclass with another `forward`. So copies, pickles and replicas are patched
and use their own parameters.
"""

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypedDict, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import modeling_outputs
from transformers.loss.loss_utils import ForCausalLMLoss
from typing_extensions import Unpack

import quackish
from quackish.errors import PortablePathWarning, UnsupportedError, warn_once
from quackish.types import Schedule

Model = TypeVar("Model", bound=nn.Module)


class _Family(NamedTuple):
    """How `<name>RMSNorm` and `<name>ForCausalLM` of a family differ from Llama's."""

    weight_offset: float = 0.0  # y = xhat * (weight_offset + weight)
    norm_keeps_dtype: bool = False  # y has x's dtype; else the promoted dtype of x and weight
    softcap: Callable[[nn.Module], float | None] = lambda model: None
    logit_scale: Callable[[nn.Module], float | None] = lambda model: None


_LIKE_LLAMA = (
    "Llama", "Mistral", "Mixtral", "Olmo", "Olmoe", "Phi", "Phi3", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "SmolLM3",
)  # fmt: skip
_FAMILIES = {
    **dict.fromkeys(_LIKE_LLAMA, _Family()),
    "Cohere": _Family(logit_scale=lambda model: model.logit_scale),
    "Cohere2": _Family(logit_scale=lambda model: model.logit_scale),
    "Gemma": _Family(1.0, True),
    "Gemma2": _Family(1.0, True, softcap=lambda model: model.config.final_logit_softcapping),
    "Gemma3": _Family(1.0, True, softcap=lambda model: model.config.final_logit_softcapping),
    "Granite": _Family(logit_scale=lambda model: 1 / model.config.logits_scaling),
    "Olmo2": _Family(norm_keeps_dtype=True),
    "Olmo3": _Family(norm_keeps_dtype=True),
}


class _HeadOptions(NamedTuple):
    """Options of `quackish.linear_cross_entropy`."""

    schedule: str
    chunk_size: int | None
    memory_limit: int | None


# Attributes that Transformers' decorator use_experts_implementation sets; 5.17 has no has_post_expert_norm.
_PLAIN_EXPERTS = dict(
    has_gate=True, is_concatenated=True, is_transposed=False, has_bias=False, has_post_expert_norm=False
)
_SILU = ("SiLU", "SiLUActivation", "silu")  # two classes and torch's function


class _ApplyOptions(TypedDict, total=False):
    norms: bool
    head: bool
    experts: bool
    schedule: Schedule
    chunk_size: int | None
    memory_limit: int | None


def apply(
    model: Model,
    *,
    norms: bool = True,
    head: bool = True,
    experts: bool = False,
    schedule: Schedule = "auto",
    chunk_size: int | None = None,
    memory_limit: int | None = None,
) -> Model:
    """Patches `model` to run quackish's RMSNorm and linear cross entropy; returns `model`.

    Call it before the model is wrapped in DDP, FSDP or `torch.compile`, and before or after PEFT wraps it. Parameters,
    the state dict and `forward`'s signature do not change. docs/transformers.md says what runs when.

    Args:
        model: a causal language model of Transformers, or a PEFT model of one. With head=False any module.
        norms: patch RMSNorms, including Q/K norms. torch.compile still uses the original ones, and fuses them.
        head: patch the loss. In training mode with labels, the output has `loss`, and `logits` is None. In a call,
            `skip_logits=False` computes logits too, `skip_logits=True` skips them in evaluation mode too, and
            `return_token_accuracy=True` adds `token_accuracy` to an output without logits.
        experts: run mixtures of experts with `quackish.moe_mlp`, which supports some models' experts.
        schedule, chunk_size, memory_limit: as in `quackish.linear_cross_entropy`.

    Raises:
        ValueError: the model is not supported or already patched. Nothing is patched.
        UnsupportedError: experts=True and the model has no supported experts. Nothing is patched.
    """
    sharded = [type(module).__name__ for module in model.modules() if type(module).__name__.startswith("FSDP")]
    if sharded:
        raise ValueError(f"apply: the model has a {sharded[0]}, expected a model before FSDP shards it")
    patches = _norm_patches(model) if norms else []
    if head:
        patches += _head_patches(model, _HeadOptions(schedule, chunk_size, memory_limit))
    if experts:
        patches += _experts_patches(model)
    if not patches:
        raise ValueError(f"apply: nothing to patch in a {type(model).__name__} with norms={norms} and head={head}")
    for module, patched in patches:
        module.__class__ = patched
    return model


def revert(model: Model) -> Model:
    """Undoes `apply`; returns `model`. Does nothing to a model without patches."""
    _unpatch(_patched(model))
    return model


@contextlib.contextmanager
def applied(model: Model, **options: Unpack[_ApplyOptions]) -> Iterator[Model]:
    """Context manager: `apply(model, **options)`, reverted on exit. Earlier patches stay."""
    before = _patched(model)
    apply(model, **options)
    try:
        yield model
    finally:
        _unpatch(_patched(model) - before)


def _patched(model: nn.Module) -> set[nn.Module]:
    return {module for module in model.modules() if hasattr(type(module), "_quackish_unpatched")}


def _unpatch(modules: set[nn.Module]) -> None:
    for module in modules:
        if "_quackish_unpatched" not in vars(type(module)):  # FSDP2 subclassed the patched class
            raise ValueError(
                f"revert: a {type(module).__name__} was wrapped after apply(); expected the model before fully_shard"
            )
    for module in modules:
        module.__class__ = type(module)._quackish_unpatched


# Patches: (module, patched class) -------------------------------------------------------------------------------------


def _norm_patches(model: nn.Module) -> list[tuple[nn.Module, type]]:
    patches = []
    for name, module in model.named_modules():
        family_name, is_norm, suffix = type(module).__name__.partition("RMSNorm")
        if is_norm and (family_name not in _FAMILIES or suffix):
            raise ValueError(
                f"apply: {name} is a {type(module).__name__} of {type(module).__module__}, expected an RMSNorm of "
                f"Transformers' {', '.join(_FAMILIES)}; norms=False does not patch norms, head=False the loss"
            )
        if is_norm:
            _check_is_unpatched(module)
            eps = "variance_epsilon" if hasattr(module, "variance_epsilon") else "eps"
            patches.append((module, _norm_class(type(module), family_name, eps)))
    return patches


def _head_patches(model: nn.Module, options: _HeadOptions) -> list[tuple[nn.Module, type]]:
    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT's
    bases = [base.__name__ for base in type(model).__mro__]  # users may subclass it
    family = next((name for name in _FAMILIES if f"{name}ForCausalLM" in bases), None)
    if family is None:
        raise ValueError(
            f"apply: model is a {type(model).__name__}, expected a ForCausalLM of {', '.join(_FAMILIES)}, before it is "
            "wrapped or compiled; head=False patches norms only"
        )
    _check_is_unpatched(model)
    if model.loss_function is not ForCausalLMLoss:
        raise ValueError(f"apply: the model's loss_function is {model.loss_function}, expected ForCausalLMLoss")
    linears = [module for module in model.lm_head.modules() if type(module) is nn.Linear]  # several in modules_to_save
    if not linears:
        raise ValueError(f"apply: lm_head is a {type(model.lm_head).__name__}, expected a torch.nn.Linear")
    if _is_adapted(model.lm_head):
        linears = []
    for linear in linears:
        _check_is_unpatched(linear)
    return [
        (model, _causal_lm_class(type(model), family, options)),
        *((linear, _head_class(options)) for linear in linears),
    ]


def _experts_patches(model: nn.Module) -> list[tuple[nn.Module, type]]:
    patches = []
    supported = "SwiGLU and weights [gate; up] without biases, as in Qwen 3 MoE, OLMoE and Mixtral"
    for name, module in model.named_modules():
        if hasattr(type(module), "_apply_gate"):  # the decorator adds it
            if why := _why_unsupported(module):
                raise UnsupportedError(
                    f"apply: {name} is a {type(module).__name__} with {why}; expected {supported}. experts=False does "
                    "not patch experts"
                )
            _check_is_unpatched(module)
            patches.append((module, _experts_class(type(module))))
    if not patches:
        raise UnsupportedError(
            f"apply: a {type(model).__name__} has no experts with a selectable implementation; expected experts with "
            f"{supported}, or experts=False"
        )
    return patches


def _why_unsupported(experts: nn.Module) -> str:
    """How these experts differ from what `quackish.moe_mlp` supports; "" if they do not."""
    differences = []
    for flag, expected in _PLAIN_EXPERTS.items():
        value = getattr(experts, flag, expected)
        if value != expected:
            differences.append(f"{flag}={value}")
    if type(experts)._apply_gate.__module__ != "transformers.integrations.moe":  # not the default gate
        return ", ".join([*differences, "a custom gate"])
    activation = getattr(experts.act_fn, "__name__", type(experts.act_fn).__name__)
    if activation not in _SILU:
        differences.append(f"activation {activation}")
    return ", ".join(differences)


def _is_adapted(lm_head: nn.Module) -> bool:
    """True if PEFT's LoRA or another adapter changes the logits, so that the loss needs full logits."""
    return hasattr(lm_head, "base_layer")


def _check_is_unpatched(module: nn.Module) -> None:
    if hasattr(type(module), "_quackish_unpatched"):
        raise ValueError("apply: the model is patched by quackish already; revert(model) first")
    forward = module.forward
    origin = getattr(forward, "__module__", None) or type(forward).__module__
    if "forward" in vars(module) or origin.partition(".")[0] not in ("transformers", "torch"):
        name = getattr(forward, "__qualname__", type(forward).__name__)
        raise ValueError(
            f"apply: forward of a {type(module).__name__} was replaced by {origin}.{name}; expected a model that "
            "nothing else has patched (Liger, kernels, hooks of accelerate, tensor parallelism)"
        )


# Patched classes: cached, so that compiled code sees few classes ------------------------------------------------------


def _subclass(base: type, forward: Callable, made_by: tuple, **attributes) -> type:
    """A subclass with another forward, but equal name (saved in config.json) and signature (read by Trainer).

    made_by: the function that makes this class, and its arguments. They are pickled instead of the class, which pickle
    cannot find by its name.
    """

    @functools.wraps(base.__init__)
    def __init__(self, *args, **kwargs):  # type(model)(config) runs it; copies and pickles do not
        if type(self) is patched:
            self.__class__ = base
            warnings.warn(
                f"{base.__name__}: this class belongs to a patched module. The new {base.__name__} is not patched; "
                "call quackish.integrations.transformers.apply on the new model",
                PortablePathWarning,
                stacklevel=2,
            )
        base.__init__(self, *args, **kwargs)

    def __reduce_ex__(self, protocol):
        reduced = base.__reduce_ex__(self, max(protocol, 2))
        return (_new, made_by, *reduced[2:]) if type(self) is patched else reduced  # not FSDP's subclass

    names = dict(__module__=base.__module__, __qualname__=base.__qualname__, __doc__=base.__doc__)
    methods = dict(__init__=__init__, __reduce_ex__=__reduce_ex__, forward=functools.wraps(base.forward)(forward))
    patched = type(base.__name__, (base,), {**names, **methods, **attributes, "_quackish_unpatched": base})
    return patched


def _new(make_class: Callable[..., type], *args) -> nn.Module:
    """A patched module that pickle fills."""
    patched = make_class(*args)
    return patched.__new__(patched)


@functools.cache
def _norm_class(base: type, family_name: str, eps: str) -> type:
    family = _FAMILIES[family_name]

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # the compiler fuses it with its neighbors
            return base.forward(self, x)
        weight, offset = self.weight, family.weight_offset
        dtype = x.dtype if family.norm_keeps_dtype else torch.promote_types(x.dtype, weight.dtype)
        return quackish.rms_norm(x, weight, eps=getattr(self, eps), weight_offset=offset, out_dtype=dtype)

    return _subclass(base, forward, (_norm_class, base, family_name, eps))


@functools.cache
def _experts_class(base: type) -> type:
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = quackish.moe_mlp(hidden_states, top_k_index, top_k_weights, self.gate_up_proj, self.down_proj)
        return out.to(hidden_states.dtype)  # under autocast, out has autocast's dtype

    return _subclass(base, forward, (_experts_class, base))


@functools.cache
def _head_class(options: _HeadOptions) -> type:
    quackish.LinearCrossEntropyLoss(1, 1, **options._asdict())  # checks the options before the first step

    def forward(self, input: Tensor, target: Tensor | None = None, **kwargs) -> Tensor:
        """The logits; with a target the loss. It is computed here because FSDP gathers the weight for this forward."""
        if target is None:
            return nn.Linear.forward(self, input)
        is_sharded = all(type(t).__name__ == "DTensor" for t in (input, self.weight))
        loss_function = _loss_of_sharded_head if is_sharded else quackish.linear_cross_entropy
        return loss_function(input, self.weight, target, linear_bias=self.bias, **options._asdict(), **kwargs)

    return _subclass(nn.Linear, forward, (_head_class, options), computes_loss=True)


def _loss_of_sharded_head(input: Tensor, weight: Tensor, target: Tensor, *, return_stats: bool, **options) -> Tensor:
    """A replicated DTensor (ranks, ranks) full of the loss: not square any more if ColwiseParallel then shards it."""
    from torch.distributed.tensor import DTensor, Replicate

    from quackish import parallel

    if return_stats:
        raise UnsupportedError("return_token_accuracy is True, expected False: lm_head is sharded by ColwiseParallel")
    loss, mesh = parallel.linear_cross_entropy(input, weight, target, **options), weight.device_mesh
    copies = loss.expand(mesh.size(), mesh.size())
    return DTensor.from_local(copies, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _from_sharded_head(copies: Tensor) -> Tensor:
    """The loss in what `_loss_of_sharded_head` returns, after ColwiseParallel."""
    copies = copies.to_local() if type(copies).__name__ == "DTensor" else copies
    if copies.shape[0] != copies.shape[1]:
        raise UnsupportedError(
            "lm_head is sharded by a ColwiseParallel whose output_layouts shard the logits; expected "
            "ColwiseParallel(output_layouts=Replicate()). quackish.parallel.linear_cross_entropy then computes the "
            "loss, and calls that need logits get all of them"
        )
    return copies[0, 0]


@functools.cache
def _causal_lm_class(base: type, family_name: str, options: _HeadOptions) -> type:
    names = list(inspect.signature(base.forward).parameters)[1:]  # without self
    balancing_loss = inspect.unwrap(base.forward).__globals__.get("load_balancing_loss_func")  # only in MoE models

    def forward(self, *args, skip_logits: bool | None = None, use_token_scaling: bool = False, **kwargs):
        if use_token_scaling:
            raise UnsupportedError("use_token_scaling is True, expected False: TRL's dft loss is not supported")
        named = dict(zip(names[: len(args)], args, strict=True), **kwargs)
        if _skips_logits(self, skip_logits, named):
            return _forward_to_loss(self, _FAMILIES[family_name], balancing_loss, **named)
        return base.forward(self, *args, **kwargs)

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Patches the new head of resize_token_embeddings."""
        base.set_output_embeddings(self, new_embeddings)
        if type(new_embeddings) is nn.Linear:
            new_embeddings.__class__ = _head_class(options)

    made_by = _causal_lm_class, base, family_name, options
    return _subclass(base, forward, made_by, set_output_embeddings=set_output_embeddings)


def _skips_logits(model: nn.Module, skip_logits: bool | None, named: dict) -> bool:
    if skip_logits is None:
        logits_to_keep = named.get("logits_to_keep", 0)  # any other value requests logits
        skip_logits = model.training and isinstance(logits_to_keep, int) and logits_to_keep == 0
    has_labels = named.get("labels") is not None or named.get("shift_labels") is not None
    if not skip_logits or not has_labels or model.loss_function is not ForCausalLMLoss:
        return False
    # An attribute of the instance: PEFT's modules_to_save and FSDP forward arguments and attributes to what they wrap.
    if getattr(model.lm_head, "computes_loss", False):
        return True
    if not torch.compiler.is_compiling():
        fix = "call revert(model) and apply(model) after it is replaced"
        if _is_adapted(model.lm_head):
            fix = "leave it out of PEFT's target_modules"
        warn_once(
            f"lm_head is a {type(model.lm_head).__module__}.{type(model.lm_head).__name__}: the loss is computed from "
            f"full logits. To use quackish.linear_cross_entropy, {fix}."
        )
    return False


@dataclass
class CausalLMOutput(modeling_outputs.CausalLMOutputWithPast):
    token_accuracy: Tensor | None = None


@dataclass
class MoeCausalLMOutput(modeling_outputs.MoeCausalLMOutputWithPast):
    token_accuracy: Tensor | None = None


def _forward_to_loss(
    model: nn.Module,
    family: _Family,
    balancing_loss: Callable | None,
    *,
    labels: Tensor | None = None,
    logits_to_keep: int | Tensor = 0,
    return_dict: bool | None = None,
    return_token_accuracy: bool = False,
    **kwargs,
):
    """The output of the original forward, without logits."""
    if balancing_loss is not None and kwargs.get("output_router_logits") is None:
        kwargs["output_router_logits"] = model.config.output_router_logits
    outputs = model.model(**kwargs, return_dict=True)
    hidden = outputs.last_hidden_state

    ignore_index = kwargs.get("ignore_index", -100)
    target, shape = kwargs.get("shift_labels"), hidden.shape[:-1]
    if target is None:  # shift labels instead of hidden states, whose slice would be copied
        target = F.pad(labels[..., 1:], (0, 1), value=ignore_index)
    if target.numel() != shape.numel():
        raise ValueError(f"labels have shape {tuple(target.shape)}, expected {tuple(shape)}, one for each token")
    target = target.to(hidden.device).reshape(shape)
    num_items, divisor = kwargs.get("num_items_in_batch"), None
    if isinstance(num_items, float):
        num_items = torch.full((), num_items, device=hidden.device)
    elif isinstance(num_items, Tensor):
        num_items = num_items.to(hidden.device)
        if num_items.dim() > 0:  # under DataParallel, which expects a loss of that shape
            num_items, divisor = 1, num_items
    loss = model.lm_head(
        hidden,
        target=target,
        ignore_index=ignore_index,
        num_items=num_items,
        softcap=family.softcap(model),
        logit_scale=family.logit_scale(model),
        return_stats=return_token_accuracy,
    )
    fields = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
    if return_token_accuracy:
        loss, stats = loss
        live = target != ignore_index
        fields["token_accuracy"] = ((stats.predicted == target) & live).sum() / live.sum().clamp(min=1)
    if loss.dim() > 0:
        loss = _from_sharded_head(loss)
    if divisor is not None:
        loss = loss / divisor

    if balancing_loss is None:
        output = CausalLMOutput(loss=loss, **fields)
    else:
        aux_loss = None
        if kwargs["output_router_logits"]:
            experts = model.num_experts, model.num_experts_per_tok
            aux_loss = balancing_loss(outputs.router_logits, *experts, kwargs.get("attention_mask"))
            loss = loss + model.router_aux_loss_coef * aux_loss.to(loss.device)
        output = MoeCausalLMOutput(loss=loss, aux_loss=aux_loss, **fields)
    return_dict = model.config.return_dict if return_dict is None else return_dict
    return output if return_dict else output.to_tuple()
