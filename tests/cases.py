"""The shapes and dtypes that tests and benchmarks share. Sizes: M rows of x, N out features, K in features."""

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
STORAGES = (torch.uint8, torch.int8, torch.bfloat16, torch.float16, torch.float32, torch.float64)
FORMATS = ("nf4", "fp4")
BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)

# Elements of a flat tensor: one, odd, around a byte, a block and a storage element, several second-level blocks.
SIZES = (1, 2, 3, 5, 31, 63, 64, 65, 127, 129, 1001, 4113, 16384 + 7)

# (M, N, K): one element, odd, K no multiple of the block, N of a panel, small and large M.
LINEAR = (
    (1, 1, 1),
    (1, 3, 5),
    (2, 96, 130),
    (3, 17, 64),
    (1, 128, 256),
    (5, 64, 192),
    (16, 257, 96),
    (17, 100, 320),
    (64, 96, 514),
    (130, 48, 128),
)

# (N, K) of the layers of Llama 3: what the choice of kernels is tested on and the GPU benchmarks measure.
MODEL_LINEAR = {
    "8B q, o": (4096, 4096),
    "8B k, v": (1024, 4096),
    "8B gate, up": (14336, 4096),
    "8B down": (4096, 14336),
    "70B q, o": (8192, 8192),
    "70B k, v": (1024, 8192),
    "70B gate, up": (28672, 8192),
    "70B down": (8192, 28672),
}

# What tests of random values allow linear_4bit and linear_4bit_dgrad beside one rounding of the result, in units of
# sqrt(sum of squared products): it is narrow, and no bound where terms have one sign (`largest_error` is).
LINEAR_BOUND = {torch.float32: 64 * 2.0**-24, torch.float16: 4 * 2.0**-11, torch.bfloat16: 4 * 2.0**-8}

# Relative error of one rounding to the dtype.
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def largest_error(exact: torch.Tensor, magnitude: torch.Tensor, terms: int, dtype: torch.dtype, own_weights: bool):
    """The bound of docs/numerics.md on |y - exact| for any order of summation and any signs; float64.

    exact: float64 products with the decoded weight, and the bias. magnitude: the same of the terms' magnitudes.
    own_weights: whether the kernel may round the weight in its own way, as those on CUDA do.
    """
    rounding = ROUNDING[dtype]
    of_terms = (terms + 4) * 2.0**-24 + (4 * rounding if own_weights else 0.0)
    smallest = torch.finfo(dtype).tiny * rounding + (terms + 4) * 2.0**-126
    return 1.01 * rounding * exact.abs() + of_terms * magnitude + smallest
