"""Numbers in a configuration, found by key and changed where they stand, so that all else stays byte for byte."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath

from reshard.batch.config_tree import Entry, ListNode, MappingNode, Node, Scalar, outline, read_yaml
from reshard.batch.json_tree import read_json
from reshard.errors import BatchError, UsageError

KeyPath = tuple[str, ...]

_MOST_DIGITS = 15
_MOST_SHOWN = 40


@dataclass(frozen=True)
class Found:
    """A part of a configuration.

    Attributes:
        key: its path, dotted.
        node: the part.
        line: the line it begins in, from 1.
        shared_line: the line of the outermost part on the way there that other places have too, by alias or merge key;
            None where changing the part changes nothing else.
    """

    key: str
    node: Node
    line: int
    shared_line: int | None


class ConfigText:
    """A YAML or JSON text and its documents.

    Args:
        text: the whole text, with its line ends as they are.
        name: its file name: what does not end in `.json`, `.yaml` or `.yml` is JSON if it begins with a bracket.

    Raises:
        UsageError: neither YAML nor JSON.
    """

    def __init__(self, text: str, name: str = "") -> None:
        self.text = text
        self.name = name
        suffix = PurePath(name).suffix.lower()
        begins_as_json = text.lstrip("\ufeff \t\r\n").startswith(("{", "["))
        is_json = suffix == ".json" or (suffix not in (".yaml", ".yml") and begins_as_json)
        try:
            self.documents = [read_json(text)] if is_json else read_yaml(text)
        except RecursionError:
            raise UsageError("nested too deeply to be read", hint="is it a configuration?") from None

    def line(self, node: Node) -> int:
        """The line in which a part begins, from 1."""
        return self.text.count("\n", 0, node.start) + 1

    def mappings(self) -> Iterator[tuple[int, KeyPath, MappingNode]]:
        """Every mapping with the number of its document and its path; one that stands in several places once."""
        for number, document in enumerate(self.documents):
            seen: set[Node] = set()
            stack: list[tuple[KeyPath, Node]] = [((), document)]
            while stack:
                path, node = stack.pop()
                if node in seen:
                    continue
                seen.add(node)
                below: list[tuple[KeyPath, Node]] = []
                if isinstance(node, MappingNode):
                    yield number, path, node
                    below = [((*path, entry.name), entry.value) for entry in node.entries if entry.name is not None]
                elif isinstance(node, ListNode):
                    below = [((*path, str(at)), item) for at, item in enumerate(node.items)]
                stack += reversed(below)

    def find(self, document: int, path: KeyPath) -> Found | None:
        """The part at a path of keys and list indices, merge keys followed; None where there is none.

        Raises:
            BatchError: a key on the way is there twice.
        """
        node = self.documents[document]
        shared_line = None
        for depth, name in enumerate(path):
            way = self._below(node, name, path[:depth], frozenset())
            if not way:
                return None
            if shared_line is None:
                shared_line = next((self.line(step) for step in way if step.uses > 1), None)
            node = way[-1]
        return Found(dotted(path), node, self.line(node), shared_line)

    def number(self, found: Found) -> int:
        """The whole number above zero that a part is.

        Raises:
            BatchError: it is none, or spelled in a way that readers disagree about.
        """
        value = _whole_number(found.node)
        if value is None:
            raise BatchError(
                f"line {found.line}",
                key=found.key,
                expected="a whole number above zero, in plain digits",
                found=self._written(found.node),
                hint="write the number itself there",
            )
        return value

    def replaced(self, numbers: Mapping[Scalar, int]) -> ConfigText:
        """The text with other numbers in the places of these, which `number` has read; it is read anew to prove it.

        Raises:
            BatchError: the new text says anything else that the old one does not.
        """
        text = self.text
        for node, number in sorted(numbers.items(), key=lambda item: -item[0].start):
            assert node.text_at is not None, "number() takes no other"
            text = f"{text[: node.text_at]}{number}{text[node.text_at + len(node.text) :]}"
        new = ConfigText(text, self.name)
        if outline(new.documents, {}) != outline(
            self.documents, {node: str(number) for node, number in numbers.items()}
        ):
            raise BatchError("the numbers cannot be changed without changing more", hint="change them by hand")
        return new

    def _below(self, node: Node, name: str, above: KeyPath, merging: frozenset[Node]) -> list[Node]:
        """The parts passed on the way to what `name` is in `node`, that one last; empty where it is not there."""
        if isinstance(node, ListNode):
            at = int(name) if name.isascii() and name.isdigit() else len(node.items)
            return node.items[at : at + 1]
        if not isinstance(node, MappingNode) or node in merging:
            return []
        if entry := self._only([entry for entry in node.entries if entry.name == name], (*above, name)):
            return [entry.value]
        merge = self._only([entry for entry in node.entries if entry.is_merge], (*above, "<<"))
        if merge is None:
            return []
        sources = merge.value.items if isinstance(merge.value, ListNode) else [merge.value]
        for source in sources:
            if way := self._below(source, name, above, merging | {node}):
                return [merge.value, source, *way]
        return []

    def _only(self, entries: list[Entry], path: KeyPath) -> Entry | None:
        if len(entries) > 1:
            lines = " and ".join(str(self.line(entry.key)) for entry in entries)
            raise BatchError(
                f"written more than once, in lines {lines}",
                key=dotted(path),
                hint="delete all but the one that is meant; most readers take the last",
            )
        return entries[0] if entries else None

    def _written(self, node: Node) -> str:
        written = " ".join(self.text[node.start : node.end].split()) or "nothing"
        return written if len(written) <= _MOST_SHOWN else f"{written[:_MOST_SHOWN]}..."


def is_auto(found: Found) -> bool:
    """Whether the framework is to fill the value in."""
    return isinstance(found.node, Scalar) and found.node.kind == "text" and found.node.text == "auto"


def dotted(path: KeyPath) -> str:
    """A path as people write it: `a.b.0`, and a backslash before a dot that belongs to a key."""
    return ".".join(name.replace(".", "\\.") for name in path)


def split_path(text: str) -> KeyPath:
    """The path that `dotted` wrote; `a[0]` is `a.0`, and `[0]` an item of a list that is the whole document."""
    kept = text.replace("\\.", "\0").replace("[", ".").replace("]", "")
    if text.startswith("["):
        kept = kept[1:]
    return tuple(name.replace("\0", ".") for name in kept.split("."))


def _whole_number(node: Node) -> int | None:
    if not isinstance(node, Scalar) or node.kind == "other" or node.text_at is None or len(node.text) > _MOST_DIGITS:
        return None
    text = node.text
    if node.kind == "int":
        # What YAML 1.1 reads as a number and every other reader too, or not at all. 010 and 1:30 are numbers to all,
        # but not the same ones.
        text = text.replace("_", "").removeprefix("+")
        if text.lower().startswith("0x"):
            text = str(int(text, 16))
    if not text.isascii() or not text.isdigit() or text.startswith("0"):
        return None
    return int(text)
