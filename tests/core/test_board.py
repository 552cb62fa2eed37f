"""FreezeBoard: what it writes, read back by TensorBoard's own reader, and drift made by hand."""

import contextlib
import sys
import warnings

import keras
import numpy as np
import pytest
from helpers import (
    blobs,
    compiled,
    dense_model,
    fit,
    gradients_by_autodiff,
    is_weight,
    same_bits,
    sgd,
    two_dense_layers,
    value_of,
)
from keras import layers
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import keras_freeze as kf
from keras_freeze.callbacks.freeze_board import FreezeBoard
from keras_freeze.callbacks.gradient_flow_history import GradientFlowHistory
from keras_freeze.optimizer.state import State

pytestmark = pytest.mark.cases(2, tensorflow=0, jax=0)

BODY, HEAD = "net/body/kernel", "net/head/kernel"
CHANGED = "Frozen weights have changed since training began"


def read(log_dir):
    """{tag: {step: value}}, as TensorBoard's own reader finds them."""
    events = EventAccumulator(str(log_dir / "freeze"), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: {event.step: event.value for event in events.Scalars(tag)}
        for tag in events.Tags()["scalars"]
    }


def drifts(log_dir):
    """The total drift after each epoch."""
    return list(read(log_dir)["frozen_drift"].values())


def small_model(seed=0):
    """Kernels of 6 x 8 and 8 x 3, biases of 8 and 3."""
    return two_dense_layers(seed, name="net")


def eager(model, optimizer=None, **arguments):
    """Compiled without traces, which take most of the time of such small tests."""
    return compiled(model, optimizer, run_eagerly=True, **arguments)


def optimizers():
    """A way of each kind to update and to treat frozen weights; three quarters are frozen."""
    return {
        "compact": kf.FreezeOptimizer(sgd(momentum=0.9), 0.75),
        "full shape": kf.FreezeOptimizer(keras.optimizers.Lamb(0.01), 0.75),
        "averages": kf.FreezeOptimizer(keras.optimizers.Adam(0.01, use_ema=True), 0.75),
        "zero": kf.FreezeOptimizer(sgd(momentum=0.9), 0.75, frozen_weights="zero"),
        "decay": kf.FreezeOptimizer(
            sgd(momentum=0.9, nesterov=True), 0.75, frozen_weights="decay", l2=0.01
        ),
        "loss scale": keras.optimizers.LossScaleOptimizer(
            kf.FreezeOptimizer(keras.optimizers.AdamW(0.01), 0.75), initial_scale=256.0
        ),
    }


class AtEpochs(keras.callbacks.Callback):
    """Does something to the model in the middle, or at the end, of given epochs."""

    def __init__(self, action, epochs, in_the_middle=True):
        super().__init__()
        self.action, self.epochs, self.in_the_middle = action, epochs, in_the_middle
        self.epoch = None

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if self.in_the_middle and batch == 0 and self.epoch in self.epochs:
            self.action(self.model)

    def on_epoch_end(self, epoch, logs=None):
        if not self.in_the_middle and epoch in self.epochs:
            self.action(self.model)


def frozen_indices(model, path):
    return np.flatnonzero(~kf.get_mask(model)[path])


def moved_by_one_bit(count, path="body/kernel"):
    """An action that flips the lowest bit of the first frozen weights of a variable."""

    def action(model):
        mask = kf.get_mask(model)
        variable = next(v for v in model.trainable_variables if v.path.endswith(path))
        values = value_of(variable)
        flat = values.reshape(-1).view("uint32")
        flat[np.flatnonzero(~mask[variable])[:count]] ^= 1
        variable.assign(values)

    return action


@contextlib.contextmanager
def no_drift_warning():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=CHANGED)
        yield


# What is written


@pytest.mark.cases(1, tensorflow=1)
def test_rates_shares_and_flow_equal_manual_ones(tmp_path):
    x, y = blobs()
    model = compiled(small_model())
    mask = kf.freeze(model, x, y)
    fit(model, x, y, epochs=2, callbacks=[FreezeBoard(tmp_path, x, y, batch_size=48)])
    scalars = read(tmp_path)
    assert set(scalars) == {
        "freeze_rate",
        "real_freeze_rate",
        "gradient_bytes",
        f"trained_share/{BODY}",
        f"trained_share/{HEAD}",
        "gradient_flow",
        "gradient_flow_deviation",
        "frozen_drift",
        f"frozen_drift/{BODY}",
        f"frozen_drift/{HEAD}",
    }
    assert all(list(values) == [0, 1] for values in scalars.values())
    trained = {BODY: mask[BODY].sum(), HEAD: mask[HEAD].sum()}
    assert trained[BODY] + trained[HEAD] == 18  # a quarter of 48 + 24
    assert scalars["freeze_rate"][1] == 0.75
    assert scalars["real_freeze_rate"][1] == np.float32(1 - (18 + 11) / (72 + 11))
    assert scalars["gradient_bytes"][1] == 4 * (18 + 11)
    assert scalars[f"trained_share/{BODY}"][0] == np.float32(trained[BODY] / 48)
    assert scalars[f"trained_share/{HEAD}"][0] == np.float32(trained[HEAD] / 24)
    gradients = gradients_by_autodiff(model, x, y)
    parts = [
        g[mask[v]] if is_weight(v) else g
        for g, v in zip(gradients, model.trainable_variables, strict=True)
    ]
    flow = np.abs(np.concatenate([part.ravel() for part in parts])).mean()
    assert np.isclose(scalars["gradient_flow"][1], flow, rtol=1e-5)
    assert scalars["gradient_flow_deviation"][1] < 1e-9  # one batch
    assert drifts(tmp_path) == [0.0, 0.0]


def test_without_data_there_is_no_flow_and_with_data_that_of_gradient_flow_history(tmp_path):
    x, y = blobs()
    model = compiled(small_model())
    flow = GradientFlowHistory(x, y, batch_size=20, steps=2)
    boards = [
        FreezeBoard(tmp_path / "with", x, y, batch_size=20, steps=2),
        FreezeBoard(str(tmp_path / "without")),
    ]
    fit(model, x, y, epochs=2, callbacks=[flow, *boards])
    with_data, without = read(tmp_path / "with"), read(tmp_path / "without")
    for name in ("gradient_flow", "gradient_flow_deviation"):
        assert list(with_data.pop(name).values()) == [np.float32(v) for v in flow.history[name][1:]]
    assert with_data == without


def test_variables_that_share_a_path_have_curves_of_their_own(tmp_path):
    x, y = blobs()
    parts = []
    for width in (6, 4):
        inputs = keras.Input((width,))
        parts.append(keras.Model(inputs, layers.Dense(4, name="fc")(inputs)))
    model = compiled(keras.Sequential([keras.Input((6,)), *parts, layers.Dense(3, name="head")]))
    paths = [v.path for v in model.trainable_variables if is_weight(v)]
    assert paths[0] == paths[1]
    fit(model, x, y, callbacks=[FreezeBoard(tmp_path)])
    scalars = read(tmp_path)
    masks = [kf.get_mask(model)[v] for v in model.trainable_variables if is_weight(v)]
    shares = [scalars[f"trained_share/{paths[0]}{end}"][0] for end in ("", "_2")]
    assert shares == [np.float32(mask.mean()) for mask in masks[:2]]
    assert shares[0] != shares[1]


def test_biases_that_a_mask_names_are_watched_too(tmp_path):
    x, y = blobs()
    model = compiled(small_model())
    kf.freeze(model, mask={"head/bias": np.array([True, False, False])})
    action = AtEpochs(moved_by_one_bit(1, "head/bias"), [1])
    with pytest.warns(UserWarning, match=r"head/bias \(1\)"):
        fit(model, x, y, epochs=2, callbacks=[action, FreezeBoard(tmp_path)])
    scalars = read(tmp_path)
    assert scalars["trained_share/net/head/bias"][0] == np.float32(1 / 3)
    assert list(scalars["frozen_drift/net/head/bias"].values()) == [0.0, 1.0]
    assert f"frozen_drift/{BODY}" not in scalars


def test_model_without_a_mask_has_rates_of_zero_and_no_drift(tmp_path):
    x, y = blobs()
    fit(compiled(small_model(), sgd()), x, y, callbacks=[FreezeBoard(tmp_path)])
    scalars = read(tmp_path)
    assert scalars["freeze_rate"] == {0: 0.0}
    assert scalars[f"trained_share/{BODY}"] == {0: 1.0}
    assert not any(tag.startswith("frozen") for tag in scalars)


def test_folder_and_epochs_are_shared_with_keras_tensorboard(tmp_path):
    x, y = blobs()
    model = compiled(small_model())
    tensorboard = keras.callbacks.TensorBoard(tmp_path, write_graph=False)
    fit(
        model,
        x,
        y,
        epochs=3,
        initial_epoch=1,
        validation_data=(x, y),
        callbacks=[tensorboard, FreezeBoard(tmp_path)],
    )
    assert {folder.name for folder in tmp_path.iterdir()} == {"freeze", "train", "validation"}
    losses = EventAccumulator(str(tmp_path / "train"))
    losses.Reload()
    steps = [event.step for event in losses.Tensors("epoch_loss")]
    assert steps == list(read(tmp_path)["freeze_rate"]) == [1, 2]


def test_what_was_written_before_an_interruption_can_be_read_and_training_goes_on(tmp_path):
    x, y = blobs()
    model = compiled(small_model())
    board = FreezeBoard(tmp_path)

    def interrupt(model):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(model, x, y, epochs=4, callbacks=[board, AtEpochs(interrupt, [2])])
    assert drifts(tmp_path) == [0.0, 0.0]
    fit(model, x, y, epochs=3, initial_epoch=2, callbacks=[board])
    assert read(tmp_path)["frozen_drift"] == {0: 0.0, 1: 0.0, 2: 0.0}


def test_training_is_the_same_with_and_without_the_board(tmp_path):
    x, y = blobs()

    def trained(callbacks):
        model = compiled(dense_model(), kf.FreezeOptimizer(keras.optimizers.Adam(0.01), 0.75))
        history = fit(
            model,
            x,
            y,
            epochs=3,
            batch_size=8,
            shuffle=True,
            validation_data=(x, y),
            callbacks=callbacks,
        )
        return [*model.variables, *model.optimizer.variables], history.history

    variables, history = trained([])
    watched, watched_history = trained([FreezeBoard(tmp_path, x, y)])
    assert watched_history == history
    for first, second in zip(variables, watched, strict=True):
        assert same_bits(value_of(first), value_of(second)), first.path


# Frozen weights that stay


@pytest.mark.cases(1)
@pytest.mark.parametrize("first_batch", [False, True])
@pytest.mark.parametrize("kind", list(optimizers()))
def test_frozen_weights_do_not_drift(tmp_path, kind, first_batch):
    x, y = blobs()
    model = compiled(dense_model(), optimizers()[kind], auto_scale_loss=False)
    if not first_batch:
        kf.freeze(model, x, y)
    starts = {v.path: value_of(v) for v in model.trainable_variables}
    with no_drift_warning():
        fit(model, x, y, epochs=3, batch_size=16, callbacks=[FreezeBoard(tmp_path)])
    assert drifts(tmp_path) == [0.0, 0.0, 0.0]
    mask = kf.get_mask(model)
    for variable in filter(is_weight, model.trainable_variables):
        now, start = (a[~mask[variable]] for a in (value_of(variable), starts[variable.path]))
        if kind == "zero":
            assert not now.any()
        elif kind == "decay":
            assert (now != start)[start != 0].all()  # they do move
        else:
            assert same_bits(now, start)


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", ["mixed_float16", "bfloat16"])
def test_other_precisions_are_compared_bit_by_bit(tmp_path, dtype):
    x, y = blobs()
    model = compiled(dense_model(dtype=dtype))
    kf.freeze(model, x, y)

    def move(model):
        kernel = model.get_layer("body").kernel
        values = value_of(kernel)
        flat = values.reshape(-1).view(f"uint{8 * values.itemsize}")
        flat[frozen_indices(model, "body/kernel")[:2]] ^= 1
        kernel.assign(values)

    with pytest.warns(UserWarning, match=CHANGED):
        fit(model, x, y, epochs=2, callbacks=[AtEpochs(move, [1]), FreezeBoard(tmp_path, x, y)])
    assert drifts(tmp_path) == [0.0, 2.0]


def test_swapped_averages_are_no_drift(tmp_path):
    x, y = blobs()
    optimizer = kf.FreezeOptimizer(keras.optimizers.Adam(0.01, use_ema=True), 0.75)
    model = compiled(small_model(), optimizer)
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    boards = [FreezeBoard(tmp_path / str(i)) for i in range(2)]
    with no_drift_warning():
        fit(model, x, y, epochs=3, callbacks=[boards[0], swap, boards[1]])
    assert drifts(tmp_path / "0") == drifts(tmp_path / "1") == [0.0, 0.0, 0.0]


@pytest.mark.cases(1)
@pytest.mark.parametrize("first_batch", [False, True])
def test_training_goes_on_from_a_backup_without_drift(tmp_path, first_batch):
    x, y = blobs()

    def train(seed, epochs, actions=()):
        model = compiled(small_model(seed))
        if not first_batch:
            kf.freeze(model, x, y)
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False)
        callbacks = [FreezeBoard(tmp_path), backup, *actions]
        fit(model, x, y, epochs=epochs, callbacks=callbacks)
        return kf.get_mask(model)

    with no_drift_warning():
        mask = train(0, epochs=2)
        # Other weights, which the backup replaces after the board's `on_train_begin`.
        assert train(1, epochs=4) == mask
    assert read(tmp_path)["frozen_drift"] == dict.fromkeys(range(4), 0.0)


@pytest.mark.cases(1)
@pytest.mark.parametrize("first_batch", [False, True])
@pytest.mark.parametrize(
    ("kind", "in_the_middle", "board_first"),
    [
        *((kind, True, False) for kind in ("compact", "full shape", "zero", "decay")),
        *((kind, False, False) for kind in ("compact", "full shape", "zero", "decay")),
        ("compact", False, True),
        ("decay", False, True),
    ],
)
def test_replaced_mask_is_no_drift(tmp_path, kind, in_the_middle, board_first, first_batch):
    x, y = blobs()
    model = eager(small_model(), optimizers()[kind])
    if not first_batch:
        kf.freeze(model, x, y)
    checkers = (np.indices((6, 8)).sum(0) % 2).astype(bool)

    def replace(model):
        masks = {BODY: checkers, HEAD: np.zeros((8, 3), bool)}
        kf.freeze(model, mask=masks, overwrite=True)

    callbacks = [AtEpochs(replace, [0], in_the_middle)]
    callbacks.insert(0 if board_first else 1, FreezeBoard(tmp_path))
    with no_drift_warning():
        fit(model, x, y, epochs=3, batch_size=16, callbacks=callbacks)
    assert np.array_equal(kf.get_mask(model)[BODY], checkers)
    assert drifts(tmp_path) == [0.0, 0.0, 0.0]


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["compact", "zero", "decay"])
def test_weight_that_a_replaced_mask_freezes_is_watched_from_then_on(tmp_path, kind):
    x, y = blobs()
    model = eager(small_model(), optimizers()[kind])

    def replace(model):
        masks = {BODY: np.zeros((6, 8), bool), HEAD: np.zeros((8, 3), bool)}
        kf.freeze(model, mask=masks, overwrite=True)

    def move(model):
        kernel = model.get_layer("body").kernel
        kernel.assign(value_of(kernel) + 0.5 * trained)

    fit(model, x, y)
    trained = kf.get_mask(model)[BODY]
    actions = [AtEpochs(replace, [0]), AtEpochs(move, [1])]
    with pytest.warns(UserWarning, match=CHANGED):
        fit(model, x, y, epochs=3, callbacks=[*actions, FreezeBoard(tmp_path)])
    assert 0 < trained.sum() <= 18
    assert drifts(tmp_path) == [0.0, trained.sum(), trained.sum()]


def test_weight_that_both_masks_freeze_is_still_compared_with_its_start(tmp_path):
    x, y = blobs()
    model = eager(small_model())
    kf.freeze(model, mask={BODY: np.arange(48).reshape(6, 8) < 40, HEAD: np.ones((8, 3), bool)})

    def replace(model):
        moved_by_one_bit(3)(model)  # of 40 to 47, the last of which both masks freeze
        kf.freeze(model, mask={BODY: np.arange(48).reshape(6, 8) >= 42}, overwrite=True)

    # 40 and 41 are frozen by both, 42 by the first alone.
    with pytest.warns(UserWarning, match=CHANGED):
        fit(model, x, y, epochs=3, callbacks=[AtEpochs(replace, [1]), FreezeBoard(tmp_path)])
    assert drifts(tmp_path) == [0.0, 2.0, 2.0]


# Frozen weights that are moved by hand


@pytest.mark.cases(1)
@pytest.mark.parametrize("first_batch", [False, True])
@pytest.mark.parametrize("kind", ["compact", "full shape", "zero", "loss scale"])
def test_each_weight_that_differs_in_one_bit_is_counted(tmp_path, kind, first_batch):
    x, y = blobs()
    model = eager(small_model(), optimizers()[kind], auto_scale_loss=False)
    if not first_batch:
        kf.freeze(model, x, y)
    actions = [
        AtEpochs(moved_by_one_bit(3), [0]),
        AtEpochs(moved_by_one_bit(2, "head/kernel"), [1]),
        AtEpochs(moved_by_one_bit(3), [2]),  # back again
    ]
    with pytest.warns(UserWarning, match=CHANGED) as caught:
        fit(model, x, y, epochs=3, callbacks=[*actions, FreezeBoard(tmp_path)])
    scalars = read(tmp_path)
    assert list(scalars[f"frozen_drift/{BODY}"].values()) == [3.0, 3.0, 0.0]
    assert list(scalars[f"frozen_drift/{HEAD}"].values()) == [0.0, 2.0, 2.0]
    assert list(scalars["frozen_drift"].values()) == [3.0, 5.0, 2.0]
    (warning,) = [w for w in caught if CHANGED in str(w.message)]
    assert f"{BODY} (3)" in str(warning.message)
    assert HEAD not in str(warning.message)


def test_each_fit_warns_once_and_starts_anew(tmp_path):
    x, y = blobs()
    model = eager(small_model())
    kf.freeze(model, x, y)
    board = FreezeBoard(tmp_path)
    for first in (0, 2):
        with pytest.warns(UserWarning, match=CHANGED) as caught:
            fit(
                model,
                x,
                y,
                epochs=first + 2,
                initial_epoch=first,
                callbacks=[AtEpochs(moved_by_one_bit(1), [first + 1]), board],
            )
        assert sum(CHANGED in str(w.message) for w in caught) == 1
    assert drifts(tmp_path) == [0.0, 1.0, 0.0, 1.0]


def test_mask_that_waits_for_an_unbuilt_optimizer_is_watched_from_the_start(tmp_path):
    x, y = blobs()
    mask = kf.freeze(eager(small_model()), x, y)
    model = eager(small_model())
    model.optimizer.restore(State(mask, compact=True))
    assert not model.optimizer.built
    with pytest.warns(UserWarning, match=CHANGED):
        fit(
            model,
            x,
            y,
            epochs=2,
            callbacks=[AtEpochs(moved_by_one_bit(5), [0]), FreezeBoard(tmp_path)],
        )
    assert drifts(tmp_path) == [5.0, 5.0]


@keras.saving.register_keras_serializable(package="test_board")
class FinalMove(keras.optimizers.SGD):
    """Moves the model's weights when training ends, as moving averages can."""

    def finalize_variable_values(self, var_list):
        for variable in var_list:
            variable.assign(variable + 1.0)


def test_drift_after_the_last_epoch_is_warned_of(tmp_path):
    x, y = blobs()
    model = eager(small_model(), kf.FreezeOptimizer(FinalMove(0.1), 0.75))
    with pytest.warns(UserWarning, match=CHANGED):
        fit(model, x, y, epochs=2, callbacks=[FreezeBoard(tmp_path)])
    assert drifts(tmp_path) == [0.0, 0.0]


def test_prune_reinitialize_and_loaded_weights_are_drift(tmp_path):
    x, y = blobs()
    small_model(seed=1).save_weights(tmp_path / "other.weights.h5")
    for name, action in {
        "prune": kf.prune,
        "reinitialize": kf.reinitialize,
        "load_weights": lambda model: model.load_weights(tmp_path / "other.weights.h5"),
    }.items():
        model = eager(small_model())
        kf.freeze(model, x, y)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            callbacks = [AtEpochs(action, [1]), FreezeBoard(tmp_path / name)]
            fit(model, x, y, epochs=2, callbacks=callbacks)
        assert any(CHANGED in str(w.message) for w in caught), name
        assert drifts(tmp_path / name) == [0.0, 54.0], name  # all that are frozen


# FreezeNet-WD: one common factor


def test_decay_counts_what_leaves_the_common_factor(tmp_path):
    x, y = blobs()
    model = eager(small_model(), optimizers()["decay"])
    mask = kf.freeze(model, x, y)
    start = value_of(model.get_layer("body").kernel)[~mask[BODY]]

    def move(model):
        kernel = model.get_layer("body").kernel
        values = value_of(kernel)
        values.reshape(-1)[frozen_indices(model, BODY)[0]] *= 1.5
        kernel.assign(values)

    callbacks = [AtEpochs(move, [1]), FreezeBoard(tmp_path)]
    with pytest.warns(UserWarning, match=r"body/kernel \(1\)"):
        fit(model, x, y, epochs=3, batch_size=16, callbacks=callbacks)
    ratio = value_of(model.get_layer("body").kernel)[~mask[BODY]] / start
    assert ratio[1] < 0.999
    assert np.isclose(ratio[0], 1.5 * ratio[1], rtol=1e-5)
    scalars = read(tmp_path)
    assert list(scalars["frozen_drift"].values()) == [0.0, 1.0, 1.0]
    deviation = scalars["frozen_deviation"]
    assert 0.0 < deviation[0] < 1e-6  # rounding in three steps
    assert np.isclose(deviation[2], 0.5, rtol=1e-5)


def test_decay_of_zeros_and_pruning_keep_a_common_factor(tmp_path):
    x, y = blobs()
    model = eager(small_model(), optimizers()["decay"])
    kernel = model.get_layer("body").kernel
    kernel.assign(value_of(kernel) * (np.arange(8) > 2))
    kf.freeze(model, x, y)
    assert not value_of(kernel)[~kf.get_mask(model)[BODY]].all()
    with no_drift_warning():
        fit(model, x, y, epochs=3, callbacks=[AtEpochs(kf.prune, [1]), FreezeBoard(tmp_path)])
    assert drifts(tmp_path) == [0.0, 0.0, 0.0]


def test_decay_that_diverges_is_drift_and_training_goes_on(tmp_path):
    x, y = blobs()
    optimizer = kf.FreezeOptimizer(sgd(1e30), 0.75, frozen_weights="decay", l2=1e10)
    model = eager(small_model(), optimizer)
    kf.freeze(model, x, y)
    with pytest.warns(UserWarning, match=CHANGED):
        fit(model, x, y, epochs=2, callbacks=[FreezeBoard(tmp_path)])
    assert drifts(tmp_path)[-1] == 54.0
    assert np.isnan(list(read(tmp_path)["frozen_deviation"].values())[-1])


# Bad input


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"log_dir": 3}, TypeError, "log_dir=3"),
        ({"log_dir": None}, TypeError, "log_dir=None"),
        ({"x": iter([blobs()]), "y": None}, TypeError, "again and again"),
        ({"x": None}, TypeError, "x=None"),
        ({"x": None, "y": None, "steps": 2}, TypeError, "x=None"),
        ({"batch_size": 0}, ValueError, "batch_size=0"),
        ({"y": np.zeros(3)}, ValueError, "length"),
    ],
)
def test_bad_input_is_refused(tmp_path, arguments, error, message):
    x, y = blobs()
    with pytest.raises(error, match=message):
        FreezeBoard(**{"log_dir": tmp_path, "x": x, "y": y, **arguments})


def test_missing_tensorboard_is_an_error_that_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        FreezeBoard(tmp_path)
