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

# Largest error of linear_4bit and linear_4bit_dgrad against fp64 with the decoded weight, in units of the rounding of
# the dtype times sqrt(sum of squared products): fp32 accumulation of up to 514 terms, one rounding to the dtype.
LINEAR_BOUND = {torch.float32: 64 * 2.0**-24, torch.float16: 4 * 2.0**-11, torch.bfloat16: 4 * 2.0**-8}
