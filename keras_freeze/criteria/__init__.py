"""How much each weight matters: the criteria that decide which weights are trained."""

from keras_freeze.criteria.criteria import (
    CRITERIA,
    RANDOM,
    Criterion,
    check_criterion,
    check_one_process,
    in_words,
    magnitude,
    score,
    snip,
    warn_of_zero_scores,
)
from keras_freeze.criteria.grasp_criterion import GRASP, GraSP, as_grasp, first_of_each_class, grasp

__all__ = [
    "CRITERIA",
    "GRASP",
    "RANDOM",
    "Criterion",
    "GraSP",
    "as_grasp",
    "check_criterion",
    "check_one_process",
    "first_of_each_class",
    "grasp",
    "in_words",
    "magnitude",
    "score",
    "snip",
    "warn_of_zero_scores",
]
