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
from core.engine import engine_settings, make_requests
from core.generators import make_engine
from core.model import load_model, load_tokenizer
from core.policy import micro_batch
from core.rollouts import Batch, Group, Rollout, SharedParameters
from core.settings import Settings, model_path
from core.text import completion_text, make_decoding, marked_text, prompt_ids
from data import Problem
from data.tasks import arithmetic
from data.verify import Verdict
from loss import Recipe
from machinery.trainer import make_policy
from train import make_optimizer

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
UPDATED_AFTER = 8  # tokens: then the generator takes over newer parameters
TRAINED_AT = 8  # the version that is trained: the batch is as old as PipelineRL-8 allows


# --- one step, as train.py makes it ---------------------------------------------------------------


@dataclass
class Step:
    """What a recipe computes from a batch. In [B, T] there is a row for each completion."""

    credit: loss.Credit
    logprobs_BT: Tensor
    log_rho_BT: Tensor
    terms_BT: Tensor
    clipped_BT: Tensor
    loss: float
    gradient_norm: float

    def of_row(self, row: int) -> tuple[float, float]:
        """The advantage and the weight of each token of a completion."""
        return tuple(each.flatten()[row].item() for each in self.credit[2:])


def step(recipe: Recipe, batch: Batch, policy) -> Step:
    """The middle of the loop in train.py; the gradient stays in the policy. All completions are one
    micro-batch, in their order: those that do not count have no weight."""
    credit = loss.credit(
        recipe,
        batch.scores_PG,
        batch.lengths_PG,
        batch.usable_PG,
        SETTINGS.thinking_budget[1],
        SETTINGS.answer_budget,
    )
    widths = 0, max(rollout.total_tokens for rollout in batch.rollouts) - 1
    m = micro_batch(batch.rollouts, range(len(batch.rollouts)), widths, CPU)
    logprobs_BT, _ = policy(m, recipe.fp32_logits)
    advantages_B = credit.advantages_PG.flatten()
    given = (recipe, logprobs_BT, m.generator_logprobs_BT, m.sampled_BT, advantages_B)
    policy_loss, _ = loss.policy_loss(*given, credit.weights_PG.flatten())
    policy.zero_grad()
    policy_loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), SETTINGS.clip_gradient).item()
    terms_BT, log_rho_BT, clipped_BT = loss.token_terms(*given)
    return Step(
        credit,
        logprobs_BT.detach(),
        log_rho_BT,
        terms_BT.detach(),
        clipped_BT,
        policy_loss.item(),
        norm,
    )


def sample(
    engine, tokenizer, problems: list[Problem], number: int, between=lambda: None
) -> list[Group]:
    """Judged groups; after UPDATED_AFTER tokens `between` is called."""
    groups = []
    for i, problem in enumerate(problems):
        ids = prompt_ids(tokenizer, problem, SETTINGS)
        seed = (number, i)
        wanted = make_requests(i, ids, COMPLETIONS, SETTINGS.thinking_budget, engine.decoding, seed)
        groups.append(Group(i, 0, i, problem, engine.version, 0, wanted))
        engine.add(wanted)
    steps = 0
    while engine.unfinished:
        for rollout in engine.step():
            request, group = rollout.request, groups[rollout.request.group]
            text = completion_text(tokenizer, engine.decoding, rollout)
            group.rollouts[request.index] = rollout
            group.verdicts[request.index] = Verdict(float(arithmetic.score(group.problem, text)))
        steps += 1
        if steps == UPDATED_AFTER:
            between()
    return groups


def one_batch():
    """The batch, the policy that trains on it, and the tokenizer. The policy makes TRAINED_AT steps
    on other problems first. The batch is begun with version 0 of the parameters, and goes on with
    the version of half of these steps."""
    path = model_path(SETTINGS.model)
    tokenizer = load_tokenizer(path)
    decoding = make_decoding(tokenizer, SETTINGS)
    policy = make_policy(SETTINGS, load_model(path), CPU)
    optimizer = make_optimizer(SETTINGS, policy)
    parameters = SharedParameters(policy.model)
    settings = engine_settings(SETTINGS, "cpu", decoding)
    engine, older = make_engine(settings), make_engine(settings)
    others = arithmetic.problems("train", 16 * TRAINED_AT)

    def train(until: int) -> None:
        while parameters.version < until:
            version = parameters.version
            problems = others[16 * version : 16 * (version + 1)]
            groups = sample(engine, tokenizer, problems, 1 + version)
            step(Recipe(), Batch(groups, version), policy)
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
    (found,) = [line for line in lines if line.startswith(start)]
    return f"[`{function.__name__}`](../loss.py): `{found}`"


def number(value: float, digits: int = 3) -> str:
    """With so many decimals; a zero has no sign."""
    return f"{round(value, digits) + 0:.{digits}f}"


def table(head: list[str], rows: list[list]) -> str:
    """Of Markdown."""
    lines = [head, ["---"] * len(head)]
    for row in rows:
        lines.append([number(cell) if isinstance(cell, float) else str(cell) for cell in row])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


NAMES = [f"{letter}{i + 1}" for letter in "ab" for i in range(COMPLETIONS)]
SHOWN = NAMES.index("b1")  # the completion that is shown token by token


def page() -> str:
    """The text of docs/walkthrough.md."""
    batch, policy, tokenizer = one_batch()
    made = step(Recipe(), batch, policy)
    sections = [
        TITLE,
        verdicts_section(batch, tokenizer),
        credit_section(made, batch),
        tokens_section(made, batch.rollouts[SHOWN], tokenizer),
        loss_section(made),
        changes_section(batch, policy),
    ]
    return "\n".join(sections)


TITLE = """# A walk through one batch

![The pipeline: the feed hands requests to the generators, verifiers judge the rollouts, the loop
trains on whole groups, and each new version of the parameters goes to the generators through shared
memory](pictures/pipeline.svg)

Eight completions of two prompts, from ids to the gradient: one optimizer step of ScaleRL with all
its numbers, as a teacher would put it on the board. `python -m docs.walkthrough` makes this page
with the shipped model and the functions that train.py calls
([`docs/walkthrough.py`](walkthrough.py)). Beside the name of a function is the line of
[`loss.py`](../loss.py) that does it. The thinking budgets are small here, so that some completions
are interrupted. The learning rate is three times that of the default run, so that the ratios differ
from 1.
"""


def verdicts_section(batch: Batch, tokenizer) -> str:
    head = ["", "completion", "sampled tokens", "tokens by version, forced ones too", "verdict"]
    lengths, scores = batch.lengths_PG.flatten().tolist(), batch.scores_PG.flatten().tolist()
    rows = []
    for name, rollout, length, score in zip(NAMES, batch.rollouts, lengths, scores):
        versions = sorted({*rollout.versions})
        of_version = [f"{(rollout.versions == v).sum()} of version {v}" for v in versions]
        text = f"`{marked_text(tokenizer, rollout)}`"
        rows.append([name, text, length, ", ".join(of_version), "right" if score else "wrong"])
    return f"""## 1. Ids, tokens, verdicts

The prompts are `{PROBLEMS[0].prompt}` (completions a1 to a4) and `{PROBLEMS[1].prompt}` (b1 to b4).
To the model the second is the ids {batch.rollouts[SHOWN].request.prompt_ids}, of which the last is
`<think>`. Forced tokens stand in [[ ]]: thinking had reached its budget.

{table(head, rows)}

The batch was begun with version 0 of the parameters. After {UPDATED_AFTER} tokens the generator
took the newest version, {TRAINED_AT // 2}, and went on with what it had begun. The trainer has
version {TRAINED_AT}, so its oldest tokens are {batch.ages_N.max()} steps off-policy. `pipeline-8`
allows 8.
"""


def credit_section(made: Step, batch: Batch) -> str:
    rewards_PG, counted_PG, advantages_PG, weights_PG = made.credit
    means_PG = rewards_PG.mean(1, keepdim=True).expand_as(rewards_PG)
    columns = (rewards_PG, means_PG, counted_PG, advantages_PG, weights_PG)
    rows = []
    for name, *values in zip(NAMES, *(column.flatten().tolist() for column in columns)):
        reward, mean, counts, advantage, weight = values
        rows.append([name, reward, mean, "yes" if counts else "no", advantage, number(weight, 5)])
    head = ["", "reward", "mean of the group", "counts", "A", "w of each token"]
    return f"""## 2. Rewards, advantages, weights

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

{table(head, rows)}

The weights of all sampled tokens add up to {(weights_PG * batch.lengths_PG).sum():.3f}.
"""


def tokens_section(made: Step, rollout: Rollout, tokenizer) -> str:
    advantage, weight = made.of_row(SHOWN)
    rows = []
    for t, token in enumerate(rollout.tokens.tolist()):
        row = [t + 1, f"`{tokenizer.decode([token])}`", rollout.versions[t]]
        at = (SHOWN, len(rollout.request.prompt_ids) - 1 + t)  # the column that predicts it
        if rollout.sampled[t]:
            term, logprob = made.terms_BT[at].item(), made.logprobs_BT[at].item()
            row += [float(rollout.logprobs[t]), logprob, made.log_rho_BT[at].exp().item()]
            row += [term, number(weight * term, 5)]
        else:
            row += ["forced", "", "", "", ""]
        rows.append(row)
    head = ["", "token", "version", "log pi_gen", "log pi_train", "rho", "term", "w x term"]
    return f"""## 3. Ratios and terms, token by token

Of completion {NAMES[SHOWN]}, whose advantage is {advantage:.3f}:

- The ratio is rho = pi_train / pi_gen, with pi_gen as it was recorded when the token was sampled:
  {code(loss.token_terms, "log_rho_BT = ")}
- CISPO's term is min(rho, 5) A log pi_train:
  {code(loss.cispo, "terms_BT = ")}

{table(head, rows)}

Forced tokens are context: they have no ratio, no term and no weight. If rho is above 1, the steps
in between have made the token more likely; if it is below 1, less likely.
"""


def loss_section(made: Step) -> str:
    # What each completion adds to the loss.
    parts = (-made.terms_BT.sum(1) * made.credit.weights_PG.flatten()).tolist()
    row = [number(part, 4) for part in [*parts, sum(parts)]]
    return f"""## 4. The loss

The loss is the sum of -w x term over all sampled tokens:
{code(loss.policy_loss, "loss = -")}

{table([*NAMES, "loss"], [row])}

The norm of its gradient is {made.gradient_norm:.3f}. If that is above
`--clip-gradient {SETTINGS.clip_gradient}`, the gradient is scaled down to it before the optimizer's
step.
"""


def changes_section(batch: Batch, policy) -> str:
    head = ["", "loss", "gradient norm", "clipped tokens", "A of a1, b1", "w of a1, b1"]

    def compared(part: str, values) -> str:
        """A table of what the step is with other values of this part of the recipe."""
        rows = []
        for value in values:
            other = step(replace(Recipe(), **{part: value}), batch, policy)
            advantages, weights = zip(*map(other.of_row, (0, SHOWN)))
            row = [f"`{value}`", other.loss, other.gradient_norm, int(other.clipped_BT.sum())]
            row.append(", ".join(map(number, advantages)))
            row.append(", ".join(number(weight, 5) for weight in weights))
            rows.append(row)
        return table(head, rows)

    formulas = [[f"`{name}`", f"`{entry.formula}`"] for name, entry in loss.LOSSES.items()]
    return f"""## 5. What another loss, norm or aggregation changes

The same batch and the same parameters, with one part of the recipe changed.

**Losses.** A clip that decides for a token takes its gradient away. CISPO's cap does not: it limits
the factor of the gradient. No gradient flows through sg(x). s is one ratio for a completion: the
exp of its mean log rho.

{table(["", "term of a token"], formulas)}

{compared("loss", loss.LOSSES)}

**Norms of the advantages.**

{compared("advantage_norm", loss.NORMS)}

**Aggregations.**

{compared("aggregation", loss.AGGREGATIONS)}
"""


if __name__ == "__main__":
    torch.set_num_threads(1)
    PAGE.write_text(page())
    print(f"{PAGE} written")
