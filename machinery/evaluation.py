"""An evaluation: verdicts on completions of held-out problems, mean@N and pass@k with their
intervals, the report."""

import json
import math
from pathlib import Path

import numpy as np
from tqdm import tqdm

from core.rollouts import Rollout
from core.settings import model_path, run_of
from curve.plots import COMPUTE_UNITS
from data import Problem
from data.load import Source
from data.verify import Verdict, VerifierPool, no_verdict_at_all
from machinery.folder import append_line

Z = 1.959964  # the normal distribution has 95 % within plus and minus this


def judge_all(
    pool: VerifierPool, problems: list[Problem], rollouts: list[Rollout], texts: list[str]
) -> list[Verdict]:
    """The verdict on each rollout, in order; a truncated one is wrong. ValueError if no other one
    got a verdict."""
    to_judge = [
        (i, problems[rollout.request.group], text)
        for i, (rollout, text) in enumerate(zip(rollouts, texts))
        if not rollout.truncated
    ]
    judging = tqdm(pool.judge(to_judge), "judging", len(to_judge), leave=False, disable=None)
    verdicts = dict(judging)
    if failure := no_verdict_at_all([*verdicts.values()]):
        raise ValueError(failure)
    return [verdicts.get(i, Verdict(0.0)) for i in range(len(rollouts))]


def evaluation_figures(rollouts: list[Rollout], verdicts: list[Verdict], samples: int) -> dict:
    """What --evaluate prints and logs; each problem has `samples` completions. pass_rate is
    mean@samples. Beside it the mean score, if a task gives scores between 0 and 1."""
    scores_PN = np.array([verdict.score for verdict in verdicts]).reshape(-1, samples)
    correct_PN = scores_PN == 1
    measured = {"pass_rate": pass_at_k(correct_PN, 1)}
    for k in (4, 16, 64, 256, samples):
        if 1 < k <= samples:
            measured[f"pass@{k}"] = pass_at_k(correct_PN, k)
    if (scores_PN[~correct_PN] > 0).any():
        measured["score_mean"] = pass_at_k(scores_PN, 1)

    figures = {"num_examples": len(rollouts), "problems": len(scores_PN)}
    for name, values in measured.items():
        names = name, f"{name}_low", f"{name}_high"
        figures |= zip(names, (round(value, 4) for value in values))
    return figures | completion_columns([*zip(rollouts, verdicts)])


def completion_columns(judged: list[tuple]) -> dict:
    """Log columns of completions and their verdicts: of a batch, of a validation, or of an
    evaluation."""
    of_each = [(r.sampled.sum(), r.interrupted, r.truncated) for r, _ in judged]
    length, interrupted, truncated = np.mean(of_each, axis=0).tolist()
    return {
        "completion_length": length,
        "interrupted_fraction": interrupted,
        "truncated_fraction": truncated,
        "verifier_failures": sum(verdict.failure is not None for _, verdict in judged),
        "task_errors": sum(verdict.raised for _, verdict in judged),
    }


def pass_at_k(scores_PN: np.ndarray, k: int) -> tuple[float, float, float]:
    """The chance that at least one of k completions of a problem is correct, and its 95 % interval.

    scores_PN: the scores of N completions of each of P problems, 0 if truncated or without a
    verdict. For each problem, the mean of the best score over all choices of k completions: with c
    correct ones the unbiased estimate 1 - C(N - c, k) / C(N, k) (Chen et al. 2021, arXiv
    2107.03374). pass@1 is mean@N. The interval is over problems, as if they were drawn at random.
    It is Wilson's (1927), for as many yes-or-no trials as would scatter as much as the problems do.
    It stays within [0, 1].
    """
    problems, samples = scores_PN.shape
    choices = math.comb(samples, k)
    # With the scores in order: the share of the choices whose best score is the i-th.
    share_with_best_N = [math.comb(i, k - 1) / choices for i in range(samples)]
    value_P = np.sort(scores_PN, axis=1) @ share_with_best_N
    mean = float(value_P.mean())
    # One failed and one solved problem are added, so that equal problems scatter too.
    with_two_P = np.append(value_P, [0.0, 1.0])
    middle = with_two_P.mean()
    trials = float(problems * middle * (1 - middle) / with_two_P.var(ddof=1))
    half = Z * math.sqrt(trials * mean * (1 - mean) + Z**2 / 4)
    low, high = ((trials * mean + Z**2 / 2 + side) / (trials + Z**2) for side in (-half, half))
    return mean, max(0.0, low), min(1.0, high)


def report_evaluation(source: Source, figures: dict, samples: int) -> None:
    """Print the figures of a data set."""
    print(f"{source.name}: {figures['problems']} problems, {samples} completions of each")
    labels = {"pass_rate": f"mean@{samples}", "score_mean": "score"}
    for name in figures:
        if f"{name}_low" in figures:
            low, high = figures[f"{name}_low"], figures[f"{name}_high"]
            label = labels.get(name, name)
            print(f"  {label:9} {figures[name]:.3f}   95 % [{low:.3f}, {high:.3f}]")
    print(
        f"  length    {figures['completion_length']:.1f} sampled tokens;"
        f" interrupted {figures['interrupted_fraction']:.3f},"
        f" truncated {figures['truncated_fraction']:.3f},"
        f" without a verdict {figures['verifier_failures']}"
    )


def log_evaluation(
    log: Path, model: str, source: Source, figures: dict, verdicts: list[Verdict]
) -> None:
    """Add a line with the figures of a data set to the log; and a line for each problem to a file
    beside it, LOG.problems.jsonl: how many of its completions are right. verdicts: problem by
    problem."""
    of_all = {"data": source.name, "model": model}
    when = {}
    state = Path(model_path(model)).parent / "state.json"
    if state.exists():  # of a checkpoint
        stored = json.loads(state.read_text())
        when = {"step": stored["step"], **stored["compute"]}
    elif not run_of(model):  # before training
        when = {"step": 0, **dict.fromkeys(COMPUTE_UNITS, 0)}
    append_line(log, of_all | when | figures)

    correct_PN = np.array([verdict.correct for verdict in verdicts])
    correct_PN = correct_PN.reshape(len(source.validation), -1)
    for problem, correct_N in zip(source.validation, correct_PN):
        line = {"problem": problem.prompt, "answer": problem.answer}
        line |= {"solved": int(correct_N.sum()), "of": len(correct_N)}
        append_line(log.with_suffix(".problems.jsonl"), of_all | line)
