"""Start worker scripts on several processes of this machine's CPU, and read what they found."""

import json
import socket
import subprocess
import sys
from pathlib import Path

from helpers import warm

WORKERS = Path(__file__).parent
LIMIT = 240  # seconds; a rank waits 25 s for the others, so nothing comes near it unless something hangs


def launch(world: int, script: str, *args: str, timeout: int = 240, **options: bool | str) -> str:
    """Run a script of this folder under torchrun, without GPUs; its output. AssertionError where it fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    return run([*command, str(WORKERS / script), *args], timeout, **options)


def accelerate_launch(
    config: str, script: str, *args: str, world: int = 2, timeout: int = 240, **options: bool | str
) -> str:
    """Run a script of this folder under `accelerate launch`, through the shim that makes FSDP real on a CPU."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(WORKERS / config)]
    command += ["--num_processes", str(world), "--main_process_port", str(free_port())]
    return run([*command, str(WORKERS / "cpu_fsdp.py"), str(WORKERS / script), *args], timeout, **options)


def free_port() -> int:
    """A TCP port that nobody listens on now, so that two runs on one machine do not meet."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run(command: list[str], timeout: int, fails=False, fresh=False, bare=False, **environment: str) -> str:
    """Run a command of sys.executable; what it writes to stdout. Of one that must fail (`fails`) all that it writes.

    Its interpreters, those of launched ranks too, are forks of the server in helpers/warm.py; of the second one, which
    has torch alone, where what is imported is part of the test (`bare`), `fresh` ones where the command itself is.
    """
    assert command[0] == sys.executable
    interpreter = sys.executable if fresh else warm.bare() if bare else warm.python()
    env = {**warm.without_launcher(), **warm.WORKER, **environment}
    done = subprocess.run([interpreter, *command[1:]], env=env, text=True, capture_output=True, timeout=timeout)
    seen = f"{' '.join(command)}\n{done.stdout[-6000:]}\n{done.stderr[-10000:]}"
    assert (done.returncode != 0) is fails, seen
    return done.stdout + done.stderr if fails else done.stdout


def agreed(folder: Path, world: int, script: str, names: list[str]) -> dict:
    """What the scenarios `names` of a script give on `world` ranks, all of which must have the same."""
    out = folder / f"{Path(script).stem}-{world}-{names[0]}.json"
    launch(world, script, "--dir", str(folder), "--only", ",".join(names), "--out", str(out))
    first, *others = json.loads(out.read_text())["ranks"]
    assert all(other == first for other in others)
    return first


def made_model(folder: Path) -> Path:
    """The folder, with the tiny Llama and the tokenizer of train.py in model/."""
    code = (
        f"import sys; sys.path.insert(0, {str(WORKERS)!r}); import train; train.make_model({str(folder / 'model')!r})"
    )
    run([sys.executable, "-c", code], 120)
    return folder


def options(folder: Path, name: str) -> list[str]:
    """Arguments of a worker that reads `folder` and writes what it found there, as `name`."""
    return ["--dir", str(folder), "--out", str(folder / name)]


def results(folder: Path, name: str, ranks: int) -> list[dict]:
    """What each rank of such a worker found: {check: {"ok": ...} or {"error": ..., "trace": ...}}."""
    return [json.loads((folder / f"{name}.{rank}").read_text()) for rank in range(ranks)]


def passed(ranks: list[dict], check: str) -> None:
    """AssertionError where a check did not run on each rank, or found something."""
    for rank in ranks:
        assert check in rank, f"not run: {list(rank)[-1]} failed before: {rank[list(rank)[-1]].get('trace')}"
        assert "error" not in rank[check], rank[check].get("trace")
