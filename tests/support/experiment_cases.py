"""Made-up results of the paper's experiments, and the tables of their reports."""

import dataclasses

from keras_freeze.paper.runs import Results

# Table 3 as printed, by method and rate: CIFAR-10, its deviation, CIFAR-100, its deviation.
TABLE_3 = {
    "baseline": {0.0: (93.0, 0.1, 71.6, 0.6)},
    "SNIP": {
        0.9: (92.9, 0.1, 53.9, 1.7),
        0.95: (92.5, 0.1, 48.6, 6.6),
        0.99: (10.0, 0.0, 1.0, 0.0),
        0.995: (10.0, 0.0, 1.0, 0.0),
    },
    "FreezeNet": {
        0.9: (92.2, 0.1, 70.7, 0.3),
        0.95: (91.7, 0.1, 69.0, 0.2),
        0.99: (88.6, 0.1, 59.8, 0.3),
        0.995: (86.0, 0.1, 53.4, 0.1),
    },
    "FreezeNet-WD": {
        0.9: (93.2, 0.2, 53.1, 1.8),
        0.95: (92.8, 0.2, 44.5, 5.4),
        0.99: (76.1, 1.0, 13.1, 1.8),
        0.995: (74.6, 1.1, 11.9, 1.4),
    },
}


def result_of(run, **others):
    """A made-up result of a run, with all that a result of its measure holds."""
    num_weights = 1000
    trained = round((1 - run.freeze_rate) * num_weights)
    report = {
        "num_weights": num_weights,
        "num_trained_weights": trained,
        "num_trained_parameters": trained + 10,
        "real_freeze_rate": 1 - (trained + 10) / (num_weights + 10),
        "network_kib": 4 * (trained + 10) / 1024,
        "compression_factor": (num_weights + 10) / (trained + 10),
    }
    if run.measure == "gradient_flow":
        return {"gradient_flow": 0.5, "report": report, **others}
    if run.measure == "costs":
        counts = {"total_weights": 1000, "stored_weights": trained, "moved_weights": trained}
        return {**counts, "file_bytes": 900, "gradient_flow": 0.5, "report": report, **others}
    accuracies = {"accuracy": [0.5, 0.75], "val_accuracy": [0.5, 0.625]}
    result = {
        "seed": run.seed,
        "report": report,
        "history": accuracies,
        "best_epoch": 2,
        "validation_accuracy": 0.625,
        "test_accuracy": 0.75,
        "diverged_epoch": None,
        "pruning": None,
        "seconds": 1.0,
        "versions": {"python": "3.11.7", "keras": "3.15.1"},
    }
    if run.measure == "gradient_flow_in_training":
        values = [0.5, 0.25, 0.125]
        flow = {"epoch": [0, 1, 2], "gradient_flow": values, "gradient_flow_deviation": values}
        result["flow"] = flow
    return {**result, **others}


def write(folder, outcomes):
    """Results of a folder: (run, changes of its made-up result) each."""
    results = Results(folder / "results.jsonl")
    for run, changes in outcomes:
        results.append({"run": dataclasses.asdict(run), "result": result_of(run, **changes)})
    return results


def write_accuracies(folder, experiment, accuracies):
    """Results whose test accuracy is given, in per cent, by label and rate, one for each seed.

    None is an accuracy that is not finite.
    """
    series = {s.label: s for s in experiment.series}
    return write(
        folder,
        [
            (
                run,
                {"test_accuracy": None, "validation_accuracy": None}
                if value is None
                else {"test_accuracy": value / 100, "validation_accuracy": value / 200},
            )
            for (label, rate), values in accuracies.items()
            for run, value in zip(experiment.runs_of(series[label], rate), values, strict=False)
        ],
    )


def tables_in(text):
    """The tables of a Markdown text, each a list of rows of cells, the head first."""
    tables, lines = [], []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            lines.append([cell.strip() for cell in line[1:-1].split(" |")])
        elif lines:
            head, rule, *rows = lines
            assert set(rule) == {"---"}
            assert {len(row) for row in rows} <= {len(head)}
            tables.append([head, *rows])
            lines = []
    return tables
