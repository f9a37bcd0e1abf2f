"""What torch.compile gives for a decoder layer as in Qwen3-0.6B: bytes that a token leaves for the
backward (in bf16), calls of kernels, and seconds (in fp32, on one thread of a CPU): python
benchmarks/elementwise.py"""

import re

import numpy as np
import torch
from common import seconds
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import run_and_get_code
from transformers import Qwen3Config, Qwen3ForCausalLM

from tools.plan import QWEN3

TOKENS = 509  # no weight has this size
VIEWS = re.compile(
    "view|transpose|slice|empty|detach|expand|as_strided|resolve|unsqueeze|alias|permute|reshape|::t$"
)
IN_CODE = re.compile(
    r"^ +(?:\w+ = )?(?:cpp_fused\w*|extern_kernels|torch\.ops\.aten)[.(]", re.MULTILINE
)


def main(repeats: int = 7) -> None:
    torch.set_num_threads(1)
    config = Qwen3Config(
        **QWEN3["0.6B"] | {"num_hidden_layers": 1},
        num_key_value_heads=8,
        attn_implementation="sdpa",
    )
    model = Qwen3ForCausalLM(config).model
    layer, kept = model.layers[0], {}  # bytes that wait for the backward, by storage

    def step(function, dtype: torch.dtype = torch.float32) -> None:
        inputs = torch.randn(1, TOKENS, config.hidden_size, dtype=dtype, requires_grad=True)
        function(
            inputs, position_embeddings=model.rotary_emb(inputs, torch.arange(TOKENS)[None])
        ).sum().backward()

    def keep(*tensors):
        kept.update(
            (each.untyped_storage()._cdata, each.nbytes) for each in tensors if TOKENS in each.shape
        )
        return tensors[0]

    layer.bfloat16()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        step(layer, torch.bfloat16)
    plain = sum(kept.values()) / TOKENS
    kept.clear()
    how = dict(
        partition_fn=min_cut_rematerialization_partition, decompositions=select_decomp_table()
    )
    of_backward = lambda graph, inputs: (
        keep(*inputs[:-1]) is not None and graph.forward
    )  # the last is the gradient
    backend = aot_autograd(
        fw_compiler=lambda graph, _: graph.forward, bw_compiler=of_backward, **how
    )
    step(torch.compile(layer, backend=backend, dynamic=False), torch.bfloat16)
    print(f"bytes a token: {plain:,.0f} plain, {sum(kept.values()) / TOKENS:,.0f} compiled")

    layer.float()
    torch._dynamo.reset()
    compiled = torch.compile(layer, dynamic=False)
    kernels = IN_CODE.findall("".join(run_and_get_code(step, compiled)[1]))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(layer)
    names = [
        event.name
        for event in profile.events()
        if event.name.startswith("aten::") and not event.cpu_children
    ]
    print(
        f"kernels: {sum(not VIEWS.search(name) for name in names)} plain, {len(kernels)} compiled"
    )
    ratios = [
        seconds(lambda: step(compiled)) / seconds(lambda: step(layer)) for _ in range(repeats)
    ]
    print(
        f"seconds compiled / plain: {np.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    )


if __name__ == "__main__":
    main()
