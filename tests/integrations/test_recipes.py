"""The page's recipes are short, and each has a test."""

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
