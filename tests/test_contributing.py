"""What CONTRIBUTING.md says of the code is true of the code."""

import itertools
import re

from pages import ROOT, fenced
from test_architecture import FLOORS, SOURCES

TEXT = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
DRAWING = TEXT.partition("<!-- the floors -->\n")[2]
DRAWING = next(block.text for block in fenced(DRAWING) if block.language == "text")


def names_of(line):
    """Return the modules and packages that a line of the drawing names, in the column beside the titles."""
    return re.findall(r"[a-z_]+/?", line[26:]) if not set("─═") & set(line) else []


def floors_of(name):
    """Return the floors on which a module, or the modules of a package, are."""
    module = f"dsa.{name.rstrip('/')}"
    found = [
        number
        for number, (_, patterns) in enumerate(FLOORS)
        for pattern in patterns
        if pattern == module or (name.endswith("/") and pattern.startswith(f"{module}."))
    ]
    assert found, (
        f"the drawing names {name!r}, which is on no floor of tests/test_architecture.py: correct it"
    )
    return found


LINES = [names for line in DRAWING.splitlines() if (names := names_of(line))]
NAMED = {name for names in LINES for name in names}
PACKAGES = {f"{name.split('.')[1]}/" for name in SOURCES if name.count(".") > 1}


def test_the_drawing_has_the_floors_in_their_order():
    for upper, lower in itertools.pairwise(LINES):
        for above in upper:
            for below in lower:
                assert max(floors_of(above)) < min(floors_of(below)), (
                    f"the drawing has {above!r} above {below!r}, tests/test_architecture.py has not: move one"
                )


def test_what_stands_in_one_line_is_on_one_floor_or_close():
    """Nothing that another line names lies between them."""
    for names in LINES:
        covered = range(min(map(min, map(floors_of, names))), max(map(max, map(floors_of, names))) + 1)
        others = NAMED - set(names)
        between = [other for other in others if set(floors_of(other)) & set(covered)]
        assert not between, f"the line of {names} also spans the floors of {between}: move them"


def test_the_drawing_has_every_package():
    assert PACKAGES <= NAMED, f"draw {sorted(PACKAGES - NAMED)} where tests/test_architecture.py has them"


def test_packages_are_drawn_with_a_slash():
    for name in NAMED:
        assert (name in PACKAGES) == name.endswith("/"), f"{name!r}: packages end in a slash, modules don't"


def test_the_files_that_it_names_exist():
    for path in re.findall(r"`((?:tests|docs|dsa|\.ci)/[\w./]+)`", TEXT):
        assert (ROOT / path).exists(), f"{path} does not exist"


def test_the_names_of_modules_exist():
    """Words in code style that look like a module of ours with an attribute, such as `state.begin`."""
    modules = {name.split(".")[1] for name in SOURCES if name.count(".") == 1}
    for module, name in re.findall(r"`(\w+)\.(\w+)`", TEXT):
        if module in modules and name != "py":
            source = SOURCES[f"dsa.{module}"].read_text("utf-8")
            assert re.search(rf"\b{name}\b", source), f"`{module}.{name}` does not exist"
