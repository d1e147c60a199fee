"""A language model with a table of n-grams beside its token embedding, fine-tuned from disk.

The table is made on the meta device, so that it is never in memory, and `dsa.convert_` puts it on disk with
rows in bfloat16 and one number of Adagrad's per row. The model that was there stays as it is, token embedding
and tied head included: only rows of the table are learned, and the layer that brings them to its width. While
one batch is worked on, the rows of the next are announced. At the end the table is merged back.

Any causal model of Hugging Face transformers can take the place of the small one here: it has to take
``inputs_embeds`` and ``labels``.

References:
    Yu et al., "Scaling embedding layers in language models", 2025 (embeddings of n-grams beside tokens').
    Svenstrup et al., "Hash embeddings for efficient word representations", 2017 (n-grams that share rows).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final, NamedTuple, Protocol

import torch
from torch.nn import functional

from dsa import CombinedOptimizer, DiskSparseAdagrad, convert_, init, lookahead, materialize_
from dsa.examples import directory_given

__all__ = ["Causal", "Ngrams", "Output", "Small", "draw_batches", "main", "ngram_rows"]

ORDERS: Final = (2, 3)
VOCABULARY: Final = 64


class Output(NamedTuple):
    """What a causal model returns.

    Args:
        loss: Mean cross entropy of the next tokens, a scalar.
        logits: ``(B, T, V)``.
    """

    loss: torch.Tensor
    logits: torch.Tensor


class Causal(Protocol):
    """What a model has to offer."""

    def get_input_embeddings(self) -> torch.nn.Embedding:
        """Return the token embedding."""

    def __call__(self, *, inputs_embeds: torch.Tensor, labels: torch.Tensor) -> Output:
        """Return loss and logits; inputs ``(B, T, width)``, labels ``(B, T)``."""


class Small(torch.nn.Module):
    """A causal model of one layer whose head is tied to its token embedding, called as transformers' are.

    Args:
        width: Of its hidden states.
    """

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, width)
        self.layer = torch.nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True)
        self.head = torch.nn.Linear(width, VOCABULARY, bias=False)
        torch.nn.init.normal_(self.tokens.weight, std=width**-0.5)
        self.head.weight = self.tokens.weight

    def get_input_embeddings(self) -> torch.nn.Embedding:
        """Return the token embedding."""
        return self.tokens

    def forward(self, inputs_embeds: torch.Tensor, labels: torch.Tensor) -> Output:
        """Return loss and logits; inputs ``(B, T, width)``, labels ``(B, T)``."""
        mask = torch.nn.Transformer.generate_square_subsequent_mask(labels.shape[1])
        logits = self.head(self.layer(inputs_embeds, src_mask=mask, is_causal=True))
        return Output(functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits)


class Ngrams(torch.nn.Module):
    """A causal model, and a table from which each position gets the rows of the n-grams that end there.

    Args:
        causal: The model, which is left as it is.
        rows: Rows N of the table, on the meta device until it is converted.
        dim: Elements of a row D.
    """

    def __init__(self, causal: Causal, rows: int, dim: int) -> None:
        super().__init__()
        self.causal = causal
        self.requires_grad_(False)
        self.ngrams = torch.nn.Embedding(rows, dim, device="meta")
        self.widen = torch.nn.Linear(dim, causal.get_input_embeddings().embedding_dim, bias=False)

    def forward(self, tokens: torch.Tensor) -> Output:
        """Return loss and logits of a batch of tokens ``(B, T)``."""
        found = self.ngrams(ngram_rows(tokens, self.ngrams.num_embeddings)).sum(2)
        embedded = self.causal.get_input_embeddings()(tokens) + self.widen(found)
        return self.causal(inputs_embeds=embedded, labels=tokens)


def ngram_rows(tokens: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the rows of the n-grams that end at each position, hashed: ``(B, T, orders)`` int64."""
    found = []
    for order in ORDERS:
        key = torch.full_like(tokens, order)
        for back in reversed(range(order)):
            earlier = functional.pad(tokens, (back, 0), value=-1)[:, : tokens.shape[1]]
            key = (key ^ earlier) * 0x9E3779B97F4A7C1  # wraps around, as hashes do
            key = key ^ (key >> 32)
        found.append(key % rows)
    return torch.stack(found, -1)


def main(
    directory: str | os.PathLike[str],
    causal: Causal | None = None,
    rows: int = 100_000,
    dim: int = 16,
    steps: int = 300,
) -> tuple[list[float], Ngrams]:
    """Fine-tune, and return the losses and the model with its table merged back into memory."""
    torch.manual_seed(0)
    model = Ngrams(Small() if causal is None else causal, rows, dim)
    print(
        convert_(
            model,
            directory,
            min_rows=rows,  # the token embedding, to which the head is tied, stays in memory
            init=lambda name, rows, dim: init.Normal(rows, dim, 0.02, seed=1),
            state="rowwise_adagrad",
            state_dtype={"w": "bfloat16"},
            allocate="sparse",
        )
    )
    optimizer = CombinedOptimizer(
        model,
        dense=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        sparse=lambda parameters: DiskSparseAdagrad(parameters, lr=0.1, row_wise=True),
    )
    losses = []
    with optimizer:
        batches = lookahead(
            draw_batches(steps), optimizer, ids=lambda tokens: {"ngrams": ngram_rows(tokens, rows).flatten()}
        )
        for tokens in batches:
            optimizer.zero_grad()
            loss = model(tokens).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        materialize_(model)
    return losses, model


def draw_batches(steps: int, batch: int = 16, length: int = 32) -> Iterator[torch.Tensor]:
    """Yield batches of a made-up language, ``(B, T)``: what comes next depends on the two tokens before."""
    draws = torch.Generator().manual_seed(2)
    follows = torch.randint(0, VOCABULARY, (VOCABULARY, VOCABULARY, 2), generator=draws)
    for _ in range(steps):
        tokens = torch.randint(0, VOCABULARY, (batch, length), generator=draws)
        coins = torch.randint(0, 2, (batch, length), generator=draws)
        for position in range(2, length):
            tokens[:, position] = follows[
                tokens[:, position - 2], tokens[:, position - 1], coins[:, position]
            ]
        yield tokens


if __name__ == "__main__":
    taken, _ = main(directory_given())
    print(f"{len(taken)} steps, loss {taken[0]:.4f} -> {taken[-1]:.4f}")
