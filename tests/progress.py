"""What one sees while the tests run: a line for each finished file, with the time left, and no dot for each test."""

import time
from collections import Counter

import pytest


class FileProgress:
    """Counts tests by file; the seconds of each file are kept in pytest's cache for the next run's estimate."""

    def __init__(self, config):
        self.config = config
        self.last_time = config.cache.get("seconds", {})  # of each file, in the last run that had it
        self.started = time.monotonic()
        self.tests = {}  # by file: the ids of its tests
        self.ended = Counter()
        self.seconds = Counter()

    def pytest_collection_finish(self, session):
        self.expect([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids):
        self.expect(ids)

    def expect(self, ids: list[str]) -> None:
        for test in ids:
            self.tests.setdefault(file_of(test), set()).add(test)

    def pytest_report_teststatus(self, report):
        """No letter for a test: a failed one has a line of its own."""
        if report.failed:
            return ("failed", "", "FAILED") if report.when == "call" else ("error", "", "ERROR")
        return ("passed", "", "") if report.passed and report.when == "call" else None

    def pytest_runtest_logreport(self, report):
        file = file_of(report.nodeid)
        self.seconds[file] += report.duration
        if report.failed:
            self.write(f"FAILED {report.nodeid}")
        if report.when == "teardown":
            self.ended[file] += 1
            if self.ended[file] == len(self.tests[file]):
                self.say(file)

    def say(self, file: str) -> None:
        done, every = sum(self.ended.values()), sum(map(len, self.tests.values()))
        left = f"about {self.seconds_left():.0f} s left" if done < every else f"{time.monotonic() - self.started:.0f} s"
        about = f"{self.ended[file]:4} tests in {self.seconds[file]:3.0f} s"
        self.write(f"{file:32} {about}; {done:4} of {every}, {left}")

    def write(self, line: str) -> None:
        screen = self.config.pluginmanager.get_plugin("terminalreporter")
        screen.ensure_newline()
        screen.write_line(line)

    def seconds_left(self) -> float:
        """What the unfinished files still want, by their seconds in the last run, or else by the tests so far; over
        how many run beside each other by now."""
        usual = sum(self.seconds.values()) / sum(self.ended.values())  # of a test
        beside = max(1.0, sum(self.seconds.values()) / (time.monotonic() - self.started))
        left = 0.0
        for file, tests in self.tests.items():
            unfinished = 1 - self.ended[file] / len(tests)
            left += unfinished * max(self.last_time.get(file, usual * len(tests)), self.seconds[file])
        return left / beside

    def pytest_sessionfinish(self):
        whole = {file: s for file, s in self.seconds.items() if self.ended[file] == len(self.tests[file])}
        self.config.cache.set("seconds", self.last_time | whole)


def file_of(test: str) -> str:
    """The file of a test, by the test's id."""
    return test.partition("::")[0]
