"""The record of benchmarks/writers.py as tables: families by result, wrappers by way, and the page docs/models.md."""

import re
from collections import defaultdict

KINDS = {"ok": "right", "raises": "raises", "WRONG": "WRONG", "NAMES": "other names"}
BAD = ("raises", "WRONG", "NAMES")
WRAPPED = "LlamaForCausalLM"  # that all wrappers are tried on
GROUPS = {
    "save_pretrained": ("save", "save (dense)", "save dtype"),
    "merge=True, dense": ("save merge dtype", "save merge (dense)", "dense_weights", "dense_weights (dense)"),
    "merge=True, 4-bit": ("save merge",),
    "bitshard merge": ("merge (dense)", "merge", "merge 4bit"),
}
CUT = 110  # characters of an error in a cell


def plain(words):
    """The words of a result without names, numbers and paths, so that equal ones are equal."""
    words = re.sub(r"^(ValueError|NotImplementedError|RuntimeError|LookupError): ", "", words)
    words = re.sub(r"\S*adapter_config\.json: ", "", words)
    words = re.sub(r"(tensors of dense do not fit|is written|fit no module of the base):.*", r"\1", words)
    words = re.sub(r"\[[^\]]*\]|\{[^}]*\}", "…", words)
    words = re.sub(r"\b\w+For[A-Z]\w+|\b\w+(\.+\w+){2,}", "…", words)
    words = re.sub(r"\b\d[\d.,]*(e[+-]\d+)?\b", "N", words)
    return re.sub(r"\s+", " ", words).replace("|", "/").replace("*", "")


def shortened(words):
    """Cut off at a word."""
    return words if len(words) <= CUT else words[:CUT].rpartition(" ")[0] + " …"


class Record:
    """All rows, by class.

    Attributes:
        classes: class -> its own row, of those with the tie that their config has.
        tries: class -> {(wrapper, way): row}.
        tied: the same of WRAPPED by "tied" and "not tied".
    """

    def __init__(self, rows):
        self.classes, self.tries = {}, defaultdict(dict)
        self.tied = defaultdict(lambda: defaultdict(dict))
        for key, row in sorted(rows.items()):
            name, tied, wrapper, way = key.split(" | ")
            if tied and way and name == WRAPPED:
                self.tied[tied][wrapper][way] = row
            elif not tied and way:
                self.tries[name][wrapper, way] = row
            elif not tied:
                self.classes[name] = row

    def made(self):
        """Classes that a tiny model was made of."""
        return [name for name, row in self.classes.items() if row["kind"] != "left out"]

    def bad(self, name, sweep):
        """{(kind, words): [what was tried]} of what is not right."""
        found = defaultdict(list)
        for (wrapper, way), row in self.tries[name].items():
            if row["kind"] in BAD and (wrapper, way) in sweep:
                words = plain(row["words"]) if row["kind"] == "raises" else ""
                found[row["kind"], words].append(f"{way}, {wrapper}" if wrapper else way)
        return found

    def tensors_only(self):
        """Classes without a forward here: their tensors were compared."""
        return [name for name in self.made() if "tensors compared only" in self.classes[name]["words"]]


def heads(record, sweep):
    """A row for each kind of head."""
    counts = defaultdict(lambda: [0, 0, 0, 0, 0])
    for name, row in record.classes.items():
        kinds = {kind for kind, _ in record.bad(name, sweep)}
        one = counts[row["head"]]
        one[0] += 1
        if row["kind"] == "left out":
            one[4] += 1
        else:
            one[1] += not kinds
            one[2] += kinds == {"raises"}
            one[3] += bool(kinds & {"WRONG", "NAMES"})
    lines = ["| models for | classes | all right | raises | not right | not tried |", "|---|---|---|---|---|---|"]
    lines += [f"| {head} | {' | '.join(map(str, one))} |" for head, one in sorted(counts.items())]
    total = [sum(one[i] for one in counts.values()) for i in range(5)]
    return "\n".join([*lines, f"| together | {' | '.join(map(str, total))} |"])


def exceptions(record, sweep, cell=190):
    """Classes of which something is not right, those with the same words in one row."""
    groups = defaultdict(list)
    for name in record.made():
        for (kind, words), what in record.bad(name, sweep).items():
            groups[KINDS[kind], "; ".join(what), shortened(words)].append(name)
    if not groups:
        return ""
    lines = ["| what | | why | classes |", "|---|---|---|---|"]
    for (kind, what, words), names in sorted(groups.items(), key=lambda item: -len(item[1])):
        lines += [f"| {what} | {kind} | {words} | {part} |" for part in cells(names, cell)]
    return "\n".join(lines)


def cells(names, cell):
    """Names in as many cells as it takes."""
    line = ""
    for name in names:
        if line and len(line) + len(name) > cell:
            yield line
            line = ""
        line += (", " if line else "") + name
    yield line


def not_made(record, cell=190):
    """Classes that were not tried, by reason."""
    groups = defaultdict(list)
    for name, row in record.classes.items():
        if row["kind"] == "left out":
            groups[shortened(plain(row["words"].removeprefix("RuntimeError: ")))].append(name)
    lines = ["| reason | classes |", "|---|---|"]
    for why, names in sorted(groups.items(), key=lambda item: -len(item[1])):
        lines += [f"| {why} | {part} |" for part in cells(names, cell)]
    return "\n".join(lines)


def _cell(found):
    kinds = {row["kind"] for row in found}
    return " or ".join(KINDS[kind] for kind in KINDS if kind in kinds) or "—"


def wrappers(record, names, tied):
    """A row for each wrapper around a Llama."""
    lines = [
        f"| wrapper | {' | '.join(GROUPS)} | why it raises, or is not there |",
        "|---|" + "---|" * (len(GROUPS) + 1),
    ]
    for name in names:
        own = record.tied[tied].get(name)
        if not own:
            continue
        results = [_cell([own[way] for way in ways if way in own]) for ways in GROUPS.values()]
        no_lora = "expected 'LORA'"
        said = [row["words"] for row in own.values() if row["kind"] in BAD and no_lora not in row["words"]]
        said = said or [row["words"] for row in own.values() if row["kind"] == "left out"]
        said = list(dict.fromkeys(shortened(plain(words)) for words in said))
        lines.append(f"| {name or 'none'} | {' | '.join(results)} | {'; '.join(said[:2])[:190]} |")
    return "\n".join(lines)


# ---- pages ----


def replaced(page, parts):
    """A page with new text between `<!-- name -->` and `<!-- end of name -->`, where it has these."""
    for name, text in parts.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, here, rest = page.partition(begin)
        if not here:
            continue
        page = f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}"
    return page
