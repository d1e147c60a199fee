"""What finding rows by id costs: the map on disk beside a dict, RocksDB and LMDB, in one run.

Run by hand: ``python tests/benchmarks/id_map.py [--ids N] [--stores N] [--directory D]``; the stores, which
have fewer ids because they are slow, take part where rocksdict and lmdb are installed. Random ids are put in
batches of 2,048 and of 65,536, then looked up in another order, and others that are not there. It prints
rows a second of the wall and of the processors, bytes of an id on the disk, by how much the process's own
memory has grown, and the longest batch. What the stores do between, in threads of their own, counts for the
processors.
"""

import argparse
import importlib.util
import tempfile
import time
from pathlib import Path

import numpy as np

from dsa.backends.id_map import IdMap


def own_memory():
    """Return the process's anonymous memory in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


class Ours:
    def __init__(self, directory):
        self.path = directory / "ids"
        self.map = IdMap.create(self.path)
        self.put, self.find = self.map.put, self.map.find

    def close(self):
        self.map.close("done")
        return self.path.stat().st_blocks * 512


class Dict:
    """As a program would: arrays come and arrays go."""

    def __init__(self, directory):
        self.map = {}

    def put(self, ids, rows):
        self.map.update(zip(ids.tolist(), rows.tolist(), strict=True))

    def find(self, ids):
        get = self.map.get
        return np.fromiter((get(key, -1) for key in ids.tolist()), np.int64, len(ids))

    def close(self):
        return 0


def keys_of(ids):
    data = ids.astype(">i8").tobytes()
    return [data[start : start + 8] for start in range(0, len(data), 8)]


class Rocks:
    def __init__(self, directory):
        import rocksdict

        self.path = directory / "rocks"
        self.batch = rocksdict.WriteBatch
        self.db = rocksdict.Rdict(str(self.path), rocksdict.Options(raw_mode=True))

    def put(self, ids, rows):
        batch = self.batch(raw_mode=True)
        for key, value in zip(keys_of(ids), keys_of(rows), strict=True):
            batch.put(key, value)
        self.db.write(batch)

    def find(self, ids):
        found = self.db.get(keys_of(ids))
        return np.array([-1 if each is None else int.from_bytes(each, "big") for each in found])

    def close(self):
        self.db.close()
        return sum(file.stat().st_blocks * 512 for file in self.path.iterdir())


class Lmdb:
    def __init__(self, directory):
        import lmdb

        self.path = directory / "lmdb"
        self.env = lmdb.open(str(self.path), map_size=16 << 30, sync=False, writemap=True)

    def put(self, ids, rows):
        with self.env.begin(write=True) as transaction, transaction.cursor() as cursor:
            cursor.putmulti(sorted(zip(keys_of(ids), keys_of(rows), strict=True)))

    def find(self, ids):
        with self.env.begin(buffers=False) as transaction:
            found = [transaction.get(key) for key in keys_of(ids)]
        return np.array([-1 if each is None else int.from_bytes(each, "big") for each in found])

    def close(self):
        self.env.sync(True)
        self.env.close()
        return (self.path / "data.mdb").stat().st_blocks * 512


def timed(action, ids, batch):
    """Return rows a second by the wall and by the processors, and the longest batch in seconds."""
    longest, wall, processors = 0.0, time.perf_counter(), time.process_time()
    for start in range(0, len(ids), batch):
        began = time.perf_counter()
        action(start, min(len(ids), start + batch))
        longest = max(longest, time.perf_counter() - began)
    return (
        len(ids) / (time.perf_counter() - wall),
        len(ids) / (time.process_time() - processors),
        longest,
    )


def run(kind, directory, ids, others, batch):
    rows = np.arange(len(ids))
    order = np.random.default_rng(2).permutation(len(ids))
    shuffled = ids[order]
    before = own_memory()
    table = kind(directory)
    put = timed(lambda start, stop: table.put(ids[start:stop], rows[start:stop]), ids, batch)
    grown = own_memory() - before
    wrong = []

    def hit(start, stop):
        wrong.append(not np.array_equal(table.find(shuffled[start:stop]), order[start:stop]))

    def miss(start, stop):
        wrong.append((table.find(others[start:stop]) != -1).any())

    found, missed = timed(hit, ids, batch), timed(miss, others, batch)
    if any(wrong):
        raise SystemExit(f"{kind.__name__} has found something else")
    return put, found, missed, grown, table.close()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ids", type=int, default=10_000_000)
    parser.add_argument("--stores", type=int, default=1_000_000, help="ids for RocksDB and LMDB")
    parser.add_argument("--directory", type=Path, default=None)
    chosen = parser.parse_args()
    drawn = np.random.default_rng(0).integers(-(2**63), 2**63, 2 * chosen.ids, dtype=np.int64)
    kinds = [(Ours, chosen.ids), (Dict, chosen.ids), (Ours, chosen.stores)]
    kinds += [(Rocks, chosen.stores)] * (importlib.util.find_spec("rocksdict") is not None)
    kinds += [(Lmdb, chosen.stores)] * (importlib.util.find_spec("lmdb") is not None)
    with tempfile.TemporaryDirectory(dir=chosen.directory) as directory:
        run(Ours, Path(directory), drawn[:10_000], drawn[10_000:20_000], 2_048)  # compiles
    print("million rows a second, wall (processors); longest batch while putting")
    for batch in (2_048, 65_536):
        for kind, count in kinds:
            with tempfile.TemporaryDirectory(dir=chosen.directory) as directory:
                ids, others = drawn[:count], drawn[chosen.ids : chosen.ids + count]
                put, hit, miss, grown, stored = run(kind, Path(directory), ids, others, batch)
            rates = "  ".join(
                f"{name} {wall / 1e6:6.2f} ({processors / 1e6:6.2f})"
                for name, (wall, processors, _) in zip(("put", "hit", "miss"), (put, hit, miss), strict=True)
            )
            print(
                f"{kind.__name__:>6} {count:>10,} by {batch:>6,}: {rates}  longest {1e3 * put[2]:6.1f} ms  "
                f"{stored / count:5.1f} bytes an id  RssAnon {grown / count:+6.1f} bytes an id",
                flush=True,
            )


if __name__ == "__main__":
    main()
