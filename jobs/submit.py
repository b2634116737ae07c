"""`overnight submit`: another verb as a job of a Ray cluster, followed to its own exit status."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

if __name__ == "__main__":
    # `python jobs/submit.py` puts jobs/ first on the path, where its modules would shadow others.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import typer

from jobs.config import CONTEXT, ConfigOption, make_app, read_yaml
from jobs.exits import ExitStatus
from jobs.interrupts import Terminated, carry_out
from jobs.options import say
from schemas.failures import UsageError

if TYPE_CHECKING:
    from pipelines.submission import Cluster

app = make_app()


# What stands behind the verb is the verb's.
CONTEXT_OF_SUBMIT = {**CONTEXT, "allow_interspersed_args": False}


@app.command(context_settings=CONTEXT_OF_SUBMIT)
def submit(
    verb: Annotated[list[str] | None, typer.Argument(metavar="VERB …", help="A verb and its options.")] = None,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="The cluster's dashboard, http://HOST:8265. Default: RAY_API_SERVER_ADDRESS, RAY_ADDRESS, then here.",
        ),
    ] = None,
    working_dir: Annotated[
        str | None,
        typer.Option(
            "--working-dir",
            metavar="FOLDER",
            help="Goes with the job, which runs in it. Default: what is installed there.",
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Of that folder, what stays here, as in a .gitignore. Repeatable."),
    ] = None,
    runtime_env: Annotated[
        Path | None,
        typer.Option("--runtime-env", metavar="FILE", help="YAML file of what else Ray prepares: pip, env_vars, …"),
    ] = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Print the job's id, and end.")] = False,
    follow: Annotated[
        str | None, typer.Option(metavar="JOB", help="Instead of a verb: follow a job that is there to its end.")
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Run another verb as a job of a Ray cluster: `overnight submit --working-dir . score --input … --output …`.

    Its log is shown until it has ended. Ctrl-C lets go of it, and it goes on; SIGTERM has it stopped.

    Exit status: the job's own; 143 where it was stopped; 130 when you let go of it; 2 wrong usage, nothing was
    submitted; 1 it didn't start, or the cluster is lost.
    """

    def work() -> int:
        from pipelines.submission import Cluster

        arguments = list(verb or ())
        if follow is not None and arguments:
            raise UsageError("--follow: found a verb, too. A job that is there has its own; leave one of them out")
        if follow is None:
            _check(arguments, working_dir)
        env = read_yaml(runtime_env, "--runtime-env ", "pip: …") if runtime_env is not None else {}
        cluster = Cluster(address)
        job = follow or cluster.submit(arguments, working_dir, exclude or (), env)
        if no_wait:
            typer.echo(job)
            return ExitStatus.OK
        return run(cluster, job)

    raise typer.Exit(carry_out(work))


def run(cluster: "Cluster", job: str) -> int:
    """Follow a job to its end, and return its exit status."""
    say(f"job {job} on {cluster.address}", 0)
    try:
        ended = cluster.follow(job, lambda text: typer.echo(text, nl=False))
    except KeyboardInterrupt:
        more = f"`overnight submit --follow {job}` shows it again, `ray job stop {job}` ends it"
        return say(f"job {job} goes on: {more}", ExitStatus.INTERRUPTED)
    except Terminated:
        cluster.stop(job)
        return say(f"job {job} is stopped; what it has finished is kept", ExitStatus.TERMINATED)
    if ended.state == "STOPPED":
        return say(f"job {job} was stopped; what it had finished is kept", ExitStatus.TERMINATED)
    if ended.exit_status is None:
        return say(f"job {job} didn't start: {ended.message}", ExitStatus.FAILED)
    return ended.exit_status


def _check(arguments: list[str], working_dir: str | None) -> None:
    """Raises UsageError for what a job can't be, or would lose."""
    from jobs.cli import app as cli

    verbs = sorted(command.name for command in cli.registered_commands if command.name and command.name != "submit")
    found = arguments[0] if arguments else "nothing"
    if found not in verbs:
        raise UsageError(f"submit: found {found}, expected a verb and its options: {', '.join(verbs)}")
    output = _value_of("--output", arguments)
    if output and "://" not in output and not Path(output).is_absolute():
        raise UsageError(
            f"--output {output}: the cluster removes the folder that a job runs in. Give an s3:// URI, or the "
            "whole path of a folder that all nodes share"
        )


def _value_of(flag: str, arguments: list[str]) -> str | None:
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == flag:
            return value if equals else next(iter(arguments[place + 1 :]), None)
    return None


if __name__ == "__main__":
    app(prog_name="submit.py")
