"""Where the files of a state directory are: a table's is named by its generation, a journal by its life."""

import json
import shutil
from pathlib import Path

from dsa.state.holding import file_numbers
from dsa.state.metadata import METADATA_NAME, read_metadata, table_file_name, write_metadata


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


def copy_as_killed(source, target):
    """Copy a directory that is open while nothing moves in it, to be as a kill would leave it.

    The copy of an open directory is refused, by the numbers of its files; a kill would leave those.
    """
    shutil.copytree(source, target)
    metadata = read_metadata(Path(target))
    if metadata.files:
        metadata.files = file_numbers(Path(target), [name for name in metadata.files if name != "."])
        write_metadata(Path(target), metadata)
    return target


def record_checksum(words):
    """The checksum of a record's words, as `dsa.kernels.checksums` tells it, by Python's integers."""
    total = 0
    for place, word in enumerate(words, 1):
        factor = place
        for shift, multiplier in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
            factor = ((factor ^ (factor >> shift)) * multiplier) & 0xFFFFFFFF
        value = int(word) & 0xFFFFFFFF
        total += (value ^ (value >> 16) ^ (value >> 23)) * (factor | 1)
    return total & 0xFFFFFFFF
