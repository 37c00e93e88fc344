"""Run a worker with bitshard's bitsandbytes and with the original, each in a process of its own."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import fetch

ROOT = Path(__file__).resolve().parents[2]
WORKERS = Path(__file__).parent / "workers"
sys.path.insert(0, str(ROOT / "tests"))

from helpers import upstream  # noqa: E402

SHIM = ROOT / "tests" / "fsdp" / "cpu_fsdp.py"
FSDP2 = ROOT / "tests" / "fsdp" / "fsdp2.yaml"
OURS, THEIRS = "bitshard", "bitsandbytes"
BOTH = (OURS, THEIRS)


def run(
    which: str,
    tools: list[str],
    worker: str,
    *args: str,
    out: Path,
    launcher: str = "",
    timeout: int = 300,
    **variables: str,
):
    """Results of a worker, a list with one dict per rank; AssertionError with its output where it fails.

    `which` is OURS or THEIRS, `tools` are names of `fetch.PINS` to put on the path, `launcher` is "" for one process,
    "torchrun" or "fsdp2" (accelerate with FSDP2) for two; `variables` are further ones of the environment.
    """
    out.mkdir(parents=True, exist_ok=True)
    for old in [*out.glob("result.*"), *out.glob("error.*")]:
        old.unlink()
    command = [str(WORKERS / worker), *args, "--out", str(out)]
    done = subprocess.run(
        [sys.executable, *launch(launcher), *command],
        env=environment(which, tools) | variables,
        cwd=out,  # unsloth writes into the working folder
        text=True,
        capture_output=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{which}: {worker} {' '.join(args)}\n{done.stdout[-2000:]}\n{cause(out, done.stderr)}"
    found = [json.loads((out / f"result.{rank}").read_text()) for rank in range(2 if launcher else 1)]
    assert all(result["bitsandbytes"] == which for result in found), (which, found)
    return found


def command(
    which: str,
    tool: str,
    words: list[str],
    files: dict[str, str],
    out: Path,
    timeout: int = 600,
    **variables: str,
) -> dict:
    """What `Trainer` trained in a tool that its own command starts: `python -m WORDS` in a folder with `files` by name,
    the model and the rows of workers/model.py. AssertionError with its output where it fails."""
    out.mkdir(parents=True, exist_ok=True)
    path = [str(WORKERS / "watch"), str(WORKERS / "standins"), str(WORKERS), str(ROOT / "tests" / "helpers")]
    env = environment(which, [tool]) | {"WATCHED": str(out / "watched")} | variables
    env["PYTHONPATH"] = os.pathsep.join([*path, env["PYTHONPATH"]])
    for name, text in files.items():
        (out / name).write_text(text)
    for line, results in (([str(WORKERS / "model.py"), str(out)], None), (["-m", *words], out / "watched")):
        code, said = ended([sys.executable, *line], results, timeout, env=env, cwd=out)
        assert code in (0, None), f"{which}: {' '.join(line)} ended with {code}\n{said}"
    found = json.loads((out / "watched").read_text())
    assert found["bitsandbytes"] == which, found
    return found


def ended(
    line: list[str], results: Path | None, timeout: float, after: float = 30, **options
) -> tuple[int | None, str]:
    """Run a command in a process group of its own: its exit code and the end of its output.

    Where it has written `results` and runs on for `after` seconds, the group is ended; the code is then None, and a
    warning says so. Where it has written none in `timeout` seconds, the group is ended with an AssertionError.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as output:  # not a pipe, which a child left behind holds open
        process = subprocess.Popen(line, stdout=output, stderr=output, start_new_session=True, **options)
        try:
            late = wait(process, results, timeout, after)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        said = output.read()[-8000:]
    if late is None:
        return process.returncode, said
    assert late == "results", f"{' '.join(line)} wrote no results in {timeout} s\n{said}"
    warnings.warn(f"{' '.join(line)} was ended {after} s after it had written its results", stacklevel=2)
    return None, said


def wait(process: subprocess.Popen, results: Path | None, timeout: float, after: float) -> str | None:
    """None where the process has ended by itself, "results" where it runs on after it wrote them, else "nothing"."""
    limit, written = time.monotonic() + timeout, False
    while process.poll() is None:
        if not written and results is not None and results.exists():
            limit, written = time.monotonic() + after, True
        if time.monotonic() > limit:
            return "results" if written else "nothing"
        time.sleep(0.2)
    return None


def cause(out: Path, stderr: str) -> str:
    """The ranks' own tracebacks where they left any, else the end of what was printed."""
    return "\n".join(left.read_text()[-5000:] for left in sorted(out.glob("error.*"))) or stderr[-6000:]


def launch(launcher: str) -> list[str]:
    if launcher == "torchrun":
        return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    if launcher == "fsdp2":
        options = ["--config_file", str(FSDP2), "--main_process_port", str(free_port())]
        return ["-m", "accelerate.commands.launch", *options, str(SHIM)]
    return []


def environment(which: str, tools: list[str]) -> dict[str, str]:
    """The caller's, with the tools and one of the two packages `bitsandbytes` first on the path."""
    dropped = ("ACCELERATE_", "FSDP_", "RANK", "WORLD_SIZE", "LOCAL_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    first = [str(upstream.folder())] if which == THEIRS else []
    given = [os.path.abspath(path) for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    path = [*first, *(str(fetch.folder(tool)) for tool in tools), *given]
    env.update(PYTHONPATH=os.pathsep.join(path), OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", BITSHARD_PLUGIN="0")
    return env | {
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": "cpu",
        "UNSLOTH_DISABLE_STATISTICS": "1",
        "DO_NOT_TRACK": "1",  # axolotl waits at its end for what it reports, with no limit
    }


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def gap(a: list[float], b: list[float]) -> float:
    """The largest relative difference of two lists of losses."""
    assert len(a) == len(b) >= 2, (a, b)
    return max(abs(x - y) / abs(x) for x, y in zip(a, b, strict=True))
