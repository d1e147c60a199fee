"""The house as CONTRIBUTING.md draws it: who may import whom; no cycles; sizes of files and functions.

The imports are read from the source; nothing is imported. Blocks under ``if TYPE_CHECKING`` do not count.
"""

import ast
import re
from fnmatch import fnmatchcase
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dsa"
MOST_LINES = 450
MOST_LINES_OF_A_BODY = 60
MOST_ROOMS = 14
MOST_FLOORS = 12

# Who may import what is heavy, or belongs to one room.
GUARDED = {
    "torch": ["dsa.modules.*", "dsa.optimizers.*", "dsa.recis.*", "dsa.cli.*", "dsa.examples.*"],
    "numba": ["dsa.kernels.*", "dsa.cli.bench.*"],
    "pytest": ["dsa.testing.*"],
    "hypothesis": ["dsa.testing.*"],
    "matplotlib": ["dsa.cli.demo.*", "dsa.inspection.plots.*"],
    "rich": ["dsa.inspection.render"],
    "xarray": ["dsa.inspection.arrays"],
    "zarr": ["dsa.checkpoint.*", "dsa.backends.zarr_group"],
}


class House(NamedTuple):
    """The drawing.

    Args:
        floors: The rooms of each floor, from the top.
        modules: The modules and packages that are drawn in each room; those of a package end in a slash.
    """

    floors: list[list[str]]
    modules: dict[str, list[str]]


def read_house(text):
    """Read the drawing out of CONTRIBUTING.md."""
    drawing = re.search(r"<!-- the house -->\n```text\n(.*?)```", text, re.DOTALL)
    assert drawing, "CONTRIBUTING.md has no drawing of the house"
    house = House([[]], {})
    for line in drawing[1].splitlines():
        if set(line) & set("─═"):
            house.floors.append([])
        elif not line.startswith(" "):
            room = line.split()[0].rstrip("/")
            house.floors[-1].append(room)
            house.modules[room] = []
        else:
            house.modules[room] += line[42:].split()
    return house


HOUSE = read_house((ROOT / "CONTRIBUTING.md").read_text("utf-8"))


def module_name(path):
    parts = [*path.relative_to(PACKAGE.parent).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text("utf-8")) for name, path in SOURCES.items()}


def statements(node):
    """Every node of a tree but those under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from statements(child)


def imports(name):
    """The modules that a module imports, ours by their exact names."""
    for node in statements(TREES[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively: write the whole name, as everywhere else"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in SOURCES else str(node.module)


def ours(name):
    return {other for other in imports(name) if other.split(".")[0] == "dsa"}


def matches(name, patterns):
    return any(fnmatchcase(name, pattern) or f"{name}.*" == pattern for pattern in patterns)


def room_of(name):
    """The room that a module is in, or the module itself where it stands alone."""
    return name.split(".")[1]


def floor_of(name):
    """The number of a module's floor, counted from the top. The package's own two files are its doors."""
    if name == "dsa":
        return next(i for i, rooms in enumerate(HOUSE.floors) if "modules" in rooms) - 0.5
    if name == "dsa.__main__":
        return -1
    found = [number for number, rooms in enumerate(HOUSE.floors) if room_of(name) in rooms]
    assert len(found) == 1, (
        f"{name} is in {len(found)} rooms of the drawing in CONTRIBUTING.md: put it into one, above what it "
        f"imports ({', '.join(sorted(ours(name))) or 'nothing of ours'})"
    )
    return found[0]


def may_import(name, other):
    if "dsa" not in (name, other) and room_of(name) == room_of(other):
        return True
    return floor_of(other) > floor_of(name)


@pytest.mark.parametrize("name", SOURCES)
def test_a_module_imports_from_its_room_and_from_below(name):
    for other in sorted(ours(name)):
        assert other in SOURCES, f"{name} imports {other}, which is not a module of the package"
        assert may_import(name, other), (
            f"{name} imports {other}, which is not below it: move what both need to a lower floor, or hand "
            "it over as an argument; change the drawing in CONTRIBUTING.md only when the design has changed"
        )


def test_every_module_is_drawn_in_its_room():
    there = {room: set() for room in HOUSE.modules}
    for name in SOURCES:
        _, *parts = name.split(".")
        if len(parts) == 1 and SOURCES[name].name != "__init__.py" and name != "dsa.__main__":
            assert parts[0] in there, f"draw {name} in CONTRIBUTING.md"
        if len(parts) > 1:
            package = len(parts) > 2 or SOURCES[name].name == "__init__.py"
            there[parts[0]].add(parts[1] + "/" * package)
    for room, modules in HOUSE.modules.items():
        assert (PACKAGE / room).is_dir() or (PACKAGE / f"{room}.py").is_file(), f"there is no room {room!r}"
        assert len(modules) == len(set(modules)), f"{room}/ names a module twice"
        # Recipes and what a reader of his own backend needs are listed where they are explained.
        if modules:
            assert set(modules) == there[room], (
                f"the drawing of {room}/ is wrong about {sorted(set(modules) ^ there[room])}: correct it"
            )


def test_the_house_is_small_enough_for_one_look():
    rooms = [each for each in PACKAGE.iterdir() if each.name[0] not in "_." and each.name != "py.typed"]
    assert len(rooms) <= MOST_ROOMS, f"dsa/ has {len(rooms)} rooms: {MOST_ROOMS} are the most"
    assert len(HOUSE.floors) <= MOST_FLOORS, f"{len(HOUSE.floors)} floors are more than {MOST_FLOORS}"


def test_there_are_no_cycles():
    try:
        list(TopologicalSorter({name: ours(name) for name in SOURCES}).static_order())
    except CycleError as error:
        pytest.fail(
            f"modules import each other: {' <- '.join(error.args[1])}; move what they share to a module of "
            "its own"
        )


@pytest.mark.parametrize("library", GUARDED)
def test_libraries_stay_where_they_belong(library):
    for name in SOURCES:
        used = any(other.split(".")[0] == library for other in imports(name))
        assert not used or matches(name, GUARDED[library]), (
            f"{name} imports {library}, which only {GUARDED[library] or 'nobody'} may: pass plain arrays "
            f"down instead, or add the module to GUARDED in {Path(__file__).name}, with a reason in its "
            "docstring"
        )


@pytest.mark.parametrize("name", SOURCES)
def test_files_fit_in_a_head(name):
    lines = len(SOURCES[name].read_text("utf-8").splitlines())
    assert lines <= MOST_LINES, (
        f"{SOURCES[name]} has {lines} lines, more than {MOST_LINES}: split it along what it does"
    )


def body_lines(function):
    """Lines of a function's body without its docstring."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


@pytest.mark.parametrize("name", SOURCES)
def test_functions_fit_in_sight(name):
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = body_lines(node)
            assert lines <= MOST_LINES_OF_A_BODY, (
                f"{name}.{node.name} has a body of {lines} lines, more than {MOST_LINES_OF_A_BODY}: give its "
                "parts names"
            )


def test_the_rules_notice_what_they_forbid(monkeypatch):
    """The tests above would pass for ever if `ours` saw nothing."""
    monkeypatch.setitem(TREES, "dsa.errors", ast.parse("from dsa.optimizers import update\nimport zarr"))
    assert ours("dsa.errors") == {"dsa.optimizers.update"}
    with pytest.raises(AssertionError, match=r"dsa\.errors imports dsa\.optimizers\.update.* below it: move"):
        test_a_module_imports_from_its_room_and_from_below("dsa.errors")
    with pytest.raises(
        AssertionError, match=r"dsa\.errors imports zarr, which only \['dsa.checkpoint.*'\] may"
    ):
        test_libraries_stay_where_they_belong("zarr")
    with pytest.raises(pytest.fail.Exception, match="modules import each other"):
        test_there_are_no_cycles()
    monkeypatch.setitem(TREES, "dsa.rules.curvature", ast.parse("import dsa.backends.memmap"))
    with pytest.raises(AssertionError, match=r"dsa.rules.curvature imports dsa.backends.memmap"):
        test_a_module_imports_from_its_room_and_from_below("dsa.rules.curvature")
    monkeypatch.setitem(
        TREES, "dsa.rules.curvature", ast.parse("if TYPE_CHECKING:\n from dsa import cli\nimport dsa.schema")
    )
    test_a_module_imports_from_its_room_and_from_below("dsa.rules.curvature")
    monkeypatch.setitem(SOURCES, "dsa.new", Path("new.py"))
    monkeypatch.setitem(TREES, "dsa.new", ast.parse("import dsa.errors"))
    with pytest.raises(AssertionError, match=r"dsa.new is in 0 rooms .* \(dsa.errors\)"):
        test_a_module_imports_from_its_room_and_from_below("dsa.new")
    with pytest.raises(AssertionError, match=r"draw dsa.new"):
        test_every_module_is_drawn_in_its_room()
