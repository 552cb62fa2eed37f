import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from keras_freeze.paper import datasets

tfds = pytest.importorskip("tensorflow_datasets")

SUBSET = Path(__file__).resolve().parents[3] / "shared/data/tiny-imagenet-200-subset.tar.gz"

# Not in alphabetical order, as in the official file.
WNIDS = ("n02124075", "n04067472", "n01641577")
TRAIN_PER_CLASS, TEST_PER_CLASS = 6, 2


def colour(label, index):
    return np.array([40 + 70 * label, 20 + 30 * index, 200 - 60 * label])


def write_jpeg(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tf.io.encode_jpeg(pixels.astype(np.uint8), quality=100).numpy())


def write_official_layout(folder):
    """Three classes of plain-coloured images; the first training image of each is grey."""
    folder.mkdir()
    (folder / "wnids.txt").write_text("\n".join(WNIDS))
    (folder / "words.txt").write_text("".join(f"{wnid}\tsomething\n" for wnid in WNIDS))
    annotations = []
    for label, wnid in enumerate(WNIDS):
        for index in range(TRAIN_PER_CLASS):
            pixels = np.broadcast_to(colour(label, index), (64, 64, 3))
            if index == 0:
                pixels = pixels[..., :1]
            write_jpeg(folder / "train" / wnid / "images" / f"{wnid}_{index}.JPEG", pixels)
        (folder / "train" / wnid / f"{wnid}_boxes.txt").write_text("")
        for index in range(TEST_PER_CLASS):
            name = f"val_{index * len(WNIDS) + label}.JPEG"
            pixels = np.broadcast_to(colour(label, index), (64, 64, 3))
            write_jpeg(folder / "val" / "images" / name, pixels)
            annotations.append(f"{name}\t{wnid}\t0\t0\t62\t62\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(annotations))
    write_jpeg(folder / "test" / "images" / "test_0.JPEG", np.zeros((64, 64, 3)))


@pytest.fixture(params=["folder", "zip", "gztar"])
def data_dir(request, tmp_path):
    """A TFDS folder with Tiny ImageNet, not yet prepared, in its manual folder."""
    manual = tmp_path / "tfds" / "downloads" / "manual"
    manual.mkdir(parents=True)
    folder = manual / "tiny-imagenet-200"
    write_official_layout(folder)
    if request.param != "folder":
        shutil.make_archive(str(folder), request.param, manual, folder.name)
        shutil.rmtree(folder)
    return tmp_path / "tfds"


def test_builder_reads_folder_and_archives_with_labels_in_the_order_of_wnids(data_dir):
    datasets.load("tiny_imagenet", data_dir=data_dir)
    builder = tfds.builder("tiny_imagenet", data_dir=data_dir)
    assert tuple(builder.info.features["label"].names) == WNIDS
    for split, per_class in (("train", TRAIN_PER_CLASS), ("validation", TEST_PER_CLASS)):
        found = sorted(
            (int(label), *image.mean(axis=(0, 1)), image)
            for image, label in builder.as_dataset(
                split=split, as_supervised=True
            ).as_numpy_iterator()
        )
        assert len(found) == len(WNIDS) * per_class
        expected = []
        for label in range(len(WNIDS)):
            for index in range(per_class):
                rgb = colour(label, index)
                if split == "train" and index == 0:
                    rgb = rgb[[0, 0, 0]]
                expected.append((label, rgb))
        unmatched = list(found)
        for label, rgb in expected:
            matches = [
                entry
                for entry in unmatched
                if entry[0] == label and np.abs(entry[-1].astype(int) - rgb).max() <= 3
            ]
            assert len(matches) == 1
            unmatched = [entry for entry in unmatched if entry is not matches[0]]


def test_official_validation_images_are_the_test_split(data_dir):
    wanted = {"data_dir": data_dir, "validation_fraction": 0.5}
    sizes = {
        split: np.bincount(datasets.load_arrays("tiny_imagenet", split, **wanted)[1]).tolist()
        for split in datasets.SPLITS
    }
    assert sizes == {"train": [3, 3, 3], "validation": [3, 3, 3], "test": [2, 2, 2]}


def test_prepared_once_the_source_is_no_longer_needed(data_dir):
    datasets.load("tiny_imagenet", data_dir=data_dir)
    moved = data_dir.with_name("moved")
    data_dir.rename(moved)
    shutil.rmtree(moved / "downloads")
    images, labels = next(iter(datasets.load("tiny_imagenet", data_dir=moved, batch_size=4)))
    assert images.shape == (4, 64, 64, 3)
    assert labels.shape == (4,)


def test_missing_source_says_what_to_download_and_where_to_put_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tiny-imagenet-200\.zip") as caught:
        datasets.load("tiny_imagenet", data_dir=tmp_path)
    assert str(tmp_path / "downloads" / "manual") in str(caught.value)


def test_a_subset_of_the_real_set(tmp_path):
    if not SUBSET.is_file():
        pytest.skip(f"{SUBSET} is missing")
    manual = tmp_path / "downloads" / "manual"
    manual.mkdir(parents=True)
    shutil.copy(SUBSET, manual)
    parts = {
        split: datasets.load_arrays("tiny_imagenet", split, data_dir=tmp_path)
        for split in datasets.SPLITS
    }
    assert {split: x.shape for split, (x, _) in parts.items()} == {
        "train": (180, 64, 64, 3),
        "validation": (20, 64, 64, 3),
        "test": (50, 64, 64, 3),
    }
    assert np.bincount(np.concatenate([y for _, y in parts.values()])).tolist() == [25] * 10
    x = np.concatenate([parts["train"][0], parts["validation"][0]])
    np.testing.assert_allclose(x.mean(axis=(0, 1, 2), dtype=np.float64), 0, atol=1e-5)
    np.testing.assert_allclose(x.std(axis=(0, 1, 2), dtype=np.float64), 1, atol=1e-5)
    # Every file decoded directly, greyscale ones among them.
    shutil.unpack_archive(SUBSET, tmp_path)
    folder = tmp_path / "tiny-imagenet-200"
    wnids = (folder / "wnids.txt").read_text().split()
    annotations = (folder / "val" / "val_annotations.txt").read_text().splitlines()
    files = {
        "train": [(path, path.parts[-3]) for path in folder.glob("train/*/images/*.JPEG")],
        "validation": [
            (folder / "val" / "images" / line.split("\t")[0], line.split("\t")[1])
            for line in annotations
        ],
    }
    builder = tfds.builder("tiny_imagenet", data_dir=tmp_path)
    channels = set()
    for split, labelled in files.items():
        expected = []
        for path, wnid in labelled:
            content = path.read_bytes()
            channels.add(int(tf.io.extract_jpeg_shape(content)[-1]))
            pixels = tf.image.decode_jpeg(content, channels=3).numpy()
            expected.append((wnids.index(wnid), pixels.tobytes()))
        dataset = builder.as_dataset(split=split, as_supervised=True)
        found = [(int(label), image.tobytes()) for image, label in dataset.as_numpy_iterator()]
        assert sorted(found) == sorted(expected)
    assert channels == {1, 3}
