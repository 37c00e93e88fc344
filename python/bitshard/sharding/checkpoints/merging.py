"""Adapters of peft merged into one layer at a time, beside the model: what the model holds stays as it is.

peft merges in place, into its base layer. Here it merges into a copy of its layer that shares the adapter's tensors,
whole ones, and has a base layer of its own; so the bytes are those that peft gives in one process.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor, nn

from bitshard import ops
from bitshard.formats.state import QuantState
from bitshard.sharding.checkpoints.contents import Piece, is_tuner, unwrapped
from bitshard.weights.inventory import holder_of
from bitshard.weights.tensor import Params4bit


def merged_packed(
    tuner: nn.Module,
    adapter: dict[int, Tensor],
    held: Any,
    packed: Tensor,
    state: QuantState,
    others: dict[str, Tensor],
) -> tuple[tuple[Tensor, QuantState], dict[str, Tensor]]:
    """(bytes and state) of a weight with the adapters of `tuner` in it, quantized again, and what else its layer has.

    Args:
        tuner: peft's layer.
        adapter: id of a tensor in it -> the whole of it.
        held: the holder of the weight.
        packed, state: the whole weight.
        others: bias and whatever the layer has, by name.
    """
    _require_no_rows(tuner)
    base = _stand_in(others)
    held.lend(base, packed, state)
    _merge(_copy(tuner, adapter, base))
    return held.lent(base, state), {other: getattr(base, other).data for other in others}


def merged_values(
    tuner: nn.Module, adapter: dict[int, Tensor], packed: Tensor, state: QuantState, others: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The values of a 4-bit weight with the adapters of `tuner` added, not quantized again, and the other tensors.

    ValueError for adapters other than LoRA and its variants.
    """
    values, base = state.kind.dequantize(packed, state), nn.Module()
    base.register_buffer("weight", values)
    layer = _copy(tuner, adapter, base)
    if merges_bytes(layer):
        names = [name for name in layer.active_adapters if name not in layer.merged_adapters]
        codes, new = layer.merged_4bit(packed, state, names)
        return new.kind.dequantize(codes, new), others
    if _has_rows(tuner):
        base.weight = nn.Parameter(base._buffers.pop("weight"), requires_grad=False)
        _merge(layer)
        return base.weight.data, others
    if not (hasattr(layer, "lora_A") and hasattr(layer, "get_delta_weight")):
        raise ValueError(f"dtype= with merge=True: {type(tuner).__name__} of peft is no LoRA; leave out dtype")
    names = [name for name in layer.active_adapters if name in layer.lora_A and name not in layer.merged_adapters]
    for name in names:
        variant = layer.lora_variant.get(name)
        if variant is None:
            values = values + layer.get_delta_weight(name)
        else:
            values = variant.merge_safe(layer, name, values)
        base.weight = values  # the next adapter finds this one merged, as in peft's own merging
        layer.merged_adapters.append(name)
        if layer.lora_bias.get(name):
            if "bias" not in others:
                raise ValueError(f"{type(tuner).__name__}: lora_bias needs a layer with a bias, this one has none")
            others = {**others, "bias": others["bias"] + layer.lora_B[name].bias * layer.scaling[name]}
    return values, others


def merges_bytes(tuner: nn.Module) -> bool:
    """Whether peft's layer is merge-aware: training saw the merged codes, so dense values are those of them, too."""
    return hasattr(tuner, "merged_4bit")


def merged_stacks(
    tuner: nn.Module,
    adapter: dict[int, Tensor],
    packed: dict[str, tuple[Tensor, QuantState]],
    others: dict[str, Tensor],
) -> tuple[dict[str, tuple[Tensor, QuantState]], dict[str, Tensor]]:
    """4-bit stacks of an experts module with the adapters of `tuner` in them, quantized again, and its other tensors.

    Args:
        packed: name of a stack -> packed bytes and state, whole.
        tuner, adapter, others: as of `merged_packed`.
    """
    base = shallow(unwrapped(around(tuner)[-1]._modules["base_layer"]))
    base.packed_stacks = {}
    for name, (codes, state) in packed.items():
        base.__dict__.pop(name, None)
        base.packed_stacks[name] = held = inner_holder(tuner, name).standing_for(base, state)
        base._parameters[name] = Params4bit.of_state(codes.clone(), state, held.storage, held)
    for name, tensor in others.items():
        base._parameters[name] = nn.Parameter(tensor.clone(), requires_grad=False)
    for layer in around(_copy(tuner, adapter, base)):
        _merge(layer)
    weights = {name: base._parameters[name] for name in packed}
    merged = {name: (weight.detach().as_subclass(Tensor), weight.quant_state) for name, weight in weights.items()}
    return merged, {name: base._parameters[name].data for name in others}


def with_biases(
    tuner: nn.Module, adapter: dict[int, Tensor], before: dict[str, Tensor], merged: dict[str, Tensor]
) -> dict[str, Tensor]:
    """`merged`, the other tensors of a layer that peft has merged into quantized, made of those from before it.

    peft leaves the scale out of what `lora_bias` adds to the bias there.
    """
    layer = _copy(tuner, adapter, nn.Module())
    trained = (name for name in layer.active_adapters if getattr(layer, "lora_bias", {}).get(name))
    names = [name for name in trained if name in layer.lora_B and name not in layer.merged_adapters]
    if not names:
        return merged
    bias = before["bias"]
    for name in names:
        bias = bias + layer.lora_B[name].bias * layer.scaling[name]
    return {**merged, "bias": bias.detach().to(merged["bias"].dtype)}


def inner_holder(tuner: nn.Module, name: str) -> Any:
    """The holder of stack `name` of the experts module that `tuner` is around."""
    return holder_of(unwrapped(around(tuner)[-1]._modules["base_layer"]), name)


def merged_dense(tuner: nn.Module, adapter: dict[int, Tensor], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a layer, or some of them, with the adapters of `tuner` in them, none of them 4-bit."""
    if not _has_rows(tuner):
        _require_plain(tuner)
    base = shallow(unwrapped(around(tuner)[-1]._modules["base_layer"]))
    for name, tensor in tensors.items():
        table = base._buffers if name in base._buffers else base._parameters
        base.__dict__.pop(name, None)
        table[name] = tensor.clone() if table is base._buffers else nn.Parameter(tensor.clone(), requires_grad=False)
    layers = around(_copy(tuner, adapter, base))
    for layer in layers:
        if getattr(layer, "parameter_name", None) in (None, *tensors):
            _merge(layer)
    base = unwrapped(layers[-1]._modules["base_layer"])  # which some of peft's layers exchange
    return {name: getattr(base, name).data for name in tensors}


def _stand_in(others: dict[str, Tensor]) -> nn.Module:
    """A module for peft to merge into, with bias and whatever the layer has beside its weight."""
    base = nn.Module()
    base.register_parameter("bias", None)
    for name, tensor in others.items():
        base.register_parameter(name, nn.Parameter(tensor.clone(), requires_grad=False))
    return base


def _require_plain(tuner: nn.Module) -> None:
    """ValueError for LoRA on an embedding that changes the rows it looks up: what is added to them is not in a row."""
    base = unwrapped(around(tuner)[-1]._modules["base_layer"])
    own = isinstance(base, nn.Embedding) and type(base).forward is not nn.Embedding.forward
    if own and type(base).__module__.startswith("transformers.") and not hasattr(base, "embed_scale"):
        raise ValueError(
            f"adapters on a {type(base).__name__} cannot be merged: it changes the rows that it looks up, and the "
            "adapter adds to what comes out. Leave the adapter unmerged"
        )


def _merge(layer: nn.Module) -> None:
    """Let peft's layer merge. ValueError that names it where peft cannot."""
    try:
        layer.merge()
    except Exception as error:
        if ops.is_out_of_memory(error):
            raise
        words = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"peft cannot merge the adapters of its {type(layer).__name__} here: {words}") from error


def _has_rows(tuner: nn.Module) -> bool:
    """Whether this layer of peft replaces rows of an embedding (`trainable_token_indices`)."""
    return "trainable_tokens_delta" in tuner._modules


def _require_no_rows(tuner: nn.Module) -> None:
    if _has_rows(tuner):
        raise ValueError(
            "trainable_token_indices: trained rows cannot be put into a quantized embedding without quantizing it "
            "again; save with dtype=torch.bfloat16, say, or leave the embedding in 16 bits"
        )


def part_of(piece: Piece, names: list[str]) -> Piece:
    """A piece with some of its tensors."""
    held = {name: one for name, one in piece.held.items() if name in names}
    return dataclasses.replace(piece, names=names, held=held)


def around(tuner: nn.Module) -> list[nn.Module]:
    """peft's layers around one layer, the outermost first: for each parameter of a module that it adapts, one."""
    inner = unwrapped(tuner._modules["base_layer"])
    return [tuner, *(around(inner) if is_tuner(inner) else [])]


def adapter_tensors(module: nn.Module) -> list[Any]:
    """All parameters and buffers of peft's layer, and of those inside it, but those of the layer of the model."""
    found = [tensor for table in (module._parameters, module._buffers) for tensor in table.values()]
    for name, child in module._modules.items():
        if name == "base_layer":
            child = unwrapped(child) if is_tuner(unwrapped(child)) else None
        if child is not None:
            found.extend(adapter_tensors(child))
    return [tensor for tensor in found if tensor is not None]


def _copy(module: nn.Module, whole: dict[int, Tensor], base: nn.Module) -> nn.Module:
    """peft's layer over whole tensors, around `base`."""
    # (no function inside a function, whose circle of references would keep the tensors)
    new = shallow(unwrapped(module))
    for table in (new._parameters, new._buffers):
        table.update({name: whole.get(id(tensor), tensor) for name, tensor in table.items()})
    for name, child in new._modules.items():
        if child is not None:
            is_base = name == "base_layer" and not is_tuner(unwrapped(child))
            new._modules[name] = base if is_base else _copy(child, whole, base)
    return new


def shallow(module: nn.Module) -> nn.Module:
    """Another module of the same tensors and children. What it notes in its lists and dicts is its own."""
    new = object.__new__(type(module))
    for name, value in vars(module).items():
        new.__dict__[name] = value.copy() if isinstance(value, (dict, list, set)) else value
    return new
