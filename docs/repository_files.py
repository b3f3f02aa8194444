"""MkDocs hook: pages may link to files of the repository outside docs/, which the site then contains.

A link such as ../profiling/results/sync.csv is right for a reader of the repository. In the site it becomes
files/profiling/results/sync.csv, a copy of that file.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

LINK = re.compile(r"(\]\()\.\./([\w./-]+)(?=[)#])")


def linked_files(markdown: str) -> set[str]:
    """Return the paths, relative to the repository, that a page links to outside docs/."""
    return {match[2] for match in LINK.finditer(markdown)}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the linked files to the site; a link to a file that does not exist stays one, and fails a strict build."""
    root = Path(config.config_file_path).parent
    paths: set[str] = set()
    for file in files.documentation_pages():
        paths |= linked_files(file.content_string)
    for path in sorted(paths):
        if (root / path).is_file():
            files.append(File.generated(config, f"files/{path}", abs_src_path=str(root / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links of a page at the copies."""
    return LINK.sub(r"\1files/\2", markdown)
