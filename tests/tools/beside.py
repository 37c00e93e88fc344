"""Run a worker with bitshard's bitsandbytes and with the original, each in a process of its own."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import fetch

ROOT = Path(__file__).resolve().parents[2]
WORKERS = Path(__file__).parent / "workers"
sys.path.insert(0, str(ROOT / "tests"))

import upstream  # noqa: E402

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


def command(which: str, tool: str, words: list[str], files: dict[str, str], out: Path, timeout: int = 600) -> dict:
    """What `Trainer` trained in a tool that its own command starts: `python -m WORDS` in a folder with `files` by name,
    the model and the rows of workers/model.py. AssertionError with its output where it fails."""
    out.mkdir(parents=True, exist_ok=True)
    path = [str(WORKERS / "watch"), str(WORKERS / "standins"), str(WORKERS)]
    env = environment(which, [tool]) | {"WATCHED": str(out / "watched")}
    env["PYTHONPATH"] = os.pathsep.join([*path, env["PYTHONPATH"]])
    for name, text in files.items():
        (out / name).write_text(text)
    for line in ([str(WORKERS / "model.py"), str(out)], ["-m", *words]):
        done = subprocess.run(
            [sys.executable, *line], env=env, cwd=out, text=True, capture_output=True, timeout=timeout
        )
        assert done.returncode == 0, f"{which}: {' '.join(line)}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    found = json.loads((out / "watched").read_text())
    assert found["bitsandbytes"] == which, found
    return found


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
    }


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def gap(a: list[float], b: list[float]) -> float:
    """The largest relative difference of two lists of losses."""
    assert len(a) == len(b) >= 2, (a, b)
    return max(abs(x - y) / abs(x) for x, y in zip(a, b, strict=True))
