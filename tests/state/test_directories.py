"""A path that can't be meant is refused with what to use instead; a home is found."""

import os
from pathlib import Path

import pytest

import dsa
from dsa import DiskEmbedding, init
from dsa.checkpoint.places import find_place
from dsa.cli import program
from dsa.state.directories import local_directory

ADDRESSES = [
    "s3://bucket/t", "S3://bucket/t", "gs://b", "http://host/t", "memory://t", "simplecache::s3://bucket/t",
    "zip://k::/a.zip", "zip::/a.zip", "s3:/bucket/t", Path("s3://bucket/t"), Path("memory://t"),
]  # fmt: skip
NAMELESS = ["", " ", "\t", "a\0b", "\0"]
NO_PATHS = [b"run", 7, None, ["run"], 1.5]
FINE = [
    "run",
    "./run",
    "/abs/run",
    "../run",
    "a b",
    "数据",
    "C:/run",
    "c:\\run",
    "a:b",
    "run/~x",
    ".",
]


@pytest.mark.parametrize("given", ADDRESSES, ids=str)
def test_an_address_is_refused(given):
    with pytest.raises(ValueError, match=r"disk_dir='.*' is an address and no directory: pass a directory"):
        local_directory(given, "disk_dir")


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        ("file:///x/y", "'/x/y'"),
        ("file:/x", "'/x'"),
        ("file://localhost/a%20b", "'/a b'"),
        ("FILE:///x", "'/x'"),
    ],
)
def test_the_address_of_a_file_names_its_path(given, instead):
    with pytest.raises(ValueError, match=rf"is an address and no directory: pass {instead}$"):
        local_directory(given)


@pytest.mark.parametrize("given", NAMELESS, ids=repr)
def test_what_names_nothing(given):
    with pytest.raises(ValueError, match="state_dir="):
        local_directory(given)


@pytest.mark.parametrize("given", NO_PATHS, ids=repr)
def test_what_is_no_path(given):
    with pytest.raises(TypeError, match=r"state_dir=.*: pass a str"):
        local_directory(given)


@pytest.mark.parametrize("given", FINE)
def test_everything_else_is_left_as_it_is(given):
    assert local_directory(given) == given
    assert local_directory(Path(given)) == str(Path(given))
    assert local_directory("./s3:/x") == "./s3:/x"


def test_a_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert local_directory("~/t") == f"{tmp_path}/t"
    assert local_directory(Path("~/t")) == f"{tmp_path}/t"
    assert local_directory("~") == str(tmp_path)
    assert local_directory("./~/t") == "./~/t"
    assert find_place("~/ck").directory == tmp_path / "ck"
    if os.name == "posix":
        with pytest.raises(ValueError, match=r"home directory that is not known: pass .* './~nobody-here/t'"):
            local_directory("~nobody-here/t")


@pytest.mark.parametrize("given", ["s3://bucket/t", "file:///x", "", "a\0b", b"t", "memory://t"], ids=repr)
def test_modules_and_views_make_nothing_of_it(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, TypeError), match="state_dir="):
        DiskEmbedding(4, 2, init=init.Zeros(4, 2), state_dir=given)
    with pytest.raises((ValueError, TypeError), match="path="):
        dsa.open_state(given)
    assert list(tmp_path.iterdir()) == []


def test_modules_and_views_find_a_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    first = DiskEmbedding(4, 2, init=init.Zeros(4, 2), state_dir="~/t", name="first")
    other = DiskEmbedding(4, 2, init=init.Zeros(4, 2), state_dir=tmp_path / "t", name="other")
    try:
        assert first.weight.state.path == tmp_path / "t"
        assert other.weight.state is first.weight.state
    finally:
        first.weight.state.close()
    with dsa.open_state("~/t") as view:
        assert sorted(view.tables) == ["first", "other"]


@pytest.mark.parametrize("given", ["", b"k", "a\0b", Path("s3://bucket/k"), 7], ids=repr)
def test_addresses_of_checkpoints(given):
    with pytest.raises((ValueError, TypeError)):
        find_place(given)


@pytest.mark.parametrize(
    "command", ["demo --disk-dir s3://b/t", "bench --dir s3://b/t", "estimate 10 2 --dir s3://b"]
)
def test_options_of_commands(command, capsys):
    with pytest.raises(SystemExit):
        program.main(command.split())
    assert "is an address and no directory" in capsys.readouterr().err
