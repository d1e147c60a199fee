"""Where the files of a state directory are: a table's is named by its generation, a journal by its life."""

import json
from pathlib import Path

from dsa.metadata import METADATA_NAME, table_file_name


def description(directory):
    """The content of the description, read without dsa."""
    return json.loads((Path(directory) / METADATA_NAME).read_text())["content"]


def table_file(directory, name):
    """The file that a table's records are in now."""
    (table,) = [each for each in description(directory)["tables"] if each["name"] == name]
    kind = table["backend"].get("kind", "memmap")
    return Path(directory) / table_file_name(name, table.get("generation", 0), kind)


def journal_file(directory):
    """The journal of a directory that is open or was never closed."""
    content = description(directory)
    file = Path(directory) / f"dsa.journal.{content['life']}"
    assert content["journal"]
    assert file.is_file()
    return file
