"""Runs the examples and writes their notebooks.

    pip install -e '.[docs]'
    python examples/notebooks.py                  # all of them
    python examples/notebooks.py quickstart graph

Every script here in jupytext's percent format is paired with a notebook of the same
name, which has the same cells and what they print and draw. `docs/hooks.py` makes pages
of them.
"""

import base64
import io
import pathlib
import sys

import jupytext
import nbformat
from nbclient import NotebookClient
from PIL import Image


EXAMPLES = pathlib.Path(__file__).parent
DPI, CSS_DPI = 144, 96  # sharp on screens with 1.5 dots per CSS pixel
COLOURS = 128  # a palette makes pictures a third as large
KERNEL = [
    f"--InlineBackend.print_figure_kwargs={{'dpi': {DPI}, 'bbox_inches': 'tight'}}",
    "--log-level=ERROR",
]
METADATA = {
    # Scripts keep no header, so that they begin with their first cell.
    "jupytext": {"formats": "ipynb,py:percent", "notebook_metadata_filter": "-all"},
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def scripts():
    """The scripts that are notebooks, by name."""
    paths = sorted(EXAMPLES.glob("*.py"))
    return {path.stem: path for path in paths if path.read_text().startswith("# %%")}


def stored():
    """The notebooks, by name."""
    return {path.stem: path for path in sorted(EXAMPLES.glob("*.ipynb"))}


def read(name):
    """The stored notebook."""
    return nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)


def run(name):
    """The notebook of a script, executed, and what its cells wrote to stderr."""
    notebook = jupytext.read(scripts()[name], fmt="py:percent")
    client = NotebookClient(
        notebook, record_timing=False, coalesce_streams=True, extra_arguments=KERNEL
    )
    client.execute()
    notebook.metadata = nbformat.from_dict(METADATA)
    messages = []
    for index, cell in enumerate(notebook.cells):
        cell.id = f"cell-{index}"  # jupytext's are random
        cell.metadata = {
            key: cell.metadata[key] for key in ["tags"] if key in cell.metadata
        }
        if cell.cell_type == "code":
            messages += [x.text for x in cell.outputs if x.get("name") == "stderr"]
            cell.outputs = [clean(x) for x in cell.outputs if x.get("name") != "stderr"]
    return notebook, "".join(messages)


def clean(output):
    """Without what differs from run to run, and with a smaller picture."""
    output.pop("transient", None)
    if "image/png" in output.get("data", {}):
        picture = Image.open(io.BytesIO(base64.b64decode(output.data["image/png"])))
        file = io.BytesIO()
        picture.convert("RGB").quantize(COLOURS).save(file, "png", optimize=True)
        output.data = {"image/png": base64.b64encode(file.getvalue()).decode()}
        width, height = (round(size * CSS_DPI / DPI) for size in picture.size)
        output.metadata = {"image/png": {"width": width, "height": height}}
    return nbformat.from_dict(output)


if __name__ == "__main__":
    for name in sys.argv[1:] or scripts():
        notebook, messages = run(name)
        path = EXAMPLES / f"{name}.ipynb"
        nbformat.write(notebook, path)
        print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")
        print(messages, end="", file=sys.stderr)
