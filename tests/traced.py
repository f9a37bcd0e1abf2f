"""One optimizer step of a trainer's rank on fake CUDA tensors, whose memory PyTorch itself traces;
nothing is computed.

    PYTHONPATH=.:tests/pretended python tests/traced.py '{"model_type": "qwen3", ...}' \\
        --trainers 4 --checkpointing

It prints the bytes at the peak of the second step, and those that `train.py --plan` has for it. The
ranks are pretended by torch's fake process group; this is rank 0. It leans on private symbols of
torch 2.13, and runs in a process of its own.
"""

import argparse
import json
import os
import sys
import weakref

import gpus
import torch
import torch.distributed as dist
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

import loss
from core.policy import MicroBatch
from core.settings import Settings
from machinery import trainer
from tools.plan import Shape, trainer_bytes

aten = torch.ops.aten
ALLOCATED = 512  # bytes: CUDA's allocator rounds up to a multiple of it


class Mode(TorchDispatchMode):
    """One that sees what a DTensor does to this rank's tensors, and not what the DTensor is
    asked."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return (
            NotImplemented
            if any(issubclass(kind, DTensor) for kind in types)
            else self.call(func, args, kwargs or {})
        )


class Known(Mode):
    """What a mask picks and what .item() returns, which a fake tensor cannot know."""

    def __init__(self, picked: int):
        super().__init__()
        self.picked = picked

    def call(self, func, args, kwargs):
        if func is aten._local_scalar_dense.default:
            return 1.0
        if func is aten.index.Tensor and args[1][0].dtype == torch.bool:
            mask = args[1][0]
            picked = [
                torch.empty(self.picked, dtype=torch.int64, device=mask.device)
                for _ in range(mask.dim())
            ]
            return func(args[0], picked)
        return func(*args, **kwargs)


class Memory(Mode):
    """Bytes of all storages on the GPU: now, and at the peak."""

    def __init__(self):
        super().__init__()
        self.sizes, self.now, self.peak = {}, 0, 0

    def call(self, func, args, kwargs):
        made = func(*args, **kwargs)
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda":
                self.see(tensor)
        return made

    def see(self, tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in self.sizes:
            self.sizes[storage._cdata] = 0
            weakref.finalize(storage, self.forget, storage._cdata)
        self.set(storage._cdata, storage.size())

    def set(self, key, size):
        size = -(-size // ALLOCATED) * ALLOCATED
        self.now += size - self.sizes[key]
        self.sizes[key] = size
        self.peak = max(self.peak, self.now)

    def forget(self, key):
        self.now -= self.sizes.pop(key)


def flash_attention(
    q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """As a GPU has it for a causal mask in bf16, which is all that the trainer asks for: never the
    plain way."""
    assert attn_mask is None and is_causal and q.dtype == torch.bfloat16
    return aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, True, False, scale=scale
    )[0]


def make_it_fakeable(memory: Memory, trainers: int) -> None:
    """Answer or go around what fake tensors cannot do."""
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    gpus.answer_for_cuda(8)
    torch.nn.functional.scaled_dot_product_attention = flash_attention
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=trainers)
    mesh = trainer.init_device_mesh("cuda", (trainers,))
    trainer.init_device_mesh = lambda *_: mesh  # made of real tensors
    usual = torch.UntypedStorage.resize_

    def resize(storage, size):  # FSDP frees what it has gathered in this way
        usual(storage, size)
        if storage._cdata in memory.sizes:
            memory.set(storage._cdata, storage.size())

    torch.UntypedStorage.resize_ = resize
    # No values.
    transformers.modeling_utils.get_torch_context_manager_or_global_device = lambda: torch.device(
        "meta"
    )
    for module in (transformers.masking_utils, transformers.integrations.sdpa_attention):
        module.is_tracing = lambda *_: False


def traced(
    config, trainers: int, settings: Settings, fp32_logits, sequences: int, tokens: int
) -> int:
    """The bytes of this rank at the peak of the second step, of two micro-batches. All but 256
    tokens of each sequence were sampled."""
    memory, device = Memory(), torch.device("cuda:0")
    make_it_fakeable(memory, trainers)
    with FakeTensorMode(allow_non_fake_inputs=True), memory:
        with device:  # fake tensors do not move by .data
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation="eager"
            )
        policy = trainer.make_policy(settings, model, device)
        for parameter in policy.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if local.is_cuda:
                memory.see(local)
        optimizer = torch.optim.AdamW(policy.parameters(), fused=True)
        integers_BT = lambda: torch.zeros((sequences, tokens), dtype=torch.int64, device=device)
        weights_B = torch.ones(sequences, device=device)
        with Known(sequences * (tokens - 256)):
            for _ in range(2):
                memory.peak = 0
                for _ in range(2):
                    inputs = (
                        integers_BT(),
                        integers_BT(),
                        integers_BT().bool(),
                        integers_BT().float(),
                        integers_BT(),
                    )
                    m = MicroBatch(*inputs, integers_BT()[:, 0], fed=0, pairs=0)
                    logprobs_BT, _ = policy(m, fp32_logits)
                    worth = (m.generator_logprobs_BT, m.sampled_BT, weights_B, weights_B)
                    loss.policy_loss(loss.Recipe(), logprobs_BT, *worth)[0].backward()
                    del logprobs_BT
                torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                trainer.update_size(optimizer)
    return memory.peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=json.loads)
    parser.add_argument("--trainers", type=int, default=1)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--split", action="store_true", help="--fp32-logits split")
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=14_336, help="of each sequence")
    options = parser.parse_args()
    config = AutoConfig.for_model(**options.config)
    with torch.device("meta"):
        shape = Shape(AutoModelForCausalLM.from_config(config))
    settings = Settings(gradient_checkpointing=options.checkpointing, offload=options.offload)
    tokens = options.sequences * options.tokens
    of_a_rank = (options.trainers, tokens, options.tokens)
    plan = trainer_bytes(shape, settings, *of_a_rank, torch.bfloat16, "cuda")
    planned = sum(plan.values()) - plan["process"]
    how = (options.trainers, settings, "split" if options.split else True)
    found = traced(config, *how, options.sequences, options.tokens)
    print(json.dumps({"traced": found, "planned": planned}))
    sys.stdout.flush()
    os._exit(0)  # at once: autograd's threads would meet an interpreter that is gone


if __name__ == "__main__":
    main()
