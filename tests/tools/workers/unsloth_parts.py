"""Files of unsloth and unsloth_zoo, loaded one by one on a CPU, over a tiny 4-bit model of transformers.

Each case leaves its values, or its error as text, under its name.
"""

import copy

import bitsandbytes as bnb
import torch
from common import as_bytes, error_of, make_model, package_without_init, run

X = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))


def load(folder, dtype=torch.bfloat16):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=config, device_map={"": "cpu"})


def packed(model):
    return [p for p in model.parameters() if isinstance(p, bnb.nn.Params4bit)]


def image(model):
    """The bytes of every 4-bit weight."""
    return [as_bytes(p).tolist() for p in packed(model)]


def logits(model):
    """Rows are many, so that the original on a CPU multiplies what it would train with, and repacks nothing."""
    model.train()
    return model(input_ids=torch.arange(3, 23)[None]).logits.detach().float()


def check(result, folder):
    """unsloth's test of the native library, and what it then binds."""
    from unsloth.bnb_availability import bitsandbytes_symbols, native_kernels_ready

    result["ready"] = native_kernels_ready(bnb, "cuda")
    result["symbols"] = {name: hasattr(bnb.functional.lib, name) for name in bitsandbytes_symbols("cuda")}
    result["get_ptr"] = bnb.functional.get_ptr(None) is None


def storage(result, folder):
    """uint8 -> float storage -> uint8, by assigning `.data`, as before and after FSDP2."""
    from unsloth.models import fsdp2_qlora as q

    model = load(folder)
    before, expected = image(model), logits(model)
    result["converted"] = q.params4bit_to_float_storage(model, torch.bfloat16)
    result["float"] = [str(p.dtype) for p in packed(model)][:1] + [str(packed(model)[0].quant_storage)]
    result["float_bytes"] = image(model) == before
    result["float_logits"] = float((logits(model) - expected).abs().max())
    with q.packed_4bit_as_uint8(model) as count:
        result["shown"] = [count, str(packed(model)[0].dtype)]
    result["back"] = list(q.params4bit_to_uint8_storage(model))
    result["uint8"] = str(packed(model)[0].dtype)
    result["uint8_bytes"] = image(model) == before
    result["uint8_logits"] = float((logits(model) - expected).abs().max())


def subclass(result, folder):
    """Weights that unsloth makes around `__new__`, for merging and for stacks of experts."""
    from unsloth.models.fsdp2_save import _rebuild, _restage_4bit

    model = load(folder)
    layer = model.model.layers[0].mlp.up_proj
    moved = _restage_4bit(layer.weight, "cpu")
    result["restaged"] = as_bytes(moved).equal(as_bytes(layer.weight))
    dense = bnb.functional.dequantize_4bit(moved.data, moved.quant_state)
    result["dense"] = dense.equal(bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state))
    full = layer.weight.data.clone().reshape(-1).view(torch.bfloat16).reshape(-1, 1)
    rebuilt = _rebuild(layer.weight, full, layer)
    result["rebuilt"] = [str(rebuilt.dtype), rebuilt.bnb_quantized, as_bytes(rebuilt).equal(as_bytes(layer.weight))]
    # unsloth_zoo.temporary_patches.moe_utils_bnb4bit, _quantize_expert_stack_in_slices
    stack = torch.Tensor._make_subclass(bnb.nn.Params4bit, layer.weight.data.clone())
    result["stack"] = [tuple(stack.data.shape), str(stack.data.dtype)]
    result["chunks"] = [tuple(part.shape) for part in with_module(stack, layer).chunk(2)]


def with_module(weight, layer):
    """The attributes that unsloth_zoo gives such a weight."""
    for name in ("quant_state", "blocksize", "compress_statistics", "quant_type", "quant_storage"):
        setattr(weight, name, getattr(layer.weight, name))
    weight.bnb_quantized, weight.module, weight.requires_grad = True, None, False
    return weight


def linear(result, folder):
    """unsloth_zoo's forward of Linear4bit; it removes `Params4bit.__torch_function__` with it."""
    model = load(folder)
    before, expected = image(model), logits(model)
    layer = model.model.layers[0].mlp.up_proj
    x = X.to(torch.bfloat16).requires_grad_()
    layer(x).float().sum().backward()
    gradient = x.grad.clone()
    x.grad = None
    from unsloth_zoo.temporary_patches.bitsandbytes import patch_bitsandbytes_linear4bit_forward

    patch_bitsandbytes_linear4bit_forward()
    result["patched"] = bnb.nn.Linear4bit.forward.__module__ == "unsloth_zoo.temporary_patches.bitsandbytes"
    result["guard"] = "__torch_function__" in vars(bnb.nn.Params4bit)
    result["logits"] = float((logits(model) - expected).abs().max())
    layer(x).float().sum().backward()
    result["gradient"] = float((x.grad - gradient).abs().max())
    other = copy.deepcopy(model)
    result["copied"] = image(other) == before
    result["keys"] = sorted(name for name in model.state_dict() if "up_proj" in name)
    torch.nn.Module.to(other, torch.float32)  # transformers' own refuses to
    result["moved"] = image(other) == before


def main(options):
    args = options.parse_args()
    folder = args.out / "model"
    make_model(folder)
    for name in ("unsloth", "unsloth.models", "unsloth_zoo"):
        package_without_init(name)
    result = {}
    for case in (check, storage, subclass, linear):
        result[case.__name__] = {}
        with error_of(result[case.__name__], "error"):
            case(result[case.__name__], folder)
    return args, result


run(main)
