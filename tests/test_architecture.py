"""The floors of the package: who may import whom; no cycles; sizes of files and functions.

The imports are read from the source; nothing is imported. Blocks under ``if TYPE_CHECKING`` do not count.
"""

import ast
from fnmatch import fnmatchcase
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "dsa"
MOST_LINES = 450
MOST_LINES_OF_A_BODY = 60

# From the top down. A module imports from the floors below its own only. A name that ends in `.*` is a
# package whose modules may import each other, without cycles.
FLOORS = [
    ("the program", ["dsa.__main__"]),
    ("the command line", ["dsa.cli"]),
    ("commands", ["dsa.commands.*"]),
    ("what commands run, and examples", ["dsa.demo.*", "dsa.bench.*", "dsa.examples.*", "dsa.testing.*"]),
    ("the package", ["dsa"]),
    ("façades", ["dsa.embedding", "dsa.optimizer", "dsa.sparse_adam"]),
    ("what modules have in common", ["dsa.disk_module"]),
    ("what façades have in common", ["dsa.portable"]),
    ("states to checkpoints and back", ["dsa.transfer"]),
    ("states and checkpoints compared", ["dsa.comparison", "dsa.repairs", "dsa.verification"]),
    ("a state or a checkpoint", ["dsa.subjects"]),
    ("pictures", ["dsa.plots.*"]),
    ("looking at states", ["dsa.inspection.*"]),
    ("steps, rows into autograd, parameters to tables", ["dsa.lookup", "dsa.registration", "dsa.stepping"]),
    (
        "what façades delegate to",
        [
            "dsa.arguments",
            "dsa.estimation",
            "dsa.flattening",
            "dsa.foreign",
            "dsa.gradients",
            "dsa.reference",
            "dsa.maintenance",
            "dsa.sharing",
            "dsa.statistics",
            "dsa.update",
            "dsa.watch",
        ],
    ),
    (
        "parameters that stand for tables",
        ["dsa.disk_parameter", "dsa.holders", "dsa.pretrained", "dsa.resident", "dsa.tensor_reference"],
    ),
    ("opening a state", ["dsa.opening"]),
    ("checkpoints", ["dsa.checkpoint.*"]),
    ("recovery of a state", ["dsa.migration", "dsa.recovery"]),
    ("whole states", ["dsa.fingerprints", "dsa.replacement", "dsa.snapshot"]),
    ("creation of a state", ["dsa.creation"]),
    ("an open state, first weights", ["dsa.matching", "dsa.state", "dsa.weights"]),
    ("files of tables, and how rows change", ["dsa.table_files", "dsa.transactions"]),
    ("what is asked for", ["dsa.storage"]),
    ("parts of a state", ["dsa.coalesce", "dsa.prefetch", "dsa.progress"]),
    ("older releases", ["dsa.legacy.*"]),
    ("a table", ["dsa.table"]),
    ("journal and writer", ["dsa.journal", "dsa.writer"]),
    ("holding a directory, formats", ["dsa.holding", "dsa.journal_format", "dsa.metadata"]),
    ("backends", ["dsa.backends"]),
    (
        "a backend",
        [
            "dsa.backends.memmap",
            "dsa.backends.memory",
            "dsa.backends.zarr",
            "dsa.backends.zarr_compressed",
        ],
    ),
    ("fields of a Zarr table", ["dsa.backends.compressed_array", "dsa.backends.mapped_array"]),
    (
        "parts of backends",
        [
            "dsa.backends.chunk_cache",
            "dsa.backends.cold_reads",
            "dsa.backends.holes",
            "dsa.backends.mapping",
            "dsa.backends.settling",
            "dsa.backends.zarr_group",
        ],
    ),
    ("contents", ["dsa.content"]),
    ("the protocol of a backend", ["dsa.backends.base"]),
    ("curvature and first weights", ["dsa.curvature", "dsa.init"]),
    ("spaces and the system", ["dsa.manifolds", "dsa.system", "dsa.from_array", "dsa.tensors"]),
    ("memory and numbers", ["dsa.memory", "dsa.options"]),
    ("fused passes", ["dsa.kernels.adam", "dsa.kernels.poincare"]),
    (
        "parts of passes",
        [
            "dsa.kernels.checks",
            "dsa.kernels.columns",
            "dsa.kernels.constants",
            "dsa.kernels.hashing",
            "dsa.kernels.row_index",
            "dsa.kernels.rows",
        ],
    ),
    ("records as words", ["dsa.kernels.layout"]),
    (
        "single passes",
        [
            "dsa.kernels",
            "dsa.kernels.checksums",
            "dsa.kernels.geodesic",
            "dsa.kernels.prefetching",
            "dsa.kernels.random",
            "dsa.kernels.report",
            "dsa.kernels.threads",
        ],
    ),
    ("compilation, and waiting", ["dsa.kernels.compiled", "dsa.kernels.compiling", "dsa.kernels.latch"]),
    ("options and layout", ["dsa.conventions", "dsa.notices", "dsa.schema"]),
    ("consoles and paths", ["dsa.console", "dsa.directories"]),
    ("files of arrays", ["dsa.shards.*"]),
    ("errors", ["dsa.errors"]),
]  # fmt: skip

MATHEMATICS = [
    "dsa.conventions", "dsa.curvature", "dsa.kernels.adam", "dsa.kernels.constants", "dsa.kernels.geodesic",
    "dsa.kernels.poincare", "dsa.kernels.random", "dsa.manifolds",
]  # fmt: skip
STORAGE = [
    "dsa.backends",
    "dsa.backends.*",
    "dsa.holding",
    "dsa.journal",
    "dsa.journal_format",
    "dsa.metadata",
    "dsa.system",
    "dsa.writer",
]

# Who may import what is heavy, or belongs to one floor.
GUARDED = {
    "torch": [
        "dsa.arguments",
        "dsa.disk_module",
        "dsa.disk_parameter",
        "dsa.embedding",
        "dsa.flattening",
        "dsa.gradients",
        "dsa.holders",
        "dsa.lookup",
        "dsa.optimizer",
        "dsa.options",
        "dsa.pretrained",
        "dsa.registration",
        "dsa.resident",
        "dsa.sparse_adam",
        "dsa.tensor_reference",
        "dsa.tensors",
        "dsa.demo.*",
        "dsa.bench.*",
        "dsa.examples.*",
    ],
    "numba": ["dsa.kernels.*", "dsa.bench.*"],
    "pytest": ["dsa.testing", "dsa.testing.*"],
    "hypothesis": ["dsa.testing.*"],
    "matplotlib": ["dsa.demo.*", "dsa.plots.*"],
    "rich": ["dsa.inspection.render"],
    "xarray": ["dsa.inspection.arrays"],
    "zarr": ["dsa.checkpoint.*", "dsa.inspection.sources"],
}


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


def floor_of(name):
    """The number of a module's floor, counted from the top."""
    found = [number for number, (_, modules) in enumerate(FLOORS) if matches(name, modules)]
    assert len(found) == 1, (
        f"{name} is on {len(found)} floors: name it once in FLOORS of {Path(__file__).name}, just above what "
        f"it imports ({', '.join(sorted(ours(name))) or 'nothing of ours'})"
    )
    return found[0]


def same_package(name, other, floor):
    return any(
        pattern.endswith(".*") and matches(name, [pattern]) and matches(other, [pattern])
        for pattern in FLOORS[floor][1]
    )


@pytest.mark.parametrize("name", SOURCES)
def test_a_module_imports_from_lower_floors(name):
    floor = floor_of(name)
    for other in sorted(ours(name)):
        assert other in SOURCES, f"{name} imports {other}, which is not a module of the package"
        assert floor_of(other) > floor or same_package(name, other, floor), (
            f"{name} ({FLOORS[floor][0]!r}) imports {other} ({FLOORS[floor_of(other)][0]!r}), which is not "
            "below it: move what both need to a lower floor, or hand it over as an argument; change "
            "FLOORS only when the design has changed"
        )


def test_every_name_on_a_floor_is_a_module():
    for floor, modules in FLOORS:
        for pattern in modules:
            assert any(matches(name, [pattern]) for name in SOURCES), (
                f"{pattern} ({floor!r}) does not exist: take it off FLOORS"
            )


def test_there_are_no_cycles():
    try:
        list(TopologicalSorter({name: ours(name) for name in SOURCES}).static_order())
    except CycleError as error:
        pytest.fail(
            f"modules import each other: {' <- '.join(error.args[1])}; move what they share to a module of "
            "its own"
        )


def reached(name):
    """Every module of ours that a module imports, directly or not; packages are not followed from within."""
    seen, waiting = set(), [name]
    while waiting:
        for other in ours(waiting.pop()):
            if other not in seen:
                seen.add(other)
                waiting.append(other)
    return seen


def test_storage_and_mathematics_never_import_each_other():
    for name in SOURCES:
        for side, others in ((MATHEMATICS, STORAGE), (STORAGE, MATHEMATICS)):
            if matches(name, side):
                wrong = sorted(other for other in reached(name) if matches(other, others))
                assert not wrong, (
                    f"{name} reaches {wrong[0]}: storage moves bytes and knows no formula, mathematics knows "
                    "no files; join them on a floor above both"
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
    assert "dsa.state" in reached("dsa.optimizer")
    assert "dsa.kernels.poincare" in reached("dsa.manifolds")
    monkeypatch.setitem(TREES, "dsa.errors", ast.parse("from dsa import optimizer\nimport zarr"))
    assert ours("dsa.errors") == {"dsa.optimizer"}
    with pytest.raises(AssertionError, match=r"dsa\.errors .* imports dsa\.optimizer .* not below it: move"):
        test_a_module_imports_from_lower_floors("dsa.errors")
    with pytest.raises(
        AssertionError, match=r"dsa\.errors imports zarr, which only \['dsa.checkpoint.*'\] may"
    ):
        test_libraries_stay_where_they_belong("zarr")
    with pytest.raises(pytest.fail.Exception, match="modules import each other"):
        test_there_are_no_cycles()
    monkeypatch.setitem(
        TREES,
        "dsa.kernels.geodesic",
        ast.parse("if TYPE_CHECKING:\n from dsa import cli\nimport dsa.journal"),
    )
    with pytest.raises(AssertionError, match="storage moves bytes"):
        test_storage_and_mathematics_never_import_each_other()
    monkeypatch.setitem(SOURCES, "dsa.new", Path("new"))
    monkeypatch.setitem(TREES, "dsa.new", ast.parse("import dsa.errors"))
    with pytest.raises(
        AssertionError, match=r"dsa.new is on 0 floors: name it once in FLOORS .* \(dsa.errors\)"
    ):
        test_a_module_imports_from_lower_floors("dsa.new")
