"""Why a LoRA layer is left to peft: the conditions of `bitshard.lora.layer` in words; imports peft."""

from __future__ import annotations

from peft.tuners.lora import bnb
from torch import Tensor, nn

from bitshard import gather
from bitshard.lora import layer as fused
from bitshard.nn.linear import Linear4bit as Base
from bitshard.state import dtype_name

# What peft's layer keeps in its `__dict__`, and `layer.choose` reads there.
ATTRIBUTES = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling", "lora_variant")
ATTRIBUTES += ("cast_input_dtype_enabled",)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def never(layer: nn.Module) -> str | None:
    """Why `layer`, one of peft's, can't be fused whatever its state."""
    if not isinstance(layer.get_base_layer(), Base):
        foreign = isinstance(layer, bnb.Linear4bit)
        return "its 4-bit weight is of another library" if foreign else "its weight is not 4-bit"
    if type(layer) is not bnb.Linear4bit and not isinstance(layer, fused.Linear4bit):
        return f"its class is {type(layer).__name__}"
    missing = [name for name in ATTRIBUTES if name not in vars(layer)]
    return f"this release of peft has no {missing[0]}" if missing else None


def why(layer: nn.Module) -> str | None:
    """Why the next call of `layer`, in training, would be peft's; None where it would be fused."""
    return never(layer) or of_adapter(layer) or of_parts(layer) or of_tensors(layer) or of_process()


def of_adapter(layer: nn.Module) -> str | None:
    """What is set in the layer itself."""
    forward = vars(layer).get("_old_forward", vars(layer).get("forward"))  # the former where accelerate has hooked it
    if forward is not None and getattr(forward, "__func__", None) is not fused.Linear4bit.forward:
        return "another forward on the layer"
    if layer.disable_adapters:
        return "its adapters are disabled"
    if layer.merged:
        return "its adapter is merged"
    names = list(layer.active_adapters)
    if len(names) != 1:
        return f"{len(names)} adapters are active"
    (name,) = names
    if name not in layer.lora_A:
        return "it has no weights of the active adapter"
    if name in layer.lora_variant:
        return type(layer.lora_variant[name]).__name__.removesuffix("LinearVariant")
    scale = layer.scaling[name]
    if type(scale) not in (float, int) or not 0 < abs(scale) < float("inf"):
        return "its scale is 0, infinite or no number"
    return None


def of_parts(layer: nn.Module) -> str | None:
    """What is around or in the place of the four modules whose forward is gone around."""
    for role, part in parts(layer).items():
        expected = {"dropout": fused.DROPOUTS, "base layer": fused.BASES}.get(role, (nn.Linear,))
        if type(part) not in expected:
            return f"its {role} is a {type(part).__name__}"
        if any(getattr(part, hooks) for hooks in _HOOKS):
            return f"hooks on its {role}"
        if "forward" in vars(part) or "_compiled_call_impl" in vars(part):
            return f"another forward on its {role}"
    dropout = parts(layer)["dropout"]
    return "dropout, which training needs" if getattr(dropout, "p", 0.0) != 0.0 else None


def parts(layer: nn.Module) -> dict[str, nn.Module]:
    """The modules that a forward with the active adapter calls, by what they are."""
    (name,) = layer.active_adapters
    adapter = {"A": layer.lora_A[name], "B": layer.lora_B[name], "dropout": layer.lora_dropout[name]}
    return {"base layer": layer.base_layer, **adapter}


def of_tensors(layer: nn.Module) -> str | None:
    """What is unusual about A, B and the bias."""
    found = parts(layer)
    A, B = (_weight(found[role]) for role in "AB")
    if any(found[role].bias is not None for role in "AB"):
        return "A or B has a bias"
    if A is None or B is None:
        return "A or B is no plain tensor"
    if A.dtype is not B.dtype or A.dtype not in fused.DTYPES:
        return f"A is {dtype_name(A.dtype)} and B {dtype_name(B.dtype)}"
    bias = found["base layer"].bias
    return "the bias of its base layer is trained" if bias is not None and bias.requires_grad else None


def _weight(linear: nn.Module) -> Tensor | None:
    """Its weight as a forward finds it, or what FSDP2 will have gathered by then."""
    sharded = linear._parameters.get("weight")
    return sharded if gather.is_dtensor(sharded) else fused.weight_of(vars(linear))


def of_process() -> str | None:
    """What holds for every layer now."""
    if fused.Peft.forward is not fused.FORWARD or fused.Base.forward is not fused.BASE_FORWARD:
        return "the forward of Linear4bit has been replaced"
    if nn.Linear.forward is not fused.LINEAR_FORWARD or nn.functional.linear is not fused.LINEAR:
        return "torch's linear has been replaced"
    return "hooks of the whole process, modes or transforms of torch" if fused.watched() else None
