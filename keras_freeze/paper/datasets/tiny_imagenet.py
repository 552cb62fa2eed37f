"""A TFDS builder for Tiny ImageNet, which tensorflow-datasets does not have.

Importing this module registers it: `tfds.load("tiny_imagenet")` works from then on.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

FOLDER = "tiny-imagenet-200"
ARCHIVE_ENDINGS = (".zip", ".tar.gz")


def find_source(manual_dir: Path) -> Path | None:
    """The extracted folder, or else an archive of it, in `manual_dir`; None if there is neither."""
    for folder in (manual_dir / FOLDER, manual_dir):
        if (folder / "wnids.txt").is_file():
            return folder
    archives = (
        manual_dir / name
        for name in sorted(path.name for path in manual_dir.glob(f"{FOLDER}*"))
        if name.endswith(ARCHIVE_ENDINGS)
    )
    return next(archives, None)


class TinyImagenet(tfds.core.GeneratorBasedBuilder):
    """Tiny ImageNet: 64x64 RGB images of 200 classes of ImageNet.

    Splits: `train` (500 images per class) and `validation` (50 per class). The 10,000 images of the
    official test split come without labels and are left out. A label is the position of the
    class in `wnids.txt`, whose identifiers are the class names. Grayscale files are decoded to
    RGB.
    """

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "Initial release."}  # noqa: RUF012
    MANUAL_DOWNLOAD_INSTRUCTIONS = """
    Download https://cs231n.stanford.edu/tiny-imagenet-200.zip (237 MB) into the manual folder.
    The archive may be left as it is, or be extracted there into `tiny-imagenet-200/`.
    """

    def _info(self) -> Any:
        features = {
            "image": tfds.features.Image(shape=(64, 64, 3), encoding_format="jpeg"),
            "label": tfds.features.ClassLabel(),  # named once wnids.txt has been read
        }
        return tfds.core.DatasetInfo(
            builder=self,
            description="64x64 images of 200 classes of ImageNet.",
            features=tfds.features.FeaturesDict(features),
            supervised_keys=("image", "label"),
            homepage="https://cs231n.stanford.edu/",
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        manual_dir = Path(dl_manager.manual_dir)
        source = find_source(manual_dir)
        if source is None:
            raise FileNotFoundError(
                f"{manual_dir} holds neither {FOLDER}.zip nor the folder {FOLDER}."
            )
        folder = source if source.is_dir() else Path(dl_manager.extract(source)) / FOLDER
        self.info.features["label"].names = (folder / "wnids.txt").read_text().split()
        return {
            "train": self._generate_examples(_training_files(folder)),
            "validation": self._generate_examples(_validation_files(folder)),
        }

    def _generate_examples(
        self, files: Iterator[tuple[Path, str]]
    ) -> Iterator[tuple[str, dict[str, str]]]:
        for path, wnid in files:
            yield path.name, {"image": str(path), "label": wnid}


def _training_files(folder: Path) -> Iterator[tuple[Path, str]]:
    for wnid in (folder / "wnids.txt").read_text().split():
        for path in sorted((folder / "train" / wnid / "images").iterdir()):
            yield path, wnid


def _validation_files(folder: Path) -> Iterator[tuple[Path, str]]:
    for line in (folder / "val" / "val_annotations.txt").read_text().splitlines():
        file_name, wnid = line.split("\t")[:2]
        yield folder / "val" / "images" / file_name, wnid
