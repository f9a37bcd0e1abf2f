"""The feed: which prompt comes next, who is given it, what comes back, and what a resumed run goes
on with. Generators and verifiers are stand-ins here that answer in this process."""

import dataclasses
import json
import multiprocessing
import os
import queue
import random
import re
import sys
import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

import core.feed
import core.generators
import loss
from core.engine import EngineSettings
from core.feed import Feed, PromptOrder, Prompts
from core.generators import Generator, GeneratorFailed, receive
from core.rollouts import Report, given_rollout
from core.settings import Settings
from core.text import make_decoding
from data import Problem
from data.load import Source
from data.verify import Verdict, VerifierHere
from docs.make_base import make_tokenizer
from loss import Recipe

# --- prompts --------------------------------------------------------------------------------------


def test_the_order_of_prompts_goes_on_where_it_was():
    """Every prompt comes once an epoch, in a new order. What is solved once stays away, whatever a
    later visit says, and when the run is resumed."""
    order = PromptOrder(12, seed=3, recipe=Recipe())
    take = lambda order, number: [order.next() for _ in range(number)]
    epochs = [take(order, 12) for _ in range(3)]
    assert all(sorted(epoch) == [*range(12)] for epoch in epochs)
    assert len({*map(tuple, epochs)}) == 3

    for prompt, pass_rate in ((1, 15 / 16), (2, 14 / 16), (3, 0.9), (4, 1.0), (3, 0.1)):
        order.retire_if_solved(prompt, pass_rate)
    begun = take(order, 4)
    state = json.loads(json.dumps(order.state()))
    rest = take(PromptOrder(12, seed=3, recipe=Recipe(), **state), 14)
    assert rest == take(order, 14) and order.left == 9
    assert sorted(begun + rest[:5]) == sorted(rest[5:]) == sorted({*range(12)} - {1, 3, 4})


def test_no_two_draws_of_a_run_have_the_same_noise():
    """Two sources of one size have orders of their own, and no order is drawn as the noise of a
    completion is, though numpy ignores zeros at the end of a seed."""
    feed = StandInFeed("ppo-1", numbers=(100,))
    feed._hand_out(0)
    noise = np.random.default_rng(feed.under_way[0].requests[0].seed).permutation(100)
    orders = [
        PromptOrder(100, seed, Recipe(), source).order for seed in (0, 1) for source in (0, 1)
    ]
    assert len({tuple(order) for order in [noise, *orders]}) == 5


def test_solved_prompts_come_again_when_few_others_are_left_or_with_positive_resampling():
    order = PromptOrder(10, seed=0, recipe=Recipe(least_prompts=4))
    for prompt, left in enumerate((9, 8, 7, 6, 5, 4, 10)):
        order.retire_if_solved(prompt, 1.0)
        assert order.left == left and order.next() not in order.retired
    off = PromptOrder(10, seed=0, recipe=Recipe(positive_resampling=True))
    off.retire_if_solved(1, 1.0)
    assert off.left == 10
    ended = {"epoch": 1, "cursor": 2, "retired": [0, 1, 2, 3]}
    lefts = [PromptOrder(4, 0, Recipe(least_prompts=n), **ended).left for n in (0, 2)]
    assert lefts == [0, 4]


# --- reports --------------------------------------------------------------------------------------


def generator_of(reports, *lives, heard=0.0):
    """The trainer's side of a generator, whose process lives at these calls."""
    process = SimpleNamespace(name="generator 0 on cpu", exitcode=-9, is_alive=iter(lives).__next__)
    generator = object.__new__(Generator)  # without the process that it would start
    came = dict(reports=reports, receiver=Mock(), slots=0, heard=time.monotonic() - heard)
    vars(generator).update(process=process, **came)
    return generator


def test_pitfall_12_a_dead_or_silent_generator_is_seen():
    """Reports that came before its end count."""
    report, broken = Report(), Report(error="Traceback: it broke")
    for sent, alive, failure in (
        ([], True, "--wait-timeout"),
        ([], False, "ended by signal 9"),
        ([report], False, "ended by signal 9"),
        ([report, broken], False, "failed:\nTraceback: it broke"),
        ([broken], True, "failed:\nTraceback: it broke"),
    ):
        reports = queue.SimpleQueue()
        generator, came = generator_of(reports, True, alive, heard=10), []
        assert not [*generator.read_reports(timeout=60)]
        for each in sent:
            reports.put(each)
        with pytest.raises(GeneratorFailed, match=failure):
            came.extend(generator.read_reports(timeout=5))
        assert came == [each for each in sent if not each.error]


@pytest.mark.parametrize("sent", [b"", b"\0\0\0\x64half of it"])
def test_a_generator_that_stops_or_dies_in_the_middle_of_a_report_is_seen(sent):
    """The first four bytes say that 100 are to come."""
    reports, come = multiprocessing.get_context("spawn").Queue(), queue.SimpleQueue()
    ended, end = os.pipe()
    receiver = threading.Thread(target=receive, args=(reports, come, ended), daemon=True)
    receiver.start()
    os.write(reports._writer.fileno(), sent)
    generator = generator_of(come, True, False, heard=10)
    generator.receiver = receiver
    with pytest.raises(GeneratorFailed, match="generator 0 on cpu has been silent"):
        next(generator.read_reports(timeout=5))
    os.close(end)  # a sentinel says that its process has ended
    with pytest.raises(GeneratorFailed, match="generator 0 on cpu ended by signal 9"):
        next(generator.read_reports(timeout=60))
    assert receiver.is_alive() == bool(sent)  # it waits for the other half


class Tells:
    """Parameters. A generator that has a GPU locks their memory first, and says what it sees."""

    def pin(self):
        settings = sys._getframe(1).f_locals["settings"]
        raise RuntimeError(f"{os.environ['CUDA_VISIBLE_DEVICES']} as {settings.device}")


@pytest.mark.parametrize(
    "visible, device, seen", [("", "cuda:2", "2"), ("4,GPU-a1b2", "cuda:1", "GPU-a1b2")]
)
def test_a_generator_sees_its_own_gpu_alone(monkeypatch, visible, device, seen):
    """The trainer sees all of them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    before = dict(os.environ)
    engine = EngineSettings("model", device, "float32", 1, 8, None)
    generator = Generator(0, engine, Tells())
    assert dict(os.environ) == before
    assert generator.process.name.endswith(device)
    assert f"{seen} as cuda:0" in generator.reports.get(timeout=300).error
    generator.close()


# --- the feed, with stand-ins ---------------------------------------------------------------------


class StandIn:
    """A generator that samples a few of its requests whenever it is asked for reports."""

    def __init__(self, number, parameters, rng):
        self.number, self.parameters, self.rng = number, parameters, rng
        self.requests, self.slots, self.dead = [], 8, False

    def give(self, requests):
        self.requests += requests

    def read_reports(self, timeout):
        if self.dead:
            raise GeneratorFailed(f"generator {self.number} is dead")
        self.slots = 8
        if self.requests and self.rng.random() < 0.6:
            self.rng.shuffle(self.requests)
            done = [self.requests.pop() for _ in self.requests[: self.rng.randint(1, 5)]]
            yield Report([self.rollout(request) for request in done])

    def rollout(self, request):
        rollout = given_rollout(request.prompt_ids, [1, 0])
        versions = np.full(2, self.parameters.version, np.int32)
        return dataclasses.replace(rollout, request=request, versions=versions)

    stop = close = lambda self: None


class Judges(VerifierHere):
    """Finds right what is of these prompts, and answers at once. After so many verdicts it
    fails."""

    def __init__(self, solved):
        self.solved, self.judged, self.can_judge = solved, [], 10**6

    def submit(self, items):
        for key, problem, _ in items:
            verdict = Verdict(problem.prompt in self.solved)
            if self.can_judge <= 0:
                verdict = Verdict(0.0, "error", "ZeroDivisionError: by zero (mine.py, line 7)")
            self.judged.append((key, verdict))
            self.can_judge -= 1


class StandInFeed(Feed):
    def __init__(
        self, asynchrony, numbers=(40,), solved=(), seed=0, state=None, version=0, **changes
    ):
        """numbers: of prompts of each source; of several, the first has three times the weight."""
        sizes = {"prompts_per_step": 3, "completions_per_prompt": 2, "validation_samples": 2}
        chosen = Settings(recipe=Recipe(asynchrony=asynchrony), slots=8, **sizes, **changes)
        sources = []
        for s, number in enumerate(numbers):
            problems = [Problem(f"{s}+{i}=", "", "task") for i in range(number + 4)]
            weight = 1.0 if s else 3.0
            sources.append(Source(str(s), weight, problems[:number], problems[number:]))
        tokenizer = make_tokenizer()
        prompts = Prompts(sources, tokenizer, make_decoding(tokenizer, chosen))
        parameters, state = SimpleNamespace(version=version), json.loads(json.dumps(state))
        super().__init__(chosen, prompts, [None, None], parameters, lambda: False, state)
        self.rng = random.Random(seed)
        self.generators = [self._start(number) for number in range(2)]
        self.verifiers = Judges(solved)

    def _start(self, number):
        return StandIn(number, self.parameters, self.rng)


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
    """Also if the run is resumed at any step, if generators die, and if it is validated between. No
    token is older than its group, no group older than k, and the bound is used. The prompts trained
    on and those under way are the first of the epoch, each once."""
    most, feed, rng = loss.most_off_policy(asynchrony), None, random.Random(seed)
    ages, prompts, numbers, step = [], [], set(), 0
    for last in sorted(rng.sample(range(10, 24), 3)):
        state = feed.state() if feed else None
        feed = StandInFeed(
            asynchrony, (400,), seed=last, state=state, version=step, max_restarts=99
        )
        while step < last:
            (groups,) = make_steps(feed, step, step + 1)
            for group in groups:
                versions = np.concatenate([rollout.versions for rollout, _ in group.judged()])
                assert group.version <= versions.min() and versions.max() <= step
                ages.append(step - group.version)
                prompts.append(group.problem_index)
                numbers.add(group.number)
            step += 1
            rng.choice(feed.generators).dead = rng.random() < 0.2
            if rng.random() < 0.2:
                assert all(group.finished for group in feed.validate(step))
    assert min(1, most) <= max(ages) <= most and min(ages) >= 0
    if asynchrony.startswith("ppo"):
        assert ages[:30] == [step % (most + 1) for step in range(10) for _ in range(3)]
    assert len(prompts) == 3 * last == len(numbers)
    prompts += [prompt for _, _, prompt in feed.state()["to_repeat"]]
    first = PromptOrder(400, seed=0, recipe=Recipe()).order.tolist()[: sum(feed.handed_out)]
    assert sorted(prompts) == sorted(first)


def test_a_generator_gets_what_its_slots_hold_and_its_share_of_a_batch():
    """Slots for 4 groups, and 2 more of the 3 of a step; none before one has come back whole."""
    feed = StandInFeed("pipeline-8")
    for came in range(2):  # completions of the first group
        feed._hand_out(0)
        assert [group.generator for group in feed.under_way.values()] == [0, 1] * 6
        feed.under_way[0].rollouts[came] = None
    feed._hand_out(0)
    assert 12 in feed.under_way


def test_sources_are_drawn_from_by_their_weights_until_every_prompt_is_retired():
    solved = [f"{s}+{i}=" for s in (0, 1) for i in range(9)]
    feed = StandInFeed("ppo-1", numbers=(9, 3), solved=solved)
    make_steps(feed, 0, 2)
    assert feed.handed_out == [5, 1]
    make_steps(feed, 2, 4)
    assert feed.handed_out == [9, 3]
    assert feed.batch(4) is None and not feed.failure


@pytest.mark.parametrize("truncated, judged, over", [(0, 0, True), (0, 1, False), (4, 0, False)])
def test_a_batch_or_a_validation_without_any_verdict_ends_the_run_and_says_why(
    truncated, judged, over, monkeypatch
):
    """The first completions are truncated, or judged. Few that want a verdict may all miss it."""
    feed, rollout = StandInFeed("ppo-1"), StandIn.rollout
    cut = lambda self, r: dataclasses.replace(
        rollout(self, r), truncated=2 * r.group + r.index < truncated
    )
    monkeypatch.setattr(StandIn, "rollout", cut)
    for take in (feed.validate, feed.batch):
        feed.verifiers.can_judge = judged
        assert (take(0) is None) == over
        says_why = re.search(r"none of \d completions got a verdict; .* line 7\)", feed.failure)
        assert bool(says_why) == over
        feed.failure = ""


def test_a_validation_is_all_held_out_problems_with_their_own_seeds_at_each_step(
    monkeypatch, capsys
):
    """It says how far it is."""
    monkeypatch.setattr(core.feed, "SAY_EVERY", 0.0)
    feed = StandInFeed("pipeline-2", numbers=(40, 20))
    trained = sum(make_steps(feed, 0, 2), [])
    under_way, seeds = {*feed.under_way}, []
    for version in (2, 2, 3):
        groups = feed.validate(version)
        places = [(group.source, group.problem_index) for group in groups]
        assert places == [(s, p) for s in (0, 1) for p in range(4)]
        seeds.append([rollout.request.seed for group in groups for rollout, _ in group.judged()])
        assert {*feed.under_way} == under_way and not feed.validating
    assert seeds[0] == seeds[1] != seeds[2] and len({*seeds[0]}) == 16
    assert "validation: 8 of 8 problems" in capsys.readouterr().err
    of_training = [*trained, *feed.under_way.values()]
    assert feed.sampled_tokens == 2 * sum(len(group.rollouts) for group in of_training)


def test_generators_that_fail_too_often_end_the_run(capsys):
    feed = StandInFeed("pipeline-2", max_restarts=1)
    make_steps(feed, 0, 2)
    feed.generators[0].dead = True
    make_steps(feed, 2, 8)
    said = capsys.readouterr().err
    assert "generator 0 is dead" in said and "(1 of --max-restarts 1)" in said
    feed.generators[1].dead = True
    assert feed.batch(8) is None
    assert feed.failure == "generator 1 is dead"


def test_the_trainer_waits_until_a_new_generator_is_ready():
    """It may share its GPU. One that fails before it is ready is replaced too."""
    feed = StandInFeed("pipeline-2", max_restarts=2)
    make_steps(feed, 0, 2)
    feed._hand_out(2)
    start = feed._start

    def fails_once(number):
        new = start(number)
        new.slots, new.dead = 0, feed.restarts == 1
        return new

    feed._start, feed.generators[0].dead = fails_once, True
    assert feed._take_in(wait=False)
    assert feed.restarts == 2 and feed.generators[0].slots == 8
    make_steps(feed, 2, 4)


def test_a_generator_that_cannot_be_started_says_why(monkeypatch):
    """No file is left for its queues. (Then a run ends: it has failed too often.)"""
    full = Mock(**{"Queue.side_effect": OSError(28, "No space left on device")})
    monkeypatch.setattr(core.generators.multiprocessing, "get_context", lambda _: full)
    engine = EngineSettings("model", "cpu", "float32", 1, 8, None)
    why = r"^generator 1 on cpu cannot be started \(\[Errno 28\] No space left.*is /dev/shm full"
    with pytest.raises(GeneratorFailed, match=why):
        Generator(1, engine, None)
