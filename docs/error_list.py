"""The page of errors: what each class means, and what its messages say is to be done."""

from __future__ import annotations

import inspect
import re
from itertools import groupby

from messages import collect

from dsa import errors

__all__ = ["error_list"]


def error_list() -> str:
    """Return a section for each class of `dsa.errors`, as Markdown."""
    values = vars(errors).values()
    kinds = [each for each in values if isinstance(each, type) and each.__module__ == errors.__name__]
    texts: dict[str, set[str]] = {kind.__name__: set() for kind in kinds}
    for message in collect():
        texts.setdefault(message.kind, set()).add(message.text)
    return "\n".join(_section(kind, texts[kind.__name__]) for kind in kinds)


def _section(kind: type, texts: set[str]) -> str:
    summary = (inspect.getdoc(kind) or "").partition("\n\nArgs:")[0].replace("\n", " ")
    bases = ", ".join(f"`{base.__name__}`" for base in kind.__bases__)
    lines = [f"## {kind.__name__}", "", f"{summary} (Derived from {bases}.)", ""]
    parted = [text.partition(": ") for text in sorted(texts, key=str.lower)]
    for statement, group in groupby(parted, key=lambda parts: parts[0]):
        lines += [_shown(statement), *(f": {_shown(remedy)}" for _, _, remedy in group if remedy), ""]
    return "\n".join(lines)


def _shown(text: str) -> str:
    """Return a message as Markdown; what is known at run time only stands in italics."""
    parts = re.split(r"\{(\w+)\}", text)
    return "".join(f"*{part}*" if number % 2 else _escaped(part) for number, part in enumerate(parts))


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_<>\[\]{}#|~])", r"\\\1", text)
