"""What a model and its QLoRA training lose when the products of its NF4 weights are computed in 8 bits (simulated).

    python benchmarks/arithmetic8_training.py MODEL [--steps 100] [--every 20] [--seeds 1] [--length 512] [--batch 8]
        [--held 16] [--rank 16] [--lr 2e-4] [--docstrings] [--tf32] [--only REGEX] [--curves-only] [--work FOLDER]
        [--out benchmarks/results/FILE.md]

MODEL is a folder of 16-bit weights, such as examples/smollm2.py makes; its linear layers but the head get NF4 weights,
nested scales. x and dy are rounded to bfloat16, then to the form's 8-bit numbers; y and dx to bfloat16; sums and
all other layers are float32. --tf32: products in TF32, which holds bfloat16 numbers and codes but rounds codes times
scales by 2^-12. Text: Python's language reference and, with --docstrings, the docstrings of its standard library; the
last tenth is held out.

Three tables: held-out loss of the model as it is; error of the gradients of LoRA weights (normal, not zero) on one
batch, beside the gradient of the next batch; LoRA on all linear layers, alpha 2 rank, AdamW, a linear decay, the same
seeds and data for each row. A curve is kept in --work and not trained again with the same settings. On a GPU a step is
one CUDA graph, the rows run side by side in streams, and x and dy are rounded by arithmetic8_triton.py.
"""

import argparse
import ast
import copy
import json
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from pydoc_data.topics import topics

import torch
import transformers
from arithmetic8 import (
    BF16,
    FORWARD,
    GRADIENT,
    LIMIT,
    OUTLIER,
    Form,
    Weight,
    label,
    quantized,
    right_operand,
    row_scale,
    spread,
)
from bitshard.graphs.captured_step import Graph
from calibration import where
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from quality import ROOT
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

if torch.cuda.is_available():
    import arithmetic8_triton

FLOAT32 = Form("float32", "float32")
Y = {"float32": FLOAT32, **{label(form): form for form in FORWARD if form.before != "balance"}}
DX = {"float32": FLOAT32, **{label(form): form for form in GRADIENT if form.before != "scale"}}
PER_64, PER_64_ROW, PER_128, PER_ROW = (
    "int8: x per row and 64, codes of W",
    "int8: x per row and 64, W per row",
    "int8: x per row and 128, W per row",
    "int8: x per row, W per row",
)
TILE, DX_128, DX_ROW = (
    "int8: dy per row and 64, W per 64 x 64",
    "int8: dy times W's row scale, per row and 128, W per row",
    "int8: dy times W's row scale, per row, W per row",
)
TRAINED = {
    "32 bits": ("float32", "float32"),
    "16 bits": ("bf16", "bf16"),
    "forward per 64": (PER_64, "bf16"),
    "both per 64": (PER_64, TILE),
    "both per 128": (PER_128, DX_128),
    "both per row": (PER_ROW, DX_ROW),
    "forward per 64, gradient per 128": (PER_64_ROW, DX_128),
}


def docstrings() -> Iterator[str]:
    """Of the modules, classes and functions of Python's standard library but its tests and IDLE, by file."""
    library = Path(ast.__file__).parent
    for file in sorted(library.rglob("*.py")):
        if not {"site-packages", "dist-packages", "test", "tests", "idlelib"} & set(file.relative_to(library).parts):
            try:
                nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            except (SyntaxError, UnicodeDecodeError):  # what lib2to3 is tested with
                continue
            documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            yield from filter(None, (ast.get_docstring(node) for node in nodes if isinstance(node, documented)))


def texts(options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """int64 [S, length] to train on, and held out."""
    text = [*topics.values(), *(docstrings() if options.docstrings else ())]
    ids = AutoTokenizer.from_pretrained(options.model)("\n\n".join(text), return_tensors="pt", verbose=False).input_ids[
        0
    ]
    rows = ids[: len(ids) // options.length * options.length].view(-1, options.length)
    held = len(rows) // 10
    return rows[:-held], rows[-held:][: options.held]


def left(form: Form, t: Tensor, row: Tensor) -> Tensor:
    """The numbers that stand for x or dy [M, C]."""
    if form.kind == "float32":
        return t
    return in_one_launch(form, t, row) if t.is_cuda and has_kernel(form) else in_steps(form, t, row)


def has_kernel(form: Form) -> bool:
    return form.kind in ("int8", "bf16") and form.before != "outliers"


def in_one_launch(form: Form, t: Tensor, row: Tensor) -> Tensor:
    limit = LIMIT["int8"] if form.kind == "int8" else 0.0
    return arithmetic8_triton.left(t, form.columns, limit, row if form.before == "row" else None)


def in_steps(form: Form, t: Tensor, row: Tensor) -> Tensor:
    t = t.bfloat16().float()
    if form.kind == "bf16":
        return t
    t = t * row if form.before == "row" else t
    outliers = t.abs().amax(0) >= (OUTLIER if form.before == "outliers" else torch.inf)
    codes, scales, columns = quantized(t.masked_fill(outliers, 0.0), form.kind, 1, form.columns)
    return torch.where(outliers, t, codes * spread(scales, columns, t.shape[1]))


def check_kernel() -> None:
    """AssertionError where the kernel's numbers are not those of the steps; zeros and a part of a group too."""
    t = torch.randn(100, 1504, device="cuda") * torch.randn(1504, device="cuda").exp()
    t[:50, 64:192] = 0
    row = torch.rand(1504, device="cuda")
    for form in filter(has_kernel, {*Y.values(), *DX.values()}):
        # On a CPU: a GPU multiplies by the inverse of what it is to divide by
        assert torch.equal(in_one_launch(form, t, row).cpu(), in_steps(form, t.cpu(), row.cpu())), form


def right(form: Form, weight: Weight, gradient: bool) -> Tensor:
    """The numbers that stand for W [N, K]."""
    if form.kind == "float32":
        return weight.decoded
    if form.kind == "bf16":
        return weight.decoded.bfloat16().float()
    codes, scales, columns = right_operand(form, weight, gradient, None)
    values = codes * spread(scales, columns, codes.shape[1])
    return values.T.contiguous() if gradient else values


class Product(torch.autograd.Function):
    """y = x W^T and dx = dy W, each in its form."""

    @staticmethod
    def forward(ctx, x: Tensor, layer: "Linear") -> Tensor:
        ctx.layer = layer
        return layer.multiply(layer.forms[0], x, layer.turned)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        layer = ctx.layer
        return layer.multiply(layer.forms[1], dy, layer.straight), None


class Linear(nn.Linear):
    """A frozen linear layer whose products are computed in `forms` (of y, of dx)."""

    def use(self, forms: tuple[Form, Form]) -> None:
        device = self.weight.device
        self.forms = forms
        self.turned = right(forms[0], self.four_bits, False).to(device).T
        self.straight = right(forms[1], self.four_bits, True).to(device)
        self.row = row_scale(self.four_bits).to(device)

    def multiply(self, form: Form, t: Tensor, matrix: Tensor) -> Tensor:
        result = left(form, t.flatten(0, -2), self.row) @ matrix
        result = result if form.kind == "float32" else left(BF16, result, self.row)
        return result.view(*t.shape[:-1], -1)

    def forward(self, x: Tensor) -> Tensor:
        y = Product.apply(x, self)
        return y if self.bias is None else y + self.bias


def load(options: argparse.Namespace) -> nn.Module:
    """The model with NF4 weights in float32."""
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval().requires_grad_(False)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and ".layers." in name:
            module.__class__ = Linear
            module.four_bits = Weight.of(module.weight.detach())
            module.weight.data = module.four_bits.decoded
    return model.to(options.device)


def use(model: nn.Module, forms: tuple[Form, Form]) -> None:
    for module in model.modules():
        if isinstance(module, Linear):
            module.use(forms)


def adapted(model: nn.Module, options: argparse.Namespace, seed: int, zeros: bool) -> PeftModel:
    """The model with new adapters; B is zero or, for gradients of A and B, normal."""
    torch.manual_seed(seed)
    settings = LoraConfig(
        r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    found = get_peft_model(model, settings)
    for name, parameter in found.named_parameters():
        if "lora_B" in name and not zeros:
            nn.init.normal_(parameter, std=0.01)
    return found


def adapter_gradient(model: nn.Module, ids: Tensor) -> Tensor:
    """Gradients of all adapters on a batch, one vector."""
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double()


@torch.no_grad()
def logarithms(model: nn.Module, ids: Tensor) -> Tensor:
    """Logarithms of the probabilities of each next token, [len(ids) - 1, vocabulary]."""
    return model(input_ids=ids[None].to(model.device)).logits[0, :-1].log_softmax(-1)


def losses(model: nn.Module, held: Tensor, options: argparse.Namespace) -> list[str]:
    """Table: held-out loss of each form of the forward product, its distance from float32 with the standard error of
    pairs of sequences, and the divergence of the probabilities, which no luck makes smaller."""
    lines = ["| y | held-out loss | above float32 | standard error | divergence |", "|---|---|---|---|---|"]
    use(model, (FLOAT32, BF16))
    exact = [logarithms(model, ids) for ids in held]
    for name, form in Y.items():
        use(model, (form, BF16))
        each, apart, divergence = [], [], []
        for ids, right_ones in zip(held, exact, strict=True):
            found, at = logarithms(model, ids), ids[1:, None].to(model.device)
            each.append(-found.gather(1, at).mean().item())
            apart.append(each[-1] + right_ones.gather(1, at).mean().item())
            divergence.append((right_ones.exp() * (right_ones - found)).sum(1).mean().item())
        error = statistics.stdev(apart) / len(apart) ** 0.5
        numbers = f"{statistics.mean(each):.4f} | {statistics.mean(apart):+.4f} | {error:.4f}"
        lines.append(f"| {name} | {numbers} | {statistics.mean(divergence):.5f} |")
        print(lines[-1], flush=True)
    return lines


def gradients(model: nn.Module, train: Tensor, options: argparse.Namespace) -> list[str]:
    """Table: error of the adapters' gradients for each form of one of the products, and of both."""
    tuned = adapted(model, options, 0, zeros=False)
    batches = [part.to(options.device) for part in train[: 2 * options.batch].split(options.batch)]
    use(tuned, (FLOAT32, FLOAT32))
    exact, other = (adapter_gradient(tuned, batch) for batch in batches)
    cases = [("bf16", "bf16"), *[(name, "bf16") for name in (PER_64, PER_128, PER_ROW)]]
    cases += [("bf16", name) for name in DX if name not in ("bf16", "float32")] + list(TRAINED.values())[3:]
    lines = ["| y | dx | error of the adapters' gradients |", "|---|---|---|"]
    for y, dx in cases:
        use(tuned, (Y[y], DX[dx]))
        off = (adapter_gradient(tuned, batches[0]) - exact).norm() / exact.norm()
        lines.append(f"| {y} | {dx} | {off.item():.4f} |")
        print(lines[-1], flush=True)
    lines.append(f"| float32, the next batch | float32 | {((other - exact).norm() / exact.norm()).item():.4f} |")
    tuned.unload()
    return lines


def launched(body: Callable[[], list[Tensor]], device: str) -> Callable[[], Tensor]:
    """`body` as one launch, whose first result the next launch overwrites; on a CPU the body itself."""
    if device == "cpu":
        return lambda: body()[0]
    graph = Graph(body)

    def launch() -> Tensor:
        graph.replay()
        return graph.results[0]

    return launch


class Training:
    """A row's own copy of the model, with adapters and optimizer, in a stream of its own."""

    def __init__(self, model: nn.Module, row: str, held: Tensor, options: argparse.Namespace):
        self.stream = torch.cuda.Stream() if options.device == "cuda" else None
        self.model = adapted(copy.deepcopy(model), options, 0, zeros=True)
        y, dx = TRAINED[row]
        use(self.model, (Y[y], DX[dx]))
        self.params = [p for p in self.model.parameters() if p.requires_grad]
        self.ids = held[: options.batch].clone()
        self.lr = torch.tensor(options.lr, device=options.device)
        on_gpu = options.device == "cuda"
        self.optimizer = torch.optim.AdamW(self.params, lr=self.lr, weight_decay=0.0, capturable=on_gpu, fused=on_gpu)
        self.parts = held.split(options.batch)
        self.step = launched(self._step, options.device)
        self.loss = launched(self._loss, options.device)

    def start(self, seed: int) -> None:
        """New adapters, the optimizer's state zero: in place, where the graphs have them."""
        torch.manual_seed(seed)
        for module in self.model.modules():
            if isinstance(module, LoraLayer):
                module.reset_lora_parameters("default", True)
        for state in self.optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()

    def _step(self) -> list[Tensor]:
        loss = self.model(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.params, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [loss.detach()]

    @torch.no_grad()
    def _loss(self) -> list[Tensor]:
        """Mean next-token loss in nats of the held-out sequences."""
        sums = [self.model(input_ids=part, labels=part).loss * len(part) for part in self.parts]
        return [sum(sums) / sum(map(len, self.parts))]


def trained(rows: dict[str, Training], train: Tensor, options: argparse.Namespace, seed: int) -> dict[str, list[float]]:
    """Of each row: held-out loss before training and after each `every` steps."""
    generator = torch.Generator().manual_seed(seed)
    epochs = -(-options.steps * options.batch // len(train))
    order = torch.cat([torch.randperm(len(train), generator=generator) for _ in range(epochs)]).to(options.device)
    found: dict[str, list[float]] = {}
    for name, row in rows.items():
        row.start(seed)
        found[name] = [row.loss().item()]
    if options.device == "cuda":
        torch.cuda.synchronize()
    for step in range(options.steps):
        chosen = order[step * options.batch : (step + 1) * options.batch]
        for name, row in rows.items():
            with torch.cuda.stream(row.stream):
                torch.index_select(train, 0, chosen, out=row.ids)
                row.lr.fill_(options.lr * (1 - step / options.steps))
                row.step()
                if (step + 1) % options.every == 0:
                    found[name].append(row.loss().item())
    return found


def note(name: str, options: argparse.Namespace) -> Path:
    return options.work / f"{options.model.name}, {name}.json"


def stored(name: str, settings: list, options: argparse.Namespace) -> list | None:
    """What was kept under this name with the same settings."""
    file = note(name, options)
    found = json.loads(file.read_text()) if file.exists() else {"settings": None}
    return found["result"] if found["settings"] == settings else None


def kept(name: str, settings: list, options: argparse.Namespace, make: Callable[[], list]) -> list:
    """What `make()` returns, computed once for the same settings."""
    found = stored(name, settings, options)
    if found is None:
        found = make()
        options.work.mkdir(parents=True, exist_ok=True)
        note(name, options).write_text(json.dumps({"settings": settings, "result": found}))
    return found


def all_trained(
    model: nn.Module, data: tuple[Tensor, Tensor], settings: list, options: argparse.Namespace
) -> dict[str, list[list[float]]]:
    """{row: the curve of each seed}."""
    train, held = (part.to(options.device) for part in data)
    rows: dict[str, Training] = {}
    runs: dict[str, list] = {row: [] for row in TRAINED if re.search(options.only, row)}
    for seed in range(options.seeds):
        missing = [row for row in runs if stored(f"{row}, {seed}", settings, options) is None]
        rows |= {row: Training(model, row, held, options) for row in missing if row not in rows}
        start = time.perf_counter()
        found = trained({row: rows[row] for row in missing}, train, options, seed)
        print(
            f"seed {seed}: {time.perf_counter() - start:.1f} s", {row: f"{run[-1]:.4f}" for row, run in found.items()}
        )
        for row, run in runs.items():
            run.append(kept(f"{row}, {seed}", settings, options, lambda row=row, found=found: found[row]))
    return runs


def curves(runs: dict[str, list[list[float]]], every: int) -> list[str]:
    """Table: final held-out loss, and its paired distance from 16 bits: mean, its standard error and each seed's."""
    lines = [
        "| products | before | after | above 16 bits, mean | standard error | each seed |", "|---|---|---|---|---|---|"
    ]  # fmt: skip
    for name, found in runs.items():
        base = runs.get("16 bits", found)
        apart = [mine[-1] - its[-1] for mine, its in zip(found, base, strict=True)]
        error = statistics.stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else float("nan")
        before, after = (statistics.mean(run[at] for run in found) for at in (0, -1))
        numbers = f"{before:.4f} | {after:.4f} | {statistics.mean(apart):+.4f} | {error:.4f}"
        lines.append(f"| {name} | {numbers} | {', '.join(f'{a:+.4f}' for a in apart)} |")
    return [*lines, "", f"Held-out loss each {every} steps, of each seed:", "", "```json", json.dumps(runs), "```"]


def main() -> None:
    """Measure; print the tables and, with --out, write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    for name, default in (("steps", 100), ("every", 20), ("seeds", 1), ("length", 512), ("batch", 8), ("held", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--docstrings", action="store_true", help="text: those of the standard library, too")
    parser.add_argument("--tf32", action="store_true", help="products in TF32")
    parser.add_argument("--only", default="", metavar="REGEX", help="rows that are trained")
    parser.add_argument("--curves-only", action="store_true", help="neither of the first two tables")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--work", type=Path, default=ROOT / ".cache" / "arithmetic8")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    transformers.logging.disable_progress_bar()
    if options.tf32:
        torch.set_float32_matmul_precision("high")
    if options.device == "cuda":
        check_kernel()
    train, held = texts(options)
    model = load(options)
    shape = [options.length, options.batch, len(held), options.rank, options.tf32, where(options.device)]
    tables = []
    if not options.curves_only:
        tables.append(kept("losses", shape, options, lambda: losses(model, held, options)))
        tables.append(kept("gradients", shape, options, lambda: gradients(model, train, options)))
    settings = [*shape, options.docstrings, options.steps, options.every, options.lr]
    runs = all_trained(model, (train, held), settings, options) if options.steps else {}
    lines = [
        f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}, "
        f"{where(options.device)}, {date.today()}",
        f"`python benchmarks/arithmetic8_training.py {options.model.name} {' '.join(sys.argv[2:])}`",
    ]
    lines.append(f"{len(train)} sequences of {options.length} tokens to train on, {len(held)} held out")
    for found in [*tables, *([curves(runs, options.every)] if runs else [])]:
        lines += ["", *found]
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
