"""Prompts out, whole judged groups in: the trainer gets its batches here, on rank 0.

The way of a rollout: a prompt is handed out to a generator as the requests of a group. Their
rollouts come back in reports. A verifier judges each. When all are judged, the group is finished
and can be trained on. A generator that dies or is silent is replaced, and the new one gets the
requests that had not come back.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

import loss
from core.engine import Decoding, EngineSettings, make_requests
from core.generators import Generator, GeneratorFailed, GeneratorHere
from core.rollouts import Group, Rollout, SharedParameters
from core.screen import say, warn
from core.settings import Settings
from core.text import completion_text, prompt_ids
from data.load import Source, fingerprint
from data.verify import Verdict, VerifierHere, VerifierPool, no_verdict_at_all

# The second number of each seed, so that no two draws have the same noise.
TRAINING, VALIDATION, ORDER = 0, 1, 2
SAY_EVERY = 30.0  # seconds, of a validation
FEW_VERDICTS = 4  # a batch that wants no more verdicts than this may miss all of them by chance


@dataclass
class PromptOrder:
    """Which problem of a source comes next: in each epoch all in a new random order, but for those
    that are retired."""

    problems: int  # how many this source has
    seed: int
    recipe: loss.Recipe
    source: int = 0  # its index
    # These three are the state in a checkpoint.
    epoch: int = 0
    cursor: int = 0  # problems of this epoch that have come, or were retired
    retired: Collection[int] = ()

    def __post_init__(self):
        self.retired = {*self.retired}
        self._bring_back_if_few()
        self._shuffle()

    def _shuffle(self) -> None:
        rng = np.random.default_rng((self.seed, ORDER, self.source, self.epoch))
        self.order = rng.permutation(self.problems)

    @property
    def left(self) -> int:
        """How many problems are not retired."""
        return self.problems - len(self.retired)

    def next(self) -> int:
        """The index of the next problem. At least one must be left."""
        while True:
            if self.cursor == self.problems:
                self.epoch, self.cursor = self.epoch + 1, 0
                self._shuffle()
            problem_index = int(self.order[self.cursor])
            self.cursor += 1
            if problem_index not in self.retired:
                return problem_index

    def retire_if_solved(self, problem_index: int, pass_rate: float) -> None:
        """Retire a problem if this visit has solved it: for good, or until fewer than
        `least_prompts` are left."""
        if loss.retires(pass_rate) and not self.recipe.positive_resampling:
            self.retired.add(problem_index)
        self._bring_back_if_few()

    def _bring_back_if_few(self) -> None:
        if self.left < self.recipe.least_prompts:
            self.retired.clear()

    def state(self) -> dict:
        """All that a new PromptOrder goes on from, for a checkpoint. The order follows from seed
        and epoch."""
        return {"epoch": self.epoch, "cursor": self.cursor, "retired": sorted(self.retired)}


@dataclass(frozen=True)
class Prompts:
    """The problems of a run, and how its model reads and writes."""

    sources: list[Source]
    tokenizer: PreTrainedTokenizerBase
    decoding: Decoding


class Feed:
    """Prompts out, whole judged groups in: `batch` has those to train on at a step, `validate`
    those of the held-out problems. Both return None if the run ends; if it cannot go on, `failure`
    says why. No token was sampled by parameters older than its group's version."""

    def __init__(
        self,
        settings: Settings,
        prompts: Prompts,
        engines: list[EngineSettings],
        parameters: SharedParameters,
        stop_asked: Callable,
        state: dict | None = None,
    ):
        """engines: of each generator. parameters: that the generators sample with. stop_asked: says
        whether the user wants the run to end. state: of a checkpoint to go on from."""
        self.settings, self.prompts, self.engines = settings, prompts, engines
        self.parameters, self.stop_asked = parameters, stop_asked
        self.data = [fingerprint(source) for source in prompts.sources]
        number = len(self.data)
        state = state or {"orders": [{}] * number, "handed_out": [0] * number, "to_repeat": []}
        self.orders = [
            PromptOrder(len(source.train), settings.seed, settings.recipe, i, **state["orders"][i])
            for i, source in enumerate(prompts.sources)
        ]
        self.handed_out = state["handed_out"]  # groups handed out so far, by source
        # Groups that were under way at the checkpoint, and are handed out first: number, source,
        # index of the problem.
        self.to_repeat = state["to_repeat"]
        self.under_way = {}  # groups by number: handed out, and not trained on yet
        self.validating = {}  # groups by number, of a validation that goes on
        self.generators, self.verifiers = [], None  # until the start
        self.restarts = 0  # generators replaced in this process; a resumed run counts from 0 again
        self.failure = ""  # why the run cannot go on
        # What all generators did for training since the last line of the log.
        self.busy_seconds, self.sampled_tokens = 0.0, 0
        self.events = []  # of them, not logged yet: (generator, *event)

    def state(self) -> dict:
        """All that a new Feed goes on from, for a checkpoint. Groups under way are sampled again
        then. Every random draw follows from the seed and the number of a group, an epoch or a step,
        so no random state is stored."""
        begun = [
            (group.number, group.source, group.problem_index) for group in self.under_way.values()
        ]
        return {
            "data": self.data,
            "orders": [order.state() for order in self.orders],
            "handed_out": self.handed_out,
            "to_repeat": [*begun, *self.to_repeat],
        }

    def start(self) -> None:
        """Start generators and verifiers, and wait until all generators are ready."""
        start_verifiers = VerifierHere if self.settings.one_process else VerifierPool
        self.verifiers = start_verifiers(*self.settings.verifier_limits)
        self.generators = [self._start(number) for number in range(len(self.engines))]
        self._take_in(wait=False)

    def _start(self, number: int) -> Generator:
        start = GeneratorHere if self.settings.one_process else Generator
        return start(number, self.engines[number], self.parameters)

    def close(self) -> None:
        """End all generators and verifiers; kill generators that do not end within 5 seconds."""
        for generator in self.generators:
            generator.stop()
        deadline = time.monotonic() + 5.0
        for generator in self.generators:
            generator.close(max(0.0, deadline - time.monotonic()))
        if self.verifiers:
            self.verifiers.close()

    # Batches

    def batch(self, version: int) -> list[Group] | None:
        """The groups to train this version of the parameters on. None if every prompt is retired,
        or if the run ends."""
        wait = False
        while self._take_in(wait):
            self._hand_out(version)
            groups = self.under_way.values()
            done = [group for group in groups if group.finished]
            unfinished = [group.version for group in groups if not group.finished]
            chosen = loss.choose_batch(
                [group.version for group in done],
                unfinished,
                version,
                self.settings.recipe.asynchrony,
                self.settings.groups_per_step,
            )
            if chosen:
                groups = [done[i] for i in chosen]
                if not self._judged(groups):
                    return None
                for group in groups:
                    del self.under_way[group.number]
                return groups
            if not unfinished:  # to wait would be for ever
                prompts_left = any(order.left for order in self.orders)
                assert not prompts_left, f"too few groups are handed out for step {version + 1}"
                return None
            wait = True
        return None

    def retire(self, groups: list[Group]) -> None:
        """No-Positive-Resampling: take the prompts that these groups have solved out of all later
        epochs."""
        for group in groups:
            self.orders[group.source].retire_if_solved(group.problem_index, group.pass_rate)

    def _hand_out(self, version: int) -> None:
        """Give prompts to the generators: as many groups as the recipe allows and the generators
        can use."""
        settings, asynchrony = self.settings, self.settings.recipe.asynchrony
        kind, _ = loss.parse_asynchrony(asynchrony)
        # What the recipe lets be under way. A generator gets what its slots hold and its share of
        # one batch more: the rest would grow old in its queue. But ppo hands out whole batches.
        most_in_all = loss.groups_ahead(asynchrony, settings.groups_per_step, version)
        share_of_batch = settings.groups_per_step // len(self.generators) + 1
        groups_of = Counter(  # that each generator has not sent back
            group.generator
            for group in self.under_way.values()
            if len(group.rollouts) < len(group.requests)
        )
        new = []
        while len(self.under_way) < most_in_all:
            generator = min(self.generators, key=lambda each: groups_of[each.number] / each.slots)
            most = generator.slots // settings.completions_per_prompt + share_of_batch
            if kind == "pipeline" and groups_of[generator.number] >= most:
                break
            prompt = self._next_prompt()
            if not prompt:
                break
            group = self._group(*prompt, generator)
            self.under_way[group.number] = group
            new.append(group)
            groups_of[generator.number] += 1
        self._send(new)

    def _next_prompt(self) -> tuple[int, int, int] | None:
        """Number, source and problem of the next group, those of the checkpoint first. None: no
        prompt is left."""
        if self.to_repeat:
            return self.to_repeat.pop(0)
        candidates = [i for i, order in enumerate(self.orders) if order.left]
        if not candidates:
            return None
        # In the long run the prompts of the sources are in proportion to their weights. Before each
        # light source has given one, the heavy ones give more than their share.
        sources = self.prompts.sources
        source = min(candidates, key=lambda i: (self.handed_out[i] + 1) / sources[i].weight)
        number = sum(self.handed_out)
        self.handed_out[source] += 1
        return number, source, self.orders[source].next()

    def _group(
        self,
        number: int,
        source: int,
        problem_index: int,
        generator: Generator,
        validated: int | None = None,
    ) -> Group:
        """A group for this generator, with its requests. Generators sample what is handed out now
        with the newest version of the parameters, or with a later one. validated: the version that
        a validation measures; None if the group is for training."""
        settings, of_source = self.settings, self.prompts.sources[source]
        problems, completions = of_source.train, settings.completions_per_prompt
        seed = (settings.seed, TRAINING, number)
        validation = validated is not None
        if validation:
            problems, completions = of_source.validation, settings.validation_samples
            seed = (settings.seed, VALIDATION, validated, number)
        problem, decoding = problems[problem_index], self.prompts.decoding
        ids = prompt_ids(self.prompts.tokenizer, problem, settings)
        budget = settings.thinking_budget
        requests = make_requests(number, ids, completions, budget, decoding, seed, validation)
        version = self.parameters.version
        return Group(number, source, problem_index, problem, version, generator.number, requests)

    def _send(self, groups: list[Group]) -> None:
        """Send each generator the requests of its groups that have not come back."""
        for generator in self.generators:
            requests = [
                request
                for group in groups
                if group.generator == generator.number
                for request in group.requests
                if request.index not in group.rollouts
            ]
            if requests:
                generator.give(requests)

    # Validations

    def validate(self, version: int) -> list[Group] | None:
        """The held-out problems, sampled and judged. None if the run ends. Their requests go before
        all others. The trainer has published this version of the parameters, and publishes none
        meanwhile, so every token is sampled with it."""
        groups = []
        for source, of_source in enumerate(self.prompts.sources):
            for problem_index in range(len(of_source.validation)):
                number = len(groups)
                generator = self.generators[number % len(self.generators)]
                groups.append(self._group(number, source, problem_index, generator, version))
        self.validating = dict(enumerate(groups))
        self._send(groups)
        go_on, said = True, time.monotonic()
        while go_on and not all(group.finished for group in groups):
            go_on = self._take_in()
            if time.monotonic() - said > SAY_EVERY:
                said = time.monotonic()
                finished = sum(group.finished for group in groups)
                say(f"validation: {finished} of {len(groups)} problems")
        self.validating = {}
        return groups if go_on and self._judged(groups) else None

    # What comes back

    def _take_in(self, wait: bool = True) -> bool:
        """Put the rollouts and verdicts that have come into their groups; with `wait`, wait until
        some have come. While a generator has no slots yet, wait for it. No wait is for ever: silent
        generators and verifiers are replaced. Returns False if the run ends."""
        try:
            while not self.stop_asked():
                came = [self._read_reports(), self._read_verdicts()]
                are_ready = all(generator.slots for generator in self.generators)
                if are_ready and (any(came) or not wait):
                    break
                time.sleep(0.002)
        except GeneratorFailed as failure:
            self.failure = str(failure)
        return not (self.failure or self.stop_asked())

    def _read_reports(self) -> bool:
        """Take what generators have sent, and replace those that have failed. Returns whether
        anything came. GeneratorFailed if too many have failed."""
        came = False
        for generator in list(self.generators):
            try:
                for report in generator.read_reports(self.settings.wait_timeout):
                    came = True
                    self.busy_seconds += report.busy_seconds
                    self.events += [(generator.number, *event) for event in report.events]
                    self._submit(report.rollouts)
            except GeneratorFailed as failure:
                self._replace(generator, failure)
        return came

    def _submit(self, rollouts: list[Rollout]) -> None:
        """Put rollouts in their groups, and give them to the verifiers; count the tokens of those
        for training. A truncated one needs no verdict."""
        to_judge = []
        for rollout in rollouts:
            request = rollout.request
            if request.validation:
                groups = self.validating
            else:
                groups = self.under_way
                self.sampled_tokens += int(rollout.sampled.sum())
            group = groups[request.group]
            group.rollouts[request.index] = rollout
            if rollout.truncated:
                group.verdicts[request.index] = Verdict(0.0)
            else:
                text = completion_text(self.prompts.tokenizer, self.prompts.decoding, rollout)
                to_judge.append(((group, request.index), group.problem, text))
        self.verifiers.submit(to_judge)

    def _read_verdicts(self) -> bool:
        """Take what the verifiers have judged. Returns whether anything came."""
        verdicts = self.verifiers.results()
        for (group, index), verdict in verdicts:
            group.verdicts[index] = verdict
            if verdict.failure:
                warn(
                    "verifier",
                    f"no verdict on a completion ({verdict.reason}); it is left out, and counted as"
                    " `verifier_failures` in the log",
                )
            elif verdict.raised:
                warn(
                    "task",
                    "the task has raised on a completion, which is wrong then, and is counted as"
                    f" `task_errors` in the log:\n{verdict.detail}",
                )
        return bool(verdicts)

    def _judged(self, groups: list[Group]) -> bool:
        """Whether any completion of these groups got a verdict, or few wanted one. Otherwise the
        run ends: its task cannot judge."""
        verdicts = [
            verdict
            for group in groups
            for rollout, verdict in group.judged()
            if not rollout.truncated
        ]
        if len(verdicts) > FEW_VERDICTS:
            self.failure = no_verdict_at_all(verdicts)
        return not self.failure

    def _replace(self, generator: Generator, failure: GeneratorFailed) -> None:
        """Start another generator in place of one that has failed, and give it the requests that
        had not come back. It begins them from their first token. The trainer waits until it is
        ready: it may share a GPU with the trainer, and takes what is free there.

        Raises the failure if too many were replaced, or if not all generators have been ready once:
        then a new one would fail in the same way.
        """
        most = self.settings.max_restarts
        all_were_ready = self.restarts or all(each.slots for each in self.generators)
        if self.restarts == most or not all_were_ready:
            raise failure
        self.restarts += 1
        say(f"warning: {failure}\nIt is replaced ({self.restarts} of --max-restarts {most}).")
        generator.close()
        self.generators[generator.number] = self._start(generator.number)
        groups = [*self.validating.values(), *self.under_way.values()]
        self._send([group for group in groups if group.generator == generator.number])
