"""diffusers' quantizers of 4 and 8 bits on a tiny transformer, on a CPU: quantize, save, load, compare.

Two checks of diffusers that no GPU means no quantization are lifted here, for both packages alike; nothing else is.
"""

import bitsandbytes as bnb
import torch
from common import as_bytes, run


def lift():
    """Let diffusers quantize without a GPU."""
    from diffusers.quantizers.bitsandbytes import bnb_quantizer

    for quantizer in (bnb_quantizer.BnB4BitDiffusersQuantizer, bnb_quantizer.BnB8BitDiffusersQuantizer):
        quantizer.validate_environment = lambda self, *args, **kwargs: None
        quantizer.update_device_map = lambda self, device_map: device_map or {"": "cpu"}


def packed(model):
    """Packed bytes or codes by name, and of an int8 weight its scales."""
    weights = (bnb.nn.Params4bit, bnb.nn.Int8Params)
    found = {name: as_bytes(p).tolist() for name, p in model.named_parameters() if isinstance(p, weights)}
    scales = {name: value.tolist() for name, value in model.state_dict().items() if name.endswith(".SCB")}
    return found | scales


def sample(model):
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(1, 4, 8, 8, generator=generator)
    words = torch.randn(1, 4, 64, generator=generator)
    with torch.no_grad():
        return model(noise, timestep=torch.tensor([3]), encoder_hidden_states=words, return_dict=False)[0]


def main(options):
    options.add_argument("--bits", type=int, choices=(4, 8), default=4)
    args = options.parse_args()
    from diffusers import BitsAndBytesConfig, PixArtTransformer2DModel

    lift()
    torch.manual_seed(0)
    dense = PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=32,
        in_channels=4,
        out_channels=8,
        num_layers=1,
        cross_attention_dim=64,
        sample_size=8,
        patch_size=2,
        caption_channels=64,
        use_additional_conditions=False,
    )
    if args.bits == 8:  # the original rounds weights to float16 before it quantizes them
        dense.half().float()
    dense.save_pretrained(args.out / "dense")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    if args.bits == 8:
        config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=6.0)
    options = {"torch_dtype": torch.float32}
    first = PixArtTransformer2DModel.from_pretrained(args.out / "dense", quantization_config=config, **options)
    first.save_pretrained(args.out / "packed")
    second = PixArtTransformer2DModel.from_pretrained(args.out / "packed", **options)
    bytes_of_model, bytes_loaded = packed(first), packed(second)  # the original repacks what it multiplies on CPUs
    before, after = sample(first), sample(second)
    result = {
        "packed": bytes_of_model,
        "kept": bytes_loaded == bytes_of_model,
        "gap": float((before - after).abs().max()),
        "sample": before.flatten()[:32].tolist(),
        "dense": sample(dense).flatten()[:32].tolist(),
        "bytes": second.get_memory_footprint() / dense.get_memory_footprint(),
    }
    from diffusers.quantizers.bitsandbytes.utils import dequantize_and_replace

    whole = dequantize_and_replace(second, second.hf_quantizer.modules_to_not_convert, config)
    result["dequantized"] = float((sample(whole) - before).abs().max())
    return args, result


run(main)
