"""Compact gradients on PyTorch: tensors for all that people do with `.grad`."""

import keras
import numpy as np
import pytest
from helpers import same_bits, value_of, values_of
from keras import layers as kl
from restricted import (
    Subclassed,
    assert_trained_alike,
    built,
    every_layer,
    freeze_optimizer,
    frozen,
    points,
    random_mask,
    small_mlp,
    spy_on_blocks,
)

import keras_freeze as kf

pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="compact gradients of PyTorch"
)
torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def restricted_products(monkeypatch):
    """The blocks of which a gradient was computed in a test."""
    return spy_on_blocks(monkeypatch)


def loop_model(make_model=small_mlp):
    keras.utils.set_random_seed(0)
    model, optimizer = make_model(), freeze_optimizer()
    with every_layer():
        kf.freeze(model, mask=random_mask(), optimizer=optimizer, loss="mse")
    return model, optimizer


def loss_of(model, x, y):
    return torch.mean((model(x, training=True) - y) ** 2)


def tensors():
    return [keras.ops.convert_to_tensor(part) for part in points()]


def gradients_of(restore, make_model=small_mlp):
    """The model and the `.grad` of its variables after one backward pass."""
    model, _ = loop_model(make_model)
    if restore:
        kf.restore_gradients(model)
    loss_of(model, *tensors()).backward()
    return model, [v.value.grad for v in model.trainable_variables]


def masked(model, gradients):
    """Ordinary gradients, zero where weights are frozen."""
    mask = kf.get_mask(model)
    return [
        g * torch.as_tensor(mask[v]) if v.name == "kernel" else g
        for g, v in zip(gradients, model.trainable_variables, strict=True)
    ]


def trained_in_loop(restore, change=lambda parameters: None, make_model=small_mlp):
    model, optimizer = loop_model(make_model)
    if restore:
        kf.restore_gradients(model)
    start = values_of(model.trainable_variables)
    x, y = tensors()
    for i in range(0, len(x), 12):
        model.zero_grad()
        loss_of(model, x[i : i + 12], y[i : i + 12]).backward()
        variables = model.trainable_variables
        if restore:  # what is done to gradients is to see the same
            for variable, g in zip(variables, masked(model, grads(variables)), strict=True):
                variable.value.grad = g
        change([v.value for v in variables])
        with torch.no_grad():
            optimizer.apply(grads(variables), variables)
    return model, start, values_of(model.trainable_variables)


def grads(variables):
    return [v.value.grad for v in variables]


def clip_by_norm(parameters):
    torch.nn.utils.clip_grad_norm_(parameters, 0.05)


def clip_by_value(parameters):
    torch.nn.utils.clip_grad_value_(parameters, 0.01)


def scale_in_place(parameters):
    for parameter in parameters:
        parameter.grad.mul_(0.5)


def replace(parameters):
    for parameter in parameters:
        parameter.grad = torch.sign(parameter.grad) * 0.1 + parameter.grad / 3


CHANGES = [lambda parameters: None, clip_by_norm, clip_by_value, scale_in_place, replace]


@pytest.mark.cases(1)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_custom_loop_trains_as_with_ordinary_gradients(change, restricted_products):
    _, _, expected = trained_in_loop(True, change)
    assert not restricted_products
    model, start, found = trained_in_loop(False, change)
    assert restricted_products
    assert_trained_alike(model, start, found, expected)


def test_clipping_by_norm_needs_no_memory_of_the_kernels_shape():
    model, found = gradients_of(False)
    torch.nn.utils.clip_grad_norm_([v.value for v in model.trainable_variables], 0.05)
    assert found[0].entries.dense is None


OPERATIONS = {
    "norm": torch.linalg.vector_norm,
    "largest norm": lambda g: torch.linalg.vector_norm(g, float("inf")),
    "number of nonzeros": lambda g: torch.linalg.vector_norm(g, 0),
    "sum": torch.sum,
    "scaled": lambda g: 3 * g / 2.0,
    "scaled by a tensor": lambda g: torch.tensor(0.25) * g,
    "added": lambda g: g + g,
    "minus": lambda g: -g,
    "with a dense one": lambda g: g + torch.ones_like(g),
    "squared": torch.square,
    "row": lambda g: g[0],
    "stacked": lambda g: torch.stack([g, g]),
    "finite": torch.isfinite,
    "product": lambda g: g @ torch.ones(g.shape[1], 2),
    "foreach": lambda g: torch._foreach_norm([g])[0],
    "copy": torch.clone,
    "to double": lambda g: g.double(),
}


@pytest.mark.cases(8)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_whatever_is_computed_is_that_of_a_tensor_with_zeros(operation):
    _, (found, *_) = gradients_of(False)
    model, ordinary = gradients_of(True)
    expected = OPERATIONS[operation](masked(model, ordinary)[0])
    result = OPERATIONS[operation](found)
    assert result.shape == expected.shape
    assert result.dtype == expected.dtype
    np.testing.assert_allclose(result.numpy(), expected.numpy(), rtol=1e-5, atol=1e-7)


def test_entries_can_be_set_in_place():
    model, gradients = gradients_of(False)
    kernel = model.trainable_variables[0].value
    alias = kernel.grad.detach()
    kernel.grad[:2] = 7.0
    assert (kernel.grad[:2] == 7.0).all()
    assert (alias[:2] == 7.0).all()
    assert np.isfinite(value_of(kernel.grad)).all()
    assert "CompactGradient" in repr(gradients[0])


@pytest.mark.cases(1)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_optimizers_of_pytorch_take_them(optimizer):
    values = []
    for restore in (False, True):
        model, gradients = gradients_of(restore)
        if restore:
            for variable, g in zip(
                model.trainable_variables, masked(model, gradients), strict=True
            ):
                variable.value.grad = g
        optimizer(model.parameters(), lr=0.1).step()
        values.append(values_of(model.trainable_variables))
    for one, other in zip(*values, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_a_second_backward_pass_adds_up():
    model, _ = loop_model()
    x, y = tensors()
    for _ in range(2):
        loss_of(model, x, y).backward()
    _, once = gradients_of(False)
    for variable, single in zip(model.trainable_variables, once, strict=True):
        np.testing.assert_allclose(
            value_of(variable.value.grad), 2.0 * value_of(single), rtol=1e-5, atol=1e-7
        )


class Checkpointed(Subclassed):
    """Computes its first layer again in the backward pass."""

    def call(self, x, training=None):
        x = torch.utils.checkpoint.checkpoint(self.first, x, use_reentrant=False)
        return self.second(x)


def test_layers_that_are_computed_again_train_alike(restricted_products):
    def make():
        return built(Checkpointed(), 1, 6)

    _, _, expected = trained_in_loop(True, make_model=make)
    model, start, found = trained_in_loop(False, make_model=make)
    assert len({id(block) for block in restricted_products}) == 1  # the other layer's
    assert_trained_alike(model, start, found, expected)


def test_functions_of_torch_func_see_ordinary_layers():
    model, _ = loop_model()
    x, _ = tensors()
    slopes = torch.func.vmap(torch.func.grad(lambda x: model(x[None], training=True).sum()))(x)
    kf.restore_gradients(model)
    expected = torch.func.vmap(torch.func.grad(lambda x: model(x[None], training=True).sum()))(x)
    np.testing.assert_allclose(slopes.detach(), expected.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["dense", "convolution"])
def test_a_gradient_of_a_gradient_has_all_its_parts(kind):
    def make():
        keras.utils.set_random_seed(0)
        if kind == "dense":
            return small_mlp()
        hidden = [kl.Reshape((6, 1)), kl.Conv1D(4, 3, activation="tanh"), kl.Conv1D(3, 4)]
        return keras.Sequential([keras.Input((6,)), *hidden, kl.Flatten()])

    found = []
    for restore in (False, True):
        model, _ = loop_model(make)
        if restore:
            kf.restore_gradients(model)
        x, y = tensors()
        x.requires_grad_(True)
        loss = loss_of(model, x, y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + 30.0 * slope.square().sum()).backward()
        found.append([value_of(g) for g in masked(model, grads(model.trainable_variables))])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_autocast_multiplies_in_its_own_precision():
    found = []
    for restore in (False, True):
        model, _ = loop_model()
        if restore:
            kf.restore_gradients(model)
        x, y = tensors()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, x, y)
        loss.backward()
        found.append([value_of(g) for g in masked(model, grads(model.trainable_variables))])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=5e-2, atol=2e-2)


def test_inference_needs_no_gradient_and_no_block(restricted_products):
    model = frozen(small_mlp())
    x, y = points()
    before = values_of(model.trainable_variables)
    model.predict(x, verbose=0)
    model.evaluate(x, y, verbose=0)
    with torch.no_grad():
        model(tensors()[0], training=True)
    assert not restricted_products
    for one, other in zip(before, values_of(model.trainable_variables), strict=True):
        assert same_bits(one, other)
