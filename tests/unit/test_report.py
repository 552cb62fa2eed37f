import json

import keras
import numpy as np
import pytest
from keras import layers

import keras_freeze as kf
from keras_freeze.masks.selection import num_trained_weights
from keras_freeze.paper.sizes import paper_sizes
from keras_freeze.reporting import report


def small_network(optimizer=None):
    """Weights 20 * 30 and 30 * 5; biases 30 and 5; gamma and beta 2 * 30; statistics 2 * 30."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((20,)),
            layers.Dense(30, name="fc1"),
            layers.BatchNormalization(name="norm"),
            layers.Dense(5, name="fc2"),
        ],
        name="net",
    )
    if optimizer is not None:
        model.compile(optimizer, loss="mse")
    return model


def frozen_network(freeze_rate=0.9, inner=None, **kwargs):
    inner = keras.optimizers.SGD(0.1, momentum=0.9) if inner is None else inner
    model = small_network(kf.FreezeOptimizer(inner, freeze_rate, **kwargs))
    kf.freeze(model, *batch())
    return model


def batch():
    generator = np.random.default_rng(0)
    return generator.random((8, 20), np.float32), generator.random((8, 5), np.float32)


# Table 2 of the paper: LeNet-5-Caffe has 430,500 weights and 580 biases.


def test_table_2_as_the_paper_prints_it():
    rows = paper_sizes(430_500, 580)
    assert [row.freeze_rate for row in rows] == [0, 0.9, 0.99, 0.995, 0.999]
    assert [row.paper_size for row in rows] == [1683.9, 170.7, 19.1, 10.7, 3.9]
    assert [row.paper_compression_factor for row in rows] == [1.0, 9.9, 88.2, 157.4, 431.8]
    rounded = [round(row.real_freeze_rate, 3) for row in rows]
    assert rounded == [0.0, 0.899, 0.989, 0.994, 0.998]


def test_table_2_exactly():
    rows = paper_sizes(430_500, 580)
    assert [row.num_trained_weights for row in rows] == [430_500, 43_050, 4_305, 2_152, 430]
    assert [row.num_trained_parameters for row in rows] == [431_080, 43_630, 4_885, 2_732, 1_010]
    assert [round(row.size_kib, 1) for row in rows] == [1683.9, 170.4, 19.1, 10.7, 3.9]
    assert [round(row.compression_factor, 1) for row in rows] == [1.0, 9.9, 88.2, 157.8, 426.8]
    assert rows[1].size_kib == 43_630 * 4 / 1024
    assert rows[1].real_freeze_rate == pytest.approx(1 - 43_630 / 431_080, rel=1e-15)


@pytest.mark.parametrize(
    ("freeze_rate", "trained"), [(0.95, 780_141), (0.99, 168_703), (0.995, 92_273)]
)
def test_trained_parameters_of_vgg_in_table_3(freeze_rate, trained):
    (row,) = paper_sizes(15_285_952, 5_348 + 10_496, [freeze_rate])
    assert row.num_trained_parameters == trained
    # Without the floor, (1 - q) |W| + |B| lies between this and the next integer, to which
    # 780,142, 168,704 and 92,274 are rounded.
    assert round((1 - freeze_rate) * 15_285_952 + 15_844) == trained + 1


def test_sizes_without_anything_trained_have_no_factor():
    (row,) = paper_sizes(1000, 0, [1])
    assert (row.size_kib, row.compression_factor, row.paper_compression_factor) == (0, None, None)
    assert row.real_freeze_rate == 1.0


def test_sizes_refuse_impossible_arguments():
    with pytest.raises(ValueError, match="num_other=-1"):
        paper_sizes(10, -1)
    with pytest.raises(ValueError, match="num_weights=-1"):
        paper_sizes(-1, 0)
    with pytest.raises(ValueError, match="freeze_rate=2"):
        paper_sizes(10, 0, [2])


# Reports of models


def test_a_model_without_a_freeze_optimizer_is_the_dense_network():
    for optimizer in (None, "sgd"):
        found = report(small_network(optimizer))
        assert not found.has_mask
        assert (found.num_weights, found.num_trained_weights) == (750, 750)
        assert (found.num_other, found.num_other_trained) == (95, 95)
        assert (found.freeze_rate, found.real_freeze_rate) == (0.0, 0.0)
        assert found.network_bytes == found.dense_bytes == 845 * 4
        assert found.compression_factor == 1.0
        assert found.num_non_trainable == 60
        assert "No freezing mask" in str(found)


def test_before_its_mask_is_decided_a_model_is_the_dense_network():
    found = report(small_network(kf.FreezeOptimizer("sgd", 0.9, exclude="fc2")))
    assert not found.has_mask
    assert (found.num_weights, found.num_other_trained) == (600, 245)


def test_counts_of_a_frozen_network():
    model = frozen_network(0.9)
    found = report(model)
    mask = kf.get_mask(model)
    assert found.has_mask
    assert found.num_weights == 750
    assert found.num_trained_weights == 75 + found.num_rescued
    assert found.num_rescued == mask.num_rescued
    assert found.num_other_trained == 95
    assert found.freeze_rate == mask.freeze_rate
    trained = found.num_trained_weights + 95
    assert found.real_freeze_rate == pytest.approx(1 - trained / 845)
    assert found.network_bytes == trained * 4
    assert found.network_kib == pytest.approx(trained / 256)
    assert found.dense_kib == pytest.approx(845 / 256)
    assert found.compression_factor == pytest.approx(845 / trained)


def test_each_variable_has_a_row():
    model = frozen_network(0.9)
    rows = report(model).rows
    assert [(row.path, row.kind, row.shape, row.size) for row in rows] == [
        ("net/fc1/kernel", "weight", (20, 30), 600),
        ("net/fc1/bias", "bias", (30,), 30),
        ("net/norm/gamma", "normalization", (30,), 30),
        ("net/norm/beta", "normalization", (30,), 30),
        ("net/fc2/kernel", "weight", (30, 5), 150),
        ("net/fc2/bias", "bias", (5,), 5),
    ]
    mask = kf.get_mask(model)
    for row in rows:
        trained = mask[row.path].sum() if row.kind == "weight" else row.size
        assert row.num_trained == trained
        assert row.is_weight == (row.kind == "weight")


def test_excluded_weights_count_among_the_other_trained_parameters():
    found = report(frozen_network(0.9, exclude="fc2"))
    assert (found.num_weights, found.num_trained_weights) == (600, 60)
    assert (found.num_other, found.num_other_trained) == (245, 245)
    assert "weight, excluded" in str(found)


def test_layers_that_are_not_trainable_count_nowhere():
    model = small_network()
    model.get_layer("fc1").trainable = False
    model.compile(kf.FreezeOptimizer("sgd", 0.9), loss="mse")
    kf.freeze(model, *batch())
    found = report(model)
    assert (found.num_weights, found.num_trained_weights) == (150, 15)
    assert found.num_other_trained == 65
    assert found.num_non_trainable == 60 + 630


def test_a_layer_made_untrainable_later_leaves_the_others_as_they_are():
    model = frozen_network(0.9)
    mask = kf.get_mask(model)
    model.get_layer("fc1").trainable = False
    found = report(model)
    assert found.num_weights == 150
    assert found.num_trained_weights == mask["fc2/kernel"].sum()


def test_unknown_parameters_are_listed():
    class Scaled(layers.Layer):
        def build(self, input_shape):
            self.w = self.add_weight(shape=(input_shape[-1],), name="w")

        def call(self, inputs):
            return inputs * self.w

    model = keras.Sequential([keras.Input((4,)), layers.Dense(3), Scaled(name="own")], name="net")
    found = report(model)
    assert found.unknown_paths == ("net/own/w",)
    assert found.num_other_trained == 6
    assert "Unknown, so always trained: net/own/w" in str(found)


def test_entries_frozen_by_ones_own_mask_are_not_counted_as_trained():
    model = small_network(kf.FreezeOptimizer("sgd"))
    kernel = np.zeros((20, 30), bool)
    kernel[:, 0] = True
    kf.freeze(model, mask={"fc1/kernel": kernel, "fc1/bias": np.arange(30) < 10})
    found = report(model)
    assert (found.num_weights, found.num_trained_weights) == (750, 170)
    assert (found.num_other, found.num_other_trained) == (95, 75)
    assert found.real_freeze_rate == pytest.approx(1 - 245 / 845)


def test_rate_one_trains_only_the_others():
    found = report(frozen_network(1.0))
    assert (found.num_trained_weights, found.num_rescued, found.freeze_rate) == (0, 0, 1.0)
    assert found.network_bytes == 95 * 4


def test_optimizer_state_of_a_dense_optimizer():
    model = small_network(keras.optimizers.Adam())
    model.optimizer.build(model.trainable_variables)
    # Two moments in float32 for each parameter, a counter and a float32 learning rate.
    counter = np.dtype(keras.backend.standardize_dtype(model.optimizer.iterations.dtype)).itemsize
    assert report(model).optimizer_state_bytes == 845 * 2 * 4 + counter + 4


@pytest.mark.parametrize(
    ("inner", "is_compact"),
    [(keras.optimizers.Adam, True), (keras.optimizers.Adafactor, False)],
)
def test_gradients_of_trained_parameters_go_to_other_machines(inner, is_compact):
    model = small_network(kf.FreezeOptimizer(inner(), 0.8))
    assert report(model).gradient_bytes == 845 * 4
    kf.freeze(model, *batch())  # trains 150 of 750 weights
    found = report(model)
    assert found.dense_gradient_bytes == 845 * 4
    expected = 4 * (150 + 95 if is_compact else 845)
    assert found.gradient_bytes == expected
    assert f"machines: {expected / 1024:,.1f} KiB" in str(found)


def test_optimizer_state_follows_the_trained_weights():
    sizes = {}
    for freeze_rate in (0.5, 0.9):
        model = frozen_network(freeze_rate)
        sizes[freeze_rate] = report(model).optimizer_state_bytes
        momentums = [v for v in model.optimizer.variables if "momentum" in v.path]
        expected = 4 * report(model).num_trained_parameters
        assert sum(v.numpy().nbytes for v in momentums) == expected
        assert sizes[freeze_rate] == sum(v.numpy().nbytes for v in model.optimizer.variables)
    assert sizes[0.9] < sizes[0.5]


def test_the_mask_is_found_under_a_loss_scale_optimizer():
    inner = kf.FreezeOptimizer("sgd", 0.9)
    model = small_network(keras.optimizers.LossScaleOptimizer(inner))
    kf.freeze(model, *batch())
    assert report(model).num_trained_weights == kf.get_mask(model).num_trained


def test_a_loaded_model_has_the_same_report(tmp_path):
    model = frozen_network(0.9)
    model.fit(*batch(), verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    before, after = report(model).to_dict(), report(loaded).to_dict()
    for row in before["rows"] + after["rows"]:
        row["path"] = row["path"].removeprefix("net/")
    assert after == before


def test_reports_can_be_written_as_json():
    found = report(frozen_network(0.9)).to_dict()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["num_weights"] == 750
    assert found["rows"][0]["shape"] == [20, 30]


def test_the_table_shows_the_numbers():
    found = report(frozen_network(0.9, exclude="fc2"))
    lines = str(found).splitlines()
    (kernel,) = [line for line in lines if line.startswith("net/fc1/kernel")]
    assert kernel.split() == ["net/fc1/kernel", "weight", "20", "x", "30", "600", "60", "10.000%"]
    assert any("q = 0.9," in line and "q_beta = 0.639053" in line for line in lines)
    assert "Network size: 1.2 KiB of 3.3 KiB (x2.8)" in str(found)
    assert "Non-trainable state, not counted: 60" in lines


def test_the_table_says_how_many_weights_were_rescued():
    model = small_network(kf.FreezeOptimizer("sgd", 0.999, criterion="magnitude"))
    model.get_layer("fc2").kernel.assign(np.full((30, 5), 1e-6))
    kf.freeze(model, *batch())
    found = report(model)
    assert (found.num_trained_weights, found.num_rescued) == (
        num_trained_weights(0.999, 750) + 2,
        2,
    )
    assert "trained: 2, 2 of them as the only ones of a layer" in str(found)


def test_a_model_without_parameters_has_an_empty_report():
    found = report(keras.Sequential([keras.Input((4,)), layers.ReLU()]))
    assert (found.num_parameters, found.freeze_rate, found.compression_factor) == (0, 0.0, None)
    assert "x" not in str(found).split("Network size")[1].split(",")[0]


def test_what_cannot_be_reported_is_refused():
    with pytest.raises(TypeError, match=r"`model` must be a keras\.Model\. Received: model="):
        report(layers.Dense(3))
    with pytest.raises(ValueError, match="must be built"):
        report(keras.Sequential([layers.Dense(3)]))


def test_a_mask_of_other_variables_is_refused():
    model = frozen_network(0.9)
    other = small_network()
    other.compile(model.optimizer, loss="mse")
    with pytest.raises(ValueError, match="This FreezeOptimizer trains the model"):
        report(other)
