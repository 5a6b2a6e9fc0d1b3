"""What a wrong call says: the function that was called, the argument, what it was, what was expected, what to do."""

import importlib
import subprocess
import sys
import warnings

import pytest
import torch

import quackish
from quackish.ops.linear_cross_entropy import api

X, WEIGHT, HEAD = torch.ones(4, 8), torch.ones(8), torch.ones(6, 8)
TARGET = torch.zeros(4, dtype=torch.int64)
EXPERTS = 3
W1, W2, OFFS = torch.ones(EXPERTS, 10, 8), torch.ones(EXPERTS, 8, 5), torch.tensor([1, 2, 4], dtype=torch.int32)
INDEX, ROUTED = torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2)
Q = torch.ones(1, 2, 4, 8)
NAMES = dict(
    torch=torch, quackish=quackish, F=torch.nn.functional, x=X, w=WEIGHT, head=HEAD, target=TARGET, w1=W1, w2=W2,
    offs=OFFS, index=INDEX, routed=ROUTED, q=Q, rms_norm=quackish.rms_norm, backward=quackish.rms_norm_backward,
    RMSNorm=quackish.RMSNorm, lce=quackish.linear_cross_entropy, Loss=quackish.LinearCrossEntropyLoss,
    dense=quackish.mlp, mlp=quackish.grouped_mlp, moe=quackish.moe_mlp, mm=quackish.grouped_mm,
    sdpa=quackish.scaled_dot_product_attention, testing=quackish.testing, parallel=quackish.parallel,
    kl=quackish.linear_divergence,
)  # fmt: skip

# A call, and a part of its message. "..." stands for any text.
TABLE = {
    # orders of other libraries
    "rms_norm(x, (8,), w)": "rms_norm: weight is a tuple; expected a torch.Tensor or None. F.rms_norm takes (input, "
    "normalized_shape, weight, eps); here it is rms_norm(x, weight, eps=1e-6)",
    "rms_norm(x, 8, w)": "rms_norm: weight is 8, an int; expected a torch.Tensor or None. F.rms_norm takes",
    "rms_norm(x, w, 1e-6)": "rms_norm: bias is 1e-06, a float; expected a torch.Tensor or None; pass eps by name",
    "lce(x, head.t(), target)": "linear_cross_entropy: linear_weight has shape (8, 6), expected (V, 8) for input "
    "(4, 8): pass linear_weight.t() if it is (H, V), and hidden states as input, not logits",
    "lce(x[:, :7], head, target)": "input has shape (4, 7), expected (..., 8), as many columns as linear_weight (6, 8)",
    "kl(x, head, x, head[:5])": "linear_divergence: linear_weight has 6 rows and teacher_weight 5, expected one "
    "vocabulary: as many classes in both. Slice off classes that only one of them has, such as padding",
    "kl(x, head, x[:3], head)": "linear_divergence: teacher_input has shape (3, 8), expected (4, 8) for input (4, 8)",
    "kl(x, head, x, head, beta=2)": "linear_divergence: beta is 2, expected a number from 0 to 1",
    "kl(x, head, x, head, temperature=0)": "temperature is 0, expected a number from 1.2e-38 to 3.4e+38",
    "kl(x, head, x, head, mask=target)": "linear_divergence: mask is torch.int64, expected bool",
    "kl(x, head, x, head, reduction='avg')": "reduction is 'avg'; expected one of 'none', 'mean', 'sum'",
    "kl(x, head, x.bfloat16(), head)": "teacher_input is torch.bfloat16, expected input's torch.float32",
    "lce(x, target, head)": "linear_cross_entropy: linear_weight is torch.int64, expected bfloat16",
    "lce(x, torch.nn.Linear(8, 6), target)": "linear_weight is a Linear; expected a torch.Tensor; for a module, pass "
    "its parameter: linear_weight=module.weight",
    "lce(x, head, target.numpy())": "target is a numpy.ndarray; expected a torch.Tensor; torch.from_numpy converts it",
    "mlp(x, w1.mT, w2, offs)": "grouped_mlp: w1 is (3, 8, 10) ... (3, 10, 8); w1.transpose(1, 2) has this shape",
    "mlp(x, w1, w2.mT, offs)": "grouped_mlp: w2 is (3, 5, 8) ... w2.transpose(1, 2) has this shape",
    "mm(x, w1, offs)": "grouped_mm: a is (4, 8) and b is (3, 10, 8) ... b.transpose(1, 2) has this shape",
    "sdpa(q, q, q, True)": "scaled_dot_product_attention: attn_mask is True, a bool; ... pass is_causal by name",
    # values of a wrong type
    "rms_norm(None, w)": "rms_norm: x is None; expected a torch.Tensor",
    "rms_norm(x, w, eps='1e-6')": "rms_norm: eps is '1e-6', a str; expected a float or None",
    "rms_norm(x, w, out_dtype='bfloat16')": "rms_norm: out_dtype is 'bfloat16', a str; ... torch.bfloat16",
    "backward(x, 'x', w, x[:, 0])": "rms_norm_backward: x is 'x', a str; expected a torch.Tensor",
    "backward(x, x, w, x[:, 0].clone(), dbias=w)": "rms_norm_backward: dbias is a Tensor; expected True or False",
    "RMSNorm(8.0)": "RMSNorm: normalized_shape is 8.0, a float; expected the size of x's last dimension",
    "RMSNorm(())": "RMSNorm: normalized_shape is empty; expected the size of x's last dimension",
    "RMSNorm((4, 0))": "RMSNorm: normalized_shape is 0; expected at least 1",
    "RMSNorm(8, bias=w)": "RMSNorm: bias is a Tensor; expected True or False",
    "RMSNorm(8)(None)": "RMSNorm: x is None; expected a torch.Tensor",
    "RMSNorm((2, 4))(x.view(4, 2, 4), 'x')": "RMSNorm: residual is 'x', a str; expected a torch.Tensor or None",
    "lce(x, head, target, memory_limit='200MB')": "memory_limit is '200MB', a str; expected an int, the number of "
    "bytes, such as 200_000_000 for 200 MB, or None",
    "lce(x, head, target, memory_limit=2e8)": "memory_limit is 200000000.0, a float; expected an int, the number of",
    "lce(x, head, target, return_lse=1)": "return_lse is 1, an int; expected True or False",
    "Loss(8, 6.0)": "LinearCrossEntropyLoss: num_classes is 6.0, a float; expected an int",
    "Loss(8, 0)": "LinearCrossEntropyLoss: num_classes is 0; expected at least 1",
    "Loss(8, 6, weight=[1.0] * 6)": "LinearCrossEntropyLoss: weight is a list; expected a torch.Tensor or None",
    "Loss(8, 6, weight=torch.ones(6).long())": "LinearCrossEntropyLoss: weight is torch.int64, expected bfloat16",
    "Loss(8, 6, out_features=3)": "LinearCrossEntropyLoss: out_features is 3, expected (): K-dimensional losses",
    "Loss(8, 6, memory_limit='1GB')": "LinearCrossEntropyLoss: memory_limit is '1GB', a str; expected an int",
    "sdpa(q, q, q, scale=torch.tensor(1.0))": "scale is a Tensor; expected a float or None",
    "sdpa(q, q, q, scale=1e39)": "scale is 1e+39; expected a finite number, or None",  # infinite in fp32
    "sdpa(q, q, q, softcap='30')": "softcap is '30', a str; expected a float or None",
    "sdpa(q, q, q, None, '0.1')": "dropout_p is '0.1', a str; expected a float",
    "sdpa(q, q, q, is_causal='yes', softcap=3.0)": "is_causal is 'yes', a str; expected True or False",
    "sdpa(q, q, q, backend='cute')": "runs PyTorch's own kernels. Expected backend=\"auto\"",
    "sdpa(q, q, q, return_lse=1)": "return_lse is 1, an int; expected True or False",
    "sdpa(q, q, q, attn_bias=torch.ones(4, 4).bool())": "attn_bias is torch.bool; expected bfloat16, ... pass a bool "
    "mask as attn_mask",
    "quackish.rotary(q, q, q, q)": "rotary: cos is (1, 2, 4, 8) but q is (1, 2, 4, 8); expected (4, W) or (1, 4, W)",
    "quackish.rotary(q, q, q[0, 0], q[0, 0], 8)": "rotary() takes 4 positional arguments but 5 were given",
    "quackish.use_kernels('no')": "use_kernels: enabled is 'no', a str; expected True or False",
    "quackish.emulate(3).__enter__()": "quackish.emulate: gpu is 3, an int; expected a quackish.gpu.Gpu or one of h100",
    "testing.assert_deterministic(rms_norm(x, w))": "assert_deterministic: function is a Tensor; expected a function, "
    "which assert_deterministic calls with the inputs",
    "testing.assert_deterministic(rms_norm, x, w, runs='3')": "assert_deterministic: runs is '3', a str; expected an",
    "testing.assert_close_to_fp64(rms_norm, x, w)": "assert_close_to_fp64: reference is a Tensor; expected a function",
    "testing.assert_close_to_fp64(rms_norm, rms_norm, x, w, slack='a')": "slack is 'a', a str; expected a number above",
    # misspelled names
    "lce(x, head, target, schedule='recomput')": "schedule is 'recomput', ... did you mean recompute?",
    "lce(x, head, target, reduction='Mean')": "reduction is 'Mean', ... did you mean mean?",
    "mlp(x, w1, w2, offs, backend='cutee')": "grouped_mlp: backend is 'cutee'; ... did you mean cute?",
    "quackish.config(rms_norm_bakward={}).__enter__()": "no kernel 'rms_norm_bakward'; ... did you mean rms_norm_back",
    "quackish.config(lce_dw=dict(num_stage=3)).__enter__()": "lce_dw has no field 'num_stage'; ... did you mean num_st",
    "quackish.config(lce_dw=3).__enter__()": "quackish.config: lce_dw is 3, an int; expected a dict of fields, or a Ge",
    "parallel.VocabParallelHead(8, 6.0)": "VocabParallelHead: num_classes is 6.0, a float; expected an int",
    "parallel.VocabParallelHead(8, 6, sofcap=3.0)": "VocabParallelHead has no option 'sofcap'; ... mean softcap?",
    # mlp has the weights of one group
    "dense(x, w1[0].mT, w2[0])": "mlp: w1 is (8, 10) ... (10, 8); w1.t() has this shape",
    "dense(x, w1[0], w2[0].mT)": "mlp: w2 is (5, 8) but x is (4, 8); expected (8, I) ... w2.t() has this shape",
    "dense(x, w1, w2)": "mlp: w2 is (3, 8, 5) but x is (4, 8); expected (8, I) with I >= 1",
    "dense(x, w1[0, :5], w2[0])": "mlp: w1 is (5, 8) ... expected (10, 8) as [gate; up], or w3 beside it",
    "dense(x, w1[0], w2[0], b3=w)": "mlp: b3 is given but w3 is None; expected None: b1 has the biases of all rows",
    "dense(x, w1[0], w2[0], b1=w)": "mlp: b1 is (8,) but w1 is (10, 8); expected (10,)",
    "dense(x, w1[0, :5], w2[0], w3=w1[0, 5:], b3=w)": "mlp: b3 is (8,) but w3 is (5, 8); expected (5,)",
    "dense(x, w1[0], w2[0], residual=w)": "mlp: residual is (8,) but x is (4, 8), w2 is (8, 5); expected (4, 8)",
    "dense(x, w1[0], w2[0], residual=x.bfloat16())": "mlp: residual is torch.bfloat16; expected torch.float32, as the",
    "dense(x, w1[0, :5], w2[0], activation='gelu')": "mlp: activation is 'gelu'; expected one of 'swiglu', ",
    "dense(x[0, 0], w1[0], w2[0])": "mlp: x is (); expected (..., H) with H >= 1",
    "dense(x, w1[0], w2[0], grad_w3_out=w1[0, :5])": "mlp: grad_w3_out is given but w3 is None; expected None",
    "dense(x, w1[0], w2[0], backend='cute')": "mlp: no kernel for cpu tensors.",
    # the function that was called, not the one that it calls
    "moe(x, index, routed, w1, w2, activaton='silu')": "moe_mlp() got an unexpected keyword argument 'activaton'",
    "moe(x, index, routed, w1, w2, activation='swigul')": "moe_mlp: activation is 'swigul'; ... did you mean swiglu",
    "moe(x, index, routed, w1, w2, backend='cuda')": "moe_mlp: backend is 'cuda'; expected one of 'auto', 'cute'",
    "moe(x, index, routed, w1, w2, recompute=1)": "moe_mlp: recompute is 1, an int; expected True or False",
    "moe(x[None], index[None], routed[None], w1[:, :5], w2)": "moe_mlp: w1 is (3, 5, 8) but x is (1, 4, 8), w2 is",
    "moe(x, index, routed, w1, w2, grad_w1_out=w1)": "moe_mlp: grad_w1_out shares memory with w1",
    "parallel.linear_cross_entropy(x, head, target, deterministic=1)": "parallel.linear_cross_entropy: deterministic "
    "is 1, an int; expected True or False",
    "quackish.emulate(completion='soon').__enter__()": "quackish.emulate: completion is 'soon'; expected 'at_once' or",
}  # fmt: skip


def check(call, text, **names):
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as caught:
        eval(call, {**NAMES, **names})
    rest = str(caught.value)
    for part in text.split(" ... "):
        _, found, rest = rest.partition(part)
        assert found, f"{caught.value} lacks {part!r}"
    assert " a int" not in str(caught.value)


@pytest.mark.parametrize("call", TABLE)
def test_messages(call):
    calls = dict(api._calls)
    for _ in range(2):  # a wrong call leaves no plan that a second one finds
        check(call, TABLE[call])
    assert api._calls == calls


MODEL = "'meta-llama/Llama-3.2-1B'"
INTEGRATIONS = {
    f"transformers.apply({MODEL})": f"apply: model is {MODEL}, a str, expected a torch.nn.Module: load it first, with "
    f"AutoModelForCausalLM.from_pretrained({MODEL})",
    f"transformers.revert({MODEL})": f"revert: model is {MODEL}, a str",
    f"transformers.report({MODEL})": f"report: model is {MODEL}, a str",
    f"transformers.applied({MODEL}).__enter__()": f"applied: model is {MODEL}, a str",
    "transformers.applied(RMSNorm(8), strickt=True).__enter__()": "applied has no option 'strickt'; ... mean strict?",
    "transformers.apply(RMSNorm)": "apply: model is the class RMSNorm, expected a torch.nn.Module",
    "transformers.apply(RMSNorm(8))": "apply: nothing to patch in an RMSNorm with norms=True",
    "transformers.apply(RMSNorm(8), head='no')": "apply: head is 'no', a str; expected True or False",
    "transformers.apply(RMSNorm(8), schedule='fast')": "apply: schedule is 'fast', expected one of auto",
    "transformers.apply(RMSNorm(8), memory_limit='1GB')": "apply: memory_limit is '1GB', a str; expected an int",
    "trainer.QuackishCallback(shedule='auto')": "QuackishCallback has no option 'shedule'; ... mean schedule?",
    f"trl.apply({MODEL})": f"apply: the first argument is {MODEL}, a str, expected options by name: quackish.integra",
    "trl.apply(schedule='fast')": "apply: schedule is 'fast', expected one of auto",
    f"megatron.output_layer_loss({MODEL}, x, target)": f"output_layer_loss: output_layer is {MODEL}, a str, expected "
    "the output_layer of a GPTModel",
    f"torchtitan.LinearCrossEntropyLoss.Config().build().set_lm_head({MODEL})": "lm_head is a str with its own forward",
}
PACKAGES = dict(transformers="transformers", trainer="transformers", trl="trl", megatron="megatron.core")
OTHERS = "trl", "megatron", "torchtitan"


@pytest.mark.parametrize(
    "call",
    [pytest.param(call, marks=[pytest.mark.integrations] * call.startswith(OTHERS), id=call) for call in INTEGRATIONS],
)
def test_messages_of_integrations(call):
    name = call.partition(".")[0]
    pytest.importorskip(PACKAGES.get(name, name), reason="needs the extra integrations")
    check(call, INTEGRATIONS[call], **{name: getattr(quackish.integrations, name)})


PROGRAM = """
import sys

import quackish, quackish.integrations, quackish.parallel, quackish.testing

for module in (quackish, quackish.integrations, quackish.parallel, quackish.testing):
    print(module.__name__, *dir(module))
for wrong in ("paralel", "rmsnorm", "testin"):
    try:
        getattr(quackish, wrong)
    except AttributeError:
        sys.__excepthook__(*sys.exc_info())  # as at the end of a program, where Python looks for similar names
"""


def test_a_new_process_shows_and_suggests_what_is_public():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    shown = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    for module, names in shown.items():
        loaded = importlib.import_module(module)
        assert names == sorted(dir(loaded))  # the same before and after the lazy modules are used
        if module != "quackish.integrations":  # which need other libraries
            assert all(hasattr(loaded, name) for name in names)
    public = {"parallel", "testing", "integrations", "emulator", "types", "rms_norm", "PortablePathWarning"}
    assert public < {*shown["quackish"]}
    assert not {"importlib", "TYPE_CHECKING", "interrupt", "ops"} & {*shown["quackish"]}
    for wrong, right in (("paralel", "parallel"), ("rmsnorm", "rms_norm"), ("testin", "testing")):
        assert f"has no attribute '{wrong}'. Did you mean: '{right}'?" in done.stderr


def test_the_warning_can_be_silenced_and_made_an_error():
    from quackish import errors

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", quackish.PortablePathWarning)
        errors.warn_once("a reason that test_messages gives first")
    with warnings.catch_warnings():
        warnings.simplefilter("error", quackish.PortablePathWarning)
        with pytest.raises(quackish.PortablePathWarning, match="gives second"):
            errors.warn_once("a reason that test_messages gives second")
