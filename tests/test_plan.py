"""`train.py --plan`: what it says, that it starts and writes nothing, and that docs/node.md says
the same."""

import os
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from plans import ROOT, make_models, table
from steps import run_train
from test_settings import refusal

from core.engine import EngineSettings
from core.feed import Feed
from core.model import load_model, load_shapes
from core.settings import Settings, TrainCommand, parse
from core.vllm_engine import make_llm_engine
from machinery.folder import write_config
from tools.plan import Needs, Shape, generator_bytes, trainer_bytes

POLARIS = ["--plan", "--data", "polaris", "--gpu-memory", "80"]
EIGHT = [*POLARIS, "--gpus", "8"]
QWEN = ["--model", "Qwen/Qwen3-8B"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to stand in, with real models' config.json; no process may be started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Feed, "start", lambda *_: pytest.fail("processes were started"))
    make_models(tmp_path)
    return tmp_path


def planned(arguments, capsys) -> str:
    """What the command prints; it leaves nothing behind."""
    assert run_train(arguments) == 0
    return capsys.readouterr().out


def row(text: str, name: str) -> str:
    """The line of the table that begins with this name."""
    return next(line for line in text.splitlines() if line.strip().startswith(name))


def test_the_plan_of_the_default_run_starts_and_writes_nothing(here, capsys):
    before = sorted(here.rglob("*"))
    text = planned(["--plan"], capsys)
    assert sorted(here.rglob("*")) == before
    assert "142,016 parameters" in row(text, "model") and "85 tokens" in row(text, "model")
    assert row(text, "a trainer").endswith("1: cpu")
    assert row(text, "a generator (torch)").endswith("1: cpu")
    assert "512 sequences of full length" in row(text, "keys and values")
    assert "fits" in row(text, "cpu") and "the parameters" in row(text, "/dev/shm")
    assert "largest" not in text and "lowered by" not in text


def test_a_machine_that_is_not_here_and_which_flags_help(here, capsys):
    text = planned([*EIGHT, *QWEN], capsys)
    seven = " ".join(f"cuda:{i}" for i in range(7))
    assert row(text, "a generator (vllm)").endswith(f"7: {seven}")
    assert row(text, "cuda:7").endswith("DOES NOT FIT")
    assert row(text, "cuda:0 to cuda:6").endswith("fits")
    assert "--trainers" in row(text, "lowered by")
    largest = "--model Qwen/Qwen3-8B --trainers 4 --gradient-checkpointing"
    assert row(text, "largest that fits").endswith(largest)

    helped = planned([*EIGHT, *QWEN, "--trainers", "4"], capsys)
    assert "DOES NOT" not in helped and "lowered by" not in helped
    for slots, verdict in (("256", "DOES NOT FIT"), ("16", "fits")):
        flags = ["--trainers", "4", "--engine", "torch", "--slots", slots]
        text = planned([*EIGHT, *QWEN, *flags], capsys)
        assert row(text, "cuda:0 to cuda:3").endswith(verdict)

    for memory, wanted in (
        ("24", "none"),
        ("48", "0.6B --trainers 1"),
        ("141", "1.7B --trainers 1"),
    ):
        alone = [*POLARIS[:-1], memory, "--gpus", "1"]
        assert wanted in row(planned([*alone, *QWEN], capsys), "largest that fits")


def test_what_cannot_be_planned_is_one_sentence(here, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    no_gpu = ["--plan", "--gpus", "0", "--gpu-memory", "80"]
    for flags, message in (
        (["--gpus", "8"], "--gpus is for --plan alone"),
        (["--gpu-memory", "80"], "--gpu-memory is for --plan alone"),
        (["--plan", "--gpus", "2"], "--gpus wants --gpu-memory too"),
        (no_gpu, "--gpu-memory is of a machine with GPUs: say how many"),
        (["--plan", "--gpus", "-1"], "--gpus is -1; it must be at least 0"),
        ([*EIGHT, "--trainers", "9"], "want 10 GPUs; there are 8"),
        ([*EIGHT, "--model", "no/such/model"], "--model no/such/model: there is no such folder"),
        ([*EIGHT, *QWEN, "--tensor-parallel", "3"], "cannot be split over 3 GPUs"),
        (["--plan", "--thinking-budget", "300", "400"], "the model holds 256"),
    ):
        assert message in refusal(flags, capsys), flags


def test_a_run_that_goes_on_has_its_own_settings_and_none_of_the_plans(here, capsys):
    run = here / "runs" / "mine"
    run.mkdir(parents=True)
    write_config(run, parse(["--prompts-per-step", "2", "--steps", "10"]))
    text = planned(["--plan", "--resume", "runs/mine", "--steps", "20"], capsys)
    # 2 x 16 sequences of 85: no micro-batch is full.
    assert " 2,720 tokens" in row(text, "activations")
    settings = parse(["--resume", "runs/mine", "--steps", "20"], TrainCommand).of_the_run()
    assert type(settings) is Settings and (settings.prompts_per_step, settings.steps) == (2, 20)


def test_shapes_come_from_the_config_alone(models):
    for kind, folder in models.items():
        model = load_model(folder)
        shapes = load_shapes(folder)
        assert {parameter.device.type for parameter in shapes.parameters()} == {"meta"}
        assert vars(Shape(shapes)) == vars(Shape(model)), kind
        if kind in ("deepseek-v3", "glm4-moe-lite"):
            continue  # versions of transformers differ in what they cache
        with torch.no_grad():
            output = model.base_model(input_ids=torch.tensor([[1, 2]]), use_cache=True)
        layer = output.past_key_values.layers[0]
        widths = [part.shape[1] * part.shape[3] for part in (layer.keys, layer.values)]
        assert Shape(shapes).cached == sum(widths), kind


def test_what_memory_grows_with():
    """By hand for a model of one layer, and the ways that the flags turn it."""
    shape = SimpleNamespace(
        parameters=1000,
        layer=300,
        table=100,
        tied=False,
        layers=1,
        heads=2,
        vocabulary=10,
        hidden=8,
        query=8,
        cached=8,
        normed=0,
        mlp=16,
    )
    alone = trainer_bytes(shape, Settings(), 1, 64, 32, torch.float32, "cuda")
    assert (alone["parameters"], alone["gradients"], alone["moments"]) == (4000, 4000, 8000)
    assert alone["gathered by FSDP"] == 0 and alone["logits"] == 3 * 4 * 64 * 10
    assert alone["activations"] == 64 * 4 * (8 * 8 + 4 * 8 + 4 * 16)
    four = trainer_bytes(shape, Settings(), 4, 64, 32, torch.bfloat16, "cuda")
    assert four["moments"] == 2000 and four["activations"] == alone["activations"] / 2
    assert four["gathered by FSDP"] == 2 * 2 * 300 + 4 * 3 * 100

    waiting = trainer_bytes(shape, Settings(offload=True), 4, 64, 32, torch.bfloat16, "cuda")
    assert waiting == four | dict.fromkeys(("parameters", "gradients", "moments"), 0)

    torch_engine = generator_bytes(shape, "torch", 8, 100, 16, torch.bfloat16, 0.0)
    assert torch_engine["weights"] == 2400 and torch_engine["keys and values"] == 8 * 100 * 8 * 2
    vllm = generator_bytes(shape, "vllm", 8, 100, 16, torch.bfloat16, 1e9)
    assert sum(vllm.values()) == 1e9 + vllm["process"]  # it takes its share


def test_one_gpu_for_both_adds_up(here):
    command = parse([*POLARIS, "--gpus", "1", "--model", "Qwen/Qwen3-0.6B"], TrainCommand)
    need = Needs(command, Shape(load_shapes("Qwen/Qwen3-0.6B")), 16_384)
    planned, there, verdict = need.devices["cuda:0"]
    assert planned == pytest.approx(sum(need.trainer.values()) + 0.4 * 80e9 + 2**29)
    assert there == 80e9 and verdict == "fits"


def test_the_table_of_the_docs_is_what_the_command_says(here, capsys):
    text = (ROOT / "docs" / "node.md").read_text()
    for line in table(here):
        assert line in text
    example = r"```\n(python train.py --plan .*)\n```\n\n```\n([^`]*)```"
    command, shown = re.search(example, text).groups()
    assert planned(command.split()[2:], capsys) == shown


def test_on_a_gpu_vllm_leaves_room_for_what_it_cannot_measure_when_it_sizes_its_cache(monkeypatch):
    """The head in fp32, twice more at an update. (What vLLM is asked for is seen by a stand-in.)"""
    model = SimpleNamespace(get_vocab_size=lambda: 1000, get_hidden_size=lambda: 50)
    config, seen = SimpleNamespace(model_config=model, cache_config=SimpleNamespace()), []

    def arguments(gpu_memory_utilization, **_):
        config.cache_config.gpu_memory_utilization = gpu_memory_utilization
        return SimpleNamespace(create_engine_config=lambda: config)

    def engine(config, **_):
        seen.append(config.cache_config.gpu_memory_utilization)
        return SimpleNamespace(collective_rpc=lambda function: seen.append(function.__name__))

    vllm = SimpleNamespace(EngineArgs=arguments, LLMEngine=SimpleNamespace(from_vllm_config=engine))
    platform = SimpleNamespace(get_device_total_memory=lambda: 10_000_000)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    monkeypatch.setattr(os, "environ", {})
    decoding = SimpleNamespace(fp32_logits=True, longest=100, phrase=())
    settings = EngineSettings("model", ("cuda:0",), "bfloat16", 1, 8, decoding, "vllm", memory=0.4)
    make_llm_engine(settings, 8192)
    assert seen == [pytest.approx(0.4 - 3 * 4 * 1000 * 50 / 10_000_000), "_keep_head_in_fp32"]
