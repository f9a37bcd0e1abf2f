"""A world in one process: small groups and requests of a test's own, optimizer steps on them by
`train.train` itself, and what plain forwards say of a completion."""

import importlib.util
import json
import os
import shlex
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributions import Categorical
from torch.nn.utils.rnn import pad_sequence
from torch.optim.optimizer import register_optimizer_step_pre_hook

import generate
import loss
import train
from core.engine import EngineSettings
from core.feed import Feed, Prompts
from core.model import checksum, load_model, load_tokenizer
from core.rollouts import Group, Request, SharedParameters, given_rollout
from core.settings import GenerateCommand, Sampling, Settings, parse, read_sources
from core.text import make_decoding
from data import Problem
from data.verify import Verdict
from docs.make_base import make_tokenizer
from machinery.folder import checkpoints, json_lines
from machinery.measures import Compute
from machinery.ranks import Stop
from machinery.record import Record
from machinery.run import Run
from machinery.trainer import Start, gathered

FIRST = 50  # steps made before; past the warm-up
CPU = torch.device("cpu")
# Of the tested engines; benchmarks/gpu.py says a GPU.
DEVICE = os.environ.get("SCALERL_TEST_DEVICE", "cpu")

# A developer's machine may be without vLLM, and then its tests are skipped; in CI (.ci/run sets CI)
# they are not.
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None and "CI" not in os.environ,
    reason="vLLM is not installed",
)


def asked(flags, command=Settings):
    """The settings that a user asks for by these flags."""
    return parse(shlex.split(flags), command)


def run_train(flags):
    """The command `python train.py FLAGS`, in this process. Returns its exit status."""
    return train.main(asked(flags))


def run_generate(flags):
    """The command `python generate.py FLAGS`, in this process. Returns its exit status."""
    return generate.main(asked(flags, GenerateCommand))


# --- groups that are trained on -------------------------------------------------------------------


def settings(steps=1, **changes):
    """Of a run of so many steps, on one thread of the CPU."""
    given = {"steps": FIRST + steps, "validation_every": 10**6, "checkpoint_every": 10**6}
    given["share_prompts"] = not changes.get("gradient_checkpointing")  # as run.open_run does
    given |= {"threads": 1, "prompts_per_step": 3, "completions_per_prompt": 4}
    return Settings(**given | changes)


def rollout(group, index, prompt, tokens, sampled=None, truncated=False):
    made = given_rollout(prompt, tokens)
    if sampled is not None:
        made.sampled[:] = [*sampled]
    noise = np.random.default_rng((group, index)).random(len(tokens))
    return replace(
        made,
        request=replace(made.request, group=group, index=index, thinking_budget=9),
        logprobs=np.where(made.sampled, -noise.astype(np.float32) - 0.1, 0.0).astype(np.float32),
        versions=made.versions + np.int32(FIRST),
        truncated=truncated,
    )


def make_group(number, rollouts, correct):
    """A finished group of these rollouts."""
    problem = Problem(f"{number}+1=", str(number + 1), "data.tasks.arithmetic")
    group = Group(number, 0, number, problem, FIRST, 0, [rollout.request for rollout in rollouts])
    group.rollouts = dict(enumerate(rollouts))
    group.verdicts = {i: Verdict(verdict) for i, verdict in enumerate(correct)}
    return group


def batch_of_groups(seed=0, long_prompts=False):
    """Three groups of four ragged completions with forced and truncated ones among them. Of the
    long prompts, of 12 and 13 tokens, two are the same."""
    rng = np.random.default_rng(seed)
    groups = []
    for number in range(3):
        prompt = rng.integers(18, size=rng.integers(2, 7)).tolist()
        if long_prompts:
            prompt = [*range(12 + number % 2)]
        rollouts, correct = [], []
        for index in range(4):
            tokens = rng.integers(18, size=rng.integers(3, 15))
            sampled = [index != 1 or place not in (1, 2) for place in range(len(tokens))]
            truncated = (number, index) == (0, 3)
            rollouts.append(rollout(number, index, prompt, tokens, sampled, truncated))
            correct.append(bool(rng.random() < 0.5) if index else number > 0)
        correct[2] = not correct[0]
        groups.append(make_group(number, rollouts, correct))
    return groups


def groups_of_every_fate():
    """Three groups: one with a truncated completion, one with a completion that has no verdict, and
    one that is solved, of zero variance and with a long answer. Parameters change while a
    completion is sampled."""
    groups = batch_of_groups()
    groups[1].verdicts[3] = Verdict(0.0, "time limit", "30 s")
    groups[2].verdicts = dict.fromkeys(range(4), Verdict(1.0))
    groups[2].problem = replace(groups[2].problem, answer="1" * 5000)
    for r in (r for group in groups for r in group.rollouts.values()):
        r.versions[:] = FIRST - np.arange(len(r.tokens)) // 4
    return groups


# --- plain forwards -------------------------------------------------------------------------------


def policy_of(rollout, model, old=None, kept=0, temperature=1.0):
    """The distribution of each token of a completion, from a plain forward; and its tokens. With
    `old`, keys and values of the first `kept` positions are those of the model `old`, which has
    sampled what they lead to."""
    prompt = rollout.request.prompt_ids
    ids, cache, logits = torch.tensor([prompt + rollout.tokens.tolist()]), {}, []
    if kept:
        before = old(input_ids=ids[:, :kept], use_cache=True)
        cache, logits = {"past_key_values": before.past_key_values}, [before.logits]
    logits = torch.cat([*logits, model(input_ids=ids[:, kept:], **cache).logits], 1)
    of_tokens = logits[0, len(prompt) - 1 : -1] / temperature
    return Categorical(logits=of_tokens), ids[0, len(prompt) :]


@torch.no_grad()
def largest_error(rollout, *of_model, start=0, end=None):
    """The most that the recorded log-probabilities of sampled tokens are off, of these completion
    tokens. of_model: as in `policy_of`."""
    policy, tokens_T = policy_of(rollout, *of_model)
    errors = np.abs(policy.log_prob(tokens_T).numpy() - rollout.logprobs)
    return errors[start:end][rollout.sampled[start:end]].max(initial=0.0)


def credit_of(chosen, batch):
    """The credit of these completions, by loss.py."""
    of_batch = batch.scores_PG, batch.lengths_PG, batch.usable_PG
    return loss.credit(chosen.recipe, *of_batch, chosen.thinking_budget[1], chosen.answer_budget)


def loss_by_hand(model, batch, chosen):
    """The loss of a step by loss.py, from a plain forward of each completion, without padding."""
    credit, rows = credit_of(chosen, batch), []
    for r in batch.rollouts:
        policy, tokens_T = policy_of(r, model)
        logprobs_T = policy.log_prob(tokens_T)
        rows.append((logprobs_T, torch.tensor(r.logprobs), torch.tensor(r.sampled)))
    columns = [pad_sequence(column, batch_first=True) for column in zip(*rows)]
    of_completions = credit.advantages_PG.flatten(), credit.weights_PG.flatten()
    return loss.policy_loss(chosen.recipe, *columns, *of_completions)[0]


# --- steps ----------------------------------------------------------------------------------------


class GivenGroups(Feed):
    """A feed whose batches a test has made."""

    def __init__(self, chosen, batches, parameters, folder):
        engines = [SimpleNamespace(device="cpu")]
        prompts = Prompts(read_sources(chosen), load_tokenizer(folder), None)
        super().__init__(chosen, prompts, engines, parameters, lambda: False)
        self.batches = list(batches)

    def start(self):
        self.generators = [SimpleNamespace(slots=1)]

    def batch(self, step):
        return self.batches.pop(0) if self.batches else None

    def validate(self, step):
        return batch_of_groups(seed=7)


def train_rank(
    rank,
    chosen,
    name,
    batches,
    folder,
    parameters=None,
    step=FIRST,
    checkpoint=None,
):
    """One rank of a run that goes from `step` to its last step: all of `train.train`, on these
    batches. Returns the Run that rank 0 has; None on another rank."""
    run = None
    parameters = parameters or SharedParameters(load_model(name))
    weights = checksum(load_model(name))
    start = Start(chosen, step, name, weights, checkpoint, parameters, 64)
    if rank == 0:
        feed = GivenGroups(chosen, batches, parameters, name)
        folder.mkdir(parents=True, exist_ok=True)
        record = Record(folder, Compute(1, 1000, {None: 10}), feed)
        run = Run(start, record, Stop(), None)
    train.train(rank, start, run)
    return run


def train_on(chosen, name, batches, folder):
    """The Run of one rank on these batches, and the gradient of each optimizer step by parameter
    name."""
    names, gradients = [name for name, _ in load_model(name).named_parameters()], []

    def catch(optimizer, *_):
        if optimizer.param_groups[0]["lr"] == 0:
            return  # on a GPU it is tried whether a step fits
        own = [p.grad for group in optimizer.param_groups for p in group["params"]]
        named = [(name, grad) for name, grad in zip(names, own) if grad is not None]
        gradients.append({name: gathered(grad).cpu().clone() for name, grad in named})

    handle = register_optimizer_step_pre_hook(catch)
    try:
        return train_rank(0, chosen, name, batches, folder), gradients
    finally:
        handle.remove()


def write_lines(path, lines):
    """Write a file of lines of JSON."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def rewrite(path, **changes):
    """Change some entries of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def add_R0(folder):
    """The validation of step 0, of which the feed of a test makes none."""
    lines = json_lines(folder / "log.jsonl")
    first = next(line for line in lines if line["kind"] == "validation")
    write_lines(folder / "log.jsonl", [first | {"step": 0}, *lines])


def stored(folder):
    """All parameters and moments in the newest checkpoint of a run, by name."""
    newest = checkpoints(folder)[-1]
    parameters = load_model(str(newest / "model")).named_parameters()
    moments = load_file(newest / "optimizer.safetensors")
    return {name: parameter.detach() for name, parameter in parameters} | moments


# --- what is sampled ------------------------------------------------------------------------------


def decoding(**changes):
    """Small budgets and the markers of the arithmetic task's tokenizer, with changes."""
    settings = Sampling(prompt_budget=40, thinking_budget=(30, 30), answer_budget=6)
    return replace(make_decoding(make_tokenizer(), settings), **changes)


def settings_of(folder, name="torch", dtype=torch.float32, slots=48, **changes):
    """What an engine is made of, with these changes of `decoding`."""
    # Many share a GPU.
    return EngineSettings(folder, DEVICE, dtype, 1, slots, decoding(**changes), name, memory=0.05)


def requests(completions, thinking=30, seed=0, validation=False):
    """Requests for so many completions of each of twelve prompts, of 2 to 13 tokens."""
    return [
        Request(i, j, [i, 7, *range(i)], thinking, (seed, i, j), validation)
        for i in range(12)
        for j in range(completions)
    ]


def parameters_of(model, version=0):
    """Shared parameters that hold those of a model."""
    shared = SharedParameters(model)
    shared.write(model.named_parameters(), version)
    return shared


def change(shared, model, version):
    """Write another version of the parameters, which the model gets too."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    shared.write(model.named_parameters(), version)
