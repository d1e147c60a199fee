"""What a short measurement of the disk says about steps."""

import threading
from unittest import mock

import numpy as np
import pytest

from dsa import backends
from dsa.backends.memmap import choose_stride, stored_bytes
from dsa.cli.bench import device, forecast
from dsa.cli.bench.device import DeviceSpeed, measure_device
from dsa.schema import adam_schema

MIB = 1 << 20


def test_a_measurement_leaves_nothing(tmp_path):
    found = forecast.forecast(100_000, 64, tmp_path, seconds=0.1, size=2 * MIB)
    assert found.device.reads_per_second > 0
    assert found.device.writes_per_second > 0
    assert list(found.milliseconds) == [64, 2_048, 16_384]
    limit = found.device.limit(found.pages_per_row)
    assert found.milliseconds[2_048] == pytest.approx(1e3 * 2_048 / limit)
    assert not list(tmp_path.iterdir())


def test_steps_are_not_larger_than_the_table(tmp_path):
    with mock.patch.object(forecast, "measure_device", return_value=DeviceSpeed(1e4, 1e4, 32, 32, True)):
        assert list(forecast.forecast(100, 8, tmp_path).milliseconds) == [64]
        assert list(forecast.forecast(10, 8, tmp_path).milliseconds) == [10]
        found = forecast.forecast(10**6, 256, tmp_path, batches=(1_000,))
    # A record of 3,080 bytes lies on 1.75 pages, each of which is read and written.
    assert found.milliseconds[1_000] == pytest.approx(1e3 * 1_000 * found.pages_per_row * 2 / 1e4)


def test_where_pages_can_not_be_measured(tmp_path):
    with mock.patch.object(forecast, "measure_device", return_value=None):
        assert forecast.forecast(100, 8, tmp_path) is None


@pytest.mark.parametrize("stride", [None, "packed", "page"])
@pytest.mark.parametrize("dim", [1, 8, 100, 128, 500])
def test_pages_of_a_row(dim, stride):
    record = stored_bytes(adam_schema(dim))
    starts = np.arange(4_096) * choose_stride(record, stride)
    pages = (starts + record - 1) // 4_096 - starts // 4_096 + 1
    found = forecast._pages_per_row(adam_schema(dim), backends.Memmap(stride=stride))
    assert found == pytest.approx(pages.mean())


def test_fields_that_lie_apart_are_more_pages():
    assert forecast._pages_per_row(adam_schema(8), backends.Zarr()) == pytest.approx(6.0, rel=0.02)
    assert forecast._pages_per_row(adam_schema(8), None) == pytest.approx(1.0, rel=0.05)


def test_an_interrupt_does_not_strand_the_threads(tmp_path):
    """Threads that have not arrived when Ctrl-C comes would wait for this one for ever."""
    with (
        mock.patch.object(threading.Thread, "start", autospec=True, side_effect=_start_three) as start,
        pytest.raises(KeyboardInterrupt),
    ):
        measure_device(tmp_path, size=MIB, seconds=0.1, depths=(8,))
    assert start.call_count == 4
    for thread in _started:
        thread.join(30)
        assert not thread.is_alive()
    assert not list(tmp_path.iterdir())
    assert device.measure_device(tmp_path, size=MIB, seconds=0.1, depths=(2,)).reads_per_second > 0


_started = []
_begin = threading.Thread.start


def _start_three(thread):
    if len(_started) == 3:
        raise KeyboardInterrupt
    _started.append(thread)
    _begin(thread)
