"""From the users' names of tables, which may be any text, to names of groups, which are directories.

A name that is harmless everywhere is used as it is. Any other becomes a readable part and a hash of the true
name, which is kept in the attributes. Harmless means: ASCII letters, digits, ``-``, ``_`` and ``.`` inside;
not long; not reserved on some system or in Zarr; and not equal to another table's but for the case of
letters, because some file systems would then make them one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Any, Final

__all__ = ["group_names", "is_group_name", "name_from_json", "name_to_json"]

_SAFE: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9_-])?")
_RESERVED: Final = re.compile(r"(?:con|prn|aux|nul|com\d|lpt\d)(?:\..*)?|zarr\.json", re.IGNORECASE)
_READABLE: Final = 40


def is_group_name(text: Any) -> bool:  # noqa: ANN401 - comes from JSON
    """Tell whether a group may have this name: one harmless step down, never out of the checkpoint."""
    return isinstance(text, str) and bool(_SAFE.fullmatch(text)) and not _RESERVED.fullmatch(text)


def group_names(names: Iterable[str]) -> list[str]:
    """Return a group name for each table: all distinct on every file system.

    Example:
        >>> group_names(["entity", "enc.emb", "Entity", "../evil"])
        ['entity', 'enc.emb', 'Entity-2ed3bb60c9af0477', 'evil-2d6afc710923ce47']
    """
    taken: set[str] = set()
    chosen = []
    for name in names:
        group, salt = name, ""
        while not is_group_name(group) or group.lower() in taken:
            group, salt = _hashed(name, salt), salt + "+"
        taken.add(group.lower())
        chosen.append(group)
    return chosen


def _hashed(name: str, salt: str) -> str:
    readable = re.sub(r"[^A-Za-z0-9_-]", "_", name.encode("ascii", "replace").decode())[:_READABLE]
    digest = hashlib.sha256((name + salt).encode("utf-8", "surrogatepass")).hexdigest()
    return f"{readable.strip('_-') or 'table'}-{digest[:16]}"


def name_to_json(name: str) -> str | dict[str, str]:
    """Return a name for a JSON document; half of a surrogate pair, which JSON can't hold, makes it hex."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return {"utf-8-hex": name.encode("utf-8", "surrogatepass").hex()}
    return name


def name_from_json(data: Any) -> str:  # noqa: ANN401 - JSON is untyped until it has been checked here
    r"""Return the name that `name_to_json` wrote down.

    Raises:
        ValueError: it is none.

    Example:
        >>> name_to_json("a/b"), name_to_json("\ud800")
        ('a/b', {'utf-8-hex': 'eda080'})
        >>> name_from_json(name_to_json("\ud800")) == "\ud800"
        True
    """
    if isinstance(data, str) and data:
        return data
    if isinstance(data, dict) and isinstance(data.get("utf-8-hex"), str):
        return bytes.fromhex(data["utf-8-hex"]).decode("utf-8", "surrogatepass")
    raise ValueError(f"{data!r} is no table's name")
