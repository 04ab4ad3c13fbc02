"""A stand-in for the lm-evaluation-harness, which the tests do not install."""

from types import ModuleType

import torch

IDS = torch.tensor([[0, 5, 9, 300, 17]])


class StandIn:
    """Knows two tasks, whose one metric is a logit of the model as it then is; notes how it was called."""

    def __init__(self):
        self.calls, self.included, self.error = [], [], None

    def manager(self, include_path=None):
        self.included.append(include_path)
        stand_in = ModuleType("manager")
        stand_in.match_tasks = lambda names: [
            task for task in ("arc_easy", "arc_hard") if any(n in ("arc_*", task) for n in names)
        ]
        return stand_in

    def model(self, pretrained, tokenizer, batch_size):
        tokenizer.pad_token = "changed"
        return pretrained

    def simple_evaluate(self, model, tasks, limit, task_manager, log_samples):
        if self.error:
            raise self.error
        self.calls.append((tasks, limit))
        with torch.no_grad():
            logits = model(input_ids=IDS).logits[0]
        logit = float(logits[-1, 7])
        results = {"results": {t: {"alias": t, "acc,none": logit, "acc_stderr,none": 0.5} for t in tasks}}
        samples = {t: self.samples(logits, len(t)) for t in tasks}
        return results | ({"samples": samples} if log_samples else {})

    def samples(self, logits, first):
        """Of each of 40 documents, in another order, whether one token is likelier than another; twice filtered."""
        right = (logits[-1, first : first + 40] > logits[-2, first : first + 40]).double().tolist()
        return [
            {"doc_id": n, "filter": f, "metrics": ["acc"], "acc": right[n] if f == "none" else 0.5}
            for n in reversed(range(40))
            for f in ("none", "second")
        ]
