"""docs/default_run.ipynb runs from its first cell to its last."""

import shutil

import pytest
from faults import ROOT, TINY, project

# The notebook has a validation at each of eight steps.
FEW = " ".join(f"{TINY} --one-process --train-prompts 100".split())


@pytest.mark.slow
def test_the_notebook_trains_and_fits_its_curve(tmp_path):
    """With eight steps and small validations; the rest is as it stands there."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    folder = project(tmp_path)
    shutil.copy(ROOT / "requirements.txt", folder)
    (folder / "docs").mkdir()
    notebook = nbformat.read(ROOT / "docs" / "default_run.ipynb", as_version=4)
    for cell in notebook.cells:
        assert not cell.get("outputs")
        short = cell.source.replace("STEPS = 160", "STEPS = 8")
        cell.source = short.replace("--steps {STEPS}", f"--steps {{STEPS}} {FEW}")

    # As Jupyter does, from the folder of the notebook.
    resources = {"metadata": {"path": str(folder / "docs")}}
    nbclient.NotebookClient(notebook, timeout=600, resources=resources).execute()

    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs)
    assert "after 8 steps" in printed and "8 of 9 points fitted" in printed
    assert "5 of 9 validations forecast 0." in printed
    assert any("image/png" in output.get("data", {}) for output in outputs)
