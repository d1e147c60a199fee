"""Every backend and every layout under dsa/backends has a subclass of its conformance suite here."""

import ast
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest

import dsa.backends
from dsa.backends.layouts import BUILT_IN

HERE = Path(__file__).parent


# Around any backend: tests/backends/test_write_behind.py runs suites over several.
WRAPPERS = {"WriteBehind"}


def built_in_backends(members=frozenset({"read", "write", "scan"})):
    """Return the names of the concrete classes under dsa/backends that read, write and scan, or do others."""
    found = set()
    for info in pkgutil.walk_packages(dsa.backends.__path__, "dsa.backends."):
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            concrete = inspect.isclass(value) and not getattr(value, "_is_protocol", False)
            if concrete and value.__module__ == info.name and members <= set(dir(value)):
                found.add(name)
    return found


def suited_backends(sources, base="BackendConformance", hook="create"):
    """Return the names used in a hook of each suite: a class called Test... over BackendConformance, say."""
    classes = [
        node for text in sources for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)
    ]
    suites = {base}
    while grown := {c.name for c in classes if suites & {ast.unparse(b) for b in c.bases}} - suites:
        suites |= grown
    return {
        name.id
        for suite in classes
        if suite.name in suites and suite.name.startswith("Test")
        for create in suite.body
        if isinstance(create, ast.FunctionDef) and create.name == hook
        for name in ast.walk(create)
        if isinstance(name, ast.Name)
    }


def test_every_backend_has_a_suite():
    untested = (
        built_in_backends()
        - WRAPPERS
        - suited_backends(file.read_text("utf-8") for file in HERE.glob("test_*.py"))
    )
    assert not untested, f"no subclass of BackendConformance under {HERE.name} makes {sorted(untested)}"


def test_every_layout_has_a_suite():
    layouts = built_in_backends({"create", "open", "look", "refusal"})
    sources = [file.read_text("utf-8") for file in HERE.glob("test_*.py")]
    untested = layouts - suited_backends(sources, "LayoutConformance", "layout")
    assert not untested, f"no subclass of LayoutConformance under {HERE.name} makes {sorted(untested)}"
    assert {"Memmap", "Zarr"} == layouts == {type(layout).__name__ for layout in BUILT_IN}


def test_the_memory_backend_is_seen():
    assert "MemoryBackend" in built_in_backends()


@pytest.mark.parametrize(
    ("source", "tested"),
    [
        ("class TestA(BackendConformance):\n def create(self): return Made.create()", True),
        ("class Base(BackendConformance): pass\nclass TestA(Base):\n def create(self): return Made()", True),
        ("class A(BackendConformance):\n def create(self): return Made()", False),
        ("class TestA:\n def create(self): return Made()", False),
        ("class TestA(BackendConformance):\n def reopen(self): return Made()", False),
    ],
)
def test_what_counts_as_a_suite(source, tested):
    assert ("Made" in suited_backends([source])) is tested
