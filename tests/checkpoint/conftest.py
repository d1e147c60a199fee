"""Makes the helpers beside the tests importable; cuts arrays small, so that little has many blocks."""

import sys
from pathlib import Path

import pytest

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)

pytest.register_assert_rewrite("checkpoint_samples")


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks and shards of 4 KiB, inner chunks of 1 KiB or 8 rows."""
    from checkpoint_samples import SMALL_LAYOUT

    for name, value in SMALL_LAYOUT.items():
        monkeypatch.setattr(f"dsa.backends.shards.layout.{name}", value)


@pytest.fixture(scope="session")
def s3(tmp_path_factory):
    """A server that speaks S3, and the options with which fsspec finds it."""
    moto = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield {
        "key": "test",
        "secret": "test",
        "endpoint_url": f"http://{host}:{port}",
    }
    server.stop()
