"""Saving where a disk is full: all ranks raise, and what was there before is there still.

The checks run in streamed.py's launch.
"""

import contextlib
import errno
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from bitshard import fsdp
from bitshard.sharding.checkpoints.files import CheckpointFiles
from models import CELLS, LIMIT, reference
from shared import rank, refused
from ways import assert_same, target_of, whole


@contextlib.contextmanager
def full_disk(writes):
    """On rank 0, a disk that takes so many more writes and no further one."""
    write, left = os.pwrite, [writes]

    def pwrite(descriptor, data, offset):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data, offset)

    if rank() == 0:
        os.pwrite = pwrite
    try:
        yield
    finally:
        os.pwrite = write


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def check_full_disk(folder):
    """Behind any number of writes: OSError with its number on every rank, no half file, and the next save is good."""
    model = whole(folder, CELLS[0], lambda model: model)
    empty, filled = target_of(folder, "full-disk"), target_of(folder, "full-disk-filled")
    fsdp.save_pretrained(model, filled, max_shard_size=LIMIT, dtype=torch.bfloat16)
    before = contents(filled)
    dist.barrier()
    for target, left in ((empty, {}), (filled, before)):
        for writes in (0, 1, 40, 87):  # of 86 tensors, and the headers behind them
            with full_disk(writes):
                began = time.monotonic()
                try:
                    fsdp.save_pretrained(model, target, max_shard_size=LIMIT)
                except OSError as error:
                    assert error.errno == errno.ENOSPC and "No space left" in str(error), error
                else:
                    raise AssertionError(f"saved on a full disk, {writes}")
                assert time.monotonic() - began < 10
            dist.barrier()
            assert contents(target) == left, sorted(contents(target))
            dist.barrier()
    fsdp.save_pretrained(model, filled, max_shard_size=LIMIT)
    assert_same(filled, reference(folder, CELLS[0]))


def check_no_room(folder):
    """A disk that has too little room is known before anything is gathered."""
    model = whole(folder, CELLS[0], lambda model: model)
    target = target_of(folder, "no-room")
    usage = CheckpointFiles._require_room

    def no_room(files, needed):
        return usage(files, 1 << 60)

    CheckpointFiles._require_room = no_room
    try:
        text = refused(lambda: fsdp.save_pretrained(model, target), "do not fit on the disk", kinds=OSError)
    finally:
        CheckpointFiles._require_room = usage
    dist.barrier()
    assert list(Path(target).iterdir()) == []
    return text


def check_unwritable(folder):
    """A folder that cannot be made: the error of rank 0 on every rank."""
    model = whole(folder, CELLS[0], lambda model: model)
    refused(lambda: fsdp.save_pretrained(model, f"{folder}/dense/config.json/x"), "config.json", kinds=OSError)


CHECKS = {"full_disk": check_full_disk, "no_room": check_no_room, "unwritable": check_unwritable}
