"""What a tuning needs: its passes cost on the meta device what they cost elsewhere, and the sums are right."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from command import mxd
from runs import small
from variants import SPARSITIES, VARIANTS, kinds

from mxd.common.errors import MxdError
from mxd.config import RunConfig
from mxd.layers import LAYERS, parse_layer
from mxd.model.frozen import FrozenModel
from mxd.model.loading import load_frozen, outline
from mxd.planning import memory as memory_module
from mxd.planning.memory import check_memory
from mxd.planning.plan import peak
from mxd.planning.process import base_process
from mxd.planning.time import Speeds, step_times
from mxd.planning.tuning import LOWER, _costs, _head, as_tuning, plan_tuning
from mxd.training.tune import tune
from mxd.tuning import TuneConfig

CPU = torch.device("cpu")
SIZE = (2, 24)


def to_tune(tmp_path: Path, **how) -> RunConfig:
    """Two sets at two blocks."""
    kinds = [{"method": "mxd", "sparsity": {"kind": "topk", "k": 8}}, {"method": "transcoder", "sparsity": topk(4)}]
    tune = {"tokens": 2048, "batch_tokens": 512, "log_every": 2} | how
    return as_tuning(small(tmp_path, blocks=[1, 4], data={"context": 64}, replacements=kinds, tune=tune))


def topk(k: int) -> dict:
    return {"kind": "topk", "k": k}


def at(*blocks: int, shape: FrozenModel, **fields) -> list:
    """Layers of one kind at some blocks."""
    layer = parse_layer({"num_units": 64, "sparsity": topk(8), **fields})
    return [(n, layer.resolve(shape.mlp_shape(n)).with_defaults()) for n in blocks]


@pytest.fixture(scope="module")
def shape() -> FrozenModel:
    found = outline("tiny-gpt2")
    found.module.float().set_attn_implementation("eager")  # whose products are counted on every device
    return found


@pytest.fixture(scope="module")
def base() -> FrozenModel:
    found = load_frozen("tiny-gpt2")
    found.module.set_attn_implementation("eager")
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    "how", [{}, {"loss": "ce", "nmse": 1.0, "checkpointing": True, "accumulation": 2}], ids=lambda how: str(len(how))
)
def test_passes_cost_on_the_meta_device_what_they_cost_on_the_cpu(
    shape: FrozenModel, base: FrozenModel, how: dict
) -> None:
    found = []
    for model in (shape, base):
        sets = [at(1, 4, shape=shape, method="mxd"), at(0, shape=shape, method="transcoder")]
        found.append(_costs(model, CPU, TuneConfig(**how), sets, SIZE))
    (forward, sets), (forward_here, sets_here) = found
    assert forward.flops == forward_here.flops and (forward.flops > 0) == (how.get("loss") != "ce")
    for there, here in zip(sets, sets_here, strict=True):
        assert there.flops == here.flops > 0
        assert there.peak == pytest.approx(here.peak, rel=0.02)
        assert there.moved == pytest.approx(here.moved, rel=0.02)


@pytest.mark.long
def test_what_an_option_costs(shape: FrozenModel) -> None:
    """Products in closed form: those of the logits, and of what is run again or beside."""
    own, (contexts, seq) = [at(1, 4, shape=shape, method="mxd")], SIZE
    plain, ce, held, again = (
        _costs(shape, CPU, TuneConfig(**{"nmse": 0.0} | how), own, SIZE)
        for how in ({}, {"loss": "ce"}, {"nmse": 1.0}, {"checkpointing": True})
    )
    logits = 2 * contexts * (seq - 1) * 128 * 4096
    assert plain[1][0].flops - ce[1][0].flops == logits  # the base model's
    mlps = 2 * 2 * (2 * contexts * seq * 128 * 512)  # two blocks, two maps
    assert held[1][0].flops - plain[1][0].flops == mlps + mlps // 2  # backward only from the upper one to the lower
    assert again[1][0].flops > plain[1][0].flops and again[1][0].peak < plain[1][0].peak
    longer = _costs(shape, CPU, TuneConfig(nmse=0), own, (2 * contexts, seq))
    assert longer[1][0].flops == pytest.approx(2 * plain[1][0].flops, rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize("method", LAYERS)
def test_every_layer_can_be_planned(shape: FrozenModel, method: str) -> None:
    name = next(name for name, fields in VARIANTS.items() if fields["method"] == method)
    (layer,) = at(2, shape=shape, **VARIANTS[name], sparsity=SPARSITIES[kinds(name)[0]])
    _, (cost,) = _costs(shape, CPU, TuneConfig(nmse=1.0), [[layer]], (1, 8))
    assert cost.peak > 4 * layer[1].num_params


def test_a_model_that_changes_its_logits_is_planned_with_all_of_them_at_once() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    heads = []
    for cap in (0.05, None):
        config = Gemma2Config(**sizes, num_attention_heads=2, num_key_value_heads=1, final_logit_softcapping=cap)
        with torch.device("meta"):
            module = Gemma2ForCausalLM(config).eval()
        model = FrozenModel(module, None, "gemma", None, module.model.layers)
        heads.append(_head(model, torch.zeros(1, 4, dtype=torch.int64, device="meta")) is module.lm_head)
    assert heads == [False, True]


@pytest.mark.long
def test_what_is_metered_is_what_tuning_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function, the contexts, the comparison and the loss."""
    from mxd.joint import joint_backward

    config = to_tune(tmp_path, accumulation=2, loss="kl", nmse=0.0)
    calls: dict[str, list] = {"mxd.planning.tuning": [], "mxd.training.tuning": []}
    for name, seen in calls.items():

        def noted(base, unembedding, splice, modules, ids, counted, how, shares, hidden, seen=seen):
            compared = [module.compare for module in modules]
            held = [module.held for module in modules]
            blocks = list(splice.layers), [module.layer.config for module in modules]
            seen.append((blocks, compared, held, ids.shape, counted.shape, how, hidden.shape))
            return joint_backward(base, unembedding, splice, modules, ids, counted, how, shares, hidden)

        monkeypatch.setattr(f"{name}.joint_backward", noted)
    folder = untrained(tmp_path, config)
    tune([folder], config.tune, "t", str(tmp_path))
    metered, run = ({repr(call) for call in seen} for seen in calls.values())
    assert metered == run and len(run) == 4  # two sets, at steps that are measured and others


def untrained(tmp_path: Path, config: RunConfig) -> Path:
    """Layers of a run as they are drawn."""
    from mxd.artifacts.checkpoint import save_layer
    from mxd.artifacts.provenance import Provenance
    from mxd.planning.layout import plan_layers

    base, folder = load_frozen("tiny-gpt2"), tmp_path / "untrained"
    for name, (block, complete) in plan_layers(config, base).items():
        layer = complete.build(block)
        if complete.bos_constant:
            layer.store_bos(torch.ones(128), torch.ones(128))
        about = {"model": base.source, "revision": None, "block": block, "fingerprint": base.fingerprint(block)}
        save_layer(folder / name, layer, Provenance(**about, data=config.data.model_dump()))
    return folder


@pytest.mark.long
def test_memory_and_work_are_the_sums_of_their_parts(tmp_path: Path) -> None:
    config = to_tune(tmp_path, accumulation=2)
    plan = plan_tuning(config)
    assert plan.sets == {"mxd-k8": ("block1-mxd-k8", "block4-mxd-k8"), "tc-k4": ("block1-tc-k4", "block4-tc-k4")}
    found = plan.memory["tuning"]
    assert (found["replacements"], found["gradients"], found["moments"]) == tuple(n * plan.params for n in (4, 4, 8))
    assert found["base model"] == 4 * sum(p.numel() for p in outline("tiny-gpt2").module.parameters())
    assert plan.disk["layers"] == 4 * plan.params and plan.disk["3 states"] > 3 * 12 * plan.params
    layers = [[plan.replacements[name] for name in own] for own in plan.sets.values()]
    base, costs = _costs(base_process(config).shape, CPU, config.tune, layers, (4, 64))
    sizes = [4 * sum(layer.num_params for _, layer in own) for own in layers]
    assert found["largest step"] == max(cost.peak - size for cost, size in zip(costs, sizes, strict=True))
    assert plan.work["base model"].flops * 256 == pytest.approx(base.flops)
    for name, cost, size in zip(plan.sets, costs, sizes, strict=True):
        assert plan.work[name].flops * 256 == pytest.approx(cost.flops)
        assert plan.work[name].fixed * 512 == pytest.approx(7 * size)
    whole = plan_tuning(to_tune(tmp_path))
    assert whole.memory["tuning"]["largest step"] > 1.5 * found["largest step"]
    speeds = Speeds(products=1e9, rounded=4e9, base=2e9, copies=1e8, network=1e7)
    alone, two = (step_times(plan_tuning(config, world=world), 512, speeds) for world in (1, 2))
    assert two.base == pytest.approx(alone.base / 2, rel=0.1) and two.exchange == alone.gradients == 0
    assert two.gradients == pytest.approx(4 * plan.params / 1e7) and two.optimizer == pytest.approx(alone.optimizer)


@pytest.mark.long
def test_layers_that_are_there_are_planned_as_they_are(tmp_path: Path) -> None:
    """Those of a tuning's own config, too, though their blocks and kinds are no product."""
    config = to_tune(tmp_path)
    folder = untrained(tmp_path, config)
    some = [str(folder / name) for name in ("block1-mxd-k8", "block4-tc-k4")]
    tuned = config.model_copy(update={"tune": config.tune.model_copy(update={"of": tuple(some)})})
    plan = plan_tuning(tuned)
    assert plan.sets == {"together": ("block1-mxd-k8", "block4-tc-k4")} and as_tuning(tuned) is tuned
    assert set(plan_tuning(config).replacements) == {path.name for path in folder.iterdir()}


@pytest.mark.long
def test_what_cannot_fit_is_refused_with_what_to_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = to_tune(tmp_path)
    plan = plan_tuning(config)
    monkeypatch.setattr(memory_module, "free_memory", lambda device: peak(plan.memory)[1] - 1)
    said = r"iB are free on cpu: .*largest step \d.*\(while tuning\)\. Raise accumulation \(--accumulation\), set check"
    with pytest.raises(MxdError, match=said):
        check_memory(config, plan, LOWER)
    folder = untrained(tmp_path, config)
    monkeypatch.setattr(memory_module, "free_memory", lambda device: 2**20)
    with pytest.raises(MxdError, match=r"Raise accumulation"):
        tune([folder], config.tune, "t", str(tmp_path))
    assert not (tmp_path / "t" / "config.yaml").exists()  # and it can begin anew there


@pytest.mark.long
def test_the_command_shows_training_and_tuning(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    config, file = tmp_path / "run.yaml", tmp_path / "plan.json"
    fields = small(tmp_path).model_dump(mode="json")
    config.write_text(yaml.safe_dump({name: value for name, value in fields.items() if name != "tune"}))
    code, out, _ = mxd(capsys, "plan", config)
    assert code == 0 and "work of training" in out and "work of tuning" not in out
    words = ("--tune.tokens", "4096", "--tune.batch_tokens", "512", "--processes", "2", "--network", "1")
    code, out, _ = mxd(capsys, "plan", config, "--json", file, *words)
    assert code == 0 and "in all 12 steps of training" in out and "in all 8 steps of tuning" in out
    found = json.loads(file.read_text())
    assert found["steps"] == 12 and found["tuning"]["steps"] == 8
    assert found["tuning"]["sets"] == {"mxd-k8": ["block2-mxd-k8"]}
    assert found["tuning"]["peak_bytes"] == max(sum(p.values()) for p in found["tuning"]["memory_bytes"].values())
    code, _, err = mxd(capsys, "plan", config, "--tune.batch_tokens", "100")
    assert code == 1 and "batch_tokens = 100 must be a multiple of 128" in err
