"""Print completions of a model, or evaluate it on held-out problems.

    python generate.py --model runs/NAME/model --prompt "4729+8153="      # print a completion
    python generate.py --model runs/NAME/model --evaluate                 # mean@16, pass@k
    python generate.py --model Qwen/Qwen3-0.6B --evaluate --data aime24   # on a GPU, if one is here

In training, each generator is a process. Its story is told in core/:

    generators.py     the process: it takes work from a queue, keeps its engine busy, sends reports
    engine.py         what any engine does: a queue of requests, and completions in slots
    torch_engine.py   the engine that can be read: many completions at once, a stock model
    vllm_engine.py    the engine for GPUs, with the same calls
    text.py           from a prompt to token ids, and from token ids to the text that is judged
    model.py          a model and its tokenizer, loaded or refused; attention.py: how it attends

The newest parameters lie in shared memory (rollouts.py). Between two steps of its engine a
generator takes them over at once. Completions in flight go on with them, over the keys and values
that older parameters left in the cache (PipelineRL; sec. 3.1, A.11 of the paper). So every token
carries the version of the parameters that sampled it, and the log-probability that it was sampled
with.

This file is the command: it makes one engine in its own process. `print_completions` is --prompt,
and `evaluate` is --evaluate.
"""

import importlib
import signal
import sys
from dataclasses import replace

if __name__ == "__main__":
    # Ctrl-C ends the seconds of imports below without a traceback.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

import core.processes  # noqa: F401, before torch: its threads that wait leave the cores to others
from core.settings import GenerateCommand, model_path, parse, refuse, say_notes
from curve.flags import errors_as_sentences, run_command

if __name__ == "__main__":
    # Before the slow imports, so that --help and wrong flags are answered fast.
    with errors_as_sentences():
        command = parse(sys.argv[1:], GenerateCommand, description=__doc__)

import torch
from transformers import PreTrainedTokenizerBase

from core.check import refuse_unfit
from core.engine import Engine, engine_settings, make_requests, sample_all
from core.generators import make_engine, out_of_memory
from core.model import load_model, load_tokenizer
from core.rollouts import Rollout, SharedParameters
from core.screen import say
from core.text import (
    completion_text,
    make_decoding,
    marked_text,
    prompt_ids,
    quoted,
    refuse_prompts,
)
from data import Problem
from data.load import load_evaluation, task_of
from data.verify import Verdict, VerifierPool
from machinery.evaluation import (
    evaluation_figures,
    judge_all,
    log_evaluation,
    report_evaluation,
)

SHOWN = 2  # completions of each kind, by --evaluate


def main(command: GenerateCommand) -> int:
    """The command. Returns 0; ValueError, in one sentence, if the flags, the data or the model
    cannot be used."""
    refuse(bool(command.prompt) == command.evaluate, "say one of --prompt TEXT and --evaluate")
    goes = command.evaluate or not command.log
    refuse(not goes, "--log goes with --evaluate: it gets the figures of data sets")
    try:
        (print_completions if command.prompt else evaluate)(command)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise ValueError(out_of_memory(error)) from None
    return 0


# --- the two commands -----------------------------------------------------------------------------


def print_completions(command: GenerateCommand) -> None:
    """--prompt: print completions of a text, which is worded as the prompts of --data are."""
    name, has_system = task_of(command.data[0])
    if has_system and command.system is None:
        say(f"{command.data[0]} has system prompts, and this prompt has none: --system gives one")
    task = importlib.import_module(name)
    prompt = command.prompt
    if hasattr(task, "worded"):
        prompt = task.worded(prompt, command.instruction)
    samples = command.samples or 1
    problems = [Problem(prompt, "", task.__name__)]
    tokenizer, engine = load(command, problems, samples)
    for rollout in sample(command, tokenizer, engine, problems, samples):
        print(quoted("prompt", prompt))
        print(quoted("reply", marked_text(tokenizer, rollout)))


def evaluate(command: GenerateCommand) -> None:
    """--evaluate: print mean@samples and pass@k of each data set, and some completions."""
    sources = [
        load_evaluation(name, command.problems, command.instruction) for name in command.data
    ]
    say_notes(sources)
    if command.log:
        open(command.log, "a").close()  # OSError now, and not after hours of sampling
    samples = command.samples or 16
    most = max(len(source.validation) for source in sources)
    all_problems = [problem for source in sources for problem in source.validation]
    tokenizer, engine = load(command, all_problems, samples * most)
    for source in sources:
        problems = source.validation
        rollouts = sample(command, tokenizer, engine, problems, samples)
        texts = [completion_text(tokenizer, engine.decoding, rollout) for rollout in rollouts]
        with VerifierPool(*command.verifier_limits) as pool:
            verdicts = judge_all(pool, problems, rollouts, texts)
        figures = evaluation_figures(rollouts, verdicts, samples)
        report_evaluation(source, figures, samples)
        if command.log:
            log_evaluation(command.log, command.model, source, figures, verdicts)
        for kind, chosen in examples(rollouts, verdicts).items():
            for rollout in [*chosen.values()][:SHOWN]:
                print(quoted("prompt", problems[rollout.request.group].prompt))
                print(quoted(kind, marked_text(tokenizer, rollout)))


def examples(rollouts: list[Rollout], verdicts: list[Verdict]) -> dict[str, dict[int, Rollout]]:
    """Completions that are right, right in part, wrong, or truncated, by the numbers of their
    problems: of each problem one a kind, if it has one."""
    kinds = {"right": {}, "in part": {}, "wrong": {}, "truncated": {}}
    for rollout, verdict in zip(rollouts, verdicts):
        kind = "right" if verdict.correct else "in part" if verdict.score > 0 else "wrong"
        kind = "truncated" if rollout.truncated else kind
        if not verdict.failure:
            kinds[kind][rollout.request.group] = rollout
    return kinds


# --- the model that is asked ----------------------------------------------------------------------


def load(
    command: GenerateCommand, problems: list[Problem], completions: int
) -> tuple[PreTrainedTokenizerBase, Engine]:
    """The model's tokenizer, and the model in an engine for so many completions at once at most.
    ValueError if it cannot be used for these problems."""
    path = model_path(command.model)
    tokenizer = load_tokenizer(path)
    decoding = make_decoding(
        tokenizer, command, command.length_control, temperature=command.temperature
    )
    device = "cuda:0" if torch.cuda.device_count() else "cpu"
    settings = engine_settings(command, device, decoding)
    settings = replace(settings, slots=min(settings.slots, completions))
    model = load_model(path)
    refuse_prompts(tokenizer, problems, command, model)
    refuse_unfit(model, settings, share_prompts=False)
    engine = make_engine(settings, model)
    if settings.engine == "vllm":  # it is made without parameters
        parameters = SharedParameters(model)
        parameters.write(model.named_parameters(), version=0)
        engine.update(parameters)
    return tokenizer, engine


def sample(
    command: GenerateCommand,
    tokenizer: PreTrainedTokenizerBase,
    engine: Engine,
    problems: list[Problem],
    samples: int,
) -> list[Rollout]:
    """So many completions of each problem, problem by problem."""
    requests, budget = [], command.thinking_budget
    for i, problem in enumerate(problems):
        ids = prompt_ids(tokenizer, problem, command)
        seed = (command.seed, i)
        requests += make_requests(i, ids, samples, budget, engine.decoding, seed)
    return sample_all(engine, requests)


if __name__ == "__main__":
    run_command(main, command)
