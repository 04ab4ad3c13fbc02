"""The public names of mxd and the files that define them: type checkers read this list, and so does ``__init__.py``."""

from mxd.api import compare, evaluate, train, tune
from mxd.artifacts.checkpoint import Trained, from_pretrained, load_layer, load_layers, save_layer
from mxd.artifacts.provenance import Provenance
from mxd.artifacts.run import Run
from mxd.artifacts.transfer import pull, push
from mxd.common.errors import MxdError, MxdWarning
from mxd.common.stop import Interrupted
from mxd.config import DataConfig, ModelConfig, RunConfig, SizingConfig, TrainingConfig, load_config
from mxd.evaluation.ablation import answer as ablation
from mxd.evaluation.checkpoints import Subject, open_checkpoints, save_results
from mxd.evaluation.explaining import answer as explaining
from mxd.evaluation.faithfulness import answer as faithfulness
from mxd.evaluation.generation import answer as generation
from mxd.evaluation.masking import answer as masking
from mxd.evaluation.probing import answer as probing
from mxd.evaluation.purging import answer as purging
from mxd.evaluation.results import Faithfulness, Measured
from mxd.evaluation.rewrite import answer as rewrite
from mxd.evaluation.steering import answer as steering
from mxd.evaluation.structure import answer as structure
from mxd.evaluation.subset import answer as subset
from mxd.evaluation.toxicity import answer as toxicity
from mxd.evaluation.units import answer as units
from mxd.evaluation.whole import answer as whole
from mxd.layers import LAYERS, Code, MLPShape, ReplacementConfig, ReplacementLayer, size
from mxd.layers.linear import LinearConfig, LowRankConfig
from mxd.layers.moe import MoEConfig
from mxd.layers.molt import MOLTConfig
from mxd.layers.monet import MonetConfig
from mxd.layers.mov import MoVConfig
from mxd.layers.mumoe import CPMuMoEConfig
from mxd.layers.mumoe_block import MuMoEBlockConfig
from mxd.layers.mxd import MxDConfig
from mxd.layers.peer import PEERConfig
from mxd.layers.sae import TopKSAEConfig
from mxd.layers.smoe import SMoEConfig
from mxd.layers.sparsity.always import AlwaysConfig
from mxd.layers.sparsity.batch_topk import BatchTopKConfig
from mxd.layers.sparsity.group_max import GroupMaxConfig
from mxd.layers.sparsity.jumprelu import JumpReLUConfig
from mxd.layers.sparsity.l1 import ReLUL1Config
from mxd.layers.sparsity.levels import LevelsConfig
from mxd.layers.sparsity.product import PairTopKConfig, ProductQuantileConfig, ProductTopKConfig
from mxd.layers.sparsity.simplex import EntmaxConfig, SoftmaxConfig
from mxd.layers.sparsity.topk import RandomKConfig, TopKConfig
from mxd.layers.sparsity.topk_softmax import TopKSoftmaxConfig
from mxd.layers.tensor_ring import TRMuMoEConfig
from mxd.layers.transcoder import TranscoderConfig
from mxd.layers.tucker import TuckerMuMoEConfig
from mxd.model.frozen import FrozenModel
from mxd.model.loading import load_frozen
from mxd.questions import (
    AblationConfig,
    EvaluationConfig,
    ExplainingConfig,
    FaithfulnessConfig,
    GenerationConfig,
    MaskingConfig,
    ProbingConfig,
    PurgingConfig,
    RewriteConfig,
    SteeringConfig,
    StructureConfig,
    SubsetConfig,
    ToxicityConfig,
    UnitsConfig,
    WholeConfig,
)
from mxd.report.page import write_report
from mxd.share.export import export_model
from mxd.splice import splice, spliced
from mxd.tuning import TuneConfig

__version__: str

__all__ = [
    "LAYERS",
    "AblationConfig",
    "AlwaysConfig",
    "BatchTopKConfig",
    "CPMuMoEConfig",
    "Code",
    "DataConfig",
    "EntmaxConfig",
    "EvaluationConfig",
    "ExplainingConfig",
    "Faithfulness",
    "FaithfulnessConfig",
    "FrozenModel",
    "GenerationConfig",
    "GroupMaxConfig",
    "Interrupted",
    "JumpReLUConfig",
    "LevelsConfig",
    "LinearConfig",
    "LowRankConfig",
    "MLPShape",
    "MOLTConfig",
    "MaskingConfig",
    "Measured",
    "MoEConfig",
    "MoVConfig",
    "ModelConfig",
    "MonetConfig",
    "MuMoEBlockConfig",
    "MxDConfig",
    "MxdError",
    "MxdWarning",
    "PEERConfig",
    "PairTopKConfig",
    "ProbingConfig",
    "ProductQuantileConfig",
    "ProductTopKConfig",
    "Provenance",
    "PurgingConfig",
    "RandomKConfig",
    "ReLUL1Config",
    "ReplacementConfig",
    "ReplacementLayer",
    "RewriteConfig",
    "Run",
    "RunConfig",
    "SMoEConfig",
    "SizingConfig",
    "SoftmaxConfig",
    "SteeringConfig",
    "StructureConfig",
    "Subject",
    "SubsetConfig",
    "TRMuMoEConfig",
    "TopKConfig",
    "TopKSAEConfig",
    "TopKSoftmaxConfig",
    "ToxicityConfig",
    "Trained",
    "TrainingConfig",
    "TranscoderConfig",
    "TuckerMuMoEConfig",
    "TuneConfig",
    "UnitsConfig",
    "WholeConfig",
    "__version__",
    "ablation",
    "compare",
    "evaluate",
    "explaining",
    "export_model",
    "faithfulness",
    "from_pretrained",
    "generation",
    "load_config",
    "load_frozen",
    "load_layer",
    "load_layers",
    "masking",
    "open_checkpoints",
    "probing",
    "pull",
    "purging",
    "push",
    "rewrite",
    "save_layer",
    "save_results",
    "size",
    "splice",
    "spliced",
    "steering",
    "structure",
    "subset",
    "toxicity",
    "train",
    "tune",
    "units",
    "whole",
    "write_report",
]
