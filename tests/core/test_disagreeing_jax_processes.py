"""Processes of JAX that disagree and are refused."""

import numpy as np
from group_scripts import JAX, arrays
from together import assert_all_succeeded, marks_of_processes, run_together

pytestmark = marks_of_processes("jax")

DISAGREE = (
    JAX
    + """
def refused(act):
    try:
        act()
    except (ValueError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return "trained"

def shifted(v):
    return ~np.eye(*v.shape, k=RANK, dtype=bool)

def restored():
    model = compiled(network())
    kf.freeze(model, mask=lambda v: ~np.eye(*v.shape, dtype=bool))
    other = model.optimizer.state
    kf.freeze(model, mask=lambda v: ~np.eye(*v.shape, k=1, dtype=bool)[::-1], overwrite=True)
    model.optimizer.restore(other if RANK else model.optimizer.state)

def by_itself():
    keras.distribution.set_distribution(None)
    model = compiled(network())
    kf.freeze(model, x, y)
    keep("alone", model)
    try:
        fit(compiled(network()))
    finally:
        keras.distribution.set_distribution(parallel)

def of_other_weights():
    model = compiled(network())
    kernel = model.layers[0].kernel
    own = np.array(kernel) + RANK
    # JAX compares what it is given with that of other processes; a computation can differ.
    kernel.assign(jax.jit(lambda: own, out_shardings=kernel.value.sharding)())
    kf.freeze(model, x, y)

def split(**arguments):
    mesh = keras.distribution.DeviceMesh((1, 2), ("batch", "model"))
    layouts = keras.distribution.LayoutMap(mesh)
    layouts[".*kernel"] = (None, "model")
    with keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch").scope():
        kf.freeze(compiled(network()), **arguments)

give(
    split=refused(lambda: split(x=x, y=y)),
    split_with_mask=refused(lambda: split(mask=lambda v: ~np.eye(*v.shape, dtype=bool))),
    mask=refused(lambda: kf.freeze(compiled(network()), mask=shifted)),
    restored=refused(restored),
    weights=refused(of_other_weights),
    network=refused(lambda: compiled(network(seed=RANK))),
    freeze_rate=refused(lambda: frozen(compiled(network(), freeze_rate=0.5 + 0.1 * RANK))),
    first_batch=refused(lambda: fit(compiled(network(), freeze_rate=0.5 + 0.1 * RANK))),
    seed=refused(lambda: frozen(compiled(network(), seed=RANK))),
    nothing=refused(lambda: fit(frozen(compiled(network())))),
    alone=refused(by_itself),
    **found,
)
"""
)


def test_processes_that_disagree_are_refused_all_of_them_with_the_reason(tmp_path):
    finished = run_together(DISAGREE, tmp_path)
    assert_all_succeeded(finished)
    settings = "settings of the FreezeOptimizer that differ"
    reasons = dict.fromkeys(["freeze_rate", "first_batch", "seed"], settings)
    masks = "masks that differ between the processes 0 / 1"
    reasons |= {"mask": masks, "restored": masks, "weights": "weights that differ"}
    for one in finished:
        assert str(one.arrays["nothing"]) == "trained"
        for name, reason in reasons.items():
            found = str(one.arrays[name])
            assert found.startswith("ValueError: Processes that train a model together"), found
            assert reason in found
        for name in ("split", "split_with_mask"):
            assert "each must have whole variables" in str(one.arrays[name])
        assert "not the same on each process" in str(one.arrays["network"])  # by JAX
        assert "would choose by its own batch" in str(one.arrays["alone"])
    masks = [arrays(one.arrays, "alone_m") for one in finished]
    assert len(masks[0]) == 3
    assert all(map(np.array_equal, *masks))
