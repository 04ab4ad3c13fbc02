"""Model cards: metadata that the Hub accepts, numbers of the very layer, and no word from outside taken for markup."""

import json
import re

import huggingface_hub
import pytest
from huggingface_hub import ModelCard, constants
from loopback_hub import LoopbackHub, check_metadata
from markdown_it import MarkdownIt
from variants import GENERAL

from mxd.artifacts.card import Member, layer_card, license_of, set_card
from mxd.artifacts.measured import Evaluation, Whole
from mxd.artifacts.provenance import Provenance
from mxd.common.errors import MxdError
from mxd.layers import LAYERS, MLPShape
from mxd.layers.sparsity import TopKConfig
from mxd.metrics import METRICS
from mxd.metrics.conventions import CONVENTIONS
from mxd.metrics.faithful import AROUND_SPECIAL

COMMIT = "0123456789" * 4
DATA = {"source": "org/text:plain@v2", "split": "train", "context": 128}
MEASURED = {"source": "org/text", "split": "test"}


def member(name="", method="mxd", k=3, block=3, evaluation=None, called="", **fields):
    config = LAYERS[method](num_units=12, sparsity=TopKConfig(k=k)).resolve(MLPShape(8, 8, 16, "gelu_tanh", False))
    known = {"model": "org/base", "revision": COMMIT, "fingerprint": "abc", "tokens": 4000, "data": DATA, "seed": 7}
    known |= {"training": {"recipe": "paper", "steps": 10, "settings": {"lr": 5e-4}}, "versions": {"torch": "2.9"}}
    return Member(name, config, Provenance(block=block, **known | fields), evaluation, called)


def measured(*members, data=MEASURED, **numbers):
    """An evaluation, as ``mxd evaluate`` writes it, of these members by their names."""
    results = {}
    for number, m in enumerate(members):
        replaced = {
            "method": m.config.label,
            "sparsity": m.config.sparsity.slug,
            "k": m.config.sparsity.max_k,
            "block": m.origin.block,
            "units": m.config.num_units,
            "params": m.config.num_params,
            "tokens_trained": m.origin.tokens,
        }
        site = {"normalized_mse": 0.25, "fvu": 0.5, "l0": 3.0, "dead_share": 0.125, "routed_share": 0.875}
        result = {"tokens": 5000, "ce_base": 3.5, "ce_zero": 4.5, "ce_increase": 0.0625 + number, "kl": 0.03125}
        result |= {"ce_increase_se": 0.001, "loss_recovered": 0.9, "top1_agreement": 0.95} | numbers
        results[f"run/{m.name}"] = result | {"blocks": {str(m.origin.block): site}, "replacements": [replaced]}
    return Evaluation.model_validate({"model": "org/base", "data": data, "results": results})


def with_numbers(*members, **options):
    found = measured(*members, **options)
    return [Member(m.name, m.config, m.origin, found, m.called) for m in members]


def shown(card):
    """The card's text as HTML, as strict about raw HTML as the Hub is lenient."""
    return MarkdownIt("commonmark").enable("table").render(ModelCard(card).text)


# Metadata


def test_the_metadata_says_what_it_is():
    (one,) = with_numbers(member("block3-mxd-k3"))
    data = ModelCard(layer_card(one, "org/name", "mit")).data
    assert data.library_name == "mxd" and data.license == "mit"
    assert data.base_model == ["org/base"] and data.datasets == ["org/text"]
    common = ["mechanistic-interpretability", "interpretability", "replacement-layer"]
    assert data.tags == [*common, "mixture-of-decoders"]
    assert data.pipeline_tag is None
    both = [member("a", "transcoder"), member("b", "mxd"), member("c", "cp_mumoe")]
    assert ModelCard(set_card(both)).data.tags == [*common, "cp-mumoe", "mixture-of-decoders", "transcoder"]


@pytest.mark.skipif(huggingface_hub.__version__ < "2", reason="there ModelCard.validate asks huggingface.co only")
@pytest.mark.parametrize("method", GENERAL)
def test_every_methods_card_is_valid_to_the_hub(method, monkeypatch):
    (one,) = with_numbers(member("one", method))
    with LoopbackHub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        for card in (
            layer_card(member(method=method)),
            layer_card(one, "org/name", "mit"),
            set_card([one], "org/name"),
        ):
            ModelCard(card).validate()
            assert check_metadata(card) == ([], [])
        with pytest.raises(ValueError, match=r"license.* must be one of"):
            ModelCard(layer_card(one, license="mine")).validate()
        assert hub.asked("POST", "validate-yaml") == ["/api/validate-yaml"] * 4


def test_evaluation_results_come_back_from_the_metadata():
    members = with_numbers(member("block3-mxd-k3"), member("block3-mxd-k4", k=4))
    data = ModelCard(set_card(members, "org/name", title="name")).data
    assert data.model_name == "name"
    found = {(r.metric_type, r.metric_name): r for r in data.eval_results}
    assert len(found) == 10
    first = found["cross_entropy_increase", "cross-entropy increase, nats, block3-mxd-k3"]
    assert (first.metric_value, first.task_type) == (0.0625, "text-generation")
    assert (first.dataset_type, first.dataset_name, first.dataset_split) == ("org/text", "org/text", "test")
    assert found["cross_entropy_increase", "cross-entropy increase, nats, block3-mxd-k4"].metric_value == 1.0625
    assert found["normalized_mse", "normalized MSE, block3-mxd-k3"].metric_value == 0.25


def test_every_number_of_an_evaluation_is_on_the_card():
    (one,) = with_numbers(member("a"))
    result = next(iter(one.evaluation.results.values())).model_dump()
    shown = [m for m in METRICS["faithfulness"] if m not in CONVENTIONS]  # other tools' names for much the same
    values = {m: (n + 1) / 64 for n, m in enumerate(shown)}
    result |= {m.key: value for m, value in values.items() if "." not in m.key}
    result |= {"around_special": {"ce_increase": values[AROUND_SPECIAL]}}
    found = Evaluation(model="org/base", data=MEASURED, results={"run/a": result})
    card = layer_card(Member("a", one.config, one.origin, found))
    for metric, value in values.items():
        assert f"| {metric.text(value)} |" in card, metric.title
    assert "| - |" not in card


def test_what_is_not_a_number_is_left_out():
    (one,) = with_numbers(member("a"), loss_recovered=float("nan"), kl=None, ce_increase_se=None)
    kinds = {r.metric_type for r in ModelCard(layer_card(one)).data.eval_results}
    assert kinds == {"cross_entropy_increase", "normalized_mse", "fraction_of_variance_unexplained"}


@pytest.mark.parametrize(
    ("model", "revision"),
    [("tiny-gpt2", None), ("models/x.gguf", None), ("./models/x", None), ("org/base", None), ("/a/b/c", COMMIT)],
)
def test_a_base_model_is_named_to_the_hub_only_where_it_came_from_there(model, revision):
    card = layer_card(member(model=model, revision=revision))
    assert ModelCard(card).data.base_model is None
    assert f"mxd.load_frozen({json.dumps(model)}" in card
    assert "named as it was in training" in card
    card = layer_card(member(model="org/base", revision=COMMIT))
    assert f'mxd.load_frozen("org/base", revision="{COMMIT}")' in card
    assert "named as it was in training" not in card


@pytest.mark.parametrize(
    ("source", "dataset"),
    [
        ("bundled", None),
        ("bundled:sotu", None),
        ("my/text.jsonl", None),
        ("my/text.csv", None),
        ("my/text.jsonl.gz", None),
        ("my/*.json", None),
        ("/data/text", None),
        ("here/text", None),
        ("org/text", ["org/text"]),
        ("org/text:plain@v2", ["org/text"]),
    ],
)
def test_only_datasets_of_the_hub_are_named_to_it(source, dataset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "text").mkdir(parents=True)
    assert ModelCard(layer_card(member(data={"source": source}))).data.datasets == dataset


def test_the_license_is_unknown_until_somebody_states_it():
    card = layer_card(member())
    assert ModelCard(card).data.license == "unknown" and "license is not stated" in card
    assert license_of(card) is None
    stated = set_card([member("a")], license="apache-2.0")
    assert license_of(stated) == "apache-2.0" and "license is not stated" not in stated
    for other in ("", "# no metadata", "---\n[1, 2]\n---\n", "---\nlicense: [mit]\n---\n", "---\n: {\n---\n"):
        assert license_of(other) is None


# Text


def test_the_text_says_what_is_replaced_how_it_was_made_and_what_it_cannot():
    (one,) = with_numbers(member("block3-mxd-k3", excluded_ids=(0, 2)))
    card = layer_card(one, f"org/name@{COMMIT}")
    for part in (
        "MLP of block 3 (counted from 0) of org/base",
        "**MxD** with 12 units and sparsity `k3`, trained with mxd on 4,000 token activations",
        f'with mxd.spliced(model, {{3: "org/name@{COMMIT}"}}):',
        f"org/base, revision {COMMIT}; run in float32",
        "- Trained without tokens: ids [0, 2].\n- BOS in position 0: nothing is stored for it.",
        "| learning rate | 0.0005 |",
        "| seed | 7 |",
        "| versions | torch 2.9 |",
        "On 5,000 held-out tokens of org/text (test)",
        "base model's cross-entropy is 3.5000 nats per token, 4.5000 with the MLP of block 3 zero-ablated",
        "| `block3-mxd-k3` | 0.2500 | 0.500 | - | +0.0625 | 0.0010 | - | 90.0% | 0.0312 | 95.0% |",
        "| `block3-mxd-k3` | 0.2500 | - | - | 0.88 | - | - | - | - | - | - | - | 3.0 | 12% |",
        "dense MLP in disguise",
        "Not measured: other domains",
        "Trained without some tokens (above): in a splice it answers there all the same, untaught.",
    ):
        assert part in card, part


def test_the_code_of_a_card_is_python_that_names_the_layer():
    members = [member("block3-mxd-k3"), member("block3-mxd-k4", k=4)]
    for card in (layer_card(members[0], "org/name@v1"), set_card(members, "org/name@v1"), layer_card(members[0])):
        (code,) = re.findall(r"```python\n(.*?)```", card, re.S)
        compile(code, "card", "exec")
    assert 'mxd.load_layers("org/name@v1")  # or some of them: pattern="*-k3"' in set_card(members, "org/name@v1")
    assert 'mxd.from_pretrained("org/name/block3-mxd-k3@v1")' in set_card(members, "org/name@v1")


def test_a_card_says_how_all_layers_of_a_kind_are_spliced_in_at_once():
    run = [member(f"block{n}-mxd-k{k}", k=k, block=n) for n in (0, 1, 10) for k in (3, 4)]
    card = set_card(run, "org/name@v1")
    (code,) = re.findall(r"```python\n(.*?)```", card, re.S)
    compile(code, "card", "exec")
    assert 'mxd.load_layers("org/name@v1", "*-mxd-k3")  # 3 blocks at once' in code
    others = ([run[0], run[1]], [run[0], member("other", k=3)], [run[0], member("block1-a-mxd-k3", "transcoder")])
    for members in others:  # one block; a name that no pattern finds; one that finds another kind, too
        assert "at once" not in set_card(members, "org/name").split("## What")[0]


def test_what_was_measured_of_all_blocks_at_once_is_on_the_card():
    run = [member(f"block{n}-mxd-k{k}", k=k, block=n) for n in (0, 1) for k in (3, 4)]
    numbers = {"tokens": 5000, "ce_base": 3.5, "kl": 0.125, "kl_se": 0.0625, "top1_agreement": 0.75, "params": 99}
    numbers |= {
        "ce_increase": 0.25,
        "ce_increase_se": 0.03125,
        "alone_sum": 0.1875,
        "around_special": {"ce_increase": 0.5},
    }
    sets = {f"mxd-k{k}": [m.replaced.model_dump() for m in run if m.config.sparsity.k == k] for k in (3, 4)}
    results = {name: numbers | {"replacements": members} for name, members in sets.items()}
    whole = Whole.model_validate({"model": "org/base", "data": MEASURED, "results": results})
    card = set_card(run, whole=whole)
    row = "+0.2500 ± 0.0312 | +0.5000 | 0.1250 ± 0.0625 | 75.0% | +0.1875 | 99 |"
    assert [f"| mxd-k{k} | 2 | {row}" in card for k in (3, 4)] == [True, True]
    assert "on 5,000 held-out tokens of org/text (test)" in card and "several layers spliced at once" not in card
    part = set_card(run[:2], whole=whole)  # of which one layer is missing
    assert "**All at once**" not in part and "several layers spliced at once" in part


def test_a_set_is_listed_by_block_method_and_k():
    names = ["block3-mxd-k16", "block3-mxd-k4", "block1-mxd-k4"]
    members = [member(names[0], k=11), member(names[1], k=4), member(names[2], k=4, block=1)]
    card = set_card(with_numbers(*members))
    assert re.findall(r"^\| `(\S+)` \| MxD", card, re.M) == names[::-1]
    listed = re.findall(r"^\| `(\S+)` \| 0\.25", card, re.M)
    assert listed == names[::-1] * 2  # faithfulness, then what it is made of


def test_a_set_states_each_recipe_once():
    same = set_card([member("a"), member("b")])
    assert same.count("| seed | 7 |") == 1 and "`a`, `b`:" not in same
    other = set_card([member("a"), member("b", seed=8), member("c")])
    assert "`a`, `c`:" in other and "`b`:" in other and other.count("| seed |") == 2


def test_a_figure_is_shown_where_there_is_one():
    members = with_numbers(member("a"))
    assert "](frontier.png)" in set_card(members, figure=True)
    assert "frontier.png" not in set_card(members)


def test_what_was_not_measured_is_said():
    assert "Not evaluated yet" in layer_card(member()) and "Not measured yet" in layer_card(member())
    assert ModelCard(layer_card(member())).data.eval_results is None
    half = set_card([*with_numbers(member("a")), member("b", k=4)])
    assert "| `b` | not evaluated |" in half


# Which numbers belong to a layer


def test_only_numbers_of_this_very_layer_are_shown():
    found = measured(member("a"))
    assert member("a", evaluation=found).result is not None
    assert member("renamed", evaluation=found).result is not None
    for other in ({"k": 4}, {"method": "transcoder"}, {"block": 2}, {"tokens": 8000}):
        assert member("a", evaluation=found, **other).result is None


def test_variants_of_one_kind_are_told_apart_by_name():
    found = measured(member("block3-mxd-k3"), member("block3-mxd-k3-v2"))
    assert member("block3-mxd-k3-v2", evaluation=found).result.ce_increase == 1.0625
    assert member("", evaluation=found, called="block3-mxd-k3").result.ce_increase == 0.0625
    assert member("neither", evaluation=found).result is None


def test_a_file_that_is_no_evaluation_is_refused(tmp_path):
    path = tmp_path / "faithfulness.json"
    assert Evaluation.read(path) is None
    path.write_text(measured(member("a")).model_dump_json())
    assert Evaluation.read(path) == measured(member("a"))
    for text in ("", "[]", '{"results": 3}', '{"model": "m", "data": {}, "results": {"a": {}}}'):
        path.write_text(text)
        with pytest.raises(MxdError, match=r"is not what `mxd evaluate` writes; run that again, or delete it"):
            Evaluation.read(path)


# Text from outside


HOSTILE = [
    "<script>alert(1)</script>",
    "[click](javascript:alert(1))",
    "![x](https://evil.example/pixel.png)",
    "a | b\n\n# heading\n\n- list",
    "`code` *star* _under_ ~~gone~~",
    "---\nlicense: mit\n---",
    "&lt;b&gt; https://evil.example",
    'name" + __import__("os").system("true") + "',
    "```\nend of code",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_words_from_outside_stay_words(text):

    def card_of(name):
        return layer_card(member(model=name, revision=None, data={"source": name}, input_convention=name))

    plain, card = card_of("NAME"), card_of(text)
    tags = [re.findall(r"<[^>]+>", shown(c)) for c in (card, plain)]
    assert tags[0] == tags[1]
    assert ModelCard(card).data.to_dict() == ModelCard(plain).data.to_dict()
    (code,) = re.findall(r"```python\n(.*?)\n```\n", card, re.S)
    names = {}
    exec(
        code.split("with ")[0].replace("import mxd", "import types; mxd = types.SimpleNamespace(load_frozen=str)"),
        names,
    )
    assert names["model"] == text


@pytest.mark.parametrize("text", HOSTILE)
def test_names_in_an_evaluation_stay_words_too(text):
    data = {"source": text, "split": text}
    (one,) = with_numbers(member("a"), data=data)
    (plain,) = with_numbers(member("a"), data={"source": "NAME", "split": "NAME"})
    tags = [re.findall(r"<[^>]+>", shown(layer_card(m))) for m in (one, plain)]
    assert tags[0] == tags[1]
    (result, *_) = ModelCard(layer_card(one)).data.eval_results
    assert (result.dataset_name, result.dataset_split) == (text, text)
