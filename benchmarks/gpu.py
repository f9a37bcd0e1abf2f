"""The proof on one GPU, in at most 570 seconds (twice as many with vLLM), the most telling first.

    python benchmarks/gpu.py                        # on cuda:0, without a hub
    python benchmarks/gpu.py --small --device cpu   # in small: whether this file works, and no more

Each step is a process of its own with a limit of seconds. What it measures is a line of
gpu/table.md at once, beside what should come. What it prints is in gpu/STEP.txt.
"""

import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import torch
from common import ROOT, make_parser
from faults import RealRun, last_step, log, project
from steps import rollout
from transformers import Qwen3Config, Qwen3ForCausalLM

from core.model import load_model
from core.policy import micro_batches
from core.rollouts import SharedParameters
from core.settings import Settings
from docs.make_base import BASE_MODEL, make_tokenizer
from machinery import ranks, trainer

# The seconds of each step at most; 570 of all together (1,140 with vLLM).
LIMITS = {
    "machine": 40,
    "locked_memory": 40,
    "attention": 40,
    "trainer_tests": 150,
    "default_run": 105,
    "float16": 75,
    "killed_and_resumed": 110,  # with engine_tests beside it
    "qwen3_model": 50,
    "qwen3_run": 135,
    "trainer_speed": 90,
    # Where vLLM is installed: with it in the place of our engine.
    "vllm_tests": 150,
    "vllm_float32": 120,
    "vllm_bfloat16": 120,
    "vllm_qwen3": 180,
}

parser = make_parser(__doc__)
parser.add_argument("--device", type=torch.device, default="cuda:0")
parser.add_argument("--small", action="store_true")
parser.add_argument("--out", type=Path, default="gpu")
parser.add_argument("--vllm-options", default='{"enforce_eager":true}', help="of train.py")
parser.add_argument("--step", default="main", help="this one alone, in this process")
HERE = parser.parse_args()
OUT = HERE.out.absolute()
DEVICE = HERE.device
ON_GPU = DEVICE.type == "cuda"

# --- what is measured, and how --------------------------------------------------------------------


def tell(what: str, aim: str, *came) -> None:
    """Write a line of the table. aim: what should come."""
    short = (f"{one:.4g}" if isinstance(one, float) else one for one in came)
    with open(OUT / "table.md", "a") as file:
        print(f"| {HERE.step} | {what} | {aim} |", *short, "|", file=file)


def size(usual, small):
    return small if HERE.small else usual


def memory() -> float:
    """GiB of the GPU that all processes have taken."""
    free, total = torch.cuda.mem_get_info() if ON_GPU else (0, 0)
    return (total - free) / 2**30


def seconds(work) -> float:
    """How long a call takes, until the device has done it."""
    start = time.perf_counter()
    work()
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def start(limit: float, *arguments, file=None) -> subprocess.Popen:
    """Start Python. After so many seconds it gets a Ctrl-C, at which pytest and train.py end in
    order, and 15 seconds later it is killed. file: for its output."""
    limit *= size(1, 9)  # a small machine may be busy
    command = ["timeout", "--signal=INT", "--kill-after=15", limit, sys.executable, *arguments]
    return subprocess.Popen([*map(str, command)], stdout=file, stderr=file)


def start_step(step: str, limit: float) -> subprocess.Popen:
    file = open(OUT / f"{step}.txt", "w")
    return start(limit, __file__, *sys.argv[1:], "--out", OUT, "--step", step, file=file)


def train(name: str, flags: str = "", script: Path = ROOT / "train.py") -> None:
    """Run train.py, and tell what its log says and how much memory was taken. Half a minute of the
    step is for the start of this process and the end of the run."""
    few = "--steps 2 --prompts-per-step 4 --completions-per-prompt 4 --validation-problems 4"
    engine = "vllm" if HERE.step.startswith("vllm") else "torch"
    flags = f"--engine {engine} --name {name} {flags} {size('', few)}"
    given = [*flags.split(), "--vllm-options", HERE.vllm_options]
    run, most = start(LIMITS[HERE.step] - 30, script, *given), 0.0
    while run.poll() is None:
        most = max(most, memory())
        time.sleep(0.5)
    steps, validations = (log(Path("runs", name), kind) for kind in ("train", "validation"))
    first, last = (row["wall_seconds"] for row in (steps[0], steps[-1]))
    tell("steps, seconds to the first, the last", "0 to 160, 90 at most", len(steps), first, last)
    tell("pass rates", "default: .12 to .97", *(row["pass_rate"] for row in validations))
    tell("nats of mismatch", "below .01", *(row["mismatch_mean"] for row in validations))
    for side in ("trainer", "generator"):
        tell(f"tokens/s of the {side}", "", steps[-1][f"{side}_tokens_per_second"])
    tell("GiB of the GPU at the peak", "", most)


def test(file: str, which: str) -> None:
    """Run tests of a file, and tell how many passed."""
    flags = f"-m pytest --all -v --tb=short -p no:xdist -o addopts= {ROOT}/tests/{file} -k"
    start(130, *flags.split(), which).wait()
    tell("tests", "all passed", (OUT / f"{HERE.step}.txt").read_text().splitlines()[-1])


# --- the steps ------------------------------------------------------------------------------------


def machine() -> None:
    """What there is."""
    tell("torch, GiB of the GPU that are taken", "below 1", torch.__version__, memory())


def locked_memory() -> None:
    """Parameters in shared memory are locked and given back, again and again: each copy holds its
    own numbers, and none of what was at its address before."""
    model, reader = load_model(str(BASE_MODEL)), load_model(str(BASE_MODEL)).to(DEVICE)
    wrong = 0
    for version in range(20):
        for parameter in model.parameters():
            parameter.data.fill_(version)
        shared = SharedParameters(model)
        if ON_GPU:
            shared.pin()
        shared.write(model.named_parameters(), version)
        shared.read_into(reader)
        wrong += any((parameter != version).any() for parameter in reader.parameters())
        del shared
    tell("wrong copies of 20", "0", wrong)


def attention() -> None:
    """The kernels that the trainer's attention takes."""
    for dtype, heads in ((torch.bfloat16, 8), (torch.float32, 16)):
        made = lambda heads: torch.randn(2, heads, 512, 128, device=DEVICE, dtype=dtype)
        query, keys = made(16), made(heads)
        kernel = torch._fused_sdp_choice(query, keys, keys, is_causal=True, enable_gqa=heads < 16)
        tell(f"kernel, {dtype}", "1, 2 or 3; 0 is math with quadratic memory", kernel)


def trainer_tests() -> None:
    test("test_trainer.py", size("not ranks", "budget"))


def default_run() -> None:
    train("default")


def float16() -> None:
    """What a GPU without bfloat16 computes in."""
    train("float16", "--dtype float16 --steps 16")


def engine_tests() -> None:
    test("test_engines.py", size("not vllm", "natural_ends and not vllm"))


def killed_and_resumed() -> None:
    """kill -9 of a generator, then of the trainer, and --resume."""
    beside = start_step("engine_tests", 100)
    run = RealRun(Path.cwd(), "--engine torch --steps 12")
    run.until_step(2)
    run.kill(run.children()[-1])
    run.until_step(6)
    run.kill()
    resumed = RealRun(Path.cwd(), f"--resume {run.folder}")
    tell("status and last step of the resumed run", "0 12", resumed.end(), last_step(run.folder))
    beside.wait()


def qwen3_model() -> None:
    """Save random weights in the shape of Qwen3-0.6B. They take any token alike, and so many end a
    completion that it has some 150."""
    tokenizer = make_tokenizer()
    config = Qwen3Config(
        num_hidden_layers=size(28, 2),
        vocab_size=size(151_936, 1000),
        hidden_size=1024,
        intermediate_size=3072,
        num_attention_heads=16,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    )
    with DEVICE:  # a CPU takes half a minute
        model = Qwen3ForCausalLM(config)
    ends = range(19, config.vocab_size, 150)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *ends]
    model.save_pretrained("qwen3")
    tokenizer.save_pretrained("qwen3")


def qwen3_run() -> None:
    """Both sides on this GPU. A random model solves nothing and no group would count, so a coin is
    the verdict."""
    coin = "def score(problem, completion):\n    return random.random() < 0.5\n"
    folder = Path(tempfile.mkdtemp(dir="."))
    script = project(folder, data__tasks__arithmetic=coin) / "train.py"
    flags = (
        "--model qwen3 --data arithmetic --defaults toy --thinking-budget 200 300 --steps 4"
        " --answer-budget 16 --prompts-per-step 8 --validation-problems 4 --validation-samples 4"
    )
    train(HERE.step, flags, script)


def trainer_speed() -> None:
    """Two sequences of 16,384 tokens, forward and backward, in the shape of Qwen3-0.6B, with
    checkpointing."""
    length, settings = size(16_384, 64), Settings(gradient_checkpointing=True)
    rollouts = [rollout(0, i, [1], [2] * (length - 1)) for i in range(2)]
    (batch,) = micro_batches(rollouts, [0, 1], 2 * length, DEVICE, 0, 1, False)
    with ranks.other_ranks(settings, None, (), None):
        policy = trainer.make_policy(settings, load_model("qwen3"), DEVICE)
        for head in (True, "split", False):

            def backward():
                logprobs, _ = policy(batch, head)
                logprobs.sum().backward()

            least = min(seconds(backward) for _ in range(3))
            tell(f"tokens/s with --fp32-logits {head}", "True: 12,000", 2 * length / least)


def vllm_tests() -> None:
    """An update in flight against a forward with new parameters over old keys and values, and what
    else the tests say of both engines."""
    test("test_engines.py", size("vllm and (logprobs or pitfall)", "vllm and pitfall_14_after"))


def vllm_float32() -> None:
    train("float32", "--dtype float32 --steps 16")


def vllm_bfloat16() -> None:
    train("bfloat16", "--dtype bfloat16 --steps 16")


def vllm_qwen3() -> None:
    qwen3_run()


def main() -> None:
    """All steps in their order, in a folder for their runs."""
    OUT.mkdir(exist_ok=True)
    (OUT / "table.md").write_text("| step | what | aim | came |\n|---|---|---|---|\n")
    if ON_GPU:  # torch says what is wrong if there is none
        tell("the GPU", "", torch.cuda.get_device_name(DEVICE))
    os.environ["SCALERL_TEST_DEVICE"] = str(DEVICE)
    end = time.monotonic() + size(1140 if find_spec("vllm") else 570, 9999)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.chdir(folder)
        for step, limit in LIMITS.items():
            if step.startswith("vllm") and not find_spec("vllm"):
                tell(f"left out: {step}", "", "vLLM is not installed")
                continue
            began = time.monotonic()
            limit = min(limit, end - began)
            status = start_step(step, limit).wait()
            tell(f"status of {step}, seconds", f"0, {limit:.0f}", status, time.monotonic() - began)
    print((OUT / "table.md").read_text())


if __name__ == "__main__":
    globals()[HERE.step]()
