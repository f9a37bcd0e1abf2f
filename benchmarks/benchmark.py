"""Measurements that are too slow for the tests, each against its alternative in the same run on the same cores.

    python tests/benchmark.py                      # the default task: asynchrony, engine, idle time, against TRL
    python tests/benchmark.py --seeds 0 1 2        # the same over several seeds (a quarter of an hour each)
    python tests/benchmark.py commands             # what a user waits for: --help, a fit, the default run; its memory
    python tests/benchmark.py step                 # what a step's arithmetic spends its time on, and what is the limit
    python tests/benchmark.py engines              # both engines, transformers' generate, vLLM while training
    python tests/benchmark.py fit                  # coverage of the intervals of fit_curve.py, sensitivity, speed
    python tests/benchmark.py fit --draws 50       # the same, quicker and rougher
    python tests/benchmark.py scaling              # ranks, generators, parameters, idle time, memory of both sides
    python tests/benchmark.py scaling --only plan  # the table of docs/node.md: what fits on 80 GB
    python tests/benchmark.py scaling --only python  # what Python does for each token of a step
    python tests/benchmark.py memory               # what fp32 logits of a large vocabulary take
    python tests/benchmark.py faults               # what is done to real runs, and what it costs them

The comparison with TRL needs `pip install trl`, for this benchmark only; without it that part says so.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from curve import least_squares  # noqa: E402
from curve.comparison import compare  # noqa: E402
from curve.fit import LEAST_GAIN_MADE, MOST_SCATTER, allowed_excess, fit_sigmoid, power_law, sigmoid  # noqa: E402
from curve.forecast import held_out  # noqa: E402
from curve.least_squares import fit_power_law  # noqa: E402
from data.verify import children  # noqa: E402
from machinery.make_base import BASE_MODEL  # noqa: E402

# --- the default task ---------------------------------------------------------------------------------------------


def train(folder: Path, name: str, *flags: str) -> list[dict]:
    """Run train.py in a folder, return the lines of its log."""
    command = [sys.executable, str(ROOT / "train.py"), "--name", name, *flags]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return [json.loads(line) for line in open(folder / "runs" / name / "log.jsonl")]


def seconds_of_training(line: dict, devices: int = 2) -> float:
    """Wall seconds of training, start-up and validation left out."""
    return 3600 * line["compute_device_hours"] / devices


def seconds_to(log: list[dict], pass_rate: float) -> float:
    """Seconds of training to a pass rate: between two validations, in proportion. inf if it was not reached."""
    validations = [line for line in log if line["kind"] == "validation"]
    for before, after in zip(validations, validations[1:]):
        if after["pass_rate"] >= pass_rate:
            start, end = seconds_of_training(before), seconds_of_training(after)
            part = (pass_rate - before["pass_rate"]) / (after["pass_rate"] - before["pass_rate"])
            return start + part * (end - start)
    return float("inf")


def asynchrony(seeds: list[int], target: float, folder: Path) -> list[list[dict]]:
    """(a) time to a pass rate and (c) idle fractions; returns the logs of the PipelineRL runs."""
    print(f"\n(a) seconds of training to a pass rate of {target:.2f}, and (c) idle fractions until then\n")
    print("seed  asynchrony    seconds   ratio   trainer idle   generator idle   off-policyness mean, max")
    logs, found = [], {}
    for seed in seeds:
        for kind in ("pipeline-8", "ppo-8", "ppo-1"):
            log = train(folder, f"{kind}-{seed}", "--asynchrony", kind, "--seed", str(seed), "--steps", "100",
                        "--validation-every", "8")  # fmt: skip
            seconds = seconds_to(log, target)
            if kind == "pipeline-8":
                logs.append(log)
                pipeline = seconds
            steps = [line for line in log if line["kind"] == "train" and seconds_of_training(line) <= seconds]
            durations = np.diff([0.0] + [seconds_of_training(line) for line in steps])
            idle = lambda side: np.average([line[f"{side}_idle_fraction"] for line in steps], weights=durations)
            age = np.mean([line["off_policyness_mean"] for line in steps])
            figures = [seconds, seconds / pipeline, idle("trainer"), idle("generator")]
            found.setdefault(kind, []).append(figures)
            print(f"{seed:4}  {kind:12} {figures[0]:8.1f} {figures[1]:7.2f} {figures[2]:14.2f} {figures[3]:16.2f}"
                  f" {age:17.1f}, {max(line['off_policyness_max'] for line in steps)}", flush=True)  # fmt: skip
    for kind, rows in found.items():
        seconds, ratio, trainer, generator = np.median(rows, axis=0)
        print(f"median {kind:11} {seconds:8.1f} {ratio:7.2f} {trainer:14.2f} {generator:16.2f}", flush=True)
    return logs


class Size(NamedTuple):
    """The shape of a random model in the manner of Llama, head size 64."""

    hidden: int
    mlp: int  # width
    layers: int
    vocabulary: int


SIZES = {
    "25.7M": Size(512, 1408, 8, 30),
    "134M": Size(768, 2048, 12, 32_000),
    "374M": Size(1024, 2816, 24, 32_000),
}


def random_model(folder: str, size: Size) -> None:
    """Save a Llama with weights that mean nothing, and the default task's tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from machinery.make_base import make_tokenizer

    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=size.vocabulary, hidden_size=size.hidden, intermediate_size=size.mlp, num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 64, max_position_embeddings=4096, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def sixteen_of_each(tokenizer, prompts: int) -> list:
    """Requests for 16 completions of each of the first prompts of the default task."""
    from data.tasks import arithmetic
    from machinery.model import render
    from machinery.rollouts import Request

    ids = [render(tokenizer, problem.prompt) for problem in arithmetic.problems("train", prompts)]
    return [Request(i, j, prompt, 58, (i, j)) for i, prompt in enumerate(ids) for j in range(16)]


def samplers(folder: str, prompts: int, slots: int, vllm: bool) -> dict:
    """Ways to sample 16 completions of each prompt with the model in the folder, by name: the same prompts, budgets and
    slots, on one thread. Each is a function that returns how many tokens it has sampled."""
    import torch

    from data.tasks import arithmetic
    from generate import TorchEngine, make_engine
    from machinery.engine import EngineSettings, sample_all
    from machinery.model import load_model, load_tokenizer, make_decoding
    from machinery.rollouts import SharedParameters
    from machinery.settings import Settings

    torch.set_num_threads(1)
    tokenizer = load_tokenizer(folder)
    tokenizer.padding_side = "left"
    model = load_model(folder, torch.device("cpu"), torch.float32)
    reference = type(model).from_pretrained(folder)  # with the attention that transformers chooses
    decoding = make_decoding(tokenizer, Settings())
    requests = sixteen_of_each(tokenizer, prompts)
    texts = [problem.prompt + "<think>" for problem in arithmetic.problems("train", prompts) for _ in range(16)]

    def torch_engine() -> int:
        rollouts = sample_all(TorchEngine(model, decoding, slots), requests)
        return sum(int(rollout.sampled.sum()) for rollout in rollouts)

    def transformers_generate() -> int:
        tokens = 0
        for start in range(0, len(texts), slots):
            inputs = tokenizer(texts[start : start + slots], return_tensors="pt", padding=True)
            with torch.no_grad():
                out = reference.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=58 + 9)
            completions = out[:, inputs["input_ids"].shape[1] :]
            tokens += int((completions != tokenizer.pad_token_id).sum())
        return tokens

    if not vllm:
        return {"torch engine": torch_engine, "transformers generate": transformers_generate}
    made = make_engine(EngineSettings(folder, ("cpu",), "float32", 1, slots, decoding, "vllm"))
    parameters = SharedParameters(model)
    parameters.write(model.named_parameters(), 0)
    made.update(parameters)

    def vllm_engine() -> int:
        return sum(int(rollout.sampled.sum()) for rollout in sample_all(made, requests))

    def vllm_bare() -> int:
        """No interruption and no look at what a step returns; as many at once as there are slots."""
        from vllm import SamplingParams

        waiting, tokens, running = list(range(len(requests))), 0, 0
        while waiting or running:
            while waiting and running < slots:
                row = waiting.pop()
                prompt = {"prompt_token_ids": requests[row].prompt, "cache_salt": "bare"}
                sampling = SamplingParams(
                    seed=row, logprobs=0, max_tokens=58 + 9, stop_token_ids=list(decoding.eos), detokenize=False
                )
                made.engine.add_request(f"bare {row}", prompt, sampling)
                running += 1
            outputs = made.engine.step()
            tokens += len(outputs)
            running -= sum(output.finished for output in outputs)
        return tokens

    return {
        "torch engine": torch_engine,
        "vLLM engine": vllm_engine,
        "vLLM bare": vllm_bare,
        "transformers generate": transformers_generate,
    }


def rates(ways: dict, rounds: int) -> dict[str, float]:
    """Sampled tokens a second of each way: the median of as many rounds, in which they take turns."""
    measured = {name: [] for name in ways}
    for _ in range(rounds):
        for name, sample in ways.items():
            start = time.perf_counter()
            tokens = sample()
            measured[name].append(tokens / (time.perf_counter() - start))
    return {name: float(np.median(values)) for name, values in measured.items()}


def engine(rounds: int = 4) -> None:
    """(b) the engine against transformers' generate."""
    medians = rates(samplers(str(BASE_MODEL), 128, 512, vllm=False), rounds)
    print(f"\n(b) sampled tokens/s, one thread, {128 * 16} completions, 512 at once, median of {rounds} rounds\n")
    print(f"engine of generate.py (with log-probabilities) {medians['torch engine']:10,.0f}")
    print(f"transformers generate (tokens only)            {medians['transformers generate']:10,.0f}")
    print(f"ratio {medians['torch engine'] / medians['transformers generate']:51.2f}", flush=True)


def benchmark_engines(options: argparse.Namespace) -> None:
    """Both engines and transformers' generate on two sizes of model, and vLLM while training: a trainer on the other
    core, parameters taken over after each of its steps, at a learning rate of nothing so that the work stays the same.
    The large model is random: its groups are all filtered out, and its trainer only hands over parameters."""
    from transformers import LlamaForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        random_model("random", SIZES["25.7M"])
        print(f"\nsampled tokens/s, fp32, one thread, median of {options.rounds} rounds; at the end while training\n")
        print("parameters   torch engine   vLLM engine   vLLM bare   transformers generate   vLLM while training")
        sizes = {
            str(BASE_MODEL): (128, 512, ["--prompts-per-step", "32", "--steps", "40"]),
            "random": (16, 64, ["--prompts-per-step", "4", "--steps", "24"]),
        }
        for model, (prompts, slots, flags) in sizes.items():
            log = train(Path(folder), f"size-{slots}", "--model", model, "--engine", "vllm", "--threads", "1",
                        "--slots", str(slots), "--learning-rate", "1e-12", "--validation-problems", "4",
                        *flags)  # fmt: skip
            steps = [line for line in log if line["kind"] == "train"]
            seconds = np.diff([seconds_of_training(line) for line in steps])[4:]  # the first steps fill the slots
            busy = seconds * [1 - line["generator_idle_fraction"] for line in steps[5:]]
            training = np.average([line["generator_tokens_per_second"] or 0.0 for line in steps[5:]], weights=busy)
            ways = samplers(model, prompts, slots, vllm=True)
            medians = rates(ways, options.rounds)
            bare = medians["vLLM bare"]
            size = sum(p.numel() for p in LlamaForCausalLM.from_pretrained(model).parameters())
            print(f"{size / 1e6:9.2f}M {medians['torch engine']:14,.0f} {medians['vLLM engine']:13,.0f} {bare:11,.0f}"
                  f" {medians['transformers generate']:23,.0f} {training:9,.0f} ({training / bare:.0%} of bare)",
                  flush=True)  # fmt: skip


def against_trl(seeds: list[int], logs: list[list[dict]], lengths: list[int], folder: Path) -> None:
    """(d) end-to-end training against TRL's GRPOTrainer: same model, prompts, completions and cores; over the first
    steps, as many as each of `lengths` says."""
    try:
        import datasets
        import trl
    except ImportError as error:
        print(f"\n(d) left out: {error}; `pip install trl` brings it")
        return
    import torch

    from data.tasks import arithmetic

    torch.set_num_threads(2)
    problems = arithmetic.problems("train", 4000)
    answers = {problem.prompt + "<think>": problem for problem in problems}
    calls = []  # of the run at hand: (time, sampled tokens so far)

    def reward(prompts, completions, completion_ids, **_):
        tokens = sum(len(ids) for ids in completion_ids)
        calls.append((time.perf_counter(), tokens + (calls[-1][1] if calls else 0)))
        return [1.0 if arithmetic.score(answers[p], c) else -1.0 for p, c in zip(prompts, completions)]

    print("\n(d) sampled tokens/s of training end to end, two cores, steps of 32 x 16 completions\n")
    print(f"seed   steps   train.py (PipelineRL-8)   TRL {trl.__version__} GRPOTrainer   ratio")
    ratios = {steps: [] for steps in lengths}
    for seed, log in zip(seeds, logs):
        calls.clear()
        config = trl.GRPOConfig(
            output_dir=str(folder / "trl"), per_device_train_batch_size=128, gradient_accumulation_steps=4, seed=seed,
            num_generations=16, max_completion_length=58 + 9, max_steps=max(lengths), learning_rate=2e-4, beta=0.0,
            loss_type="cispo", epsilon_high=5.0, temperature=1.0, use_cpu=True, bf16=False,
            gradient_checkpointing=False, report_to=[], save_strategy="no", disable_tqdm=True, logging_steps=1000,
            shuffle_dataset=True,
        )  # fmt: skip
        trainer = trl.GRPOTrainer(
            model=str(BASE_MODEL), reward_funcs=reward, args=config,
            train_dataset=datasets.Dataset.from_list([{"prompt": prompt} for prompt in answers]),
        )  # fmt: skip
        trainer.train()
        lines = [line for line in log if line["kind"] == "train"]
        for steps in lengths:
            (start, first), (end, last) = calls[0], calls[steps - 1]
            ours = lines[steps - 1]["compute_tokens"] / seconds_of_training(lines[steps - 1])
            theirs = (last - first) / (end - start)
            ratios[steps].append(ours / theirs)
            print(f"{seed:4} {steps:7} {ours:25,.0f} {theirs:24,.0f} {ours / theirs:7.2f}", flush=True)
    for steps, of_seeds in ratios.items():
        print(f"median {steps:5} {np.median(of_seeds):58.2f}", flush=True)


def benchmark_training(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        logs = asynchrony(options.seeds, options.target, Path(folder))
        engine()
        against_trl(options.seeds, logs, options.trl_steps, Path(folder))


# --- what a user waits for ----------------------------------------------------------------------------------------


def benchmark_commands(options: argparse.Namespace) -> None:
    """Seconds of commands beside those of their bare imports, and the default run: how long, and its memory."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        began, peaks = time.perf_counter(), {}
        run = subprocess.Popen([sys.executable, str(ROOT / "train.py"), "--name", "default"], stdout=subprocess.DEVNULL)
        while run.poll() is None:
            for process in [run.pid, *children(run.pid)]:
                peaks[process] = max(peaks.get(process, 0.0), memory_of(process))
            time.sleep(1)
        print(f"\npython train.py: {time.perf_counter() - began:.0f} s; GiB that its processes had at their peaks:")
        print(", ".join(f"{peak:.2f}" for peak in sorted(peaks.values(), reverse=True)), flush=True)
        fitted = [str(ROOT / "fit_curve.py"), "runs/default/log.jsonl"]
        pairs = {  # a command, and its bare imports
            "train.py --help": ([str(ROOT / "train.py"), "--help"], "torch"),
            "fit_curve.py LOG": (fitted, "numpy, scipy.special"),
            "fit_curve.py LOG --plot": ([*fitted, "--plot", "x.png"], "numpy, scipy.special, matplotlib.pyplot"),
        }
        print(f"\nseconds, median of {options.rounds} rounds\n\ncommand                   seconds   of its imports")
        for name, (command, imports) in pairs.items():
            taken = []
            for _ in range(options.rounds):
                for arguments in (command, ["-c", f"import {imports}"]):
                    began = time.perf_counter()
                    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
                    taken.append(time.perf_counter() - began)
            whole, bare = np.median(taken[::2]), np.median(taken[1::2])
            print(f"{name:25} {whole:7.2f} {bare:8.2f} ({imports}): {whole / bare:.2f} x", flush=True)


def memory_of(process: int) -> float:
    """GiB at the peak of a process."""
    try:
        return int(open(f"/proc/{process}/status").read().partition("VmHWM:")[2].split()[0]) / 2**20
    except (OSError, IndexError):  # it has ended
        return 0.0


# --- the arithmetic of a step -------------------------------------------------------------------------------------


def benchmark_step(options: argparse.Namespace) -> None:
    """What forward and backward of the first batch of the default task spend their time on, alone on one thread, and
    how long the machine takes for the same products with weights without anything else."""
    import torch

    import loss
    from generate import TorchEngine
    from machinery.compute import matmul_parameters
    from machinery.engine import sample_all
    from machinery.model import load_model, load_tokenizer, make_decoding
    from machinery.policy import micro_batches
    from machinery.settings import Settings
    from machinery.trainer import make_policy

    torch.set_num_threads(1)
    settings, recipe, device = Settings(), loss.Recipe(), torch.device("cpu")
    model, tokenizer = load_model(str(BASE_MODEL), device, torch.float32), load_tokenizer(str(BASE_MODEL))
    engine = TorchEngine(model, make_decoding(tokenizer, settings), settings.slots)
    rollouts = sample_all(engine, sixteen_of_each(tokenizer, settings.prompts_per_step))
    policy, ones = make_policy(settings, model, device), torch.ones(len(rollouts))

    def step() -> None:
        for m in micro_batches(rollouts, list(range(len(rollouts))), settings.tokens_per_micro_batch, device):
            logprobs_BT, _ = policy(m, recipe.fp32_logits)
            advantages_B = weights_B = ones[m.rows_B]  # any: the arithmetic is the same
            value, _ = loss.policy_loss(
                recipe, logprobs_BT, m.generator_logprobs_BT, m.sampled_BT, advantages_B, weights_B
            )
            value.backward()

    def seconds(work: Callable) -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    tokens, inner, outer = (
        sum(rollout.length for rollout in rollouts),
        model.config.hidden_size,
        model.config.intermediate_size,
    )
    flops = 6 * tokens * matmul_parameters(model)
    left, right = torch.randn(settings.tokens_per_micro_batch, inner), torch.randn(inner, outer)
    product = left @ right

    def products() -> None:
        for _ in range(flops // (2 * left.numel() * outer)):  # as many FLOPs
            torch.mm(left, right, out=product)

    step()
    took, bare = zip(*[(seconds(step), seconds(products)) for _ in range(5)])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    spent, kinds = {}, {"aten::mm": "products with weights", "aten::bmm": "products of attention"}
    for event in profile.key_averages():
        kind = kinds.get(event.key, "all else: elementwise, copies, softmax, calls")
        spent[kind] = spent.get(kind, 0.0) + event.self_cpu_time_total
    print(f"\nforward and backward of {len(rollouts)} completions, {tokens:,} tokens: {np.median(took):.2f} s")
    print(f"the same products with weights alone, {flops / 1e9:.1f} GFLOPs: {np.median(bare):.2f} s\n")
    for kind, microseconds in sorted(spent.items(), key=lambda item: -item[1]):
        print(f"{kind:46} {microseconds / sum(spent.values()):5.2f} of the time")


# --- memory of the logits -----------------------------------------------------------------------------------------

LOGITS = """
import resource, sys, torch
import loss
how, vocabulary, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
hidden = torch.randn(tokens, 1024, requires_grad=True)
head = torch.randn(vocabulary, 1024, requires_grad=True)
targets = torch.randint(vocabulary, (tokens,))
head.grad, hidden.grad = torch.zeros_like(head), torch.zeros_like(hidden)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
chunk = {"chunked": 2048, "at once": tokens}[how]
logprobs, _ = loss.sampled_logprobs(hidden, head, targets, fp32=True, chunk=chunk)
logprobs.sum().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20)
"""


def benchmark_memory(options: argparse.Namespace) -> None:
    """Peak memory that fp32 logits of a 150,000-token vocabulary add, forward and backward, in a process of its own."""
    print("\nGiB added by the fp32 logits of a vocabulary of 150,000 (hidden size 1,024), forward and backward\n")
    print("tokens   chunks of 2048   at once   logits alone, once")
    for tokens in (2048, 4096, 8192):
        peaks = []
        for how in ("chunked", "at once"):
            command = [sys.executable, "-c", LOGITS, how, "150000", str(tokens)]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            peaks.append(f"{float(done.stdout):.2f}" if done.returncode == 0 else "out of memory")
        print(f"{tokens:6} {peaks[0]:>16} {peaks[1]:>9} {4 * tokens * 150_000 / 2**30:20.2f}", flush=True)


# --- scaling ------------------------------------------------------------------------------------------------------


def scaling_of_devices(folder: Path) -> None:
    """Synchronous runs, in which both sides have the cores to themselves in turns: one device of each, two of each."""
    print("\n(a) tokens/s with one and two devices of one thread each, while the other side waits\n")
    print("parameters   devices   sampled/s            trained/s            copy of parameters, s")
    sizes = {
        "0.14M": ["--steps", "8"],
        "25.7M": ["--steps", "4", "--model", "25.7M", "--prompts-per-step", "4", "--slots", "32"],
    }
    for name, flags in sizes.items():
        single = None
        for devices in (1, 2):
            log = train(folder, f"{name}-{devices}", "--asynchrony", "ppo-1", "--no-zero-variance-filter", "--threads",
                        "1", "--learning-rate", "1e-12", "--validation-problems", "2", "--validation-samples", "2",
                        "--generators", str(devices), "--trainers", str(devices), *flags)  # fmt: skip
            steps = [line for line in log if line["kind"] == "train"][1:]  # the first warms up
            median = lambda key: np.median([line[key] for line in steps])
            found = [median(f"{side}_tokens_per_second") for side in ("generator", "trainer")]
            single = single or found
            texts = [f"{value:10,.0f} ({value / one:.2f}x)" for value, one in zip(found, single)]
            print(
                f"{name:>10} {devices:9}   {texts[0]:20} {texts[1]:20} {median('parameters_seconds'):.4f}", flush=True
            )


def scaling_of_idleness(folder: Path) -> None:
    """The default task with the default settings, one core for each side."""
    print("\n(b) shares of the time in which each side of a PipelineRL-8 run waits, by part of the run\n")
    log = train(folder, "idle", "--steps", "80", "--validation-every", "40")
    steps = [line for line in log if line["kind"] == "train"]
    print("steps      trainer   generator   groups filtered out   groups waiting   off-policyness mean, max")
    for start in range(0, 80, 20):
        some = steps[start : start + 20]
        mean = lambda key: np.mean([line[key] for line in some])
        print(
            f"{start + 1:3}-{start + 20:3} {mean('trainer_idle_fraction'):10.2f}"
            f" {mean('generator_idle_fraction'):11.2f} {mean('zero_variance_fraction'):21.2f}"
            f" {mean('groups_waiting'):16.1f} {mean('off_policyness_mean'):15.1f},"
            f" {max(line['off_policyness_max'] for line in some)}"
        )


def groups_of(tokens: int, length: int) -> list:
    """Groups of four sequences of `length` tokens, 16 of them prompt, half of them right; so many tokens in all."""
    from steps import make_group, rollout

    rng, groups = np.random.default_rng(0), []
    for number in range(tokens // length // 4):
        rollouts = [rollout(number, i, [1] * 16, rng.integers(18, size=length - 16)) for i in range(4)]
        groups.append(make_group(number, rollouts, [True, True, False, False]))
    return groups


def scaling_of_updates(repeats: int = 5) -> None:
    """From a trainer's parameters to a generator's, through the shared buffer, within one process and one thread."""
    import torch

    from machinery.model import load_model
    from machinery.rollouts import SharedParameters

    print("\n(c) parameters to a generator, on a CPU: seconds of the trainer's copy and of the generator's\n")
    print("parameters       MiB   trainer's   generator's   GiB/s of the trainer's")
    torch.set_num_threads(1)
    for name in (str(BASE_MODEL), *SIZES):
        model, reader = (load_model(name, torch.device("cpu"), torch.float32) for _ in range(2))
        shared, seconds = SharedParameters(model), {"written": [], "read": []}
        for version in range(repeats + 1):
            started = time.perf_counter()
            shared.write(model.named_parameters(), version)
            seconds["written"].append(time.perf_counter() - started)
            started = time.perf_counter()
            shared.read_into(reader)
            seconds["read"].append(time.perf_counter() - started)
        size, median = shared.flat.nbytes, {key: np.median(values[1:]) for key, values in seconds.items()}
        print(f"{size / 4e6:9.2f}M {size / 2**20:9.1f} {median['written']:11.4f} {median['read']:13.4f}"
              f" {size / median['written'] / 2**30:24.1f}", flush=True)  # fmt: skip


PEAK = """
import os, sys
from pathlib import Path

import torch

def peak():  # GiB; ru_maxrss would have that of the process which started this one
    return int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0]) / 2**20
"""

STEP = (
    PEAK
    + """
import torch.multiprocessing as multiprocessing

import steps
from benchmark import groups_of
from machinery import trainer
from machinery.model import load_model
from machinery.record import Record
from machinery.rollouts import SharedParameters

def one(rank, ranks, name, tokens, checkpointing, parameters):
    if ranks > 1:
        trainer.join_ranks(rank, ["cpu"] * ranks, str(Path("meet").absolute()))
    peaks, log_step = [], Record.log_step
    Record.log_step = lambda *arguments: peaks.append(peak())
    chosen = dict(trainers=ranks, tokens_per_micro_batch=tokens, gradient_checkpointing=checkpointing)
    batches = [groups_of(ranks * tokens, 256) for _ in range(2)]  # each rank has a micro-batch
    steps.train_rank(rank, steps.settings(steps=2, **chosen), name, batches, Path("run"), parameters)
    if rank == 0:
        print("GiB", peaks[-1] - parameters.flat.nbytes / ranks / 2**30, flush=True)  # this rank's part of the buffer
    if ranks > 1:
        trainer.end_ranks()
        os._exit(0)

if __name__ == "__main__":
    name, ranks, tokens, checkpointing = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "True"
    parameters = SharedParameters(load_model(name, steps.CPU, torch.float32), ranks)
    multiprocessing.spawn(one, (ranks, name, tokens, checkpointing, parameters), nprocs=ranks)
"""
)

SAMPLE = (
    PEAK
    + """
import dataclasses

from generate import make_engine
from machinery.engine import EngineSettings, sample_all
from machinery.model import load_tokenizer, make_decoding
from machinery.rollouts import Request
from machinery.settings import Sampling

name, slots = sys.argv[1], int(sys.argv[2])
rules = make_decoding(load_tokenizer(name), Sampling(thinking_budget=(200, 200), answer_budget=24))
rules = dataclasses.replace(rules, eos=())  # all go to the full length
engine = make_engine(EngineSettings(name, ("cpu",), "float32", 1, slots, rules))
sample_all(engine, [Request(i, 0, [1] * 16, 200, (i,)) for i in range(slots)])
print("GiB", peak(), flush=True)
"""
)


def scaling_of_memory(folder: Path) -> None:
    """Peak memory of a trainer's rank 0 over two steps, and of a generator, each case in processes of its own."""
    import torch

    from machinery.model import load_shapes
    from machinery.plan import Shape, generator_bytes, trainer_bytes

    def measured(script: str, name: str, *arguments) -> float:
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        with tempfile.TemporaryDirectory() as own:
            (Path(own) / "script.py").write_text(script)
            command = [sys.executable, "script.py", str(folder / name), *map(str, arguments)]
            done = subprocess.run(
                command, cwd=own, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}
            )
        found = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("GiB ")]
        if not found:
            raise RuntimeError(done.stderr)
        return float(found[0])

    print("\n(d) GiB of a process on a CPU, fp32, at its peak, beside what train.py --plan says\n")
    print("| parameters | of | with | measured | planned | planned / measured |\n|---|---|---|---|---|---|")
    shapes = {name: Shape(load_shapes(str(folder / name))) for name in SIZES}
    cases = [("25.7M", 1, 2048, False), ("25.7M", 1, 2048, True), ("134M", 1, 2048, False), ("134M", 1, 2048, True),
             ("134M", 1, 4096, True), ("134M", 2, 2048, True)]  # fmt: skip
    for name, ranks, tokens, checkpointing in cases:
        parts = trainer_bytes(shapes[name], ranks, tokens, 256, torch.float32, "cpu", checkpointing)
        with_what = f"{tokens:,} tokens{', checkpointing' if checkpointing else ''}"
        who = "a trainer" if ranks == 1 else f"one of {ranks} trainers"
        memory_row(name, who, with_what, measured(STEP, name, ranks, tokens, checkpointing), parts)
    for name, slots in (("25.7M", 64), ("134M", 16)):
        parts = generator_bytes(shapes[name], "torch", slots, 242, 16, torch.float32, 0)
        memory_row(name, "a generator", f"{slots} slots of 242 tokens", measured(SAMPLE, name, slots), parts)


def memory_row(name: str, who: str, with_what: str, found: float, parts: dict[str, float]) -> None:
    planned = sum(parts.values()) / 2**30
    print(f"| {name} | {who} | {with_what} | {found:.2f} | {planned:.2f} | {planned / found:.2f} |", flush=True)


# Real models by what their config.json says; nothing of them is downloaded.
QWEN = {"vocab_size": 151_936, "max_position_embeddings": 40_960}
REAL = {
    "Qwen/Qwen3-0.6B": dict(model_type="qwen3", hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
                            num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True),
    "Qwen/Qwen2.5-1.5B": dict(model_type="qwen2", hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
                              num_attention_heads=12, num_key_value_heads=2, tie_word_embeddings=True),
    "Qwen/Qwen3-8B": dict(model_type="qwen3", hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36,
                          num_attention_heads=32, num_key_value_heads=8, head_dim=128, tie_word_embeddings=False),
}  # fmt: skip


def real_models(folder: Path) -> None:
    """Folders that --model finds by the names of these models, with a config.json and nothing else."""
    for name, config in REAL.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(config | QWEN))


PLAN = "--plan --model Qwen/Qwen3-8B --data polaris --gpus 8 --gpu-memory 80"  # which docs/node.md shows whole


def table_of_plans(folder: Path) -> list[str]:
    """The table of docs/node.md: what `train.py --plan` says of real models on GPUs of 80 GB, in GiB."""
    from machinery.model import load_shapes
    from machinery.plan import Shape, longest, needs
    from machinery.settings import TrainCommand, parse

    GiB = lambda *sizes: f"{sum(sizes) / 2**30:.1f}"
    lines = [
        "| model | flags | a trainer: weights, gradients, moments | activations | logits | all of it | a generator:"
        " weights | cache | sequences of full length, of half | fits |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, flags in [
        ("Qwen/Qwen3-0.6B", "--gpus 1"), ("Qwen/Qwen3-0.6B", "--gpus 8"), ("Qwen/Qwen2.5-1.5B", "--gpus 1"),
        ("Qwen/Qwen2.5-1.5B", "--gpus 8"), ("Qwen/Qwen3-8B", "--gpus 8"), ("Qwen/Qwen3-8B", "--gpus 8 --trainers 4"),
        ("Qwen/Qwen3-8B", "--gpus 8 --trainers 4 --engine torch --slots 16"),
    ]:  # fmt: skip
        arguments = ["--plan", "--data", "polaris", "--gpu-memory", "80", "--model", str(folder / name), *flags.split()]
        command = parse(arguments, TrainCommand)
        model = load_shapes(command.model)
        need = needs(command, Shape(model), longest(command, model))
        trainer, generator, room = need.trainer, need.generator, need.sequences
        states = GiB(*(trainer[part] for part in ("parameters", "gradients", "moments")))
        fits = {verdict for *_, verdict in need.devices.values()}
        lines.append(
            f"| {name.split('/')[1]} | `{flags}` | {states} | {GiB(trainer['activations'])} |"
            f" {GiB(trainer['logits'])} | {GiB(*trainer.values())} | {GiB(generator['weights'])} |"
            f" {GiB(generator['keys and values'])} | {room:.0f}, {2 * room:.0f} |"
            f" {'yes' if fits == {'fits'} else 'no'} |"
        )
    return lines


def byte_tokenizer():
    """One of the kind that most models have, trained on the texts of this project."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made, markers = Tokenizer(models.BPE()), ["<eos>", "<think>", "</think>"]
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=markers, initial_alphabet=alphabet, show_progress=False)
    made.train([str(path) for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>")


def scaling_of_python(length: int = 14_000, slots: int = 256, steps: int = 2000) -> None:
    """What Python and numpy do for the tokens of a step, on made-up rollouts: CPU seconds of all threads, the least of
    three times."""
    import pickle

    import torch
    from steps import make_group, rollout

    from machinery.compute import Compute
    from machinery.engine import Completions
    from machinery.model import completion_texts, make_decoding
    from machinery.policy import micro_batches
    from machinery.record import completion_columns
    from machinery.rollouts import Batch, Report, Request
    from machinery.settings import PRESETS, Settings

    print(f"\n(f) CPU seconds of Python and numpy for a step of 48 x 16 rollouts of {length:,} tokens, by stage\n")
    tokenizer, rng = byte_tokenizer(), np.random.default_rng(0)
    decoding = make_decoding(tokenizer, Settings(**PRESETS["paper"]))
    groups = []
    for number in range(48):
        tokens = rng.integers(3, len(tokenizer), (16, length))
        group = [rollout(number, i, [3] * 200, own) for i, own in enumerate(tokens)]
        groups.append(make_group(number, group, [True, False] * 8))
    rollouts = [rollout for group in groups for rollout in group.rollouts.values()]
    rows = np.arange(slots)
    books, tokens, sampled = Completions(slots, decoding), np.full(slots, 3), np.ones(slots, bool)
    for row in rows:
        books.begin(row, Request(0, row, [3], 12_288, (0,)))

    def seconds(stage: str, function: Callable, times: float = 1.0):
        least = math.inf
        for _ in range(3):
            started = time.process_time()
            result = function()
            least = min(least, time.process_time() - started)
        print(f"{stage:65}{times * least:8.2f}", flush=True)
        return result

    append = lambda: [books.append(rows, tokens, np.zeros(slots), sampled, 0) for _ in range(steps)]
    stage = f"generators: books, {slots} in flight (from {steps:,} tokens of each)"
    seconds(stage, append, times=768 * length / slots / steps)
    reports = seconds("generators: pickled reports", lambda: [pickle.dumps(Report([rollout])) for rollout in rollouts])
    seconds("rank 0: unpickled reports", lambda: [pickle.loads(report) for report in reports])
    seconds("rank 0: texts for the verifiers, on all cores", lambda: completion_texts(tokenizer, decoding, rollouts))
    seconds("rank 0: the batch, handed to other ranks", lambda: pickle.loads(pickle.dumps(groups)))
    batch = seconds("each rank: the batch", lambda: Batch(groups, 50))
    every, device = list(range(768)), torch.device("cpu")
    seconds("all ranks together: micro-batches", lambda: [0 for _ in micro_batches(rollouts, every, 32_768, device)])
    seconds("rank 0: the log", lambda: (completion_columns(groups), Compute(1, 1).add(groups, 1), batch.ages_N.mean()))


def benchmark_scaling(options: argparse.Namespace) -> None:
    parts = {"devices", "idle", "updates", "memory", "plan", "python"} if options.only is None else {options.only}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name, size in SIZES.items() if parts - {"idle", "plan", "python"} else ():
            random_model(name, size)
        if "devices" in parts:
            scaling_of_devices(Path(folder))
        if "idle" in parts:
            scaling_of_idleness(Path(folder))
        if "updates" in parts:
            scaling_of_updates()
        if "memory" in parts:
            scaling_of_memory(Path(folder))
        if "plan" in parts:
            real_models(Path(folder))
            import train as script

            print("\n(e) what train.py --plan says, for docs/node.md\n", *table_of_plans(Path(folder)), sep="\n")
            script.main(PLAN.split())
    if "python" in parts:
        scaling_of_python()


# --- faults -------------------------------------------------------------------------------------------------------


def full_disk(faults) -> None:
    """A run on a disk with room for two checkpoints and a half (of 1.7 MB each), which goes on once there is more.
    It needs the right to mount."""
    with tempfile.TemporaryDirectory() as folder:
        disk = Path(folder) / "runs"
        disk.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "none", str(disk)]).returncode:
            return print("\nfull disk: left out, for want of the right to mount")
        try:
            run = faults.RealRun(Path(folder), "--steps", "100000", "--keep-checkpoints", "10")
            assert run.end() == 1 and "No space left on device" in run.text(), run.text()
            assert "the run's folder cannot be written" in run.text() and "Traceback" not in run.text()
            assert not list(run.folder.rglob("*.partial"))
            stopped = faults.last_step(run.folder)
            subprocess.run(["mount", "-o", "remount,size=50m", str(disk)], check=True)
            faults.RealRun(Path(folder), "--resume", "runs/run", "--steps", str(stopped + 2)).end_well()
            faults.check_log(run.folder, stopped + 2, validation_every=8)
            print(f"\na full disk ended a run at step {stopped} in words, and with more room it went on")
        finally:
            subprocess.run(["umount", "-l", str(disk)], check=True)


def benchmark_faults(options: argparse.Namespace) -> None:
    """Each fault is put into real runs of tiny steps; lost is the time until training is further than it was."""
    import faults

    def longest_pause(folder: Path) -> float:
        """Seconds of the longest time between two steps without a validation, above the median time."""
        pauses = np.diff([line["wall_seconds"] for line in faults.log(folder, "train")])
        return max(pauses) - np.median(pauses)

    inside = {
        "exception in the engine": dict(generate=faults.faulty_engine(fault=faults.RAISES)),
        "engine hangs (--wait-timeout 20)": dict(generate=faults.faulty_engine(fault=faults.HANGS)),
        "reward raises": dict(data__arithmetic=faults.faulty_reward(fault=faults.RAISES)),
        "reward hangs (--verifier-time-limit 2)": dict(data__arithmetic=faults.faulty_reward(fault=faults.HANGS)),
        "loss is not a number": dict(loss=faults.faulty_loss(call=4)),
    }
    record: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--steps", "100000", "--validation-every", "4", "--validation-problems", "32"]
        for victim, seconds in faults.kill_at_random(Path(folder), options.kills, flags, seed=1):
            record.setdefault(f"kill -9 of the {victim}", []).append(seconds)
        run = Path(folder) / "runs" / "run"
        steps, rates = faults.last_step(run), [line["pass_rate"] for line in faults.log(run, "validation")]
        faults.check_log(run, steps, validation_every=4, finished=False)  # the log of one unbroken run
        print(
            f"\n{steps} steps in spite of {options.kills} kills; pass rate {rates[0]:.2f} before, {rates[-1]:.2f} after"
        )
    full_disk(faults)
    injected = {name: len(seconds) for name, seconds in record.items()}
    for name, fault in inside.items():
        injected[name], record[name] = options.repeats, []
        for _ in range(options.repeats):
            with tempfile.TemporaryDirectory() as folder:
                flags = ["--validation-every", "100", "--wait-timeout", "20", "--verifier-time-limit", "2"]
                run = faults.RealRun(faults.project(Path(folder), **fault), "--steps", "20", *flags)
                if run.end() == 0:
                    record[name].append(longest_pause(run.folder))
                else:
                    print(f"not recovered from: {name}\n{run.text()[-2000:]}")
    print("\nfault                                    injected   recovered   seconds lost: median   most\n")
    for name, seconds in sorted(record.items()):
        print(f"{name:40} {injected[name]:8} {len(seconds):11} {np.median(seconds):22.1f} {max(seconds):6.1f}")


# --- fit_curve.py -------------------------------------------------------------------------------------------------

TRUTH = {"A": 0.61, "B": 1.92, "C_mid": 2542.0, "R0": 0.40}  # ScaleRL, table 1 of the paper


def simulate(random, n, reach, noise, correlation=0.0, truth=TRUTH):
    """A run with the curve `truth`: validations at compute x (n + 1,) from 0 to `reach` times C_mid, with
    noise in which neighbours correlate (AR(1) of standard deviation `noise`). The first one gives R0."""
    x = np.linspace(0, reach * truth["C_mid"], n + 1)
    shocks = random.standard_normal(n + 1)
    drift = shocks.copy()
    for i in range(1, n + 1):
        drift[i] = correlation * drift[i - 1] + np.sqrt(1 - correlation**2) * shocks[i]
    return x, np.clip(sigmoid(x, **truth) + noise * drift, 0, 1)


def plain_interval(x, y):
    """The interval of A by profile likelihood alone: neighbours taken as independent, R0 as known."""
    theta, squares = least_squares.variable_projection(x[1:], y[1:], y[0])
    excess = allowed_excess(squares, len(x) - 4, correlation=0.0)
    return least_squares.profile_over_A(x[1:], y[1:], theta, theta, excess, R0_free=False)[0]["A"]


def holds(interval, value):
    return interval[0] <= value <= interval[1]


def coverage(draws):
    print(
        f"\nHow often do 95 % intervals hold the truth? Percent of {draws} simulated runs; noise .01,\n"
        "C_max/C_mid 4, forecast at twice the last compute, gain of twice the compute, held-out test (what came).\n"
        "Width: median width of the interval of A. r: mean correlation of neighbouring residuals, raw and corrected\n"
    )
    print(
        "points  correlation   A without correction     A     B  C_mid  forecast  gain  held out   width"
        "         r  corrected"
    )
    for n in (20, 40, 75):
        for correlation in (0.0, 0.3, 0.6, 0.8):
            random, hits, widths, found = np.random.default_rng(0), [], [], []
            for _ in range(draws):
                x, y = simulate(random, n, 4, 0.01, correlation)
                f, held, later = fit_sigmoid(x, y), held_out(x, y), 2 * x[-1]
                gain = np.diff(sigmoid([x[-1], later], **TRUTH))[0]
                hits.append(
                    [
                        holds(plain_interval(x, y), TRUTH["A"]),
                        *(holds(f.interval[name], TRUTH[name]) for name in ("A", "B", "C_mid")),
                        holds(f.band(later), sigmoid(later, **TRUTH)),
                        holds(f.gain()[1:], gain),
                        holds(held["interval"], held["came"]),
                    ]
                )
                widths.append(f.interval["A"][1] - f.interval["A"][0])
                found.append((f.lag_1, f.correlation))
            plain, A, B, C_mid, forecast, gain, held = 100 * np.mean(hits, axis=0)
            raw, corrected = np.mean(found, axis=0)
            print(
                f"{n:6}{correlation:13.1f}{plain:23.0f}{A:6.0f}{B:6.0f}{C_mid:7.0f}{forecast:10.0f}{gain:6.0f}"
                f"{held:10.0f}{np.median(widths):8.3f}{raw:10.2f}{corrected:11.2f}",
                flush=True,
            )


def false_verdicts(draws):
    print(
        f"\nSettings with one ceiling, percent of {draws} pairs: how often is that of one said to be raised? 40\n"
        "points up to 6 C_mid, noise .005; `slow` has twice the C_mid, 20 points up to 2.5 C_mid or 16 up to 2.\n"
        "Several seeds scatter, by .008 in A and 5 % in C_mid. `compared`: both identify A, or one has no\n"
        "ceiling. `efficient`: B or C_mid is told apart, where both settings are alike\n"
    )
    print("seeds   the other run     correlation   compared   first raised   other raised   efficient")
    for seeds in (1, 3):
        for what, later, n, reach in (("alike", 1, 40, 6), ("slow, to 2.5", 2, 20, 2.5), ("slow, to 2", 2, 16, 2)):
            for correlation in (0.0, 0.3, 0.6):
                random, said = np.random.default_rng(0), []
                for _ in range(draws):
                    fits = [[], []]
                    for group, times, *length in ((0, 1, 40, 6), (1, later, n, reach)):
                        for _ in range(seeds):
                            A, C_mid = random.standard_normal(2) * (seeds > 1)
                            own = {"A": TRUTH["A"] + 0.008 * A, "C_mid": times * TRUTH["C_mid"] * np.exp(0.05 * C_mid)}
                            run = simulate(random, *length, 0.005, correlation, TRUTH | own)
                            fits[group].append(fit_sigmoid(*run))
                    said.append(compare(("first", "other"), fits)["verdict"])
                raised = [100 * np.mean([f"{name} raises" in text for text in said]) for name in ("first", "other")]
                compared = 100 * np.mean(["does not identify" not in text for text in said])
                efficient = 100 * np.mean(["efficient" in text for text in said])
                print(
                    f"{seeds:5}   {what:15}{correlation:14.1f}{compared:11.0f}{raised[0]:15.1f}{raised[1]:15.1f}"
                    + (f"{efficient:12.1f}" if later == 1 else f"{'-':>12}"),
                    flush=True,
                )


def identification(draws):
    print(
        f"\nWhich part of the gain must a run show? {15 * draws} simulated runs: A from .4 to .95, R0 .2 below it at\n"
        "least, B from .6 to 3, noise .003 to .03, correlation 0, .3 or .6, 20, 40 or 75 points, .35 to .99 of the\n"
        "gain made. Left out: intervals wider than the gain, no ceiling below 1, no rise\n"
    )
    random, rows = np.random.default_rng(0), []
    for _ in range(15 * draws):
        A, made, n = random.uniform(0.4, 0.95), random.uniform(0.35, 0.99), random.choice([20, 40, 75])
        B, noise = np.exp(random.uniform(np.log([0.6, 0.003]), np.log([3, 0.03])))
        truth = {"A": A, "B": B, "C_mid": 1.0, "R0": random.uniform(0, A - 0.2)}
        reach, correlation = (made / (1 - made)) ** (1 / B), random.choice([0, 0.3, 0.6])
        f = fit_sigmoid(*simulate(random, n, reach, noise, correlation, truth))
        (low, high), gain = f.interval["A"], f.A - f.R0
        if high - low < gain and f.A < 0.9999 and gain > 2 * f.rms and not f.fell:
            error = abs(f.A - A) / (A - truth["R0"])
            rows.append((f.gain_made, f.rms / np.sqrt(n) / gain, f.identified, low <= A, low <= A <= high, error))
    made, scatter, identified, above, inside, error = np.array(rows).T
    calm = scatter <= MOST_SCATTER
    lines = [(f"gain made {a} to {a + 0.1:.1f}", calm & (made >= a) & (made < a + 0.1)) for a in np.arange(4, 10) / 10]
    for a, b in ((0, 0.003), (0.003, 0.006), (0.006, 0.01), (0.01, 0.02), (0.02, 0.1)):
        lines.append((f"scatter {a} to {b}", (made >= LEAST_GAIN_MADE) & (scatter > a) & (scatter <= b)))
    print("of the gain             runs   A inside   A above its low end   error of A, of the gain: median   95 %")
    for text, chosen in [*lines, ("identified", identified > 0)]:
        shares = f"{100 * inside[chosen].mean():9.1f} %{100 * above[chosen].mean():20.1f} %"
        size = f"{np.median(error[chosen]):32.3f}{np.quantile(error[chosen], 0.95):7.2f}"
        print(f"{text:19}{chosen.sum():9}{shares}{size}", flush=True)


def sensitivity(draws):
    print(
        f"\nWhat do the window and R0 do? Mean over {draws} simulated runs, 75 points up to 16k, noise\n"
        ".01, true A .61 and R0 .40\n"
    )
    print("   fitted on     R0   A of the sigmoid   of the power law   error at 16k: sigmoid   power law")
    windows = [(0, 16e3), (1500, 16e3), (0, 8e3), (1500, 8e3), (3000, 8e3)]
    for fit_from, fit_to, shift in [*((*w, 0) for w in windows), (1500, 8e3, -0.05), (1500, 8e3, 0.05)]:
        random, rows = np.random.default_rng(0), []
        for _ in range(draws):
            x, y = simulate(random, 75, 16e3 / TRUTH["C_mid"], 0.01)
            f = fit_sigmoid(x, y, TRUTH["R0"] + shift, fit_from, fit_to)
            law, truth = fit_power_law(f.x, f.y), sigmoid(16e3, **TRUTH)
            rows.append([f.A, law[0], f.predict(16e3) - truth, power_law(16e3, *law) - truth])
        A, law_A, error, law_error = np.mean(rows, axis=0)
        print(
            f"{fit_from:5} - {fit_to:5.0f}{TRUTH['R0'] + shift:7.2f}{A:19.3f}{law_A:19.3f}{error:+24.3f}"
            f"{law_error:+12.3f}",
            flush=True,
        )


def speed():
    x, y = simulate(np.random.default_rng(0), 75, 6, 0.01)
    R0, later_x, later_y = y[0], x[1:], y[1:]

    def seconds(function, repeats):
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            result = function()
            times.append(time.perf_counter() - start)
        return np.median(times), result

    fast, (_, squares) = seconds(lambda: least_squares.variable_projection(later_x, later_y, R0), 200)
    whole, _ = seconds(lambda: fit_sigmoid(x, y), 200)
    slow, (_, squares_of_grid) = seconds(lambda: least_squares.paper_grid(later_x, later_y, R0), 3)
    print(
        f"\nSpeed, 75 points, medians: published grid {slow:.2f} s, residual {squares_of_grid:.6f}\n"
        f"variable projection {1e3 * fast:.2f} ms, residual {squares:.6f}: {slow / fast:.0f} times faster\n"
        f"with intervals and warnings {1e3 * whole:.2f} ms: {slow / whole:.0f} times faster"
    )


def benchmark_fit(options):
    coverage(options.draws)
    false_verdicts(options.draws)
    identification(options.draws)
    sensitivity(options.draws)
    speed()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    subjects = {"training": benchmark_training, "engines": benchmark_engines, "fit": benchmark_fit}
    subjects |= {"step": benchmark_step, "commands": benchmark_commands}
    subjects |= {"scaling": benchmark_scaling, "faults": benchmark_faults, "memory": benchmark_memory}
    parser.add_argument("what", choices=[*subjects], nargs="?", default="training")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="training: seeds of (a)")
    parser.add_argument("--target", type=float, default=0.8, help="training: pass rate that (a) waits for")
    parser.add_argument("--trl-steps", type=int, nargs="+", default=[20, 100], help="training: steps of (d), up to 100")
    parser.add_argument("--rounds", type=int, default=4, help="engines, commands: measurements of each")
    parser.add_argument(
        "--only", choices=["devices", "idle", "updates", "memory", "plan", "python"], help="scaling: one part"
    )
    parser.add_argument("--draws", type=int, default=400, help="fit: simulated runs a line")
    parser.add_argument("--kills", type=int, default=20, help="faults: kill -9 at random moments")
    parser.add_argument("--repeats", type=int, default=3, help="faults: runs with each of the other faults")
    options = parser.parse_args()
    subjects[options.what](options)


if __name__ == "__main__":
    main()
