"""Where a layer's packed weight is: the word that `bitshard.nn.holder.PackedWeight` keeps and others ask for."""

from __future__ import annotations

import enum


class Place(enum.Enum):
    """Where a layer's packed weight is."""

    __module__ = "bitshard.place"  # as pickles name it

    FLOAT = "not quantized yet"
    AWAITED = "sharded by FSDP2, its rows still to come"
    WHOLE = "whole"
    PART = "this rank's part, before fully_shard"
    VIEW = "FSDP1 view"
    SHARD = "FSDP2 shard"
    GATHERED = "gathered"
