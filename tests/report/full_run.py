"""A run's folder with results of every kind, all of them made up: what the report's tests read."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from mxd.artifacts.checkpoint import save_layer
from mxd.artifacts.provenance import Provenance
from mxd.common.arrays import packed
from mxd.common.files import write_json
from mxd.layers import parse_layer

EVIL = '</script><script>window.pwned=1</script><img src=x onerror="window.pwned=1"> "\'`${window.pwned=1}'
"""Text that must be shown, never run."""
DOMAINS = ["sport", "law"]
UNITS = 120


def layer(folder: Path, name: str, fields: dict[str, Any], block: int = 1) -> None:
    """Save an untrained layer."""
    config = parse_layer({"d_in": 8, "d_out": 8, "num_units": UNITS, **fields})
    provenance = Provenance(
        model="made-up",
        revision="abc123",
        block=block,
        fingerprint="f" * 16,
        excluded_ids=(0,),
        data={"source": f"corpus {EVIL}", "split": "train", "context": 128},
        training={"recipe": "short", "steps": 100, "batch_tokens": 4096, "settings": {"lr": 1e-3, "warmup_steps": 10}},
        tokens=409_600,
        seed=7,
        versions={"mxd": "0.1.0", "torch": "2"},
    )
    save_layer(folder / name, config.build(seed=1), provenance)


def replacements(k: int) -> dict[str, dict[str, Any]]:
    """Return the layers of one K."""
    encoder = {"hidden": 16, "activation": "relu", "glu": False}
    sparsity = {"kind": "topk", "k": k}
    return {
        f"block1-mxd-k{k}": {"method": "mxd", "sparsity": sparsity, **encoder},
        f"block1-tc-k{k}": {"method": "transcoder", "sparsity": sparsity},
        f"block1-cp-mumoe-r4-k{k}": {"method": "cp_mumoe", "sparsity": sparsity, "rank": 4, **encoder},
    }


def fill(folder: Path, ks: tuple[int, ...] = (8, 32), extra: dict[str, dict[str, Any]] | None = None) -> Path:
    """Make a run's folder."""
    rng = np.random.default_rng(0)
    layers = {name: fields for k in ks for name, fields in replacements(k).items()} | (extra or {})
    for name, fields in layers.items():
        layer(folder, name, fields)
    names = {f"{folder.name}/{name}": name for name in layers}
    (folder / "config.yaml").write_text(f"run: made-up\n# {EVIL}\n")
    lines = [
        {"step": s, "tokens": 4096 * s, "replacement": name, "normalized_mse": 0.02 / s, "seconds": 1.5 * s}
        | {"step_seconds": 0.01 * (1 + s % 3), "dead_share": 0.5 / s}
        for s in range(1, 151)
        for name in layers
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    makers = {
        "faithfulness": evaluated,
        "generation": generated,
        "whole": replaced_whole,
        "tuned": tuned_whole,
        "structure": structured,
        "units": looked_at,
        "probing": probed,
        "steering": steered,
        "masking": masked,
        "purging": purged,
        "explaining": explained,
        "toxicity": toxic,
        "ablation": dropped,
        "subset": limited,
        "rewrite": rewritten,
    }
    for kind, make in makers.items():
        made = {f"mxd-k{k}": f"block1-mxd-k{k}" for k in ks} if kind in ("whole", "tuned") else names
        results = {name: make(rng, short, n) for n, (name, short) in enumerate(made.items())}
        if kind == "probing":
            results["MLP neurons, block 1"] = probed(rng, "", 3)
        data = {"source": "made-up text", "split": "validation"}
        write_json(folder / f"{kind}.json", {"model": "made-up", "data": data, "results": results}, packed)
    return folder


def evaluated(rng: Any, name: str, n: int) -> dict[str, Any]:
    k = 8 if "k8" in name else 32
    site = {
        "normalized_mse": 0.01 / (n + 1),
        "fvu": 0.1,
        "l0": float(k),
        "dead_share": 0.25,
        "routed_share": 0.7,
        "shared_share": 0.01,
        "nmse_mean_gate": 0.02,
        "effective_units": 7.5,
        "nmse_fixed_directions": 0.03,
        "gate_share": 0.6,
        "dense_share": 0.1,
        "interaction_share": 0.15,
        "skip_share": 0.0,
        "stable_rank": 2.5,
        "conventions": {
            "saelens": {"tokens": 900, "explained_variance": 0.9},
            "sparsify": {"tokens": 1000, "fvu": 0.2},
        },
    }
    method = {"mxd": "MxD", "tc": "TC", "cp": "CP-muMoE", "linear": "Linear"}[name.split("-")[1]]
    what = {"method": method, "sparsity": f"k{k}", "k": k, "block": 1, "units": UNITS, "params": 9, "tokens_trained": 1}
    return {
        "tokens": 1000,
        "ce_base": 3.5,
        "ce_base_se": 0.1,
        "ce_spliced": 3.51,
        "ce_increase": 0.01 * (n + 1),
        "ce_increase_se": 0.001,
        "ce_zero": 5.0,
        "ce_mean": 4.5,
        "loss_recovered": None if n == 1 else 0.9,
        "around_special": {"ce_increase": 0.02 * (n + 1)},
        "kl": 0.02,
        "kl_se": 0.001,
        "params": 9,
        "active_params": 100.0 * (n + 1),
        "flops": 3000.0 * (n + 1),
        "top1_agreement": 0.95,
        "conventions": {"saelens": {"targets": 900, "ce_loss_score": 0.75, "kl_div_score": None}},
        "blocks": {"1": site},
        "replacements": [what],
    }


def generated(rng: Any, name: str, n: int) -> dict[str, Any]:
    match = [0.97**i for i in range(1, 33)]
    example = {"prompt": [1, 2], "base": [3, 4, 5], "spliced": [3, 9, 5], "prompt_text": f"A prompt {EVIL}"}
    example |= {"base_tokens": [" the", " cat", " sat"], "spliced_tokens": [" the", f" dog{EVIL}", " sat"]}
    return {
        "match": match,
        "match_low": [m - 0.05 for m in match],
        "match_high": [min(1, m + 0.05) for m in match],
        "agreed": [3, 4],
        "agreed_tokens": 3.5,
        "agreed_tokens_se": float("inf"),
        "prompts": 64,
        "new_tokens": 32,
        "examples": [example],
    }


def predicted(increase: float) -> dict[str, float]:
    return {"ce_increase": increase, "ce_increase_se": 0.001, "kl": 0.02, "kl_se": 0.001, "top1_agreement": 0.95}


def replaced_whole(rng: Any, name: str, n: int) -> dict[str, Any]:
    """Of three blocks, 1, 2 and 4."""
    example = generated(rng, name, n)
    garbage = {"repeated": 0.25, "repeated_se": 0.05, "base_ce": 2.5, "base_ce_se": 0.125}
    drawn = {"ce_increase": 0.07, "low": 0.06, "high": 0.08, "kl": 0.02, "top1_agreement": 0.9, "drawn": [0.06, 0.08]}
    orders = {"bottom": [[1, 2, 4]], "top": [[4, 2, 1]], "random": [[2, 1, 4], [4, 1, 2]]}
    points = {"bottom": [predicted(0.01 * i) for i in range(3)], "top": [predicted(0.02)] * 3, "random": [drawn] * 3}
    site = evaluated(rng, name, n)["blocks"]["1"]
    blocks = {}
    for i, block in enumerate((1, 2, 4)):
        without = predicted(0.03) | {"won_back": 0.125 * (i + 1), "won_back_se": 0.0625}
        more = {"spliced": site | {"normalized_mse": 0.02}, "alone": predicted(0.0625 * (i + 1)), "without": without}
        blocks[str(block)] = site | more
    what = evaluated(rng, name, n)["replacements"][0]
    return {
        **predicted(0.5 + n),
        "tokens": 1000,
        "ce_base": 3.5,
        "ce_base_se": 0.1,
        "around_special": predicted(0.375),
        "alone_sum": 0.25,
        "alone_sum_se": 0.0625,
        "params": 27,
        "by_number": {"numbers": [1, 2, 3]} | {k: {"orders": orders[k], "points": points[k]} for k in orders},
        "blocks": blocks,
        "generation": example | {"garbage": garbage, "garbage_base": garbage | {"base_ce": 1.25}},
        "replacements": [what | {"block": block} for block in (1, 2, 4)],
    }


def tuned_whole(rng: Any, name: str, n: int) -> dict[str, Any]:
    before, after = (replaced_whole(rng, name, n + i) for i in (1, 0))
    return {"before": before, "after": after, "replacements": before["replacements"]}


def structured(rng: Any, name: str, n: int) -> dict[str, Any]:
    units = [{"unit": u, "activation": 1.5 - u, "rate": 0.125 * (u + 1)} for u in range(2)]
    tokens = [
        {"token": f"the {EVIL}", "units": [7, 3, 2, 5]},
        {"token": "", "units": [7, 2]},
        {"token": "\n", "units": []},
    ]
    leading = [{"prompt": f"p{i} {EVIL}", "units": units[i % 2 :], "tokens": tokens[i:]} for i in range(3)]
    ranks = {"normalized_rank": [0.99, 0.125, 0.5][n % 3], "normalized_rank_sd": 0.03125, "deficient": n % 3}
    return {**ranks, "stable_rank": 2.5, "stable_rank_sd": 0.5, "experts": UNITS, "leading": leading}


def looked_at(rng: Any, name: str, n: int) -> dict[str, Any]:
    rates = rng.uniform(0.001, 0.2, UNITS)
    rates[5] = 0.0
    units = {}
    for unit in range(0, UNITS, 2):
        intervals = []
        for interval in range(6):
            tokens = [" one", f" {EVIL}", f" word{unit}x", " four", "\n"]
            context = {
                "tokens": tokens,
                "activations": [0, 0.5, interval + 1.0, 0, 0],
                "at": 2,
                "value": interval + 1.0,
            }
            intervals.append({"low": float(interval), "high": interval + 1.0, "contexts": [context]})
        adds = {"cosine": 0.625, "peak": 4.0 + unit / 100, "activations": {"high": 6.0 + unit, "active": 9}}
        adds["activations"]["counts"] = [5, 3, 0, 1]
        adds["promoted"] = [{"token": f" up{unit}", "logit": 0.5}, {"token": f" {EVIL}", "logit": 0.25}]
        adds["suppressed"] = [{"token": f" down{unit}", "logit": -0.5}]
        units[str(unit)] = {"rate": rates[unit], "mean": 1.0, "max": 6.0 + unit, "intervals": intervals} | adds
    return {
        "block": 1,
        "tokens": 100_000,
        "rates": rates.astype(np.float32) if n % 2 else rates.tolist(),  # lists: older files
        "histogram": {"log10_edges": [-4, -3, -2, -1, 0], "counts": [1, 20, 60, 38]},
        "dead": 1,
        "shared": [{"unit": 3, "rate": 0.99}],
        "logits": {
            "norm": "LayerNorm",
            "centred": True,
            "chance": 3.5,
            "sample": 65_536,
            "fixed": False,
            "missing": None,
        },
        "units": units,
    }


def probed(rng: Any, name: str, n: int) -> dict[str, Any]:
    density = {"edges": [0, 1, 2, 3], "positive": [0.1, 0.2, 0.7], "negative": [0.7, 0.2, 0.1]}
    classes = {
        "sport": {"f1": 0.9 - 0.05 * n, "unit": 4, "n_test": 40, "density": density},
        f"law {EVIL}": {"f1": 0.7, "unit": 7, "n_test": 40, "density": density},
    }
    return {"topic": {"level": "sample", "classes": classes, "mean_f1": 0.8}}


def steered(rng: Any, name: str, n: int) -> dict[str, Any]:
    unit = {"scale": 100.0, "samples": [f"Talk {EVIL}", "more"], "coherence": 0.5, "fluency": None, "failures": 1}
    judges = [f"a judge {EVIL}", "another"]
    found = {"units": {"0": unit, "1": unit}, "prompt": "Let's talk about ", "judge": ", ".join(judges)}
    means = {"coherence": 0.625, "coherence_se": 0.125, "fluency": 0.25 * (n % 4), "fluency_se": None}
    means |= {"asked": 20, "failures": 1, "disagreements": 0}
    pair = {"units": 2, "difference": -0.25, "difference_se": 0.125, "spearman": None, "chance": 0.875}
    agreement = [{"judges": judges, "coherence": pair, "fluency": pair | {"spearman": 0.75}}]
    found |= {
        "judges": dict.fromkeys(judges, means | {"fluency": None}),
        "agreement": agreement,
        "rubric": "paraphrase",
    }
    still = {"coherence": 0.75, "fluency": 0.875}
    return found | means | {"unsteered": ["as it is"], "unsteered_judged": still}


def explained(rng: Any, name: str, n: int) -> dict[str, Any]:
    unit = {"tokens": [f" tok{EVIL}", "en"], "explanations": [f"It means {EVIL}", "more", ""]}
    one = {
        "accuracy": 0.75,
        "accuracy_se": 0.125,
        "score": 0.5,
        "score_se": 0.25,
        "units": 2,
        "asked": 24,
        "failures": 1,
    }
    one |= {"control_score": 0.375, "control_score_se": 0.25, "beyond": 0.125, "beyond_se": None}
    return {"units": {"0": unit, "7": unit}, "left_out": 1, "judges": {f"a judge {EVIL}": one} if n % 2 else {}}


def masked(rng: Any, name: str, n: int) -> dict[str, Any]:
    matrix = [[0.5, -0.01], [float("nan"), 0.25]]
    means = {"target": 0.375, "others": -0.01, "control_target": 0.125, "control_others": 0.0625}
    found = {"domains": DOMAINS, "units": {"sport": 3, "law": 0}, "matrix": matrix, "control": [[0.125, 0.0625]] * 2}
    found |= {"matrix_se": [[0.0625, 0.25], [0.5, float("inf")]], "control_se": [[0.125] * 2] * 2}
    matrices = {"columns": DOMAINS, "matrix": [[-0.25, 0.0], [0.125, -0.5]], "control": [[-0.125, 0.0]] * 2}
    tasks = {"documents": [40, 80], "metric": f"acc {EVIL}", "mean": [0.5, 0.625], "control_mean": [0.75, 0.75]}
    repeated = {"repeated": 0.25, "repeated_masked": [0.375, 0.25]}
    example = {"new_tokens": 3, "examples": [generated(rng, name, n)["examples"], []]}
    more = {"tasks": {**matrices, **means, **tasks}, "generation": {**matrices, **means, **repeated, **example}}
    return found | means | (more if name.startswith("mxd") else {}) | {"faithfulness": held_out()}


def toxic(rng: Any, name: str, n: int) -> dict[str, Any]:
    kind = {"expected_max": 0.75, "expected_max_se": 0.0625, "probability": 0.5, "probability_se": 0.25}
    kind |= {"greedy": None, "greedy_se": None, "incomplete": 1}
    way = {"asked": 40, "failures": 3, "toxic": kind, "other": kind | {"expected_max": 0.125 * (n % 4)}}
    ways = {"base": way, "unmasked": way, "masked": [way, way], "control": [way, way]}
    prompts = {"toxic": 3, "other": 4}
    examples = [generated(rng, name, n)["examples"], []]
    found = {"scorer": f"words {EVIL}", "prompts": prompts, "samples": 5, "examples": examples} | ways
    return purged(rng, name, n) | {"toxicity": found, "faithfulness": held_out()}


def held_out() -> dict[str, Any]:
    """What two masks add to the loss on held-out text."""
    added = [{"added": 0.125, "added_se": 0.0625}, {"added": 0.25, "added_se": float("inf")}]
    return {"masked": added, "control": added[::-1]}


def purged(rng: Any, name: str, n: int) -> dict[str, Any]:
    changes, control = [[0.125, 0.5], [0.25, 0.75]], [[0.0625, 0.0625]] * 2
    errors = [[0.01, 0.02], [0.03, float("inf")]]
    leading = [{"block": 1, "unit": unit, "correlation": 0.5 - 0.125 * unit} for unit in range(3 - n % 2)]
    leading = [{**one, "correlation_texts": 0.75, "beyond_chance": one["unit"] < 2} for one in leading]
    leading[0] |= {"points": [[0.5, 1.25], [0.25, 0.0]], "tokens": 80, "active": 10}
    found = {"mean_score": 0.25, "thresholds": [0.2, 0.1], "units": [3, 9], "share": [0.025, 0.075], "leading": leading}
    found |= {"removed": [4, 12]}
    return found | {"changes": changes, "changes_se": errors, "control": control, "control_se": errors}


def dropped(rng: Any, name: str, n: int) -> dict[str, Any]:
    """Unit 3 serves one class, unit 4 both, and unit 5 nothing."""
    control = {"d": [0.0625, 0.0], "p": 0.9375}
    units = {"3": ([1.0, 0.0], 0.0, True), "4": ([0.5, 0.5], 0.707107, False), "5": ([0.0, None], None, False)}
    found = {"polysemanticity": 0.353553, "polysemanticity_se": 0.25, "affecting": 2, "largest_drop": 0.5}
    return {
        "block": 1,
        "target": "probe",
        "num_units": UNITS,
        "classes": ["sport", f"law {EVIL}"],
        "texts": [8, 8],
        "accuracy": [0.75, 0.5],
        "mean_accuracy": 0.625,
        "ablated": 3,
        **found,
        "beyond_chance": found | {"polysemanticity": 0.0, "polysemanticity_se": None, "units": 1},
        "control": found | {"polysemanticity": 0.9375, "largest_drop": 0.0625},
        "histogram": {"edges": [0.0, 1.0, 2.0], "units": [2, 0], "beyond_chance": [1, 0], "control": [3, 0]},
        "units": {
            unit: {"rate": 0.25, "coefficients": 9, "beyond_chance": beyond, "d": d, "p": p, "control": control}
            for unit, (d, p, beyond) in units.items()
        },
        "shared_left_out": 0,
    }


def limited(rng: Any, name: str, n: int) -> dict[str, Any]:
    """Of two shares in two modes; in one of them the draws do not differ."""
    outcome = {"ce_increase": 0.25, "ce_increase_se": 0.125, "normalized_mse": 0.5, "normalized_mse_se": float("inf")}
    outcome |= {"mass": 0.75, "l0": 4.5}
    random = {"ce_increase": 0.75 + n, "ce_increase_sd": 0.0625, "normalized_mse": 0.8, "normalized_mse_sd": 0.1}
    random |= {"mass": 0.5, "mass_sd": 0.01, "l0": 3.5, "l0_sd": 0.1, "draws": [0.6875 + n, 0.8125 + n]}
    half = {"share": 0.5, "units": 12.5, "active": 25.0} | outcome | {"random": random, "z": 8.0}
    points = [{"share": 1.0, "units": 25.0, "active": 25.0} | outcome, half]
    modes = {"token": {"full": outcome, "points": points}}
    modes |= {"global": {"full": outcome, "points": [points[0], half | {"z": None}]}}
    times = [{"share": share, "k": k, "ms": 1.25, "ms_sd": 0.25} for share, k in ((None, None), (0.5, 4))]
    return {"texts": 64, "tokens": 8000, "ce_base": 3.5, "block": 1, "modes": modes, "decoding": times}


def rewritten(rng: Any, name: str, n: int) -> dict[str, Any]:
    """Of three cells; blind rewriting adds nothing, the others move the target up and another cell down."""
    names = ("rewrite_score", "target_accuracy", "equality_of_opportunity", "std_bias", "max_min", "accuracy")
    ways: dict[str, Any] = {}
    for i, way in enumerate(("plain", "blind", "expert", "random", "contrast", "random_contrast")):
        values = dict.fromkeys(names, 0.125 * i) | {f"{key}_se": 0.0625 for key in names}
        ways[way] = values | {"cells": [0.5, 0.75, 0.25 + 0.125 * i], "cells_se": [0.0625, 0.03125, 0.125]}
        ways[way] |= {"strengths": [0.0] if way == "blind" else [0.125, 0.25]} if i else {}
    cells = [
        {"label": label, "group": group, "fitted": 3, "tuned": 3, "measured": 6}
        for label, group in (("law", "long"), ("law", f"short {EVIL}"), (f"sport {EVIL}", "long"))
    ]
    gains = dict.fromkeys(("gain", "gain_random", "gain_contrast", "gain_contrast_random"), 0.25 * n)
    apart = {"auc": 0.75, "auc_cells": [0.75, 0.625, None], "auc_least": 0.625, "nearest": 1}
    tried = [{"strength": 0.125, "target": 0.25, "others": 0.125}, {"strength": 0.25, "target": 0.5, "others": 0.75}]
    return {
        "block": 1,
        "num_units": UNITS,
        "token": {"text": f" the {EVIL}", "present": n % 2 == 0, "auc": 0.625},
        "cells": cells,
        "target": 2,
        "simplex": False,
        "ways": ways,
        **gains,
        **{f"{key}_se": 0.125 for key in gains},
        "best": 0.75,
        "tried": {way: tried for way in ways if way != "plain"},
        "separation": dict.fromkeys(("expert", "contrast"), apart)
        | {way: {"auc": 0.5} for way in ("random", "random_contrast")},
    }
