import signal
import threading

import pytest

from dsa.cli.demo.interrupt import Interrupt


def test_the_first_ctrl_c_is_a_request_and_the_second_is_not():
    before = signal.getsignal(signal.SIGINT)
    with Interrupt() as interrupt:
        assert not interrupt.requested
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_another_thread_changes_no_handler():
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def work():
        with Interrupt():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
