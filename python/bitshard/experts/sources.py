"""Published files in other formats that become 4-bit weights while they are loaded: MXFP4 (gpt-oss), FP8 (DeepSeek-V3).

transformers' own quantizers of these formats decode one stack or layer at a time; what is decoded is quantized at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bitshard.formats import layouts

_FP8 = "weight_scale_inv"  # how names of their scales end


def dense_config(path: Any, **options: Any) -> Any:
    """The config of a folder or model name as if its files were in 16 bits, for `from_pretrained(path, config=...)`.

        config = dense_config("openai/gpt-oss-20b")
        AutoModelForCausalLM.from_pretrained("openai/gpt-oss-20b", config=config, quantization_config=FourBitConfig())

    Without it transformers refuses another quantization_config than the one the files name. With
    `FourBitConfig(bnb_4bit_quant_type="mxfp4")` (or "nvfp4") weights that the files have in this format keep their
    bytes; else those of MXFP4 and FP8 are decoded and quantized again.

    Args:
        path: of the model.
        options: of AutoConfig.from_pretrained.

    ValueError where the files are in a format that is none of MXFP4, NVFP4 and FP8 in blocks, nor dense.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, **options)
    found = getattr(config, "quantization_config", None)
    if found is None:
        return config
    method, known = layouts.method_of(found), sorted({"fp8", *layouts.METHODS})
    if method not in known:
        raise ValueError(f"dense_config: the files of {path} are {method}, expected one of {known} or 16 bits")
    del config.quantization_config
    return config


def quantizer_of(files: Iterable[str]) -> Any:
    """transformers' quantizer that decodes these files; None where they are dense.

    ValueError where they are NVFP4, which is kept only; an error of safetensors where a file is none of its own.
    """
    files = list(files)
    names = files_of(files)
    found = layouts.layout_of(names)
    if found is not None and found.kind.has_global:
        raise ValueError(f"{files[0]}: weights in NVFP4, which are kept as they are: bnb_4bit_quant_type='nvfp4'")
    if any(name.endswith(_FP8) for name in names):
        from transformers import FineGrainedFP8Config
        from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

        return FineGrainedFP8HfQuantizer(FineGrainedFP8Config(dequantize=True), pre_quantized=True)
    if found is layouts.GptOss:
        from transformers import Mxfp4Config
        from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer

        return Mxfp4HfQuantizer(Mxfp4Config(dequantize=True), pre_quantized=True)
    return None


def files_of(files: Iterable[str]) -> dict[str, Path]:
    """{name of a tensor: its file} of all tensors of safetensors files; other files are passed over."""
    from safetensors import safe_open

    found: dict[str, Path] = {}
    for file in files:
        if str(file).endswith(".safetensors"):
            with safe_open(file, framework="pt") as opened:
                found |= dict.fromkeys(opened.keys(), Path(file))
    return found


def has_float_scales(source: Any) -> bool:
    """Whether a quantizer of `quantizer_of` reads scales that are floats: those of FP8, whose layers are all so."""
    return source is not None and type(source.quantization_config).__name__ == "FineGrainedFP8Config"


def converts(conversion: Any) -> bool:
    """Whether a conversion of transformers decodes such files: what is saved then is not to be encoded again."""
    patterns = getattr(conversion, "source_patterns", ())
    return any(pattern.rstrip("$").endswith((_FP8, *layouts.GptOss.ends())) for pattern in patterns)
