"""What tells a file from one that was made in its place."""

import os
import shutil
import sys

import pytest

from dsa.backends import births
from dsa.backends.births import file_number, is_same_file

pytestmark = pytest.mark.disk


def test_a_file_stays_itself(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"1")
    number = file_number(path)
    path.write_bytes(b"22")
    os.utime(path, (1, 1))
    path.chmod(0o600)
    path.rename(tmp_path / "b")
    os.link(tmp_path / "b", path)
    assert file_number(path) == number
    assert is_same_file(file_number(path), number)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a number may be all that there is")
def test_a_file_that_is_made_in_its_place_is_another(tmp_path):
    """However often its number is given again."""
    path = tmp_path / "directory" / "file"
    numbers = set()
    for _ in range(20):
        path.parent.mkdir()
        path.write_bytes(b"1")
        for each in (path, path.parent):
            numbers.add(file_number(each))
        shutil.rmtree(path.parent)
    assert len(numbers) == 40


def test_where_births_are_not_known_the_number_is_compared(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_bytes(b"1")
    number = file_number(path)
    monkeypatch.setattr(births, "_STATX", lambda *given: -1)
    plain = file_number(path)
    assert plain == path.stat().st_ino
    assert is_same_file(plain, number)
    assert is_same_file(number, plain)
    assert not is_same_file(plain + 1, number)
    assert not is_same_file(number, number + (1 << 64))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        file_number(tmp_path / "missing")
