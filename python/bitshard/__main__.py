"""`python -m bitshard`: what is installed, what is used, what is wrong and the command that fixes it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys

from bitshard import tried

FACADE_MARK = "+bitshard"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _bitsandbytes() -> tuple[str, str | None]:
    """(description of the `bitsandbytes` that an import finds, the command that fixes it)."""
    mend = "pip install --force-reinstall --no-deps ./python/bitsandbytes   (in bitshard's source tree)"
    version = _version("bitsandbytes")
    if importlib.util.find_spec("bitsandbytes") is None:
        return "none: transformers, peft and trl will not find 4-bit support", mend
    if version is None:
        return "a folder on the path without an installed distribution: accelerate will not accept it", mend
    if FACADE_MARK in version:
        return f"{version}: bitshard's façade", None
    return f"{version}: upstream, so bitshard is not used by transformers, peft and trl", mend


def _torch() -> tuple[str, str | None]:
    try:
        import torch
    except ImportError as error:
        return f"cannot be imported: {error}", "pip install torch"
    return f"{torch.__version__}, CUDA {'available' if torch.cuda.is_available() else 'not available'}", None


def _core() -> tuple[list[tuple[str, str]], str | None]:
    rebuild = "pip install --force-reinstall --no-deps .   (in bitshard's source tree)"
    try:
        import torch  # noqa: F401  (before the C core)

        from bitshard import _C
    except ImportError as error:
        causes = {"BITSHARD_ISA": "unset BITSHARD_ISA", "needs torch >= 2.10": "pip install 'torch>=2.10'"}
        mends = [mend for cause, mend in causes.items() if cause in str(error)]
        return [("C core", f"cannot be imported: {error}")], (mends or [rebuild])[0]
    usable = ", ".join(_C.isas())
    rows = [("C core", _C.version), ("CPU kernels", f"{_C.isa()} (usable: {usable}; BITSHARD_ISA= lowers it)")]
    cuda = _C.cuda_state()
    if not cuda["built"]:
        rows.append(("CUDA kernels", "not in this build (no nvcc when it was installed)"))
        import torch

        mend = f"install the CUDA toolkit, then {rebuild}" if torch.cuda.is_available() else None
        return rows, mend
    state = cuda["error"] or f"driver {cuda['driver']}"
    return [*rows, ("CUDA kernels", f"{cuda['architectures']}; {state}")], None


def _tried() -> list[tuple[str, str]]:
    """Which versions of the stack were tested, and a warning for installed ones outside that range."""
    rows = []
    for package, versions in tried.TRIED.items():
        version = _version(package)
        if version is None:
            continue
        doubt = tried.beyond(package, version)
        warning = f". Warning: {version} is {doubt}; `make newest` in the source tree tests it" if doubt else ""
        rows.append(("tried with", f"{package} {', '.join(versions)}{warning}"))
    return rows


def main() -> int:
    """Print the report; the exit status is 1 if something is wrong."""
    rows = [
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("bitshard", _version("bitshard") or "not installed"),
    ]
    torch_row, torch_mend = _torch()
    rows.append(("torch", torch_row))
    mend = torch_mend
    if torch_mend is None:
        core_rows, core_mend = _core()
        rows += core_rows
        mend = core_mend
    facade_row, facade_mend = _bitsandbytes()
    rows.append(("bitsandbytes", facade_row))
    mend = mend or facade_mend
    rows += _tried()
    for name, text in rows:
        print(f"{name:<14}{text}")
    print(f"\nTo mend: {mend}" if mend else "\nNothing is wrong.")
    return 1 if mend else 0


if __name__ == "__main__":
    sys.exit(main())
