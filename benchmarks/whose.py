"""Whose the host's time of a training step is: a thread that looks which Python frame runs, many times a second.

Each look counts for the innermost frame of an owner: OWNERS, by file. Frames of torch that others call (modules,
functionals, dispatch) count for the caller. During a backward the thread of autograd's engine counts where it runs
Python; where it runs none, that is the engine's own time and its kernels' launches. The looks need the interpreter's
lock, which torch gives up inside operators: 5 % of a share, and those of very short Python calls, are not to be
trusted.
"""

import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

# part of a file's path: owner; the first that matches counts.
OWNERS = (
    ("/bitshard/", "bitshard"),
    ("/bitsandbytes/", "bitshard"),
    ("/peft/", "peft"),
    ("/transformers/", "transformers"),
    ("/torch/distributed/fsdp/", "FSDP2"),
    ("/torch/distributed/tensor/", "DTensor"),
    ("/torch/distributed/", "collectives"),
    ("/torch/utils/checkpoint", "checkpointing"),
    ("/torch/optim/", "optimizer"),
    ("/torch/autograd/graph", "autograd's engine"),
    ("/benchmarks/", "the loop, which waits for the GPU"),
)


def owner(frame) -> tuple[str, str]:
    """Whose `frame` is, or its nearest caller of an owner; and that frame's function."""
    while frame is not None:
        code = frame.f_code
        for part, name in OWNERS:
            if part in code.co_filename:
                return name, f"{Path(code.co_filename).name}:{code.co_name}"
        frame = frame.f_back
    return "others", ""


def running(frames: dict, main: int):
    """The frame of all threads' that counts: one of autograd's where there is one, else the main thread's."""
    for thread, frame in frames.items():
        if thread != main and in_backward(frame):
            return frame
    return frames.get(main)


def in_backward(frame) -> bool:
    """Does a thread run Python for the engine? Such a thread has no Python below its first frame's call."""
    while frame.f_back is not None:
        frame = frame.f_back
    return "threading.py" not in frame.f_code.co_filename


@contextmanager
def watching(interval: float = 4e-4):
    """A Counter of looks by (owner, function) at what this thread does inside, every `interval` seconds or so."""
    found, stop, main = Counter(), threading.Event(), threading.get_ident()
    own = sys.getswitchinterval()

    def look() -> None:
        while not stop.is_set():
            frame = running({k: v for k, v in sys._current_frames().items() if k != threading.get_ident()}, main)
            found[owner(frame)] += 1
            time.sleep(interval)

    thread = threading.Thread(target=look, daemon=True)
    sys.setswitchinterval(1e-4)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(own)


def functions(found: Counter, name: str, most: int = 8) -> str:
    """The functions of owner `name` that were seen most, in a line."""
    seen = Counter({function: count for (whose, function), count in found.items() if whose == name})
    return ", ".join(f"{function} {count / found.total():.1%}" for function, count in seen.most_common(most))


def table(looks: Counter, seconds: float, layers: int) -> str:
    """Markdown: each owner's share of the looks, ms of a step that takes `seconds`, and us for each layer."""
    found, total = Counter(), looks.total()
    for (name, _), count in looks.items():
        found[name] += count
    lines = ["| whose | share | ms of a step | us for each layer |", "|---|---|---|---|"]
    for name, count in found.most_common():
        share = count / total
        lines.append(f"| {name} | {share:.1%} | {share * seconds * 1e3:.1f} | {share * seconds / layers * 1e6:.0f} |")
    return "\n".join([*lines, f"| all, {total} looks | | {seconds * 1e3:.1f} | {seconds / layers * 1e6:.0f} |"])
