"""Criteria in steps: SNIP in steps, FORCE, SynFlow and the user's, with their steps in NumPy."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import blobs, compiled, same_bits, sgd, value_of, values_of
from iterative_cases import (
    CRITERIA,
    equal,
    kernels_of,
    masks_of,
    normalized_model,
    relu_model,
    scores_of,
    synflow_by_hand,
)
from oracle import DenseByHand, brute_force_mask

import keras_freeze as kf
from keras_freeze.criteria import FORCE, IterativeCriterion, IterativeSNIP, SynFlow

pytestmark = pytest.mark.cases(None, tensorflow=1, jax=1)


# The steps by hand


def count_by_hand(rate, step, steps, total):
    """How many of all weights are left after a step; 1e-9 for the rounding of a power."""
    return int((1.0 - rate) ** (step / steps) * total + 1e-9)


def steps_by_hand(values, gradients_of, score, rate, steps):
    """The masks of kernels after all steps, and how far apart the threshold's scores are."""
    kernels = [value.astype("float64") for value in values[::2]]
    masks, margin = [np.ones(k.shape, bool) for k in kernels], np.inf
    for step in range(1, steps + 1):
        pruned = list(values)
        pruned[::2] = [np.where(m, k, 0.0) for k, m in zip(kernels, masks, strict=True)]
        gradients = gradients_of(pruned)
        scores = [score(k, g, m) for k, g, m in zip(kernels, gradients, masks, strict=True)]
        count = count_by_hand(rate, step, steps, sum(k.size for k in kernels))
        flat = np.sort(np.concatenate([s.ravel() for s in scores]))[::-1]
        margin = min(margin, (flat[count - 1] - flat[count]) / flat[count - 1])
        masks = brute_force_mask(scores, count)
        assert all(mask.any() for mask in masks)  # no layer needs the weight of its own
    return masks, margin


def left(kernel, gradient, mask):
    return np.where(mask, np.abs(kernel * gradient), -1.0)


def whole(kernel, gradient, mask):
    return np.abs(kernel * gradient)


def loss_by_hand(batches):
    def gradients(values):
        parts = [DenseByHand(values).gradients(x, y)[::2] for x, y in batches]
        return [sum(of_kernel) for of_kernel in zip(*parts, strict=True)]

    return gradients


BY_HAND = {
    "synflow in 1": (SynFlow(1), left),
    "synflow in 100": ("synflow", left),
    "snip in 1": (IterativeSNIP(1), left),
    "snip in 10": (IterativeSNIP(), left),
    "force in 1": (FORCE(1), whole),
    "force in 10": (FORCE(), whole),
    "force in 4": (FORCE(4), whole),
}


@pytest.mark.cases(5)
@pytest.mark.parametrize("rate", [0.5, 0.9])
@pytest.mark.parametrize("name", BY_HAND)
def test_masks_of_all_steps_are_those_by_hand(name, rate):
    criterion, score = BY_HAND[name]
    model, (x, y) = relu_model(criterion, rate=rate, biases=True), blobs()
    steps = 100 if criterion == "synflow" else criterion.steps
    values = values_of(model.trainable_variables)
    gradients = synflow_by_hand if "synflow" in name else loss_by_hand([(x, y)])
    expected, margin = steps_by_hand(values, gradients, score, rate, steps)
    assert margin > 1e-5  # float32 cannot tell less apart
    mask = kf.freeze(model, x, y)
    assert equal(masks_of(model), expected)
    assert mask.num_trained == round((1 - rate) * 144 - 0.4)
    found = values_of(kernels_of(model))
    assert equal(found, [np.where(m, v, 0) for m, v in zip(expected, values[::2], strict=True)])


@pytest.mark.same_on_all
def test_steps_change_the_mask_and_force_brings_weights_back():
    """The tests by hand tell the criteria apart."""
    found = {}
    for name, (criterion, _) in BY_HAND.items():
        model = relu_model(criterion, biases=True)
        kf.freeze(model, *blobs())
        found[name] = np.concatenate([m.ravel() for m in masks_of(model)]).tobytes()
    assert found["snip in 1"] == found["force in 1"]
    assert len(set(found.values())) == len(BY_HAND) - 1


@pytest.mark.same_on_all
def test_batches_of_a_dataset_are_summed_in_each_step():
    (x, y), criterion = blobs(), FORCE(3)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
    model = relu_model(criterion, biases=True)
    values = values_of(model.trainable_variables)
    batches = [(x[:16], y[:16]), (x[16:32], y[16:32])]
    kf.freeze(model, dataset, steps=2)
    expected, margin = steps_by_hand(values, loss_by_hand(batches), whole, 0.9, 3)
    assert margin > 1e-5
    assert equal(masks_of(model), expected)


@pytest.mark.cases(1, tensorflow=0, jax=0)
@pytest.mark.parametrize("criterion", CRITERIA, ids=repr)
@pytest.mark.parametrize("frozen_weights", ["keep", "decay"])
def test_where_frozen_weights_stay_in_the_network_one_step_is_all(criterion, frozen_weights):
    """Bit for bit the mask of one score of the whole network."""
    once = type(criterion)(1)
    arguments = {"l2": 0.1} if frozen_weights == "decay" else {}
    masks, scores = [], []
    for one in (criterion, once):
        model = relu_model(one, frozen_weights, **arguments)
        before = values_of(model.variables)
        masks.append(kf.freeze(model, *blobs()))
        assert all(map(same_bits, values_of(model.variables), before))
        scores.append(scores_of(relu_model(one), *blobs(), criterion=one))
    assert masks[0] == masks[1]
    assert all(map(same_bits, *scores))
    pruned = kf.freeze(relu_model(criterion), *blobs())
    assert pruned != masks[0]


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.parametrize("criterion", [IterativeSNIP(1), FORCE(9)], ids=repr)
def test_score_of_the_whole_network_is_that_of_snip(criterion):
    found = scores_of(relu_model("snip"), *blobs(), criterion=criterion)
    expected = scores_of(relu_model("snip"), *blobs(), criterion="snip")
    assert all(map(same_bits, found, expected))


@pytest.mark.cases(6)
@pytest.mark.same_on_all
@pytest.mark.parametrize("rate", [0.0, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("criterion", CRITERIA, ids=repr)
def test_counts_are_exact(criterion, rate):
    model = relu_model(criterion, rate=rate)
    with warnings.catch_warnings():
        if rate != 0.99:  # of which two weights are left at last, on different paths
            warnings.simplefilter("error")
        mask = kf.freeze(model, *blobs())
    assert mask.num_trained - mask.num_rescued == {0.0: 144, 0.5: 72, 0.99: 1, 1.0: 0}[rate]


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.parametrize("distribution", ["uniform", {"body": 0.5}, {"body": 0.0}, {"head": 1.0}])
def test_distribution_holds_in_each_step(distribution):
    """Each rate of a mapping is approached at its own pace; 0 and 1 are there at once."""
    given, seen = [], []

    class Spy(FORCE):
        def rate(self, freeze_rate, step):
            given.append(freeze_rate)
            return super().rate(freeze_rate, step)

        def score(self, weights, gradients, mask):
            seen.append(int(keras.ops.sum(mask)))
            return super().score(weights, gradients, mask)

    model = relu_model(Spy(2), rate=0.75, distribution=distribution)
    (x, y), values = blobs(), values_of(model.trainable_variables)
    kf.freeze(model, x, y)
    rates = {"body": 0.75, "head": 0.75, **(distribution if distribution != "uniform" else {})}
    counts = [
        [
            int((1 - rate) ** part * size + 1e-9)
            for rate, size in zip(rates.values(), (96, 48), strict=True)
        ]
        for part in (0.5, 1.0)
    ]
    assert seen == [96, 48, *counts[0]]
    assert [mask.sum() for mask in masks_of(model)] == counts[1]
    assert set(given) == {0.75, *rates.values()}
    kernels = values[::2]
    gradients_of, masks = loss_by_hand([(x, y)]), None
    for step in counts:
        gradients = gradients_of(values)
        scores = [
            whole(k.astype("float64"), g, None) for k, g in zip(kernels, gradients, strict=True)
        ]
        masks = [brute_force_mask([s], k)[0] for s, k in zip(scores, step, strict=True)]
        values[::2] = [np.where(m, k, 0.0) for m, k in zip(masks, kernels, strict=True)]
    assert equal(masks_of(model), masks)


@pytest.mark.same_on_all
def test_rate_of_a_step_is_a_decimal_number():
    assert [FORCE(2).rate(0.99, 1), SynFlow(4).rate(0.9999, 2)] == [0.9, 0.99]


FINGERPRINTS = {
    "IterativeSNIP(steps=5)": "b70f5b197b6ea3ad",
    "FORCE(steps=5)": "8fd9b10c90e176ff",
    "SynFlow(steps=7)": "7afb43885e230291",
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("criterion", CRITERIA, ids=repr)
def test_three_backends_agree(criterion):
    """From weights that are the same bits everywhere."""
    model = relu_model(criterion)
    kf.reinitialize(model, seed=3)
    mask = kf.freeze(model, *blobs())
    assert mask.fingerprint[:16] == FINGERPRINTS[repr(criterion)]


# What it needs


@pytest.mark.same_on_all
def test_own_train_step_needs_a_loss_for_the_others():
    class Own(keras.Sequential):
        def train_step(self, *args):
            return super().train_step(*args)

    plain = relu_model(FORCE(2))
    model = compiled(Own([keras.Input((6,)), *plain.layers]), plain.optimizer)
    with pytest.raises(ValueError, match="give `freeze` a `loss`"):
        kf.freeze(model, *blobs())


@pytest.mark.parametrize("criterion", ["synflow", *CRITERIA], ids=repr)
def test_first_step_without_freeze_is_an_error(criterion):
    model = relu_model(criterion)
    with pytest.raises(ValueError, match=r"in steps.*keras_freeze\.freeze"):
        model.fit(*blobs(), verbose=0)


# The model is left as it was


class Interrupted(IterativeSNIP):
    """Fails in its second step, as if somebody had pressed Ctrl-C."""

    def __init__(self, error):
        super().__init__(4)
        self.error = error

    def score(self, weights, gradients, mask):
        if not keras.ops.all(mask):
            raise self.error
        return super().score(weights, gradients, mask)


def state_of(model):
    holders = [model, *model.layers]
    values = values_of([*model.variables, *model.metrics_variables])
    return values, [holder.dtype_policy for holder in holders]


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.parametrize("criterion", CRITERIA, ids=repr)
def test_model_is_left_as_it_was(criterion):
    plain = normalized_model()
    optimizer = kf.FreezeOptimizer(sgd(), 0.5, criterion=criterion)
    model = compiled(plain, optimizer, metrics=["accuracy"])
    model.evaluate(*blobs(), verbose=0)
    before, policies = state_of(model)
    random = np.random.get_state()[1].copy()
    kf.freeze(model, *blobs())
    after, policies_after = state_of(model)
    assert all(map(same_bits, after, before))
    assert all(a is b for a, b in zip(policies_after, policies, strict=True))
    assert np.array_equal(np.random.get_state()[1], random)
    model.fit(*blobs(), verbose=0)


@pytest.mark.same_on_all
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("no")], ids=["stop", "error"])
def test_model_is_left_as_it_was_by_a_pass_that_fails(error, monkeypatch):
    model = normalized_model()
    before, policies = state_of(model)
    layer = model.layers[-1]

    def fail(inputs, training):
        assert not same_bits(value_of(layer.kernel), before[-2])  # signs are gone
        raise error

    monkeypatch.setattr(layer, "call", fail)
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else Exception):
        kf.freeze(model)
    after, policies_after = state_of(model)
    assert all(map(same_bits, after, before))
    assert all(a is b for a, b in zip(policies_after, policies, strict=True))
    assert kf.get_mask(model) is None


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("no")], ids=["stop", "error"])
def test_weights_come_back_where_a_step_fails(error):
    model = relu_model(Interrupted(error))
    before = values_of(model.variables)
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else RuntimeError):
        kf.freeze(model, *blobs())
    assert all(map(same_bits, values_of(model.variables), before))
    assert kf.get_mask(model) is None


# Criteria of the user, configurations and files


@keras.saving.register_keras_serializable("test_iterative_criteria")
class Weighted(IterativeCriterion):
    """The power of the weights in the score decides, at rates of a straight line."""

    def __init__(self, steps, power=2.0):
        super().__init__(steps)
        self.power = power

    def score(self, weights, gradients, mask):
        return keras.ops.abs(gradients) * keras.ops.abs(weights) ** self.power

    def rate(self, freeze_rate, step):
        return freeze_rate * step / self.steps

    def get_config(self):
        return {**super().get_config(), "power": self.power}


@pytest.mark.same_on_all
def test_criterion_of_the_user_has_its_score_and_rates():
    model, (x, y) = relu_model(Weighted(3), rate=0.75, biases=True), blobs()
    kernels = values_of(model.trainable_variables)
    gradients_of, seen = loss_by_hand([(x, y)]), []
    values = list(kernels)
    for rate in (0.25, 0.5, 0.75):
        scores = [
            np.abs(g) * np.abs(k.astype("float64")) ** 2
            for g, k in zip(gradients_of(values), kernels[::2], strict=True)
        ]
        masks = brute_force_mask(scores, int((1 - rate) * 144))
        values[::2] = [np.where(m, k, 0.0) for m, k in zip(masks, kernels[::2], strict=True)]
        seen.append(masks)
    kf.freeze(model, x, y)
    assert equal(masks_of(model), seen[-1])


@pytest.mark.same_on_all
def test_criterion_without_a_score_says_so():
    with pytest.raises(NotImplementedError, match="IterativeCriterion must define `score`"):
        kf.freeze(relu_model(IterativeCriterion(2)), *blobs())


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.parametrize(
    "criterion", ["synflow", SynFlow(3), FORCE(3), IterativeSNIP(2), Weighted(2, 0.5)], ids=repr
)
def test_criterion_survives_configuration_and_files(tmp_path, criterion):
    model = relu_model(criterion)
    optimizer = kf.FreezeOptimizer.from_config(model.optimizer.get_config())
    assert optimizer.criterion == criterion
    kf.freeze(model, *blobs())
    model.save(tmp_path / "model.keras")
    kf.save(model, tmp_path / "model.freeze", include_optimizer=True)
    custom = {"test_iterative_criteria>Weighted": Weighted}
    for loaded in (
        keras.saving.load_model(tmp_path / "model.keras"),
        kf.load(tmp_path / "model.freeze", custom_objects=custom),
    ):
        assert loaded.optimizer.criterion == criterion
        assert kf.get_mask(loaded) == kf.get_mask(model)
        assert all(map(same_bits, values_of(loaded.variables), values_of(model.variables)))


@pytest.mark.same_on_all
def test_descriptions_tell_settings():
    assert kf.criteria.in_words("synflow") == kf.criteria.in_words(SynFlow())
    assert kf.criteria.in_words(SynFlow()) == "SynFlow(steps=100)"
    assert kf.criteria.in_words(FORCE()) == "FORCE(steps=10)"
    assert kf.criteria.in_words(Weighted(2)) == f"{__name__}.Weighted(steps=2, power=2.0)"


@pytest.mark.same_on_all
def test_criteria_are_equal_when_their_settings_are():
    assert FORCE(np.int64(3)) == FORCE(3)
    assert hash(FORCE(3)) == hash(FORCE(3))
    assert FORCE(3) != FORCE(4)
    assert FORCE(3) != IterativeSNIP(3)
    assert Weighted.from_config(Weighted(2, 3.0).get_config()) == Weighted(2, 3.0)


@pytest.mark.same_on_all
def test_class_in_place_of_a_criterion_is_refused():
    with pytest.raises(TypeError, match="criterion"):
        kf.FreezeOptimizer(sgd(), criterion=FORCE)
