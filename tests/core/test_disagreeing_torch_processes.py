"""Processes of PyTorch that disagree and are refused."""

from group_scripts import TORCH
from together import assert_all_succeeded, marks_of_processes, run_together

pytestmark = marks_of_processes("torch")

DISAGREE = (
    TORCH
    + """
def refused(make, **settings):
    model = compiled(network(7 if make == "weights" and RANK else 5), **settings)
    if make == "mask":
        kf.freeze(model, mask=lambda v: ~np.eye(*v.shape, k=RANK, dtype=bool))
    before = values(model)
    x, y = digits(RANK, COUNT)
    try:
        model.train_on_batch(x[:30], y[:30])
    except ValueError as error:
        same = all(np.array_equal(v, before[k]) for k, v in values(model).items())
        return f"{same} {error}"
    return "trained"

class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, number):
        x, y = digits(RANK, COUNT)
        return x[10 * number : 10 * number + 10], y[10 * number : 10 * number + 10]

class OwnStep(keras.Model):
    def __init__(self):
        super().__init__()
        self.net = network()

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        loss = self.compute_loss(x=data[0], y=data[1], y_pred=self(data[0]))
        loss.backward()
        variables = self.trainable_variables
        gradients = [v.value.grad for v in variables]
        with torch.no_grad():
            self.optimizer.apply(gradients, variables)
        return {"loss": loss}

def not_frozen(model, *data, **arguments):
    try:
        kf.freeze(model, *data, **arguments)
    except ValueError as error:
        return f"{kf.get_mask(model) is None} {error}"
    return "frozen"

x, y = digits(RANK, COUNT)
broken = np.where(RANK == 1, np.nan, x).astype("float32")
few = y * 0 if RANK == 1 else y
size = 0 if RANK == 1 else len(y)
give(
    rate=refused("nothing", optimizer=keras.optimizers.SGD(0.1 * (1 + RANK))),
    nan=not_frozen(compiled(network()), broken, y),
    nothing_to_freeze_by=not_frozen(compiled(network()), x[:size], y[:size]),
    nan_of_step=not_frozen(compiled(OwnStep()), broken, y),
    classes=not_frozen(
        compiled(network(), criterion=kf.criteria.GraSP(samples_per_class=1)), x, few
    ),
    batches=not_frozen(compiled(network(), criterion="fisher"), Batches(), steps=1 + RANK % 2),
    mask=refused("mask"), weights=refused("weights"),
    freeze_rate=refused("settings", freeze_rate=0.5 + 0.1 * RANK),
    seed=refused("settings", seed=RANK), l2=refused("settings", l2=0.1 * RANK),
    criterion=refused("settings", criterion=("snip", "magnitude", "random")[RANK]),
    nothing=refused("nothing"),
)
"""
)


def test_processes_that_disagree_are_refused_all_of_them_with_the_reason(tmp_path):
    finished = run_together(DISAGREE, tmp_path, count=3)
    assert_all_succeeded(finished)
    reasons = dict.fromkeys(["freeze_rate", "seed", "l2", "criterion"], "settings of the")
    reasons |= {"mask": "masks that differ", "weights": "weights that differ"}
    reasons |= {"rate": "inner optimizers that differ"}
    for one in finished:
        assert str(one.arrays["nothing"]) == "trained"
        for name, reason in reasons.items():
            assert str(one.arrays[name]).startswith("True Processes that train a model together")
            assert reason in str(one.arrays[name]), one.arrays[name]
        for name in ("nan", "nothing_to_freeze_by", "nan_of_step", "classes", "batches"):
            assert str(one.arrays[name]).startswith("True"), one.arrays[name]
    for name in ("nan", "nothing_to_freeze_by", "nan_of_step", "classes"):
        for one in (finished[0], finished[2]):
            assert "an error in the processes 1" in str(one.arrays[name]), one.arrays[name]
    assert "number of batches in common. Received: 1, 2, 1" in str(finished[0].arrays["batches"])
