"""The cells of matrix.py for stacks of experts: hostile bytes in two blocks, each one experts module and a branch."""

import functools

import torch
from bitshard import experts, fsdp
from bitshard.experts.modules import PackedExperts
from common import BASE_DTYPE, gathered_dtypes, hostile_values, plant, wrong_bytes
from helpers.bytes import as_bytes
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.distributed.tensor import DTensor
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

COUNTS = {"4 experts": 4, "5 experts": 5, "2 experts": 2}  # 3 ranks divide none, and are more than 2
HIDDEN, INTERMEDIATE, TOKENS = 64, 32, 6


class Routed(nn.Module):
    """An experts module that every token reaches two experts of, and a small trainable branch."""

    def __init__(self, count, seed):
        super().__init__()
        settings = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "moe_intermediate_size": INTERMEDIATE}
        if seed % 2:  # stacks [E, K, N] and biases
            self.base = GptOssExperts(GptOssConfig(**settings, num_local_experts=count))
        else:
            self.base = Qwen3MoeExperts(Qwen3MoeConfig(**settings, num_experts=count))
        for name, parameter in self.base.named_parameters():
            shape = parameter.shape
            parameter.data = torch.zeros(shape, dtype=BASE_DTYPE)
            if not name.endswith("bias"):
                values = hostile_values(shape[0] * shape[1], shape[2], BASE_DTYPE, seed)
                parameter.data = values.view(shape) * 0.1
            parameter.requires_grad_(False)
        token = torch.arange(TOKENS)
        self.register_buffer("chosen", torch.stack([token % count, (token + 1) % count], 1))
        self.branch = nn.Parameter(torch.randn(HIDDEN, HIDDEN, dtype=BASE_DTYPE) * 0.1)

    def forward(self, x):
        counts = torch.full((TOKENS, 2), 0.5, dtype=x.dtype, device=x.device)
        return self.base(x, self.chosen, counts) + (x.to(self.branch.dtype) @ self.branch).to(x.dtype)


class Spy:
    """Compares what an experts module sees in forward, and what it gives of ones, with what it was quantized to."""

    def __init__(self, routed):
        module = routed.base
        self.expected = {
            name: (as_bytes(module._parameters[name].data), as_bytes(held.state.absmax))
            for name, held in module.packed_stacks.items()
        }
        self.chosen, self.seen, self.equal, self.output = routed.chosen, [], [], None
        self.output = self.of_ones(module)
        module.register_forward_hook(self.look)

    def of_ones(self, module):
        device = self.chosen.device
        x = torch.ones(TOKENS, HIDDEN, dtype=BASE_DTYPE, device=device)
        with torch.no_grad():
            return type(module).forward(module, x, self.chosen, torch.ones_like(self.chosen).to(BASE_DTYPE))

    def look(self, module, args, output):
        for name, (packed, scales) in self.expected.items():
            held = module.packed_stacks[name]
            found = (wrong_bytes(getattr(module, name), packed), wrong_bytes(held.state.absmax, scales))
            self.seen.append(found)
        self.equal.append(torch.equal(self.of_ones(module), self.output))

    def wrong(self):
        """The largest numbers of wrong bytes of weights and of scales since it was asked last."""
        seen, self.seen = self.seen, []
        return [max((abs(counts[i]) for counts in seen), default=-1) for i in (0, 1)]


def build(count, storage, device, quant_type):
    torch.manual_seed(0)
    model = nn.Sequential(Routed(count, 0), Routed(count, 1)).to(device)
    experts.quantize(model, quant_storage=storage, quant_type=quant_type)
    return model


def shard(model, version, param_dtype, device):
    if version == 2:
        policy = MixedPrecisionPolicy(param_dtype=param_dtype)
        for block in model:
            fully_shard(block, mp_policy=policy)
        return fully_shard(model, mp_policy=policy)
    wrap = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, PackedExperts))
    precision = MixedPrecision(param_dtype=param_dtype) if param_dtype else None
    return FullyShardedDataParallel(model, auto_wrap_policy=wrap, mixed_precision=precision, device_id=device)


def run_cell(version, storage, param_dtype, count, device, world, quant_type="nf4"):
    """As of matrix.py: [wrong weight bytes, wrong scale bytes], and what is wrong and equal after a fault in each."""
    model = build(count, storage, device, quant_type)
    spies = [Spy(block) for block in model]
    first = model[0].base
    model = shard(model, version, param_dtype, device)
    x = torch.ones(TOKENS, HIDDEN, dtype=BASE_DTYPE, device=device)
    with gathered_dtypes() as dtypes:
        for _ in range(2):
            model(x).float().sum().backward()
    counts = [max(of) for of in zip(*(spy.wrong() for spy in spies), strict=True)]
    assert all(len(spy.equal) == 2 and all(spy.equal) for spy in spies), "other results of the same bytes"
    share = fsdp.measure(model)
    assert share.weights == 4 and share.ranks == world, share
    held = first.packed_stacks["down_proj"]
    if version == 2:
        assert dtypes == {torch.uint8}, dtypes
        assert share.own_packed <= -(-share.packed // world) + 4 * 4 and isinstance(held.shard, DTensor), share
        plant(held.shard._local_tensor.plain())
        plant(held.state.absmax if held.state.sharded is None else held.state.sharded.scales)
    else:
        unit = next(unit for unit in FullyShardedDataParallel.fsdp_modules(model) if unit.module is first)
        plant(unit._flat_param.data)
        plant(held.state.absmax)
    spies[0].equal.clear()
    with torch.no_grad():
        model(x)
    return [*counts, *spies[0].wrong(), int(spies[0].equal[0])]
