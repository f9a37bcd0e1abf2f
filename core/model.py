"""A causal language model is loaded or refused, the same for trainer and generator."""

import math
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.masking_utils import eager_mask

from core.decoding import Decoding
from core.limits import in_a_child, in_one_sentence, refuse_odd_files
from core.settings import model_path

transformers.utils.logging.disable_progress_bar()  # of loading, which is over in a moment

WIDE = 256  # below this hidden size a call of oneDNN costs more than it saves


@in_a_child
def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub name. ValueError, in one sentence, if it cannot be
    loaded or used."""
    refuse_odd_files(Path(path))
    with in_one_sentence(path):
        file = Path(path) / "tokenizer.json"
        # Each added token has this word in the file; so many take 6 s.
        if file.exists() and file.read_text().count('"single_word"') > 100_000:
            raise ValueError("it has more than 100,000 added tokens")
        # No code in the folder is run.
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        tokenizer("1")  # some fail only here
    return tokenizer


def load_model(path: str) -> PreTrainedModel:
    """A causal LM from a folder or the hub, on the CPU in fp32. ValueError if it cannot be loaded
    or is not supported."""
    load_shapes(path)
    with in_one_sentence(path):
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            path,
            output_loading_info=True,
            trust_remote_code=False,
            dtype=torch.float32,
            attn_implementation="eager",
        )
        missing = found["missing_keys"]
        if missing:  # transformers would draw them at random
            raise ValueError(f"its files lack {len(missing)} weights, {min(missing)} first")
    key_heads = getattr(model.config.get_text_config(), "num_key_value_heads", None)
    if key_heads not in (None, attention_heads(model)):
        model.set_attn_implementation("grouped")
    return model.eval()


def put_on_device(
    model: PreTrainedModel, device: torch.device, dtype: torch.dtype, fp32_head: bool
) -> PreTrainedModel:
    """Move a model in fp32 from the CPU to a device, with its trunk in `dtype`. With fp32_head the
    weight of the LM head stays in fp32, and is no longer tied."""
    head = model.get_output_embeddings()
    if fp32_head and dtype != torch.float32:
        head.weight = torch.nn.Parameter(head.weight.detach())
    for parameter in model.parameters():
        if not (fp32_head and parameter is head.weight):
            parameter.data = parameter.data.to(device).to(dtype)
    if device.type == "cuda":
        model.set_attn_implementation("sdpa")
    return model.to(device).eval()


def use_wide_products(model: PreTrainedModel, device: torch.device) -> None:
    """Let oneDNN compute the fp32 products of this process instead of MKL, if the model is wide and
    on the CPU.

    MKL uses half of the vectors' width on AMD's processors, so oneDNN takes half of its time. To
    ask torch for oneDNN, the precision has to be "medium", which allows bf16 too. A CPU that then
    computes in bf16 keeps MKL: its product with the identity is not exact."""
    if device.type != "cpu" or model.config.get_text_config().hidden_size < WIDE:
        return
    torch.set_float32_matmul_precision("medium")
    more_than_bf16_holds = torch.full((WIDE, WIDE), 1 + 2**-12)
    product = more_than_bf16_holds @ torch.eye(WIDE)
    if not torch.equal(product, more_than_bf16_holds):
        torch.set_float32_matmul_precision("highest")


def grouped_attention(
    _,
    query_BHTD: Tensor,
    key_BGKD: Tensor,
    value_BGKD: Tensor,
    attention_mask: Tensor | None,
    scaling,
    **__,
):
    """What transformers calls "eager" attention: plain matmuls and a softmax, the fastest for one
    query a sequence on a CPU. If several heads of queries have the same keys and values, "eager"
    copies these for each head, which takes most of a step of the engine. Here these heads are rows
    of one matmul. H heads of queries, G of keys, K keys. attention_mask: [B, 1, T, K], under the
    name by which some models give it."""
    B, H, T, D = query_BHTD.shape
    G = key_BGKD.shape[1]
    rows = H // G * T  # for each head of keys
    scores = query_BHTD.reshape(B, G, rows, D) @ key_BGKD.transpose(2, 3) * scaling
    scores_BHTK = scores.view(B, H, T, -1)
    if attention_mask is not None:
        scores_BHTK = scores_BHTK + attention_mask
    weights_BHTK = torch.softmax(scores_BHTK, -1, dtype=torch.float32).to(query_BHTD.dtype)
    values = weights_BHTK.view(B, G, rows, -1) @ value_BGKD
    return values.view(B, H, T, -1).transpose(1, 2).contiguous(), None


transformers.AttentionInterface.register("grouped", grouped_attention)
transformers.AttentionMaskInterface.register("grouped", eager_mask)


def attention_heads(model: PreTrainedModel) -> int | None:
    """The attention heads of a layer; None if the model's configuration does not say."""
    return getattr(model.config.get_text_config(), "num_attention_heads", None)


def load_shapes(name: str) -> PreTrainedModel:
    """A causal LM without its weights: on torch's meta device, by its config.json alone, out of a
    folder or from the hub. ValueError, in one sentence, if it cannot be loaded or is not
    supported."""
    path = name if (Path(name) / "config.json").exists() else model_path(name)
    refuse_odd_files(Path(path))
    with in_one_sentence(path), torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
        layers = getattr(config.get_text_config(), "num_hidden_layers", 1)
        if not 1 <= layers <= 1000:  # so many take 5 s
            raise ValueError("it has no layers, or more than 1,000")
        model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    refuse_unusual(model, path)
    return model


def refuse_unusual(model: PreTrainedModel, path: str) -> None:
    """ValueError for a model with parts that the trainer's logits or the generator's cache do not
    support."""
    config = model.config.get_text_config()  # of a model that reads pictures too, its language part
    factors = ("final_logit_softcapping", "attn_logit_softcapping", "logits_scaling", "logit_scale")
    unusual = [name for name in factors if getattr(config, name, None) not in (None, 1, 1.0)]
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        unusual.append("a bias in the LM head")
    layers = [
        *(getattr(config, "layer_types", None) or []),
        *(getattr(config, "attention_layers", None) or []),
    ]
    if {*layers} - {"full_attention", "global"} or getattr(config, "sliding_window", None):
        unusual.append("layers that are not full attention")
    if unusual:
        raise ValueError(f"--model {path}: models with {', '.join(unusual)} are not supported")


def refuse_too_long(model: PreTrainedModel, decoding: Decoding) -> None:
    """ValueError if all budgets together exceed the positions of the model. With longrope a call
    that goes beyond the original positions rotates all its sequences otherwise, the short ones too:
    then log-probabilities would depend on what else is in the call."""
    config, why = model.config.get_text_config(), ""
    limit = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        limit = rope["original_max_position_embeddings"]
        why = " before its longrope changes the short sequences too"
    if limit is not None and decoding.longest > limit:
        raise ValueError(
            "the budgets for prompt, thinking, interruption and answer add up to"
            f" {decoding.longest} tokens; the model holds {limit}{why}: lower --thinking-budget or"
            " --prompt-budget, or take a larger --model (small budgets: --defaults toy)"
        )


def first_learning_rate(parameters: int) -> float:
    """A learning rate to begin with, by the number of parameters: 7.5e-05 for 1M, 3.1e-06 for
    600M."""
    return float(f"{0.075 / math.sqrt(parameters):.2g}")
