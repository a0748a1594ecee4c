"""The notebooks of the examples are in step with their scripts, and fit to be read."""

import json
import re
from pathlib import Path

import pytest


EXAMPLES = Path(__file__).parent.parent.parent / "examples"
START = re.compile(r"^# %%(.*)\n", re.MULTILINE)
SCRIPTS = {
    path.stem: path.read_text()
    for path in sorted(EXAMPLES.glob("*.py"))
    if START.match(path.read_text())
}
AGAIN = "run `python examples/notebooks.py {}`"


def cells_of_script(text):
    """Pairs of a kind and a source, from jupytext's percent format."""
    _, *parts = START.split(text)
    found = []
    for head, body in zip(parts[::2], parts[1::2], strict=True):
        source = body.strip("\n")
        if "[markdown]" in head:
            source = re.sub(r"^# ?", "", source, flags=re.MULTILINE)
        found.append(("markdown" if "[markdown]" in head else "code", source))
    return found


def load(name):
    return json.loads((EXAMPLES / f"{name}.ipynb").read_text())


def title(name):
    heading, *_ = "".join(load(name)["cells"][0]["source"]).splitlines()
    return heading


def test_every_script_has_a_notebook():
    assert {path.stem for path in EXAMPLES.glob("*.ipynb")} == set(SCRIPTS)
    assert len(SCRIPTS) >= 13


@pytest.mark.parametrize("name", SCRIPTS)
def test_cells_are_those_of_the_script(name):
    cells = load(name)["cells"]
    found = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    assert found == cells_of_script(SCRIPTS[name]), AGAIN.format(name)


@pytest.mark.parametrize("name", SCRIPTS)
def test_notebooks_were_run_from_start_to_end(name):
    cells = [cell for cell in load(name)["cells"] if cell["cell_type"] == "code"]
    counts = [cell["execution_count"] for cell in cells]
    assert counts == list(range(1, len(cells) + 1)), AGAIN.format(name)
    outputs = [output for cell in cells for output in cell["outputs"]]
    kinds = {output["output_type"] for output in outputs}
    assert "stream" in kinds
    assert "error" not in kinds
    assert {x["name"] for x in outputs if x["output_type"] == "stream"} == {"stdout"}
    drawn = sum("image/png" in output.get("data", {}) for output in outputs)
    axes = re.findall(r"plt\.subplots\(", SCRIPTS[name])
    assert drawn == len(axes) > 0


@pytest.mark.parametrize("name", SCRIPTS)
def test_notebooks_are_small_and_say_nothing_of_the_machine(name):
    assert (EXAMPLES / f"{name}.ipynb").stat().st_size <= 300_000
    notebook = load(name)
    assert set(notebook["metadata"]) == {"jupytext", "kernelspec", "language_info"}
    assert notebook["metadata"]["jupytext"]["formats"] == "ipynb,py:percent"
    assert {key for cell in notebook["cells"] for key in cell["metadata"]} <= {"tags"}
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            text = "".join(output.get("text", []))
            assert not re.search(r"/(tmp|home|root|Users)/", text)


def test_titles_are_tasks():
    titles = [title(name) for name in SCRIPTS]
    assert len(set(titles)) == len(titles)
    for name, heading in zip(SCRIPTS, titles, strict=True):
        assert re.match(r"# [A-Z]\w+ (\w+ )+", heading), name
        assert "_" not in heading, name
