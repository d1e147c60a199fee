"""The README is short, runs from top to bottom in an empty directory, and leads to the guide."""

import re
from pathlib import Path

import torch
from pages import ROOT, blocks, run

import dsa

README = (ROOT / "README.md").read_text("utf-8")


def test_the_python_blocks_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(README, "README").split() == ["30", "20"]


def test_it_is_short():
    assert len(README.splitlines()) <= 200
    assert not [line for line in README.splitlines() if len(line) > 120]


def test_its_links_lead_to_files():
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", README)
    assert len(targets) >= 10
    assert not [target for target in targets if not (ROOT / target).is_file()]


def test_it_leads_to_every_page_of_the_guide_that_a_user_starts_from():
    pages = {path.name for path in (ROOT / "docs" / "guide").glob("*.md")}
    linked = {target.rpartition("/")[2] for target in re.findall(r"\]\((docs/guide/[^)#]+)", README)}
    # Looked up when something happened, or written for those who extend the package.
    assert pages - linked == {"errors.md", "own_backend.md"}


def test_going_on_is_as_never_having_stopped(tmp_path, monkeypatch):
    definitions = blocks(README, "python")[0].partition("\n\ntrain(")[0]
    namespace, roots = {}, []
    exec(compile(definitions, "README", "exec"), namespace)
    for name, stops in (("stopped", (20, 30)), ("not stopped", (30,))):
        directory = tmp_path / name
        directory.mkdir()
        monkeypatch.chdir(directory)
        torch.manual_seed(7)  # the first weights
        for stop in stops:
            namespace["train"](stop, resume=True if Path("table").exists() else None)
        roots.append(dsa.open_checkpoint("checkpoints/step-30").content_root)
    assert roots[0] == roots[1]


def test_the_gate_runs_the_test_command():
    after = README.partition("<!-- test command -->\n")[2]
    assert re.match(r"```bash\n.*python -m pytest -n auto --dist loadgroup\n```", after)
