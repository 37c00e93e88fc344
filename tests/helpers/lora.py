"""LoRA layers of peft on 4-bit and int8 weights, alone: peft's, their fused copies, and what float64 makes of both."""

import contextlib
import copy

import bitsandbytes as bnb
import peft
import torch
from bitshard import functional, lora
from torch.utils.checkpoint import checkpoint

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def model(
    shapes=((96, 128),),
    compute=torch.float32,
    adapter=torch.float32,
    bias=True,
    base_dtype=None,
    seed=0,
    threshold=None,
    **options,
):
    """A Sequential of `Linear4bit` [N, K] under one LoRA adapter whose A and B are random, of dtype `adapter`.

    threshold: of `Linear8bitLt`, which the layers are then.
    """
    torch.manual_seed(seed)
    options = {"r": 8, "lora_alpha": 12, **options}
    if threshold is None:
        layers = [bnb.nn.Linear4bit(k, n, bias=bias, compute_dtype=compute, quant_type="nf4") for n, k in shapes]
    else:
        eight = {"has_fp16_weights": False, "threshold": threshold}
        layers = [bnb.nn.Linear8bitLt(k, n, bias=bias, **eight) for n, k in shapes]
    base = torch.nn.Sequential(*layers).to("cpu")
    base.is_loaded_in_4bit, base.is_loaded_in_8bit = threshold is None, threshold is not None
    config = peft.LoraConfig(target_modules=[str(i) for i in range(len(shapes))], **options)
    wrapped = peft.get_peft_model(base.requires_grad_(False), config)
    randomize(wrapped, adapter)
    return wrapped


def randomize(wrapped, dtype=None):
    """Give every A and B values such that the adapter's part of y is about as large as the weight's."""
    for layer in layers(wrapped):
        for part in (layer.lora_A, layer.lora_B):
            for linear in part.values():
                values = torch.randn(linear.weight.shape) / linear.in_features**0.5
                linear.weight.data = values.to(linear.weight.dtype if dtype is None else dtype)


def layers(wrapped):
    """The LoRA layers of a model."""
    return [module for module in wrapped.modules() if isinstance(module, peft.tuners.lora.LoraLayer)]


def part_of(layer, role):
    """One of the four modules inside a LoRA layer, as `lora.report` calls it."""
    inside = {"base layer": layer.base_layer, "A": layer.lora_A, "B": layer.lora_B, "dropout": layer.lora_dropout}
    return inside[role] if role == "base layer" else inside[role]["default"]


def fused_copy(wrapped):
    """A copy of a model of peft, fused."""
    twin = copy.deepcopy(wrapped)
    lora.fuse(twin)
    return twin


class Checkpointed(torch.nn.Module):
    """`inner` with gradient checkpointing."""

    def __init__(self, inner, **options):
        super().__init__()
        self.inner, self.options = inner, options

    def forward(self, x):
        return checkpoint(self.inner, x, **self.options)


def run(wrapped, x, dy, autocast=None, seed=None):
    """[y, dx, dA and dB of each layer] of a model under the output gradient dy; seed: of what a dropout draws."""
    x = x.detach().clone().requires_grad_()
    wrapped.zero_grad()
    if seed is not None:
        torch.manual_seed(seed)
    with torch.autocast("cpu", dtype=autocast) if autocast else contextlib.nullcontext():
        y = wrapped(x)
    y.backward(dy)
    trained = [p.grad.clone() for p in wrapped.parameters() if p.grad is not None]
    return [y.detach(), x.grad, *trained]


def noise_of(layer, x, seed):
    """What peft's dropout multiplies x with after `torch.manual_seed(seed)`: 0 or about 1 / (1 - p), in its dtype."""
    (name,) = layer.active_adapters
    torch.manual_seed(seed)
    return layer.lora_dropout[name](torch.ones_like(x, dtype=layer.lora_A[name].weight.dtype))


def exact(layer, x, dy, noise=1.0):
    """What `run` gives for one layer, in float64, from the decoded weight; A multiplies x times noise."""
    base = layer.base_layer
    weight = functional.dequantize_4bit(base.weight.data, base.quant_state).double()
    (name,) = layer.active_adapters
    x, A, B = (
        tensor.detach().double().requires_grad_()
        for tensor in (x, layer.lora_A[name].weight, layer.lora_B[name].weight)
    )
    bias = None if base.bias is None else base.bias.detach().double()
    y = torch.nn.functional.linear(x, weight, bias) + layer.scaling[name] * (x * noise @ A.t()) @ B.t()
    y.backward(dy.double())
    return [y.detach(), x.grad, A.grad, B.grad]


def saved(wrapped, x, autocast=None):
    """Bytes that a forward keeps for its backward: (all, without parameters)."""
    sizes, owned = [], {p.untyped_storage().data_ptr() for p in wrapped.parameters()}

    def keep(tensor):
        sizes.append((tensor.nbytes, tensor.untyped_storage().data_ptr() in owned))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            y = wrapped(x)
    assert y.requires_grad
    return sum(size for size, _ in sizes), sum(size for size, parameter in sizes if not parameter)


def error(actual, expected):
    """The relative error of a tensor in the Frobenius norm."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@contextlib.contextmanager
def fused_calls():
    """The number of calls that were fused, while this is open: a list that grows by one element with each."""
    from bitshard.lora import layer

    calls, apply, product = [], layer._apply, layer.product
    layer._apply = lambda *args: (calls.append("trained"), apply(*args))[1]
    layer.product = lambda *args: (calls.append("no gradient"), product(*args))[1]
    try:
        yield calls
    finally:
        layer._apply, layer.product = apply, product


@contextlib.contextmanager
def wrong_scale():
    """While this is open, fused layers have a scale that is wrong by a fiftieth in every product with B."""
    from bitshard import _C
    from bitshard.lora import layer, product

    plain, scaled, backward = product.product, product.scaled, _C.lora_4bit_backward
    product.product = layer.product = lambda *args: plain(*args[:6], 1.02 * args[6], *args[7:])
    product.scaled = lambda left, right, scale: scaled(left, right, 1.02 * scale)
    _C.lora_4bit_backward = lambda *args: backward(*args[:14], 1.02 * args[14], *args[15:])
    try:
        yield
    finally:
        product.product, layer.product, product.scaled = plain, plain, scaled
        _C.lora_4bit_backward = backward
