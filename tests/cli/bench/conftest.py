import pytest
import torch


@pytest.fixture(autouse=True)
def _threads():
    """Leave torch's threads as they were."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
