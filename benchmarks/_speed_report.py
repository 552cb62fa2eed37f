"""The tables and figures of `speed.py`."""

import statistics

from _common import BLUE, GRAY, GREEN, ORANGE, table
from _speed_cases import GROWTH_VARIANTS, SETTINGS, TARGETS, VARIANTS
from matplotlib.figure import Figure

from keras_freeze._utils.files import replacing


def fastest(block, variant):
    return min(block["runs_of"][variant]["wall_ms"])


def median(block, variant, clock="wall_ms"):
    return statistics.median(block["runs_of"][variant][clock])


def ratio(block, variant, other="plain_sgd", of=median):
    """The ratio of two variants' times a step; None where one was not measured."""
    if not {variant, other} <= block["runs_of"].keys():
        return None
    return of(block, variant) / of(block, other)


def shown(number):
    return "-" if number is None else f"{number:.2f}"


def title(block):
    return f"{block['network']}, q = {block['rate']:g}, batches of {block['batch_size']}"


def print_block(block):
    runs = len(block["runs_of"]["plain_sgd"]["wall_ms"])
    compiler = "with XLA" if block["jit_compile"] else "without XLA"
    header = [
        "",
        "fastest, ms a step",
        "median, ms",
        "CPU, ms",
        "median / plain SGD",
        "fastest / plain SGD",
    ]
    rows = [
        [
            VARIANTS[variant],
            f"{fastest(block, variant):.2f}",
            f"{median(block, variant):.2f}",
            f"{median(block, variant, 'cpu_ms'):.2f}",
            shown(ratio(block, variant)),
            shown(ratio(block, variant, of=fastest)),
        ]
        for variant in block["runs_of"]
    ]
    table(
        f"{title(block)}, {compiler}: {runs} runs of {block['steps']} steps; "
        f"{100 * block['work_left']:.0f} % of the weight gradients' products are left",
        header,
        rows,
    )


def print_summary(blocks):
    if not blocks:
        return
    rows = []
    for block in blocks:
        frozen = ratio(block, "freeze_sgd")
        target = TARGETS.get((block["network"], block["rate"]))
        rows.append(
            [
                block["network"],
                f"{block['rate']:g}",
                f"{100 * block['work_left']:.0f} %",
                shown(frozen),
                shown(ratio(block, "freeze_sgd", of=fastest)),
                shown(ratio(block, "floor")),
                shown(ratio(block, "masked_sgd")),
                shown(ratio(block, "freeze_sgd_ordinary")),
                shown(ratio(block, "freeze_adam", "plain_adam")),
                shown(ratio(block, "torch_hooks", "torch_sgd")),
                shown(target),
                met(frozen, target),
            ]
        )
    header = [
        "network",
        "q",
        "work left",
        "FreezeOptimizer / plain",
        "the same, fastest",
        "floor / plain",
        "masked / plain",
        "ordinary gradients / plain",
        "Adam: FreezeOptimizer / plain",
        "PyTorch: hooks / plain",
        "target",
        "met",
    ]
    table("Time of a step, ratios of medians", header, rows)
    print_train([block for block in blocks if {"train", "torch_hooks"} <= block["runs_of"].keys()])


def met(number, target):
    if number is None or target is None:
        return "-"
    return "yes" if number <= target else "no"


def print_train(blocks):
    if not blocks:
        return
    variants = ("train", "torch_hooks", "torch_sgd", "plain_sgd")
    rows = [
        [
            block["network"],
            f"{block['rate']:g}",
            *(shown(median(block, v) if v in block["runs_of"] else None) for v in variants),
            met(median(block, "train"), median(block, "torch_hooks")),
        ]
        for block in blocks
    ]
    header = ["network", "q", *(VARIANTS[v] for v in variants), "train() at most hooks"]
    table("`train()` beside PyTorch, medians, ms a step", header, rows)


def print_growth(blocks):
    for kind, what in (("width", "width"), ("batch", "batch size")):
        of_kind = sorted(
            (block for block in blocks if block["kind"] == kind),
            key=lambda block: (block["rate"], size_of(block)),
        )
        rows = [
            [
                f"{block['rate']:g}",
                f"{size_of(block)}",
                f"{100 * block['work_left']:.0f} %",
                f"{median(block, 'plain_sgd'):.2f}",
                *(shown(ratio(block, v)) for v in GROWTH_VARIANTS[1:]),
            ]
            for block in of_kind
        ]
        if rows:
            names = [f"{VARIANTS[v]} / plain SGD" for v in GROWTH_VARIANTS[1:]]
            header = ["q", what, "work left", "plain SGD, ms", *names]
            table(f"Time of a step by {what}, ratios of medians", header, rows)


def size_of(block):
    """The width or the batch size, whichever grows."""
    if block["kind"] == "width":
        return int(block["network"].removeprefix("mlp_"))
    return block["batch_size"]


LINES = {
    "masked_sgd": ("gradients masked after their computation", ORANGE, "^"),
    "freeze_sgd_ordinary": ("FreezeOptimizer, ordinary gradients", GRAY, "s"),
    "freeze_sgd": ("FreezeOptimizer", BLUE, "o"),
    "floor": ("floor: no kernel gradient at all", GREEN, "v"),
}


def draw(blocks, folder):
    """Draws what there is to draw, and gives the names of the files."""
    kinds = [block["kind"] for block in blocks]
    figures = {}
    if "network" in kinds:
        figures["speed.png"] = draw_networks([b for b in blocks if b["kind"] == "network"])
    if {"width", "batch"} & {*kinds}:
        figures["growth.png"] = draw_growth([b for b in blocks if b["kind"] != "network"])
    for name, figure in figures.items():
        with replacing(folder / name) as path:
            figure.savefig(path)
    return list(figures)


def draw_networks(blocks):
    names = [name for name in SETTINGS if any(b["network"] == name for b in blocks)]
    panels = {
        name: sorted((b for b in blocks if b["network"] == name), key=lambda b: b["rate"])
        for name in names
    }
    figure, axes = empty_figure(len(panels))
    for panel, (name, those) in zip(axes, panels.items(), strict=True):
        draw_ratios(panel, those, [f"{b['rate']:g}" for b in those], name)
        panel.set_xlabel("freezing rate q")
    return with_legend(figure, axes)


def draw_growth(blocks):
    panels = {}
    for block in sorted(blocks, key=lambda b: (b["kind"] != "width", b["rate"], size_of(b))):
        panels.setdefault((block["kind"], block["rate"]), []).append(block)
    figure, axes = empty_figure(len(panels))
    for panel, ((kind, rate), those) in zip(axes, panels.items(), strict=True):
        network = "two hidden layers" if kind == "width" else "4096 wide"
        draw_ratios(panel, those, [f"{size_of(b)}" for b in those], f"{network}, q = {rate:g}")
        panel.set_xlabel("width" if kind == "width" else "batch size")
    return with_legend(figure, axes)


def empty_figure(columns):
    figure = Figure(figsize=(1.2 + 2.6 * columns, 3.8), dpi=130, layout="constrained")
    [axes] = figure.subplots(1, columns, sharey=True, squeeze=False)
    axes[0].set_ylabel("fastest step / plain SGD's")
    return figure, axes


def draw_ratios(axes, blocks, labels, name):
    axes.axhline(1, color="#BBBBBB", linewidth=1)
    for variant, (label, color, marker) in LINES.items():
        points = [(x, ratio(block, variant, of=fastest)) for x, block in enumerate(blocks)]
        points = [(x, y) for x, y in points if y is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker, ls="-", color=color, label=label, ms=5)
    axes.set_xticks(range(len(labels)), labels)
    axes.margins(x=0.12)
    axes.set_title(name, fontsize=10)
    axes.grid(axis="y", color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)


def with_legend(figure, axes):
    entries = {}
    for panel in axes:
        handles, labels = panel.get_legend_handles_labels()
        entries.update(zip(labels, handles, strict=True))
    columns = min(len(entries), 4 if len(axes) > 2 else 2 if len(axes) == 2 else 1)
    figure.legend(
        entries.values(),
        entries.keys(),
        loc="outside upper center",
        ncols=columns,
        frameon=False,
        fontsize=9,
    )
    return figure
