"""Runs the tutorials and makes pages of them, and a page of further measurements.

Every `examples/NAME.py` in jupytext's percent format becomes `tutorials/NAME.md`: its
markdown, its code, and what that prints and draws. Pages are plain Markdown, so MkDocs
checks their links and renders them as any other. An error in a cell ends the build.
`EXECUTE_TUTORIALS=false mkdocs serve` leaves out the running.
"""

import ast
import functools
import pathlib
import re
from concurrent.futures import ThreadPoolExecutor

import jupytext
from mkdocs.exceptions import PluginError
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError


ROOT = pathlib.Path(__file__).parents[1]
EXAMPLES, BENCHMARKS = ROOT / "examples", ROOT / "benchmarks"
PERCENT = "# %%"
KERNEL = ["--InlineBackend.figure_formats=svg", "--log-level=ERROR"]

log = get_plugin_logger("tutorials")


def on_files(files, config):
    sources = {path.stem: path.read_text() for path in sorted(EXAMPLES.glob("*.py"))}
    tutorials = [name for name, source in sources.items() if source.startswith(PERCENT)]

    def pages_of(name):
        page, figures = convert(name, sources[name], config.extra["execute_tutorials"])
        return {f"{name}.md": page, **figures}

    with ThreadPoolExecutor(max_workers=2) as pool:  # each runs a process
        for contents in pool.map(pages_of, tutorials):
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
    notebook = jupytext.reads(source, fmt="py:percent")
    if execute:
        log.info("Running %s", name)
        client = NotebookClient(notebook, coalesce_streams=True, extra_arguments=KERNEL)
        try:
            client.execute()
        except CellExecutionError as error:
            raise PluginError(f"examples/{name}.py: {error}") from error

    blocks, figures = [], {}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            blocks.append(re.sub(r"\]\((\w+)\.py\b", r"](\1.md", cell.source))
            continue
        blocks.append(f"~~~ python\n{cell.source}\n~~~")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if output.get("name") == "stderr":
                log.info(output["text"])
            elif "image/svg+xml" in data:
                figure = f"{name}_{len(figures) + 1}.svg"
                figures[figure] = data["image/svg+xml"]
                blocks.append(f"![Figure {len(figures)}]({figure})")
            elif text := data.get("text/plain", output.get("text")):
                blocks.append(f"~~~ {{ .text .output }}\n{text.rstrip()}\n~~~")
    blocks.append(f"*This page is made from `examples/{name}.py`.*")
    return "\n\n".join(blocks), figures
