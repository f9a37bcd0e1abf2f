"""Make docs/walkthrough.md: one optimizer step of the shipped model on eight completions, with all
its numbers.

    python -m docs.walkthrough

Everything on the page is computed by the functions that train.py calls. Text in `code` is cut out
of loss.py.
"""

import inspect
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

import loss
from core.decoding import completion_texts, make_decoding, marked_text, render
from core.engine import engine_settings, make_requests
from core.generators import make_engine
from core.model import load_model, load_tokenizer, model_path
from core.policy import micro_batch
from core.rollouts import Batch, Group, Rollout, SharedParameters
from core.settings import Settings
from data import Problem
from data.tasks import arithmetic
from data.verify import Verdict
from loss import Recipe
from machinery.trainer import make_policy

PAGE = Path(__file__).with_name("walkthrough.md")
CPU = torch.device("cpu")
# Small thinking budgets, so that some completions are interrupted; and a learning rate that moves
# the ratios.
SETTINGS = Settings(threads=1, thinking_budget=(14, 26), learning_rate=6e-4)
PROBLEMS = [
    Problem("36+47=", "83", "data.tasks.arithmetic"),
    Problem("58+64=", "122", "data.tasks.arithmetic"),
]
COMPLETIONS, SEED = 4, 100
UPDATED_AFTER, TRAINED_AT = (
    8,
    8,
)  # tokens; optimizer steps: the batch is as old as PipelineRL-8 allows


# --- one step, as train.py makes it ---------------------------------------------------------------


@dataclass
class Step:
    """What a recipe computes from a batch: a row for each group, or for each of its completions."""

    rewards_PG: Tensor
    counted_PG: Tensor
    advantages_PG: Tensor
    weights_PG: Tensor
    logprobs_BT: Tensor
    log_rho_BT: Tensor
    terms_BT: Tensor
    clipped_BT: Tensor
    loss: float
    gradient_norm: float


def step(recipe: Recipe, batch: Batch, policy) -> Step:
    """The middle of the loop in train.py; the gradient stays in the policy. All completions are one
    micro-batch, in their order: those that do not count have no weight."""
    most, answer = SETTINGS.thinking_budget[1] + SETTINGS.answer_budget, SETTINGS.answer_budget
    rewards_PG = loss.rewards(
        batch.scores_PG, batch.lengths_PG, recipe.length_control, most, answer
    )
    counted_PG = loss.counted_samples(rewards_PG, batch.usable_PG, recipe.zero_variance_filter)
    advantages_PG = loss.advantages(rewards_PG, batch.usable_PG, counted_PG, recipe.advantage_norm)
    weights_PG = loss.token_weights(batch.lengths_PG, counted_PG, recipe.aggregation)
    m = micro_batch(batch.rollouts, list(range(len(batch.rollouts))), CPU)
    logprobs_BT, _ = policy(m, recipe.fp32_logits)
    given = (recipe, logprobs_BT, m.generator_logprobs_BT, m.sampled_BT, advantages_PG.flatten())
    value, _ = loss.policy_loss(*given, weights_PG.flatten())
    policy.zero_grad()
    value.backward()
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), SETTINGS.clip_gradient).item()
    terms_BT, log_rho_BT, clipped_BT = (tensor.detach() for tensor in loss.token_terms(*given))
    tables = (
        rewards_PG,
        counted_PG,
        advantages_PG,
        weights_PG,
        logprobs_BT.detach(),
        log_rho_BT,
        terms_BT,
        clipped_BT,
    )
    return Step(*tables, value.item(), norm)


def sample(engine, tokenizer, problems: list[Problem], number: int, between=None) -> list[Group]:
    """Judged groups; after UPDATED_AFTER tokens `between` is called."""
    groups = []
    for i, problem in enumerate(problems):
        ids = render(tokenizer, problem.prompt)
        seed = (number, i)
        wanted = make_requests(i, ids, COMPLETIONS, SETTINGS.thinking_budget, engine.decoding, seed)
        groups.append(Group(i, 0, i, problem, engine.version, 0, wanted))
        engine.add(wanted)
    steps = 0
    while engine.unfinished:
        for rollout in engine.step():
            group = groups[rollout.request.group]
            group.rollouts[rollout.request.index] = rollout
            right = arithmetic.score(
                group.problem, completion_texts(tokenizer, engine.decoding, [rollout])[0]
            )
            group.verdicts[rollout.request.index] = Verdict(float(right))
        steps += 1
        if between is not None and steps == UPDATED_AFTER:
            between()
    return groups


def one_batch():
    """The batch, the policy that trains on it, and the tokenizer. The policy makes TRAINED_AT steps
    on other problems first. The batch is begun with version 0 of the parameters, and goes on with
    the version of half of these steps."""
    path = model_path(SETTINGS.model)
    tokenizer = load_tokenizer(path)
    decoding = make_decoding(tokenizer, SETTINGS)
    policy = make_policy(SETTINGS, load_model(path, CPU, torch.float32), CPU)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=SETTINGS.learning_rate, betas=SETTINGS.adam_betas, eps=1e-15
    )
    parameters = SharedParameters(policy.model)
    engine, older = (
        make_engine(engine_settings(SETTINGS, ("cpu",), path, decoding)) for _ in range(2)
    )
    others = arithmetic.problems("train", 16 * TRAINED_AT)

    def train(until: int) -> None:
        while parameters.version < until:
            version = parameters.version
            parts = sample(engine, tokenizer, others[16 * version : 16 * version + 16], 1 + version)
            step(Recipe(), Batch(parts, version), policy)
            optimizer.step()
            parameters.write(policy.model.named_parameters(), version + 1)
            engine.update(parameters)

    parameters.write(policy.model.named_parameters(), 0)
    engine.update(parameters)
    older.update(parameters)

    def between() -> None:
        train(TRAINED_AT // 2)
        older.update(parameters)

    groups = sample(older, tokenizer, PROBLEMS, SEED, between)
    train(TRAINED_AT)
    return Batch(groups, TRAINED_AT), policy, tokenizer


# --- the page -------------------------------------------------------------------------------------


def code(function, start: str) -> str:
    """The line of this function of loss.py that starts so."""
    lines = [line.strip() for line in inspect.getsource(function).splitlines()]
    found = [line for line in lines if line.startswith(start)]
    assert len(found) == 1, f"{len(found)} lines of {function.__name__} start with {start!r}"
    return f"[`{function.__name__}`](../loss.py): `{found[0]}`"


def number(value: float, digits: int = 3) -> str:
    """With so many decimals; a zero has no sign."""
    return f"{round(value, digits) + 0:.{digits}f}"


def table(head: list[str], rows: list[list]) -> str:
    """Of Markdown."""
    shown = [
        [number(cell) if isinstance(cell, float) else str(cell) for cell in row] for row in rows
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *shown])


NAMES = [f"{letter}{i + 1}" for letter in "ab" for i in range(COMPLETIONS)]
SHOWN = NAMES.index("b1")  # the completion that is shown token by token


def page() -> str:
    """The text of docs/walkthrough.md."""
    batch, policy, tokenizer = one_batch()
    made = step(Recipe(), batch, policy)
    rollout, first = (
        batch.rollouts[SHOWN],
        len(batch.rollouts[SHOWN].request.prompt_ids) - 1,
    )  # where its tokens begin
    most = int(
        made.log_rho_BT[SHOWN].argmax()
    )  # its token that the steps in between have raised most

    def compared(part: str, values, columns: dict) -> str:
        """A table of what the step is with other values of this part of the recipe. columns: of a
        Step, by name."""
        steps = {value: step(replace(Recipe(), **{part: value}), batch, policy) for value in values}
        columns = {
            "loss": lambda made: made.loss,
            "gradient norm": lambda made: made.gradient_norm,
            **columns,
        }
        rows = [
            [f"`{value}`", *(column(made) for column in columns.values())]
            for value, made in steps.items()
        ]
        return table(["", *columns], rows)

    def of(name: str, field: str, digits: int):
        """A column: the value that this completion has in a table [P, G] of a step."""
        return lambda made: number(getattr(made, field).flatten()[NAMES.index(name)].item(), digits)

    formulas = [[f"`{name}`", f"`{kind.formula}`"] for name, kind in loss.LOSSES.items()]
    term = f"term of token {most - first + 1} of {NAMES[SHOWN]}"
    return f"""{TITLE}
## 1. Ids, tokens, verdicts

The prompts are `{PROBLEMS[0].prompt}` (completions a1 to a4) and `{PROBLEMS[1].prompt}` (b1 to b4). To the model the
second is the ids {rollout.request.prompt_ids}, of which the last is `<think>`. Forced tokens stand in [[ ]]: thinking
had reached its budget.

{table(["", "completion", "sampled tokens", "tokens by version, forced ones too", "verdict"], completions(batch, tokenizer))}

The batch was begun with version 0 of the parameters. After {UPDATED_AFTER} tokens the generator took over version {TRAINED_AT // 2},
and went on with what it had begun. The trainer has version {TRAINED_AT}, so its oldest tokens are {batch.ages_N.max()} steps
off-policy; `pipeline-8` allows 8.

## 2. Rewards, advantages, weights

- The reward is +1 or -1:
  {code(loss.rewards, "rewards_PG = 2")}
- A group counts if not all of its rewards are equal. They are equal if
  {code(loss.zero_variance, "return highest_P <=")}
- The advantage is the reward less the mean of its group,
  {code(loss.advantages, "centred_PG = ")}
- divided by the standard deviation of these over the batch:
  {code(loss.advantages, "return centred_PG /")}
- The weight of a token is 1 / (prompts that count x tokens of this prompt that count):
  {code(loss.token_weights, "return torch.where")}

{table(["", "reward", "mean of the group", "counts", "A", "w of each token"], worth(made))}

The weights of all sampled tokens add up to {(made.weights_PG * batch.lengths_PG).sum():.3f}.

## 3. Ratios and terms, token by token

Of completion {NAMES[SHOWN]}, whose advantage is {made.advantages_PG.flatten()[SHOWN]:.3f}:

- The ratio is rho = pi_train / pi_gen, with pi_gen as it was recorded when the token was sampled:
  {code(loss.token_terms, "log_rho_BT = ")}
- CISPO's term is min(rho, 5) A log pi_train:
  {code(loss.cispo, "return rho_BT.clamp")}

{table(["", "token", "version", "log pi_gen", "log pi_train", "rho", "term", "w x term"], tokens(made, rollout, tokenizer))}

Forced tokens are context: they have no ratio, no term and no weight. If rho is above 1, the steps in between have made
the token more likely; if it is below 1, less likely.

## 4. The loss

The loss is the sum of -w x term over all sampled tokens:
{code(loss.policy_loss, "loss = -")}

{table([*NAMES, "loss"], [[number(-value, 4) for value in (*parts(made), sum(parts(made)))]])}

The norm of its gradient is {made.gradient_norm:.3f}. If that is above `--clip-gradient {SETTINGS.clip_gradient}`, the gradient is scaled down to it before
the optimizer's step.

## 5. What another loss, norm or aggregation changes

The same batch and the same parameters, with one part of the recipe changed.

**Losses.** A clip that decides for a token takes its gradient away. CISPO's cap does not: it limits the
factor of the gradient.

{table(["", "term of a token"], formulas)}

{compared("loss", loss.LOSSES, {"clipped tokens": lambda made: int(made.clipped_BT.sum()), term: lambda made: made.terms_BT[SHOWN, most].item()})}

**Norms of the advantages.**

{compared("advantage_norm", loss.NORMS, {"A of a1": of("a1", "advantages_PG", 3), "A of b1": of("b1", "advantages_PG", 3)})}

**Aggregations.**

{compared("aggregation", loss.AGGREGATIONS, {"w of a1": of("a1", "weights_PG", 5), "w of a2": of("a2", "weights_PG", 5), "w of b1": of("b1", "weights_PG", 5)})}
"""  # noqa: E501


def completions(batch: Batch, tokenizer) -> list[list]:
    """A row for each completion: what was sampled, by which parameters, and its verdict."""

    def by_version(versions) -> str:
        return ", ".join(
            f"{(versions == version).sum()} of version {version}" for version in sorted({*versions})
        )

    return [
        [
            name,
            f"`{marked_text(tokenizer, r)}`",
            length,
            by_version(r.versions),
            "right" if score else "wrong",
        ]
        for name, r, length, score in zip(
            NAMES,
            batch.rollouts,
            batch.lengths_PG.flatten().tolist(),
            batch.scores_PG.flatten().tolist(),
        )
    ]


def worth(made: Step) -> list[list]:
    """A row for each completion: from its reward to its weight."""
    means_PG = made.rewards_PG.mean(1, keepdim=True).expand_as(made.rewards_PG)
    columns = (made.rewards_PG, means_PG, made.counted_PG, made.advantages_PG, made.weights_PG)
    rows = zip(NAMES, *(column.flatten().tolist() for column in columns))
    return [[*row[:3], "yes" if row[3] else "no", row[4], number(row[5], 5)] for row in rows]


def tokens(made: Step, rollout: Rollout, tokenizer) -> list[list]:
    """A row for each token of the completion that is shown."""
    rows, weight, first = (
        [],
        made.weights_PG.flatten()[SHOWN].item(),
        len(rollout.request.prompt_ids) - 1,
    )
    for t, token in enumerate(rollout.tokens.tolist()):
        row = [t + 1, f"`{tokenizer.decode([token])}`", rollout.versions[t]]
        at = (SHOWN, first + t)  # the place that predicts it
        if rollout.sampled[t]:
            row += [
                float(rollout.logprobs[t]),
                made.logprobs_BT[at].item(),
                made.log_rho_BT[at].exp().item(),
            ]
            row += [made.terms_BT[at].item(), number(weight * made.terms_BT[at].item(), 5)]
        else:
            row += ["forced", "", "", "", ""]
        rows.append(row)
    return rows


def parts(made: Step) -> list[float]:
    """What each completion adds to the objective."""
    return (made.terms_BT.sum(1) * made.weights_PG.flatten()).tolist()


TITLE = """# A walk through one batch

Eight completions of two prompts, from ids to the gradient: one optimizer step of ScaleRL with all its numbers, as a
teacher would put it on the board. `python -m docs.walkthrough` makes this page with the shipped model and the
functions that train.py calls ([`docs/walkthrough.py`](walkthrough.py)). Beside the name of a function is the line of
[`loss.py`](../loss.py) that does it. The thinking budgets are small here, so that some completions are interrupted.
The learning rate is three times that of the default run, so that the ratios differ from 1.
"""

if __name__ == "__main__":
    torch.set_num_threads(1)
    PAGE.write_text(page())
    print(f"{PAGE} written")
