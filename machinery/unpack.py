"""A model out of a GGUF file, as packages and llama.cpp have it, into a folder that --model can name.

    python -m machinery.unpack FILE.gguf FOLDER         # `pip install gguf accelerate` brings what reads the file

Weights that the file holds in a few bits become fp32 numbers. Nothing else changes, and nothing can bring back what the
rounding has lost.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from curve.flags import run_command
from machinery.files import whole_folder
from machinery.model import refuse_unusual
from machinery.processes import in_one_sentence


def main(arguments: list[str]) -> int:
    """The command. Returns 0; ValueError, in one sentence, if the file cannot be read, or if the folder is there."""
    if len(arguments) != 2 or not arguments[0].endswith(".gguf"):
        raise ValueError("wanted are two names: python -m machinery.unpack FILE.gguf FOLDER")
    file, folder = map(Path, arguments)
    if folder.exists():
        raise ValueError(f"{folder} is there already: name a new folder")
    if not file.is_file():
        raise ValueError(f"there is no file {file}")
    with in_one_sentence(str(file.parent), f"{file.name} could not be read"):
        packed = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    vars(packed.config).pop("quantization_config", None)  # transformers does not save a model that has one
    model = AutoModelForCausalLM.from_config(packed.config, dtype=torch.float32)
    model.load_state_dict(packed.state_dict())
    model.generation_config = packed.generation_config
    refuse_unusual(model, str(file))
    with whole_folder(folder) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    print(f"{folder}: {model.num_parameters():,} parameters, {type(model).__name__}")
    return 0


if __name__ == "__main__":
    run_command(main)
