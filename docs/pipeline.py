"""Draw docs/pictures/pipeline.svg: the processes of a run, what each holds, what crosses between
them, and where the version of the parameters changes.

    python -m docs.pipeline

The picture is light or dark as the reader's system is. All lengths are in pixels.
"""

from html import escape
from pathlib import Path

PICTURE = Path(__file__).parent / "pictures" / "pipeline.svg"
WIDTH, HEIGHT = 1000, 600
TEXT_HEIGHT = 19  # from line to line

STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1b1f24 }
  .title { font-weight: 600; font-size: 15px }
  .soft { fill: #57606a }
  .back { fill: #ffffff }
  .process { fill: #f5f7f9; stroke: #8c959f }
  .box { fill: #ffffff; stroke: #d0d7de }
  .memory { fill: #fff4e0; stroke: #b26a00 }
  .arrow { stroke: #57606a; stroke-width: 1.6; fill: none; marker-end: url(#head) }
  .head { fill: #57606a }
  .older { fill: #e69f00 }
  .newer { fill: #56b4e9 }
  .forced { fill: #afb8c1 }
  .change { fill: #0550ae }
  .on-change { fill: #ffffff; font-weight: 600 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e4e8ec }
    .soft { fill: #9da7b1 }
    .back { fill: #14171b }
    .process { fill: #1d2228; stroke: #6e7781 }
    .box { fill: #14171b; stroke: #39414a }
    .memory { fill: #332a18; stroke: #d9a441 }
    .arrow { stroke: #9da7b1 }
    .head { fill: #9da7b1 }
    .forced { fill: #565f69 }
    .change { fill: #79b8ff }
    .on-change { fill: #14171b }
  }
"""


# --- the parts of a drawing -----------------------------------------------------------------------


def rectangle(kind: str, x: int, y: int, width: int, height: int) -> str:
    """A rectangle with round corners. kind: a class of the style."""
    place = f'x="{x}" y="{y}" width="{width}" height="{height}" rx="6"'
    return f'<rect class="{kind}" {place}/>'


def text(kind: str, x: int, y: int, words: str, anchor: str = "start") -> str:
    """A line of text. anchor: which end of it is at x, or "middle"."""
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>'


def box(
    kind: str, x: int, y: int, size: tuple[int, int], title: str, file: str, lines: list[str]
) -> str:
    """A rectangle of this width and height, with a title, a file and lines of text."""
    width, height = size
    drawn = [
        rectangle(kind, x, y, width, height),
        text("title", x + 14, y + 25, title),
        text("soft", x + width - 14, y + 25, file, "end"),
    ]
    for i, line in enumerate(lines):
        drawn.append(text("", x + 14, y + 47 + i * TEXT_HEIGHT, line))
    return "\n".join(drawn)


def arrow(start: tuple[int, int], end: tuple[int, int], words: str, below: str = "") -> str:
    """A horizontal arrow with words above its middle, and softer ones below it."""
    (x, y), (end_x, end_y) = start, end
    drawn = [f'<path class="arrow" d="M{x} {y}L{end_x} {end_y}"/>']
    middle = (x + end_x) // 2
    drawn.append(text("", middle, y - 7, words, "middle"))
    if below:
        drawn.append(text("soft", middle, y + 17, below, "middle"))
    return "\n".join(drawn)


def arrow_down_or_up(start: tuple[int, int], end: tuple[int, int], lines: list[str]) -> str:
    """A vertical arrow with lines of text at its right."""
    (x, y), (end_x, end_y) = start, end
    drawn = [f'<path class="arrow" d="M{x} {y}L{end_x} {end_y}"/>']
    first = (y + end_y) // 2 + 5 - (len(lines) - 1) * TEXT_HEIGHT // 2
    for i, line in enumerate(lines):
        drawn.append(text("", x + 14, first + i * TEXT_HEIGHT, line))
    return "\n".join(drawn)


def change(x: int, y: int, width: int, words: str) -> str:
    """A mark where the version of the parameters changes."""
    label = text("on-change", x + width // 2, y + 17, words, "middle")
    return f"{rectangle('change', x, y, width, 24)}\n{label}"


def tokens(x: int, y: int, kinds: list[str]) -> str:
    """The tokens of a completion, as squares."""
    return "\n".join(rectangle(kind, x + 17 * i, y, 14, 14) for i, kind in enumerate(kinds))


# --- the picture ----------------------------------------------------------------------------------


def picture() -> str:
    """The text of the SVG."""
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    turned_with_its_line = 'markerWidth="7" markerHeight="7" orient="auto"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        "<title>The pipeline: who holds what, what crosses, where versions change</title>",
        f"<style>{STYLE}</style>",
        f'<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" {turned_with_its_line}>',
        '<path class="head" d="M0 0L10 5L0 10z"/></marker>',
        rectangle("back", 0, 0, WIDTH, HEIGHT),
        *trainer(),
        *others(),
        *crossings(),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def trainer() -> list[str]:
    """The process on the left."""
    feed = [
        "holds the problems, the order of their prompts,",
        "and the groups under way: (k + 1) batches at most",
        "(groups_ahead). A prompt that is solved retires.",
        "",
        "hands a prompt out as a group of 16 requests. The",
        "group is finished when all of them are judged.",
    ]
    loop = [
        "holds version v of the parameters, and moments",
        "1. verdicts become advantages and weights",
        "2. log pi_train of the sampled tokens (policy.py)",
        "3. the loss of loss.py, and its gradient",
        "4. the optimizer step",
    ]
    batch = ["a batch of whole groups, none of whose", "tokens is over k steps old (choose_batch)"]
    return [
        rectangle("process", 20, 20, 400, 560),
        text("title", 34, 47, "trainer process"),
        text("soft", 404, 47, "blue: here versions change", "end"),
        box("box", 36, 64, (368, 200), "feed", "core/feed.py", feed),
        arrow_down_or_up((70, 264), (70, 342), batch),
        box("box", 36, 344, (368, 220), "loop", "train.py", loop),
        change(50, 518, 340, "version v becomes version v + 1"),
    ]


def others() -> list[str]:
    """The processes on the right, and the memory that all share."""
    verifier = ["holds the task. Its score may hang or crash,", "so time and memory are limited"]
    generator = [
        "holds a copy of the parameters; in each slot",
        "a completion, with its keys and values",
    ]
    memory = ["holds the newest version, in fp32. Nobody", "takes over one that is half written."]
    completion = ["older"] * 7 + ["newer"] * 5 + ["forced"] * 3 + ["newer"] * 3
    return [
        box("process", 630, 20, (350, 112), "verifier processes", "data/verify.py", verifier),
        box(
            "process", 630, 156, (350, 240), "generator processes", "core/generators.py", generator
        ),
        change(644, 232, 322, "a newer version is taken over"),
        text("", 644, 277, "between two tokens of a completion. Each token"),
        text("", 644, 296, "has its version, and log pi_gen of that version:"),
        tokens(644, 310, completion),
        tokens(644, 340, ["older"]),
        text("soft", 664, 352, "version v - 1"),
        tokens(762, 340, ["newer"]),
        text("soft", 782, 352, "version v"),
        tokens(860, 340, ["forced"]),
        text("soft", 880, 352, "forced"),
        text("soft", 644, 382, "Keys and values of older versions stay."),
        box("memory", 630, 474, (350, 106), "shared memory", "core/rollouts.py", memory),
    ]


def crossings() -> list[str]:
    """What crosses between the processes."""
    newest = ["the newest version that", "is complete (read_into)"]
    return [
        arrow((404, 84), (630, 84), "text of a completion"),
        arrow((630, 120), (404, 120), "score from 0 to 1"),
        arrow((404, 184), (630, 184), "requests", "prompt ids, budget, seed"),
        arrow((630, 242), (404, 242), "rollouts", "ids, versions, log pi_gen"),
        arrow((404, 530), (630, 530), "version v + 1 (publish)", "after each step"),
        arrow_down_or_up((730, 474), (730, 398), newest),
    ]


if __name__ == "__main__":
    PICTURE.write_text(picture())
    print(f"{PICTURE} written")
