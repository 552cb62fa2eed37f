"""KerasTuner, or an error that says how to install it."""

try:
    import keras_tuner
    from keras_tuner.engine.base_tuner import BaseTuner
    from keras_tuner.engine.trial import TrialStatus
except ImportError as error:
    raise ImportError(
        "Sweeps and searches need KerasTuner: "
        "pip install keras-tuner scikit-learn scipy tensorboard"
    ) from error

__all__ = ["BaseTuner", "TrialStatus", "keras_tuner"]
