"""The time of a step for people, and for programs."""

from __future__ import annotations

from typing import Any

from bitshard.planning.time import Time


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def header(time: Time) -> str:
    """What is timed."""
    way, card = time.way, time.card
    words = ["as graphs" if way.graphs else "eagerly", "fused adapters" if way.fused else "peft's adapters"]
    if way.accumulate > 1:
        words.append(f"{way.accumulate} batches a step")
    if way.replicas > 1:
        words.append(f"{way.replicas} replicas")
    return f"A step on {time.cards} x {card.name} ({card.sms} multiprocessors, {card.gb:.0f} GB/s), {', '.join(words)}"


def parts(time: Time) -> list[str]:
    """What each moment waits for."""
    lines = ["| moment | waits for | ms | |", "|---|---|---:|---|"]
    lines += [f"| {part.moment} | {part.limit} | {_ms(part.seconds)} | {part.source} |" for part in time.parts]
    return lines


def verdict(time: Time) -> str:
    """The step, or why there is no figure of it."""
    limits = ", ".join(f"{limit} {seconds / time.seconds:.0%}" for limit, seconds in time.limits.items())
    if time.left_out:
        return f"At least {_ms(time.seconds)} ms ({limits}). No figure of the step: {time.left_out}."
    return f"{_ms(time.seconds)} ms, {time.tokens:,.0f} tokens/s of all cards. It waits for: {limits}."


def text(time: Time) -> str:
    """All of it."""
    return "\n\n".join([header(time), "\n".join(parts(time)), verdict(time)])


def data(time: Time) -> dict[str, Any]:
    """The same for programs, in seconds; `seconds` and `tokens_per_second` are None where there is no figure."""
    known = time.left_out is None
    return {
        "card": time.card._asdict(),
        "way": time.way._asdict(),
        "cards": time.cards,
        "parts": [part._asdict() for part in time.parts],
        "limits": time.limits,
        "least": time.seconds,
        "seconds": time.seconds if known else None,
        "tokens_per_second": time.tokens if known else None,
        "left_out": time.left_out,
    }
