"""Where the files of the CUDA runtime are. bitshard needs none of them: it calls the driver."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from ..cextension import HIP_ENVIRONMENT, get_cuda_bnb_library_path
from ..cuda_specs import CUDASpecs
from .utils import print_dedented

__all__ = [
    "CUDART_PATH_IGNORED_ENVVARS",
    "CUDART_PATH_PREFERRED_ENVVARS",
    "CUDASpecs",
    "CUDA_RUNTIME_LIB_PATTERNS",
    "HIP_ENVIRONMENT",
    "find_cuda_libraries_in_path_list",
    "find_cudart_libraries",
    "get_cuda_bnb_library_path",
    "get_potentially_lib_path_containing_env_vars",
    "is_relevant_candidate_env_var",
    "logger",
    "print_dedented",
    "print_diagnostics",
    "print_runtime_diagnostics",
]

CUDART_PATH_PREFERRED_ENVVARS = ("CONDA_PREFIX", "LD_LIBRARY_PATH")
CUDART_PATH_IGNORED_ENVVARS = set(
    "DBUS_SESSION_BUS_ADDRESS GOOGLE_VM_CONFIG_LOCK_FILE HOME LESSCLOSE LESSOPEN MAIL OLDPWD PATH PWD SHELL "
    "SSH_AUTH_SOCK SSH_TTY TMUX XDG_DATA_DIRS XDG_GREETER_DATA_DIR XDG_RUNTIME_DIR _".split()
)
CUDA_RUNTIME_LIB_PATTERNS = ("cudart64*.dll", "libcudart*.so*", "nvcuda*.dll")

logger = logging.getLogger(__name__)


def find_cuda_libraries_in_path_list(paths_list_candidate: str) -> Iterator[Path]:
    """Files of the CUDA runtime, links excepted, in the folders of a list such as LD_LIBRARY_PATH."""
    for name in filter(lambda name: os.sep in name, paths_list_candidate.split(os.pathsep)):
        try:
            found = [path for pattern in CUDA_RUNTIME_LIB_PATTERNS for path in Path(name).glob(pattern)]
            yield from (path for path in found if path.is_file() and not path.is_symlink())
        except OSError:
            continue


def is_relevant_candidate_env_var(env_var: str, value: str) -> bool:
    """Whether an environment variable may hold a folder with the CUDA runtime."""
    if env_var in CUDART_PATH_PREFERRED_ENVVARS:
        return True
    if env_var in CUDART_PATH_IGNORED_ENVVARS or "CONDA" in env_var or "BASH_FUNC" in env_var:
        return False
    return os.sep in value and "\n" not in value


def get_potentially_lib_path_containing_env_vars() -> dict[str, str]:
    """The environment variables that may hold a folder with the CUDA runtime."""
    return {name: value for name, value in os.environ.items() if is_relevant_candidate_env_var(name, value)}


def find_cudart_libraries() -> Iterator[Path]:
    """Files of the CUDA runtime that the environment names, those of the preferred variables first."""
    variables = get_potentially_lib_path_containing_env_vars()
    for name in sorted(variables, key=lambda name: name not in CUDART_PATH_PREFERRED_ENVVARS):
        yield from find_cuda_libraries_in_path_list(variables[name])


def print_diagnostics(cuda_specs: CUDASpecs) -> None:
    """Print torch's CUDA and whether bitshard has kernels for it."""
    print(
        f"PyTorch settings found: CUDA_VERSION={cuda_specs.cuda_version_string}, "
        f"Highest Compute Capability: {cuda_specs.highest_compute_capability}."
    )
    if not get_cuda_bnb_library_path(cuda_specs).exists():
        print("bitshard was built without CUDA kernels; `python -m bitshard` says how to build them.")


def print_runtime_diagnostics() -> None:
    """Print the files of the CUDA runtime that the environment names."""
    print(f"CUDA of PyTorch: {torch.version.cuda or 'N/A'}")
    for path in find_cudart_libraries():
        print(f"* Found CUDA runtime at: {path}")
