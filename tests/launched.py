"""What one process of a launch does in tests/test_distributed.py: trains, and writes down which tokens it trained on.

    torchrun --nproc-per-node 2 tests/launched.py JOB...     each JOB is JSON, of these fields:

config: a run's, as a mapping; resume, groups, shard: as for ``train``; ids: folder for the token ids of this process's
part of every batch; poison: [rank, forward] whose activations are NaN; stop: step before which rank 0 gets a SIGTERM;
kill: [rank, step before which it is killed]; expect: text that an error holds; cache: folder to which the activations
are written, and nothing is trained; hub: folder of .jsonl files in place of the Hub; own: rank -> fields that are
different for it.
"""

import importlib
import json
import os
import signal
import sys
from pathlib import Path

import datasets
import numpy as np
import torch
from streams import served

from mxd.common.errors import MxdError
from mxd.common.processes import launched
from mxd.config import parse_config
from mxd.data import streams
from mxd.model.loading import load_frozen
from mxd.training.source import cache_activations

RANK = int(os.environ.get("RANK", 0))
module = importlib.import_module("mxd.training.trainer")
real_stream = module.activation_stream


def run(job: dict) -> None:
    seen = []
    job = job | job.get("own", {}).get(str(RANK), {})

    def recorded(*args):
        for step, batch in enumerate(real_stream(*args)):
            if [RANK, step] == job.get("kill"):
                os.kill(os.getpid(), signal.SIGKILL)
            if step == job.get("stop") and RANK == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            seen.append(batch.ids.numpy())
            yield batch

    if "hub" in job:
        datasets.load_dataset = served(Path(job["hub"]), "jsonl")
        streams.WINDOW, streams.BATCH = 24, 5
    module.activation_stream = recorded
    config = parse_config(job["config"])
    model = load_frozen(config.model.source, device="cpu")
    rank, forward = job.get("poison", (None, None))
    if rank == RANK:
        calls = []

        def poison(mlp, args, output):
            calls.extend([1] * (output.shape[1] > 1))  # BOS alone, whose output is stored, is no forward of the stream
            return output * float("nan") if len(calls) > forward else output

        model.mlp(config.blocks[0]).register_forward_hook(poison)
    try:
        if "cache" in job:
            cache_activations(config, job["cache"], model)
        else:
            module.train(config, job.get("resume", False), model, job.get("groups"), job.get("shard", False))
        assert "expect" not in job
    except MxdError as error:
        assert job.get("expect", "nothing") in str(error), f"rank {RANK}: {error}"
    if "ids" in job:
        folder = Path(job["ids"])
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / f"{RANK}.npy", np.array(seen))


torch.set_num_threads(1)
with launched():  # one process group for all jobs
    for text in sys.argv[1:]:
        run(json.loads(text))
