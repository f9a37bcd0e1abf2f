"""Small real models for the tests: the shipped base, and random ones of several kinds."""

import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded, so nothing waits for a hub
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("model"), head_dim=16)


def make_models(parent, head_dim):
    """Folders of tiny random models by kind, with the arithmetic task's tokenizer."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

    from data.arithmetic import make_tokenizer

    tokenizer = make_tokenizer()
    common = dict(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                  num_attention_heads=4, head_dim=head_dim, max_position_embeddings=256,
                  eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None)  # fmt: skip
    configs = {
        "llama": LlamaConfig(**common, num_key_value_heads=4),
        "llama-grouped-tied": LlamaConfig(**common, num_key_value_heads=2, tie_word_embeddings=True),
        "qwen3": Qwen3Config(**common, num_key_value_heads=2),
        "qwen3-moe": Qwen3MoeConfig(
            **common, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
        ),
    }
    folders = {}
    for kind, config in configs.items():
        torch.manual_seed(len(kind))
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():  # far from uniform, so that a wrong position shows
            if parameter.dim() >= 2:
                torch.nn.init.normal_(parameter, std=0.3)
        folders[kind] = str(parent / kind)
        model.save_pretrained(folders[kind])
        tokenizer.save_pretrained(folders[kind])
    return folders


CHAT_TEMPLATE = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""


@pytest.fixture(scope="session")
def chat_models(tmp_path_factory):
    """Folders of tiny random chat models by kind, with a tokenizer of bytes and `<think>` already in the prompt."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    text = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    text.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text.decoder = decoders.ByteLevel()
    text.add_tokens([AddedToken(marker, normalized=False) for marker in ("<think>", "</think>")])
    text.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=text, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    common = dict(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                  num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=1024,
                  tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id, bos_token_id=None)  # fmt: skip
    configs = {
        "qwen3": Qwen3Config(**common),
        "qwen3-moe": Qwen3MoeConfig(**common, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    }
    folders = {}
    for kind, config in configs.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.pad_token_id]
        folders[kind] = str(tmp_path_factory.mktemp("chat") / kind)
        model.save_pretrained(folders[kind])
        tokenizer.save_pretrained(folders[kind])
    return folders
