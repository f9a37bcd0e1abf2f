"""All that is to be seen on a GPU, in one command. Its table becomes docs/gpu.md: please send it to us.

    python tests/gpu.py                         # all four parts, each at most eight minutes on an H200
    python tests/gpu.py --part 2                # one part; the lines of the others stay, if the versions are the same
    python tests/gpu.py --device cpu --small    # without a GPU, in small: whether this file works; writes nothing

It wants `pip install -r requirements.txt -r requirements-dev.txt`; with vLLM (requirements-vllm.txt) more is measured.
RULES says what should come. "not as expected" wants a look: not each such line is a defect.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.multiprocessing as multiprocessing

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from benchmark import Size, groups_of, random_model  # noqa: E402

LIMIT = 8 * 60  # seconds of a part
FEW = ["--prompts-per-step", 4, "--completions-per-prompt", 4, "--validation-problems", 4]  # of a run with --small
HAS_VLLM = importlib.util.find_spec("vllm") is not None


class Machine(NamedTuple):
    """Where it is measured."""

    device: str  # cuda:0 or cpu
    small: bool  # sizes at which the figures mean nothing
    folder: Path  # for what is written
    deadline: float  # of this part, as time.monotonic() has it

    def size(self, usual, small):
        return small if self.small else usual

    def seconds(self, work: Callable) -> float:
        """That this takes, until the device has done it."""
        wait = (lambda: None) if self.device == "cpu" else torch.cuda.synchronize
        wait()
        start = time.perf_counter()
        work()
        wait()
        return time.perf_counter() - start

    def start(self, arguments, start=subprocess.Popen, **options):
        """A Python command in the folder."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path[:2]), **options.pop("env", {})}
        environment |= {"CUDA_VISIBLE_DEVICES": ""} if self.device == "cpu" else {}
        return start([sys.executable, *map(str, arguments)], cwd=self.folder, env=environment, **options)

    def run(self, *arguments, check=True, **environment) -> str:
        """What a Python command prints, as long as this part may last. RuntimeError, with its last words, if it fails
        and that is not wanted."""
        left = max(1.0, self.deadline - time.monotonic())
        options = dict(capture_output=True, text=True, timeout=left, env=environment)
        done = self.start(arguments, subprocess.run, **options)
        if check and done.returncode:
            raise RuntimeError(" ".join(done.stderr.strip().splitlines()[-3:]))
        return done.stdout

    def train(self, name: str, *flags, **environment) -> tuple[list[dict], list[dict]]:
        """The lines of training and of validations in the log of a run of train.py."""
        self.run(ROOT / "train.py", "--name", name, *self.size([], FEW), *flags, **environment)
        log = [json.loads(line) for line in open(self.folder / "runs" / name / "log.jsonl")]
        steps, checks = ([line for line in log if line["kind"] == kind] for kind in ("train", "validation"))
        return steps, checks

    def model(self) -> str:
        """A random model: of 400M parameters, with a vocabulary of 32,000."""
        folder = self.folder / "random"
        if not folder.exists():
            random_model(str(folder), Size(64, 128, 2, 100) if self.small else Size(1024, 2816, 26, 32_000))
        return str(folder)


# --- part 1: the machine ----------------------------------------------------------------------------------------------


def versions(at: Machine) -> dict:
    """Also the room for parameters on their way."""
    precision, free = torch.get_float32_matmul_precision(), shutil.disk_usage("/dev/shm").free
    return {"cudnn": torch.backends.cudnn.version() or 0, "precision": precision, "shm": free / 2**30}


ATTENTION = """
import sys, time, torch
device, (low, high) = sys.argv[1], map(int, sys.argv[2:])
wait = (lambda: None) if device == "cpu" else torch.cuda.synchronize
for length in [8, *range(low, high)]:  # the first is not counted
    q, k, v = (torch.randn(1, 16, length, 128, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
    for _ in range(2):
        wait()
        start = time.perf_counter()
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
        wait()
        print(1000 * (time.perf_counter() - start))
"""


def attention(at: Machine) -> dict:
    """Milliseconds of attention, forward and backward, at a length that has not been and at one that has."""
    found = {}
    for name, environment in (("", {}), ("_other", {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"})):
        printed = at.run("-c", ATTENTION, at.device, at.size(1000, 16), at.size(1021, 18), **environment)
        times = np.array([float(line) for line in printed.split()]).reshape(-1, 2)[1:]
        found[f"first{name}"], found[f"again{name}"] = np.median(times, axis=0).tolist()
    return found


def head(at: Machine) -> dict:
    """Milliseconds of the head's logits for a chunk: 2,048 tokens, hidden size 1,024, a vocabulary of 151,936."""
    hidden = torch.randn(at.size(2048, 8), 1024, device=at.device)
    weight = torch.randn(1024, at.size(151_936, 100), device=at.device)
    narrow, high = hidden.bfloat16(), weight.bfloat16()
    low = (weight - high.float()).bfloat16()
    ways = {"fp32": lambda: hidden @ weight, "bf16": lambda: narrow @ high}
    if at.device != "cpu":
        mm = lambda piece: torch.mm(narrow, piece, out_dtype=torch.float32)
        ways["pieces"] = lambda: mm(high) + mm(low)
    return {name: 1000 * min(at.seconds(way) for _ in range(5)) for name, way in ways.items()}


def copies(at: Machine) -> dict:
    """Seconds of bringing 600M parameters to the device as bfloat16: cast on the way, or there."""
    source = torch.ones(at.size(600_000_000, 1000), pin_memory=at.device != "cpu")
    target = torch.empty(len(source), dtype=torch.bfloat16, device=at.device)
    there = lambda: target.copy_(source.to(at.device, non_blocking=True))
    return {"blocking": at.seconds(lambda: target.copy_(source)), "there": min(at.seconds(there) for _ in range(3))}


def write_constants(parameters, model) -> None:
    """A trainer's part of the next one: version v of all parameters is v."""
    for version in range(1, 10**9):
        for parameter in model.parameters():
            parameter.data.fill_(version)
        parameters.write(model.named_parameters(), version)


def reads(at: Machine) -> dict:
    """Parameters are read while another process writes; each read must have one version throughout."""
    from machinery.model import load_model
    from machinery.rollouts import SharedParameters

    model = load_model("data/arithmetic_base", torch.device("cpu"), torch.float32)
    parameters = SharedParameters(model)
    parameters.write(model.named_parameters(), 0)
    reader = load_model("data/arithmetic_base", torch.device(at.device), torch.float32)
    writer = multiprocessing.get_context("spawn").Process(target=write_constants, args=(parameters, model), daemon=True)
    writer.start()
    while parameters.version < 1:
        time.sleep(0.01)
    mixed = 0
    for _ in range(at.size(500, 20)):
        version = parameters.read_into(reader)
        mixed += any((parameter != version).any().item() for parameter in reader.parameters())
    writer.kill()
    return {"mixed": mixed if version > 1 else "the writer wrote nothing"}


# --- part 2: tests ----------------------------------------------------------------------------------------------------


def tests(at: Machine) -> dict:
    """Of each file what pytest says, with the engines on the device: "all pass", or how many fail and which. Several
    ranks have tests on CPUs only."""
    chosen = {"engine_tests": ("engines", "not vllm"), "trainer_tests": ("trainer", "not three_ranks")}
    chosen |= {"vllm_tests": ("engines", "vllm"), "vllm_processes": ("vllm", "moe or short_run")} if HAS_VLLM else {}
    if at.small:
        chosen = {"engine_tests": ("engines", "beyond_the_budgets"), "trainer_tests": ("trainer", "to_their_budget")}
    found = {}
    for name, (file, only) in chosen.items():
        arguments = ["-p", "no:xdist", "-o", "addopts=", "-q", "--tb=line", ROOT / "tests" / f"test_{file}.py"]
        try:
            out = at.run("-m", "pytest", *arguments, "-k", only, check=False, SCALERL_TEST_DEVICE=at.device)
        except subprocess.TimeoutExpired:
            out = "not ended when the part's eight minutes were over"
        summary, failed = (out.strip().splitlines() or ["no output"])[-1], re.findall(r"(?m)^FAILED .*?::(\S+)", out)
        well = "passed" in summary and "failed" not in summary and "error" not in summary
        found[name] = "all pass" if well else ", ".join([summary, *failed])
    return found


# --- part 3: runs -----------------------------------------------------------------------------------------------------


def evaluation(at: Machine) -> dict:
    few = ["--problems", 2, "--samples", 2] if at.small else []
    at.run(ROOT / "generate.py", "--evaluate", "--engine", "torch", "--log", "evaluation.jsonl", *few)
    return {"base": json.loads((at.folder / "evaluation.jsonl").read_text())["pass_rate"]}


def default_run(at: Machine) -> dict:
    """The default task as it is, with the engine that needs no vLLM."""
    steps, checks = at.train("default", "--engine", "torch", "--steps", at.size(160, 2))
    found = {"learned": checks[-1]["pass_rate"], "mismatch": max(line["mismatch_mean"] for line in checks)}
    for name in ("trainer_tokens_per_second", "generator_tokens_per_second", "trainer_idle_fraction",
                 "generator_idle_fraction"):  # fmt: skip
        found[name] = float(np.mean([line[name] or 0.0 for line in steps]))
    return found


def exact_run(at: Machine) -> dict:
    flags = ["--engine", "torch", "--asynchrony", "ppo-1", "--dtype", "float32", "--steps", at.size(4, 1)]
    return {"exact": max(line["mismatch_mean"] for line in at.train("exact", *flags)[1])}


def long_run(at: Machine) -> list:
    """Flags of a few steps with completions of about a thousand tokens."""
    lengths = ["--thinking-budget", at.size(500, 9), at.size(1000, 9), "--slots", at.size(256, 8)]
    return ["--steps", at.size(6, 1), "--prompts-per-step", 8, "--validation-problems", 4, *lengths]


def vllm_run(at: Machine) -> dict:
    if not HAS_VLLM or at.small:
        return {}
    _, checks = at.train("vllm", "--engine", "vllm", "--model", at.model(), *long_run(at))
    return {"vllm_mismatch": max(line["mismatch_mean"] for line in checks)}


def killed_generator(at: Machine) -> dict:
    """kill -9 of the generator once there is a step; how many steps there are at the end."""
    number, few = at.size(20, 3), at.size([], FEW)
    run = at.start([ROOT / "train.py", "--name", "killed", "--engine", "torch", "--steps", number, *few])
    log = at.folder / "runs" / "killed" / "log.jsonl"
    steps = lambda: log.read_text().count('"kind": "train"') if log.exists() else 0
    while not steps() and run.poll() is None and time.monotonic() < at.deadline:
        time.sleep(0.05)
    for child in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split():
        if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text():
            os.kill(int(child), signal.SIGKILL)
    try:
        status = run.wait(max(1.0, at.deadline - time.monotonic()))
    finally:
        run.terminate()
    return {"after_a_kill": f"{'all' if steps() == number else steps()} steps, status {status}"}


# --- part 4: speed and memory -----------------------------------------------------------------------------------------


def engine_busy(at: Machine) -> dict:
    """The share of TorchEngine.step in which the GPU computes, and tokens a second, with 512 slots."""
    from torch.profiler import ProfilerActivity, profile

    from generate import make_engine
    from machinery.engine import EngineSettings
    from machinery.model import load_tokenizer, make_decoding
    from machinery.rollouts import Request
    from machinery.settings import Sampling

    slots, number, dtype = at.size(512, 4), at.size(20, 2), "float32" if at.device == "cpu" else "bfloat16"
    rules = make_decoding(load_tokenizer(at.model()), Sampling(thinking_budget=(200, 200)))
    engine = make_engine(EngineSettings(at.model(), (at.device,), dtype, 4, slots, rules))
    engine.add([Request(i, 0, [1, 2, 3], 200, (i,)) for i in range(slots)])
    for _ in range(5):
        engine.step()
    steps = lambda: [engine.step() for _ in range(number)]
    seconds = at.seconds(steps)
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (at.device != "cpu")]) as seen:
        at.seconds(steps)
    busy = sum(event.self_device_time_total for event in seen.key_averages() if event.device_type.name == "CUDA") / 1e6
    return {"busy": busy / seconds, "engine_speed": slots * number / seconds}


def micro_batch_sizes(at: Machine) -> dict:
    """The trainer with gradient checkpointing on sequences of 1,024 tokens: tokens/s by the size of its micro-batches,
    and the peak of its memory beside the plan."""
    from machinery import trainer
    from machinery.model import load_model, load_shapes
    from machinery.plan import Shape, trainer_bytes
    from machinery.policy import micro_batches
    from machinery.settings import Settings

    device, chosen, length = torch.device(at.device), Settings(gradient_checkpointing=True), at.size(1024, 32)
    trainer.start_other_ranks(chosen, lambda: None, (), "")
    policy = trainer.make_policy(chosen, load_model(at.model(), torch.device("cpu"), torch.float32), device)
    optimizer = torch.optim.AdamW(policy.parameters(), fused=device.type == "cuda")
    rollouts = [rollout for group in groups_of(32 * length, length) for rollout in group.rollouts.values()]

    def step(tokens: int) -> None:
        for batch in micro_batches(rollouts, [*range(len(rollouts))], tokens, device, 0, 1):
            logprobs, _ = policy(batch, True)
            logprobs.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    speeds = {}
    if at.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    for tokens in (4 * length, 32 * length):
        step(tokens)
        speeds[tokens] = 32 * length / min(at.seconds(lambda: step(tokens)) for _ in range(2))
    found = {"speed_ratio": speeds[32 * length] / speeds[4 * length], "trainer_speed": speeds[32 * length]}
    if at.device != "cpu":
        shape = Shape(load_shapes(at.model()))
        plan = trainer_bytes(shape, 1, 32 * length, length, torch.bfloat16, at.device, True)
        found["memory"] = torch.cuda.max_memory_allocated() / (sum(plan.values()) - plan["process"])
    trainer.end_ranks()
    return found


def both_on_one(at: Machine) -> dict:
    """Sampled tokens/s of training where both sides have one GPU, without MPS and with."""
    flags = ["--model", at.model(), "--engine", "torch", *long_run(at), "--no-zero-variance-filter"]
    one = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    places = {name: str(at.folder / "mps") for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")}
    daemon = shutil.which("nvidia-cuda-mps-control")

    def speed(name: str, environment: dict) -> float:
        last = at.train(name, *flags, **environment)[0][-1]
        return last["compute_tokens"] / last["compute_device_hours"] / 3600

    found = {"one_gpu": speed("alone", one)}
    if daemon and at.device != "cpu":
        (at.folder / "mps").mkdir()
        subprocess.run([daemon, "-d"], env={**os.environ, **one, **places}, check=True)
        try:
            found["mps"] = speed("mps", {**one, **places}) / found["one_gpu"]
        finally:
            subprocess.run([daemon], input="quit\n", text=True, env={**os.environ, **places})
    return found


# --- what should come -------------------------------------------------------------------------------------------------

# Who measures it, what it is, and what should come: a word, or the least and the most; None: for the record.
RULES = {
    "cudnn": (versions, "version of cuDNN", 91_900, None),
    "precision": (versions, "precision of fp32 matmuls", "highest"),
    "shm": (versions, "GiB free in /dev/shm", 2.3, None),
    "first": (attention, "ms of bf16 attention at a new length", 30, 100),
    "again": (attention, "ms of it at that length again", 0, 1),
    "first_other": (attention, "ms at a new length with TORCH_CUDNN_SDPA_DEPRIORITIZED=1", 0, 1),
    "fp32": (head, "ms of a chunk of logits in fp32", 6, 26),
    "bf16": (head, "ms of it in bf16", 0, 2),
    "pieces": (head, "ms of it in two bf16 pieces", 0, 4),
    "blocking": (copies, "s of 600M parameters to the device, cast on the CPU", 0.3, 3),
    "there": (copies, "s of it, cast on the device", 0, 0.1),
    "mixed": (reads, "reads of parameters that mixed two versions", 0, 0),
    "engine_tests": (tests, "tests of the engine of generate.py, on the device", "all pass"),
    "trainer_tests": (tests, "tests of the trainer, on the device", "all pass"),
    "vllm_tests": (tests, "tests of the vLLM engine, on the device", "all pass"),
    "vllm_processes": (tests, "tests of vLLM in processes of its own", "all pass"),
    "base": (evaluation, "mean@16 of the shipped model", 0.10, 0.14),
    "learned": (default_run, "pass rate after the default run", 0.93, 1),
    "mismatch": (default_run, "nats of mismatch, bf16 trunk", 1e-5, 0.01),
    "trainer_tokens_per_second": (default_run, "tokens/s trained", None, None),
    "generator_tokens_per_second": (default_run, "tokens/s sampled", None, None),
    "trainer_idle_fraction": (default_run, "share of the time that the trainer waits", None, None),
    "generator_idle_fraction": (default_run, "share of the time that the generator waits", None, None),
    "exact": (exact_run, "nats of mismatch, float32, ppo-1", 0, 1e-4),
    "after_a_kill": (killed_generator, "a run whose generator is killed", "all steps, status 0"),
    "vllm_mismatch": (vllm_run, "nats of mismatch with vLLM, bf16 trunk", 1e-6, 0.05),
    "busy": (engine_busy, "share of an engine's step in which the GPU computes", 0, 0.3),
    "engine_speed": (engine_busy, "tokens/s of the engine, 400M, 512 slots", None, None),
    "speed_ratio": (micro_batch_sizes, "tokens/s at 32,768 tokens a micro-batch over 4,096", 3, None),
    "trainer_speed": (micro_batch_sizes, "tokens/s of the trainer, 400M", None, None),
    "memory": (micro_batch_sizes, "GPU memory of the trainer over the plan", 0.75, 1.25),
    "one_gpu": (both_on_one, "tokens/s of training, 400M, both sides on one GPU", None, None),
    "mps": (both_on_one, "that with MPS, over that without", 1, None),
}  # fmt: skip
PARTS = {
    1: [versions, attention, head, copies, reads],
    2: [tests],
    3: [evaluation, default_run, exact_run, killed_generator, vllm_run],
    4: [engine_busy, micro_batch_sizes, both_on_one],
}


def should(name: str) -> str:
    """What should come, in words."""
    expected = RULES[name][2:]
    if len(expected) == 1:
        return expected[0]
    least, most = expected
    if least == most:
        return "for the record" if least is None else str(least)
    return f"at least {least}" if most is None else f"at most {most}" if least == 0 else f"{least} to {most}"


def verdict(name: str, came) -> str:
    """Of what came: `as expected`, `not as expected` or, where nothing is expected, nothing."""
    expected = RULES[name][2:]
    if expected == (None, None):
        return ""
    low, high = expected * 2 if len(expected) == 1 else expected
    if isinstance(came, str) or isinstance(low, str):
        good = came == low
    else:
        good = (low is None or came >= low) and (high is None or came <= high)
    return "as expected" if good else "not as expected"


def measure_part(part: int, device: str, small: bool) -> list[str]:
    """The lines of the table for this part."""
    lines = []
    with tempfile.TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True) as folder:
        at = Machine(device, small, Path(folder), time.monotonic() + LIMIT)
        for measure in PARTS[part]:
            print(f"{measure.__name__} ...", file=sys.stderr, flush=True)
            try:
                found, otherwise = measure(at), "left out: not to be had here"
            except Exception as error:  # the others are measured all the same
                said = " ".join(f"{type(error).__name__}: {error}".split())[-300:].replace("|", "/")
                found, otherwise = {}, f"failed: {said}"
            if device != "cpu":
                torch.cuda.empty_cache()  # room for the next
            for name, rule in RULES.items():
                if rule[0] is measure:
                    came = found.get(name, "")
                    shown = f"{came:.4g}" if isinstance(came, float) else str(came)
                    judged = verdict(name, came) if name in found else otherwise
                    lines.append(f"| {part} | {rule[1]} | {should(name)} | {shown} | {judged} |")
    return lines


def about(device: str) -> str:
    """The device's name, and the versions."""
    name = torch.cuda.get_device_name(device) if device != "cpu" else "a CPU"
    packages = importlib.metadata.packages_distributions()
    names = {package: packages[package][0] for package in ("torch", "transformers", "vllm") if package in packages}
    versions = [f"{package} {importlib.metadata.version(name)}" for package, name in names.items()]
    return ", ".join([name, f"CUDA {torch.version.cuda}", *versions])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, choices=[1, 2, 3, 4], help="one of the four; by default all")
    parser.add_argument("--device", default="cuda:0", help="cuda:0, or cpu")
    parser.add_argument("--small", action="store_true", help="sizes that say whether this file works, and no more")
    parser.add_argument("--out", type=Path, help="file of the table; by default docs/gpu.md, with --small none")
    options = parser.parse_args(arguments)
    if options.device != "cpu" and not torch.cuda.is_available():
        print("error: torch sees no GPU with CUDA here, and this command measures one", file=sys.stderr)
        return 2
    out = options.out or (None if options.small else ROOT / "docs" / "gpu.md")
    where, kept = about(options.device), []
    if out and out.exists() and where in out.read_text():
        kept = re.findall(r"(?m)^\| \d \|.*$", out.read_text())
    for part in [options.part] if options.part else [1, 2, 3, 4]:
        kept = [line for line in kept if not line.startswith(f"| {part} |")]
        kept = sorted([*kept, *measure_part(part, options.device, options.small)], key=lambda line: line[:5])
        table = ["| part | what | what should come | what came | verdict |", "|---|---|---|---|---|", *kept]
        text = f"# What came on a GPU\n\n`python tests/gpu.py` has written this. On {where}:\n\n" + "\n".join(table)
        if out:
            out.write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
