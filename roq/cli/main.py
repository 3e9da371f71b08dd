"""The command tree, `roq version`, and where errors become exit codes: 0 done, 1 refused, 2 usage, 130 interrupted."""

from __future__ import annotations

import importlib
import os
import platform
import signal
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from roq.cli.address import JsonOption
from roq.cli.examples import add_examples
from roq.cli.output import print_error, print_json
from roq.errors import RoqError
from roq.runtime.installation import installed_version
from roq.runtime.log_output import set_up_logging
from roq.runtime.security import use_card

INTERRUPTED = 128 + signal.SIGINT
# A command, and the module here that has a function of its name.
COMMANDS = {
    "up": "local",
    "down": "local",
    "demo": "demo",
    "status": "status",
    "top": "top",
    "events": "events",
    "pub": "pub_sub",
    "sub": "pub_sub",
    "request": "requests",
    "serve": "requests",
    "metrics": "metrics",
    "console": "console",
    "chaos": "chaos",
    "doctor": "doctor",
    "version": "main",
}
# Modules here, each with its `app`.
GROUPS = (
    "queue",
    "host",
    "fleet",
    "policy",
    "history",
    "task",
    "shuffle",
    "pipeline",
    "ca",
    "access",
    "context",
    "backup",
    "upgrade",
    "bench",
)
PANELS = {  # of `roq --help`, in its order
    "On this machine": ("up", "down", "demo", "version"),
    "Messages": ("queue", "pub", "sub", "request", "serve", "policy"),
    "Tasks and data sets": ("task", "shuffle", "pipeline"),
    "What happens": ("status", "top", "events", "history", "console", "metrics", "doctor"),
    "Operation": ("host", "fleet", "context", "upgrade", "backup", "ca", "access"),
    "Under load": ("bench", "chaos"),
}
PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names}


class RoqGroup(TyperGroup):
    """A command's module is imported when it is asked for: all of them take a third of the time a command takes to start.

    A RoqError becomes one line on stderr and exit code 1, Ctrl-C 130, a reader that left a quiet end."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names, none imported."""
        known = {*COMMANDS, *GROUPS}
        return [*(name for name in PANEL_OF if name in known), *sorted(known - PANEL_OF.keys())]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """None if there is none of that name; then all are there, so that it can be told which one was meant."""
        for name in [cmd_name] if cmd_name in self.list_commands(ctx) else self.list_commands(ctx):
            if name not in self.commands:
                self.add_command(command(name), name)
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        level, log_format = os.environ.get("ROQ_LOG_LEVEL", "ERROR"), os.environ.get("ROQ_LOG_FORMAT", "auto")
        try:
            set_up_logging("roq", level, log_format=log_format)
            return super().invoke(ctx)
        except RoqError as error:
            print_error(error)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            _silence_stdout()
            raise typer.Exit(0) from None
        except OSError as error:  # a full disk, a standard stream that is closed
            print(f"roq: {type(error).__name__}: {error}", file=sys.stderr)
            raise typer.Exit(1) from None


def command(name: str) -> Any:
    """The command or group of this name, imported."""
    module, one = importlib.import_module(f"roq.cli.{COMMANDS.get(name, name)}"), typer.Typer()
    if name in GROUPS:
        one.add_typer(module.app, name=name, rich_help_panel=PANEL_OF.get(name))
    else:
        one.command(name, rich_help_panel=PANEL_OF.get(name))(getattr(module, name))
    made = typer.main.get_group(one).commands[name]
    add_examples(made, name)
    return made


def print_version(asked: bool) -> None:
    """`roq --version`: the number alone."""
    if asked:
        print(installed_version())
        raise typer.Exit


def version(json: JsonOption = False) -> None:
    """Print the versions of RoQ and of what it stands on."""
    found = {
        "roq": installed_version(),
        "python": platform.python_version(),
        **{library: metadata.version(library) for library in ("uvloop", "msgspec", "kazoo")},
    }
    if json:
        print_json(found)
    else:
        print(", ".join(f"{name} {number}" for name, number in found.items()))


def _silence_stdout() -> None:
    """The reader has gone; what the interpreter still flushes at exit goes nowhere instead of failing."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


app = typer.Typer(
    name="roq",
    cls=RoqGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def roq(
    version_asked: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    card: Annotated[Path | None, typer.Option(help="Who you are: a file from `roq access grant`. (ROQ_CARD)")] = None,
) -> None:
    """RoQ: an elastic message system. Start with `roq up`, or see it work: `roq demo`."""
    if card is not None:
        use_card(card)


def _open_standard_streams() -> None:
    """A closed standard stream (`roq … <&-`) becomes /dev/null; else the event loop would get its number."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
    sys.stdin, sys.stdout, sys.stderr = (
        stream or open(os.devnull, mode)  # noqa: SIM115  it stays open as long as the process lives
        for stream, mode in ((sys.stdin, "r"), (sys.stdout, "w"), (sys.stderr, "w"))
    )


def main() -> None:
    """Console script `roq`."""
    _open_standard_streams()
    app()
