"""Whatever a store leaves out or gets wrong: nothing is called damaged but bytes that were read as asked."""

import http.server
import threading

import fsspec
import pytest
from checkpoint_samples import assert_same, export, files_of, sample_content, sample_table
from fsspec.implementations.memory import MemoryFileSystem

import dsa
from dsa.checkpoint import copy_checkpoint, open_checkpoint
from dsa.checkpoint.places import find_place
from dsa.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointIncompleteError,
    CheckpointNotFoundError,
    CheckpointReadError,
    CheckpointWriteError,
)
from dsa.state.content import StateContent

pytestmark = pytest.mark.usefixtures("small_blocks")

CONTENT = sample_content()


class Handler(http.server.SimpleHTTPRequestHandler):
    """The server of the standard library, which lists names without sizes and ignores ranges; and worse."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        if "no heads" in self.server.moods:
            self.send_error(405)
        else:
            self.answer(False)

    def do_GET(self):
        self.answer(True)

    def answer(self, body):
        moods, path = self.server.moods, self.translate_path(self.path)
        self.server.asked.append(self.path)
        if "broken" in moods and self.path.endswith(self.server.broken):
            self.send_error(self.server.status)
            return
        if self.path.endswith("/") and "no listings" in moods:
            self.send_error(403)
        elif self.path.endswith("/") or not ("ranges" in moods or "no lengths" in moods or "short" in moods):
            (super().do_GET if body else super().do_HEAD)()
        else:
            self.send_file(path, body)

    def send_file(self, path, body):
        moods = self.server.moods
        try:
            with open(path, "rb") as file:
                data = file.read()
        except OSError:
            self.send_error(404)
            return
        start, stop = 0, len(data)
        asked = self.headers.get("Range")
        if asked and "ranges" in moods:
            low, _, high = asked.removeprefix("bytes=").partition("-")
            start, stop = int(low), min(len(data), int(high) + 1) if high else len(data)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        else:
            self.send_response(200)
        sent = data[start:stop]
        if "short" in moods and len(sent) > 700:
            sent = sent[:700]
        if "no lengths" in moods:
            self.send_header("Connection", "close")
            self.close_connection = True
        else:
            self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        if body:
            self.wfile.write(sent)


@pytest.fixture
def serve(tmp_path):
    """A function that serves the temporary directory and returns server and address."""
    pytest.importorskip("aiohttp")
    servers = []

    def start(*moods):
        def handler(*arguments):
            return Handler(*arguments, directory=tmp_path)

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.moods, server.asked, server.status, server.broken = moods, [], 500, "/"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        return server, f"http://127.0.0.1:{server.server_port}"

    yield start
    for server, thread in servers:
        server.shutdown()
        server.server_close()
        thread.join()
    fsspec.filesystem("http").clear_instance_cache()


MOODS = [
    (),
    ("no listings",),
    ("ranges",),
    ("no listings", "ranges"),
    ("no lengths",),
    ("no listings", "no lengths"),
    ("no heads",),
    ("no heads", "no listings", "no lengths"),
]


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("moods", MOODS, ids=", ".join)
def test_behind_any_web_server(tmp_path, serve, moods, compression):
    export(CONTENT, tmp_path / "k", compression=compression)
    _, address = serve(*moods)
    found = open_checkpoint(f"{address}/k")
    found.verify()
    assert_same(found.content(), CONTENT)
    assert sum(found.source.sizes.values()) == sum(map(len, files_of(tmp_path / "k").values()))
    copy_checkpoint(f"{address}/k/", tmp_path / "copy")
    assert files_of(tmp_path / "copy") == files_of(tmp_path / "k")


def test_rows_that_are_zero_have_no_files_there_either(tmp_path, serve):
    content = StateContent((sample_table(rows=3_000, touched=0.0),), 3)
    export(content, tmp_path / "k")
    _, address = serve("no listings")
    found = open_checkpoint(f"{address}/k")
    found.verify()
    assert_same(found.content(), content)


@pytest.mark.parametrize("moods", MOODS, ids=", ".join)
def test_what_is_missing_or_damaged_is_said_as_everywhere(tmp_path, serve, moods):
    export(CONTENT, tmp_path / "k")
    _, address = serve(*moods)
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint at"):
        open_checkpoint(f"{address}/other")
    shard = tmp_path / "k/entity/w/c/1/0"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:9] + b"\0" + whole[10:])
    with pytest.raises(CheckpointCorruptError, match=rf"block 1 of field 'w'.*'{address}/k/entity/w/c/1/0'"):
        open_checkpoint(f"{address}/k").verify()
    shard.unlink()
    with pytest.raises(CheckpointCorruptError, match=r"block 1 of field 'w' .* is missing"):
        open_checkpoint(f"{address}/k")
    (tmp_path / "k/zarr.json").unlink()
    with pytest.raises((CheckpointNotFoundError, CheckpointIncompleteError)):
        open_checkpoint(f"{address}/k")


@pytest.mark.parametrize("status", [401, 403, 429, 500, 503])
@pytest.mark.parametrize("broken", ["k/zarr.json", "entity/zarr.json", "w/zarr.json", "w/c/1/0"])
def test_a_server_that_refuses_says_nothing_of_the_content(tmp_path, serve, status, broken):
    export(CONTENT, tmp_path / "k")
    server, address = serve("broken", "no listings")
    server.status, server.broken = status, broken
    with pytest.raises(CheckpointReadError, match=rf"'{address}/k' can't be read .*{status}.*: check"):
        open_checkpoint(f"{address}/k").verify()


def test_a_server_that_stops(tmp_path, serve):
    export(CONTENT, tmp_path / "k")
    server, address = serve()
    found = open_checkpoint(f"{address}/k")
    server.moods, server.broken = ("broken",), "w/c/0/0"
    with pytest.raises(CheckpointReadError):
        found.verify()
    server.moods = ("short", "ranges")
    with pytest.raises(CheckpointReadError, match=r"has sent 700 bytes of 'entity/.*try again"):
        found.verify()
    (tmp_path / "k/entity/w/c/0/0").unlink()
    server.moods = ()
    with pytest.raises(CheckpointReadError, match="there a moment ago"):
        found.verify()


def test_nobody_listens():
    pytest.importorskip("aiohttp")
    with pytest.raises(CheckpointReadError, match=r"'http://127\.0\.0\.1:9/k' can't be read"):
        open_checkpoint("http://127.0.0.1:9/k")


def test_a_wrong_address_is_not_searched_through(tmp_path, serve):
    for number in range(20):
        (tmp_path / f"site/{number}/deep/deeper").mkdir(parents=True)
    server, address = serve()
    with pytest.raises(CheckpointError):
        open_checkpoint(f"{address}/site")
    assert not any("deeper" in path for path in server.asked)


class Odd(MemoryFileSystem):
    """A store whose answers can be replaced."""

    protocol = "odd"
    cachable = False
    store = MemoryFileSystem.store
    changes = {}  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.replace("odd://", "memory://"))

    def _call(self, name, *arguments, **options):
        change = self.changes.get(name)
        usual = getattr(super(), name)
        return usual(*arguments, **options) if change is None else change(usual, *arguments, **options)

    def info(self, *arguments, **options):
        return self._call("info", *arguments, **options)

    def ls(self, *arguments, **options):
        return self._call("ls", *arguments, **options)

    def find(self, *arguments, **options):
        return self._call("find", *arguments, **options)

    def cat_file(self, *arguments, **options):
        return self._call("cat_file", *arguments, **options)


@pytest.fixture
def odd(monkeypatch):
    """The address of a checkpoint and what the store does otherwise than others."""
    fsspec.register_implementation("odd", Odd, clobber=True)
    monkeypatch.setattr(Odd, "changes", {})
    export(CONTENT, "memory://some/k", compression="zstd")
    yield "odd://some/k", Odd.changes
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def without_sizes(usual, *arguments, **options):
    found = usual(*arguments, **options)
    if isinstance(found, list):
        return [{**each, "size": None} if isinstance(each, dict) else each for each in found]
    if all(isinstance(each, dict) for each in found.values()):
        return {path: {**each, "size": None} for path, each in found.items()}
    return {**found, "size": None}


@pytest.mark.parametrize("names", [("info",), ("ls", "find"), ("info", "ls", "find")])
def test_sizes_that_nobody_tells(odd, names):
    address, changes = odd
    changes.update(dict.fromkeys(names, without_sizes))
    found = open_checkpoint(address)
    found.verify()
    assert_same(found.content(), CONTENT)


class OfALibrary(Exception):
    pass


ERRORS = [
    PermissionError("Access Denied"),
    PermissionError(13, "Permission denied"),
    ConnectionError("gone"),
    ConnectionResetError(104, "reset by peer"),
    TimeoutError(),
    OSError("some failure"),
    OfALibrary("no credentials"),
    RuntimeError("session is closed"),
    KeyError("x-amz-header"),
    ValueError("bad response"),
]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("when", ["opening", "reading", "a file"])
def test_errors_of_a_store_are_ours(odd, error, when):
    address, changes = odd

    def fail(usual, path, *arguments, **options):
        if when != "a file" or path.endswith("w/c/1/0"):
            raise error
        return usual(path, *arguments, **options)

    def act():
        found = open_checkpoint(address)
        if when == "reading":
            changes["cat_file"] = fail
        found.verify()

    if when != "reading":
        changes.update(
            dict.fromkeys(["cat_file", "info", "ls", "find"], fail)
            if when == "opening"
            else {"cat_file": fail}
        )
    with pytest.raises(
        CheckpointReadError, match=r"'odd://some/k' can't be read \(.*\): check the address"
    ) as caught:
        act()
    assert type(error).__name__ in str(caught.value)
    assert isinstance(caught.value, OSError)
    assert caught.value.__cause__ is error
    changes.clear()
    open_checkpoint(address).verify()


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("when", ["pipe_file", "open", "find", "exists"])
def test_errors_of_a_store_that_is_written_to_are_ours(odd, monkeypatch, error, when):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(Odd, when, fail)
    with pytest.raises(CheckpointWriteError, match=r"'odd://new/k' can't be written to \(") as caught:
        export(CONTENT, "odd://new/k", compression="zstd")
    assert type(error).__name__ in str(caught.value)
    monkeypatch.undo()
    assert not fsspec.filesystem("memory").exists("/new/k/zarr.json")


def test_a_list_that_is_refused_is_not_needed(odd):
    address, changes = odd

    def fail(*_, **__):
        raise PermissionError("no ListBucket for you")

    changes.update(ls=fail, find=fail)
    open_checkpoint(address).verify()


@pytest.mark.parametrize(
    ("address", "package"),
    [
        ("http://host/k", "fsspec[http]"),
        ("zip://k::https://host/a.zip", "fsspec[http]"),
        ("s3://b/k", "s3fs"),
    ],
)
def test_a_package_that_is_missing_is_named(monkeypatch, address, package):
    def missing(*_, **__):
        raise ImportError('HTTPFileSystem requires "requests" and "aiohttp" to be installed')

    monkeypatch.setattr(fsspec, "url_to_fs", missing)
    with pytest.raises(ImportError) as caught:
        find_place(address)
    assert f"pip install '{package}'" in str(caught.value)
    assert repr(address) in str(caught.value)


def test_all_that_reads_a_checkpoint_reads_it_there(tmp_path, serve):
    export(CONTENT, tmp_path / "k")
    _, address = serve("no listings")
    from dsa.cli import program

    assert program.main(["verify", f"{address}/k"]) == 0
    assert program.main(["inspect", f"{address}/k"]) == 0
    assert program.main(["diff", f"{address}/k", str(tmp_path / "k")]) == 0
    assert issubclass(dsa.errors.CheckpointReadError, dsa.errors.CheckpointError)
