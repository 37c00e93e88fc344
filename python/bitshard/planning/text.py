"""A plan for people: Markdown tables, and a picture."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from bitshard.planning import Plan
from bitshard.planning.job import GIB


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"


def header(plan: Plan) -> list[str]:
    """What is planned."""
    job, memory = plan.job, plan.memory
    weights = [weight for unit in (*memory.layers, memory.units.rest) for weight in unit.packed]
    packed = sum(weight.elements for weight in (*weights, memory.units.packed_head) if weight)
    trained = sum(sum(unit.adapters) for unit in (*memory.layers, memory.units.rest))
    elements = sum(parameter.numel() for parameter in plan.model.model.parameters())
    share = f"{packed / elements:.1%} of them in {job.bits} bits"
    gpus = f"{job.gpus} GPU{'' if job.gpus == 1 else 's'} of {job.gib:g} GiB"
    sharding = "" if job.sharding == "none" else f", {job.sharding.upper()}"
    return [
        f"{plan.model.name} ({type(plan.model.model).__name__}): {elements / 1e9:.2f} billion parameters, {share}; "
        f"{trained / 1e6:.1f} million trained (LoRA, r = {job.rank}, {job.lora_dtype}), {job.optimizer}",
        f"{gpus}{sharding}; {job.batch} x {job.seq} tokens on each",
    ]


def parts(plan: Plan) -> list[str]:
    """The parts on one GPU at the peak of a step."""
    worst = plan.memory.worst()
    lines = [f"| on each GPU at the peak of a step ({worst.name}) | GiB |", "|---|---:|"]
    lines += [f"| {part} | {_gib(size)} |" for part, size in sorted(worst.parts.items(), key=lambda each: -each[1])]
    lines.append(f"| **all of it** | **{_gib(worst.total)}** |")
    return lines


def moments(plan: Plan) -> list[str]:
    """The most in each phase, loading first, beside bitsandbytes."""
    other = plan.bitsandbytes() if plan.job.library == "bitshard" else None
    rows: list[tuple[str, str, str]] = []
    theirs = _phases(other) if other else {}
    ours = _phases(plan)
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        cells = (_gib(found[name]) if name in found else "" for found in (ours, theirs))
        rows.append((name, *cells))
    lines = [f"| most allocated on a GPU, GiB | {plan.job.library} |{' bitsandbytes |' if other else ''}"]
    lines.append(f"|---|---:|{'---:|' if other else ''}")
    lines += [f"| {name} | {own} |{f' {their} |' if other else ''}" for name, own, their in rows]
    return lines


def _phases(plan: Plan) -> dict[str, float]:
    names = {"load": "loading", "prepare": "sharding, adapters" if plan.memory.ranks > 1 else "adapters"}
    found = {names[phase]: size for phase, size in (plan.loading or {}).items()}
    return found | {moment.name: moment.total for moment in plan.memory.moments()}


def verdict(plan: Plan) -> list[str]:
    """Whether it fits, and what would help."""
    job = plan.job
    line = f"{'Fits' if plan.fits else 'Does not fit'}: {_gib(plan.needs)} of {job.gib:g} GiB, of which"
    line += f" {_gib(plan.fragments)} fragments and {_gib(plan.outside)} outside torch"
    lines = [line, *plan.notes]
    if plan.estimated:
        lines.append(f"Activations are estimated, within a fifth: {plan.estimated}")
    if plan.loading is None:
        lines.append("The peak while loading is not known for weights on the host.")
    if plan.job.library == "bitshard" and plan.bitsandbytes() is None:
        lines.append("bitsandbytes cannot shard 8-bit layers.")
    if plan.host:
        lines.append("In host memory of each process: " + _listed(plan.host))
    if plan.links:
        lines.append("Over the links in a step, for each GPU: " + _listed(plan.links))
    return lines


def _listed(sizes: dict[str, float]) -> str:
    return ", ".join(f"{what} {_gib(size)} GiB" for what, size in sizes.items())


def advice(plan: Plan) -> list[str]:
    """What each option saves, and the first options with which it fits."""
    lines = []
    if not plan.fits:
        remedy = plan.remedy()
        found = "no options that are known make it fit" if remedy is None else f"fits with: {remedy.name}"
        lines += [found[0].upper() + found[1:] + (f" ({_gib(remedy.needs)} GiB)" if remedy else ""), ""]
    changes = plan.changes()
    if changes:
        lines += ["| option alone | saves, GiB | fits |", "|---|---:|---|"]
        for change in changes:
            lines.append(f"| {change.name} | {_gib(plan.needs - change.needs)} | {'yes' if change.fits else 'no'} |")
    return lines


def text(plan: Plan) -> str:
    """All of it."""
    blocks = [header(plan), parts(plan), moments(plan), verdict(plan), advice(plan)]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def data(plan: Plan) -> dict[str, Any]:
    """The same for programs; sizes in bytes."""
    worst, other, remedy = plan.memory.worst(), plan.bitsandbytes(), None if plan.fits else plan.remedy()
    return {
        "model": plan.model.name,
        "class": type(plan.model.model).__name__,
        "notes": plan.notes,
        "job": plan.job._asdict(),
        "fits": plan.fits,
        "estimated": plan.estimated,
        "needs": plan.needs,
        "peak": {"moment": worst.name, "parts": worst.parts, "total": worst.total},
        "moments": {moment.name: moment.total for moment in plan.memory.moments()},
        "loading": plan.loading,
        "fragments": plan.fragments,
        "outside": plan.outside,
        "host": plan.host,
        "links": plan.links,
        "remedy": remedy and remedy._asdict(),
        "changes": [change._asdict() | {"saves": plan.needs - change.needs} for change in plan.changes()],
        "bitsandbytes": other and _other(other),
    }


def _other(plan: Plan) -> dict[str, Any]:
    return {"needs": plan.needs, "loading": plan.loading, "peak": plan.memory.worst().parts}


def picture(plan: Plan, path: str | os.PathLike) -> None:
    """Stacked bars of loading and of a step's peak, beside bitsandbytes'. The format is that of the file's name, which
    appears when the picture is whole. ValueError for a name without a known end."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    path = Path(path)
    form = path.suffix.removeprefix(".").lower()
    if form not in FigureCanvasAgg.get_supported_filetypes():
        raise ValueError(f"{path}: a picture's name ends in .png, .svg or .pdf")
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    bars = _bars(plan)
    names = list(dict.fromkeys(part for bar in bars.values() for part in bar))
    colors = colormaps["tab20"].colors
    bottom = [0.0] * len(bars)
    for number, part in enumerate(names):
        heights = [bar.get(part, 0.0) / GIB for bar in bars.values()]
        axes.bar(list(bars), heights, 0.6, bottom=bottom, label=part, color=colors[number % len(colors)])
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.axhline(plan.job.gib, color="black", linestyle="--", linewidth=1)
    axes.text(len(bars) - 0.5, plan.job.gib, f" {plan.job.gib:g} GiB", va="bottom", ha="right")
    axes.set_ylabel("GiB on each GPU")
    axes.set_title("\n".join(line.partition(";")[0] for line in header(plan)), fontsize=10)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=8, reverse=True)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=120, format=form)
    _write(path, drawn.getvalue())


def _write(path: Path, content: bytes) -> None:
    """A file that is whole or not there."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


def _bars(plan: Plan) -> dict[str, dict[str, float]]:
    """{bar: {part: bytes}}."""
    found = {}
    other = plan.bitsandbytes() if plan.job.library == "bitshard" else None
    for each in (plan, other) if other else (plan,):
        if each.loading:
            most = max(each.loading.values())
            kept = each.memory.whole() if each.job.way == "whole" else each.memory.shard()
            found[f"{each.job.library}\nloading"] = kept | {"only while loading": max(0.0, most - sum(kept.values()))}
        worst = each.memory.worst()
        rest = {"fragments": each.fragments, "outside torch": each.outside}
        found[f"{each.job.library}\nstep"] = worst.parts | rest
    return found
