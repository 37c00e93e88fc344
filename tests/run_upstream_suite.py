"""Run bitsandbytes' own tests of its 4-bit half, or of its optimizers, on the façade. A tool for the hand; pytest does
not collect it.

    python tests/run_upstream_suite.py PATH [pytest options]
    python tests/run_upstream_suite.py --optim PATH [pytest options]      # needs the package lion-pytorch
    python tests/run_upstream_suite.py --plug-in PATH [pytest options]    # on the original, with bitshard's plug-in

PATH is a checkout of bitsandbytes 0.50.2 (a tag or commit near it), whose `tests/` are run against the `bitsandbytes`
that this Python imports: 1,308 of them pass, as on the original's own CPU build. Of the optimizers' tests none may
fail; on a CPU they skip paged ones, and everywhere LARS, momentum and RMSprop in bfloat16. Nothing is written to the
checkout.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

FILES = ("test_linear4bit.py", "test_parametrize.py", "test_autograd.py", "test_ops.py", "test_functional.py")
WITHOUT = ("int8", "8bitlt", "torch_compile", "matmullt", "stable_embedding")
MARKERS = "not slow and not benchmark and not deprecated"
EXPECTED_PASSED = {"4bit": 1308, "optim": 1, "plug-in": 1308}


def main(arguments: list[str]) -> int:
    """Run the tests; 0 when none failed and as many passed as on the original."""
    part = arguments[0][2:] if arguments[:1] in (["--optim"], ["--plug-in"]) else "4bit"
    arguments = arguments[part != "4bit" :]
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    names = ("test_optim.py",) if part == "optim" else FILES
    checkout = Path(arguments[0]).resolve()
    missing = [name for name in names if not (checkout / "tests" / name).exists()]
    if missing:
        print(f"{checkout}/tests lacks {', '.join(missing)}", file=sys.stderr)
        return 2

    import bitsandbytes

    if ("+bitshard." in bitsandbytes.__version__) is (part == "plug-in"):
        wanted = "the original" if part == "plug-in" else "the façade"
        print(f"bitsandbytes here is {bitsandbytes.__version__} from {bitsandbytes.__file__}, not {wanted}")
        return 2
    print(f"{bitsandbytes.__version__} from {bitsandbytes.__file__}")
    if part == "plug-in":
        from bitshard_cli import plugin

        print(f"plug-in: {plugin.state()}")
        if not plugin.state().startswith("bitshard's kernels"):
            return 2
    paths = [str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])]
    paths = [str(Path(path).resolve()) for entry in paths for path in entry.split(os.pathsep) if path]
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
    command += ["-o", "addopts=", "-o", "log_cli=false", "-o", f"log_file={os.devnull}"]
    command += ["-m", MARKERS, *(["-k", " and ".join(f"not {word}" for word in WITHOUT)] if part != "optim" else [])]
    command += [*(f"tests/{name}" for name in names), *arguments[1:]]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(paths), PYTHONDONTWRITEBYTECODE="1")
    process = subprocess.Popen(command, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True)
    last = ""
    for line in process.stdout:
        print(line, end="")
        last = line.strip() or last
    failed = process.wait() != 0
    found = re.search(r"(\d+) passed", last)
    passed = int(found[1]) if found else 0
    print(f"{passed} passed, at least {EXPECTED_PASSED[part]} must, and no test may fail")
    return 1 if failed or (len(arguments) == 1 and passed < EXPECTED_PASSED[part]) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
