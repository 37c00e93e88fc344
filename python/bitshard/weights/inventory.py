"""How much of a model is 4-bit or int8: one line at its first forward, because nothing else says what stays in 16 bits.

transformers quantizes `nn.Linear` layers only. The experts of Mixtral, Qwen3-MoE or gpt-oss are parameters of other
modules and stay in 16 bits, most of such a model, unless `bitshard.experts` takes them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn

from bitshard.functions import card
from bitshard.process import foreign, launch

logger = logging.getLogger("bitshard")

_ADVICE = (
    " Less than half of this model is {}: load_in_4bit and load_in_8bit take linear layers only. For 4-bit experts "
    "call bitshard.experts.enable() before the model is loaded (or set BITSHARD_EXPERTS=1); for layers left out see "
    "llm_int8_skip_modules."
)


def holders_of(module: nn.Module) -> list[Any]:
    """The holders of the 4-bit weights of `module` itself (`bitshard.nn.holder`), quantized or not."""
    # FSDP1's wrappers forward attribute access to what they wrap, so only a module's own attributes count
    return [held for held in held_by(module) if held.owner is module]


def held_by(module: nn.Module) -> list[Any]:
    """The holders that `module` has, those of another module's weights among them."""
    mine = vars(module)
    return [mine["packed_weight"]] if "packed_weight" in mine else list(mine.get("packed_stacks", {}).values())


def holder_of(module: nn.Module, name: str) -> Any:
    """The holder of the 4-bit weight `name` of `module` itself, quantized or not; None without one."""
    return next((held for held in holders_of(module) if held.name == name), None)


def holders(model: nn.Module) -> list[tuple[str, Any]]:
    """(name of its owner, holder) of every quantized weight of `model`, sharded or not."""
    return [(name, held) for name, module in model.named_modules() for held in holders_of(module) if held.state]


def quantized(model: nn.Module) -> list[Any]:
    """Holders of every quantized weight of `model`, as `PackedWeight.quantized` shows them: whole int8 ones, too."""
    found = (held.quantized() for module in model.modules() for held in holders_of(module))
    return [held for held in found if held is not None]


def counted(held: list[Any]) -> str:
    """Holders in words: "12 weights, 4 of them stacks of experts"."""
    stacks = sum(each.state.kind.stacked for each in held)
    weights = f"{len(held)} weight{'' if len(held) == 1 else 's'}"
    return f"{weights}, {stacks} of them stacks of experts" if stacks else weights


def bits(held: list[Any]) -> str:
    """What the weights of holders are, in a word: "4-bit", "int8" or "4-bit and int8"."""
    return " and ".join(sorted({each.state.kind.word for each in held})) or "4-bit"


def take(model: nn.Module) -> tuple[list[Any], int, Counter]:
    """(holders, their elements, elements of the other parameters by kind) of `model`, under FSDP of the whole one."""
    held = {(id(held.owner), held.name): held for held in quantized(model)}
    others: Counter = Counter()
    paths, head = {id(module): path for path, module in model.named_modules()}, _head(model)
    for module, name, elements in _parameters(model):
        if (id(module), name) not in held:
            others[_kind(module, name, paths.get(id(module), ""), head)] += elements
    return list(held.values()), sum(held.state.shape.numel() for held in held.values()), others


def line(model: nn.Module) -> tuple[str, float, str]:
    """The line about `model`, the quantized share of its elements, and what that is: as `bits` says."""
    held, elements, others = take(model)
    total = elements + sum(others.values())
    share = elements / max(total, 1)
    rest = ", ".join(f"{kind} {count / total:.1%}" for kind, count in others.most_common() if count > 0)
    word = bits(held)
    text = f"{word}: {counted(held)}, {elements:,} of {total:,} elements ({share:.1%})"
    return f"{text}; not {word.replace(' and ', ' or ')}: {rest}." if rest else f"{text}.", share, word


def log_line(layer: nn.Module) -> None:
    """Log the line about the model whose forward is calling `layer`, on rank 0; a warning below one half.

    The first forward is also when a GPU is measured, where that is asked for.
    """
    for held in held_by(layer):  # also by a replica of DataParallel, whose holder names the original as its owner
        held.reported = True
        card.at_first_use(held.weight.device)
    model = model_of(layer)
    for module in model.modules():
        for held in holders_of(module):
            held.reported = held.reported or held.quantized() is not None
    if not launch.first_rank():
        return
    text, share, word = line(model)
    advice = "" if share >= 0.5 else _ADVICE.format(word)
    logger.log(logging.WARNING if advice else logging.INFO, "%s", text + advice)


def model_of(layer: nn.Module) -> nn.Module:
    """The outermost module on the call stack in whose forward `layer` is being called; else `layer`."""
    model = layer
    for module in foreign.running_methods():
        if isinstance(module, nn.Module) and module is not model and any(part is layer for part in module.modules()):
            model = module
    return model


def path_of(layer: nn.Module) -> str:
    """The path of `layer` in the outermost module whose forward is calling it; its class where that is itself."""
    found = (path for path, module in model_of(layer).named_modules() if module is layer)
    return next(found, "") or type(layer).__name__


def _parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, int]]:
    """(module, name in it, elements) of every parameter once, those in FSDP1's flat parameters included."""
    seen = set()
    for module in model.modules():
        flat = getattr(vars(module).get("_handle"), "flat_param", None)
        if flat is not None:
            for info, elements in zip(flat._param_infos, flat._numels, strict=True):
                seen.add((id(info.module), info.param_name))
                yield info.module, info.param_name, elements
            seen.add(id(flat))
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in seen or (id(module), name) in seen:
                continue
            seen.add(id(parameter))
            yield module, name, getattr(parameter, "ds_numel", parameter.numel())  # DeepSpeed ZeRO-3 empties parameters


def _kind(module: nn.Module, name: str, path: str, head: nn.Module | None) -> str:
    """The name under which a parameter that is not 4-bit is counted."""
    if isinstance(module, nn.Embedding):
        return "embeddings"
    if module is head or "head" in type(module).__name__.lower():
        return "head"
    if "expert" in f"{path} {type(module).__name__}".lower():
        return "experts"
    if getattr(getattr(module, name, None), "requires_grad", False):
        return "trained"
    return "linear layers" if isinstance(module, nn.Linear) else "others"


def _head(model: nn.Module) -> nn.Module | None:
    """The output embeddings, if a model of transformers names them."""
    try:
        return model.get_output_embeddings()
    except Exception:  # not every model has them, and a log line must not stop a forward
        return None
