"""What the open and the hidden tests share: which file is graded, and the table of the points."""

import os
from pathlib import Path

import pytest

from docs.lessons.assignment import grader

BESIDE = Path(__file__).parents[4] / "recipe.py"  # beside the folder of the repository


@pytest.fixture(scope="session")
def hand_in() -> Path:
    """The file that is graded."""
    path = Path(os.environ.get("HAND_IN", BESIDE))
    if not path.is_file():
        advice = "cp docs/lessons/assignment/stubs.py ../recipe.py, or name your file with HAND_IN="
        pytest.exit(f"There is no file {path}: {advice}", returncode=1)
    return path


@pytest.fixture(scope="session")
def chosen(request) -> set[str]:
    """The functions that are graded: all, or those that -k chooses."""
    return {item.callspec.params["name"] for item in request.session.items}


@pytest.fixture
def give_points(record_property):
    """give_points(name, verdict): the points of a function go into the table; without them the test
    fails."""

    def give(name: str, verdict: grader.Verdict) -> None:
        points = grader.POINTS[name]
        record_property("points", [name, 0 if verdict.fault else points, points])
        print(verdict.printed, end="")
        if verdict.fault:
            pytest.fail(verdict.fault, pytrace=False)

    return give


def pytest_terminal_summary(terminalreporter):
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    rows = [value for report in reports for _, value in report.user_properties]
    rows.sort(key=lambda row: [*grader.POINTS].index(row[0]))
    rows.append(["total", sum(row[1] for row in rows), sum(row[2] for row in rows)])
    terminalreporter.section("points")
    for name, points, most in rows:
        terminalreporter.write_line(f"{name:24}{points:3} of {most:3}")
