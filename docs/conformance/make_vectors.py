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
cispo prompt far old
cispo prompt far recomputed
cispo prompt far forced
cispo prompt far flat
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
grpo prompt far old forced flat dead cut
grpo token far old forced flat dead cut
gspo sample on-policy
gspo sample close
gspo sample far
gspo sample close old
gspo sample close forced
gspo sample close old forced flat dead cut
gspo prompt close old forced flat dead cut
gspo token close old forced flat dead cut
norm none 8008 8000 8888 0000
norm prompt 8008 8000 8888 0000
norm batch 8008 8000 8888 0000
norm none 2480 7776 3333
norm prompt 2480 7776 3333
norm batch 2480 7776 3333
"""
BOUNDS = {  # of the ratio
    "cispo": {"low": 0.0, "high": 5.0},
    "dapo": {"low": 0.8, "high": 1.26},
    "grpo": {"low": 0.8, "high": 1.2},
    "gspo": {"low": 0.996, "high": 1.005},
}
LOG_RATIOS = {  # none on a bound
    "on-policy": "0",
    "close": "-0.0213 -0.0117 -0.0031 0 0.0031 0.0117 0.0213",
    "near": "-0.05 0 0.1",
    "below": "-3.9 -2.3 -0.7 -0.3 -0.05 0 0.1 0.2 0.4 1.1 1.5",
    "far": "-3.9 -2.3 -0.7 -0.3 -0.05 0 0.1 0.2 0.4 1.1 1.5 1.7 2 3.7 6.8",
}
LENGTHS, SINGLE = [5, 7, 8, 8, 6, 3, 1, 8, 4], [1, 40, 2]  # three completions of each prompt
INPUTS = "logp_train", "logp_old", "logp_gen", "mask"
OUTPUTS = "coefficient", "weight", "clip", "gradient"


def loss_case(name: str) -> dict:
    """The case of this name."""
    rng = random.Random(name)
    loss, aggregation, ratios, *words = name.split()
    lengths = SINGLE if "single" in words else LENGTHS
    case = {
        "name": name,
        "loss": loss,
        "aggregation": aggregation,
        **BOUNDS[loss],
        "micro_batches": [2, 4, 3] if "cut" in words else [len(lengths)],
        "group": [],
        "advantages": [],
    }
    # The old policy is the one that has sampled, the one that is trained, or between them.
    share = 0 if "recomputed" in words else 0.5 if "old" in words else 1
    rows = []
    for i, length in enumerate(lengths):
        case["group"].append(i // 3)
        flat = "flat" in words and i // 3 == 1  # without variance
        A = 0.0 if flat else round(rng.uniform(-2, 2), 2)
        case["advantages"].append(A)
        rows.append([])
        for t in range(max(lengths)):
            log_rho = float(rng.choice(LOG_RATIOS[ratios].split()))
            logp = rng.randint(-600, -400) / 100
            forced = "forced" in words and t % 4 == 2
            masked = t >= length or forced or "dead" in words and i == 7
            token = SimpleNamespace(
                i=i,
                A=A,
                logp_train=logp,
                logp_old=logp - share * log_rho,
                logp_gen=0.0 if masked else logp - log_rho,
                mask=int(not masked),
            )
            rows[i].append(token)
    case["expected"] = {"loss": round(give_outputs(case, sum(rows, [])), 12)}
    for key in INPUTS + OUTPUTS:
        place = case if key in INPUTS else case["expected"]
        place[key] = [[round(vars(token).get(key, 0), 12) for token in row] for row in rows]
    return case


def give_outputs(case: dict, tokens: list[SimpleNamespace]) -> float:
    """To each trained token: the derivative of its term by its log pi, its weight, whether a clip
    decides it, and the derivative of the loss. Returns the loss."""
    trained = [token for token in tokens if token.mask]
    counted = [token for token in trained if token.A]
    # The mean over the tokens of each part, then over the parts: these are completions, the three
    # completions of a prompt, or the whole batch.
    size = {"sample": 1, "prompt": 3, "token": 9}[case["aggregation"]]
    parts = [token.i // size for token in counted]
    loss = 0.0
    for token in trained:
        weight = 1 / (len({*parts}) * parts.count(token.i // size)) if token in counted else 0.0
        own = [other for other in trained if other.i == token.i]
        of_ratio = own if case["loss"] == "gspo" else [token]
        rho = math.exp(fmean(other.logp_train - other.logp_gen for other in of_ratio))
        bounded, A = min(max(rho, case["low"]), case["high"]), token.A
        if case["loss"] == "cispo":
            clip, coefficient = bounded < rho, bounded * A
            term = coefficient * token.logp_train
        else:
            term = min(rho * A, bounded * A)
            clip = term < rho * A
            coefficient = 0.0 if clip else term
        outputs = coefficient, weight, int(clip), -weight * coefficient
        vars(token).update(zip(OUTPUTS, outputs))
        loss -= weight * term
    return loss


def norm_case(name: str) -> dict:
    """The case of this name, which has the scores of each group in eighths. Advantages are r - mean
    r, for rewards r = 2 score - 1, by what the norm says."""
    _, norm, *groups = name.split()
    scores = [[int(x) / 8 for x in group] for group in groups]
    centred = [[2 * (x - fmean(row)) for x in row] for row in scores]
    batch = [x for row in centred if any(row) for x in row]  # without groups that have no variance
    advantages = []
    for row in centred:
        std = pstdev(row if norm == "prompt" else batch) + 1e-6
        advantages.append([round(x if norm == "none" else x / std, 12) for x in row])
    return {"name": name, "norm": norm, "scores": scores, "expected": {"advantages": advantages}}


def make() -> str:
    """The file: a case a line."""
    cases = [norm_case(name) if "norm" in name else loss_case(name) for name in CASES.splitlines()]
    return json.dumps(cases).replace("}, {", "},\n{")


if __name__ == "__main__":
    FILE.write_text(make())
