"""Format tables, and what is installed."""

import importlib.metadata
import importlib.util
from typing import Any

import torch
from bitshard.functional import get_4bit_type
from bitshard.ops import FORMATS

__all__ = ["CODE", "GAUDI_SW_VER", "_get_4bit_code", "get_gaudi_sw_version", "triton_available"]

triton_available = importlib.util.find_spec("triton") is not None
# The exact values; upstream rounds those of FP4 to four digits here.
CODE = {quant_type: get_4bit_type(quant_type, device="cpu") for quant_type in FORMATS}


def _get_4bit_code(quant_type: str, device: torch.device) -> torch.Tensor:
    """The 16 values of a format, f32 [16] on `device`."""
    return get_4bit_type(quant_type, device=device)


def get_gaudi_sw_version() -> Any:
    """Version of the plug-in for Gaudi as a `packaging.version.Version`, None without it."""
    try:
        installed = importlib.metadata.version("habana-torch-plugin")
    except importlib.metadata.PackageNotFoundError:
        return None
    from packaging.version import parse

    return parse(installed)


GAUDI_SW_VER = get_gaudi_sw_version()
