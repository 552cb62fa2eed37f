"""The page of the paper's architectures."""

from pathlib import Path

import pytest
from experiment_cases import tables_in

from keras_freeze.paper.experiments import architectures

pytestmark = pytest.mark.cases(2)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def page():
    return architectures.markdown()


def test_the_committed_page_is_what_the_generator_makes(page):
    assert (ROOT / "docs" / "paper" / "architectures.md").read_text(encoding="utf-8") == page


def test_layers_add_up_to_the_papers_counts(page):
    tables = tables_in(page)
    expected = [
        (266_200, 410, 0),
        (430_500, 580, 0),
        (15_239_872, 5_258, 10_496),
        (21_366_464, 200, 17_152),
    ]
    for layers, counts, numbers in zip(tables[::2], tables[1::2], expected, strict=True):
        sums = [
            sum(int(row[column].replace(",", "")) for row in layers[1:]) for column in (-3, -2, -1)
        ]
        assert tuple(sums) == numbers
        assert counts[1][1:] == [f"{n:,}" for n in (sum(numbers), *numbers)]
        for counted, printed in zip(counts[1::2], counts[2::2], strict=True):
            assert counted[1:] == printed[1:]


def test_resnet34_is_table_s1(page):
    layers = tables_in(page)[6]
    columns = ("layer", "output", "times", "n_in", "n_out", "kernel", "stride", "padding")
    chosen = [[row[layers[0].index(name)] for name in columns] for row in layers[1:]]
    assert [[row[0].split(",")[0], *row[1:]] for row in chosen] == [
        ["Conv2D", "64 x 64", "1", "3", "64", "3 x 3", "1 x 1", "1"],
        ["ResBlock", "32 x 32", "1", "64", "64", "3 x 3", "2 x 2", "1"],
        ["ResBlock", "32 x 32", "2", "64", "64", "3 x 3", "1 x 1", "1"],
        ["ResBlock", "16 x 16", "1", "64", "128", "3 x 3", "2 x 2", "1"],
        ["ResBlock", "16 x 16", "3", "128", "128", "3 x 3", "1 x 1", "1"],
        ["ResBlock", "8 x 8", "1", "128", "256", "3 x 3", "2 x 2", "1"],
        ["ResBlock", "8 x 8", "5", "256", "256", "3 x 3", "1 x 1", "1"],
        ["ResBlock", "4 x 4", "1", "256", "512", "3 x 3", "2 x 2", "1"],
        ["ResBlock", "4 x 4", "2", "512", "512", "3 x 3", "1 x 1", "1"],
        ["AvgPool", "", "1", "512", "512", "4 x 4", "", ""],
        ["linear", "", "1", "512", "200", "", "", ""],
    ]


def test_convolutions_of_vgg16_d_have_bias_normalization_and_relu(page):
    rows = tables_in(page)[4][1:]
    blocks = [row for row in rows if row[0] == "Conv2D" or row[0] == "linear"]
    assert sum(int(row[1]) for row in blocks) == 16
    assert [row[8:11] for row in blocks] == [["✓", "✓", "✓"]] * (len(blocks) - 1) + [
        ["✓", "✗", "✗"]
    ]


def test_the_residual_block_is_drawn_with_both_its_ways(page):
    with_convolution, with_identity = page.split("```mermaid")[1:]
    for edge in (
        "input --> stage2_block1_conv1",
        "input --> stage2_block1_shortcut",
        "stage2_block1_conv2_bn --> stage2_block1_add",
        "stage2_block1_shortcut_bn --> stage2_block1_add",
    ):
        assert edge in with_convolution
    assert "input --> stage1_block2_add" in with_identity
    assert "shortcut" not in with_identity
