"""JSON of older releases: read within bounds, and checked as values are taken out."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from dsa.errors import StateCorruptError, StateIncompleteError, StateMismatchError
from dsa.state.legacy.files import Shape, regular_size

__all__ = ["Document", "brief", "read_document"]

_MOST_BYTES: Final = 1 << 20
"""More than any release wrote, and little enough that no content can take much memory."""

_LARGEST: Final = 2**63 - 1
_FLOAT32: Final = ("float32", "torch.float32", "<f4", "f4")

_reprs = reprlib.Repr()
_reprs.maxstring = _reprs.maxother = _reprs.maxlong = 120


def brief(value: object) -> str:
    """Return a representation that is short, however long or deep the value is."""
    return _reprs.repr(value)


@final
@dataclass(frozen=True, slots=True)
class Document:
    """A JSON object, or one inside it, and where it is from.

    Args:
        path: The file.
        values: The object.
        place: Where in the file it stands, for messages.
    """

    path: Path
    values: Mapping[str, Any]
    place: str = ""

    def value(self, *keys: str) -> Any:  # noqa: ANN401 - JSON is untyped until it has been checked
        """Return the value of the first of some keys that is there, or None; null is as good as absent."""
        return next((self.values[key] for key in keys if self.values.get(key) is not None), None)

    def part(self, value: object, place: str) -> Document:
        """Return an object inside this one.

        Raises:
            StateCorruptError: the value is not an object.
        """
        if not isinstance(value, dict):
            raise self.wrong(place, value, "an object")
        return Document(self.path, value, place)

    def count(self, *keys: str, least: int = 0) -> int | None:
        """Return an integer by the first of some keys that is there, or None.

        Raises:
            StateCorruptError: the value is not an integer, or out of range.
        """
        value = self.value(*keys)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _LARGEST:
            raise self.wrong(keys[0], value, f"an integer from {least}")
        return value

    def curvature(self) -> float | None:
        """Return the curvature magnitude, or None.

        Raises:
            StateCorruptError: the value is not one.
        """
        value = self.value("curvature", "k")
        if value is None:
            return None
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _LARGEST:
            value = float(value)
        if not isinstance(value, float) or not math.isfinite(value) or value < 0.0:
            raise self.wrong("curvature", value, "a finite number >= 0")
        return value

    def shape(self) -> Shape | None:
        """Return rows and dim, or None.

        Raises:
            StateCorruptError: the value is not a shape.
        """
        shape = self.value("shape")
        if shape is None:
            rows = self.count("num_rows", "rows", least=1)
            dim = self.count("dim", "embedding_dim", least=1)
            return None if rows is None or dim is None else (rows, dim)
        if not isinstance(shape, list) or len(shape) != 2:
            raise self.wrong("shape", shape, "a list of rows and dim")
        sizes = Document(self.path, {"rows": shape[0], "dim": shape[1]}, self.place).shape()
        if sizes is None:
            raise self.wrong("shape", shape, "a list of rows and dim")
        return sizes

    def version(self) -> int | None:
        """Return the format version, or None; a text by ``version`` is the release's and not the format's.

        Raises:
            StateCorruptError: the value is not an integer.
        """
        text = isinstance(self.value("version"), str)
        return self.count("format_version", *(() if text else ("version",)))

    def require_version(self, *known: int | None) -> None:
        """Refuse a format version that is not known here.

        Raises:
            StateMismatchError: it is another one.
        """
        if (version := self.version()) not in known:
            raise StateMismatchError(
                f"{self.name} has format version {version!r} where {known[0]} is expected: "
                "open it with the release that wrote it"
            )

    def require_float32(self) -> None:
        """Refuse another dtype than that of every older release.

        Raises:
            StateMismatchError: it is another one.
        """
        if (dtype := self.value("dtype")) is not None and dtype not in _FLOAT32:
            raise StateMismatchError(
                f"{self.name} states the dtype {brief(dtype)} where older releases stored 'float32': restore "
                "it from a copy, or read the data with numpy"
            )

    def require_finished(self) -> None:
        """Refuse a description that says that a replacement of the state was under way.

        Raises:
            StateIncompleteError: it does.
        """
        for key, value in self.values.items():
            if "reinit" in key.lower() and value:
                raise StateIncompleteError(
                    f"{self.name} says {key!r}: the state was being replaced when its process ended; restore "
                    "the directory from a copy, or pass resume=False to start over"
                )

    @property
    def name(self) -> str:
        """What a message calls it."""
        return f"{str(self.path)!r}" + (f" ({self.place})" if self.place else "")

    def wrong(self, key: str, value: object, expected: str) -> StateCorruptError:
        """Return the error for a value that can't be used."""
        return StateCorruptError(
            f"{self.name} states {brief(value)} for {key!r} where {expected} is expected: restore the file "
            "from a copy"
        )

    def lacking(self, *keys: str) -> StateCorruptError:
        """Return the error for a value that is not there."""
        return StateCorruptError(
            f"{self.name} lacks {' or '.join(map(repr, keys))}: restore the file from a copy, or add the "
            "value if you know it"
        )


def read_document(path: Path) -> Document:
    """Read a JSON object from a file.

    Raises:
        StateCorruptError: the file is missing, too long, or something else.
    """
    size = regular_size(path)
    if size > _MOST_BYTES:
        raise StateCorruptError(
            f"{str(path)!r} has {size:,} bytes where older releases wrote less than {_MOST_BYTES:,}: restore "
            "it from a copy"
        )
    with open(path, "rb") as file:
        raw = file.read(_MOST_BYTES)
    try:
        values = json.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        raise StateCorruptError(
            f"{str(path)!r} is not JSON ({error}): restore it from a copy, or write it anew"
        ) from error
    if not isinstance(values, dict):
        raise StateCorruptError(
            f"{str(path)!r} holds {brief(values)} instead of an object: restore it from a copy"
        )
    return Document(path, values)
