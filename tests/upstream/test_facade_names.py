"""Every name of bitsandbytes 0.50.2 is at its place in the façade, by the list of tests/original/."""

import fnmatch
import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import bitsandbytes as bnb
import pytest
import torch
from bitsandbytes import _absent
from bitshard import _C
from helpers import upstream
from original import upstream_names

LIST = json.loads(upstream_names.FILE.read_text(encoding="utf-8"))
CUDA_BUILD = hasattr(torch._C, "_cuda_getCurrentRawStream")

# What is not as upstream has it, and why.
NO_MODULE = {
    "bitsandbytes.backends.triton.*": "Triton kernels, which upstream imports on Intel GPUs only, and with triton",
}
NO_NAME = {
    "bitsandbytes.[hmx]p[us]_ops": "upstream binds these only where there is such a device",
    "bitsandbytes.cuda_ops": "as upstream, with a GPU only: test_cuda_names",
    "bitsandbytes.backends.cuda.ops.str2optimizer*": "native functions of the optimizers",
    "bitsandbytes.backends.xpu.ops.triton_ops": "upstream binds it only with triton",
    "bitsandbytes.cextension.error_msg": "upstream binds it only where its library cannot be loaded",
}
OTHER_SIGNATURE = {
    "bitsandbytes.autograd._functions.MatMul4Bit.*": "`apply` takes the same five; the methods are autograd's to call",
    "bitsandbytes.autograd._functions.MatMul8bitFp.forward": "its default is a class, and that is the engine's",
    "bitsandbytes._ops.register_fake": "torch's own function, as the installed torch has it",
    "bitsandbytes.cextension.*NativeLibrary*": "the C core is part of Python: no handle of ctypes to construct with",
}
OTHER_VALUE = {
    "bitsandbytes.supported_torch_devices": "bitshard runs on CPU and CUDA",
    "bitsandbytes.diagnostics.main.bnb_version": "the same release, and bitshard's after it",
}


def excused(name: str, exceptions: dict[str, str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in exceptions)


def is_absent(item) -> bool:
    """Whether an item only refuses: it may be called with anything."""
    if inspect.isclass(item):
        return issubclass(item, _absent.Absent)
    return getattr(item, "__code__", None) is _absent.absent_function("", "").__code__


def importable(module: str) -> bool:
    return module != "bitsandbytes.backends.cuda.ops" or CUDA_BUILD


MODULES = [name for name in LIST["modules"] if not excused(name, NO_MODULE) and importable(name)]


def find(module: str, name: str):
    """The item, or the class that refuses on its behalf."""
    item = importlib.import_module(module)
    for part in name.split("."):
        if is_absent(item):
            return item
        item = getattr(item, part)
    return item


@pytest.fixture(scope="module")
def original():
    """What the original says of itself on this machine, in a process of its own."""
    upstream.folder_or_skip()
    return json.loads(upstream.run(upstream_names.__file__, "--describe").splitlines()[-1])


@pytest.mark.parametrize("module", MODULES)
def test_names_and_signatures(module):
    """The same parameters in the same order with the same defaults, and the same base classes."""
    for name, expected in LIST["modules"][module].items():
        path = f"{module}.{name}"
        if excused(path, NO_NAME):
            continue
        if name.endswith(".__mro__"):
            bases = {base.__name__ for base in find(module, name.removesuffix(".__mro__")).__mro__}
            assert set(expected.split()) <= bases or excused(path, OTHER_SIGNATURE), (path, expected, bases)
            continue
        item = find(module, name)
        if expected is None or is_absent(item) or excused(path, OTHER_SIGNATURE):
            continue
        assert upstream_names.signature(getattr(item, "__func__", item)) == expected, path


def test_modules_without_the_device():
    """`backends.cuda.ops` fails to import as upstream's does where torch was built without CUDA; the others import."""
    assert {name for name in LIST["modules"] if not excused(name, NO_MODULE)} - set(MODULES) == (
        set() if CUDA_BUILD else {"bitsandbytes.backends.cuda.ops"}
    )
    if not CUDA_BUILD:
        with pytest.raises(AttributeError, match="_cuda_getCurrentRawStream"):
            importlib.import_module("bitsandbytes.backends.cuda.ops")
    for module in ("triton", "hpu", "mps", "xpu"):
        assert isinstance(importlib.import_module(f"bitsandbytes.backends.{module}"), ModuleType)


def test_import_loads_the_same_modules():
    """`import bitsandbytes` alone binds every submodule that upstream's binds."""
    code = "import bitsandbytes, sys; print(*(n for n in sys.modules if n.split('.')[0] == 'bitsandbytes'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(LIST["loaded"]) <= set(done.stdout.split())


def test_op_schemas():
    """Every operator with the same schema, and no other."""
    assert upstream_names.schemas() == LIST["ops"] and len(LIST["ops"]) > 15


def test_list_is_the_originals(original):
    """The committed list against the installed original; a GPU adds names, and takes none away."""
    assert original["ops"] == LIST["ops"] and set(LIST["loaded"]) <= set(original["loaded"])
    assert set(original["modules"]) == set(LIST["modules"])
    for module, names in LIST["modules"].items():
        found = original["modules"][module]
        assert names.keys() <= found.keys(), module
        other = {name: found[name] for name in names if names[name] not in (None, found[name])}
        assert not {name for name in other if not excused(f"{module}.{name}", OTHER_SIGNATURE)}, (module, other)


def test_constants_are_the_originals(original):
    """Numbers, texts and tables, facts of this machine among them."""
    compared = 0
    for path, expected in original["values"].items():
        module, _, name = path.rpartition(".")
        if excused(path, NO_NAME | NO_MODULE | OTHER_VALUE):
            continue
        assert upstream_names.text(getattr(importlib.import_module(module), name)) == expected, path
        compared += 1
    assert compared > 25


def test_tables_are_the_engines():
    """No formats, block sizes or dtypes of values are listed in the façade: the engine says them."""
    table = re.compile(r'"nf4"[:,]|\b128, 256\b|\bfloat16, torch\.bfloat16\b')
    files = sorted(Path(bnb.__file__).parent.rglob("*.py"))
    assert len(files) > 30 and not {str(path): found for path in files if (found := table.findall(path.read_text()))}


def test_a_name_of_earlier_releases():
    """0.50.2 has no such name; unsloth still reads it."""
    assert bnb.cextension.ROCM_WARP_SIZE_64 is False


def test_cuda_specs():
    """torch's CUDA, as upstream reports it."""
    specs, version = bnb.cuda_specs.get_cuda_specs(), torch.version.cuda
    assert bnb.cuda_specs.get_cuda_version_tuple() == (tuple(map(int, version.split(".")[:2])) if version else None)
    assert bnb.cuda_specs.get_rocm_gpu_arch() == bnb.cextension.ROCM_GPU_ARCH == "unknown"
    if not torch.cuda.is_available():
        assert specs is None and bnb.cuda_specs.get_compute_capabilities() == []
        return
    assert specs.highest_compute_capability == max(bnb.cuda_specs.get_compute_capabilities())
    assert specs.cuda_version_string == bnb.cuda_specs.get_cuda_version_string() == "".join(version.split(".")[:2])


@pytest.mark.parametrize(("version", "text"), [("12.4", (12, 4)), ("13.0", (13, 0)), (None, None)])
def test_cuda_version(monkeypatch, version, text):
    monkeypatch.setattr(torch.version, "cuda", version)
    assert bnb.cuda_specs.get_cuda_version_tuple() == text
    assert bnb.cuda_specs.get_cuda_version_string() == (version and version.replace(".", ""))


@pytest.mark.parametrize("built", [False, True])
def test_library_paths(monkeypatch, built):
    """One C core for every version of CUDA; where it has no kernels the path is of no file."""
    ext = bnb.cextension
    monkeypatch.setattr(_C, "cuda_state", lambda: {"built": built})
    monkeypatch.setattr(torch.version, "cuda", "12.4")
    specs = bnb.cuda_specs.CUDASpecs((9, 0), "124", (12, 4))
    assert specs.has_imma and not bnb.cuda_specs.CUDASpecs((7, 0), "124", (12, 4)).has_imma
    path = ext.get_cuda_bnb_library_path(specs)
    assert path.exists() == built and (built or path.name == "libbitsandbytes_cuda124.so")
    assert ext.get_available_cuda_binary_versions() == (["12.4"] if built else [])
    assert not ext.get_xpu_bnb_library_path().exists()
    monkeypatch.setenv("BNB_CUDA_VERSION", "118")
    assert ext.get_cuda_bnb_library_path(specs) == path
    monkeypatch.setenv("BNB_CUDA_VERSION", "11.8")
    with pytest.raises(RuntimeError, match=r"BNB_CUDA_VERSION='11\.8': expected digits only"):
        ext.get_cuda_bnb_library_path(specs)
    assert ext.parse_cuda_version("118") == "11.8" and ext.parse_cuda_version("12.4") == "12.4"


def test_native_library_classes():
    """Callers ask by isinstance whether the library is there, and whether it is one for CUDA."""
    ext = bnb.cextension
    assert isinstance(ext.get_native_library(), ext.BNBNativeLibrary) and isinstance(ext.lib, ext.BNBNativeLibrary)
    assert bnb.functional.lib is bnb.backends.cpu.ops.lib is ext.lib
    assert not isinstance(ext.lib, (ext.ErrorHandlerMockBNBNativeLibrary, ext.XpuBNBNativeLibrary))
    assert isinstance(ext.lib, ext.CudaBNBNativeLibrary) == torch.cuda.is_available()


def test_functional_helpers():
    a, meta = torch.zeros(2), torch.zeros(2, device="meta")
    assert bnb.functional.is_on_gpu([a, None, a]) is True
    with pytest.raises(RuntimeError, match="same device, got .*cpu.*meta"):
        bnb.functional.is_on_gpu([a, meta])
    meta.is_paged = True
    assert bnb.functional.is_on_gpu([a, meta]) is True
    with bnb.functional._cuda_device_of(a):
        pass
    for quant_type, code in bnb.backends.utils.CODE.items():
        assert torch.equal(bnb.backends.utils._get_4bit_code(quant_type, torch.device("cpu")), code)
    assert bnb.utils.execute_and_return(f"{sys.executable} -c \"print(' a b ')\"") == ("a b", "")


def test_find_cudart(monkeypatch, tmp_path):
    """Files, not links, in folders that the environment names; preferred variables first."""
    cuda = importlib.import_module("bitsandbytes.diagnostics.cuda")
    for name in list(cuda.os.environ):
        if cuda.is_relevant_candidate_env_var(name, cuda.os.environ[name]):
            monkeypatch.delenv(name)
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "libcudart.so.12").touch()
    (tmp_path / "first" / "libcudart.so").symlink_to("libcudart.so.12")
    monkeypatch.setenv("A_FOLDER", f"{tmp_path}/second:word:{tmp_path}/nowhere")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}/first")
    monkeypatch.setenv("MY_CONDA_THING", f"{tmp_path}/first")
    found = [path.relative_to(tmp_path).as_posix() for path in cuda.find_cudart_libraries()]
    assert found == ["first/libcudart.so.12", "second/libcudart.so.12"]


def test_diagnostics(capsys):
    main = importlib.import_module("bitsandbytes.diagnostics.main")
    main.show_environment()
    main.print_header("title", 20)
    main.print_dedented("\n    one\n      two\n")
    main.print_diagnostics(bnb.cuda_specs.CUDASpecs((9, 0), "124", (12, 4)))
    importlib.import_module("bitsandbytes.diagnostics.cuda").print_runtime_diagnostics()
    out = capsys.readouterr().out
    assert f"PyTorch: {torch.__version__}" in out and f"bitshard: {main.get_package_version('bitshard')}" in out
    assert "====== title =======\none\n  two\n" in out and "Highest Compute Capability: (9, 0)" in out
    assert main.get_package_version("no-such-distribution") == "not found"
    if not torch.cuda.is_available():
        with pytest.raises((AssertionError, RuntimeError), match="CUDA|NVIDIA"):
            main.sanity_check()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_names():
    ops = importlib.import_module("bitsandbytes.backends.cuda.ops")
    assert bnb.cuda_ops is ops
    weight = torch.randn(8, 64, device="cuda")
    packed, state = bnb.functional.quantize_4bit(weight)
    out = torch.empty_like(weight)
    ops._dequantize_4bit_impl(packed, state.absmax, 64, "fp4", torch.float32, out)
    assert torch.equal(out, bnb.functional.dequantize_4bit(packed, state))
    assert bnb.functional._get_tensor_stream(weight).value in (None, torch.cuda.current_stream().cuda_stream)
    importlib.import_module("bitsandbytes.diagnostics.main").sanity_check()
