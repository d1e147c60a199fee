"""The recipes of the guide's page on frameworks, and what their tests share."""

import importlib
import importlib.util
import re
from pathlib import Path

import pytest
import torch

import dsa

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "frameworks.md"
MOST_LINES = 15
RECIPES = dict(
    re.findall(
        r"<!-- recipe: (\w+) -->\n```python\n(.*?)```$", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
)


def needs(*libraries):
    """Skip a module's tests where a library is missing."""
    missing = [each for each in libraries if importlib.util.find_spec(each) is None]
    reason = f"{', '.join(missing)} not installed: pip install --no-deps -r tests/integrations/versions.txt"
    return pytest.mark.skipif(bool(missing), reason=reason)


def recipe(name, *libraries, **given):
    """Return what a recipe of the page defines."""
    namespace = {"dsa": dsa, "torch": torch, **given}
    for library in libraries:
        importlib.import_module(library)
        root = library.split(".")[0]
        namespace[root] = importlib.import_module(root)
    exec(compile(RECIPES[name], f"frameworks.md, {name}", "exec"), namespace)
    return namespace


def weights(table):
    """All weights of a table."""
    with torch.no_grad():
        return table(torch.arange(table.num_embeddings)).clone()


def assert_close(found, expected):
    """Compare losses that differ by float32's rounding over some steps."""
    torch.testing.assert_close(
        torch.tensor(found, dtype=torch.float64),
        torch.tensor(expected, dtype=torch.float64),
        rtol=1e-4,
        atol=1e-6,
    )
