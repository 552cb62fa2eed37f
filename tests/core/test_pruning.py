"""The check whether frozen weights can be pruned, against networks computed by hand."""

import keras
import numpy as np
import pytest
from helpers import blobs, compiled, dense_model, fit, same_bits, sgd, value_of, values_of
from keras import layers

import keras_freeze as kf
from keras_freeze.pruning import check_pruning

pytestmark = [pytest.mark.cases(1, tensorflow=0, jax=0), pytest.mark.slow]

METHODS = {
    "keep": {},
    "zero": {"frozen_weights": "zero"},
    "decay": {"frozen_weights": "decay", "l2": 0.2},
}


def linear_model(kernel, frozen, **arguments):
    """One layer with these weights and no bias, of which the frozen ones are given."""
    model = keras.Sequential(
        [keras.Input((len(kernel),)), layers.Dense(1, use_bias=False, name="only")]
    )
    arguments = {"loss": "mse", "metrics": ["mae"], **arguments}
    compiled(model, kf.FreezeOptimizer(sgd()), **arguments)
    model.layers[0].kernel.assign(np.array(kernel, "float32")[:, None])
    trained = ~np.isin(np.arange(len(kernel)), frozen)[:, None]
    kf.freeze(model, mask={"only/kernel": trained})
    return model


def network(method="keep", way="compact", inner=None, steps=True, dtype="float32"):
    """A network with Dropout and normalization, frozen and trained for a while."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="tanh", dtype=dtype),
            layers.BatchNormalization(dtype=dtype),
            layers.Dropout(0.3),
            layers.Dense(3, dtype=dtype),
        ]
    )
    kf.reinitialize(model, seed=1)
    inner = sgd(0.05, momentum=0.9) if inner is None else inner
    compiled(model, kf.FreezeOptimizer(inner, 0.75, **METHODS[method]), metrics=["accuracy"])
    if way == "compact":
        kf.freeze(model, *blobs())
    if steps:
        fit(model, *blobs(), epochs=2, batch_size=12)
    return model


def state_of(model):
    """All that a model consists of, but for metrics that do not exist yet."""
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    return variables, values_of(variables)


def assert_same_state(state):
    for variable, value in zip(*state, strict=True):
        assert same_bits(value_of(variable), value), variable.path


def test_losses_and_largest_frozen_weight_equal_manual_ones():
    model = linear_model([1.0, 2.0, -3.0, 0.5], frozen=[1, 2])
    x = np.array([[1, 0, 0, 2], [0, 1, 1, 0], [2, 1, 0, 4], [0, 0, -1, 0]], "float32")
    y = np.array([[2], [0], [4], [1]], "float32")
    # outputs 2, -1, 6, 3 with errors 0, -1, 2, 2; pruned 2, 0, 4, 0 with errors 0, 0, 0, -1
    check = check_pruning(model, x, y)
    assert check.largest_frozen_weight == 3.0
    assert check.before == {"loss": 9 / 4, "mae": 5 / 4}
    assert check.after == {"loss": 1 / 4, "mae": 1 / 4}
    assert check.changes == {"loss": -2.0, "mae": -1.0}


def test_a_large_trained_weight_does_not_count():
    check = check_pruning(linear_model([-9.0, 0.25], frozen=[1]), np.eye(2), np.zeros((2, 1)))
    assert check.largest_frozen_weight == 0.25
    assert check.before["mae"] == (9 + 0.25) / 2
    assert check.after["mae"] == 9 / 2


def test_without_frozen_weights_nothing_is_pruned():
    check = check_pruning(linear_model([1.0, 2.0], frozen=[]), np.eye(2), np.zeros((2, 1)))
    assert check.largest_frozen_weight == 0.0
    assert check.before == check.after == {"loss": 5 / 2, "mae": 3 / 2}


def test_frozen_biases_of_a_users_mask_count():
    model = keras.Sequential([keras.Input((1,)), layers.Dense(2, name="only")])
    compiled(model, kf.FreezeOptimizer(sgd()), loss="mae")
    model.set_weights([np.ones((1, 2)), np.array([4.0, -5.0])])
    bias = np.array([True, False])
    kf.freeze(model, mask={"only/kernel": np.ones((1, 2), bool), "only/bias": bias})
    check = check_pruning(model, np.zeros((3, 1)), np.zeros((3, 2)))
    assert check.largest_frozen_weight == 5.0
    assert (check.before, check.after) == ({"loss": 9 / 2}, {"loss": 2.0})


class OneBatch(keras.utils.PyDataset):
    """A dataset of one batch."""

    def __init__(self, batch):
        super().__init__()
        self._batch = batch

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return self._batch


def tf_dataset(batch):
    tf = pytest.importorskip("tensorflow", reason="tf.data is TensorFlow's")
    return tf.data.Dataset.from_tensors(batch)


@pytest.mark.cases(2, tensorflow=2, jax=2)
@pytest.mark.parametrize("dataset", [OneBatch, tf_dataset])
def test_a_dataset_with_sample_weights_and_a_model_without_metrics(dataset):
    model = linear_model([1.0, 2.0], frozen=[1], metrics=None)
    batch = np.eye(2), np.zeros((2, 1)), np.array([3.0, 1.0])
    check = check_pruning(model, dataset(batch))
    # errors 1 and 2, squared 1 and 4; Keras divides by the number of examples
    assert (check.before, check.after) == ({"loss": (3 + 4) / 2}, {"loss": 3 / 2})


def test_changes_of_a_metric_for_each_class_are_arrays():
    x, y = blobs()
    targets = keras.utils.to_categorical(y, 3)
    model = dense_model()
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    compiled(model, loss=loss, metrics=[keras.metrics.F1Score(name="f1")])
    kf.freeze(model, x, targets)
    changes = check_pruning(model, x, targets).changes
    assert np.shape(changes["f1"]) == (3,)
    assert np.shape(changes["loss"]) == ()


@pytest.mark.parametrize(
    ("method", "way"),
    [
        ("keep", "full shape"),
        ("decay", "compact"),
        ("decay", "full shape"),
        ("zero", "compact"),
    ],
)
def test_a_check_changes_neither_the_model_nor_later_training(method, way):
    model = network(method, way)  # seeds the random numbers first, Dropout's included
    state = state_of(model)
    check = check_pruning(model, *blobs(), batch_size=7)
    assert_same_state(state)
    fit(model, *blobs(), batch_size=12, shuffle=True)
    other = network(method, way)
    fit(other, *blobs(), batch_size=12, shuffle=True)
    for a, b in zip(state_of(model)[1], state_of(other)[1], strict=True):
        assert same_bits(a, b)
    assert (check.largest_frozen_weight == 0.0) == (method == "zero")
    assert all(change == 0 for change in check.changes.values()) == (method == "zero")


def test_a_check_before_the_first_epoch_does_not_change_the_training():
    x, y = blobs()
    trained = []
    for check in (True, False):
        model = network(steps=False)
        if check:
            check_pruning(model, x, y)
        fit(model, x, y, batch_size=12)
        metrics = model.evaluate(x, y, verbose=0)
        trained.append((values_of(model.variables), metrics))
    for a, b in zip(trained[0][0], trained[1][0], strict=True):
        assert same_bits(a, b)
    assert trained[0][1] == trained[1][1]


def get_entries(model):
    return kf.get_mask(model).entries


@pytest.mark.parametrize("method", list(METHODS))
def test_a_check_equals_evaluating_before_and_after_prune(method):
    model = network(method)
    frozen = np.concatenate(
        [value_of(model.trainable_variables[e.position])[~e.trained] for e in get_entries(model)]
    )
    check = check_pruning(model, *blobs())
    assert check.largest_frozen_weight == np.abs(frozen).max()
    assert check.before == model.evaluate(*blobs(), verbose=0, return_dict=True)
    kf.prune(model)
    assert check.after == model.evaluate(*blobs(), verbose=0, return_dict=True)


def test_decay_makes_pruning_harmless():
    model = network("decay", inner=sgd(1.0), steps=False)
    first = check_pruning(model, *blobs())
    fit(model, *blobs(), epochs=15, batch_size=12)  # 60 steps, each times 1 - 1.0 * 0.2
    last = check_pruning(model, *blobs())
    assert first.largest_frozen_weight > 0.3
    assert last.largest_frozen_weight == pytest.approx(
        first.largest_frozen_weight * 0.8**60, rel=1e-3
    )
    assert abs(first.changes["loss"]) > 1e-2
    assert abs(last.changes["loss"]) < 1e-5
    assert last.changes["accuracy"] == 0.0


def test_moving_averages_of_weights_are_kept():
    model = network(inner=keras.optimizers.SGD(0.05, use_ema=True))
    averages = model.optimizer.inner_optimizer._model_variables_moving_average
    assert any(average is not None for average in averages)
    state = state_of(model)
    check_pruning(model, *blobs())
    assert_same_state(state)


def test_metrics_continue_after_a_check():
    x, y = blobs()
    results = []
    for check in (True, False):
        model = network(steps=False)
        model.train_on_batch(x[:8], y[:8])
        if check:
            check_pruning(model, x, y)
        model.train_on_batch(x[8:20], y[8:20])
        results.append(model.get_metrics_result())
    assert results[0] == results[1]


def test_a_check_leaves_unbuilt_metrics_unbuilt():
    model = network(steps=False)
    assert len(model.metrics_variables) == 2  # those of the loss
    check_pruning(model, *blobs())
    assert len(model.metrics_variables) == 2
    assert not any(value_of(variable).any() for variable in model.metrics_variables)


class Noise(layers.Layer):
    """Draws random numbers outside of training too: by a seed of its own, or the global ones."""

    def __init__(self, seed):
        super().__init__()
        self.seed = keras.random.SeedGenerator(seed) if seed else None

    def call(self, x):
        return x + keras.random.normal(keras.ops.shape(x), seed=self.seed)


@pytest.mark.cases(2, tensorflow=2, jax=2)
@pytest.mark.parametrize("seed", [3, None])
def test_both_evaluations_draw_the_same_random_numbers_and_random_state_is_kept(seed):
    if seed is None and keras.backend.backend() == "jax":
        pytest.skip("JAX traces no random numbers without a seed")
    model = keras.Sequential([keras.Input((6,)), Noise(seed), layers.Dense(3)])
    compiled(model, kf.FreezeOptimizer(sgd(), frozen_weights="zero"))
    kf.freeze(model, *blobs())
    keras.utils.set_random_seed(5)
    first = value_of(keras.random.normal((3,)))
    second = value_of(keras.random.normal((3,)))
    keras.utils.set_random_seed(5)
    assert same_bits(value_of(keras.random.normal((3,))), first)
    assert check_pruning(model, *blobs()).changes == {"loss": 0.0}
    assert same_bits(value_of(keras.random.normal((3,))), second)


def test_weights_in_bfloat16_count():
    model = network(dtype="bfloat16")
    entries = get_entries(model)
    frozen = [value_of(model.trainable_variables[e.position])[~e.trained] for e in entries]
    expected = max(float(np.abs(values.astype("float32")).max()) for values in frozen)
    assert check_pruning(model, *blobs()).largest_frozen_weight == expected


def test_a_frozen_nan_is_reported_and_a_trained_nan_is_not():
    x, y = np.eye(2), np.zeros((2, 1))
    assert np.isnan(check_pruning(linear_model([1.0, np.nan], [1]), x, y).largest_frozen_weight)
    assert check_pruning(linear_model([1.0, np.nan], [0]), x, y).largest_frozen_weight == 1.0


@pytest.mark.parametrize("include_optimizer", [False, True])
def test_a_pruned_model_keeps_its_zeros_when_trained_and_loaded(include_optimizer, tmp_path):
    model = network("decay")
    kf.prune(model)
    path = tmp_path / "model.freeze"
    kf.save(model, path, include_optimizer=include_optimizer)
    loaded = kf.load(path)
    for one in (model, loaded):
        # Not before `fit`, which draws random numbers on PyTorch where it builds the metrics.
        seed = keras.callbacks.LambdaCallback()
        seed.on_train_begin = lambda logs=None: keras.utils.set_random_seed(2)
        fit(one, *blobs(), batch_size=12, callbacks=[seed])
        for entry in get_entries(one):
            frozen = value_of(one.trainable_variables[entry.position])[~entry.trained]
            assert frozen.size
            assert not frozen.any()
        assert check_pruning(one, *blobs()).largest_frozen_weight == 0.0
    kf.save(loaded, path)
    for a, b in zip(loaded.variables, kf.load(path).variables, strict=True):
        assert same_bits(value_of(a), value_of(b))
    if include_optimizer:
        for a, b in zip(model.variables, loaded.variables, strict=True):
            assert same_bits(value_of(a), value_of(b))


def test_a_model_that_is_not_frozen_raises_as_in_prune():
    model = compiled(dense_model())
    for call in (lambda: kf.prune(model), lambda: check_pruning(model, *blobs())):
        with pytest.raises(ValueError, match="No weight is frozen yet"):
            call()
    plain = compiled(dense_model(), sgd())
    with pytest.raises(ValueError, match=r"compiled with one FreezeOptimizer.*Received: SGD"):
        check_pruning(plain, *blobs())


def test_anything_but_a_model_raises():
    with pytest.raises(TypeError, match=r"`model` must be a keras\.Model.*'digits.freeze'"):
        check_pruning("digits.freeze", *blobs())


def test_data_that_can_be_read_only_once_raise():
    model = network()
    with pytest.raises(ValueError, match=r"`x` must be arrays.*twice.*generator"):
        check_pruning(model, (batch for batch in [blobs()]))


def test_an_error_in_the_data_leaves_the_model_unchanged():
    model = network()
    state = state_of(model)
    with pytest.raises(ValueError, match="expected axis -1"):
        check_pruning(model, np.zeros((4, 5)), np.zeros(4))
    assert_same_state(state)
