"""A causal language model as trainer and generator both see it: loaded or refused, its chat template, how completions
end, and their budgets in tokens."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from machinery.rollouts import Rollout
from machinery.settings import Sampling

ROOT = Path(__file__).resolve().parent.parent  # where the scripts are, and the shipped model

# --- loaded or refused ----------------------------------------------------------------------------------------------


def model_path(name: str) -> str:
    """Where --model NAME is: a folder, seen from here or from the scripts, or else a name on the hub. ValueError for a
    folder that holds no model."""
    beside = ROOT / name
    folder = beside if beside.is_dir() and not Path(name).exists() else Path(name)
    is_path = folder.is_absolute() or name.startswith("./") or len(folder.parts) > 2
    if not folder.exists() and (is_path or Path(folder.parts[0]).is_dir()):
        raise ValueError(f"--model {name}: there is no such folder")  # and no hub needs to be asked
    if folder.is_dir() and not (folder / "tokenizer_config.json").exists():
        inside = f"; did you mean {folder / 'model'}?" if (folder / "model").is_dir() else ""
        raise ValueError(f"--model {name}: the folder holds no model{inside}")
    return str(folder)


def _load(kind, path: str, **options):
    """What transformers loads; ValueError, in one sentence, whatever a broken folder or the hub make it raise."""
    try:
        return kind.from_pretrained(path, trust_remote_code=False, **options)  # no code that lies in the folder is run
    except Exception as error:
        reason = f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"
        if Path(path).is_dir():
            raise ValueError(f"--model {path}: what is in this folder could not be loaded ({reason})") from error
        raise ValueError(
            f"--model {path}: there is no such folder, and it could not be had from the model hub ({reason}): check the"
            " name and the network, or download it elsewhere and give its folder"
        ) from error


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub name. ValueError, in one sentence, if it cannot be loaded."""
    return _load(AutoTokenizer, path)


def load_model(path: str, device: torch.device, dtype: torch.dtype, fp32_head: bool = False) -> PreTrainedModel:
    """A causal LM from a folder or by hub name, on a device as `put_on_device` says. ValueError, in one sentence, if it
    cannot be loaded or used here."""
    # Reading the parts of a plain matmul and softmax is fastest for one query a row on a CPU.
    model = _load(AutoModelForCausalLM, path, dtype=torch.float32, attn_implementation="eager")
    check_parts(model, path)
    return put_on_device(model, device, dtype, fp32_head)


def put_on_device(model: PreTrainedModel, device: torch.device, dtype: torch.dtype, fp32_head: bool) -> PreTrainedModel:
    """This model, which is on the CPU in fp32, on a device with a trunk in `dtype`. With fp32_head the weight of the LM
    head stays in fp32 (and is no longer tied)."""
    head = model.get_output_embeddings()
    if fp32_head and dtype != torch.float32:
        head.weight = torch.nn.Parameter(head.weight.detach())
    for parameter in model.parameters():
        if not (fp32_head and parameter is head.weight):
            parameter.data = parameter.data.to(device).to(dtype)
    if device.type == "cuda":
        model.set_attn_implementation("sdpa")
    return model.to(device).eval()


def load_shapes(name: str) -> PreTrainedModel:
    """A causal LM without its weights: on torch's meta device, by its config.json alone, out of a folder or from the
    hub. ValueError, in one sentence, if it cannot be had or used here."""
    path = name if (Path(name) / "config.json").exists() else model_path(name)
    config = _load(AutoConfig, path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    check_parts(model, path)
    return model


def check_parts(model: PreTrainedModel, path: str) -> None:
    """ValueError, naming them, for `unusual_parts`."""
    if unusual := unusual_parts(model):
        raise ValueError(f"--model {path}: models with {', '.join(unusual)} are not supported")


def unusual_parts(model: PreTrainedModel) -> list[str]:
    """What this model has that the trainer's logits, or the generator's cache, would get wrong."""
    config = model.config
    factors = ("final_logit_softcapping", "logits_scaling", "logit_scale")
    unusual = [name for name in factors if getattr(config, name, None) not in (None, 1, 1.0)]
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        unusual.append("a bias in the LM head")
    layers = {*(getattr(config, "layer_types", None) or ()), *(getattr(config, "attention_layers", None) or ())}
    if layers - {"full_attention", "global"} or getattr(config, "sliding_window", None):
        unusual.append("layers that are not full attention")
    return unusual


def check_length(model: PreTrainedModel, decoding: "Decoding") -> None:
    """ValueError if the budgets together are longer than what the model can hold."""
    budget, limit = decoding.longest, getattr(model.config, "max_position_embeddings", None)
    if limit is not None and budget > limit:
        raise ValueError(
            f"the budgets for prompt, thinking, interruption and answer add up to {budget} tokens; the model holds"
            f" {limit}: lower --thinking-budget or --prompt-budget, or take a larger --model (small budgets:"
            " --defaults toy)"
        )


def first_learning_rate(parameters: int) -> float:
    """What RL may begin with for a model of so many parameters: 7.5e-05 for 1M, 3.1e-06 for 600M."""
    return float(f"{0.075 / parameters**0.5:.2g}")


# --- prompts and ends -----------------------------------------------------------------------------------------------


def render(
    tokenizer: PreTrainedTokenizerBase, prompt: str, thinking: bool = True, system: str | None = None
) -> list[int]:
    """Token ids of a user's turn in the model's chat template, after a system prompt if there is one, ready for the
    model to go on. thinking: what the template is told as `enable_thinking`, which those of models without such a
    choice ignore."""
    if tokenizer.chat_template is None:
        return tokenizer(prompt if system is None else f"{system}\n\n{prompt}").input_ids
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, enable_thinking=thinking, return_dict=True
    )["input_ids"]


def render_all(tokenizer: PreTrainedTokenizerBase, prompts: list[str], settings: Sampling) -> dict[str, list[int]]:
    """Token ids of all prompts, by their text. ValueError for one that is longer than its budget, and for a chat
    template that makes the same of two."""
    ids_of, text_of = {}, {}
    for prompt in prompts:
        ids = render(tokenizer, prompt, settings.thinking, settings.system)
        if len(ids) > settings.prompt_budget:
            raise ValueError(
                f"the prompt {prompt[:60]!r} has {len(ids)} tokens with the chat template; --prompt-budget is"
                f" {settings.prompt_budget}"
            )
        other = text_of.setdefault(tuple(ids), prompt)
        if other != prompt:
            raise ValueError(
                f"--model {settings.model}: its chat template drops the prompt: {prompt[:40]!r} and {other[:40]!r}"
                f" become the same {len(ids)} tokens"
            )
        ids_of[prompt] = ids
    return ids_of


def end_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids that end a completion: the tokenizer's EOS and those of the model's generation_config.json, since chat models
    often have two, of a turn and of a text. ValueError if there is none."""
    try:
        configured = GenerationConfig.from_pretrained(tokenizer.name_or_path).eos_token_id
    except OSError:  # the model has no such file
        configured = None
    configured = configured if isinstance(configured, list) else [configured]
    ids = {token for token in (tokenizer.eos_token_id, *configured) if token is not None}
    if not ids:
        raise ValueError(
            f"--model {tokenizer.name_or_path}: neither its tokenizer nor its generation_config.json has an EOS token,"
            " so no completion could end"
        )
    return tuple(sorted(ids))


@dataclass(frozen=True)
class Decoding:
    """What all completions of a run have in common."""

    eos: tuple[int, ...]  # ids that end a completion
    end_of_thinking: int  # id of </think>; -1: the model has none, and nothing is interrupted
    thinks: bool  # False: the prompt ends with thinking closed, so that all is answer
    phrase: tuple[int, ...]  # ids of the interruption phrase
    prompt_budget: int  # tokens
    thinking_budget: int  # sampled tokens, the most that a request may have
    answer_budget: int  # sampled tokens
    length_control: str  # as in loss.Recipe
    fp32_logits: bool  # as in loss.Recipe

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
    tokenizer: PreTrainedTokenizerBase, settings: Sampling, length_control: str = "interruption", fp32: bool = True
) -> Decoding:
    """The budgets and markers of the settings in ids of this tokenizer. ValueError for a marker that cannot be."""
    marker = tokenizer(settings.end_of_thinking, add_special_tokens=False).input_ids
    phrase = tokenizer(settings.interruption_phrase, add_special_tokens=False).input_ids
    if length_control == "interruption":
        if len(marker) != 1:
            raise ValueError(
                f"--end-of-thinking {settings.end_of_thinking!r} is {len(marker)} tokens of this model; an interruption"
                " wants exactly one (--length-control penalty wants none)"
            )
        if marker[0] not in phrase:
            raise ValueError(
                f"--interruption-phrase {settings.interruption_phrase!r} does not close thinking: it must hold"
                f" {settings.end_of_thinking}"
            )
    marker_id = marker[0] if len(marker) == 1 else -1
    example = render(tokenizer, "", settings.thinking)
    last = max((i for i, token in enumerate(example) if token == marker_id), default=None)
    closed = last is not None and not tokenizer.decode(example[last + 1 :]).strip()
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


def completion_texts(tokenizer: PreTrainedTokenizerBase, decoding: Decoding, rollouts: list[Rollout]) -> list[str]:
    """What a task judges of each rollout: the completion without its EOS, forced tokens included. Whatever marks
    thinking for this model, tasks read `<think>` and `</think>`; where the prompt has opened thinking, as many chat
    templates do, the first stands before the completion."""
    ids = [rollout.tokens.tolist() for rollout in rollouts]
    texts = decode_all(tokenizer, [own[:-1] if own[-1] in decoding.eos else own for own in ids])
    if decoding.end_of_thinking < 0:
        return texts
    end = tokenizer.decode([decoding.end_of_thinking])
    start = end.replace("/", "", 1)
    if start != end:
        ends_of_prompts = decode_all(tokenizer, [rollout.request.prompt[-8:] for rollout in rollouts])
        opened = [start if start in before and end not in before else "" for before in ends_of_prompts]
        texts = [(before + text).replace(start, "<think>") for before, text in zip(opened, texts)]
    return [text.replace(end, "</think>") for text in texts]


def decode_all(tokenizer: PreTrainedTokenizerBase, ids: list[list[int]]) -> list[str]:
    """What `tokenizer.decode` makes of each; by a tokenizer in Rust on all cores: one takes 5 ms for 14,000 tokens."""
    if tokenizer.is_fast and not tokenizer.clean_up_tokenization_spaces:
        return tokenizer.backend_tokenizer.decode_batch(ids, skip_special_tokens=False)
    return [tokenizer.decode(own) for own in ids]


def marked_text(tokenizer: PreTrainedTokenizerBase, rollout: Rollout) -> str:
    """The completion with its end, forced tokens in [[ ]]."""
    text, start = "", 0
    for end in range(1, len(rollout.tokens) + 1):
        if end == len(rollout.tokens) or rollout.sampled[end] != rollout.sampled[start]:
            piece = tokenizer.decode(rollout.tokens[start:end].tolist())
            text, start = text + (piece if rollout.sampled[start] else f"[[{piece}]]"), end
    return text
