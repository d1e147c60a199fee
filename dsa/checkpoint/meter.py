"""How far an export, an import or a copy is: a bar, a function of the caller's, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm.auto import tqdm

__all__ = ["Advance", "Progress", "metered"]

Progress = bool | Callable[[int, int], None]
"""True for a bar; or a function that is called with the bytes done and their total."""

Advance = Callable[[int], None]


@contextmanager
def metered(progress: Progress, total: int, what: str) -> Iterator[Advance]:
    """Yield a function that is told of more bytes, in the thread that entered.

    Args:
        progress: See `Progress`.
        total: Bytes in all.
        what: The bar's label.

    Example:
        >>> with metered(lambda done, total: print(done, "of", total), 30, "export") as advance:
        ...     advance(10), advance(20)
        10 of 30
        30 of 30
        (None, None)
    """
    if progress is True:
        with tqdm(total=total, desc=what, unit="B", unit_scale=True) as bar:
            yield bar.update
        return
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        if callable(progress):
            progress(done, total)

    yield advance
