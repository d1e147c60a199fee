"""The recipe of a language model with a table of n-grams, with the small model that it brings."""

import numpy as np
import pytest
import torch

import dsa
from dsa.examples import language_model as recipe


def oracle(tokens, rows):
    """The rows of n-grams in Python's integers, as numbers of 64 bits that wrap around."""

    def signed(number):
        return (number + (1 << 63)) % (1 << 64) - (1 << 63)

    def row(order, sequence, position):
        key = order
        for at in range(position - order + 1, position + 1):
            key = signed((key ^ (sequence[at] if at >= 0 else -1)) * 0x9E3779B97F4A7C1)
            key ^= key >> 32
        return key % rows

    return [
        [[row(order, sequence, position) for order in recipe.ORDERS] for position in range(len(sequence))]
        for sequence in tokens.tolist()
    ]


def test_ngrams_are_hashed_from_what_stands_before():
    tokens = torch.randint(0, 64, (3, 7), generator=torch.Generator().manual_seed(1))
    for rows in (10, 10**9 + 7):
        assert recipe.ngram_rows(tokens, rows).tolist() == oracle(tokens, rows)
    assert recipe.ngram_rows(tokens[:, :2], 10**9).tolist() == oracle(tokens[:, :2], 10**9)


def test_the_table_learns_in_bfloat16_and_is_merged_back(tmp_path, capsys):
    torch.manual_seed(5)
    causal = recipe.Small()
    before = {name: value.clone() for name, value in causal.state_dict().items()}
    losses, model = recipe.main(tmp_path, causal, rows=20_000, dim=8, steps=60)
    assert np.mean(losses[-5:]) < 0.75 * np.mean(losses[:5])
    assert "ngrams  20,000    8" in capsys.readouterr().out

    # What was there is as it was, and the head tied as before.
    assert all(torch.equal(value, before[name]) for name, value in causal.state_dict().items())
    assert causal.head.weight is causal.tokens.weight

    # The table holds bfloat16, a number per row, and only rows that were touched; it is the merged weight.
    with dsa.open_state(tmp_path) as state:
        table = state["ngrams"]
        assert (table.rule.name, table.steps) == ("row_wise_adagrad", 60)
        merged = model.ngrams.weight.detach()
        assert type(model.ngrams) is torch.nn.Embedding
        assert torch.equal(merged, merged.bfloat16().float())
        np.testing.assert_array_equal(table.weights(np.arange(20_000)), merged.numpy())
    tokens = torch.cat(list(recipe.draw_batches(60)))
    touched = len(np.unique(recipe.ngram_rows(tokens, 20_000)))
    with dsa.DiskSparseRiemannianAdam(
        {"start": dsa.init.Normal(20_000, 8, 0.02, seed=1)}, k=0.0, disk_dir=tmp_path / "start"
    ) as start:
        first = start.read_rows(range(20_000)).bfloat16().float()
    assert 0.9 * touched < int((merged != first).any(1).sum()) <= touched


def test_the_token_embedding_is_refused_for_its_tied_head(tmp_path):
    model = recipe.Ngrams(recipe.Small(), 1000, 8)
    with pytest.raises(ValueError, match=r"'causal\.tokens' is tied to 'causal\.head\.weight'"):
        dsa.convert_(model, tmp_path, min_rows=1)
    assert not list(tmp_path.iterdir())
    converted = dsa.convert_(model, tmp_path, min_rows=1, skip=["causal.tokens"])
    assert [table.name for table in converted.tables] == ["ngrams"]
    model.ngrams.close()
