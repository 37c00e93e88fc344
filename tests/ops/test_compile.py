"""The fakes of every op, and torch.compile without graph breaks, forward and backward."""

import pytest
import torch
from bitshard import functional, ops
from bitshard.kinds import kind_of
from bitshard.nn.linear import LinearNF4
from torch import nn

NAMES = (
    "quantize_4bit",
    "dequantize_4bit",
    "quantize_blockwise",
    "dequantize_blockwise",
    "linear_4bit",
    "linear_4bit_dgrad",
    "linear_4bit_int8",
    "grouped_linear_4bit",
    "grouped_linear_4bit_dgrad",
    "sort_by_expert",
    "sum_by_token",
    "search_4bit",
    "round_4bit",
    "merge_4bit",
    "merge_e2m1",
    "merged_values",
    "quantize_e2m1",
    "quantize_int8",
    "dequantize_int8",
    "product_int8",
    "scale_product_int8",
    "linear_int8",
    "linear_int8_dgrad",
    "checksum",
    "optimizer_32bit",
    "optimizer_8bit_blockwise",
)


def arguments(name: str, nested: bool, dtype: torch.dtype) -> tuple:
    """Arguments of an op for a weight of odd shape."""
    N, K = 33, 70
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed, state = functional.quantize_nf4(w, compress_statistics=nested, quant_storage=torch.bfloat16)
    offs = torch.tensor([2, 2, 5], dtype=torch.int32)
    stack, of_stack = functional.quantize_experts_4bit(w.new_ones(3, 32, 48), 32, nested, "nf4", torch.bfloat16)
    map, none = ops.table("dynamic"), ops.empty(w.device)
    code, absmax = ops.quantize_blockwise(w, map, none, 256)
    codes, rows, _ = ops.quantize_int8(w, 0.0)
    short, of_short = kind_of("nvfp4" if nested else "mxfp4").quantize(w, quant_storage=torch.uint8)
    even, of_even = functional.quantize_nf4(w.new_ones(N, 128), compress_statistics=nested)
    numbers = (0, 1e-3, 0.9, 0.999, 0.0, 0.0, 1e-8, 0.01, 2)
    return {
        "quantize_4bit": (w, 64, 0, torch.float32),
        "dequantize_4bit": (packed, *state.scales(), 64, 0, N, K, dtype),
        "quantize_blockwise": (w, map, none, 256),
        "dequantize_blockwise": (code, absmax, map, none, 256, dtype),
        "linear_4bit": (torch.randn(2, 3, K).to(dtype), packed, *state.scales(), none, 64, 0, N, K),
        "linear_4bit_dgrad": (torch.randn(2, 3, N).to(dtype), packed, *state.scales(), 64, 0, N, K),
        "linear_4bit_int8": (torch.randn(2, 3, 128).to(dtype), even, *of_even.scales(), none, 64, 0, N, 128),
        "grouped_linear_4bit": (w.new_ones(6, 48), offs, stack, *of_stack.scales(), none, 32, 0, 32, 48),
        "grouped_linear_4bit_dgrad": (w.new_ones(6, 32), offs, stack, *of_stack.scales(), 32, 0, 32, 48),
        "sort_by_expert": (torch.tensor([[1, 0], [3, 1], [-1, 2]]), 3, False),
        "sum_by_token": (w[:6], torch.tensor([3, 0, 5, 1, 2, 4]), w.new_ones(2, 3)),
        "search_4bit": (w.float(), torch.ones(7), torch.ones(-(-N * K // 64), 5), 64, 0),
        "round_4bit": (torch.ones(3, 8), torch.eye(8), torch.ones(3, 8), 0),
        "merge_4bit": (
            *(packed, *state.scales(), w[:4], w[:, :4].contiguous(), torch.ones(4)),
            *(state.state2.code if nested else none, 64, 0, N, K),
        ),
        "merge_e2m1": (
            short,
            *of_short.scales(),
            w[:4],
            w[:, :4].contiguous(),
            torch.ones(4),
            of_short.blocksize,
            2,
            N,
            K,
        ),
        "merged_values": (packed, *state.scales(), w[:4], w[:, :4].contiguous(), torch.ones(4), 64, 0, N, K, 3, 20),
        "quantize_e2m1": (w, torch.tensor(0.01) if nested else none),
        "quantize_int8": (w, 2.0 if nested else 0.0),
        "dequantize_int8": (codes, rows, N, K, dtype),
        "product_int8": (codes.view(3, 11, K), codes),
        "scale_product_int8": (codes.int(), rows, w[0].float(), w[0], dtype),
        "linear_int8": (torch.randn(2, 3, K).to(dtype), codes, rows, none, 2.0, N, K),
        "linear_int8_dgrad": (torch.randn(2, 3, N).to(dtype), codes, rows, N, K),
        "checksum": (packed,),
        "optimizer_32bit": (w, *(w.float() ** 2 for _ in range(3)), none, *numbers, 0.0, 0.0, 1.0, False),
        "optimizer_8bit_blockwise": (
            *(w, w.clone(), code, code.clone(), map, map.abs(), absmax, absmax.clone()),
            *(*numbers, 1.0, False, 256),
        ),
    }[name]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(name, nested, dtype):
    """Schema, fake and tracing agree with what the op does. Gradients are autograd.py's, not the op's."""
    op = getattr(torch.ops.bitshard, name).default
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(op, arguments(name, nested, dtype), test_utils=checks)


def test_every_op_is_here():
    registered = {
        name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if name.startswith("bitshard::")
    }
    behind = {name for name in registered if name.endswith("_fused")}  # of an op, called by its kernel on CUDA only
    assert registered - behind == set(NAMES) and {name.removesuffix("_fused") for name in behind} <= set(NAMES)


def test_fakes_refuse_wrong_shapes():
    packed, state = functional.quantize_nf4(torch.randn(33, 70))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(RuntimeError, match="71 columns"):
        ops.linear_4bit(torch.empty(2, 71), packed, *state.scales(), ops.empty(packed.device), 64, 0, 33, 70)


def both(model: nn.Module, x: torch.Tensor, **settings):
    """(output, input gradient, parameter gradients), eager and compiled whole."""
    results = []
    for call in (model, torch.compile(model, fullgraph=True, **settings)):
        x = x.detach().clone().requires_grad_()
        model.zero_grad()
        y = call(x)
        y.square().sum().backward()
        results.append((y.detach(), x.grad, *[p.grad for p in model.parameters() if p.requires_grad]))
    return zip(*results, strict=True)


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("compute", [None, torch.bfloat16])
@pytest.mark.parametrize("nested", [False, True])
def test_linear(storage, compute, nested):
    torch._dynamo.reset()
    model = LinearNF4(64, 32, compute_dtype=compute, compress_statistics=nested, quant_storage=storage).to("cpu")
    for eager, compiled in both(model, torch.randn(3, 64), backend="aot_eager"):
        assert torch.equal(eager, compiled)
    with torch.no_grad():
        x = torch.randn(5, 64)
        assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))


class LoRALinear(nn.Module):
    """A 4-bit base and a LoRA beside it, as peft builds it."""

    def __init__(self, K: int, N: int):
        super().__init__()
        self.base_layer = LinearNF4(K, N, bias=False, compute_dtype=torch.float32, quant_storage=torch.bfloat16)
        self.lora_A = nn.Linear(K, 4, bias=False)
        self.lora_B = nn.Linear(4, N, bias=False)

    def forward(self, x):
        return self.base_layer(x).clone() + 2.0 * self.lora_B(self.lora_A(x))


class LlamaBlock(nn.Module):
    """RMSNorm, rotary attention, RMSNorm, gated MLP."""

    def __init__(self, width: int = 64, heads: int = 4, hidden: int = 96):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (LoRALinear(width, width) for _ in range(4))
        self.gate, self.up, self.down = LoRALinear(width, hidden), LoRALinear(width, hidden), LoRALinear(hidden, width)

    def rotate(self, x):
        angles = torch.arange(x.shape[-2])[:, None] * 10000 ** (-torch.arange(0, x.shape[-1], 2) / x.shape[-1])
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], dim=-1)

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (p(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        h = nn.functional.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        x = x + self.o(h.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_llama_block_with_lora(backend):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = LlamaBlock().to("cpu")
    for module in model.modules():
        if isinstance(module, LoRALinear):
            nn.init.normal_(module.lora_B.weight, std=0.02)
    for eager, compiled in both(model, torch.randn(2, 8, 64), backend=backend):
        assert torch.allclose(eager, compiled, atol=1e-4, rtol=1e-4)


def test_dynamic_shapes():
    torch._dynamo.reset()
    model = LinearNF4(64, 32).to("cpu")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for M in (3, 7, 1, 20):
        x = torch.randn(2, M, 64)
        assert torch.equal(compiled(x), model(x))


def test_compiled_quantize_and_dequantize():
    torch._dynamo.reset()

    def round_trip(x):
        packed, absmax = ops.quantize_4bit(x, 64, 0, torch.uint8)
        none = ops.empty(x.device)
        return ops.dequantize_4bit(packed, absmax, none, none, none, 64, 0, *x.shape, x.dtype)

    x = torch.randn(33, 70)
    assert torch.equal(torch.compile(round_trip, fullgraph=True, backend="aot_eager")(x), round_trip(x))


def test_transformers_llama_with_peft():
    """transformers' own Llama with peft's LoRA on 4-bit layers, compiled whole."""
    _, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    torch._dynamo.reset()
    from helpers import tiny

    model = tiny.llama(num_hidden_layers=1, vocab_size=128, num_key_value_heads=2)
    for name, linear in list(model.model.layers.named_modules()):
        if isinstance(linear, nn.Linear):
            layer = LinearNF4(
                linear.in_features, linear.out_features, False, torch.float32, quant_storage=torch.bfloat16
            )
            layer.weight.data = linear.weight.data
            model.model.layers.set_submodule(name, layer.to("cpu"))
    model.is_loaded_in_4bit = True
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    body = model.base_model.model.model
    assert type(body.layers[0].self_attn.q_proj).__module__ == "peft.tuners.lora.bnb"
    ids = torch.randint(0, 128, (2, 8))
    results = []
    for call in (body, torch.compile(body, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        y = call(input_ids=ids, use_cache=False).last_hidden_state
        y.square().sum().backward()
        results.append([y.detach(), *[p.grad for p in model.parameters() if p.grad is not None]])
    assert len(results[0]) == 1 + 2 * 7
    for eager, compiled in zip(*results, strict=True):
        assert torch.allclose(eager, compiled, atol=1e-5)
