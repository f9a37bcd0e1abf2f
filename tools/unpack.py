"""Turn a GGUF file, the form of a model in packages and in llama.cpp, into a folder for --model.

    python -m tools.unpack FILE.gguf FOLDER

`pip install gguf accelerate` brings what reads the file.

Weights that the file holds in a few bits become fp32 numbers. Nothing else changes, and nothing can
bring back what the rounding has lost.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from core.limits import in_a_child, in_one_sentence
from curve.flags import run_command
from machinery.files import whole_folder


@in_a_child
def look_at_header(file: Path) -> None:
    """ValueError if the file cannot be read, or if its sizes are those of no model."""
    import gguf

    with in_one_sentence(str(file)):
        header = gguf.GGUFReader(file)
        for name, field in header.fields.items():
            if name.endswith(".block_count") and not 1 <= field.contents() <= 1000:
                raise ValueError("it has no layers, or more than 1,000")


def main(arguments: list[str]) -> int:
    """The command. Returns 0; ValueError or OSError if the file cannot be read, or if the folder is
    there."""
    if len(arguments) != 2 or not Path(arguments[0]).is_file() or Path(arguments[1]).exists():
        raise ValueError(
            "wanted are a file and the name of a new folder:"
            " python -m tools.unpack FILE.gguf FOLDER"
        )
    file, folder = map(Path, arguments)
    look_at_header(file)
    with in_one_sentence(str(file)):
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32
        )
    # transformers saves no model that is marked as quantized.
    model.hf_quantizer = None
    del model.config.quantization_config
    with whole_folder(folder) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    print(f"{folder}: {model.num_parameters():,} parameters, {type(model).__name__}")
    return 0


if __name__ == "__main__":
    run_command(main)
