"""Makes the base model that RL on the arithmetic task starts from (`data/arithmetic_base/`,
shipped).

Supervised learning on traces: first clean ones, until the model can add numbers of every length,
then noisy ones, which teach mistakes and rambling for RL to remove. If the model has not learned
the algorithm first, RL depends on luck.

    python -m docs.make_base                        # makes data/arithmetic_base again
    python -m docs.make_base --out /tmp/base --seed 1
    python -m docs.make_base --out models/wide --hidden-size 256 --max-digits 10   # 1.5M parameters

The first takes about three minutes on one core.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from core.screen import say
from curve.flags import option, read_flags, run_command
from data import Problem
from data.tasks import arithmetic
from data.tasks.arithmetic import MAX_DIGITS, draw, score
from tools.imitate import NOT_LEARNED, Example, imitate

BASE_MODEL = Path(__file__).parent.parent / "data" / "arithmetic_base"
HIDDEN_SIZE = 64
NOISY_STEPS = 500
# one token, before </think>
TIME_IS_UP = "Okay, time is up. Let me stop thinking and formulate a final answer now. "


# --- traces to imitate ----------------------------------------------------------------------------


def trace(
    a: int, b: int, rng: random.Random, wrong: float = 0.0, ramble: float = 0.0
) -> tuple[str, str]:
    """A trace and the answer that it leads to. Each step is wrong with probability `wrong`, and the
    next steps build on the mistake. With probability `ramble` the last step is repeated, up to
    three times."""
    steps, answer = [], ""
    carry = 0
    for x, y in zip(reversed(str(a)), reversed(str(b))):
        result = int(x) + int(y) + carry
        if rng.random() < wrong:
            result = rng.choice([other for other in range(20) if other != result])
        steps.append(f"{x}+{y}+{carry}={result:02d}")
        carry = result // 10
        answer = str(result % 10) + answer
    if rng.random() < ramble:  # repeats in the middle would also unlearn which digits come next
        steps += rng.randint(1, 3) * [steps[-1]]
    return ";".join(steps), (str(carry) + answer).lstrip("0") or "0"


def example(tokenizer, rng: random.Random, noisy: bool, max_digits: int = MAX_DIGITS) -> Example:
    """One training text. The tokens of the completion are learned, except the forced ones."""
    a, b = draw(rng, rng.randint(1, max_digits), held_out=False)
    wrong, ramble = (0.3, 0.15) if noisy else (0.0, 0.0)
    thinking, answer = trace(a, b, rng, wrong, ramble)
    pieces = [(f"{a}+{b}=<think>", False)]  # texts, and whether they are learned
    if rng.random() < 0.05:  # cut in its second half: shows what an interruption asks for
        end = rng.randint(len(thinking) // 2, len(thinking) - 1)
        pieces += [(thinking[:end], True), (TIME_IS_UP + "</think>", False), (str(a + b), True)]
    else:
        pieces += [(thinking + "</think>" + answer, True)]
    ids, labels = [], []
    for text, learn in [*pieces, (tokenizer.eos_token, True)]:
        piece = tokenizer(text).input_ids
        ids += piece
        labels += piece if learn else [NOT_LEARNED] * len(piece)
    return ids, labels


# --- the base model -------------------------------------------------------------------------------


def make_tokenizer():
    """One token a character, one each for the markers and for the phrase of an interruption."""
    vocabulary = {character: i for i, character in enumerate("0123456789+=;")} | {"<unk>": 13}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    characters.add_tokens(
        [AddedToken(text, normalized=False) for text in ("<think>", "</think>", TIME_IS_UP)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>"
    )
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<think>{% endif %}"
    )
    return tokenizer


def make_model(tokenizer, hidden_size: int = HIDDEN_SIZE):
    """A Llama of 0.14M parameters, or of another width. What decided whether it learns to carry:
    four full heads and a small rope theta."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden_size,
            intermediate_size=3 * hidden_size,
            num_hidden_layers=2,
            num_attention_heads=4,
            head_dim=32,  # wider than hidden / heads: vLLM on a CPU takes no head below 32
            rope_parameters={"rope_type": "default", "rope_theta": 100.0},
            max_position_embeddings=256,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_tokens" in name or "lm_head" in name:
                parameter.normal_(std=0.02)
            elif parameter.dim() == 2:  # the usual flat 0.02 is far too small for narrow ones
                back_to_residual = "o_proj" in name or "down_proj" in name
                scale = 0.5 if back_to_residual else 1.0
                parameter.normal_(std=scale / math.sqrt(parameter.shape[1]))
    return model


def pass_rates(
    model, tokenizer, per_length: int, seed: int, max_digits: int = MAX_DIGITS
) -> list[float]:
    """Sampled pass rate for each number of digits, on held-out problems; prompts of one length need
    no padding."""
    rates = []
    for digits in range(1, max_digits + 1):
        rng = random.Random(f"check {digits} {seed}")
        pairs = [draw(rng, digits, held_out=True) for _ in range(per_length)]
        prompts = torch.tensor([tokenizer(f"{a}+{b}=<think>").input_ids for a, b in pairs])
        with torch.no_grad():
            output = model.generate(
                input_ids=prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                top_k=0,
                max_new_tokens=10 * max_digits + 40,
            )
        texts = tokenizer.batch_decode(output[:, prompts.shape[1] :])
        solved = 0
        for (a, b), text in zip(pairs, texts):
            completion = text.split(tokenizer.eos_token)[0]
            solved += score(Problem("", str(a + b), arithmetic.__name__), completion)
        rates.append(solved / per_length)
    return rates


def listed(rates: list[float]) -> str:
    return " ".join(f"{rate:.2f}" for rate in rates)


@dataclass(frozen=True)
class Command:
    """Make the base model of the arithmetic task again."""

    out: Path = option(BASE_MODEL, "folder to save the model in")
    seed: int = 0
    clean_steps: int = option(2000, "of imitation, on clean traces; then 500 on noisy ones")
    hidden_size: int = option(HIDDEN_SIZE, "width of the model: 32 gives .05M parameters, 64 .14M")
    max_digits: int = option(
        MAX_DIGITS, "of the numbers; train with --data arithmetic,max_digits=N"
    )
    any_pass_rate: bool = option(
        False, "save the model also if it cannot add every length, or leaves RL little to do"
    )


def main(arguments: list[str]) -> int:
    """The command: train the base model and save it. Returns 0.

    ValueError, and nothing is saved, if it cannot add numbers of every length after the clean
    phase, or if the noisy phase leaves RL too little or too much to do. With `any_pass_rate` such a
    model is saved too.
    """
    command = read_flags(Command, arguments, description=__doc__)
    seed, max_digits = command.seed, command.max_digits
    torch.set_num_threads(1)  # one thread: deterministic, and as fast at this size
    torch.manual_seed(seed)
    rng = random.Random(f"warm start {seed}")
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, command.hidden_size)

    def batches() -> Iterator[list[Example]]:
        for _ in range(command.clean_steps):
            yield [example(tokenizer, rng, False, max_digits) for _ in range(32)]
        rates = pass_rates(model, tokenizer, 200, seed, max_digits)
        say(f"after the clean traces, by digits: {listed(rates)}")
        least = min(rates)
        if least < 0.4 and not command.any_pass_rate:
            raise ValueError(
                f"the model has not learned to add {1 + rates.index(least)} digits (pass rate "
                f"{least:.2f} on clean traces, 0.40 needed): RL would depend on luck. Try another "
                "--seed. Nothing was saved."
            )
        for _ in range(NOISY_STEPS):
            yield [example(tokenizer, rng, True, max_digits) for _ in range(32)]

    learning_rate = 5e-3 * HIDDEN_SIZE / command.hidden_size  # about 1 / sqrt(parameters)
    imitate(model, batches(), command.clean_steps + NOISY_STEPS, learning_rate)
    rates = pass_rates(model, tokenizer, 200, seed, max_digits)
    mean = sum(rates) / len(rates)
    say(f"after the noisy traces, by digits: {listed(rates)}; mean {mean:.3f}")
    if not (0.10 <= mean <= 0.35 or command.any_pass_rate):
        raise ValueError(
            f"the base model's pass rate is {mean:.3f}, outside 0.10 to 0.35. Nothing was saved."
        )
    model.save_pretrained(command.out)
    tokenizer.save_pretrained(command.out)
    return 0


if __name__ == "__main__":
    run_command(main)
