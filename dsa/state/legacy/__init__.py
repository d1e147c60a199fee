"""State directories and checkpoints of releases 0.1.0, 0.2.0 and 0.3.0, read and never written.

What each release left, for a table called ``emb`` of N rows and D elements:

- *0.1.0*: ``emb_w.dat``, ``emb_m.dat`` and ``emb_v.dat``, float32 ``(N, D)`` in C order without a header.
  Neither shape nor curvature is recorded: the caller says them. The weights are kept; moments and counters
  start anew, because that release's moments were not tangent vectors.
- *0.2.0*: also ``emb_meta.json`` with format version 1, and perhaps ``emb_t.dat``. The weights are kept;
  moments and counters start anew, as above.
- *0.3.0*: format version 2, with ``emb_t.dat``, int32 ``(N,)``, and ``dsa_global_meta.json``. All is kept;
  ``v`` is per coordinate.
- *a checkpoint of 0.3.0*: ``checkpoint.json`` and the files it lists by plain names, with their sizes and
  SHA-256 sums. All is kept.
- *a checkpoint of 0.2.0*: JSON that names files by absolute paths. It is refused, with advice.

The documentation of those releases names the files but, apart from ``format_version``, not the keys inside
the JSON. The keys assumed are these; of several, the first that is there counts:

- format version: ``format_version``, or an integer ``version``;
- shape: ``shape``, a list of rows and dim; or ``num_rows`` or ``rows``, with ``dim`` or ``embedding_dim``;
- dtype: ``dtype``, which may be absent, since every release stored float32;
- curvature: ``curvature`` or ``k``, of a table or of the whole state; where both say it they must agree;
- global step: ``global_step`` or ``step``;
- tables of a checkpoint: ``params``, ``parameters`` or ``tables``, an object of names, which may be absent;
- a file of a checkpoint: any object with ``sha256``, and with ``size`` or ``bytes``; its name is its
  ``file``, ``path`` or ``name``, or else the key that it stands under;
- shape of a table in a checkpoint: in the object of its name, in its ``<name>_meta.json``, or the caller's.

Also assumed:

- Numbers are little-endian.
- A file in a state directory may be a symbolic link; a file of a checkpoint may not lead out of it.
- A file whose name contains ``reinit`` and is not a table's, or such a key with a true value in a
  description, is the marker that 0.3.0 left while it replaced a state.
- Tables of format version 1 beside a ``dsa_global_meta.json`` are read as 0.2.0: only weights are taken.
- A checkpoint without a format version is one of 0.3.0: that release's are the only portable ones.
- Other keys, such as ``algorithm``, say nothing about what is stored, and files of other names are not ours:
  neither is looked at.

A run that was killed left no mark. Its rows are as the last writes left them, and its global step is that of
the last shutdown.
"""

from __future__ import annotations

from dsa.state.legacy.given import Curvatures, Shapes
from dsa.state.legacy.reading import LegacyRelease, find_legacy, legacy_files, read_legacy

__all__ = ["Curvatures", "LegacyRelease", "Shapes", "find_legacy", "legacy_files", "read_legacy"]
