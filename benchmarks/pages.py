"""Reads the tables that `run.py` has written to `results/`."""

import re
from pathlib import Path
from typing import NamedTuple


RESULTS = Path(__file__).parent / "results"
TABLE = re.compile(r"^(?:[^|\n].*\n\n?)?((?:\|.*\n)+)", re.MULTILINE)


class Table(NamedTuple):
    """What stands above it, the columns but for the first, and the cells of each row."""

    title: str
    columns: list[str]
    rows: dict[str, list[str]]


def tables(name: str) -> list[Table]:
    """The tables that `name.py` has printed."""
    found = []
    for block in TABLE.finditer((RESULTS / f"{name}.md").read_text()):
        (_, *columns), _, *rows = (
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in block[1].splitlines()
        )
        title = block[0][: block.start(1) - block.start()].strip()
        found.append(Table(title, columns, {row[0]: row[1:] for row in rows}))
    return found


def numbers(cell: str) -> list[float]:
    return [float(each) for each in re.findall(r"-?\d+\.?\d*(?:e[+-]?\d+)?", cell)]
