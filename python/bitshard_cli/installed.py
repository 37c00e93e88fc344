"""Which `bitsandbytes` this Python has: distributions that own the module, and the façade that bitshard carries."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import site
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bitshard_cli.console import Mistake

MODULE = "bitsandbytes"
FACADE_MARK = "+bitshard"
CARRIED = Path(__file__).parent / "facade"  # made by setup.py: what the façade's wheel holds


class Owner(NamedTuple):
    """A distribution that owns the module."""

    name: str
    version: str
    site: Path  # the folder that its files are below
    info: Path  # its folder of metadata
    files: list[str] | None  # paths of its RECORD, from `site`; None: it has no RECORD
    editable: bool

    @property
    def is_facade(self) -> bool:
        """Whether this is bitshard's own."""
        return FACADE_MARK in self.version

    @property
    def is_whole(self) -> bool:
        """Whether the package is there that it says it has; an editable one has it elsewhere."""
        return self.editable or (self.site / MODULE / "__init__.py").is_file()


def _normal(name: str | None) -> str:
    return re.sub(r"[-_.]+", "-", name or "").lower()


def _record(distribution: importlib.metadata.Distribution) -> list[str] | None:
    text = distribution.read_text("RECORD")
    return None if text is None else [str(file) for file in distribution.files or []]


def _is_editable(distribution: importlib.metadata.Distribution, files: list[str] | None) -> bool:
    if any(Path(file).name.startswith("__editable__") for file in files or []):
        return True
    try:
        url = json.loads(distribution.read_text("direct_url.json") or "{}")
    except ValueError:
        return False
    return bool(url.get("dir_info", {}).get("editable"))


def _owns(distribution: importlib.metadata.Distribution) -> bool:
    if _normal(distribution.metadata["Name"]) == MODULE:
        return True
    return f"\n{MODULE}/__init__.py," in "\n" + (distribution.read_text("RECORD") or "")


def owners() -> Iterator[Owner]:
    """All distributions that own the module, in the order of sys.path: the first one's is imported."""
    seen = set()
    for distribution in importlib.metadata.distributions():
        info = getattr(distribution, "_path", None)
        if info is None or Path(info).resolve() in seen or not _owns(distribution):
            continue
        seen.add(Path(info).resolve())
        files = _record(distribution)
        name, version = distribution.metadata["Name"] or MODULE, distribution.metadata["Version"] or "unknown"
        yield Owner(name, version, Path(info).parent, Path(info), files, _is_editable(distribution, files))


def owners_in(folder: Path) -> list[Owner]:
    """Those whose files are below this folder of installed packages."""
    return [owner for owner in owners() if _same(owner.site, folder)]


def owners_beside(folder: Path) -> list[Owner]:
    """Those elsewhere."""
    return [owner for owner in owners() if not _same(owner.site, folder)]


def _same(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def home() -> Path:
    """The folder of installed packages that holds this bitshard; of an editable one, that of its metadata."""
    here = CARRIED.parents[1]
    if CARRIED.is_dir():
        return here
    infos = [getattr(found, "_path", None) for found in importlib.metadata.distributions(name="bitshard")]
    sites = [Path(info).parent for info in infos if info is not None]
    return next((folder for folder in sites if not _same(folder, here)), here)


def is_foreign(folder: Path) -> bool:
    """Whether a folder belongs to another Python than this one, which sees it by a .pth file or a variable.

    One that belongs to none, such as pip's `--target` fills, is not foreign.
    """
    own = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    own += [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    own += [path for path in site.getsitepackages() if Path(path).is_relative_to(sys.prefix)]  # Debian has two
    if any(_same(folder, Path(path)) for path in own):
        return False
    is_a_python_s = folder.name in ("site-packages", "dist-packages")
    return is_a_python_s and os.path.exists(folder.parents[2] / "bin" / "python3")


def ahead_of(folder: Path) -> Path | None:
    """What comes before a folder on sys.path and has the module, so that it is imported instead; None: nothing."""
    sites = [owner.site for owner in owners()]
    for entry in map(Path, sys.path):
        if _same(entry, folder):
            return None
        names = (entry / MODULE / "__init__.py", entry / f"{MODULE}.py")
        if any(map(os.path.exists, names)) or any(_same(entry, owner) for owner in sites):
            return entry
    return None


def imported() -> Path | None:
    """The folder of the package that an import finds; None: no such package, or one without a file of its own."""
    try:
        spec = importlib.util.find_spec(MODULE)
    except (ImportError, ValueError):
        return None
    return None if spec is None or not spec.origin else Path(spec.origin).parent


def carried() -> Path:
    """The folder below which the carried façade's package and metadata are."""
    if not (CARRIED / MODULE / "__init__.py").is_file():
        raise Mistake(
            "this bitshard carries no façade, as it is installed from a source tree that can be edited: "
            "pip install -e ./python/bitsandbytes exchanges bitsandbytes there"
        )
    return CARRIED


def carried_names() -> list[str]:
    """Names of the folders in `carried()`: the package's and that of its metadata."""
    return sorted(path.name for path in carried().iterdir())


def carried_version() -> str:
    """The façade's version."""
    (info,) = [name for name in carried_names() if name.endswith(".dist-info")]
    return info.removeprefix(f"{MODULE}-").removesuffix(".dist-info")


def doubled(here: list[Owner]) -> str:
    """The line on several distributions that own the module in one folder."""
    names = " and ".join(f"{owner.name} {owner.version}" for owner in here)
    every = " ".join(dict.fromkeys(owner.name for owner in here))
    return f"{names} own one folder, {here[0].site / MODULE}, so one overwrote the other: pip uninstall {every}"


def complaints() -> list[str]:
    """What is wrong with the distributions of the module, a line each."""
    found = list(owners())
    lines = []
    for folder in dict.fromkeys(owner.site for owner in found):
        here = [owner for owner in found if owner.site == folder]
        if len(here) > 1:
            lines.append(doubled(here))
    for owner in found:
        if not owner.is_whole:
            lines.append(
                f"{owner.name} {owner.version} in {owner.site} has lost its package: pip uninstall {owner.name}"
            )
    lines += [f"{place} is a folder without a package: rm -r {place}" for place in _leftovers()]
    return lines


def _leftovers() -> Iterator[Path]:
    """Folders named as the module in which there is no package; Python imports them as an empty one."""
    for place in dict.fromkeys(Path(entry or ".") / MODULE for entry in sys.path):
        if place.is_dir() and not (place / "__init__.py").exists() and place.parent.name == "site-packages":
            yield place
