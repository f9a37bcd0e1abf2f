"""docs/default_run.ipynb runs from its first cell to its last."""

import re
import shutil

import pytest
from faults import ROOT, TINY, project

NOTEBOOK = ROOT / "docs" / "default_run.ipynb"
FEW = f"{' '.join(TINY)} --validation-every 1 --train-prompts 100"  # eight validations make a fit


def text_of(cell) -> str:
    """What a cell has printed."""
    return "".join(output.get("text", "") for output in cell.outputs)


@pytest.mark.slow
def test_the_notebook_trains_and_fits_its_curve(tmp_path):
    """With eight steps and small validations; the rest is as it stands there. It installs nothing,
    since all that it needs is there."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    folder = project(tmp_path)
    shutil.copy(ROOT / "requirements.txt", folder)
    (folder / "docs").mkdir()
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    (run,) = [cell for cell in cells if "train.py --name" in cell.source]
    (fitted,) = [cell for cell in cells if "fit_curve.py" in cell.source]
    (by_hand,) = [cell for cell in cells if "read_log" in cell.source]
    assert "STEPS = 160" in cells[0].source
    cells[0].source = cells[0].source.replace("160", "8")
    run.source = run.source.replace("{STEPS}", f"{{STEPS}} {FEW}")

    # As Jupyter does, from the folder of the notebook.
    resources = {"metadata": {"path": str(folder / "docs")}}
    nbclient.NotebookClient(notebook, timeout=600, resources=resources).execute()

    assert "after 8 steps" in text_of(run)
    assert "8 of 9 points fitted" in text_of(fitted)
    assert any("image/png" in output.get("data", {}) for output in fitted.outputs)
    assert re.search(r"5 of 9 validations forecast 0\.\d+; 0\.\d+ came", text_of(by_hand))
    made = folder / "runs" / "notebook-1"
    assert {"log.jsonl", "fit.png", "rollouts.html"} <= {path.name for path in made.iterdir()}
