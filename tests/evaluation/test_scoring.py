"""Scorers: word lists, classifiers and endpoints; what cannot be scored is a failure with a reason."""

import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, GPT2ForSequenceClassification

from mxd.common.bundled import bundled_path
from mxd.common.errors import MxdError
from mxd.evaluation.judging import GIVE_UP, NoAnswer
from mxd.evaluation.scoring import Asked, Classifier, Scorer, WordList, make_scorer
from mxd.questions import EndpointConfig, WordsConfig


def test_words_count_whole_and_in_any_case(tmp_path):
    file = tmp_path / "words.txt"
    file.write_text("Fool\n\n cat \n")
    words = make_scorer(WordsConfig(file=str(file)))
    assert isinstance(words, Scorer) and words.name == "the 2 words of words.txt"
    assert words(["You FOOL!", "foolish", "a cat.", "", "concat"]) == [1, 0, 1, 0, 0]
    assert words(["a 'fool' said", "a fool--really", "the cat's", "dog-cat", "fool_cat"]) == [1, 1, 1, 1, 0]
    phrases = WordList(frozenset({"son of a", "f**k"}))
    assert phrases(["Son of a gun", "f**k this", "son of an", "fork", "xf**k"]) == [1, 1, 0, 0, 0]
    file.write_text(" \n")
    with pytest.raises(MxdError, match=r"words.txt' holds no words; expected one a line"):
        WordList.read(file)
    with pytest.raises(MxdError, match="cannot read words from"):
        WordList.read(tmp_path / "none.txt")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A folder with a tiny classifier of random weights and three classes."""
    folder = tmp_path_factory.mktemp("classifier")
    torch.manual_seed(0)
    labels = dict(enumerate(("kind", "neutral", "rude")))
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "vocab_size": 4096, "pad_token_id": 0}
    model = GPT2ForSequenceClassification(
        GPT2Config(**sizes, id2label=labels, label2id={v: k for k, v in labels.items()})
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(bundled_path("tiny-gpt2")).save_pretrained(folder)
    return folder


def test_a_classifier_gives_the_probability_of_its_class(classifier):
    texts = ["The cat", "A dog and a cat run away", "", "word " * 100, "The dog"]
    scorer = Classifier.load(str(classifier), "rude", "cpu")
    assert isinstance(scorer, Scorer) and scorer.name.startswith("'rude' of ")
    model = GPT2ForSequenceClassification.from_pretrained(classifier).eval()
    tokenizer = AutoTokenizer.from_pretrained(classifier)
    expected = []
    for text in texts:
        row = tokenizer(text)["input_ids"][:32]
        with torch.no_grad():
            expected.append(float(model(torch.tensor([row])).logits.softmax(-1)[0, 2]) if row else "no tokens")
    found = scorer(texts)
    assert found[2] == expected[2] == "no tokens"
    assert [found[n] for n in (0, 1, 3, 4)] == pytest.approx([expected[n] for n in (0, 1, 3, 4)], abs=1e-6)
    assert len(set(found)) == 5
    scorer.model.config.problem_type = "multi_label_classification"
    with torch.no_grad():
        one = float(model(torch.tensor([tokenizer("The cat")["input_ids"]])).logits.sigmoid()[0, 2])
    assert scorer(["The cat"]) == pytest.approx([one], abs=1e-6)


def test_of_two_classes_the_second_scores_and_every_text_is_scored(classifier, tmp_path):
    model = GPT2ForSequenceClassification.from_pretrained(classifier, num_labels=2, ignore_mismatched_sizes=True)
    model.config.id2label = {0: "fine", 1: "rude"}
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(classifier).save_pretrained(tmp_path)
    scorer = Classifier.load(str(tmp_path), device="cpu")
    texts = [f"The {word}" for word in ("cat", "law", "war", "oil")] * 12
    found = scorer(texts)  # more of one length than fit into a forward
    assert found == pytest.approx(Classifier.load(str(tmp_path), "rude", "cpu")(texts[:4]) * 12, abs=1e-6)
    assert found[:4] == pytest.approx([1 - p for p in Classifier.load(str(tmp_path), "fine", "cpu")(texts[:4])])
    assert abs(found[0] - 0.5) > 1e-6
    scorer.model.score.weight.data.fill_(float("nan"))
    assert scorer(texts[:1]) == ["not a number"]


def test_a_classifiers_class_must_be_known_and_its_files_safe(classifier, tmp_path):
    with pytest.raises(MxdError, match="has the classes kind, neutral, rude; say which one scores with --scorer-label"):
        Classifier.load(str(classifier), device="cpu")
    with pytest.raises(MxdError, match="rud"):
        Classifier.load(str(classifier), "rud", "cpu")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((classifier / name).read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(MxdError, match="cannot load"):
        Classifier.load(str(tmp_path), "rude", "cpu")


class Told:
    """A judge that gives prepared answers."""

    name = "a judge"

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), []

    def __call__(self, prompt):
        self.asked.append(prompt)
        answer = self.answers.pop(0)
        if answer is None:
            raise NoAnswer("timed out")
        return answer


def test_a_judge_is_asked_for_a_number_and_failures_have_reasons():
    judge = Told(" 0.25\n", "1", "1.5", "rather rude", None, "0")
    assert Asked(judge)(["a", "{b}", "c", "d", "e", "f"]) == [
        *(0.25, 1.0, "not a number from 0 to 1", "not a number from 0 to 1", "timed out", 0.0)
    ]
    assert judge.asked[1].endswith("TEXT:\n{b}") and isinstance(Asked(judge), Scorer)


def test_a_judge_that_is_silent_is_left_alone():
    judge = Told(*[None] * GIVE_UP)
    assert Asked(judge)(["a"] * (GIVE_UP + 2)) == ["timed out"] * GIVE_UP + ["not asked"] * 2
    short = [*[None] * (GIVE_UP - 1), "1"] * 2
    assert Asked(Told(*short))(["a"] * len(short)).count(1.0) == 2, "an answer between two silences ends the first"
    with pytest.raises(MxdError, match="is 'example'; expected an address"):
        make_scorer(EndpointConfig(url="example", model="m"))
