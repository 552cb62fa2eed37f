"""The paper's augmentation: random horizontal flips and translations up to 4 pixels."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import tensorflow as tf

MAX_SHIFT = 4


def draw(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw one flip and one shift per image.

    Args:
        rng: the generator to draw from.
        count: the number of images.

    Returns:
        `flip`, bool of shape (count,), true with probability 1/2, and `shift`, int32 of shape
        (count, 2): rows down and columns right, each uniform on -4, ..., 4.
    """
    flip = rng.integers(0, 2, size=count).astype(bool)
    shift = rng.integers(-MAX_SHIFT, MAX_SHIFT + 1, size=(count, 2), dtype=np.int32)
    return flip, shift


def flip_and_shift(images: "tf.Tensor", flip: "tf.Tensor", shift: "tf.Tensor") -> "tf.Tensor":
    """Mirror each image left to right where `flip` says so, then move it by `shift`.

    What moves in from outside is zero.

    Args:
        images: (batch, height, width, channels), any numeric dtype.
        flip: bool, (batch,).
        shift: int32, (batch, 2): rows down and columns right, at most 4 either way.

    Returns:
        A tensor like `images`.

    Example:
        >>> import tensorflow as tf
        >>> image = tf.constant([[[[1.0], [2.0]]]])
        >>> moved = flip_and_shift(image, tf.constant([True]), tf.constant([[0, 1]]))
        >>> moved[0, 0, :, 0].numpy().tolist()
        [0.0, 2.0]
    """
    import tensorflow as tf

    height, width = images.shape[1:3]
    border = [MAX_SHIFT, MAX_SHIFT]
    padded = tf.pad(images, [[0, 0], border, border, [0, 0]])
    rows = MAX_SHIFT + tf.range(height) - shift[:, :1]
    columns = MAX_SHIFT + tf.range(width) - shift[:, 1:]
    columns = tf.where(flip[:, tf.newaxis], width + 2 * MAX_SHIFT - 1 - columns, columns)
    padded = tf.gather(padded, rows, axis=1, batch_dims=1)
    return tf.gather(padded, columns, axis=2, batch_dims=1)
