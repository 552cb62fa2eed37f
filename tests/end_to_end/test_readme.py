"""The quickstart of the README runs and prints what it says."""

import re
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_the_quickstart_prints_what_the_readme_says(tmp_path, monkeypatch, capsys):
    section = README.split("## Quickstart\n")[1].split("\n## ")[0]
    code, expected = re.findall(r"^```(?:python)?\n(.*?)^```$", section, re.M | re.S)
    assert len([line for line in code.splitlines() if line and "import" not in line]) == 12
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out.strip().splitlines()
    # Scores that nearly tie may fall otherwise on another backend or machine.
    told = ("parameter", "---", "Weights", "Other", "Freezing", "Network")
    assert [line for line in printed if line.startswith(told)] == [
        line for line in expected.splitlines() if line.startswith(told)
    ]
    assert float(printed[-1].split()[-1].rstrip("%")) > 95
    assert abs((tmp_path / "model.freeze").stat().st_size - 99_336) < 2_000
