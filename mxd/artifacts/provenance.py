"""What a layer replaces and how it was trained."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from mxd.common.errors import MxdError
from mxd.model.frozen import FrozenModel


class Provenance(BaseModel):
    """What a layer replaces and how it was trained."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    model: str
    """Base model: Hub id, path or bundled name."""
    revision: str | None
    """The base model's commit, where known."""
    block: int
    """Block number, from 0."""
    fingerprint: str
    """Hash of the replaced MLP's weights (``FrozenModel.fingerprint``)."""
    base_fingerprint: str = ""
    """Hash of the whole base model (``FrozenModel.base_fingerprint``); "" where it was not recorded."""
    site: str = "mlp"
    """The module whose input and output were matched."""
    input_convention: str = "input of the mlp module: after the layer norm with its affine part; nothing folded"
    """Which tensor the layer reads."""
    model_dtype: str = "float32"
    """Dtype the base model ran in."""
    excluded_ids: tuple[int, ...] = ()
    """Tokens left out in training; a splice still replaces the MLP there."""
    data: dict[str, Any] = {}
    """The training text: source, split, column, context, BOS."""
    text_hash: str = ""
    """Hash of the text's token ids, of a stream up to where training ended; of a mixed cache, of its shards."""
    training: dict[str, Any] = {}
    """The recipe: steps, learning rate, warm-up, batch."""
    below: dict[NonNegativeInt, Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]] = {}
    """Block number -> SHA-256 of the layer's tensors that was spliced in there while this one was trained
    (``training.inputs: spliced``)."""
    tokens: int = 0
    """Token activations trained on."""
    seed: int = 0
    """Seed of the run."""
    config_hash: str = ""
    """Hash of the run's config without its name and folder."""
    tuning: tuple[dict[str, Any], ...] = ()
    """How the layer was tuned together with others, one time after another: loss, tokens, text, and ``members``: the
    hashes of all their tensors, by block."""
    versions: dict[str, str] = {}
    """Versions of mxd, torch, transformers, safetensors."""

    @property
    def recorded_in(self) -> str:
        """What the base model computed in while activations were recorded."""
        return f"{self.model_dtype}, under autocast to bfloat16" if self.data.get("autocast") else self.model_dtype

    @classmethod
    def of(cls, model: FrozenModel, block: int, **known: Any) -> "Provenance":
        """Return the provenance of a layer for a block of a model.

        Args:
            model: the base model.
            block: the block whose MLP the layer replaces.
            known: what else is known of its training: ``data``, ``tokens``, ``seed`` and other fields.

        Raises:
            MxdError: there is no such block or field, or a field has a wrong value.
        """
        fields: dict[str, Any] = {
            "model": model.source,
            "revision": model.revision,
            "block": block,
            "fingerprint": model.fingerprint(block),
            "model_dtype": model.dtype,
            "versions": versions(),
        }
        if "base_fingerprint" not in known:  # which takes a look at every weight of the model
            fields["base_fingerprint"] = model.base_fingerprint()
        try:
            return cls(**{**known, **fields})
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            raise MxdError(f"provenance: {'.'.join(map(str, problem['loc']))}: {problem['msg']}.") from error


def versions() -> dict[str, str]:
    """Return the versions of the packages that a result depends on."""
    from importlib.metadata import version

    return {name: version(name) for name in ("mxd", "torch", "transformers", "safetensors")}
