"""torch.compile, without graph breaks, of 4-bit models with adapters and of code that reads packed weights itself."""

import pytest
import torch
from bitshard import functional
from bitshard.autograd import matmul_4bit
from bitshard.nn.linear import LinearNF4
from bitshard.tensor import PackedData, Params4bit
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from helpers.llama import TOKENS, load_4bit, save_llama  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
ADAPTERS = {"lora": {"init_lora_weights": False}, "dora": {"use_dora": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved Llama of one layer with odd sizes, in fp32."""
    target = tmp_path_factory.mktemp("llama")
    save_llama(target)
    return target


def with_adapter(folder, name: str) -> nn.Module:
    """The model as a QLoRA script loads it: NF4, nested scales, an adapter on every linear layer."""
    model = load_4bit(folder)
    transformers.set_seed(3)
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", **ADAPTERS[name])
    return peft.get_peft_model(model, settings)


def tokens(rows: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(3, TOKENS, (rows, length), generator=torch.Generator().manual_seed(rows + length))


def train(model: nn.Module, call, steps: int = 2) -> list[float]:
    """Losses of SGD on the adapter."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for _ in range(steps):
        loss = call(input_ids=tokens(), labels=tokens(), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_peft_model(folder, adapter):
    """Trained and evaluated in one graph each, with the losses and logits of eager."""
    model = with_adapter(folder, adapter).train()
    start = {name: value.clone() for name, value in model.state_dict().items() if "lora_" in name}
    eager = train(model, model)
    model.load_state_dict(start, strict=False)
    counter = CompileCounterWithBackend("aot_eager" if adapter == "dora" else "eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    assert train(model, compiled) == eager
    assert eager[-1] < eager[0]
    assert counter.frame_count == 1
    model.eval()
    with torch.no_grad():
        expected = model(input_ids=tokens(), use_cache=False).logits
        for _ in range(2):
            assert torch.equal(compiled(input_ids=tokens(), use_cache=False).logits, expected)
    assert counter.frame_count == 2


def test_peft_model_of_any_length(folder):
    model = with_adapter(folder, "dora").eval()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for rows, length in ((2, 12), (3, 7), (5, 20)):
            ids = tokens(rows, length)
            expected = model(input_ids=ids, use_cache=False).logits
            assert torch.equal(compiled(input_ids=ids, use_cache=False).logits, expected)
    assert counter.frame_count == 1


class OneLinear(nn.Module):
    """What peft takes for a 4-bit model."""

    is_loaded_in_4bit = True

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.proj = LinearNF4(64, 32, bias=False, compute_dtype=torch.float32)

    def forward(self, x):
        return self.proj(x)


def test_dora_layer_by_inductor():
    model = OneLinear().to("cpu")
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["proj"], use_dora=True))
    x = torch.randn(3, 64)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="inductor")
        assert torch.allclose(compiled(x), model(x), atol=1e-5, rtol=1e-5)


# ---- code that reads weights itself ----


def layer(**options) -> LinearNF4:
    torch.manual_seed(0)
    return LinearNF4(64, 32, bias=False, compute_dtype=torch.float32, **options).to("cpu")


def bytes_of(weight: Params4bit) -> torch.Tensor:
    """A copy, in which NaN patterns compare."""
    with torch._C.DisableTorchFunctionSubclass():
        return weight.data.view(torch.uint8).clone()


READS = {
    "dequantize data": lambda w, x: x @ functional.dequantize_4bit(w.data, w.quant_state).t(),
    "dequantize weight": lambda w, x: x @ functional.dequantize_4bit(w, w.quant_state).t(),
    "dequantize detached": lambda w, x: x @ functional.dequantize_4bit(w.detach(), w.quant_state).t(),
    "getter of data": lambda w, x: x @ functional.dequantize_4bit(torch.Tensor.data.__get__(w), w.quant_state).t(),
    "product with data": lambda w, x: matmul_4bit(x, w.data.t(), w.quant_state),
    "bytes": lambda w, x: x + w.data.view(torch.uint8).to(torch.float32).sum(),
    "part": lambda w, x: x + w.chunk(4)[1].view(torch.uint8).sum(),
    "strided": lambda w, x: x + w.as_strided((4, 1), (1, 1)).view(torch.uint8).sum(),
    "sizes": lambda w, x: x + w.data.numel() + w.data.element_size() + w.quant_state.blocksize + w.quant_state.shape[0],
    "class": lambda w, x: x + (w.__class__.__name__ == "Params4bit") + 2 * (type(w).__name__ == "Params4bit"),
    "state by name": lambda w, x: x + w.absmax.sum() + w.code.sum() + w.nested_absmax.sum() + w.nested_offset,
    "state": lambda w, x: x + w.quant_state.absmax.sum() + w.quant_state.offset + w.quant_state.state2.code.sum(),
    "state as a list": lambda w, x: x + w.quant_state[0].sum() + w.quant_state[4][0] + w.quant_state[3],
}


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("name", READS)
def test_reads(name, storage):
    weight = layer(quant_storage=storage).weight
    x = torch.randn(3, 64)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(READS[name], fullgraph=True, backend=counter)
    results = [compiled(weight, x) for _ in range(3)]
    expected = READS[name](weight, x)
    assert all(torch.equal(result, expected) for result in results)
    assert counter.frame_count <= 2  # the copies of shared tables are made in the first call


def test_module_that_dequantizes():
    """As kernels of others do: the weight of a submodule, its state, and a product of the dense weight."""

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = layer()

        def forward(self, x):
            state = getattr(self.inner.weight, "quant_state", None)
            return x @ functional.dequantize_4bit(self.inner.weight.data, state).to(x.dtype).t()

    model = Outer()
    x = torch.randn(3, 64, requires_grad=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    gradients = []
    for call in (model, compiled):
        gradients.append(torch.autograd.grad(call(x).square().sum(), x)[0])
    assert torch.equal(*gradients)


WRITES = {
    "data.mul_": lambda w: w.data.mul_(2),
    "data.zero_": lambda w: w.data.zero_(),
    "data[0] = 0": lambda w: w.data.__setitem__(0, 0),
    "detach().add_": lambda w: w.detach().add_(1),
    "chunk.fill_": lambda w: w.chunk(2)[0].fill_(1),
    "mul_": lambda w: w.mul_(2),
    "init": lambda w: nn.init.normal_(w.data),
}


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("name", WRITES)
def test_writes_raise(name, fullgraph):
    """In-place functions raise as in eager: Dynamo's error where it must trace all, else that of eager."""
    weight = layer(quant_storage=torch.bfloat16).weight
    before = bytes_of(weight)

    def write(w, x):
        WRITES[name](w)
        return x + 1

    error, text = (torch._dynamo.exc.Unsupported, None) if fullgraph else ((ValueError, TypeError), "packed bytes")
    with pytest.raises(error, match=text):
        torch.compile(write, fullgraph=fullgraph, backend="aot_eager")(weight, torch.ones(2))
    assert torch.equal(bytes_of(weight), before)


def test_copies_of_the_same_dtype_are_written():
    weight = layer(quant_storage=torch.bfloat16).weight
    value = torch.randn(weight.shape).bfloat16()

    def write(w, value):
        w.data.copy_(value)
        return value + 1

    torch.compile(write, fullgraph=True, backend="aot_eager")(weight, value)
    assert torch.equal(bytes_of(weight), value.view(torch.uint8))


def test_what_a_graph_returns_is_guarded():
    weight = layer().weight
    for read in (lambda w: w.data, lambda w: w.detach()):
        out = torch.compile(read, fullgraph=True, backend="aot_eager")(weight)
        assert type(out) is PackedData and out.data_ptr() == weight.data_ptr()
        with pytest.raises(ValueError, match="packed bytes"):
            out.mul_(2)


def test_assigned_data_of_another_dtype():
    model = layer()

    def replace(x, data):
        model.weight.data = data
        return model(x)

    with pytest.raises(TypeError, match="container"):
        torch.compile(replace, backend="aot_eager")(torch.randn(3, 64), torch.zeros(1024, 1))


def test_class_of_a_weight():
    """The class is what it is for everybody, and can be given to another tensor."""
    weight, other = layer().weight, nn.Parameter(torch.zeros(3), requires_grad=False)
    data, state = bytes_of(weight), weight.quant_state
    assert weight.__class__ is type(weight) is Params4bit and isinstance(weight, nn.Parameter)
    torch.utils.swap_tensors(weight, other)
    assert type(weight) is nn.Parameter and type(other) is Params4bit
    assert other.quant_state is state and torch.equal(bytes_of(other), data)


def test_blocks_of_8_bits():
    codes, state = functional.quantize_blockwise(torch.randn(1000))
    compiled = torch.compile(lambda a: functional.dequantize_blockwise(a, state), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(codes), functional.dequantize_blockwise(codes, state))
