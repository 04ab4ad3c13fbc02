r"""Make multiple-choice tasks by topic for `mxd mask`: a passage's beginning, and which of four sentences comes next.

    python scripts/cloze_tasks.py cloze                                      # the Factbook's nine topics
    python scripts/cloze_tasks.py cloze --texts data/probing/bbc.jsonl       # any labelled set of `mxd probe`
    mxd mask RUN --domains cloze/select.jsonl --lm-eval "cloze_*" --lm-eval-include cloze/tasks \
        --lm-eval-groups cloze/domains.csv

Written are tasks for lm-eval in ``tasks/``, with local files, the domain of each task in ``domains.csv``, and texts
that choose a domain's units in ``select.jsonl``. The three wrong sentences come next in other passages of the same
topic and are about as long, so neither topic nor length gives the answer away; guessing is right 25% of the time.

Owners of texts (countries; of other sets each text is its own) are divided by the seed: one half chooses units, the
other makes tasks. Of these, passages are left out that share a run of eight words with a text that chooses.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from mxd.common.errors import MxdError
from mxd.data.labelled import labelled_texts
from mxd.data.text import documents

CHOICES = 4
NEAREST = 12
"""Sentences nearest in length among which the wrong ones are drawn."""
RUN = 8
"""Words in a row that no task has in common with a text that chooses units."""
CONTEXT, NEXT = (8, 40), (6, 25)
"""Fewest and most words of a beginning, and of the sentence after it."""
SELECTING = (80, 600)
"""Fewest and most characters of a text that chooses units, as in the bundled labelled set."""


@dataclass(frozen=True)
class Passage:
    """A text on one topic."""

    owner: str
    domain: str
    text: str


@dataclass(frozen=True)
class Item:
    """The beginning of a passage and the sentence after it."""

    owner: str
    context: str
    following: str


def factbook() -> Iterator[Passage]:
    """Yield the fields of the bundled Factbook, without their names, on the topics of the labelled set."""
    topics = set(labelled_texts("factbook").labels)
    for split in ("train", "validation", "test"):
        for text in documents("bundled:factbook", split):
            head, _, body = text.partition("\n\n")
            country, _, topic = head.rpartition(" - ")
            for line in body.split("\n") if topic in topics else ():
                yield Passage(country, topic, line.partition(": ")[2])


def labelled(source: str) -> Iterator[Passage]:
    """Yield the texts of a labelled set."""
    found = labelled_texts(source)
    for number, (text, label) in enumerate(zip(found.texts, found.labels, strict=True)):
        yield Passage(str(number), label, " ".join(text.split()))


def halves(passages: Iterable[Passage], seed: int) -> tuple[list[Passage], list[Passage]]:
    """Return the passages that choose units and those that make tasks; no owner has any in both."""
    passages = list(dict.fromkeys(passages))
    owners = sorted({passage.owner for passage in passages})
    random.Random(seed).shuffle(owners)
    choosing = set(owners[: len(owners) // 2])
    return [p for p in passages if p.owner in choosing], [p for p in passages if p.owner not in choosing]


def selected(passages: Sequence[Passage], count: int, seed: int) -> dict[str, list[str]]:
    """Return up to ``count`` texts of each domain, cut at a word."""
    shortest, longest = SELECTING
    found: dict[str, dict[str, None]] = {}
    for passage in passages:
        if len(text := passage.text) >= shortest:
            cut = text if len(text) <= longest else text[:longest].rpartition(" ")[0]
            found.setdefault(passage.domain, {})[cut] = None
    rng = random.Random(seed)
    return {domain: rng.sample(list(texts), min(count, len(texts))) for domain, texts in sorted(found.items())}


def runs(text: str) -> set[tuple[str, ...]]:
    """Return every run of ``RUN`` words, without case and punctuation."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + RUN]) for i in range(len(words) - RUN + 1)}


def beginning(passage: Passage) -> Item | None:
    """Return a passage's first sentences, as few as are long enough, and the next; ``None`` where there are none."""
    sentences = re.split(r"(?<=[a-z0-9)%][.;?!])(?<! St\.)\s+", passage.text.strip())
    for end in range(1, len(sentences)):
        context, following = " ".join(sentences[:end]), sentences[end]
        if len(context.split()) >= CONTEXT[0]:
            words = len(following.split())
            prose = len(re.findall(r"\b[^\W\d]{2,}", following)) >= max(NEXT[0], words / 2)
            fits = len(context.split()) <= CONTEXT[1] and words <= NEXT[1] and prose
            return Item(passage.owner, context, following) if fits else None
    return None


def items(passages: Sequence[Passage], known: set[tuple[str, ...]]) -> dict[str, list[Item]]:
    """Return the items of each domain, none with a run of words that is known.

    No beginning and no sentence is there twice, also not with other figures, or more than one answer would be right.
    """
    found: dict[str, list[Item]] = {}
    seen: set[str] = set()
    for passage in passages:
        if (item := beginning(passage)) is None:
            continue
        both = {re.sub(r"\d+", "0", text) for text in (item.context, item.following)}
        if not both & seen and not runs(f"{item.context} {item.following}") & known:
            seen |= both
            found.setdefault(passage.domain, []).append(item)
    return found


def questions(pool: Sequence[Item], count: int, rng: random.Random) -> Iterator[dict[str, object]]:
    """Yield up to ``count`` questions: beginning, four sentences in a drawn order, and the place of the right one."""
    for item in rng.sample(pool, min(count, len(pool))):
        others = [other.following for other in pool if other.owner != item.owner]
        others.sort(key=lambda text: abs(len(text) - len(item.following)))
        if len(others) < CHOICES - 1:
            continue
        choices = [item.following, *rng.sample(others[:NEAREST], CHOICES - 1)]
        rng.shuffle(choices)
        yield {"context": item.context, "choices": choices, "label": choices.index(item.following)}


def write(folder: Path, texts: dict[str, list[str]], asked: dict[str, list[dict[str, object]]]) -> None:
    """Write the texts that choose units, and the tasks."""
    tasks = folder / "tasks"
    tasks.mkdir(parents=True, exist_ok=True)
    rows = [{"text": text, "label": domain} for domain, of in texts.items() for text in of]
    _write_rows(folder / "select.jsonl", rows)
    with (folder / "domains.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(("task", "domain"))
        for domain, rows in asked.items():
            name = "cloze_" + re.sub(r"[^a-z0-9]+", "_", domain.lower())
            table.writerow((name, domain))
            _write_rows(tasks / f"{name}.jsonl", rows)
            (tasks / f"{name}.yaml").write_text(_task(name, tasks.resolve() / f"{name}.jsonl"), encoding="utf-8")


def _task(name: str, file: Path) -> str:
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    return yaml.safe_dump(task, sort_keys=False)


def _write_rows(path: Path, rows: Iterable[object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make(folder: Path, source: str, count: int, select: int, seed: int) -> dict[str, int]:
    """Make everything; return the number of questions of each domain.

    Raises:
        MxdError: a set that cannot be read, or a domain without texts or without questions.
    """
    choosing, asking = halves(factbook() if source == "factbook" else labelled(source), seed)
    texts = selected(choosing, select, seed)
    known = set().union(*(runs(text) for of in texts.values() for text in of))
    pools, rng = items(asking, known), random.Random(seed)
    asked = {domain: list(questions(pools.get(domain, []), count, rng)) for domain in texts}
    domains = {passage.domain for passage in [*choosing, *asking]}
    poor = sorted(domain for domain in domains if not asked.get(domain) or len(texts[domain]) < 2)
    if poor:
        raise MxdError(f"too little text for a task on {', '.join(poor)}; give more or longer texts.")
    write(folder, texts, asked)
    return {domain: len(rows) for domain, rows in asked.items()}


def main() -> None:
    """Parse, make, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write")
    parser.add_argument("--texts", default="factbook", help="factbook, or a labelled set as for `mxd probe`")
    parser.add_argument("--questions", type=int, default=50, help="of each domain, at most")
    parser.add_argument("--select", type=int, default=100, help="texts of each domain that choose units, at most")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        made = make(args.folder, args.texts, args.questions, args.select, args.seed)
    except MxdError as error:
        raise SystemExit(str(error)) from error
    for domain, count in made.items():
        print(f"{count:5}  {domain}")
    print(f"{sum(made.values()):5}  questions in {args.folder}; guessing is right {1 / CHOICES:.0%} of the time")


if __name__ == "__main__":
    main()
