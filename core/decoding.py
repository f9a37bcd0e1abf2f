"""From text to token ids and back: the chat template, ends and budgets of completions, and their
texts."""

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from transformers import GenerationConfig, PreTrainedTokenizerBase

from core.limits import in_a_child, in_one_sentence
from core.rollouts import Rollout
from core.settings import Sampling
from data.tasks import gym, mathematics

COMPARED = 100  # prompts among the shortest and the longest, of which no two may have the same ids
AT_ONCE = 250  # prompts that a child renders: each child takes 10 to 30 ms


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
        text = prompt if system is None else f"{system}\n\n{prompt}"
        return tokenizer(text).input_ids
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    text = in_template(tokenizer, messages, add_generation_prompt=True, enable_thinking=thinking)
    return tokenizer(text, add_special_tokens=False).input_ids


def in_template(tokenizer: PreTrainedTokenizerBase, messages: list[dict], **options) -> str:
    """The messages in the model's chat template, a program of its maker. ValueError if it fails."""
    with in_one_sentence(tokenizer.name_or_path, "its chat template cannot be used"):
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        given = sum(len(message["content"].encode()) for message in messages)  # bytes
        if len(text.encode()) > 100_000 + 10 * given:
            raise ValueError(f"it makes {len(text):,} characters of a prompt")
    return text


def rendered(
    tokenizer: PreTrainedTokenizerBase, prompts: list[str], settings: Sampling
) -> Iterator[list[int]]:
    """The token ids of each prompt, as `render` makes them. ValueError if the model's files take
    too much."""

    @in_a_child
    def of_some(tokenizer: PreTrainedTokenizerBase, some: list[str]) -> list[list[int]]:
        return [render(tokenizer, prompt, settings.thinking, settings.system) for prompt in some]

    for start in range(0, len(prompts), AT_ONCE):
        yield from of_some(tokenizer, prompts[start : start + AT_ONCE])


def refuse_unfit_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: list[str], settings: Sampling
) -> None:
    """ValueError if one of these prompts is above its budget, or if two have the same ids. Most are
    not rendered here, but when they are handed out: all of a million would take minutes."""
    by_length = sorted(set(prompts), key=lambda prompt: len(prompt.encode()))
    # A text has at most as many tokens as bytes, unless the tokenizer rewrites its characters. So
    # only long ones can be above the budget.
    (shortest_ids,) = rendered(tokenizer, by_length[:1], settings)
    most_bytes = settings.prompt_budget - len(shortest_ids)
    may_be_long = [prompt for prompt in by_length if len(prompt.encode()) > most_bytes]
    some = [*dict.fromkeys(by_length[:COMPARED] + by_length[-COMPARED:] + may_be_long)]
    ids_of = dict(zip(some, rendered(tokenizer, some, settings)))
    longest = max(ids_of, key=lambda prompt: len(ids_of[prompt]))
    most = len(ids_of[longest])
    if most > settings.prompt_budget:
        ours = ""
        for instruction in (settings.instruction, mathematics.INSTRUCTION, gym.INSTRUCTION):
            if instruction and longest.endswith(instruction) and not ours:
                ours = f", {len(tokenizer(instruction).input_ids)} of them the instruction's"
        raise ValueError(
            f"the prompt {longest[:60]!r} has {most} tokens with the chat template{ours};"
            f" --prompt-budget is {settings.prompt_budget}: --prompt-budget {most} would be enough"
            " for all"
        )
    different = {tuple(ids) for ids in ids_of.values()}
    if len(different) < len(ids_of):
        raise ValueError(
            f"--model {settings.model}: its chat template drops the prompt: two have the same"
            " tokens"
        )


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


@in_a_child
def make_decoding(
    tokenizer: PreTrainedTokenizerBase,
    settings: Sampling,
    length_control: str = "interruption",
    fp32_logits: bool | str = True,
) -> Decoding:
    """The budgets and markers in ids of this tokenizer. ValueError if it has no such marker, or the
    phrase has not."""
    end = settings.end_of_thinking
    marker = tokenizer(end, add_special_tokens=False).input_ids
    phrase = tokenizer(settings.interruption_phrase, add_special_tokens=False).input_ids
    if length_control == "interruption":
        if len(marker) != 1:
            raise ValueError(
                f"--end-of-thinking {end!r} is {len(marker)} tokens of this model; an interruption"
                " wants exactly one (--length-control penalty wants none)"
            )
        if marker[0] not in phrase:
            raise ValueError(
                f"--interruption-phrase {settings.interruption_phrase!r} does not close thinking:"
                f" it must hold {end}"
            )
    marker_id = marker[0] if len(marker) == 1 else -1
    # The prompt closes thinking if nothing but spaces comes after the last marker in it.
    example = render(tokenizer, "", settings.thinking)
    closed = False
    if marker_id in example:
        after_last_marker = example[::-1].index(marker_id)
        closed = not tokenizer.decode(example[len(example) - after_last_marker :]).strip()
    return Decoding(
        eos=end_tokens(tokenizer),
        end_of_thinking=marker_id,
        thinks=not closed,
        phrase=tuple(phrase),
        prompt_budget=settings.prompt_budget,
        thinking_budget=settings.thinking_budget[1],
        answer_budget=settings.answer_budget,
        length_control=length_control,
        fp32_logits=fp32_logits,
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
    without_eos = [ids[:-1] if ids[-1] in decoding.eos else ids for ids in completions]
    texts = decode_all(tokenizer, without_eos)
    if decoding.end_of_thinking < 0:
        return texts
    end = tokenizer.decode([decoding.end_of_thinking])
    start = end.replace("/", "", 1)
    if start != end:
        ends_of_prompts = [rollout.request.prompt_ids[-8:] for rollout in rollouts]
        for i, before in enumerate(decode_all(tokenizer, ends_of_prompts)):
            if start in before and end not in before:
                texts[i] = start + texts[i]
            texts[i] = texts[i].replace(start, "<think>")
    return [text.replace(end, "</think>") for text in texts]


def decode_all(tokenizer: PreTrainedTokenizerBase, completions: list[list[int]]) -> list[str]:
    """`tokenizer.decode` of each. A tokenizer in Rust uses all cores: one takes 5 ms for 14,000
    tokens."""
    if tokenizer.is_fast and not tokenizer.clean_up_tokenization_spaces:
        return tokenizer.backend_tokenizer.decode_batch(completions, skip_special_tokens=False)
    return [tokenizer.decode(ids) for ids in completions]


def unwritable(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    """A line about the characters of a text that are lost in the tokenizer."""
    ids = tokenizer(text, add_special_tokens=False).input_ids
    lost = {*text} - {*tokenizer.decode(ids)} - {*" \n\t"}
    if not lost:
        return []
    return [
        f"! the tokenizer has no tokens for {''.join(sorted(lost))!r}: the model never sees them"
        " (the shipped model reads sums only; --model names another)"
    ]


def quoted(name: str, text: str) -> str:
    """A text of any number of lines, told apart from others by a name and a bar on its left."""
    return f"{name:8}| " + visible(text).replace("\n", f"\n{'':8}| ")


def visible(text: str) -> str:
    """The text with its control characters as \\x1b or \\u202e: a terminal shows them, and obeys
    none."""

    def shown(character: str) -> str:
        if character.isprintable() or character in "\n\t":
            return character
        return character.encode("unicode_escape").decode()

    return "".join(map(shown, text))


def marked_text(tokenizer: PreTrainedTokenizerBase, rollout: Rollout) -> str:
    """The text of a rollout with its EOS, and with forced tokens in [[ ]]."""
    pieces = []
    pairs = zip(rollout.sampled.tolist(), rollout.tokens.tolist())
    for sampled, of_piece in itertools.groupby(pairs, key=lambda pair: pair[0]):
        piece = tokenizer.decode([token for _, token in of_piece])
        pieces.append(piece if sampled else f"[[{piece}]]")
    return "".join(pieces)
