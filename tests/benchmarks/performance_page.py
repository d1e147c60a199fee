"""The tables of docs/guide/performance.md: takes the figures and prints them as the page has them.

Run by hand, on a machine that does nothing else: ``python tests/benchmarks/performance_page.py [--directory
D] [--quick]``. ``dsa bench`` runs twice, the second time with ``OMP_WAIT_POLICY=PASSIVE``.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TABLES = {
    "warm": "A step on rows in the page cache",
    "loop": "The whole loop",
    "small": "Rows of few elements",
    "hyperbolic": "On the ball",
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, default=Path(), help="where the tables are made")
    parser.add_argument("--quick", action="store_true", help="small sizes: whether it works")
    chosen = parser.parse_args()
    for policy in ("", "PASSIVE"):
        results = measure(chosen, policy)
        machine = results["machine"]
        print(
            f"\n**{machine['cpu']}**, {machine['usable_cores']} cores, load {machine['load_average']}", end=""
        )
        print(f", `OMP_WAIT_POLICY={policy}`" if policy else "")
        for kind, title in TABLES.items():
            print_table(title, [group for group in results["groups"] if group["kind"] == kind])


def measure(chosen, policy):
    """Return what a run of the benchmark writes."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "results.json"
        words = [sys.executable, "-m", "dsa", "bench", "--only", *TABLES, "--dir", str(chosen.directory)]
        words += ["--json", str(target), *(["--quick"] if chosen.quick else [])]
        environment = os.environ | ({"OMP_WAIT_POLICY": policy} if policy else {})
        subprocess.run(words, check=True, env=environment, stdout=subprocess.DEVNULL)
        return json.loads(target.read_text())


def print_table(title, groups):
    """Print milliseconds of a step, and in brackets how many times faster than its rival a line is."""
    print(f"\n{title}, {groups[0]['rows']:,} x {groups[0]['dim']}\n")
    print("| |", " | ".join(f"B = {group['batch']:,}" for group in groups), "|")
    print("|" + " --- |" * (len(groups) + 1))
    for line in groups[0]["lines"]:
        cells = [cell(each) for group in groups for each in group["lines"] if each["key"] == line["key"]]
        print(f"| {line['what']} | {' | '.join(cells)} |", flush=True)


def cell(line):
    ratio = "" if line["ratio"] is None else f" ({line['ratio']:.1f}x)"
    return f"{line['milliseconds']:.3g}{ratio}"


if __name__ == "__main__":
    main()
