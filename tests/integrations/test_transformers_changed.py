"""Patched models whose head, norms or experts change after `apply`, or were quantized before."""

import types
import warnings

import pytest
import torch
from torch import nn

import quackish
from tests.wrapper_tensor import Wrapper

pytest.importorskip("transformers", minversion="5")
from quackish.errors import PortablePathWarning, UnsupportedError
from quackish.integrations.transformers import apply, report, revert
from quackish.integrations.transformers.experts import Form, patch
from tests.integrations.test_transformers import Temperature, assert_same_step, batch, step, tiny


class Quantized(Wrapper):
    """Has PyTorch's operators but not quackish's, as torchao's tensors."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if "quackish" in str(func):
            raise NotImplementedError(f"unimplemented operator {func}")
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        return super().__torch_dispatch__(func, types, args, kwargs)


def quantize(module: nn.Module) -> None:
    for name, p in list(module._parameters.items()):
        if p is not None:
            module._parameters[name] = nn.Parameter(Quantized(p.detach().clone()), requires_grad=False)


QUANTIZED = {
    "lm_head": ("Llama", "loss", "lm_head: its weight is a Quantized, expected a plain tensor"),
    "model.norm": ("Llama", "norm", "its weight is a Quantized, expected a plain tensor"),
    "model.layers.0.mlp.experts": ("Qwen3Moe", "experts", "its gate_up_proj is a Quantized, expected a plain tensor"),
    "model.layers.0.feed_forward.experts": ("Llama4", "experts", "its gate_up_proj is a Quantized, expected a plain"),
}


@pytest.mark.parametrize("is_patched_first", [False, True])
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_weights(name, is_patched_first):
    """Are left to Transformers with a reason, and trained around."""
    family, kind, message = QUANTIZED[name]
    plain, model = tiny(family), tiny(family)
    quantize(plain.get_submodule(name))
    if is_patched_first:
        apply(model, experts=True)
    quackish.errors._warned.clear()
    quantize(model.get_submodule(name))
    with pytest.warns(PortablePathWarning, match=message):
        assert_same_step(
            step(model if is_patched_first else apply(model, experts=True)), step(plain), 1e-4, name == "lm_head"
        )
    (entry,) = [entry for entry in report(model) if entry.reason and entry.is_expected]
    assert (entry.kind, entry.is_patched) == (kind, is_patched_first)
    assert message in entry.reason
    assert ("runs Transformers' code" in str(report(model))) == is_patched_first


def test_quantized_weights_that_are_sorted():
    experts = tiny("GptOss", num_hidden_layers=1).model.layers[0].mlp.experts
    patch(experts, Form("clamped_swiglu", "gate_up_proj", is_transposed=True, is_interleaved=True))
    quantize(experts)
    with pytest.raises(UnsupportedError, match=r"gate_up_proj is a Quantized, .* Call revert\(model\) before"):
        experts(torch.ones(3, 32), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))


def test_quantized_head_of_torchtitan():
    pytest.importorskip("torchtitan")
    head = nn.Linear(8, 8, bias=False)
    quantize(head)
    loss = quackish.integrations.torchtitan.LinearCrossEntropyLoss.Config().build()
    with pytest.raises(UnsupportedError, match="lm_head: its weight is a Quantized, expected a plain tensor"):
        loss.set_lm_head(head)


def double(module, args, output):
    return 2 * output


def half(module, args):
    return (args[0] / 2,)


def double_grad(module, grad_inputs, grad_outputs):
    assert grad_outputs[0].dim() == 3  # of logits
    return (2 * grad_inputs[0],)


def double_grad_outputs(module, grad_outputs):
    assert grad_outputs[0].dim() == 3
    return (2 * grad_outputs[0],)


def double_of_heads(module, args, output):
    return 2 * output if isinstance(module, nn.Linear) and module.out_features == 97 else None


def quarter_logits(model):
    own = model.lm_head.forward
    model.lm_head.forward = types.MethodType(lambda self, hidden: own(hidden) / 4, model.lm_head)


CHANGES = {
    "hook double": lambda m: m.lm_head.register_forward_hook(double),
    "hook half": lambda m: m.lm_head.register_forward_pre_hook(half),
    "hook double_grad": lambda m: m.lm_head.register_full_backward_hook(double_grad),
    "hook double_grad_outputs": lambda m: m.lm_head.register_full_backward_pre_hook(double_grad_outputs),
    "hook double_of_heads": lambda m: nn.modules.module.register_module_forward_hook(double_of_heads),
    "its forward was replaced": quarter_logits,
    "it is .*Temperature": lambda m: setattr(m, "lm_head", Temperature(m.lm_head)),
}


@pytest.mark.parametrize("message", CHANGES)
def test_changed_head(message):
    """The model's own forward runs, with one warning for all steps."""
    steps = []
    for model in (apply(tiny()), tiny()):
        quackish.errors._warned.clear()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always", PortablePathWarning)
            handle = CHANGES[message](model)
            steps += [step(model), step(model)]
            if handle is not None:
                handle.remove()
        steps.append(len([w for w in seen if w.category is PortablePathWarning]))
        if handle is not None and len(steps) == 3:
            assert model(**batch()).logits is None  # patched again
    *got, count, expected, _, none = steps
    assert (count, none) == (1, 0)
    for each in got:
        assert_same_step(each, expected, has_logits=True)


@pytest.mark.parametrize("family, name", [("Qwen3Moe", "mlp.experts"), ("Llama4", "feed_forward.experts")])
def test_hooks_on_norms_and_experts(family, name):
    """See what they see without quackish."""
    steps, seen = [], []
    for model in (apply(tiny(family), experts=True), tiny(family)):
        seen.append([])
        for part in (f"model.layers.0.{name}", "model.norm"):
            module, see = model.get_submodule(part), seen[-1].append
            module.register_forward_hook(lambda module, args, output, see=see: see((args[0], output)))
            module.register_full_backward_hook(lambda module, grads, outputs, see=see: see((grads[0], outputs[0])))
        steps.append(step(model))
    assert_same_step(*steps, close=1e-4)
    assert len(seen[0]) == 4
    torch.testing.assert_close(*seen, rtol=1e-4, atol=1e-5)


def test_changed_head_in_compiled_code():
    torch._dynamo.reset()
    model, plain = apply(tiny(num_hidden_layers=1), norms=False), tiny(num_hidden_layers=1)
    for m in (model, plain):
        m.lm_head.register_forward_hook(double)
    model.compile(backend="eager", fullgraph=True)
    assert_same_step(step(model), step(plain), has_logits=True)


def weight_norm(model):
    nn.utils.parametrizations.weight_norm(model.lm_head)


def spectral_norm(model):  # each use of its weight is an iteration
    torch.manual_seed(0)
    nn.utils.parametrizations.spectral_norm(model.lm_head)


def compiled(model):
    model.lm_head = torch.compile(model.lm_head, backend="eager")


def checkpointed(model):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model.lm_head = checkpoint_wrapper(model.lm_head)


def fsdp1(model):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model.lm_head = FullyShardedDataParallel(model.lm_head, device_id=torch.device("cpu"), use_orig_params=True)


def fsdp2(model):
    from torch.distributed.fsdp import fully_shard

    fully_shard(model.lm_head, mesh=torch.distributed.init_device_mesh("cpu", (1,)))


def zero3(model):
    def gather(module, *args):
        pass

    gather.__module__ = "deepspeed.runtime.zero.parameter_offload"
    model.lm_head.register_forward_pre_hook(gather)
    model.lm_head.register_forward_hook(gather)


@pytest.fixture
def alone():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("change", [weight_norm, spectral_norm, compiled, checkpointed, fsdp1, fsdp2, zero3])
def test_head_that_others_wrap(change, alone):
    """Their hooks, wrappers and parametrizations leave the loss to quackish, without a warning."""
    model, plain = apply(tiny()), tiny()
    with warnings.catch_warnings():
        warnings.simplefilter("error", PortablePathWarning)
        for m in (model, plain):
            change(m)
        if change is weight_norm:
            with pytest.raises(ValueError, match=r"a ParametrizedLinear was wrapped after apply.* parametrizations"):
                revert(model)
        for _ in range(2):
            (output, grads), (truth, true_grads) = step(model), step(plain)
            assert output.logits is None
            torch.testing.assert_close(output.loss, truth.loss, rtol=1e-5, atol=0)
            for name, grad in grads.items():
                grad, true = (t.full_tensor() if hasattr(t, "full_tensor") else t for t in (grad, true_grads[name]))
                assert (grad - true).abs().max() <= 1e-5 * true.abs().max() + 1e-8, name
