"""`train.py --plan`: what it says, that it starts and writes nothing, and that docs/node.md says
the same."""

import json
import os
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from plans import CARDS, OF_CARDS, ROOT, chosen, make_models, of_cards, table
from steps import run_train
from test_settings import refusal

from core.engine import EngineSettings
from core.feed import Feed
from core.model import load_model, load_shapes
from core.settings import BY_MEMORY, Settings, TrainCommand, parse, read_settings
from core.vllm_engine import make_llm_engine
from machinery import memory as memory_module
from machinery.compute import time_left
from machinery.folder import write_config
from machinery.memory import FITS, GiB, Needs, Shape, choose, generator_bytes, trainer_bytes
from machinery.run import with_what_suits_the_memory
from tools.hours import least_seconds, step_flops

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
    assert "does not fit: cuda:7 has 74.5 GiB" in row(text, "nothing fits")
    assert "--trainers 3 would fit: " in row(text, "nothing fits")
    largest = "Qwen3-8B: --model Qwen/Qwen3-8B --trainers 3 --slots 256 --gradient-checkpointing"
    assert largest in row(text, "largest that fits")

    helped = planned([*EIGHT, *QWEN, "--trainers", "4"], capsys)
    assert "DOES NOT" not in helped and "lowered by" not in helped
    for slots, verdict in (("256", "DOES NOT FIT"), ("16", "fits")):
        flags = ["--trainers", "4", "--engine", "torch", "--slots", slots]
        text = planned([*EIGHT, *QWEN, *flags], capsys)
        assert row(text, "cuda:0 to cuda:3").endswith(verdict)

    for memory, wanted in (
        ("24", "none"),
        ("48", "0.6B --trainers 1"),
        ("141", "4B --trainers 1"),
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
        (["--plan", "--gpus", "1", "--gpu-memory", "0"], "--gpu-memory is 0.0; it must be above 0"),
        (["--gpu-kind", "H100"], "--gpu-kind is for --plan alone"),
        ([*EIGHT, "--gpu-kind", "H1"], "--gpu-kind H1 is not known; known are H200, H100, "),
        (["--plan", "--gpu-kind", "H100"], "--gpu-kind is of a machine with GPUs"),
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
    # In the head: the gradient of a chunk, and the sum with the others'; the logits are larger.
    in_head = 4 * 100 + alone["logits"] + 5 * 64 * 4 * 8
    in_layer = 3 * 64 * 4 * 16
    assert alone["in passing"] == max(in_head, in_layer) - alone["logits"]
    four = trainer_bytes(shape, Settings(), 4, 64, 32, torch.bfloat16, "cuda")
    assert four["moments"] == 2000 and four["activations"] == alone["activations"] / 2
    assert four["gathered by FSDP"] == 2 * 4 * 100  # the head in fp32, and its gradient
    again = Settings(gradient_checkpointing=True)
    again = trainer_bytes(shape, again, 4, 640, 32, torch.bfloat16, "cuda")
    assert again["activations"] == 640 * 2 * 8
    in_layer = 640 * 2 * (8 * 8 + 4 * 8 + 4 * 16 + 3 * 16) + (3 * 2 + 4 + 1) * 300
    assert again["in passing"] == in_layer - again["logits"]

    waiting = trainer_bytes(shape, Settings(offload=True), 4, 64, 32, torch.bfloat16, "cuda")
    assert waiting == four | dict.fromkeys(("parameters", "gradients", "moments"), 0)

    torch_engine = generator_bytes(shape, "torch", 8, 100, 16, torch.bfloat16, 0.0)
    assert torch_engine["weights"] == 2400 and torch_engine["keys and values"] == 8 * 100 * 8 * 2
    vllm = generator_bytes(shape, "vllm", 8, 100, 16, torch.bfloat16, 1e9)
    assert sum(vllm.values()) == 1e9 + vllm["process"]  # it takes its share


def test_one_gpu_for_both_adds_up(here):
    need, _ = chosen(here, "Qwen/Qwen3-0.6B", f"{' '.join(POLARIS)} --gpus 1")
    planned, there, verdict = need.devices["cuda:0"]
    assert planned == pytest.approx(sum(need.trainer.values()) + 0.4 * 80e9 + 2**29)
    assert there == 80e9 and verdict == "fits"


# --- what the memory chooses ----------------------------------------------------------------------

SMALL = "--plan --data gsm8k --defaults small --gpus 1"


def test_the_cards_that_people_have_train_these_models(here):
    """With a quarter to spare, the first without a flag. What is chosen can be given too."""
    for name, memory, flags in CARDS:
        need, words = chosen(here, name, f"{OF_CARDS} --gpu-memory {memory} {flags}")
        assert need.verdict == FITS, (name, memory)
        given = f"{OF_CARDS} --gpu-memory {memory} {flags} {words}"
        again, left = chosen(here, name, given)
        assert left == "" and vars(again.settings) == vars(need.settings)
    assert CARDS[0] == ("Qwen/Qwen3-0.6B", 24, "")


def test_what_costs_least_is_given_up_first(here):
    """With less and less memory: tokens, checkpointing, slots or vLLM's share; a flag is kept."""

    def values(memory, flags=""):
        command = f"{SMALL} --gpu-memory {memory} {flags}"
        settings = chosen(here, "Qwen/Qwen3-0.6B", command)[0].settings
        return {name: getattr(settings, name) for name in BY_MEMORY}

    order = [values(memory) for memory in (300, 100, 48, 24)]
    tokens, again, _, shares = zip(*[[v[n] for n in reversed(BY_MEMORY)] for v in order])
    assert tokens == (32_768, 16_384, 32_768, 4096)
    assert again == (False, False, True, True)
    assert shares == (0.4, 0.4, 0.4, 0.3)
    assert values(24, "--tokens-per-micro-batch 2048")["tokens_per_micro_batch"] == 2048
    slots = [values(memory, "--engine torch --offload")["slots"] for memory in (80, 24, 14)]
    assert slots == [128, 32, 16]
    assert values(80, "--no-gradient-checkpointing --slots 7") | {
        "gradient_checkpointing": False,
        "slots": 7,
    } == values(80, "--no-gradient-checkpointing --slots 7")


def test_the_plan_says_what_was_chosen_and_what_would_fit(here, capsys):
    command = [*SMALL.split(), "--model", "Qwen/Qwen3-0.6B", "--gpu-memory"]
    text = planned([*command, "24"], capsys)
    assert row(text, "cuda:0").endswith("fits") and "for the 22.4 GiB" in row(text, "chosen")
    assert "--gradient-checkpointing --tokens-per-micro-batch 4096" in row(text, "chosen")
    text = planned([*command, "16"], capsys)
    assert "too many; --offload would fit" in row(text, "nothing fits")
    longer = [*command, "13", "--offload", "--max-length", "16384"]
    said = row(planned(longer, capsys), "nothing fits")
    assert "tokens, not 16,896, would fit" in said
    larger = [*command, "24", "--offload", "--model", "Qwen/Qwen3-8B"]
    assert "a smaller model, Qwen3-" in row(planned(larger, capsys), "nothing fits")
    # More trainers are tried only as far as the generator leaves GPUs for them.
    split = [*command, "6", "--gpus", "8", "--tensor-parallel", "4", "--model", "Qwen/Qwen3-8B"]
    assert "does not fit" in row(planned(split, capsys), "nothing fits")
    # With every flag given there is nothing to choose.
    given = "--tokens-per-micro-batch 2048 --gradient-checkpointing --slots 8 --generator-memory .1"
    text = planned([*command, "16", *given.split()], capsys)
    assert "nothing fits" not in text and "DOES NOT FIT" in row(text, "cuda:0")


def test_on_a_cpu_nothing_is_chosen_by_memory(models):
    shape = Shape(load_shapes(models["llama"]))
    for arguments in ([], ["--data", "gsm8k", "--defaults", "small"], ["--data", "polaris"]):
        settings = parse(arguments)
        assert choose(settings, shape, 100) == (settings, "")
    settings, reason = choose(parse(["--slots", "None"]), shape, 100)
    assert (settings, reason) == (parse([]), "")


def make_up_a_gpu(monkeypatch, free: float, total: float) -> None:
    """This machine has one GPU, with so many bytes."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, total))


def test_a_run_says_what_was_chosen_and_config_json_too_and_resume_chooses_again(
    models, tmp_path, monkeypatch, capsys
):
    """On a GPU that is made up, of 10 GB and then of 1.5 GB."""
    model, prompts = load_shapes(models["llama"]), SimpleNamespace(decoding=SimpleNamespace())
    prompts.decoding.longest = 1024
    make_up_a_gpu(monkeypatch, 10e9, 10e9)
    asked, chosen_at_first = parse(["--engine", "torch", "--slots", "8"]), None
    for size in (10e9, 1.5e9):
        make_up_a_gpu(monkeypatch, size, size)
        settings, chosen = with_what_suits_the_memory(asked, model, prompts)
        assert settings.slots == 8 and "slots" not in chosen["settings"]
        assert chosen["reason"] in capsys.readouterr().err
        write_config(tmp_path, settings, chosen)
        assert json.loads((tmp_path / "config.json").read_text())["chosen"] == chosen
        assert read_settings(tmp_path).tokens_per_micro_batch == settings.tokens_per_micro_batch
        asked = parse(["--resume", str(tmp_path)])
        assert asked.tokens_per_micro_batch is None and asked.slots == 8
        chosen_at_first = chosen_at_first or chosen
    assert chosen != chosen_at_first
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    on_a_cpu = parse(["--resume", str(tmp_path)])
    assert on_a_cpu.tokens_per_micro_batch == settings.tokens_per_micro_batch


def test_a_run_that_cannot_fit_is_refused(models, monkeypatch):
    make_up_a_gpu(monkeypatch, 1e8, 1e8)
    shape = Shape(load_shapes(models["llama"]))
    with pytest.raises(ValueError, match="does not fit: cuda:0 has 0.1 GiB, and 1.* too many"):
        choose(parse(["--engine", "torch"]), shape, 100)


def test_what_other_programs_hold_of_a_gpu_is_not_there(models, monkeypatch):
    """The choice is made for the memory that is free; vLLM's share is of all."""
    shape = Shape(load_shapes(models["llama"]))
    chosen = []
    for free in (10e9, 1.12e9):
        make_up_a_gpu(monkeypatch, free, 10e9)
        settings, reason = choose(parse(["--engine", "torch", "--slots", "8"]), shape, 1024)
        assert f"for the {GiB(free)} GiB of cuda:0" in reason
        chosen.append(settings)
    assert chosen[0] != chosen[1]
    by_hand = parse("--slots 8 --tokens-per-micro-batch 2048 --generator-memory .3".split())
    monkeypatch.setattr(memory_module, "engine_of", lambda *_: "vllm")
    shares = []
    for free in (10e9, 9e9):
        make_up_a_gpu(monkeypatch, free, 10e9)
        shares.append(sum(Needs(by_hand, shape, 1024).generator.values()))
    assert shares[0] == shares[1] == pytest.approx(0.3 * 10e9 + memory_module.PROCESS)


def test_what_offload_puts_in_the_cpus_memory_must_fit_there(models, monkeypatch):
    make_up_a_gpu(monkeypatch, 80e9, 80e9)
    shape = Shape(load_shapes(models["llama"]))
    asked = parse(["--engine", "torch", "--offload"])
    choose(asked, shape, 100)
    monkeypatch.setattr(memory_module, "memory_of_this_cpu", lambda: 19 * shape.parameters)
    with pytest.raises(ValueError, match="does not fit: cpu has"):
        choose(asked, shape, 100)


# --- hours ----------------------------------------------------------------------------------------


def logged(name):
    """The lines of a real run's log, by kind."""
    by_kind = {"train": [], "validation": [], "warning": [], "end": []}
    for line in map(json.loads, open(ROOT / "docs" / "real_model" / f"{name}.jsonl")):
        by_kind[line["kind"]].append(line)
    return by_kind


@pytest.mark.parametrize("name", ["reversal-0", "reversal-1", "reversal-2"])
def test_after_ten_steps_a_run_knows_how_long_it_will_take(name):
    """Real runs of SmolLM2 on a CPU: within a factor of 1.5 of what came."""
    lines = logged(name)
    first, steps = lines["validation"][0], lines["train"]
    ended = lines["validation"][-1]["wall_seconds"]
    assert time_left(first, steps[8], 48) == ""
    for now in (steps[9], steps[23]):
        # In thousands of runs, so that rounding to tenths of hours does not count.
        made = now["step"] + 1000 * (48 - now["step"])
        left = float(time_left(first, now, made).removesuffix(" hours left"))
        came = (ended - now["wall_seconds"]) / 3600
        assert 1 / 1.5 < left / 1000 / came < 1.5
    assert "minutes left" in time_left(first, steps[9], 48)


def test_the_flops_of_a_step_are_those_of_real_runs(here):
    """By part, from the lengths of SmolLM2's completions and the groups that counted; prompts had
    about 60 tokens. Within a factor of 1.5 of compute_flops."""
    model = load_shapes("HuggingFaceTB/SmolLM2-135M")
    command = parse(["--data", "gym:word_sequence_reversal"])
    for name in ("reversal-0", "reversal-1", "reversal-2"):
        steps, planned = logged(name)["train"], 0
        for line in steps[1:]:
            flops = step_flops(command, model, 60, round(line["completion_length"]))
            sampled = flops["prompts"] + flops["sampling"]
            counted = line["groups_counted"] / command.groups_per_step
            planned += sampled + counted * (sum(flops.values()) - sampled)
        came = steps[-1]["compute_flops"] - steps[0]["compute_flops"]
        assert 1 / 1.5 < planned / came < 1.5


def test_the_plan_says_the_least_hours_on_a_kind_of_gpu(here, capsys):
    """The least time is below what one H100 took (docs/measured.md), and not by far."""
    flags = "--plan --data polaris --gpus 1 --gpu-memory 80 --gpu-kind H100 --steps 100"
    command = [*flags.split(), "--model", "Qwen/Qwen3-0.6B"]
    text = planned(command, capsys)
    for part in ("prompts", "sampling", "trunk", "head", "attention"):
        assert "s on H100" in row(text, part)
    assert "for 100 steps" in row(text, "hours") and "theirs, not ours: prime-rl" in text

    need, _ = chosen(here, "Qwen/Qwen3-0.6B", flags)
    model = load_shapes("Qwen/Qwen3-0.6B")
    flops = step_flops(need.settings, model, 1, 16_384)
    seconds = least_seconds(need.settings, need, Shape(model), flops, 16_384)
    trained = seconds["trunk"] + seconds["head"] + seconds["attention"]
    speed = 48 * 16 * 16_384 / trained
    assert 15_260 < speed < 4 * 15_260
    for kind in (["--gpu-kind", "RTX-4090"], []):
        slower = planned([*flags.split()[:-4], *kind, "--model", "Qwen/Qwen3-0.6B"], capsys)
        assert ("s on RTX-4090" in row(slower, "trunk")) == bool(kind)


def test_a_run_that_goes_on_says_how_long_it_will_take(here, capsys):
    run = here / "runs" / "mine"
    run.mkdir(parents=True)
    write_config(run, parse(["--steps", "60"]))
    lines = [{"kind": "validation", "step": 0, "wall_seconds": 100}]
    lines += [{"kind": "train", "step": s, "wall_seconds": 100 + 90 * s} for s in range(1, 21)]
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = planned(["--plan", "--resume", "runs/mine"], capsys)
    assert row(text, "this run").endswith("1.0 hours left, as measured up to step 20")


def test_the_table_of_the_docs_is_what_the_command_says(here, capsys):
    text = (ROOT / "docs" / "node.md").read_text()
    for line in table(here):
        assert line in text
    # What was traced stands there too.
    for line in of_cards(here, {}):
        before, _, after = line.partition(" |  | ")
        assert re.search(f"{re.escape(before)}.*{re.escape(after)}", text), line
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
