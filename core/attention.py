"""How a stock model attends here: the kernels that transformers calls, and which keys a token sees.

Dimensions: B sequences, T tokens, K keys that they may attend to, D size of a head.
"""

import math
import sys
from types import SimpleNamespace

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask


def config_value(model: PreTrainedModel, usual, *names: str):
    """The first of these entries that the model's config has, and that is not 0; else the usual
    value. Of a model that reads pictures too, it is the config of its language part."""
    values = [getattr(model.config.get_text_config(), name, None) for name in names]
    return next(filter(None, values), usual)


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
    softcap = config_value(model, None, "attn_logit_softcapping")
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
    window = config_value(model, None, "sliding_window")
    of_kinds = {"full_attention": None, "hybrid": None, "sliding_attention": window}
    alike = ["sliding_attention"] * config_value(model, 0, "num_hidden_layers")
    kinds = config_value(model, alike, "layer_types")
    return [of_kinds[kind] for kind in kinds if kind in of_kinds]


def most_positions(model: PreTrainedModel) -> int:
    """How many positions a sequence may have. Beyond them a model may rotate its whole batch
    otherwise (longrope), also if only padding lies there."""
    limit = config_value(model, sys.maxsize, "max_position_embeddings")
    rope = config_value(model, {}, "rope_parameters")
    if rope.get("rope_type") == "longrope":
        limit = rope["original_max_position_embeddings"]
    return limit


def padded(positions: int, device: torch.device) -> int:
    """The width of a tensor with so many positions. On a GPU the next multiple of 64: attention
    there (cuDNN's) plans about 30 ms for each new shape, and nearly every length is new."""
    multiple = 64 if device.type == "cuda" else 1
    return math.ceil(positions / multiple) * multiple


def recurrent(model: PreTrainedModel) -> bool:
    """Whether layers keep a state in place of keys: padding before a token would change it."""
    places = DynamicCache(config=model.config).layers
    return any(isinstance(place, LinearAttentionCacheLayerMixin) for place in places)
