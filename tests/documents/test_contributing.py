"""What CONTRIBUTING.md says of the code is true of the code."""

import re

from pages import ROOT
from test_architecture import SOURCES

TEXT = (ROOT / "CONTRIBUTING.md").read_text("utf-8")


def test_the_files_that_it_names_exist():
    for path in re.findall(r"`((?:tests|docs|dsa|\.ci)/[\w./]+)`", TEXT):
        assert (ROOT / path).exists(), f"{path} does not exist"


def test_the_names_of_modules_exist():
    """Words in code style that look like a module of ours with an attribute."""
    modules = {name.split(".")[-1]: name for name in SOURCES if name.count(".") > 0}
    for module, name in re.findall(r"`(?:\w+\.)*(\w+)\.(\w+)`", TEXT):
        if module in modules and name not in ("py", "md", "json"):
            source = SOURCES[modules[module]].read_text("utf-8")
            folder = SOURCES[modules[module]].parent
            assert re.search(rf"\b{name}\b", source) or (folder / f"{name}.py").exists(), (
                f"`{module}.{name}` does not exist"
            )
