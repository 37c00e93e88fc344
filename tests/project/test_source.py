"""Rules of the project that a reader could break without noticing: sizes of files, one table, one list of ops."""

import ast
import importlib
import pathlib
import re
import subprocess
import sys
import tarfile

import bitshard
import pytest
import torch

ROOT = pathlib.Path(__file__).parents[2]
ALL = [name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if name.startswith("bitshard::")]
FUSED = sorted(name for name in ALL if name.endswith("_fused"))  # kernels of another op on CUDA, called by it only
OPS = sorted(set(ALL) - set(FUSED))
# Modules that stand for one in a folder, under the name that users, other libraries and pickles know
FACES = """functional int8 outliers tensor int8_params state kinds autograd
transformers matmul_int8 place""".split()
# The engine's modules, lowest first: each imports only from those before it. A package stands for its modules.
LAYERS = [
    "_C",
    "ops",
    "process",
    "formats",
    "shards",
    "functions",
    "optim",
    "weights",
    "sharding",
    "sharding.together",
    "sharding.report",
    "sharding.weights",
    "sharding.checkpoints",
    "sharding.loading",
    "fsdp",
    "products",
    "nn",
    "arithmetic",
    "graphs",
    "experts.modules",
    "experts.adapted",
    "experts.lora",
    "experts.sources",
    "experts.forward",
    "experts",
    "lora",
    "huggingface",
    "convert",
    "planning",
    "calibration",
    "bitshard",
    "bnb_ops",
    *FACES,
    "__main__",
]
# The folders of csrc, lowest first: each includes and calls only those before it, and itself
FOLDERS = ["core", "cpu", "plan", "torch", "gpu", "ops", "native", "python"]
SOURCES = (".py", ".pyi", ".c", ".h", ".cu", ".cuh", ".sh", ".toml", ".yaml", ".md", ".txt", "Makefile", "run")


def files() -> list[pathlib.Path]:
    """Text files under version control, or new and not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs the git checkout: {error}")
    return [ROOT / name for name in listed if name.endswith(SOURCES) and (ROOT / name).is_file()]


def read(path: pathlib.Path) -> str:
    return path.read_text(encoding="utf-8")


def test_there_are_ops_and_files():
    assert len(OPS) == 26 and len(files()) > 30


def test_no_file_is_too_long():
    code = [path for path in files() if path.suffix in (".py", ".pyi", ".c", ".h", ".cu", ".cuh")]
    assert not {str(path): n for path in code if (n := read(path).count("\n")) > 800}


def test_tests_are_in_folders_of_their_subjects():
    """Those that docs/contributing.md lists; a file is found by its name alone."""
    rows = re.findall(r"^\| (`[\w/]+/`(?:, `\w+/`)*) \|", read(ROOT / "docs/contributing.md"), re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(\w+)/`", row)}
    paths = [path.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")]
    assert all(len(path.parts) == 2 for path in paths) and len({path.name for path in paths}) == len(paths)
    assert {path.parts[0] for path in paths} <= listed and len(paths) > 80


def test_no_second_nf4_table():
    """NF4's values are in csrc/core/formats.h and nowhere else; Python asks the C core."""
    value = re.compile(r"0\.69619|BF3239B0|0\.52507|0\.72295", re.IGNORECASE)
    code = [path for path in files() if path.suffix != ".md"]
    holders = [path.relative_to(ROOT).as_posix() for path in code if value.search(read(path))]
    assert [path for path in holders if path != "tests/project/test_source.py"] == ["csrc/core/formats.h"]


@pytest.mark.parametrize("op", OPS)
def test_every_op_is_whole(op):
    """A fake, a reference, a test, a leak test, an opcheck and a name in ops.py."""
    ops = read(ROOT / "python/bitshard/ops.py")
    assert f'register_fake("bitshard::{op}")' in ops and f"torch.ops.bitshard.{op}.default" in ops
    assert f"def {op}(" in read(ROOT / "tests/reference.py")
    tests = "".join(
        read(ROOT / f"tests/ops/test_{name}.py")
        for name in ("quantize", "optimizer_ops", "grouped", "calibration_ops", "int8_ops")
    )
    assert f"ops.{op}(" in tests and f'"{op}": lambda' in tests
    assert f'"{op}"' in read(ROOT / "tests/ops/test_compile.py")


@pytest.mark.parametrize("op", FUSED)
def test_ops_behind_another_are_tested(op):
    assert op.removesuffix("_fused") in OPS and f"ops.{op}(" in read(ROOT / "tests/ops/test_grouped.py")
    assert f"torch.ops.bitshard.{op}.default" in read(ROOT / "python/bitshard/ops.py")


def test_stubs_name_what_the_core_has():
    """_C.pyi and the extension have the same functions, each with a docstring."""
    stub = read(ROOT / "python/bitshard/_C.pyi")
    described = set(re.findall(r"^def (\w+)\(", stub, re.MULTILINE)) | set(re.findall(r"^(\w+): ", stub, re.MULTILINE))
    real = {name for name in dir(bitshard._C) if not name.startswith("_")}
    assert described == real
    assert all(getattr(bitshard._C, name).__doc__ for name in real)


def test_references_are_short():
    text = read(ROOT / "tests/reference.py")
    for body in re.split(r"^def ", text, flags=re.MULTILINE)[1:]:
        assert body.rstrip().count("\n") <= 15, body.split("(")[0]


def test_no_paths_of_a_machine():
    """No absolute path of somebody's machine, and no host name of a package registry."""
    bad = re.compile(r"/(?:home|root|Users)/\w|/work/|/tmp/b/|pypi\.org|pythonhosted|download\.pytorch|files\.py")
    found = {str(path): bad.search(read(path)).group() for path in files() if bad.search(read(path))}
    found.pop(str(pathlib.Path(__file__)), None)
    assert not found


def test_no_leftovers():
    """No notes to oneself, no commented-out Python code."""
    note = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b|^\s*# *(?:print\(|import |def |return )", re.MULTILINE)
    code = [
        path for path in files() if path.suffix in (".py", ".c", ".h", ".cu", ".cuh") and path.name != "test_source.py"
    ]
    assert not {str(path): note.search(read(path)).group() for path in code if note.search(read(path))}


def test_source_distribution_is_whole(tmp_path):
    """Everything that a build needs is in the sdist."""
    pytest.importorskip("setuptools")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path), "sdist", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (archive,) = tmp_path.glob("bitshard-*.tar.gz")
    with tarfile.open(archive) as names:
        packed = {name.partition("/")[2] for name in names.getnames()}
    needed = [path.relative_to(ROOT).as_posix() for path in files()]
    needed = [name for name in needed if name.startswith(("csrc/", "cuda/", "python/"))]
    assert len(needed) > 40 and not set(needed) - packed and {"setup.py", "pyproject.toml", "LICENSE"} <= packed


def repeated(texts: dict[str, str], length: int = 12) -> list[str]:
    """Where `length` lines stand that stand elsewhere too, blank ones and indentation apart, as "name: first line"."""
    places: dict[tuple[str, ...], list[str]] = {}
    for name, text in texts.items():
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        for i in range(len(lines) - length + 1):
            places.setdefault(tuple(lines[i : i + length]), []).append(f"{name}: {lines[i]}")
    return [place for found in places.values() if len(found) > 1 for place in found]


def test_nothing_is_written_twice():
    """No twelve lines of code outside tests."""
    code = (".py", ".c", ".h", ".cu", ".cuh")
    texts = {path.relative_to(ROOT).as_posix(): read(path) for path in files() if path.suffix in code}
    assert not repeated({name: text for name, text in texts.items() if not name.startswith("tests/")})
    lines = "\n".join(map(str, range(12)))
    assert len(repeated({"one": lines, "other": f"x\n\n  {lines}"})) == 2
    assert not repeated({"one": lines, "other": "x"})


# ---- dtypes ----

# Functions of torch whose result has a dtype that they choose, mostly torch's default, unless they are given one
MAKERS = """
arange as_tensor asarray bartlett_window blackman_window complex empty empty_permuted empty_strided eye full
hamming_window hann_window kaiser_window linspace logspace normal ones rand randn randint randperm range scalar_tensor
sparse_coo_tensor tensor tril_indices triu_indices zeros Tensor
""".split()


def without_dtype(source: str) -> list[str]:
    """Calls of MAKERS, as attributes of torch or imported from it, without `dtype=`; "line: call"."""
    tree = ast.parse(source)
    own = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "torch"
        for alias in node.names
        if alias.name in MAKERS
    }
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or any(keyword.arg == "dtype" for keyword in node.keywords):
            continue
        called = node.func
        of_torch = (
            isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == "torch"
        )
        if (of_torch and called.attr in MAKERS) or (isinstance(called, ast.Name) and called.id in own):
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize(
    "code, count",
    [
        ("torch.zeros(3)", 1),
        ("x = [torch.tensor(1.0, device=device).double()]", 1),
        ("def f():\n    return torch.linspace(0, 1, 5)", 1),
        ("from torch import Tensor, full as filled\nfilled((2,), 0.5)\nTensor(3)", 2),
        ("torch.zeros(3, dtype=torch.int64); x.new_zeros(3); torch.zeros_like(x); numpy.zeros(3); zeros(3)", 0),
        ("from torch import Tensor\nx: Tensor = torch.mm(a, b)", 0),
    ],
)
def test_a_constant_without_a_dtype_is_found(code, count):
    assert len(without_dtype(code)) == count


def test_constants_name_their_dtype():
    """No tensor of the engine, the façade or the command line has a dtype that torch.set_default_dtype chooses."""
    paths = [path for path in files() if path.suffix == ".py" and path.is_relative_to(ROOT / "python")]
    assert len(paths) > 100
    assert not {str(path): found for path in paths if (found := without_dtype(read(path)))}


# ---- imports ----


def module_files() -> dict[str, pathlib.Path]:
    """Every module of the engine by name, without "bitshard." in front; the package itself is "bitshard"."""
    found = {}
    for path in sorted((ROOT / "python/bitshard").rglob("*.py")):
        parts = path.relative_to(ROOT / "python/bitshard").with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "bitshard"] = path
    return found


def base_of(node: ast.ImportFrom, name: str, is_package: bool) -> str | None:
    """The module after "from", in full, as module `name` means it; None where it is none of the engine."""
    if node.level == 0:
        return node.module if (node.module or "").partition(".")[0] == "bitshard" else None
    package = ["bitshard", *name.split(".")] if name != "bitshard" else ["bitshard"]
    package = package if is_package else package[:-1]
    package = package[: len(package) - node.level + 1]
    return ".".join(package + ([node.module] if node.module else []))


def imports_of(source: str, name: str, is_package: bool, known: set[str]) -> set[str]:
    """Modules of the engine that module `name` names in imports anywhere in it: in functions, classes and branches too.

    A module of a package counts as that module; `with_packages` adds the package.
    """
    wanted = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            wanted |= {alias.name for alias in node.names if alias.name.partition(".")[0] == "bitshard"}
        elif isinstance(node, ast.ImportFrom) and (base := base_of(node, name, is_package)):
            inside = {alias.name: f"{base}.{alias.name}".removeprefix("bitshard.") for alias in node.names}
            wanted |= {full if full in known else base for full in inside.values()}
    return {full.removeprefix("bitshard.") for full in wanted} - {name}


def packages_of(name: str) -> set[str]:
    """A module's packages, and the module itself."""
    parts = name.split(".")
    return {".".join(parts[:n]) for n in range(1, len(parts) + 1)}


def with_packages(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The graph with packages too, which Python loads before a module of theirs; but for those that a module is in."""
    return {
        name: imported | set().union(*map(packages_of, imported)) - packages_of(name)
        for name, imported in graph.items()
    }


def import_graph() -> dict[str, set[str]]:
    """{module: modules it imports}; the C core, which imports nothing here, is "_C"."""
    paths = module_files()
    known = {*paths, "_C"}
    graph = {name: imports_of(read(path), name, path.name == "__init__.py", known) for name, path in paths.items()}
    assert all(imported <= known for imported in graph.values()), graph
    return with_packages({**graph, "_C": set()})


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """What `start` imports, directly or through others; `start` itself only on a circle."""
    found, left = set(), [start]
    while left:
        new = graph[left.pop()] - found
        found |= new
        left += new
    return found


def layer_of(name: str) -> int:
    """Place of a module in LAYERS; a module of a package stands where the package does, unless it is named itself."""
    parts = name.split(".")
    named = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    place = next((LAYERS.index(part) for part in named if part in LAYERS), None)
    assert place is not None, f"{name} has no place in LAYERS"
    return place


@pytest.mark.parametrize(
    "statement, imported",
    [
        ("import bitshard.state", {"state"}),
        ("import bitshard.state as s, torch", {"state"}),
        ("import bitshard", {"bitshard"}),
        ("from bitshard import state, version", {"state", "bitshard"}),
        ("from bitshard.state import QuantState", {"state"}),
        ("from bitshard.parts import one, two", {"parts.one", "parts"}),
        ("from . import state", {"parts"}),
        ("from .one import f", {"parts.one"}),
        ("from . import one", {"parts.one"}),
        ("from .. import state", {"state"}),
        ("from ..state import QuantState", {"state"}),
        ("def f():\n    if f:\n        from bitshard import state", {"state"}),
        ("class A:\n    def f(self):\n        from ..state import (\n            QuantState,\n        )", {"state"}),
        ("from torch import nn\nimport bitshards, bitsandbytes.state", set()),
    ],
)
def test_every_form_of_import_is_read(statement, imported):
    known = {"bitshard", "state", "parts", "parts.one", "parts.here"}
    assert imports_of(statement, "parts.here", False, known) == imported


def test_relative_imports_of_packages():
    known = {"bitshard", "state", "parts", "parts.one"}
    assert imports_of("from .one import f\nfrom ..state import g", "parts", True, known) == {"parts.one", "state"}
    assert imports_of("from . import state\nfrom .parts import one", "bitshard", True, known) == {"state", "parts.one"}
    assert imports_of("from . import state\nfrom .parts import g", "top", False, known) == {"state", "parts"}


def test_a_circle_through_a_package_is_found():
    """One module imports another's neighbour, and with it the package, which imports the first module."""
    graph = {"low": {"top"}, "top": {"parts.one"}, "parts": {"low", "parts.one"}, "parts.one": set()}
    assert not circles_of(graph) and circles_of(with_packages(graph)) == [["low", "parts", "top"]]
    assert with_packages({"parts.one": {"parts.two"}, "parts": {"parts.two"}}) == {
        "parts.one": {"parts.two"},
        "parts": {"parts.two"},
    }


def test_no_modules_import_each_other():
    """No circle of any length, imports inside functions included."""
    assert not circles_of(import_graph())


def test_imports_go_one_way():
    """A module imports only what stands before it in LAYERS; modules of one package may import each other."""
    graph = import_graph()
    upwards = [f"{name} -> {other}" for name in graph for other in graph[name] if layer_of(other) > layer_of(name)]
    assert not upwards


@pytest.mark.parametrize("name", FACES)
def test_public_names_are_the_modules_themselves(name):
    """What is set or replaced in one is so in the other, underscored names included."""
    face = importlib.import_module(f"bitshard.{name}")
    assert re.fullmatch(rf"bitshard\.\w+\.{name}", face.__name__) and sys.modules[face.__name__] is face


def test_the_engine_does_not_know_the_command_line():
    """Only `python -m bitshard` reaches up to it, and the command line imports neither torch nor the engine at once."""
    engine = {path for path in (ROOT / "python" / "bitshard").rglob("*.py") if "bitshard_cli" in read(path)}
    assert {path.name for path in engine} == {"__main__.py"}
    heavy = re.compile(r"^(?:import|from) (?!bitshard_cli)(torch|numpy|transformers|peft|safetensors|bitshard)", re.M)
    assert not [path.name for path in (ROOT / "python" / "bitshard_cli").glob("*.py") if heavy.search(read(path))]


def test_layers_name_what_there_is():
    names = {*module_files(), "_C"}
    assert len(set(LAYERS)) == len(LAYERS) and set(LAYERS) <= names


# ---- the C core ----

FUNCTION = re.compile(
    r"^(?!static|typedef|extern|return|else)[A-Za-z_][\w *]*?[ *](bsh_\w+)\([^;{}]*\) *\{", re.MULTILINE
)
VARIABLE = re.compile(
    r"^(?!static|typedef|extern|return)[A-Za-z_][\w *]*?[ *](bsh_\w+)(?:\[\w*\])* *[=;]", re.MULTILINE
)


def code_of(path: pathlib.Path) -> str:
    """C without comments and strings."""
    return re.sub(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', " ", read(path), flags=re.DOTALL)


def call_graph(sources: list[tuple[str, str]]) -> dict[str, set[str]]:
    """{unit: units whose functions and variables it names} of (unit, code) pairs."""
    owner = {name: unit for unit, code in sources for name in FUNCTION.findall(code) + VARIABLE.findall(code)}
    graph = {unit: set() for unit, _ in sources}
    for unit, code in sources:
        graph[unit] |= {owner[name] for name in re.findall(r"\bbsh_\w+", code) if name in owner} - {unit}
    return graph


def core_graph() -> dict[str, set[str]]:
    """{folder/file: those whose functions and variables it names}; of a build with kernels."""
    folder = ROOT / "csrc"
    files = sorted(path for path in folder.rglob("*.c") if path.name != "driver_absent.c")
    return call_graph([(path.relative_to(folder).with_suffix("").as_posix(), code_of(path)) for path in files])


def include_graph() -> dict[str, set[str]]:
    """{folder/file: headers of csrc that it includes}, of headers and sources."""
    folder = ROOT / "csrc"
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.[ch]")}
    lines = {name: re.findall(r'^#include "([^"]+)"', read(path), re.MULTILINE) for name, path in paths.items()}
    unknown = [line for found in lines.values() for line in found if line not in paths and not line.startswith("cuda/")]
    assert not unknown, "an include names its folder"
    return {name: {line for line in found if line in paths} for name, found in lines.items()}


def upwards(graph: dict[str, set[str]]) -> list[str]:
    """Arrows from a folder of csrc to one above it."""
    place = {name: FOLDERS.index(name.partition("/")[0]) for name in {*graph, *set().union(*graph.values())}}
    return sorted(f"{name} -> {other}" for name in graph for other in graph[name] if place[other] > place[name])


def circles_of(graph: dict[str, set[str]]) -> list[list[str]]:
    reached = {name: reachable(graph, name) for name in graph}
    circles = {frozenset(other for other in reached[name] if name in reached[other]) for name in graph}
    return sorted(sorted(circle) for circle in circles if circle)


def test_a_circle_of_c_files_is_found():
    low = "const int bsh_table[2] = {1, 2};\nint bsh_low(\n    int a) {\n  return a;\n}\n"
    high = "int bsh_high(void) { return bsh_low(1) + bsh_table[0]; }\nstatic int bsh_own(void) { return 0; }\n"
    assert call_graph([("low", low), ("high", high)]) == {"low": set(), "high": {"low"}}
    back = "int bsh_declared(void);\nvoid *bsh_back(void) { return bsh_high; }\n"
    assert circles_of(call_graph([("low", low + back), ("high", high)])) == [["high", "low"]]
    assert not circles_of(call_graph([("low", low), ("high", high), ("top", back)]))


def test_no_c_files_call_each_other():
    graph = core_graph()
    assert len(graph) > 40 and "gpu/launch" in graph["gpu/fused"]
    assert not circles_of(graph)


def test_folders_of_the_c_core_go_one_way():
    """core <- plan <- gpu <- ops <- python: by includes and by calls; and a plan, which is arithmetic, calls nobody."""
    calls, includes = core_graph(), include_graph()
    assert not upwards(calls) and not upwards(includes)
    assert {name.partition("/")[0] for name in includes} == set(FOLDERS)
    assert not [path for path in (ROOT / "csrc").glob("*.[ch]")]


def test_kernels_of_the_plan_do_not_know_each_other():
    """plan/choose.c alone knows all, each once; what several share is no kernel."""
    calls = core_graph()
    texts = {path.stem: read(path) for path in (ROOT / "csrc/plan").glob("*.c")}
    kernels = {
        name: re.findall(r"^const bsh_kernel (bsh_kernel_\w+) = ", text, re.MULTILINE) for name, text in texts.items()
    }
    files = {f"plan/{name}" for name, found in kernels.items() if found}
    rows = re.findall(r"&(bsh_kernel_\w+)", texts["choose"])
    assert sorted(rows) == sorted(one for found in kernels.values() for one in found) and len(rows) > 12
    shared = {"plan/cards", "plan/dequantize", "plan/gemv", "plan/int8", "plan/sm80"}
    for name in files:
        others = set(rows) - set(kernels[name.partition("/")[2]])
        assert not calls[name] - shared - {"core/status"}, name
        assert not others & set(re.findall(r"bsh_kernel_\w+", texts[name.partition("/")[2]])), name


@pytest.mark.parametrize(
    "low, high", [("core/packed", "ops/ops"), ("plan/choose", "gpu/launch"), ("gpu/wide", "torch/gemm")]
)
def test_an_arrow_turned_around_is_found(low, high):
    calls = core_graph()
    calls["torch/gemm"] |= {"gpu/wide"} if high == "torch/gemm" else set()
    calls[low] |= {high} if high != "torch/gemm" else set()
    assert len(upwards(calls)) == 1
    includes = include_graph()
    includes[f"{low}.c"] |= {"python/direct.h"}
    assert upwards(includes) == [f"{low}.c -> python/direct.h"]


def test_the_list_of_c_sources_is_whole():
    """csrc/sources.txt, from which setup.py and the C tests build, has every source once, by folders."""
    lines = [line.split() for line in read(ROOT / "csrc/sources.txt").splitlines()]
    listed = [line[0] for line in lines if line and line[0].endswith(".c")]
    assert sorted(listed) == sorted(path.relative_to(ROOT / "csrc").as_posix() for path in (ROOT / "csrc").rglob("*.c"))
    assert list(dict.fromkeys(name.partition("/")[0] for name in listed)) == FOLDERS


# The folders of cuda, lowest first: each includes only those before it, and itself.
CUDA_FOLDERS = "sizes numerics ptx operands schedulers loaders epilogues gemv gemm elementwise".split()


def cuda_includes() -> dict[str, set[str]]:
    """{file of cuda: what it includes}, as #include says it."""
    files = {f"cuda/{path.relative_to(ROOT / 'cuda').as_posix()}": path for path in (ROOT / "cuda").rglob("*.*u*")}
    files |= {f"cuda/{path.relative_to(ROOT / 'cuda').as_posix()}": path for path in (ROOT / "cuda").rglob("*.h")}
    return {name: set(re.findall(r'^#include "([^"]+)"', read(path), re.MULTILINE)) for name, path in files.items()}


def test_no_headers_include_each_other():
    """csrc by folders; those of cuda as "cuda/sizes/fused.h" from everywhere."""
    headers = {path.relative_to(ROOT / "csrc").as_posix(): path for path in (ROOT / "csrc").rglob("*.h")}
    graph = {name: set(re.findall(r'^#include "([^"]+)"', read(path), re.MULTILINE)) for name, path in headers.items()}
    graph |= cuda_includes()
    assert len(graph) > 80 and "core/kernels.h" in graph["cuda/sizes/fused.h"]
    assert set().union(*graph.values()) <= set(graph) and not circles_of(graph)


def test_folders_of_cuda_go_one_way():
    """And none includes more of csrc than its lowest headers: nvcc runs again when one of those changes."""
    includes = cuda_includes()
    assert {name.split("/")[1] for name in includes} == set(CUDA_FOLDERS)
    places = {folder: i for i, folder in enumerate(CUDA_FOLDERS)}
    for name, found in includes.items():
        for other in found:
            parts = other.split("/")
            assert parts[0] in ("cuda", "core"), f"{name} includes {other}"
            assert parts[0] == "core" or places[parts[1]] <= places[name.split("/")[1]], f"{name} includes {other}"


def test_the_list_of_cuda_sources_is_whole():
    """cuda/sources.txt, by which setup.py compiles: every source once; wgmma is machine code of sm_90a alone, and what
    later GPUs have faster of sm_75."""
    lines = [line.split() for line in read(ROOT / "cuda/sources.txt").splitlines()]
    listed = {line[0]: line[1:] for line in lines if line and line[0] != "#"}
    there = {path.relative_to(ROOT / "cuda").as_posix(): path for path in (ROOT / "cuda").rglob("*.cu")}
    assert sorted(listed) == sorted(there) and len(listed) == sum(bool(line) and line[0] != "#" for line in lines)
    stems = re.findall(
        r"X\((\w+)\)", read(ROOT / "csrc/core/cuda_kernel.h").split("BSH_FATBINS(X)")[1].split("#define")[0]
    )
    assert sorted(stems) == sorted(path.stem for path in there.values())
    for name, only in listed.items():
        own = ["90a"] if "sm90" in name else ["75", "compute_75"] if "sm75" in name else []
        assert only == own, name


def messages() -> str:
    """All string constants of the package, the parts of an f-string or of neighbours joined."""
    found = []
    for path in sorted((ROOT / "python" / "bitshard").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_documented_errors_are_raised():
    """Every phrase in the first column of docs/errors.md stands in the source."""
    rows = [line for line in (ROOT / "docs" / "errors.md").read_text().splitlines() if line.startswith("| `")]
    phrases = [phrase for row in rows for phrase in re.findall("`([^`]+)`", row.split(" | ")[0])]
    known = messages()
    assert len(phrases) > 15 and not [phrase for phrase in phrases if phrase not in known]
