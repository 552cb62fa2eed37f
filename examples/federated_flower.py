"""The clients of federated.py as clients of Flower: `--engine=flower`.

`DigitsClient` is what a Flower app needs. Here, Flower's FedAvg averages within one process.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from flwr.client import NumPyClient
from flwr.common import FitIns, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server.strategy import FedAvg


class DigitsClient(NumPyClient):
    """A client of federated.py: its parameters are one vector, what is trained."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def fit(
        self, parameters: list[np.ndarray], config: dict[str, Any]
    ) -> tuple[list[np.ndarray], int, dict[str, Any]]:
        (vector,) = parameters
        trained = self._client.train(vector, config["fingerprint"])
        return [trained], len(self._client.labels), {}


def average(clients: Sequence[Any], vector: np.ndarray, fingerprint: str) -> np.ndarray:
    """Let all clients train, and return the average of what they send."""
    told = FitIns(ndarrays_to_parameters([vector]), {"fingerprint": fingerprint})
    results = [(None, DigitsClient(client).to_client().fit(told)) for client in clients]
    strategy = FedAvg(fit_metrics_aggregation_fn=lambda metrics: {})  # it warns without
    parameters, _ = strategy.aggregate_fit(1, results, [])
    (averaged,) = parameters_to_ndarrays(parameters)
    return averaged
