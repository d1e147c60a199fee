"""A sample of `change_kills`."""

import os

import pytest


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_sample(tmp_path):
    from change_kills import run_trials

    found = run_trials(tmp_path, 10, seed=3)
    assert sum(found.values()) == 20
