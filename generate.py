"""The generator: prompts go in, completions with their log-probabilities come out.

    python generate.py --model runs/NAME/model --prompt "4729+8153="      # print a completion
    python generate.py --model runs/NAME/model --evaluate                 # mean@16, pass@k on held-out problems
    python generate.py --model Qwen/Qwen3-0.6B --evaluate --data aime24   # on a GPU, if there is one
    python generate.py --model MODEL --data my.jsonl --check              # whether model and data fit

In training, each generator is a process (`generator_process`). It is sent `Work` through a queue,
keeps its engine busy with it, and sends back `Report`s with finished rollouts. The newest
parameters lie in shared memory: between two steps of the engine they are taken over at once, and
completions in flight go on with them over the keys and values that older parameters left in the
cache (PipelineRL; sec. 3.1, A.11 of the paper). So every token carries the version of the
parameters that sampled it, and the log-probability that it was sampled with.

    1. TorchEngine         decodes many completions at once, over a stock transformers model
    2. generator_process   work in, reports out, the newest parameters between two steps
    3. main                the command: print completions, evaluate a model, or see whether data fit it

Dimensions: S slots of the engine, n <= S of them live, T positions, D hidden size, V vocabulary.
"""

import dataclasses
import importlib
import os
import signal
import sys

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # Ctrl-C ends the seconds of imports below without a traceback
    os.environ.setdefault(
        "OMP_WAIT_POLICY", "PASSIVE"
    )  # torch's threads that wait leave the cores to other processes

from core.settings import GenerateCommand, parse
from curve.flags import errors_as_sentences, run_command

if __name__ == "__main__":
    with (
        errors_as_sentences()
    ):  # before the slow imports, so that --help and wrong flags are answered fast
        command = parse(sys.argv[1:], GenerateCommand, description=__doc__)

import torch
import transformers

from core.decoding import (
    completion_texts,
    make_decoding,
    marked_text,
    quoted,
    render_all,
    unwritable,
)
from core.engine import (
    engine_settings,
    make_requests,
    refuse_split,
    sample_all,
)
from core.generators import make_engine, out_of_memory
from core.model import load_model, load_tokenizer, model_path, refuse_too_long
from core.rollouts import Rollout, SharedParameters
from core.torch_engine import refuse_wrong_over_slots
from core.vllm_engine import VllmEngine
from data import Problem
from data.load import load_evaluation, task_of
from data.verify import VerifierPool
from machinery.evaluation import evaluation_figures, judge_all, report_evaluation
from tools.check import check_fit

# --- 3. The command -------------------------------------------------------------------------------


def main(command: GenerateCommand) -> int:
    """The command. Returns the exit status: 1 if --check has found what does not fit, else 0.
    ValueError, in one sentence, if the flags, the data or the model cannot be used."""
    transformers.utils.logging.disable_progress_bar()
    if bool(command.prompt) + command.evaluate + command.check != 1:
        raise ValueError("say one of --prompt TEXT, --evaluate and --check")
    names = () if command.prompt else command.data
    sources = [
        load_evaluation(name, command.problems, instruction=command.instruction) for name in names
    ]
    for source in sources:
        for note in source.notes:
            print(f"{source.name}: {note}", file=sys.stderr)

    path = model_path(command.model)
    tokenizer = load_tokenizer(path)
    decoding = make_decoding(tokenizer, command, command.length_control)
    decoding = dataclasses.replace(decoding, temperature=command.temperature)
    devices = tuple(f"cuda:{i}" for i in range(torch.cuda.device_count()))[
        : command.tensor_parallel
    ] or ("cpu",)
    settings = engine_settings(command, devices, path, decoding)
    model = load_model(path, torch.device("cpu"), torch.float32)
    if not command.check:  # which shows the problem first
        refuse_too_long(model, decoding)
    refuse_split(settings.engine, command.tensor_parallel, model.config.num_attention_heads)
    if settings.engine == "torch":
        refuse_wrong_over_slots(model, path)

    if command.check:
        lines = [
            line
            for source in sources
            for line in check_fit(model, tokenizer, decoding, command, source)
        ]
        print("\n".join(lines))
        render_all(
            tokenizer,
            [problem.prompt for source in sources for problem in source.validation],
            command,
        )
        refuse_too_long(model, decoding)
        return int(any(line.startswith("!") for line in lines))

    samples = command.samples or (1 if command.prompt else 16)
    completions = samples * max([1, *(len(source.validation) for source in sources)])
    try:
        engine = make_engine(
            dataclasses.replace(settings, slots=min(command.slots, completions)), model
        )
        if isinstance(engine, VllmEngine):  # it is made without parameters
            parameters = SharedParameters(model)
            parameters.write(model.named_parameters(), version=0)
            engine.update(parameters)

        def sample(problems: list[Problem]) -> list[Rollout]:
            ids = render_all(tokenizer, [problem.prompt for problem in problems], command)
            requests = []
            for i, problem in enumerate(problems):
                seed = (command.seed, i)
                requests += make_requests(
                    i, ids[problem.prompt], samples, command.thinking_budget, decoding, seed
                )
            return sample_all(engine, requests, progress=command.evaluate)

        if command.prompt:
            task = task_of(command.data[0])
            worded = getattr(
                importlib.import_module(task), "worded", lambda text, _: text
            )  # as in training
            prompt = worded(command.prompt, command.instruction)
            for line in unwritable(tokenizer, prompt):
                print(line, file=sys.stderr)
            for rollout in sample([Problem(prompt, "", task)]):
                print(quoted("prompt", prompt))
                print(quoted("reply", marked_text(tokenizer, rollout)))
        for source in sources:
            rollouts = sample(source.validation)
            texts = completion_texts(tokenizer, decoding, rollouts)
            with VerifierPool(
                command.verifiers, command.verifier_time_limit, command.verifier_memory
            ) as pool:
                verdicts = judge_all(pool, source.validation, rollouts, texts)
            figures = evaluation_figures(rollouts, verdicts, samples)
            report_evaluation(command.model, path, source, figures, samples, command.log)
            for wanted in (True, False):
                by_problem = {
                    rollout.request.group: rollout
                    for rollout, verdict in zip(rollouts, verdicts)
                    if verdict.correct == wanted
                    and verdict.failure is None
                    and not rollout.truncated
                }
                for rollout in [*by_problem.values()][: command.show]:
                    print(quoted("prompt", source.validation[rollout.request.group].prompt))
                    print(quoted("right" if wanted else "wrong", marked_text(tokenizer, rollout)))
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise ValueError(out_of_memory(error)) from None
    return 0


if __name__ == "__main__":
    run_command(main, command)
