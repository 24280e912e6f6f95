"""JSON read into a tree of which every part knows its place in the text.

The standard library's reader decides what JSON is, and says what is wrong. It keeps no places, so a text that has
passed is gone through once more; there, only strings, brackets and what stands between separators need telling apart.
"""

from __future__ import annotations

import json

from reshard.batch.config_tree import Entry, ListNode, MappingNode, Node, Scalar
from reshard.errors import UsageError

_BLANKS = " \t\r\n"
_SEPARATORS = _BLANKS + ":,"
_BYTE_ORDER_MARK = "\ufeff"


def read_json(text: str) -> Node:
    """The one document of a JSON text, which may begin with a byte order mark.

    Raises:
        UsageError: not JSON.
        RecursionError: nested more deeply than the standard library's reader can follow.
    """
    start = len(_BYTE_ORDER_MARK) if text.startswith(_BYTE_ORDER_MARK) else 0
    try:
        json.loads(text[start:])
    except json.JSONDecodeError as error:
        raise UsageError(
            f"not JSON: {error.msg}",
            key=f"line {error.lineno}",
            hint="mend it there; JSON has no comments and no comma after the last entry",
        ) from error
    except ValueError as error:  # an integer of more digits than Python converts
        raise UsageError(
            "not JSON that can be read", found=str(error).split(";")[0], hint="shorten that number"
        ) from error
    return _scan(text, start)


def _scan(text: str, at: int) -> Node:
    """Needs valid JSON from `at` on."""
    open_nodes: list[MappingNode | ListNode] = []
    keys: list[Node | None] = []
    while True:
        character = text[at]
        if character in _SEPARATORS:
            at += 1
            continue
        if character in "}]":
            at += 1
            closed = open_nodes.pop()
            keys.pop()
            closed.end = at
            if not open_nodes:
                return closed
            continue
        node = _begin(text, at)
        at = node.end
        if open_nodes:
            _put(node, open_nodes[-1], keys)
        if isinstance(node, (MappingNode, ListNode)):
            open_nodes.append(node)
            keys.append(None)
        elif not open_nodes:
            return node


def _begin(text: str, at: int) -> Node:
    """What begins at `at`: a scalar with its end, a container with only its bracket."""
    if text[at] == "{":
        return MappingNode(start=at, end=at + 1)
    if text[at] == "[":
        return ListNode(start=at, end=at + 1)
    if text[at] == '"':
        end = _string_end(text, at)
        value = json.loads(text[at:end])
        is_verbatim = text[at + 1 : end - 1] == value
        return Scalar(start=at, end=end, text=value, kind="text", text_at=at + 1 if is_verbatim else None)
    end = at
    while end < len(text) and text[end] not in _SEPARATORS + "}]":
        end += 1
    kind = "int" if text[at:end].removeprefix("-").isdigit() else "other"
    return Scalar(start=at, end=end, text=text[at:end], kind=kind, text_at=at)


def _put(node: Node, container: MappingNode | ListNode, keys: list[Node | None]) -> None:
    if isinstance(container, ListNode):
        container.items.append(node)
    elif keys[-1] is None:
        keys[-1] = node
    else:
        container.entries.append(Entry(key=keys[-1], value=node))
        keys[-1] = None


def _string_end(text: str, at: int) -> int:
    at += 1
    while text[at] != '"':
        at += 2 if text[at] == "\\" else 1
    return at + 1
