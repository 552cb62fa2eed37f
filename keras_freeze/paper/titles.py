"""The names by which figures and tables call networks, data sets and methods."""

_TITLES = {
    "lenet_300_100": "LeNet-300-100",
    "lenet_5_caffe": "LeNet-5-Caffe",
    "vgg16_d": "VGG16-D",
    "resnet34": "ResNet34",
    "mnist_5k": "5,000 digits of MNIST",
    "mnist": "MNIST",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "tiny_imagenet": "Tiny ImageNet",
    "baseline": "dense baseline",
    "freezenet": "FreezeNet",
    "freezenet-wd": "FreezeNet-WD",
    "snip": "SNIP",
    "random": "random mask",
    "grasp": "GraSP",
}


def title_of(name: str) -> str:
    """Return the published name of a network, a data set or a method of this package.

    Example:
        >>> title_of("lenet_5_caffe")
        'LeNet-5-Caffe'
    """
    return _TITLES.get(name, name)
