"""Which versions of other packages take each other."""

import importlib.metadata

import pytest
from packaging.version import Version


def _refused() -> str:
    """Why transformers' `add_adapter` refuses the installed peft: it can ask for one that is not published yet."""
    from transformers.integrations.peft import MIN_PEFT_VERSION

    found = importlib.metadata.version("peft")
    return (
        f"transformers asks for peft {MIN_PEFT_VERSION}, not {found}"
        if Version(found) < Version(MIN_PEFT_VERSION)
        else ""
    )


transformers_takes_peft = pytest.mark.skipif(bool(_refused()), reason=_refused())
