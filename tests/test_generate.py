"""The engine that one can read, the way of the parameters, the generator's process and the
command."""

import contextlib
import dataclasses
import json
import os
import queue
import re
import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from conftest import save_random, sizes
from sampling import (
    CPU,
    PROMPTS,
    decoding,
    load,
    parameters_of,
    requests,
    run_generate,
    samples_takes_updates_validates_and_stops,
)
from torch.utils._python_dispatch import TorchDispatchMode

import generate
from core import decoding as core_decoding
from core import generators, limits, torch_engine, vllm_engine
from core.decoding import (
    completion_texts,
    decode_all,
    make_decoding,
    marked_text,
    quoted,
    refuse_unfit_prompts,
    render,
    rendered,
)
from core.engine import EngineSettings, sample_all
from core.model import (
    attention_heads,
    load_model,
    load_tokenizer,
    model_path,
    put_on_device,
    refuse_too_long,
    refuse_unusual,
)
from core.rollouts import Report, Request, Rollout, SharedParameters, given_rollout
from core.settings import GenerateCommand, Sampling
from core.torch_engine import TorchEngine
from curve.flags import flag, run_command
from data import Problem
from data.tasks import gym
from data.tasks.mathematics import INSTRUCTION
from data.verify import Verdict, VerifierPool
from docs.make_base import make_tokenizer
from machinery.evaluation import judge_all

ROOT = Path(__file__).parent.parent


def settings_of(folder, **changes) -> EngineSettings:
    """What a generator of 8 slots is made of."""
    made = EngineSettings(folder, ("cpu",), "float32", 1, 8, decoding(load_tokenizer(folder)))
    return dataclasses.replace(made, **changes)


# --- the engine -----------------------------------------------------------------------------------


def test_few_slots_and_one_slot_sample_what_many_do(models):
    """Requests wait, and completions move to other slots when others end."""
    model, tokenizer = load(models["llama"])
    wanted = requests(tokenizer, PROMPTS, 2)
    many, few, one = (
        [
            rollout.tokens.tolist()
            for rollout in sample_all(TorchEngine(model, decoding(tokenizer), slots), wanted)
        ]
        for slots in (32, 3, 1)
    )
    assert many == few == one


# --- models that cannot be sampled ----------------------------------------------------------------


def odd_configs(tokenizer) -> dict:
    """Models whose cache is none of keys and values, or whose attention sees something else than
    our mask says."""
    common = sizes(tokenizer) | dict(num_key_value_heads=2, head_dim=8, num_local_experts=2)
    names = dict(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
    full = dict(layer_types=["full_attention", "full_attention"])
    llama4 = dict(**common, intermediate_size_mlp=32)
    return {
        "rwkv": transformers.RwkvConfig(
            hidden_size=32, num_hidden_layers=2, context_length=256, **names
        ),
        "bloom": transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, **names),
        "llama4": transformers.Llama4TextConfig(**llama4),
        "llama4, full": transformers.Llama4TextConfig(**llama4, **full),
        "minimax": transformers.MiniMaxConfig(**common, block_size=16),
        "minimax, full": transformers.MiniMaxConfig(**common, **full),
        "gpt-neo": transformers.GPTNeoConfig(
            hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
            window_size=8, max_position_embeddings=256, **names,
        ),
    }  # fmt: skip


def test_a_model_that_cannot_be_sampled_over_slots_is_refused_in_one_sentence(models, tmp_path):
    for kind, folder in models.items():
        torch_engine.refuse_wrong_over_slots(load(folder)[0], kind)
    tokenizer = make_tokenizer()
    for kind, config in odd_configs(tokenizer).items():
        folder = save_random(config, tmp_path / kind, tokenizer, std=0.3)
        with pytest.raises(ValueError) as caught:
            torch_engine.refuse_wrong_over_slots(load_model(folder), folder)
        message = str(caught.value)
        assert message.startswith(f"--model {folder}: ") and "\n" not in message, kind
        assert "not full attention" in message or "token by token over slots" in message, kind


def test_of_a_model_that_reads_pictures_too_the_language_part_is_looked_at(tmp_path):
    tokenizer = make_tokenizer()
    text = sizes(tokenizer) | dict(num_key_value_heads=2, head_dim=8, max_position_embeddings=40)
    pictures = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, image_size=28)
    pictures |= dict(num_attention_heads=2, patch_size=14)
    for kind in ("full_attention", "sliding_attention"):
        config = transformers.Gemma3Config(
            text_config=text | dict(layer_types=[kind, "full_attention"]),
            vision_config=pictures,
            mm_tokens_per_image=1,
            eos_token_id=tokenizer.eos_token_id,
        )
        folder = save_random(config, tmp_path / kind, tokenizer)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert attention_heads(model) == 4
        with pytest.raises(ValueError, match="the model holds 40"):
            refuse_too_long(model, decoding(tokenizer))
        if kind == "sliding_attention":
            with pytest.raises(ValueError, match="not full attention"):
                refuse_unusual(model, folder)


def longrope() -> dict:
    """Of a model whose rotations change if a call goes beyond 32 positions."""
    factors = dict(short_factor=[1.0] * 4, long_factor=[4.0] * 4, factor=8.0)
    return dict(
        rope_type="longrope", rope_theta=1e4, original_max_position_embeddings=32, **factors
    )


def test_short_sequences_beside_long_ones_are_refused_if_longrope_would_change_them(tmp_path):
    tokenizer = make_tokenizer()
    config = transformers.Phi3Config(
        **sizes(tokenizer),
        num_key_value_heads=2,
        rope_parameters=longrope(),
        original_max_position_embeddings=32,
    )
    model, _ = load(save_random(config, tmp_path / "phi3", tokenizer))
    rotate = model.base_model.rotary_emb
    alone, beside = (rotate(torch.zeros(1), torch.arange(n)[None])[0] for n in (6, 90))
    assert not torch.allclose(alone[0], beside[0, :6]), "the control: the long one changes it"
    with pytest.raises(ValueError, match="the model holds 32 before its longrope"):
        refuse_too_long(model, decoding(tokenizer))
    refuse_too_long(model, decoding(tokenizer, prompt_budget=6, thinking_budget=2, phrase=()))


def test_a_model_that_names_the_mask_in_a_call_is_sampled(tmp_path):
    """Doge does, and its heads share keys."""
    tokenizer = make_tokenizer()
    config = transformers.DogeConfig(**sizes(tokenizer), num_key_value_heads=2, head_dim=8)
    model, _ = load(save_random(config, tmp_path / "doge", tokenizer))
    assert model.config._attn_implementation == "grouped"
    torch_engine.refuse_wrong_over_slots(model, "doge")


def test_an_engine_whose_hidden_states_are_a_little_off_is_refused(models, monkeypatch):
    model, _ = load(models["llama"])
    right = TorchEngine._hidden
    monkeypatch.setattr(TorchEngine, "_hidden", lambda self, n: 1.002 * right(self, n))
    with pytest.raises(ValueError, match="off by 0.2%"):
        torch_engine.refuse_wrong_over_slots(model, "llama")


# --- the way of the parameters --------------------------------------------------------------------


def test_pitfall_13_readers_get_whole_versions_and_the_newest(models):
    """A writer at full speed writes versions whose parameters all equal the version; no mixture is
    ever read."""
    model, _ = load(models["llama"])
    reader, _ = load(models["llama"])
    shared = SharedParameters(model)
    assert shared.version == -1
    stop, newest = threading.Event(), [0]

    def write():
        while not stop.is_set():
            newest[0] += 1
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(newest[0])
            shared.write(model.named_parameters(), newest[0])

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen, reads = set(), 0
        while reads < 60 or (len(seen) <= 10 and reads < 10_000):
            at_least = shared.version
            version = shared.read_into(reader)
            assert version >= at_least
            assert all((parameter == version).all() for parameter in reader.parameters())
            seen, reads = seen | {version}, reads + 1
    finally:
        stop.set()
        writer.join()
    assert len(seen) > 10


def test_pitfall_12_a_writer_that_died_in_the_middle_is_a_time_out_and_not_a_hang(models):
    model, _ = load(models["llama"])
    shared = SharedParameters(model)
    with pytest.raises(TimeoutError, match="no complete version"):
        shared.read_into(model, timeout=0.05)
    shared.write(model.named_parameters(), 3)
    assert shared.read_into(model) == 3
    shared.begun_W[0] = 4
    with pytest.raises(TimeoutError):
        shared.read_into(model, timeout=0.05)


def test_parameters_go_to_a_device_as_they_are_and_are_cast_there(models, monkeypatch):
    """A copy from a CPU that casts would do that on the CPU. And the copies have ended before the
    reader asks whether the version was complete. Checked on torch's device without memory."""
    shared, reader = (
        parameters_of(load(models["llama-grouped-tied"])[0]),
        load(models["llama-grouped-tied"])[0],
    )
    put_on_device(reader, CPU, torch.bfloat16, fp32_head=True).to("meta")
    events, holds = [], shared.holds
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: events.append("synchronized"))
    monkeypatch.setattr(shared, "holds", lambda version: events.append("holds") or holds(version))

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten._to_copy.default:
                assert (kwargs or {}).get("dtype", torch.float32) == args[0].dtype == torch.float32
                events.append("copied")
            elif function is torch.ops.aten.copy_.default:
                assert args[0].device == args[1].device
                events.append("cast")
            return function(*args, **(kwargs or {}))

    with Copies():
        assert shared.read_into(reader) == 0
    assert events == [
        "holds",
        *["copied", "cast"] * len([*reader.parameters()]),
        "synchronized",
        "holds",
    ]


def test_vllms_worker_is_given_all_parameters_and_a_head_of_its_own_if_it_is_tied(models):
    shared, given = parameters_of(load(models["llama-grouped-tied"])[0]), {}
    worker = SimpleNamespace(shared_parameters=shared, device=CPU, get_model=torch.nn.Module)
    worker.reload_weights = lambda weights_iterator: given.update(weights_iterator)
    vllm_engine._reload_parameters(worker)
    assert [*given] == [*shared.shapes, "lm_head.weight"]
    assert torch.equal(given["lm_head.weight"], shared.views()[shared.head_name])


# --- texts ----------------------------------------------------------------------------------------


def rollout_of(tokenizer, text, sampled=True, **changes) -> Rollout:
    """A rollout with this text and EOS."""
    tokens = np.array(tokenizer(text).input_ids + [tokenizer.eos_token_id], np.int32)
    flags = np.full(len(tokens), sampled)
    made = Rollout(
        Request(0, 0, [1], 9, (0,)), tokens, flags, tokens * np.float32(0), tokens * 0, False, False
    )
    return dataclasses.replace(made, **changes)


def test_a_truncated_completion_is_never_correct(models):
    tokenizer = load_tokenizer(models["llama"])
    fine = rollout_of(tokenizer, "1+2+0=03</think>3")
    rollouts = [fine, dataclasses.replace(fine, truncated=True), fine]
    texts = completion_texts(tokenizer, decoding(tokenizer), rollouts)
    with VerifierPool(1, 30.0, 4.0) as pool:
        verdicts = judge_all(pool, [Problem("1+2=", "3", "data.tasks.arithmetic")], rollouts, texts)
    assert [verdict.correct for verdict in verdicts] == [True, False, True]


def test_a_chat_model_ends_at_any_of_its_eos_tokens_and_starts_as_its_template_says(chat_models):
    """`<think>` is in the prompt, or thinking is over before the model begins: then all of it is
    answer."""
    model, tokenizer = load(chat_models["qwen3"])
    settings = Sampling(prompt_budget=100, thinking_budget=(30, 30), answer_budget=6)
    rules = make_decoding(tokenizer, settings)
    assert rules.eos == tuple(
        sorted(tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))
    )
    assert rules.thinks and tokenizer.decode(render(tokenizer, "hi")).endswith(
        "assistant\n<think>\n"
    )
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "<think>\n", "<think>\n{% if not enable_thinking %}\n</think>\n\n{% endif %}"
    )
    assert make_decoding(tokenizer, settings).thinks
    answers = make_decoding(tokenizer, dataclasses.replace(settings, thinking=False))
    ids = render(tokenizer, "What </think> is this?", thinking=False)
    assert not answers.thinks and tokenizer.decode(ids).endswith("</think>\n\n")
    rollouts = sample_all(
        TorchEngine(model, answers, 8), [Request(0, i, ids, 30, (0, i)) for i in range(8)]
    )
    assert all(len(r.tokens) <= 6 and not r.interrupted for r in rollouts) and any(
        r.truncated for r in rollouts
    )


def test_a_prompt_is_worded_as_the_data_are_and_follows_the_system_prompt(
    chat_models, tmp_path, capsys
):
    (tmp_path / "my.jsonl").write_text(
        "".join(f'{{"problem": "{i}+1?", "answer": "{i + 1}"}}\n' for i in range(3))
    )
    about = [
        "--model",
        chat_models["qwen3"],
        "--data",
        str(tmp_path / "my.jsonl"),
        "--defaults",
        "toy",
    ]
    about += ["--prompt-budget", "200", "--thinking-budget", "2", "3", "--prompt", "7+8?"]
    for more, wanted in (([], INSTRUCTION), (["--instruction", "Be brief."], "Be brief.")):
        assert run_generate([*about, *more]) == 0
        assert capsys.readouterr().out.startswith(f"prompt  | 7+8?\n        | \n        | {wanted}")
    tokenizer = load_tokenizer(chat_models["qwen3"])
    asked = tokenizer.decode(render(tokenizer, "hi", system="You add."))
    assert asked.startswith(
        "<|im_start|>system\nYou add.<|im_end|>\n<|im_start|>user\nhi<|im_end|>"
    )
    tokenizer.chat_template = None
    assert tokenizer.decode(render(tokenizer, "hi", system="You add.")) == "You add.\n\nhi"


def test_a_marker_of_ones_own_reaches_tasks_as_the_usual_one(models):
    tokenizer = load_tokenizer(models["llama"])
    rules = make_decoding(tokenizer, Sampling(end_of_thinking=";", interruption_phrase=";"))
    assert completion_texts(tokenizer, rules, [rollout_of(tokenizer, "1+2;3")]) == ["1+2</think>3"]


def test_thinking_that_the_prompt_has_opened_is_seen_by_the_task(chat_models):
    tokenizer = load_tokenizer(chat_models["qwen3"])
    rules = make_decoding(tokenizer, Sampling(prompt_budget=99))
    for prompt, before in (
        ("Q<think>\n", "<think>"),
        ("Q<think>\n</think>\n", ""),
        ("<think>" + "Q" * 20, ""),
        ("Q", ""),
    ):
        request = Request(0, 0, tokenizer(prompt).input_ids, 9, (0,))
        for text in ("a</think>b", "a", "<think>a</think>b"):
            made = dataclasses.replace(rollout_of(tokenizer, text), request=request)
            assert completion_texts(tokenizer, rules, [made, made]) == [before + text] * 2


def test_many_texts_at_once_are_those_of_the_tokenizer_one_by_one(chat_models):
    """Markers and broken characters among them; also of a tokenizer that tidies up spaces."""
    tokenizer, rng = load_tokenizer(chat_models["qwen3"]), np.random.default_rng(0)
    ids = [rng.integers(len(tokenizer), size=size).tolist() for size in (0, 1, 40, 300)]
    for tidy in (False, True):
        tokenizer.clean_up_tokenization_spaces = tidy
        assert decode_all(tokenizer, ids) == [tokenizer.decode(own) for own in ids]


def test_a_completion_is_printed_with_its_end_and_with_forced_tokens_marked(models):
    tokenizer = load_tokenizer(models["llama"])
    assert marked_text(tokenizer, rollout_of(tokenizer, "1+2</think>3")) == "1+2</think>3<eos>"
    sampled = np.array([True, True, False, False, True, True])
    assert (
        marked_text(tokenizer, rollout_of(tokenizer, "1+2=3", sampled=sampled)) == "1+[[2=]]3<eos>"
    )


def test_a_terminal_shows_the_control_characters_of_a_model_and_obeys_none():
    assert (
        quoted("reply", "a\x1b[2J\r\u202eb\n\tπ") == "reply   | a\\x1b[2J\\r\\u202eb\n        | \tπ"
    )


def test_pitfall_9_ids_go_through_end_to_end(models):
    """The prompt's ids are the chat template's, and what comes back is the request itself with the
    sampled ids."""
    model, tokenizer = load(models["llama"])
    ids = render(tokenizer, "12+34=")
    assert tokenizer.decode(ids) == "12+34=<think>"
    (rollout,) = sample_all(
        TorchEngine(model, decoding(tokenizer), 1), [Request(0, 0, ids, 5, (0,))]
    )
    assert rollout.request.prompt_ids == ids


# --- what cannot be -------------------------------------------------------------------------------


def test_models_that_cannot_be_used_are_refused_in_one_sentence(models, tmp_path):
    with pytest.raises(ValueError, match="holds no model"):
        model_path(str(tmp_path))
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="did you mean .*run/model?"):
        model_path(str(tmp_path / "run"))
    (tmp_path / "run" / "model" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds no tokenizer"):
        model_path(str(tmp_path / "run" / "model"))
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (broken / name).write_text("{")
    with pytest.raises(ValueError, match="could not be loaded"):
        load_model(str(broken))
    with pytest.raises(ValueError, match="could not be loaded"):
        load_tokenizer(str(broken))
    model, tokenizer = load(models["llama"])
    with pytest.raises(ValueError, match="the model holds 256"):
        refuse_too_long(model, decoding(tokenizer, thinking_budget=400))
    with pytest.raises(ValueError, match="wants exactly one"):
        make_decoding(tokenizer, Sampling(end_of_thinking="12"))
    with pytest.raises(ValueError, match="does not close thinking"):
        make_decoding(tokenizer, Sampling(interruption_phrase=""))
    with pytest.raises(
        ValueError,
        match="'1234.6789' has 10 tokens with .*, 5 of them the instruction's; .*budget 10",
    ):
        refuse_unfit_prompts(
            tokenizer, ["1+1=", "1234+6789"], Sampling(prompt_budget=8, instruction="+6789")
        )
    words = len(tokenizer(gym.INSTRUCTION).input_ids)
    with pytest.raises(ValueError, match=f"{words} of them the instruction's"):
        refuse_unfit_prompts(tokenizer, [gym.worded("1+1=")], Sampling(prompt_budget=8))
    tokenizer.chat_template = "<think>"
    with pytest.raises(ValueError, match="drops the prompt: two have the same tokens"):
        refuse_unfit_prompts(tokenizer, ["2", "1"], Sampling())


def test_only_prompts_that_may_be_too_long_are_rendered_before_a_run(monkeypatch):
    """And some of the others, so that a template that drops the prompt is found."""
    tokenizer, asked, usual = make_tokenizer(), [], core_decoding.rendered

    def rendered(tokenizer, prompts, settings):
        asked.extend(prompts)
        return usual(tokenizer, prompts, settings)

    monkeypatch.setattr(core_decoding, "rendered", rendered)
    prompts = [f"{i}+{i}=" for i in range(10_000)]
    refuse_unfit_prompts(tokenizer, prompts, Sampling(prompt_budget=32))
    assert len(set(asked)) <= 2 * core_decoding.COMPARED
    asked.clear()
    most = len(render(tokenizer, "9999+9999="))
    with pytest.raises(ValueError, match=f"--prompt-budget {most} would be enough"):
        refuse_unfit_prompts(tokenizer, prompts, Sampling(prompt_budget=most - 1))
    assert len(set(asked)) >= 9000, "all that have ten characters"


@pytest.mark.parametrize(
    "file, change, message",
    [
        (
            "config.json",
            {"num_hidden_layers": 20_000},
            "could not be loaded .*no layers, or more than 1,000",
        ),
        (
            "config.json",
            {"num_hidden_layers": 9},
            r"its files lack \d+ weights, model.layers.\S+ first",
        ),
        ("config.json", {"hidden_act": "none"}, r"could not be loaded \(KeyError: 'none'\)"),
        (
            "tokenizer.json",
            {"added_tokens": [{"single_word": False}] * 100_001},
            "more than 100,000 added tokens",
        ),
        ("tokenizer_config.json", {"model_max_length": "many"}, r"could not be loaded \(TypeError"),
        (
            "generation_config.json",
            {"eos_token_id": "abc"},
            r"its generation_config.json cannot be used \(ValueError",
        ),
    ],
)
def test_a_broken_or_giant_file_of_a_model_is_refused_at_once_in_one_sentence(
    models, tmp_path, file, change, message
):
    folder = Path(shutil.copytree(models["llama"], tmp_path / "model"))
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | change))
    with pytest.raises(ValueError, match=rf"^--model \S+: .*{message}"):
        load_model(str(folder))
        make_decoding(load_tokenizer(str(folder)), Sampling())


MUCH = "reading its files fails, or takes over 2 seconds or 2 GiB"
TEMPLATE = r"its chat template cannot be used \("


@pytest.mark.parametrize(
    "template, reason",
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", MUCH),
        ("{{ 9**(9**8) % 7 }}", MUCH),  # one call in C, which no signal interrupts
        ("{{ messages[0].content * 10**11 }}", TEMPLATE + "MemoryError"),
        (
            "{{ messages[0].content * 10**6 }}",
            TEMPLATE + "ValueError: it makes 4,000,000 characters of a prompt",
        ),
        ("{{ 1 + 'a' }}", TEMPLATE + "TypeError"),
        ("{% for %}", TEMPLATE + "TemplateSyntaxError"),
        ("{{ raise_exception('no system') }}", TEMPLATE + "TemplateError: no system"),
    ],
)
def test_a_chat_template_that_fails_or_takes_too_much_is_refused(
    models, monkeypatch, template, reason
):
    monkeypatch.setattr(limits, "SECONDS", 2)
    tokenizer, limit = load_tokenizer(models["llama"]), resource.getrlimit(resource.RLIMIT_AS)
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=rf"^--model \S+: {reason}"):
        [*rendered(tokenizer, ["1+1="], Sampling())]
    assert resource.getrlimit(resource.RLIMIT_AS) == limit
    if "content" not in template:
        with pytest.raises(ValueError, match=rf"^--model \S+: {reason}"):
            make_decoding(tokenizer, Sampling())


def test_a_tokenizer_whose_expression_takes_too_much_is_refused(tmp_path, models, capfd):
    """Its library panics at the interruption phrase."""
    folder = shutil.copytree(models["llama"], tmp_path / "hostile")
    content = json.loads((folder / "tokenizer.json").read_text())
    hostile = {"type": "Split", "pattern": {"Regex": "(1+)+$"}, "behavior": "Isolated"}
    content["pre_tokenizer"] = hostile | {"invert": False}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(str(folder))
    sampling = Sampling(interruption_phrase=f"{'1' * 40}!</think>")
    with pytest.raises(ValueError, match="reading its files fails"):
        make_decoding(tokenizer, sampling)
    assert "panicked" not in capfd.readouterr().err


def test_a_model_is_loaded_once_whatever_the_engine_computes_in(models, monkeypatch):
    """Its trunk is that of a model loaded in bf16, with the buffers of one in fp32; its head is
    exact."""
    loaded, load_it = [], transformers.AutoModelForCausalLM.from_pretrained
    count = lambda path, **options: loaded.append(path) or load_it(path, **options)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", count)
    kind = models["llama-grouped-tied"]
    exact = load_it(kind, dtype=torch.float32)
    for fp32_head in (True, False):
        model = put_on_device(load_model(kind), CPU, torch.bfloat16, fp32_head)
        rounded = dict(load_it(kind, dtype=torch.bfloat16).state_dict())
        if fp32_head:
            rounded["lm_head.weight"] = exact.lm_head.weight
        assert all(
            torch.equal(values, rounded[name]) for name, values in model.state_dict().items()
        )
        assert all(b.dtype == torch.float32 for b in model.buffers())
        assert (model.lm_head.weight is model.get_input_embeddings().weight) is not fp32_head
    del loaded[:]
    assert run_generate(["--prompt", "1+1=", "--dtype", "bfloat16"]) == 0 and len(loaded) == 1


def test_code_that_lies_in_a_models_folder_is_never_run(models, tmp_path, monkeypatch):
    """And nobody is asked whether it may be."""
    folder = shutil.copytree(models["llama"], tmp_path / "hostile")
    (folder / "hostile.py").write_text(f"open({str(tmp_path / 'it ran')!r}, 'w')\n")
    for name, classes in (
        ("config.json", {"AutoConfig": "hostile.C", "AutoModelForCausalLM": "hostile.M"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["hostile.T", None]}),
    ):
        config = json.loads((folder / name).read_text()) | {"auto_map": classes}
        config |= (
            {"model_type": "hostile"} if name == "config.json" else {"tokenizer_class": "Hostile"}
        )
        (folder / name).write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    # The tokenizer may well be read without a class of its own.
    with contextlib.suppress(ValueError):
        load_tokenizer(str(folder))
    with pytest.raises(ValueError, match="could not be loaded .*contains custom code"):
        load_model(str(folder))
    assert not (tmp_path / "it ran").exists()


def test_the_shipped_model_is_found_beside_the_scripts_and_a_path_that_is_not_there_at_once(
    tmp_path, monkeypatch
):
    """From any folder; no hub is asked. What could be a name on the hub is left to it."""

    def no_hub(*arguments, **options):
        raise AssertionError("something was loaded")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", no_hub)
    monkeypatch.chdir(tmp_path)
    assert model_path(Sampling().model) == str(ROOT / "data" / "arithmetic_base")
    (tmp_path / "runs" / "mine" / "model").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "model" / "tokenizer_config.json").write_text("{}")
    assert model_path("runs/mine/model") == "runs/mine/model"
    for name in (
        str(tmp_path / "nothing"),
        "runs/nothing",
        "runs/mine/nothing/model",
        "a/b/c",
        "./nothing",
    ):
        with pytest.raises(ValueError, match=f"--model {name}: there is no such folder"):
            run_generate(["--prompt", "1+1=", "--model", name])
    assert model_path("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B" and model_path("gpt2") == "gpt2"


# --- the process ----------------------------------------------------------------------------------


def test_a_generator_process_samples_takes_updates_validates_and_stops(models):
    samples_takes_updates_validates_and_stops(settings_of(models["llama"]))


class Script:
    """The queue for work, read in the generator's own thread: some requests, and the end when all
    have come back."""

    def __init__(self, wanted):
        self.works = [wanted]

    def get_nowait(self):
        if not self.works:
            raise queue.Empty
        return self.works.pop()

    def get(self, timeout):
        """What the generator waits for when it has nothing to sample."""
        return self.works.pop() if self.works else None


def test_only_the_share_of_training_counts_as_busy_while_a_validation_is_sampled(
    models, monkeypatch
):
    """With a clock by which each step of the engine takes one second."""
    model, tokenizer = load(models["llama"])
    seconds = iter(range(10**9))
    monkeypatch.setattr(generators, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    wanted = requests(tokenizer, PROMPTS[:5], 1) + requests(
        tokenizer, PROMPTS[:3], 1, seed=1, validation=True
    )
    reports = queue.Queue()
    generators._generate(
        settings_of(models["llama"]), parameters_of(model), Script(wanted), reports
    )
    assert (first := reports.get_nowait()) == Report(slots=8), first
    came = [reports.get_nowait() for _ in range(reports.qsize())]
    rollouts = [rollout for report in came for rollout in report.rollouts]
    lengths = {
        kind: [len(r.tokens) for r in rollouts if r.request.validation == kind]
        for kind in (False, True)
    }
    assert (
        len(lengths[False]) == 5
        and len(lengths[True]) == 3
        and max(lengths[False]) != max(lengths[True])
    )
    share = 0.0
    for step in range(max(lengths[False])):  # all begin with the first
        training, validation = (
            sum(length > step for length in lengths[kind]) for kind in (False, True)
        )
        share += training / (training + validation)
    assert share < max(lengths[False]) - 1 and sum(
        report.busy_seconds for report in came
    ) == pytest.approx(share)
    training = [rollout for rollout in rollouts if not rollout.request.validation]
    assert sum(report.sampled_tokens for report in came) == sum(
        int(r.sampled.sum()) for r in training
    )


def test_pitfall_12_an_exception_in_a_generator_travels_with_its_traceback(models, monkeypatch):
    monkeypatch.setattr(generators, "belong_to_the_run", lambda: None)
    script, reports = Script([Request(0, 0, [1] * 99, 1, (0,))]), queue.Queue()
    with pytest.raises(SystemExit) as ended:
        generators.generator_process(
            settings_of(models["llama"]), parameters_of(load(models["llama"])[0]), script, reports
        )
    last = [reports.get_nowait() for _ in range(reports.qsize())][-1]
    assert ended.value.code == 1 and "shape mismatch" in last.error and "Traceback" in last.error


# --- the command ----------------------------------------------------------------------------------


def test_the_command_prints_completions_and_mean_at_k(capsys, tmp_path):
    assert run_generate(["--prompt", "4729+8153=", "--samples", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[::2] == ["prompt  | 4729+8153="] * 3 and all(
        line.startswith("reply   | ") for line in lines[1::2]
    )
    assert run_generate(["--prompt", "4729+8153=", "--samples", "9", "--temperature", "0"]) == 0
    assert len({*capsys.readouterr().out.splitlines()}) == 2  # every reply is the likeliest one
    log = tmp_path / "evaluations.jsonl"
    assert run_generate(["--evaluate", "--problems", "5", "--samples", "4", "--log", str(log)]) == 0
    printed = capsys.readouterr().out
    figures = json.loads(log.read_text())
    assert figures["step"] == figures["compute_flops"] == 0  # no run has made the shipped model
    assert (
        "5 problems, 4 completions of each" in printed
        and f"mean@4    {figures['pass_rate']:.3f}" in printed
    )
    assert figures["num_examples"] == 20 and figures["pass@4"] >= figures["pass_rate"] > 0
    assert figures["pass@4_low"] <= figures["pass@4"] <= figures["pass@4_high"]
    assert printed.count("\nright   | ") == 2 and printed.count("\nwrong   | ") == 2
    assert run_generate(["--evaluate", "--problems", "2", "--samples", "2", "--show", "0"]) == 0
    assert " | " not in capsys.readouterr().out


def test_a_completion_that_is_right_in_part_is_not_called_wrong():
    rollouts = [given_rollout([1], [i]) for i in range(4)]
    verdicts = [Verdict(1.0), Verdict(0.95), Verdict(0.0), Verdict(0.0, "died")]
    (right,), (in_part,), (wrong,) = generate.examples(rollouts, verdicts).values()
    assert [right, in_part, wrong] == rollouts[:3]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "say one of --prompt TEXT and --evaluate"),
        (["--prompt", "1+1=", "--evaluate"], "say one of --prompt TEXT and --evaluate"),
        (["--evaluate", "--samples", "0"], "--samples is 0; it must be at least 1"),
        (["--evaluate", "--slot", "3"], "--slot.*; did you mean --slots"),
        (["--evaluate", "--engine", "tensorrt"], "auto.*torch.*vllm"),
        (
            ["--evaluate", "--data", "nothing"],
            "no such file or folder, and no data set .OWNER.NAME. or task",
        ),
    ],
)
def test_what_the_command_cannot_do_is_one_line_and_status_2(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        run_command(run_generate, arguments)
    printed = capsys.readouterr()
    assert ended.value.code == 2 and printed.out == ""
    assert re.match(f"error: .*{message}.*\n$", printed.err)


def test_memory_that_is_full_is_said_in_one_sentence(monkeypatch):
    def full(*_):
        raise MemoryError("Unable to allocate 9 TiB. More words.")

    monkeypatch.setattr(generate, "make_engine", full)
    with pytest.raises(
        ValueError,
        match=r"^out of memory \(Unable to allocate 9 TiB\): lower --slots or the budgets$",
    ):
        run_generate(["--prompt", "1+1="])


def test_the_help_says_every_flag_with_its_meaning_and_default(capsys):
    with pytest.raises(SystemExit) as ended:
        run_generate(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0 and "python generate.py --model" in text
    assert all(flag(field.name) in text for field in dataclasses.fields(GenerateCommand))
    assert "sequences that a generator decodes at once" in text and "(default: 512)" in text


def test_the_script_runs_from_any_folder_and_its_waiting_threads_leave_the_cores(tmp_path):
    command = [sys.executable, ROOT / "generate.py", "--prompt", "1+1="]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_DISPLAY_ENV": "true"},
    )
    assert done.returncode == 0 and done.stdout.startswith("prompt  | 1+1=\nreply   | "), (
        done.stderr
    )
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_memory_that_the_driver_does_not_lock_is_a_warning(models, monkeypatch, capsys):
    """CUDA keeps the error until it is asked for: a first kernel takes it."""
    parameters, kernels = SharedParameters(load(models["llama"])[0]), []

    def refuses(status):
        raise torch.cuda.CudaError.__new__(torch.cuda.CudaError, f"out of memory ({status})")

    def kernel(*_, device):
        kernels.append(device)
        raise RuntimeError("CUDA error: out of memory")

    cudart = SimpleNamespace(cudaHostRegister=lambda *_: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "check_error", refuses)
    monkeypatch.setattr(torch, "zeros", kernel)
    parameters.pin()
    said = "warning: the driver does not lock shared memory (out of memory (2)): copies are slower"
    assert said in capsys.readouterr().err
    assert kernels == ["cuda"]
