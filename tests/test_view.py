"""The page that tools/view.py makes of a run: its numbers, and the page itself in a real
browser."""

import os
import re
import shutil

import pytest
from faults import log
from steps import FIRST, settings, write_lines

from loss import Recipe
from machinery.folder import json_lines, write_config
from tools import view

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
ARGUMENTS = """
    --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync
""".split()


@pytest.fixture(scope="module")
def window():
    """Of a browser, without a network. `said` is what stands in its console."""
    if CHROMIUM is None and "CI" not in os.environ:
        pytest.skip("there is no Chromium on the PATH")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        page = chromium.new_page(viewport={"width": 1280, "height": 900}, offline=True)
        page.said = []
        for event in ("console", "pageerror"):
            page.on(event, lambda message: page.said.append(str(message)))
        yield page


# --- its numbers ----------------------------------------------------------------------------------


def groups_of(run):
    """What the page shows of the run's groups, in its order."""
    return [line for line in view.read_run(run)["rollouts"] if line["kind"] != "times"]


def terms_of(run):
    """By completion that was trained on: its step, and the terms of its sampled tokens."""
    for line in groups_of(run):
        for its in line["completions"]:
            assert ("terms" in its) == (its.get("became") == "trained")
            if "terms" in its:
                given = zip(its["terms"], its["generator_logprobs"], strict=True)
                yield line["step"], its, [term for term, sampled in given if sampled is not None]


def test_terms_add_up_to_the_loss_of_the_step_and_clips_to_its_fraction(golden_run):
    for logged in log(golden_run, "train"):
        own = [each for step, *each in terms_of(golden_run) if step == logged["step"]]
        total = -sum(its["weight"] * sum(terms) for its, terms in own)
        assert total == pytest.approx(logged["loss"], rel=1e-4) and total != 0
        clips, tokens = (sum(map(len, each)) for each in zip(*[(i["clipped"], t) for i, t in own]))
        assert clips / tokens == pytest.approx(logged["clipped_fraction"]) and clips > 0


def test_a_page_that_would_be_too_large_has_the_first_completions(run, golden_run, monkeypatch):
    groups, whole = groups_of(golden_run), len(view.as_json(groups_of(golden_run)))
    for share, completions in ((0.8, 3), (0.01, 1)):
        monkeypatch.setattr(view, "MOST_BYTES", share * whole)
        assert {len(line["completions"]) for line in groups_of(golden_run)} == {completions}
    assert view.read_run(golden_run)["completions"] == 4 * len(groups)
    # Files whose encoding nobody names are read as in a locale of ASCII.
    monkeypatch.setattr("io.text_encoding", lambda encoding, *_: encoding or "ascii")
    assert view.write_page(run).exists()


def test_what_cannot_be_shown_is_refused_with_its_place(run):
    (run / "rollouts.jsonl").write_text('{"kind": "gro\n')
    with pytest.raises(ValueError, match="rollouts.jsonl, line 1: "):
        view.main([str(run)])


# --- in a browser ---------------------------------------------------------------------------------

# What the page makes of a formula, for each sampled token that was trained on.
FORMULAS = """([formula, constants]) => {
    Object.assign(run, { formula, constants });
    return lines.flatMap((line) => line.completions).flatMap((rollout) =>
        (rollout.log_rho ?? []).flatMap((x, t) => x === null ? [] : withNumbers(rollout, t)));
}"""
# What stands in a formula.
KNOWN = {"sg": float, "clip": lambda x, low, high: min(max(x, low), high)}

# Markup that ends scripts, odd characters, lone surrogates.
SCRIPT = "<script>document.title = 'taken'</script>"
MARKS = f"{SCRIPT}<img src=x onerror=\"document.title = 'taken'\">"
ODD = "\0\1\n\r\t\x1b\x7f\x85\xad\u200b\u200f\u2028\u202e\u2066\ud800\udfff\ufeff\ufffd🙂\U000e0041"
HOSTILE = [*ODD, MARKS, f"</script>{SCRIPT}", *"<!-- --> &lt; $& ` \\ DATA_OF_THE_RUN".split()]
HOSTILE += ["NONCE_OF_THE_PAGE", "e" + "\u0301" * 200]


def test_texts_are_shown_as_text_and_numbers_as_the_terms_of_the_loss(run, window):
    """Hostile are the prompts, and the first completion of the first problem. The run goes on: a
    line is being written, and two of its log have no columns."""
    kept = json_lines(run / "rollouts.jsonl")
    for line in kept:
        line |= {"prompt": MARKS, "answer": MARKS, "source": MARKS}
    first = next(line for line in kept if line["kind"] != "times")
    odd = {"texts": HOSTILE, "ids": [0] * len(HOSTILE), "sampled": [[True, len(HOSTILE)]]}
    first["completions"][0] |= odd
    write_lines(run / "rollouts.jsonl", kept)
    (run / "rollouts.jsonl").open("a").write('{"kind": "gro')
    bare = [{"kind": kind, "step": FIRST + 2} for kind in ("validation", "train")]
    write_lines(run / "log.jsonl", log(run) + bare)
    assert view.main([str(run)]) == 0
    (page := window).goto((run / "rollouts.html").as_uri())
    page.wait_for_selector("#tokens span", state="attached")
    assert page.locator("#plot circle").count() == 4  # validations
    span = page.evaluate("lanes.to - lanes.from")
    page.press("#lanes", "+")  # zooms in
    assert page.evaluate("lanes.to - lanes.from") == pytest.approx(span / 2)

    page.select_option("#choose", "0")
    assert page.locator("#tokens span").count() == len(HOSTILE)
    shown = page.text_content("#tokens")
    assert MARKS in shown and "⟨202e⟩" in shown and "⟨d800⟩" in shown
    assert not re.search("[\u202e\u2066\ufeff\0]", shown)
    for name in page.locator("#colour option").all_text_contents():
        page.select_option("#colour", name)
        assert page.inner_text("#colour-legend").strip()
    page.locator("#tokens span").nth(1).click()
    page.press("#tokens", "ArrowRight")
    assert page.inner_text("#token").startswith("token\t3 of")

    # The formula with the numbers of a token gives its term.
    for name in ("cispo", "gspo", "dapo"):
        write_config(run, settings(recipe=Recipe(loss=name)))
        data = view.read_run(run)
        numbers = page.evaluate(FORMULAS, [data["formula"], data["constants"]])
        terms = sum((terms for *_, terms in terms_of(run)), [])
        for each, term in zip(numbers, terms, strict=True):
            value = eval(each.replace("×", "*"), KNOWN)
            assert value == pytest.approx(term, rel=5e-3, abs=1e-4), each

    # No other script runs.
    assert page.locator("img, #run ~ script ~ script").count() == 0
    page.evaluate("""() => {
        const script = document.createElement("script");
        script.text = "document.title = 1";
        document.body.append(script);
    }""")
    assert page.title() == f"{run.name}: rollouts"
    assert "Content Security Policy" in page.said.pop() and page.said == []
