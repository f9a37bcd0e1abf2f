"""A causal language model and its tokenizer, the same for trainer and generator: loaded or
refused."""

import contextlib
import functools
import math
import zlib
from collections.abc import Iterable, Iterator

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import find_adapter_config_file

import loss
from core.attention import attention_on_gpu, config_value, most_positions
from core.settings import refuse

transformers.utils.logging.disable_progress_bar()  # of loading, which is over in a moment


@contextlib.contextmanager
def in_one_sentence(model: str, wrong: str = "it could not be loaded") -> Iterator[None]:
    """ValueError, in one sentence, for whatever a library raises in this block about the files of a
    model."""
    try:
        yield
    except Exception as error:
        if find_adapter_config_file(model, local_files_only=True):
            wrong = "it is a LoRA adapter: merge it into its model first (peft's merge_and_unload)"
        kind, text = type(error).__name__, str(error).strip() or "no reason given"
        raise ValueError(f"--model {model}: {wrong} ({kind}: {text.splitlines()[0]})") from error


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub name. ValueError, in one sentence, if it cannot be
    loaded. No code in the folder is run."""
    with in_one_sentence(path, "its tokenizer could not be loaded"):
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)


def load_model(path: str) -> PreTrainedModel:
    """A causal LM from a folder or the hub, on the CPU in fp32. ValueError if it cannot be
    loaded."""
    wrong = "it could not be loaded"
    with in_one_sentence(path):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        if hasattr(config, "quantization_config"):  # some are no longer quantized when loaded
            wrong = "it is quantized, and cannot be trained: take its weights in bf16"
    with in_one_sentence(path, wrong):
        model, found = AutoModelForCausalLM.from_pretrained(
            path,
            output_loading_info=True,
            trust_remote_code=False,
            dtype=torch.float32,
            attn_implementation="grouped",
        )
        missing = found["missing_keys"]
        if missing:  # transformers would draw them at random
            raise ValueError(f"its files lack {len(missing)} weights, {min(missing)} first")
        if getattr(model, "is_quantized", False):
            raise ValueError("its weights have no floating point")
        # If it reads pictures too, that part stays as it is.
        model.requires_grad_(False)
        model.get_decoder().requires_grad_(True)
        model.get_output_embeddings().requires_grad_(True)
    try:
        model.generation_config.validate(strict=True)
    except ValueError:  # with it transformers would save no checkpoint
        ends = model.generation_config.eos_token_id
        model.generation_config = GenerationConfig(eos_token_id=ends)
    return model.eval()


def checksum(model: PreTrainedModel) -> int:
    """A number that tells the weights of a model on the CPU from others."""
    total = 0
    for parameter in model.parameters():
        total = zlib.crc32(parameter.detach().contiguous().numpy(), total)
    return total


def put_on_device(
    model: PreTrainedModel, device: torch.device, dtype: torch.dtype, fp32_head: bool
) -> None:
    """Move a model in fp32 from the CPU to a device, with its trunk in `dtype`. With fp32_head the
    LM head stays in fp32, and is no longer tied."""
    head = model.get_output_embeddings()
    if fp32_head and dtype != torch.float32:
        head.weight = torch.nn.Parameter(head.weight.detach())
    kept = {*head.parameters()} if fp32_head else set()
    for parameter in model.parameters():
        if parameter not in kept:
            parameter.data = parameter.data.to(device).to(dtype)
    if device.type == "cuda":
        model.set_attn_implementation(attention_on_gpu(model))
    model.to(device)


def head_of(model: PreTrainedModel) -> loss.Head:
    """The LM head, with the factors that configs have under these names."""
    linear, factor = model.get_output_embeddings(), functools.partial(config_value, model, 1.0)
    scale = factor("logit_scale") * factor("lm_head_multiplier") / factor("logits_scaling")
    cap = config_value(model, None, "final_logit_softcapping")
    return loss.Head(linear.weight, getattr(linear, "bias", None), scale, cap)


def refuse_too_long(model: PreTrainedModel, longest: int, advice: str = "") -> None:
    """ValueError, with this advice, if so many tokens exceed the positions of the model. Without
    advice they are all budgets together."""
    limit = most_positions(model)
    budgets = (
        "the budgets for prompt, thinking, interruption and answer add up to that; lower"
        " --thinking-budget, --answer-budget or --prompt-budget, or take a larger --model (small"
        " budgets: --defaults toy)"
    )
    refuse(longest > limit, f"--model holds {limit} tokens, and not {longest}: {advice or budgets}")


def refuse_unknown(model: PreTrainedModel, ids: Iterable[int]) -> None:
    """ValueError if one of these tokens has no embedding."""
    known, last = model.get_input_embeddings().num_embeddings, max(ids)
    refuse(
        last >= known,
        f"--model: its tokenizer has the token {last}, and the model has embeddings for {known}"
        " tokens: resize_token_embeddings of transformers adds some",
    )


def first_learning_rate(parameters: int, factor: float = 1.0) -> float:
    """A learning rate to begin with, by the number of parameters: 7.5e-05 for 1M, 3.1e-06 for 600M;
    times this factor."""
    return float(f"{factor * 0.075 / math.sqrt(parameters):.2g}")
