"""Ten whole programs of the kind that people publish for Keras, each frozen by two lines.

A program has these functions, in the order in which a script calls them: `make_model`,
`compile_model` (with the FreezeOptimizer, the one line that differs), `freeze_model` (the one line
more; without it the first batch decides), `train` (returns the losses), `keep` (what one keeps of
the training). `networks` gives what is trained, with its optimizer.
"""

import importlib
import math
import types
from dataclasses import dataclass
from fractions import Fraction

import keras
import numpy as np
import pytest
from helpers import (
    assert_frozen_bits_kept,
    assert_trained_moved,
    is_weight,
    same_bits,
    value_of,
    values_of,
)

import keras_freeze as kf

pytestmark = pytest.mark.cases(2, tensorflow=0, jax=0)

BACKEND = keras.backend.backend()
# What Keras lets each program be written for; `train_step` is another one on each backend.
PROGRAMS = {
    "vae": ("tensorflow", "torch"),
    "normalizing_flow": ("tensorflow", "jax", "torch"),
    "wgan_gp": ("tensorflow",),
    "distillation": ("tensorflow", "jax", "torch"),
    "siamese": ("tensorflow", "jax"),
    "actor_critic": ("tensorflow", "torch"),
    "diffusion": ("tensorflow", "torch"),
    "vqvae": ("tensorflow", "jax", "torch"),
    "seq2seq": ("tensorflow", "jax", "torch"),
    "graph_attention": ("tensorflow", "jax"),
}
# The loss of an episode, or of a critic that the generator learns to fool, need not go down.
WITHOUT_FALLING_LOSS = ("actor_critic", "wgan_gp")
WAYS = ("freeze", "first_batch")
CASES = [(name, way) for name in PROGRAMS for way in WAYS]


@dataclass
class Finished:
    """A program that has been run."""

    program: types.ModuleType
    model: object
    before: list[list[np.ndarray]]
    losses: list[float]

    @property
    def networks(self):
        return self.program.networks(self.model)

    @property
    def optimizers(self):
        """Each with the networks that it trains."""
        by_id = {}
        for network, optimizer in self.networks:
            by_id.setdefault(id(optimizer), (optimizer, []))[1].append(network)
        return list(by_id.values())


def start(name, seed=0):
    """A program with its model, compiled."""
    if BACKEND not in PROGRAMS[name]:
        pytest.skip(f"written for {' and '.join(PROGRAMS[name])}")
    keras.utils.set_random_seed(seed)
    program = importlib.import_module(name)
    model = program.make_model()
    program.compile_model(model)
    return program, model


def build(program, model):
    """Gives a network its variables where Keras would do so with the first batch."""
    if not all(network.built for network, _ in program.networks(model)):
        network, inputs = program.keep(model)
        network(inputs)


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def finished(request):
    name, way = request.param
    if (name, way, BACKEND) == ("diffusion", "first_batch", "torch"):
        pytest.skip("Keras builds the optimizer with the averages, which have no gradient")
    program, model = start(name)
    if way == "freeze":
        program.freeze_model(model)
    build(program, model)
    before = [values_of(n.trainable_variables) for n, _ in program.networks(model)]
    return Finished(program, model, before, program.train(model))


def weights_of(networks):
    return [v for network in networks for v in network.trainable_variables if is_weight(v)]


def assert_bits_kept(finished):
    for (network, optimizer), before in zip(finished.networks, finished.before, strict=True):
        assert_frozen_bits_kept(network.trainable_variables, optimizer.mask, before)


@pytest.mark.cases(1)
def test_program_learns(finished):
    losses = finished.losses
    assert np.isfinite(losses).all()
    if finished.program.__name__ not in WITHOUT_FALLING_LOSS:
        assert losses[-1] < losses[0]


def test_only_what_is_trained_moves(finished):
    assert_bits_kept(finished)
    for optimizer, networks in finished.optimizers:
        pairs = zip(finished.networks, finished.before, strict=True)
        pairs = [(n, values) for (n, _), values in pairs if n in networks]
        variables = [v for network, _ in pairs for v in network.trainable_variables]
        before = [value for _, values in pairs for value in values]
        assert_trained_moved(variables, optimizer.mask, before)


def test_mask_covers_what_its_optimizer_trains_and_nothing_else(finished):
    """No teacher, no averages; the tower once; of two optimizers each its own network."""
    for optimizer, networks in finished.optimizers:
        weights, mask = weights_of(networks), optimizer.mask
        assert mask.num_weights == sum(math.prod(v.shape) for v in weights)
        assert mask.num_trained == sum(np.count_nonzero(mask[v]) for v in weights)
        rate = Fraction(str(optimizer.freeze_rate))  # without the rounding of floats
        extra = mask.num_trained - math.floor((1 - rate) * mask.num_weights)
        assert 0 <= extra <= sum(np.count_nonzero(mask[v]) == 1 for v in weights)


def test_network_knows_its_mask_and_reports_it(finished):
    for optimizer, networks in finished.optimizers:
        for network in networks:
            weights, mask = weights_of([network]), kf.get_mask(network)
            assert all(np.array_equal(mask[v], optimizer.mask[v]) for v in weights)
            report = kf.report(network).to_dict()
            assert report["num_weights"] == sum(math.prod(v.shape) for v in weights)
            assert report["num_trained_weights"] == sum(
                np.count_nonzero(optimizer.mask[v]) for v in weights
            )


@pytest.mark.cases(1)
def test_compiling_again_keeps_the_mask(finished):
    masks = [optimizer.mask for _, optimizer in finished.networks]
    finished.program.compile_model(finished.model)
    finished.program.train(finished.model)
    assert [optimizer.mask for _, optimizer in finished.networks] == masks
    assert_bits_kept(finished)


@pytest.mark.cases(1)
def test_what_one_keeps_is_a_small_file_and_the_same_when_loaded(finished, tmp_path):
    network, inputs = finished.program.keep(finished.model)
    kf.save(network, tmp_path / "kept.freeze")
    dense = sum(value.nbytes for value in values_of(network.trainable_variables))
    assert (tmp_path / "kept.freeze").stat().st_size < dense / 3
    loaded = kf.load(tmp_path / "kept.freeze")
    for variable, other in zip(network.variables, loaded.variables, strict=True):
        assert same_bits(value_of(variable), value_of(other)), variable.path
    outputs, others = (keras.tree.flatten(model(inputs)) for model in (network, loaded))
    for output, other in zip(outputs, others, strict=True):
        assert same_bits(value_of(output), value_of(other))


@pytest.mark.cases(1)
def test_weights_of_a_whole_model_bring_their_masks(finished, tmp_path):
    if not isinstance(finished.model, keras.Model):
        pytest.skip("there is no model around network and optimizer")
    if not finished.model.built:
        pytest.skip("Keras does not save a model that is never called")
    finished.model.save_weights(tmp_path / "all.weights.h5")
    program, model = start(finished.program.__name__, seed=1)
    build(program, model)
    model.built = True  # which Keras asks for; of an outer model, it is its layers that count
    model.load_weights(tmp_path / "all.weights.h5")
    pairs = list(zip(program.networks(model), finished.networks, strict=True))
    before = [values_of(network.trainable_variables) for (network, _), _ in pairs]
    program.train(model)
    for ((network, optimizer), (saved, saved_optimizer)), values in zip(pairs, before, strict=True):
        assert all(map(same_bits, values, values_of(saved.trainable_variables)))
        assert optimizer.mask == saved_optimizer.mask
        assert kf.get_mask(network) == kf.get_mask(saved)
        assert_frozen_bits_kept(network.trainable_variables, optimizer.mask, values)
