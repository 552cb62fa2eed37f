"""The README, the documentation's tools, and what the package ships besides code."""

import configparser
import importlib.util
import json
import pkgutil
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import keras_freeze as kf

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.py"))
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def tool(name):
    """A module of `tools/`, which is not a package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tutobooks():
    return tool("tutobooks")


@pytest.fixture(scope="module")
def flowcharts():
    return tool("flowcharts")


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if link.startswith("http"):
            continue
        target = page.parent / link
        tutorial = target.with_suffix(".py")  # its page is made when the site is built
        assert target.exists() or tutorial.resolve() in TUTORIALS, f"{link} in {page}"


def names_in_the_reference():
    pages = (ROOT / "docs" / "api").glob("*.md")
    return [name for page in pages for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)]


@pytest.mark.parametrize("name", names_in_the_reference())
def test_names_of_the_reference_exist(name):
    assert pkgutil.resolve_name(name) is not None


def test_every_public_name_is_in_the_reference():
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    for name in kf.__all__:
        assert name == "__version__" or f"`{name}`" in pages, name


def test_everything_beside_code_is_package_data():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    declared = {
        "/".join([*package.split("."), name])
        for package, names in setup["options.package_data"].items()
        for name in names.split()
    }
    package = ROOT / "keras_freeze"
    files = {p for p in package.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    others = {str(p.relative_to(ROOT)) for p in files if p.suffix != ".py"}
    assert others == declared
    assert "keras_freeze/py.typed" in others


# ---------------------------------------------------------------- tutorials


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_becomes_a_page_and_a_notebook_with_its_code(path, tutobooks):
    tutorial = tutobooks.read(path)
    code = [cell.source for cell in tutorial.cells if cell.is_code]
    page = tutobooks.to_markdown(tutorial)
    assert page.startswith(f"# {tutorial.fields['Title']}\n")
    assert re.findall(r"^```python\n(.*?)\n```$", page, re.M | re.S) == code
    notebook = json.loads(json.dumps(tutobooks.to_notebook(tutorial)))
    cells = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    assert ["".join(c["source"]) for c in cells] == code
    assert len({c["id"] for c in notebook["cells"]}) == len(notebook["cells"])
    lines = [line for part in code for line in part.splitlines() if line.strip()]
    source = path.read_text(encoding="utf-8").splitlines()
    assert [line for line in source if line in set(lines) and line.strip()] == lines


def test_cells_are_text_and_code_in_order(tutobooks, tmp_path):
    path = tmp_path / "tutorial.py"
    path.write_text(
        '"""\nTitle: One\nDescription: Of two\n"""\n\n"""\ntext\n"""\n\nx = 1\n\n"""end"""\n'
    )
    tutorial = tutobooks.read(path)
    assert tutorial.fields == {"Title": "One", "Description": "Of two"}
    assert [(c.is_code, c.source) for c in tutorial.cells] == [
        (False, "text"),
        (True, "x = 1"),
        (False, "end"),
    ]


@pytest.mark.parametrize("source", ["x = 1\n", '"""\nAuthor: none\n"""\n', ""])
def test_a_tutorial_needs_a_title(source, tutobooks, tmp_path):
    path = tmp_path / "tutorial.py"
    path.write_text(source)
    with pytest.raises(ValueError, match="must"):
        tutobooks.read(path)


# ---------------------------------------------------------------- flowcharts


def test_every_flowchart_of_the_documentation_can_be_drawn(flowcharts):
    drawn = 0
    for page in PAGES:
        text = flowcharts.replace_flowcharts(page.read_text(encoding="utf-8"))
        assert "```mermaid" not in text
        for svg in re.findall(r"<svg.*?</svg>", text):
            ET.fromstring(svg)
            drawn += 1
    assert drawn >= 3


def test_a_flowchart_has_its_labels_and_edges(flowcharts):
    svg = flowcharts.draw('flowchart TD\n  a["one & two"]\n  a --> b\n  a -- "so" --> c\n  c --> a')
    root = ET.fromstring(svg)
    words = [e.text for e in root if e.tag == "text"]
    assert sorted(words) == ["b", "c", "one & two", "so"]
    assert len([e for e in root if e.tag == "path"]) == 3
    assert len([e for e in root if e.tag == "rect"]) == 3


def test_an_edge_over_several_rows_passes_beside_the_nodes_between(flowcharts):
    svg = ET.fromstring(flowcharts.draw("flowchart TD\n a --> b\n b --> c\n a --> c"))
    boxes = [{k: float(e.get(k)) for k in ("x", "width")} for e in svg if e.tag == "rect"]
    paths = [e.get("d") for e in svg if e.tag == "path"]
    places = [float(x) for x in re.findall(r"[ C](-?\d+) -?\d+V", paths[2])]
    middle = boxes[1]
    assert any(abs(x - middle["x"] - middle["width"] / 2) > middle["width"] / 2 for x in places)


@pytest.mark.parametrize("text", ["flowchart LR\n a --> b", "flowchart TD\n a ==> b"])
def test_other_diagrams_are_refused(text, flowcharts):
    with pytest.raises(ValueError, match="flowchart"):
        flowcharts.draw(text)
