"""Every message of an error or a warning in the sources of the package, found without importing them.

A message is what is handed to an exception wherever one is made, or to `notify` or `warnings.warn`. Parts
that are only known at run time are written ``{name}``.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

PACKAGE: Final = Path(__file__).parents[1] / "dsa"

# Their constructors take values and compose the text themselves.
_COMPOSING: Final = ("DiskSpaceError",)


class Message(NamedTuple):
    """One message.

    Args:
        kind: The class of the error or the warning.
        text: The message, with ``{name}`` for each value.
        module: Where it is, such as ``dsa.state.state_directory``.
        function: The innermost function or class around it; empty at the top of a module.
        line: The line in the module's file.
        arguments: The names of the arguments of that function.
    """

    kind: str
    text: str
    module: str
    function: str
    line: int
    arguments: tuple[str, ...]


def collect(package: Path = PACKAGE) -> list[Message]:
    """Return the messages of a package, module by module in the order of the sources."""
    found: list[Message] = []
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found += messages_of(file.read_text("utf-8"), name)
    return found


def messages_of(source: str, module: str) -> list[Message]:
    """Return the messages of one module's source."""
    tree = ast.parse(source)
    return sorted(_Finder(module, tree).found(), key=lambda message: message.line)


def is_exception(name: str) -> bool:
    """Whether a name is that of an exception: one of Python's, or by its ending one of a library's."""
    known = getattr(builtins, name, None)
    builtin = isinstance(known, type) and issubclass(known, BaseException)
    return builtin or name.endswith(("Error", "Warning"))


class _Finder(ast.NodeVisitor):
    """Walks a module and remembers the function it is in."""

    def __init__(self, module: str, tree: ast.Module) -> None:
        self._module, self._tree = module, tree
        self._scopes: list[ast.AST] = [tree]
        self._found: list[Message] = []

    def found(self) -> list[Message]:
        """Return the messages of the module."""
        self.visit(self._tree)
        return self._found

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._within(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._within(node)

    def _within(self, node: ast.AST) -> None:
        self._scopes.append(node)
        self.generic_visit(node)
        self._scopes.pop()

    def visit_Raise(self, node: ast.Raise) -> None:
        if isinstance(node.exc, ast.Name) and is_exception(node.exc.id):
            self._add(node.exc.id, "", node)  # a class without a message
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        kind, argument = self._subject(node)
        if kind and argument is not None and not isinstance(argument, ast.Starred):
            for text in self._texts(argument):
                self._add(kind, text, node)
        elif kind:
            self._add(kind, "", node)
        self.generic_visit(node)

    def _subject(self, node: ast.Call) -> tuple[str, ast.expr | None]:
        """Return the kind of message that a call makes and its text, or an empty kind."""
        first = node.args[0] if node.args else None
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in ("notify", "warn"):
            category = node.args[1] if len(node.args) > 1 else None
            return (category.id if isinstance(category, ast.Name) else "Warning"), first
        if ast.unparse(node.func) == "super().__init__":
            name = next(scope.name for scope in reversed(self._scopes) if isinstance(scope, ast.ClassDef))
        elif name in _COMPOSING:
            return "", None
        if len(node.args) > 1 and not isinstance(first, ast.Starred):
            first = node.args[1]  # after an error number
        return (name, first) if is_exception(name) else ("", None)

    def _add(self, kind: str, text: str, node: ast.expr | ast.stmt) -> None:
        function = ".".join(str(getattr(scope, "name", "")) for scope in self._scopes[1:])
        inner = self._scopes[-1]
        named = inner.args if isinstance(inner, ast.FunctionDef) else None
        arguments = () if named is None else (*named.posonlyargs, *named.args, *named.kwonlyargs)
        names = tuple(each.arg for each in arguments)
        self._found.append(Message(kind, text, self._module, function, node.lineno, names))

    def _texts(self, node: ast.expr) -> Iterator[str]:
        """Yield what an expression may say: one text for each branch of a choice."""
        if isinstance(node, ast.IfExp):
            yield from self._texts(node.body)
            yield from self._texts(node.orelse)
        elif isinstance(node, ast.Constant):
            yield str(node.value)
        elif isinstance(node, ast.JoinedStr):
            yield "".join(self._part(part) for part in node.values)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            yield from (left + right for left in self._texts(node.left) for right in self._texts(node.right))
        elif isinstance(node, ast.Name) and (value := self._assigned(node.id)) is not None:
            yield from self._texts(value)
        else:
            yield _placeholder(node)

    def _part(self, part: ast.expr) -> str:
        if not isinstance(part, ast.FormattedValue):
            return next(self._texts(part))
        whole = part.value
        value = self._assigned(whole.id) if isinstance(whole, ast.Name) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            return value.value
        if isinstance(whole, ast.Call) and isinstance(whole.func, ast.Name):
            return self._returned(whole.func.id) or _placeholder(whole)
        return _placeholder(whole)

    def _returned(self, name: str) -> str:
        """Return the text that a function of this module returns, if it is always one."""
        for function in self._tree.body:
            if isinstance(function, ast.FunctionDef) and function.name == name:
                values = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
                if len(values) == 1 and isinstance(values[0], ast.JoinedStr):
                    self._scopes.append(function)
                    text = next(self._texts(values[0]))
                    self._scopes.pop()
                    return text
        return ""

    def _assigned(self, name: str) -> ast.expr | None:
        """Return the text assigned to a name in the function or in the module, if it is always one."""
        for scope in reversed(self._scopes):
            values = [
                node.value
                for node in ast.walk(scope)
                if isinstance(node, ast.Assign | ast.AnnAssign)
                and node.value is not None
                and any(
                    isinstance(target, ast.Name) and target.id == name
                    for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
                )
            ]
            if values:
                text = isinstance(values[0], ast.Constant | ast.JoinedStr | ast.IfExp | ast.BinOp)
                return values[0] if len(values) == 1 and text else None
        return None


def _placeholder(node: ast.expr) -> str:
    """Return ``{name}`` for a value: the last name in its expression that is not a function's."""
    functions = {id(inner.func) for inner in ast.walk(node) if isinstance(inner, ast.Call)}
    names = [
        inner.attr if isinstance(inner, ast.Attribute) else inner.id
        for inner in ast.walk(node)
        if isinstance(inner, ast.Name | ast.Attribute) and id(inner) not in functions
    ]
    names = [name for name in names if not name.startswith("__") and name not in ("self", "type")]
    return "{" + (names[0].strip("_") if names else "value") + "}"
