"""Start worker scripts on several processes of this machine's CPU."""

import os
import socket
import subprocess
import sys
from pathlib import Path

WORKERS = Path(__file__).parent


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


def run(command: list[str], timeout: int, fails: bool = False, **environment: str) -> str:
    """Run a command; what it writes to stdout. Of one that must fail (`fails`) all that it writes."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "FSDP_"))}
    env.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    done = subprocess.run(command, env={**env, **environment}, text=True, capture_output=True, timeout=timeout)
    seen = f"{' '.join(command)}\n{done.stdout[-6000:]}\n{done.stderr[-10000:]}"
    assert (done.returncode != 0) is fails, seen
    return done.stdout + done.stderr if fails else done.stdout
