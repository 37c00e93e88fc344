"""What `bitshard.process.foreign` knows of other libraries still stands in those that are installed."""

import importlib
import inspect
import re
import sys

import pytest
from bitshard.process import foreign


@pytest.mark.parametrize("known", foreign.KNOWN, ids=lambda known: known.function)
def test_the_function_is_there_and_asks(known):
    """A canary: where a library renames a function, or asks otherwise, its entry answers nobody any more."""
    found = importlib.import_module(known.module)
    for part in known.function.split("."):
        found = getattr(found, part)
    found = inspect.unwrap(found)
    source = inspect.getsource(found)
    assert known.asks in source and found.__qualname__ == known.function and found.__code__.co_name in known.function


@pytest.mark.parametrize(
    "function, asks", [("PreTrainedModel.gone", "state_dict()"), ("PreTrainedModel.save_pretrained", "never_asked()")]
)
def test_a_canary_can_die(function, asks):
    gone = foreign.TRANSFORMERS_SAVES._replace(function=function, asks=asks)
    with pytest.raises((AssertionError, AttributeError)):
        test_the_function_is_there_and_asks(gone)


def test_who_asks_is_known_by_name():
    def _sync_module_states(known):
        return foreign.asked_by(known)

    def _recursive_wrap(known):
        return next(foreign.asked_by(known) for _ in range(1))

    sends, wraps = foreign.DDP_SENDS, foreign.FSDP1_WRAPS
    assert _sync_module_states(sends).f_code is _sync_module_states.__code__ and _sync_module_states(wraps) is None
    assert _recursive_wrap(wraps).f_code is _recursive_wrap.__code__ and _recursive_wrap(sends) is None
    assert foreign.asked_by(sends) is None


def test_the_table_is_whole():
    """Every entry is used, says why, and no other module looks at names of frames."""
    entries = {name: value for name, value in vars(foreign).items() if isinstance(value, foreign.Foreign)}
    assert sorted(entries.values()) == sorted(foreign.KNOWN) and all(entry.why for entry in foreign.KNOWN)
    package = sys.modules["bitshard"].__path__[0]
    sources = {path: path.read_text() for path in importlib.import_module("pathlib").Path(package).rglob("*.py")}
    for name in entries:
        assert any(f"foreign.{name}" in text for text in sources.values()), name
    assert [path.name for path, text in sources.items() if re.search(r"\bco_name\b", text)] == ["foreign.py"]
