"""`state_dtype`: tables that store bfloat16, through every door that reads or writes them."""

from __future__ import annotations

import hashlib
import json
from contextlib import closing

import numpy as np
import pytest
import torch
import zarr

import dsa
from dsa import (
    DiskEmbedding,
    DiskSparseAdagrad,
    DiskSparseAdam,
    DiskSparseOptimizer,
    DiskSparseRiemannianAdam,
)
from dsa.backends import Zarr
from dsa.errors import StateMismatchError
from dsa.inspection import open_state, summarize
from dsa.inspection.comparison import diff
from dsa.inspection.verification import verify
from dsa.kernels.adam import adam_step
from dsa.rules.conventions import AdamOptions
from dsa.rules.init import Normal
from dsa.schema import adam_schema, read_numbers, store_numbers, with_dtypes
from tests.kernels.test_packing import packed

ROWS, DIM = 3_000, 6
MOMENTS = {"m": "bfloat16", "v": "bfloat16"}
ALL = {"w": "bfloat16", **MOMENTS}
CHOICES = {"moments": "bfloat16", "second moment": {"v": torch.bfloat16}, "all": ALL}


def build(path, state_dtype="bfloat16", source=None, **options):
    table = Normal(ROWS, DIM, seed=3) if source is None else source
    options = {"lr": 0.1, "k": 0.0, "disk_dir": path, **options}
    return DiskSparseRiemannianAdam({"entity": table}, state_dtype=state_dtype, **options)


def train(optimizer, until):
    while optimizer.global_step < until:
        draws = np.random.default_rng(optimizer.global_step)
        rows = draws.integers(0, ROWS, 1_500)
        optimizer.step({"entity": (rows, draws.standard_normal((1_500, DIM)).astype(np.float32))})


def stored(optimizer):
    (table,) = optimizer._portable_state().tables.values()
    optimizer._portable_state().settle()
    return table.backend.read(np.arange(ROWS))


def numbers(bits):
    """What a reader without a bfloat16 does with an array of uint16, as the guide tells."""
    assert bits.dtype == np.uint16
    return (bits.astype("uint32") << 16).view("float32")


@pytest.fixture(params=CHOICES)
def state_dtype(request):
    return CHOICES[request.param]


@pytest.mark.parametrize(
    "backend", ["memmap", "zarr", Zarr(compression="zstd")], ids=["memmap", "zarr", "zstd"]
)
@pytest.mark.parametrize("async_writes", [False, True])
def test_the_same_bytes_whatever_the_backend_the_queue_and_the_threads(tmp_path, backend, async_writes):
    with build(tmp_path / "one") as optimizer:
        train(optimizer, 4)
        expected = stored(optimizer).tobytes()
    threads = torch.get_num_threads()
    for count in (1, 2, 4):
        try:
            torch.set_num_threads(count)
            with build(tmp_path / str(count), backend=backend, async_writes=async_writes) as optimizer:
                train(optimizer, 4)
                assert stored(optimizer).tobytes() == expected
        finally:
            torch.set_num_threads(threads)


def test_a_step_is_that_of_float32_and_a_rounding_by_table_row_and_stamp(tmp_path):
    """The first step of all rows, of which every other one was set before."""
    with build(tmp_path, ALL, lr=0.25) as optimizer:
        before = optimizer.read_rows(np.arange(ROWS)).numpy()
        rows = np.arange(0, ROWS, 7)
        grad = np.random.default_rng(0).standard_normal((len(rows), DIM)).astype(np.float32)
        optimizer.step({"entity": (rows, grad)})
        found = stored(optimizer)[rows]
    wide = np.zeros(len(rows), adam_schema(DIM).dtype)
    wide["w"] = before[rows]
    adam_step(wide, grad, AdamOptions(lr=0.25), stamp=2)
    seed = int.from_bytes(hashlib.sha256(b"entity").digest()[:8], "little") // 2
    expected = packed(wide, with_dtypes(adam_schema(DIM), ALL), rows, 2, seed)
    assert found.tobytes() == expected.tobytes()


def test_first_weights_are_those_of_float32_to_the_nearest(tmp_path):
    with build(tmp_path / "narrow", ALL) as narrow, build(tmp_path / "wide", None) as wide:
        exact = wide.read_rows(np.arange(ROWS))
        assert torch.equal(narrow.read_rows(np.arange(ROWS)), exact.bfloat16().float())
        train(narrow, 2)
        again = narrow.read_rows(np.arange(ROWS))
        untouched = stored(narrow)["s"] == 0
        assert torch.equal(again[untouched], exact.bfloat16().float()[untouched])
        assert torch.equal(again, again.bfloat16().float())


def test_weights_that_are_given_are_rounded_to_the_nearest(tmp_path):
    weights = torch.randn(ROWS, DIM)
    with build(tmp_path, ALL, weights) as optimizer:
        assert torch.equal(optimizer.read_rows(np.arange(ROWS)), weights.bfloat16().float())


def test_a_checkpoint_in_plain_zarr(tmp_path, state_dtype):
    with build(tmp_path / "state", state_dtype) as optimizer:
        train(optimizer, 3)
        optimizer.export_checkpoint(tmp_path / "full")
        train(optimizer, 4)
        optimizer.export_checkpoint(tmp_path / "delta", base=tmp_path / "full")
        records = stored(optimizer)
        weights = optimizer.read_rows(np.arange(ROWS)).numpy()
    group = zarr.open_group(tmp_path / "full", mode="r")["entity"]
    narrow = [name for name in "wmv" if records.dtype[name].base == np.uint16]
    for name in "wmv":
        assert group[name].dtype == (np.uint16 if name in narrow else np.float32)
        assert group[name].attrs.get("dsa_dtype") == ("bfloat16" if name in narrow else None)
    changed = zarr.open_group(tmp_path / "delta", mode="r")["entity"]
    rows = changed["rows"][:]
    for name in narrow:
        assert changed[name].attrs["dsa_dtype"] == "bfloat16"
        assert (numbers(changed[name][:]) == read_numbers(records, name)[rows]).all()
    assert verify(tmp_path / "full").ok
    assert verify(tmp_path / "delta").ok
    for source in "full", "delta":
        dsa.import_checkpoint(tmp_path / source, tmp_path / f"from {source}")
        with build(tmp_path / f"from {source}", state_dtype, resume=True) as optimizer:
            train(optimizer, 4)
            assert stored(optimizer).tobytes() == records.tobytes()
            assert (optimizer.read_rows(np.arange(ROWS)).numpy() == weights).all()


def test_a_live_zarr_table_is_read_by_plain_zarr(tmp_path):
    with build(tmp_path, ALL, backend="zarr") as optimizer:
        train(optimizer, 2)
        optimizer.flush()
        records = stored(optimizer)
        (path,) = tmp_path.glob("entity-*.zarr")
        group = zarr.open_group(path, mode="r")
        for name in "wmv":
            assert group[name].attrs["dsa_dtype"] == "bfloat16"
            assert (numbers(group[name][:]) == read_numbers(records, name)).all()


def test_exported_weights(tmp_path):
    """Safetensors has a name for bfloat16; in Zarr they become float32, which every reader reads."""
    with build(tmp_path / "state", ALL) as optimizer:
        train(optimizer, 2)
        weights = optimizer.read_rows(np.arange(ROWS)).numpy()
        optimizer.export_weights(tmp_path / "weights.safetensors")
        optimizer.export_weights(tmp_path / "weights")
    raw = (tmp_path / "weights.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])["entity"]
    assert (header["dtype"], header["shape"]) == ("BF16", [ROWS, DIM])
    assert len(raw) == 8 + length + 2 * ROWS * DIM
    bits = np.frombuffer(raw, "<u2", offset=8 + length).reshape(ROWS, DIM)
    assert (numbers(bits) == weights).all()
    array = zarr.open_group(tmp_path / "weights", mode="r")["entity"]["w"]
    assert array.dtype == np.float32
    assert (array[:] == weights).all()


def test_another_dtype_is_refused_by_name(tmp_path, state_dtype):
    build(tmp_path, state_dtype).close()
    description = (tmp_path / "dsa.json").read_bytes()
    for other in [None, *(each for each in CHOICES.values() if each != state_dtype)]:
        with pytest.raises(StateMismatchError, match=r"v bfloat16 per element, t int32 .* is asked for"):
            build(tmp_path, other, resume=True)
        assert (tmp_path / "dsa.json").read_bytes() == description
    build(tmp_path, state_dtype, resume=True).close()


def test_a_checkpoint_of_float32_is_converted_when_that_is_asked_for(tmp_path):
    with build(tmp_path / "wide", None) as wide:
        train(wide, 3)
        wide.export_checkpoint(tmp_path / "full")
        train(wide, 4)
        wide.export_checkpoint(tmp_path / "delta", base=tmp_path / "full")
        exact = stored(wide)
    with build(tmp_path / "narrow", ALL) as narrow:
        train(narrow, 1)
        before = stored(narrow).tobytes()
        match = (
            "w float32, m float32, v float32 in the checkpoint but w bfloat16, m bfloat16, v bfloat16 here"
        )
        with pytest.raises(StateMismatchError, match=match + ": pass convert_dtypes=True"):
            narrow.import_checkpoint(tmp_path / "full")
        assert stored(narrow).tobytes() == before
        narrow.import_checkpoint(tmp_path / "delta", convert_dtypes=True)
        assert narrow.global_step == 4
        for name in "wmv":
            found = torch.from_numpy(np.array(read_numbers(stored(narrow), name)))
            given = torch.from_numpy(np.array(exact[name])).bfloat16().float()
            touched = torch.from_numpy(exact["s"] > 0)
            assert torch.equal(found[touched], given[touched])
        with pytest.raises(dsa.errors.CheckpointMismatchError):  # of other bytes
            narrow.export_checkpoint(tmp_path / "second", base=tmp_path / "full")
        narrow.export_checkpoint(tmp_path / "back")
        records = stored(narrow)
    with build(tmp_path / "wide", None, resume=True) as wide:
        wide.import_checkpoint(tmp_path / "back", convert_dtypes=True)
        for name in "wmv":
            assert (stored(wide)[name] == read_numbers(records, name)).all()
        train(wide, 6)
    assert verify(tmp_path / "wide").ok


def test_looking_at_a_table(tmp_path):
    for name, dtype in ("wide", None), ("narrow", ALL):
        with build(tmp_path / name, dtype) as optimizer:
            train(optimizer, 8)
            records = stored(optimizer)
    (wide,), (narrow,) = (summarize(tmp_path / name).tables for name in ("wide", "narrow"))
    assert narrow.touched_rows == wide.touched_rows
    assert narrow.implausible_rows == 0
    assert narrow.logical_bytes == ROWS * (3 * 2 * DIM + 4)
    assert narrow.second_moments.mean == pytest.approx(wide.second_moments.mean, rel=1e-2)
    assert narrow.weight_norms.mean == pytest.approx(wide.weight_norms.mean, rel=1e-2)
    (compared,) = diff(tmp_path / "wide", tmp_path / "narrow").tables
    lacking = (
        [f"{name} bfloat16 per element" for name in "wmv"],
        [f"{name} float32 per element" for name in "wmv"],
    )
    assert sorted(map(tuple, compared.facts["fields"])) == sorted(map(tuple, lacking))
    with open_state(tmp_path / "narrow") as view:
        table = view["entity"]
        assert (numbers(np.asarray(table["m"])) == read_numbers(records, "m")).all()
        attributes = {name: variable.attrs.get("dsa_dtype") for name, variable in table.to_xarray().items()}
        assert attributes == {**dict.fromkeys("wmv", "bfloat16"), "t": None, "s": None}


def test_damage_is_found_and_reset(tmp_path):
    with build(tmp_path, ALL, durability="none") as optimizer:
        train(optimizer, 2)
        records = stored(optimizer)
        row = int(np.flatnonzero(records["s"])[0])
        broken = records[row : row + 1].copy()
        store_numbers(broken, "v", -1.0)
        optimizer._portable_state().tables["entity"].backend.write(np.array([row]), broken)
        with pytest.raises(dsa.errors.CorruptRowError, match=f"row {row} .* a negative second moment"):
            optimizer.read_rows([row])
        with pytest.warns(dsa.errors.StateWarning, match="1 rows of table 'entity' held implausible values"):
            optimizer.reproject_all()
        assert torch.isfinite(optimizer.read_rows([row])).all()


@pytest.mark.parametrize("k", [0.0, 0.7])
def test_another_curvature_rescales_the_moments(tmp_path, k):
    for name, dtype in ("wide", None), ("narrow", MOMENTS):
        with build(tmp_path / name, dtype, k=k, lr=0.01, second_moment="frame") as optimizer:
            train(optimizer, 6)
            optimizer.set_curvature(1.5)
            records = stored(optimizer)
            train(optimizer, 7)
        if name == "wide":
            wide = records
    for name in "mv":
        found = np.abs(read_numbers(records, name)).mean()
        assert found == pytest.approx(np.abs(wide[name]).mean(), rel=2e-2)


@pytest.mark.parametrize(
    ("state_dtype", "match"),
    [
        ("float16", "state_dtype='float16' is not known: use 'float32' or 'bfloat16'"),
        (torch.int8, "is not known: use 'float32' or 'bfloat16'"),
        ({"q": "bfloat16"}, r"names 'q', which is no field .*: use some of \['w', 'm', 'v'\]"),
        ({"t": "bfloat16"}, "names 't', which is no field"),
        ({"m": None}, "state_dtype=None is not known"),
        (7, "state_dtype=7 is not known"),
    ],
)
def test_what_no_field_can_be(tmp_path, state_dtype, match):
    with pytest.raises(ValueError, match=match):
        build(tmp_path / "state", state_dtype)
    assert not (tmp_path / "state").exists()


def test_an_odd_number_of_elements_is_refused(tmp_path):
    with pytest.raises(ValueError, match="dim=5 is odd, and bfloat16 is stored two in a word"):
        build(tmp_path / "state", "bfloat16", Normal(10, 5))


def test_a_single_number_of_a_row_stays_as_it_is(tmp_path):
    with build(tmp_path, "bfloat16", second_moment="row") as optimizer:
        assert stored(optimizer).dtype["v"] == np.float32
    with pytest.raises(ValueError, match=r"names 'v'.*a single number of a row would take no less"):
        build(tmp_path / "other", {"v": "bfloat16"}, second_moment="row")


MODULES = {
    "adam": lambda params, **options: DiskSparseAdam(params, 0.1, **options),
    "adagrad": lambda params, **options: DiskSparseAdagrad(params, 0.1, **options),
    "lion": lambda params, **options: DiskSparseOptimizer(params, "lion", lr=0.1, **options),
}


@pytest.mark.parametrize("rule", MODULES)
def test_modules_and_their_optimizers(tmp_path, rule):
    """A module decides how its table is stored; an optimizer may say the same, and nothing else."""
    field = {"adam": "m", "adagrad": "h", "lion": "m"}[rule]
    module = DiskEmbedding(50, 4, state=rule, state_dtype="bfloat16", state_dir=tmp_path)
    with closing(module):
        with pytest.raises(StateMismatchError, match=f"stores '{field}' as bfloat16, but .*'float32'"):
            MODULES[rule](module.parameters(), state_dtype="float32")
        for told in {"state_dtype": torch.bfloat16}, {}:
            optimizer = MODULES[rule](module.parameters(), **told)
            module(torch.tensor([3, 4])).sum().backward()
            optimizer.step()
        records = module.weight.table.backend.read(np.arange(50))
        assert records.dtype[field].base == np.uint16
        assert (read_numbers(records, field)[[3, 4]] != 0).all()


@pytest.mark.parametrize("rule", MODULES)
def test_weights_in_memory(tmp_path, rule):
    field = {"adam": "m", "adagrad": "h", "lion": "m"}[rule]
    embedding = torch.nn.Embedding(50, 4, sparse=True)
    with pytest.raises(ValueError, match=r"names 'w', .*; the weights are a parameter's, in its own dtype"):
        MODULES[rule](embedding.parameters(), state_dir=tmp_path / "a", state_dtype={"w": "bfloat16"})
    first = embedding.weight.detach().clone()
    with MODULES[rule](embedding.parameters(), state_dir=tmp_path / "a", state_dtype="bfloat16") as optimizer:
        for _ in range(3):
            optimizer.zero_grad()
            embedding(torch.tensor([3, 4])).sum().backward()
            optimizer.step()
        (table,) = optimizer._portable_state().tables.values()
        optimizer.export_checkpoint(tmp_path / "full")
        assert table.backend.read(np.arange(50)).dtype[field].base == np.uint16
    moved = (embedding.weight != first).any(dim=1)
    assert moved.nonzero().flatten().tolist() == [3, 4]
    kept = embedding.weight.detach().clone()
    with torch.no_grad():
        embedding.weight.zero_()
    with MODULES[rule](embedding.parameters(), state_dir=tmp_path / "b", state_dtype="bfloat16") as optimizer:
        optimizer.import_checkpoint(tmp_path / "full")
        assert torch.equal(embedding.weight, kept)


def test_max_norm_and_padding(tmp_path):
    """Weights that are set are rounded to the nearest, which may be a little above the norm."""
    module = DiskEmbedding(
        20, 4, padding_idx=2, max_norm=0.5, state_dtype={"w": "bfloat16"}, state_dir=tmp_path
    )
    with closing(module):
        found = module(torch.tensor([1, 2, 3]))
        assert (found[1] == 0).all()
        norms = torch.linalg.norm(module(torch.tensor([1, 3])), dim=1)
        assert (norms <= 0.5 * (1 + 2**-8)).all()


def test_state_of_torch_is_taken_over(tmp_path):
    plain, ours = (torch.nn.Embedding(30, 4, sparse=True) for _ in range(2))
    theirs = torch.optim.SparseAdam(plain.parameters(), lr=0.1)
    for _ in range(3):
        theirs.zero_grad()
        plain(torch.tensor([3, 4])).sum().backward()
        theirs.step()
    with DiskSparseAdam(ours.parameters(), state_dir=tmp_path, state_dtype="bfloat16") as optimizer:
        optimizer.load_state_dict(theirs.state_dict())
        (table,) = optimizer._portable_state().tables.values()
        records = table.backend.read(np.arange(30))
    moments = theirs.state_dict()["state"][0]
    for name, key in ("m", "exp_avg"), ("v", "exp_avg_sq"):
        assert (read_numbers(records, name) == moments[key].bfloat16().float().numpy()).all()


def test_a_damaged_file_is_verified_and_repaired(tmp_path):
    with build(tmp_path, ALL) as optimizer:
        train(optimizer, 2)
        optimizer.flush()
        stride = optimizer._portable_state().tables["entity"].backend.describe()["stride"]
    (file,) = tmp_path.glob("entity-*.dsa")
    data = bytearray(file.read_bytes())
    data[-stride * 5 + 3] ^= 0x40
    file.write_bytes(data)
    assert not verify(tmp_path).ok
    (repaired,) = dsa.repair(tmp_path).tables
    assert len(repaired.reset) == 1
    assert verify(tmp_path).ok
    with build(tmp_path, ALL, resume=True) as optimizer:
        train(optimizer, 4)


def test_moments_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    with build(tmp_path, ALL) as optimizer:
        train(optimizer, 3)
    with open_state(tmp_path) as view:
        axes = dsa.plots.moment_scales(view["entity"])
    assert axes.get_xlabel()


def test_a_module_that_only_reads(tmp_path):
    module = DiskEmbedding(50, 4, state_dtype=ALL, state_dir=tmp_path)
    with closing(module), DiskSparseAdam(module.parameters(), 0.1) as optimizer:
        module(torch.tensor([3, 4])).sum().backward()
        optimizer.step()
        expected = module(torch.tensor([3, 4, 9])).detach()
    reader = DiskEmbedding.open(tmp_path)
    with closing(reader):
        assert torch.equal(reader(torch.tensor([3, 4, 9])), expected)
