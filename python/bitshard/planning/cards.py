"""GPUs and links whose rates are known, and those that somebody gives.

Rates of a GPU that `csrc/plan/cards.c` has are asked there (`_C.card_rates`); the others are figures of data sheets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from bitshard import _C

READ = 0.85  # of a data sheet's GB/s: what cards.c takes a product to read
PRODUCTS = 0.90  # of its TFLOP/s
DEQUANTIZED = 0.80  # of its GB/s


class Card(NamedTuple):
    """A GPU.

    Attributes:
        name, sm (10 major + minor), sms: which it is, and how many multiprocessors it has.
        gb: GB/s of its memory, on paper.
        tflops: TFLOP/s of products in 16 bits with float32 sums, on paper.
        link: of `LINKS`, the fastest that it commonly has to others of its kind.
        host: the one to the host.
        counted: whether `csrc/plan/cards.c` has its rates.
    """

    name: str
    sm: int
    sms: int
    gb: float
    tflops: float
    link: str = "pcie4"
    host: str = "pcie4"
    counted: bool = False

    @property
    def measured(self) -> bool:
        """Whether products are planned by what was measured on it."""
        return self.sm == 90


class Link(NamedTuple):
    """How data comes to a GPU: GB/s in one direction on paper, and the share of that which is reached.

    Attributes:
        source: of the share: a record, or "" for an assumption.
    """

    gb: float
    share: float
    source: str = ""


_PINNED = "optimizers_paged_h200"  # 101 of 128 GB/s, both directions at once
LINKS = {
    "nvlink4": Link(450.0, 0.5),
    "nvlink3": Link(300.0, 0.5),
    "pcie5": Link(64.0, 0.79, _PINNED),
    "pcie4": Link(32.0, 0.79, _PINNED),
    "pcie3": Link(16.0, 0.79, _PINNED),
    "host5": Link(64.0, 0.4),  # through memory of the host: in and out again over one link
    "host4": Link(32.0, 0.4),
    "host3": Link(16.0, 0.4),
}


def _counted(name: str, sm: int, sms: int, link: str, host: str) -> Card:
    rates = _C.card_rates(sm)
    gb, tflops = rates["bytes_per_ns_sm"] * sms / READ, rates["flops_per_ns_sm"] * sms / PRODUCTS / 1e3
    return Card(name, sm, sms, gb, tflops, link, host, True)


def known() -> dict[str, Card]:
    """{name: card}."""
    cards = (
        _counted("T4", 75, 40, "pcie3", "pcie3"),
        _counted("3090", 86, 82, "pcie4", "pcie4"),
        _counted("4090", 89, 128, "host4", "pcie4"),
        _counted("5090", 120, 170, "host5", "pcie5"),
        _counted("A100", 80, 108, "nvlink3", "pcie4"),
        Card("L40S", 89, 142, 864.0, 362.0, "pcie4", "pcie4"),
        Card("H100", 90, 132, 3350.0, 989.0, "nvlink4", "pcie5"),
        Card("H200", 90, 132, 4800.0, 989.0, "nvlink4", "pcie5"),
    )
    return {card.name.lower(): card for card in cards}


_FIELDS = {"sm": int, "sms": int, "gb": float, "tflops": float, "link": str, "host": str}


def card(text: str) -> Card:
    """A known name, such as "H100" or "RTX 4090", or "sm=89,sms=142,gb=864,tflops=362" with link= and host= behind
    it. ValueError with the words and numbers that make no sense."""
    cards = known()
    found = cards.get(re.sub(r"^(nvidia|geforce|rtx|tesla)|[\s_-]", "", text.lower().replace("rtx", "")))
    if found is not None:
        return found
    if "=" not in text:
        names = ", ".join(each.name for each in cards.values())
        raise ValueError(f"no card {text!r} is known: expected one of {names}, or sm=89,sms=142,gb=864,tflops=362")
    return _given(text)


def _given(text: str) -> Card:
    given = dict(part.split("=", 1) for part in text.split(",") if "=" in part)
    if wrong := (given.keys() - _FIELDS.keys()) | (_FIELDS.keys() - {"link", "host"} - given.keys()):
        raise ValueError(f"card {text!r}: {', '.join(sorted(wrong))}: expected sm, sms, gb, tflops; link, host at will")
    try:
        values = {name: kind(given[name]) for name, kind in _FIELDS.items() if name in given}
    except ValueError as error:
        raise ValueError(f"card {text!r}: {error}") from None
    made = Card("card", **values)
    if not 75 <= made.sm < 200:
        raise ValueError(f"card: sm is {made.sm}, expected 75 or more: 10 major + minor")
    for name in ("sms", "gb", "tflops"):
        if not 0 < getattr(made, name) < 1e9:
            raise ValueError(f"card: {name} is {getattr(made, name):g}, expected more than 0")
    link(made.link), link(made.host)
    return made


def link(text: str) -> Link:
    """A known name, or GB/s in one direction that are reached. ValueError for others."""
    if text in LINKS:
        return LINKS[text]
    try:
        gb = float(text)
    except ValueError:
        raise ValueError(f"no link {text!r} is known: expected GB/s or one of {', '.join(LINKS)}") from None
    if not 0 < gb < 1e9:
        raise ValueError(f"a link of {text} GB/s: expected more than 0")
    return Link(gb, 1.0)


@contextmanager
def planned_for(card: Card) -> Iterator[None]:
    """While it lasts, `_C` plans products by the card's rates. Not while other threads multiply."""
    if card.measured or card.counted:
        yield
        return
    before = _C.card_rates(card.sm)
    sms = card.sms
    rates = (card.tflops * PRODUCTS * 1e3 / sms, card.gb * READ / sms, card.gb * DEQUANTIZED / sms)
    _C.set_card_rates(card.sm, *rates, before["share"], before["l2"])
    try:
        yield
    finally:
        names = ("flops_per_ns_sm", "bytes_per_ns_sm", "dequantized_per_ns_sm", "share", "l2")
        _C.set_card_rates(card.sm, *((before[name] for name in names) if before["chosen"] else ()))
