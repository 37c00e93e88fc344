"""CUDA as torch sees it: version and compute capabilities."""

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class CUDASpecs:
    """The best GPU of this machine, (major, minor), and torch's version of CUDA, as "124" and (12, 4)."""

    highest_compute_capability: tuple[int, int]
    cuda_version_string: str
    cuda_version_tuple: tuple[int, int]

    @property
    def has_imma(self) -> bool:
        """Whether the GPU has tensor cores for integers."""
        return self.highest_compute_capability >= (7, 5)


def get_compute_capabilities() -> list[tuple[int, int]]:
    """(major, minor) of every GPU, ascending."""
    return sorted(torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count()))


def get_cuda_version_tuple() -> tuple[int, int] | None:
    """(major, minor) of the CUDA that torch was built with, None without."""
    if torch.version.cuda is None:
        return None
    major, minor = torch.version.cuda.split(".")[:2]
    return int(major), int(minor)


def get_cuda_version_string() -> str | None:
    """Major and minor version of CUDA without a dot, None without CUDA."""
    version = get_cuda_version_tuple()
    return None if version is None else f"{version[0]}{version[1]}"


def get_cuda_specs() -> CUDASpecs | None:
    """None where torch finds no GPU."""
    capabilities = get_compute_capabilities() if torch.cuda.is_available() else []
    version, text = get_cuda_version_tuple(), get_cuda_version_string()
    if not capabilities or version is None or text is None:
        return None
    return CUDASpecs(capabilities[-1], text, version)


def get_rocm_gpu_arch() -> str:
    """Always "unknown": bitshard has no kernels for ROCm."""
    return "unknown"
