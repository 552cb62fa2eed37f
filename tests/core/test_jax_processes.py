"""Several processes of JAX that train one model: what they exchange, and that they agree."""

import numpy as np
import pytest
from group_scripts import JAX, arrays, assert_only_trained_entries_moved
from helpers import same_bits
from together import assert_all_succeeded, marks_of_processes, run_together

pytestmark = marks_of_processes("jax")

TRAIN = (
    JAX
    + """
def num_exchanged(model):
    # Of the step that `fit` compiles.
    def of_all(part):
        layout = parallel.get_data_layout(part.shape).backend_layout
        return jax.make_array_from_process_local_data(layout, part)

    step = jax.jit(model.train_step)
    state = _keras_private.state_of(model, is_taken=False)
    return collectives.num_exchanged(
        step.lower(state, (of_all(x[:30]), of_all(y[:30]))).compile().as_text()
    )

def loss_scaled(optimizer):
    return keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=128.0)

start = compiled(network())
keep("start", start)
model = frozen(compiled(network(), keras.optimizers.SGD(1.0)), number=60)
keep("step", fit(model, number=60))
model = fit(frozen(compiled(network())), epochs=5)
keep("early", model)
keep("freeze", fit(model, epochs=45))
keep("odd", fit(frozen(compiled(network())), number=100))
batch = fit(compiled(network()), epochs=5)
keep("batch", batch)
# In `freeze`, each process would have the statistics of its own batch.
keep("norm", fit(compiled(network(normalized=True), l2=1e-3), epochs=5))
keep("ema", fit(compiled(network(), keras.optimizers.SGD(0.1, use_ema=True)), epochs=5))
keep("whole", fit(frozen(compiled(network(), keras.optimizers.Adam(0.01))), epochs=4))
regrow = kf.callbacks.RegrowTrained(0.3, 2, x=x[: 120 // COUNT], y=y[: 120 // COUNT], end=7)
keep("moving", fit(frozen(compiled(network())), epochs=4, callbacks=[regrow]))
plain = network()
plain.compile(keras.optimizers.SGD(1.0), model.loss)
keep("plain", fit(plain, number=60))
policies = {}
for policy in ("mixed_float16", "mixed_bfloat16"):
    keras.config.set_dtype_policy(policy)
    wrap = {"wrap": loss_scaled} if policy == "mixed_float16" else {}
    policies[policy] = fit(frozen(compiled(network(), **wrap)))
    keep(policy, policies[policy])
keras.config.set_dtype_policy("float32")
if COUNT > 1:
    found["trained"] = kf.report(model).num_trained_parameters
    counted = {"freeze": model, "batch": batch, "plain": plain, **policies}
    found.update({f"{name}_exchanged": num_exchanged(each) for name, each in counted.items()})
    if RANK == 0:
        kf.save(model, os.path.join(FOLDER, "model.freeze"))  # without the others
    kf.freeze(compiled(network()), mask=kf.get_mask(model))  # the others wait here
    keep("loaded", kf.load(os.path.join(FOLDER, "model.freeze")))
give(**found)
"""
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The arrays of two processes, and those of one that has all data."""
    folder = tmp_path_factory.mktemp("trained")
    finished = run_together(TRAIN, folder / "two", timeout=600)
    finished += run_together(TRAIN, folder / "one", 1, timeout=600)
    assert_all_succeeded(finished)
    return [one.arrays for one in finished]


def test_all_processes_have_the_same_bits(trained):
    first, second, _ = trained
    assert set(first) == set(second)
    for name, value in first.items():
        assert same_bits(value, second[name]), name
    for name in ("freeze_v", "freeze_m"):
        loaded = arrays(first, name.replace("freeze", "loaded"))
        assert all(map(same_bits, arrays(first, name), loaded))
        assert loaded


def test_no_more_than_the_gradients_of_trained_entries_is_exchanged(trained):
    first = trained[0]
    assert first["trained"] == sum(m.sum() for m in arrays(first, "freeze_m")) + 32 + 16 + 4
    for name in ("freeze", "batch", "mixed_float16", "mixed_bfloat16"):
        assert first[f"{name}_exchanged"] == first["trained"], name
    assert first["plain_exchanged"] == sum(v.size for v in arrays(first, "start_v"))


@pytest.mark.parametrize("name", ["early", "odd", "batch", "norm", "ema", "whole", "moving"])
def test_two_processes_train_what_one_does_on_all_data(name, trained):
    first, _, alone = trained
    assert all(map(np.array_equal, arrays(first, f"{name}_m"), arrays(alone, f"{name}_m")))
    variables = arrays(first, f"{name}_v"), arrays(alone, f"{name}_v")
    for one, other in zip(*variables, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=2e-5)


def test_a_mask_that_moves_leaves_what_is_frozen_as_it_was(trained):
    first, _, alone = trained
    for mask, before in zip(arrays(first, "moving_m"), arrays(first, "freeze_m"), strict=True):
        assert (mask != before).any()
    assert_only_trained_entries_moved(first, "moving", arrays(alone, "start_v"))


def test_a_step_is_one_of_keras_at_trained_entries_and_none_at_frozen_ones(trained):
    first, _, alone = trained
    start, masks = arrays(alone, "start_v"), arrays(first, "step_m")
    # The oracle is Keras without this package: with a learning rate of 1, w - w' is the gradient.
    gradients = [a - b for a, b in zip(start, arrays(alone, "plain_v"), strict=True)]
    scores = [np.abs(w * g) for w, g in zip(start[::2], gradients[::2], strict=True)]
    flat = np.sort(np.concatenate([s.ravel() for s in scores]))
    smallest = flat[-sum(mask.sum() for mask in masks)]
    for mask, score in zip(masks, scores, strict=True):
        assert (score[mask] >= smallest * (1 - 1e-4)).all()
        assert (score[~mask] <= smallest * (1 + 1e-4)).all()
    for position, (before, after) in enumerate(zip(start, arrays(first, "step_v"), strict=True)):
        mask = np.ones(before.shape, bool) if position % 2 else masks[position // 2]
        assert same_bits(before[~mask], after[~mask])
        np.testing.assert_allclose((before - after)[mask], gradients[position][mask], atol=1e-6)
    assert_only_trained_entries_moved(first, "freeze", start)  # after 100 steps


STOPPED = (
    JAX
    + """
model = compiled(network(), keras.optimizers.Adam(0.01))
path = os.path.join(ARGUMENTS["checkpoints"], f"{RANK}.weights.h5")
if ARGUMENTS["resume"]:
    model.optimizer.build(model.trainable_variables)
    model.load_weights(path.replace(f"{RANK}.w", "0.w"))
    fit(model, epochs=2)
else:
    model = fit(frozen(model), epochs=2)
    model.save_weights(path)  # by all processes, as Keras demands
    fit(model)
    if RANK == 1:
        os._exit(9)
    fit(model)
keep("whole", model)
give(**found)
"""
)


@pytest.mark.exhaustive
def test_training_goes_on_from_a_checkpoint_after_a_process_has_died(trained, tmp_path):
    (tmp_path / "kept").mkdir()
    settings = {"checkpoints": str(tmp_path / "kept"), "timeout": 120, "group_timeout": 10}
    died = run_together(STOPPED, tmp_path / "died", resume=False, **settings)
    assert died[1].returncode == 9
    assert died[0].returncode not in (0, -9)  # and not stopped by the test, after a longer time
    assert "Gloo" in died[0].errors
    assert "Connection" in died[0].errors
    resumed = run_together(STOPPED, tmp_path / "resumed", resume=True, **settings)
    assert_all_succeeded(resumed)
    for one in resumed:
        for name, value in one.arrays.items():
            assert same_bits(value, trained[0][name]), name
