"""What holds for every update rule, driven by a table of them; and that one of one's own needs nothing else.

To add a rule, add it to `dsa.rules.known.RULES` and a `Case` here.
"""

import json
import os
import signal
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from nursery import start

from dsa.backends import Memmap, Zarr
from dsa.checkpoint.delta import open_content
from dsa.checkpoint.reading import open_checkpoint
from dsa.checkpoint.transfer import export_state, import_state, make_state
from dsa.errors import CheckpointMismatchError, CorruptRowError, StateMismatchError
from dsa.inspection import open_state, summarize
from dsa.inspection.comparison import diff
from dsa.inspection.verification import verify
from dsa.kernels.compiled import compiled
from dsa.kernels.plausible import describe_fault, first_implausible
from dsa.kernels.visiting import Gradients, pass_of
from dsa.optimizers.stepping import Batch, Stepping
from dsa.rules import known
from dsa.rules.adagrad import ADAGRAD, ROW_WISE_ADAGRAD, AdagradOptions
from dsa.rules.adam import ADAM, CATCH_UP_ADAM, FRAME_ADAM, ROW_WISE_ADAM, adam_rule
from dsa.rules.conventions import AdamOptions
from dsa.rules.init import Normal
from dsa.rules.lion import LION, LionOptions
from dsa.rules.manifolds import manifold_of
from dsa.rules.sgd import SGD, SGDOptions
from dsa.rules.updates import UpdateRule, rule_to_json
from dsa.schema import TORN, Field, Schema, adam_schema, read_numbers, store_numbers, with_dtypes
from dsa.state.opening import open_directory
from dsa.state.replacement import change_curvature
from dsa.state.storage import Queue, StorageChoice, table_spec
from dsa.state.table import read_records, read_weights

ROWS, DIM, BATCH = 311, 6, 40


class Rate(NamedTuple):
    """The options of a step of `Momentum`."""

    lr: float


class Constants(NamedTuple):
    """What its pass needs."""

    lr: float
    decay: float
    stamp: int


@compiled(_nrt=False)
def _descend(visit, constants, scratch, p, slot):
    layout = visit.layout
    old, new = visit.images[slot].view(np.float32), visit.table[visit.places[p]].view(np.float32)
    decay, lr = np.float32(constants.decay), np.float32(constants.lr)
    for j in range(layout.dim):
        momentum = decay * old[layout.m + j] + scratch.gradient[j]
        new[layout.m + j] = momentum
        new[layout.w + j] = old[layout.w + j] - lr * momentum
    new[layout.v] = old[layout.v] + np.float32(1.0)


_PASS = pass_of(_descend)


@dataclass(frozen=True)
class Momentum:
    """A rule of one's own: gradient descent with momentum, in flat space; its ``v`` counts the updates, too.

    How the momentum decays is an option that fixes what is stored.
    """

    decay: float = 0.5
    name = "test_momentum"
    curved = False
    non_negative = MappingProxyType({"v": "count of its own"})

    @property
    def choice(self):
        return f"decay={self.decay}"

    @property
    def options(self):
        return {"decay": self.decay}

    def with_options(self, options):
        return Momentum(**options)

    def schema(self, dim, *, weights=True):
        return adam_schema(dim, second_moment_per="row", weights=weights)

    def decay_of(self, options):
        return 0.0

    def pass_for(self, options, *, k, stamp, step, decay):
        return _PASS, Constants(options.lr, self.decay, stamp)

    def rescale(self, records, ratio, old, new):
        raise AssertionError("a rule for flat space is asked for another curvature")


MOMENTUM = Momentum()


class Case(NamedTuple):
    """A rule, as it is tested.

    Args:
        rule: The rule.
        options: Those of a step.
        k: Curvature magnitude of the table.
        record: Bytes of a record of `DIM` elements with its weight, without a checksum.
        dtypes: How fields are stored, when not as float32.
    """

    rule: UpdateRule
    options: Any
    k: float
    record: int
    dtypes: Any = None

    @property
    def schema(self):
        """Of a record."""
        return with_dtypes(self.rule.schema(DIM), self.dtypes or {})


DECOUPLED = AdamOptions(lr=0.1, weight_decay=0.3, weight_decay_mode="decoupled")
CASES = {
    "adam": Case(ADAM, AdamOptions(lr=0.1), 0.0, 4 * (3 * DIM + 2)),
    "adam on a ball": Case(ADAM, AdamOptions(lr=0.01), 0.5, 4 * (3 * DIM + 2)),
    "frame_adam": Case(FRAME_ADAM, AdamOptions(lr=0.01), 1.0, 4 * (3 * DIM + 2)),
    "row_wise_adam": Case(ROW_WISE_ADAM, AdamOptions(lr=0.1), 0.0, 4 * (2 * DIM + 3)),
    "row_wise_adam on a ball": Case(ROW_WISE_ADAM, AdamOptions(lr=0.01), 1.0, 4 * (2 * DIM + 3)),
    "catch_up_adam": Case(CATCH_UP_ADAM, DECOUPLED, 0.0, 4 * (3 * DIM + 3)),
    "adagrad": Case(ADAGRAD, AdagradOptions(0.1, lr_decay=0.01), 0.0, 4 * (2 * DIM + 1)),
    "row_wise_adagrad": Case(ROW_WISE_ADAGRAD, AdagradOptions(0.1), 0.0, 4 * (DIM + 2)),
    "sgd": Case(SGD, SGDOptions(0.1), 0.0, 4 * (DIM + 1)),
    "lion": Case(LION, LionOptions(0.01), 0.0, 4 * (2 * DIM + 1)),
    "one's own": Case(MOMENTUM, Rate(0.1), 0.0, 4 * (2 * DIM + 3)),
    **{
        f"{name}, {' '.join(fields)} bfloat16": Case(
            rule, options, k, record, dict.fromkeys(fields, "bfloat16")
        )
        for name, rule, options, k, fields, record in (
            ("adam", ADAM, AdamOptions(lr=0.1), 0.0, "mv", 4 * (2 * DIM + 2)),
            ("adam", ADAM, AdamOptions(lr=0.1), 0.0, "wmv", 2 * 3 * DIM + 8),
            ("adam on a ball", ADAM, AdamOptions(lr=0.01), 0.5, "mv", 4 * (2 * DIM + 2)),
            ("frame_adam", FRAME_ADAM, AdamOptions(lr=0.01), 1.0, "mv", 4 * (2 * DIM + 2)),
            ("row_wise_adam", ROW_WISE_ADAM, AdamOptions(lr=0.1), 0.0, "wm", 4 * (DIM + 3)),
            (
                "row_wise_adam on a ball",
                ROW_WISE_ADAM,
                AdamOptions(lr=0.01),
                1.0,
                "m",
                4 * (3 * DIM // 2 + 3),
            ),
            ("catch_up_adam", CATCH_UP_ADAM, DECOUPLED, 0.0, "wv", 4 * (2 * DIM + 3)),
            ("adagrad", ADAGRAD, AdagradOptions(0.1), 0.0, "wh", 4 * (DIM + 1)),
            ("row_wise_adagrad", ROW_WISE_ADAGRAD, AdagradOptions(0.1), 0.0, "w", 4 * (DIM // 2 + 2)),
            ("sgd", SGD, SGDOptions(0.1), 0.0, "w", 4 * (DIM // 2 + 1)),
            ("lion", LION, LionOptions(0.01), 0.0, "m", 4 * (3 * DIM // 2 + 1)),
            ("one's own", MOMENTUM, Rate(0.1), 0.0, "wm", 4 * (DIM + 3)),
        )
    },
}


@pytest.fixture(autouse=True)
def _with_one_of_ones_own(monkeypatch):
    monkeypatch.setattr(known, "RULES", (*known.RULES, MOMENTUM))


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


def spec_of(case, rule=None):
    source = Normal(ROWS, DIM, std=0.1, seed=3)
    if rule is not None:
        return table_spec("entity", source, rule, k=case.k, init_max_norm_fraction=0.5)
    return table_spec(
        "entity", source, case.rule, k=case.k, init_max_norm_fraction=0.5, state_dtype=case.dtypes
    )


def opened(path, case, resume=None, **choice):
    return closing(open_directory(path, [spec_of(case)], resume, StorageChoice(**choice).complete()))


def batch_of(step):
    """Rows and gradients of a step, which depend on its number alone."""
    draws = np.random.default_rng(step)
    rows = np.sort(draws.choice(ROWS, BATCH, replace=False))
    return rows, draws.standard_normal((BATCH, DIM)).astype(np.float32)


def train(state, case, until, threads=1):
    """Take the steps that are left."""
    stepping = Stepping()
    while state.global_step < until:
        rows, grad = batch_of(state.global_step)
        with stepping.ready(state, threads):
            each = np.arange(len(rows) + 1)
            gradients = Gradients(grad, each[:-1], each)
            stepping.take(state, [Batch(state.tables["entity"], rows, gradients, case.options)])


def contents(state):
    """The bytes of all records, with the weights that rows have from their rule, and of all weights."""
    state.settle()
    table = state.tables["entity"]
    return read_records(table, np.arange(ROWS)).tobytes() + read_weights(table, np.arange(ROWS)).tobytes()


def records_of(state, case):
    """All records."""
    state.settle()
    return np.frombuffer(read_records(state.tables["entity"], np.arange(ROWS)).tobytes(), case.schema.dtype)


def trained(path, case, until):
    with opened(path, case) as state:
        train(state, case, until)
        return contents(state)


def test_every_known_rule_has_a_case():
    assert {rule.name for rule in known.RULES} == {case.rule.name for case in CASES.values()}
    assert len({rule.name for rule in known.RULES}) == len(known.RULES)


def test_a_rule_is_a_value_that_is_read_back(case):
    description = json.loads(json.dumps(rule_to_json(case.rule)))
    again = known.rule_from_json(description)
    assert again == case.rule
    assert hash(again) == hash(case.rule)
    assert description["name"] == case.rule.name


def test_fields_begin_with_the_weight_and_end_with_the_stamp(case):
    schema = case.rule.schema(DIM)
    assert schema.fields[0] == Field("w", "float32", "element")
    assert schema.fields[-1] == Field("s", "int32", "row")
    assert case.rule.schema(DIM, weights=False).fields == schema.fields[1:]
    assert set(case.rule.non_negative) < set(schema.names)
    assert spec_of(case).schema == case.schema
    assert case.schema.dtype.itemsize == case.record


def test_training_goes_on_where_it_was_left(tmp_path, case):
    whole = trained(tmp_path / "whole", case, 12)
    trained(tmp_path / "parts", case, 5)
    with opened(tmp_path / "parts", case, resume=True) as state:
        assert state.tables["entity"].rule == case.rule
        assert state.tables["entity"].steps == 5
        train(state, case, 12, threads=2)
        assert contents(state) == whole


def test_the_same_bytes_in_place_and_staged(tmp_path, case):
    """On one thread and on two, too; `tests/optimizers/test_in_place.py` draws batches for Adam."""
    ways = {
        "process": {},
        "none": {"durability": "none"},
        "zarr": {"backend": Zarr(shard_bytes=2048)},
        "zarr, none": {"backend": Zarr(shard_bytes=2048), "durability": "none"},
        "power": {"durability": "power"},
        "queue": {"queue": Queue()},
        "zstd": {"backend": Zarr(compression="zstd", shard_bytes=4096)},
    }
    found = {}
    for way, choice in ways.items():
        with opened(tmp_path / way, case, **choice) as state:
            assert state.can_be_in_place(list(state.tables.values())) == (way in list(ways)[:4])
            train(state, case, 6, threads=1 + len(found) % 2)
            found[way] = contents(state)
    assert len(set(found.values())) == 1, {way: hash(each) for way, each in found.items()}


def test_a_step_changes_the_rows_of_its_batch_alone(tmp_path, case):
    with opened(tmp_path, case) as state:
        before = records_of(state, case)
        train(state, case, 1)
        after = records_of(state, case)
    rows, _ = batch_of(0)
    assert (after["w"][rows] != before["w"][rows]).any(axis=1).all()
    assert (np.flatnonzero(after["s"]) == rows).all()
    others = np.setdiff1d(np.arange(ROWS), rows)
    assert after[others].tobytes() == before[others].tobytes()


# One of a kind: a process takes its time to start.
KILLED = [
    name
    for name, case in CASES.items()
    if case.dtypes is None or name in ("adam, w m v bfloat16", "lion, m bfloat16")
]
_CHILD = """
import sys
from dsa.rules import known
from tests.rules.test_updates import CASES, MOMENTUM, opened, train
known.RULES = (*known.RULES, MOMENTUM)
case = CASES[sys.argv[2]]
with opened(sys.argv[1], case) as state:
    for until in range(1, 100_000):
        train(state, case, until)
        print(until, flush=True)
"""


@pytest.mark.parametrize("name", KILLED)
def test_a_kill_in_the_middle_of_training(tmp_path, name):
    """Killed at some step, no matter where in it, and resumed: as if nothing had been."""
    case = CASES[name]
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root)}
    with start(_CHILD, tmp_path / "killed", name, env=environment) as child:
        for line in child.stdout:
            if int(line) == 7:
                break
        child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL
    with opened(tmp_path / "killed", case, resume=True) as state:
        reached = state.global_step
        assert reached >= 7
        train(state, case, reached + 3)
        found = contents(state)
    assert found == trained(tmp_path / "whole", case, reached + 3)


def test_a_full_checkpoint_and_back(tmp_path, case):
    with opened(tmp_path / "a", case) as state:
        train(state, case, 6)
        export_state(state, tmp_path / "full", durable=False)
        train(state, case, 9)
        whole = contents(state)
        import_state(state, open_content(tmp_path / "full"))
        assert state.tables["entity"].rule == case.rule
        train(state, case, 9)
        assert contents(state) == whole
    make_state(tmp_path / "b", open_content(tmp_path / "full").content, StorageChoice().complete())
    with opened(tmp_path / "b", case, resume=True) as state:
        train(state, case, 9)
        assert contents(state) == whole


def test_a_differential_checkpoint_and_back(tmp_path, case):
    with opened(tmp_path / "a", case) as state:
        train(state, case, 4)
        export_state(state, tmp_path / "full", durable=False)
        train(state, case, 6)
        export_state(state, tmp_path / "delta", base=tmp_path / "full", durable=False)
        train(state, case, 9)
        whole = contents(state)
    make_state(tmp_path / "b", open_content(tmp_path / "delta").content, StorageChoice().complete())
    with opened(tmp_path / "b", case, resume=True) as state:
        assert state.global_step == 6
        train(state, case, 9)
        assert contents(state) == whole


def test_inspection(tmp_path, case):
    trained(tmp_path / "a", case, 5)
    trained(tmp_path / "b", case, 6)
    (table,) = summarize(tmp_path / "a").tables
    touched = len(np.unique(np.concatenate([batch_of(step)[0] for step in range(5)])))
    assert (table.rule, table.touched_rows, table.implausible_rows) == (case.rule.name, touched, 0)
    assert table.stepped_rows == touched
    assert table.logical_bytes == ROWS * (case.record - 4)
    with open_state(tmp_path / "a") as view:
        assert view["entity"].rule == case.rule
        assert case.rule.name in repr(view["entity"])
        assert view["entity"].fields == case.rule.schema(DIM).names
    assert verify(tmp_path / "a").ok
    (compared,) = diff(tmp_path / "a", tmp_path / "b").tables
    decays = {"decay": tuple(-n * np.log1p(-0.03) for n in (5, 6))} if case.rule == CATCH_UP_ADAM else {}
    assert compared.facts == {"steps": (5, 6), **{name: pytest.approx(both) for name, both in decays.items()}}
    assert {each.name: each.rows for each in compared.fields}["s"] == BATCH


def test_a_row_takes_on_disk_what_the_schema_says(tmp_path, case):
    with opened(tmp_path, case, backend=Memmap(stride="packed")) as state:
        backend = state.tables["entity"].backend
        assert backend.schema == case.schema
        assert backend.describe()["stride"] == case.record + 4  # and a checksum
        (file,) = tmp_path.glob("entity-*.dsa")
    header = file.stat().st_size - ROWS * (case.record + 4)
    assert 0 <= header < 64 << 10


def test_an_implausible_record_is_refused_and_named(tmp_path, case):
    for name, value, match in faults(case):
        path = tmp_path / f"{name} {value}"
        with opened(path, case) as state:
            train(state, case, 1)
            table, rows = state.tables["entity"], batch_of(1)[0]
            records = read_records(table, rows[:1])
            records["s"] = 1
            store_numbers(records, name, value)
            table.backend.write(rows[:1], records)
            with pytest.raises(CorruptRowError, match=rf"row {rows[0]} of table 'entity' .*{match}"):
                train(state, case, 2)
            assert state.global_step == 1
        assert summarize(path).tables[0].implausible_rows == 1
        assert match in verify(path).problems[0]


def faults(case):
    """Values that no training produces, and what is said of them."""
    for field in case.rule.schema(DIM).fields:
        if field.dtype == "int32":
            yield field.name, -2, f"field '{field.name}' holds -2, a negative count"
        else:
            yield field.name, np.nan, f"field '{field.name}' holds a number that is not finite"
        if field.name in case.rule.non_negative:
            yield (
                field.name,
                -2.0,
                f"field '{field.name}' holds -2.0, a negative {case.rule.non_negative[field.name]}",
            )


def other_rules(case):
    return [rule for rule in known.RULES if rule != case.rule and (rule.curved or case.k == 0.0)]


def test_another_rule_is_refused_by_name(tmp_path, case):
    trained(tmp_path / "state", case, 2)
    with opened(tmp_path / "state", case, resume=True) as state:
        export_state(state, tmp_path / "full", durable=False)
    description = (tmp_path / "state" / "dsa.json").read_bytes()
    for rule in other_rules(case):
        match = f"stored with the update rule '{case.rule.name}' .* but '{rule.name}' .* asked for"
        with pytest.raises(StateMismatchError, match=match):
            open_directory(tmp_path / "state", [spec_of(case, rule)], True, StorageChoice().complete())
        assert (tmp_path / "state" / "dsa.json").read_bytes() == description
        other = open_directory(tmp_path / rule.name, [spec_of(case, rule)], None, StorageChoice().complete())
        with closing(other):
            match = f"the update rule '{case.rule.name}' .* in the checkpoint but '{rule.name}'"
            with pytest.raises(StateMismatchError, match=match):
                import_state(other, open_content(tmp_path / "full"))


def test_a_rule_with_another_option_is_another_rule(tmp_path):
    case = CASES["one's own"]
    trained(tmp_path / "state", case, 2)
    other = spec_of(case, Momentum(0.25))
    open_directory(tmp_path / "other", [other], None, StorageChoice().complete()).close()
    (compared,) = diff(tmp_path / "state", tmp_path / "other").tables
    assert compared.facts["rule"] == ("test_momentum decay=0.5", "test_momentum decay=0.25")
    with pytest.raises(
        StateMismatchError, match=r"'test_momentum' .decay=0\.5. .* 'test_momentum' .decay=0\.25."
    ):
        open_directory(tmp_path / "state", [other], True, StorageChoice().complete())


def test_a_rule_that_is_not_known_is_named(tmp_path, monkeypatch):
    case = CASES["one's own"]
    trained(tmp_path / "state", case, 2)
    with opened(tmp_path / "state", case, resume=True) as state:
        export_state(state, tmp_path / "full", durable=False)
    monkeypatch.setattr(known, "RULES", (ADAM,))
    match = "the update rule 'test_momentum' is not known here: use one of 'adam'"
    with pytest.raises(StateMismatchError, match=f"table 'entity' in .*state.*{match}"):
        open_directory(tmp_path / "state", [spec_of(CASES["adam"])], True, StorageChoice().complete())
    with pytest.raises(StateMismatchError, match=match):
        open_state(tmp_path / "state")
    with pytest.raises(CheckpointMismatchError, match=match):
        open_checkpoint(tmp_path / "full")


@pytest.mark.parametrize("data", [None, "adam", [], {}, {"name": 3}, {"name": "adam", "decay": 1}])
def test_what_describes_no_rule(data):
    with pytest.raises(ValueError, match="update rule"):
        known.rule_from_json(data)


def test_a_rule_for_flat_space_is_refused_on_a_ball(tmp_path):
    case = CASES["one's own"]
    with pytest.raises(ValueError, match=r"'test_momentum' .* works in flat space only, and k=1\.0"):
        spec_of(case._replace(k=1.0))
    with opened(tmp_path, case) as state:
        train(state, case, 2)
        before = contents(state)
        with pytest.raises(ValueError, match="flat space only"):
            change_curvature(state, [(state.tables["entity"], 1.0)], "clip", False)
        assert contents(state) == before


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.rule.curved and "w" not in (case.dtypes or {})]
)
@pytest.mark.parametrize("reset", [False, True])
def test_another_curvature_keeps_counts_or_resets_all(tmp_path, name, reset):
    """What a rule makes of its moments is in `test_curvature`; here, that nothing else changes."""
    case = CASES[name]
    with opened(tmp_path, case) as state:
        train(state, case, 3)
        before = records_of(state, case)
        change_curvature(state, [(state.tables["entity"], 2.0)], "clip", reset)
        assert (state.tables["entity"].k, state.tables["entity"].rule) == (2.0, case.rule)
        after = records_of(state, case)
        train(state, case, 6)
    written = before["s"] > 0
    assert ((after["s"] > 0) == written).all()
    assert (after["t"] == (0 if reset else before["t"])).all()
    for name in set(after.dtype.names) - {"w", "t", "s"}:
        kept = np.asarray(read_numbers(after, name)[written] != 0)
        assert kept.any() != reset
    inside = manifold_of(2.0).project(after["w"].astype(np.float64))[1]
    assert not inside.any()


def test_weights_in_bfloat16_stay_off_the_ball(tmp_path):
    case = CASES["adam, w m v bfloat16"]
    with pytest.raises(ValueError, match=r"weights in bfloat16 and k=1\.0: near the edge of a ball"):
        spec_of(case._replace(k=1.0))
    with opened(tmp_path, case) as state:
        train(state, case, 2)
        before = contents(state)
        with pytest.raises(ValueError, match="near the edge of a ball"):
            change_curvature(state, [(state.tables["entity"], 1.0)], "clip", False)
        assert contents(state) == before


def test_the_argument_of_users_names_a_rule():
    assert [adam_rule(mode) for mode in ("coordinate", "frame", "row")] == [ADAM, FRAME_ADAM, ROW_WISE_ADAM]
    with pytest.raises(ValueError, match="second_moment='rows' is not known: use one of"):
        adam_rule("rows")


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
@pytest.mark.parametrize("dim", [1, 2, 5, 16])
def test_every_bit_of_a_record_is_judged(weights, moments, dim):
    """Beside an oracle that looks at numbers one by one."""
    weight = (Field("w", "float32", "element"),) if weights else ()
    moment = [Field(name, moments, per) for name, per in (("m", "element"), ("v", "element"), ("u", "row"))]
    schema = Schema(dim, (*weight, *moment, Field("t", "int32", "row"), Field("s", "int32", "row")))
    draws = np.random.default_rng(dim)
    records = np.zeros(1, schema.dtype)
    odd = [np.nan, -np.nan, np.inf, -np.inf, -0.0, -1.5, 0.0, 3e38, 1e-40, 7.25]
    for field in schema.fields:
        for _ in range(60):
            value = draws.choice([-1, TORN, 0, 5, 2**31 - 1]) if field.dtype == "int32" else draws.choice(odd)
            where = int(draws.integers(dim)) if field.per == "element" else None
            numbers = np.array(read_numbers(records, field.name))
            kept = numbers.copy()
            numbers[(0, where) if field.per == "element" else 0] = value
            store_numbers(records, field.name, numbers)
            expected = value < 0 if field.dtype == "int32" else not np.isfinite(value)
            expected |= field.name in "vu" and bool(np.signbit(value))
            assert (first_implausible(records, ["v", "u"]) == 0) == expected, (field, value)
            words = {"v": "second moment", "u": "norm"}
            assert bool(describe_fault(records, 0, words)) == expected, (field, value)
            store_numbers(records, field.name, kept)


def test_a_field_that_no_kernel_can_judge():
    records = np.zeros(1, Schema(2, (Field("m", "float64", "element"),)).dtype)
    with pytest.raises(ValueError, match="field 'm' of float64 is not one that an update rule may have"):
        first_implausible(records, [])


def test_numbers_of_adam_are_read_as_they_lie():
    records = np.zeros(3, adam_schema(2).dtype)
    assert np.shares_memory(read_numbers(records, "m"), records)
    store_numbers(records, "v", [[1.0, 2.0]] * 3)
    assert records["v"].tolist() == [[1.0, 2.0]] * 3


def test_bfloat16_is_rounded_as_torch_does():
    torch = pytest.importorskip("torch")
    draws = np.random.default_rng(8)
    patterns = draws.integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32)
    special = [0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F7FFFFF, 0x3F808000, 0x3F818000]
    numbers = np.concatenate([patterns, np.array(special, np.uint32)]).view(np.float32)
    records = np.zeros(len(numbers), Schema(1, (Field("b", "bfloat16", "row"),)).dtype)
    store_numbers(records, "b", numbers)
    expected = torch.from_numpy(numbers).to(torch.bfloat16).to(torch.float32).numpy()
    assert np.array_equal(read_numbers(records, "b"), expected, equal_nan=True)
