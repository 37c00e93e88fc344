"""diffusers' 4-bit quantizer on a tiny transformer, on a CPU: quantize, save, load, compare.

Two checks of diffusers that no GPU means no quantization are lifted here, for both packages alike; nothing else is.
"""

import bitsandbytes as bnb
import torch
from common import as_bytes, run


def lift():
    """Let diffusers quantize without a GPU."""
    from diffusers.quantizers.bitsandbytes.bnb_quantizer import BnB4BitDiffusersQuantizer

    BnB4BitDiffusersQuantizer.validate_environment = lambda self, *args, **kwargs: None
    BnB4BitDiffusersQuantizer.update_device_map = lambda self, device_map: device_map or {"": "cpu"}


def packed(model):
    return {name: as_bytes(p).tolist() for name, p in model.named_parameters() if isinstance(p, bnb.nn.Params4bit)}


def sample(model):
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(1, 4, 8, 8, generator=generator)
    words = torch.randn(1, 4, 64, generator=generator)
    with torch.no_grad():
        return model(noise, timestep=torch.tensor([3]), encoder_hidden_states=words, return_dict=False)[0]


def main(options):
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
    dense.save_pretrained(args.out / "dense")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
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
