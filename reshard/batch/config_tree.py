"""A configuration as a tree of which every part knows its place in the text, and YAML read into it.

Places count characters of the text from 0 and come from the parser. A part that a YAML alias or merge key names again
is one node, with more than one use: to change its text is to change all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reshard.errors import UsageError

if TYPE_CHECKING:
    import yaml

_INT, _TEXT, _MERGE = (f"tag:yaml.org,2002:{name}" for name in ("int", "str", "merge"))


@dataclass(eq=False, kw_only=True)
class Node:
    """Characters `start` up to `end`, tag and anchor included; `uses` counts the places that have this very node."""

    start: int
    end: int
    uses: int = 1


@dataclass(eq=False, kw_only=True)
class Scalar(Node):
    """A number, a text, or whatever else is no container.

    Attributes:
        text: the value without quotes.
        kind: `int`, `text` or `other`.
        text_at: where `text` stands in the configuration, character by character; None where it is spelled otherwise.
    """

    text: str
    kind: str
    text_at: int | None


@dataclass(eq=False, kw_only=True)
class Entry:
    """A key and its value; a YAML `<<` that merges another mapping is no key."""

    key: Node
    value: Node
    is_merge: bool = False

    @property
    def name(self) -> str | None:
        return self.key.text if isinstance(self.key, Scalar) and not self.is_merge else None


@dataclass(eq=False, kw_only=True)
class MappingNode(Node):
    """Keys and values in the order of the text, duplicates included."""

    entries: list[Entry] = field(default_factory=list)


@dataclass(eq=False, kw_only=True)
class ListNode(Node):
    """A list."""

    items: list[Node] = field(default_factory=list)


def read_yaml(text: str) -> list[Node]:
    """The documents of a YAML text; nothing of it is constructed, so no tag can do harm.

    Raises:
        UsageError: not YAML.
        RecursionError: nested more deeply than a YAML reader can follow.
    """
    import yaml

    try:
        return [_Reader(text).node(root) for root in yaml.compose_all(text, Loader=yaml.SafeLoader)]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or " ".join(str(error).split())
        raise UsageError(
            f"not YAML: {problem}",
            key=None if mark is None else f"line {mark.line + 1}",
            hint="mend it there; a template has to be filled in first",
        ) from error


def outline(documents: Sequence[Node], replaced: Mapping[Node, str]) -> list[tuple[str, str]]:
    """All that a text says apart from its layout, as it would be with some scalars `replaced`: two texts with equal
    outlines are read alike."""
    lines: list[tuple[str, str]] = []
    numbers: dict[Node, int] = {}
    for document in documents:
        lines.append(("document", ""))
        for node in _walk(document):
            if node in numbers:
                lines.append(("again", str(numbers[node])))
                continue
            numbers[node] = len(numbers)
            if isinstance(node, Scalar):
                lines.append((node.kind, replaced.get(node, node.text)))
            else:
                lines.append((type(node).__name__, str(len(children(node)))))
    return lines


def children(node: Node) -> list[Node]:
    """The parts of a node, keys included, in the order of the text."""
    if isinstance(node, MappingNode):
        return [part for entry in node.entries for part in (entry.key, entry.value)]
    return node.items if isinstance(node, ListNode) else []


def _walk(document: Node) -> Iterator[Node]:
    """Every place of a node, each node's parts once; without recursion, as JSON may be nested deeply."""
    seen: set[Node] = set()
    stack = [document]
    while stack:
        node = stack.pop()
        yield node
        if node not in seen:
            seen.add(node)
            stack += reversed(children(node))


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._nodes: dict[int, Node] = {}

    def node(self, source: yaml.Node) -> Node:
        import yaml

        if id(source) in self._nodes:
            self._nodes[id(source)].uses += 1
            return self._nodes[id(source)]
        start, end = source.start_mark.index, source.end_mark.index
        if isinstance(source, yaml.ScalarNode):
            scalar = self._nodes[id(source)] = self._scalar(source, start, end)
            return scalar
        if isinstance(source, yaml.MappingNode):
            mapping = self._nodes[id(source)] = MappingNode(start=start, end=end)
            for key, value in source.value:
                mapping.entries.append(Entry(key=self.node(key), value=self.node(value), is_merge=key.tag == _MERGE))
            return mapping
        listing = self._nodes[id(source)] = ListNode(start=start, end=end)
        for item in source.value:
            listing.items.append(self.node(item))
        return listing

    def _scalar(self, source: yaml.ScalarNode, start: int, end: int) -> Scalar:
        # The start mark is that of a tag or an anchor, where there is one; the end mark is always the value's own.
        quote = source.style if source.style in ("'", '"') else ""
        value_end = end - len(quote)
        at = value_end - len(source.value)
        is_verbatim = (
            source.style not in ("|", ">")
            and at - len(quote) >= start
            and self._text[at - len(quote) : end] == f"{quote}{source.value}{quote}"
        )
        kind = {_INT: "int", _TEXT: "text"}.get(source.tag, "other")
        return Scalar(start=start, end=end, text=source.value, kind=kind, text_at=at if is_verbatim else None)
