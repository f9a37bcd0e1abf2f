"""train.py: batches and gradients, prompts, settings, and whole short runs from the command line."""

import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from faults import RealRun

import generate
import loss as scalerl
import train
from data import arithmetic
from data.verify import Verdict
from generate import Report, Request, Rollout
from train import Group, PromptOrder, Settings

ROOT = Path(__file__).parent.parent
TINY = ["--prompts-per-step", "4", "--completions-per-prompt", "4", "--validation-problems", "6",
        "--validation-samples", "2", "--slots", "32", "--train-prompts", "40"]  # fmt: skip


def settings(**changes):
    return Settings(prompts_per_step=3, completions_per_prompt=4, **changes)


def rollout(group, index, prompt, tokens, sampled=None, truncated=False, version=0):
    tokens = np.array(tokens, np.int32)
    sampled = np.ones(len(tokens), bool) if sampled is None else np.array(sampled)
    noise = np.random.default_rng((group, index)).random(len(tokens)).astype(np.float32)
    logprobs = np.where(sampled, -noise - 0.1, 0.0).astype(np.float32)
    versions = np.full(len(tokens), version, np.int32)
    return Rollout(Request(group, index, prompt, 9, (0,)), tokens, sampled, logprobs, versions, False, truncated)


def batch_of_groups(seed=0, vocabulary=18):
    """Three groups of four ragged completions with forced and truncated ones among them."""
    rng = np.random.default_rng(seed)
    groups = []
    for number in range(3):
        group = Group(number, 0, number, 0, 0, [])
        prompt = rng.integers(vocabulary, size=rng.integers(2, 7)).tolist()
        for index in range(4):
            tokens = rng.integers(vocabulary, size=rng.integers(3, 15))
            sampled = np.ones(len(tokens), bool)
            if index == 1:
                sampled[1:3] = False
            truncated = (number, index) == (0, 3)
            group.rollouts[index] = rollout(number, index, prompt, tokens, sampled, truncated)
            group.verdicts[index] = Verdict(bool(rng.random() < 0.5) if index else number > 0, None)
        group.verdicts[2] = Verdict(not group.verdicts[0].correct, None)
        groups.append(group)
    return groups


def gradients(folder, groups, chosen):
    """The gradient of one train_step (before clipping) by parameter name, and the metrics."""
    model = generate.load_model(folder, torch.device("cpu"), torch.float32)
    train.compute_in(model, getattr(torch, train.trunk_dtype(chosen, "cpu")), chosen.gradient_checkpointing)
    caught = {}

    class Catch(torch.optim.SGD):
        def step(self):
            caught.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})

    chosen = dataclasses.replace(chosen, clip_gradient=float("inf"))
    metrics = train.train_step(train.Policy(model), Catch(model.parameters(), lr=0.0), groups, 0, chosen)
    return caught, metrics


# --- one step -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", ["sample", "prompt", "token"])
@pytest.mark.parametrize("name", ["cispo", "gspo"])
def test_pitfall_5_the_gradient_of_a_step_does_not_depend_on_the_micro_batches(models, aggregation, name):
    """Padded or packed, cut in any way, computed again in the backward or not."""
    recipe = dataclasses.replace(scalerl.Recipe(), aggregation=aggregation, loss=name)
    results = [
        gradients(models["qwen3"], batch_of_groups(), settings(recipe=recipe, tokens_per_micro_batch=tokens, **changes))
        for tokens in (10_000, 60, 1)
        for changes in ({}, {"pack": True}, {"gradient_checkpointing": True})
    ]
    for caught, metrics in results[1:]:
        assert metrics["loss"] == pytest.approx(results[0][1]["loss"], abs=1e-5)
        for name, gradient in results[0][0].items():
            torch.testing.assert_close(caught[name], gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["cispo", "dapo", "gspo"])
def test_a_step_matches_a_plain_reference_one_completion_at_a_time(models, name):
    """The loss, and its gradient, of the whole step from single unpadded sequences and sums over single tokens."""
    recipe, groups = dataclasses.replace(scalerl.Recipe(), loss=name), batch_of_groups()
    caught, metrics = gradients(models["llama"], groups, settings(recipe=recipe))
    model = generate.load_model(models["llama"], torch.device("cpu"), torch.float32)
    total, kept = 0.0, []
    for group in groups:
        pairs = [(group.verdicts[i].correct, group.rollouts[i]) for i in range(4)]
        members = [(1.0 if correct else -1.0, r) for correct, r in pairs if not r.truncated]
        mean = sum(reward for reward, _ in members) / len(members)
        if len({reward for reward, _ in members}) > 1:
            kept.append([(reward - mean, r) for reward, r in members])
    everything = [advantage for group in kept for advantage, _ in group]
    std = (sum(a * a for a in everything) / len(everything)) ** 0.5
    for group in kept:
        tokens = sum(int(r.sampled.sum()) for _, r in group)
        for advantage, r in group:
            prompt = len(r.request.prompt)
            ids = torch.tensor([r.request.prompt + r.tokens.tolist()])
            logprobs = torch.log_softmax(model(input_ids=ids).logits[0], -1)[prompt - 1 : -1]
            logprobs = logprobs.gather(-1, ids[0, prompt:, None])[:, 0][r.sampled]
            ratios = (logprobs - torch.tensor(r.logprobs[r.sampled])).exp()
            scaled = advantage / std
            if name == "cispo":
                terms = ratios.clamp(max=5).detach() * scaled * logprobs
            else:
                low, high = scalerl.CLIP[name]
                if name == "gspo":
                    ratios = ratios.log().mean().exp().expand(len(ratios))
                terms = torch.minimum(ratios * scaled, ratios.clamp(1 - low, 1 + high) * scaled)
            total = total - terms.sum() / tokens / len(kept)
    total.backward()
    assert metrics["loss"] == pytest.approx(total.item(), rel=1e-4)
    for parameter_name, parameter in model.named_parameters():
        torch.testing.assert_close(caught[parameter_name], parameter.grad, atol=1e-5, rtol=1e-3)


def micro_batches(rollouts, tokens, pack=False):
    return [batch for batch, _ in train.own_micro_batches(rollouts, tokens, torch.device("cpu"), pack)]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3-moe"])
@pytest.mark.parametrize("pack", [False, True])
def test_pitfall_11_sequences_of_a_micro_batch_have_the_logprobs_of_sequences_on_their_own(models, pack, kind):
    model = generate.load_model(models[kind], torch.device("cpu"), torch.float32)
    rollouts = [r for group in batch_of_groups() for r in group.rollouts.values()]
    (batch,) = micro_batches(rollouts, 10_000, pack)
    assert len(batch.inputs_RT) == (1 if pack else len(rollouts))
    together, _ = train.Policy(model)(batch, True)
    for row, which in enumerate(batch.rows_B.tolist()):
        (alone,) = micro_batches([rollouts[which]], 10_000)
        logprobs, _ = train.Policy(model)(alone, True)
        torch.testing.assert_close(together[row][batch.sampled_BT[row]], logprobs[alone.sampled_BT], atol=1e-5, rtol=0)
        # The negative control: the same sequence after two tokens of padding on the left is another one.
        shifted = torch.nn.functional.pad(alone.inputs_RT, (2, 0))
        with torch.no_grad():
            left = torch.log_softmax(model(input_ids=shifted).logits[:, 2:], -1)
        left = left.gather(-1, alone.targets_BT[..., None])[..., 0][alone.sampled_BT]
        assert (left - logprobs[alone.sampled_BT]).abs().max() > 1e-3
    if pack:  # and the other: positions that do not start anew let sequences see each other
        running = torch.arange(batch.inputs_RT.shape[1])[None]
        crossed, _ = train.Policy(model)(dataclasses.replace(batch, positions_RT=running), True)
        assert (crossed - together).abs().max() > 1e-2


@pytest.mark.parametrize("pack", [False, True])
def test_micro_batches_keep_to_their_budget(pack):
    rollouts = [rollout(0, i, [1, 2], list(range(3, 5 + i))) for i in range(9)]
    batches = micro_batches(rollouts, 30, pack)
    assert sorted(row for batch in batches for row in batch.rows_B.tolist()) == list(range(9))
    taken = [[len(rollouts[row].tokens) + 2 for row in batch.rows_B.tolist()] for batch in batches]
    size = lambda lengths: sum(lengths) if pack else len(lengths) * max(lengths)  # noqa: E731
    assert all(size(lengths) <= 30 for lengths in taken)
    assert all(size([*lengths, following[0]]) > 30 for lengths, following in zip(taken, taken[1:]))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("pack", [False, True])
def test_micro_batches_are_even_over_the_ranks(ranks, pack):
    """Within the limit, in no more rounds than it asks for, each rank with nearly the same to do."""
    lengths = np.random.default_rng(0).integers(30, 80, size=200).tolist()
    size = lambda rows: sum(lengths[row] for row in rows) if pack else len(rows) * lengths[rows[0]]  # noqa: E731
    for tokens in (1, 700, 4000, 10_000):
        batches = train.cut_evenly(lengths, tokens, pack, ranks)
        assert sorted(row for rows in batches for row in rows) == list(range(200))
        assert all(size(rows) <= tokens or len(rows) == 1 for rows in batches)
        rounds = [math.ceil(len(some) / ranks) for some in (train.cut(lengths, tokens, pack), batches)]
        assert rounds[0] == rounds[1]
        work = [sum(map(size, batches[rank::ranks])) for rank in range(ranks)]
        assert max(work) < 1.12 * min(work) or tokens == 1


def test_gradients_of_a_bf16_trunk_are_those_of_the_fp32_parameters(models):
    """They come back in fp32, close to those of fp32 arithmetic, and the same when layers are computed again."""
    exact, _ = gradients(models["llama"], batch_of_groups(), settings())
    plain, _ = gradients(models["llama"], batch_of_groups(), settings(dtype="bfloat16"))
    again, _ = gradients(models["llama"], batch_of_groups(), settings(dtype="bfloat16", gradient_checkpointing=True))
    for name, gradient in exact.items():
        assert plain[name].dtype == torch.float32
        torch.testing.assert_close(plain[name], again[name])
        assert 0 < (plain[name] - gradient).norm() < 0.2 * gradient.norm()


def test_pitfall_10_lengths_and_not_padding_ids_say_what_counts(models):
    """EOS with the id that also pads (0 here) keeps its place in the loss; padding gets none."""
    rollouts = [rollout(0, 0, [1, 2], [3, 4, 0]), rollout(0, 1, [1, 2], [3, 4, 5, 6, 7, 0])]
    (batch,) = micro_batches(rollouts, 100)
    assert batch.sampled_BT.sum(1).tolist() == [6, 3]
    assert batch.targets_BT[batch.sampled_BT].tolist() == [3, 4, 5, 6, 7, 0, 3, 4, 0]


def test_pitfall_9_the_trained_tokens_are_the_sampled_ids(models):
    rollouts = [r for group in batch_of_groups() for r in group.rollouts.values()]
    seen = {}
    for batch in micro_batches(rollouts, 40):
        for row, which in enumerate(batch.rows_B.tolist()):
            mask = batch.sampled_BT[row]
            seen[which] = (batch.targets_BT[row][mask].tolist(), batch.generator_logprobs_BT[row][mask].tolist())
            prompt = rollouts[which].request.prompt
            assert batch.inputs_RT[row][: len(prompt)].tolist() == prompt
    for which, r in enumerate(rollouts):
        assert seen[which] == (r.tokens[r.sampled].tolist(), r.logprobs[r.sampled].tolist())


@pytest.mark.parametrize("change", ["forced", "truncated", "without a verdict"])
def test_forced_tokens_truncated_samples_and_those_without_a_verdict_are_out_of_the_loss(models, change):
    """What the generator recorded there, and for the latter two the whole completion, changes nothing."""
    before, after = batch_of_groups(), batch_of_groups()
    if change == "without a verdict":
        for groups in (before, after):
            groups[2].verdicts[1] = Verdict(False, "time limit")
    for group in after:
        for i, r in group.rollouts.items():
            if change == "forced":
                logprobs = np.where(r.sampled, r.logprobs, -50).astype(np.float32)
                group.rollouts[i] = dataclasses.replace(r, logprobs=logprobs)
            elif r.truncated if change == "truncated" else group.verdicts[i].failure:
                group.rollouts[i] = dataclasses.replace(r, tokens=(r.tokens + 1) % 18, logprobs=r.logprobs - 3)
                group.verdicts[i] = dataclasses.replace(group.verdicts[i], correct=not group.verdicts[i].correct)
    a, b = (gradients(models["llama"], groups, settings()) for groups in (before, after))
    assert a[1]["loss"] == b[1]["loss"]
    for name, gradient in a[0].items():
        assert torch.equal(gradient, b[0][name])


def test_a_batch_without_any_variance_changes_nothing(models):
    groups = batch_of_groups()
    for group in groups:
        group.verdicts = {i: Verdict(True, None) for i in range(4)}
    caught, metrics = gradients(models["llama"], groups, settings())
    assert caught == {} and metrics["loss"] == 0 and metrics["zero_variance_fraction"] == 1
    assert metrics["entropy"] is None


@pytest.mark.parametrize("fp32_logits", [True, False])
def test_pitfall_3_generator_and_trainer_agree_with_fp32_logits_on_both_sides(models, fp32_logits):
    """On-policy mismatch of a bf16 trunk, through the same code on both sides; fp32 heads leave less of it."""
    recipe = dataclasses.replace(scalerl.Recipe(), fp32_logits=fp32_logits)
    chosen = settings(recipe=recipe, dtype="bfloat16")
    for kind in ("llama", "llama-grouped-tied"):
        tokenizer = generate.load_tokenizer(models[kind])
        rules = generate.make_decoding(tokenizer, recipe, 16, 30, 6)
        wanted = [Request(0, i, [1, 2, 3], 30, (0, i)) for i in range(16)]

        def mismatch(head_of_generator):
            model = generate.load_model(models[kind], torch.device("cpu"), torch.bfloat16, head_of_generator)
            engine = generate.TorchEngine(model, dataclasses.replace(rules, fp32_logits=head_of_generator), 16)
            trainer = generate.load_model(models[kind], torch.device("cpu"), torch.float32)
            train.compute_in(trainer, torch.bfloat16, gradient_checkpointing=False)
            return train.numerics_mismatch(train.Policy(trainer), generate.sample_all(engine, wanted), chosen)["mismatch_mean"]

        assert mismatch(fp32_logits) < mismatch(not fp32_logits)  # one-sided is worse, whichever side
        assert mismatch(fp32_logits) < 0.1


# --- prompts ------------------------------------------------------------------------------------------------------


def test_every_prompt_comes_once_an_epoch_in_a_new_order():
    order = PromptOrder(10, seed=0, no_positive_resampling=True)
    epochs = [[order.next() for _ in range(10)] for _ in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    again = PromptOrder(10, seed=0, no_positive_resampling=True)
    assert [again.next() for _ in range(10)] == epochs[0]


@pytest.mark.parametrize("resampling_off", [True, False])
def test_no_positive_resampling_removes_solved_prompts_for_good(resampling_off):
    order = PromptOrder(4, seed=0, no_positive_resampling=resampling_off)
    for _ in range(4):
        prompt = order.next()
        order.record(prompt, 15 / 16 if prompt in (1, 3) else 14 / 16)
    second = [order.next() for _ in range(4)]
    if not resampling_off:
        assert sorted(second) == [0, 1, 2, 3]
        return
    assert sorted(second[:2]) == sorted(second[2:]) == [0, 2]
    order.record(0, 0.9)
    order.record(2, 1.0)
    assert order.exhausted
    assert order.pass_rates == {1: 15 / 16, 3: 15 / 16, 0: 0.9, 2: 1.0}


# --- waiting ------------------------------------------------------------------------------------------------------


class Quiet:
    """A generator's process that lives, or has died, and its empty queue."""

    name, exitcode = "generator 0 on cpu", -9

    def __init__(self, alive, reports=()):
        self.alive, self.left = alive, list(reports)

    def is_alive(self):
        return self.alive

    def get_nowait(self):
        if self.left:
            return self.left.pop(0)
        raise train.queue.Empty


def test_pitfall_12_a_dead_or_silent_generator_is_seen():
    generator = lambda quiet: train.Generator(0, quiet, None, quiet, time.monotonic() - 10)  # noqa: E731
    assert train.take_reports(generator(Quiet(alive=True)), timeout=60) == []
    with pytest.raises(train.GeneratorFailed, match="--wait-timeout"):
        train.take_reports(generator(Quiet(alive=True)), timeout=1)
    with pytest.raises(train.GeneratorFailed, match="ended by signal 9"):
        train.take_reports(generator(Quiet(alive=False)), timeout=60)
    with pytest.raises(train.GeneratorFailed, match="failed:\nTraceback: it broke"):
        train.take_reports(generator(Quiet(False, [Report(0, error="Traceback: it broke")])), timeout=60)
    last_words = Quiet(False, [Report(0)])
    assert train.take_reports(generator(last_words), timeout=60) == [Report(0)]


# --- settings -----------------------------------------------------------------------------------------------------


def test_recipe_flags():
    assert train.parse_settings([]).recipe == scalerl.Recipe()
    assert train.parse_settings(["--recipe", "base"]).recipe == scalerl.RECIPES["base"]
    mixed = train.parse_settings(["--recipe=minimax", "--loss", "gspo", "--advantage-norm", "none"]).recipe
    assert mixed == dataclasses.replace(scalerl.RECIPES["minimax"], loss="gspo", advantage_norm="none")
    assert train.parse_settings(["--leave-out", "fp32_logits"]).recipe == scalerl.leave_one_out("fp32_logits")
    named = train.run_folder(train.parse_settings(["--loss", "gspo", "--no-fp32-logits", "--seed", "3"])).name
    assert named == "scalerl-loss-gspo-fp32_logits-False-seed3"
    assert train.run_folder(train.parse_settings(["--leave-out", "loss"])).name == "scalerl-without-loss-seed0"
    assert train.parse_settings(["--no-zero-variance-filter"]).recipe.zero_variance_filter is False
    assert train.parse_settings(["--recipe", "dapo", "--prompts-per-step", "48"]).prompts == 80
    with pytest.raises(ValueError, match="cannot go with --recipe base"):
        train.parse_settings(["--recipe", "base", "--leave-out", "loss"])


def test_the_defaults_are_the_toys_for_the_toy_and_the_papers_for_the_rest():
    """Section 9 of the recipe; single flags still change single settings."""
    toy, paper = train.parse_settings([]), train.parse_settings(["--data", "polaris:3", "deepcoder", "--steps", "7"])
    assert (toy.defaults, toy.learning_rate, toy.thinking_budget) == ("toy", 2e-4, (54, 58))
    assert (paper.defaults, paper.data, paper.steps) == ("paper", ("polaris:3", "deepcoder"), 7)
    assert (paper.learning_rate, paper.warmup_steps, paper.adam_eps, paper.weight_decay) == (5e-7, 100, 1e-15, 0.01)
    assert (paper.prompts_per_step, paper.completions_per_prompt, paper.validation_problems) == (48, 16, 1000)
    assert (paper.prompt_budget, paper.thinking_budget[1], paper.answer_budget) == (2048, 12_288, 2048)
    assert train.parse_settings(["--data", "arithmetic", "--defaults", "paper"]).learning_rate == 5e-7
    assert train.parse_settings(["--data", "gsm8k", "--defaults", "toy"]).learning_rate == 2e-4


@pytest.mark.parametrize(
    "flags, named",
    [
        (["--learning-rte", "1"], "--learning-rate"),  # pitfall 18: by name, with the nearest valid one
        (["--agregation", "token"], "--aggregation"),
        (["--loss", "ppo"], "cispo"),
        (["--recipe", "scalrl"], "scalerl"),
        (["--leave-out", "kl"], "advantage_norm"),
    ],
)
def test_pitfall_18_unknown_flags_and_values_are_refused_with_the_valid_ones(flags, named, capsys):
    with pytest.raises(SystemExit) as stopped:
        train.parse_settings(flags)
    assert stopped.value.code == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--model", "no/such/model"], "--model no/such/model: there is no such folder"),
        (["--model", "data"], "--model data: the folder holds no model"),
        (["--data", "algebra"], "--data algebra: there is no such file or folder"),
        (["--prompt-budget", "5"], "--prompt-budget is 5"),
        (["--thinking-budget", "300", "400"], "the model holds 256"),
        (["--thinking-budget", "9", "8"], "0 <= LOW <= HIGH"),
        (["--generator-devices", "cuda:9"], "no device 'cuda:9'"),
        (["--trainer-devices", "gpu"], "--trainer-devices: 'gpu' is no device; devices are cpu, cpu:2"),
        (["--generator-devices", "cuda:3-1"], "--generator-devices: 'cuda:3-1' is a range that goes backwards"),
        (["--generator-memory", ".5"], "--generator-memory goes with --slots 0, not with --slots 512"),
        (["--tensor-parallel", "2"], "--tensor-parallel 2 wants as many --generator-devices for each generator"),
        (["--asynchrony", "sync"], "pipeline-K"),
        (["--completions-per-prompt", "1"], "--completions-per-prompt is 1; it must be at least 2"),
        (["--train-prompts", "10"], "a step takes 32 prompts"),
        (["--name", "taken"], "holds another run"),
        (["--learning-rate", "-1"], "--learning-rate is -1.0; it must be above 0"),
        (["--model", "data/nope"], "--model data/nope: there is no such folder"),
    ],
)
def test_bad_input_is_one_sentence_before_any_process_starts(flags, message, capsys, tmp_path, monkeypatch):
    taken = tmp_path / "runs" / "taken"
    taken.mkdir(parents=True)
    (taken / "log.jsonl").write_text("mine\n")
    (tmp_path / "data").symlink_to(ROOT / "data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "start_generator", lambda *_: pytest.fail("a process was started"))
    assert train.main(flags) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1
    assert (taken / "log.jsonl").read_text() == "mine\n"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["taken"]


# --- whole runs ---------------------------------------------------------------------------------------------------


def run(folder, *flags, expect=0, name="run"):
    """python train.py in a folder of its own; returns the run's folder and what was printed."""
    if not (folder / "data").exists():
        (folder / "data").symlink_to(ROOT / "data")
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "--name", name, *TINY, *flags],
        cwd=folder, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == expect, done.stderr[-3000:]
    return folder / "runs" / name, done.stdout


def lines(folder, kind):
    return [line for line in map(json.loads, open(folder / "log.jsonl")) if line["kind"] == kind]


def test_a_whole_short_run(tmp_path):
    """With an update after every step, two generators, and everything that a run leaves behind."""
    folder, printed = run(
        tmp_path, "--steps", "10", "--validation-every", "1", "--generator-devices", "cpu", "cpu", "--asynchrony",
        "pipeline-2",
    )  # fmt: skip
    steps, validations = lines(folder, "train"), lines(folder, "validation")
    assert [line["step"] for line in steps] == list(range(1, 11))
    assert [line["step"] for line in validations] == list(range(11))
    for line in validations:
        assert line["num_examples"] == 12 and 0 <= line["pass_rate"] <= 1
        assert line["mismatch_max"] < 1e-4  # fp32 on both sides
    for earlier, later in zip(steps, steps[1:]):
        for key in ("compute_device_hours", "compute_tokens", "compute_flops", "wall_seconds"):
            assert later[key] > earlier[key]
    assert max(line["off_policyness_max"] for line in steps) <= 2
    assert max(line["off_policyness_mean"] for line in steps) > 0
    assert all(line["clipped_fraction"] is None or 0 <= line["clipped_fraction"] <= 1 for line in steps)
    readme = (ROOT / "README.md").read_text()
    assert all(f"`{key}`" in readme for line in (steps[-1], validations[-1]) for key in line), "README: log.jsonl"
    config = json.loads((folder / "config.json").read_text())
    assert config["recipe"]["asynchrony"] == "pipeline-2" and config["versions"]["torch"] == torch.__version__
    samples = (folder / "samples.txt").read_text()
    assert "step    0" in samples and "step   10" in samples and ("right" in samples or "wrong" in samples)
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    for text in ("pass rate", "curve ", "forecast", "files"):
        assert text in printed
    trained = generate.load_model(str(folder / "model"), torch.device("cpu"), torch.float32)
    base = generate.load_model(str(ROOT / arithmetic.BASE_MODEL), torch.device("cpu"), torch.float32)
    assert any(not torch.equal(a, b) for a, b in zip(trained.parameters(), base.parameters()))
    assert not list(folder.glob("*.partial"))
    run(tmp_path, "--steps", "1", expect=2)  # the folder holds a run now
    assert len(lines(folder, "train")) == 10


def test_synchronous_training_reproduces_its_losses_with_the_same_seed(tmp_path):
    """PPO-off-policy-1, PipelineRL-0 and itself again: the same batches, so the same losses to the last digit."""
    chosen = {"a": ("ppo-1", "0"), "b": ("ppo-1", "0"), "k0": ("pipeline-0", "0"), "c": ("ppo-1", "1")}
    runs = [
        RealRun(tmp_path, "--steps", "4", "--validation-every", "2", "--asynchrony", asynchrony, "--seed", seed, name=name)
        for name, (asynchrony, seed) in chosen.items()
    ]
    columns = []
    for one in runs:
        assert one.end() == 0, one.text()[-3000:]
        steps = lines(one.folder, "train")
        assert all(line["off_policyness_max"] == 0 for line in steps)
        columns.append([(line["loss"], line["gradient_norm"], line["pass_rate"], line["ratio_max"]) for line in steps])
        assert all(abs(ratio - 1) < 1e-3 for *_, ratio in columns[-1] if ratio)
    assert columns[0] == columns[1] == columns[2] != columns[3]


def test_ppo_off_policy_k_trains_k_steps_on_what_one_policy_sampled(tmp_path):
    folder, _ = run(tmp_path, "--steps", "6", "--validation-every", "2", "--asynchrony", "ppo-3")
    ages = [(line["off_policyness_mean"], line["off_policyness_max"]) for line in lines(folder, "train")]
    assert ages == [(0, 0), (1, 1), (2, 2), (0, 0), (1, 1), (2, 2)]


def test_other_recipes_run(tmp_path):
    chosen = {"penalty": ["--length-control", "penalty", "--slots", "0"], "base": ["--recipe", "base", "--asynchrony", "ppo-1"]}
    runs = [RealRun(tmp_path, "--steps", "2", *flags, name=name) for name, flags in chosen.items()]
    for one in runs:
        assert one.end() == 0, one.text()[-3000:]
        assert len(lines(one.folder, "train")) == 2
    assert all(line["interrupted_fraction"] == 0 for line in lines(runs[0].folder, "train"))
    said = "devices: generators cpu with 512 slots; trainer cpu (one does both)"
    assert said in runs[0].text() and said.replace("512", "32") in runs[1].text()


def test_training_ends_with_a_message_when_every_prompt_is_retired(tmp_path):
    """Short sums only, at a budget that solves them: a prompt pool so small that it is used up."""
    (tmp_path / "data").mkdir()
    for name in ("__init__.py", "verify.py", "evaluation.py"):
        (tmp_path / "data" / name).write_text((ROOT / "data" / name).read_text())
    (tmp_path / "data" / "always.py").write_text(
        "from data import Problem\n"
        "def problems(split, number, seed=0):\n    return [Problem(f'{i}+{len(split)}=', '', __name__) for i in range(number)]\n"
        "def score(problem, completion):\n    return True\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = ['.', {str(ROOT)!r}]; import train\n"
         "if __name__ == '__main__': sys.exit(train.main(sys.argv[1:]))",
         *TINY, "--train-prompts", "8", "--data", "always", "--defaults", "toy", "--model", str(ROOT / arithmetic.BASE_MODEL),
         "--steps", "20", "--name", "run"],
        cwd=tmp_path, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Every prompt has been retired" in done.stdout + done.stderr
    assert 2 <= len(lines(tmp_path / "runs" / "run", "train")) < 20


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-moe"])
def test_a_chat_model_trains_on_mathematics_and_programs_together(tmp_path, chat_models, kind):
    """From files of one's own, in proportion to their weights, each with its own held-out curve. (The models are random
    and never right, so all groups are of zero variance; that verdicts count is for other tests.)"""
    problems = [{"question": f"What is {i} times {i + 3}?", "answer": str(i * (i + 3))} for i in range(40)]
    tests = [{"input": "3\n", "output": "6\n", "type": "stdin_stdout"}]
    programs = [{"problem": f"Double a number, {i} times.", "tests": json.dumps(tests)} for i in range(20)]
    for name, records in (("sums.jsonl", problems), ("programs.jsonl", programs)):
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    folder, _ = run(
        tmp_path, "--model", chat_models[kind], "--data", "sums.jsonl:3", "programs.jsonl:1", "--defaults", "toy",
        "--prompt-budget", "300", "--thinking-budget", "10", "12", "--answer-budget", "8", "--steps", "3",
        "--train-prompts", "30", "--asynchrony", "ppo-1", "--dtype", "bfloat16", "--gradient-checkpointing", "--pack",
    )  # fmt: skip
    validations = lines(folder, "validation")
    assert [line["step"] for line in validations] == [0, 3]
    for line in validations:
        assert line["num_examples"] == (4 + 2) * 2  # a tenth of each file is held out
        assert line["pass_rate/sums.jsonl"] == line["pass_rate/programs.jsonl"] == line["pass_rate"] == 0
        assert line["verifier_failures"] == 0 and line["mismatch_mean"] < 0.05
    state = json.loads((train.newest_checkpoint(folder) / "state.json").read_text())
    assert state["handed_out"] == [9, 3]
    generate.load_model(str(folder / "model"), torch.device("cpu"), torch.float32)


def test_a_template_that_drops_the_prompt_is_refused(tmp_path, chat_models, capsys, monkeypatch):
    shutil.copytree(chat_models["qwen3"], tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n<think>\n")
    monkeypatch.chdir(tmp_path)
    assert train.main(["--model", "model", "--prompt-budget", "64"]) == 2
    error = capsys.readouterr().err
    assert "its chat template drops the prompt" in error and error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_flops_count_the_parameters_that_a_token_meets(models):
    """Of four experts a token is sent to two."""
    model = generate.load_model(models["qwen3-moe"], torch.device("cpu"), torch.float32)
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    everything = sum(parameter.numel() for parameter in model.parameters())
    assert experts > 0
    table = model.get_input_embeddings().weight.numel()
    assert train.matmul_parameters(model) == everything - table - experts // 2
    tied = generate.load_model(models["llama-grouped-tied"], torch.device("cpu"), torch.float32)
    assert train.matmul_parameters(tied) == sum(parameter.numel() for parameter in tied.parameters())


def test_truncation_above_a_tenth_is_said_once(tmp_path):
    """An answer budget of one token truncates every answer of two digits or more; the run goes on."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *TINY, "--steps", "3", "--answer-budget", "1", "--model",
         str(ROOT / arithmetic.BASE_MODEL)],
        cwd=tmp_path, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert (done.stdout + done.stderr).count("reached their token limit without ending") == 1
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name == "scalerl-seed0"  # the default name
    assert all(line["truncated_fraction"] > 0.1 for line in lines(folder, "train"))


def test_ctrl_c_before_the_first_step_leaves_the_name_free(tmp_path):
    (tmp_path / "data").symlink_to(ROOT / "data")
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), "--name", "run", *TINY], cwd=tmp_path, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (tmp_path / "runs" / "run").exists():  # made when all is checked, before the generators start
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in error
    assert not (tmp_path / "runs" / "run").exists()
