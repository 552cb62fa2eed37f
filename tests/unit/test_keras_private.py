"""Private names of Keras and TensorFlow: each function, and that no other module uses any."""

import ast
import functools
import re
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_freeze
from keras_freeze import _keras_private as private
from keras_freeze import backend

TENSORFLOW = keras.backend.backend() == "tensorflow"
on_tensorflow = pytest.mark.skipif(not TENSORFLOW, reason="of TensorFlow")

PACKAGE = Path(keras_freeze.__file__).parent

# What a subclass overrides or calls on itself, by module.
HOOKS = {
    # Optimizer: two helpers of `apply`, called on itself; two hooks of TensorFlow's checkpoints.
    "optimizer/freeze_optimizer.py": {"_check_variables_are_known", "_get_variable_index"},
    "optimizer/masked_optimizer.py": {
        "_restore_from_tensors",
        "_serialize_to_tensors",
        "_trackable_children",
    },
    # SwapEMAWeights of Keras reads the averages of the optimizer that it finds.
    "optimizer/delegation.py": {"_model_variables_moving_average"},
    # The type of a value that enters and leaves a `tf.function`.
    "backend/_tensorflow_gradients.py": {"_from_components", "_serialize", "_type_spec"},
}
# Of Python's own modules, and of named tuples.
PYTHON = {"_asdict", "_current_frames", "_fields", "_getframe", "_replace"}
# Where a name of Keras is a string that files or models contain.
STRINGS = {"storage/checks/kinds.py", "storage/checks/names.py"}


class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential([keras.layers.Dense(2, name="a"), keras.layers.Dense(1)])
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x, training=False):
        self.trained = private.is_training_call_of(self)
        return self.inner(x) * self.scale


class Regularized(keras.layers.Layer):
    def call(self, x):
        self.add_loss(keras.ops.sum(x))
        return x


def net(**arguments):
    model = Net()
    model.compile(loss="mse", optimizer=keras.optimizers.SGD(0.1), **arguments)
    return model


X, Y = np.ones((4, 3), "float32"), np.zeros((4, 1), "float32")


def test_version_is_the_one_that_was_checked():
    assert keras.__version__.startswith(private.CHECKED_WITH + ".")


# Models and layers


def test_all_layers_are_found_at_any_depth():
    model = net()
    model(X)
    assert {one.name for one in private.all_layers(model)} >= {model.name, model.inner.name, "a"}
    assert model not in private.all_layers(model, include_self=False)


def test_own_variables_are_without_those_of_layers_inside():
    model = net()
    model(X)
    assert [v is model.scale for v in private.own_variables(model)] == [True]
    norm = keras.layers.BatchNormalization()
    norm.build((None, 3))
    assert len(private.own_variables(norm)) == 4


def test_added_losses_are_told_from_regularizers_and_cleared():
    plain = keras.Sequential([keras.layers.Dense(1, kernel_regularizer="l2")])
    plain(X)
    assert plain.losses
    assert not private.has_added_losses(plain)
    model = keras.Sequential([Regularized()])
    model(X)
    assert private.has_added_losses(model)
    private.clear_losses(model)
    assert not private.has_added_losses(model)


def test_a_model_is_built_with_its_metrics_and_optimizer():
    model = net(metrics=["mae"])
    assert private.has_unbuilt_metrics(model)
    private.build_symbolically(model, (X, Y, None))
    assert not private.has_unbuilt_metrics(model)
    assert all(layer.built for layer in private.all_layers(model))
    assert not private.has_unbuilt_metrics(net())


def test_a_function_is_run_with_symbolic_tensors():
    spec = private.compute_output_spec(lambda: keras.ops.ones((2, 3)))
    assert tuple(spec.shape) == (2, 3)


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="of PyTorch")
def test_tensors_of_pytorch_tell_of_changes_and_transformations():
    import torch

    tensor = torch.zeros(3)
    before = private.num_changes(tensor)
    tensor.add_(1.0)
    assert private.num_changes(tensor) == before + 1

    class Wrapper(torch.Tensor):
        __torch_function__ = staticmethod(private.call_as_plain_tensors)

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            return torch.ones(2, 3)

    wrapped = private.tensor_without_memory(Wrapper, (2, 3), torch.zeros(1, dtype=torch.float64))
    assert (tuple(wrapped.shape), wrapped.dtype) == ((2, 3), torch.float64)
    assert type(wrapped + 1) is torch.Tensor

    found = []
    function = lambda x: found.append(private.is_transformed_by_torch(x)) or x.sum()  # noqa: E731
    function(tensor)
    torch.func.grad(function)(tensor)
    torch.utils.checkpoint.checkpoint(function, tensor.requires_grad_(), use_reentrant=False)
    assert found == [False, True, True]


@pytest.mark.parametrize("mode", ["full", "activations"])
def test_layers_of_a_remat_scope_are_told(mode):
    with keras.RematScope(mode):
        layer = keras.layers.Dense(2)
    assert private.is_rematerialized(layer) == (mode == "full")
    assert not private.is_rematerialized(keras.layers.Dense(2))


def test_a_training_call_of_the_model_itself_is_told_from_others():
    model = net()
    model(X)
    assert not model.trained
    model(X, training=True)
    assert model.trained
    keras.Sequential([model])(X, training=True)
    assert not model.trained
    assert not private.is_training_call_of(model)


def test_the_layer_that_has_created_a_tensor_is_known():
    layer = keras.layers.Dense(2)
    assert private.creating_layer(layer(keras.Input((3,)))) is layer


def test_trackers_of_layers_are_recognized():
    layer = keras.layers.Dense(1)
    assert any(map(private.is_tracker, vars(layer).values()))
    assert not private.is_tracker([])


def test_shared_objects_are_serialized_once():
    shared = keras.layers.Dense(2, name="shared")
    with private.object_sharing_scope():
        configs = [keras.saving.serialize_keras_object(shared) for _ in range(2)]
    with private.object_sharing_scope():
        first, second = map(keras.saving.deserialize_keras_object, configs)
    assert first is second


# Variables and global state


def test_path_dtype_and_value_of_a_variable():
    variable = keras.Variable(np.ones(2, "float32"), name="v")
    private.set_path(variable, "some/kernel")
    assert variable.path == "some/kernel"
    with keras.StatelessScope([(variable, keras.ops.zeros(2))]):
        assert keras.ops.convert_to_numpy(private.stored_value(variable)).tolist() == [1, 1]
        assert private.in_stateless_scope()
        (value,) = private.stateless_values().values()
        assert list(private.stateless_values()) == [id(variable)]
        assert keras.ops.convert_to_numpy(value).tolist() == [0, 0]
    assert not private.in_stateless_scope()
    assert private.has_shape(variable)
    assert private.stored_dtype(variable) == "float32"


def test_variables_keep_their_dtype_without_autocast():
    seen = []

    class Layer(keras.layers.Layer):
        def build(self, shape):
            self.v = self.add_weight(shape=(), name="v")

        def call(self, x):
            seen.append((self.v.dtype, private.stored_dtype(self.v)))
            with private.no_autocast():
                seen.append((self.v.dtype, private.stored_dtype(self.v)))
            return x

    Layer(dtype="mixed_bfloat16")(X)
    assert seen[-2:] == [("bfloat16", "float32"), ("float32", "float32")]


def test_policy_of_one_layer_is_not_that_of_a_map():
    policies = keras.dtype_policies.DTypePolicyMap(default_policy="float32")
    first, second = (keras.layers.Dense(2, dtype=policies, name=name) for name in "ab")
    for layer in (first, second):
        layer.build((None, 3))
    private.set_dtype_policy(first, keras.DTypePolicy("float64"))
    assert (first.compute_dtype, second.compute_dtype) == ("float64", "float32")
    private.set_dtype_policy(first, policies)
    assert first.compute_dtype == "float32"
    assert len(policies) == 0


def test_sums_are_float64_inside_a_scope():
    variable = keras.Variable(np.full(2, 1e30, "float32"))

    def product():
        value = keras.ops.matmul(variable[None], variable[:, None])
        return keras.backend.standardize_dtype(value.dtype), float(keras.ops.sum(value))

    assert product() == ("float32", np.inf)
    with backend.double_precision(), private.autocast_to_float64():
        dtype, value = product()
    assert dtype == "float64"
    assert np.isclose(value, 2e60)
    assert product() == ("float32", np.inf)


def test_each_new_variable_is_checked_before_it_has_its_memory():
    original, seen = private.shape_check(), []

    def check(variable, shape):
        seen.append((private.has_shape(variable), tuple(shape)))
        return original(variable, shape)

    private.set_shape_check(check)
    try:
        keras.Variable("zeros", shape=(2, 3))
    finally:
        private.set_shape_check(original)
    assert seen[0] == (False, (2, 3))
    assert private.shape_check() is original


def test_global_seed_generator_is_replaced():
    before = private.global_seed_generator()
    try:
        private.set_global_seed_generator(None)
        keras.random.uniform((1,))
        assert isinstance(private.global_seed_generator(), keras.random.SeedGenerator)
    finally:
        private.set_global_seed_generator(before)
    assert private.global_seed_generator() is before


# Optimizers


def test_variables_of_an_optimizer():
    variables = [keras.Variable(np.ones(2, "float32"), name=name) for name in "ab"]
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=2)
    optimizer.build(variables)
    assert [v is w for v, w in zip(private.built_variables(optimizer), variables, strict=True)]
    optimizer.apply([keras.ops.ones(2)] * 2)
    count = private.iterations_variable(optimizer)
    assert int(keras.ops.convert_to_numpy(count)) == 1
    assert int(keras.ops.convert_to_numpy(optimizer.iterations)) == 0
    other = [keras.Variable(np.ones(3, "float32"))]
    private.forget_built_variables(optimizer)
    optimizer.built = False
    optimizer.build(other)
    assert private.built_variables(optimizer) == other


def test_a_learning_rate_that_is_a_function_is_taken_out_for_a_while():
    optimizer = keras.optimizers.SGD(lambda: 0.5)
    with private.without_learning_rate_function(optimizer) as rate:
        assert rate() == 0.5
        optimizer.get_config()  # which serializes no lambda
    assert float(optimizer.learning_rate) == 0.5
    optimizer = keras.optimizers.SGD(0.25)
    with private.without_learning_rate_function(optimizer) as rate:
        assert float(keras.ops.convert_to_numpy(rate)) == 0.25


def test_exclusions_from_weight_decay_are_copied_and_extended():
    first, second, vector = (keras.Variable(np.ones(2, "float32"), name=n) for n in "abc")
    optimizer, other = (keras.optimizers.AdamW(0.1, weight_decay=0.5) for _ in range(2))
    optimizer.exclude_from_weight_decay(var_list=[first], var_names=["bias"])
    private.exclude_from_decay_like(optimizer, second, vector)
    assert optimizer._use_weight_decay(vector)
    optimizer.exclude_from_weight_decay(var_list=[first], var_names=["bias"])
    private.exclude_from_decay_like(optimizer, first, vector)
    assert not optimizer._use_weight_decay(vector)
    private.copy_decay_exclusions(optimizer, other)
    assert not other._use_weight_decay(first)
    assert not other._use_weight_decay(keras.Variable(1.0, name="bias"))
    private.exclude_from_decay_like(keras.optimizers.SGD(), first, vector)


def test_moving_averages_come_with_their_variables():
    variable = keras.Variable(np.ones(2, "float32"))
    optimizer = keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5)
    assert private.moving_averages(optimizer) == []
    optimizer.build([variable])
    optimizer.apply([keras.ops.ones(2)])
    ((first, average),) = private.moving_averages(optimizer)
    assert first is variable
    assert keras.ops.convert_to_numpy(average).tolist() == [0.5, 0.5]


def test_public_class_of_an_optimizer_is_the_same_on_every_backend():
    class Own(keras.optimizers.SGD):
        pass

    assert private.public_optimizer_class(keras.optimizers.Adam()) is keras.optimizers.Adam
    assert private.public_optimizer_class(Own()) is Own
    is_replaced = private.is_torch_optimizer_module(type(keras.optimizers.Adam()).__module__)
    assert is_replaced == (keras.backend.backend() == "torch")


# TensorFlow


@on_tensorflow
def test_variables_are_kept_out_of_checkpoints():
    optimizer = keras.optimizers.SGD()
    optimizer.build([keras.Variable(1.0)])
    assert "_trainable_variables" in optimizer._trackable_children()
    private.untrack_built_variables(optimizer)
    assert "_trainable_variables" not in optimizer._trackable_children()


@on_tensorflow
def test_a_tracked_list_contains_a_plain_one():
    import tensorflow as tf

    module = tf.Module()
    module.items = [1, 2]
    assert private.wrapped_list(module.items) == [1, 2]
    assert private.wrapped_list([1, 2]) is None


@on_tensorflow
def test_strategies_of_variables_and_optimizers():
    import tensorflow as tf

    strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
    with strategy.scope():
        variable, optimizer = keras.Variable(1.0), keras.optimizers.SGD()
    assert private.variable_strategy(variable.value) is strategy
    assert private.optimizer_strategy(optimizer) is strategy
    assert private.variable_strategy(keras.Variable(1.0).value) is not strategy
    assert private.optimizer_strategy(keras.optimizers.SGD()) is tf.distribute.get_strategy()
    assert private.supports_no_merge_call()


@on_tensorflow
def test_a_graph_compiled_by_xla_is_recognized():
    import tensorflow as tf

    seen = []

    def function():
        seen.append(private.is_compiled_by_xla(tf.compat.v1.get_default_graph()))

    tf.function(function, jit_compile=True)()
    tf.function(function)()
    assert seen == [True, False]


@on_tensorflow
def test_a_function_traced_for_many_shapes_does_not_warn(caplog):
    import tensorflow as tf

    function = private.without_tracing_warning(tf.function(lambda x: x))
    for size in range(8):
        function(tf.zeros(size))
    assert "triggered tf.function retracing" not in caplog.text


@on_tensorflow
def test_random_states_are_put_back():
    import tensorflow as tf

    generator, seeds = private.global_generator(), private.operation_seeds()
    try:
        tf.random.set_seed(3)
        state = private.operation_seeds()
        first = [float(tf.random.uniform(())) for _ in range(2)]
        private.set_operation_seeds(state)
        assert [float(tf.random.uniform(())) for _ in range(2)] == first
        private.set_global_generator(None)
        assert private.global_generator() is None
        assert tf.random.get_global_generator() is private.global_generator()
    finally:
        private.set_global_generator(generator)
        private.set_operation_seeds(seeds)


@on_tensorflow
def test_model_being_traced_is_that_of_keras_own_function_alone():
    import tensorflow as tf

    found = []

    class Traced(Net):
        def train_step(self, data):
            found.append(private.model_being_traced())
            return super().train_step(data)

    model = Traced()
    model.compile("sgd", "mse")
    model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    assert {id(one) for one in found} == {id(model)}
    tf.function(lambda: found.append(private.model_being_traced()))()
    assert found[-1] is None
    assert private.model_being_traced() is None


def test_is_train_function_tells_those_of_keras():
    model = Net()
    model.compile("sgd", "mse", jit_compile=False)
    model.make_train_function()
    function = model.train_function
    assert private.is_train_function(function)
    assert not private.is_train_function(functools.wraps(function)(lambda *a: function(*a)))
    assert not private.is_train_function(None)


def test_keep_counters_keeps_the_variables_that_someone_holds():
    optimizer, other = keras.optimizers.SGD(0.5), keras.optimizers.SGD(0.25)
    rate, iterations = optimizer.learning_rate, optimizer.iterations
    before = dict(vars(optimizer))
    vars(optimizer).update(vars(other))
    private.keep_counters(optimizer, before)
    optimizer.learning_rate = 0.125
    optimizer.build([keras.Variable(np.ones(2))])
    optimizer.apply([keras.ops.ones(2)])
    assert float(rate) == 0.125
    assert int(iterations) == int(optimizer.iterations) == 1
    assert len(optimizer.variables) == 2


# No other module


def _own_names(trees):
    """The private names that the package gives to its own functions, classes and attributes."""
    names = set()
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
            owner, _, name = ast.unparse(node).rpartition(".")
            if owner in ("", "self", "cls", "gradient"):
                names.add(name)
    return names


def _private_attributes(tree):
    """Pairs of an expression and the private name that is looked up in it."""
    for node in ast.walk(tree):
        owner, name = None, ""
        if isinstance(node, ast.Attribute):
            owner, name = node.value, node.attr
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            owner, name = node.value, str(node.slice.value)  # vars(optimizer)["_learning_rate"]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("attr"):
            owner, name = node.args[0], ast.unparse(node.args[1]).strip("'")  # getattr(v, "_value")
        if owner is not None and re.match("_[a-zA-Z]", name):
            yield ast.unparse(owner), name


def test_no_other_module_uses_private_names():
    files = {p.relative_to(PACKAGE).as_posix(): p for p in PACKAGE.rglob("*.py")}
    trees = {name: ast.parse(path.read_text()) for name, path in files.items()}
    of_keras = {name for _, name in _private_attributes(trees.pop("_keras_private.py"))}
    own = _own_names(trees)
    used = []
    for file, tree in trees.items():
        for owner, name in _private_attributes(tree):
            is_own = name in own and (name not in of_keras or owner in ("self", "cls"))
            if not is_own and name not in PYTHON | HOOKS.get(file, set()):
                used.append(f"{file}: {owner}.{name}")
        modules = r"\bkeras\.src\.\w+|\btensorflow\.python\.\w+|\bjax\._src\b|\btf\.__internal__\b"
        if file not in STRINGS:
            used += [f"{file}: {match}" for match in re.findall(modules, ast.unparse(tree))]
    assert not used, "\n".join(used)
