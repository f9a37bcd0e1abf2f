"""`generate.py --check`: what a model of one's own and data of one's own are told before anything
is trained."""

import json
import shutil

import pytest
from sampling import run_generate

TURN = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
)
PLAIN = TURN + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
BUDGETS = ["--prompt-budget", "300", "--thinking-budget", "100", "120", "--answer-budget", "40"]


def checked(model, data, *flags) -> int:
    """The exit status of generate.py --check."""
    return run_generate(["--check", "--model", str(model), "--data", f"{data},split=test", *flags])


@pytest.fixture
def check(chat_models, tmp_path, capsys):
    """Runs the check on a copy of a chat model, with another template or other end tokens, and a
    file of one problem (two: one is held out). Returns the exit status and what was printed."""

    def run(*flags, template=None, ends=None, problem="What is 1 + 1?", answer="2"):
        folder = tmp_path / "model"
        shutil.copytree(chat_models["qwen3"], folder)
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        if ends is not None:
            path = folder / "tokenizer_config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": ends}))
            (folder / "generation_config.json").write_text("{}")
        data = tmp_path / "my.jsonl"
        records = [{"problem": problem + end, "answer": answer} for end in ("", " ")]
        data.write_text("".join(json.dumps(record) + "\n" for record in records))
        status = checked(folder, data, *BUDGETS, *flags)
        return status, capsys.readouterr().out

    return run


def test_a_model_and_data_that_fit_are_shown_as_the_model_gets_them(check):
    status, printed = check()
    assert status == 0 and "\n!" not in printed
    assert "  | <|im_start|>user\n  | What is 1 + 1?" in printed and "within \\boxed{}" in printed
    assert "  | <|im_start|>assistant\n  | <think>\n" in printed
    assert "the prompt opens it; it ends at </think>, or after 100 to 120 tokens" in printed
    assert "ends with  '<|im_end|>'" in printed and "'<|endoftext|>'" in printed
    assert "reference  '\\\\boxed{2}' is judged right; it takes 10 tokens" in printed


def test_thinking_that_the_prompt_leaves_to_the_model_or_closes(check, tmp_path):
    assert "the model begins; it ends at" in check(template=PLAIN)[1]
    shutil.rmtree(tmp_path / "model")
    closed = (
        TURN + "{% if add_generation_prompt %}<|im_start|>assistant\n<think></think>{% endif %}"
    )
    assert "the prompt closes it: all is answer" in check(template=closed)[1]


def test_what_does_not_fit_is_named_and_the_status_is_1(check, tmp_path):
    no_line_end = TURN.replace("\n{% endfor", "{% endfor")
    other_end = "! the chat template ends a reply with '<|im_end|>', and that is"
    wrong = "! the reference 'no \\\\unknown{answer' is judged wrong"
    for flags, changes, words in (
        (
            ["--answer-budget", "9"],
            {},
            "! that is more than --answer-budget 9: it would be cut off",
        ),
        ([], {"template": PLAIN, "ends": "<|endoftext|>"}, other_end),
        ([], {"template": no_line_end}, "! the prompt ends with '<|im_end|>'"),
        ([], {"answer": "no \\unknown{answer"}, wrong),
    ):
        status, printed = check(*flags, **changes)
        assert status == 1 and f"\n{words}" in printed, words
        shutil.rmtree(tmp_path / "model")


TOO_SMALL = [
    ("--prompt-budget 9", r"--prompt-budget is 9: --prompt-budget \d+ would be enough for all"),
    (
        "--thinking-budget 900 2000",
        "add up to 2414 tokens; the model holds 1024: lower --thinking-budget",
    ),
]


@pytest.mark.parametrize("flags, error", TOO_SMALL)
def test_budgets_that_do_not_fit_are_refused_after_the_problem_is_shown(
    check, capsys, flags, error
):
    with pytest.raises(ValueError, match=error):
        check(*flags.split())
    assert "What is 1 + 1?" in capsys.readouterr().out


def test_characters_that_the_tokenizer_drops_are_named(tmp_path, capsys):
    data = tmp_path / "my.jsonl"
    data.write_text('{"problem": "What is 1+1?", "answer": "2"}\n')
    shipped = "data/arithmetic_base"
    assert checked(shipped, data, "--defaults", "toy", "--prompt-budget", "150") == 1
    printed = capsys.readouterr().out
    assert "\n! the tokenizer has no tokens for '" in printed
    assert "W" in printed.split("no tokens for")[1].split(":")[0]
    assert run_generate(["--prompt", "1+1?"]) == 0
    said = "! the tokenizer has no tokens for '?': the model never sees them (the shipped"
    assert said in capsys.readouterr().err


def test_a_program_has_no_reference_to_try(chat_models, tmp_path, capsys):
    data = tmp_path / "programs.jsonl"
    record = {"problem": "Print 1.", "tests": {"inputs": [""], "outputs": ["1"]}}
    data.write_text(json.dumps(record) + "\n")
    assert checked(chat_models["qwen3"], data, *BUDGETS) == 0
    printed = capsys.readouterr().out
    assert "judged by data/tasks/programming.py" in printed and "no program to try" in printed
