"""Messages are part of the interface: each names a value, gives a reason, and says what to do.

They are read from the sources by `docs/messages.py`, which also serves the page of errors. A new message
that breaks a rule fails here, and so does an exception to the rules that is not needed any more.
"""

import importlib.util
import re
import sys
from collections import defaultdict
from fnmatch import fnmatchcase

import pytest
from pages import ROOT


def load_messages():
    """Return the module `docs/messages.py`; the folder is no package."""
    spec = importlib.util.spec_from_file_location("docs_messages", ROOT / "docs" / "messages.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


messages = load_messages()
FOUND = defaultdict(list)
for message in messages.collect():
    FOUND[message.module].append(message)

# A remedy begins with one of these.
IMPERATIVES = {
    "add", "build", "call", "check", "choose", "clip", "close", "convert", "copy", "correct", "count",
    "divide", "do", "drop", "end", "export", "flatten", "free", "give", "hand", "import", "install",
    "keep", "leave", "let", "load", "look", "lower", "make", "migrate", "mount", "move", "name", "open",
    "pass", "penalise", "pip", "put", "raise", "read", "rebuild", "reduce", "remove", "rename",
    "repeat", "replace", "reshape", "restore", "retry", "rewrite", "run", "save", "say", "scale", "set",
    "skip", "start", "swap", "take", "train", "try", "use", "verify", "wait", "write", "yield",
}  # fmt: skip
# A value known at run time, a quoted name, an argument with its value, a call, a name with an underscore, or
# an option.
NAMED = re.compile(r"\{\w+\}|'[^']+'|\w=|\w\(|\w_\w|--\w")
FIRST_PERSON = re.compile(r"\b(I|me|my|we|our|ours|us)\b")

NO_VALUE, NO_REMEDY = "names no value before its colon", "has no remedy, an imperative, after a colon"

# What breaks a rule on purpose: module and beginning of the message; `*` stands for anything.
DELIBERATE = {
    "the reason that another message gives in brackets or after its own": [
        ("dsa.checkpoint.manifest", "*"),
        ("dsa.checkpoint.names", "*"),
        ("dsa.checkpoint.plain", "the shard {key} is shorter"),
        ("dsa.checkpoint.reading", "{url} {REASONS}"),
        ("dsa.checkpoint.sources", "it *"),
        ("dsa.checkpoint.stored", "its *"),
        ("dsa.checkpoint.stored", "it *"),
        ("dsa.cli.demo.directory", "format {data}"),
        ("dsa.state.journal_format", "*"),
    ],
    "the words before or after it come from another message": [
        ("dsa.cli.demo.command", "--picture needs matplotlib"),
        ("dsa.state.directories", "{error}"),
        ("dsa.errors", "{message}"),
        ("dsa.state.matching", "in {path}, {error}"),
        ("dsa.state.table_files", "table {name} {refusal}"),
    ],
    "what the system or a library says, with its own class": [
        ("dsa.backends.system", "{code}"),
        ("dsa.checkpoint.exchange", "{code}"),
        ("dsa.checkpoint.remote", "{path}"),
        ("dsa.checkpoint.sources", "{url}"),
        ("dsa.checkpoint.transport", "{path}"),
    ],
    "for whoever tests or extends the package, in the form that Python or pytest has for it": [
        ("dsa.testing", "module {value} has no attribute"),
        ("dsa.testing.records", "{what}: field {name} differs"),
    ],
    "there is one such thing only, which has no name": [
        ("dsa.optimizers.arguments", "every table is flat"),
        ("dsa.checkpoint.places", "the address of the checkpoint is empty"),
        ("dsa.cli.demo.graph", "the edge list holds no edge"),
        ("dsa.optimizers.disk_parameter", "the weight of a table on disk can't be copied"),
        ("dsa.examples.own_backend", "the backend was closed"),
        ("dsa.rules.from_array", "the tensor is on the meta device"),
        ("dsa.inspection.*", "the entries of the journal hold"),
        ("dsa.inspection.*", "this view of a state is for reading"),
        ("dsa.optimizers.explicit", "an optimizer whose state lives on disk can't"),
        ("dsa.optimizers.explicit", "the state lives on disk and"),
        ("dsa.optimizers.sparse_riemannian_adam", "the tables of a state directory are fixed"),
        ("dsa.inspection.plots.spreads", "first moments were given"),
        ("dsa.inspection.plots.spreads", "no row has moments"),
        ("dsa.schema", "a schema without fields"),
        ("dsa.optimizers.sparse_methods", "an optimizer whose state lives on disk can't"),
        ("dsa.backends.writer", "the write queue was closed"),
    ],
    "news about something that was asked for: there is nothing to do": [
        ("dsa.optimizers.arguments", "retain_params=True keeps nothing here"),
        ("dsa.checkpoint.reading", "{url} was being replaced when its writer was killed"),
        ("dsa.state.migration", "the state in {path} was migrated"),
        ("dsa.state.opening", "resume=False replaces the state"),
    ],
}

# What breaks a rule and should not: take a line away with the fault.
ALLOWED = [*(each for group in DELIBERATE.values() for each in group)]


def faults(text, arguments=()):
    """Return what is wrong with a message, in words."""
    statement, _, rest = text.partition(": ")
    clauses = re.split(r"[,;:] |\bor |\band ", rest)
    wrong = {
        NO_VALUE: not NAMED.search(statement) and statement.split(" ")[0] not in arguments,
        NO_REMEDY: not any(clause.strip(" ,").split(" ")[0] in IMPERATIVES for clause in clauses),
        "ends with a period": text.endswith((".", "!", "?")),
        "speaks in the first person": FIRST_PERSON.search(text),
        "begins with a capital letter": re.match(r"[A-Z][a-z']+ ", text),
        "says 'invalid' instead of what is wrong": re.search(r"\binvalid\b", text, re.IGNORECASE),
    }
    return [fault for fault, found in wrong.items() if found]


def faulty(module):
    """Yield the messages of a module that break a rule, and which."""
    for message in FOUND[module]:
        if wrong := faults(message.text, message.arguments):
            yield message, wrong


def excuse(message):
    """Return the exception to the rules that is made for a message, or None."""
    for module, beginning in ALLOWED:
        pattern = f"{beginning}*" if beginning else ""
        if fnmatchcase(message.module, module) and fnmatchcase(message.text, pattern):
            return module, beginning
    return None


@pytest.mark.parametrize("module", sorted(FOUND))
def test_messages_name_a_value_a_reason_and_a_remedy(module):
    wrong = [
        f"line {message.line}: {message.kind}: {message.text!r} {' and '.join(faults)}"
        for message, faults in faulty(module)
        if excuse(message) is None
    ]
    assert not wrong, "\n".join(
        [f"{module}: mend the message, or list it in DELIBERATE with a reason", *wrong]
    )


def test_every_exception_to_the_rules_is_needed():
    used = {excuse(message) for module in FOUND for message, _ in faulty(module)}
    idle = [each for each in ALLOWED if each not in used]
    assert not idle, f"these messages are gone or keep the rules now: take them off the lists: {idle}"


def test_the_messages_are_found():
    assert sum(map(len, FOUND.values())) > 300
    texts = {message.text for messages in FOUND.values() for message in messages}
    assert "resume={resume} is not a choice: pass None, True or False" in texts
    locked = [message for message in FOUND["dsa.state.holding"] if message.kind == "StateLockedError"]
    assert [message.function for message in locked] == ["_in_use"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("raise ValueError(f'k={k!r} is {what}: pass {1 + other.k:g}')", ["k={k} is {what}: pass {k}"]),
        ("raise OSError(errno.EIO, 'a: b')", ["a: b"]),
        ("notify('a' if b else f'{c()}', StateWarning)", ["a", "{value}"]),
        ("TEXT = 'one: two'\nraise TypeError(TEXT)", ["one: two"]),
        ("raise KeyError", [""]),
        ("raise", []),
        ("def f():\n return OddError(f'{part()}: c')\ndef part():\n return f'a {b}'", ["a {b}: c"]),
        ("class OddError(OSError):\n def __init__(self): super().__init__(1, 'x: y')", ["x: y"]),
        ("warnings.warn('a' + b, ResourceWarning)", ["a{b}"]),
        ("print('no message')", []),
    ],
)
def test_what_counts_as_a_message(source, expected):
    assert [message.text for message in messages.messages_of(source, "module")] == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("k={k} is out of range: pass a number >= 0", []),
        ("block {b} is damaged: somebody changed it; restore it from a copy", []),
        ("the journal is damaged: restore it", [NO_VALUE]),
        ("k={k} is out of range: a curvature is a number", [NO_REMEDY]),
        ("pass another k, {k} is wrong", [NO_REMEDY]),
        ("k={k} is out of range: pass another.", ["ends with a period"]),
        ("we can't use k={k}: pass another", ["speaks in the first person"]),
        ("Can't use k={k}: pass another", ["begins with a capital letter"]),
        ("k={k} is invalid: pass another", ["says 'invalid' instead of what is wrong"]),
    ],
)
def test_what_counts_as_a_fault(text, expected):
    assert faults(text) == expected
    assert faults("params is empty: pass one", ("params",)) == []
