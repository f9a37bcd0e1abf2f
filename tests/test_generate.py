"""The engine that one can read, the way of the parameters, the generator's process and the
command."""

import contextlib
import dataclasses
import itertools
import json
import os
import queue
import re
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
from tokenizers.processors import TemplateProcessing
from torch.utils._python_dispatch import TorchDispatchMode

import core.model
import generate
from core import generators, torch_engine, vllm_engine
from core.engine import EngineSettings, sample_all
from core.model import (
    attention_heads,
    completion_texts,
    decode_all,
    end_tokens,
    load_model,
    load_tokenizer,
    make_decoding,
    marked_text,
    model_path,
    padded,
    put_on_device,
    quoted,
    refuse_too_long,
    refuse_unfit_prompts,
    refuse_unknown,
    refuse_unusual,
    render,
)
from core.rollouts import Report, Request, Rollout, SharedParameters, given_rollout
from core.settings import Sampling
from core.torch_engine import TorchEngine
from curve.flags import run_command
from data import Problem
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


@pytest.mark.parametrize("slots", [1, 3])
def test_few_slots_and_the_widths_of_a_gpu_sample_what_many_slots_do(models, monkeypatch, slots):
    """Requests wait, and completions move to other slots when others end."""
    model, tokenizer = load(models["llama"])
    wanted, widths = requests(tokenizer, PROMPTS, 2), set()
    many = sample_all(TorchEngine(model, decoding(tokenizer), 32), wanted)
    on_a_gpu = lambda positions, _: padded(positions, torch.device("cuda"))
    forward = model.base_model.forward

    def seen(input_ids, **options):
        widths.add(max(input_ids.shape[1], options.get("attention_mask", input_ids).shape[-1]))
        return forward(input_ids=input_ids, **options)

    monkeypatch.setattr(torch_engine, "padded", on_a_gpu)
    monkeypatch.setattr(model.base_model, "forward", seen)
    few = sample_all(TorchEngine(model, decoding(tokenizer, prompt_budget=200), slots), wanted)
    assert widths == {64}
    for one, other in zip(many, few, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


# --- models that cannot be sampled ----------------------------------------------------------------


def odd_configs(tokenizer) -> dict:
    """Models whose cache is none of keys and values, or whose attention sees something else than
    our mask says."""
    names = dict(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
    return {
        "rwkv": transformers.RwkvConfig(
            hidden_size=32, num_hidden_layers=2, context_length=256, **names
        ),
        "bloom": transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, **names),
        "gpt-neo": transformers.GPTNeoConfig(
            hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
            window_size=8, max_position_embeddings=256, **names,
        ),
    }  # fmt: skip


def test_a_model_that_cannot_be_sampled_over_slots_is_refused_in_one_sentence(models, tmp_path):
    """Doge can be, which names the mask in a call."""
    tokenizer = make_tokenizer()
    config = transformers.DogeConfig(**sizes(tokenizer), num_key_value_heads=2, head_dim=8)
    doge = save_random(config, tmp_path / "doge", tokenizer)
    for folder in (*models.values(), doge):
        torch_engine.refuse_wrong_over_slots(load_model(folder), folder)
    for kind, config in odd_configs(tokenizer).items():
        folder = save_random(config, tmp_path / kind, tokenizer, std=0.3)
        with pytest.raises(ValueError, match=rf"^--model {folder}: .*(full att|over slots)[^\n]*$"):
            torch_engine.refuse_wrong_over_slots(load_model(folder), folder)


def test_of_a_model_that_reads_pictures_too_the_language_part_is_looked_at(tmp_path):
    tokenizer = make_tokenizer()
    text = sizes(tokenizer) | dict(num_key_value_heads=2, head_dim=8, max_position_embeddings=40)
    pictures = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, image_size=28)
    pictures |= dict(num_attention_heads=2, patch_size=14)
    config = transformers.Gemma3Config(
        text_config=text | dict(layer_types=["sliding_attention", "full_attention"]),
        vision_config=pictures,
        mm_tokens_per_image=1,
        eos_token_id=tokenizer.eos_token_id,
    )
    folder = save_random(config, tmp_path / "pictures", tokenizer)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert attention_heads(model) == 4
    with pytest.raises(ValueError, match="the model holds 40"):
        refuse_too_long(model, decoding(tokenizer))
    with pytest.raises(ValueError, match="not full attention"):
        refuse_unusual(model, folder)


def test_short_sequences_beside_long_ones_are_refused_if_longrope_would_change_them(tmp_path):
    tokenizer = make_tokenizer()
    factors = dict(short_factor=[1.0] * 4, long_factor=[4.0] * 4, factor=8.0, rope_theta=1e4)
    config = transformers.Phi3Config(
        **sizes(tokenizer),
        num_key_value_heads=2,
        rope_parameters=factors | dict(rope_type="longrope", original_max_position_embeddings=32),
        original_max_position_embeddings=32,
    )
    model, _ = load(save_random(config, tmp_path / "phi3", tokenizer))
    rotate = model.base_model.rotary_emb
    alone, beside = (rotate(torch.zeros(1), torch.arange(n)[None])[0] for n in (6, 90))
    assert not torch.allclose(alone[0], beside[0, :6]), "the control: the long one changes it"
    with pytest.raises(ValueError, match="the model holds 32 before its longrope"):
        refuse_too_long(model, decoding(tokenizer))
    refuse_too_long(model, decoding(tokenizer, prompt_budget=6, thinking_budget=2, phrase=()))


# --- the way of the parameters --------------------------------------------------------------------


def test_pitfall_13_readers_get_whole_versions_and_the_newest(models):
    """A writer at full speed writes versions whose parameters all equal the version; no mixture is
    ever read."""
    (model, _), (reader, _) = load(models["llama"]), load(models["llama"])
    shared, stop = SharedParameters(model), threading.Event()
    assert shared.version == -1

    @torch.no_grad()
    def write():
        for version in itertools.count(1):
            for parameter in model.parameters():
                parameter.fill_(version)
            shared.write(model.named_parameters(), version)
            if stop.is_set():
                return

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
    shared = parameters_of(load_model(models["llama-grouped-tied"]))
    reader = put_on_device(load_model(models["llama-grouped-tied"]), CPU, torch.bfloat16, True)
    reader.to("meta")
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
            return function(*args, **(kwargs or {}))

    with Copies():
        assert shared.read_into(reader) == 0
    copies = ["copied"] * len([*reader.parameters()])
    assert events == ["holds", *copies, "synchronized", "holds"]


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
    rollouts = [fine, dataclasses.replace(fine, truncated=True)]
    texts = completion_texts(tokenizer, decoding(tokenizer), rollouts)
    with VerifierPool(1, 30.0, 4.0) as pool:
        verdicts = judge_all(pool, [Problem("1+2=", "3", "data.tasks.arithmetic")], rollouts, texts)
    assert [verdict.correct for verdict in verdicts] == [True, False]


def test_a_completion_is_all_answer_if_the_prompt_closes_thinking(chat_models):
    model, tokenizer = load(chat_models["qwen3"])
    settings = Sampling(prompt_budget=100, thinking_budget=(30, 30), answer_budget=6)
    assert make_decoding(tokenizer, settings).thinks
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "<think>\n", "<think>\n{% if not enable_thinking %}\n</think>\n\n{% endif %}"
    )
    assert make_decoding(tokenizer, settings).thinks
    answers = make_decoding(tokenizer, dataclasses.replace(settings, thinking=False))
    ids = render(tokenizer, "What </think> is this?", thinking=False)
    assert not answers.thinks and tokenizer.decode(ids).endswith("</think>\n\n")
    wanted = [Request(0, i, ids, 30, (0, i)) for i in range(8)]
    rollouts = sample_all(TorchEngine(model, answers, 8), wanted)
    assert all(len(rollout.tokens) <= 6 and not rollout.interrupted for rollout in rollouts)
    assert any(rollout.truncated for rollout in rollouts)


def test_every_eos_that_a_models_files_name_ends_a_completion(models, chat_models, tmp_path):
    chat = load_tokenizer(chat_models["qwen3"])  # its generation_config.json names both
    assert [*end_tokens(chat)] == chat.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    folder = Path(shutil.copytree(models["llama"], tmp_path / "model"))
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    for eos, expected in (([1, 2], {1, 2}), (3, {3}), (None, set())):
        (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": eos}))
        tokenizer = load_tokenizer(str(folder))
        assert {*end_tokens(tokenizer)} == {*expected, tokenizer.eos_token_id}


def test_an_eos_that_a_tokenizer_appends_does_not_end_the_prompt():
    tokenizer = make_tokenizer()
    tokenizer.chat_template, plain = None, tokenizer("1+2=").input_ids
    appends = TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", tokenizer.eos_token_id)]
    )
    tokenizer.backend_tokenizer.post_processor = appends
    assert tokenizer("1+2=").input_ids == [*plain, tokenizer.eos_token_id]
    assert render(tokenizer, "1+2=") == plain


def test_prompts_with_a_part_that_is_unknown_to_the_tokenizer_are_refused():
    """Also if only one of many has it."""
    prompts = [f"{i}+{i}=" for i in range(1000)]
    for unknown in ("77*7=", "1 + 1="):
        with pytest.raises(ValueError, match="no tokens for a part of the prompt .*<unk>"):
            refuse_unknown(make_tokenizer(), [*prompts, unknown, *prompts])
    refuse_unknown(make_tokenizer(), [*prompts, "<unk>"])


def test_a_prompt_is_worded_as_the_data_are_and_follows_the_system_prompt(
    chat_models, tmp_path, capsys
):
    records = "".join(f'{{"problem": "{i}+1?", "answer": "{i + 1}"}}\n' for i in range(3))
    (tmp_path / "my.jsonl").write_text(records)
    about = ["--model", chat_models["qwen3"], "--data", str(tmp_path / "my.jsonl")]
    about += ["--defaults", "toy", "--prompt-budget", "200", "--thinking-budget", "2", "3"]
    for more, wanted in (([], INSTRUCTION), (["--instruction", "Be brief."], "Be brief.")):
        assert run_generate([*about, "--prompt", "7+8?", *more]) == 0
        assert capsys.readouterr().out.startswith(f"prompt  | 7+8?\n        | \n        | {wanted}")
    tokenizer = load_tokenizer(chat_models["qwen3"])
    asked = tokenizer.decode(render(tokenizer, "hi", system="You add."))
    assert asked.startswith(
        "<|im_start|>system\nYou add.<|im_end|>\n<|im_start|>user\nhi<|im_end|>"
    )
    tokenizer.chat_template = None
    assert tokenizer.decode(render(tokenizer, "hi", system="You add.")) == "You add.\n\nhi"


def test_tasks_and_readers_get_texts_with_the_usual_markers(models, chat_models):
    """Also if the prompt has opened thinking, or if the model has another marker. A reader sees
    the end, and forced tokens marked; a terminal obeys no control character."""
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
    tokenizer = load_tokenizer(models["llama"])
    rules = make_decoding(tokenizer, Sampling(end_of_thinking=";", interruption_phrase=";"))
    assert completion_texts(tokenizer, rules, [rollout_of(tokenizer, "1+2;3")]) == ["1+2</think>3"]
    forced = rollout_of(
        tokenizer, "1+2=3", sampled=np.array([True, True, False, False, True, True])
    )
    assert marked_text(tokenizer, forced) == "1+[[2=]]3<eos>"
    assert quoted("reply", "a\x1b[2J\u202eb\nπ") == "reply   | a\\x1b[2J\\u202eb\n        | π"


def test_many_texts_at_once_are_those_of_the_tokenizer_one_by_one(chat_models):
    """Markers and broken characters among them; also of a tokenizer that tidies up spaces."""
    tokenizer, rng = load_tokenizer(chat_models["qwen3"]), np.random.default_rng(0)
    ids = [rng.integers(len(tokenizer), size=size).tolist() for size in (0, 1, 40, 300)]
    for tidy in (False, True):
        tokenizer.clean_up_tokenization_spaces = tidy
        assert decode_all(tokenizer, ids) == [tokenizer.decode(own) for own in ids]


# --- what cannot be -------------------------------------------------------------------------------


def test_models_that_cannot_be_used_are_refused_in_one_sentence(models, tmp_path):
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    for folder, message in (
        (tmp_path, "holds no model with a tokenizer$"),
        (run, "did you mean .*run/model?"),
    ):
        with pytest.raises(ValueError, match=message):
            model_path(str(folder))
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (run / "model" / name).write_text("{")
    for load_it in (load_model, load_tokenizer):
        with pytest.raises(ValueError, match="could not be loaded"):
            load_it(str(run / "model"))
    model, tokenizer = load(models["llama"])
    with pytest.raises(ValueError, match="the model holds 256"):
        refuse_too_long(model, decoding(tokenizer, thinking_budget=400))
    for changes, message in (
        (dict(end_of_thinking="12"), "wants exactly one"),
        (dict(interruption_phrase=""), "does not close thinking"),
    ):
        with pytest.raises(ValueError, match=message):
            make_decoding(tokenizer, Sampling(**changes))
        make_decoding(tokenizer, Sampling(**changes), "penalty")
    tokenizer.chat_template = "<think>"
    with pytest.raises(ValueError, match="drops the prompt: two have the same tokens"):
        refuse_unfit_prompts(tokenizer, ["2", "1"], Sampling())


def test_only_prompts_that_may_be_too_long_are_rendered_before_a_run(monkeypatch):
    """And some of the others, so that a template that drops the prompt is found."""
    tokenizer, asked, usual = make_tokenizer(), set(), core.model.render
    monkeypatch.setattr(core.model, "render", lambda *about: asked.add(about[1]) or usual(*about))
    prompts = [f"{i}+{i}=" for i in range(10_000)]
    refuse_unfit_prompts(tokenizer, prompts, Sampling(prompt_budget=32))
    assert len(asked) <= 2 * core.model.COMPARED
    asked.clear()
    most = len(usual(tokenizer, "9999+9999="))
    with pytest.raises(ValueError, match=f"--prompt-budget {most} would be enough"):
        refuse_unfit_prompts(tokenizer, prompts, Sampling(prompt_budget=most - 1))
    assert len(asked) >= 9000, "all that have ten characters"


@pytest.mark.parametrize(
    "file, change, message",
    [
        (
            "config.json",
            {"num_hidden_layers": 9},
            r"its files lack \d+ weights, model.layers.\S+ first",
        ),
        ("config.json", {"hidden_act": "none"}, r"could not be loaded \(KeyError: 'none'\)"),
        ("tokenizer_config.json", {"model_max_length": "many"}, r"could not be loaded \(TypeError"),
        (
            "generation_config.json",
            {"eos_token_id": "abc"},
            r"the EOS that its files name cannot be used \(ValueError",
        ),
    ],
)
def test_a_broken_file_of_a_model_is_refused_in_one_sentence(
    models, tmp_path, file, change, message
):
    folder = Path(shutil.copytree(models["llama"], tmp_path / "model"))
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | change))
    with pytest.raises(ValueError, match=rf"^--model \S+: .*{message}"):
        load_model(str(folder))
        make_decoding(load_tokenizer(str(folder)), Sampling())


@pytest.mark.parametrize(
    "template, reason",
    [
        ("{{ 1 + 'a' }}", "TypeError"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ raise_exception('no system') }}", "TemplateError: no system"),
    ],
)
def test_a_chat_template_that_fails_is_refused(models, template, reason):
    tokenizer = load_tokenizer(models["llama"])
    tokenizer.chat_template = template
    with pytest.raises(
        ValueError, match=rf"^--model \S+: its chat template cannot be used \({reason}"
    ):
        refuse_unfit_prompts(tokenizer, ["1+1="], Sampling())


@pytest.mark.parametrize("fp32_head", [True, False])
def test_in_bf16_the_trunk_is_rounded_and_the_head_is_exact(models, fp32_head):
    """The trunk is that of a model loaded in bf16, with the buffers of one in fp32."""
    folder = models["llama-grouped-tied"]
    load_it = transformers.AutoModelForCausalLM.from_pretrained
    model = put_on_device(load_model(folder), CPU, torch.bfloat16, fp32_head)
    rounded = dict(load_it(folder, dtype=torch.bfloat16).state_dict())
    if fp32_head:
        rounded["lm_head.weight"] = load_it(folder, dtype=torch.float32).lm_head.weight
    for name, values in model.state_dict().items():
        assert torch.equal(values, rounded[name]) and values.dtype == rounded[name].dtype
    assert all(buffer.dtype == torch.float32 for buffer in model.buffers())
    assert (model.lm_head.weight is model.get_input_embeddings().weight) is not fp32_head


def test_code_that_lies_in_a_models_folder_is_never_run(models, tmp_path, monkeypatch):
    """And nobody is asked whether it may be."""
    folder = shutil.copytree(models["llama"], tmp_path / "hostile")
    (folder / "hostile.py").write_text(f"open({str(tmp_path / 'it ran')!r}, 'w')\n")
    classes = {"AutoConfig": "hostile.C", "AutoModelForCausalLM": "hostile.M"}
    for name, changes in (
        ("config.json", {"model_type": "hostile"}),
        ("tokenizer_config.json", {"tokenizer_class": "Hostile"}),
    ):
        changes["auto_map"] = classes | {"AutoTokenizer": ["hostile.T", None]}
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    # The tokenizer may well be read without a class of its own.
    with contextlib.suppress(ValueError):
        load_tokenizer(str(folder))
    with pytest.raises(ValueError, match="could not be loaded .*contains custom code"):
        load_model(str(folder))
    assert not (tmp_path / "it ran").exists()


def test_a_model_is_a_folder_here_or_beside_the_scripts_or_a_name_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert model_path(Sampling().model) == str(ROOT / "data" / "arithmetic_base")
    (tmp_path / "runs" / "mine" / "model").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "model" / "tokenizer_config.json").write_text("{}")
    for name in ("runs/mine/model", "Qwen/Qwen3-0.6B", "gpt2"):
        assert model_path(name) == name
    for name in (str(tmp_path / "nothing"), "runs/nothing", "a/b/c", "./nothing"):
        with pytest.raises(ValueError, match=f"--model {name}: there is no such folder"):
            model_path(name)


# --- the process ----------------------------------------------------------------------------------


def test_a_generator_process_samples_takes_updates_validates_and_stops(models):
    samples_takes_updates_validates_and_stops(settings_of(models["llama"]))


def test_only_the_share_of_training_counts_as_busy_while_a_validation_is_sampled(
    models, monkeypatch
):
    """With a clock by which each step of the engine takes one second."""
    model, tokenizer = load(models["llama"])
    seconds = itertools.count()
    monkeypatch.setattr(generators, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    sampler = generators.Sampler(settings_of(models["llama"]), parameters_of(model))
    for seed, number, validation in ((0, 5, False), (1, 3, True)):
        wanted = requests(tokenizer, PROMPTS[:number], 1, seed=seed, validation=validation)
        sampler.engine.add(wanted)
    rollouts = []
    while sampler.engine.unfinished:
        rollouts += sampler.step()
    lengths = {True: [], False: []}
    for rollout in rollouts:
        lengths[rollout.request.validation].append(len(rollout.tokens))
    assert max(lengths[False]) != max(lengths[True])
    share = 0.0
    for step in range(max(lengths[False])):  # all begin with the first
        training, validation = (
            sum(length > step for length in lengths[kind]) for kind in (False, True)
        )
        share += training / (training + validation)
    report = sampler.report(rollouts)
    assert report.busy_seconds == pytest.approx(share)
    training = [rollout for rollout in rollouts if not rollout.request.validation]
    assert report.sampled_tokens == sum(int(rollout.sampled.sum()) for rollout in training)


def test_pitfall_12_an_exception_in_a_generator_travels_with_its_traceback(models, monkeypatch):
    monkeypatch.setattr(generators, "belong_to_the_run", lambda: None)
    work, reports = queue.Queue(), queue.Queue()
    parameters = parameters_of(load_model(models["llama"]))
    work.put([Request(0, 0, [1] * 99, 1, (0,))])
    with pytest.raises(SystemExit) as ended:
        generators.generator_process(settings_of(models["llama"]), parameters, work, reports)
    assert ended.value.code == 1 and reports.get_nowait() == Report(slots=8)
    error = reports.get_nowait().error
    assert "could not broadcast" in error and "Traceback" in error


# --- the command ----------------------------------------------------------------------------------


def test_the_command_prints_completions_and_mean_at_k(capsys, tmp_path):
    for temperature, most in (("1", 9), ("0", 1)):
        sampling = ["--samples", "9", "--temperature", temperature]
        assert run_generate(["--prompt", "4729+8153=", *sampling]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[::2] == ["prompt  | 4729+8153="] * 9
        assert all(line.startswith("reply   | ") for line in lines[1::2])
        assert 1 <= len({*lines[1::2]}) <= most
    log = tmp_path / "evaluations.jsonl"
    assert run_generate(["--evaluate", "--problems", "5", "--samples", "4", "--log", str(log)]) == 0
    printed, figures = capsys.readouterr().out, json.loads(log.read_text())
    assert figures["step"] == figures["compute_flops"] == 0  # no run has made the shipped model
    assert "5 problems, 4 completions of each" in printed
    assert f"mean@4    {figures['pass_rate']:.3f}" in printed
    assert figures["num_examples"] == 20 and figures["pass@4"] >= figures["pass_rate"] > 0
    assert figures["pass@4_low"] <= figures["pass@4"] <= figures["pass@4_high"]
    assert printed.count("\nright   | ") == 2 and printed.count("\nwrong   | ") == 2


def test_a_completion_that_is_right_in_part_is_not_called_wrong():
    rollouts = [given_rollout([1], [i]) for i in range(4)]
    verdicts = [Verdict(1.0), Verdict(0.95), Verdict(0.0), Verdict(0.0, "died")]
    (right,), (in_part,), (wrong,) = generate.examples(rollouts, verdicts).values()
    assert [right, in_part, wrong] == rollouts[:3]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "say one of --prompt"),
        (["--prompt", "1+1=", "--evaluate"], "say one of --prompt"),
        (["--evaluate", "--data", "nothing"], "no such file or folder"),
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
