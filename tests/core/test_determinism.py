"""The claims of docs/reproducibility.md that no other test holds, and that every claim has a test.

What several processes or backends take is run in processes of their own by `main`; what compares
backends is tested where Keras runs on TensorFlow.
"""

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from format_reader import read_layout
from helpers import crossentropy, same_bits, sgd

import keras_freeze as kf

pytestmark = [pytest.mark.slow, pytest.mark.cases(None, tensorflow=0, jax=0)]

BACKEND = keras.backend.backend()
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reproducibility.md"
OPTIMIZERS = {"sgd": lambda: sgd(0.05, momentum=0.9), "adam": lambda: keras.optimizers.Adam(0.01)}
CRITERIA = ["snip", "magnitude", "random", "grasp", "synflow", "fisher"]


def data():
    rng = np.random.default_rng(0)
    return rng.normal(size=(64, 8, 8, 1)).astype("float32"), np.arange(64) % 3


def network(dropout=0.0):
    """A network of convolution, dense layers and normalisation, its weights from seed 5."""
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(4, 3, activation="relu", name="conv"),
            keras.layers.Flatten(name="flat"),
            keras.layers.Dense(16, activation="tanh", name="body"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dropout(dropout, name="dropout"),
            keras.layers.Dense(3, name="head"),
        ],
        name="network",
    )
    kf.reinitialize(model, seed=5)
    return model


def frozen(way="freeze", inner="sgd", x=None, dropout=0.0, freeze_rate=0.9, criterion="snip", **a):
    images, labels = data()
    x = images if x is None else x
    model = network(dropout)
    optimizer = kf.FreezeOptimizer(OPTIMIZERS[inner](), freeze_rate, criterion=criterion)
    model.compile(optimizer, crossentropy(), **a)
    if way == "freeze":
        kf.freeze(model, x, labels)
    return model


def trained(way="freeze", shuffle=False, seed=7, **arguments):
    keras.utils.set_random_seed(seed)  # which layers of dropout read when they are made
    model = frozen(way, **arguments)
    model.fit(*data(), batch_size=16, epochs=3, shuffle=shuffle, verbose=0)
    return model


def flat(arrays):
    return np.concatenate([np.ravel(array) for array in arrays])


def weights_of(model):
    return flat(model.get_weights())


def mask_of(model):
    return flat(entry.trained for entry in kf.get_mask(model).entries)


def frozen_weights_of(model):
    mask = kf.get_mask(model)
    kernels = [model.get_layer(name).kernel for name in ("conv", "body", "head")]
    return flat(np.array(keras.ops.convert_to_numpy(k))[~mask[k]] for k in kernels)


def measure(folder):
    """What a seed gives in this process: arrays by name, and files in a folder."""
    x, y = data()
    keras.backend.clear_session()  # or automatic names would count on
    found = {
        f"initial/{name}": keras.ops.convert_to_numpy(kf.initializers.get(name, seed=1)((50, 40)))
        for name in kf.initializers.INITIALIZERS
    }
    found["initial/model"] = weights_of(kf.models.lenet_300_100(seed=3))
    found["initial/reinitialized"] = weights_of(network())
    images, labels = kf.datasets.load_arrays("mnist_5k", "train", seed=3)
    found["data/labels"] = labels
    found["data/images"] = images.sum((1, 2, 3))
    found["keras/initializer"] = keras.initializers.GlorotUniform(seed=1)((4, 4))
    found["keras/dropout"] = keras.layers.Dropout(0.5, seed=1)(np.ones((8, 8)), training=True)
    for criterion in CRITERIA:
        found[f"mask/{criterion}"] = mask_of(frozen(criterion=criterion))
    found["mask/rescued"] = mask_of(frozen(freeze_rate=0.999))
    with pytest.warns(UserWarning, match="All scores are zero"):
        found["mask/ties"] = mask_of(frozen(x=0 * x))
    model = frozen()
    kf.save(model, folder / "start.freeze")
    found["scores"] = flat(kf.compute_saliency(model, x, y).values())
    found["flow"] = kf.gradient_flow(model, x, y)
    for way, inner in (("freeze", "sgd"), ("first_batch", "adam")):
        model = trained(way, inner=inner)
        found[f"mask/{way}"] = mask_of(model)
        found[f"frozen/{way}"] = frozen_weights_of(model)
        found[f"trained/{way}"] = weights_of(model)
    model.save(folder / "model.keras")
    kf.save(model, folder / "model.freeze")
    found["bytes"] = np.frombuffer((folder / "model.freeze").read_bytes(), np.uint8)
    found["shuffled"] = weights_of(trained(shuffle=True, dropout=0.3))
    return {name: np.array(keras.ops.convert_to_numpy(value)) for name, value in found.items()}


def main(folder):
    np.savez(folder / "found.npz", **measure(folder))


def start(folder, backend, **environment):
    folder.mkdir()
    environment = {**os.environ, "KERAS_BACKEND": backend, **environment}
    with (folder / "errors.txt").open("w") as errors:
        command = [sys.executable, __file__, str(folder)]
        return subprocess.Popen(command, env=environment, stdout=errors, stderr=errors)


def finish(process, folder):
    assert process.wait() == 0, (folder / "errors.txt").read_text()[-3000:]
    with np.load(folder / "found.npz") as found:
        return dict(found)


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    return measure(tmp_path_factory.mktemp("here"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def elsewhere(folder):
    """What a process of its own finds, with another seed of Python's hashes."""
    process = start(folder / "same", BACKEND, PYTHONHASHSEED="99")
    return finish(process, folder / "same")


@pytest.fixture(scope="module")
def backends(folder):
    """What the other backends find, by backend."""
    if BACKEND != "tensorflow":
        pytest.skip("backends are compared where Keras runs on TensorFlow")
    names = [name for name in ("jax", "torch") if importlib.util.find_spec(name)]
    if not names:
        pytest.skip("there is no other backend here")
    processes = {name: start(folder / name, name) for name in names}
    return {name: finish(process, folder / name) for name, process in processes.items()}


@pytest.fixture(scope="module")
def other_threads(folder):
    """What a process with other numbers of cores and threads finds."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})  # for the process that starts now
    try:
        process = start(folder / "threads", BACKEND, OMP_NUM_THREADS="2")
    finally:
        os.sched_setaffinity(0, before)
    return finish(process, folder / "threads")


def part(found, *prefixes):
    return {name: value for name, value in found.items() if name.startswith(prefixes)}


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    assert found
    for name, value in found.items():
        assert value.dtype == expected[name].dtype
        assert value.tobytes() == expected[name].tobytes(), name


def assert_same_up_to_rounding(found, expected, tolerance):
    assert found.keys() == expected.keys()
    assert found
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=tolerance, err_msg=name)


# ---------------------------------------------------------------- runs and processes


def test_everything_comes_again_in_the_same_process(here, tmp_path):
    assert_same_bits(measure(tmp_path), here)


def test_everything_comes_again_in_another_process(here, elsewhere):
    assert_same_bits(elsewhere, here)


def test_shuffling_and_dropout_go_by_the_global_seed(here):
    model = trained(shuffle=True, dropout=0.3, seed=8)
    assert not same_bits(weights_of(model), here["shuffled"])


def test_files_are_read_the_same_in_another_process(elsewhere, folder):
    assert elsewhere["mask/freeze"].any()
    for model in load_all(folder / "same"):
        assert same_bits(weights_of(model), elsewhere["trained/first_batch"])
        assert np.array_equal(mask_of(model), elsewhere["mask/first_batch"])


# ---------------------------------------------------------------- other ways to run a step

WAYS_TO_RUN = {
    "eager": {"run_eagerly": True},
    "without XLA": {"jit_compile": False},
    "XLA": {"jit_compile": True},
    "several steps": {"steps_per_execution": 4},
}
if BACKEND == "torch":
    WAYS_TO_RUN = {"eager": {"run_eagerly": True}}  # the others are refused, or need a compiler


@pytest.mark.parametrize("name", WAYS_TO_RUN)
def test_compiled_and_eager_steps_differ_by_rounding_alone(here, name):
    model = trained(**WAYS_TO_RUN[name])
    assert np.array_equal(mask_of(model), here["mask/freeze"])
    assert same_bits(frozen_weights_of(model), here["frozen/freeze"])
    np.testing.assert_allclose(weights_of(model), here["trained/freeze"], rtol=0, atol=5e-6)


@pytest.mark.skipif(BACKEND == "torch", reason="Keras has no steps_per_execution on PyTorch")
def test_several_steps_in_one_execution_change_no_bit(here):
    model = trained(steps_per_execution=4)
    assert same_bits(weights_of(model), here["trained/freeze"])


@pytest.mark.exhaustive
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no way to take a core away")
def test_number_of_threads_changes_roundings_alone(here, other_threads):
    assert_same_bits(*(part(f, "initial/", "mask/", "frozen/") for f in (other_threads, here)))
    assert_same_up_to_rounding(
        *(part(f, "trained/", "scores", "flow") for f in (other_threads, here)), 5e-6
    )


# ---------------------------------------------------------------- backends


def test_initial_values_are_the_same_on_every_backend(here, backends):
    for found in backends.values():
        assert_same_bits(part(found, "initial/"), part(here, "initial/"))


def test_masks_are_the_same_on_every_backend(here, backends):
    for found in backends.values():
        assert_same_bits(part(found, "mask/"), part(here, "mask/"))


def test_frozen_weights_are_the_same_on_every_backend_after_training(here, backends):
    for found in backends.values():
        assert_same_bits(part(found, "frozen/"), part(here, "frozen/"))


def test_trained_weights_of_two_backends_differ_by_rounding_alone(here, backends):
    for found in backends.values():
        assert_same_up_to_rounding(part(found, "trained/"), part(here, "trained/"), 5e-6)


def test_scores_and_gradient_flow_of_two_backends_differ_by_rounding_alone(here, backends):
    for found in backends.values():
        assert_same_up_to_rounding(
            part(found, "scores", "flow"), part(here, "scores", "flow"), 1e-6
        )


def test_seeds_of_keras_mean_other_numbers_on_each_backend(here, backends):
    for found in backends.values():
        for name in ("keras/initializer", "keras/dropout", "shuffled"):
            assert not np.allclose(found[name], here[name]), name


def load_all(folder):
    yield kf.load(folder / "model.freeze")
    yield keras.models.load_model(folder / "model.keras")


def test_files_of_every_backend_are_read_the_same_bit_for_bit(backends, folder):
    for backend, found in backends.items():
        for model in load_all(folder / backend):
            assert same_bits(weights_of(model), found["trained/first_batch"])
            assert np.array_equal(mask_of(model), found["mask/first_batch"])


def test_freeze_files_of_two_backends_differ_in_versions_and_how_to_compile_alone(
    backends, folder, elsewhere
):
    def sections(name):
        header, *others = read_layout((folder / name / "start.freeze").read_bytes())
        versions = header.pop("versions")
        assert header["model"].pop("compile_config")
        assert set(versions) == {"keras_freeze", "keras", BACKEND if name == "same" else name}
        return [header, *others]

    for backend in backends:
        assert sections(backend) == sections("same")


def test_arrays_of_a_data_set_are_the_same_on_every_backend(here, backends):
    for found in backends.values():
        assert_same_bits(part(found, "data/"), part(here, "data/"))


# ---------------------------------------------------------------- versions

# SHA-256 of the packed bits of masks that need no gradient, as of version 1 of the rules.
MASKS = {
    ("random", 0.99): "3db885b1cdee684bbe7533d82bed0592fb9177ed6690a6c748d64b49b980d4bd",
    ("magnitude", 0.99): "05ed2285d332e1aecad34cad5aa2d831f3d793287c6aed47e9814f29a51f79d8",
    ("magnitude", 0.99999): "a1f5a6a41e0e31a940aca9661c5cadb1dc1da7969825ebe55602fd592b955570",
}


@pytest.mark.parametrize(("criterion", "freeze_rate"), MASKS)
def test_masks_of_a_seed_are_those_of_earlier_versions(criterion, freeze_rate):
    model = kf.models.lenet_300_100(seed=0)
    optimizer = kf.FreezeOptimizer(sgd(), freeze_rate, criterion=criterion, seed=3)
    x = np.zeros((1, *model.input_shape[1:]), "float32")
    kf.freeze(model, x, np.zeros(1), loss=crossentropy(), optimizer=optimizer)
    packed = np.packbits(flat(entry.trained for entry in optimizer.mask.entries))
    assert hashlib.sha256(packed.tobytes()).hexdigest() == MASKS[criterion, freeze_rate]


# ---------------------------------------------------------------- names of runs


def test_a_run_is_named_by_its_settings_alone():
    run = kf.runs.Run("mnist", "lenet_5_caffe", "freezenet", 0.99, seed=3, epochs=5)
    assert run.label == "lenet_5_caffe on mnist, freezenet, q = 0.99, epochs 5, seed 3"


# ---------------------------------------------------------------- the page


def claims():
    """The numbered claims of the page: text by number."""
    items = re.findall(r"^(\d+)\. (.+?)(?=^\d+\. |^#|\Z)", PAGE.read_text(), re.M | re.S)
    return {int(number): text for number, text in items}


def test_every_claim_of_the_page_names_tests_that_exist():
    found = claims()
    assert list(found) == list(range(1, len(found) + 1))
    code = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for number, text in found.items():
        names = re.findall(r"`(test_\w+)`", text)
        assert names, f"claim {number} names no test"
        for name in names:
            assert re.search(rf"^def {name}\(", code, re.M), f"there is no {name}"


def test_every_cell_that_promises_something_has_the_number_of_a_claim():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [cell for row in rows[2:] for cell in row.strip("|").split("|")[1:]]
    promising = [cell for cell in cells if "same" in cell]
    assert len(promising) > 30
    mentioned = set()
    for cell in promising:
        numbers = [int(number) for number in re.findall(r"\[(\d+)\]", cell)]
        assert numbers, cell
        mentioned.update(numbers)
    assert mentioned <= set(claims())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
