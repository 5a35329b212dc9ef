"""The pages of README and docs/: links, the index, and paths that code, configurations and messages name."""

import re
from pathlib import Path

import pytest

from tests import config_reference

ROOT = Path(__file__).parent.parent
FOLDERS = ("benchmarks", "configs", "cotrain", "docs", "drafters", "examples", "pipelines", "tests")
FILES = sorted(file.relative_to(ROOT) for folder in FOLDERS for file in (ROOT / folder).rglob("*.*"))
FILES += [Path("README.md"), Path("CONTRIBUTING.md"), Path("CHANGELOG.md"), Path("Makefile"), Path("pyproject.toml")]
PAGES = [file for file in FILES if file.suffix == ".md"]
INDEX = Path("docs/README.md")
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def text(page: Path) -> str:
    return CODE_BLOCK.sub("", (ROOT / page).read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub forms them."""
    headings = re.findall(r"^#+ (.+)$", text(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[tuple[Path, str]]:
    """(page or file, anchor) of each link of a page to a file of this repository."""
    found = []
    for target in LINK.findall(text(page)):
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            found.append(((ROOT / page.parent / path).resolve().relative_to(ROOT) if path else page, anchor))
    return found


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_a_page_has_a_heading_and_its_links_lead_somewhere(page: Path) -> None:
    assert anchors(page), f"{page} has no heading"
    for file, anchor in links(page):
        assert (ROOT / file).exists(), f"{page}: {file}"
        assert not anchor or anchor in anchors(file), f"{page}: {file}#{anchor}"


def test_the_index_lists_every_page() -> None:
    listed = {file for file, _ in links(INDEX)}
    assert [str(page) for page in PAGES if page.parts[0] == "docs" and page not in {*listed, INDEX}] == []


def test_pages_that_code_and_messages_name_exist() -> None:
    sources = [file for file in FILES if file.suffix in {".py", ".toml"} or file.name == "Makefile"]
    named = {
        (page, str(file))
        for file in sources
        for page in re.findall(r"(?<![\w./])docs/[\w/]+\.md(?!, commit)", (ROOT / file).read_text(encoding="utf-8"))
    }
    assert sorted((page, file) for page, file in named if not (ROOT / page).exists()) == []


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 110


def test_configuration_page_is_that_of_the_schema() -> None:
    page = config_reference.PAGE.read_text(encoding="utf-8")
    assert page == config_reference.text(), "python -m tests.config_reference writes the page"
