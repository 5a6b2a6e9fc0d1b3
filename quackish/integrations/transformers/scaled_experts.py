"""Experts whose inputs, not outputs, the router's scores scale, as in Llama 4.

The forward of such a block, `self.experts(hidden * scores)`, multiplies every token by every expert, most of them with
a score of 0. The patched one multiplies each token by its top k experts, and uses the block's `router`, `experts`,
`shared_expert` and `top_k`.
"""

import functools

import torch
from torch import Tensor, nn

from quackish.errors import a
from quackish.integrations.plain import warn_unless_compiling, why_output_differs, why_weights_unsupported
from quackish.integrations.transformers import experts
from quackish.integrations.transformers.experts import Form
from quackish.integrations.transformers.subclass import subclass, unpatched_class
from quackish.integrations.transformers.trial import Random, compare_trials, isolated, key_of, reason, run_trial, takes


@functools.cache
def block_class(base: type, form: Form) -> type:
    """A subclass of a block that multiplies each token by its top k experts alone. Cached."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        if why := why_bypassed(self.experts):
            warn_unless_compiling(f"experts of {a(base)}: {why}. Its own forward runs.")
            return base.forward(self, hidden_states)
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores, logits = self.router(x)
        scores, index = scores.topk(self.top_k, dim=1)
        rows = x[:, None] * scores[..., None]  # (tokens, top_k, H)
        routed = self.experts(rows.flatten(0, 1), index.reshape(-1, 1)).view_as(rows)
        return self.shared_expert(x) + routed.sum(1), logits

    return subclass(base, forward, (block_class, base, form))


def why_bypassed(inner: nn.Module) -> str:
    """Says why a patched block runs its experts on all tokens; "" if it runs the chosen ones."""
    if not getattr(type(inner), "takes_index", False):
        return f"they are {a(type(inner))}, expected the patched ones"
    return why_output_differs(inner) or why_weights_unsupported(inner)


@functools.cache
def experts_class(base: type, form: Form) -> type:
    """A subclass of a block's experts whose forward takes the index of each row's expert. Cached."""

    def forward(self, hidden_states: Tensor, index: Tensor | None = None) -> Tensor:
        if index is None:
            return base.forward(self, hidden_states)
        ones = torch.ones(index.shape, dtype=hidden_states.dtype, device=hidden_states.device)
        return experts.run(self, form, hidden_states, index, ones)

    return subclass(base, forward, (experts_class, base, form), takes_index=True)


def patch(block: nn.Module, form: Form) -> None:
    """Changes the classes of a block and of its experts."""
    block.__class__ = block_class(type(block), form)
    block.experts.__class__ = experts_class(type(block.experts), form)


# Trials ---------------------------------------------------------------------------------------------------------------


def is_block(module: nn.Module) -> bool:
    """True for a module with `router` and `experts`, whose experts take nothing but scaled hidden states."""
    inner = module._modules.get("experts")
    return "router" in module._modules and inner is not None and is_inner(inner)


def is_inner(module: nn.Module) -> bool:
    """True for experts whose forward takes nothing but hidden states."""
    return experts.first_matrix(module) is not None and len(takes(module)) == 1


_forms: dict[tuple, Form | str] = {}


def form_of(block: nn.Module) -> Form | str:
    """What the experts of a block compute, or why `quackish.moe_mlp` cannot."""
    base = unpatched_class(block)
    if "forward" in vars(block):
        return "its forward was replaced on the instance, as hooks of accelerate do"
    if why := why_output_differs(block.experts) or why_weights_unsupported(block.experts):
        return f"its experts: {why}"
    key = base, base.forward, key_of(block)
    if key not in _forms:
        try:
            with isolated():
                _forms[key] = experts.find_form(block, block.experts, _why_different)
        except Exception as error:  # anything a class's forward may raise
            return reason(error)
    return _forms[key]


def _why_different(small: nn.Module, form: Form) -> str:
    """Says how a class's own forward differs from the patched one's; "" if it does not."""
    random, classes = Random(1), (type(small), type(small.experts))
    hidden = small.experts.down_proj.shape[1 + form.is_transposed]
    for scale, training in ((0.3, True), (30.0, False)):  # large activations reach limits
        small.train(training)
        x, grad = random.normal(2, 3, hidden, std=scale), random.normal(6, hidden)
        expected = run_trial(small, (x,), grad)
        patch(small, form)
        got = run_trial(small, (x,), grad)
        small.__class__, small.experts.__class__ = classes
        if why := compare_trials(got, expected):
            return why
    return ""
