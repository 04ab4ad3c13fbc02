"""Check that the tools people already use read what mxd writes, that mxd reads what they write, and the numbers agree.

    python scripts/check_interop.py               # all of them
    python scripts/check_interop.py sparsify      # one

Each peer gets a folder of its own packages (``--cache``), installed once with ``--no-deps`` and put in front of this
environment, so that torch is never downloaded again and this environment stays as it is. The two sides exchange
safetensors files in a temporary folder. Exit code 1 if a check fails.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from goals import conclude

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Peer:
    """A tool to check against."""

    script: str
    """File in scripts/interop/; its functions are the steps."""
    requirements: tuple[str, ...] = ()
    """Pinned packages, installed without their dependencies: list those that are needed and not in this environment,
    and those of which another version is needed."""
    steps: tuple[str, ...] = ("peer",)
    """Functions of the script, in order. ``peer`` runs in the peer's environment, all others in this one. Where the
    peer's packages leave mxd importable, ``peer`` alone is enough."""


# To add a peer: one line here, one file in scripts/interop/. The file holds the steps as functions of a work folder,
# calls interop.common.check(...) once for each thing it compares, and ends with interop.common.main(...).
PEERS = {
    "sparsify": Peer(
        "sparsify.py",
        ("eai-sparsify==1.3.3", "natsort==8.4.0", "schedulefree==1.4.1", "simple-parsing==0.1.9"),
        ("give", "peer", "take"),
    ),
    "sae-lens": Peer(
        "saelens.py",
        (
            "sae-lens==6.54.12",
            "transformer-lens==3.9.0",
            "babe==0.0.7",
            "better-abc==0.0.3",
            "nltk==3.9.2",
            "plotly==6.5.0",
            "plotly-express==0.4.1",
            "python-dotenv==1.2.1",
            "simple-parsing==0.1.9",
            "tenacity==9.1.2",
        ),
        ("give", "peer", "take"),
    ),
    "sae-bench": Peer(
        "sae_bench.py",
        (
            "sae-bench==0.6.0",
            "sae-lens==6.54.12",
            "transformer-lens==3.9.0",
            "babe==0.0.7",
            "better-abc==0.0.3",
            "nltk==3.9.2",
            "plotly==6.5.0",
            "plotly-express==0.4.1",
            "python-dotenv==1.2.1",
            "simple-parsing==0.1.9",
            "tabulate==0.10.0",
            "tenacity==9.1.2",
        ),
    ),
    "circuit-tracer": Peer(
        "circuit_tracer.py",
        ("circuit-tracer==0.5.0", "huggingface-hub==0.36.0", "transformers==4.57.3", "tokenizers==0.22.2"),
        ("give", "peer", "take"),
    ),
    "transformers-5.0": Peer(
        "transformers.py",
        ("transformers==5.0.0", "huggingface-hub==1.33.0", "tokenizers==0.22.2"),
        ("give", "peer"),
    ),
    "transformers-5.17": Peer("transformers.py", ("transformers==5.17.0", "huggingface-hub==1.33.0"), ("give", "peer")),
    "lm-eval": Peer(
        "lm_eval.py",
        (
            "lm-eval==0.4.13",
            "absl-py==2.5.1",
            "chardet==7.7.0",
            "colorama==0.4.6",
            "dataproperty==1.1.1",
            "evaluate==0.4.6",
            "joblib==1.6.0",
            "lxml==6.1.3",
            "mbstrdecoder==1.1.5",
            "more-itertools==11.2.1",
            "narwhals==2.29.0",
            "nltk==3.10.4",
            "pathvalidate==3.3.1",
            "portalocker==4.4.2",
            "pytablewriter==1.2.1",
            "rouge-score==0.1.2",
            "sacrebleu==2.6.0",
            "scikit-learn==1.9.1",
            "scipy==1.17.1",
            "six==1.17.0",
            "sqlitedict==2.1.0",
            "tabledata==1.3.5",
            "tabulate==0.10.0",
            "tcolorpy==0.1.7",
            "threadpoolctl==3.8.0",
            "typepy==2.0.0",
            "word2number==1.1",
        ),
    ),
    "transformer-lens-3.9": Peer("transformer_lens.py", ("transformer-lens==3.9.0", "better-abc==0.0.3")),
    "transformer-lens-4.3": Peer("transformer_lens.py", ("transformer-lens==4.3.0",)),
    "nnsight": Peer(
        "nnsight.py",
        ("nnsight==0.8.1", "cloudpickle==3.1.2", "greenlet==3.5.6", "websocket-client==1.9.2", "zstandard==0.25.0"),
    ),
}


def main() -> None:
    """Parse, run, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", choices=[[], *PEERS], help=f"of: {', '.join(PEERS)}; all by default")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "mxd-interop", help="installed peers")
    parser.add_argument("--json", type=Path, help="write the checks")
    args = parser.parse_args()
    results_of = {name: run(PEERS[name], args.cache) for name in args.peers or PEERS}
    width = max((len(check["check"]) for checks in results_of.values() for check in checks), default=5)
    print(f"\n{'peer':16} {'check':{width}} {'difference':>10} {'limit':>8}")
    for name, checks in results_of.items():
        for check in checks:
            number = f"{check['difference']:10.2g} {check['limit']:8.2g}"
            print(f"{name:16} {check['check']:{width}} {number} {'ok' if check['ok'] else 'FAILED'}")
    if args.json:
        args.json.write_text(json.dumps(results_of, indent=1) + "\n")
    wrong = [f"{name}: {check['check']}" for name, checks in results_of.items() for check in checks if not check["ok"]]
    conclude([*wrong, *(f"{name}: no check ran" for name, checks in results_of.items() if not checks)], "all agree")


def run(peer: Peer, cache: Path) -> list[dict]:
    """Run the steps of one peer; return its checks, with a failed one where a step broke off."""
    packages = install(peer.requirements, cache)
    with tempfile.TemporaryDirectory() as work:
        for step in peer.steps:
            paths = [str(ROOT / "scripts"), *([str(packages)] if step == "peer" and peer.requirements else [])]
            # -P: the script's folder, whose files are called as the peers are, stays off the import path.
            command = [sys.executable, "-P", str(ROOT / "scripts" / "interop" / peer.script), step, work]
            done = subprocess.run(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, check=False)
            if done.returncode:
                broken = {"check": f"step {step} of {peer.script} broke off", "difference": float("nan")}
                return [*results(work), {**broken, "limit": 0.0, "ok": False}]
        return results(work)


def results(work: str) -> list[dict]:
    """Return the checks that the steps recorded."""
    path = Path(work) / "checks.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def install(requirements: tuple[str, ...], cache: Path) -> Path:
    """Install packages into a folder of the cache, once."""
    folder = cache / hashlib.sha256(" ".join(requirements).encode()).hexdigest()[:12]
    if requirements and not (folder / ".done").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, "--upgrade", "--target", str(folder), *requirements], check=True)
        (folder / ".done").touch()
    return folder


if __name__ == "__main__":
    main()
