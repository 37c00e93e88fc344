"""`use` and `unuse`: upstream's files out and the façade's in, and back, safe to repeat and to interrupt.

Files of an installed upstream are renamed into a folder beside them, SITE/.bitshard-kept, with a journal that names
every move before the first is made. Whatever was interrupted, the journal and the places of the files say what is left
to do: each move either happened or did not, because a rename inside one file system does.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bitshard_cli import installed
from bitshard_cli.console import Mistake
from bitshard_cli.installed import MODULE, Owner

KEPT = ".bitshard-kept"


class Journal(NamedTuple):
    """What was begun. Paths are from the folder of installed packages, kept ones from `KEPT` in it."""

    phase: str  # using, used or unusing
    version: str  # of the kept upstream; empty: there was none
    moves: list[list[str]]  # (path, kept path) of each file or folder of upstream
    facade: list[str]  # folders of the façade
    dropped: list[str]  # folders of an older façade


class Store:
    """The folder of kept files in a folder of installed packages."""

    def __init__(self, site: Path):
        self.site, self.folder = site, site / KEPT

    def path(self, name: str) -> Path:
        """A file of the store."""
        return self.folder / name

    def read(self) -> Journal | None:
        """The journal; None: nothing was begun, or all of it was undone."""
        try:
            return Journal(**json.loads(self.path("journal.json").read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise Mistake(f"{self.path('journal.json')} cannot be read: {error}") from None

    def write(self, journal: Journal) -> None:
        """The journal on disk, whole or not at all."""
        partial = self.path("journal.partial")
        with partial.open("w") as file:
            json.dump(journal._asdict(), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self.path("journal.json"))

    def remove(self, name: str) -> None:
        """A folder or file of the store, if it is there."""
        _delete(self.path(name))

    def discard(self, name: str) -> None:
        """What is installed under this name, if anything is: out of the way at once, then deleted."""
        place, trash = self.site / name, self.path("trash")
        if os.path.lexists(place):
            _delete(trash)
            os.rename(place, trash)
        _delete(trash)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


@contextmanager
def _opened(site: Path) -> Iterator[Store]:
    """The store, for this process alone."""
    store = Store(site)
    if not os.access(site, os.W_OK, effective_ids=True):
        raise Mistake(f"{site} cannot be written, so nothing was changed; `bitshard run` needs no change of files")
    store.folder.mkdir(exist_ok=True)
    descriptor = os.open(store.path("lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield store
    except BlockingIOError:
        raise Mistake(f"another process exchanges bitsandbytes in {site} now") from None
    finally:
        os.close(descriptor)
        if store.read() is None:
            shutil.rmtree(store.folder, ignore_errors=True)


def own_site() -> Path:
    """The one folder of installed packages that may be changed: the one that holds this bitshard.

    Raises Mistake where another Python owns it.
    """
    site = installed.home()
    if installed.is_foreign(site):
        raise Mistake(
            f"this bitshard lies in {site}, which is not of this environment, {sys.prefix}: nothing was changed; "
            "run the other environment's `bitshard`, install bitshard here, or start programs with `bitshard run`"
        )
    return site


def check_first(site: Path) -> None:
    """Raises Mistake where a façade in `site` would not be what is imported."""
    first = installed.ahead_of(site)
    if first is not None:
        raise Mistake(
            f"{first} comes first on Python's path and has a bitsandbytes, so one in {site} would not be imported: "
            "nothing was changed; `bitshard run` starts a program with bitshard's"
        )


def kept(site: Path) -> Journal | None:
    """What is kept there, for the report."""
    return Store(site).read()


def _within(site: Path, file: str) -> str | None:
    """The path of a RECORD from the site; None: it leads out of the site, by itself or through a link."""
    name = os.path.normpath(file)
    real, root = os.path.realpath((site / name).parent), os.path.realpath(site)
    if os.path.isabs(name) or os.path.commonpath([real, root]) != root:
        return None
    return os.path.relpath(os.path.join(real, os.path.basename(name)), root)


def _pieces(owner: Owner) -> list[str]:
    """Paths, from its site, of folders and files in it that are a distribution's alone.

    What a RECORD names outside of the site, as scripts, stays where it is.
    """
    if owner.files is None:
        raise Mistake(
            f"{owner.name} {owner.version} in {owner.site} has no RECORD of its files: pip uninstall {owner.name}"
        )
    whole = {MODULE, owner.info.name}
    found = dict.fromkeys(name for name in sorted(whole) if (owner.site / name).exists())
    for file in owner.files:
        name = _within(owner.site, file)
        if name is not None and Path(name).parts[0] not in whole and (owner.site / name).exists():
            found[name] = None
    return list(found)


def _alone(site: Path) -> Owner | None:
    """The distribution that owns the module there."""
    here = installed.owners_in(site)
    if len(here) > 1:
        raise Mistake(installed.doubled(here))
    if not here and (site / MODULE).exists():
        raise Mistake(f"{site / MODULE} belongs to no installed distribution: delete it first")
    return here[0] if here else None


def use(site: Path) -> dict[str, Any]:
    """The façade instead of what is installed. Gives what was active, what is, and where upstream's files are."""
    with _opened(site) as store:
        version, journal = installed.carried_version(), store.read()
        if journal is not None and journal.phase == "unusing":
            _finish_unuse(store, journal)
            journal = None
        if journal is None or journal.phase == "used":
            owner = _alone(site)
            if owner is not None and owner.is_facade and owner.version == version:
                return _result(store, journal, changed=False)
            _stage(store)
            journal = _begun(store, journal, owner)
        else:  # interrupted, perhaps with another façade
            _stage(store)
            dropped = [*journal.dropped, *journal.facade]
            journal = journal._replace(facade=installed.carried_names(), dropped=dropped)
            store.write(journal)
        _finish_use(store, journal)
        return _result(store, store.read(), changed=True)


def _begun(store: Store, earlier: Journal | None, owner: Owner | None) -> Journal:
    """A new journal, on disk."""
    moves = earlier.moves if earlier is not None else []
    version, dropped = earlier.version if earlier is not None else "", []
    if owner is not None and owner.is_facade:
        dropped = _pieces(owner)
    elif owner is not None:
        folder = next(name for name in map("kept-{}".format, itertools.count()) if not store.path(name).exists())
        version = owner.version
        moves = [[name, f"{folder}/{name}"] for name in _pieces(owner)]
    journal = Journal("using", version, moves, installed.carried_names(), dropped)
    store.write(journal)
    return journal


def _stage(store: Store) -> None:
    """The façade's files in the store, before anything is moved: on a full disk nothing is."""
    store.remove("staged")
    try:
        shutil.copytree(installed.carried(), store.path("staged"), ignore=shutil.ignore_patterns("__pycache__"))
    except shutil.Error as error:
        store.remove("staged")
        raise Mistake(f"the façade cannot be copied: {error.args[0][0][2]}") from None


def _finish_use(store: Store, journal: Journal) -> None:
    """All that a begun `use` has left to do."""
    staged = store.path("staged")
    for name, place in journal.moves:
        if not os.path.lexists(store.path(place)):
            store.path(place).parent.mkdir(parents=True, exist_ok=True)
            os.rename(store.site / name, store.path(place))
    for name in dict.fromkeys([*journal.dropped, *journal.facade]):
        store.discard(name)
    for name in journal.facade:
        os.rename(staged / name, store.site / name)
    store.remove("staged")
    store.write(journal._replace(phase="used", dropped=[]))
    current = {place.partition("/")[0] for _, place in journal.moves}
    for path in store.folder.glob("kept-*"):
        if path.name not in current:  # an upstream that pip has replaced since
            _delete(path)


def unuse(site: Path) -> dict[str, Any]:
    """Upstream's files back, byte for byte. Gives what is active then."""
    with _opened(site) as store:
        journal = store.read()
        if journal is None:
            return {"changed": False, "put_back": "", "site": str(site)}
        owner = next(iter(installed.owners_in(site)), None)
        if journal.phase == "used" and owner is not None and not owner.is_facade:
            raise Mistake(
                f"bitsandbytes {owner.version} was installed since and is active; "
                f"{store.folder}, where {journal.version or 'nothing'} is kept, can be deleted"
            )
        journal = journal._replace(phase="unusing")
        store.write(journal)
        _finish_unuse(store, journal)
        return {"changed": True, "put_back": journal.version, "site": str(site)}


def _finish_unuse(store: Store, journal: Journal) -> None:
    """All that a begun `unuse` has left to do."""
    places = dict(journal.moves)
    for name in dict.fromkeys([*journal.facade, *journal.dropped]):
        if name not in places or os.path.lexists(store.path(places[name])):  # else it is upstream's, back already
            store.discard(name)
    for name, place in journal.moves:
        if os.path.lexists(store.path(place)):
            (store.site / name).parent.mkdir(parents=True, exist_ok=True)
            os.rename(store.path(place), store.site / name)
    store.remove("journal.json")


def _result(store: Store, journal: Journal | None, changed: bool) -> dict[str, Any]:
    version = journal.version if journal is not None else ""
    where = sorted({place.partition("/")[0] for _, place in journal.moves}) if journal is not None else []
    return {
        "changed": changed,
        "active": installed.carried_version(),
        "kept": version,
        "kept_in": str(store.path(where[0])) if where else "",
        "site": str(store.site),
    }
