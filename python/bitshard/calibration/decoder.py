"""The decoder layers of a model of transformers: what goes into the first one, and each run by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


class _Stop(Exception):
    """Ends a forward once it has given what was wanted."""


class Decoder:
    """The layers of a model whose other parts, but for norm and head, have their weights.

    Args:
        model: of transformers, with a stack of decoder layers.
        device: on which layers run.

    Attributes:
        layers: the stack.
        path: its name in the model.
    """

    def __init__(self, model: nn.Module, device: torch.device):
        self.model, self.device = model, device
        self.path, self.layers = stack_of(model)
        self._arguments: list[tuple[tuple, dict[str, Any]]] = []
        self._wraps = False  # whether layers give their result in a tuple

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Iterator[Tensor]:
        """What the first layer gets for samples ids [S, L], one sample [1, L, H] at a time, float32 on the CPU."""
        for sample in ids:
            with self._recording(stop_at=0) as recorded:
                self._forward(sample)
            yield recorded[0][0][0].float().cpu()

    @torch.no_grad()
    def learn(self, sample: Tensor, first: nn.Module, hidden: Tensor) -> None:
        """Find out what each layer is called with beside hidden states; all samples are as long as this one.

        Args:
            sample: ids [L].
            first: the first layer, with its weights.
            hidden: what it gets.
        """
        with self._recording(stop_at=0) as recorded:
            self._forward(sample)
        self._arguments = self._on_device(recorded)
        self._wraps = isinstance(self._call(first, 0, hidden), tuple)
        with self._recording(stop_at=len(self.layers) - 1) as recorded:
            self._forward(sample)
        self._arguments = self._on_device(recorded)

    @torch.no_grad()
    def run(self, layer: nn.Module, number: int, hidden: Tensor) -> Tensor:
        """What layer `number`, given by itself on the device, makes of hidden [B, L, H]."""
        return self._states(layer, number, hidden)

    def run_with(self, number: int, hidden: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        """The same of a layer that has `tensors`, all of its own by their names, on the device; gradients flow."""
        layer = self.layers[number]
        return self._states(lambda *given, **named: functional_call(layer, tensors, given, named), number, hidden)

    def _states(self, layer: Callable[..., Any], number: int, hidden: Tensor) -> Tensor:
        """The hidden states that a layer gives, of a tuple the first."""
        found = self._call(layer, number, hidden)
        return found[0] if self._wraps else found

    def outside(self) -> dict[str, Tensor]:
        """What the model has outside its layers, in float32 on the device."""
        inside = {id(tensor) for layer in self.layers for tensor in (*layer.parameters(), *layer.buffers())}
        every = (*self.model.named_parameters(), *self.model.named_buffers())
        found = {name: tensor.detach() for name, tensor in every if id(tensor) not in inside}
        return {
            name: tensor.to(self.device, torch.float32 if tensor.is_floating_point() else None)
            for name, tensor in found.items()
        }

    def finish(self, hidden: Tensor, outside: dict[str, Tensor]) -> Tensor:
        """Logits [B, L, V] of what the last layer gives, [B, L, H] on the device; gradients flow.

        Args:
            outside: of `outside`.
        """
        ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        for layer in self.layers:
            layer.forward = lambda *given, **named: (hidden,) if self._wraps else hidden
        try:
            return functional_call(self.model, outside, (), {"input_ids": ids, "use_cache": False}).logits
        finally:
            for layer in self.layers:
                vars(layer).pop("forward", None)

    def _call(self, layer: Callable[..., Any], number: int, hidden: Tensor) -> Any:
        positional, named = self._arguments[number]
        return layer(hidden.to(self.device), *positional[1:], **named)

    def _on_device(self, recorded: list[tuple[tuple, dict[str, Any]]]) -> list[tuple[tuple, dict[str, Any]]]:
        """Arguments beside hidden states on the device; what several layers are given is one tensor there, too."""
        known: dict[int, Tensor] = {}

        def moved(value: Any) -> Any:
            if isinstance(value, Tensor):
                return known.setdefault(id(value), value.to(self.device))
            return tuple(map(moved, value)) if isinstance(value, tuple) else value

        return [
            ((None, *map(moved, positional[1:])), {name: moved(value) for name, value in named.items()})
            for positional, named in recorded
        ]

    def _forward(self, sample: Tensor) -> None:
        try:
            self.model(input_ids=sample[None].to(self._input_device()), use_cache=False)
        except _Stop:
            return
        raise NotImplementedError(f"{type(self.model).__name__} does not run its decoder layers ({self.path})")

    def _input_device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    @contextmanager
    def _recording(self, stop_at: int) -> Iterator[list[tuple[tuple, dict[str, Any]]]]:
        """While it lasts, layers give back what they get, and what they are called with is put down."""
        recorded: list[tuple[tuple, dict[str, Any]]] = []

        def recorder(number: int) -> Callable[..., Any]:
            def forward(*positional: Any, **named: Any) -> Any:
                if not positional:
                    positional = (named.pop("hidden_states"),)
                recorded.append((positional, named))
                if number == stop_at:
                    raise _Stop
                return (positional[0],) if self._wraps else positional[0]

            return forward

        for number, layer in enumerate(self.layers):
            layer.forward = recorder(number)
        # rotations and masks are computed in the dtype of the embeddings
        wide = self.model.get_input_embeddings().register_forward_hook(lambda module, given, found: found.float())
        try:
            yield recorded
        finally:
            wide.remove()
            for layer in self.layers:
                vars(layer).pop("forward", None)


def stack_of(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """(name, decoder layers) of a model of transformers. NotImplementedError where there is no one stack of them,
    and where an encoder is before it."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise NotImplementedError(
            f"{type(model).__name__}: calibration runs the decoder layers of decoders alone, and this has an encoder"
        )
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    count = getattr(getattr(decoder, "config", None), "num_hidden_layers", None)
    found = [each for each in decoder.children() if isinstance(each, nn.ModuleList) and len(each) == count]
    if len(found) != 1:
        raise NotImplementedError(
            f"{type(model).__name__}: calibration runs decoder layers one by one, and finds {len(found)} lists of "
            f"{count} of them"
        )
    return next(name for name, module in model.named_modules() if module is found[0]), found[0]


@contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """Products of float32 in full ("highest"), or in TF32 where a GPU has it ("high"), whatever the caller has set."""
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # set by torch's newer interface, of which the older one says nothing
        matmul, wanted = torch.backends.cuda.matmul, {"highest": "ieee", "high": "tf32"}[precision]
        newer, matmul.fp32_precision = matmul.fp32_precision, wanted
        try:
            yield
        finally:
            matmul.fp32_precision = newer
        return
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
