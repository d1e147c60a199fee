"""The recipe of a table of n-grams, beside causal models of transformers that are made from a config."""

import numpy as np
import pytest
import torch
from recipes import needs

from dsa.examples import language_model as recipe

pytestmark = needs("transformers")


def gpt2(transformers):
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=recipe.VOCABULARY,
            n_embd=16,
            n_layer=1,
            n_head=2,
            n_positions=32,
            initializer_range=0.2,
            bos_token_id=None,
            eos_token_id=None,
        )
    ).eval()


def llama(transformers):
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=recipe.VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            tie_word_embeddings=True,
            initializer_range=0.2,
        )
    ).eval()


@pytest.mark.parametrize("make", [gpt2, llama])
def test_a_table_of_ngrams_beside_a_causal_model(make, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    causal = make(transformers)
    before = {name: value.clone() for name, value in causal.state_dict().items()}
    losses, model = recipe.main(tmp_path, causal, rows=20_000, dim=8, steps=60)
    assert np.mean(losses[-5:]) < 0.95 * np.mean(losses[:5])
    assert all(torch.equal(value, before[name]) for name, value in causal.state_dict().items())
    assert causal.lm_head.weight is causal.get_input_embeddings().weight
    tokens = next(recipe.draw_batches(1))
    again = recipe.Ngrams(causal, 20_000, 8)
    again.ngrams.to_empty(device="cpu")
    again.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)
