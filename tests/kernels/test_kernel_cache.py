"""A cache of compiled kernels is an optimisation: whatever becomes of its files, the kernels compute."""

import errno
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numba
import pytest

import dsa
from dsa.errors import DSAWarning
from dsa.kernels import compiled as module

PACKAGE = Path(dsa.__file__).parent

KERNELS = """
from dsa.kernels.compiled import compiled

@compiled
def add(x, y):
    return x + y

@compiled(fastmath={"contract"})
def add_twice(x, y):
    return add(add(x, y), y)
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A directory of compiled kernels, and nothing said yet."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_said", [])
    (tmp_path / "kernels.py").write_text(KERNELS)
    return tmp_path / "cache"


def run(tmp_path):
    """Compute as a new process would and return which functions were loaded from the cache."""
    spec = importlib.util.spec_from_file_location("some_kernels", tmp_path / "kernels.py")
    kernels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernels)
    assert kernels.add_twice(1.5, 2) == 5.5
    assert kernels.add(1.5, 2) == 3.5
    assert kernels.add(1, 2) == 3
    return [sum(each.stats.cache_hits.values()) for each in (kernels.add_twice, kernels.add)]


WHOLE = [1, 2]


def files(cache, kind):
    found = sorted(cache.rglob(f"*.{kind}"))
    assert found
    return found


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


def replace_by_directory(path):
    path.unlink()
    path.mkdir()
    (path / "somebody's").touch()


DAMAGES = {
    "emptied": lambda path: cut(path, 0),
    "cut after a byte": lambda path: cut(path, 1),
    "halved": lambda path: cut(path, path.stat().st_size // 2),
    "cut before its end": lambda path: cut(path, -1),
    "garbage": lambda path: path.write_bytes(b"\x93garbage" * 100),
    "another pickle": lambda path: path.write_bytes(b"\x80\x04]\x94."),
    "a text": lambda path: path.write_text("<html>not found</html>"),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "removed": lambda path: path.unlink(),
    "looping link": lambda path: (path.unlink(), path.symlink_to(path)),
}


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_a_miss_and_is_mended(cache, tmp_path, kind, damage):
    run(tmp_path)
    assert run(tmp_path) == WHOLE
    for path in files(cache, kind):
        DAMAGES[damage](path)
    assert run(tmp_path) == [0, 0]
    assert run(tmp_path) == WHOLE
    assert not module._said


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
def test_what_can_not_be_replaced_is_left_and_said_once(cache, tmp_path, kind):
    run(tmp_path)
    for path in files(cache, kind):
        replace_by_directory(path)
    with pytest.warns(DSAWarning, match=r"compiled kernels can't be kept.*set NUMBA_CACHE_DIR") as said:
        hits = [*run(tmp_path), *run(tmp_path)]
    assert hits == [0, 0, 0, 0]
    assert len(said) == 1
    assert all((path / "somebody's").exists() for path in files(cache, kind))


def test_a_changed_bit_is_never_run(cache, tmp_path):
    run(tmp_path)
    for path in [*files(cache, "nbc"), *files(cache, "nbi")]:
        whole = path.read_bytes()
        for place in range(0, len(whole), len(whole) // 25):
            flip(path, place)
            run(tmp_path)  # asserts the results
            path.write_bytes(whole)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO])
def test_a_cache_that_takes_nothing(cache, tmp_path, monkeypatch, code):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.warns(DSAWarning, match="can't be kept") as said:
        assert run(tmp_path) == [0, 0]
    assert len(said) == 1
    assert os.strerror(code) in str(said[0].message)
    monkeypatch.undo()
    assert not [*tmp_path.rglob("*.tmp.*")]


def test_a_source_that_changed_elsewhere_is_a_miss(cache, tmp_path, monkeypatch):
    """numba asks only whether the file changed in which the function is, not those compiled into it."""
    run(tmp_path)
    assert run(tmp_path) == WHOLE
    monkeypatch.setattr(module, "_sources", lambda: 1)
    assert run(tmp_path) == [0, 0]
    assert run(tmp_path) == WHOLE


def test_without_compilation_there_is_the_function(monkeypatch):
    monkeypatch.setattr(numba.config, "DISABLE_JIT", True)

    def half(x):
        return x / 2

    assert module.compiled(half) is half


def test_nobody_compiles_otherwise():
    """A kernel that is declared with numba's own decorator has numba's own cache."""
    for path in PACKAGE.rglob("*.py"):
        if path.name != "compiled.py":
            assert "jit(" not in path.read_text("utf-8"), f"{path}: use dsa.kernels.compiled"


EVERYTHING = """
import importlib, pkgutil, sys
import numpy as np
import dsa, dsa.kernels, dsa.cli.demo
for package in (dsa.kernels, dsa.cli.demo):
    for each in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{each.name}")
with dsa.DiskSparseRiemannianAdam({"a": dsa.init.Zeros(10, 2)}, k=0.0, disk_dir=sys.argv[1]) as optimizer:
    optimizer.step({"a": ([1, 4], np.ones((2, 2), np.float32))})
    print(dsa.__file__, optimizer.read_rows([1, 2]).tolist())
"""


def homeless(tmp_path):
    """A copy of the package beside which nothing can be written, by root either, and no home."""
    copy = tmp_path / "site" / "dsa"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in {path.parent for path in copy.rglob("*.py")}:
        (folder / "__pycache__").touch()
    nowhere = str(tmp_path / "site" / "dsa" / "__init__.py" / "below a file")
    return {
        **{name: value for name, value in os.environ.items() if name not in ("PYTHONWARNINGS",)},
        "PYTHONPATH": str(copy.parent),
        "PYTHONDONTWRITEBYTECODE": "1",
        "NUMBA_CACHE_DIR": nowhere,
        "XDG_CACHE_HOME": nowhere,
        "LOCALAPPDATA": nowhere,
        "HOME": nowhere,
    }


def program(*command, environment):
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        cwd=environment["PYTHONPATH"],
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_no_place_for_a_cache(tmp_path):
    environment = homeless(tmp_path)
    done = program("-c", EVERYTHING, tmp_path / "state", environment=environment)
    assert done.stdout.startswith(environment["PYTHONPATH"])
    assert done.stderr.count("DSAWarning") == done.stderr.count("NUMBA_CACHE_DIR") == 1
    assert program("-m", "dsa", "--help", environment=environment).stderr == ""
    inspected = program("-m", "dsa", "inspect", tmp_path / "state", environment=environment)
    assert inspected.stderr.count("NUMBA_CACHE_DIR") <= 1

    # The same with a cache: the same numbers; then with every file of it damaged: again.
    environment["NUMBA_CACHE_DIR"] = str(tmp_path / "cache")
    assert program("-c", EVERYTHING, tmp_path / "cached", environment=environment).stdout == done.stdout
    for number, path in enumerate([*files(tmp_path / "cache", "nbi"), *files(tmp_path / "cache", "nbc")]):
        [*DAMAGES.values()][number % len(DAMAGES)](path)
    again = program("-c", EVERYTHING, tmp_path / "again", environment=environment)
    assert again.stdout == done.stdout
    assert "NUMBA_CACHE_DIR" not in again.stderr


def test_nothing_is_said_when_all_is_well(cache, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(tmp_path)
        assert run(tmp_path) == WHOLE
    assert not module._said
