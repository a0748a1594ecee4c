"""Markdown tables of published numbers beside ours."""


def head(*names: str) -> None:
    print("| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|")


def row(*cells: str) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


def beside(theirs: float, ours: float, form: str = ".2g") -> tuple[str, str, str]:
    """Theirs, ours, and ours over theirs."""
    return f"{theirs:{form}}", f"{ours:{form}}", f"{ours / theirs:.2f}"
