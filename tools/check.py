"""Whether a model and its data fit, before anything is trained (generate.py --check): a problem as
the model gets it, what ends a completion, the budgets, and the verdict on the reference answer."""

from collections.abc import Iterator

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from core.decoding import Decoding, completion_texts, in_template, rendered, unwritable, visible
from core.limits import in_a_child
from core.rollouts import given_rollout
from core.settings import Sampling
from data import cheap
from data.load import Source
from data.tasks import programming
from data.verify import VerifierPool
from machinery.evaluation import judge_all


def check_fit(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    decoding: Decoding,
    settings: Sampling,
    source: Source,
) -> Iterator[str]:
    """The lines to print about a model and the first held-out problem of a source. A line that
    starts with `!` says what does not fit."""
    template = "its chat template" if tokenizer.chat_template else "no chat template"
    yield (
        f"model      {settings.model}: {type(model).__name__},"
        f" {model.num_parameters():,} parameters, {template}"
    )

    # The first problem, as the model gets it.
    texts = [problem.prompt for problem in source.validation]
    prompts = [*rendered(tokenizer, texts, settings)]
    problem, ids = source.validation[0], prompts[0]
    yield (
        f"problem    the first of {source.name},"
        f" judged by {problem.task.replace('.', '/')}.py; the model gets"
    )
    for line in visible(tokenizer.decode(ids)).split("\n"):
        yield f"  | {line}"
    yield from unwritable(tokenizer, problem.prompt)

    # What ends thinking, and what ends a completion.
    yield f"thinking   {thinking(tokenizer, decoding, settings, ids)}"
    ends = ", ".join(f"{tokenizer.decode([token])!r} ({token})" for token in decoding.eos)
    yield (
        f"ends with  {ends}, or after {decoding.longest_completion} tokens"
        " (--thinking-budget and --answer-budget)"
    )
    yield from unfit_ends(tokenizer, decoding, ids)

    # Whether all of it has room in the model.
    longest = max(map(len, prompts))
    positions = getattr(model.config, "max_position_embeddings", None) or "any number"
    yield (
        f"length     {len(ids)} tokens of prompt, {longest} of the longest of {len(prompts)};"
        f" {decoding.longest} in all at most, and the model holds {positions}"
    )

    yield from reference(tokenizer, decoding, settings, source, ids)


def thinking(
    tokenizer: PreTrainedTokenizerBase, decoding: Decoding, settings: Sampling, ids: list[int]
) -> str:
    """How thinking begins and ends. ids: the prompt."""
    if not decoding.thinks:
        return "the prompt closes it: all is answer"
    marker = settings.end_of_thinking
    opened = marker.replace("/", "", 1) in tokenizer.decode(ids[-8:])
    begins = "the prompt opens it" if opened else "the model begins"
    if decoding.length_control != "interruption":
        return f"{begins}; nothing interrupts it (--length-control {decoding.length_control})"
    low, high = settings.thinking_budget
    phrase = tokenizer.decode(decoding.phrase)
    return (
        f"{begins}; it ends at {marker},"
        f" or after {low} to {high} tokens (--thinking-budget) by {phrase!r}"
    )


def unfit_ends(
    tokenizer: PreTrainedTokenizerBase, decoding: Decoding, ids: list[int]
) -> Iterator[str]:
    """Lines about a prompt that ends with an end token, and about a chat template that ends a reply
    with another."""
    if ids[-1] in decoding.eos:
        end = repr(tokenizer.decode(ids[-1:]))
        yield f"! the prompt ends with {end}: the model is told that all has been said"
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "reply"}]
        after = in_a_child(in_template)(tokenizer, turns).rpartition("reply")[2].strip()
        if after and not any(tokenizer.decode([token]) in after for token in decoding.eos):
            yield (
                f"! the chat template ends a reply with {after!r}, and that is no end token:"
                " name it as eos_token_id in generation_config.json"
            )


def reference(
    tokenizer: PreTrainedTokenizerBase,
    decoding: Decoding,
    settings: Sampling,
    source: Source,
    ids: list[int],
) -> Iterator[str]:
    """Lines about the verdict on the reference answer, as it stands or in a box, and about cheap
    answers that are right often. ids: the prompt."""
    problem = source.validation[0]
    if problem.task == programming.__name__:
        yield "reference  programs are judged by their tests, and the data hold no program to try"
        return
    texts = [problem.answer, f"\\boxed{{{problem.answer}}}"]
    answers = [
        tokenizer(text, add_special_tokens=False).input_ids + [decoding.eos[0]] for text in texts
    ]
    marker = [decoding.end_of_thinking] if decoding.thinks and decoding.end_of_thinking >= 0 else []
    rollouts = [given_rollout(ids, marker + answer) for answer in answers]
    completions = completion_texts(tokenizer, decoding, rollouts)
    with VerifierPool(*settings.verifier_limits) as pool:
        verdicts = judge_all(pool, [problem], rollouts, completions)
        for line in cheap.warnings(source.name, source.validation, pool):
            yield f"cheap      {line}"
    for text, answer, verdict in zip(texts, answers, verdicts):
        if verdict.correct:
            yield f"reference  {text!r} is judged right; it takes {len(answer)} tokens"
            if decoding.length_control == "interruption" and len(answer) > decoding.answer_budget:
                yield (
                    f"! that is more than --answer-budget {decoding.answer_budget}:"
                    " it would be cut off"
                )
            return
    yield (
        f"! the reference {problem.answer!r} is judged wrong, as it stands and in a box;"
        " if the task wants it in another form, try that by hand"
    )
    yield from unwritable(tokenizer, texts[1])
