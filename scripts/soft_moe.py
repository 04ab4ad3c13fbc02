"""What "Implicit bias in Soft MoE" found, on problems of a few seconds: its theorem, its norm regression, its subsets.

    python scripts/soft_moe.py [--parts theorem norm digits] [--seeds 3] [--quick] [--json FILE] [--check]

A Soft MoE layer mixes all tokens of an input, later ones into earlier ones, so it cannot take the place of an MLP in a
causal model, and is here only: of tokens ``X [m, d]`` with logits ``L = X Phi [m, n]``,

    out = Comb [f_j((Disp^T X)_j)]_j,   Disp = softmax of L over tokens,   Comb = softmax of L over experts

*theorem* (1 of the paper, section 3): with one expert two inputs whose norms lie far apart become the same to the
expert. *norm* (appendix B): regression of ||X||_2, with as many expert parameters for any number of experts n.
*digits* (sections 4.2 to 4.4, on scikit-learn's digits in place of MNIST): accuracy with k of n experts for each image:
the best subset, found by trying all with the label at hand; algorithm 1, the k experts with the largest sums of Comb;
random ones, 10 draws. A search that knows the label also finds subsets for wrong labels: how often it does so for a
wrong label drawn at random stands beside it. Expert layers have no biases, so counts are as printed: 20 d^2, and 8 d^2.

`--check` names where the paper's findings do not come out: with larger inputs the expert sees a smaller difference;
more experts have a lower error; algorithm 1 is above random subsets by two of their standard deviations; and a subset
for a wrong label is found for at most half as many images as one for the right label.
"""

import argparse
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from goals import conclude
from torch import Tensor, nn

from mxd.artifacts.provenance import versions
from mxd.common.progress import progress

DRAWS = 10
SEARCHED = 16
"""The most experts whose subsets are all tried."""
NOTHING = 1e-9
"""A difference that is left to rounding."""
PATCH = 4
"""Pixels of a patch's side: an image of 8 x 8 is four tokens of 16."""
PUBLISHED = {
    "best": {4: 0.9469, 8: 0.9990, 16: 1.0},
    "random": {4: 0.4657, 8: 0.5195, 16: 0.5894},
    "kept": {
        2: {2: 0.781, 4: 0.803, 8: 0.885, 16: 0.942, 32: 0.966, 64: 0.970},
        4: {4: 0.477, 8: 0.608, 16: 0.762, 32: 0.864, 64: 0.884},
        8: {8: 0.403, 16: 0.519, 32: 0.716, 64: 0.762},
    },
}
"""On MNIST: tables 1 (k = n/4) and 10b, the algorithm's accuracy over that of all experts, by n/k and n."""


class SoftMoE(nn.Module):
    """``n`` experts with one hidden ReLU layer each, one slot for each expert."""

    def __init__(self, d: int, hidden: int, n: int) -> None:
        super().__init__()
        self.phi = nn.Parameter(torch.randn(d, n) / math.sqrt(d))
        self.encoder = nn.Parameter(torch.empty(n, d, hidden).uniform_(-1, 1) / math.sqrt(d))
        self.decoder = nn.Parameter(torch.empty(n, hidden, d).uniform_(-1, 1) / math.sqrt(hidden))

    def experts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``Comb`` [batch, m, n] and what the experts return [batch, n, d] for inputs [batch, m, d]."""
        logits = x @ self.phi
        slots = logits.softmax(-2).mT @ x
        hidden = torch.einsum("bnd,ndh->bnh", slots, self.encoder).relu()
        return logits.softmax(-1), torch.einsum("bnh,nhd->bnd", hidden, self.decoder)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output [batch, m, d]."""
        combine, out = self.experts(x)
        return combine @ out


def expert_input(x: Tensor, phi: Tensor) -> Tensor:
    """Return ``Disp^T X`` [n, d]: all that experts see of an input [m, d]."""
    return (x @ phi).softmax(0).T @ x


def theorem(sizes: tuple[float, ...] = (3, 10, 30, 100), m: int = 3, d: int = 4) -> list[dict[str, float]]:
    """Return how far the proof's inputs A and B of size ``a`` lie apart, in norm and for the one expert.

    For Phi_1 > 0: A = (a, -a, 0 ...), B = (a, 0, 0 ...) in the first column. For Phi_1 = 0: A = (a/2, a/2, 0 ...).
    """
    rows = []
    for first in (1.0, 0.0):
        phi = torch.zeros(d, 1, dtype=torch.float64)
        phi[0] = first
        for a in sizes:
            one, other = torch.zeros(2, m, d, dtype=torch.float64)
            one[:2, 0] = torch.tensor([a, -a] if first else [a / 2, a / 2])
            other[0, 0] = a
            apart = float((expert_input(one, phi) - expert_input(other, phi)).norm())
            rows.append({"phi_1": first, "a": a, "norms": abs(float(one.norm() - other.norm())), "expert": apart})
    return rows


def norm_regression(m: int, d: int, n: int, seed: int, steps: int, batch: int) -> dict[str, Any]:
    """Learn ``||X||_2`` of X [m, d] ~ N(0, 5): the mean squared error at first, halfway, and over the last tenth."""
    torch.manual_seed(seed)
    layer = SoftMoE(d, 10 * d // n, n)
    optimizer, losses = torch.optim.Adam(layer.parameters(), lr=1e-3), []
    for _ in range(steps):
        x = math.sqrt(5) * torch.randn(batch, m, d)
        loss = F.mse_loss(layer(x).sum((1, 2)), torch.linalg.vector_norm(x, dim=(1, 2)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    last = float(np.mean(losses[-max(1, steps // 10) :]))
    return {"first": losses[0], "half": losses[steps // 2], "last": last}


def digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return images as tokens [images, 4, 16] with pixels in 0 ... 1, and labels: 1,437 to train on, 360 held out."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    side = 8 // PATCH
    patches = images.reshape(-1, side, PATCH, side, PATCH).transpose(0, 1, 3, 2, 4).reshape(len(labels), side**2, -1)
    x, y = torch.from_numpy(patches[order] / 16).float(), torch.from_numpy(labels[order]).long()
    train = len(labels) * 4 // 5
    return (x[:train], y[:train]), (x[train:], y[train:])


def classifier(n: int, seed: int, steps: int, x: Tensor, y: Tensor) -> tuple[SoftMoE, nn.Linear]:
    """Train a Soft MoE of n experts and a linear head: Adam, 1e-3, batches of 256, as in the paper's appendix D.1."""
    torch.manual_seed(seed)
    d = x.shape[-1]
    layer, head = SoftMoE(d, 4 * d // n, n), nn.Linear(x.shape[1] * d, 10)
    optimizer = torch.optim.Adam([*layer.parameters(), *head.parameters()], lr=1e-3)
    for _ in range(steps):
        some = torch.randint(len(x), (256,))
        loss = F.cross_entropy(head(layer(x[some]).flatten(1)), y[some])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return layer, head


@torch.no_grad()
def subsets(layer: SoftMoE, head: nn.Linear, x: Tensor, y: Tensor, ks: list[int], seed: int) -> dict[str, Any]:
    """Return the accuracy with all experts, and with k of them, by k. Nothing is normalised anew.

    The logits are a sum over experts, so each expert's part of them is computed once.
    """
    combine, out = layer.experts(x)
    weight = head.weight.view(10, x.shape[1], -1)
    parts = torch.einsum("bmn,bnd,cmd->bnc", combine, out, weight)
    sums, rng = combine.sum(1), np.random.default_rng(seed)
    wrong = (y + torch.from_numpy(rng.integers(1, 10, len(y)))) % 10

    def right(kept: Tensor) -> float:
        predicted = ((kept.float().unsqueeze(-1) * parts).sum(1) + head.bias).argmax(-1)
        return float((predicted == y).float().mean())

    n = parts.shape[1]
    top_half = sums.sort(descending=True).values[:, : n // 2].sum(1) / sums.sum(1)
    found: dict[str, Any] = {"all": right(torch.ones(len(x), n)), "mass_of_half": float(top_half.mean()), "k": {}}
    for k in ks:
        places = torch.from_numpy(rng.random((DRAWS, len(x), n))).argsort(-1).argsort(-1)
        draws = [right(place < k) for place in places]
        mean, sd = float(np.mean(draws)), float(np.std(draws, ddof=1))
        chosen = right(sums.argsort(-1, descending=True).argsort(-1) < k)
        row = {"algorithm": chosen, "random": mean, "random_sd": sd, "kept": chosen / found["all"]}
        row["z"] = (chosen - mean) / sd if sd else None
        if n <= SEARCHED:
            tried = torch.tensor(list(itertools.combinations(range(n), k)))
            masks = torch.zeros(len(tried), n).scatter_(1, tried, 1)
            predicted = (torch.einsum("sn,bnc->bsc", masks, parts) + head.bias).argmax(-1)
            for name, label in (("best", y), ("best_wrong", wrong)):
                row[name] = float((predicted == label.unsqueeze(1)).any(1).float().mean())
        found["k"][str(k)] = row
    return found


def missed(found: dict[str, Any]) -> list[str]:
    """Return where a finding of the paper does not come out."""
    lines = []
    for one, other in itertools.pairwise(found.get("theorem", [])):
        if one["phi_1"] == other["phi_1"] and not other["expert"] < max(one["expert"], NOTHING):
            lines.append(f"theorem, Phi_1 = {one['phi_1']:g}: no smaller difference at a = {other['a']:g}")
    for one, other in itertools.pairwise(found.get("norm", [])):
        few, more = (np.mean([run["last"] for run in row["runs"]]) for row in (one, other))
        if one["m"] == other["m"] and not more < few:
            where = f"norm, {one['m']} x {one['d']}"
            lines.append(f"{where}: error {more:.3f} of {other['n']} experts, {few:.3f} of {one['n']}")
    for row in found.get("digits", []):
        for k in row["runs"][0]["k"]:
            mean = means(row["runs"], k)
            where = f"digits, {k} of {row['n']}"
            if "z" in mean and mean["z"] < 2:
                lines.append(f"{where}: algorithm 1 is {mean['z']:+.1f} deviations above random subsets")
            if "best" in mean and mean["best_wrong"] > mean["best"] / 2:
                lines.append(f"{where}: a subset for a wrong label is found in {mean['best_wrong']:.0%} of images")
    return lines


def means(runs: list[dict[str, Any]], k: str) -> dict[str, float]:
    """Return the means over the seeds of what all of them have."""
    every = [run["k"][k] for run in runs]
    values = {key: [one[key] for one in every] for key in every[0]}
    return {key: float(np.mean(of_key)) for key, of_key in values.items() if None not in of_key}


def show_theorem(rows: list[dict[str, float]]) -> None:
    """Print the inputs' distances."""
    print("| Phi_1 | a | norms apart | expert inputs apart |\n|---|---|---|---|")
    for row in rows:
        print(f"| {row['phi_1']:g} | {row['a']:g} | {row['norms']:.3f} | {row['expert']:.2e} |")


def show_norm(rows: list[dict[str, Any]]) -> None:
    """Print errors: means over seeds, with the range of the last."""
    print("\n| tokens | n | error at first | halfway | over the last tenth | a constant |\n|---|---|---|---|---|---|")
    for row in rows:
        means = {key: np.mean([run[key] for run in row["runs"]]) for key in ("first", "half", "last")}
        last = [run["last"] for run in row["runs"]]
        print(
            f"| {row['m']} x {row['d']} | {row['n']} | {means['first']:.3f} | {means['half']:.3f} | "
            f"{means['last']:.3f} ({min(last):.3f} to {max(last):.3f}) | {row['constant']:.3f} |"
        )


def show_digits(rows: list[dict[str, Any]]) -> None:
    """Print accuracies: means over seeds, those of MNIST in brackets."""
    head = ("n", "k", "all", "best", "best for a wrong label", "algorithm", "of all", "random", "z", "mass of half")
    print("\n| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for row in rows:
        n, runs = row["n"], row["runs"]
        for k in runs[0]["k"]:
            mean = means(runs, k)
            share = n // int(k)
            best = [
                f"{mean['best']:.1%}" + _paper("best", n, share) if "best" in mean else "-",
                f"{mean['best_wrong']:.1%}" if "best_wrong" in mean else "-",
            ]
            cells = (
                *(str(n), k, f"{np.mean([run['all'] for run in runs]):.1%}", *best, f"{mean['algorithm']:.1%}"),
                f"{mean['kept']:.1%}" + _brackets(PUBLISHED["kept"].get(share, {}).get(n)),
                f"{mean['random']:.1%} ± {mean['random_sd']:.1%}" + _paper("random", n, share),
                f"{mean['z']:+.1f}" if "z" in mean else "-",
                f"{np.mean([run['mass_of_half'] for run in runs]):.1%}",
            )
            print("| " + " | ".join(cells) + " |")


def _paper(what: str, n: int, share: int) -> str:
    return _brackets(PUBLISHED[what].get(n)) if share == 4 else ""


def _brackets(value: Any) -> str:
    return "" if value is None else f" ({value:.1%})"


def constant_error(draws: int = 1_000_000) -> float:
    """Return the variance of the norm of a draw of N(0, 5 I) in R^10: the error of the best constant."""
    return float((math.sqrt(5) * torch.randn(draws, 10, generator=torch.Generator().manual_seed(0))).norm(dim=1).var())


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("theorem", "norm", "digits")
    parser.add_argument("--parts", nargs="*", default=parts, choices=parts)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it runs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help="exit 1 and name the findings that do not come out")
    args = parser.parse_args()
    found: dict[str, Any] = {"versions": versions(), "seeds": args.seeds, "published": PUBLISHED}
    if "theorem" in args.parts:
        found["theorem"] = theorem()
        show_theorem(found["theorem"])
    if "norm" in args.parts:
        steps, batch = (20, 100) if args.quick else (500, 10_000)
        cases = list(itertools.product(((2, 5), (5, 2)), (1, 2, 5, 10)))
        constant = constant_error(10_000 if args.quick else 1_000_000)
        found["norm"] = []
        with progress("norm regression", len(cases) * args.seeds, "models") as advance:
            for (m, d), n in cases:
                runs = []
                for seed in range(args.seeds):
                    runs.append(norm_regression(m, d, n, seed, steps, batch))
                    advance(1)
                found["norm"].append({"m": m, "d": d, "n": n, "steps": steps, "constant": constant, "runs": runs})
        show_norm(found["norm"])
    if "digits" in args.parts:
        (x, y), held_out = digits()
        counts, steps = ((4, 8), 20) if args.quick else ((2, 4, 8, 16, 32, 64), 2000)
        found["digits"] = []
        with progress("digits", len(counts) * args.seeds, "models") as advance:
            for n in counts:
                runs = []
                for seed in range(args.seeds):
                    trained = classifier(n, seed, steps, x, y)
                    runs.append(subsets(*trained, *held_out, [n // q for q in (2, 4, 8) if n >= q], seed))
                    advance(1)
                found["digits"].append({"n": n, "steps": steps, "runs": runs})
        show_digits(found["digits"])
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    if args.check:
        conclude(missed(found), "every finding comes out")


if __name__ == "__main__":
    main()
