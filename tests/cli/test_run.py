"""`bitshard run` and the plug-in, each beside an original bitsandbytes that stays first on the path or installed."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from bitshard_cli import console, installed, main, run
from helpers import upstream, warm

WHICH = "import importlib.metadata as m, bitsandbytes as b; print(m.version('bitsandbytes'), b.__version__, flush=True)"


@pytest.fixture(scope="module")
def original():
    return str(upstream.folder_or_skip())


def start(original: str, facade: Path, *words: str, **variables: str) -> subprocess.CompletedProcess:
    """`bitshard run WORDS` in a process that would import the original."""
    code = (
        "import sys; from pathlib import Path; from bitshard_cli import installed, main;"
        "installed.CARRIED = Path(sys.argv[1]); sys.exit(main.main(['run', *sys.argv[2:]]))"
    )
    paths = [original, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "BITSHARD_PLUGIN": "0", **variables}
    command = [warm.bare(), "-c", code, str(facade), *words]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=180)


def tree(folder: Path) -> set[str]:
    return {str(path) for path in Path(folder).rglob("*") if "__pycache__" not in path.parts}


def test_a_script_and_its_children(original, facade, tmp_path):
    """The script, a process that it starts, and two of torchrun's: all with the façade; its arguments are its own."""
    script = tmp_path / "train.py"
    script.write_text(
        f"import os, subprocess, sys\n{WHICH}\n"
        f"subprocess.run([sys.executable, '-c', {WHICH!r}], check=True)\n"
        "print(sys.argv[1:], 'RANK' in os.environ)\nsys.exit(7)\n"
    )
    before = tree(tmp_path), tree(original)
    ran = start(original, facade, str(script), "--json", "-m", "x")
    version = next(path.name.split("-")[1].removesuffix(".dist") for path in facade.glob("*.dist-info"))
    assert ran.returncode == 7, ran.stderr
    assert ran.stdout.splitlines() == [f"{version} {version}"] * 2 + ["['--json', '-m', 'x'] False"], ran.stdout
    assert (tree(tmp_path), tree(original)) == before


def test_workers_of_a_launcher(original, facade, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(WHICH)
    words = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    ran = start(original, facade, "-m", *words)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert len(lines) == 2 and all(installed.FACADE_MARK in word for line in lines for word in line.split()), lines


def test_without_run_it_is_the_original(original):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([original, os.environ.get("PYTHONPATH", "")])}
    ran = subprocess.run([warm.bare(), "-c", WHICH], capture_output=True, text=True, env=env, timeout=120)
    assert ran.stdout.split() == ["0.50.2", "0.50.2"], ran.stderr


def test_what_is_executed(tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    assert run.command_of([str(script), "-x"]) == [sys.executable, str(script), "-x"]
    assert run.command_of(["-m", "trl.scripts.sft"]) == [sys.executable, "-m", "trl.scripts.sft"]
    assert run.command_of(["env", "x"])[0].endswith("/env") and run.command_of(["env", "x"])[1:] == ["x"]
    for words, said in (([], "run what"), (["-m"], "run what"), (["absent.py"], "no such script")):
        with pytest.raises(console.Mistake, match=said):
            run.command_of(words)


# ---- the plug-in ----


def beside(original: str, code: str, plugin: str = "1") -> subprocess.CompletedProcess:
    """`code` in a process with the original, which starts the plug-in as its entry point says."""
    before = """
        import importlib.metadata as metadata
        from importlib.metadata import EntryPoint, EntryPoints
        from bitshard_cli import plugin
        ours = EntryPoint("bitshard", "bitshard_cli.plugin:register", "bitsandbytes.backends")
        found = metadata.entry_points
        metadata.entry_points = lambda **k: EntryPoints([ours]) if k.get("group") == ours.group else found(**k)
        import torch
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([original, os.environ.get("PYTHONPATH", "")])}
    text = textwrap.dedent(before) + textwrap.dedent(code)
    env["BITSHARD_PLUGIN"] = plugin
    return subprocess.run([warm.bare(), "-c", text], capture_output=True, text=True, timeout=180, env=env)


def test_the_entry_point_is_declared():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '[project.entry-points."bitsandbytes.backends"]\nbitshard = "bitshard_cli.plugin:register"' in text


def test_upstream_runs_our_kernels(original):
    """Upstream's own functions give bitshard's bytes, products and states, and its classes are upstream's."""
    ran = beside(
        original,
        """
        import bitsandbytes as bnb, bitshard.functional as F, bitshard, bitshard.bnb_ops
        from bitsandbytes import functional
        print(plugin.state())
        x = torch.randn(96, 256)
        packed, state = functional.quantize_4bit(x, quant_type="nf4", blocksize=64)
        ours, own = F.quantize_4bit(x, quant_type="nf4", blocksize=64)
        assert torch.equal(packed.view(-1), ours.view(-1)) and torch.equal(state.absmax, own.absmax)
        assert torch.equal(functional.dequantize_4bit(packed, state), F.dequantize_4bit(ours, own))
        assert torch.equal(bnb.matmul_4bit(x, packed.t(), state), bitshard.matmul_4bit(x, ours.t(), own))
        codes, scales, columns = functional.int8_vectorwise_quant(8 * x.half(), threshold=24.0)
        ours, own, marks = torch.ops.bitshard.quantize_int8(8 * x.half(), 24.0)
        assert torch.equal(codes, ours) and torch.equal(scales, own) and torch.equal(columns, marks.nonzero().view(-1))
        layer = bnb.nn.Linear8bitLt(256, 32, has_fp16_weights=False, threshold=24.0).to("cpu").eval()
        dense = x.half() @ (functional.int8_vectorwise_dequant(layer.weight.data, layer.weight.SCB)).half().t()
        assert (layer(x.half()) - layer.bias.half() - dense).abs().max() < 0.1 * dense.abs().max()
        assert not issubclass(bnb.nn.Params4bit, bitshard.Params4bit)
        names = {op.name for op in bitshard.bnb_ops.OPS}
        for name in names:
            lines = torch._C._dispatch_dump(f"bitsandbytes::{name}").splitlines()
            assert ["bnb_ops.py" in line for line in lines if line.startswith("CPU:")] == [True], lines
        param = torch.nn.Parameter(torch.randn(5000))
        step, param.grad = bnb.optim.AdamW8bit([param], lr=1e-2, min_8bit_size=1), torch.randn(5000)
        before = param.detach().clone()
        step.step()
        assert (before - param).abs().max() > 1e-3
        print("equal")
        """,
    )
    assert ran.returncode == 0 and "verrid" not in ran.stderr, ran.stderr
    said, equal = ran.stdout.splitlines()
    assert said.startswith("bitshard's kernels for 19 of upstream's ops on CPU") and "BITSHARD_PLUGIN=0" in said
    assert equal == "equal"


@pytest.mark.parametrize(
    "spoil, reason",
    [
        ("bnb_ops.OPS = (*bnb_ops.OPS, bnb_ops.OPS[0]._replace(name='absent'))", "has no op bitsandbytes::absent"),
        ("bnb_ops.OPS = tuple(o._replace(schema=o.schema.replace('int b', 'int n_b')) for o in bnb_ops.OPS)", "knows"),
        ("bnb_ops.OPS = (*bnb_ops.OPS, bnb_ops.OPS[0]._replace(kernel=3))", "own kernels stay: "),
    ],
)
def test_all_or_none_and_never_an_exception(original, spoil, reason):
    """Where an op is not as it is known here, or one cannot be registered, every kernel is upstream's."""
    ran = beside(
        original,
        f"""
        from bitshard import bnb_ops
        called = []
        bnb_ops.OPS = tuple(o._replace(kernel=lambda *a, **k: called.append(1)) for o in bnb_ops.OPS)
        {spoil}
        import bitsandbytes as bnb
        print(plugin.state())
        packed, state = bnb.functional.quantize_4bit(torch.randn(64, 64), quant_type="nf4")
        print(bnb.functional.dequantize_4bit(packed, state).shape, called)
        """,
    )
    assert ran.returncode == 0, ran.stderr
    said, result = ran.stdout.splitlines()
    assert said.startswith("upstream's own kernels stay: ") and reason in said
    assert result == "torch.Size([64, 64]) []"


def test_a_broken_engine_does_not_end_upstream_s_import(original):
    ran = beside(original, "import sys; sys.modules['bitshard'] = None\nimport bitsandbytes\nprint(plugin.state())")
    assert ran.returncode == 0 and ran.stdout.startswith("upstream's own kernels stay: "), ran.stderr


def test_off(original):
    ran = beside(original, "import bitsandbytes, sys\nprint(plugin.state(), 'bitshard' in sys.modules)", plugin="0")
    assert ran.stdout == "off by BITSHARD_PLUGIN=0: upstream's own kernels False\n", ran.stderr


def test_the_report_asks_upstream(original):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([original, os.environ.get("PYTHONPATH", "")])}
    ran = subprocess.run(
        [warm.bare(), "-m", "bitshard", "report", "--json"], capture_output=True, text=True, timeout=180, env=env
    )
    assert ran.returncode == 1 and "plug-in" in ran.stdout and "upstream, so bitshard is not used" in ran.stdout


# ---- the command itself ----


def test_help_has_an_example_for_every_command(capsys):
    for name in main.COMMANDS:
        with pytest.raises(SystemExit) as stopped:
            main.main([name, "--help"])
        said = capsys.readouterr().out
        assert stopped.value.code == 0 and f"example:\n  bitshard {name}" in said
    assert main.main([]) == 0
    assert set(main.COMMANDS) <= set(capsys.readouterr().out.split())


@pytest.mark.parametrize("error, status, said", [
    (KeyboardInterrupt(), 130, "bitshard: interrupted\n"),
    (console.Mistake("a line\nof two"), 1, "bitshard: a line of two\n"),
    (FileNotFoundError(2, "No such file or directory", "x.json"), 1, "bitshard: x.json: No such file or directory\n"),
    (OSError(28, "No space left on device"), 1, "bitshard: No space left on device\n"),
    (ModuleNotFoundError("No torch", name="torch"), 1, "bitshard: torch is not installed: pip install torch\n"),
    (KeyError("x"), 1, "bitshard: KeyError: 'x' (BITSHARD_TRACEBACK=1 shows where)\n"),
])  # fmt: skip
def test_errors_are_one_line(error, status, said, monkeypatch, capsys):
    def fail(args):
        raise error

    from bitshard_cli import unuse

    monkeypatch.setattr(unuse, "run", fail)
    assert main.main(["unuse"]) == status
    assert capsys.readouterr().err == said


def test_wrong_arguments(capsys):
    for words in (["nothing"], ["use", "--absent"]):
        with pytest.raises(SystemExit) as stopped:
            main.main(words)
        assert stopped.value.code == 2 and "usage: bitshard" in capsys.readouterr().err
