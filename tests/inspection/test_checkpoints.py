"""Views and summaries beside checkpoints: the same numbers wherever a state is."""

from dataclasses import replace

import numpy as np
import pytest
from small_states import TABLES, build, train

from dsa.checkpoint import open_checkpoint, write_checkpoint
from dsa.errors import StateClosedError
from dsa.inspection import open_state, summarize
from dsa.inspection.render import render


@pytest.fixture
def checkpoint(tmp_path):
    """A state of three steps, and its checkpoint."""
    with build(tmp_path / "state") as optimizer:
        train(optimizer, 3)
        optimizer.export_checkpoint(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def test_a_checkpoint_is_summarised_like_its_state(tmp_path, checkpoint):
    exported = summarize(open_checkpoint(checkpoint).content())
    stored = summarize(tmp_path / "state")
    assert exported.global_step == stored.global_step == 3
    for theirs, ours in zip(exported.tables, stored.tables, strict=True):
        assert theirs == replace(ours, file_bytes=None, disk_bytes=None)
    assert "entity" in render(exported)
    assert render(exported).startswith("step 3\n")


def test_a_view_can_be_exported(tmp_path, checkpoint):
    with open_state(tmp_path / "state") as state:
        content = state.content()
        assert content.exports == {open_checkpoint(checkpoint).content_root: 3}
        write_checkpoint(content, tmp_path / "second")
    first, second = open_checkpoint(checkpoint), open_checkpoint(tmp_path / "second")
    assert first.content_root == second.content_root
    for ours, theirs in zip(first.content().tables, second.content().tables, strict=True):
        for (_, left), (_, right) in zip(ours.blocks(), theirs.blocks(), strict=True):
            for name in left.dtype.names:
                np.testing.assert_array_equal(left[name], right[name])


def test_a_view_notices_an_import(tmp_path, checkpoint):
    with build(tmp_path / "state", resume=True) as optimizer:
        train(optimizer, 2, first=3)
        state = open_state(tmp_path / "state")
        assert state.global_step == 5
        optimizer.import_checkpoint(checkpoint)
        with pytest.raises(StateClosedError, match="replaced or removed since this view"):
            state["entity"].weights([0])
        state.close()
        with open_state(tmp_path / "state") as state:
            assert state.global_step == 3
            for name, source in TABLES.items():
                np.testing.assert_array_equal(
                    state[name].weights(range(source.rows)), optimizer.read_rows(range(source.rows), name)
                )
