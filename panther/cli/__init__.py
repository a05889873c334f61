"""The ``panther`` command: a module or package for each subcommand, imported when its subcommand is called.

Each of these modules has a function ``add_parser``, which describes the options, and a function ``run``, which does the
work and returns the exit status. ``panther --help`` and ``panther COMMAND --help`` do not import torch, because that
takes seconds: ``run`` imports the modules that need torch.
"""

__all__ = ["main"]

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NoReturn

from panther._hints import advice_for, near_name
from panther._logs import logs_shown
from panther._version import __version__
from panther.errors import PantherError

_COMMANDS = {
    "compress": "compress a trained model to a budget",
    "tune": "search forms and ranks by a metric of yours, from a configuration file",
    "tree": "show a model's modules with parameters, bytes, and what is sketched or quantized",
    "export": "write a model for other programs: ONNX, torch.export, plain layers",
    "train": "train a model of yours, without a script",
    "launch": "start a script on several processes, as torchrun does",
    "init": "write launch files for Slurm, Kubernetes, Ray or torchrun",
    "advise": "choose a parallelism: memory, bytes sent and time of every layout",
    "simulate": "show on a CPU what data parallelism does, and check it",
    "explain": "print a page about a concept: sketching, seeds, memory, parallelism, ranks, ...",
    "demo": "train dense, sketched and low-rank networks on handwritten digits, on several processes",
    "doctor": "show versions, devices and extras, found or missing; check between nodes (--nodes)",
}
_REMOVED = {
    "profile": "torch.profiler records a script, as docs/howto/launch.rst shows, and profile=True a Trainer's run",
}
# The other commands install their own handlers of SIGTERM, or start processes that would inherit this handler.
_ENDED_BY_SIGTERM = ("compress", "export")
_EXIT_STATUS = """\
exit status:
  0    success
  1    the work failed: training, a check, a process or a file; or nothing fits (advise, simulate)
  2    bad usage or bad input: an option, a setting, a path or a model that cannot be used
  130  interrupted (compress and export: 143 after SIGTERM)
  launch returns 1 if a rank failed, 128 + N if signal N ended it.
"""


class _TerminatedError(BaseException):
    """SIGTERM ends the process. No ``except Exception`` catches this error."""


class _Parser(argparse.ArgumentParser):
    """A parser that refuses unknown options before missing ones, and lists the commands or kinds if one is missing."""

    _words: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = args
        parsed, rest = super().parse_known_args(args, namespace)
        if rest and "launch_options" not in parsed:
            self._refuse(rest)
        return parsed, rest

    def error(self, message: str) -> NoReturn:
        flags, is_missing = [*self._option_string_actions], "required" in message
        options = [(word, word.partition("=")[0]) for word in self._words if word.startswith("--")]
        unknown = [word for word, name in options if not any(flag.startswith(name) for flag in flags)]
        if is_missing and unknown:
            self._refuse(unknown)
        has_commands = any(isinstance(action, argparse._SubParsersAction) for action in self._actions)
        (self.print_help if is_missing and has_commands else self.print_usage)(sys.stderr)
        self.exit(2, f"{self.prog}: error: {message}\n")

    def _refuse(self, words: Sequence[str]) -> NoReturn:
        self.error(f"unrecognized arguments: {' '.join(words)}{_hint(self, words[0])}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``panther`` command, on the command line's arguments if ``argv`` is None, and return its exit status.

    Errors are explained on standard error. argparse raises SystemExit for arguments that it refuses.
    """
    args = _parse(sys.argv[1:] if argv is None else list(argv))
    try:
        with logs_shown("panther: %(message)s", always=True), _termination_raised(args.command in _ENDED_BY_SIGTERM):
            status: int = args.run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader of the output has closed it, as `head` does; Python would raise again on closing the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except PantherError as error:
        return _explain(error)
    except OSError as error:
        if args.command in ("train", "tune"):
            raise  # The error may come from the user's code, and the user then needs the traceback.
        return _explain(error)
    except KeyboardInterrupt:
        print("panther: interrupted", file=sys.stderr)
        return 130
    except _TerminatedError:
        print(f"panther: SIGTERM ended {args.command} before its result was written", file=sys.stderr)
        return 128 + signal.SIGTERM


@contextmanager
def _termination_raised(is_wanted: bool) -> Iterator[None]:
    """Let SIGTERM raise _TerminatedError within the block, as Ctrl-C raises, so that incomplete files are removed."""
    # Python sets handlers of signals in the main thread only.
    if not is_wanted or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: Any) -> None:
        raise _TerminatedError

    previous_handler = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def _parse(argv: list[str]) -> argparse.Namespace:
    """Parse the arguments, importing the module of the chosen command only."""
    parser = _Parser(
        prog="panther",
        description="Sketched layers for PyTorch: compress and train models, launch and plan distributed runs.",
        epilog=_EXIT_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"panther {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    command = next((argument for argument in argv if not argument.startswith("-")), None)
    if command in _REMOVED:
        parser.error(f"{command!r} is not a command any more: {_REMOVED[command]}")
    if command is not None and command not in _COMMANDS and (near := get_close_matches(command, _COMMANDS, 1)):
        parser.error(f"{command!r} is not a command: did you mean {near[0]!r}?")
    arguments = argv
    for name, summary in _COMMANDS.items():
        if name == command:
            module = import_module(f"panther.cli.{name}")
            module.add_parser(commands)
            if name == "train":
                arguments = module.new_spelling(commands.choices[name], argv)
        else:
            commands.add_parser(name, help=summary)
    args, args.launch_options = parser.parse_known_args(arguments, argparse.Namespace(argv=argv))
    return args


def _hint(parser: argparse.ArgumentParser, argument: str) -> str:
    """Return the end of the error about an unknown argument: the option of a similar name, or how to list all."""
    visible_flags = (flag for flag, action in parser._option_string_actions.items() if action.help != argparse.SUPPRESS)
    flags = {flag[2:].replace("-", "_"): flag for flag in visible_flags if flag.startswith("--")}
    name = argument.lstrip("-").partition("=")[0].replace("-", "_") if argument.startswith("--") else ""
    if (near := near_name(name, flags)) is None:
        if (advice := advice_for(name, parser.get_default("owner") or "")) is not None:
            return f": {advice}"
        near = next(iter(get_close_matches(name, flags, 1, cutoff=0.7)), None)
    return f"; {parser.prog} --help lists the options" if near is None else f": did you mean {flags[near]}?"


def _explain(error: PantherError | OSError) -> int:
    """Print an error as one sentence and return the exit status that it stands for."""
    message = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
    print(f"panther: error: {message}", file=sys.stderr)
    # If a launcher started this process, it reads the failure from a file.
    import_module("panther.distributed.comm.ending").record_failure(error)
    # The classes of panther.errors about failed work derive from RuntimeError. The classes about bad input derive from
    # ValueError or TypeError, and the commands raise PantherError itself for bad arguments.
    return 1 if isinstance(error, RuntimeError | ImportError | OSError) else 2
