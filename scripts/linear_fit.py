"""How much of an MLP a linear map explains, which a skip connection can learn and a replacement has to beat.

    python scripts/linear_fit.py tiny-gpt2 --blocks 0 2

Fits an affine map from the MLP's input to its output on training text, and reports FVU and NMSE on held-out text.
"""

import argparse

import torch
from torch import Tensor

from mxd.data.activations import activation_batches
from mxd.data.contexts import special_ids, token_contexts
from mxd.data.text import documents
from mxd.layers.losses import normalized_mse
from mxd.model.frozen import FrozenModel
from mxd.model.loading import load_frozen


def activations(model: FrozenModel, block: int, split: str, tokens: int) -> tuple[Tensor, Tensor]:
    """Return MLP inputs and outputs of ``tokens`` tokens of a bundled split, special tokens left out."""
    contexts = token_contexts(documents("bundled", split), model.tokenizer)
    excluded = special_ids(model.tokenizer)
    x, y = next(activation_batches(model, [block], contexts, tokens, tokens, excluded)).sites[block]
    return x.double(), y.double()


def main() -> None:
    """Parse, fit, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--blocks", type=int, nargs="+", default=[0])
    parser.add_argument("--tokens", type=int, default=40_000)
    args = parser.parse_args()
    model = load_frozen(args.model)
    for block in args.blocks:
        x, y = activations(model, block, "train", args.tokens)
        held_x, held_y = activations(model, block, "test", args.tokens // 5)
        mean_x, mean_y = x.mean(0), y.mean(0)
        weight = torch.linalg.lstsq(x - mean_x, y - mean_y).solution
        fit = (held_x - mean_x) @ weight + mean_y
        fvu = (held_y - fit).square().sum() / (held_y - held_y.mean(0)).square().sum()
        print(f"{args.model} block {block}: FVU {fvu:.3f}, NMSE {normalized_mse(fit, held_y):.4f}")


if __name__ == "__main__":
    main()
