"""The PyTorch side of speed.py: the same networks, data, start and masks in a process of its own.

It reads pickled messages from its standard input and answers each on its standard output: first
the task, a dictionary; then, for every run, the name of a variant.
"""

import os
import pickle
import sys
import time
from collections import OrderedDict

import torch
from torch import nn


def main():
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is no answer
    torch.set_num_threads(os.cpu_count())
    task = pickle.load(sys.stdin.buffer)
    batches = tensors(task)
    loops = {variant: Loop(variant, task, batches) for variant in task["variants"]}
    answer = torch.__version__
    while True:
        pickle.dump(answer, answers)
        answers.flush()
        try:
            answer = loops[pickle.load(sys.stdin.buffer)].run()
        except EOFError:
            return


def tensors(task):
    """The batches, images with their channels first."""
    images = torch.from_numpy(task["images"]).permute(0, 3, 1, 2).contiguous()
    labels = torch.from_numpy(task["labels"]).long()
    size = task["batch_size"]
    return list(zip(images.split(size), labels.split(size), strict=True))


class Loop:
    """A network, its optimizer and the plain loop over the batches."""

    def __init__(self, variant, task, batches):
        self.batches = batches
        self.network = build(task["network"])
        set_weights(self.network, task["kernels"])
        if variant == "torch_hooks":
            mask_gradients(self.network, task["masks"])
        self.optimizer = torch.optim.SGD(
            self.network.parameters(), task["learning_rate"], momentum=task["momentum"]
        )

    def run(self):
        """Wall and CPU seconds of one pass over the batches, and the last loss."""
        start, cpu_start = time.perf_counter(), time.process_time()
        for images, labels in self.batches:
            self.optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(self.network(images), labels)
            loss.backward()
            self.optimizer.step()
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu_start
        return seconds, cpu, loss.item()


def set_weights(network, kernels):
    with torch.no_grad():
        for name, layer in weighted_layers(network):
            layer.weight.copy_(torch.from_numpy(kernels[name]))
            if layer.bias is not None:
                layer.bias.zero_()


def mask_gradients(network, masks):
    for name, layer in weighted_layers(network):
        mask = torch.from_numpy(masks[name]).to(layer.weight.dtype)
        layer.weight.register_hook(lambda gradient, mask=mask: gradient * mask)


def weighted_layers(network):
    for name, layer in network.named_modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            yield name.replace(".", "_"), layer


def build(name):
    if name.startswith("mlp_"):
        return dense_network(int(name.removeprefix("mlp_")), int(name.removeprefix("mlp_")))
    return {
        "lenet_300_100": lambda: dense_network(300, 100),
        "lenet_5_caffe": lenet_5_caffe,
        "vgg16_d": vgg16_d,
        "resnet34": resnet34,
    }[name]()


def dense_network(first, second):
    layers = {
        "flatten": nn.Flatten(),
        "fc1": nn.Linear(784, first),
        "relu1": nn.ReLU(),
        "fc2": nn.Linear(first, second),
        "relu2": nn.ReLU(),
        "fc3": nn.Linear(second, 10),
    }
    return nn.Sequential(OrderedDict(layers))


def lenet_5_caffe():
    layers = {
        "conv1": nn.Conv2d(1, 20, 5),
        "relu1": nn.ReLU(),
        "pool1": nn.MaxPool2d(2),
        "conv2": nn.Conv2d(20, 50, 5),
        "relu2": nn.ReLU(),
        "pool2": nn.MaxPool2d(2),
        "flatten": nn.Flatten(),
        "fc1": nn.Linear(800, 500),
        "relu3": nn.ReLU(),
        "fc2": nn.Linear(500, 10),
    }
    return nn.Sequential(OrderedDict(layers))


def vgg16_d():
    layers = OrderedDict()
    channels, number = 3, 0
    for stage, (filters, repeat) in enumerate(
        ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)), start=1
    ):
        for _ in range(repeat):
            number += 1
            layers[f"conv{number}"] = nn.Conv2d(channels, filters, 3, padding=1)
            layers[f"bn{number}"] = nn.BatchNorm2d(filters)
            layers[f"relu{number}"] = nn.ReLU()
            channels = filters
        layers[f"pool{stage}"] = nn.MaxPool2d(2)
    layers["flatten"] = nn.Flatten()
    for name in ("fc1", "fc2"):
        layers[name] = nn.Linear(512, 512)
        layers[f"{name}_bn"] = nn.BatchNorm1d(512)
        layers[f"{name}_relu"] = nn.ReLU()
    layers["fc3"] = nn.Linear(512, 10)
    return nn.Sequential(layers)


def resnet34():
    layers = OrderedDict()
    layers["conv1"] = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    layers["conv1_bn"] = nn.BatchNorm2d(64)
    layers["conv1_relu"] = nn.ReLU()
    channels = 64
    for stage, (filters, repeat) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=1):
        for block in range(1, repeat + 1):
            stride = 2 if block == 1 else 1
            layers[f"stage{stage}_block{block}"] = Block(channels, filters, stride)
            channels = filters
    layers["pool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["fc"] = nn.Linear(512, 10)
    return nn.Sequential(layers)


class Block(nn.Module):
    def __init__(self, channels, filters, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, filters, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(filters)
        self.conv2 = nn.Conv2d(filters, filters, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(filters)
        self.has_shortcut = stride != 1 or channels != filters
        if self.has_shortcut:
            self.shortcut = nn.Conv2d(channels, filters, 1, stride, bias=False)
            self.shortcut_bn = nn.BatchNorm2d(filters)

    def forward(self, x):
        y = nn.functional.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        if self.has_shortcut:
            x = self.shortcut_bn(self.shortcut(x))
        return nn.functional.relu(x + y)


if __name__ == "__main__":
    main()
