"""From a problem to the token ids that a model gets, and from its token ids to the text that is
judged."""

import contextlib
import itertools
from dataclasses import replace

from transformers import AutoConfig, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from core.engine import Decoding
from core.model import in_one_sentence, refuse_unknown
from core.rollouts import Rollout
from core.settings import Sampling, refuse
from data import Problem


def messages(problem: Problem, settings: Sampling) -> list[dict]:
    """What a model is asked: the user's turn, after the system prompt of --system or else of the
    problem, if there is one that is not empty."""
    system = problem.system if settings.system is None else settings.system
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": problem.prompt}]


def rendered(tokenizer: PreTrainedTokenizerBase, turns: list[dict], settings: Sampling) -> str:
    """Messages in the model's chat template, ready for a reply; without a template their text.
    --thinking is `enable_thinking` for the template; one that knows no such choice ignores it."""
    if tokenizer.chat_template is None:
        return "\n\n".join(turn["content"] for turn in turns)
    with in_one_sentence(tokenizer.name_or_path, "its chat template cannot be used"):
        return tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=True, enable_thinking=settings.thinking
        )


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str, special: bool = False) -> list[int]:
    """Token ids of a text; special: with those that the tokenizer puts around one. ValueError, in
    one sentence, if it has none for a part of it."""
    with in_one_sentence(tokenizer.name_or_path, f"its tokenizer cannot read {text[:60]!r}"):
        return tokenizer(text, add_special_tokens=special).input_ids


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, problem: Problem, settings: Sampling
) -> list[int]:
    """Token ids of the `messages`, `rendered`, ready for the model to go on."""
    plain = tokenizer.chat_template is None
    text = rendered(tokenizer, messages(problem, settings), settings)
    ids = token_ids(tokenizer, text, special=plain)
    # Some tokenizers append an EOS; no model would go on after it.
    return ids[:-1] if plain and ids[-1:] == [tokenizer.eos_token_id] else ids


def refuse_template(
    tokenizer: PreTrainedTokenizerBase, problems: list[Problem], settings: Sampling
) -> None:
    """ValueError if the chat template drops or repeats a turn that these problems have."""
    if tokenizer.chat_template is None:
        return
    with_most = max((messages(problem, settings) for problem in problems), key=len)
    turns = [turn | {"content": f"words of the {turn['role']}"} for turn in with_most]
    text = rendered(tokenizer, turns, settings)
    for turn in turns:
        times = text.count(turn["content"])
        kind = "prompt" if turn["role"] == "user" else "system prompt (--system '' leaves it out)"
        refuse(
            times != 1,
            f"--model {tokenizer.name_or_path}: its chat template has {times} times the {kind}",
        )


def refuse_prompts(
    tokenizer: PreTrainedTokenizerBase,
    problems: list[Problem],
    settings: Sampling,
    model: PreTrainedModel,
) -> None:
    """ValueError if the tokenizer cannot read one of their prompts, if a prompt has tokens that the
    model has not, if one is above its budget, or if the chat template does not suit them. Most are
    not rendered here, but when they are handed out: all of a million would take minutes."""
    turns = [turn for problem in problems for turn in messages(problem, settings)]
    texts = dict.fromkeys(turn["content"] for turn in turns)
    with_character = {character: text for text in texts for character in set(text)}
    for text in dict.fromkeys(with_character.values()):
        ids = token_ids(tokenizer, text)
        refuse(
            tokenizer.unk_token_id in ids and tokenizer.unk_token not in text,
            f"--model {tokenizer.name_or_path}: its tokenizer has no tokens for a part of the"
            f" prompt {text[:60]!r}, which it reads as {tokenizer.decode(ids)[:60]!r} (the"
            " shipped model reads sums only; --model names another)",
        )
    refuse_template(tokenizer, problems, settings)
    ids_of = lambda problem: prompt_ids(tokenizer, problem, settings)
    if max(tokenizer.get_vocab().values()) >= model.get_input_embeddings().num_embeddings:
        for problem in problems:
            refuse_unknown(model, ids_of(problem))
    # A text has at most as many tokens as bytes, so only long ones can be above the budget.
    first = problems[0]
    most_bytes = settings.prompt_budget - len(ids_of(replace(first, prompt="")))
    lengths = [
        (len(ids_of(problem)), problem.prompt)
        for problem in problems
        if len(problem.prompt.encode()) > most_bytes or problem.system != first.system
    ]
    most, prompt = max(lengths, default=(0, ""))
    refuse(
        most > settings.prompt_budget,
        f"the prompt {prompt[:60]!r} has {most} tokens with its instruction and the chat template;"
        f" --prompt-budget is {settings.prompt_budget}: --prompt-budget {most} would be enough for"
        " all",
    )


def make_decoding(
    tokenizer: PreTrainedTokenizerBase,
    settings: Sampling,
    length_control: str = "interruption",
    **others,
) -> Decoding:
    """The budgets and markers in ids of this tokenizer; and others, by the names of their fields.
    ValueError if the tokenizer has no such marker, or the phrase has not."""
    end = settings.end_of_thinking
    marker = token_ids(tokenizer, end)
    phrase = token_ids(tokenizer, settings.interruption_phrase)
    if length_control == "interruption":
        refuse(
            len(marker) != 1,
            f"--end-of-thinking {end!r} is {len(marker)} tokens of this model; an interruption"
            " wants exactly one (--length-control penalty wants none)",
        )
        refuse(
            marker[0] not in phrase,
            f"--interruption-phrase {settings.interruption_phrase!r} does not close thinking: it"
            f" must hold {end}",
        )
    example = tokenizer.decode(prompt_ids(tokenizer, Problem("", "", ""), settings))
    return Decoding(
        eos=end_tokens(tokenizer),
        end_of_thinking=marker[0] if len(marker) == 1 else -1,
        thinks=not example.rstrip().endswith(end),  # the prompt does not close thinking
        phrase=tuple(phrase),
        prompt_budget=settings.prompt_budget,
        thinking_budget=settings.thinking_budget[1],
        answer_budget=settings.answer_budget,
        length_control=length_control,
        **others,
    )


def end_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids that end a completion: the EOS of the tokenizer comes first, then those that the model's
    config.json and generation_config.json name. Chat models often have two, one for a turn and one
    for a text. ValueError if there is none."""
    path, named = tokenizer.name_or_path, [tokenizer.eos_token_id]
    for kind in (AutoConfig, GenerationConfig):
        with in_one_sentence(path), contextlib.suppress(OSError):  # the model has no such file
            config = kind.from_pretrained(path, trust_remote_code=False)
            eos = getattr(config, "eos_token_id", None)
            named += eos if isinstance(eos, list) else [eos]
    ids = [each for each in dict.fromkeys(named) if each is not None]
    refuse(not ids, f"--model {path}: no completion could end, since it has no EOS token")
    return tuple(ids)


def completion_text(
    tokenizer: PreTrainedTokenizerBase, decoding: Decoding, rollout: Rollout
) -> str:
    """The text of a rollout, as a task judges it: without EOS, with forced tokens, with `<think>`
    and `</think>` for the model's own markers. If the prompt opens thinking, as many chat templates
    do, the text begins with `<think>`."""
    ids = rollout.tokens.tolist()
    without_eos = ids[:-1] if ids[-1] in decoding.eos else ids
    # Some tokenizers would remove spaces before punctuation, also in a program.
    text = tokenizer.decode(without_eos, clean_up_tokenization_spaces=False)
    if decoding.end_of_thinking < 0:
        return text
    end = tokenizer.decode([decoding.end_of_thinking])
    start = end.replace("/", "", 1)
    if start != end:
        before = tokenizer.decode(rollout.request.prompt_ids[-8:])
        if start in before and end not in before:
            text = start + text
        text = text.replace(start, "<think>")
    return text.replace(end, "</think>")


def quoted(name: str, text: str) -> str:
    """A text of any number of lines, told apart from others by a name and a bar on its left.
    Control characters stand as \\x1b or \\u202e: a terminal shows them, and obeys none."""
    shown = [c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text]
    return f"{name:8}| " + "".join(shown).replace("\n", f"\n{'':8}| ")


def marked_text(tokenizer: PreTrainedTokenizerBase, rollout: Rollout) -> str:
    """The text of a rollout with its EOS, and with forced tokens in [[ ]]."""
    pieces = []
    pairs = zip(rollout.sampled.tolist(), rollout.tokens.tolist())
    for sampled, of_piece in itertools.groupby(pairs, key=lambda pair: pair[0]):
        piece = tokenizer.decode([token for _, token in of_piece])
        pieces.append(piece if sampled else f"[[{piece}]]")
    return "".join(pieces)
