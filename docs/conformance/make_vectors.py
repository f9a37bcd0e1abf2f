"""Makes docs/conformance/vectors.json: small batches, and what each token's loss must be.

    python docs/conformance/make_vectors.py

Plain Python, one token after the other: no torch, and nothing else of this project. The equations
are those of the paper, sections 2 and 3.2. docs/conformance.md says what the keys of the file mean,
and the words in the name of a case.
"""

import json
import math
import random
from pathlib import Path
from statistics import fmean, pstdev
from types import SimpleNamespace

FILE = Path(__file__).with_name("vectors.json")
CASES = """\
cispo prompt on-policy
cispo prompt near
cispo prompt below
cispo prompt far
cispo prompt far cap-8
cispo prompt far old
cispo prompt far recomputed
cispo prompt far forced
cispo prompt far flat
cispo prompt far flat unfiltered
cispo prompt far dead
cispo prompt far single
cispo prompt far cut
cispo prompt far old forced flat dead cut
cispo sample far
cispo sample far flat
cispo sample far dead
cispo sample far single
cispo sample far cut
cispo sample far old forced flat dead cut
cispo token far
cispo token far flat
cispo token far dead
cispo token far single
cispo token far cut
cispo token far old forced flat dead cut
dapo prompt near
dapo prompt far
dapo prompt far old
dapo prompt far forced
dapo prompt far old forced flat dead cut
dapo sample far old forced flat dead cut
dapo token far old forced flat dead cut
grpo sample near
grpo sample far
grpo sample far old
grpo sample far forced
grpo sample far old forced flat dead cut
grpo prompt far old forced flat dead cut unfiltered
grpo token far old forced flat dead cut unfiltered
gspo sample near
gspo sample far
gspo sample far old
gspo sample far forced
gspo sample far old forced flat dead cut
gspo prompt far old forced flat dead cut
gspo token far old forced flat dead cut
norm none 8008 8000 8888 0000
norm prompt 8008 8000 8888 0000
norm batch 8008 8000 8888 0000
norm none 2480 7776 3333
norm prompt 2480 7776 3333
norm batch 2480 7776 3333
"""
CONSTANTS = {
    "cispo": {"eps_max": 5.0},
    "dapo": {"eps_low": 0.2, "eps_high": 0.26},
    "grpo": {"eps_low": 0.2, "eps_high": 0.2},
    "gspo": {"eps_low": 0.004, "eps_high": 0.005},
}
RATIOS = {  # none on the edge of a clip
    "on-policy": "1",
    "near": "0.95 1 1.1",
    "below": "0.02 0.3 0.75 0.95 1 1.1 1.23 1.4 3 4.5",
    "far": "0.02 0.3 0.75 0.95 1 1.1 1.23 1.4 3 4.5 5.5 6.5 40 900",
}
LENGTHS, SINGLE = "5 7 8 8 6 3 1 8 4", "1 40 2"  # three completions of each prompt
INPUTS = "logp_train", "logp_old", "logp_gen", "mask"
OUTPUTS = "coefficient", "weight", "clip", "gradient"


def draw_tokens(name: str) -> list[list[SimpleNamespace]]:
    """The tokens of each completion of the batch of this name."""
    rng = random.Random(name)
    loss, _, ratios, *words = name.split()
    # The old policy is the one that has sampled, the one that is trained, or between them.
    share = 0 if "recomputed" in words else 0.5 if "old" in words else 1
    rows = []
    for i, length in enumerate((SINGLE if "single" in words else LENGTHS).split()):
        A = round(rng.choice([-1, 1]) * rng.uniform(0.1, 2), 3)
        if "flat" in words and i // 3 == 1:  # a group without variance
            A = 0.0
        rows.append([])
        for t in range(int(length)):
            log_rho = math.log(float(rng.choice(RATIOS[ratios].split())))
            log_rho = round(log_rho * (0.05 if loss == "gspo" else 1), 5)  # its clips are near 1
            token = SimpleNamespace(i=i, A=A, log_rho=log_rho)
            token.logp_train = round(rng.uniform(-6, -4), 5)
            token.logp_old = token.logp_train - share * log_rho
            token.mask = int(not ("forced" in words and t % 4 == 2 or "dead" in words and i == 7))
            token.logp_gen = (token.logp_train - log_rho) * token.mask
            rows[i].append(token)
    return rows


def give_outputs(case: dict, tokens: list[SimpleNamespace]) -> float:
    """To each trained token: the derivative of its term by its log pi, its weight, whether a clip
    decides it, and the derivative of the loss. Returns the loss."""
    low = 1 - case.get("eps_low", 1)
    high = case.get("eps_max") or 1 + case["eps_high"]
    trained = [token for token in tokens if token.mask]
    counted = [token for token in trained if token.A or not case["filter"]]
    loss = 0.0
    for token in trained:
        own = [other for other in trained if other.i == token.i]
        of_prompt = [other for other in counted if other.i // 3 == token.i // 3]
        denominators = {
            "sample": len({other.i for other in counted}) * len(own),
            "prompt": len({other.i // 3 for other in counted}) * len(of_prompt),
            "token": len(counted),
        }
        weight = 1 / denominators[case["aggregation"]] if token in counted else 0.0
        log_rhos = [other.log_rho for other in (own if case["loss"] == "gspo" else [token])]
        rho, A = math.exp(fmean(log_rhos)), token.A
        bounded = min(max(rho, low), high)
        if case["loss"] == "cispo":
            clip, coefficient = bounded < rho, bounded * A
            term = coefficient * token.logp_train
        else:
            clip, term = bounded * A < rho * A, min(rho * A, bounded * A)
            coefficient = 0.0 if clip else term
        outputs = coefficient, weight, int(clip), -weight * coefficient
        vars(token).update(zip(OUTPUTS, outputs))
        loss -= weight * term
    return loss


def loss_case(name: str) -> dict:
    """The case of this name."""
    loss, aggregation, _, *words = name.split()
    rows = draw_tokens(name)
    case = {"name": name, "loss": loss, "aggregation": aggregation} | CONSTANTS[loss]
    case["filter"] = "unfiltered" not in words
    case["micro_batches"] = [2, 4, 3] if "cut" in words else [len(rows)]
    case["group"] = [i // 3 for i in range(len(rows))]
    case["advantages"] = [row[0].A for row in rows]
    case["expected"] = {"loss": round(give_outputs(case, sum(rows, [])), 12)}
    for key in INPUTS + OUTPUTS:
        columns = [[round(vars(token).get(key, 0), 12) for token in row] for row in rows]
        padded = [column + [0] * (max(map(len, rows)) - len(column)) for column in columns]
        (case if key in INPUTS else case["expected"])[key] = padded
    return case


def norm_case(name: str) -> dict:
    """The case of this name, which has the scores of each group in eighths. Advantages are r - mean
    r, for rewards r = 2 score - 1, by what the norm says."""
    _, norm, *groups = name.split()
    scores = [[int(x) / 8 for x in group] for group in groups]
    centred = [[2 * (x - fmean(row)) for x in row] for row in scores]
    batch = [x for row in centred if any(row) for x in row]  # without groups that have no variance
    advantages = []
    for row in centred:
        stds = {"none": 1, "prompt": pstdev(row) + 1e-6, "batch": pstdev(batch) + 1e-6}
        advantages.append([round(x / stds[norm], 12) for x in row])
    return {"name": name, "norm": norm, "scores": scores, "expected": {"advantages": advantages}}


def make() -> str:
    """The file: a case a line."""
    names = CASES.splitlines()
    cases = [norm_case(name) if "norm" in name else loss_case(name) for name in names]
    return "[\n" + ",\n".join(map(json.dumps, cases)) + "\n]\n"


if __name__ == "__main__":
    FILE.write_text(make())
