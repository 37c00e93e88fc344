"""Calibration in commands: options of the text and of tuning, samples, bars, and what is reported."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bitshard_cli import console


def samples(parser: Any) -> None:
    """Options of the text's samples."""
    parser.add_argument("--samples", type=int, default=128, help="pieces of the text (default: 128)")
    parser.add_argument("--length", type=int, default=2048, help="tokens of each (default: 2048)")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the choice of pieces, and of their order in tuning (default: 0)"
    )
    parser.add_argument("--column", default="text", help="of texts in files with columns (default: text)")


def tuning(parser: Any) -> None:
    """The option of tuning."""
    parser.add_argument(
        "--tune", type=int, metavar="STEPS",
        help="steps of tuning scales, and the adapter, for what the whole model says; needs all 4-bit weights on the "
        "device (default: 150 on a GPU, 0 on a CPU)",
    )  # fmt: skip


def require_sound(args: argparse.Namespace) -> None:
    """WrongArgument for numbers that make no sense, and for tuning without calibration."""
    if args.tune is not None and args.calibrate is None:
        raise console.WrongArgument("--tune follows calibration: add --calibrate TEXT")
    if not 0 <= args.seed < 2**63:
        raise console.WrongArgument(f"--seed {args.seed}: expected a number from 0 to 2**63 - 1")
    for name, least in (("samples", 1), ("length", 2), ("tune", 0)):
        given = getattr(args, name)
        if given is not None and given < least:
            raise console.WrongArgument(f"--{name} {given}: expected {least} or more")


def of_text(args: argparse.Namespace, folder: Path) -> Any:
    """int64 [S, L]: samples of the text, by the tokenizer of a folder. Mistake where it has none."""
    calibration = console.load("transformers", "bitshard.calibration")
    from bitshard.sharding.loading.skeleton import refusing_code
    from transformers import AutoTokenizer

    try:
        with refusing_code(folder, "tokenizer_config.json"):
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        raise console.Mistake(f"{folder}: no tokenizer ({console.line_of(error)})") from None
    return calibration.samples(args.calibrate, tokenizer, args.samples, args.length, args.seed, args.column)


def bars() -> dict[str, Any]:
    """Bars over layers and steps, as keywords of `calibrate_folder`."""

    def layer_bar(reports: Iterable, total: int) -> Iterable:
        shown = console.progress(reports, total=total, unit="layer", label="Calibrating")
        for report in shown:
            if hasattr(shown, "set_postfix_str"):
                shown.set_postfix_str(f"error {report.error:.3%}, plain {report.plain:.3%}")
            yield report

    def step_bar(steps: Iterable[int], total: int) -> Iterable[int]:
        return console.progress(steps, total=total, unit="step", label="Tuning")

    return {"layer_progress": layer_bar, "tune_progress": step_bar}


def report(args: argparse.Namespace, layers: list, tuned: Any, count: int) -> tuple[dict, list[str]]:
    """(data, lines) of what became of the layers. count: of samples that there were."""
    from bitshard.calibration.layers import summary

    found = summary(layers) | {"samples": count}
    methods = ", ".join(f"{number} {method}" for method, number in sorted(found["methods"].items()))
    lines = [
        f"lost of the layers' products, squared, on average: {found['error']:.4%}; without calibration "
        f"{found['plain']:.4%} (matrices: {methods})"
    ]
    if tuned is not None:
        found["tuned"] = tuned._asdict()
        lines.append(tuned.line())
    if count < args.samples:
        lines.append(f"{count} samples instead of {args.samples}: the text has no more of {args.length} tokens")
    return found, lines + found["remarks"]
