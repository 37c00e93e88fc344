"""Tries the wheel for aarch64 on a machine that is none, under qemu-user, and prints a table of what ran.

    python release/try_aarch64.py [--out TABLE.md] [--only core,wheel,suite] [--tests "ops/test_isa.py"] [--limit 900]

`make aarch64` builds that wheel, for CPU only, and runs this. It needs Debian's packages gcc-aarch64-linux-gnu and
qemu-user, and apt that knows the architecture (`dpkg --add-architecture arm64 && apt-get update`), from which come the
interpreter and its libraries. torch is the stated floor, tests/oldest.txt: the last whose wheel for aarch64 can be
imported without CUDA's libraries. The rest is what constraints.txt pins. All of it lies below .cache/aarch64: 2 GB.

A limit of time is no failure of the wheel: emulated code is 10 to 30 times slower, and its row says so.
"""

import argparse
import functools
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".cache" / "aarch64"
SYSTEM, SITE, PYTHON = FOLDER / "root", FOLDER / "site", FOLDER / "python"
CROSS, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
VERSION = "3.11"  # Debian 12's
INTERPRETER = f"python{VERSION} python{VERSION}-minimal libpython{VERSION}-minimal libpython{VERSION}-stdlib"
LIBRARIES = "libc6 libssl3 libffi8 zlib1g libbz2-1.0 liblzma5 libsqlite3-0 libexpat1 libgcc-s1 libstdc++6 libgomp1"
LIBRARIES += " libuuid1 libncursesw6 libtinfo6 libreadline8 libcrypt1"
FOREIGN = "manylinux_2_28_aarch64 manylinux_2_17_aarch64 manylinux2014_aarch64".split()
LEFT_OUT = ("#", "torch==", "ruff", "clang-format")  # lines of constraints.txt
CORE = (
    "ops/test_isa.py ops/test_quantize.py ops/test_functional.py ops/test_int8_ops.py ops/test_optimizer_ops.py "
    "ops/test_products.py ops/test_direct.py ops/test_grouped.py nn/test_linear.py weights/test_params.py "
    "upstream/test_checkpoints.py upstream/test_facade_names.py sharding/test_fsdp_shard.py sharding/test_fsdp_parts.py"
)


def needed() -> None:
    """Ends this program where a tool is missing."""
    packages = {CROSS: "gcc-aarch64-linux-gnu", EMULATOR: "qemu-user", "apt-get": "apt", "dpkg": "dpkg"}
    missing = [package for command, package in packages.items() if shutil.which(command) is None]
    if missing:
        sys.exit(f"try_aarch64.py needs Debian's packages {' '.join(missing)}")
    known = subprocess.run(["dpkg", "--print-foreign-architectures"], stdout=subprocess.PIPE, text=True, check=True)
    if "arm64" not in known.stdout.split():
        sys.exit("apt knows no packages of arm64: dpkg --add-architecture arm64 && apt-get update")


def made_system() -> None:
    """An interpreter for aarch64 with its libraries, unpacked below one folder, and a command that runs it."""
    if PYTHON.exists():
        return
    archives = FOLDER / "archives"
    for folder in (SYSTEM, archives):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    names = [f"{name}:arm64" for name in f"{INTERPRETER} {LIBRARIES}".split()]
    subprocess.run(["apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", *names], cwd=archives, check=True)
    for archive in archives.glob("*.deb"):
        subprocess.run(["dpkg", "-x", archive, SYSTEM], check=True)
    shutil.rmtree(archives)
    PYTHON.write_text(f'#!/bin/sh\nexec {EMULATOR} -L {SYSTEM} -0 {PYTHON} {SYSTEM}/usr/bin/python{VERSION} "$@"\n')
    PYTHON.chmod(0o755)


def made_site() -> None:
    """torch and the packages of the tests, by the pip of this machine."""
    torch = next(line for line in (ROOT / "tests" / "oldest.txt").read_text().split("\n") if line.startswith("torch"))
    if (SITE / f"torch-{torch.partition('==')[2]}.dist-info").exists():
        return
    shutil.rmtree(SITE, ignore_errors=True)
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    chosen = [torch, *(line for line in pins if line and not line.startswith(LEFT_OUT))]
    command = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", VERSION, "--implementation", "cp", "--target", str(SITE)]
    for options in (("--platform", FOREIGN), ("--abi", [f"cp{VERSION.replace('.', '')}", "abi3", "none"])):
        command += [word for value in options[1] for word in (options[0], value)]
    subprocess.run([*command, *chosen], check=True)


def installed(wheels: Path) -> None:
    """Both wheels, unpacked among the packages."""
    for pattern in ("bitshard-*_aarch64.whl", "bitsandbytes-*.whl"):
        (wheel,) = wheels.glob(pattern)
        name = wheel.name.partition("-")[0]
        for old in (*SITE.glob(name), *SITE.glob(f"{name}_cli"), *SITE.glob(f"{name}-*.dist-info")):
            shutil.rmtree(old)
        with zipfile.ZipFile(wheel) as opened:
            opened.extractall(SITE)


def row(name: str, command: list[str], limit: float, last: str, **variables: str) -> str:
    """Run something; a line of the table: what, how it ended, and the last match of `last` in what it printed."""
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")} | variables
    begin = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit
        )
        ended, text = f"status {done.returncode}" if done.returncode else "ran", done.stdout
    except subprocess.TimeoutExpired as error:
        ended, text = f"not finished in {limit:.0f} s", (error.stdout or b"").decode(errors="replace")
    (FOLDER / "logs").mkdir(exist_ok=True)
    (FOLDER / "logs" / f"{name.split()[0].replace('/', '_')}.txt").write_text(text)
    found = re.findall(last, text, re.M)
    line = f"| {name} | {ended} | {found[-1] if found else ''} | {time.monotonic() - begin:.0f} s |"
    print(line, flush=True)
    return line


def core(limit: float) -> list[str]:
    """The C tests, with the dot products and matrix products of int8, with the former alone, and with neither."""
    common = {"CC": CROSS, "AR": "aarch64-linux-gnu-ar", "ASAN_OPTIONS": "detect_leaks=0"}
    lines = []
    for cpu in ("max", "neoverse-n1", "cortex-a53"):
        runner = f"{EMULATOR} -cpu {cpu} -L /usr/aarch64-linux-gnu"
        command = ["tests/core/run.sh", str(FOLDER / "core"), str(int(time.time())), "20"]
        lines.append(row(f"core-{cpu} tests in C", command, limit, r"^(test_cpu: ok.*)", RUNNER=runner, **common))
    return lines


def wheel(limit: float) -> list[str]:
    """The command, and the first example on two processes."""
    run = functools.partial(row, limit=limit, PYTHONPATH=str(SITE), OMP_NUM_THREADS="1")
    example = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "examples/first.py"]
    return [
        run("report python -m bitshard", [str(PYTHON), "-m", "bitshard"], last=r"^(Nothing is wrong\.)"),
        run("first.py on two processes", [str(PYTHON), *example], last=r"^(the same bits.*)"),
    ]


def suite(files: list[str], limit: float) -> list[str]:
    """Test files, one after the other, each with a limit of time."""
    command = [str(PYTHON), "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider"]
    run = functools.partial(row, limit=limit, PYTHONPATH=str(SITE), OMP_NUM_THREADS="1")
    summary = r"^=*\s*(\d+ (?:passed|failed|skipped).*?) in "
    return [run(name, [*command, str(ROOT / "tests" / name.partition("::")[0])], last=summary) for name in files]


def main() -> None:
    """Print and write the table; status 1 where something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, default=FOLDER / "dist")
    parser.add_argument("--only", default="core,wheel,suite")
    parser.add_argument("--tests", default=CORE, help="files below tests/")
    parser.add_argument("--limit", type=float, default=900, help="seconds of each row")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    needed()
    FOLDER.mkdir(parents=True, exist_ok=True)
    only, lines = options.only.split(","), ["| what | ended | said | time |", "|---|---|---|---|"]
    lines += core(options.limit) if "core" in only else []
    if "wheel" in only or "suite" in only:
        made_system()
        made_site()
        installed(options.wheels)
    lines += wheel(options.limit) if "wheel" in only else []
    lines += suite(options.tests.split(), options.limit) if "suite" in only else []
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")
    sys.exit(any("status" in line for line in lines))


if __name__ == "__main__":
    main()
