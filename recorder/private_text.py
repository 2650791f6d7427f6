"""Takes paths, addresses and accounts out of free text."""

from __future__ import annotations

import re
from typing import Final

REMOVED: Final = "[removed]"
_END: Final = r"\s'\"()<>\[\],;"
_PATHS: Final = re.compile(
    rf"""
    [A-Za-z][A-Za-z0-9+.\-]*://[^{_END}]+                  # scheme://host/path
    | (?<!\w) (?:[A-Za-z]:)? \\ [^{_END}]+                  # C:\\path, \\\\host\\path
    | (?<![\w.]) (?:~\w*|\.\.?)? / [^{_END}:]+              # /path, ~/path, ./path
    | [^{_END}:/]+ (?: / [^{_END}:/]+ ){{2,}}               # one/two/three: at least two slashes
    """,
    re.VERBOSE,
)
_ACCOUNTS: Final = re.compile(r"[\w.+\-]+@[\w.\-]+")
_ADDRESSES: Final = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?(?![\w.]*\w)")
_HOSTS: Final = re.compile(r"(?<![\w.])(?:[A-Za-z0-9\-]+\.){2,}[A-Za-z]{2,}(?![\w.])")
_LONG_ADDRESSES: Final = re.compile(r"(?<![\w:])(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{1,4}(?![\w:])")
_WHOLE: Final = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.\-]*://|[A-Za-z]:\\|~|\.{0,2}[/\\])")


def without_paths(text: str) -> str:
    """`text` with each path in it reduced to its last component.

    Text that begins like a path, or has a slash and no space, is one path from end to end (`org/model` is
    `model`). In other text a single slash between two words stays: it is prose more often than a path.
    """
    if _WHOLE.match(text) or not re.search(r"\s", text):
        return _last(text) if re.search(r"[/\\]", text) else text
    return _PATHS.sub(lambda found: _last(found[0]), text)


def without_people(text: str) -> str:
    """`without_paths`, and without `user@host`, IPv4 and IPv6 addresses, and host names with their domain. A name in prose ("on Alice's
    node") is beyond it.
    """
    text = without_paths(_ACCOUNTS.sub(REMOVED, text))
    for pattern in (_ADDRESSES, _LONG_ADDRESSES, _HOSTS):
        text = pattern.sub(REMOVED, text)
    return text


def _last(path: str) -> str:
    """Last component; of an URL without its query, and nothing of one that is only a host."""
    scheme, marker, rest = path.partition("://")
    if marker:
        rest = re.split(r"[?#]", rest)[0]
        return _last(rest) if re.search(r"[^/]/+[^/]", rest) else REMOVED
    parts = [part for part in re.split(r"[/\\]+", scheme) if part not in ("", ".", "..", "~")]
    return parts[-1] if parts else REMOVED
