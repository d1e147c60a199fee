"""Who steps when, and what becomes of the times."""

from contextlib import ExitStack

import pytest
import torch

from dsa.cli.bench import flat
from dsa.cli.bench.batches import UniformBatches
from dsa.cli.bench.entry import Tournament, enter, settle, with_one_thread
from dsa.cli.bench.results import Duration, Footprint, Group, Line, line_from_times, set_ratio
from dsa.cli.bench.settings import QUICK
from dsa.cli.bench.timing import Entry, alternate

pytestmark = pytest.mark.disk


class Recorder:
    """A contender that writes down what is asked of it."""

    what = "a recorder"

    def __init__(self, key, log, size=0):
        self.key, self.log, self.size = key, log, size

    def prepare(self, batch):
        self.batch = batch

    def step(self):
        self.log.append((self.key, self.batch.indices.tolist(), torch.get_num_threads()))

    def flush(self):
        self.log.append((self.key, "flush"))

    def file_bytes(self):
        return self.size

    def close(self):
        self.log.append((self.key, "close"))


def entry(key, log):
    return Entry(Recorder(key, log), Footprint())


BATCHES = UniformBatches(100, 2, 3, seed=0)


def rows(number):
    return BATCHES.make(number).indices.tolist()


def test_contenders_take_turns_over_the_same_batches():
    log = []
    times = alternate([entry("a", log), entry("b", log)], BATCHES, seconds=0.0)
    # no time: every block ends after one step, and the fewest rounds are run
    expected = [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("b", 31), ("a", 31), ("a", 61), ("b", 61)]
    assert [(key, row) for key, row, _ in log] == [(key, rows(number)) for key, number in expected]
    assert [len(t) for t in times] == [3, 3]


def test_blocks_have_no_more_steps_than_asked():
    log = []
    times = alternate([entry("a", log)], BATCHES, seconds=0.2, steps=4)
    assert len(times[0]) % 4 == 0
    assert [row for _, row, _ in log[:7]] == [rows(n) for n in (0, 1, 2, 1, 2, 3, 4)]


def test_one_thread_is_for_its_own_steps_only():
    torch.set_num_threads(2)
    log = []
    alternate([entry("a", log)._replace(one_thread=True), entry("b", log)], BATCHES, seconds=0.0)
    assert {(key, threads) for key, _, threads in log} == {("a", 1), ("b", 2)}
    assert torch.get_num_threads() == 2


def test_one_thread_is_said_in_the_names():
    one = entry("a", [])._replace(one_thread=True)
    assert (one.key, one.what) == ("a_one_thread", "a recorder, one thread")


@pytest.mark.parametrize(("threads", "keys"), [(1, ["a"]), (2, ["a", "a_one_thread"])])
def test_one_thread_joins_where_torch_has_several(threads, keys):
    torch.set_num_threads(threads)
    assert [each.key for each in with_one_thread(entry("a", []))] == keys


def test_entering_updates_every_row_on_one_thread_and_closes_at_the_end():
    torch.set_num_threads(2)
    log = []
    with ExitStack() as stack:
        entry = enter(stack, lambda: Recorder("a", log, size=9), 20_000, 2)
    assert [row for _, part, _ in log[:-1] for row in part] == list(range(20_000))
    assert {threads for _, _, threads in log[:-1]} == {1}
    assert log[-1] == ("a", "close")
    assert entry.footprint.file == 9
    assert entry.footprint.vram == 0


def test_settling_writes_files_and_updates_once_more():
    log = []
    settle(Recorder("memory", log), 10, 2)
    settle(Recorder("disk", log, size=1), 10, 2)
    assert [entry[:2] for entry in log] == [
        ("memory", "flush"),
        ("disk", "flush"),
        ("disk", list(range(10))),
    ]


def test_a_tournament_pools_the_baselines_and_lists_them_first():
    log = []
    groups = [Group("warm", "", 100, 2, batch) for batch in (3, 5)]
    tournament = Tournament(groups, [entry("base", log)], seed=0)
    for key in ("a", "b"):
        tournament.race([Entry(Recorder(key, log), Footprint(file=1))], seconds=0.0)
    tournament.finish()
    for group in groups:
        assert [line.key for line in group.lines] == ["base", "a", "b"]
        assert [line.steps for line in group.lines] == [6, 3, 3]
        assert [line.baseline for line in group.lines] == ["", "base", "base"]
    # settled before each race, and written after the last
    assert [entry for entry in log if entry[1] == "flush"] == [("a", "flush")] * 3 + [("b", "flush")] * 3


def line(key, *milliseconds):
    return line_from_times(key, key, 10, [Duration(t / 1e3, t / 2e3) for t in milliseconds])


def test_a_line_summarises_its_times():
    one = line("a", 5.0, 1.0, 3.0, 2.0, 4.0)
    assert (one.milliseconds, one.steps, one.rows_per_second) == (
        pytest.approx(3.0),
        5,
        pytest.approx(1e4 / 3),
    )
    assert one.quartiles == (pytest.approx(2.0), pytest.approx(4.0))
    assert one.cpu_milliseconds == pytest.approx(1.5)


def test_traps_are_counted_for_each_row():
    times = [Duration(0.1, 0.1, 0), Duration(0.1, 0.1, 30)]
    assert line_from_times("a", "a", 10, times).traps_per_row == pytest.approx(1.5)


def test_the_faster_rival_counts():
    one = line("a", 2.0)
    set_ratio(one, [line("slow", 30.0), line("fast", 10.0)])
    assert (one.baseline, one.ratio, one.cpu_ratio) == ("fast", pytest.approx(5.0), pytest.approx(5.0))


def test_without_rivals_there_is_no_ratio():
    one = line("a", 2.0)
    set_ratio(one, [])
    assert (one.baseline, one.ratio) == ("", None)


def test_without_a_gpu_nothing_is_measured_there(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert flat.gpu_groups(QUICK, tmp_path, 1.0) == ([], "no GPU is present: nothing was measured there")


def test_a_small_gpu_is_not_filled(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (1000, 2000))
    groups, reason = flat.gpu_groups(QUICK, tmp_path, 1.0)
    assert groups == []
    assert reason.startswith("the GPU has 1,000 bytes free and SparseAdam takes 25,600,000")


def test_the_gpu_s_race(tmp_path, monkeypatch):
    # the processor plays the GPU
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (1 << 40, 1 << 40))
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda: 0)
    settings = QUICK.with_sizes(rows=1000, dim=4, batches=(16,), directory=tmp_path)
    (group,), reason = flat.gpu_groups(settings, tmp_path / "state", 0.1, device="cpu")
    assert reason == ""
    assert [one.key for one in group.lines][-1] == "dsa"
    assert isinstance(group.find("dsa"), Line)
    assert group.find("dsa").baseline.startswith("sparse_adam")
