"""Optimizer steps of bitshard beside those of bitsandbytes' CUDA library, in one process, on the same gradients.

    export PYTHONPATH=FOLDER_OF_UPSTREAM
    python benchmarks/checks/cuda_optim.py compare [ELEMENTS] [--only "adam 8,lion"] [--steps 20]
    python benchmarks/checks/cuda_optim.py golden FILE.npz      # bitsandbytes' states, for the CPU

Upstream must come before the façade on the path. `compare` prints a table of what differs, each row as soon as it is
known; `--only` names rows by the words they begin with, with commas between. `golden` is what
tests/golden/optimizers.npz was made with.
"""

import argparse

import numpy
import torch
from bitshard.bnb_ops import _optimizer_update_8bit_blockwise, _optimizer_update_32bit

STEPS = 100
GOLDEN_STEPS, GOLDEN_ELEMENTS = (1, 2, 100), 515  # two blocks and three elements
NAMES = ("adam", "momentum", "rmsprop", "adagrad", "lion", "ademamix")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
NUMBERS = {"beta1": 0.9, "beta2": 0.999, "beta3": 0.9999, "alpha": 5.0, "eps": 1e-8, "weight_decay": 0.01, "lr": 1e-3}


def scattered(n: int, seed: int) -> torch.Tensor:
    """n numbers of [-0.5, 0.5) by integer arithmetic, the same everywhere and always."""
    i = torch.arange(n, dtype=torch.int64)
    h = (i * 2654435761 + seed * 40503 * 65537 + 12345) % 2**32
    h = (h ^ (h >> 15)) * 2246822519 % 2**32
    h = (h ^ (h >> 13)) * 3266489917 % 2**32
    return (h >> 8).double() / 2**24 - 0.5


def gradient(n: int, step: int) -> torch.Tensor:
    """Over twelve powers of two, a seventh of them zero."""
    g = scattered(n, 2 * step) * torch.exp2(-torch.floor((scattered(n, 2 * step + 1) + 0.5) * 12))
    g[step % 7 :: 7] = 0
    return g.float()


def parameter(n: int) -> torch.Tensor:
    return scattered(n, 1000003).float()


class State:
    """What an optimizer keeps of one parameter [n], as bitsandbytes lays it out."""

    def __init__(self, name: str, bits: int, p: torch.Tensor, maps: tuple[torch.Tensor, torch.Tensor]):
        n, device = p.numel(), p.device
        lead, two = (2,) if name == "ademamix" else (), name in ("adam", "ademamix")
        dtype, blocks = (torch.uint8, -(-n // 256)) if bits == 8 else (torch.float32, 0)
        self.name, self.bits, self.p = name, bits, p
        self.state1 = torch.zeros((*lead, n), dtype=dtype, device=device)
        self.state2 = torch.zeros(n, dtype=dtype, device=device) if two else None
        self.maps = maps if two else (maps[0], None)
        self.absmax1 = torch.zeros((*lead, blocks), device=device)
        self.absmax2 = torch.zeros(blocks, device=device) if two else None

    def step(self, library, g: torch.Tensor, step: int) -> None:
        """`library` has optimizer_update_32bit and optimizer_update_8bit_blockwise with bitsandbytes' arguments."""
        k = numbers(self.name, self.bits)
        if self.bits == 8:
            library.optimizer_update_8bit_blockwise(
                *(self.name, g, self.p, self.state1, self.state2, k["beta1"], k["beta2"], k["beta3"], k["alpha"]),
                *(k["eps"], step, k["lr"], *self.maps, self.absmax1, self.absmax2, k["weight_decay"], 1.0, False),
            )
            return
        library.optimizer_update_32bit(
            *(self.name, g, self.p, self.state1, k["beta1"], k["eps"], step, k["lr"], self.state2, k["beta2"]),
            *(k["beta3"], k["alpha"], k["weight_decay"], 1.0, None, 0.0, False),
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {"p": self.p, "state1": self.state1, "state2": self.state2}
        if self.bits == 8:
            found |= {"absmax1": self.absmax1, "absmax2": self.absmax2}
        return {key: value for key, value in found.items() if value is not None}


def ordered(values: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the numbers: their difference counts roundings."""
    if values.dtype == torch.uint8:
        return values.long()
    bits = values.view(torch.int32 if values.itemsize == 4 else torch.int16).long()
    return torch.where(bits < 0, -(bits & (2**31 - 1 if values.itemsize == 4 else 2**15 - 1)), bits)


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> str:
    """Share that differs, and by how many codes or roundings at most."""
    apart = (ordered(ours) - ordered(theirs)).abs()
    different = float((apart != 0).double().mean())
    return "equal" if different == 0 else f"{different:.1e} by <= {int(apart.max())}"


class Ours:
    """bitshard's updates with bitsandbytes' arguments."""

    optimizer_update_8bit_blockwise = staticmethod(_optimizer_update_8bit_blockwise)

    @staticmethod
    def optimizer_update_32bit(name, g, p, state1, beta1, eps, step, lr, state2, beta2, beta3, alpha, *rest) -> None:
        weight_decay, gnorm_scale, unorm, max_unorm, skip_zeros = rest
        numbers = (beta1, beta2, beta3, alpha, eps, weight_decay, step, lr, gnorm_scale, skip_zeros)
        _optimizer_update_32bit(name, g, p, state1, state2, unorm, max_unorm, 0.0, *numbers)


def numbers(name: str, bits: int) -> dict[str, float]:
    """Without decay where bitsandbytes divides the gradient without decay by the root of squares with it."""
    return NUMBERS | ({"weight_decay": 0.0} if bits == 8 and name in ("rmsprop", "adagrad") else {})


def whole_blocks(name: str, n: int) -> int:
    """bitsandbytes lays the scales of AdEMAMix's two first moments over each other where n is not in whole blocks."""
    return n - n % 256 if name == "ademamix" else n


def known(name: str, bits: int, dtype: torch.dtype) -> bool:
    """Whether bitsandbytes has it: of 32-bit states in bfloat16 only some."""
    return bits == 8 or dtype != torch.bfloat16 or name in ("adam", "lion", "ademamix")


def cases():
    for name in NAMES:
        for bits in (8, 32):
            for label, dtype in DTYPES.items():
                if known(name, bits, dtype):
                    yield name, bits, label, dtype


def is_wanted(row: str, only: str) -> bool:
    """Whether a row begins with one of the texts of `only`; all do where there is none."""
    return not only or any(f"{row} ".startswith(f"{text.strip()} ") for text in only.split(","))


def compare(n: int, only: str = "", steps: int = STEPS) -> None:
    from bitsandbytes import functional as theirs

    maps = (theirs.create_dynamic_map().cuda(), theirs.create_dynamic_map(signed=False).cuda())
    columns = ["state1", "state2", "absmax1", "absmax2", "p"]
    print(f"{n} elements, {steps} steps of each\n")
    print(f"| algorithm | state | dtype | {' | '.join(columns)} | p: most apart, in lr |\n|{'---|' * 9}")
    for name, bits, label, dtype in cases():
        if not is_wanted(f"{name} {bits} {label}", only):
            continue
        size = whole_blocks(name, n)
        states = [State(name, bits, parameter(size).to("cuda", dtype), maps) for _ in range(2)]
        for step in range(1, steps + 1):
            g = gradient(size, step).to("cuda", dtype)
            for state, library in zip(states, (Ours, theirs), strict=True):
                state.step(library, g.clone(), step)
        found = [state.tensors() for state in states]
        cells = [difference(found[0][key], found[1][key]) if key in found[0] else "" for key in columns]
        apart = float((found[0]["p"].double() - found[1]["p"].double()).abs().max()) / NUMBERS["lr"]
        print(f"| {name} | {bits} | {label} | {' | '.join(cells)} | {apart:.1e} |", flush=True)


def golden(file: str) -> None:
    from bitsandbytes import functional as theirs

    maps = (theirs.create_dynamic_map().cuda(), theirs.create_dynamic_map(signed=False).cuda())
    arrays = {}
    for name, bits, label, dtype in cases():
        size = whole_blocks(name, GOLDEN_ELEMENTS)
        state = State(name, bits, parameter(size).to("cuda", dtype), maps)
        for step in range(1, STEPS + 1):
            state.step(theirs, gradient(size, step).to("cuda", dtype), step)
            for key, value in state.tensors().items() if step in GOLDEN_STEPS else ():
                value = value.view(torch.int16) if value.dtype == torch.bfloat16 else value
                arrays[f"{name}.{bits}.{label}.{step}.{key}"] = value.cpu().numpy().copy()
    numpy.savez_compressed(file, **arrays)
    print(f"{file}: {len(arrays)} arrays from {torch.cuda.get_device_name()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    rows = commands.add_parser("compare")
    rows.add_argument("elements", type=int, nargs="?", default=1_000_003)
    rows.add_argument("--only", default="")
    rows.add_argument("--steps", type=int, default=STEPS)
    commands.add_parser("golden").add_argument("file")
    options = parser.parse_args()
    if options.command == "golden":
        golden(options.file)
    else:
        compare(options.elements, options.only, options.steps)
