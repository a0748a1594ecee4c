"""Every public name has an example in its docstring, which runs as users would run it."""

import inspect
import re
import types

import equinox as eqx
import jax
import pytest

import traceax as tx


PUBLIC = {
    name: value
    for name, value in sorted(vars(tx).items())
    if not name.startswith("_") and not isinstance(value, types.ModuleType)
}
CLASSES = [name for name, value in PUBLIC.items() if isinstance(value, type)]
FUNCTIONS = [
    name
    for name, value in PUBLIC.items()
    if callable(value) and not isinstance(value, type)
]
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
SHOWN = re.compile(r"^ *print\(.*\)  # (.+)$", re.MULTILINE)
SECTION = re.compile(r"^\*\*(\w+):\*\*$", re.MULTILINE)
ENTRY = re.compile(r"^- ((?:`\w+`(?:, )?)+):", re.MULTILINE)


def docstring(name):
    """That of the object itself: unlike `inspect.getdoc`, `__doc__` of a class is not
    that of its base."""
    return inspect.cleandoc(PUBLIC[name].__doc__ or "")


def examples(name):
    """The Python blocks, each with the lines above it, so that line numbers are those of
    the docstring."""
    text = docstring(name)
    for block in BLOCK.finditer(text):
        indent, code = block.groups()
        lines = [line.removeprefix(indent) for line in code.splitlines()]
        yield "\n" * text.count("\n", 0, block.start(2)) + "\n".join(lines)


def sections(name):
    """The text under each heading, in their order."""
    _, *parts = SECTION.split(docstring(name))
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.slow(but=("logdet", "trace"))
@pytest.mark.parametrize("name", PUBLIC)
def test_examples_run(name, capsys):
    codes = list(examples(name))
    assert codes, f"the docstring of `traceax.{name}` has no Python block"
    for code in codes:
        capsys.readouterr()
        # Nothing but what the block itself imports, and the precision that users have.
        with jax.enable_x64(False):
            exec(compile(code, f"<docstring of {name}>", "exec"), {"__name__": name})
        printed = capsys.readouterr().out.splitlines()
        assert set(SHOWN.findall(code)) <= set(printed)


@pytest.mark.parametrize("name", PUBLIC)
def test_blocks_stand_apart(name):
    """Markdown takes a fence for text where no blank line is around it."""
    lines = ["", *docstring(name).splitlines(), ""]
    fences = [i for i, line in enumerate(lines) if line.strip().startswith("```")]
    for opening, closing in zip(fences[::2], fences[1::2], strict=True):
        assert not lines[opening - 1]
        assert not lines[closing + 1]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_sections_of_functions(name):
    found = sections(name)
    parameters = list(inspect.signature(PUBLIC[name]).parameters)
    # Without arguments there is nothing to raise an error for.
    expected = ["Arguments", "Returns", "Raises"] if parameters else ["Returns"]
    assert list(found) == expected
    entries = ENTRY.findall(found.get("Arguments", ""))
    assert sorted(re.findall(r"\w+", " ".join(entries))) == sorted(parameters)


# `Preconditioner` is made by functions, and some of its fields are their business.
@pytest.mark.parametrize("name", sorted({*CLASSES} - {"RESULTS", "Preconditioner"}))
def test_fields_are_explained(name):
    cls = PUBLIC[name]
    assert issubclass(cls, eqx.Module)
    bases = [base for base in cls.__mro__ if base.__module__.startswith("traceax")]
    text = "".join(x.__doc__ or "" for x in (*bases, cls.__init__))
    fields = {*inspect.signature(cls).parameters}
    fields |= {*cls.__abstractvars__, *cls.__abstractclassvars__}
    assert {field for field in fields if f"`{field}`" not in text} == set()
