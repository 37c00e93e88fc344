"""List the names of the original bitsandbytes: modules, signatures, base classes, operator schemas.

    python tests/original/upstream_names.py           # writes upstream_names.json beside it, on a machine without a GPU

A signature is names and defaults of parameters. A module's names are what it defines, and what it imports from its own
package; those that start with an underscore count where others read them. tests/upstream/test_facade_names.py holds the
façade to the list.
"""

import ast
import importlib
import importlib.util
import inspect
import json
import sys
from pathlib import Path

FILE = Path(__file__).with_suffix(".json")
PACKAGE = "bitsandbytes"
# Underscore names that other projects, or plug-ins for other devices, import.
READ_BY_OTHERS = {
    "bitsandbytes.backends.cuda.ops": {"_dequantize_4bit_impl"},
    "bitsandbytes.backends.utils": {"_get_4bit_code"},
    "bitsandbytes.functional": {
        "_convert_weight_packed_for_cpu",
        "_convert_weight_packed_for_cpu_inverse",
        "_cuda_device_of",
        "_get_tensor_stream",
    },
    "bitsandbytes.nn.parametrize": {
        "_disable_parametrization_cache",
        "_enable_parametrization_cache",
        "_parametrized_state_dict_post_hook",
        "_register_parametrization_hooks",
    },
}
SIMPLE = (str, int, float, bool, type(None))


def modules(folder: Path) -> dict[str, Path]:
    """Dotted name -> file of every module below the package's folder."""
    names = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        if parts[-1] != "__main__":
            names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def own_names(module: str, path: Path) -> set[str]:
    """Names that a module binds at its top level, without imports from other packages."""
    names, nodes = set(), list(ast.parse(path.read_text(encoding="utf-8")).body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom) and (node.level or node.module.split(".")[0] == PACKAGE):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {item.id for target in targets for item in ast.walk(target) if isinstance(item, ast.Name)}
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            nodes += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
            nodes += [statement for handler in getattr(node, "handlers", ()) for statement in handler.body]
    return {name for name in names if name[0] != "_" or name in READ_BY_OTHERS.get(module, ())}


def signature(function) -> str | None:
    """Parameters and defaults, without annotations; None where Python knows none."""
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in found.parameters.values()]
    return str(found.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def describe_class(name: str, cls: type) -> dict[str, str | None]:
    """The class itself, its bases by name, and its public members."""
    bases = [base.__name__ for base in cls.__mro__[1:] if base.__module__.split(".")[0] in (PACKAGE, "torch")]
    found = {name: signature(cls), f"{name}.__mro__": " ".join(base for base in bases if not base.startswith("_"))}
    for member, value in vars(cls).items():
        if not member.startswith("_"):
            value = value.__func__ if isinstance(value, classmethod) else value
            found[f"{name}.{member}"] = signature(value) if callable(value) else None
    return found


def plain(value) -> bool:
    if isinstance(value, (tuple, list, set, frozenset)):
        return all(plain(item) for item in value)
    if isinstance(value, dict):
        return all(plain(item) for pair in value.items() for item in pair)
    return isinstance(value, SIMPLE)


def text(value) -> str:
    return repr(sorted(value)) if isinstance(value, (set, frozenset)) else repr(value)


def describe_module(name: str, path: Path) -> tuple[dict[str, str | None], dict[str, str]]:
    """(name -> signature or None, name -> text of a constant); names alone where an import wants a device."""
    names = sorted(own_names(name, path))
    try:
        module = importlib.import_module(name)
    except Exception:
        return dict.fromkeys(names), {}
    found, values = {}, {}
    for item in names:
        if not hasattr(module, item):
            found[item] = None
        elif inspect.isclass(value := getattr(module, item)):
            found |= describe_class(item, value) if value.__module__ == name else {item: None}
        else:
            found[item] = signature(value) if callable(value) else None
            if plain(value):
                values[f"{name}.{item}"] = text(value)
    return found, values


def schemas() -> list[str]:
    import torch

    found = [str(item) for item in torch._C._jit_get_all_schemas() if item.name.startswith(PACKAGE + "::")]
    return sorted(found)


def describe() -> dict:
    """The package that an import finds: "modules" {module: {name: signature}}, "loaded" (modules that importing the
    package imports), "ops" [schema] and "values" {name: text of a constant}."""
    spec = importlib.util.find_spec(PACKAGE)
    importlib.import_module(PACKAGE)
    found = {"modules": {}, "ops": [], "values": {}}
    found["loaded"] = sorted(name for name in sys.modules if name.split(".")[0] == PACKAGE)
    for name, path in modules(Path(spec.submodule_search_locations[0])).items():
        found["modules"][name], values = describe_module(name, path)
        found["values"] |= values
    found["ops"] = schemas()
    return found


if __name__ == "__main__":
    if "--describe" in sys.argv:
        print(json.dumps(describe()))
    else:
        sys.path.append(str(FILE.parents[1]))
        from helpers import upstream

        found = json.loads(upstream.run(Path(__file__), "--describe").splitlines()[-1])
        del found["values"]  # facts of the machine
        FILE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
