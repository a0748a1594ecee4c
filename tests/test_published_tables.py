"""Tables of published results are made by scripts: each has its place, and it is full."""

import re
from pathlib import Path


ROOT = Path(__file__).parent.parent
PLACE = re.compile(r"^<!-- ([\w/]+) -->\n(.*?)^<!-- end of \1 -->$", re.DOTALL | re.M)


def test_scripts_and_places_are_the_same():
    page = (ROOT / "docs" / "published.md").read_text()
    places = dict(PLACE.findall(page))
    scripts = (ROOT / "benchmarks" / "published").glob("*.py")
    assert set(places) == {f"published/{script.stem}" for script in scripts}
    assert page.count("<!-- ") == 2 * len(places)
    for name, text in places.items():
        assert text.startswith(f"*`benchmarks/{name}.py` on ")
        assert re.search(r"^\|.*\d.*\|$", text, re.M), f"the table of {name} is empty"
