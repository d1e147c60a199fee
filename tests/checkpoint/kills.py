"""Exports killed at random moments: ``python -m tests.checkpoint.kills --trials 200``, run from the root.

A process exports two contents in turn to one place, each replacing the other, until it is killed. Then the
place must hold one of the two, whole, or nothing if nothing was complete before; and the next export must
remove all that was left. Both ways of replacing a directory are tried.
"""

import argparse
import random
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

NURSERY = """
import os, signal, sys, time
sys.path[:0] = sys.argv[1:3]
import checkpoint_samples
from checkpoint_samples import SMALL_LAYOUT, export, killed_contents
from dsa.checkpoint import exchange
from dsa.backends.shards import layout

vars(layout).update(SMALL_LAYOUT)
contents = killed_contents()
print("ready", flush=True)
for line in sys.stdin:
    path, way, first, delay = line.rstrip("\\n").split("\\t")
    child = os.fork()
    if child == 0:
        if way == "two renames":
            exchange.exchange_directories = lambda first, second: False
        turn = int(first)
        while True:
            export(contents[turn % 2], path, overwrite=True)
            turn += 1
    time.sleep(float(delay))
    os.kill(child, signal.SIGKILL)
    print(os.waitpid(child, 0)[1], flush=True)
"""


class Nursery:
    """A process that starts the ones to be killed, so that each is there at once."""

    def __enter__(self):
        from nursery import start

        self.process = start(NURSERY, str(HERE), str(HERE.parents[1]))
        assert self.process.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *exc):
        self.process.__exit__(*exc)

    def kill_one(self, path, way, first, delay):
        self.process.stdin.write(f"{path}\t{way}\t{first}\t{delay}\n")
        self.process.stdin.flush()
        assert int(self.process.stdout.readline()) == 9, "the export ended by itself"


def run_trials(folder, trials, seed):
    """Kill so many exports and return what was found how often; anything else raises."""
    from checkpoint_samples import assert_same, export, killed_contents

    from dsa.checkpoint import open_checkpoint
    from dsa.errors import CheckpointNotFoundError

    contents, rng, found = killed_contents(), random.Random(seed), Counter()
    with Nursery() as nursery:
        for trial in range(trials):
            way = ("exchange", "two renames")[trial % 2]
            path = folder / f"{way}-{trial // 20}" / "k"
            path.parent.mkdir(exist_ok=True)
            there = path.exists()
            nursery.kill_one(path, way, rng.randrange(2), rng.uniform(0.0, 0.15))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a killed replacement is reported
                try:
                    checkpoint = open_checkpoint(path)
                except CheckpointNotFoundError:
                    assert not there, "a checkpoint was lost"
                    found["nothing"] += 1
                    continue
            step = checkpoint.global_step
            assert_same(checkpoint.content(), contents[step])
            found[f"content {step}"] += 1
            found["beside it"] += not path.exists()
            found["left over"] += len(list(path.parent.iterdir())) - 1
    for parent in folder.iterdir():
        export(contents[0], parent / "k", overwrite=True)
        assert [each.name for each in parent.iterdir()] == ["k"], "something was not swept"
    return found


def main():
    parser = argparse.ArgumentParser(
        prog="python -m tests.checkpoint.kills", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    from checkpoint_samples import SMALL_LAYOUT

    from dsa.backends.shards import layout

    vars(layout).update(SMALL_LAYOUT)
    with tempfile.TemporaryDirectory() as folder:
        found = run_trials(Path(folder), options.trials, options.seed)
    print(f"{options.trials} kills:", ", ".join(f"{what} {count}" for what, count in sorted(found.items())))


if __name__ == "__main__":
    main()
