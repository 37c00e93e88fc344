"""Tries the wheels in empty environments that find neither a compiler nor nvcc, and prints a table.

    python release/try_wheels.py --wheels dist --environment python3.12:2.15.0 [--environment ...] [--out TABLE.md]

Each environment is an interpreter and a version of torch. There it installs torch, the Hugging Face stack, bitsandbytes
0.50.2 and the engine's wheel; then `bitshard report` must name upstream, `bitshard use` must exchange it, the report
must find nothing wrong, the quick demo and the core of the suite run, and `bitshard unuse` must leave upstream's files
as they were. torch brings some 5 GB a time; environments are removed again.
"""

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STACK = "transformers peft accelerate trl datasets gguf matplotlib psutil pytest".split()
UPSTREAM = "bitsandbytes==0.50.2"
CORE = "quantize linear functional params autograd isa facade_names facade_optim checkpoints hf experts lora fsdp_train"


class Environment:
    """An interpreter's environment below .cache/try, for the time of a `with`."""

    def __init__(self, python: str, torch: str):
        self.python, self.torch = python, torch
        self.folder = ROOT / ".cache" / "try" / f"{Path(python).name}-{torch}"
        self.bin = self.folder / "bin"

    def __enter__(self) -> "Environment":
        shutil.rmtree(self.folder, ignore_errors=True)
        self._call([self.python, "-m", "venv", str(self.folder)])
        return self

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _call(self, command: list[str]) -> subprocess.CompletedProcess:
        """With nothing on the PATH but the environment's own programs."""
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CC", "CUDA_HOME")}
        env |= {"PATH": str(self.bin), "CUDA_HOME": "/nowhere", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)

    def __call__(self, program: str, *words: str, status: int = 0) -> str:
        """Output of a program of the environment; RuntimeError where it ends otherwise than expected."""
        done = self._call([str(self.bin / program), *words])
        if done.returncode != status:
            raise RuntimeError(f"{program} {' '.join(words)}: status {done.returncode}: {done.stderr[-600:]}")
        return done.stdout

    def pip(self, *words: str) -> None:
        """Install."""
        self("python", "-m", "pip", "install", "-qq", "--disable-pip-version-check", *words)

    def tests(self, names: list[str]) -> str:
        """The runner's last line, without its times."""
        files = [str(next((ROOT / "tests").glob(f"*/test_{name}.py"))) for name in names]
        done = self._call([str(self.bin / "python"), "-m", "pytest", "-q", "-p", "no:cacheprovider", *files])
        for line in re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.M):
            print(f"  {line}", flush=True)
        found = re.findall(r"^=*\s*(\d+ (?:passed|failed).*?) in ", done.stdout, re.M)
        return found[-1] if found else f"status {done.returncode}: {done.stdout[-300:]}"


def installed_bytes(environment: Environment) -> str:
    """A hash of all files of the installed upstream."""
    (site,) = (environment.folder / "lib").glob("python3.*/site-packages")
    found = hashlib.sha256()
    for path in sorted(site.glob("bitsandbytes*/**/*")):
        if path.is_file() and "__pycache__" not in path.parts:
            found.update(f"{path.relative_to(site)}\n".encode() + path.read_bytes())
    return found.hexdigest()


def tried(environment: Environment, wheel: Path, names: list[str]) -> list[str]:
    """Cells of a row."""
    environment.pip(f"torch=={environment.torch}")
    environment.pip(*STACK, UPSTREAM, str(wheel))
    before = installed_bytes(environment)
    if "upstream" not in environment("bitshard", "report", status=1):
        raise RuntimeError("bitshard report did not name upstream")
    environment("bitshard", "use")
    report = environment("bitshard", "report")
    if "Nothing is wrong." not in report:
        raise RuntimeError(f"bitshard report: {report}")
    begin = time.monotonic()
    environment("python", "examples/demo.py", "--quick")
    seconds = time.monotonic() - begin
    outcome = environment.tests(names)
    environment("bitshard", "unuse")
    back = "equal" if installed_bytes(environment) == before else "DIFFERENT"
    version = environment("python", "-c", "import torch, platform; print(platform.python_version(), torch.__version__)")
    transformers = environment("python", "-c", "import transformers; print(transformers.__version__)").strip()
    return [*version.split(), transformers, f"runs, {seconds:.0f} s", outcome, back]


def main() -> None:
    """A row for each environment, also where it fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, default=ROOT / "dist")
    parser.add_argument("--environment", action="append", required=True, metavar="PYTHON:TORCH")
    parser.add_argument("--tests", default=CORE, help="names of test files, without test_")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    (wheel,) = options.wheels.glob(f"bitshard-*_{platform.machine()}.whl")
    titles = ["Python", "torch", "transformers", "quick demo", "core of the suite", "upstream's files after `unuse`"]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for given in options.environment:
        python, _, torch = given.rpartition(":")
        try:
            with Environment(python, torch) as environment:
                cells = tried(environment, wheel, options.tests.split())
        except (RuntimeError, OSError) as error:
            cells = [Path(python).name, torch, "", f"failed: {' '.join(str(error).split())}", "", ""]
        lines.append("| " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
