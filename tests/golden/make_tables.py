"""Makes the tables under `tables/`: a memmap file and a Zarr table of version 2, by numpy and json alone.

Run it as ``python make_tables.py DIRECTORY``; it gives the same bytes everywhere. Nothing of dsa is imported,
so that reader and writer can't share a mistake. `read_memmap` and `read_zarr` read such tables, whoever wrote
them, and check every checksum.
"""

import json
import sys
import zlib
from pathlib import Path

import numpy as np

ROWS, DIM, PAGE = 5, 3, 4096
FIELDS = {"w": ("<f4", DIM), "m": ("<f4", DIM), "v": ("<f4", DIM), "t": ("<i4", 1), "s": ("<i4", 1)}
NAMES = {"<f4": "float32", "<i4": "int32"}
SCHEMA = {
    "dim": DIM,
    "fields": [
        {"dtype": NAMES[dtype], "name": name, "per": "element" if count > 1 else "row"}
        for name, (dtype, count) in FIELDS.items()
    ],
}
HEADER = {
    "allocate": "reserve",
    "id": "0123456789abcdef",
    "kind": "memmap",
    "rows": ROWS,
    "schema": SCHEMA,
    "stride": 48,
}
ZARR = {
    "allocate": "reserve",
    "compression": None,
    "cuts": {name: [ROWS, ROWS] for name in (*FIELDS, "c")},
    "id": "fedcba9876543210",
    "kind": "zarr",
    "rows": ROWS,
    "schema": SCHEMA,
}


def record_type(fields):
    return np.dtype([(name, dtype, (count,) if count > 1 else ()) for name, (dtype, count) in fields.items()])


def records():
    """Five records; the third was never written."""
    table = np.zeros(ROWS, record_type(FIELDS))
    places = np.arange(1, ROWS * DIM + 1).reshape(ROWS, DIM)
    table["w"], table["m"], table["v"] = places / 8 - 1, places / -64, places / 1024
    table["t"], table["s"] = np.arange(ROWS), np.arange(ROWS) + 7
    table[2] = np.zeros(1, table.dtype)
    return table


def checksum(words):
    """The checksum of a record's words, with Python's integers."""
    total = 0
    for place, word in enumerate(words, 1):
        factor = place
        factor = (factor ^ factor >> 16) * 0x85EBCA6B & 0xFFFFFFFF
        factor = (factor ^ factor >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
        factor = (factor ^ factor >> 16) | 1
        word &= 0xFFFFFFFF
        total += (word ^ word >> 16 ^ word >> 23) * factor
    return total & 0xFFFFFFFF


def checksums(table):
    words = (
        np.ascontiguousarray(table).view(np.uint8).reshape(len(table), -1).view("<u4").reshape(len(table), -1)
    )
    return np.array([checksum(map(int, row)) for row in words], "<u4")


def header_page(header):
    text = json.dumps(header, sort_keys=True).encode()
    return (b"dsa-table-2\n" + f"{zlib.crc32(text):08x}\n".encode() + text + b"\n").ljust(PAGE, b"\0")


def make_memmap(path):
    table = records()
    rows = zip(table, checksums(table), strict=True)
    path.write_bytes(header_page(HEADER) + b"".join(row.tobytes() + check.tobytes() for row, check in rows))


def read_memmap(path):
    """Return the header and the records of a file of version 2, whose records have no padding."""
    content = path.read_bytes()
    magic, check, text = content[:PAGE].split(b"\n", 3)[:3]
    assert magic == b"dsa-table-2"
    assert int(check, 16) == zlib.crc32(text)
    header = json.loads(text)
    fields = {
        each["name"]: (f"<{each['dtype'][0]}4", header["schema"]["dim"] if each["per"] == "element" else 1)
        for each in header["schema"]["fields"]
    }
    dtype = record_type(fields)
    rows = np.frombuffer(content, np.uint8, offset=PAGE).reshape(header["rows"], header["stride"])
    table = rows[:, : dtype.itemsize].copy().view(dtype)[:, 0]
    stored = rows[:, dtype.itemsize : dtype.itemsize + 4].copy().view("<u4")[:, 0]
    assert stored.tolist() == checksums(table).tolist()
    return header, table


def crc32c(data):
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def array_document(dtype, count, attributes):
    tail = [count] if count > 1 else []
    bytes_codec = {"configuration": {"endian": "little"}, "name": "bytes"}
    sharding = {
        "chunk_shape": [ROWS, *tail],
        "codecs": [bytes_codec],
        "index_codecs": [bytes_codec, {"name": "crc32c"}],
        "index_location": "end",
    }
    return {
        "attributes": attributes,
        "chunk_grid": {"configuration": {"chunk_shape": [ROWS, *tail]}, "name": "regular"},
        "chunk_key_encoding": {"configuration": {"separator": "/"}, "name": "default"},
        "codecs": [{"configuration": sharding, "name": "sharding_indexed"}],
        "data_type": NAMES[dtype],
        "dimension_names": ["row", "dim"][: 1 + len(tail)],
        "fill_value": 0.0 if dtype == "<f4" else 0,
        "node_type": "array",
        "shape": [ROWS, *tail],
        "zarr_format": 3,
    }


def make_zarr(path):
    table = records()
    arrays = {name: table[name] for name in FIELDS} | {"c": checksums(table)}
    for number, (name, values) in enumerate(arrays.items()):
        dtype, count = FIELDS.get(name, ("<i4", 1))
        file = path / name / ("c/0/0" if count > 1 else "c/0")
        file.parent.mkdir(parents=True)
        label = f"dsa-shard-1 {ZARR['id']} {number} 0\n".encode().ljust(64, b"\0")
        index = np.array([0, values.nbytes], "<u8").tobytes()
        file.write_bytes(values.tobytes() + label + index + crc32c(index).to_bytes(4, "little"))
        attributes = {"dsa_field": [ZARR["id"], name]}
        write_json(path / name / "zarr.json", array_document(dtype, count, attributes))
    root = {"attributes": {"dsa_table": ZARR}, "node_type": "group", "zarr_format": 3}
    write_json(path / "zarr.json", root)


def read_zarr(path):
    """Return the description and the records of a table whose fields are one shard each."""
    description = json.loads((path / "zarr.json").read_bytes())["attributes"]["dsa_table"]
    table = np.zeros(description["rows"], record_type(FIELDS))
    for name, (dtype, count) in FIELDS.items():
        content = (path / name / ("c/0/0" if count > 1 else "c/0")).read_bytes()
        table[name] = np.frombuffer(content, dtype, len(table) * count).reshape(table[name].shape)
    stored = np.frombuffer((path / "c" / "c" / "0").read_bytes(), "<u4", len(table))
    assert stored.tolist() == checksums(table).tolist()
    return description, table


def write_json(path, values):
    path.write_bytes(json.dumps(values, indent=1, sort_keys=True).encode())


def make(directory):
    directory.mkdir(parents=True, exist_ok=True)
    make_memmap(directory / "memmap.rec")
    make_zarr(directory / "zarr")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
