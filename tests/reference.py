"""Every op in obvious PyTorch. Slow, and exact up to the one rounding that each comment names."""

import math

import torch
from bitshard import ops
from torch import Tensor


def blocks(x: Tensor, blocksize: int) -> Tensor:
    """[n] -> float64 [n_blocks, blocksize], the last block filled up with zeros."""
    flat = x.detach().double().flatten()
    n_blocks = math.ceil(flat.numel() / blocksize)
    return torch.nn.functional.pad(flat, (0, n_blocks * blocksize - flat.numel())).view(n_blocks, blocksize)


def pack(codes: Tensor, itemsize: int) -> Tensor:
    """4-bit codes [n] -> uint8 bytes, the first of a pair in the high half, zeros up to whole storage elements."""
    n_bytes = math.ceil(math.ceil(codes.numel() / 2) / itemsize) * itemsize
    codes = torch.nn.functional.pad(codes, (0, 2 * n_bytes - codes.numel()))
    return (codes[0::2] * 16 + codes[1::2]).to(torch.uint8)


def unpack(packed: Tensor, n: int) -> Tensor:
    """Packed tensor of any storage dtype -> 4-bit codes [n], int64."""
    bytes_ = packed.detach().cpu().contiguous().flatten().view(torch.uint8).long()
    return torch.stack([bytes_ // 16, bytes_ % 16], dim=1).flatten()[:n]


def normalized(x: Tensor, blocksize: int) -> tuple[Tensor, Tensor]:
    """x / absmax of its block, float64 [n]; and absmax float32 [n_blocks]."""
    values = blocks(x, blocksize)
    absmax = values.abs().amax(1)
    return (values / absmax[:, None]).flatten()[: x.numel()], absmax.float()


def thresholds(values: Tensor) -> Tensor:
    """Middles between neighbours of ascending values, float64."""
    ascending = values.double().sort().values
    return (ascending[1:] + ascending[:-1]) / 2


def quantize_4bit(x: Tensor, blocksize: int, quant_type: str) -> tuple[Tensor, Tensor]:
    """Nearest value of the format to x / absmax: codes [n] int64, absmax float32 [n_blocks]. FP4 codes -0 for v < 0."""
    v, absmax = normalized(x, blocksize)
    values = ops.table(quant_type)
    if quant_type == "nf4":
        return (v[:, None] > thresholds(values)).sum(1), absmax
    magnitudes, order = values[:8].sort()
    code = order[(v.abs()[:, None] > thresholds(magnitudes)).sum(1)]
    return code + 8 * (v < 0), absmax


def quantize_e2m1(x: Tensor, whole: Tensor | None) -> tuple[Tensor, Tensor]:
    """MXFP4 (no `whole`) or NVFP4: codes [n] int64, scales uint8; x / scale to the nearest, of two to the even code."""
    values = blocks(x, 32 if whole is None else 16)
    largest = values.abs().amax(1)
    if whole is None:
        scales = torch.where(largest > 0, largest.log2().floor() - 2 + 127, 127).clamp(0, 252).to(torch.uint8)
        units = 2.0 ** (scales.double() - 127)
    else:
        wanted = (largest.float() / 6 / whole).clamp(2.0**-9, 448)
        scales = wanted.to(torch.float8_e4m3fn).view(torch.uint8)
        units = (ops.table("e4m3")[scales.long()] * whole).double()
    units = torch.where(largest > 0, units, 1)
    v = (values / units[:, None]).float().flatten()[: x.numel()]  # one rounding
    middles = thresholds(ops.table("e2m1")[:8])
    above = (v.abs()[:, None] > middles) | ((v.abs()[:, None] == middles) & (torch.arange(7) % 2 == 1))
    return above.sum(1) + 8 * (v < 0), scales


def dequantize_4bit(codes: Tensor, scale: Tensor, blocksize: int, quant_type: str, dtype: torch.dtype) -> Tensor:
    """table[code] * scale of its block in float32, rounded once to dtype; [n]. FP4's code 8 is -0."""
    table = ops.table(quant_type)
    table = torch.cat([table[:8], -table[:8]]) if quant_type == "fp4" else table
    scale = scale.float().repeat_interleave(blocksize)[: codes.numel()]
    return (table[codes] * scale).to(dtype)


def nested_scale(code: Tensor, map: Tensor, absmax2: Tensor, offset: Tensor) -> Tensor:
    """map[code] * absmax2 of its 256 + offset, two float32 roundings; [n_blocks]."""
    return map[code.long()] * absmax2.repeat_interleave(256)[: code.numel()] + offset


def quantize_blockwise(x: Tensor, map: Tensor, offset: Tensor | None, blocksize: int) -> tuple[Tensor, Tensor]:
    """Nearest value of an ascending map to (x - offset) / absmax: codes [n] int64, absmax float32 [n_blocks]."""
    x = x.float() if offset is None else x.float() - offset
    v, absmax = normalized(x, blocksize)
    return torch.searchsorted(thresholds(map), v.flatten()), absmax


def dequantize_blockwise(code: Tensor, absmax: Tensor, map: Tensor, offset: Tensor | None, blocksize: int) -> Tensor:
    """map[code] * absmax of its block (+ offset), each step rounded to float32; [n]."""
    values = map[code.flatten().long()] * absmax.repeat_interleave(blocksize)[: code.numel()]
    return values if offset is None else values + offset


def linear_4bit(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + bias in float64, for the decoded weight W [N, K]."""
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


def linear_4bit_dgrad(dy: Tensor, weight: Tensor) -> Tensor:
    """dy W in float64, for the decoded weight W [N, K]."""
    return dy.double() @ weight.double()


def grouped_linear_4bit(x: Tensor, offs: Tensor, weights: Tensor, bias: Tensor | None) -> Tensor:
    """`linear_4bit` of each expert's rows with its decoded weight of [E, N, K]; rows of no expert are zero."""
    y = x.new_zeros(x.shape[0], weights.shape[1], dtype=torch.float64)
    for e, (begin, end) in enumerate(zip([0, *offs.tolist()], offs.tolist(), strict=False)):
        y[begin:end] = linear_4bit(x[begin:end], weights[e], None if bias is None else bias[e])
    return y


def grouped_linear_4bit_dgrad(dy: Tensor, offs: Tensor, weights: Tensor) -> Tensor:
    """`linear_4bit_dgrad` likewise."""
    return grouped_linear_4bit(dy, offs, weights.transpose(1, 2), None)


def sort_by_expert(chosen: Tensor, E: int, elsewhere: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The pairs of tokens and experts: order, its inverse, tokens, ends.

    Experts elsewhere are behind all. Wrong numbers are with the nearest expert; their places count from the end.
    """
    numbers = chosen.flatten()
    expert = numbers.clamp(0, E if elsewhere else E - 1)
    order = expert.argsort(stable=True)
    wrong = (numbers < 0) | (numbers >= E) & (not elsewhere)
    back = order.argsort() - len(order) * wrong
    ends = (expert.unsqueeze(0) <= torch.arange(E).unsqueeze(1)).sum(1)
    return order, back, order // chosen.shape[-1], ends.int()


def sum_by_token(y: Tensor, back: Tensor, counts: Tensor) -> Tensor:
    """Each token's rows times what they count, in fp32, one after the other; places below 0 count NaN."""
    total = torch.zeros(counts.shape[0], y.shape[1])
    back = back.view(counts.shape)
    counts = counts.float().masked_fill(back < 0, torch.nan)
    for i in range(counts.shape[1]):
        total = total + counts[:, i : i + 1] * y[back[:, i]].float()
    return total.to(y.dtype)


def checksum(packed: Tensor) -> int:
    """Sum mod 2^64 of mix(word_i + (i + 1) * golden ratio) over little-endian 8-byte words, as a signed number."""
    data = bytes(packed.detach().cpu().contiguous().flatten().view(torch.uint8).tolist())
    data += bytes(-len(data) % 8)
    total, mask = 0, 2**64 - 1
    for i in range(len(data) // 8):
        z = int.from_bytes(data[8 * i : 8 * i + 8], "little") + (i + 1) * 0x9E3779B97F4A7C15 & mask
        z ^= z >> 32
        z = z * 0xD6E8FEB86659FD93 & mask
        total += z ^ z >> 32
    total &= mask
    return total - 2**64 if total >> 63 else total


def moments(name: str, g: Tensor, s1: Tensor, s2: Tensor, s3: Tensor, h: dict) -> tuple[Tensor, Tensor, Tensor]:
    """New states of an optimizer from gradients g, float64: first and second moment, and AdEMAMix's slow one."""
    if name == "momentum":
        return (g if h["step"] == 1 else h["beta1"] * s1 + g), s2, s3
    if name == "adagrad":
        return s1 + g * g, s2, s3
    if name == "rmsprop":
        return h["beta1"] * s1 + (1 - h["beta1"]) * g * g, s2, s3
    if name == "lion":
        return h["beta2"] * s1 + (1 - h["beta2"]) * g, s2, s3
    s1 = h["beta1"] * s1 + (1 - h["beta1"]) * g
    s2 = h["beta2"] * s2 + (1 - h["beta2"]) * g * g
    return s1, s2, h["beta3"] * s3 + (1 - h["beta3"]) * g if name == "ademamix" else s3


def direction(name: str, g: Tensor, old: Tensor, s1: Tensor, s2: Tensor, s3: Tensor, h: dict) -> Tensor:
    """What lr multiplies, float64, after the states are new; `old` is the first moment before."""
    if name == "momentum":
        return s1
    if name in ("rmsprop", "adagrad"):
        return g / (s1.sqrt() + h["eps"])
    if name == "lion":
        return (h["beta1"] * old + (1 - h["beta1"]) * g).sign()
    first, second = s1 / (1 - h["beta1"] ** h["step"]), s2 / (1 - h["beta2"] ** h["step"])
    slow = h["alpha"] * s3 if name == "ademamix" else 0
    return (first + slow) / (second.sqrt() + h["eps"])


def optimizer_step(name: str, g: Tensor, p: Tensor, states: tuple[Tensor, ...], h: dict, unorm: float = 0.0):
    """p and the three states after a step, float64. `unorm`: norm of the update where max_unorm bounds it."""
    coupled = name in ("momentum", "rmsprop", "adagrad")
    scaled = g * h["gnorm_scale"]
    scaled = scaled + h["weight_decay"] * p if coupled and h["weight_decay"] else scaled  # + 0 would lose the sign of 0
    new = moments(name, scaled, *states, h)
    bound = h["max_unorm"] * h["param_norm"] + (0 if name == "adam" else h["eps"])
    scale = bound / unorm if unorm > bound else 1.0
    decay = 1 if coupled else 1 - h["lr"] * h["weight_decay"]
    x = h["lr"] * scale * direction(name, scaled, states[0], *new, h)
    p_new = p * decay - x if name == "lion" else (p - x) * decay
    keep = (g == 0) & h["skip_zeros"]
    return torch.where(keep, p, p_new), *(torch.where(keep, a, b) for a, b in zip(states, new, strict=True))


def optimizer_32bit(name: str, g: Tensor, p: Tensor, states: tuple[Tensor, ...], h: dict):
    """p, the three states, and the squared norm of the update, float64."""
    g, p, *states = (x.double() for x in (g, p, *states))
    scaled = g * h["gnorm_scale"]
    update = direction(name, scaled, states[0], *moments(name, scaled, *states, h), h)
    squared = (update**2).sum().item()
    bounded = h["max_unorm"] > 0 and name in ("adam", "momentum", "rmsprop")
    return *optimizer_step(name, g, p, states, h, math.sqrt(squared) if bounded else 0.0), squared


def state_codes(state: Tensor, map: Tensor, keep_sign: bool, blocksize: int) -> tuple[Tensor, Tensor]:
    """Codes [n] int64 and absmax float32 [n_blocks] of new states; a small first moment keeps its sign."""
    codes, absmax = quantize_blockwise(state, map, None, blocksize)
    codes = torch.where(absmax.repeat_interleave(blocksize)[: state.numel()] == 0, 0, codes)
    wrong = keep_sign & (map[codes].signbit() != state.signbit())
    return (codes + torch.where(wrong, torch.where(state > 0, 1, -1), 0)) % 256, absmax


def optimizer_8bit_blockwise(name: str, g: Tensor, p: Tensor, states: tuple[Tensor, ...], h: dict):
    """p and the three decoded states, float64. Where g is no number, p stays and the states are zero."""
    g, p, *states = (x.double() for x in (g, p, *states))
    good = g.isfinite()
    p_new, *new = optimizer_step(name, torch.where(good, g, 0), p, states, h)
    return torch.where(good, p_new, p), *(torch.where(good, state, 0) for state in new)


def search_4bit(x: Tensor, weights: Tensor, scales: Tensor, blocksize: int, quant_type: str) -> Tensor:
    """float64 [n_blocks, G]: the weighted sum of squared errors of each block with each of its scales [n_blocks, G]."""
    table = ops.table(quant_type).double()
    flat, repeated = blocks(x, blocksize), blocks(weights.repeat(-(-x.numel() // len(weights)))[: x.numel()], blocksize)
    q = table * scales.double()[..., None]  # [n_blocks, G, 16]
    errors = (flat[:, None, :, None] - q[:, :, None, :]).square().amin(-1)
    return (errors * repeated[:, None]).sum(-1)


def merge_4bit(values: Tensor, adapters: list[tuple[Tensor, Tensor, float]]) -> Tensor:
    """W in float32 [N, K] with adapters (A [r, K], B [N, r], s) in it: each product and sum rounded once, by rank."""
    for A, B, s in adapters:
        total = torch.zeros_like(values)
        for a, b in zip(A.float(), B.float().t(), strict=True):
            total = fma(b[:, None].expand_as(values), a.expand_as(values), total)
        values = fma(torch.full_like(values, s), total, values)
    return values


def merge_e2m1(values: Tensor, adapters: list, has_global: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """`merge_4bit` in MXFP4, or NVFP4 with a global scale: the largest magnitude / (6 * 448), an inverse's inverse."""
    merged = merge_4bit(values, adapters)
    whole = 1 / (1 / (merged.abs().max() / torch.tensor(6.0 * 448))) if has_global else None
    return *quantize_e2m1(merged, whole), whole


def merged_values(values: Tensor, adapters: list[tuple[Tensor, Tensor, float]], row0: int, rows: int) -> Tensor:
    """Rows [row0, row0 + rows) of `merge_4bit`."""
    return merge_4bit(values, adapters)[row0 : row0 + rows]


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """fp32(a b + c), rounded once: the product is exact in float64, and its sum with c is rounded to odd there."""
    product, c = a.double() * b.double(), c.double()
    total = product + c
    part = total - product
    lost = (product - (total - part)) + (c - part)  # what the sum has lost, exactly (Knuth)
    bits = total.view(torch.int64)
    away = (lost > 0) == (total > 0)  # the exact sum is further from zero
    odd = torch.where(away, bits | 1, torch.where(bits % 2 == 0, bits - 1, bits))
    return torch.where(lost != 0, odd.view(torch.float64), total).float()


def round_4bit(w: Tensor, u: Tensor, scales: Tensor, quant_type: str) -> tuple[Tensor, Tensor]:
    """Codes int64 [N, P], column by column, and float64 errors, each passed on to the columns behind it."""
    table, w, u = ops.table(quant_type).double(), w.double().clone(), u.double()
    codes, errors = torch.empty(w.shape, dtype=torch.long), torch.empty_like(w)
    for j in range(w.shape[1]):
        q = table * scales[:, j : j + 1].double()
        codes[:, j] = (w[:, j : j + 1] - q).abs().argmin(1)
        errors[:, j] = (w[:, j] - q.gather(1, codes[:, j : j + 1])[:, 0]) / u[j, j]
        w[:, j + 1 :] -= errors[:, j : j + 1] * u[j, j + 1 :]
    return codes, errors


def quantize_int8(x: Tensor, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    """Codes int64 and absmax float32 of rows, and which columns have an outlier; x finite, absmax not tiny."""
    rows = x.detach().reshape(-1, x.shape[-1])
    outliers = rows.abs() >= threshold if threshold > 0 else torch.zeros_like(rows, dtype=torch.bool)
    values = rows.float().masked_fill(outliers, 0)
    absmax = values.abs().amax(1) if values.numel() else values.new_zeros(len(values))
    scale = torch.where(absmax > 0, 127 / absmax, 0)
    codes = torch.round(values * scale[:, None]).long()  # to even
    if len(rows) > 1:
        codes[:, outliers.any(0)] = 0
    return codes.view(x.shape), absmax, outliers.any(0)


def dequantize_int8(packed: Tensor, absmax: Tensor, N: int, K: int, dtype: torch.dtype) -> Tensor:
    """Codes of any storage times absmax / 127 of their row, two float32 roundings and one to dtype; [N, K]."""
    codes = packed.detach().contiguous().flatten().view(torch.int8)[: N * K].view(N, K)
    return (codes.float() * absmax[:, None] * torch.tensor(1 / 127)).to(dtype)


def product_int8(a: Tensor, b: Tensor) -> Tensor:
    """a b^T, int64."""
    return a.long() @ b.long().T


def scale_product_int8(sums: Tensor, rows: Tensor, columns: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """sums * row absmax * column absmax in float32; times a rounded 1 / 127^2, plus bias, rounded to float32, dtype."""
    flat = sums.reshape(-1, sums.shape[-1])
    scaled = (flat.float() * rows[:, None] * columns).double() * torch.tensor(6.200012e-05).double()
    return (scaled + (0 if bias is None else bias.double())).float().to(dtype).view(sums.shape)


def linear_int8(x: Tensor, weight: Tensor, bias: Tensor | None, threshold: float, coded: bool) -> Tensor:
    """x W^T + bias in float64, for the decoded weight W [N, K]; `coded`: through codes but in outlier columns."""
    x = x.double().reshape(-1, x.shape[-1])
    codes, absmax, outliers = quantize_int8(x, threshold)
    if coded:
        x = torch.where(outliers, x, codes * absmax.double()[:, None] / 127)
    return linear_4bit(x, weight, bias)


def linear_int8_dgrad(dy: Tensor, weight: Tensor) -> Tensor:
    """dy W in float64, for the decoded weight W [N, K]."""
    return dy.double() @ weight.double()


def linear_4bit_int8(
    x: Tensor, absmax: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, factor: float
) -> tuple[Tensor, Tensor]:
    """y [M, N] and the sum of its terms' magnitudes, float64. x: codes of groups [M K / 64, 64], absmax [M K / 64].

    codes: int64 [N, K], W's 16 values times `factor`, rounded. scales: float32 [N, K / 64] of W's groups.
    """
    G = codes.shape[1] // 64
    sums = torch.einsum("mgi,ngi->mng", x.view(-1, G, 64).double(), codes.view(-1, G, 64).double())
    terms = sums * (absmax.double() / 127).view(-1, 1, G) * (scales.double() / factor)
    bias = torch.zeros(len(codes)) if bias is None else bias
    return terms.sum(2) + bias.double(), terms.abs().sum(2) + bias.double().abs()
