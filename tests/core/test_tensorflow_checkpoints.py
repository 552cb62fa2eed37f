"""`tf.train.Checkpoint` of a model and its FreezeOptimizer."""

import axes
import keras
import pytest
from helpers import blobs, compiled, fit, same_bits, two_dense_layers, value_of

import keras_freeze as kf

each_way = pytest.mark.parametrize("way", axes.WAYS)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(axes.BACKEND != "tensorflow", reason="files of TensorFlow"),
]


@pytest.mark.cases(3)
@each_way
@pytest.mark.parametrize("grid", [None, 0.05])
@pytest.mark.parametrize("by", ["Checkpoint", "CheckpointManager"])
def test_a_checkpoint_that_is_restored_before_the_first_step_is_consumed(by, grid, way, tmp_path):
    """And training on is the same bit for bit."""
    tf = pytest.importorskip("tensorflow")

    def checkpoint_of(model):
        return tf.train.Checkpoint(model=model, optimizer=model.optimizer)

    def make():
        inner = keras.optimizers.Adam(0.01)
        return compiled(two_dense_layers(), kf.FreezeOptimizer(inner, 0.75, grid=grid))

    x, y = blobs()
    model, restored = make(), make()
    if way == "freeze":
        kf.freeze(model, x, y)
    fit(model, x, y)
    if by == "Checkpoint":
        path = checkpoint_of(model).save(tmp_path / "saved")
        status = checkpoint_of(restored).restore(path)
    else:
        tf.train.CheckpointManager(checkpoint_of(model), tmp_path, 1).save()
        manager = tf.train.CheckpointManager(checkpoint_of(restored), tmp_path, 1)
        status = manager.checkpoint.restore(manager.latest_checkpoint)
    status.assert_existing_objects_matched()
    assert kf.get_mask(restored) == kf.get_mask(model)
    for each in (model, restored):
        fit(each, x, y)
    status.assert_consumed()
    assert kf.get_mask(restored) == kf.get_mask(model)
    for one, other in zip(model.variables, restored.variables, strict=True):
        assert same_bits(value_of(one), value_of(other))


@each_way
def test_a_checkpoint_that_is_restored_after_the_build_is_consumed(way, tmp_path):
    tf = pytest.importorskip("tensorflow")
    x, y = blobs()
    models = [compiled(two_dense_layers()) for _ in range(2)]
    for model in models:
        if way == "freeze":
            kf.freeze(model, x, y)
        else:
            model.optimizer.build(model.trainable_variables)
    model, restored = models
    fit(model, x, y)
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(tmp_path / "saved")
    status = tf.train.Checkpoint(model=restored, optimizer=restored.optimizer).restore(path)
    status.assert_consumed()
    for each in models:
        fit(each, x, y)
    for one, other in zip(model.variables, restored.variables, strict=True):
        assert same_bits(value_of(one), value_of(other))
