"""Constants of the package."""

from pathlib import Path

DYNAMIC_LIBRARY_SUFFIX = ".so"
PACKAGE_DIR = Path(__file__).parent
