"""What one step keeps and needs for a moment: the model's own code, run on the meta device and metered.

Products with quantized weights and their adapters are played by `Product`, `ProductInt8` and `Adapted`, which allocate
what bitshard's and peft's do; everything else is the model's code. One decoder layer of each kind is played, and
embeddings, head and loss once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bitshard.experts import modules as experts
from bitshard.planning.job import Job
from bitshard.planning.meter import Meter, noted
from bitshard.planning.model import Model

ATTENTION = "bitshard_played"  # name among transformers' attention functions


class Layer(NamedTuple):
    """Bytes of one decoder layer, without its weights and the gradients of its adapters.

    Attributes:
        kept: its input, which checkpointing keeps.
        saved: from forward to backward, without checkpointing.
        forward, backward: the most at a time.
    """

    kept: int
    saved: int
    forward: int
    backward: int


class Ends(NamedTuple):
    """Bytes of embeddings, head and loss, without weights.

    Attributes:
        forward, backward: the most at a time.
        logits: of one copy in the dtype of the model.
    """

    forward: int
    backward: int
    logits: int


class Play:
    """Plays a model for jobs; what was played is kept.

    Attributes:
        estimated: why activations are estimated, where the model's code does not run on the meta device.
    """

    def __init__(self, model: Model):
        self.model = model
        self._layers: dict[tuple, Layer] = {}
        self._ends: dict[tuple, Ends] = {}
        self._calls: dict[tuple, list[tuple[tuple, dict]]] = {}
        self.estimated: str | None = None

    def layer(self, number: int, kind: tuple, job: Job) -> Layer:
        """Decoder layer `number`, of a kind that `model.Unit` tells."""
        settings = (kind, job.seq, job.batch, job.rank, job.lora_bytes, job.autocast, job.targets, job.lora_experts)
        settings += (job.library, job.bits, job.experts_4bit, job.skip)
        if settings not in self._layers:
            self._layers[settings] = self._or_estimate(
                lambda: self._play_layer(number, job), lambda: self._estimate_layer(number, job)
            )
        return self._layers[settings]

    def ends(self, job: Job) -> Ends:
        """Embeddings, head and loss, of a chunk of the tokens where the job has the loss in chunks."""
        tokens = min(job.loss_chunk or job.seq * job.batch, job.seq * job.batch)
        if (tokens,) not in self._ends:
            self._ends[(tokens,)] = self._or_estimate(
                lambda: self._play_ends(tokens), lambda: self._estimate_ends(tokens)
            )
        return self._ends[(tokens,)]

    def _or_estimate(self, play: Callable[[], Any], estimate: Callable[[], Any]) -> Any:
        """What was played, or an estimate for code that asks for values or calls kernels of one kind of device."""
        try:
            return play()
        except Exception as error:
            words = " ".join(str(error).split())[:120]
            self.estimated = self.estimated or f"{type(error).__name__}: {words}"
            return estimate()

    def _estimate_layer(self, number: int, job: Job) -> Layer:
        """1.13 times what its linear layers take in and give out, as in a Llama of 8 billion parameters."""
        _, layer = self.model.layers()[number]
        tokens = job.seq * job.batch
        features = sum(m.in_features + m.out_features for m in layer.modules() if type(m) is nn.Linear)
        for module in layer.modules():
            if experts.is_experts(module):
                chosen = getattr(self.model.config, "num_experts_per_tok", None) or 1
                features += chosen * sum(
                    sum(p.shape[1:]) for p in map(module._parameters.get, experts.stack_names(module))
                )
        saved = int(1.13 * tokens * features * 2)
        return Layer(tokens * self.model.embedding.weight.shape[1] * 2, saved, saved, int(1.4 * saved))

    def _estimate_ends(self, tokens: int) -> Ends:
        """10 and 12 bytes for each logit, as in a Llama."""
        logits = tokens * self.model.embedding.weight.shape[0]
        return Ends(10 * logits, 12 * logits, 2 * logits)

    def _play_layer(self, number: int, job: Job) -> Layer:
        call = self.call(number, job)
        if call is None:  # of an image tower, which text does not pass
            return Layer(0, 0, 0, 0)
        args, kwargs = call
        layer = self.stand_in(number, job)
        hidden = args[0].detach().requires_grad_()
        shared = [value for value in _tensors((args, kwargs))]
        with Meter([hidden, *shared, *layer.parameters(), *layer.buffers()]) as meter:
            out = _first(layer(hidden, *args[1:], **kwargs))
            saved, forward = meter.live - out.numel() * out.element_size(), meter.peak
            gradient = torch.empty_like(out)
            meter.since()
            out.backward(gradient)
            del out, gradient
        kept = hidden.numel() * hidden.element_size()
        return Layer(kept, saved, forward, meter.peak)

    def _play_ends(self, tokens: int) -> Ends:
        model = self.model.model
        with Meter([*model.parameters(), *model.buffers()]) as meter, stubs(self.model):
            loss = self.loss(tokens)
            forward = meter.peak
            meter.since()
            loss.backward()
            del loss
        vocabulary = self.model.embedding.weight.shape[0]
        return Ends(forward, meter.peak, tokens * vocabulary * self.model.embedding.weight.element_size())

    def loss(self, tokens: int) -> Tensor:
        """That of so many tokens."""
        ids = torch.empty((1, tokens), dtype=torch.long, device="meta")
        return self.model.model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, use_cache=False).loss

    def call(self, number: int, job: Job) -> tuple[tuple, dict] | None:
        """The arguments that the model gives to one of its decoder layers; None: it does not call it."""
        size = (job.batch, job.seq)
        if size not in self._calls:
            ids = torch.empty(size, dtype=torch.long, device="meta")
            with torch.no_grad(), Meter(), stubs(self.model) as calls:
                self.model.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
            self._calls[size] = calls
        return self._calls[size][number]

    def stand_in(self, number: int, job: Job) -> nn.Module:
        """A copy of decoder layer `number` in which quantized products and adapters are played."""
        name, layer = self.model.layers()[number]
        new = copy.deepcopy(layer)
        for path, module in list(new.named_modules()):
            whole = f"{name}.{path}"
            adapters = self.model.adapted(whole, layer.get_submodule(path), job)
            if experts.is_experts(module):
                new.set_submodule(path, Experts(module, job))
            elif type(module) is nn.Linear and (
                adapters or self.model.is_packed(whole, layer.get_submodule(path), job)
            ):
                packed = self.model.is_packed(whole, layer.get_submodule(path), job)
                new.set_submodule(path, Adapted(module, packed, bool(adapters), job))
        return new.train()


# ---- stand-ins ------------------------------------------------------------------------------------------------------


def _note_product(rows: Tensor, N: int, K: int, gradient: bool = False) -> None:
    noted("product", rows.shape[:-1].numel(), N, K, gradient=gradient)


class Product(torch.autograd.Function):
    """x [..., K] -> [..., N] with a frozen weight: nothing is kept. bitsandbytes decodes the weight both times."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, columns: int, decoded: int) -> Tensor:
        ctx.sizes = (x.shape[-1], decoded)
        _note_product(x, columns, x.shape[-1])
        panel = x.new_empty(decoded)
        out = x.new_empty(*x.shape[:-1], columns)
        del panel
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        columns, decoded = ctx.sizes
        _note_product(dy, dy.shape[-1], columns, gradient=True)
        panel = dy.new_empty(decoded)
        dx = dy.new_empty(*dy.shape[:-1], columns)
        del panel
        return dx, None, None


class ProductInt8(torch.autograd.Function):
    """The same with an int8 weight: codes of x for a moment, what else it needs is in the workspaces.

    bitsandbytes keeps x, makes codes of float16 copies of it, stores int32 sums and a float16 result before that in
    x's dtype, and decodes the weight for backward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, columns: int, decoded: int) -> Tensor:
        ctx.sizes = (x.shape[-1], decoded)
        _note_product(x, columns, x.shape[-1])
        codes = x.new_empty(x.shape, dtype=torch.int8)
        if decoded:
            ctx.kept = x
            half = x.new_empty(x.shape, dtype=torch.float16)
            magnitudes = x.new_empty(x.shape, dtype=torch.float16)
            del half, magnitudes
            sums = x.new_empty(*x.shape[:-1], columns, dtype=torch.int32)
            half = sums.new_empty(sums.shape, dtype=torch.float16)
            out = x.new_empty(sums.shape)
            del sums, half
        else:
            out = x.new_empty(*x.shape[:-1], columns)
        del codes
        return out

    backward = Product.backward


class Adapted(nn.Module):
    """A linear layer with its adapters as peft computes them."""

    def __init__(self, linear: nn.Linear, packed: bool, adapted: bool, job: Job):
        super().__init__()
        self.linear, self.packed = linear, packed
        self.product = ProductInt8.apply if job.bits == 8 else Product.apply
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.decoded = linear.weight.numel() if job.library == "bitsandbytes" else 0
        self.a = self.b = None
        if adapted:
            dtype = linear.weight.dtype if job.autocast else getattr(torch, job.lora_dtype)
            self.a = _trained(job.rank, linear.in_features, dtype)
            self.b = _trained(linear.out_features, job.rank, dtype)

    @property
    def weight(self) -> Tensor:
        """That of the layer."""
        return self.linear.weight

    @property
    def bias(self) -> Tensor | None:
        """That of the layer."""
        return self.linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        y = self.product(x, self.linear.out_features, self.decoded) if self.packed else self.linear(x)
        if self.a is None:
            return y
        delta = nn.functional.linear(nn.functional.linear(x.to(self.a.dtype), self.a), self.b)
        return y + (delta * 0.5).to(y.dtype)


class Experts(nn.Module):
    """Experts in stacks, as `experts.forward` computes them: a row for each chosen (token, expert) pair."""

    def __init__(self, module: nn.Module, job: Job):
        super().__init__()
        self.module, self.job = module, job
        self.up, self.down = (module._parameters[name] for name in experts.stack_names(module))
        inner = module._parameters["down_proj"].shape[-1]
        hidden = module._parameters["down_proj"].shape[-2]
        if getattr(module, "is_transposed", False):
            inner, hidden = hidden, inner
        self.sizes = (hidden, self.up.shape[1:].numel() // hidden, inner)
        self.adapted = job.lora_experts

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        tokens, k = top_k_index.shape
        hidden, up, _ = self.sizes
        x = Rows.apply(hidden_states, tokens * k)
        h = self._product(x, up)
        h = self.module._apply_gate(h) if self.module.has_gate else self.module.act_fn(h)
        y = Rows.apply(self._product(h, hidden), tokens * k)
        return (y.view(tokens, k, -1) * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)

    def _product(self, x: Tensor, columns: int) -> Tensor:
        return StackProduct.apply(x, columns, self.up.shape[0], self.adapted)


class Rows(torch.autograd.Function):
    """[T, H] -> [S, H] by an index, which is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int) -> Tensor:
        ctx.rows = x.shape[0]
        ctx.save_for_backward(torch.empty(rows, dtype=torch.long, device=x.device))
        return x.new_empty(rows, x.shape[1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        ordered = torch.empty_like(dy)
        return ordered.view(ctx.rows, -1, dy.shape[1]).sum(1), None


class StackProduct(torch.autograd.Function):
    """x [S, K] -> [S, N] with a stack of experts; with adapters x is kept for their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, columns: int, stack: int, adapted: bool) -> Tensor:
        ctx.stack, ctx.columns = stack, x.shape[1]
        noted("stack", stack, x.shape[0], columns, x.shape[1])
        if adapted:
            ctx.save_for_backward(x)
        return x.new_empty(x.shape[0], columns)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        noted("stack", ctx.stack, dy.shape[0], dy.shape[1], ctx.columns, gradient=True)
        return dy.new_empty(dy.shape[0], ctx.columns), None, None, None


class Attention(torch.autograd.Function):
    """Attention [B, heads, T, D] that keeps its arguments, its result (token by token in memory) and a float per row
    and head, as the fused kernels do."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, heads, tokens = q.shape[:3]
        noted("attention", batch, heads, tokens, q.shape[-1], v.shape[-1])
        out = q.new_empty(batch, tokens, heads, v.shape[-1]).transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device))
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, _, v = ctx.saved_tensors[:3]
        noted("attention", *q.shape, v.shape[-1], gradient=True)
        return tuple(torch.empty_like(each) for each in ctx.saved_tensors[:3])


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    return Attention.apply(query, key, value).transpose(1, 2).contiguous(), None


def _trained(rows: int, columns: int, dtype: torch.dtype) -> nn.Parameter:
    """A parameter whose gradient is gone as soon as it is there: plans count gradients apart."""
    parameter = nn.Parameter(torch.empty(rows, columns, dtype=dtype, device="meta"))
    parameter.register_post_accumulate_grad_hook(_drop)
    return parameter


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


# ---- the model without its layers -----------------------------------------------------------------------------------


@contextmanager
def stubs(model: Model) -> Iterator[list[tuple[tuple, dict]]]:
    """While it lasts, decoder layers hand on their input; [(args, kwargs) of the call of each]."""
    _use_played_attention(model)
    calls: list[Any] = [None] * len(model.layers())
    shapes: dict[type, tuple | None] = {}  # what a layer returns besides its result

    def stub(number: int, layer: nn.Module) -> Callable:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if type(layer) not in shapes:
                with torch.no_grad():
                    out = type(layer).forward(layer, *args, **kwargs)
                shapes[type(layer)] = out[1:] if isinstance(out, (tuple, list)) else None
            if not args:
                args = (kwargs.pop("hidden_states"),)
            calls[number] = (args, kwargs)
            hidden = args[0].detach().requires_grad_() if torch.is_grad_enabled() else args[0]
            more = shapes[type(layer)]
            return hidden if more is None else (hidden, *more)

        return forward

    for number, (_, layer) in enumerate(model.layers()):
        layer.forward = stub(number, layer)
    try:
        yield calls
    finally:
        for _, layer in model.layers():
            del layer.forward


def _use_played_attention(model: Model) -> None:
    """Where the model would call torch's fused attention, which on the meta device computes another way."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.utils import logging

    if getattr(model.config, "_attn_implementation", None) != "sdpa":
        return
    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, lambda *_, **__: None)
    said = logging.get_verbosity()
    logging.set_verbosity_error()  # of models whose attention cannot be exchanged
    model.model.set_attn_implementation(ATTENTION)
    logging.set_verbosity(said)


def _tensors(value: Any) -> Iterator[Tensor]:
    from torch.utils._pytree import tree_leaves

    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _first(value: Any) -> Tensor:
    return value[0] if isinstance(value, (tuple, list)) else value
