"""The record of benchmarks/writers.py as tables: families by result, and wrappers by way."""

import re
from collections import defaultdict

KINDS = {"ok": "right", "raises": "raises", "WRONG": "WRONG", "NAMES": "other names"}
WRAPPED = "LlamaForCausalLM"  # that all wrappers are tried on
GROUPS = (
    ("as it is", ("save", "save (dense)", "quantize")),
    ("dense", ("save dtype", "dense_weights", "dense_weights (dense)")),
    ("merged, dense", ("save merge dtype", "save merge (dense)")),
    ("merged, 4-bit", ("save merge",)),
    ("bitshard merge", ("merge (dense)", "merge", "merge 4bit")),
)


def rows(record):
    """(class, tied, wrapper, way, row) of each that says something."""
    for key, row in sorted(record.items()):
        name, tied, wrapper, way = key.split(" | ")
        yield name, tied, wrapper, way, row


def plain(words):
    """The words of a result without names, numbers and paths, so that equal ones are equal."""
    words = re.sub(r"\[[^\]]*\]|\{[^}]*\}|'[^']*'", "…", words)
    words = re.sub(r"\b[\w.]*\.(weight|bias|[a-z_]+_proj)\b", "…", words)
    words = re.sub(r"\d+(\.\d+)?(e[+-]\d+)?", "N", words)
    return re.sub(r"\s+", " ", words)[:110].replace("|", "/")


def joined(names):
    """Names in one cell, cut off where there are many."""
    names = sorted(names)
    return ", ".join(names)


# ---- families ----


def made(record):
    """{class: row of the class itself}, and {class: {(wrapper, way): row}} of those that were tried."""
    bases, tries = {}, defaultdict(dict)
    for name, tied, wrapper, way, row in rows(record):
        if tied:
            continue
        if way:
            tries[name][wrapper, way] = row
        else:
            bases[name] = row
    return bases, tries


def families(record, sweep):
    """[(what holds, how many tries, classes)]: classes with the same results, the good ones first."""
    bases, tries = made(record)
    found = defaultdict(list)
    for name, row in bases.items():
        if row["kind"] == "left out":
            continue
        own = {one: tries[name][one] for one in sweep if one in tries[name]}
        wrong = {
            (row["kind"], wrapper, way, plain(row["words"]))
            for (wrapper, way), row in own.items()
            if row["kind"] in ("raises", "WRONG", "NAMES")
        }
        found[frozenset(wrong)].append(name)
    return sorted(found.items(), key=lambda item: (len(item[0]), -len(item[1])))


def family_table(record, sweep):
    """Families with the same results in one row each."""
    lines = ["| classes | what is not right | |", "|---|---|---|"]
    for wrong, names in families(record, sweep):
        said = defaultdict(list)
        for kind, wrapper, way, words in sorted(wrong):
            said[kind, words].append(f"{way} of {wrapper}" if wrapper else way)
        text = "; ".join(f"{KINDS[kind]}: {', '.join(ways)} ({words})" for (kind, words), ways in said.items())
        lines.append(f"| {len(names)} | {text or 'all right'} | {joined(names)} |")
    return "\n".join(lines)


def left_out(record):
    """Classes that were not tried, by reason."""
    bases, _ = made(record)
    found = defaultdict(list)
    for name, row in bases.items():
        if row["kind"] == "left out":
            found[plain(row["words"])].append(name)
    lines = ["| classes | reason |", "|---|---|"]
    lines += [f"| {joined(names)} | {why} |" for why, names in sorted(found.items(), key=lambda item: -len(item[1]))]
    return "\n".join(lines)


def tensors_only(record):
    """Classes without a forward: their tensors were compared."""
    bases, _ = made(record)
    return sorted(name for name, row in bases.items() if "tensors compared only" in row.get("words", ""))


# ---- wrappers ----


def cell(found):
    """What a group of ways gave: one word where all agree."""
    kinds = {row["kind"] for row in found}
    if not kinds - {"left out"}:
        return "—"
    return " / ".join(KINDS[kind] for kind in KINDS if kind in kinds)


def wrapper_table(record, wrappers, tied):
    """A row for each wrapper, of the Llama that is tied or not."""
    tries = defaultdict(dict)
    for name, tied_, wrapper, way, row in rows(record):
        if name == WRAPPED and tied_ == tied and way:
            tries[wrapper][way] = row
    lines = [f"| wrapper | {' | '.join(name for name, _ in GROUPS)} | words |", "|---|" + "---|" * (len(GROUPS) + 1)]
    for wrapper in wrappers:
        own = tries.get(wrapper, {})
        if not own:
            continue
        cells = [cell([own[way] for way in ways if way in own]) for _, ways in GROUPS]
        said = {plain(row["words"]) for row in own.values() if row["kind"] in ("raises", "WRONG", "NAMES")}
        if all(row["kind"] == "left out" for row in own.values()):
            said = {plain(row["words"]) for row in own.values()}
        text = "; ".join(sorted(word[:90] for word in said))[:180]
        lines.append(f"| {wrapper or 'no adapter'} | {' | '.join(cells)} | {text} |")
    return "\n".join(lines)
