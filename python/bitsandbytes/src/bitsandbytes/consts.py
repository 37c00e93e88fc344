"""Constants of the package."""

from pathlib import Path

DYNAMIC_LIBRARY_SUFFIX = ".so"
PACKAGE_DIR = Path(__file__).parent
PACKAGE_GITHUB_URL = "https://github.com/TimDettmers/bitsandbytes"
NONPYTORCH_DOC_URL = PACKAGE_GITHUB_URL + "/blob/main/docs/source/nonpytorchcuda.mdx"
