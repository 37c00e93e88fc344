"""What `python -m bitsandbytes` prints: bitshard's own report."""

import platform

import torch
from bitshard_cli import report
from bitshard_cli.main import main as _bitshard

from .. import __version__ as bnb_version
from ..autograd._functions import matmul_4bit
from ..consts import PACKAGE_GITHUB_URL
from ..cuda_specs import get_cuda_specs
from ..functional import dequantize_4bit, quantize_4bit
from .cuda import print_diagnostics
from .utils import print_dedented, print_header

__all__ = [
    "PACKAGE_GITHUB_URL",
    "bnb_version",
    "get_cuda_specs",
    "get_package_version",
    "main",
    "print_dedented",
    "print_diagnostics",
    "print_header",
    "sanity_check",
    "show_environment",
]


def main() -> int:
    """Print the report; the exit status is 1 if something is wrong."""
    return _bitshard(["report"])


def sanity_check() -> None:
    """Multiply by a quantized weight on the GPU: AssertionError where that is wrong, torch's error without a GPU."""
    weight, x = (torch.randn(rows, 64, dtype=torch.float32, device="cuda") for rows in (64, 2))
    packed, state = quantize_4bit(weight, quant_type="nf4")
    product, expected = matmul_4bit(x, packed.t(), state), x @ dequantize_4bit(packed, state).t()
    torch.testing.assert_close(product, expected, rtol=1e-2, atol=1e-2)


def get_package_version(name: str) -> str:
    """Version of an installed distribution, or "not found"."""
    return report.version(name) or "not found"


def show_environment() -> None:
    """Print the versions of the system, Python, torch, CUDA and related packages."""
    print(f"Platform: {platform.platform()}")
    print(f"Python: {platform.python_version()}")
    print(f"PyTorch: {torch.__version__}, CUDA {torch.version.cuda or 'N/A'}")
    for name in ("bitshard", "accelerate", "diffusers", "numpy", "peft", "safetensors", "transformers", "trl"):
        print(f"  {name}: {get_package_version(name)}")
