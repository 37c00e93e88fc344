"""Values of E2M1, E8M0 and E4M3 from their specifications: OCP Microscaling Formats v1.0, 5.3 and 5.4; OCP FP8 1.0."""

import math

import torch


def e2m1(code: int) -> float:
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    magnitude = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
    return -magnitude if sign else magnitude


def e4m3(byte: int) -> float:
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    magnitude = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
    return -magnitude if sign else magnitude


def e8m0(byte: int) -> float:
    return math.nan if byte == 255 else 2.0 ** (byte - 127)


SCALE = {"mxfp4": torch.tensor([e8m0(b) for b in range(256)]), "nvfp4": torch.tensor([e4m3(b) for b in range(256)])}
VALUE = torch.tensor([e2m1(code) for code in range(16)])
