"""Several processes: RMSNorm under DTensor, the head under FSDP2 and DDP. Each test is one check that all ranks run.

Truth is one process with the whole batch in fp64. Ranks are gloo processes on the CPU, or one for each of two GPUs.
They start once and run all checks in order; the tests report what was found.
"""

import copy
import dataclasses
import datetime
import importlib.util
import itertools
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, parallelize_module

import quackish
from tests import forked
from tests.once import once

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
V, H = 40, 64
MIXED = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)


@dataclasses.dataclass
class Ranks:
    """The ranks, seen from this process."""

    mesh: DeviceMesh  # all ranks, in one dimension
    rank: int
    dtype: torch.dtype  # kernels run in bf16, the portable path in fp32
    backend: str

    @property
    def size(self) -> int:
        return self.mesh.size()

    def randn(self, *shape: int, scale: float = 1.0) -> Tensor:
        """The same on every rank."""
        return (torch.randn(shape) * scale).to(self.mesh.device_type, self.dtype)

    def is_close(self, got: Tensor, truth: Tensor) -> None:
        if isinstance(got, DTensor):
            got = got.full_tensor()
        error = (got.double() - truth).norm() / truth.norm()
        assert error < (2e-2 if BF16 in (got.dtype, self.dtype) else 1e-5), f"{error} of {truth.norm()}"


@contextmanager
def collectives(expected: dict[str, int]):
    with CommDebugMode() as mode:
        yield
    # "c10d._allgather_base_" and "c10d_functional.all_gather_into_tensor" are one name here
    counts: dict[str, int] = {}
    for op, count in mode.get_comm_counts().items():
        name = str(op).replace("_", "").split(".")[1]
        kind = next(kind for kind in ("allgather", "reducescatter", "allreduce", "") if kind in name) or name
        counts[kind] = counts.get(kind, 0) + count
    assert counts == expected


# RMSNorm under DTensor ------------------------------------------------------------------------------------------------


def norm(x, weight, bias, residual, **options):
    return quackish.rms_norm(x, weight, bias, residual=residual, weight_offset=1.0, eps=1e-6, **options)


def norm_step(f, inputs, gradients):
    """(y, res, and the gradients of x, weight, bias, residual)."""
    inputs = [t.detach().requires_grad_() for t in inputs]
    out = f(*inputs)
    return *out, *torch.autograd.grad(out, inputs, gradients)


def check_norm(ranks: Ranks) -> None:
    """Any sharding of rows: no communication, and weight gradients are Partial."""
    mesh = ranks.mesh if ranks.size == 2 else init_device_mesh(ranks.mesh.device_type, (2, ranks.size // 2))
    shape = 4, 6, 4, H
    tensors, gradients = [ranks.randn(*shape) for _ in range(2)], [ranks.randn(*shape) for _ in range(2)]
    ways = "S0 R", "S1 S0", "R S1", "S1 S1", "S2 S2"
    named = {"R": Replicate(), "S0": Shard(0), "S1": Shard(1), "S2": Shard(2)}
    for rows in dict.fromkeys(tuple(named[p] for p in way.split()[: mesh.ndim]) for way in ways):
        for per_head in (False, True):
            parameters = [ranks.randn(*((4, H) if per_head else (H,)), scale=0.1) for _ in range(2)]
            inputs = [tensors[0], *parameters, tensors[1]]
            truth = norm_step(norm, *([t.double() for t in each] for each in (inputs, gradients)))
            where = [Replicate() if not p.is_shard(2) or not per_head else Shard(0) for p in rows]
            placements = rows, where, where, rows
            sharded = [distribute_tensor(t, mesh, p) for t, p in zip(inputs, placements, strict=True)]
            dys = [distribute_tensor(t, mesh, rows) for t in gradients]
            with collectives({}):
                results = norm_step(partial(norm, backend=ranks.backend), sharded, dys)
            sums = [Partial() if p.is_shard() and w.is_replicate() else w for p, w in zip(rows, where, strict=True)]
            for got, p, true in zip(results, (rows, rows, rows, sums, sums, rows), truth, strict=True):
                assert got.placements == tuple(p), (rows, per_head)
                ranks.is_close(got, true)
            rstd = quackish.rms_norm_forward(sharded[0], None, backend=ranks.backend).rstd
            assert (rstd.shape, rstd.placements) == (shape[:-1], tuple(rows))


def check_norm_backward(ranks: Ranks) -> None:
    """As the first call on a DTensor, which must register the sharding rules."""
    x, weight, rstd = ranks.randn(4, 6, H), ranks.randn(H), ranks.randn(4, 6).float()
    truth = quackish.rms_norm_backward(x, x, weight, rstd, backend=ranks.backend)
    x, weight, rstd = (
        distribute_tensor(t, ranks.mesh, [p]) for t, p in ((x, Shard(0)), (weight, Replicate()), (rstd, Shard(0)))
    )
    grads = quackish.rms_norm_backward(x, x, weight, rstd, backend=ranks.backend)
    assert (grads.dx.placements, grads.dweight.placements) == ((Shard(0),), (Partial(),))
    ranks.is_close(grads.dx, truth.dx.double())
    ranks.is_close(grads.dweight, truth.dweight.double())


def check_norm_refuses(ranks: Ranks) -> None:
    x, weight = ranks.randn(4, 6, H), distribute_tensor(ranks.randn(H), ranks.mesh, [Replicate()])
    with pytest.raises(quackish.UnsupportedError, match="whose last dimension is sharded"):
        quackish.rms_norm(distribute_tensor(x, ranks.mesh, [Shard(2)]), weight)
    with pytest.raises(quackish.UnsupportedError, match="dweight_out is given but x is a DTensor"):
        quackish.rms_norm(distribute_tensor(x, ranks.mesh, [Shard(1)]), weight, dweight_out=torch.zeros_like(weight))


def check_norm_is_compiled(ranks: Ranks) -> None:
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    call = partial(norm, backend=ranks.backend)
    x, residual, dy, dres = (distribute_tensor(ranks.randn(4, 6, H), ranks.mesh, [Shard(1)]) for _ in range(4))
    weight, bias = (distribute_tensor(ranks.randn(H), ranks.mesh, [Replicate()]) for _ in range(2))
    inputs = x, weight, bias, residual
    got = norm_step(torch.compile(call, fullgraph=True, backend=backend), inputs, (dy, dres))
    for mine, eager in zip(got, norm_step(call, inputs, (dy, dres)), strict=True):
        assert mine.placements == eager.placements
        assert torch.equal(mine.to_local(), eager.to_local())
    targets = {str(node.target) for graph in graphs for node in graph.graph.nodes}
    assert {"quackish.rms_norm_fwd.default", "quackish.rms_norm_bwd.default"} <= targets
    assert not any("c10d" in target for target in targets)


def check_sequence_parallel(ranks: Ranks) -> None:
    """With PyTorch's SequenceParallel."""
    module = quackish.RMSNorm(H, eps=1e-6, device=ranks.mesh.device_type, dtype=ranks.dtype, backend=ranks.backend)
    parallelize_module(module, ranks.mesh, SequenceParallel())
    x, dy = ranks.randn(2, 8, H), ranks.randn(2, 8, H)
    mine = x.chunk(ranks.size, 1)[ranks.rank].clone().requires_grad_()  # SequenceParallel takes this rank's part
    y = module(mine)
    y.backward(distribute_tensor(dy, ranks.mesh, [Shard(1)]))
    again, res = module(mine.detach(), residual=torch.zeros_like(y))  # by keyword: SequenceParallel keeps one argument
    ranks.is_close(res, x.double())
    ranks.is_close(again, y.full_tensor().double())
    x64, w64 = x.double().requires_grad_(), torch.ones(H, dtype=FP64, device=x.device, requires_grad=True)
    truth = F.rms_norm(x64, (H,), w64, 1e-6)
    truth.backward(dy.double())
    ranks.is_close(y, truth)
    ranks.is_close(mine.grad, x64.grad.chunk(ranks.size, 1)[ranks.rank])
    ranks.is_close(module.weight.grad, w64.grad)


# The head under FSDP2 and DDP -----------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, tied: bool, backend: str = "auto"):
        super().__init__()
        self.embedding = nn.Embedding(V, H)
        self.norm = quackish.RMSNorm(H, eps=1e-6, backend=backend)
        self.head = quackish.LinearCrossEntropyLoss(H, V, backend=backend)
        if tied:
            self.head.linear.weight = self.embedding.weight

    def forward(self, ids, target, num_items=None):
        return self.head(self.norm(self.embedding(ids)), target, num_items=num_items)


def model_and_truth(ranks: Ranks, tied: bool) -> tuple[Model, Model]:
    """(model, truth in fp64) with equal parameters, which are exact in 16 bits."""
    torch.manual_seed(0)
    truth = Model(tied)
    for p in truth.parameters():
        p.data = p.data.bfloat16().double()
    model = Model(tied, ranks.backend)
    model.load_state_dict(truth.state_dict())
    return model.to(ranks.mesh.device_type), truth.to(ranks.mesh.device_type)


def batch(ranks: Ranks) -> tuple[Tensor, Tensor]:
    """ids and targets of all ranks. Ranks ignore different numbers of targets, the fourth all."""
    ids, target = torch.randint(V, (2, ranks.size, 12)).to(ranks.mesh.device_type)
    for rank in range(ranks.size):
        target[rank, : 5 * rank] = -100
    return ids, target


def loss_of(ranks: Ranks, model: nn.Module, ids: Tensor, target: Tensor) -> Tensor:
    """A step on this rank's shard of the batch. FSDP and DDP divide gradients by the number of ranks."""
    target = target[ranks.rank]
    num_items = (target != -100).sum()
    dist.all_reduce(num_items)
    return model(ids[ranks.rank], target, num_items) * ranks.size


def check_gradients(ranks: Ranks, model: nn.Module, truth: nn.Module) -> None:
    for (name, p), (_, true) in zip(model.named_parameters(), truth.named_parameters(), strict=True):
        assert p.grad is not None, name
        ranks.is_close(p.grad, true.grad)


def check_head_under_fsdp(ranks: Ranks) -> None:
    """Weights are gathered once for forward and once for backward (the root's are kept), gradients reduced once."""
    policy = MIXED if ranks.dtype is BF16 else MixedPrecisionPolicy()
    ids, target = batch(ranks)
    for tied in (False, True):
        model, truth = model_and_truth(ranks, tied)
        if not tied:  # a tied weight belongs to the group of the root
            fully_shard(model.head, mesh=ranks.mesh, mp_policy=policy)
        fully_shard(model, mesh=ranks.mesh, mp_policy=policy)
        groups = dict(allgather=1, reducescatter=1) if tied else dict(allgather=3, reducescatter=2)
        with collectives({**groups, "allreduce": 1}):  # the last for num_items
            loss = loss_of(ranks, model, ids, target)
            loss.backward()
        true = truth(ids, target)
        true.backward()
        dist.all_reduce(loss := loss.detach())
        ranks.is_close(loss / ranks.size, true)
        check_gradients(ranks, model, truth)
        with pytest.raises(TypeError, match="linear_weight is a DTensor, expected a plain tensor"):
            x = torch.zeros(3, H, device=ids.device)
            quackish.linear_cross_entropy(x, model.head.linear.weight, target[0, :3])


def check_bf16_policy_of_tied_weights(ranks: Ranks) -> None:
    ids, target = batch(ranks)
    model, truth = model_and_truth(ranks, tied=True)
    fully_shard(model, mesh=ranks.mesh, mp_policy=MIXED)
    loss_of(ranks, model, ids, target).backward()
    truth(ids, target).backward()
    check_gradients(dataclasses.replace(ranks, dtype=BF16), model, truth)


def check_compiled_under_fsdp(ranks: Ranks) -> None:
    ids, target = batch(ranks)
    model, truth = model_and_truth(ranks, tied=False)
    model.to(ranks.dtype)
    model.head.compile(fullgraph=True, backend="aot_eager")
    model.norm.compile(fullgraph=True, backend="aot_eager")
    for module in (model.head, model):
        fully_shard(module, mesh=ranks.mesh)
    loss_of(ranks, model, ids, target).backward()
    truth(ids, target).backward()
    check_gradients(ranks, model, truth)


def check_ddp(ranks: Ranks) -> None:
    ids, target = batch(ranks)
    model, truth = model_and_truth(ranks, tied=True)
    model = nn.parallel.DistributedDataParallel(model.to(ranks.dtype))
    loss_of(ranks, model, ids, target).backward()
    truth(ids, target).backward()
    check_gradients(ranks, model, truth)


def check_transformers(ranks: Ranks) -> None:
    """A patched Llama under FSDP2, compared with the unpatched one in one process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from quackish.integrations.transformers import apply

    ids, labels = batch(ranks)
    num_items = (labels[:, 1:] != -100).sum()  # the model shifts labels
    mine = slice(ranks.rank, ranks.rank + 1)
    for tied in (False, True):
        config = LlamaConfig(
            vocab_size=V, hidden_size=H, intermediate_size=H, num_hidden_layers=2, num_attention_heads=2,
            tie_word_embeddings=tied,
        )  # fmt: skip
        truth = LlamaForCausalLM(config).double()
        model = LlamaForCausalLM(config)
        model.load_state_dict(truth.state_dict())
        apply(model.train())
        modules = [*model.model.layers, *([] if tied else [model.lm_head]), model]
        for module in modules:
            fully_shard(module, mesh=ranks.mesh)
        output = model(ids[mine], labels=labels[mine], num_items_in_batch=num_items)
        assert output.logits is None
        (output.loss * ranks.size).backward()
        true = truth(ids, labels=labels, num_items_in_batch=num_items).loss
        true.backward()
        dist.all_reduce(loss := output.loss.detach())
        ranks.is_close(loss, true)
        check_gradients(ranks, model, truth)


def check_trl(ranks: Ranks) -> None:
    """TRL's head under FSDP2, in the root's group as accelerate shards it, compared with TRL's own in one process."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl.trainer.utils import add_fused_lm_head

    from quackish.integrations.trl import apply, revert

    ids, labels = batch(ranks)
    num_items = (labels[:, 1:] != -100).sum()  # the head shifts labels
    mine = slice(ranks.rank, ranks.rank + 1)
    config = LlamaConfig(
        vocab_size=V, hidden_size=H, intermediate_size=H, num_hidden_layers=1, num_attention_heads=2
    )  # fmt: skip
    truth, model = LlamaForCausalLM(config).double(), LlamaForCausalLM(config)
    model.load_state_dict(truth.state_dict())
    for each in (truth, model):
        add_fused_lm_head(each, outputs=("log_probs", "entropy"))
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=ranks.mesh)

    def loss_of(model, rows):
        output = model(input_ids=ids[rows], labels=labels[rows], num_items_in_batch=num_items, fused_lm_head=True)
        return output.loss - 0.1 * output.entropy.sum()

    true = loss_of(truth, slice(None))
    true.backward()
    apply(schedule="recompute")
    try:
        loss = loss_of(model, mine)
        (loss * ranks.size).backward()
    finally:
        revert()
    dist.all_reduce(loss := loss.detach())
    ranks.is_close(loss, true)
    check_gradients(ranks, model, truth)


def check_transformers_experts(ranks: Ranks) -> None:
    """gpt-oss's experts, which apply sorts in memory, under FSDP2: a step, and state dicts in the original order."""
    from transformers import GptOssConfig, GptOssForCausalLM

    from quackish.integrations.transformers import apply

    config = GptOssConfig(
        vocab_size=V, hidden_size=H, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    truth, model = GptOssForCausalLM(config).train(), GptOssForCausalLM(config).train()
    with torch.no_grad():
        for p in truth.parameters():
            p.copy_(torch.randn(p.shape) * 0.3)
    apply(model, experts=True, strict=True)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=ranks.mesh)
    whole = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, {name: t.clone() for name, t in truth.state_dict().items()}, options=whole)
    for name, t in get_model_state_dict(model, options=whole).items():
        assert torch.equal(t, truth.state_dict()[name]) or ranks.rank > 0, name
    ids, labels = batch(ranks)
    for m in (model, truth):
        m(ids, labels=labels).loss.backward()
    for (name, p), (_, true) in zip(model.named_parameters(), truth.named_parameters(), strict=True):
        grad = p.grad.full_tensor()
        if "gate_up_proj" in name:
            grad = torch.stack(grad.chunk(2, dim=-1), dim=-1).flatten(-2)
        assert (grad - true.grad).abs().max() <= 1e-5 * true.grad.abs().max() + 1e-8, name


def check_transformers_tensor_parallel(ranks: Ranks) -> None:
    """A patched Llama whose lm_head is sharded over two ranks; with four ranks, two such pairs under FSDP2."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from quackish.integrations.transformers import apply

    device = ranks.mesh.device_type
    pairs = ranks.size // 2
    mesh = init_device_mesh(device, (pairs, 2), mesh_dim_names=("dp", "tp"))
    sizes = dict(vocab_size=V, hidden_size=H, intermediate_size=H, num_hidden_layers=1, num_attention_heads=2)
    truth = LlamaForCausalLM(LlamaConfig(**sizes)).double()

    def sharded(style):
        model = LlamaForCausalLM(LlamaConfig(**sizes))
        model.load_state_dict(truth.state_dict())
        return parallelize_module(apply(model.train()), mesh["tp"], {"lm_head": style})

    ids, labels = batch(ranks)
    num_items = (labels[:pairs, 1:] != -100).sum()
    true = truth(ids[:pairs], labels=labels[:pairs], num_items_in_batch=num_items).loss
    true.backward()
    row = mesh.get_local_rank("dp")
    inputs = dict(input_ids=ids[row : row + 1], labels=labels[row : row + 1], num_items_in_batch=num_items)
    for local in (True, False):
        model = sharded(ColwiseParallel(output_layouts=Replicate(), use_local_output=local))
        if pairs > 1:
            for module in (model.lm_head, model):
                fully_shard(module, mesh=mesh["dp"])
        output = model(**inputs)
        assert output.logits is None
        (output.loss * pairs).backward()
        dist.all_reduce(loss := output.loss.detach(), group=mesh.get_group("dp"))
        ranks.is_close(loss, true)
        check_gradients(ranks, model, truth)
    with pytest.raises(NotImplementedError, match="return_token_accuracy is True, expected False: lm_head is sharded"):
        model(**inputs, return_token_accuracy=True)
    for model in (sharded(ColwiseParallel()), sharded(ColwiseParallel(use_local_output=False))):
        with pytest.raises(NotImplementedError, match=r"expected ColwiseParallel\(output_layouts=Replicate\(\)\)"):
            model(**inputs)


def check_torchtitan(ranks: Ranks) -> None:
    """torchtitan's Llama under its FSDP with our norms and loss, compared with the original in one process."""
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    def build(*overrides, **options):
        config = dataclasses.replace(llama3_debugmodel(), **options)
        config.model_spec.model.layers = config.model_spec.model.layers[:2]
        for layer in config.model_spec.model.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()  # the default compiles, slowly
        apply_overrides(
            OverrideConfig(imports=[f"quackish.integrations.torchtitan.{name}" for name in overrides]), config
        )
        with torch.device(ranks.mesh.device_type):
            model = config.model_spec.model.build()
            model.init_states()
        loss = config.loss.build(compile_config=None)
        loss.set_lm_head(model.lm_head)
        model._skip_lm_head = True
        return model, loss

    (theirs, their_loss), (ours, our_loss) = build(), build("rms_norm", "linear_cross_entropy")
    assert sum(isinstance(module, quackish.RMSNorm) for module in ours.modules()) == 5
    assert ours.norm._cache_pos_arg_names() == theirs.norm._cache_pos_arg_names()  # used by tensor parallelism
    ours.load_state_dict(theirs.state_dict())
    apply_fsdp_to_decoder(ours, ranks.mesh, param_dtype=ranks.dtype, reduce_dtype=FP32, pp_enabled=False)
    for module in ours.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums
    ids, target = torch.randint(2048, (2, ranks.size, 16)).to(ranks.mesh.device_type)
    target[1, :10] = -100
    positions, num_items = torch.arange(16, device=ids.device)[None], (target != -100).sum()
    mine = slice(ranks.rank, ranks.rank + 1)
    loss, _ = our_loss(ours(ids[mine], positions), target[mine], num_items)
    loss.backward()
    true, _ = their_loss(theirs(ids, positions.expand(2, -1)), target, num_items)
    true.backward()
    dist.all_reduce(loss := loss.detach())
    ranks.is_close(loss, true)
    check_gradients(ranks, ours, theirs)
    _, same_loss = build("linear_cross_entropy", loss=CrossEntropyLoss.Config())
    assert type(same_loss) is type(our_loss)
    summed, _ = our_loss(ours(ids[mine], positions), target[mine])  # as in validation
    dist.all_reduce(summed := summed.detach())
    ranks.is_close(summed, true * num_items)


def check_torchtitan_mtp(ranks: Ranks) -> None:
    """DeepSeek-V3 with two layers of multi-token prediction under FSDP, compared with the original in one process."""
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel_mtp
    from torchtitan.models.deepseek_v3.mtp import MTPLoss, apply_fsdp_to_mtp_decoder

    def build(*overrides):
        config = deepseek_v3_debugmodel_mtp()
        decoder = config.model_spec.model
        decoder.layers = decoder.layers[:1]
        decoder.mtp_layers = [copy.deepcopy(decoder.mtp_layers[0]) for _ in range(2)]
        for layer in decoder.mtp_layers:  # a dense MLP, because its experts are for GPUs
            layer.moe, layer.feed_forward = None, decoder.layers[0].feed_forward
        for layer in (*decoder.layers, *decoder.mtp_layers):
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
        apply_overrides(
            OverrideConfig(imports=[f"quackish.integrations.torchtitan.{name}" for name in overrides]), config
        )
        with torch.device(ranks.mesh.device_type):
            model = config.model_spec.model.build()
            model.init_states()
        return model, config.loss.build(compile_config=None)

    (theirs, their_loss), (ours, our_loss) = build(), build("rms_norm", "linear_cross_entropy")
    assert type(their_loss) is MTPLoss
    ours.load_state_dict(theirs.state_dict())
    our_loss.set_lm_head(ours.lm_head)
    ours._skip_lm_head = True  # as torchtitan's trainer does
    apply_fsdp_to_mtp_decoder(ours, ranks.mesh, param_dtype=ranks.dtype, reduce_dtype=FP32, pp_enabled=False)
    for module in ours.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums
    ids, target = torch.randint(2048, (2, ranks.size, 16)).to(ranks.mesh.device_type)
    target[1, :10] = -100
    positions, num_items = torch.arange(16, device=ids.device).expand(2, -1), (target != -100).sum()
    mine = slice(ranks.rank, ranks.rank + 1)
    hidden = ours(ids[mine], positions[mine])
    assert [h.shape[-1] for h in hidden] == [ours.lm_head.in_features] * 3
    assert isinstance(ours.lm_head, nn.Linear)
    loss, _ = our_loss(hidden, target[mine], num_items, positions=positions[mine])
    loss.backward()
    true, _ = their_loss(theirs(ids, positions), target, num_items, positions=positions)
    true.backward()
    dist.all_reduce(loss := loss.detach())
    ranks.is_close(loss, true)
    check_gradients(ranks, ours, theirs)


def check_torchtitan_tensor_parallel(ranks: Ranks) -> None:
    """As its backend partial_dtensor: classes sharded, hidden states replicated, plain labels."""
    from torchtitan.models.common.linear import Linear

    from quackish.integrations.torchtitan import LinearCrossEntropyLoss

    head = Linear.Config(in_features=H, out_features=V, bias=True).build()
    nn.init.normal_(head.weight)
    nn.init.normal_(head.bias)
    loss = LinearCrossEntropyLoss.Config(z_loss=1e-2).build()
    loss.set_lm_head(head)
    hidden, labels = ranks.randn(2, 8, H), torch.randint(V, (2, 8))
    labels[0, :3] = -100
    w64, b64, x64 = (t.detach().double().requires_grad_() for t in (head.weight, head.bias, hidden))
    true = quackish.linear_cross_entropy(x64, w64, labels, linear_bias=b64, z_loss=1e-2, num_items=9)
    true.backward()

    whole = head.weight
    head.weight = nn.Parameter(whole[: V // 2].detach())  # as of spmd_types
    with pytest.raises(quackish.UnsupportedError, match=f"lm_head.weight has {V // 2} of {V} classes"):
        loss(hidden, labels)
    head.weight = whole
    with pytest.raises(quackish.UnsupportedError, match="labels are a DTensor"):  # as of full_dtensor
        loss(*(distribute_tensor(t, ranks.mesh, [Replicate()]) for t in (hidden, labels)))

    head.weight, head.bias = (nn.Parameter(distribute_tensor(p, ranks.mesh, [Shard(0)])) for p in (whole, head.bias))
    x = distribute_tensor(hidden, ranks.mesh, [Replicate()]).requires_grad_()
    got, _ = loss(x, labels, torch.tensor(9))
    got.backward()
    for mine, truth in ((got, true), (x.grad, x64.grad), (head.weight.grad, w64.grad), (head.bias.grad, b64.grad)):
        ranks.is_close(mine, truth)
    parallelize_module(head, ranks.mesh, ColwiseParallel())
    with pytest.raises(AttributeError, match="placements"):  # its plan needs sharded logits: must not be silent
        loss(hidden, labels)


def check_torchtitan_refuses(ranks: Ranks) -> None:
    from torchtitan.components.loss import ChunkedLossWrapper, MSELoss
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.muse_glimmer.model import SoftCappedLinear

    from quackish.integrations.torchtitan import LinearCrossEntropyLoss, linear_cross_entropy

    with pytest.raises(ValueError, match="schedule is 'fast'"):
        LinearCrossEntropyLoss.Config(schedule="fast").build()
    for config in (MSELoss.Config(), ChunkedLossWrapper.Config(loss_fn=MSELoss.Config())):
        with pytest.raises(ValueError, match=r"loss is .*MSELoss\.Config\(.*, expected a Config of CrossEntropyLoss"):
            linear_cross_entropy(config)
    loss, other = (LinearCrossEntropyLoss.Config(z_loss=z).build() for z in (0.0, 1.0))
    hidden, labels = torch.ones(1, 2, H), torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=r"no lm_head yet: call set_lm_head\(model.lm_head\)"):
        loss(hidden, labels)
    with pytest.raises(quackish.UnsupportedError, match="lm_head is a SoftCappedLinear"):
        loss.set_lm_head(SoftCappedLinear.Config(in_features=H, out_features=V, output_multiplier=0.5).build())
    head = Linear.Config(in_features=H, out_features=V).build()
    nn.init.zeros_(head.weight)
    loss.set_lm_head(head)
    other.set_lm_head(head)  # with options of its own
    log_v = torch.tensor(V, dtype=FP64).log()
    ranks.is_close(loss(hidden, labels)[0], 2 * log_v)
    ranks.is_close(other(hidden, labels)[0], 2 * (log_v + log_v**2))


def check_megatron(ranks: Ranks) -> None:
    """megatron-core's output layer and loss as one function, with and without tensor parallelism."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from quackish.integrations.megatron import output_layer_loss

    for size, is_shared in itertools.product((1, 2), (False, True)):
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
        config = TransformerConfig(
            num_layers=1, hidden_size=H, num_attention_heads=2, use_cpu_initialization=True, add_bias_linear=False,
            tensor_model_parallel_size=size,
        )  # fmt: skip
        model = GPTModel(config, get_gpt_layer_local_spec(), 64, 16, share_embeddings_and_output_weights=is_shared)
        layer, weight = model.output_layer, model.shared_embedding_or_output_weight() if is_shared else None
        owner = layer.weight if weight is None else weight
        hidden, labels = torch.randn(8, 2, H, requires_grad=True), torch.randint(64, (2, 8))
        grad = torch.rand(2, 8)
        logits, _ = layer(hidden, weight=weight)
        theirs = model.compute_language_model_loss(labels, logits)
        wants = torch.autograd.grad(theirs, [hidden, owner], grad)
        for sequence_parallel in (False, True)[:size]:
            layer.sequence_parallel = sequence_parallel
            mine = slice(4 * ranks.rank, 4 * ranks.rank + 4) if sequence_parallel else slice(None)
            part = hidden.detach()[mine].requires_grad_()
            ours = output_layer_loss(layer, part, labels, weight=weight)
            got = torch.autograd.grad(ours, [part, owner], grad)
            assert ours.shape == (2, 8)
            for one, want in zip((ours, *got), (theirs, wants[0][mine], wants[1]), strict=True):
                ranks.is_close(one, want.double())
        config.defer_embedding_wgrad_compute = True
        with pytest.raises(quackish.UnsupportedError, match="defer_embedding_wgrad_compute is True"):
            output_layer_loss(layer, part, labels, weight=weight)
        parallel_state.destroy_model_parallel()


# Processes ------------------------------------------------------------------------------------------------------------

COMPILED = (check_norm_is_compiled, check_compiled_under_fsdp)  # first, so that tracing registers the rules
EAGER = (
    check_norm,
    check_norm_refuses,
    check_sequence_parallel,
    check_head_under_fsdp,
    check_bf16_policy_of_tied_weights,
    check_ddp,
)
INTEGRATIONS = {
    check_torchtitan: "torchtitan",
    check_torchtitan_mtp: "torchtitan",
    check_torchtitan_tensor_parallel: "torchtitan",
    check_torchtitan_refuses: "torchtitan",
    check_transformers: "transformers",
    check_transformers_experts: "transformers",
    check_transformers_tensor_parallel: "transformers",
    check_trl: "trl",
    check_megatron: "megatron",
}
TWO = (*COMPILED, *EAGER, *INTEGRATIONS)
# Meshes with two dimensions, and a rank that ignores all its targets.
FOUR = (check_norm_backward, check_norm, check_head_under_fsdp, check_transformers_tensor_parallel)
MISSING = {package for package in INTEGRATIONS.values() if importlib.util.find_spec(package) is None}


def named(checks: tuple):
    """A parameter for each check; those of packages that are not installed are skipped."""
    return [
        pytest.param(
            check.__name__,
            marks=[
                pytest.mark.skipif(INTEGRATIONS.get(check) in MISSING, reason=f"{INTEGRATIONS.get(check)} is missing"),
                *[pytest.mark.integrations] * (INTEGRATIONS.get(check, "transformers") != "transformers"),
            ],
        )
        for check in checks
    ]


def run_checks(rank: int, checks: list, size: int, device: str, folder: str) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    name = "nccl" if device == "cuda" else "gloo"
    limit = datetime.timedelta(seconds=600)
    dist.init_process_group(name, init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=limit)
    settings = (BF16, "cute") if device == "cuda" else (FP32, "auto")
    ranks = Ranks(init_device_mesh(device, (size,)), rank, *settings)
    for i, check in enumerate(checks):
        Path(folder, str(rank)).write_text(str(i))
        torch.manual_seed(0)
        check(ranks)
    dist.barrier()  # wait: other ranks may still communicate
    dist.destroy_process_group()


def failures_of(checks: tuple, size: int, device: str, folder: Path) -> dict[str, str]:
    """{check: why it failed, or ""}.

    After a failure the ranks are out of step, so new processes run the remaining checks.
    """
    found, left = {}, [check for check in checks if INTEGRATIONS.get(check) not in MISSING]
    while left:
        this = folder / str(len(left))
        this.mkdir()
        try:
            forked.context()  # prepares the server
            arguments = (left, size, device, str(this))
            torch.multiprocessing.start_processes(run_checks, arguments, size, start_method="forkserver")
            reached, why = len(left), ""
        except Exception as error:  # the first rank that failed; the others may have reached a later check
            began = [int(path.read_text() or 0) for path in this.glob("[0-9]*")]
            reached, why = min(began, default=0), str(error)
        found |= dict.fromkeys((check.__name__ for check in left[:reached]), "")
        found |= {check.__name__: why for check in left[reached : reached + 1]}
        left = left[reached + 1 :]
    return found


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    return once(tmp_path_factory, "two_processes", partial(failures_of, TWO, 2, "cpu"))


@pytest.fixture(scope="module")
def four_processes(tmp_path_factory):
    return once(tmp_path_factory, "four_processes", partial(failures_of, FOUR, 4, "cpu"))


@pytest.fixture(scope="module")
def two_gpus(tmp_path_factory):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return once(tmp_path_factory, "two_gpus", partial(failures_of, (*COMPILED, *EAGER), 2, "cuda"))


def assert_passed(check: str, failures: dict[str, str]) -> None:
    if failures[check]:
        pytest.fail(failures[check], pytrace=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("check", named(TWO))
def test_two_processes(check, two_processes):
    assert_passed(check, two_processes)


@pytest.mark.exhaustive
@pytest.mark.parametrize("check", named(FOUR))
def test_four_processes(check, four_processes):
    assert_passed(check, four_processes)


@pytest.mark.gpu
@pytest.mark.parametrize("check", named((*COMPILED, *EAGER)))
def test_two_gpus(check, two_gpus):
    assert_passed(check, two_gpus)
