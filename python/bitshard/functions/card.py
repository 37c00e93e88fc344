"""What a GPU does, measured when it is first used: by it the plan compares one pass over a 4-bit weight with panels.

For GPUs other than Hopper these rates are counted from data sheets (`csrc/plan/cards.c`), and two cards of one
architecture have the same. With BITSHARD_MEASURE_CARD=1 the first forward of a 4-bit layer times six products, and the
rates are fitted to them. They are kept in a file, so that later processes choose the same kernels:
`$XDG_CACHE_HOME/bitshard/cards.json` (`~/.cache` without the variable). Delete it to measure again.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bitshard import _C, ops

logger = logging.getLogger("bitshard")

VARIABLE = "BITSHARD_MEASURE_CARD"
SIZES = (4096, 14336)  # N and K of the weight, 117 MB in 16 bits
FEW, MANY = 128, 1024  # rows: what takes dequantizing longest, and what takes products longest
ONE_PASS, ONE_PASS_SM75, PANELS = "gemm_4bit_sm80", "gemm_4bit_sm75", "panels"
_OPS = {False: "linear_4bit", True: "linear_4bit_dgrad"}
_F16, _BF16 = 1, 2  # of `_C.plan_linear_4bit`
KEPT = ("flops_per_ns_sm", "bytes_per_ns_sm", "dequantized_per_ns_sm", "share", "l2")  # in the order of set_card_rates
_ROUNDS = 6

_seen: set[int] = set()

Timed = Callable[[str, int, bool], float]  # (kernel, rows, gradient) -> nanoseconds of a product with the weight


def at_first_use(device: torch.device) -> None:
    """Measure the GPU `device`, or read what was measured before, where the variable asks for it; once per device."""
    if os.environ.get(VARIABLE) != "1" or device.type != "cuda" or device.index in _seen:
        return
    if torch.cuda.is_current_stream_capturing():
        return
    _seen.add(device.index)
    properties = torch.cuda.get_device_properties(device)
    sm = 10 * properties.major + properties.minor
    if not _C.card_rates(sm)["chosen"]:  # its kernels are compared otherwise
        return
    try:
        rates = _read(_name(properties)) or _write(_name(properties), measured(device))
    except torch.OutOfMemoryError:
        logger.warning("%s=1: no memory to measure %s; its data sheet counts", VARIABLE, properties.name)
        return
    _C.set_card_rates(sm, *(rates[name] for name in KEPT))


def one_pass(sm: int) -> str:
    """The kernel that is compared with panels on a GPU (10 major + minor)."""
    return ONE_PASS if sm >= 80 else ONE_PASS_SM75


def measured(device: torch.device) -> dict[str, Any]:
    """The rates of a GPU, as `_C.card_rates` has them, fitted to times of its own.

    torch's random numbers stay as they are: a job that measures draws what the next one does.
    """
    properties = torch.cuda.get_device_properties(device)
    sm = 10 * properties.major + properties.minor
    (N, K), dtype = SIZES, torch.bfloat16 if sm >= 80 else torch.float16
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    with torch.cuda.device(device), torch.no_grad():
        packed, scales = ops.quantize_4bit(random(N, K), 64, 0, torch.uint8)
        none = ops.empty(device)

        def timed(kernel: str, rows: int, gradient: bool) -> float:
            x = random(rows, N if gradient else K)
            weight = (packed, scales, none, none, none)
            if gradient:
                return _forced(kernel, gradient, lambda: ops.linear_4bit_dgrad(x, *weight, 64, 0, N, K))
            return _forced(kernel, gradient, lambda: ops.linear_4bit(x, *weight, none, 64, 0, N, K))

        return fitted(sm, properties.multi_processor_count, timed, properties.L2_cache_size)


def _forced(kernel: str, gradient: bool, call: Callable[[], Any]) -> float:
    """Nanoseconds of `call` by a kernel: the least of three rounds, each after the one before."""
    _C.force_kernel(_OPS[gradient], kernel)
    try:
        call()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        for event in events:
            event.record()
            call()
        torch.cuda.synchronize()
    finally:
        _C.force_kernel(_OPS[gradient], None)
    return 1e6 * min(a.elapsed_time(b) for a, b in zip(events[:-1], events[1:], strict=True))


def fitted(sm: int, sms: int, timed: Timed, l2: int) -> dict[str, Any]:
    """Rates with which the plan's estimates for a GPU (10 major + minor, multiprocessors) are the times measured.

    Args:
        timed: measures a product with a weight of `SIZES`.
        l2: bytes; counted where the model of the architecture counts on its L2.
    """
    times = {
        (kernel, rows, gradient): timed(kernel, rows, gradient)
        for kernel in (PANELS, one_pass(sm))
        for rows in (FEW, MANY)
        for gradient in ((False,) if kernel == PANELS else (False, True))
    }
    before = _C.card_rates(sm)
    rates = {**before, "share": [list(row) for row in before["share"]], "l2": l2 if before["l2"] else 0}
    try:
        for _ in range(_ROUNDS):
            _nearer(rates, times, sm, sms)
    finally:
        _C.set_card_rates(sm)
    return rates


def _nearer(rates: dict[str, Any], times: dict[tuple, float], sm: int, sms: int) -> None:
    """Change each rate by how far the estimate that it rules most is from what was measured."""

    def off(kernel: str, rows: int, gradient: bool) -> tuple[float, str]:
        """(estimate / measured, the kernel's name in the image) by the rates as they are now."""
        _C.set_card_rates(sm, *(rates[name] for name in KEPT))
        dtype = _BF16 if sm >= 80 else _F16
        plan = _C.plan_linear_4bit(rows, *SIZES, dtype, sm, sms, nested=False, gradient=gradient, kernel=kernel)
        entry = "" if kernel == PANELS else plan["slices"][0]["launches"][0]["entry"]
        return plan["ns"] / times[kernel, rows, gradient], entry

    rates["flops_per_ns_sm"] *= off(PANELS, MANY, False)[0]
    by = off(PANELS, FEW, False)[0]
    rates["dequantized_per_ns_sm"] *= by
    rates["bytes_per_ns_sm"] *= by
    for gradient in (False, True):
        for rows in (FEW, MANY):
            by, entry = off(one_pass(sm), rows, gradient)
            rates["share"][gradient][entry.endswith("m256")] *= by


# ---- the file ----


def _name(properties: Any) -> str:
    """What must be the same for rates to be those of this card."""
    return f"{properties.name}, {properties.multi_processor_count} multiprocessors, CUDA {torch.version.cuda}"


def _path() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "bitshard" / "cards.json"


def _all() -> dict[str, Any]:
    try:
        found = json.loads(_path().read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _read(name: str) -> dict[str, Any] | None:
    """What was kept of a card; None where nothing was, or nothing that can be used."""
    kept = _all().get(name)
    try:
        numbers = [kept[key] for key in KEPT[:3]] + [value for row in kept["share"] for value in row]
        usable = len(numbers) == 7 and all(math.isfinite(value) and 0 < value < 1e9 for value in numbers)
        return {**kept, "share": tuple(map(tuple, kept["share"]))} if usable and type(kept["l2"]) is int else None
    except (KeyError, TypeError):
        return None


def _write(name: str, rates: dict[str, Any]) -> dict[str, Any]:
    """Keep the rates; other cards in the file stay. Returns them."""
    kept = {key: rates[key] for key in KEPT}
    path = _path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps({**_all(), name: kept}, indent=1))
        part.replace(path)
    except OSError as error:
        logger.warning("%s=1: what was measured cannot be kept (%s); the next process measures again", VARIABLE, error)
    return {**kept, "share": tuple(map(tuple, kept["share"]))}
