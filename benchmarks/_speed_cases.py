"""What `speed.py` measures: its networks, variants and targets."""

from typing import NamedTuple


class Setting(NamedTuple):
    """Where a network's batches come from, and how it is timed unless flags say otherwise."""

    dataset: str
    batch_size: int
    steps: int
    runs: int
    has_convolutions: bool


SETTINGS = {
    "lenet_300_100": Setting("mnist", 100, 100, 15, False),
    "lenet_5_caffe": Setting("mnist", 100, 100, 15, True),
    "mlp_4096": Setting("mnist", 128, 5, 12, False),
    "vgg16_d": Setting("cifar10", 128, 1, 5, True),
    "resnet34": Setting("cifar10", 16, 1, 3, True),
}
WIDTHS = (512, 1024, 2048, 4096, 8192)
BATCH_SIZES = (16, 32, 64, 128, 256, 512, 1024)

VARIANTS = {
    "plain_sgd": "plain SGD",
    "plain_adam": "plain Adam",
    "masked_sgd": "masked SGD",
    "freeze_sgd_ordinary": "FreezeOptimizer(SGD), ordinary gradients",
    "freeze_sgd": "FreezeOptimizer(SGD)",
    "freeze_adam_ordinary": "FreezeOptimizer(Adam), ordinary gradients",
    "freeze_adam": "FreezeOptimizer(Adam)",
    "floor": "floor: no kernel gradient",
    "bare": "the same as FreezeOptimizer(SGD), bare tf.function",
    "train": "train()",
    "torch_sgd": "PyTorch SGD",
    "torch_hooks": "PyTorch SGD, gradient hooks",
}
GROWTH_VARIANTS = ("plain_sgd", "masked_sgd", "freeze_sgd", "floor")
BARE = ("lenet_300_100",)  # a step so small that what stands around it would show
TRAINABLE = ("lenet_300_100", "lenet_5_caffe")  # small enough for an epoch of train() in a run

# The most that a step of FreezeOptimizer(SGD) may take, relative to plain SGD.
TARGETS = {
    ("lenet_300_100", 0.99): 0.90,
    ("lenet_5_caffe", 0.99): 1.00,
    ("mlp_4096", 0.99): 0.80,
    ("mlp_4096", 0.995): 0.70,
    ("mlp_4096", 0.999): 0.60,
    ("vgg16_d", 0.99): 0.95,
    ("vgg16_d", 0.995): 0.92,
    **{(network, 0.9): 1.03 for network in SETTINGS},
}


class Case(NamedTuple):
    """One thing to measure: a network at a rate."""

    kind: str  # "network", "width" or "batch"
    network: str
    rate: float
    batch_size: int
    steps: int
    runs: int
    variants: tuple[str, ...]
    dataset: str
    jit_compile: bool

    @property
    def num_images(self):
        return self.steps * self.batch_size
