"""From text to token ids and back: the chat template, ends and budgets of completions, and their
texts."""

import contextlib
import itertools
from dataclasses import dataclass

from transformers import GenerationConfig, PreTrainedTokenizerBase

from core.limits import in_one_sentence
from core.rollouts import Rollout
from core.settings import Sampling
from data.tasks import gym, mathematics


def render(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    thinking: bool = True,
    system: str | None = None,
) -> list[int]:
    """Token ids of a user's turn in the model's chat template, after a system prompt if there is
    one, ready for the model to go on. thinking: `enable_thinking` for the template; templates that
    know no such choice ignore it."""
    if tokenizer.chat_template is None:
        return tokenizer(prompt if system is None else f"{system}\n\n{prompt}").input_ids
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": prompt})
    text = in_template(tokenizer, messages, add_generation_prompt=True, enable_thinking=thinking)
    return tokenizer(text, add_special_tokens=False).input_ids


def in_template(tokenizer: PreTrainedTokenizerBase, messages: list[dict], **options) -> str:
    """The messages in the model's chat template, a program of its maker. ValueError if it fails or
    takes too much."""
    with in_one_sentence(tokenizer.name_or_path, "its chat template cannot be used", limited=True):
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        if len(text.encode()) > 100_000 + 10 * sum(
            len(message["content"].encode()) for message in messages
        ):
            raise ValueError(f"it makes {len(text):,} characters of a prompt")
    return text


def render_all(
    tokenizer: PreTrainedTokenizerBase, prompts: list[str], settings: Sampling
) -> dict[str, list[int]]:
    """Token ids of all prompts, by their text. ValueError if one is above its budget, or if two
    have the same ids."""
    ids_of = {
        prompt: render(tokenizer, prompt, settings.thinking, settings.system) for prompt in prompts
    }
    longest, budget = max(prompts, key=lambda prompt: len(ids_of[prompt])), settings.prompt_budget
    if (most := len(ids_of[longest])) > budget:
        said = [
            end for end in (settings.instruction, mathematics.INSTRUCTION, gym.INSTRUCTION) if end
        ]
        end = next(filter(longest.endswith, said), "")
        ours = f", {len(tokenizer(end).input_ids)} of them the instruction's" if end else ""
        length = f"{most} tokens with the chat template{ours}; --prompt-budget is {budget}"
        raise ValueError(
            f"the prompt {longest[:60]!r} has {length}: --prompt-budget {most} would be enough for all"
        )
    if len({tuple(ids) for ids in ids_of.values()}) < len(ids_of):
        raise ValueError(
            f"--model {settings.model}: its chat template drops the prompt: two have the same tokens"
        )
    return ids_of


@dataclass(frozen=True)
class Decoding:
    """What all completions of a run have in common."""

    eos: tuple[int, ...]  # ids that end a completion
    end_of_thinking: int  # id of </think>; -1 if the model has none: then nothing is interrupted
    thinks: bool  # False if the prompt closes thinking: then all is answer
    phrase: tuple[int, ...]  # ids of the interruption phrase
    prompt_budget: int  # tokens
    thinking_budget: int  # sampled tokens, the most that a request may have
    answer_budget: int  # sampled tokens
    length_control: str  # as in loss.Recipe
    fp32_logits: bool | str  # as in loss.Recipe
    temperature: float = 1.0  # of training; generate.py takes others, 0 is the likeliest token

    @property
    def longest_completion(self) -> int:
        """The most tokens that a completion can have, forced ones included."""
        forced = len(self.phrase) if self.length_control == "interruption" else 0
        return self.thinking_budget + forced + self.answer_budget

    @property
    def longest(self) -> int:
        """The most tokens that a prompt and its completion can have."""
        return self.prompt_budget + self.longest_completion


def make_decoding(
    tokenizer: PreTrainedTokenizerBase, settings: Sampling, length_control: str = "interruption",
    fp32: bool | str = True,
) -> Decoding:  # fmt: skip
    """The budgets and markers in ids of this tokenizer. ValueError if it has no such marker, or the
    phrase has not."""
    end = settings.end_of_thinking
    marker = tokenizer(end, add_special_tokens=False).input_ids
    phrase = tokenizer(settings.interruption_phrase, add_special_tokens=False).input_ids
    if length_control == "interruption":
        if len(marker) != 1:
            wanted = "an interruption wants exactly one (--length-control penalty wants none)"
            raise ValueError(
                f"--end-of-thinking {end!r} is {len(marker)} tokens of this model; {wanted}"
            )
        if marker[0] not in phrase:
            text = settings.interruption_phrase
            raise ValueError(
                f"--interruption-phrase {text!r} does not close thinking: it must hold {end}"
            )
    marker_id = marker[0] if len(marker) == 1 else -1
    example = render(tokenizer, "", settings.thinking)
    last_marker = max((i for i, token in enumerate(example) if token == marker_id), default=None)
    closed = last_marker is not None and not tokenizer.decode(example[last_marker + 1 :]).strip()
    return Decoding(
        eos=end_tokens(tokenizer),
        end_of_thinking=marker_id,
        thinks=not closed,
        phrase=tuple(phrase),
        prompt_budget=settings.prompt_budget,
        thinking_budget=settings.thinking_budget[1],
        answer_budget=settings.answer_budget,
        length_control=length_control,
        fp32_logits=fp32,
    )


def end_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids that end a completion: the EOS of the tokenizer, and the EOS in the model's
    generation_config.json. Chat models often have two, one for a turn and one for a text.
    ValueError if there is none."""
    configured = None
    with in_one_sentence(tokenizer.name_or_path, "its generation_config.json cannot be used"):
        with contextlib.suppress(OSError):  # the model has no such file
            configured = GenerationConfig.from_pretrained(tokenizer.name_or_path).eos_token_id
        configured = configured if isinstance(configured, list) else [configured]
        ids = {int(token) for token in (tokenizer.eos_token_id, *configured) if token is not None}
    if not ids:
        raise ValueError(
            f"--model {tokenizer.name_or_path}: no completion could end, since it has no EOS token"
        )
    return tuple(sorted(ids))


def completion_texts(
    tokenizer: PreTrainedTokenizerBase, decoding: Decoding, rollouts: list[Rollout]
) -> list[str]:
    """The text of each rollout, as a task judges it: without EOS, with forced tokens, with
    `<think>` and `</think>` for the model's own markers. If the prompt opens thinking, as many chat
    templates do, the text begins with `<think>`."""
    completions = [rollout.tokens.tolist() for rollout in rollouts]
    texts = decode_all(
        tokenizer, [ids[:-1] if ids[-1] in decoding.eos else ids for ids in completions]
    )
    if decoding.end_of_thinking < 0:
        return texts
    end = tokenizer.decode([decoding.end_of_thinking])
    start = end.replace("/", "", 1)
    if start != end:
        ends_of_prompts = decode_all(
            tokenizer, [rollout.request.prompt_ids[-8:] for rollout in rollouts]
        )
        opened = [
            start if start in before and end not in before else "" for before in ends_of_prompts
        ]
        texts = [(before + text).replace(start, "<think>") for before, text in zip(opened, texts)]
    return [text.replace(end, "</think>") for text in texts]


def decode_all(tokenizer: PreTrainedTokenizerBase, completions: list[list[int]]) -> list[str]:
    """`tokenizer.decode` of each. A tokenizer in Rust uses all cores: one takes 5 ms for 14,000
    tokens."""
    if tokenizer.is_fast and not tokenizer.clean_up_tokenization_spaces:
        return tokenizer.backend_tokenizer.decode_batch(completions, skip_special_tokens=False)
    return [tokenizer.decode(ids) for ids in completions]


def unwritable(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    """A line about the characters of a text that are lost in the tokenizer."""
    lost = (
        {*text}
        - {*tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids)}
        - {*" \n\t"}
    )
    never = "the model never sees them (the shipped model reads sums only; --model names another)"
    return [f"! the tokenizer has no tokens for {''.join(sorted(lost))!r}: {never}"] if lost else []


def quoted(name: str, text: str) -> str:
    """A text of any number of lines, told apart from others by a name and a bar on its left."""
    return "\n".join(
        f"{name if i == 0 else '':8}| {line}" for i, line in enumerate(visible(text).split("\n"))
    )


def visible(text: str) -> str:
    """The text with its control characters as \\x1b or \\u202e: a terminal shows them, and obeys
    none."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )


def marked_text(tokenizer: PreTrainedTokenizerBase, rollout: Rollout) -> str:
    """The text of a rollout with its EOS, and with forced tokens in [[ ]]."""
    pieces = []
    for sampled, places in itertools.groupby(
        range(len(rollout.tokens)), key=lambda i: rollout.sampled[i]
    ):
        piece = tokenizer.decode(rollout.tokens[[*places]].tolist())
        pieces.append(piece if sampled else f"[[{piece}]]")
    return "".join(pieces)
