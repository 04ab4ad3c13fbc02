"""Optimisers, and what keeps units alive: scaled activations, K that falls, the AuxK loss."""

from pathlib import Path

import numpy as np
import pytest
import torch
from runs import assert_same_run, small, stop_after, tensors

from mxd.config import TrainingConfig
from mxd.layers import MLPShape, parse_layer
from mxd.layers.losses import normalized_mse
from mxd.training.optimizers import Optimizer, Signum
from mxd.training.step import mean_sizes, new_trainee, train_step, widening
from mxd.training.trainer import train

SHAPE = MLPShape(6, 5, 8, "gelu_tanh", False)
LAYERS = [{"method": "mxd"}, {"method": "transcoder", "skip": True}, {"method": "cp_mumoe", "rank": 4}]


def trainee_of(fields, **training):
    config = parse_layer(fields | {"num_units": 16, "sparsity": {"kind": "topk", "k": 4}}).resolve(SHAPE)
    recipe = TrainingConfig(tokens=40 * 32, batch_tokens=32, buffer_tokens=32, lr=1e-2, warmup_steps=0, **training)
    trainee = new_trainee("a", 0, config, 0, torch.device("cpu"), recipe)
    trainee.layer.double()
    return trainee, recipe


def data(step):
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return x, x[:, :5].roll(1, 1).abs() + x[:, 1:]


# --- scaled activations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adam", "signum"])
@pytest.mark.parametrize("fields", LAYERS, ids=lambda fields: fields["method"])
def test_scaled_training_is_training_on_scaled_activations(fields, optimizer):
    """The same steps as a layer that is given ``s x`` and ``t y``, its factors folded in at the end."""
    s, t = 37.0, 0.02
    (ours, recipe), (other, _) = (trainee_of(fields, optimizer=optimizer) for _ in range(2))
    ours.scale((s, t))
    ours.enlarge()
    for step in range(20):
        x, y = data(step)
        train_step(ours, x / s, y / t, recipe, step)
        train_step(other, x, y, recipe, step)
    x, y = data(99)
    torch.testing.assert_close(t * ours.layer(x / s), other.layer(x), rtol=1e-4, atol=1e-6)
    assert normalized_mse(other.layer(x), y) < normalized_mse(trainee_of(fields)[0].layer(x), y)


def test_sizes_are_means_of_norms():
    x, y = (t.numpy() for t in data(3))
    found = mean_sizes((torch.from_numpy(x), torch.from_numpy(y)), trainee_of(LAYERS[0])[0].processes)
    expected = [1 / (np.linalg.norm(a, axis=1).mean() / np.sqrt(a.shape[1])) for a in (x, y)]
    np.testing.assert_allclose(found, expected)


# --- optimisers -----------------------------------------------------------------------------------------------------


def test_signum_is_the_sign_of_a_running_mean():
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer, mean, expected = Signum([parameter], lr=0.5, momentum=0.75), np.zeros(4), np.zeros(4)
    for step in range(5):
        parameter.grad = torch.tensor([1.0, -2.0, 0.0, (-1.0) ** step * 3])
        mean = 0.75 * mean + 0.25 * parameter.grad.numpy()
        expected -= 0.5 * np.sign(mean)
        optimizer.step()
    np.testing.assert_allclose(parameter.detach(), expected)
    assert parameter[2] == 0


def test_muon_takes_the_matrices_and_adam_the_rest():
    layer = trainee_of(LAYERS[0])[0].layer.float()
    parameters = dict(layer.named_parameters())
    kinds = {type(part): part for part in Optimizer(parameters, "muon", {}, 1.0).parts}
    matrices = {id(p) for group in kinds[torch.optim.Muon].param_groups for p in group["params"]}
    assert matrices == {id(p) for p in parameters.values() if p.ndim == 2}
    rest = {id(p) for group in kinds[torch.optim.Adam].param_groups for p in group["params"]}
    assert matrices | rest == {id(p) for p in parameters.values()} and not matrices & rest


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["adam", "signum", "muon"])
def test_a_run_resumes_bit_for_bit_with_everything_on(tmp_path: Path, optimizer, trained_gpt2) -> None:
    training = {
        "optimizer": optimizer,
        "scaled": True,
        "k_start": 3.0,
        "auxk": 0.03,
        "dead_after": 512,
        "save_every": 4,
    }
    whole = train(small(tmp_path, run="whole", training=training), model=trained_gpt2)
    stopped = small(tmp_path, run="stopped", training=training)
    stop_after(9, stopped, trained_gpt2)
    assert_same_run(whole, train(stopped, resume=True, model=trained_gpt2))
    assert float(tensors(whole)["state/block2-mxd-k8/scales"][1]) != 1


# --- K that falls ---------------------------------------------------------------------------------------------------


def test_k_falls_linearly_to_its_own_value_after_half_of_the_steps():
    recipe = trainee_of(LAYERS[0], k_start=3.0)[1]
    assert [widening(step, recipe) for step in (0, 10, 20, 39)] == [3.0, 2.0, 1.0, 1.0]
    assert widening(0, trainee_of(LAYERS[0])[1]) == 1.0


def test_a_wider_k_is_for_training_and_never_more_than_there_are_units():
    trainee, recipe = trainee_of(LAYERS[1], k_start=10.0)
    x, y = data(0)
    train_step(trainee, x, y, recipe, 0)
    assert trainee.layer.encode(x).indices.shape[1] == 16
    assert trainee.layer.eval().encode(x).indices.shape[1] == 4
    train_step(trainee, x, y, recipe, 39)
    assert trainee.layer.train().encode(x).indices.shape[1] == 4


# --- AuxK -----------------------------------------------------------------------------------------------------------


def test_dead_units_are_found_by_their_last_activity():
    trainee, recipe = trainee_of(LAYERS[1], auxk=0.1)
    trainee.stats.last_active.copy_(torch.arange(16) * 32)
    assert recipe.dead_tokens == 64
    assert torch.equal(trainee.dead(480, recipe), 480 - torch.arange(16) * 32 >= 64)
    assert trainee_of(LAYERS[1])[0].dead(480, trainee_of(LAYERS[1])[1]) is None


def test_auxk_moves_units_that_are_never_chosen():
    moved = []
    for auxk in (0.0, 1 / 32):
        trainee, recipe = trainee_of(LAYERS[1], auxk=auxk)
        trainee.layer.encoder.data[8:] *= 1e-3  # positive for some tokens, never among the K largest
        trainee.layer.encoder_bias.data[:8] = 3.0
        for step in range(6):
            train_step(trainee, *data(step), recipe, step)
        assert not torch.isin(trainee.layer.encode(data(9)[0]).indices, torch.arange(8, 16)).any()
        moved.append([float(trainee.layer.decoder.detach()[half].abs().max()) for half in (slice(8), slice(8, 16))])
    assert moved[0][0] > 0 and moved[0][1] == 0
    assert moved[1][1] > 0
