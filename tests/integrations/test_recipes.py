"""The page's recipes are short, and each has a test."""

import re
from pathlib import Path

import pytest
from pages import blocks
from recipes import MOST_LINES, PAGE, RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_short_and_is_run(name):
    assert len(RECIPES[name].strip().splitlines()) <= MOST_LINES
    sources = "".join(path.read_text("utf-8") for path in Path(__file__).parent.glob("*.py"))
    assert f'recipe("{name}"' in sources


def test_no_block_is_left_out():
    assert sorted(RECIPES.values()) == sorted(blocks(PAGE.read_text("utf-8"), "python"))


def test_the_table_tells_lines_and_versions():
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|[^|]+\|[^|]+\|$", PAGE.read_text("utf-8"), re.MULTILINE)[2:]
    told = [int(number) for _, lines in rows for number in re.findall(r"\d+", lines)]
    assert told == [sum(1 for line in text.splitlines() if line.strip()) for text in RECIPES.values()]
    pinned = re.findall(r"==(\S+)", (Path(__file__).parent / "versions.txt").read_text("utf-8"))
    versions = [version for library, _ in rows for version in re.findall(r"\d+\.\d+\.\d+", library)]
    assert len(versions) == len(rows) + 1
    assert set(versions) <= set(pinned)
