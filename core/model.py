"""A causal language model and its tokenizer, the same for trainer and generator: loaded or refused,
text to token ids and back."""

import contextlib
import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import torch
import transformers
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

import loss
from core.engine import Decoding
from core.rollouts import Rollout
from core.settings import Sampling, refuse
from data import Problem

transformers.utils.logging.disable_progress_bar()  # of loading, which is over in a moment


# --- loaded or refused ----------------------------------------------------------------------------


@contextlib.contextmanager
def in_one_sentence(model: str, wrong: str = "it could not be loaded") -> Iterator[None]:
    """ValueError, in one sentence, for whatever a library raises in this block about the files of a
    model."""
    try:
        yield
    except Exception as error:
        kind, text = type(error).__name__, str(error).strip() or "no reason given"
        raise ValueError(f"--model {model}: {wrong} ({kind}: {text.splitlines()[0]})") from error


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub name. ValueError, in one sentence, if it cannot be
    loaded. No code in the folder is run."""
    with in_one_sentence(path, "its tokenizer could not be loaded"):
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)


def load_model(path: str) -> PreTrainedModel:
    """A causal LM from a folder or the hub, on the CPU in fp32. ValueError if it cannot be
    loaded."""
    with in_one_sentence(path):
        model, found = AutoModelForCausalLM.from_pretrained(
            path,
            output_loading_info=True,
            trust_remote_code=False,
            dtype=torch.float32,
            attn_implementation="grouped",
        )
        missing = found["missing_keys"]
        if missing:  # transformers would draw them at random
            raise ValueError(f"its files lack {len(missing)} weights, {min(missing)} first")
        # If it reads pictures too, that part stays as it is.
        model.requires_grad_(False)
        model.get_decoder().requires_grad_(True)
        model.get_output_embeddings().requires_grad_(True)
    try:
        model.generation_config.validate(strict=True)
    except ValueError:  # with it transformers would save no checkpoint
        ends = model.generation_config.eos_token_id
        model.generation_config = GenerationConfig(eos_token_id=ends)
    return model.eval()


def put_on_device(
    model: PreTrainedModel, device: torch.device, dtype: torch.dtype, fp32_head: bool
) -> None:
    """Move a model in fp32 from the CPU to a device, with its trunk in `dtype`. With fp32_head the
    LM head stays in fp32, and is no longer tied."""
    head = model.get_output_embeddings()
    if fp32_head and dtype != torch.float32:
        head.weight = torch.nn.Parameter(head.weight.detach())
    kept = {*head.parameters()} if fp32_head else set()
    for parameter in model.parameters():
        if parameter not in kept:
            parameter.data = parameter.data.to(device).to(dtype)
    if device.type == "cuda":
        model.set_attn_implementation(attention_on_gpu(model))
    model.to(device)


def of_config(model: PreTrainedModel, usual, *names: str):
    """The first of these entries that the model's config has, and that is not 0; else the usual
    value. Of a model that reads pictures too, it is the config of its language part."""
    values = [getattr(model.config.get_text_config(), name, None) for name in names]
    return next(filter(None, values), usual)


def head_of(model: PreTrainedModel) -> loss.Head:
    """The LM head, with the factors that configs have under these names."""
    linear, factor = model.get_output_embeddings(), functools.partial(of_config, model, 1.0)
    scale = factor("logit_scale") * factor("lm_head_multiplier") / factor("logits_scaling")
    cap = of_config(model, None, "final_logit_softcapping")
    return loss.Head(linear.weight, getattr(linear, "bias", None), scale, cap)


def grouped_attention(
    _,
    query_BHTD: Tensor,
    key_BGKD: Tensor,
    value_BGKD: Tensor,
    attention_mask: Tensor | None,
    scaling,
    **options,
):
    """What transformers calls "eager" attention: plain matmuls and a softmax, the fastest for one
    query a sequence on a CPU. If several heads of queries have the same keys and values, "eager"
    copies these for each head, which takes most of a step of the engine. Here these heads are rows
    of one matmul. H heads of queries, G of keys, K keys. attention_mask: [B, 1, T, K], under the
    name by which some models give it. options: softcap, which no score passes; s_aux: [H], the
    score of a sink, a key without a value."""
    softcap, sinks_H = options.get("softcap"), options.get("s_aux")
    B, H, T, D = query_BHTD.shape
    G, K = key_BGKD.shape[1:3]
    scores = query_BHTD.reshape(B, G, -1, D) @ key_BGKD.transpose(2, 3) * scaling
    scores_BHTK = scores.view(B, H, T, K)
    if softcap:
        scores_BHTK = softcap * torch.tanh(scores_BHTK / softcap)
    if attention_mask is not None:
        scores_BHTK = scores_BHTK + attention_mask
    if sinks_H is not None:
        sinks_BHT1 = sinks_H.to(scores_BHTK.dtype).view(-1, 1, 1).expand(B, H, T, 1)
        scores_BHTK = torch.cat([scores_BHTK, sinks_BHT1], -1)
    weights_BHTK = torch.softmax(scores_BHTK, -1, dtype=torch.float32).to(query_BHTD.dtype)
    values = weights_BHTK[..., :K].reshape(B, G, -1, K) @ value_BGKD
    return values.view(B, H, T, -1).transpose(1, 2).contiguous(), None


def fused_attention(
    layer: torch.nn.Module,
    query_BHTD: Tensor,
    key_BGKD: Tensor,
    value_BGKD: Tensor,
    *mask,
    **options,
):
    """What transformers calls "sdpa" attention, for a GPU. No fused kernel of torch 2.13 takes
    grouped heads in fp32, and the other kernel is quadratic in memory. So in fp32 each head of
    queries gets a copy of its keys and values."""
    copies = query_BHTD.shape[1] // key_BGKD.shape[1]
    if copies > 1 and query_BHTD.dtype == torch.float32:
        key_BGKD = key_BGKD.repeat_interleave(copies, dim=1)
        value_BGKD = value_BGKD.repeat_interleave(copies, dim=1)
        layer = SimpleNamespace(is_causal=getattr(layer, "is_causal", True))  # without groups
    return sdpa_attention_forward(layer, query_BHTD, key_BGKD, value_BGKD, *mask, **options)


def fused_mask(*of, dtype: torch.dtype, **options) -> Tensor | None:
    """A mask for "sdpa", if one is needed, in numbers: each layer would make its own from one of
    bools, and keep it for the backward."""
    mask = sdpa_mask(*of, **options)
    return mask if mask is None else torch.finfo(dtype).min * (~mask).to(dtype)


for name, attention, mask in (
    ("grouped", grouped_attention, eager_mask),
    ("fused", fused_attention, fused_mask),
):
    transformers.AttentionInterface.register(name, attention)
    transformers.AttentionMaskInterface.register(name, mask)


def attention_on_gpu(model: PreTrainedModel) -> str:
    """The name of its attention: "fused", or "grouped" if it has a softcap or sinks, which torch's
    kernels ignore in silence. "grouped" holds the scores of all pairs of tokens."""
    softcap = of_config(model, None, "attn_logit_softcapping")
    sinks = any(name.endswith("sinks") for name, _ in model.named_parameters())
    return "grouped" if softcap or sinks else "fused"


def masks(
    model: PreTrainedModel, positions_BT: Tensor, keys_BK: Tensor, dtype: torch.dtype
) -> Tensor | dict[str, Tensor]:
    """What hides keys from the tokens at these positions: those that come later, and those before a
    sliding window. Numbers to be added to scores, [B, 1, T, K]; by kind of layer, if only some
    layers have the window. keys_BK: the positions of the keys, which count tokens and no padding
    between them."""
    positions_BT1, keys_B1K = positions_BT[..., None], keys_BK[:, None]
    made = {}
    for window in {*windows(model)} or {None}:
        hidden_BTK, kind = keys_B1K > positions_BT1, "full_attention"
        if window:
            hidden_BTK = hidden_BTK | (keys_B1K <= positions_BT1 - window)
            kind = "sliding_attention"
        zeros_BTK = torch.zeros(hidden_BTK.shape, dtype=dtype, device=hidden_BTK.device)
        made[kind] = zeros_BTK.masked_fill(hidden_BTK, torch.finfo(dtype).min)[:, None]
    return made if len(made) > 1 else made[kind]


def windows(model: PreTrainedModel) -> list[int | None]:
    """How many tokens, itself among them, a token sees in each layer of attention; None: all before
    it."""
    window = of_config(model, None, "sliding_window")
    of_kinds = {"full_attention": None, "hybrid": None, "sliding_attention": window}
    alike = ["sliding_attention"] * of_config(model, 0, "num_hidden_layers")
    kinds = of_config(model, alike, "layer_types")
    return [of_kinds[kind] for kind in kinds if kind in of_kinds]


def padded(positions: int, device: torch.device) -> int:
    """The width of a tensor with so many positions. On a GPU the next multiple of 64: attention
    there (cuDNN's) plans about 30 ms for each new shape, and nearly every length is new."""
    multiple = 64 if device.type == "cuda" else 1
    return math.ceil(positions / multiple) * multiple


def recurrent(model: PreTrainedModel) -> bool:
    """Whether layers keep a state in place of keys: padding before a token would change it."""
    places = DynamicCache(config=model.config).layers
    return any(isinstance(place, LinearAttentionCacheLayerMixin) for place in places)


def refuse_too_long(model: PreTrainedModel, longest: int, advice: str = "") -> None:
    """ValueError, with this advice, if so many tokens exceed the positions of the model. Without
    advice they are all budgets together."""
    limit = of_config(model, math.inf, "max_position_embeddings")
    rope = of_config(model, {}, "rope_parameters")
    if rope.get("rope_type") == "longrope":  # beyond these it rotates short sequences otherwise too
        limit = rope["original_max_position_embeddings"]
    budgets = (
        "the budgets for prompt, thinking, interruption and answer add up to that; lower"
        " --thinking-budget, --answer-budget or --prompt-budget, or take a larger --model (small"
        " budgets: --defaults toy)"
    )
    refuse(
        longest > limit, f"the model holds {limit} tokens, and not {longest}: {advice or budgets}"
    )


def refuse_misfit(model: PreTrainedModel, decoding: Decoding, ids: Iterable[int] = ()) -> None:
    """ValueError if the budgets exceed the positions of the model, or if one of these tokens, or of
    those that end or interrupt a completion, has no embedding."""
    refuse_too_long(model, decoding.longest)
    known = model.get_input_embeddings().num_embeddings
    last = max([*ids, *decoding.phrase, *decoding.eos])
    refuse(
        last >= known,
        f"--model: its tokenizer has the token {last}, and the model has embeddings for {known}"
        " tokens: resize_token_embeddings of transformers adds some",
    )


def first_learning_rate(parameters: int, factor: float = 1.0) -> float:
    """A learning rate to begin with, by the number of parameters: 7.5e-05 for 1M, 3.1e-06 for 600M;
    times this factor."""
    return float(f"{factor * 0.075 / math.sqrt(parameters):.2g}")


# --- text to token ids and back -------------------------------------------------------------------


def turns(
    tokenizer: PreTrainedTokenizerBase, problem: Problem, settings: Sampling
) -> str | list[dict]:
    """What a model is asked: the messages for its chat template, after the system prompt of
    --system or else of the problem, if there is one; without a template their text."""
    asked = [{"role": "user", "content": problem.prompt}]
    system = problem.system if settings.system is None else settings.system
    if system is not None:
        asked.insert(0, {"role": "system", "content": system})
    if tokenizer.chat_template is None:
        return "\n\n".join(turn["content"] for turn in asked)
    return asked


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, problem: Problem, settings: Sampling
) -> list[int]:
    """Token ids of the `turns`, in the model's chat template, ready for the model to go on.
    --thinking is `enable_thinking` for the template; one that knows no such choice ignores it."""
    asked = turns(tokenizer, problem, settings)
    if tokenizer.chat_template is None:
        ids = tokenizer(asked).input_ids
        # Some tokenizers append an EOS; no model would go on after it.
        return ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids
    with in_one_sentence(tokenizer.name_or_path, "its chat template cannot be used"):
        text = tokenizer.apply_chat_template(
            asked, tokenize=False, add_generation_prompt=True, enable_thinking=settings.thinking
        )
    return tokenizer(text, add_special_tokens=False).input_ids


def refuse_prompts(
    tokenizer: PreTrainedTokenizerBase, problems: list[Problem], settings: Sampling
) -> None:
    """ValueError if the tokenizer cannot read one of their prompts, if one is above its budget, or
    if the chat template drops them. Most are not rendered here, but when they are handed out: all
    of a million would take minutes."""
    distinct = {problem.prompt: problem for problem in problems}
    with_character = {character: prompt for prompt in distinct for character in set(prompt)}
    for prompt in dict.fromkeys(with_character.values()):
        ids = tokenizer(prompt, add_special_tokens=False).input_ids
        refuse(
            tokenizer.unk_token_id in ids and tokenizer.unk_token not in prompt,
            f"--model {tokenizer.name_or_path}: its tokenizer has no tokens for a part of the"
            f" prompt {prompt[:60]!r}, which it reads as {tokenizer.decode(ids)[:60]!r} (the"
            " shipped model reads sums only; --model names another)",
        )
    ids_of = lambda problem: prompt_ids(tokenizer, problem, settings)
    first, *others = distinct.values()
    refuse(
        others and ids_of(first) == ids_of(others[0]),
        f"--model {settings.model}: its chat template drops the prompt: two have the same tokens",
    )
    # A text has at most as many tokens as bytes, so only long ones can be above the budget.
    most_bytes = settings.prompt_budget - len(ids_of(replace(first, prompt="")))
    lengths = {
        prompt: len(ids_of(problem))
        for prompt, problem in distinct.items()
        if len(prompt.encode()) > most_bytes or problem.system != first.system
    }
    prompt = max(lengths, key=lengths.get, default="")
    most = lengths.get(prompt, 0)
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
    marker = tokenizer(end, add_special_tokens=False).input_ids
    phrase = tokenizer(settings.interruption_phrase, add_special_tokens=False).input_ids
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
