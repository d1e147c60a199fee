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
    for module, name in re.findall(r"`(?:\w+\.)*(\w+)\.(\w+)`", TEXT):
        homes = [each for each in SOURCES if each.count(".") > 0 and each.split(".")[-1] == module]
        if homes and name not in ("py", "md", "json"):
            assert any(is_in(name, SOURCES[home]) for home in homes), f"`{module}.{name}` does not exist"


def is_in(name, source):
    """Whether a module's text has a name, or its folder a module of that name."""
    found = re.search(rf"\b{name}\b", source.read_text("utf-8"))
    return bool(found) or (source.parent / f"{name}.py").exists()
