"""lm-evaluation-harness: `mxd evaluate --lm-eval` and its own command line on the exported model give the same scores.

The tasks are two files made here from the bundled text, so that nothing is downloaded.
"""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq
import torch
from interop.common import check, main

from mxd import load_frozen, save_layer
from mxd.artifacts.provenance import Provenance
from mxd.common.bundled import bundled_path
from mxd.layers.mxd import MxDConfig
from mxd.layers.sparsity import TopKConfig

LIMIT = "40"
CHOICE = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/choice.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
PERPLEXITY = """
task: tiny_perplexity
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/perplexity.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}, {metric: byte_perplexity}]
"""
METRICS = {"tiny_choice": ("acc,none",), "tiny_perplexity": ("bits_per_byte,none", "byte_perplexity,none")}


def write_tasks(folder: Path) -> None:
    """Which of three sentences comes next, and the perplexity of passages."""
    folder.mkdir()
    texts = pq.read_table(bundled_path("text") / "test.parquet").column("text").to_pylist()
    sentences = [[s.strip() for s in text.split(". ") if 40 < len(s) < 160] for text in texts]
    pairs = [(first, second) for sentence in sentences for first, second in pairwise(sentence)][::8]
    with (folder / "choice.jsonl").open("w") as file:
        for i in range(int(LIMIT)):
            choices = [pairs[i][1], pairs[i + 50][1], pairs[i + 100][1]]
            choices = choices[i % 3 :] + choices[: i % 3]
            doc = {"context": pairs[i][0] + ".", "choices": choices, "label": choices.index(pairs[i][1])}
            file.write(json.dumps(doc) + "\n")
    with (folder / "perplexity.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": text[:600]}) + "\n" for text in texts[: int(LIMIT)])
    for name, task in (("choice", CHOICE), ("perplexity", PERPLEXITY)):
        (folder / f"{name}.yaml").write_text(task.replace("FOLDER", str(folder)))


def write_layer(folder: Path) -> None:
    """An MxD that is the base MLP with its output scaled: another model, but one that still predicts text."""
    model = load_frozen("tiny-gpt2", device="cpu")
    layer = MxDConfig(num_units=64, sparsity=TopKConfig(k=4)).resolve(model.mlp_shape(0)).build()
    layer.copy_base(model.mlp_weights(0))
    layer.expert_scale.data[0] = 0.6
    known = {"model": "tiny-gpt2", "revision": None, "block": 0, "fingerprint": model.fingerprint(0)}
    data = {"source": "bundled", "context": 64, "split": "train"}
    save_layer(folder, layer, Provenance(**known, excluded_ids=(0,), data=data))


def peer(work: Path) -> None:
    """Score the same splice in both ways."""
    write_tasks(work / "tasks")
    write_layer(work / "run" / "block0")
    names = ["--lm-eval", "tiny_choice,tiny_perplexity", "--lm-eval-limit", LIMIT, "--lm-eval-include", "tasks"]
    run(work, "mxd", "evaluate", "run/block0", *names, "--tokens", "512", "--device", "cpu", "--out", "ours.json")
    ours = json.loads((work / "ours.json").read_text())["lm_eval"]
    run(work, "mxd", "export-model", "tiny-gpt2", "run/block0", "exported")
    compare(work, "base", harness(work, bundled_path("tiny-gpt2")), ours["base"])
    (spliced,) = ours["spliced"].values()
    compare(work, "exported", harness(work, work / "exported"), spliced)
    changed = [spliced[task][metric] != ours["base"][task][metric] for task in METRICS for metric in METRICS[task]]
    check(work, "the splice changes every score", torch.tensor(changed), torch.ones(len(changed)))


def compare(work: Path, name: str, theirs: dict, ours: dict) -> None:
    """Compare every score."""
    for task, metrics in METRICS.items():
        for metric in metrics:
            got, expected = (torch.tensor(scores[task][metric], dtype=torch.float64) for scores in (theirs, ours))
            check(work, f"{name}: {task} {metric.removesuffix(',none')} {expected:.4f}", got, expected, 1e-5)


def harness(work: Path, model: Path) -> dict:
    """Run the harness's own command line on a folder, which is all it is given."""
    arguments = f"pretrained={model},trust_remote_code=True,dtype=float32"
    out = work / f"{model.name}.json"
    words = ["--model", "hf", "--model_args", arguments, "--tasks", ",".join(METRICS), "--include_path", "tasks"]
    run(work, "lm_eval", "run", *words, "--limit", LIMIT, "--device", "cpu", "--output_path", str(out))
    (file,) = work.glob(f"{model.name}_*.json")  # it adds the time to the name
    return json.loads(file.read_text())["results"]


def run(work: Path, module: str, *words: str) -> None:
    """Run a command line in the work folder, without the Hub."""
    here = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(work / "data"), "HF_MODULES_CACHE": str(work / "code")}
    subprocess.run([sys.executable, "-m", module, *words], cwd=work, env={**os.environ, **here}, check=True)


if __name__ == "__main__":
    main(peer)
