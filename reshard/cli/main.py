"""The `reshard` command: the parser, and what becomes of a verb that fails.

A family of verbs is a module with `register(verbs)`, which adds its parsers and sets `run` on each: a function from
the parsed arguments to the exit code. The parser is built on every call, `reshard --help` included, so such a module
imports whatever is slow to import (torch, matplotlib) inside `run`.

Exit codes: 0 sound, equal or done; 1 unsound or different; 2 usage or environment; 3 our own bug; and as shells have
it, 130 interrupted, 141 the reader of our output went away.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from reshard.cli import (
    batch,
    batch_config,
    check,
    convert,
    diff,
    estimate,
    inspect,
    offline,
    prove,
    prune,
    slurm,
    traces,
    triage,
)
from reshard.cli.output import print_error
from reshard.environment import is_follower, want_one_numpy_thread
from reshard.errors import ReshardError, UsageError

EXIT_BUG = 3
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

_FAMILIES = (batch, batch_config, check, convert, diff, estimate, inspect, offline, prove, prune, slurm, traces, triage)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code; nothing escapes as an exception.

    Args:
        argv: the arguments after `reshard`; those of the process by default.
    """
    try:
        _accept_any_text()
        if argv is None:
            want_one_numpy_thread()
        code = _run(argv)
        # Flushed here, a reader that went away is noticed while it can still be handled.
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        _discard_output()
        return EXIT_BROKEN_PIPE


def build_parser() -> argparse.ArgumentParser:
    """The parser of every verb."""
    parser = _Parser(prog="reshard", description="Make an FSDP run survive any change of machines.")
    parser.add_argument("--version", action=_PrintVersion)
    parser.add_argument("--debug", action="store_true", help="print the traceback of an error")
    verbs = parser.add_subparsers(metavar="VERB", dest="verb", required=True)
    for family in _FAMILIES:
        family.register(verbs)
    for verb in parsers_below(parser).values():
        # Suppressed, or the verb's default would undo a --debug given before the verb.
        verb.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser


def parsers_below(parser: argparse.ArgumentParser, above: str = "") -> dict[str, argparse.ArgumentParser]:
    """The parsers of verbs and of their actions, by name: `check`, `slurm`, `slurm submit`."""
    found = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                found[above + name] = below
                found.update(parsers_below(below, f"{above}{name} "))
    return found


class _Parser(argparse.ArgumentParser):
    """Options in full only: an abbreviation that works today would be taken from its users by the next option."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})


class _PrintVersion(argparse.Action):
    """Looks the version up only when asked: argparse's own action would do so on every start."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, nargs=0, help="print the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            number = version("reshard")
        except PackageNotFoundError:
            number = "unknown (not installed)"
        print(f"{parser.prog} {number}")
        parser.exit()


def _run(argv: Sequence[str] | None) -> int:
    try:
        args = build_parser().parse_args(argv)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2
    try:
        return int(args.run(args))
    except ReshardError as error:
        if args.debug:
            traceback.print_exc()
        # Where several processes work together, all end with this error and the first one tells it.
        if not (error.is_shared and is_follower()):
            print_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        raise
    except MemoryError:
        print_error("not enough memory; free some, or use a machine that has more")
        return UsageError.exit_code
    except BaseException as error:  # torch's CheckpointException is not an Exception
        _report_bug(error, with_traceback=args.debug)
        return EXIT_BUG


def _report_bug(error: BaseException, *, with_traceback: bool) -> None:
    if with_traceback:
        traceback.print_exception(error)
    hint = "please report it" if with_traceback else "run again with --debug for the traceback"
    print_error(f"a bug in reshard: {type(error).__name__}: {error}; {hint}")


def _accept_any_text() -> None:
    """A name that a terminal cannot show must not end a verb that has done its work."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """Keep the interpreter's own flush at exit from complaining about the same broken pipe."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
