"""The page that tools/view.py makes of a run, in a real browser."""

import dataclasses
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from faults import ROOT, RealRun
from steps import make_group, rollout

import loss
from core.rollouts import Batch
from core.settings import Settings
from curve.flags import run_command
from data.load import Source
from machinery.folder import lock_folder, write_config
from machinery.kept import KeptRollouts
from tools import view

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PARTS = ["curve", "timeline", "group", "completion", "problem"]


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
    """Open a page of a run in a window of this width; at the end of the test nothing may stand in
    the console, and nothing may have been asked of a network."""
    messages, contexts = [], []

    def note_request(request):
        if not request.url.startswith("file:"):
            messages.append(request.url)

    def open_it(folder, width=1280, scheme="light"):
        window = {"width": width, "height": 900}
        contexts.append(browser.new_context(viewport=window, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("request", note_request)
        page.goto((folder / "rollouts.html").as_uri())
        page.wait_for_selector("#tokens span", state="attached")
        return page

    open_it.messages = messages
    yield open_it
    for context in contexts:
        context.close()
    assert messages == []


# --- runs -----------------------------------------------------------------------------------------


class Words:
    """A tokenizer whose tokens are these texts."""

    def __init__(self, texts):
        self.texts = texts

    def decode(self, ids):
        return "".join(self.texts[i] for i in ids)


SCALERL = loss.Recipe()


def made_run(
    folder,
    texts=("a", "b", "c", "d"),
    groups=3,
    completions=4,
    tokens=40,
    recipe=SCALERL,
    spread=0.3,
):
    """Make a folder with all that tools/view.py reads, of a run of one group a step with such
    texts. Returns the tensors of all its tokens as loss.py has them: log pi_train, log pi_gen and
    whether it was sampled, [B, T], and the advantages [B]."""
    folder.mkdir(parents=True)
    settings = Settings(
        recipe=recipe, steps=min(groups, 40), completions_per_prompt=completions, rollouts_kept=1
    )
    write_config(folder, settings)
    rng, tensors, log = np.random.default_rng(0), [], [validation(0)]
    writer = KeptRollouts(folder, settings, Words(texts), [Source(texts[0], 1.0, [], [])])
    for step in range(1, groups + 1):
        # A group, of which every other completion is right; one token in ten is forced.
        rollouts = []
        for index in range(completions):
            ids = rng.integers(len(texts), size=tokens)
            sampled = np.arange(tokens) % 10 != 3
            begun = rollout(step, index, [0, 1], ids, sampled, version=step - 1)
            rollouts.append(dataclasses.replace(begun, began=step - 0.9, ended=step - 0.5))
        group = make_group(step, rollouts, [index % 2 == 0 for index in range(completions)])

        # What the trainer makes of it.
        batch = Batch([group], step)
        rewards = 2 * batch.scores_PG - 1
        advantages = loss.advantages(rewards, batch.usable_PG, batch.usable_PG, "none") * 0.7
        weights = loss.token_weights(batch.lengths_PG, batch.usable_PG, "prompt")
        worth = loss.Worth(rewards, batch.usable_PG, advantages, weights)
        logprobs, kept = [], {}
        for i, its in enumerate(rollouts):
            logprobs.append(its.logprobs + rng.normal(0, spread, tokens).astype(np.float32))
            kept[i] = {
                "trainer_logprobs": logprobs[i][its.sampled],
                "entropies": -its.logprobs[its.sampled],
            }

        # What a run writes of it.
        writer.add_batch(step, batch, worth, kept)
        writer.run_began = -0.4  # so that a validation is later than its batch
        writer.add_validation(step, [group])
        writer.run_began = 0.0
        writer.add_times(step, (step - 1.0, step - 0.8), [(0, step - 0.9, step - 0.85, step - 1)])
        line = {"kind": "train", "step": step, "wall_seconds": step - 0.1}
        log += [line | {"parameters_seconds": 0.01, "skipped": 0}, validation(step)]

        generator_logprobs = [its.logprobs for its in rollouts]
        sampled = [its.sampled for its in rollouts]
        stacked = [np.stack(rows) for rows in (logprobs, generator_logprobs, sampled)]
        tensors.append([*map(torch.tensor, stacked), advantages[0]])
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    return [torch.cat(parts) for parts in zip(*tensors)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of a made-up run of four steps, with its page."""
    folder = tmp_path_factory.mktemp("made") / "run"
    made_run(folder, groups=4)
    view.write_page(folder)
    return folder


def validation(step):
    line = {"kind": "validation", "step": step, "wall_seconds": float(step), "num_examples": 64}
    return line | {"compute_flops": 1e9 * step, "pass_rate": 0.9 - 0.8 / (1 + step)}


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
def test_terms_on_the_page_are_those_of_loss_py(open_page, tmp_path, name):
    """At a hundred tokens of a page: the term, the ratio, whether it is clipped; and the formula
    with the numbers put in gives the term."""
    recipe = loss.Recipe(loss=name)
    tensors = made_run(tmp_path / "run", recipe=recipe, spread=0.1 if name == "gspo" else 0.6)
    terms_BT, log_rho_BT, clipped_BT = loss.token_terms(recipe, *tensors)
    view.write_page(tmp_path / "run")
    page = open_page(tmp_path / "run")
    group = page.evaluate("run.lines.map((line) => line.kind)").index("group")
    seen = 0
    for row in range(3):
        for t, (term, rho, clipped, numbers) in enumerate(page.evaluate(READ, [group, row])):
            if not tensors[2][row, t]:
                assert term is None and rho == "–"
                continue
            seen += 1
            wanted = terms_BT[row, t].item()
            assert float(term) == pytest.approx(wanted, rel=1e-4, abs=1e-6)
            assert float(rho) == pytest.approx(log_rho_BT[row, t].exp().item(), rel=1e-3)
            assert clipped == ("yes" if clipped_BT[row, t] else "no")
            value = eval(numbers.replace("×", "*"), dict(KNOWN))
            assert value == pytest.approx(wanted, rel=5e-3, abs=1e-4), numbers
    assert seen >= 100


@pytest.mark.slow
def test_the_page_of_a_real_run_has_the_run_s_own_numbers(tmp_path, open_page):
    """A page is made at the end of a run; the command makes the same one."""
    flags = "--train-prompts 40 --steps 4 --validation-every 2 --asynchrony pipeline-2"
    budgets = "--rollouts-kept 3 --thinking-budget 20 24"
    run = RealRun(tmp_path, *flags.split(), *budgets.split())
    run.end_well()
    before = (run.folder / "rollouts.html").read_text()
    with pytest.raises(SystemExit) as ended:
        run_command(view.main, [str(run.folder)])
    assert ended.value.code == 0 and (run.folder / "rollouts.html").read_text() == before
    page = open_page(run.folder)

    kept = lines_of(run.folder / "rollouts.jsonl")
    groups = [line for line in kept if line["kind"] != "times"]
    assert page.locator("#choose option").count() == len(groups) == 4 * 3 + 3 * 6
    for line in (groups[3], groups[-1]):
        page.select_option("#choose", str(groups.index(line)))
        cards = page.locator(".card .raw").all_text_contents()
        assert cards == ["".join(its["texts"]).replace("\n", "↵\n") for its in line["completions"]]
        facts = page.locator("#group-facts").inner_text()
        assert line["answer"] in facts and line["prompt"] in facts


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_key_of_a_line_is_in_the_docs(made):
    text = (ROOT / "docs" / "log.md").read_text()
    for line in lines_of(made / "rollouts.jsonl"):
        keys = {*line}.union(*line.get("completions", ()))
        assert [key for key in keys if f"`{key}`" not in text] == []


# --- its parts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("width, scheme", [(1280, "light"), (390, "dark")])
def test_each_part_is_there_and_reacts_to_clicks_and_keys(made, open_page, width, scheme):
    page = open_page(made, width, scheme)
    line = "run.lines[state.line]"
    opened = lambda: page.evaluate(f"[{line}.kind, {line}.step, state.completion]")
    which = lambda: page.evaluate("[state.line, state.completion]")
    window = lambda: page.evaluate("[lanes.from, lanes.to]")
    assert all(page.locator(f"#{part}").is_visible() for part in PARTS)

    # 1. The curve: a point for each validation. A click, and Enter, on one.
    circles = page.locator("#plot circle")
    label = circles.nth(2).get_attribute("aria-label")
    assert circles.count() == 5 and label == "step 2: pass_rate 0.6333 at 2000000000 FLOPs"
    circles.nth(2).click()
    assert opened() == ["validation", 2, 0]
    circles.nth(4).press("Enter")
    assert opened() == ["validation", 4, 0]

    # 2. The timeline: zoom, and the rollout after this one; a click on a bar.
    page.get_by_role("button", name="whole run").click()
    whole = window()
    page.locator("#lanes").press("+")
    assert window()[1] - window()[0] == pytest.approx((whole[1] - whole[0]) / 2)
    page.get_by_role("button", name="whole run").click()
    page.select_option("#choose", "4")
    page.locator("#lanes").press("ArrowDown")
    assert which() != [4, 0]
    place = page.evaluate("""() => {
        const bar = lanes.bars.find((bar) => lines[bar.line].kind === "group");
        const lane = lanes.tops.get(bar.generator);
        const width = document.getElementById("lanes").clientWidth;
        const x = (t) => (t - lanes.from) / (lanes.to - lanes.from) * width;
        return [(x(bar.began) + x(bar.ended)) / 2, lane.top + STRIP + (bar.row + 0.5) * lane.each];
    }""")
    page.locator("#lanes").click(position={"x": place[0], "y": place[1]})
    assert opened()[0] == "group"

    # 3. A group: the one after, a completion by click and by key.
    before = which()
    page.get_by_role("button", name="after").click()
    assert which() == [before[0] + 1, 0]
    page.locator(".card").nth(2).click()
    assert opened()[2] == 2 and page.locator(".card").nth(2).get_attribute("aria-current") == "true"
    page.locator(".card").nth(2).press("ArrowRight")
    assert opened()[2] == 3

    # 4. Its tokens: every colouring with a legend, a token by key and by click.
    for name in page.locator("#colour option").all_text_contents():
        page.select_option("#colour", name)
        assert text_of(page, "#colour-legend").strip()
    page.locator("#tokens").press("ArrowRight")
    assert text_of(page, "#token").split("\n")[0].startswith("token\t2 of")
    page.locator("#tokens span").nth(4).click()
    assert "5 of" in text_of(page, "#token")

    # 5. A problem at every validation: another completion, a click on one.
    kept = [line for line in lines_of(made / "rollouts.jsonl") if line["kind"] == "validation"]
    page.select_option("#which", str(kept[1]["group"]))
    page.locator("#nth").fill("2")
    row = page.locator("#problem-rows tr").nth(1)
    assert row.locator("td").last.inner_text() == "".join(kept[1]["completions"][1]["texts"])
    row.locator("button").nth(1).click()
    assert opened() == ["validation", kept[1]["step"], 1]
    assert page.evaluate("document.documentElement.scrollWidth") <= width

    # The address keeps what is open when the page is made again.
    page.reload()
    assert opened() == ["validation", kept[1]["step"], 1]


def text_of(page, place):
    return page.locator(place).inner_text()


# --- a page that follows a run --------------------------------------------------------------------


def test_a_page_that_is_watched_follows_the_run(tmp_path, open_page):
    """It loads itself again, and stays at the completion that is open. After Ctrl-C, as after the
    end of the run, it does so no more."""
    folder = tmp_path / "run"
    made_run(folder, groups=4)
    whole = (folder / "rollouts.jsonl").read_text()
    (folder / "rollouts.jsonl").write_text("".join(whole.splitlines(keepends=True)[:3]))
    command = [sys.executable, "-m", "tools.view", str(folder), "--watch", "1.5"]
    with lock_folder(folder):
        watcher = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE)
        deadline = time.monotonic() + 60
        while not (folder / "rollouts.html").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        page = open_page(folder)
        options = page.locator("#choose option")
        assert options.count() == 2
        page.locator(".card").nth(3).click()
        (folder / "rollouts.jsonl").write_text(whole)
        options.nth(7).wait_for(state="attached")
        opened = page.locator(".card[aria-current=true]")
        assert opened.get_attribute("data-completion") == "3"
        watcher.send_signal(signal.SIGINT)
        said, _ = watcher.communicate(timeout=60)
    assert watcher.returncode == 0 and "rollouts.html: open it in a browser" in said
    page.locator("#size", has_not_text="loads itself again").wait_for()


# --- what it bears --------------------------------------------------------------------------------


def test_a_hostile_completion_harms_nothing(tmp_path, open_page):
    """Markup that ends scripts, odd characters, lone surrogates: all is shown as text."""
    codes = [*range(32), 127, 0x85, 0xAD, 0x200B, 0x200F, 0x2028, 0x202E, 0x2066]
    codes += [0xD800, 0xDFFF, 0xFEFF, 0xFFFD, 0x1F642, 0xE0041, 0x10FFFF]
    script = "<script>document.title = 'taken'</script>"
    marks = f"{script}<img src=x onerror=\"document.title = 'taken'\">"
    texts = [*map(chr, codes), marks, f"</script>{script}", "<!--", "-->", "&lt;", "$&", "`"]
    texts += ["e" + "\u0301" * 200, "\\", "DATA_OF_THE_RUN", "SHA256_OF_THE_SCRIPT"]
    made_run(tmp_path / "run", texts=texts, tokens=2000, groups=1)
    view.write_page(tmp_path / "run")
    page = open_page(tmp_path / "run", 390)
    assert page.title() == "run: rollouts"
    assert page.locator("img, #run ~ script ~ script").count() == 0
    assert page.locator("#tokens span").count() == 2000
    shown = page.locator("#tokens").text_content()
    assert marks in shown and "⟨202e⟩" in shown and "⟨d800⟩" in shown
    assert not re.search("[\u202e\u2066\ufeff\x00]", shown)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.evaluate("""() => {
        const script = document.createElement("script");
        script.text = "document.title = 1";
        document.body.append(script);
    }""")
    assert page.title() == "run: rollouts" and "Content Security Policy" in open_page.messages.pop()


def test_a_page_that_would_be_too_large_has_the_first_completions(tmp_path, open_page, monkeypatch):
    made_run(tmp_path / "run", groups=20)
    whole = len(view.as_json(view.read_run(tmp_path / "run")["lines"]))
    for share, completions in ((0.8, 3), (0.01, 1)):
        monkeypatch.setattr(view, "MOST_BYTES", share * whole)
        lines = view.read_run(tmp_path / "run")["lines"]
        assert [len(line["completions"]) for line in lines] == [completions] * 40
    view.write_page(tmp_path / "run")
    said = text_of(open_page(tmp_path / "run"), "#size")
    assert said.startswith("40 completions in 40 groups") and "since all 160" in said


def test_a_page_shows_what_there_is(tmp_path, open_page):
    """No step yet, no group that was trained on, a line that is being written; a log without
    columns."""
    made_run(tmp_path / "run", groups=1)
    lines = (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run" / "rollouts.jsonl").write_text(lines[1] + lines[0][:100])
    log = [validation(0), {"kind": "validation", "step": 1}, {"kind": "train", "step": 1}]
    (tmp_path / "run" / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    view.write_page(tmp_path / "run")
    page = open_page(tmp_path / "run")
    assert page.locator("#choose option").count() == page.locator("#plot circle").count() == 1


# --- what is refused ------------------------------------------------------------------------------


def test_what_cannot_be_shown_is_refused_in_one_sentence(tmp_path):
    run = tmp_path / "run"
    made_run(run)
    kept = run / "rollouts.jsonl"
    for flags, words in (
        ([str(tmp_path)], "the folder holds no run"),
        ([str(run), "--watch", "0"], "--watch 0: "),
    ):
        with pytest.raises(ValueError, match=words):
            view.main(flags)
    kept.write_text('{"kind": "gro\n')
    with pytest.raises(ValueError, match="rollouts.jsonl, line 1: "):
        view.main([str(run)])
    kept.unlink()
    with pytest.raises(ValueError, match="--rollouts-kept 0"):
        view.main([str(run)])
    assert not (run / "rollouts.html").exists()
