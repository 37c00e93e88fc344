"""accelerate's `load_and_quantize_model` in 8 bits on a CPU: a model on the meta device, weights from files, offload.

accelerate quantizes on a GPU only where a device is named by text or number; here it is a `torch.device`.
"""

import bitsandbytes as bnb
import torch
from accelerate import cpu_offload, init_empty_weights
from accelerate.utils import BnbQuantizationConfig, load_and_quantize_model
from common import TOKENS, as_bytes, error_of, make_model, run
from transformers import AutoConfig, AutoModelForCausalLM


def empty(folder):
    """The model of `folder` on the meta device."""
    with init_empty_weights():
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float16)


def loaded(folder, weights):
    """It with int8 layers, and with the weights of the file or folder `weights`."""
    config = BnbQuantizationConfig(load_in_8bit=True, llm_int8_threshold=6.0, skip_modules=["lm_head"])
    place = {"": torch.device("cpu")}
    return load_and_quantize_model(empty(folder), config, weights_location=str(weights), device_map=place).eval()


def logits(model):
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(3, TOKENS, (2, 12), generator=generator)
    with torch.no_grad():
        return model(words).logits.float()


def codes(model):
    """Codes and scales of every int8 layer by name."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, bnb.nn.Linear8bitLt)}
    return {name: [as_bytes(layer.weight).tolist(), scales(layer)] for name, layer in layers.items()}


def scales(layer):
    held = layer.state.SCB if layer.weight.SCB is None else layer.weight.SCB
    return held.flatten().tolist()


def offloaded(model):
    """The result of a forward whose weights come from the host's memory for it, and leave after it."""
    return logits(cpu_offload(model, execution_device=torch.device("cpu"), state_dict=dict(model.state_dict())))


def main(options):
    args = options.parse_args()
    make_model(args.out / "dense", torch.float16)
    dense = AutoModelForCausalLM.from_pretrained(args.out / "dense", dtype=torch.float16)
    torch.save(dense.state_dict(), args.out / "dense.bin")
    first = loaded(args.out / "dense", args.out / "dense.bin")
    result = {"codes": codes(first)}
    torch.save(first.state_dict(), args.out / "int8.bin")
    before = logits(first)
    result |= {"logits": before.flatten()[:64].tolist(), "keys": sorted(first.state_dict())}
    with error_of(result, "again_error"):
        second = loaded(args.out / "dense", args.out / "int8.bin")
        result |= {"kept": codes(second) == result["codes"], "gap": float((logits(second) - before).abs().max())}
    with error_of(result, "offload_error"):
        result["offloaded_gap"] = float((offloaded(first) - before).abs().max())
    return args, result


run(main)
