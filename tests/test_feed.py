"""The feed: which prompt comes next, who is given it, what comes back, and what a resumed run goes
on with. Generators and verifiers are stand-ins here that answer in this process."""

import dataclasses
import itertools
import json
import multiprocessing
import os
import queue
import random
import time
from types import SimpleNamespace

import numpy as np
import pytest

import core.feed
import core.generators
import loss
from core.engine import EngineSettings
from core.feed import Feed, PromptOrder, Prompts, Workers
from core.generators import Generator, GeneratorFailed, start_generator
from core.model import make_decoding
from core.rollouts import Report, Rollout
from core.settings import Settings
from data import Problem
from data.load import Source
from data.verify import Verdict
from docs.make_base import make_tokenizer
from loss import Recipe

# --- prompts --------------------------------------------------------------------------------------


def test_the_order_of_prompts_goes_on_where_it_was():
    """Every prompt comes once an epoch, in a new order. What is solved once stays away, whatever a
    later visit says, and when the run is resumed."""
    order = PromptOrder(12, seed=3, recipe=Recipe())
    epochs = [[order.next() for _ in range(12)] for _ in range(3)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    again, other = (PromptOrder(12, seed=seed, recipe=Recipe()) for seed in (3, 1))
    assert [again.next() for _ in range(12)] == epochs[0] != [other.next() for _ in range(12)]

    for prompt, pass_rate in ((1, 15 / 16), (2, 14 / 16), (3, 0.9), (4, 1.0), (3, 0.1)):
        order.retire_if_solved(prompt, pass_rate)
    begun = [order.next() for _ in range(4)]
    state = json.loads(json.dumps(order.state()))
    resumed = PromptOrder(12, seed=3, recipe=Recipe(), state=state)
    assert resumed.left == order.left == 9
    rest = [resumed.next() for _ in range(14)]
    assert rest == [order.next() for _ in range(14)]
    assert sorted(begun + rest[:5]) == sorted(rest[5:]) == sorted({*range(12)} - {1, 3, 4})


def test_no_two_draws_of_a_run_have_the_same_noise():
    """Two sources of one size have orders of their own, and no order is drawn as the noise of a
    completion is, though numpy ignores zeros at the end of a seed."""
    orders = [PromptOrder(100, 0, Recipe(), source).order.tolist() for source in (0, 1)]
    assert orders[0] != orders[1]
    feed = StandInFeed("ppo-1", numbers=(100,))
    feed._hand_out(0)
    noise = np.random.default_rng(feed.under_way[0].requests[0].seed).permutation(100).tolist()
    assert noise not in orders


def test_solved_prompts_come_again_when_few_others_are_left_or_without_no_positive_resampling():
    order = PromptOrder(10, seed=0, recipe=Recipe(least_prompts=4))
    for prompt in range(6):
        order.retire_if_solved(prompt, 1.0)
    assert order.left == 4 and {order.next() for _ in range(20)} == {6, 7, 8, 9}
    order.retire_if_solved(6, 1.0)
    assert order.left == 10 and {order.next() for _ in range(30)} == {*range(10)}
    off = PromptOrder(10, seed=0, recipe=Recipe(no_positive_resampling=False))
    off.retire_if_solved(1, 1.0)
    assert off.left == 10
    ended = {"epoch": 1, "cursor": 2, "retired": [0, 1, 2, 3]}
    assert PromptOrder(4, 0, Recipe(), state=ended).left == 0
    assert PromptOrder(4, 0, Recipe(least_prompts=2), state=ended).left == 4


# --- reports --------------------------------------------------------------------------------------


class Quiet:
    """A generator's process that lives, or has died, and its queue."""

    name, exitcode = "generator 0 on cpu", -9

    def __init__(self, alive, reports=()):
        self.alive, self.left = alive, list(reports)

    def is_alive(self):
        return self.alive

    def get_nowait(self):
        if self.left:
            return self.left.pop(0)
        raise queue.Empty


def test_pitfall_12_a_dead_or_silent_generator_is_seen():
    generator = lambda quiet: Generator(0, quiet, None, quiet, time.monotonic() - 10)
    assert generator(Quiet(alive=True)).read_reports(timeout=60) == []
    with pytest.raises(GeneratorFailed, match="--wait-timeout"):
        generator(Quiet(alive=True)).read_reports(timeout=1)
    with pytest.raises(GeneratorFailed, match="ended by signal 9"):
        generator(Quiet(alive=False)).read_reports(timeout=60)
    with pytest.raises(GeneratorFailed, match="failed:\nTraceback: it broke"):
        generator(Quiet(False, [Report(error="Traceback: it broke")])).read_reports(timeout=60)
    last_words = Quiet(False, [Report()])
    assert generator(last_words).read_reports(timeout=60) == [Report()]


@pytest.mark.parametrize("sent", [b"", b"\0\0\0\x64half of it"])
def test_a_generator_that_dies_in_the_middle_of_a_report_is_seen(sent):
    reports = multiprocessing.get_context("spawn").Queue()
    os.write(reports._writer.fileno(), sent)  # the first four bytes say that 100 are to come
    reports._writer.close()
    lives = iter([True, False])  # its queue ends a moment before the process does
    process = SimpleNamespace(name="generator 0", exitcode=-9, is_alive=lambda: next(lives))
    generator = Generator(0, process, None, reports, time.monotonic())
    assert generator.read_reports(timeout=60) == []
    with pytest.raises(GeneratorFailed, match="generator 0 ended by signal 9"):
        generator.read_reports(timeout=60)


def tells(engine, parameters, work, reports):
    """A generator that says what it sees, and of what its engine would be made."""
    reports.put((os.environ["CUDA_VISIBLE_DEVICES"], engine.devices))


def test_a_generator_is_started_among_its_own_gpus_and_modules(monkeypatch, tmp_path):
    """It never sees others, whatever its imports ask CUDA; the trainer sees all of them again. It
    takes no module from the folder that the user stands in."""
    monkeypatch.chdir(tmp_path)
    for module in ("multiprocessing", "signal", "torch"):
        (tmp_path / f"{module}.py").write_text("open('it ran', 'w')\nraise ImportError\n")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cases = [
        (None, ("cuda:2",), "2"),
        ("4,GPU-a1b2,6", ("cuda:1", "cuda:2"), "GPU-a1b2,6"),
        ("", ("cpu",), ""),
    ]
    monkeypatch.setattr(core.generators, "generator_process", tells)
    generators = []
    for visible, devices, _ in cases:
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        engine = EngineSettings("model", devices, "float32", 1, 8, None)
        generators.append(start_generator(0, engine, None))
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible
    for generator, (_, devices, seen) in zip(generators, cases):
        seen_as = tuple(f"cuda:{i}" for i in range(len(devices))) if seen else ("cpu",)
        assert generator.reports.get(timeout=300) == (seen, seen_as)
        assert generator.process.name.endswith(",".join(devices))
        generator.close()
    assert not (tmp_path / "it ran").exists()


# --- the feed, with stand-ins ---------------------------------------------------------------------


class StandIn:
    """Process and both queues of a generator, which samples a few of its requests whenever it is
    asked for reports."""

    name, exitcode = "generator 0 on cpu", -9

    def __init__(self, parameters, rng):
        self.parameters, self.rng, self.requests, self.dead = parameters, rng, [], False

    def put(self, requests):
        self.requests += requests or []  # None: the generator ends

    def get_nowait(self):
        if self.dead or not self.requests or self.rng.random() < 0.4:
            raise queue.Empty
        self.rng.shuffle(self.requests)
        self.requests.sort(key=lambda request: not request.validation)
        number = self.rng.randint(1, 5)
        done, self.requests = self.requests[:number], self.requests[number:]
        rollouts = [self.rollout(request) for request in done]
        return Report(rollouts, busy_seconds=0.5, sampled_tokens=len(done), slots=8)

    def rollout(self, request):
        versions = np.full(2, self.parameters.version, np.int32)
        return Rollout(
            request,
            np.array([1, 0], np.int32),
            np.ones(2, bool),
            np.zeros(2),
            versions,
            False,
            False,
        )

    def is_alive(self):
        return not self.dead

    kill = join = close = cancel_join_thread = lambda self, *_: None


class Judges:
    """A pool of verifiers that finds right what is of these prompts, and answers at once."""

    def __init__(self, solved):
        self.solved, self.verdicts = solved, []

    def submit(self, items):
        self.verdicts += [
            (key, Verdict(problem.prompt in self.solved)) for key, problem, _ in items
        ]

    def results(self):
        given, self.verdicts = self.verdicts, []
        return given

    def close(self):
        pass


class StandInFeed(Feed):
    def __init__(
        self,
        asynchrony,
        numbers=(40,),
        solved=(),
        seed=0,
        generators=2,
        state=None,
        version=0,
        **changes,
    ):
        """numbers: of prompts of each source; of several, the first has three times the weight."""
        chosen = Settings(
            prompts_per_step=3, completions_per_prompt=2, validation_samples=2, slots=8, **changes
        )
        chosen = dataclasses.replace(chosen, recipe=loss.Recipe(asynchrony=asynchrony))
        sources = []
        for s, number in enumerate(numbers):
            problems = [
                Problem(f"{s}+{i}=", "", "data.tasks.arithmetic") for i in range(number + 4)
            ]
            sources.append(
                Source(str(s), 3.0 if s == 0 else 1.0, problems[:number], problems[number:])
            )
        tokenizer = make_tokenizer()
        prompts = Prompts(sources, tokenizer, make_decoding(tokenizer, chosen))
        parameters = SimpleNamespace(version=version)
        workers = Workers([SimpleNamespace(devices=("cpu",))] * generators, parameters)
        super().__init__(chosen, prompts, workers, lambda: False, json.loads(json.dumps(state)))
        self.rng = random.Random(seed)
        self.generators = [self._start(number) for number in range(generators)]
        self.verifiers = Judges(solved)

    def _start(self, number):
        process = StandIn(self.parameters, self.rng)
        return Generator(number, process, process, process, heard=time.monotonic(), slots=8)


def make_steps(feed, first, last):
    """Train: the groups of each step from first to last, published as the recipe says."""
    trained = []
    for step in range(first, last):
        groups = feed.batch(step)
        assert len(groups) == 3 and all(group.finished for group in groups)
        trained.append(groups)
        feed.retire(groups)
        if loss.publishes(feed.settings.recipe.asynchrony, step + 1):
            feed.parameters.version = step + 1
    return trained


@pytest.mark.parametrize("asynchrony", ["pipeline-0", "pipeline-2", "pipeline-8", "ppo-1", "ppo-3"])
@pytest.mark.parametrize("seed", range(4))
def test_pitfall_16_no_token_is_older_than_k_and_no_prompt_is_lost(asynchrony, seed):
    """Also if the run is resumed at any step. No token is older than its group, no group older than
    k, and the bound is used. The prompts trained on and those under way are the first of the
    epoch, each once."""
    most, feed, version = loss.most_off_policy(asynchrony), None, 0
    ages, prompts, numbers = [], [], []
    for last in sorted(random.Random(seed).sample(range(10, 24), 3)):
        state = feed.state() if feed else None
        feed = StandInFeed(asynchrony, numbers=(400,), seed=last, state=state, version=version)
        for step, groups in enumerate(make_steps(feed, version, last), start=version):
            for group in groups:
                versions = np.concatenate([rollout.versions for rollout in group.rollouts.values()])
                assert group.version <= versions.min() and versions.max() <= step
                ages.append(step - group.version)
                prompts.append(group.problem_index)
                numbers.append(group.number)
        version = last
    assert max(ages) <= most and min(ages) >= 0
    if asynchrony.startswith("ppo"):
        assert ages[:30] == [step % (most + 1) for step in range(10) for _ in range(3)]
    assert max(ages) >= min(1, most)
    assert len(prompts) == 3 * version and len({*numbers}) == len(numbers)
    prompts += [prompt for _, _, prompt in feed.state()["to_repeat"]]
    first = PromptOrder(400, seed=0, recipe=Recipe()).order.tolist()[: sum(feed.handed_out)]
    assert sorted(prompts) == sorted(first)


def test_a_solved_prompt_does_not_come_again_when_the_run_is_resumed():
    solved = {f"0+{i}=" for i in range(0, 30, 2)}
    feed = StandInFeed("ppo-1", numbers=(30,), solved=solved)
    make_steps(feed, 0, 10)  # one epoch
    resumed = StandInFeed("ppo-1", numbers=(30,), solved=solved, state=feed.state(), version=10)
    groups = sum(make_steps(resumed, 10, 15), [])
    assert {group.problem_index for group in groups} == {*range(1, 30, 2)}


def test_sources_are_drawn_from_by_their_weights():
    feed = StandInFeed("ppo-1", numbers=(40, 40))
    make_steps(feed, 0, 4)
    assert feed.handed_out == [9, 3]


def test_a_batch_is_nothing_when_every_prompt_is_retired():
    feed = StandInFeed("ppo-1", numbers=(6,), solved={f"0+{i}=" for i in range(6)})
    make_steps(feed, 0, 2)
    assert feed.exhausted and feed.batch(2) is None and not feed.failure


@pytest.mark.parametrize(
    "failing, truncated, over",
    [(lambda i: True, 0, True), (lambda i: i > 0, 0, False), (lambda i: True, 4, False)],
    ids=["all", "all but one", "all but four truncated ones"],
)
def test_a_batch_or_a_validation_without_any_verdict_ends_the_run_and_says_why(
    failing, truncated, over, monkeypatch
):
    feed = StandInFeed("ppo-1")
    submit, rollout = feed.verifiers.submit, StandIn.rollout
    cut = lambda self, r: dataclasses.replace(
        rollout(self, r), truncated=2 * r.group + r.index < truncated
    )
    monkeypatch.setattr(StandIn, "rollout", cut)

    def fail(items):
        submit(items)
        failed = Verdict(0.0, "error", "ZeroDivisionError: division by zero (mine.py, line 7)")
        feed.verifiers.verdicts = [
            (key, failed if failing(i) else verdict)
            for i, (key, verdict) in enumerate(feed.verifiers.verdicts)
        ]

    feed.verifiers.submit = fail
    assert (feed.validate(0) is None) == over
    assert (
        "none of 8 completions got a verdict; the first, error: ZeroDivi" in feed.failure
    ) == over
    feed.failure = ""
    assert (feed.batch(0) is None) == over
    assert ("line 7)" in feed.failure) == over


@pytest.mark.parametrize("ahead", [0, 2])
def test_work_in_flight_that_was_miscounted_is_said_and_not_taken_for_the_end(monkeypatch, ahead):
    """Fewer groups than a step takes are handed out, by a mistake: to wait would be for ever."""
    feed = StandInFeed("pipeline-2")
    monkeypatch.setattr(loss, "groups_ahead", lambda *_: ahead)
    with pytest.raises(
        RuntimeError, match=f"but {ahead} finished ones, too few for step 1, .* was miscounted"
    ):
        feed.batch(0)
    assert not feed.exhausted and not feed.failure


def test_a_validation_goes_before_what_waits_and_leaves_it_alone():
    """All held-out problems with a seed of their own for each step; what was under way is still
    trained on."""
    feed = StandInFeed("pipeline-2", numbers=(40, 20))
    make_steps(feed, 0, 2)
    under_way = {*feed.under_way}
    assert under_way
    seeds = []
    for _ in range(2):
        groups = feed.validate(2)
        assert [(group.source, group.problem_index) for group in groups] == [
            (s, p) for s in (0, 1) for p in range(4)
        ]
        assert all(group.finished and len(group.requests) == 2 for group in groups)
        assert all(
            rollout.versions.min() == 2 for group in groups for rollout in group.rollouts.values()
        )
        seeds.append([request.seed for group in groups for request in group.requests])
        assert {*feed.under_way} == under_way and not feed.validating
    assert seeds[0] == seeds[1] and len({*seeds[0]}) == 16
    assert seeds[0] != [request.seed for group in feed.validate(3) for request in group.requests]
    make_steps(feed, 2, 6)


def test_what_a_generator_has_not_finished_is_done_by_the_one_that_replaces_it(capsys):
    feed = StandInFeed("pipeline-2", max_restarts=2)
    make_steps(feed, 0, 2)
    feed._hand_out(2)
    victim = feed.generators[0]
    own = {
        group.number
        for group in feed.under_way.values()
        if group.generator == 0 and not group.finished
    }
    assert own
    victim.process.dead = True
    trained = make_steps(feed, 2, 8)
    assert own <= {group.number for groups in trained for group in groups}
    assert feed.generators[0] is not victim and feed.restarts == 1
    assert (
        "ended by signal 9" in (said := capsys.readouterr().err)
        and "(1 of --max-restarts 2)" in said
    )

    feed.generators[1].process.dead = True  # it takes its share of a validation with it
    calls = itertools.count()
    feed.stop_asked = lambda: next(calls) > 1000
    groups = feed.validate(8)
    assert groups and all(group.finished for group in groups) and feed.restarts == 2


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1", "cpu"])
def test_where_one_gpu_does_both_the_trainer_waits_for_a_new_generator(monkeypatch, device):
    feed = StandInFeed("pipeline-2", generators=1, max_restarts=2)
    feed.engines = [SimpleNamespace(devices=(device,))]
    monkeypatch.setattr(
        core.feed, "devices_here", lambda _: (None, ["cpu" if device == "cpu" else "cuda:0"])
    )
    make_steps(feed, 0, 2)
    feed._hand_out(2)
    start = feed._start

    def fails_once(number):
        new = start(number)
        new.process.dead = feed.restarts == 1
        return new

    feed._start, feed.generators[0].process.dead = fails_once, True
    assert feed._take_in(wait=False)
    # It has reported; the second had never been ready, and was replaced all the same.
    if device == "cuda:0":
        assert feed.restarts == 2 and feed.generators[0].slots == 8
    else:
        assert feed.restarts == 1
    make_steps(feed, 2, 4)


def test_generators_that_fail_too_often_end_the_run():
    feed = StandInFeed("pipeline-2", max_restarts=0)
    make_steps(feed, 0, 2)
    feed.generators[1].process.dead = True
    for step in range(2, 9):
        if (groups := feed.batch(step)) is None:
            break
        feed.parameters.version = step + 1
    assert groups is None and "ended by signal 9 and reported no error" in feed.failure


def test_a_replacement_that_cannot_be_started_ends_the_run_and_says_why(monkeypatch):
    """Full shared memory has no room for the queues of another generator."""

    def full():
        raise OSError(28, "No space left on device")

    feed = StandInFeed("pipeline-2")
    make_steps(feed, 0, 2)
    real = multiprocessing.get_context("spawn").Queue()
    feed.generators[1].work, feed.generators[1].process.dead = real, True
    context = SimpleNamespace(Queue=full)
    monkeypatch.setattr(core.generators.multiprocessing, "get_context", lambda _: context)
    engine = EngineSettings("model", ("cpu",), "float32", 1, 8, None)
    feed._start = lambda number: start_generator(number, engine, None)
    assert feed.batch(2) is None
    assert feed.failure.startswith("generator 1 on cpu cannot be started ([Errno 28] No space left")
    assert "is /dev/shm full" in feed.failure
    feed.close()
