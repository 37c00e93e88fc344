"""Draws sharding_pays.svg: from which link and how many cards on sharding stops paying, by `bitshard plan --time`.

python docs/pictures/sharding_pays.py
"""

from pathlib import Path

from bitshard.planning import Plan, plan
from bitshard.planning.time import Time, Way
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

LINKS = [2**i for i in range(10)]  # GB/s in one direction, reached
CARDS = (2, 4, 8, 16)
KNOWN = {"PCIe 3, host": 6.4, "PCIe 4": 25, "PCIe 5": 51, "NVLink 4": 225}
FSDP2 = {"sharding": "fsdp2", "gib": 80.0, "nested": True, "lora_dtype": "bfloat16"}
CASES = (("llama-3-8b", 512, "4090"), ("llama-3-8b", 2048, "4090"), ("llama-3-70b", 2048, "H100"))


def rates(found: Plan, card: str, **way) -> list[float]:
    """Tokens/s a card for each of LINKS."""
    times = [Time(found, card, Way(link=str(link), **way)) for link in LINKS]
    return [time.tokens / time.cards for time in times]


def number_of_cards(axes, name: str, seq: int, card: str) -> Plan:
    """A line for each number of cards, and what one alone does where a card holds the model."""
    found = plan(name, seq=seq, gpus=2, **FSDP2)
    for gpus in CARDS:
        axes.plot(LINKS, rates(found.other(gpus=gpus), card), marker=".", label=f"{gpus} cards, sharded")
    alone = found.other(gpus=1, sharding="none")
    if name == "llama-3-8b":
        one = Time(alone, card)
        axes.axhline(one.tokens, color="black", linestyle="--", linewidth=1, label="one card with all weights")
    axes.set_title(f"{name}, {seq} tokens a card, {card}", fontsize=10)
    return found


def ways(axes, found: Plan, card: str) -> None:
    """What offload, accumulation and HSDP change, of eight cards."""
    eight = found.other(gpus=8)
    axes.plot(LINKS, rates(eight, card), marker=".", label="8 cards, sharded")
    axes.plot(LINKS, rates(eight, card, accumulate=8), marker="x", label="8 batches a step")
    axes.plot(LINKS, rates(found, card, replicas=4), marker=".", label="HSDP: 4 x 2 cards")
    away = eight.other(offload_weights=True)
    axes.plot(LINKS, rates(away, card), marker=".", label="weights on the host")
    alone = found.other(gpus=1, sharding="none")
    axes.plot(LINKS, rates(alone, card, replicas=8), linestyle="--", color="black", label="DDP: 8 x all weights")
    axes.set_title(f"llama-3-8b, {found.job.seq} tokens a card, {card}", fontsize=10)


def main() -> None:
    figure = Figure(figsize=(11, 8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2).flatten()
    plans = [number_of_cards(each, *case) for each, case in zip(axes, CASES, strict=False)]
    ways(axes[3], plans[0], "4090")
    for each in axes:
        each.set_xscale("log", base=2)
        each.set_ylim(bottom=0)
        each.set_xlabel("GB/s that a card gets from others")
        each.set_ylabel("tokens/s a card")
        each.legend(fontsize=8, loc="lower right")
        for name, rate in KNOWN.items():
            each.axvline(rate, color="lightgrey", linewidth=1, zorder=0)
            each.text(
                rate, 0.02, f" {name}", rotation=90, fontsize=7, color="grey", transform=each.get_xaxis_transform()
            )
    figure.suptitle("Modelled: nothing here was measured on these cards but the products of an H100", fontsize=10)
    figure.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
