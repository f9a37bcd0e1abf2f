"""The generator: prompts go in, completions with their log-probabilities come out.

    python generate.py --model runs/NAME/model --prompt "4729+8153="      # print a completion
    python generate.py --model runs/NAME/model --evaluate                 # mean@16, pass@k on held-out problems
    python generate.py --model Qwen/Qwen3-0.6B --evaluate --data aime24   # on a GPU, if there is one
    python generate.py --model MODEL --data my.jsonl --check              # whether model and data fit

In training, each generator is a process (`generator_process`). It is sent `Work` through a queue, keeps its engine busy
with it, and sends back `Report`s with finished rollouts. The newest parameters lie in shared memory: between two steps
of the engine they are taken over at once, and completions in flight go on with them over the keys and values that older
parameters left in the cache (PipelineRL; sec. 3.1, A.11 of the paper). So every token carries the version of the
parameters that sampled it, and the log-probability that it was sampled with.

    1. TorchEngine         decodes many completions at once, over a stock transformers model
    2. generator_process   work in, reports out, the newest parameters between two steps
    3. main                the command: print completions, evaluate a model, or see whether data fit it

Dimensions: S slots of the engine, n <= S of them live, T positions, D hidden size, V vocabulary.
"""

import dataclasses
import importlib
import os
import queue
import signal
import sys
import time
import traceback
from collections import deque

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the seconds of imports below without a traceback
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch's threads that wait leave the cores to other processes

from curve.flags import errors_as_sentences, run_command
from machinery.settings import GenerateCommand, parse

if __name__ == "__main__":
    with errors_as_sentences():  # before the slow imports, so that --help and wrong flags are answered fast
        command = parse(sys.argv[1:], GenerateCommand, description=__doc__)

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

import loss
from data import Problem
from data.load import load_evaluation, task_of
from data.verify import VerifierPool
from machinery.check import check_fit, unwritable
from machinery.decoding import Decoding, completion_texts, make_decoding, marked_text, quoted, render_all
from machinery.engine import (
    Completions,
    Engine,
    EngineSettings,
    NoEngine,
    engine_settings,
    make_requests,
    refuse_split,
    sample_all,
)
from machinery.evaluation import evaluation_figures, judge_all, report_evaluation
from machinery.model import load_model, load_tokenizer, model_path, put_on_device, refuse_too_long
from machinery.processes import belong_to_the_run, in_one_sentence
from machinery.rollouts import Report, Request, Rollout, SharedParameters, Work
from machinery.vllm_engine import VllmEngine

# --- 1. The engine --------------------------------------------------------------------------------------------------


class SlotCache(Cache):
    """Keys and values of S sequences at positions of their own, over a stock transformers model.

    The first n slots take part in a step. Each writes at its own position. `update` returns more positions than a slot
    has written; the mask that the model is given hides the others.
    """

    def __init__(self, slots: int, length: int):
        super().__init__(layers=[])
        self.slots, self.length = slots, length
        self.keys: list[Tensor] = []  # per layer [S, heads, T, head size], made at the first prompt
        self.values: list[Tensor] = []
        self.slots_n: Tensor | None = None  # 0 to n - 1
        self.positions_n: Tensor | None = None  # at which the live slots write next
        self.width = 0  # positions that the model is given

    def fill(self, slots_n: Tensor, source: DynamicCache, rows_n: Tensor) -> None:
        """Copy the prompts' keys and values, as a plain forward left them in rows of `source`, to slots."""
        for i, layer in enumerate(source.layers):  # heads of keys and heads of values may differ in size
            for stored, given in ((self.keys, layer.keys), (self.values, layer.values)):
                if len(stored) == i:  # these are the first prompts
                    stored.append(given.new_zeros(self.slots, given.shape[1], self.length, given.shape[3]))
                stored[i][slots_n, :, : given.shape[2]] = given[rows_n]

    def move(self, to_n: Tensor, slots_n: Tensor, width: int) -> None:
        """Copy the first `width` positions of slots over others."""
        for stored in (*self.keys, *self.values):
            stored[to_n, :, :width] = stored[slots_n, :, :width]

    def place(self, positions_n: Tensor, longest: int) -> int:
        """Set the positions at which the first n slots write next. Returns how many positions the model will be given.

        If the longest completion reaches beyond half of its slot, the model gets whole slots. A CPU reads contiguous
        memory several times faster, and that saves more than the masked positions cost.
        """
        self.positions_n, self.slots_n = positions_n, torch.arange(len(positions_n), device=positions_n.device)
        self.width = self.length if 2 * longest > self.length else longest
        return self.width

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_, **__):
        """Called by a layer: store the keys and values of this step, return all that the live slots have."""
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        keys[self.slots_n, :, self.positions_n] = key_states[:, :, 0]
        values[self.slots_n, :, self.positions_n] = value_states[:, :, 0]
        n = len(self.positions_n)
        return keys[:n, :, : self.width], values[:n, :, : self.width]

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """0: positions are given explicitly."""
        return 0


class TorchEngine(Engine):
    """Continuous batching over slots of a preallocated KV cache, for any transformers causal LM.

    The live completions are always the first n slots: when one ends, the last live one takes its slot, and when enough
    slots are free, waiting requests are admitted behind them. A prompt is run once for all its completions, and always
    with the newest parameters. Completions in flight keep their cache; a new one never uses anything old.
    """

    def __init__(self, model: PreTrainedModel, decoding: Decoding, slots: int):
        self.model, self.decoding, self.slots = model, decoding, slots
        self.device = model.device
        self.version = 0
        self.waiting: deque[Request] = deque()
        self.live = 0  # slots in use
        # What is known of a slot is on the CPU; only the model's forward and the sampling are on the device.
        self.completions = Completions(slots, decoding)
        self.last_token = np.zeros(slots, np.int64)  # the model reads it next
        self.position = np.zeros(slots, np.int64)  # of this token
        # Uniform, one for each token that is sampled.
        self.noise = np.zeros((slots, decoding.thinking_budget + decoding.answer_budget))
        self.cache = SlotCache(slots, decoding.longest)

    @property
    def in_flight(self) -> list[Request]:
        return self.completions.requests[: self.live].tolist()

    def update(self, parameters: SharedParameters) -> None:
        self.version = parameters.read_into(self.model)

    @torch.inference_mode()
    def step(self) -> list[Rollout]:
        self._admit()
        if self.live == 0:
            return []
        slots = np.arange(self.live)
        tokens, logprobs = self._sample(self._hidden(self.live))
        forced = self.completions.forced_tokens(slots)  # of the phrase, if thinking was interrupted; else -1
        tokens = np.where(forced < 0, tokens, forced)
        ended, truncated = self.completions.append(slots, tokens, logprobs, self.version)
        self.last_token[slots] = tokens
        self.position[slots] += 1
        return self._release(ended | truncated, truncated)

    def _hidden(self, n: int) -> Tensor:
        """The last hidden states of the live slots' newest tokens, [n, D] in the dtype of the trunk."""
        inputs = torch.from_numpy(np.stack([self.last_token[:n], self.position[:n]])).to(self.device)
        width = self.cache.place(inputs[1], longest=int(self.position[:n].max()) + 1)
        unseen_nT = torch.arange(width, device=self.device) > inputs[1][:, None]
        mask = torch.zeros(n, 1, 1, width, dtype=self.model.dtype, device=self.device)
        mask.masked_fill_(unseen_nT[:, None, None], torch.finfo(self.model.dtype).min)
        output = self.model.base_model(
            input_ids=inputs[0][:, None],
            position_ids=inputs[1][:, None],
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
        )
        return output.last_hidden_state[:, 0]

    def _sample(self, hidden_nD: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """One token for each live slot and its log-probability, from the whole distribution."""
        head_VD = self.model.get_output_embeddings().weight
        logits_nV = loss.head_logits(hidden_nD, head_VD, self.decoding.fp32_logits)
        temperature = self.decoding.temperature
        logprobs_nV = torch.log_softmax(logits_nV / (temperature or 1.0), -1)
        # Inverse transform sampling: the first token at which the cumulative probability passes the noise.
        cumulative_nV = logprobs_nV.double().exp().cumsum(-1)
        n = len(hidden_nD)
        noise = self.noise[np.arange(n), self.completions.progress["num_sampled"][:n]]
        noise_n = torch.from_numpy(noise).to(self.device)
        tokens_n1 = torch.searchsorted(cumulative_nV, noise_n[:, None] * cumulative_nV[:, -1:], right=True)
        if temperature == 0:
            tokens_n1 = logprobs_nV.argmax(-1, keepdim=True)
        logprobs_n1 = logprobs_nV.gather(-1, tokens_n1)
        return tokens_n1[:, 0].cpu().numpy(), logprobs_n1[:, 0].cpu().numpy()

    def _admit(self) -> None:
        """Give free slots to waiting requests, when a sixteenth of the slots is free: a forward over prompts costs as
        much as a step."""
        free = self.slots - self.live
        count = min(free, len(self.waiting))
        if count == 0 or (self.live > 0 and free < self.slots / 16):
            return
        prompts: dict[tuple[int, ...], list[int]] = {}  # the slots of each distinct prompt
        for slot in range(self.live, self.live + count):
            request = self.waiting.popleft()
            self.completions.begin(slot, request)
            prompts.setdefault(tuple(request.prompt_ids), []).append(slot)
            self.noise[slot] = np.random.default_rng(request.seed).random(self.noise.shape[1])
            self.last_token[slot] = request.prompt_ids[-1]
            self.position[slot] = len(request.prompt_ids) - 1
        self._prefill(prompts)
        self.live += count

    def _prefill(self, prompts: dict[tuple[int, ...], list[int]], tokens_at_once: int = 16384) -> None:
        """Keys and values of all prompt tokens but the last, which the next step reads like any other."""
        longest_first = sorted(prompts, key=len, reverse=True)
        while longest_first:
            width = max(len(longest_first[0]) - 1, 1)
            batch = longest_first[: max(1, tokens_at_once // width)]
            longest_first = longest_first[len(batch) :]
            # Padding is on the right, where a causal model never looks; its keys and values are overwritten.
            ids = torch.tensor([(list(ids[:-1]) + [0] * width)[:width] for ids in batch], device=self.device)
            cache = DynamicCache()
            self.model.base_model(input_ids=ids, past_key_values=cache, use_cache=True)
            copies = [(slot, row) for row, ids in enumerate(batch) for slot in prompts[ids]]
            slots_n, rows_n = torch.tensor(copies, device=self.device).T
            self.cache.fill(slots_n, cache, rows_n)

    def _release(self, finished: np.ndarray, truncated: np.ndarray) -> list[Rollout]:
        """Take the finished completions out of their slots and close the gaps with the last live ones."""
        done = np.flatnonzero(finished)
        rollouts = [self.completions.rollout(slot, bool(truncated[slot])) for slot in done]
        left = self.live - len(done)
        gaps, movers = done[done < left], np.flatnonzero(~finished[left:]) + left
        if len(gaps):
            self.completions.move(gaps, movers)
            for array in (self.last_token, self.position, self.noise):
                array[gaps] = array[movers]
            to_n, slots_n = torch.from_numpy(np.stack([gaps, movers])).to(self.device)
            self.cache.move(to_n, slots_n, int(self.position[gaps].max()))
        self.live = left
        return rollouts


def make_engine(settings: EngineSettings, model: PreTrainedModel | None = None) -> Engine:
    """The engine, ready for its first `update`. ValueError, in one sentence, if there can be none. model: the same
    model on the CPU in fp32, if it is loaded already; TorchEngine takes it as its own."""
    torch.set_num_threads(settings.threads)
    if settings.engine == "vllm":
        return VllmEngine(settings)
    model = model or load_model(settings.model, torch.device("cpu"), torch.float32)
    dtype, fp32_head = getattr(torch, settings.dtype), settings.decoding.fp32_logits
    put_on_device(model, torch.device(settings.devices[0]), dtype, fp32_head)
    return TorchEngine(model, settings.decoding, settings.slots)


@torch.inference_mode()
def refuse_wrong_over_slots(model: PreTrainedModel, name: str) -> None:
    """ValueError if this model does not compute the same token by token over slots as in one forward: one without a
    cache of keys and values, with attention that our mask does not reach, or with positions of another kind."""
    ids = list(range(min(6, model.config.get_text_config().vocab_size)))
    decoding = Decoding(
        eos=(), end_of_thinking=-1, thinks=True, phrase=(), prompt_budget=len(ids), thinking_budget=0, answer_budget=1,
        length_control="penalty", fp32_logits=True,
    )  # fmt: skip
    attention = model.config._attn_implementation
    with in_one_sentence(name, "it cannot be sampled token by token over slots of a cache; --engine vllm may know it"):
        model.set_attn_implementation("eager")  # which every model has
        plain_D = model.base_model(input_ids=torch.tensor([ids], device=model.device)).last_hidden_state[0, -1]
        model.set_attn_implementation(attention)
        engine = TorchEngine(model, decoding, slots=2)
        engine.add([Request(0, i, ids[: len(ids) - i], 0, (0,)) for i in range(2)])
        engine._admit()
        error = ((engine._hidden(2)[0] - plain_D).norm() / plain_D.norm()).item()
        if not error < 0.05:  # nor NaN
            raise ValueError(f"its hidden state is off by {error:.0%}")


# --- 2. The process -------------------------------------------------------------------------------------------------

HEARTBEAT = 5.0  # the most seconds between two reports, if no step of the engine takes longer


def generator_process(
    settings: EngineSettings, parameters: SharedParameters, work: queue.Queue, reports: queue.Queue
) -> None:
    """Sample what comes through `work`, with the newest parameters, until told to stop. Any exception is sent to the
    trainer, with its traceback unless it is `NoEngine` or memory is full. When the trainer dies, the process ends."""
    belong_to_the_run()
    try:
        _generate(settings, parameters, work, reports)
    except BaseException as error:
        text = str(error) if isinstance(error, NoEngine) else traceback.format_exc()
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            text = out_of_memory(error)
        reports.put(Report(error=text))
        raise SystemExit(1) from None


def _generate(settings: EngineSettings, parameters: SharedParameters, work: queue.Queue, reports: queue.Queue) -> None:
    transformers.utils.logging.disable_progress_bar()
    engine = make_engine(settings)
    if isinstance(engine, TorchEngine) and engine.device.type == "cuda":  # the workers of vLLM do it themselves
        parameters.pin()
    engine.update(parameters)
    reports.put(Report(slots=engine.slots))
    busy, reported, events = 0.0, time.monotonic(), []
    while True:
        # 1. First take all the work, then the parameters. The trainer has read the version of a group before it sent
        # the work, so no token is sampled with parameters older than that.
        waits, began = engine.unfinished == 0, time.monotonic()
        while (message := _next_work(work, wait=engine.unfinished == 0)) is not None:
            if message.stop:
                return
            engine.add(message.requests)
        if waits:
            events.append((began, time.monotonic(), None))
        if parameters.version > engine.version:
            began = time.monotonic()
            engine.update(parameters)
            events.append((began, time.monotonic(), engine.version))

        # 2. One token for everything in flight.
        started = time.monotonic()
        rollouts = engine.step()
        training = [not request.validation for request in engine.in_flight]
        training += [not rollout.request.validation for rollout in rollouts]
        busy += (time.monotonic() - started) * sum(training) / max(1, len(training))

        # 3. What has ended goes back; now and then an empty report says that the process lives.
        if rollouts or time.monotonic() - reported > HEARTBEAT:
            sampled = sum(int(rollout.sampled.sum()) for rollout in rollouts if not rollout.request.validation)
            reports.put(Report(rollouts, busy, sampled, events=events))
            busy, reported, events = 0.0, time.monotonic(), []


def _next_work(work: queue.Queue, wait: bool) -> Work | None:
    """The next message; None if there is none yet. With `wait` it may take a second to come."""
    try:
        return work.get(timeout=1.0) if wait else work.get_nowait()
    except queue.Empty:
        return None


def out_of_memory(error: BaseException) -> str:
    """A sentence for the user."""
    return f"out of memory ({str(error).partition('. ')[0]}): lower --slots or the budgets"


# --- 3. The command -------------------------------------------------------------------------------------------------


def main(command: GenerateCommand) -> int:
    """The command. Returns the exit status: 1 if --check has found what does not fit, else 0. ValueError, in one
    sentence, if the flags, the data or the model cannot be used."""
    transformers.utils.logging.disable_progress_bar()
    if bool(command.prompt) + command.evaluate + command.check != 1:
        raise ValueError("say one of --prompt TEXT, --evaluate and --check")
    names = () if command.prompt else command.data
    sources = [load_evaluation(name, command.problems, instruction=command.instruction) for name in names]
    for source in sources:
        for note in source.notes:
            print(f"{source.name}: {note}", file=sys.stderr)

    path = model_path(command.model)
    tokenizer = load_tokenizer(path)
    decoding = make_decoding(tokenizer, command, command.length_control)
    decoding = dataclasses.replace(decoding, temperature=command.temperature)
    devices = tuple(f"cuda:{i}" for i in range(torch.cuda.device_count()))[: command.tensor_parallel] or ("cpu",)
    settings = engine_settings(command, devices, path, decoding)
    model = load_model(path, torch.device("cpu"), torch.float32)
    if not command.check:  # which shows the problem first
        refuse_too_long(model, decoding)
    refuse_split(settings.engine, command.tensor_parallel, model.config.num_attention_heads)
    if settings.engine == "torch":
        refuse_wrong_over_slots(model, path)

    if command.check:
        lines = [line for source in sources for line in check_fit(model, tokenizer, decoding, command, source)]
        print("\n".join(lines))
        render_all(tokenizer, [problem.prompt for source in sources for problem in source.validation], command)
        refuse_too_long(model, decoding)
        return int(any(line.startswith("!") for line in lines))

    samples = command.samples or (1 if command.prompt else 16)
    completions = samples * max([1, *(len(source.validation) for source in sources)])
    try:
        engine = make_engine(dataclasses.replace(settings, slots=min(command.slots, completions)), model)
        if isinstance(engine, VllmEngine):  # it is made without parameters
            parameters = SharedParameters(model)
            parameters.write(model.named_parameters(), version=0)
            engine.update(parameters)

        def sample(problems: list[Problem]) -> list[Rollout]:
            ids = render_all(tokenizer, [problem.prompt for problem in problems], command)
            requests = []
            for i, problem in enumerate(problems):
                seed = (command.seed, i)
                requests += make_requests(i, ids[problem.prompt], samples, command.thinking_budget, decoding, seed)
            return sample_all(engine, requests, progress=command.evaluate)

        if command.prompt:
            task = task_of(command.data[0])
            worded = getattr(importlib.import_module(task), "worded", lambda text, _: text)  # as in training
            prompt = worded(command.prompt, command.instruction)
            for line in unwritable(tokenizer, prompt):
                print(line, file=sys.stderr)
            for rollout in sample([Problem(prompt, "", task)]):
                print(quoted("prompt", prompt))
                print(quoted("reply", marked_text(tokenizer, rollout)))
        for source in sources:
            rollouts = sample(source.validation)
            texts = completion_texts(tokenizer, decoding, rollouts)
            with VerifierPool(command.verifiers, command.verifier_time_limit, command.verifier_memory) as pool:
                verdicts = judge_all(pool, source.validation, rollouts, texts)
            figures = evaluation_figures(rollouts, verdicts, samples)
            report_evaluation(command.model, path, source, figures, samples, command.log)
            for wanted in (True, False):
                by_problem = {
                    rollout.request.group: rollout
                    for rollout, verdict in zip(rollouts, verdicts)
                    if verdict.correct == wanted and verdict.failure is None and not rollout.truncated
                }
                for rollout in [*by_problem.values()][: command.show]:
                    print(quoted("prompt", source.validation[rollout.request.group].prompt))
                    print(quoted("right" if wanted else "wrong", marked_text(tokenizer, rollout)))
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise ValueError(out_of_memory(error)) from None
    return 0


if __name__ == "__main__":
    run_command(main, command)
