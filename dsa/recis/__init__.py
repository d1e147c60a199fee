"""The names that programs written for RecIS call, over tables on disk: optimizers, hash tables, clipping.

The formulas are those of RecIS 1.2, also where its documents say something else: `SparseAdam` knows no decay,
`SparseAdamWTF` and `AdamWTF` don't scale it by the learning rate, and micro-batches are summed, not averaged.
What differs is listed in the guide, "From RecIS".
"""

from dsa.recis.adamw_tf import AdamWTF
from dsa.recis.gradients import clip_grad_by_global_norm_, filter_out_sparse_param
from dsa.recis.hash_table import AdmitHook, FilterHook, HashTable, HashTableFilterHook
from dsa.recis.sparse_adagrad import (
    SparseAdagrad,
    SparseAdagradSum,
    SparseRowWiseAdagrad,
    SparseRowWiseAdagradSum,
)
from dsa.recis.sparse_adam import SparseAdam, SparseAdamW, SparseAdamWTF

__all__ = [
    "AdamWTF",
    "AdmitHook",
    "FilterHook",
    "HashTable",
    "HashTableFilterHook",
    "SparseAdagrad",
    "SparseAdagradSum",
    "SparseAdam",
    "SparseAdamW",
    "SparseAdamWTF",
    "SparseRowWiseAdagrad",
    "SparseRowWiseAdagradSum",
    "clip_grad_by_global_norm_",
    "filter_out_sparse_param",
]
