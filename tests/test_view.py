"""The page that tools/view.py makes of a run, in a real browser."""

import json
import math
import os
import re
import shutil

import pytest
from faults import log
from steps import FIRST, batch_of_groups, settings, train_on, write_lines

import loss
from machinery.folder import json_lines, write_config
from tools import view

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
ARGUMENTS = """
    --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync
""".split()


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None and "CI" not in os.environ:
        pytest.skip("there is no Chromium on the PATH")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser):
    """Make the page of a run and open it in a window of this width, without a network. At the end
    of the test nothing may stand in the console."""
    messages = []

    def open_it(folder, width=1280, scheme="light"):
        assert view.main([str(folder)]) == 0
        window = {"width": width, "height": 900}
        page = browser.new_page(viewport=window, color_scheme=scheme, offline=True)
        for event in ("console", "pageerror"):
            page.on(event, lambda message: messages.append(str(message)))
        page.goto((folder / "rollouts.html").as_uri())
        page.wait_for_selector("#tokens span", state="attached")
        return page

    open_it.messages = messages
    yield open_it
    assert messages == []


# --- a run ----------------------------------------------------------------------------------------


@pytest.fixture
def make_run(models, tmp_path):
    """Makes the folder of a run of some steps, with 12 completions each. A group has a second to be
    sampled in."""

    def run(steps=2, **recipe):
        chosen = settings(steps, validation_every=1, rollouts_kept=3, recipe=loss.Recipe(**recipe))
        write_config(tmp_path, chosen)
        batches = [batch_of_groups(seed) for seed in range(steps)]
        train_on(chosen, models["llama"], batches, tmp_path)
        kept = json_lines(tmp_path / "rollouts.jsonl")
        for line in kept:
            begun = line["step"] - FIRST
            for its in line.get("completions", ()):
                its |= {"began": begun + 0.1, "ended": begun + 0.9}
            if line["kind"] == "times":
                line["generators"] = [[0, begun, begun + 0.1, begun]]
        write_lines(tmp_path / "rollouts.jsonl", kept)
        return tmp_path

    return run


def groups_of(run):
    """The lines of its rollouts.jsonl that the page shows as groups, in its order."""
    return [line for line in json_lines(run / "rollouts.jsonl") if line["kind"] != "times"]


# --- its numbers ----------------------------------------------------------------------------------


# What stands in a formula.
KNOWN = {"min": min, "max": max, "exp": math.exp, "log": math.log, "sg": float}
KNOWN["clip"] = lambda x, low, high: min(max(x, low), high)
READ = """([line, completion]) => {
    open(line, completion);
    return [...document.querySelectorAll("#tokens span")].map((span) => {
        span.click();
        const rows = [...document.querySelectorAll("#token tr")];
        const cells = rows.map((row) => [...row.children].map((cell) => cell.textContent));
        const { rho, clipped } = Object.fromEntries(cells);
        const text = (id) => document.getElementById(id)?.textContent;
        return [text("term"), rho, clipped, text("with-numbers")];
    });
}"""


@pytest.mark.parametrize("name", ["cispo", "gspo", pytest.param("dapo", marks=pytest.mark.slow)])
def test_terms_on_the_page_add_up_to_the_loss_of_the_step(open_page, make_run, name):
    """The formula with the numbers of a token gives its term. By the weights, the terms add up to
    the loss of the log, and the tokens that are said to be clipped to its fraction."""
    run = make_run(1, loss=name)
    page = open_page(run)
    total, clips = 0.0, []
    for place, line in enumerate(groups_of(run)):
        for row, completion in enumerate(line["completions"]):
            read = page.evaluate(READ, [place, row])
            terms = [term for term, *_ in read]
            if completion.get("became") != "trained":
                assert terms == [None] * len(completion["ids"])
                continue
            sampled = [is_sampled for is_sampled, n in completion["sampled"] for _ in range(n)]
            assert [term is not None for term in terms] == sampled
            logprobs = completion["trainer_logprobs"], completion["generator_logprobs"]
            for (term, rho, clipped, numbers), train, generator in zip(read, *logprobs):
                if term is None:
                    continue
                value = eval(numbers.replace("×", "*"), dict(KNOWN))
                assert value == pytest.approx(float(term), rel=5e-3, abs=1e-4), numbers
                assert float(rho) == pytest.approx(math.exp(train - generator), rel=1e-3)
                total -= completion["weight"] * float(term)
                clips.append(clipped == "yes")
    (logged,) = log(run, "train")
    assert total == pytest.approx(logged["loss"], rel=1e-4) and total != 0
    assert sum(clips) / len(clips) == pytest.approx(logged["clipped_fraction"])


# --- its parts ------------------------------------------------------------------------------------

# Where the bar of the first rollout for training is.
BAR = """() => {
    const bar = lanes.bars.find((bar) => lines[bar.line].kind === "group");
    const lane = lanes.tops.get(bar.generator);
    const width = document.getElementById("lanes").clientWidth;
    const x = (t) => (t - lanes.from) / (lanes.to - lanes.from) * width;
    return { x: (x(bar.began) + x(bar.ended)) / 2, y: lane.top + STRIP + (bar.row + 0.5) * lane.each };
}"""  # noqa: E501


@pytest.mark.parametrize("width, scheme", [(1280, "light"), (390, "dark")])
def test_each_part_is_there_and_reacts_to_clicks_and_keys(make_run, open_page, width, scheme):
    run = make_run()
    page = open_page(run, width, scheme)
    line = "lines[state.line]"
    opened = lambda: page.evaluate(f"[{line}.kind, {line}.step, state.completion]")
    button = lambda name: page.get_by_role("button", name=name).click()

    # 1. The curve: a point for each validation.
    circles = page.locator("#plot circle")
    assert circles.count() == 3
    assert circles.nth(1).get_attribute("aria-label").startswith(f"step {FIRST + 1}: pass_rate 0.")
    circles.nth(1).press("Enter")
    assert opened() == ["validation", FIRST + 1, 0]
    circles.nth(2).click()
    assert opened() == ["validation", FIRST + 2, 0]

    # 2. The timeline: all of it, half of it, and a bar of it.
    window = lambda: page.evaluate("lanes.to - lanes.from")
    button("whole run")
    whole = window()
    page.press("#lanes", "+")
    assert window() == pytest.approx(whole / 2)
    button("whole run")
    page.click("#lanes", position=page.evaluate(BAR))
    assert opened()[0] == "group"

    # 3. A group: the first, the one after, a completion by click and by key. Its texts are shown.
    _, group, *_, last = groups_of(run)
    page.select_option("#choose", "0")
    button("after")
    card = page.locator(".card").nth(2)
    card.click()
    assert opened() == [group["kind"], group["step"], 2]
    card.press("ArrowRight")
    assert opened()[2] == 3
    shown = page.locator(".card .raw").all_text_contents()
    assert shown == ["".join(its["texts"]) for its in group["completions"]]

    # 4. Its tokens: every colouring with a legend, a token by click and by key.
    for name in page.locator("#colour option").all_text_contents():
        page.select_option("#colour", name)
        assert page.inner_text("#colour-legend").strip()
    page.locator("#tokens span").nth(1).click()
    page.press("#tokens", "ArrowRight")
    assert page.inner_text("#token").startswith("token\t3 of")

    # 5. A problem at every validation: another completion, a click on one.
    page.select_option("#which", str(last["group"]))
    page.fill("#nth", "2")
    row = page.locator("#problem-rows tr").last
    assert row.locator("td").last.inner_text() == "".join(last["completions"][1]["texts"])
    row.locator("button").nth(1).click()
    assert opened() == ["validation", FIRST + 2, 1]
    assert page.evaluate("document.documentElement.scrollWidth") <= width

    # The address keeps what is open when the page is made again.
    page.reload()
    assert opened() == ["validation", FIRST + 2, 1]


# --- what it bears --------------------------------------------------------------------------------


def test_a_hostile_completion_harms_nothing(make_run, open_page):
    """Markup that ends scripts, odd characters, lone surrogates: all is shown as text."""
    codes = [*range(32), 127, 0x85, 0xAD, 0x200B, 0x200F, 0x2028, 0x202E, 0x2066]
    codes += [0xD800, 0xDFFF, 0xFEFF, 0xFFFD, 0x1F642, 0xE0041, 0x10FFFF]
    script = "<script>document.title = 'taken'</script>"
    marks = f"{script}<img src=x onerror=\"document.title = 'taken'\">"
    texts = [*map(chr, codes), marks, f"</script>{script}", *"<!-- --> &lt; $& ` \\".split()]
    texts += ["e" + "\u0301" * 200, "DATA_OF_THE_RUN", "NONCE_OF_THE_PAGE"]
    run = make_run(1)
    kept = groups_of(run)
    for line in kept:
        line |= {"prompt": marks, "answer": marks, "source": marks}
        for its in line["completions"]:
            its |= {"texts": texts, "ids": [0] * len(texts)}
    write_lines(run / "rollouts.jsonl", kept)
    page = open_page(run, 390)
    assert page.locator("img, #run ~ script ~ script").count() == 0
    assert page.locator("#tokens span").count() == len(texts)
    shown = page.text_content("#tokens")
    assert marks in shown and "⟨202e⟩" in shown and "⟨d800⟩" in shown
    assert not re.search("[\u202e\u2066\ufeff\x00]", shown)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.evaluate("""() => {
        const script = document.createElement("script");
        script.text = "document.title = 1";
        document.body.append(script);
    }""")
    assert page.title() == f"{run.name}: rollouts"
    assert "Content Security Policy" in open_page.messages.pop()


def test_a_page_that_would_be_too_large_has_the_first_completions(make_run, open_page, monkeypatch):
    run = make_run()
    read = lambda: [line for line in view.read_run(run)["rollouts"] if "completions" in line]
    groups, whole = len(read()), len(view.as_json(read()))
    for share, completions in ((0.8, 3), (0.01, 1)):
        monkeypatch.setattr(view, "MOST_BYTES", share * whole)
        assert [len(line["completions"]) for line in read()] == [completions] * groups
    assert f"all {4 * groups}" in open_page(run).locator("#size").inner_text()


def test_a_page_shows_what_there_is(make_run, open_page):
    """No step yet, no group that was trained on, a line that is being written; a log without
    columns."""
    run = make_run()
    first, *_ = [line for line in groups_of(run) if line["kind"] == "validation"]
    (run / "rollouts.jsonl").write_text(f'{json.dumps(first)}\n{{"kind": "gro')
    bare = [{"kind": kind, "step": 1} for kind in ("validation", "train")]
    write_lines(run / "log.jsonl", [log(run, "validation")[0], *bare])
    page = open_page(run)
    assert page.locator("#choose option").count() == page.locator("#plot circle").count() == 1


def test_what_cannot_be_shown_is_refused_in_one_sentence(make_run):
    run = make_run()
    (run / "rollouts.jsonl").write_text('{"kind": "gro\n')
    with pytest.raises(ValueError, match="rollouts.jsonl, line 1: "):
        view.main([str(run)])
