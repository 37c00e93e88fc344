"""Paged optimizers on a GPU: bit-equal to unpaged ones where states are three times the buffer, then their speed.

    python benchmarks/checks/cuda_paged.py [exact] [speed] [--only "AdamW8bit bf16,pause"] [--times 5]

Both by default; speed prints a Markdown table. `--only` names what runs by texts in its line, with commas between.
Each line is printed as soon as it is known. Nothing of it is in the table without having run: an inequality ends the
script. "Link": pinned memory copied in both directions at once, 64 MiB at a time, bytes of both directions over the
time.
"""

import argparse
import gc
import os
import time

import bitsandbytes as bnb
import torch

STEPS = 5
NAMES = ("AdamW8bit", "AdamW32bit", "Lion8bit", "AdEMAMix8bit")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
STATES = {"AdamW8bit": 2, "AdamW32bit": 8, "Lion8bit": 1, "AdEMAMix8bit": 3}  # bytes an element
MIB = 2**20


def build(name: str, params: list, paged: bool):
    return getattr(bnb.optim, ("Paged" if paged else "") + name)(params, lr=1e-3, weight_decay=1e-2)


def parameters(shapes, dtype) -> list[torch.nn.Parameter]:
    generator = torch.Generator("cuda").manual_seed(1)
    return [torch.nn.Parameter(torch.randn(s, generator=generator, device="cuda").to(dtype)) for s in shapes]


def set_gradients(params: list, step: int) -> None:
    generator = torch.Generator("cuda").manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator, device="cuda").to(p.dtype)


def paged_bytes(optimizer) -> int:
    return sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if getattr(value, "is_paged", False)
    )


def compare(ours, theirs, what: str) -> None:
    """Parameters and all of the state, through state dicts."""
    left, right = ours.state_dict()["state"], theirs.state_dict()["state"]
    for key in right:
        hidden = "__bnb_optimizer_quant_state__"
        for name, value in right[key][hidden].items():
            assert torch.equal(left[key][hidden][name].cpu(), value.cpu()), (what, key, name)
    for group, other in zip(ours.param_groups, theirs.param_groups, strict=True):
        for p, q in zip(group["params"], other["params"], strict=True):
            assert torch.equal(p, q), what


def is_wanted(line: str, only: str) -> bool:
    """Whether one of the texts of `only` is in it; all are wanted where there is none."""
    return not only or any(text.strip() in line for text in only.split(","))


def exact(options) -> None:
    """Large, odd and small parameters; states at least three times the buffer; a state dict between steps."""
    shapes = [(3001, 4099), (1024, 4096), (7,), (99_999,), (100_003,), (4096, 1024), (333, 777)] + [(16, 14336)] * 20
    elements = sum(torch.Size(shape).numel() for shape in shapes)
    for name in NAMES:
        for label, dtype in DTYPES.items():
            if not is_wanted(f"{name} {label}", options.only):
                continue
            limit = round(elements * STATES[name] / 3.5 / MIB, 3)
            os.environ["BITSHARD_PAGING_MB"] = str(limit)
            ours, theirs = parameters(shapes, dtype), parameters(shapes, dtype)
            paged, plain = build(name, ours, True), build(name, theirs, False)
            for step in range(STEPS):
                for params, optimizer in ((ours, paged), (theirs, plain)):
                    set_gradients(params, step)
                    optimizer.step()
                if step == 2:
                    saved, paged = paged.state_dict(), build(name, ours, True)
                    paged.load_state_dict(saved)
            compare(paged, plain, f"{name} {label}")
            held = sum(buffer.nbytes for pager in paged.paging._pagers.values() for buffer in pager.buffers)
            states = paged_bytes(paged)
            assert states >= 3 * held > 0 and held <= limit * MIB, (name, states, held)
            pinned = all(v.is_pinned() for s in paged.state.values() for v in s.values() if getattr(v, "is_paged", 0))
            assert pinned, name
            print(
                f"{name} {label}: equal after {STEPS} steps, {states / MIB:.0f} MiB through {held / MIB:.0f}",
                flush=True,
            )
            del ours, theirs, paged, plain, saved
    if is_wanted("steps without a pause", options.only):
        unsynchronized()
    os.environ.pop("BITSHARD_PAGING_MB", None)


def unsynchronized() -> None:
    """Steps without a pause, other work on the same stream and allocations between, which must not take slot memory."""
    made = []
    for paged in (True, False):
        params = parameters([(2048, 4096)] * 6, torch.bfloat16)
        optimizer = build("AdamW8bit", params, paged)
        for step in range(20):
            set_gradients(params, step % 3)
            optimizer.step()
            noise = [torch.full((2048, 2048), float("nan"), device="cuda") for _ in range(8)]
            del noise
            if step == 10:
                os.environ["BITSHARD_PAGING_MB"] = "16"  # another buffer
        made.append(optimizer)
    compare(*made, "steps without a pause")
    print("steps without a pause: equal", flush=True)


# ---- speed ----


def link() -> float:
    """GB/s of plain pinned copies, both directions at once."""
    up, down = torch.cuda.Stream(), torch.cuda.Stream()
    size, times = 64 * MIB, 40
    hosts = [torch.zeros(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    devices = [torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    best = 0.0
    for _ in range(3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(times):
            with torch.cuda.stream(up):
                devices[0].copy_(hosts[0], non_blocking=True)
            with torch.cuda.stream(down):
                hosts[1].copy_(devices[1], non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, 2 * size * times / (time.perf_counter() - begin) / 1e9)
    return best


def adapters() -> list[tuple[int, int]]:
    """A and B of rank 16 on the seven linears of 32 layers of an 8B Llama."""
    linears = [(4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096), (4096, 14336), (4096, 14336), (14336, 4096)]
    return [shape for _ in range(32) for inner, outer in linears for shape in ((16, inner), (outer, 16))]


def timed(optimizer, times: int) -> tuple[float, float]:
    """(seconds of a step in a loop, seconds until a step returns)."""
    for _ in range(3):
        optimizer.step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(times):
        optimizer.step()
    torch.cuda.synchronize()
    whole = (time.perf_counter() - begin) / times
    host = []
    for _ in range(times):
        begin = time.perf_counter()
        optimizer.step()
        host.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
    return whole, min(host)


def measure(name: str, shapes: list, dtype, paged: bool, times: int) -> dict:
    params = parameters(shapes, dtype)
    set_gradients(params, 0)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer = build(name, params, paged)
    seconds, host = timed(optimizer, times)
    peak = torch.cuda.max_memory_allocated() - before
    return {"seconds": seconds, "host": host, "peak": peak, "moved": 2 * paged_bytes(optimizer)}


def speed(options) -> None:
    plain = link()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, link {plain:.1f} GB/s both ways together\n")
    columns = ["case", "optimizer", "paged ms", "unpaged ms", "host ms", "link GB/s", "of the link"]
    columns += ["device MiB paged", "device MiB unpaged"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for case, shapes in (("one of 268M", [(2**14, 2**14)]), ("448 adapters", adapters())):
        for name in NAMES:
            for label, dtype in DTYPES.items():
                if not is_wanted(f"{case}, {name} {label}", options.only):
                    continue
                paged, whole = (measure(name, shapes, dtype, paged, options.times) for paged in (True, False))
                rate = paged["moved"] / paged["seconds"] / 1e9
                cells = [f"{case}, {label}", name, *(f"{1e3 * found['seconds']:.2f}" for found in (paged, whole))]
                cells += [f"{1e3 * paged['host']:.2f}", f"{rate:.1f}", f"{rate / plain:.2f}"]
                cells += [f"{found['peak'] / MIB:.0f}" for found in (paged, whole)]
                print(f"| {' | '.join(cells)} |", flush=True)
                gc.collect()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="exact | speed", help="default: both")
    parser.add_argument("--only", default="")
    parser.add_argument("--times", type=int, default=5, help="steps of each kind that are timed")
    chosen = parser.parse_args()
    functions = {"exact": exact, "speed": speed}
    if unknown := set(chosen.parts) - set(functions):
        parser.error(f"{', '.join(sorted(unknown))}: expected exact or speed")
    for part in chosen.parts or functions:
        functions[part](chosen)
