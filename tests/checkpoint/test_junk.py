"""What systems and viewers leave beside files is in nobody's way; what people put there is never deleted."""

import fsspec
import pytest
from checkpoint_samples import assert_same, export, files_of, sample_table
from fsspec.implementations.memory import MemoryFileSystem

from dsa.checkpoint import copy_checkpoint, open_checkpoint
from dsa.cli import program
from dsa.errors import CheckpointExistsError
from dsa.state.content import StateContent

pytestmark = pytest.mark.usefixtures("small_blocks")

CONTENT = StateContent((sample_table("entity", seed=1), sample_table("word", seed=2)), 5)
NEW = StateContent((sample_table("entity", seed=3),), 6)

JUNK = [
    ".DS_Store", "Thumbs.db", "desktop.ini", "._zarr.json", "._entity", "._.DS_Store", "entity/.DS_Store",
    "entity/._zarr.json", "entity/._w", "entity/w/._zarr.json", "entity/w/._c", "entity/w/c/._0",
    "entity/w/c/1/._0", "entity/w/c/.DS_Store", "entity/w/c/0/Thumbs.db",
    ".ipynb_checkpoints/zarr-checkpoint.json", "entity/.ipynb_checkpoints/zarr-checkpoint.json",
    "__MACOSX/k/._zarr.json", "@eaDir/zarr.json@SynoEAStream",
]  # fmt: skip

DATA = [
    "notes.txt", "._notes", "thumbs.txt", ".git/config", "results/zarr.json", "entity/notes.txt",
    "entity/labels.csv", "entity/w/backup.bin", "entity/w/c/mine", "entity/w/c/0/mine.txt", "entity/.hidden",
    "._photos/1.jpg", ".DS_Store/thesis.txt", ".ipynb_checkpoints/analysis-checkpoint.ipynb",
    "analysis.ipynb", "other/.DS_Store.txt", "c/0",
]  # fmt: skip


def put(folder, names, data=b"junk"):
    for name in names:
        if (folder / "._.DS_Store").name == name:
            (folder / ".DS_Store").write_bytes(data)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


@pytest.mark.parametrize("junk", [*([each] for each in JUNK), JUNK], ids=lambda each: ",".join(each)[:40])
def test_junk(tmp_path, junk):
    export(CONTENT, tmp_path / "k")
    whole = files_of(tmp_path / "k")
    put(tmp_path / "k", junk)
    (tmp_path / "k/.ipynb_checkpoints").mkdir(exist_ok=True)
    found = open_checkpoint(tmp_path / "k")
    found.verify()
    assert_same(found.content(), CONTENT)
    copy_checkpoint(tmp_path / "k", tmp_path / "copy")
    assert files_of(tmp_path / "copy") == whole
    export(NEW, tmp_path / "k", overwrite=True)
    assert_same(open_checkpoint(tmp_path / "k").content(), NEW)
    assert not [name for name in junk if (tmp_path / "k" / name).exists()]


def test_commands_do_not_stumble(tmp_path, capsys):
    export(CONTENT, tmp_path / "k")
    put(tmp_path / "k", JUNK)
    assert program.main(["verify", str(tmp_path / "k")]) == 0
    assert program.main(["inspect", str(tmp_path / "k")]) == 0
    assert program.main(["import", str(tmp_path / "k"), str(tmp_path / "state")]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", DATA)
def test_data_is_kept(tmp_path, name):
    export(CONTENT, tmp_path / "k")
    put(tmp_path / "k", [name, *([".DS_Store"] if not name.startswith(".DS_Store") else [])], b"mine")
    before = files_of(tmp_path / "k")
    with pytest.raises(CheckpointExistsError, match="is not part of the checkpoint and would be deleted"):
        export(NEW, tmp_path / "k", overwrite=True)
    assert files_of(tmp_path / "k") == before
    open_checkpoint(tmp_path / "k").verify()


def test_a_link_is_somebodys(tmp_path):
    export(CONTENT, tmp_path / "k")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "k/link").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    with pytest.raises(CheckpointExistsError, match="'link', which is not part"):
        export(NEW, tmp_path / "k", overwrite=True)


@pytest.mark.parametrize("junk", [[".DS_Store"], [".ipynb_checkpoints/x-checkpoint.json", "Thumbs.db"]])
def test_a_directory_of_junk_is_empty(tmp_path, junk):
    (tmp_path / "k").mkdir()
    put(tmp_path / "k", junk)
    export(NEW, tmp_path / "k")
    assert_same(open_checkpoint(tmp_path / "k").content(), NEW)


@pytest.mark.parametrize("name", ["notes.txt", "._notes", ".ipynb_checkpoints/a-checkpoint.ipynb"])
def test_a_directory_of_data_is_not(tmp_path, name):
    (tmp_path / "k").mkdir()
    put(tmp_path / "k", [name], b"mine")
    with pytest.raises(CheckpointExistsError):
        export(NEW, tmp_path / "k", overwrite=True)
    assert (tmp_path / "k" / name).read_bytes() == b"mine"


@pytest.fixture
def memory():
    yield "memory://junk"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.mark.parametrize("name", JUNK)
def test_junk_in_a_store(memory, name):
    files = fsspec.filesystem("memory")
    export(CONTENT, f"{memory}/k")
    if name == "._.DS_Store":
        files.pipe(f"{memory}/k/.DS_Store", b"junk")
    files.pipe(f"{memory}/k/{name}", b"junk")
    open_checkpoint(f"{memory}/k").verify()
    export(NEW, f"{memory}/k", overwrite=True)
    assert_same(open_checkpoint(f"{memory}/k").content(), NEW)


@pytest.mark.parametrize("name", ["notes.txt", "entity/notes.txt", "._notes"])
def test_data_in_a_store(memory, name):
    files = fsspec.filesystem("memory")
    export(CONTENT, f"{memory}/k")
    files.pipe(f"{memory}/k/{name}", b"mine")
    with pytest.raises(CheckpointExistsError, match="is not part of the checkpoint"):
        export(NEW, f"{memory}/k", overwrite=True)
    assert files.cat(f"{memory}/k/{name}") == b"mine"
