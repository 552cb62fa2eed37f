"""Tests of the figures: what is drawn, and that it can be drawn at all."""

import dataclasses
import io
import sys

import numpy as np
import pytest

import keras_freeze as kf
from keras_freeze.masks.mask import FreezeMask, MaskEntry
from keras_freeze.paper import plots


@pytest.fixture(scope="module")
def result():
    return kf.training.train(
        "mnist_5k", "lenet_300_100", "freezenet", 0.99, epochs=2, verbose=False
    )


def render(figure):
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=50)
    assert buffer.getvalue().startswith(b"\x89PNG")


def titles(figure):
    return [axes.get_title(loc="left") for axes in figure.axes]


def test_history_shows_both_curves_and_the_best_epoch(result):
    figure = plots.plot_history(result)
    for axes, quantity, scale in zip(figure.axes, ("loss", "accuracy"), (1, 100), strict=True):
        training, validation, best = axes.get_lines()
        np.testing.assert_allclose(training.get_ydata(), scale * np.array(result.history[quantity]))
        expected = scale * np.array(result.history[f"val_{quantity}"])
        np.testing.assert_allclose(validation.get_ydata(), expected)
        assert list(best.get_xdata()) == [result.best_epoch]
        np.testing.assert_allclose(best.get_ydata(), expected[result.best_epoch - 1])
    render(figure)


def test_history_without_a_finite_epoch_can_be_drawn(result):
    nothing = {name: [float("nan")] for name in result.history}
    failed = dataclasses.replace(result, history=nothing, best_epoch=0)
    figure = plots.plot_history(failed)
    assert all(len(axes.get_lines()) == 2 for axes in figure.axes)
    render(figure)


def test_comparison_has_a_curve_and_a_bar_for_each_run(result):
    run = dataclasses.replace(result.run, method="baseline")
    baseline = dataclasses.replace(result, run=run, test_accuracy=0.875)
    figure = plots.plot_comparison([baseline, result])
    curves, bars = figure.axes
    assert [line.get_label() for line in curves.get_lines()] == [
        "dense baseline",
        "FreezeNet, q = 0.99",
    ]
    widths = [bar.get_width() for bar in bars.patches]
    np.testing.assert_allclose(widths, [87.5, 100 * result.test_accuracy])
    colors = {line.get_color() for line in curves.get_lines()}
    assert len(colors) == 2
    render(figure)


def test_what_q_is_does_not_cover_the_legend(result):
    baseline = dataclasses.replace(result, run=dataclasses.replace(result.run, method="baseline"))
    figure = plots.plot_comparison([baseline, result])
    figure.savefig(io.BytesIO(), format="png")  # lays it out
    (legend,) = figure.legends
    title = legend.get_title()
    assert title.get_text().startswith("q: freezing rate")
    boxes = [text.get_window_extent() for text in (title, *legend.get_texts())]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert plots.plot_comparison([baseline]).legends[0].get_title().get_text() == ""


def test_comparison_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="Received: results="):
        plots.plot_comparison([])


def test_mask_titles_count_what_is_trained(result):
    mask = kf.get_mask(result.model)
    figure = plots.plot_mask(mask)
    counts = [int(entry.trained.sum()) for entry in mask.entries]
    for title, count, size in zip(
        [t for t in titles(figure) if t], counts, (235_200, 30_000, 1_000), strict=True
    ):
        assert f"{count:,} of {size:,} trained" in title
    render(figure)


def test_a_single_trained_weight_of_a_large_kernel_shows():
    trained = np.zeros((4096, 512), bool)
    trained[4000, 17] = True
    figure = plots.plot_mask(FreezeMask([MaskEntry(0, "fc/kernel", trained)]))
    cells = figure.axes[0].get_images()[0].get_array()
    assert cells.size <= 60 * 200
    assert (cells > 0).sum() == 1
    render(figure)


def test_a_convolution_is_a_table_of_its_filters():
    trained = np.zeros((3, 2, 4, 10), bool)
    trained[2, 1, 3, 7] = True  # row 2 of 3 and column 1 of 2 of the filter from channel 3 to 7
    figure = plots.plot_mask(FreezeMask([MaskEntry(0, "conv/kernel", trained)]))
    cells = figure.axes[0].get_images()[0].get_array()
    assert cells.shape == (4 * 3, 10 * 2)
    assert np.argwhere(cells).tolist() == [[3 * 3 + 2, 7 * 2 + 1]]


@pytest.mark.parametrize("shape", [(7,), (5, 3, 4), (2, 2, 2, 3, 4), (300, 2), (1, 1)])
def test_every_shape_keeps_its_trained_weights_in_view(shape):
    trained = np.random.default_rng(0).random(shape) < 0.3
    trained.reshape(-1)[-1] = True
    figure = plots.plot_mask(FreezeMask([MaskEntry(0, "layer/kernel", trained)]))
    cells = np.asarray(figure.axes[0].get_images()[0].get_array())
    if cells.size == trained.size:
        assert (cells > 0).sum() == trained.sum()
    assert cells.max() > 0
    render(figure)


def test_many_layers_fit_into_one_figure():
    entries = [MaskEntry(i, f"layer{i}/kernel", np.eye(6, dtype=bool)) for i in range(25)]
    figure = plots.plot_mask(FreezeMask(entries))
    assert len([t for t in titles(figure) if t]) == 25
    render(figure)


def test_plot_mask_wants_a_mask():
    with pytest.raises(TypeError, match="Received: mask=None"):
        plots.plot_mask(None)


def test_cell_shares_are_means_of_blocks():
    matrix = np.random.default_rng(1).random((12, 30)) < 0.4
    blocks = matrix.reshape(4, 3, 10, 3).mean(axis=(1, 3))
    np.testing.assert_allclose(plots.cell_shares(matrix, 4, 10), blocks)
    assert np.array_equal(plots.cell_shares(matrix, 12, 30), matrix)


def test_cells_at_the_border_count_only_the_weights_they_have():
    matrix = np.ones((5, 7), bool)
    assert np.array_equal(plots.cell_shares(matrix, 2, 3), np.ones((2, 3)))


def test_missing_matplotlib_says_what_to_install(monkeypatch, result):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        plots.plot_history(result)
