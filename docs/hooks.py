"""Makes pages of the tutorials, and a page of further measurements.

Every `examples/NAME.py` in jupytext's percent format becomes `tutorials/NAME.md`: its
markdown, its code, and what that prints and draws. Pages are plain Markdown, so MkDocs
checks their links and renders them as any other. An error in a cell ends the build.
With `EXECUTE_TUTORIALS=false mkdocs serve` nothing is run: pages show what is stored in
`examples/NAME.ipynb`.
"""

import ast
import base64
import functools
import pathlib
import re
import sys
from concurrent.futures import ThreadPoolExecutor

from mkdocs.exceptions import PluginError
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File
from nbclient.exceptions import CellExecutionError


ROOT = pathlib.Path(__file__).parents[1]
EXAMPLES, BENCHMARKS = ROOT / "examples", ROOT / "benchmarks"
sys.path.append(str(EXAMPLES))
import notebooks  # noqa: E402


WIDE = 650  # pixels: wider figures have several panels, or a legend at their side

log = get_plugin_logger("tutorials")


def on_files(files, config):
    execute = config.extra["execute_tutorials"]
    sources = notebooks.scripts() if execute else notebooks.stored()

    def pages_of(name):
        page, figures = convert(name, sources[name].read_text(), execute)
        return {f"{name}.md": page, **figures}

    with ThreadPoolExecutor(max_workers=2) as pool:  # each runs a process
        for contents in pool.map(pages_of, sources):
            for name, content in contents.items():
                file = File.generated(config, f"tutorials/{name}", content=content)
                files.append(file)
    content = further_measurements(files)
    files.append(File.generated(config, "measurements.md", content=content))
    return files


FURTHER = """# Further measurements

Results that no other page shows, with the commit, the machine and the versions of each.
[Benchmarks](benchmarks.md) says how to make them again."""


def further_measurements(files):
    """The results of `benchmarks/run.py` that no page shows, each below the docstring of
    its script, which has its commands in indented paragraphs."""
    pages = "".join(file.content_string for file in files.documentation_pages())
    blocks = [FURTHER]
    for path in sorted((BENCHMARKS / "results").rglob("*.md")):
        name = path.relative_to(BENCHMARKS / "results").with_suffix("")
        show = f'--8<-- "{name}.md"'
        if show not in pages:
            source = (BENCHMARKS / f"{name}.py").read_text()
            title, *rest = ast.get_docstring(ast.parse(source)).split("\n\n")
            explained = [text for text in rest if not text.startswith("    ")]
            blocks += [f"## {title.removesuffix('.')}", *explained, show]
    return "\n\n".join(blocks) + "\n"


@functools.cache  # `mkdocs serve` runs only what has changed
def convert(name, source, execute):
    """The page in Markdown, and the figures in it by their file names."""
    if execute:
        log.info("Running %s", name)
        try:
            notebook, messages = notebooks.run(name)
        except CellExecutionError as error:
            raise PluginError(f"examples/{name}.py: {error}") from error
        if messages:
            log.info(messages)
    else:
        notebook = notebooks.read(name)

    blocks, figures = [], {}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            text = cell.source.replace("](../docs/", "](../")
            blocks.append(re.sub(r"\]\((\w+)\.ipynb\)", r"](\1.md)", text))
            continue
        blocks.append(f"~~~ python\n{cell.source}\n~~~")
        for output in cell.outputs:
            data = output.get("data", {})
            if "image/png" in data:
                figure = f"{name}_{len(figures) + 1}.png"
                figures[figure] = base64.b64decode(data["image/png"])
                width = output.metadata["image/png"]["width"]
                wide = ["wide"] if width > WIDE else []
                classes = ["figure", *wide, *cell.metadata.get("tags", [])]
                attributes = " ".join(f".{each}" for each in classes)
                attributes += f' style="--width: {width}px"'
                blocks.append(f"![Figure {len(figures)}]({figure}){{ {attributes} }}")
            elif text := data.get("text/plain", output.get("text")):
                blocks.append(f"~~~ {{ .text .output }}\n{text.rstrip()}\n~~~")
    blocks.append(
        f"*This page is the notebook `examples/{name}.ipynb`, which is also a script, "
        f"`examples/{name}.py`.*"
    )
    return "\n\n".join(blocks), figures
