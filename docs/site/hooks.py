"""What the site has beside the pages: the files that they link to, as pages, and the changes.

The pages are read in the repository too, where a link to a program shows the program. A site would
offer it for download, and has nothing of what lies outside of its folder.
"""

from __future__ import annotations

import posixpath
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent.parent
LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)\s#]+)")
CODE = {".py": "python", ".toml": "toml"}
CHANGES = "changes.md"
ANSWERS = runpy.run_path(str(Path(__file__).with_name("answers.py")))


def on_config(config: Any) -> Any:
    """Give the page of each defect its place in the navigation."""
    answers = next(section["Answers"] for section in config.nav if "Answers" in section)
    at = next(index for index, page in enumerate(answers) if "Defects" in page)
    answers[at] = {"Defects": ANSWERS["navigation"](ROOT)}
    return config


def on_files(files: Any, *, config: Any) -> Any:
    """Add a page for each file that is linked and is none, with its figures, and the changes."""
    for uri, content in ANSWERS["pages"](ROOT).items():
        files.append(File.generated(config, uri, content=content))
    config.extra["beyond"] = ANSWERS["beyond"](ROOT)
    config.extra["shown"] = shown = {"CHANGELOG.md": CHANGES}
    for page in list(files.documentation_pages()):
        for _, path in _links(page.content_string, f"docs/{page.src_uri}"):
            inside = path.startswith("docs/")
            if (ROOT / path).is_file() and (not inside or Path(path).suffix in CODE):
                shown.setdefault(path, f"source/{path.removesuffix('.md')}.md")
    for path, uri in shown.items():
        files.append(File.generated(config, uri, content=_page(path)))
        images = (target for _, target in _links(_page(path), path) if target.endswith(".svg"))
        for target in images if path.endswith(".md") else ():
            source = str(ROOT / target)
            files.append(File.generated(config, f"source/{target}", abs_src_path=source))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Lead links to files to their pages."""
    shown = config.extra["shown"]
    uri = page.file.src_uri
    if uri == "index.md":
        cards = '<div class="grid cards" markdown>\n\n'
        markdown = markdown.replace(cards, cards + ANSWERS["start"]() + "\n", 1)
    if uri.startswith("implementations/"):
        markdown += config.extra["beyond"].get(Path(uri).stem, "")
    own = next((path for path, to in shown.items() if to == uri), f"docs/{uri}")
    links = {
        link: posixpath.relpath(
            shown.get(path, path.removeprefix("docs/")), posixpath.dirname(uri) or "."
        )
        for link, path in _links(markdown, own)
        if path in shown or path.startswith("docs/")
    }
    return LINK.sub(lambda found: links.get(found[0], found[0]), markdown)


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    """Name the search, which the theme forgets, for who hears the page."""
    return output.replace('role="dialog"', 'role="dialog" aria-label="Search"')


def _links(markdown: str, page: str) -> Iterator[tuple[str, str]]:
    """Links to files, as they are written and as paths from the root."""
    for found in LINK.finditer(markdown):
        yield found[0], posixpath.normpath(posixpath.join(posixpath.dirname(page), found[0]))


def _page(path: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    language = CODE.get(Path(path).suffix, "text")
    fence = f"~~~~~~ {{ .{language} linenums=1 }}"
    return (
        f"# {Path(path).name}\n\n`{path}`, as it is in the repository.\n\n{fence}\n{text}~~~~~~\n"
    )
