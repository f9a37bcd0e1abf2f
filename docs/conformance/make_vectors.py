"""Makes docs/conformance/vectors.json: small batches, and what each token's loss must be.

    python docs/conformance/make_vectors.py

Plain Python, one token after the other: no torch, and nothing else of this project. The equations
are those of the paper, sections 2 and 3.2. docs/conformance.md says what the words in the name of a
case and the keys in the file mean.
"""

import json
import math
import random
from pathlib import Path
from statistics import fmean, pstdev

FILE = Path(__file__).with_name("vectors.json")
CASES = """
cispo prompt on-policy
cispo prompt near
cispo prompt below
cispo prompt
cispo prompt cap-8
cispo prompt old
cispo prompt recomputed
cispo prompt forced
cispo prompt flat
cispo prompt flat unfiltered
cispo prompt dead
cispo prompt long
cispo prompt single
cispo prompt cut
cispo prompt old forced flat dead cut
cispo sample
cispo sample flat
cispo sample dead
cispo sample long
cispo sample cut
cispo sample old forced flat dead cut
cispo token
cispo token flat
cispo token dead
cispo token long
cispo token cut
cispo token old forced flat dead cut
dapo prompt near
dapo prompt
dapo prompt old
dapo prompt forced
dapo prompt old forced flat dead cut
dapo sample old forced flat dead cut
dapo token old forced flat dead cut
grpo sample near
grpo sample
grpo sample old
grpo sample forced
grpo sample old forced flat dead cut
grpo prompt old forced flat dead cut unfiltered
grpo token old forced flat dead cut unfiltered
gspo sample near
gspo sample
gspo sample old
gspo sample forced
gspo sample old forced flat dead cut
gspo prompt old forced flat dead cut
gspo token old forced flat dead cut
"""
CONSTANTS = {
    "cispo": {"eps_max": 5.0},
    "dapo": {"eps_low": 0.2, "eps_high": 0.26},
    "grpo": {"eps_low": 0.2, "eps_high": 0.2},
    "gspo": {"eps_low": 0.004, "eps_high": 0.005},
}
RATIOS = {  # none on the edge of a clip
    "on-policy": [1.0],
    "near": [0.95, 1.0, 1.1],
    "below": [0.02, 0.3, 0.75, 0.95, 1.0, 1.1, 1.23, 1.4, 3.0, 4.5],
    "far": [0.02, 0.3, 0.75, 0.95, 1.0, 1.1, 1.23, 1.4, 3.0, 4.5, 5.5, 6.5, 40.0, 900.0],
}
GROUP = 3  # completions of each prompt
FLAT, DEAD = 1, 7  # the group without variance, the completion without a trained token


def draw_case(name: str) -> dict:
    """The inputs of a case."""
    rng = random.Random(name)
    loss, aggregation, *words = name.split()
    case = {"name": name, "loss": loss, "aggregation": aggregation} | CONSTANTS[loss]
    if "cap-8" in words:
        case["eps_max"] = 8.0
    lengths = [1, 40, 2, 17, 5, 1] if "long" in words else [5, 7, 8, 8, 6, 3, 1, 8, 4]
    lengths = lengths[:GROUP] if "single" in words else lengths
    case["filter"] = "unfiltered" not in words
    case["micro_batches"] = [2, 4, 3] if "cut" in words else [len(lengths)]
    case["group"] = [i // GROUP for i in range(len(lengths))]
    case["advantages"] = [
        0.0 if "flat" in words and group == FLAT else round(rng.choice([-1, 1]) * rng.uniform(0.1, 2), 3)
        for group in case["group"]
    ]
    ratios = next((RATIOS[word] for word in words if word in RATIOS), RATIOS["far"])
    columns = ["logp_train", "logp_old", "logp_gen", "mask"]
    case |= {column: [] for column in columns}
    for i, length in enumerate(lengths):
        row = [(0.0, 0.0, 0.0, 0)] * max(lengths)
        for t in range(length):
            # The clips of gspo are near 1.
            log_rho = math.log(rng.choice(ratios)) * (0.05 if loss == "gspo" else 1)
            train = min(log_rho, 0) - rng.uniform(0.05, 3)
            gen = train - log_rho
            old = (train + gen) / 2 if "old" in words else gen
            old = train if "recomputed" in words else old
            trained = not ("forced" in words and t % 4 == 2 or "dead" in words and i == DEAD)
            row[t] = (train, old, gen * trained, int(trained))
        for column, values in zip(columns, zip(*row)):
            case[column].append([round(value, 5) for value in values])
    return case


def expected_of(case: dict) -> dict:
    """What comes out of a case, for each token: the derivative of its term by its log pi, its
    weight, whether a clip decides it, and the derivative of the loss; and the loss."""
    found = {key: [] for key in ("coefficient", "weight", "clip", "gradient")} | {"loss": 0.0}
    counted = [A != 0 or not case["filter"] for A in case["advantages"]]
    lengths = [sum(mask) * counts for mask, counts in zip(case["mask"], counted)]
    groups = [group for group, length in zip(case["group"], lengths) for _ in range(length)]
    for i, mask in enumerate(case["mask"]):
        denominators = {
            "sample": sum(map(bool, lengths)) * lengths[i],
            "prompt": len({*groups}) * groups.count(case["group"][i]),
            "token": sum(lengths),
        }
        weight = 1 / denominators[case["aggregation"]] if lengths[i] else 0
        A, logps = case["advantages"][i], case["logp_train"][i]
        logs = [(a - b) * m for a, b, m in zip(logps, case["logp_gen"][i], mask)]
        if case["loss"] == "gspo":
            logs = [sum(logs) / max(1, sum(mask))] * len(logs)
        row = []
        for logp, log_rho, trained in zip(logps, logs, mask):
            rho = math.exp(log_rho)
            if case["loss"] == "cispo":
                clip = rho > case["eps_max"]
                coefficient = min(rho, case["eps_max"]) * A
                term = coefficient * logp
            else:
                bounded = min(max(rho, 1 - case["eps_low"]), 1 + case["eps_high"])
                clip = bounded * A < rho * A
                coefficient = 0 if clip else rho * A
                term = min(rho, bounded, key=lambda ratio: ratio * A) * A
            found["loss"] -= weight * trained * term
            outputs = coefficient, weight, int(clip), -weight * coefficient
            row.append([trained and output for output in outputs])
        for key, values in zip(found, zip(*row)):
            found[key].append([*values])
    return found


# Scores in eighths. A completion with "-" was right, and did not end by itself.
SCORES = ["8008 8000 8888 0000", "80-- 8-08 08-8 --8- 888-", "2480 7776 3-33"]


def norm_case(norm: str, scores: str, filtered: bool) -> dict:
    """The advantages of all completions, in groups: r - mean r, for rewards r = 2 score - 1, by
    what the norm divides it by."""
    name = f"norm {norm}: {scores}" + " unfiltered" * (not filtered)
    case = {"name": name, "norm": norm, "filter": filtered}
    case["scores"] = [[int(x) / 8 for x in row.replace("-", "8")] for row in scores.split()]
    case["usable"] = [[int(x != "-") for x in row] for row in scores.split()]
    members = [
        [2 * x - 1 for x, usable in zip(*rows) if usable]
        for rows in zip(case["scores"], case["usable"])
    ]
    batch = [r - fmean(row) for row in members if len({*row}) > filtered for r in row]
    advantages = []
    for scores, usable, rewards in zip(case["scores"], case["usable"], members):
        stds = {"none": 1, "prompt": pstdev(rewards) + 1e-6, "batch": pstdev(batch) + 1e-6}
        centred = [2 * x - 1 - fmean(rewards) for x in scores]
        advantages.append([u * x / stds[norm] for u, x in zip(usable, centred)])
    return case | {"expected": {"advantages": advantages}}


def make() -> list[dict]:
    """All cases, with nine digits of each number."""
    cases = [draw_case(name) for name in CASES.strip().splitlines()]
    cases = [case | {"expected": expected_of(case)} for case in cases]
    for scores in SCORES:
        cases += [norm_case(norm, scores, True) for norm in ("none", "prompt", "batch")]
        cases.append(norm_case("batch", scores, False))
    return json.loads(json.dumps(cases), parse_float=lambda text: float(f"{float(text):.9g}"))


if __name__ == "__main__":
    FILE.write_text("[\n" + ",\n".join(map(json.dumps, make())) + "\n]\n")
