"""The parts of Keras's variables and optimizers that the package relies on."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


class Variable(Protocol):
    """A `keras.Variable`."""

    dtype: Any
    path: str
    shape: Any
    value: Any

    def assign(self, value: Any) -> Any:
        """Set the value."""


class Optimizer(Protocol):
    """A `keras.optimizers.Optimizer`."""

    built: bool
    iterations: Any
    learning_rate: Any
    loss_scale_factor: float | None
    name: str
    use_ema: bool

    @property
    def variables(self) -> list[Any]:
        """The optimizer's state."""

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        """Update the variables by one step."""

    def build(self, variables: Sequence[Any]) -> Any:
        """Create the state for these variables."""

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that make an equal optimizer."""
