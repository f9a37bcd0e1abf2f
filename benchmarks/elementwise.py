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

from machinery.memory import QWEN3

TOKENS = 509  # no weight has this size
# Operations that compute nothing.
VIEWS = re.compile(
    "view|transpose|slice|empty|detach|expand|as_strided|resolve|unsqueeze|alias|permute|reshape"
    "|::t$"
)
# A call of a kernel in the code that is compiled.
IN_CODE = re.compile(
    r"^ +(?:\w+ = )?(?:cpp_fused\w*|extern_kernels|torch\.ops\.aten)[.(]", re.MULTILINE
)


def main(repeats: int = 7) -> None:
    torch.set_num_threads(1)
    shape = QWEN3["0.6B"] | {"num_hidden_layers": 1}
    config = Qwen3Config(**shape, num_key_value_heads=8, attn_implementation="sdpa")
    model = Qwen3ForCausalLM(config).model
    layer, kept = model.layers[0], {}  # bytes that wait for the backward, by storage

    def step(function, dtype: torch.dtype = torch.float32) -> None:
        inputs = torch.randn(1, TOKENS, config.hidden_size, dtype=dtype, requires_grad=True)
        positions = model.rotary_emb(inputs, torch.arange(TOKENS)[None])
        function(inputs, position_embeddings=positions).sum().backward()

    def keep(*tensors):
        for tensor in tensors:
            if TOKENS in tensor.shape:
                kept[tensor.untyped_storage()._cdata] = tensor.nbytes
        return tensors[0]

    def backward(graph, inputs):
        keep(*inputs[:-1])  # the last is the gradient
        return graph.forward

    layer.bfloat16()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        step(layer, torch.bfloat16)
    plain = sum(kept.values()) / TOKENS
    kept.clear()
    backend = aot_autograd(
        fw_compiler=lambda graph, _: graph.forward,
        bw_compiler=backward,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    step(torch.compile(layer, backend=backend, dynamic=False), torch.bfloat16)
    print(f"bytes a token: {plain:,.0f} plain, {sum(kept.values()) / TOKENS:,.0f} compiled")

    layer.float()
    torch._dynamo.reset()
    compiled = torch.compile(layer, dynamic=False)
    kernels = IN_CODE.findall("".join(run_and_get_code(step, compiled)[1]))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(layer)
    plain_kernels = []
    for event in profile.events():
        of_aten = event.name.startswith("aten::") and not event.cpu_children
        if of_aten and not VIEWS.search(event.name):
            plain_kernels.append(event.name)
    print(f"kernels: {len(plain_kernels)} plain, {len(kernels)} compiled")
    ratios = []
    for _ in range(repeats):
        ratios.append(seconds(lambda: step(compiled)) / seconds(lambda: step(layer)))
    middle, least, most = np.median(ratios), min(ratios), max(ratios)
    print(f"seconds compiled / plain: {middle:.2f} ({least:.2f} to {most:.2f})")


if __name__ == "__main__":
    main()
