"""The engine for a GPU: vLLM with the same calls as TorchEngine.

vLLM runs in the process of the generator and is driven step by step. It does the continuous
batching, the paged cache and the sampling, from the whole distribution. The rest
is decided here, between two of its steps: who is let in, when thinking is interrupted, which blocks
of its prefix cache a request may hit. So the version of a token is the version in use at the step
that returned it, and nothing runs ahead of that (async_scheduling is off). docs/node.md says what
vLLM does when its cache is full.

Parameters come from the same shared memory as for TorchEngine. So the trainer writes and goes on.
With vLLM's own weight transfer it would wait for all generators.
"""

import json
import os

import numpy as np
import torch

from core.engine import Engine, EngineSettings, NoEngine
from core.rollouts import Rollout, SharedParameters

# Bytes that vLLM does not count when it sizes its cache: 4 for each number of the head, three
# times. The head in fp32 is made later. At each update there are a copy of it on the device, and
# the weight that this is loaded into.
UNMEASURED = 3 * 4
# Bytes of keys and values on a CPU. On a GPU vLLM takes what its share of the memory leaves.
CPU_CACHE = 2**30


class VllmEngine(Engine):
    """Continuous batching by vLLM.

    vLLM gets a completion in pieces: up to an interruption, and after it. Each piece is a request
    with its own name, and so is one that is given to vLLM again after an update.
    """

    def __init__(self, settings: EngineSettings):
        """`NoEngine`, with vLLM's reason, if it cannot run this model on this machine."""
        super().__init__(settings.slots, settings.decoding)
        # With this limit on the tokens of new prompts, all that vLLM is given begins in the very
        # next step, if its cache has room. A step has tokens for these prompts, and for a token or
        # an interruption of each slot.
        self.prompt_tokens = max(8192, settings.decoding.longest)
        self.engine = make_llm_engine(settings, self.prompt_tokens)
        self.slot_of = {}  # the slot of each piece in flight, by vLLM's name for it
        self.pieces = 0  # given to vLLM so far

    def update(self, parameters: SharedParameters) -> None:
        def reload() -> None:
            try:
                self.engine.collective_rpc(_reload_parameters, args=(parameters,))
            except (ValueError, KeyError, AttributeError) as error:
                raise NoEngine(
                    f"--engine vllm: vLLM cannot load the parameters of this model ({error!r}):"
                    " take --engine torch"
                ) from error

        self.version = parameters.read(reload)
        # A completion without a sampled token has waited for room in vLLM's cache. It is given to
        # vLLM again, with a new salt. With the old one it could hit blocks of its prompt that hold
        # keys and values of older parameters.
        sampled = self.progress["num_sampled"]
        unbegun = [name for name, slot in self.slot_of.items() if sampled[slot] == 0]
        self.engine.abort_request(unbegun)
        slots = [self.slot_of.pop(name) for name in unbegun]
        self.waiting[:0] = self.requests[slots]
        self.live[slots] = False

    def step(self) -> list[Rollout]:
        self._admit()
        outputs = self.engine.step()
        if not outputs:
            return []
        # Each piece in flight has one more token.
        names = [output.request_id for output in outputs]
        pieces = [output.outputs[0] for output in outputs]
        tokens = [piece.token_ids[0] for piece in pieces]
        logprobs = [piece.logprobs[0][token].logprob for piece, token in zip(pieces, tokens)]
        slots = np.array([self.slot_of[name] for name in names])
        rollouts = self._append(slots, np.array(tokens), np.array(logprobs))
        # vLLM does not know of interruptions, and not of the budget of an answer.
        live, forced = self.live[slots], self._forced_tokens(slots)
        over = [names[i] for i in np.flatnonzero(~live | (forced >= 0))]
        self.engine.abort_request(over)
        for name in over:
            slot = self.slot_of.pop(name)
            if self.live[slot]:  # interrupted
                self._submit(slot)
        return rollouts

    def _admit(self) -> None:
        """Begin waiting requests while there are slots for them and their prompts fit into this
        step."""
        tokens = self.prompt_tokens
        for slot in np.flatnonzero(~self.live):
            if not self.waiting or tokens < len(self.waiting[0].prompt_ids):
                break
            request = self.waiting.pop(0)
            tokens -= len(request.prompt_ids)
            self._begin(slot, request)
            self._submit(slot)

    def _submit(self, slot: int) -> None:
        """Append the forced tokens, if thinking was interrupted, and give vLLM all tokens so far as
        a prompt.

        Requests share blocks of vLLM's prefix cache only if they have the same salt: the version at
        their beginning. So an interrupted completion finds the full blocks of its own past there,
        with keys and values of older parameters. Tokens that did not fill a block are computed
        again, with the newest parameters.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        slots = np.array([slot])
        while self._forced_tokens(slots) >= 0:
            self._append(slots, np.zeros(1), np.zeros(1))
        request, count = self.requests[slot], int(self.progress["num_tokens"][slot])
        sampling = SamplingParams(
            temperature=self.decoding.temperature,
            # Each piece has its own noise: with one seed the answer would get the noise of the
            # thinking.
            seed=int(np.random.default_rng((*request.seed, count)).integers(2**62)),
            logprobs=0,
            max_tokens=None,  # `step` ends what is too long
            stop_token_ids=list(self.decoding.eos),
            ignore_eos=True,  # the ids above are all that ends a completion
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        ids = request.prompt_ids + self.written["tokens"][slot, :count].tolist()
        began_with = self.written["versions"][slot, 0] if count else self.version
        prompt = {"prompt_token_ids": ids, "cache_salt": f"version {began_with}"}
        name = str(self.pieces)
        self.pieces += 1
        self.engine.add_request(name, prompt, sampling)
        self.slot_of[name] = slot


def make_llm_engine(settings: EngineSettings, prompt_tokens: int):
    """vLLM's own engine, without parameters yet. `NoEngine`, with vLLM's reason, if it refuses."""
    decoding, on_cpu = settings.decoding, settings.device == "cpu"
    _set_environment(on_cpu, settings.threads)
    block_size = 32 if on_cpu else 16
    tokens_of_a_slot = 1 + block_size + len(decoding.phrase)
    low = "float16" if settings.dtype == torch.float16 else "bfloat16"
    try:
        from vllm import EngineArgs, LLMEngine

        # What nobody else has, but for a twentieth, and .9 at most: a trainer on the same GPU has
        # tried its largest micro-batch before.
        free, total = (1, 1) if on_cpu else torch.cuda.mem_get_info()
        arguments = EngineArgs(
            model=settings.model,
            load_format="dummy",  # `update` brings the parameters
            skip_tokenizer_init=True,
            trust_remote_code=False,
            generation_config="vllm",  # no top-k, top-p or penalty out of the model's folder
            # The head is computed as by loss.head_logits, from a weight and in a dtype of its own.
            hf_overrides={
                "tie_word_embeddings": False,
                "head_dtype": "float32" if decoding.fp32_logits else low,
            },
            dtype=settings.dtype,
            max_model_len=decoding.longest,
            max_num_seqs=settings.slots,
            max_num_batched_tokens=prompt_tokens + settings.slots * tokens_of_a_slot,
            block_size=block_size,
            gpu_memory_utilization=settings.memory or min(0.9, free / total - 0.05),
            kv_cache_memory_bytes=CPU_CACHE if on_cpu else None,
            enable_prefix_caching=True,
            async_scheduling=False,
            logprobs_mode="processed_logprobs",
            # None of the above: a second value is an error.
            **{"enforce_eager": on_cpu} | json.loads(settings.vllm_options),
        )
        config = arguments.create_engine_config()
        if not on_cpu:
            head = config.model_config.get_vocab_size() * config.model_config.get_hidden_size()
            config.cache_config.gpu_memory_utilization -= UNMEASURED * head / total
        engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
    except Exception as error:  # of any kind: it depends on the model, the settings and the machine
        text = str(error).strip() or type(error).__name__
        # A validation error has several lines; its sentence is in their middle.
        reason = text.partition("Value error, ")[2].partition(" [type=")[0] or text.splitlines()[0]
        if "memory" in reason.lower():
            reason += "; raise or lower --generator-memory, or lower --thinking-budget or --slots"
        raise NoEngine(f"--engine vllm: {reason}") from error
    if decoding.fp32_logits and settings.dtype != torch.float32:
        engine.collective_rpc(_keep_head_in_fp32)
    return engine


def _set_environment(on_cpu: bool, threads: int) -> None:
    """What vLLM reads when it is imported. What the user has set stays."""
    # The engine is in this process, and does one step a call.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    wanted = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        # The runner that vLLM takes on a CPU, and that the tests run; on a GPU it has another.
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }
    if on_cpu:
        wanted |= {
            "TORCHDYNAMO_DISABLE": "1",  # nothing is compiled
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # to no cores, which the trainer may be on
            "OMP_NUM_THREADS": str(threads),
        }
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


# --- what runs in vLLM's worker, in this process -------------------------------------------------


def _reload_parameters(worker, parameters: SharedParameters) -> None:
    # As a checkpoint without tied weights has them. Some models (Gemma 2) have no other head than
    # their embedding.
    names = dict.fromkeys(parameters.shapes)
    if any("lm_head" in name for name, _ in worker.get_model().named_parameters()):
        names["lm_head.weight"] = None
    elif "lm_head.weight" in names:
        raise ValueError("it takes the embedding for the head")
    worker.reload_weights(weights_iterator=parameters.on(worker.device, names))
    for layer in worker.get_model().modules():
        # vLLM 0.32 brings experts into the layout of its CPU kernel at their first load, and never
        # again.
        if type(layer).__name__ == "RoutedExperts" and layer.w13_weight.device.type == "cpu":
            layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)


def _keep_head_in_fp32(worker) -> None:
    """Give the head a weight in fp32, as the trainer's. vLLM's head_dtype is of the arithmetic
    alone: its weight is rounded to bf16, and a head in fp32 on one side only is worse than none. An
    embedding that is the head stays so."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

    for module in worker.get_model().modules():
        if isinstance(module, ParallelLMHead):
            weight = torch.nn.Parameter(module.weight.float(), requires_grad=False)
            vars(weight).update(vars(module.weight))  # how it is loaded and sharded
            module.weight = weight
            with weight.device:
                record_metadata_for_reloading(module)
        if isinstance(module, LogitsProcessor):
            module._apply_head = lambda head, hidden_ND, bias: torch.nn.functional.linear(
                hidden_ND.float(), head.weight.float(), None if bias is None else bias.float()
            )
