"""Steering: sampled text is what a plain hook gives one sample at a time; judges are believed only word for word."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from command import mxd

from mxd.artifacts.checkpoint import Trained, save_layer
from mxd.artifacts.provenance import Provenance
from mxd.common.errors import MxdError
from mxd.evaluation.judging import Endpoint, LocalJudge, NoAnswer, judge_prompt, judged, read_answer
from mxd.evaluation.steering import Steered, choose, evaluate_steering, summary
from mxd.layers.linear import LowRankConfig
from mxd.layers.mxd import MxDConfig
from mxd.layers.peer import PEERConfig
from mxd.layers.sae import TopKSAEConfig
from mxd.layers.sparsity import PairTopKConfig, RandomKConfig, TopKConfig
from mxd.layers.transcoder import TranscoderConfig
from mxd.model.loading import load_frozen
from mxd.questions import SteeringConfig, checked

LAYER = 1
KEY = "sk-a-secret"


def trained_layer(model, kind=TranscoderConfig, masked=(0,), sparsity=None, units=24):
    shape = model.mlp_shape(LAYER)
    config = kind(num_units=units, sparsity=sparsity or TopKConfig(k=4)).resolve(shape)
    layer = config.build(0)
    for parameter in layer.parameters():
        parameter.data.normal_(std=0.2, generator=torch.Generator().manual_seed(parameter.numel()))
    provenance = Provenance(
        model=model.source, revision=None, block=LAYER, fingerprint=model.fingerprint(LAYER), excluded_ids=masked
    )
    return Trained(layer.eval().requires_grad_(False), provenance, Path())


def nucleus(logits, draw, temperature, top_p):
    """Sampling written out: sort, keep the smallest set that holds top_p, walk up to the draw."""
    z = np.asarray(logits, dtype=np.float64) / temperature
    p = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
    kept, held = [], 0.0
    for token in np.argsort(-p, kind="stable"):
        if held >= top_p:
            break
        kept.append(token)
        held += p[token]
    walked = 0.0
    for token in kept:
        walked += p[token] / held
        if draw < walked:
            return int(token)
    return int(kept[-1])


def oracle(model, trained, unit, how):
    """One sample alone, everything computed again for every token, the steered MLP as a plain hook."""
    layer = trained.layer
    ids = [0, *model.tokenizer(how.prompt)["input_ids"]]
    start, found = len(ids), []
    if how.at == "input":
        row = torch.stack(
            [layer.gates.rows(torch.tensor([unit]), head)[0][0] for head in range(layer.gates.heads)]
        ).sum(0)
        size = model.record(torch.tensor([ids]), [LAYER])[LAYER][0].norm(dim=-1).mean()

    def replace(module, args, output):
        read = args[0] if layer.config.reads == "mlp_in" else output
        if how.at == "input":
            pushed = read + how.scale * size * row / row.norm()
            return layer(pushed) if how.on == "replacement" else module.forward(pushed)
        out = layer(read) if how.on == "replacement" else output
        return out + how.scale * layer.unit_output(unit, read)

    for draws in np.random.default_rng([how.seed, unit]).random((how.samples, how.tokens)):
        ids = ids[:start]
        handle = model.mlp(LAYER).register_forward_hook(replace)
        for draw in draws:
            logits = model.logits(torch.tensor([ids]))[0, -1].numpy()
            logits = logits - how.frequency_penalty * np.bincount(ids, minlength=len(logits))
            ids.append(nucleus(logits, draw, how.temperature, how.top_p))
        handle.remove()
        found.append(model.tokenizer.decode(ids[start:], skip_special_tokens=True))
    return found


@pytest.mark.parametrize("on", ["replacement", "base"])
@pytest.mark.parametrize("kind", [TranscoderConfig, MxDConfig, TopKSAEConfig])
def test_samples_are_those_of_a_plain_hook_one_at_a_time(trained_gpt2, kind, on):
    trained = trained_layer(trained_gpt2, kind)
    how = SteeringConfig(scale=7.0, samples=2, tokens=5, top_p=0.9, on=on, seed=3, frequency_penalty=0.5)
    found = evaluate_steering(trained_gpt2, {"a": trained}, [5, 0, 23], how)["a"]
    for unit in (5, 0, 23):
        assert found["units"][str(unit)] == {"scale": 7.0, "samples": oracle(trained_gpt2, trained, unit, how)}
    assert found["unsteered"] == oracle(trained_gpt2, trained, 5, how.model_copy(update={"scale": 0.0}))


@pytest.mark.parametrize("on", ["replacement", "base"])
@pytest.mark.parametrize(
    "fields", [{}, {"kind": MxDConfig}, {"kind": PEERConfig, "sparsity": PairTopKConfig(heads=2, k=3), "units": 25}]
)
def test_steering_at_the_input_is_a_push_along_the_gate_row(trained_gpt2, fields, on):
    """Twice as long as the prompt's inputs: units say something else, and each the same in any company."""
    trained = trained_layer(trained_gpt2, **fields)
    how = SteeringConfig(scale=2.0, samples=2, tokens=5, top_p=0.9, at="input", on=on)
    found = evaluate_steering(trained_gpt2, {"a": trained}, [5, 0], how)["a"]
    for unit in (5, 0):
        assert found["units"][str(unit)] == {"scale": 2.0, "samples": oracle(trained_gpt2, trained, unit, how)}
    assert found["at"] == "input" and found["units"]["5"]["samples"] != found["unsteered"]
    at_output = evaluate_steering(trained_gpt2, {"a": trained}, [5], how.model_copy(update={"at": "output"}))["a"]
    assert at_output["unsteered"] == found["unsteered"] and at_output["units"]["5"] != found["units"]["5"]


def test_a_stored_bos_is_not_pushed(trained_gpt2):
    """Pushed, its input would no longer be known."""
    trained = trained_layer(trained_gpt2)
    x, _ = trained_gpt2.record(torch.tensor([[0, 5, 9]]), [LAYER])[LAYER]
    rows = torch.full((1, x.shape[-1]), 0.5)
    steered = Steered(trained.layer, trained_gpt2.mlp(LAYER), "replacement", [3], 2.0, rows)
    torch.testing.assert_close(steered(x), trained.layer(x + 1))
    constant = TranscoderConfig(num_units=24, sparsity=TopKConfig(k=4), bos_constant=True)
    layer = constant.resolve(trained_gpt2.mlp_shape(LAYER)).build(0)
    layer.store_bos(x[0, 0], torch.full_like(x[0, 0], 7.0))
    out = Steered(layer, trained_gpt2.mlp(LAYER), "replacement", [3], 2.0, rows)(x)
    assert out[0, 0].unique().tolist() == [7.0]
    torch.testing.assert_close(out[:, 1:], layer(x[:, 1:] + 1))


def test_at_the_input_only_layers_with_gate_rows_there(gpt2):
    how = SteeringConfig(at="input")
    with pytest.raises(MxdError, match=r"a is an autoencoder: it reads the MLP's output .* --at output"):
        evaluate_steering(gpt2, {"a": trained_layer(gpt2, TopKSAEConfig)}, [0], how)
    low_rank = LowRankConfig(rank=4, num_units=1).resolve(gpt2.mlp_shape(LAYER)).build(0)
    layer = trained_layer(gpt2)
    with pytest.raises(MxdError, match="units of a are always on"):
        evaluate_steering(gpt2, {"a": Trained(low_rank, layer.provenance, Path())}, [0], how)


def test_random_models_of_every_family_too(family):
    trained = trained_layer(family, MxDConfig)
    how = SteeringConfig(samples=2, tokens=4, top_p=1.0, scale=2.0)
    found = evaluate_steering(family, {"a": trained}, [1, 2], how, batch=1)["a"]["units"]
    assert [found[unit]["samples"] for unit in ("1", "2")] == [oracle(family, trained, unit, how) for unit in (1, 2)]


def test_a_units_samples_depend_on_the_seed_but_not_on_its_company(trained_gpt2):
    layers = {"a": trained_layer(trained_gpt2)}
    how = SteeringConfig(samples=3, tokens=6, top_p=1.0, scale=1.0)
    alone = evaluate_steering(trained_gpt2, layers, [4], how)["a"]["units"]["4"]["samples"]
    company = evaluate_steering(trained_gpt2, layers, [1, 4, 2], how)["a"]["units"]
    assert company["4"]["samples"] == alone != company["1"]["samples"]
    other = SteeringConfig(samples=3, tokens=6, top_p=1.0, scale=1.0, seed=1)
    assert evaluate_steering(trained_gpt2, layers, [4], other)["a"]["units"]["4"]["samples"] != alone
    assert len(set(alone)) == 3


def test_the_model_and_the_layer_are_as_before_and_the_layer_runs_in_evaluation_mode(gpt2):
    trained = trained_layer(gpt2, sparsity=RandomKConfig(k=4))
    evaluated = evaluate_steering(gpt2, {"a": trained}, [0], SteeringConfig(samples=1, tokens=8))
    assert not any(module.training for module in (trained.layer, *gpt2.module.modules()))
    trained.layer.train()
    mlp, mode = gpt2.mlp(LAYER), gpt2.mlp(LAYER).training
    assert evaluate_steering(gpt2, {"a": trained}, [0], SteeringConfig(samples=1, tokens=8)) == evaluated
    assert trained.layer.training and gpt2.mlp(LAYER) is mlp and mlp.training == mode is False


def test_units_are_by_default_the_first_hundred_there_are(gpt2):
    found = evaluate_steering(gpt2, {"a": trained_layer(gpt2)}, None, SteeringConfig(samples=1, tokens=1))["a"]
    assert list(found["units"]) == [str(i) for i in range(24)]
    assert found["judge"] is None and "coherence" not in found["units"]["0"]
    few = evaluate_steering(gpt2, {"a": trained_layer(gpt2)}, None, SteeringConfig(samples=1, tokens=1, first=3))["a"]
    assert list(few["units"]) == ["0", "1", "2"]


def test_tokens_are_drawn_from_the_nucleus_in_proportion():
    rng = np.random.default_rng(0)
    logits = torch.tensor(rng.normal(size=(1, 12)) * 2, dtype=torch.float32)
    draws = np.linspace(0, 1, 2000, endpoint=False)
    for temperature, top_p in ((1.0, 0.1), (1.0, 0.7), (2.5, 1.0)):
        got = choose(logits.expand(2000, -1), torch.tensor(draws), temperature, top_p).tolist()
        assert got == [nucleus(logits[0].numpy(), draw, temperature, top_p) for draw in draws]
    shares = np.bincount(choose(logits.expand(2000, -1), torch.tensor(draws), 1.0, 1.0).numpy(), minlength=12) / 2000
    np.testing.assert_allclose(shares, logits[0].softmax(-1).numpy(), atol=1e-3)
    assert choose(logits, torch.tensor([0.99]), 0.0, 1.0).item() == logits.argmax().item()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("0.75, 0.50", (0.75, 0.5)),
        (" 1.00, 0.00\n", (1.0, 0.0)),
        ("1.01, 0.50", None),
        ("0.75,0.50", None),
        ("0.7, 0.5", None),
        ("0.75, 0.50, 0.25", None),
        ("-0.75, 0.50", None),
        ("coherence 0.75, 0.50", None),
        ("'0.75, 0.50'", None),
        ("0.75, 0.50\n0.25, 0.25", None),
        ("nan, 0.50", None),
        ("٠.75, 0.50", None),
        ("", None),
    ],
)
def test_an_answer_is_two_numbers_and_nothing_else(answer, expected):
    assert read_answer(answer) == expected


def test_the_judge_is_given_anchors_for_both_axes_and_all_samples():
    asked = judge_prompt(["one {x}", "two"])
    for anchor in ("0.00", "0.25", "0.50", "0.75", "1.00"):
        assert sum(line.startswith(f"{anchor} ") for line in asked.splitlines()) == 2
    assert "collection of 2 samples" in asked and asked.endswith("<sample>one {x}</sample>\n<sample>two</sample>")


class Scripted:
    """A judge that gives answers in turn; an exception is raised."""

    name = "scripted"

    def __init__(self, *answers):
        self.answers, self.prompts = list(answers), []

    def __call__(self, prompt):
        self.prompts.append(prompt)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_means_are_over_answers_failures_are_counted_and_disagreement_is_said():
    verdict = judged(Scripted("0.50, 1.00", "no", "0.75, 0.90", NoAnswer("HTTP 500")), ["a"], 4).report()
    assert (verdict["coherence"], verdict["fluency"]) == (pytest.approx(0.625), pytest.approx(0.95))
    assert verdict["failures"] == 2 and verdict["reasons"] == {"not two numbers": 1, "HTTP 500": 1}
    assert verdict["disagreement"] and verdict["answers"] == [[0.5, 1.0], [0.75, 0.9]]
    assert not judged(Scripted("0.50, 1.00", "0.74, 0.76"), ["a"], 2).report()["disagreement"]
    nothing = judged(Scripted("no", "0.5"), ["a"], 2).report()
    assert (nothing["coherence"], nothing["fluency"], nothing["failures"]) == (None, None, 2)


def test_totals_leave_out_what_was_not_answered_and_a_silent_judge_is_not_asked_on(gpt2):
    layers = {"a": trained_layer(gpt2)}
    how = SteeringConfig(samples=2, tokens=2)
    judge = Scripted("0.20, 0.40", "no", "0.40, 0.80", *[NoAnswer("timed out")] * 3)
    found = evaluate_steering(gpt2, layers, list(range(8)), how, [judge])["a"]
    assert (found["coherence"], found["fluency"]) == (pytest.approx(0.3), pytest.approx(0.6))
    assert (found["asked"], found["failures"], found["disagreements"]) == (8, 6, 0)
    assert found["reasons"] == {"not two numbers": 1, "timed out": 3, "not asked": 2}
    assert found["units"]["1"]["coherence"] is None and found["units"]["7"]["failures"] == 1
    assert [len(judge.prompts), judge.answers] == [6, []]
    for sample in found["units"]["0"]["samples"]:
        assert f"<sample>{how.prompt}{sample}</sample>" in judge.prompts[0]
    assert json.loads(json.dumps(found)) == found
    lines = summary({"a": found})
    assert f"  prompt: {how.prompt!r}\n  not steered: " in lines
    assert "coherence 0.30, fluency 0.60; of 8 answers 6 failed" in lines and "[no answer, no answer]" in lines


@pytest.fixture
def server(monkeypatch):
    """A loopback endpoint that answers what is put into ``replies``: status, body, seconds to wait, headers."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.server.asked.append((self.path, body, self.headers.get("Authorization")))
            status, reply, wait, headers = self.server.replies.pop(0)
            time.sleep(wait)
            try:
                self.send_response(status)
                for header in headers.items():
                    self.send_header(*header)
                self.end_headers()
                self.wfile.write(reply.encode())
            except OSError:  # the client has hung up
                pass

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.replies = [], []
    server.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def reply(content, status=200, wait=0.0, **headers):
    body = content if status != 200 else json.dumps({"choices": [{"message": {"content": content}}]})
    return status, body, wait, headers


def endpoint(server, **options):
    return Endpoint(server.url, "some-model", pause=0.0, **{"timeout": 5.0, **options})


def test_an_endpoint_is_asked_as_openai_is_and_answers(server, monkeypatch):
    monkeypatch.setenv("MXD_JUDGE_KEY", KEY)
    server.replies = [reply("0.75, 0.50")]
    assert judged(endpoint(server), ["a text"]).answers == [(0.75, 0.5)]
    ((path, body, authorization),) = server.asked
    assert (path, authorization) == ("/v1/chat/completions", f"Bearer {KEY}")
    assert body == {"model": "some-model", "messages": [{"role": "user", "content": judge_prompt(["a text"])}]}


def test_without_a_key_none_is_sent(server, monkeypatch):
    monkeypatch.delenv("MXD_JUDGE_KEY", raising=False)
    server.replies = [reply("0.75, 0.50")]
    endpoint(server)("hello")
    assert server.asked[0][2] is None


@pytest.mark.parametrize(
    ("replies", "options", "reason", "asked"),
    [
        ([reply("I would say 0.75, 0.50")], {}, "not two numbers", 1),
        ([(200, "<html>", 0.0, {})], {}, "no chat completion", 1),
        ([(200, '{"choices": []}', 0.0, {})], {}, "no chat completion", 1),
        ([(200, '{"choices": [{"message": {"content": null}}]}', 0.0, {})], {}, "no chat completion", 1),
        ([reply("down", 500)] * 3, {}, "HTTP 500", 3),
        ([reply("slow down", 429)] * 2, {"attempts": 2}, "HTTP 429", 2),
        ([reply(f"bad key {KEY}", 401)], {}, "HTTP 401", 1),
        ([reply("0.75, 0.50", wait=0.6)] * 2, {"attempts": 2, "timeout": 0.1}, "timed out", 2),
        ([reply("moved", 307, Location="http://127.0.0.1:9/v1")], {}, "HTTP 307", 1),
    ],
    ids=["prose", "html", "empty", "null", "500", "429", "401", "timeout", "redirect"],
)
def test_what_is_no_answer_is_a_failure_with_its_reason(server, monkeypatch, replies, options, reason, asked):
    monkeypatch.setenv("MXD_JUDGE_KEY", KEY)
    server.replies = list(replies)
    verdict = judged(endpoint(server, **options), ["a"]).report()
    assert (verdict["coherence"], verdict["answers"], verdict["reasons"]) == (None, [], {reason: 1})
    assert len(server.asked) == asked and KEY not in json.dumps(verdict)


def test_an_error_that_passes_is_tried_again(server):
    server.replies = [reply("down", 503), reply("0.25, 1.00")]
    assert judged(endpoint(server), ["a"]).report()["answers"] == [[0.25, 1.0]]


def test_an_endpoint_that_is_not_there_cannot_be_reached(server):
    nobody = Endpoint("http://127.0.0.1:9/v1", "m", attempts=1, timeout=2.0)
    assert judged(nobody, ["a"]).report()["reasons"] == {"cannot be reached": 1}


def test_addresses_are_checked_and_a_key_does_not_leave_this_machine_unencrypted(monkeypatch):
    for url in ("api.example.com/v1", "ftp://x/v1", "https://", ""):
        with pytest.raises(MxdError, match=r"expected an address such as https://api\.example\.com/v1"):
            Endpoint(url, "m")
    Endpoint("http://example.com/v1", "m", key_variable="NO_SUCH_KEY")
    monkeypatch.setenv("SOME_KEY", KEY)
    with pytest.raises(MxdError, match=r"SOME_KEY is not sent over http to example\.com") as error:
        Endpoint("http://example.com/v1", "m", key_variable="SOME_KEY")
    assert KEY not in str(error.value)
    assert KEY not in repr(Endpoint("https://user:pw@example.com/v1", "m", key_variable="SOME_KEY")) and (
        Endpoint("https://user:pw@example.com/v1", "m").name == "m at example.com"
    )


def test_a_local_model_that_babbles_fails_every_time(gpt2, build_model, tokenizer):
    judge = LocalJudge(load_frozen(build_model("llama", max_position_embeddings=2048), tokenizer=tokenizer))
    found = evaluate_steering(
        gpt2, {"a": trained_layer(gpt2)}, [0, 1], SteeringConfig(samples=2, tokens=2, repeats=2), [judge]
    )["a"]
    assert found["reasons"] == {"not two numbers": 4} and found["coherence"] is None and found["asked"] == 4
    short = judged(LocalJudge(gpt2), ["a"]).report()
    assert short["reasons"] == {"prompt too long": 1}


def test_a_local_judge_is_asked_by_its_chat_template_and_stops_at_eos(gpt2, monkeypatch):
    from mxd.evaluation import judging

    asked = []
    tokenizer = type(gpt2.tokenizer).from_pretrained(gpt2.tokenizer.name_or_path)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<answer>"
    answer = [*tokenizer("0.75, 0.50")["input_ids"], 0, *tokenizer(" and more")["input_ids"]]
    monkeypatch.setattr(judging, "greedy", lambda model, prompts, n: asked.append(prompts[0]) or torch.tensor([answer]))
    judge = LocalJudge(load_frozen(gpt2.module, tokenizer=tokenizer))
    assert judged(judge, ["text"]).answers == [(0.75, 0.5)]
    text = tokenizer.decode(asked[0])
    assert text.startswith("<user>You are an expert") and text.endswith("<sample>text</sample><answer>")


def test_mistakes_are_refused_with_a_remedy(gpt2, build_model):
    layers = {"a": trained_layer(gpt2)}
    for options, message in (
        ({"samples": 0}, "samples: expected a number greater than 0, got 0"),
        ({"tokens": 0}, "tokens: expected a number greater than 0, got 0"),
        ({"repeats": 0}, "repeats: expected a number greater than 0, got 0"),
        ({"first": 0}, "first: expected a number greater than 0, got 0"),
        ({"top_p": 0.0}, "top_p: expected a number greater than 0, got 0.0"),
        ({"top_p": 1.1}, "top_p: expected a number of at most 1, got 1.1"),
        ({"temperature": -1.0}, "temperature: expected a number of at least 0, got -1.0"),
        ({"at": "gate"}, "at: expected output or input, got 'gate'"),
        ({"on": "both"}, "on: expected replacement or base, got 'both'"),
        ({"rubric": "mine"}, "rubric: expected paraphrase or paper, got 'mine'"),
        ({"prompts": 1}, "prompts: there is no such field"),
    ):
        with pytest.raises(MxdError, match=message):
            checked(SteeringConfig, **options)
    for units, options, message in (
        ([24], {}, r"a has units 0 \.\.\. 23, got 24"),
        ([-1], {}, "got -1"),
        ([], {}, "no units to steer with"),
        (None, {"tokens": 80}, r"and 80 new ones do not fit into the 64 positions.*lower --tokens"),
        (None, {"prompt": ""}, "the prompt has no tokens"),
    ):
        with pytest.raises(MxdError, match=message):
            evaluate_steering(gpt2, layers, units, SteeringConfig(**options), bos=bool(options.get("prompt", "x")))
    with pytest.raises(MxdError, match="no tokenizer"):
        evaluate_steering(load_frozen(build_model("gpt2")), layers, [0])
    with pytest.raises(MxdError, match="has other weights there"):
        evaluate_steering(load_frozen(build_model("gpt2", seed=1), tokenizer=gpt2.tokenizer), layers, [0])


def test_layers_that_are_not_additive_are_refused_before_any_work(gpt2, build_model, monkeypatch):
    """The model has no tokenizer, which would be the next thing to be refused."""
    layers = {"a": trained_layer(gpt2)}
    monkeypatch.setattr(type(layers["a"].layer), "additive", False)
    with pytest.raises(MxdError, match=r"a unit of TC adds no direction of its own .* mask it instead"):
        evaluate_steering(load_frozen(build_model("gpt2")), layers, [0])


# The command line


@pytest.fixture
def checkpoint(tmp_path, trained_gpt2):
    trained = trained_layer(trained_gpt2, MxDConfig)
    data = {"source": "bundled", "split": "train"}
    provenance = trained.provenance.model_copy(update={"model": "tiny-gpt2", "data": data})
    return save_layer(tmp_path / "block1", trained.layer, provenance)


def test_mxd_steer_writes_samples_and_the_judges_numbers(checkpoint, server, capsys, monkeypatch):
    monkeypatch.setenv("JUDGE", KEY)
    server.replies = [reply("0.50, 1.00"), reply("maybe"), reply("0.70, 0.80"), reply("0.90, 0.95")]
    how = ("--units", "3,7-8", "--samples", "2", "--tokens", "4", "--scale", "5", "--device", "cpu")
    by = ("--judge", server.url, "--judge-model", "m", "--judge-key", "JUDGE")
    code, out, err = mxd(capsys, "steer", checkpoint, *how, *by)
    assert code == 0 and "coherence 0.60, fluency 0.90; of 3 answers 1 failed" in out
    assert "not steered: coherence 0.90, fluency 0.95" in out
    text = (checkpoint / "steering.json").read_text()
    document = json.loads(text)
    (result,) = document["results"].values()
    assert list(result["units"]) == ["3", "7", "8"] and result["units"]["7"]["coherence"] is None
    assert document["judge"] == "m at 127.0.0.1" and document["prompt"] == "Let's talk about "
    assert document["asked"]["scale"] == 5.0 and document["asked"]["top_p"] == 0.1
    assert KEY not in text + out + err


def test_mxd_steer_refuses_half_a_judge_bad_ranges_and_unknown_units(checkpoint, capsys):
    for words, message in (
        (("--judge", "http://127.0.0.1:9"), "got 1 --judge, 0 --judge-model: give each --judge URL"),
        (("--judge-model", "m"), "got 0 --judge, 1 --judge-model"),
        (("--judge-key", "A", "--judge-key", "B"), "and 2 --judge-key"),
        (("--rubric", "mine"), "rubric: expected paraphrase or paper, got 'mine'"),
        (("--units", "0-99999999999"), "expected 100,000 numbers at most"),
        (("--units", "3-x"), "--units is '3-x'; expected numbers and ranges such as 3,17,40-49"),
        (("--units", "99"), "has units 0 ... 23, got 99"),
    ):
        code, _, err = mxd(capsys, "steer", checkpoint, "--device", "cpu", *words)
        assert code == 1 and message in err
    assert not (checkpoint / "steering.json").exists()


def test_mxd_steer_asks_several_judges_with_the_papers_words(checkpoint, server, capsys, monkeypatch):
    monkeypatch.setenv("JUDGE", KEY)
    first, second = ("0.50, 1.00", "0.70, 0.80", "0.90, 0.60"), ("0.40, 0.70", "0.60, 0.90", "0.80, 1.00")
    pairs = zip((*first, "0.10, 0.30"), (*second, "0.20, 0.50"), strict=True)
    server.replies = [reply(answer) for pair in pairs for answer in pair]
    how = ("--units", "3,7-8", "--samples", "2", "--tokens", "4", "--rubric", "paper", "--device", "cpu")
    by = ("--judge", server.url, "--judge-model", "m", "--judge-key", "JUDGE", "--judge-key", "OTHER")
    code, out, _ = mxd(capsys, "steer", checkpoint, *how, *by, "--judge", server.url, "--judge-model", "n")
    (result,) = json.loads((checkpoint / "steering.json").read_text())["results"].values()
    assert code == 0 and [(body["model"], key) for _, body, key in server.asked][:2] == [
        ("m", f"Bearer {KEY}"),
        ("n", None),
    ]
    assert "all snippets clearly share" in server.asked[0][1]["messages"][0]["content"]
    assert result["judge"] == "m at 127.0.0.1, n at 127.0.0.1" and result["rubric"] == "paper"
    assert (result["coherence"], result["fluency"]) == (pytest.approx(0.65), pytest.approx(5 / 6))
    assert result["unsteered_judged"]["coherence"] == pytest.approx(0.15)
    assert "mean over judges: coherence 0.65, fluency 0.83" in out
    assert "coherence: difference 0.10, rank correlation 1.00" in out and "rank correlation -1.00" in out


@pytest.mark.long
def test_mxd_probe_writes_what_units_and_neurons_know(checkpoint, tmp_path, capsys):
    rows = [{"t": f"the number {i} of the wheat harvest", "c": "grain"} for i in range(12)]
    rows += [{"t": f"the vote {i} of the senate and the house", "c": "law"} for i in range(12)]
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    words = ("--set", path, "--text-column", "t", "--label-column", "c", "--device", "cpu", "--last")
    code, out, _ = mxd(capsys, "probe", checkpoint, *words)
    assert code == 0 and "own: 2 classes, sample level, 19 + 5 texts" in out and "MLP neurons, block 1" in out
    document = json.loads((checkpoint / "probing.json").read_text())
    assert set(document["results"]) == {f"{tmp_path.name}/block1", "MLP neurons, block 1"}
    for result in document["results"].values():
        assert result["own"]["side"] == "last" and set(result["own"]["classes"]) == {"grain", "law"}
    assert document["asked"]["sets"] == [str(path)] and document["asked"]["seed"] == 42
    code, _, err = mxd(capsys, "probe", checkpoint, "--set", "nothing", "--device", "cpu")
    assert code == 1 and "no labelled set 'nothing'" in err
