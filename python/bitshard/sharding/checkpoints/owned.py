"""Files that one process owns while it lives: another one can tell, and what a dead one has left belongs to nobody.

An owner holds flock on its open file, which ends with the process however that ends. Over NFS flock works between
machines (Linux 2.6.12 and later, unless mounted with nolock or local_lock). Where a file system has no locks nobody is
shut out, and `hold` says so.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}
_PATIENCE_S = 60
_LOOK_S = 0.02


def hold(path: Path, patience_s: float | None = None) -> tuple[int, bool]:
    """(descriptor of `path`, made if need be and now owned, whether the file system has locks).

    Waits for an owner that lives; OSError where it does not let go within a minute, or `patience_s`. Closing the
    descriptor lets go.
    """
    patience_s = _PATIENCE_S if patience_s is None else patience_s
    until = time.monotonic() + patience_s
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            locked = _lock(descriptor)
            if locked is None or (locked and _is_at(descriptor, path)):
                descriptor, found = -1, descriptor
                return found, locked is not None
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        if time.monotonic() > until:
            raise OSError(
                errno.EBUSY, f"another save has not let go of this file for {patience_s} s: end it", os.fspath(path)
            )
        time.sleep(_LOOK_S)


@contextlib.contextmanager
def alone(path: Path) -> Iterator[bool]:
    """While this is open no other process is in it with the same `path`; gives whether the file system has locks."""
    descriptor, locked = hold(path)
    try:
        yield locked
    finally:
        try:
            path.unlink(missing_ok=True)  # who waits for it sees that, and makes another
        finally:
            os.close(descriptor)


def remove_dead(paths: Iterable[Path]) -> None:
    """Remove those of `paths` that nobody owns; without locks none, for nobody can tell."""
    for path in list(paths):
        try:
            descriptor = os.open(path, os.O_RDWR)
        except (FileNotFoundError, PermissionError):
            continue
        try:
            if _lock(descriptor):
                path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    """Whether this process owns the file now; None where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether `path` still leads to this file, which another process may have removed before it was owned."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
