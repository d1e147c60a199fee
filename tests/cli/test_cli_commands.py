"""Each command on a small run: what it does, prints and returns."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import nursery
import pytest
from story import GOLDEN, ROWS, STEPS, batch, build, flip, listing, tell

import dsa
from dsa.cli import program
from dsa.errors import DSAWarning
from dsa.inspection import open_state

NEW = [name for name in program.COMMANDS if name not in ("demo", "bench")]


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("story")
    tell(folder)
    return folder


@pytest.fixture
def folder(told, tmp_path, monkeypatch):
    """A copy of the run, as the current directory."""
    shutil.copytree(told, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture
def run(folder, capsys):
    """Runs a command line; returns exit code, output and errors. Warnings are printed, as in a process."""

    def run(line):
        capsys.readouterr()
        with warnings.catch_warnings():
            warnings.simplefilter("always", DSAWarning)
            code = program.main(shlex.split(line))
        return code, *capsys.readouterr()

    return run


def shard_of(checkpoint, table, field):
    """The only file of an array's rows."""
    (shard,) = (each for each in (checkpoint / table / field / "c").rglob("*") if each.is_file())
    return shard


def help_of(name, capsys):
    with pytest.raises(SystemExit):
        program.main([name, "--help"])
    return capsys.readouterr().out


def keys_of(name, capsys):
    """The JSON keys that a command's help names."""
    told = " ".join(help_of(name, capsys).split())
    return set(re.search(r"JSON: ([\w, ]+)[.;]", told)[1].split(", "))


@pytest.mark.parametrize("name", program.COMMANDS)
def test_help_shows_examples(capsys, name):
    shown = help_of(name, capsys)
    after = shown.partition("\nexamples:\n")[2].splitlines()
    assert tuple(line.strip() for line in after) == program.COMMANDS[name].examples
    assert program.COMMANDS[name].examples
    for example in program.COMMANDS[name].examples:
        word, *given = shlex.split(example)
        assert word == "dsa"
        assert program._parser(name).parse_args(given).command == name


def test_the_examples_work_one_after_the_other(run, tmp_path):
    for name in NEW:
        for example in program.COMMANDS[name].examples:
            line = example.removeprefix("dsa ").replace("s3://", "memory://examples/")
            line = line.replace("/media/backup", str(tmp_path / "media"))
            code, out, err = run(line)
            assert code == (1 if name == "diff" else 0), (example, out, err)
            assert out, example
            assert all(text.startswith(f"dsa {name}: warning: ") for text in err.splitlines()), err


JSON = {
    "estimate": "estimate 1000 8 --no-measure",
    "inspect": "inspect run",
    "verify": "verify run",
    "repair": "repair run",
    "export": "export run out",
    "import": "import checkpoints/step-20 out",
    "copy": "copy checkpoints/step-20 out",
    "diff": "diff run checkpoints/step-20",
    "migrate": "migrate old-run out",
    "flatten": "flatten checkpoints/step-30-changes out",
}


@pytest.mark.parametrize("name", NEW)
def test_json_has_the_documented_keys(run, capsys, name):
    code, out, err = run(f"{JSON[name]} --json")
    assert code == (1 if name == "diff" else 0)
    assert err == ""
    assert set(json.loads(out)) == keys_of(name, capsys)


@pytest.mark.parametrize("name", NEW)
def test_nothing_there_is_an_error_in_one_line(run, folder, name):
    given = {"estimate": "1000 8 --dir nowhere", "inspect": "nowhere", "verify": "nowhere"}
    given["repair"] = "nowhere"
    code, out, err = run(f"{name} {given.get(name, 'nowhere out')}")
    assert (code, out) == (2, "")
    assert err.startswith(f"dsa {name}: ")
    assert len(err.splitlines()) == 1
    assert "nowhere" in err
    assert not (folder / "out").exists()
    assert not (folder / "nowhere").exists()


def test_export_import_diff_is_the_same(run, folder):
    for url in ("out", "memory://commands/out"):
        assert run(f"export run {url}")[0] == 0
        assert run(f"verify {url}")[0] == 0
        assert run(f"import {url} again")[0] == 0
        code, out, err = run("diff run again")
        assert (code, err) == (0, "")
        assert out == f"the same: step 40, 2 tables, {sum(ROWS.values()):,} rows\n"
        assert run(f"diff {url} again")[0] == 0
        assert json.loads(run(f"diff run {url} --json")[1])["same"] is True
        shutil.rmtree(folder / "again")
    assert run("diff run run")[0] == 0


def test_a_differential_checkpoint_is_what_it_stands_for(run, folder):
    assert run("export run changes --base checkpoints/step-20")[0] == 0
    assert run("verify changes --base checkpoints/step-20")[0] == 0
    assert run("diff changes run --base checkpoints/step-20")[0] == 0
    assert run("import changes again --base checkpoints/step-20")[0] == 0
    assert run("diff again run")[0] == 0
    assert run("flatten changes flat --base checkpoints/step-20 --compression zstd")[0] == 0
    assert run("diff flat run")[0] == 0
    code, out, _ = run("inspect changes --base checkpoints/step-20")
    assert code == 0
    assert "differs from: 'step-20', step 20, in the rows" in out
    for line in (
        "verify changes",
        "diff changes run",
        "inspect changes",
        "import changes x",
        "flatten changes x",
    ):
        code, _, err = run(line)
        assert code == 2
        assert "'step-20', is not beside it" in err
    assert "pass --base with the place" in run("diff changes run")[2]
    assert run("import run2 x --base y")[0] == 2


@pytest.mark.parametrize("field", ["w", "m", "v", "t", "s"])
def test_a_flipped_bit_is_named(run, folder, field):
    flip(shard_of(folder / "checkpoints/step-20", "relation", field), 5)
    code, out, err = run("verify checkpoints/step-20")
    assert (code, err) == (1, "")
    assert "step-20: DAMAGED; full checkpoint, step 20, 2 tables" in out
    assert f"\n  block 0 of field '{field}' of the table 'relation' doesn't match its checksum" in out
    found = json.loads(run("verify checkpoints/step-20 --json")[1])
    assert found["ok"] is False
    assert len(found["problems"]) == 1
    code, out, err = run("verify checkpoints/step-30-changes")
    assert code == 1
    assert f"together with its base: block 0 of field '{field}' of the table 'relation'" in out
    for line in (
        "diff run checkpoints/step-20",
        "import checkpoints/step-20 x",
        "copy checkpoints/step-20 x",
    ):
        code, out, err = run(line)
        assert (code, out) == (2, "")
        assert f"block 0 of field '{field}' of the table 'relation'" in err
        assert not (folder / "x").exists()


def test_several_fields_are_named_at_once(run, folder):
    for table, field in (("entity", "w"), ("relation", "t")):
        flip(shard_of(folder / "checkpoints/step-20", table, field), 5)
    code, out, _ = run("verify checkpoints/step-20")
    assert code == 1
    assert re.findall(r"field '(.)' of the table '(\w+)'", out) == [("w", "entity"), ("t", "relation")]


def test_an_interrupted_export_is_damage_and_another_format_an_error(run, folder):
    (folder / "checkpoints/step-20/zarr.json").unlink()
    code, out, err = run("verify checkpoints/step-20")
    assert (code, err) == (1, "")
    assert "is no complete checkpoint" in out
    assert run("inspect checkpoints/step-20")[0] == 2
    code, out, err = run(f"verify {shlex.quote(str(GOLDEN / '0.3.0-checkpoint'))}")
    assert (code, out) == (2, "")
    assert "convert it with dsa migrate" in err
    code, out, err = run("verify old-run")
    assert (code, out) == (2, "")
    assert "dsa migrate" in err
    assert run("export run entity.safetensors --weights")[0] == 0
    assert run("verify entity.safetensors")[0] == 2


def test_nothing_is_changed_by_looking(run, folder):
    before = listing(folder)
    for line in (
        "inspect run",
        "verify run",
        "diff run checkpoints/step-20",
        "verify checkpoints/step-30-changes",
    ):
        run(line)
        run(f"{line} --json")
    assert listing(folder) == before


def test_looking_beside_training(run, folder):
    with build(folder / "run", resume=True) as optimizer:
        optimizer.step(batch(STEPS["end"]))
        code, out, _ = run("inspect run")
        assert code == 0
        assert "open, step 41" in out
        code, out, _ = run("verify run")
        assert code == 0
        assert "note: it was not closed: a process has it open, or was killed" in out
        assert run("diff run run")[0] == 0
        code, out, err = run("export run out")
        assert (code, out) == (2, "")
        assert "in use" in err


def test_inspect(run):
    code, out, err = run("inspect run")
    assert (code, err) == (0, "")
    for words in (
        "closed, step 40",
        "entity",
        "relation",
        "updates per row",
        "distance from the centre",
        "on disk",
    ):
        assert words in out
    code, out, err = run("inspect checkpoints/step-20")
    assert (code, err) == (0, "")
    for words in ("full checkpoint, step 20", "content root: ", "made: ", "attributes: epoch=1"):
        assert words in out
    state = json.loads(run("inspect run --json")[1])
    other = json.loads(run("inspect checkpoints/step-20 --json")[1])
    assert (state["kind"], other["kind"]) == ("state", "full")
    assert state["checkpoint"] is None
    assert other["checkpoint"]["attributes"] == {"epoch": 1}
    assert [table["name"] for table in other["tables"]] == ["entity", "relation"]
    for table in (*state["tables"], *other["tables"]):
        assert table["rows"] == ROWS[table["name"]]
        assert 0 < table["touched_rows"] <= table["rows"]
        assert table["disk_bytes"] > 0
        assert table["weight_norms"]["count"] == table["touched_rows"]


def test_diff_says_where(run, folder):
    code, out, err = run("diff run checkpoints/step-20")
    assert (code, err) == (1, "")
    assert "A: " in out
    assert "(state, step 40)" in out
    assert "(full checkpoint, step 20)" in out
    assert "  steps: 40 in A, 20 in B" in out
    with build(folder / "other", lr=0.1) as optimizer:
        optimizer.step(batch(0))
    found = json.loads(run("diff run other --json")[1])
    assert found["a"]["global_step"] == STEPS["end"]
    assert found["b"]["global_step"] == 1
    (entity, relation) = found["tables"]
    assert entity["facts"] == {"steps": [40, 1]}
    assert [each["name"] for each in entity["fields"]] == ["w", "m", "v", "t", "s"]
    assert relation["fields"][3]["largest"] > 1
    assert run("export run w --weights")[0] == 0
    code, out, _ = run("diff run w")
    assert code == 1
    assert "table 'entity': 0 of 300 rows differ\n  fields that only A has: m float32 per element" in out


def test_export_options(run, folder):
    assert run("export run out --compression zstd")[0] == 0
    code, out, err = run("export run out")
    assert (code, out) == (2, "")
    assert err.endswith("pass --overwrite\n")
    assert run("export run out --overwrite")[0] == 0
    assert run("export run out --weights --base checkpoints/step-20")[0] == 2
    code, out, _ = run("export run out.safetensors --weights --json")
    assert json.loads(out) == {"url": str(folder / "out.safetensors"), "kind": "safetensors"}
    assert run("export run out.safetensors --weights --compression zstd")[0] == 2
    assert run("export run run/inside")[0] == 2
    assert run("export run checkpoints/step-20/inside")[0] == 2


@pytest.mark.parametrize(
    ("options", "suffix", "durability"),
    [
        ("", "dsa", "process"),
        ("--backend memmap --allocate reserve --durability power", "dsa", "power"),
        ("--backend zarr --durability none", "zarr", "none"),
        ("--backend zarr --zarr-compression zstd", "zarr", "process"),
    ],
)
def test_import_options(run, folder, options, suffix, durability):
    assert run(f"import checkpoints/step-20 again {options}")[0] == 0
    assert len(list((folder / "again").glob(f"*.{suffix}"))) == 2
    assert json.loads((folder / "again/dsa.json").read_text())["content"]["durability"] == durability
    assert run("diff again checkpoints/step-20")[0] == 0
    code, _, err = run("import checkpoints/step-20 again")
    assert code == 2
    assert "already holds state at step 20" in err


def test_import_refuses_a_compression_without_its_backend(run):
    code, out, err = run("import checkpoints/step-20 again --zarr-compression zstd")
    assert (code, out) == (2, "")
    assert err == "dsa import: --zarr-compression zstd is for another backend: add --backend zarr\n"


def test_migrate(run, folder):
    assert run("migrate old-run new")[0] == 0
    code, out, err = run("migrate old-run")
    assert code == 0
    assert out.startswith("old-run: state at step 12, ")
    assert all(line.startswith("dsa migrate: warning: ") for line in err.splitlines())
    assert "before-migration" in err
    assert run("diff old-run new")[0] == 0
    assert run("verify old-run")[0] == 0
    code, _, err = run("migrate older-run")
    assert code == 2
    assert "--shape emb=ROWSxDIM" in err
    code, _, err = run("migrate older-run --shape emb=1000x16")
    assert code == 2
    assert "--k" in err
    code, _, err = run("migrate older-run x --shape emb=1000x16 --k 1 --k emb=0")
    assert code == 2
    assert "--k is given 2 times" in err
    assert run("migrate older-run --shape emb=1000x16 --k emb=0.5")[0] == 0
    with open_state("older-run") as state:
        assert state["emb"].k == 0.5


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("migrate x --shape emb", "'emb' is no shape: write NAME=ROWSxDIM"),
        ("migrate x --shape emb=3,4", "is no shape"),
        ("migrate x --k big", "'big' is no curvature: write K or NAME=K"),
        ("verify x --storage-option key", "'key' has no key: write KEY=VALUE"),
        ("verify x --storage-option =v", "has no key"),
        ("estimate 0 8", "'0' is no count"),
        ("estimate 1.5 8", "'1.5' is no count"),
        ("estimate many 8", "'many' is no count"),
        ("estimate nan 8", "is no count"),
        ("estimate 1e400 8", "is no count"),
        ("import x", "STATE_DIR"),
        ("diff x", "required: B"),
        ("export run out --compression gzip", "invalid choice: 'gzip'"),
    ],
)
def test_wrong_usage(capsys, line, words):
    with pytest.raises(SystemExit) as caught:
        program.main(shlex.split(line))
    out, err = capsys.readouterr()
    assert (caught.value.code, out) == (2, "")
    assert words in err


def test_estimate(run, folder):
    code, out, err = run("estimate 1e4 8 --no-measure")
    assert (code, err) == (0, "")
    assert out.startswith("10,000 rows x 8, one second moment per coordinate, memmap\n")
    assert "it fits" in out
    assert "reads/s" not in out
    plain = json.loads(run("estimate 10_000 8 --no-measure --json")[1])
    assert plain["rows"] == 10_000
    assert plain["fields"] == dsa.estimate(10_000, 8).fields
    assert plain["measured"] is None
    assert plain["fits"] is True
    rowwise = json.loads(run("estimate 10,000 8 --second-moment row --no-measure --json")[1])
    assert rowwise["file"] < plain["file"]
    summed = json.loads(run("estimate 10000 8 --rule row_wise_adagrad --no-measure --json")[1])
    assert (summed["rule"], summed["second_moment"]) == ("row_wise_adagrad", None)
    assert summed["fields"] == {"w": 320_000, "h": 40_000, "s": 40_000}
    assert run("estimate 1e4 8 --rule sgd --no-measure")[1].startswith("10,000 rows x 8, sgd, memmap\n")
    halved = json.loads(run("estimate 1e4 8 --state-dtype bfloat16 --no-measure --json")[1])
    assert (halved["state_dtype"], halved["record"]) == ("bfloat16", 32 + 2 * 16 + 8 + 4)
    text = run("estimate 1e4 8 --state-dtype w=bfloat16,v=bfloat16 --no-measure")[1]
    assert ", w bfloat16, v bfloat16, memmap\n" in text
    large = run("estimate 1e13 8 --no-measure")[1]
    assert "too little" in large


def test_estimate_measures_this_disk(run, folder):
    before = sorted(folder.iterdir())
    code, out, err = run("estimate 100000 128 --batch 1000")
    assert (code, err) == (0, "")
    assert re.search(r"random pages of 4 KiB.*: [\d,]+ reads/s, [\d,]+ writes/s", out)
    assert re.search(r"64 rows +[\d.]+ m?s\n  1,000 rows", out)
    assert sorted(folder.iterdir()) == before
    measured = json.loads(run("estimate 100000 128 --json")[1])["measured"]
    assert measured["reads_per_second"] > 0
    assert list(measured["step_milliseconds"]) == ["64", "2048", "16384"]


@pytest.mark.parametrize("name", [name for name in NEW if name != "estimate"])
def test_a_bar_when_it_is_asked_for(run, name):
    code, _, err = run(f"{JSON[name]} --progress")
    assert code == (1 if name == "diff" else 0)
    assert re.search(rf"\r{name}: +[0-9]+%\|", err)
    assert not err.rpartition("\r")[2].strip()  # it is gone in the end
    if name in ("inspect", "verify", "diff"):
        assert run(f"{JSON[name]} --no-progress")[2] == ""


def test_storage_options_arrive(run, monkeypatch):
    seen = []

    def note(url, storage_options=None, **others):
        seen.append(storage_options)
        raise ValueError("seen")

    monkeypatch.setattr("dsa.inspection.subjects.find_place", note)
    code, _, err = run(
        "verify s3://bucket/x --storage-option anon=true --storage-option key=A --storage-option n=1"
    )
    assert (code, err) == (2, "dsa verify: seen\n")
    assert seen == [{"anon": True, "key": "A", "n": 1}]


def test_copy_takes_options_for_each_side(run, monkeypatch):
    seen = {}

    def note(source, target, **options):
        seen.update(options)
        raise ValueError("seen")

    monkeypatch.setattr("dsa.checkpoint.copy_checkpoint", note)
    run("copy a b --storage-option x=1")
    assert (seen["storage_options"], seen["target_storage_options"]) == ({"x": 1}, {"x": 1})
    run("copy a b --storage-option x=1 --target-storage-option y=2")
    assert (seen["storage_options"], seen["target_storage_options"]) == ({"x": 1}, {"y": 2})
    run("copy a b")
    assert (seen["storage_options"], seen["target_storage_options"]) == (None, None)


def test_a_reader_that_has_had_enough(folder):
    done = subprocess.run(
        f"{sys.executable} -m dsa inspect run | head -n 1",
        shell=True,
        capture_output=True,
        text=True,
        check=True,
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": str(Path(dsa.__file__).parents[1]),
            "NUMBA_CACHE_DIR": os.environ["NUMBA_CACHE_DIR"],  # compiling would be told of
        },
    )
    assert "closed, step 40" in done.stdout
    assert done.stderr == ""


def test_in_processes(folder):
    for arguments, code in (
        (("verify", "run"), 0),
        (("diff", "run", "checkpoints/step-20"), 1),
        (("diff", "run", "nowhere"), 2),
    ):
        done = nursery.run(nursery.DSA, *arguments, env={})
        assert done.returncode == code, done.stderr
        assert bool(done.stdout) == (code < 2)
        assert "Traceback" not in done.stderr
