"""The paper's data sets, standardized and split; and 5,000 digits that need no download.

`load` returns a `tf.data.Dataset`, `load_arrays` NumPy arrays, `info` the facts about a data set,
`NAMES` all the names.
"""

from keras_freeze.paper.datasets.catalog import NAMES, DatasetInfo, info
from keras_freeze.paper.datasets.loading import SPLITS, load, load_arrays

__all__ = ["NAMES", "SPLITS", "DatasetInfo", "info", "load", "load_arrays"]
