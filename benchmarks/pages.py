"""Reads the tables that `run.py` has put into the pages of the documentation."""

import re
from pathlib import Path
from typing import NamedTuple


DOCS = Path(__file__).parents[1] / "docs"
TABLE = re.compile(r"^(?:[^|\n].*\n\n?)?((?:\|.*\n)+)", re.MULTILINE)


class Table(NamedTuple):
    """What stands above it, the columns but for the first, and the cells of each row."""

    title: str
    columns: list[str]
    rows: dict[str, list[str]]


def tables(page: str, place: str) -> list[Table]:
    """Those of a place of a page, such as `tables("benchmarks", "accuracy")`."""
    text = (DOCS / f"{page}.md").read_text()
    text = text.split(f"<!-- {place} -->\n")[1].split(f"<!-- end of {place} -->")[0]
    found = []
    for block in TABLE.finditer(text):
        (_, *columns), _, *rows = (
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in block[1].splitlines()
        )
        title = block[0][: block.start(1) - block.start()].strip()
        found.append(Table(title, columns, {row[0]: row[1:] for row in rows}))
    return found


def numbers(cell: str) -> list[float]:
    return [float(each) for each in re.findall(r"-?\d+\.?\d*(?:e[+-]?\d+)?", cell)]
