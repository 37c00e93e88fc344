"""What products of NF4 weights lose in 8-bit arithmetic: relative errors of y and dx, layer by layer.

    python benchmarks/arithmetic8.py [MODEL ...] [--rows 512] [--every 1] [--out FILE.md] [--plot FILE.png]

Each MODEL is a folder of 16-bit weights, such as examples/smollm2.py makes: every linear layer but the head is measured
with the x and dy that `--rows` tokens of Python's language reference give it (model in float32, weights NF4, nested
scales); of its decoder layers each `--every`th. Without a model: random x, dy and W of 1,024 x 2,048.

Sums of int8 products are exact integers: float32 products of at most 1,024 columns, below 2^24, added in float64. They
are scaled and added in float32, y and dx are rounded to bfloat16 once, and the reference is float64 with the decoded W.
A product is left [M, C] times right [R, C], both contiguous along the contraction: x and W, or dy and W transposed.
"""

import argparse
import platform
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
import transformers
from bitshard import functional, ops
from quality import ROOT, processor, text_ids
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

sys.path.append(str(ROOT / "tests"))
import reference  # noqa: E402

BLOCK = 64
LIMIT = {"int8": 127.0, "fp8": 448.0}
# Factors of the 16 values of NF4 at which they are nearest to int8 and to E4M3, weighted as codes of normal weights
FACTOR = {"int8": 124.11, "fp8": 224.256}
OUTLIER = 6.0
EXACT = 1024  # columns of int8 codes whose products sum to less than 2^24
Errors = dict[tuple[str, str], list[list[float]]]  # {(direction, form): [Frobenius, worst row, W's own] of each layer}


@dataclass
class Weight:
    """NF4 W [N, K]: table values and block scales [N, K / 64], both float32."""

    values: Tensor
    scales: Tensor

    @property
    def decoded(self) -> Tensor:
        return self.values * spread(self.scales, BLOCK, self.values.shape[1])

    @classmethod
    def of(cls, w: Tensor) -> "Weight":
        packed, state = functional.quantize_4bit(w.bfloat16(), quant_type="nf4", compress_statistics=True)
        scales = reference.nested_scale(*state.scales())
        values = ops.table("nf4")[reference.unpack(packed, w.numel())]
        return cls(values.view(w.shape), scales.view(len(w), -1))


@dataclass(frozen=True)
class Form:
    """How a product is computed. columns: of the contraction that share a scale of the left operand, None: the row.

    right: "codes" (table values in 8 bits, W's block scales outside the sum), or W in 8 bits anew, one scale per (rows,
    columns) of the right operand. before: what x or dy is multiplied by before it is quantized: "row" (dy by the
    largest scale of W's row), "scale" (dy by each scale: as many quantized dy as W has blocks in a row), "balance"
    (x and W by powers of the sizes of 64 columns). Or "outliers": columns of x with a magnitude from 6 on stay as they
    are, as in LLM.int8(), and are multiplied by the values of W in 8 bits.
    """

    name: str
    kind: str = "int8"
    columns: int | None = None
    right: str | tuple[int, int | None] = "codes"
    before: str = ""


BF16 = Form("bf16", "bf16")
FORWARD = (
    BF16,
    Form("x per row and 64, codes of W", columns=64),
    Form("x per row, codes of W"),
    Form("x per row and 64, W per row and 128", columns=64, right=(1, 128)),
    Form("x per row and 128, W per row and 128", columns=128, right=(1, 128)),
    Form("x per row and 64, W per row", columns=64, right=(1, None)),
    Form("x per row and 128, W per row", columns=128, right=(1, None)),
    Form("x per row and 256, W per row", columns=256, right=(1, None)),
    Form("x per row and 128, W per 64 rows and 128", columns=128, right=(64, 128)),
    Form("x per row, W per row", right=(1, None)),
    Form("x per row, W per row, balanced", right=(1, None), before="balance"),
    Form("x per row but for outlier columns, W per row", right=(1, None), before="outliers"),
    Form("x per row and 64, codes of W", "fp8", columns=64),
    Form("x per row, codes of W", "fp8"),
    Form("x per row and 64, W per row", "fp8", columns=64, right=(1, None)),
    Form("x per row, W per row", "fp8", right=(1, None)),
)
GRADIENT = (
    BF16,
    Form("dy per row and 64, W per 64 x 64", columns=64, right=(64, 64)),
    Form("dy per row and 64, W per 64 rows and column", columns=64, right=(1, 64)),
    Form("dy times W's scales, per row and 64, codes of W", columns=64, before="scale"),
    Form("dy times W's scales, per row, codes of W", before="scale"),
    Form("dy times W's row scale, per row and 64, W per row", columns=64, right=(0, None), before="row"),
    Form("dy times W's row scale, per row and 128, W per row", columns=128, right=(0, None), before="row"),
    Form("dy times W's row scale, per row and 256, W per row", columns=256, right=(0, None), before="row"),
    Form("dy per row and 128, W per 64 columns and 128 rows", columns=128, right=(64, 128)),
    Form("dy times W's row scale, per row, W per row", right=(0, None), before="row"),
    Form("dy per row, W per column", right=(1, None)),
    Form("dy times W's row scale, per row and 64, W per row", "fp8", columns=64, right=(0, None), before="row"),
    Form("dy times W's row scale, per row, W per row", "fp8", right=(0, None), before="row"),
    Form("dy per row, W per column", "fp8", right=(1, None)),
)
DRAWN = {
    "y": [
        "NF4 itself",
        "int8: x per row, W per row",
        "fp8: x per row and 64, codes of W",
        "int8: x per row and 128, W per row",
        "int8: x per row and 64, codes of W",
        "bf16",
    ],
    "dx": [
        "NF4 itself",
        "int8: dy times W's row scale, per row, W per row",
        "fp8: dy times W's row scale, per row and 64, W per row",
        "int8: dy times W's row scale, per row and 128, W per row",
        "int8: dy per row and 64, W per 64 x 64",
        "bf16",
    ],
}


def spread(scales: Tensor, columns: int, width: int) -> Tensor:
    """Scales [R, ceil(width / columns)] of groups of columns -> [R, width]."""
    return scales.repeat_interleave(columns, 1)[:, :width]


def rounded(t: Tensor, kind: str) -> Tensor:
    """To the nearest number of the kind, float32."""
    return t.round() if kind == "int8" else t.to(torch.float8_e4m3fn).float()


def quantized(t: Tensor, kind: str, rows: int, columns: int | None) -> tuple[Tensor, Tensor, int]:
    """Codes [R, C] as float32, scales [R, groups] and columns of a group; rows x columns share a scale."""
    R, C = t.shape
    columns = min(columns or C, C)
    groups = -(-C // columns)
    padded = F.pad(t, (0, groups * columns - C, 0, -R % rows)).view(-1, rows, groups, columns)
    scales = padded.abs().amax((1, 3)).div(LIMIT[kind]).repeat_interleave(rows, 0)[:R]
    codes = t / spread(scales, columns, C)
    return rounded(codes.nan_to_num(0.0), kind), scales, columns


def right_operand(form: Form, weight: Weight, gradient: bool, balance: Tensor | None) -> tuple[Tensor, Tensor, int]:
    """Codes [R, C], scales and columns of W, or of W transposed for the gradient."""
    if form.right == "codes":
        factor = FACTOR[form.kind]
        codes = rounded(weight.values * factor, form.kind)
        return codes, weight.scales / factor, BLOCK
    w = weight.decoded
    if balance is not None:
        w = w * balance
    if form.before == "row":  # the forward product's codes: their scale has gone into dy
        codes, scales, _ = quantized(w, form.kind, 1, None)
        return codes.T.contiguous(), torch.full((w.shape[1], 1), 1 / LIMIT[form.kind]), len(w)
    return quantized(w.T if gradient else w, form.kind, *form.right)


def balanced(x: Tensor, weight: Tensor) -> Tensor:
    """For 64 columns each, the factor of W: root of the largest |x| over the largest |w|, [K]."""
    largest = [t.abs().amax(0).view(-1, BLOCK).amax(1).clamp(min=1e-30) for t in (x, weight)]
    return (largest[0] / largest[1]).sqrt().repeat_interleave(BLOCK)


def row_scale(weight: Weight) -> Tensor:
    """Largest magnitude of each row of W, [N]."""
    return weight.decoded.abs().amax(1)


def product(left: tuple[Tensor, Tensor, int], right: tuple[Tensor, Tensor, int]) -> Tensor:
    """Sum over blocks of float32(exact sum of codes) * scales, in float32; [M, R]."""
    (a, a_scales, a_columns), (b, b_scales, b_columns) = left, right
    C = a.shape[1]
    block = min(a_columns, b_columns, C)
    total = torch.zeros(len(a), len(b))
    for at in range(0, C, block):
        end = min(at + block, C)
        cuts = [(cut, min(cut + EXACT, end)) for cut in range(at, end, EXACT)]
        sums = [a[:, i:j] @ b[:, i:j].T for i, j in cuts]
        whole = sums[0] if len(sums) == 1 else sum(s.double() for s in sums).float()
        total += whole * a_scales[:, at // a_columns, None] * b_scales[:, at // b_columns]
    return total


def forward(form: Form, x: Tensor, weight: Weight) -> Tensor:
    """y [M, N] in the form's arithmetic, before its rounding."""
    if form.kind == "bf16":
        return x @ weight.decoded.bfloat16().float().T
    balance = balanced(x, weight.decoded) if form.before == "balance" else None
    right = right_operand(form, weight, False, balance)
    if form.before == "outliers":
        outliers = x.abs().amax(0) >= OUTLIER
        apart = x[:, outliers] @ (right[0][:, outliers] * right[1]).T
        return apart + product(quantized(x.masked_fill(outliers, 0.0), form.kind, 1, form.columns), right)
    return product(quantized(x if balance is None else x / balance, form.kind, 1, form.columns), right)


def gradient(form: Form, dy: Tensor, weight: Weight) -> Tensor:
    """dx [M, K] in the form's arithmetic, before its rounding."""
    if form.kind == "bf16":
        return dy @ weight.decoded.bfloat16().float()
    if form.before == "scale":
        codes, scales, _ = right_operand(form, weight, False, None)
        one = torch.ones(BLOCK, 1)
        parts = [
            product(quantized(dy * scale, form.kind, 1, form.columns), (codes_of.T.contiguous(), one, len(codes)))
            for scale, codes_of in zip(scales.T, codes.split(BLOCK, 1), strict=True)
        ]
        return torch.cat(parts, 1)
    dy = dy * row_scale(weight) if form.before == "row" else dy
    return product(quantized(dy, form.kind, 1, form.columns), right_operand(form, weight, True, None))


def relative(actual: Tensor, exact: Tensor) -> tuple[float, float]:
    """Frobenius, and of the worst row (rows of zeros left out)."""
    off, size = (actual.double() - exact).norm(dim=1), exact.norm(dim=1)
    return (off.norm() / size.norm()).item(), (off[size > 0] / size[size > 0]).max().item()


def weight_error(form: Form, weight: Weight, transposed: bool) -> float:
    """Of the values of W that are multiplied, against the decoded ones."""
    w = weight.decoded.double()
    if form.kind == "bf16":
        return relative(w.bfloat16(), w)[0]
    codes, scales, columns = right_operand(form, weight, transposed and form.before != "scale", None)
    values = codes * spread(scales, columns, codes.shape[1])
    values = values.T if transposed and form.before != "scale" else values
    return relative(values * row_scale(weight)[:, None] if form.before == "row" else values, w)[0]


def layer_errors(x: Tensor, dy: Tensor, dense: Tensor) -> dict[tuple[str, str], list[float]]:
    """{(direction, form): [Frobenius, worst row, W's own]} of one layer; rows "NF4" are what 4 bits cost."""
    weight = Weight.of(dense)
    found = {}
    sides = (("y", FORWARD, forward, x, lambda w: w.T), ("dx", GRADIENT, gradient, dy, lambda w: w))
    for side, forms, multiply, left, turned in sides:
        left = left.bfloat16().float()
        exact = left.double() @ turned(weight.decoded.double())
        ideal = left.double() @ turned(dense.double())
        found[side, "NF4 itself"] = [*relative(exact, ideal), relative(weight.decoded.double(), dense.double())[0]]
        for form in forms:
            actual = multiply(form, left, weight).bfloat16()
            found[side, label(form)] = [*relative(actual, exact), weight_error(form, weight, side == "dx")]
    return found


def label(form: Form) -> str:
    return form.name if form.kind == "bf16" else f"{form.kind}: {form.name}"


def synthetic(outliers: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """One layer of 1,024 x 2,048: columns of x (and dy) of different size, `outliers` of them 30 times larger."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def columns(M: int, C: int) -> Tensor:
        t = random(M, C) * (0.5 * random(C)).exp()
        t[:, torch.randperm(C, generator=generator)[:outliers]] *= 30
        return t

    yield columns(512, 2048), columns(512, 1024), 0.02 * random(1024, 2048)


def model_layers(folder: Path, rows: int, every: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """x, dy and dense W of the linear layers of a model whose weights are NF4; dy of the mean loss."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = text_ids(folder).flatten()[:rows].view(-1, min(rows, 512))
    kept: dict[str, list[Tensor]] = {}
    chosen = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and ".layers." in name
    ]
    for name, module in chosen:
        dense, kept[name] = module.weight.detach(), []
        module.weight = torch.nn.Parameter(Weight.of(dense).decoded, requires_grad=False)
        module.dense = dense
        if int(name.split(".layers.")[1].split(".")[0]) % every == 0:
            module.register_forward_hook(lambda _, given, y, keep=kept[name]: keep.append(given[0].detach()))
            module.register_full_backward_hook(lambda _, dx, dy, keep=kept[name]: keep.append(dy[0].detach()))
    model.get_input_embeddings().register_forward_hook(lambda _, given, y: y.requires_grad_())
    model(input_ids=ids, labels=ids).loss.backward()
    for name, module in chosen:
        if kept[name]:
            x, dy = kept.pop(name)
            yield x.flatten(0, 1), dy.flatten(0, 1), module.dense


def measured(layers: Iterator[tuple[Tensor, Tensor, Tensor]]) -> Errors:
    """`layer_errors` of all layers."""
    found: Errors = {}
    for layer in layers:
        for key, errors in layer_errors(*layer).items():
            found.setdefault(key, []).append(errors)
    return found


def cell(layers: list[list[float]]) -> str:
    """Error / worst row of one layer; of several median / largest layer / worst row."""
    frobenius, worst, _ = zip(*layers, strict=True)
    numbers = [*([statistics.median(frobenius)] if len(layers) > 1 else []), max(frobenius), max(worst)]
    return " / ".join(f"{number:.4f}" for number in numbers)


def table(side: str, results: dict[str, Errors]) -> list[str]:
    """Markdown: a row a form, a column a data set, and the error of W's own values in the first one."""
    first = next(iter(results.values()))
    lines = [f"| {side} | {' | '.join(results)} | W's own |", "|---|" + "---|" * (len(results) + 1)]
    for key in [key for key in first if key[0] == side]:
        cells = [cell(found[key]) for found in results.values()]
        lines.append(f"| {key[1]} | {' | '.join(cells)} | {first[key][0][2]:.4f} |")
    return lines


def draw(results: dict[str, Errors], picture: Path) -> None:
    """Frobenius errors of the layers of each model, ascending, of the forms in DRAWN."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    models = {name: found for name, found in results.items() if len(next(iter(found.values()))) > 1}
    figure, rows = pyplot.subplots(2, len(models), figsize=(5 * len(models), 8), sharey=True, squeeze=False)
    for side, row in zip(DRAWN, rows, strict=True):
        for (name, found), axes in zip(models.items(), row, strict=True):
            for form in DRAWN[side]:
                errors = sorted(layer[0] for layer in found[side, form])
                axes.plot([i / (len(errors) - 1) for i in range(len(errors))], errors, label=form)
            axes.set(title=f"{side}, {name}", xlabel="share of layers", ylabel="relative error", yscale="log")
            axes.set_ylim(2e-4, 0.3)
            axes.grid(alpha=0.3)
            axes.legend(fontsize=7, loc="lower right")
    figure.tight_layout()
    figure.savefig(picture, dpi=80)


def measure(options: argparse.Namespace) -> dict[str, Errors]:
    """Of each data set."""
    results = {"normal": measured(synthetic(0)), "six columns 30 times larger": measured(synthetic(6))}
    for folder in options.models:
        results[folder.name] = measured(model_layers(folder, options.rows, options.every))
        print(f"{folder.name}: {len(results[folder.name]['y', 'bf16'])} layers", flush=True)
    return results


def main() -> None:
    """Measure; print the tables and, with --out, write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="*")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path, help="picture of the models' layers")
    options = parser.parse_args()
    transformers.logging.disable_progress_bar()
    results = measure(options)
    command = " ".join(Path(word).name if Path(word).is_dir() else word for word in sys.argv[1:])
    lines = [
        f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}, "
        f"{processor()}, {date.today()}",
        f"`python benchmarks/arithmetic8.py {command}`",
        "",
        *table("y", results),
        "",
        *table("dx", results),
    ]
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if options.plot:
        draw(results, options.plot)


if __name__ == "__main__":
    main()
