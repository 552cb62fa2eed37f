"""What the documentation site does besides mkdocs: pages of the tutorials, and drawings."""

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))

import flowcharts
import tutobooks


def on_files(files: Files, config: Any) -> Files:
    """Give every tutorial, which is a Python file, a page."""
    for file in list(files):
        if file.src_uri.startswith("tutorials/") and file.src_uri.endswith(".py"):
            page = tutobooks.to_markdown(tutobooks.read(Path(file.abs_src_path)))
            uri = file.src_uri.removesuffix(".py") + ".md"
            download = f"\n[Download this tutorial as a Python file]({Path(file.src_uri).name})\n"
            files.append(File.generated(config, uri, content=page + download))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Draw the diagrams, since Mermaid itself would be loaded from the network."""
    return flowcharts.replace_flowcharts(markdown)
