"""Small real models for the tests: random ones of several kinds."""

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest

# The tests are of a machine without a GPU. This comes before torch looks for one.
if "SCALERL_TEST_DEVICE" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

# isort: off
from core.processes import SIGNALS  # noqa: E402, before torch: threads that wait sleep
import torch  # noqa: E402

# isort: on

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded, so nothing waits for a hub
# With it, each of the processes would compile all modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
torch.set_num_threads(1)


def pytest_addoption(parser):
    about = "the tests marked `slow` too: real processes, long simulations"
    parser.addoption("--all", action="store_true", help=about)


def pytest_configure(config):
    if not config.getoption("--all"):
        config.option.markexpr = "not slow"


def pytest_collection_modifyitems(items):
    """The longest file comes first: at the end one process would wait for the other."""
    items.sort(key=lambda item: item.path.name != "test_lessons.py")


@pytest.fixture(scope="module", autouse=True)
def no_group_is_left():
    """An engine of vLLM in this process makes a group of ranks. The trainer in another file would
    shard over it."""
    yield
    if "vllm" in sys.modules:
        from vllm.distributed import parallel_state

        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


@pytest.fixture(autouse=True)
def nothing_has_been_warned_of(monkeypatch):
    monkeypatch.setattr("core.screen._warned", set())


@pytest.fixture(autouse=True)
def signals_are_handled_as_before():
    """A run in this process handles Ctrl-C in its own way."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """We stand in tmp_path."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder for temporary files, which is empty again afterwards."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert [*folder.iterdir()] == [], "temporary files were left"


@pytest.fixture
def group_of_one():
    """A group of one rank, as other_ranks makes it for 16 bits: FSDP computes over it. An engine of
    vLLM in this process may have made one already."""
    import torch.distributed as dist

    from core.settings import Settings
    from machinery import ranks

    group = contextlib.nullcontext()
    if not dist.is_initialized():
        group = ranks.other_ranks(Settings(dtype="bfloat16"), None, (), None)
    with group:
        assert dist.get_world_size() == 1
        yield


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folders of tiny random models by kind, with the arithmetic task's tokenizer: models.json has
    what their configs have besides. Heads have 32 numbers, the fewest that vLLM takes on a CPU; in
    DeepSeek's, those of values are smaller than those of keys, 12 and 8 + 8. Each folder has
    sampling defaults that would show if they were used."""
    from transformers import AutoConfig

    from docs.make_base import make_tokenizer

    tokenizer, folders, parent = make_tokenizer(), {}, tmp_path_factory.mktemp("model")
    common = sizes(tokenizer) | {"head_dim": 32}
    defaults = {"do_sample": True, "temperature": 0.2, "top_k": 2, "repetition_penalty": 3.0}
    for kind, own in json.loads(Path(__file__).with_name("models.json").read_text()).items():
        text = own.get("text_config", own)
        text |= common | text
        # Parameters far from uniform, so that a wrong position shows.
        config = AutoConfig.for_model(**own)
        folders[kind] = save_random(config, parent / kind, tokenizer, std=0.3, **defaults)
    return folders


@pytest.fixture(scope="session")
def llama(models):
    """The folder of a tiny random Llama."""
    return models["llama"]


@pytest.fixture(scope="session")
def golden_run(llama, tmp_path_factory):
    """The folder of a run of two steps on the groups of steps.py, with all that a run leaves. It is
    made once, to be read; `run` is a copy."""
    import steps

    from loss import Recipe
    from machinery.folder import write_config

    folder = tmp_path_factory.mktemp("golden")
    of_a_run = dict(model=llama, defaults="toy", recipe=Recipe(eps_max=0.05), name="run")
    chosen = steps.settings(2, validation_every=1, rollouts_kept=3, **of_a_run)
    batches = [steps.groups_of_every_fate(), steps.batch_of_groups(1)]
    steps.train_on(chosen, llama, batches, folder)
    write_config(folder, chosen)
    steps.add_R0(folder)
    return folder


@pytest.fixture
def run(golden_run, tmp_path, here):
    """A run, runs/run below the folder where we stand."""
    return shutil.copytree(golden_run, tmp_path / "runs" / "run")


def sizes(tokenizer):
    """What the configs of tiny models have in common."""
    return dict(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )


def save_random(config, folder, tokenizer, std=None, **generation):
    """Save a random model of this config, and the tokenizer; returns the folder. std: of the
    matrices, if not as usual. generation: what its generation_config.json says."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(len(folder.name))
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if std is not None and parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=std)
    model.generation_config.update(**generation)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


CHAT_TEMPLATE = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""


@pytest.fixture(scope="session")
def chat_models(tmp_path_factory):
    """Folders of tiny random chat models by kind, with a tokenizer of bytes and `<think>` already
    in the prompt."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    text = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    text.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text.decoder = decoders.ByteLevel()
    text.add_tokens([AddedToken(marker, normalized=False) for marker in ("<think>", "</think>")])
    text.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=text, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    common = sizes(tokenizer) | dict(max_position_embeddings=1024, tie_word_embeddings=True)
    common |= dict(num_key_value_heads=2, head_dim=32)
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    configs = {"qwen3": Qwen3Config(**common), "qwen3-moe": Qwen3MoeConfig(**common, **experts)}
    parent, folders = tmp_path_factory.mktemp("chat"), {}
    ends = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    for kind, config in configs.items():
        folders[kind] = save_random(config, parent / kind, tokenizer, eos_token_id=ends)
    return folders
