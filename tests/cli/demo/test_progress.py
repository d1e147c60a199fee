import sys

from dsa.cli.demo.progress import Progress


def watch(epochs, per_epoch, done=0):
    with Progress(epochs, per_epoch, done) as progress:
        for step in range(done, epochs * per_epoch):
            progress.step(step // per_epoch, float(step))


def test_a_file_gets_ten_lines(capsys):
    watch(epochs=50, per_epoch=2)
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines() == [f"epoch {n} of 50: loss {2 * n - 1.5:.4f}" for n in range(5, 51, 5)]


def test_the_last_epoch_is_always_told_and_earlier_calls_count(capsys):
    watch(epochs=23, per_epoch=3, done=3 * 19 + 1)
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        "epoch 20 of 23",
        "epoch 22 of 23",
        "epoch 23 of 23",
    ]


def test_a_terminal_gets_a_bar(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Progress(epochs=2, steps_per_epoch=3, done=2) as progress:
        progress.step(0, 8.0)
        progress.step(1, 1.0)
        progress.step(1, 2.0)
        progress._bar.refresh()
    out, err = capsys.readouterr()
    assert out == ""
    shown = err.split("\r")
    assert any("epoch 2/2" in bar and "5/6" in bar and "loss 1.500" in bar for bar in shown), shown
