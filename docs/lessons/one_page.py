"""The whole recipe on one page: a language model learns to add, by ScaleRL.

    python -m docs.lessons.one_page          # twenty steps, about a minute on one CPU core

The pass rate of its batches goes from .12 to .53. It samples, judges and trains in turn, in one
process, so a `breakpoint()` works anywhere. The parts of the recipe are functions of loss.py, and
this page calls them. Its losses are those of

    python train.py --one-process --thinking-budget 56 56

at least until rounding changes a sampled token. What train.py adds is for larger models and longer
runs: generators that run ahead of the trainer, micro-batches, several GPUs, checkpoints, verifiers
that may hang, and validations on problems that are held out.

Dimensions: P prompts, G completions of each, R = P x G rows, T columns of tokens, N sampled tokens,
D hidden size, V vocabulary.
"""

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import loss
from data.tasks import arithmetic

STEPS, P, G = 20, 32, 16
THINKING, ANSWER = 56, 9  # budgets, in tokens
LEARNING_RATE, WARMUP = 2e-4, 10
SEED, TRAINING, ORDER = 0, 0, 2  # the kinds of random draws, as in core/feed.py

torch.set_num_threads(1)  # with more threads so small a model is not faster
recipe = loss.Recipe()
FOLDER = "data/arithmetic_base"
model = AutoModelForCausalLM.from_pretrained(
    FOLDER, trust_remote_code=False, attn_implementation="eager"
)
tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=False)
head = loss.Head(model.get_output_embeddings().weight)
(END_OF_THINKING,) = tokenizer("</think>").input_ids
PHRASE = torch.tensor(tokenizer(loss.INTERRUPTION_PHRASE).input_ids)


def trunk(ids_RT, seen_RT, cache=None):
    """The last hidden states [R, T, D]. The cache, if there is one, has the columns before these.
    seen_RT is of all columns: False at padding, which no token attends to."""
    positions_RT = (seen_RT.cumsum(1) - 1).clamp(min=0)
    return model.model(
        input_ids=ids_RT,
        attention_mask=seen_RT.long(),
        position_ids=positions_RT[:, -ids_RT.shape[1] :],
        past_key_values=cache,
    ).last_hidden_state


@torch.no_grad()
def sample(prompts, seeds):
    """A completion of each prompt, all at the same time, token by token.

    Returns ids_RT; seen_RT, False at padding; sampled_RT, True at tokens that the policy chose;
    logprobs_RT, log pi_gen of these; truncated_R."""
    # Padding is on the left of the prompts, so that all completions begin in the same column.
    widest = max(map(len, prompts))
    R, T = len(prompts), widest + THINKING + len(PHRASE) + ANSWER
    ids_RT = torch.full((R, T), tokenizer.pad_token_id)
    seen_RT, sampled_RT = torch.zeros(2, R, T, dtype=torch.bool)
    logprobs_RT = torch.zeros(R, T)
    for row, prompt in enumerate(prompts):
        ids_RT[row, widest - len(prompt) : widest] = torch.tensor(prompt)
        seen_RT[row, widest - len(prompt) : widest] = True

    # A random number for each token of a row, from the row's own seed.
    numbers = [np.random.default_rng(seed).random(THINKING + ANSWER + 1) for seed in seeds]
    noise_RN = torch.tensor(np.array(numbers))
    length_R = torch.zeros(R, dtype=torch.int64)  # sampled tokens
    closed_at_R = torch.full((R,), -1)  # the length at the end of thinking; -1: it goes on
    done_R, truncated_R = torch.zeros(2, R, dtype=torch.bool)
    cache = DynamicCache()
    for t in range(widest, T):
        # The policy chooses the first token at which the cumulative probability passes the number.
        columns = slice(cache.get_seq_length(), t)
        hidden_RD = trunk(ids_RT[:, columns], seen_RT[:, :t], cache)[:, -1]
        logprobs_RV = loss.head_logits(hidden_RD, head, recipe.fp32_logits).log_softmax(-1)
        cumulative_RV = logprobs_RV.double().exp().cumsum(-1)
        passed_R1 = noise_RN.gather(1, length_R[:, None]) * cumulative_RV[:, -1:]
        chosen_R1 = torch.searchsorted(cumulative_RV, passed_R1, right=True)

        # A row takes it, unless it has ended, or a token of the phrase is here already.
        takes_R = ~done_R & ~seen_RT[:, t]
        ids_RT[takes_R, t] = chosen_R1[takes_R, 0]
        logprobs_RT[takes_R, t] = logprobs_RV.gather(1, chosen_R1)[takes_R, 0]
        sampled_RT[:, t] = takes_R
        seen_RT[:, t] |= takes_R
        length_R += takes_R

        # What ends a completion: its EOS, or too long an answer. What ends its thinking: </think>,
        # or its budget. Then the phrase is written into the next columns.
        done_R |= ids_RT[:, t] == tokenizer.eos_token_id
        closes_R = takes_R & (closed_at_R < 0) & (ids_RT[:, t] == END_OF_THINKING)
        closed_at_R[closes_R] = length_R[closes_R]
        interrupt_R, truncate_R = loss.interrupt_or_truncate(
            recipe.length_control, length_R, closed_at_R, THINKING, ANSWER
        )
        interrupt_R &= ~done_R
        if interrupt_R.any():
            closed_at_R[interrupt_R] = length_R[interrupt_R]
            ids_RT[interrupt_R, t + 1 : t + 1 + len(PHRASE)] = PHRASE
            seen_RT[interrupt_R, t + 1 : t + 1 + len(PHRASE)] = True
        truncated_R |= truncate_R & ~done_R
        done_R |= truncated_R
    return ids_RT, seen_RT, sampled_RT, logprobs_RT, truncated_R


problems = arithmetic.problems("train", 4000)
order = np.random.default_rng((SEED, ORDER, 0, 0)).permutation(len(problems))
optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), eps=1e-15, weight_decay=0.01)

for step in range(1, STEPS + 1):
    # 1. The next P prompts, and G completions of each. (Twenty steps do not come to the second
    # epoch, in which the prompts that are solved by now would be left out.)
    numbers = np.arange((step - 1) * P, step * P).repeat(G)
    asked = [problems[order[number]] for number in numbers]
    prompts = [tokenizer(f"{problem.prompt}<think>").input_ids for problem in asked]
    seeds = [(SEED, TRAINING, number, row % G) for row, number in enumerate(numbers)]
    ids_RT, seen_RT, sampled_RT, generator_RT, truncated_R = sample(prompts, seeds)

    # 2. Verdicts: the sum behind </think> is right or wrong. A truncated completion is no member of
    # its group.
    scores_R = torch.zeros(P * G)
    for row, problem in enumerate(asked):
        text = tokenizer.decode(ids_RT[row, seen_RT[row]]).partition("<think>")[2]
        scores_R[row] = arithmetic.score(problem, text.removesuffix("<eos>"))
    scores_R[truncated_R] = 0

    # 3. The credit of each completion in its group and in the batch.
    verdicts = scores_R.view(P, G), sampled_RT.sum(1).view(P, G), ~truncated_R.view(P, G)
    credit = loss.credit(recipe, *verdicts, THINKING, ANSWER)

    # 4. log pi of the sampled tokens again, with a gradient. Column t predicts column t + 1.
    targets_RT, sampled_RT, generator_RT = ids_RT[:, 1:], sampled_RT[:, 1:], generator_RT[:, 1:]
    hidden_RTD = trunk(ids_RT[:, :-1], seen_RT[:, :-1])
    hidden_ND, targets_N = hidden_RTD[sampled_RT], targets_RT[sampled_RT]
    logprobs_N, _ = loss.sampled_logprobs(hidden_ND, head, targets_N, recipe.fp32_logits)
    logprobs_RT = torch.zeros_like(generator_RT).masked_scatter(sampled_RT, logprobs_N)

    # 5. The loss, its gradient, and the step.
    of_rows = credit.advantages_PG.flatten(), credit.weights_PG.flatten()
    policy_loss, _ = loss.policy_loss(recipe, logprobs_RT, generator_RT, sampled_RT, *of_rows)
    policy_loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, step / WARMUP)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step:2}   pass rate {scores_R.mean():.3f}   loss {policy_loss.item():.6f}")
