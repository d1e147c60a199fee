"""Every notebook runs at a small size and shows what it says; none keeps anything of a run."""

import json
import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import dsa

NOTEBOOKS = {path.stem: path for path in (Path(__file__).parents[2] / "notebooks").glob("*.ipynb")}

# What replaces the numbers of the cell tagged "parameters".
SMALL = {
    "1_local_training": "USERS, ITEMS, DIM, STEPS, BATCH = 20_000, 2_000, 16, 60, 512",
    "2_kaggle_and_colab": "ROWS, DIM, STEPS, EXPORT_EVERY, KILLED_AFTER = 3_000, 16, 200, 20, 20",
    "3_hyperbolic_mammals": "EPOCHS = 8",
    "4_inspecting": "ROWS, DIM, STEPS = 3_000, 8, 20",
    "5_checkpoints_on_s3": "ROWS, DIM, STEPS = 3_000, 8, 10",
    "6_compared_with_sparse_adam": "ROWS, DIM, BAGS, STEPS, OTHERS = 20_000, 16, 128, 20, 500",
}
# A few units in the last place of float32, or none, as the processor adds.
ROUNDING = r"(0\.0e\+00|\d\.\de-(0[6-9]|[1-9]\d))"
# What they print, and how many pictures they draw.
SHOWN = {
    "1_local_training": [
        r"continuing at step 30",
        r"was saved at step 30 but the state in .* is at step 60",
        r"users seen  10 to +99 times: (8|9)\d% right",
    ],
    "2_kaggle_and_colab": [
        r"state 15\.4 GB",
        r"exported step 20\n",
        r"step (\d+), \1 losses kept",
        r"the attached folder is as it was: True",
        r"\nequal: True",
    ],
    "3_hyperbolic_mammals": [
        r"a tiger is: .*mammal, .*big cat",
        r"step 5 of \d+ rows",
        r"MAP 0\.[789]\d\d",
        r"horse: .*(equine|ungulate)",
    ],
    "4_inspecting": [
        r"writeable: False",
        r"full at step 21 {'places': 50}",
        r"entity {'m': \[\], 's': \[\], 't': \[\], 'v': \[\], 'w': \[\]}",
        r"by hand: \[0\]",
        r"dsa: block 0 of field 'w' of the table 'entity' doesn't match its checksum",
    ],
    "5_checkpoints_on_s3": [
        r"the same content: True",
        r"block 0 of field 'w' .* doesn't match",
        r"is no complete checkpoint",
        r"MB of step 20 in",
        r"step 22 - the same rows: True",
        r"taken back to step 20",
    ],
    "6_compared_with_sparse_adam": [
        rf"(?s)MB of memory.*(on disk +largest relative difference {ROUNDING}\n.*){{2}}",
        rf"(?s)(on disk +largest difference {ROUNDING}\n.*){{2}}",
        r"counting per parameter: 1\.9\d learning rates",
        r"counting per row +: 1\.00 learning rates",
    ],
}
PICTURES = {
    "1_local_training": 2,
    "2_kaggle_and_colab": 2,
    "3_hyperbolic_mammals": 5,
    "4_inspecting": 2,
    "5_checkpoints_on_s3": 0,
    "6_compared_with_sparse_adam": 2,
}
ENTER = "import warnings\nwarnings.simplefilter('error')"
A_PATH = r"(?<!\w)/(home|root|Users|tmp|usr|opt|var|mnt|work)\b|\b[A-Z]:\\"
# What was left open shows when it is collected.
LEAVE = """
import socket

if "port" in globals():
    with socket.socket() as probe:
        assert probe.connect_ex((host, port)) != 0, "the server is still there"
%reset -f
import gc, warnings
gc.collect()
warnings.resetwarnings()
"""


def read(name):
    return nbformat.read(NOTEBOOKS[name], as_version=4)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """A kernel that all notebooks share, so that torch is imported once; with directories of its own."""
    home = tmp_path_factory.mktemp("kernel")
    for folder in ("here", "temporary"):
        (home / folder).mkdir()
    environment = os.environ | {
        "PYTHONPATH": str(Path(dsa.__file__).parents[1]),
        "TMPDIR": str(home / "temporary"),
        "IPYTHONDIR": str(home / "ipython"),
        "TORCHINDUCTOR_CACHE_DIR": str(home / "inductor"),
    }
    client = NotebookClient(
        nbformat.v4.new_notebook(),
        kernel_name="python3",
        timeout=300,
        shutdown_kernel="immediate",
        resources={"metadata": {"path": str(home / "here")}},
    )
    with client.setup_kernel(env=environment):
        yield client, home


def run(client, notebook):
    """Run the cells in order and return all outputs."""
    client.nb = notebook
    for index, cell in enumerate(notebook.cells):
        client.execute_cell(cell, index)
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


@pytest.mark.parametrize("name", sorted(SMALL))
def test_it_runs_and_shows_what_it_says(name, kernel):
    client, home = kernel
    notebook = read(name)
    place = [cell.metadata.get("tags") for cell in notebook.cells].index(["parameters"])
    notebook.cells.insert(place + 1, nbformat.v4.new_code_cell(SMALL[name]))
    notebook.cells.insert(0, nbformat.v4.new_code_cell(ENTER))
    notebook.cells.append(nbformat.v4.new_code_cell(LEAVE))
    outputs = run(client, notebook)

    printed = {"stdout": "", "stderr": ""}
    for output in outputs:
        if output.output_type == "stream":
            printed[output.name] += output.text
    assert printed["stderr"] == ""
    for pattern in SHOWN[name]:
        assert re.search(pattern, printed["stdout"]), f"{pattern!r} is not in:\n{printed['stdout']}"
    assert sum("image/png" in output.get("data", {}) for output in outputs) == PICTURES[name]
    for folder in ("here", "temporary"):
        assert list((home / folder).iterdir()) == []


def test_every_notebook_is_run():
    assert set(NOTEBOOKS) == set(SMALL) == set(SHOWN) == set(PICTURES)
    assert len(NOTEBOOKS) >= 6


@pytest.mark.parametrize("name", sorted(NOTEBOOKS))
def test_nothing_of_a_run_or_a_machine_is_kept(name):
    text = NOTEBOOKS[name].read_text("utf-8")
    notebook = json.loads(text)
    assert notebook["metadata"] == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all((cell["outputs"], cell["execution_count"]) == ([], None) for cell in code)
    assert code[0]["metadata"] == {"tags": ["parameters"]}
    assert all(cell["metadata"] == {} for cell in notebook["cells"] if cell is not code[0])
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    # As Jupyter writes it, so that saving it again changes nothing.
    assert text == nbformat.writes(read(name)).rstrip("\n") + "\n"
    for cell in notebook["cells"]:
        assert not re.search(A_PATH, "".join(cell["source"]))
