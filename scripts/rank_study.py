"""Can low-rank experts be faithful at all? What a model loses when its MLPs' own weights are cut to a lower rank.

    python scripts/rank_study.py MODEL [--layers 2 5] [--shares 0.1 ... 1] [--tokens 8192] [--json FILE]

Of each linear map of an MLP (encoder, a GLU's gate, decoder) the best approximation of rank k takes its place: the
truncated SVD (Eckart and Young 1936), with k the given share of the map's smaller side; biases stay. Blocks are cut one
by one, and all of them together as in figure 7 of muMoE (arXiv 2402.12550), there on images. Beside the increase of the
cross-entropy on held-out text stand

- *weights*: numbers in the two factors, k (rows + columns), as a share of the map's: above 100% nothing is saved;
- *energy*: share of the squared weights that is kept, ||W_k||^2 / ||W||^2;
- *random*: the increase with each map projected on a random subspace of the same rank on its smaller side. What the
  SVD keeps beyond that is due to the weights, and not to the model's indifference.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from goals import conclude
from torch import Tensor, nn

from mxd.artifacts.provenance import versions
from mxd.config import DataConfig
from mxd.evaluation.checkpoints import held_out_contexts
from mxd.evaluation.faithfulness import evaluate
from mxd.layers.config import ACTIVATIONS
from mxd.layers.neurons import mlp_hidden
from mxd.model.frozen import FrozenModel
from mxd.model.loading import load_frozen

SHARES = [n / 10 for n in range(1, 11)]
COSTS = 0.01
"""What half of the rank or more may cost, as a share of what the model loses without the MLP."""

Cut = Callable[[Tensor, int], Tensor]
"""A matrix and a rank -> a matrix of that rank."""


def rank_of(weight: Tensor, share: float) -> int:
    """Return the rank that is this share of a matrix's smaller side, 1 at least."""
    return max(1, round(share * min(weight.shape)))


def truncated(weight: Tensor, rank: int) -> Tensor:
    """Return the best approximation of a rank, by the spectral and by the Frobenius norm; float32 of float64."""
    u, s, v = torch.linalg.svd(weight.double(), full_matrices=False)
    return ((u[:, :rank] * s[:rank]) @ v[:rank]).float()


def projected(seed: int) -> Cut:
    """Return the control: a matrix projected on a random subspace of its smaller side, of the rank's dimension."""
    generator = torch.Generator().manual_seed(seed)

    def cut(weight: Tensor, rank: int) -> Tensor:
        w = weight.double()
        side = min(w.shape)
        basis = torch.linalg.qr(torch.randn(side, rank, generator=generator, dtype=torch.float64).to(w.device))[0]
        return ((w @ basis) @ basis.T if w.shape[1] == side else basis @ (basis.T @ w)).float()

    return cut


class LowRankMLP(nn.Module):
    """A base MLP whose linear maps are cut; ``weights`` and ``energy`` are what is kept of them, in parts of 1."""

    def __init__(self, model: FrozenModel, block: int, share: float, cut: Cut) -> None:
        super().__init__()
        own, activation = model.mlp_weights(block), model.mlp_shape(block).activation
        if activation is None:
            raise SystemExit(f"the activation function of block {block} of {model.source} is not known")
        maps = {"encoder": own.encoder, "encoder_glu": own.encoder_glu, "decoder": own.decoder}
        whole = {name: weight for name, weight in maps.items() if weight is not None}
        kept = {name: cut(weight, rank_of(weight, share)) for name, weight in whole.items()}
        self.hidden = mlp_hidden(ACTIVATIONS[activation], kept["encoder"], own.encoder_bias, kept.get("encoder_glu"))
        self.decoder, self.bias = kept["decoder"], own.decoder_bias
        self.ranks = {name: rank_of(weight, share) for name, weight in whole.items()}
        numbers = sum(weight.numel() for weight in whole.values())
        self.weights = sum(self.ranks[name] * sum(weight.shape) for name, weight in whole.items()) / numbers
        self.energy = float(
            sum(w.square().sum() for w in kept.values()) / sum(w.square().sum() for w in whole.values())
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for inputs [..., d_in]."""
        y = self.hidden(x) @ self.decoder
        return y if self.bias is None else y + self.bias


def study(
    model: FrozenModel, blocks: Sequence[int], shares: Sequence[float], text: DataConfig, tokens: int, seed: int
) -> list[dict[str, Any]]:
    """Measure every share of every block alone, and of all together.

    Args:
        model: the model.
        blocks: whose MLPs are cut.
        shares: ranks as shares of the smaller side.
        text: what is read.
        tokens: positions to read.
        seed: draws the order of the text, and the random subspaces.
    """
    contexts = held_out_contexts(model, text, seed)
    rows = []
    for share in shares:
        cuts = {"svd": truncated, "random": projected(seed)}
        mlps = {kind: {n: LowRankMLP(model, n, share, cut) for n in blocks} for kind, cut in cuts.items()}
        groups = {str(n): (n,) for n in blocks} | ({"all": tuple(blocks)} if len(blocks) > 1 else {})
        sets = {f"{kind} {name}": {n: mlps[kind][n] for n in group} for kind in cuts for name, group in groups.items()}
        found = evaluate(model, sets, contexts, tokens)
        for name, group in groups.items():
            one = [mlps["svd"][n] for n in group]
            row = {"blocks": name, "share": share, "ranks": one[0].ranks, "weights": one[0].weights}
            row |= {"energy": sum(mlp.energy for mlp in one) / len(one), "ce_base": found[f"svd {name}"]["ce_base"]}
            row |= {"ce_zero": found[f"svd {name}"]["ce_zero"]}
            for kind in cuts:
                result = found[f"{kind} {name}"]
                nmse = [block["normalized_mse"] for block in result["blocks"].values()]
                row[kind] = {key: result[key] for key in ("ce_increase", "ce_increase_se", "tokens")}
                row[kind]["normalized_mse"] = sum(nmse) / len(nmse)
            rows.append(row)
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows as a table, set by set."""
    print(f"{rows[0]['svd']['tokens']:,} tokens, CE of the base model {rows[0]['ce_base']:.4f}\n")
    print(
        "| blocks | share | rank | weights | energy | NMSE | CE increase | random, NMSE | random, CE increase | zero |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in dict.fromkeys(row["blocks"] for row in rows):
        for row in (row for row in rows if row["blocks"] == name):
            ranks = "/".join(map(str, dict.fromkeys(row["ranks"].values())))
            cells = [name, f"{row['share']:g}", ranks, f"{row['weights']:.0%}", f"{row['energy']:.1%}"]
            for kind in ("svd", "random"):
                one = row[kind]
                cells += [f"{one['normalized_mse']:.4f}", f"{one['ce_increase']:+.4f} ± {one['ce_increase_se']:.4f}"]
            print("| " + " | ".join([*cells, f"{row['ce_zero'] - row['ce_base']:+.4f}"]) + " |")


def missed(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return where half of the rank or more costs much, or a random subspace costs no more than the best."""
    lines = []
    for row in rows:
        where, cost = f"blocks {row['blocks']}, share {row['share']:g}", row["svd"]["ce_increase"]
        part = cost / (row["ce_zero"] - row["ce_base"])
        if row["share"] >= 0.5 and part > COSTS:
            lines.append(f"{where}: {part:.1%} of what the model loses without the MLP, at most {COSTS:.0%}")
        if row["share"] < 1 and cost >= row["random"]["ce_increase"]:
            lines.append(f"{where}: a random subspace costs no more")
    return lines


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a bundled name, a folder, a GGUF file or a Hub id")
    parser.add_argument("--layers", type=int, nargs="+", help="blocks; by default all")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--split", default="test")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help=f"exit 1 where half of the rank costs over {COSTS:.0%}%%")
    args = parser.parse_args()
    if not all(0 < share <= 1 for share in args.shares):
        parser.error("--shares are above 0 and at most 1")
    model = load_frozen(args.model)
    blocks = list(range(model.num_blocks)) if args.layers is None else args.layers
    text = DataConfig(source="bundled", split=args.split, context=args.context)
    rows = study(model, blocks, args.shares, text, args.tokens, args.seed)
    show(rows)
    if args.json:
        asked = {"model": args.model, "blocks": blocks, "split": args.split, "seed": args.seed, "context": args.context}
        args.json.write_text(json.dumps({"versions": versions(), "asked": asked, "rows": rows}, indent=2) + "\n")
    if args.check:
        conclude(missed(rows), f"half of the rank costs at most {COSTS:.0%}, and random subspaces more")


if __name__ == "__main__":
    main()
