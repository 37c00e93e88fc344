"""What the workers share. They import `bitsandbytes`, whichever it is, and know nothing of bitshard."""

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

TOKENS, LENGTH, ROWS = 96, 24, 32
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def which() -> str:
    """ "bitshard" or "bitsandbytes": the package that was imported."""
    return "bitshard" if "bitshard" in sys.modules else "bitsandbytes"


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser()
    options.add_argument("--out", type=Path, required=True, help="folder for result.RANK, and for what a case writes")
    return options


def write(args: argparse.Namespace, result: dict) -> None:
    """result.RANK; then leave at once, since gloo's threads can abort the interpreter's shutdown."""
    rank = os.environ.get("RANK", "0")
    (args.out / f"result.{rank}").write_text(json.dumps({"bitsandbytes": which(), **result}))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)


def run(main: Callable[[argparse.ArgumentParser], tuple[argparse.Namespace, dict]]) -> None:
    """Run a worker: its results go to result.RANK, or its traceback to error.RANK."""
    options = parser()
    folder, rank = options.parse_known_args()[0].out, os.environ.get("RANK", "0")
    try:
        write(*main(options))
    except BaseException:
        (folder / f"error.{rank}").write_text(traceback.format_exc())
        raise


def package_without_init(name: str) -> None:
    """Make `name` importable without running its `__init__`, which wants a GPU: its files then load one by one."""
    top, *below = name.split(".")
    if below:
        folder = Path(sys.modules[top].__path__[0]).joinpath(*below)
    else:
        folder = Path(importlib.util.find_spec(top).origin).parent
    module = types.ModuleType(name)
    module.__path__ = [str(folder)]
    sys.modules[name] = module


def make_model(folder: Path, dtype: torch.dtype = torch.float32, **sizes: float) -> None:
    """A Llama of two layers. Its widths are whole blocks: others the original dequantizes wrongly on CPUs."""
    set_seed(0)
    settings = {
        **{"vocab_size": TOKENS, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
        **{"initializer_range": 0.1, "tie_word_embeddings": False},
        **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    }
    config = LlamaConfig(**{**settings, **sizes})
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    words = {f"w{i}": i for i in range(3, config.vocab_size)} | {"<pad>": 0, "<s>": 1, "</s>": 2}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def texts(rows: int = ROWS, length: int = LENGTH, tokens: int = TOKENS) -> list[str]:
    """Rows of words of `make_model`'s tokenizer, the same in each run."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(3, tokens, (rows, length), generator=generator).tolist()
    return [" ".join(f"w{token}" for token in row) for row in drawn]


def layers_of(model: torch.nn.Module) -> dict[str, Any]:
    """What of the decoder's linear layers is 4-bit: how many of how many, classes of layers and weights, dtypes, number
    of bytes of their weights, a digest of these bytes, and the number that 16 bits would take."""
    found = [layer for name, layer in model.named_modules() if name.endswith(LINEARS) and hasattr(layer, "in_features")]
    found = [getattr(layer, "base_layer", layer) for layer in found]
    weights = [layer.weight for layer in found]
    packed = [weight for weight in weights if type(weight).__name__ == "Params4bit" and weight.bnb_quantized]
    return {
        "linear": len(found),
        "four_bit": len(packed),
        "classes": sorted({f"{type(layer).__name__} {type(layer.weight).__name__}" for layer in found}),
        "dtypes": sorted({str(weight.dtype) for weight in weights}),
        "bytes": sum(weight.numel() * weight.element_size() for weight in weights),
        "digest": hashlib.sha256(b"".join(as_bytes(weight).numpy().tobytes() for weight in packed)).hexdigest(),
        "bytes_in_16_bits": sum(2 * layer.in_features * layer.out_features for layer in found),
    }


def as_bytes(data: torch.Tensor) -> torch.Tensor:
    """The storage of a tensor as plain uint8 [bytes] on the CPU, whatever class it is of."""
    with torch._C.DisableTorchFunctionSubclass():
        data = data.detach().as_subclass(torch.Tensor).contiguous()
        return data.reshape(-1).view(torch.uint8).cpu().clone()


class Spy:
    """Counts the bytes of a `Linear4bit` that differ in forward from what was quantized."""

    def __init__(self, layer: torch.nn.Module):
        self.expected = as_bytes(layer.weight)
        self.seen: list[int] = []
        layer.register_forward_hook(self.look)

    def look(self, layer: torch.nn.Module, args: tuple, output: torch.Tensor) -> None:
        """After the layer's forward. Containers of other dtypes differ in their padding only."""
        found = as_bytes(layer.weight)
        size = min(found.numel(), self.expected.numel())
        wrong = int((found[:size] != self.expected[:size]).sum())
        self.seen.append(wrong + max(0, abs(found.numel() - self.expected.numel()) - 3))


def spies(model: torch.nn.Module) -> list[Spy]:
    return [Spy(layer) for layer in model.modules() if isinstance(layer, bnb.nn.Linear4bit)]


def wrong_bytes(watched: list[Spy]) -> int:
    """All wrong bytes that all layers saw; -1 where a layer was never run."""
    if not watched or any(not spy.seen for spy in watched):
        return -1
    return sum(sum(spy.seen) for spy in watched)


def base_bytes(model: torch.nn.Module) -> dict[str, int]:
    """Packed bytes of the base that this rank holds, and those of the whole."""
    local = whole = 0
    for layer in model.modules():
        if isinstance(layer, bnb.nn.Linear4bit):
            weight = layer._parameters["weight"]
            piece = getattr(weight, "ds_tensor", getattr(weight, "_local_tensor", weight))
            local += piece.numel() * piece.element_size()
            whole += getattr(weight, "ds_numel", weight.numel()) * weight.element_size()
    return {"local": local, "whole": whole}


@contextlib.contextmanager
def error_of(result: dict, name: str):
    """Keep the error of a step as text instead of ending the run."""
    try:
        yield
    except Exception as error:
        result[name] = f"{type(error).__name__}: {error}"
