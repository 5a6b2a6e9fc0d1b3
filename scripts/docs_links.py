"""A hook of mkdocs: pages of docs/ link to files of the repository, as on GitHub, and the site has these links too.

Pages and results outside docs/ become pages of the site. Links to other files, such as sources, lead to the repository.
"""

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
ALSO = ("CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md", "benchmarks/results/**/*.*")
LINK = re.compile(r"\]\((?P<path>[^)#\s:]+)(?P<anchor>#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the files outside docs/ under the path that they have in the repository."""
    for pattern in ALSO:
        for path in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites links between docs/ and the files outside it."""
    here = Path(page.file.abs_src_path).parent

    def rewritten(link: re.Match) -> str:
        target = Path(os.path.normpath(here / link["path"]))
        if not (target.exists() and target.is_relative_to(ROOT)):
            return link[0]  # mkdocs reports it
        path = target.relative_to(ROOT).as_posix()
        in_site = path.removeprefix("docs/")
        file = files.get_file_from_path(in_site)
        if file and file.inclusion.is_included():
            path = posixpath.relpath(in_site, posixpath.dirname(page.file.src_uri) or ".")
        else:
            path = f"{config.extra['repository']}/blob/main/{path}"
        return f"]({path}{link['anchor'] or ''})"

    return LINK.sub(rewritten, markdown)
