"""The way of the parameters, texts, the generator's process and the command."""

import ast
import contextlib
import dataclasses
import itertools
import json
import re
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import torch
from faults import ROOT, SOURCES, python
from programs import rows
from steps import (
    asked,
    change,
    decoding,
    largest_error,
    needs_vllm,
    parameters_of,
    requests,
    rewrite,
    run_generate,
    settings_of,
)
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing

import generate
from core import generators
from core.model import load_model, load_tokenizer, refuse_too_long, refuse_unknown
from core.rollouts import Report, Request, SharedParameters, given_rollout
from core.settings import Sampling, model_path, read_sources
from core.text import (
    completion_text,
    end_tokens,
    make_decoding,
    marked_text,
    prompt_ids,
    quoted,
    refuse_prompts,
)
from curve.flags import run_command
from data import Problem
from data.verify import Verdict
from docs.make_base import make_tokenizer
from machinery.evaluation import judge_all
from machinery.run import make_prompts

# --- the way of the parameters --------------------------------------------------------------------


def test_pitfall_13_readers_get_whole_versions_and_the_newest(llama):
    """A writer writes versions whose parameters all equal the version, two of three at full speed;
    no mixture is ever read."""
    model, reader = load_model(llama), load_model(llama)
    shared = SharedParameters(model)
    assert shared.version == -1

    @torch.no_grad()
    def write():
        for version in itertools.count():
            for parameter in model.parameters():
                parameter.fill_(version)
            shared.write(model.named_parameters(), version)
            time.sleep(0.003 if version % 3 == 0 else 0)  # or a reader may find no gap for minutes
            if enough.is_set():
                return

    enough, seen = threading.Event(), []
    threading.Thread(target=write, daemon=True).start()
    while len({*seen}) <= 10:
        at_least = shared.version
        seen.append(shared.read_into(reader))
        assert seen[-1] >= at_least
        assert all((parameter == seen[-1]).all() for parameter in reader.parameters())
    enough.set()


def test_pitfall_12_a_version_is_of_every_rank_and_a_writer_that_died_is_a_time_out(
    llama, monkeypatch
):
    """In the middle of a version, and not a hang."""
    monkeypatch.setattr("core.rollouts.READ_TIMEOUT", 0.05)
    model = load_model(llama)
    shared = SharedParameters(model, ranks=2)
    assert shared.holds(-1)
    with pytest.raises(TimeoutError, match="no complete version"):
        shared.read_into(model)
    shared.write(model.named_parameters(), 1, rank=0)
    assert shared.version == -1 and not shared.holds(1)
    shared.write(model.named_parameters(), 1, rank=1)
    assert shared.read_into(model) == 1 and shared.holds(1)
    shared.begun_W[1] = 2
    assert shared.version == 1 and not shared.holds(1) and not shared.holds(2)
    with pytest.raises(TimeoutError):
        shared.read_into(model)


@pytest.mark.parametrize("refused", [False, True])
def test_memory_is_locked_as_long_as_its_object_is_there_or_a_warning_comes(
    llama, monkeypatch, capsys, refused
):
    """Locked for longer, copies would go to its pages, whatever lies at their address. And CUDA
    keeps an error until it is asked for: a first kernel takes it."""
    parameters, cuda = SharedParameters(load_model(llama)), Mock(CudaError=OSError)
    address = parameters.flat.data_ptr()
    cuda.check_error.side_effect = OSError("it is full") if refused else None
    cuda.zeros.side_effect = RuntimeError("CUDA error: it is full")
    monkeypatch.setattr("torch.cuda", cuda)
    monkeypatch.setattr("torch.zeros", cuda.zeros)
    parameters.pin()
    assert ("(it is full)" in capsys.readouterr().err) == cuda.zeros.called == refused
    unlock = cuda.cudart().cudaHostUnregister
    assert not unlock.called
    del parameters
    assert unlock.mock_calls == ([] if refused else [call(address)])


def test_parameters_go_to_a_device_as_they_are_and_are_cast_there(models, monkeypatch):
    """A copy from a CPU that casts would do that on the CPU. And the copies have ended before the
    reader asks whether the version was complete. A reader may have a head of its own. Checked on
    torch's device without memory."""
    model, asked = load_model(models["llama-grouped-tied"]), Mock()
    shared = parameters_of(model)
    monkeypatch.setattr("torch.cuda.synchronize", asked.synchronize)
    monkeypatch.setattr(shared, "holds", asked.holds)
    ((_, head),) = shared.on(torch.device("meta"), ["lm_head.weight"])
    assert (head.dtype, head.shape) == (torch.float32, model.lm_head.weight.shape)
    assert shared.read_into(model.bfloat16().to("meta")) == 0
    order = [name for name, *_ in asked.mock_calls]
    assert order == ["synchronize", "holds", "synchronize", "holds"]


# --- texts ----------------------------------------------------------------------------------------


def problems_of(*prompts):
    return [Problem(prompt, "2", "data.tasks.arithmetic") for prompt in prompts]


def rollout_of(tokenizer, text, sampled=None, prompt="1"):
    """A rollout with this text and EOS."""
    tokens = [*tokenizer(text).input_ids, tokenizer.eos_token_id]
    made = given_rollout(tokenizer(prompt).input_ids, tokens)
    made.sampled[:] = sampled or True
    return made


def test_a_completion_is_all_answer_if_the_prompt_closes_thinking(chat_models):
    tokenizer = load_tokenizer(chat_models["qwen3"])
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "<think>\n", "<think>\n{% if not enable_thinking %}\n</think>\n\n{% endif %}"
    )
    for thinking in (True, False):
        assert make_decoding(tokenizer, Sampling(thinking=thinking)).thinks == thinking


def test_every_eos_that_a_models_files_name_ends_a_completion(llama, chat_models, tmp_path):
    chat = load_tokenizer(chat_models["qwen3"])  # its generation_config.json names both
    assert [*end_tokens(chat)] == chat.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    folder = Path(shutil.copytree(llama, tmp_path / "model"))
    config = folder / "generation_config.json"
    # transformers saves no model with a temperature that is not used.
    config.write_text('{"eos_token_id": [1, 2], "temperature": 0.6}')
    load_model(str(folder)).save_pretrained(folder)
    assert {1, 2} < {*end_tokens(load_tokenizer(str(folder)))}
    config.unlink()
    rewrite(folder / "config.json", eos_token_id=[1, 2])
    tokenizer = load_tokenizer(str(folder))
    assert {*end_tokens(tokenizer)} == {1, 2, tokenizer.eos_token_id}
    rewrite(folder / "config.json", eos_token_id=None)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no completion could end"):
        end_tokens(tokenizer)


def test_an_eos_that_a_tokenizer_appends_does_not_end_the_prompt():
    tokenizer = make_tokenizer()
    tokenizer.chat_template, plain = None, tokenizer("1+2=").input_ids
    appends = TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", tokenizer.eos_token_id)]
    )
    tokenizer.backend_tokenizer.post_processor = appends
    assert tokenizer("1+2=").input_ids == [*plain, tokenizer.eos_token_id]
    assert prompt_ids(tokenizer, *problems_of("1+2="), Sampling()) == plain


def test_the_system_turn_of_the_data_is_used_and_the_answer_is_shown(chat_models, tmp_path, capsys):
    turns = [{"role": role, "content": f"{role} I"} for role in ("system", "user")]
    lines = [json.dumps({"prompt": turns, "answer": "2"}).replace("I", str(i)) for i in range(300)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    path, said = chat_models["qwen3"], []
    flags = f"""
        --model {path} --data {tmp_path}/a.jsonl --defaults toy --prompt-budget 300
        --thinking-budget 2 3 --end-of-thinking </think>
    """
    for more in ("", "--system none"):
        settings = asked(f"{flags} {more}")
        make_prompts(settings, load_model(path), read_sources(settings))
        said.append(capsys.readouterr().err)
    assert re.search(r"<\|im_start\|>system\\nsystem (\d+)<\|im_end\|>.*user\\nuser \1\\n", said[0])
    assert r"Its answer is '2', and it would have to come as '\\boxed{2}'." in said[0]
    assert "<|im_start|>system\\nnone<|im_end|>" in said[1]


def test_a_prompt_is_worded_as_the_data_are_and_follows_the_system_prompt(
    chat_models, tmp_path, capsys
):
    record = '{"problem": "1+1?", "answer": "2", "system": "You add."}\n'
    (tmp_path / "my.jsonl").write_text(record * 3)
    about = f"--model {chat_models['qwen3']} --data {tmp_path}/my.jsonl --prompt 7+8?"
    about += " --defaults toy --prompt-budget 200 --thinking-budget 2 3"
    assert run_generate(f"{about} --instruction 'Be brief.'") == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("prompt  | 7+8?\n        | \n        | Be brief.")
    assert "my.jsonl has system prompts, and this prompt has none" in printed.err
    tokenizer = load_tokenizer(chat_models["qwen3"])
    tokenizer.chat_template = None
    ids = prompt_ids(tokenizer, *problems_of("hi"), Sampling(system="You add."))
    assert tokenizer.decode(ids) == "You add.\n\nhi"


def test_tasks_and_readers_get_texts_with_the_usual_markers(llama, chat_models):
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
        for text in ("a</think>b", "a", "<think>a</think>b"):
            made = rollout_of(tokenizer, text, prompt=prompt)
            assert completion_text(tokenizer, rules, made) == before + text
    tokenizer.clean_up_tokenization_spaces = True  # as some models have it: "a ." would be "a."
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    assert completion_text(tokenizer, rules, rollout_of(tokenizer, "a .")) == "a ."
    tokenizer = load_tokenizer(llama)
    rules = make_decoding(tokenizer, Sampling(end_of_thinking=";", interruption_phrase=";"))
    assert completion_text(tokenizer, rules, rollout_of(tokenizer, "1+2;3")) == "1+2</think>3"
    forced = rollout_of(tokenizer, "1+2=3", [True, True, False, False, True, True])
    assert marked_text(tokenizer, forced) == "1+[[2=]]3<eos>"
    assert quoted("reply", "a\x1b[2J\u202eb\nπ") == "reply   | a\\x1b[2J\\u202eb\n        | π"


# --- what cannot be -------------------------------------------------------------------------------


LONGROPE = """{
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 40,
    "short_factor": [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
    "long_factor": [9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9]
}"""
# What is wrong in a model, or asked of it, and what is said.
UNUSABLE = r"""
config.json | {"num_hidden_layers": 9} | lack \d+ weights, model.layers.\S+ first
tokenizer_config.json | {"tokenizer_class": 1} | its tokenizer could not be
chat | "{{ raise_exception('no') }}" | template cannot be used \(TemplateError: no
chat | "{{ messages[0].content }}" | has 0 times the prompt
chat | "{{ messages[-1].content }}" | has 0 times the system prompt
chat | "{% for m in messages %}{{ m.content * loop.index }}{% endfor %}" | has 2 times the prompt
adapter_config.json | {} | is a LoRA adapter: merge it
config.json | {"quantization_config": {"quant_method": "awq", "bits": 4}} | is quantized
config.json | {"max_position_embeddings": 40} | holds 40 tokens, and not
config.json | {"rope_parameters": LONGROPE} | holds 40 tokens, and not
flags | {"end_of_thinking": "12"} | wants exactly one
flags | {"interruption_phrase": ""} | does not close thinking
ids | [19] | the token 19, and the model has embeddings for 19 tokens
prompts | "1 + 1=" | no tokens for a part of the prompt .*<unk>
prompts | "1 +1=" | cannot read '7' \(
prompts | "zebra" | the token 19, and the model has embeddings for 19 tokens
"""


@pytest.mark.parametrize("file, changes, message", rows(UNUSABLE))
def test_a_model_that_cannot_be_used_is_refused_in_one_sentence(
    llama, tmp_path, file, changes, message
):
    changes = json.loads(changes.replace("LONGROPE", LONGROPE))
    folder = Path(shutil.copytree(llama, tmp_path / "model"))
    if file.endswith(".json"):
        (folder / file).exists() or shutil.move(folder / "config.json", folder / file)
        rewrite(folder / file, **changes)
    with pytest.raises(ValueError, match=message) as refused:
        model = load_model(str(folder))
        refuse_too_long(model, decoding().longest)
        refuse_unknown(model, changes if file == "ids" else [18])
        tokenizer = load_tokenizer(str(folder))
        if file == "chat":
            tokenizer.chat_template = changes
        make_decoding(tokenizer, Sampling(**(changes if file == "flags" else {})))
        prompt = changes if file == "prompts" else "<unk>"
        tokenizer.add_tokens(["zebra"] * (prompt == "zebra"))
        if prompt == "1 +1=":
            tokenizer.backend_tokenizer.model = WordLevel({"1": 1, "+": 2, "=": 3}, "none")
        asked = problems_of("1+1=", prompt, "2+2=")
        refuse_prompts(tokenizer, asked, Sampling(system="7"), model)
    assert "\n" not in str(refused.value) and str(refused.value).startswith("--")


def test_code_that_lies_in_a_models_folder_is_never_run(llama, tmp_path):
    """And nobody is asked whether it may be."""
    folder = shutil.copytree(llama, tmp_path / "hostile")
    (folder / "hostile.py").write_text(f"open({str(tmp_path / 'it ran')!r}, 'w')\n")
    classes = {
        "AutoConfig": "hostile.C",
        "AutoModelForCausalLM": "hostile.M",
        "AutoTokenizer": ["hostile.T", None],
    }
    rewrite(folder / "config.json", model_type="hostile", auto_map=classes)
    before, cache = [*tmp_path.rglob("*")], {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    command = ROOT / "generate.py", "--model", folder, "--prompt", "1+1="
    done = python(*command, folder=tmp_path, **cache)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith(f"error: --model {folder}: it could not be")
    rewrite(folder / "tokenizer_config.json", tokenizer_class="Hostile", auto_map=classes)
    with pytest.raises(ValueError, match="could not be loaded"):
        load_tokenizer(str(folder))
    assert [*tmp_path.rglob("*")] == before


def test_no_call_in_the_tree_lets_a_library_run_code_of_a_model_or_a_data_set():
    loads = {"from_pretrained", "from_config", "load_dataset", "pipeline", "EngineArgs"}
    found = []
    for path in SOURCES:
        calls = ast.walk(ast.parse(path.read_text())) if path.parent.name != "tests" else ()
        for node in filter(lambda node: isinstance(node, ast.Call), calls):
            if ast.unparse(node.func).rpartition(".")[2] in loads:
                trusts = {each.arg: ast.unparse(each.value) for each in node.keywords}
                found.append((str(path), trusts.get("trust_remote_code")))
    assert len(found) >= 5 and {trust for _, trust in found} == {"False"}, found


def test_a_model_is_a_folder_here_or_beside_the_scripts_or_a_name_on_the_hub(here):
    assert model_path(Sampling().model) == str(ROOT / "data" / "arithmetic_base")
    Path("runs/mine/model").mkdir(parents=True)
    for name in ("runs/mine/model", "Qwen/Qwen3-0.6B", "gpt2"):
        assert model_path(name) == name


# --- the process ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, engine",
    [("llama", "torch"), pytest.param("qwen3-moe", "vllm", marks=[needs_vllm, pytest.mark.slow])],
)
def test_a_generator_process_samples_takes_updates_validates_and_stops(models, kind, engine):
    settings, model = settings_of(models[kind], engine), load_model(models[kind])
    shared = parameters_of(model)
    with contextlib.closing(generators.Generator(0, settings, shared)) as generator:
        while not [*generator.read_reports(300)]:
            time.sleep(0.01)
        assert generator.slots == settings.slots
        for version in (1, 2):
            change(shared, model, version)
            wanted = requests(2, thinking=9, validation=version == 2)
            rollouts, taken, began = [], [], time.monotonic()
            generator.give(wanted)
            while len(rollouts) < len(wanted):
                for report in generator.read_reports(60):
                    rollouts += report.rollouts
                    taken += [event[2] for event in report.events]
                time.sleep(0.001)
            # It has waited, and taken this version over.
            assert {version, None} <= {*taken}
            assert {rollout.request.seed for rollout in rollouts} == {each.seed for each in wanted}
            for rollout in rollouts:
                assert began <= rollout.began < rollout.ended <= time.monotonic()
                assert (rollout.versions == version).all()
                assert largest_error(rollout, model) < 1e-4
        generator.stop()
        generator.process.join(60)
        assert generator.process.exitcode == 0


def test_only_the_share_of_training_counts_as_busy_while_a_validation_is_sampled(monkeypatch):
    """By a clock by which each step of an engine takes one second. Here it has three completions
    for training and one for a validation, and then none."""
    clock, engine = Mock(), Mock(version=0)
    clock.monotonic.side_effect = itertools.count(0.0)
    monkeypatch.setattr("core.generators.time", clock)
    monkeypatch.setattr("core.generators.make_engine", lambda _: engine)
    sampler = generators.Sampler(None, Mock(version=0))
    for validations in ((False, True), (False, False), ()):
        engine.in_flight = [Request(0, 0, [1], 1, (0,), each) for each in validations]
        engine.step.return_value = [given_rollout([1], [1])] * len(validations)
        sampler.step()
    assert sampler.report([]).busy_seconds == 0.75 + 1.0
    assert sampler.report([]) == Report()


# --- the command ----------------------------------------------------------------------------------


def test_the_command_prints_completions_and_mean_at_k(capsys, tmp_path):
    assert run_generate("--prompt 4729+8153= --samples 9 --temperature 0") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[::2] == ["prompt  | 4729+8153="] * 9
    assert len({*lines[1::2]}) == 1 and lines[1].startswith("reply   | ")
    log = tmp_path / "evaluations.jsonl"
    assert run_generate(f"--evaluate --problems 5 --samples 4 --log {log}") == 0
    printed, figures = capsys.readouterr().out, json.loads(log.read_text())
    problems = [*map(json.loads, open(log.with_suffix(".problems.jsonl")))]
    assert [line["of"] for line in problems] == [4] * 5
    assert sum(line["solved"] for line in problems) / 20 == figures["pass_rate"]
    assert all(str(eval(line["problem"][:-1])) == line["answer"] for line in problems)
    assert figures["step"] == figures["compute_flops"] == 0  # no run has made the shipped model
    assert "5 problems, 4 completions of each" in printed
    assert f"mean@4    {figures['pass_rate']:.3f}" in printed
    assert printed.count("\nright   | ") == 2 and printed.count("\nwrong   | ") == 2


def test_a_completion_that_is_right_in_part_is_not_called_wrong_and_a_truncated_one_is():
    rollouts = [given_rollout([1], [i]) for i in range(5)]
    rollouts[4] = dataclasses.replace(rollouts[4], truncated=True)
    verdicts = [Verdict(1.0), Verdict(0.95), Verdict(0.0), Verdict(0.0, "died"), Verdict(1.0)]
    kinds = generate.examples(rollouts, verdicts).values()
    assert [chosen[0] for chosen in kinds] == [*rollouts[:3], rollouts[4]]
    pool = SimpleNamespace(judge=lambda items: [(i, verdicts[i]) for i, _, _ in items])
    judged = judge_all(pool, [None], rollouts, [""] * 5)
    assert judged == [*verdicts[:4], Verdict(False)]


IMPOSSIBLE = r"""
--prompt 1+1= --evaluate | say one of --prompt
 | say one of --prompt
--prompt 1+1= --log log.jsonl | --log goes with --evaluate
--evaluate --log nowhere/log.jsonl | No such file .*nowhere/log.jsonl
--prompt 1+1= | out of memory \(Unable to allocate 9 TiB\): lower --slots or
"""


@pytest.mark.parametrize("flags, message", rows(IMPOSSIBLE))
def test_what_the_command_cannot_do_is_one_line_and_status_2(monkeypatch, capsys, flags, message):
    full = MemoryError("Unable to allocate 9 TiB. More words.")
    monkeypatch.setattr("generate.make_engine", Mock(side_effect=full))
    with pytest.raises(SystemExit) as ended:
        run_command(run_generate, flags)
    printed = capsys.readouterr()
    assert ended.value.code == 2 and printed.out == ""
    assert re.match(f"error: .*{message}.*\n$", printed.err)
