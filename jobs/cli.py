"""`overnight <verb>`: every verb behind one command."""

from jobs import check, export, nightly, report, score, serve, status, submit, users
from jobs.config import CONTEXT, make_app

app = make_app()
app.command("score", context_settings=CONTEXT)(score.score)
app.command("check", context_settings=CONTEXT)(check.check)
app.command("serve", context_settings=CONTEXT)(serve.serve)
app.command("nightly", context_settings=CONTEXT)(nightly.nightly)
app.command("status", context_settings=CONTEXT)(status.status)
app.command("export", context_settings=CONTEXT)(export.export)
app.command("report", context_settings=CONTEXT)(report.report)
app.command("submit", context_settings=submit.CONTEXT_OF_SUBMIT)(submit.submit)
app.add_typer(users.app, name="users")


@app.callback()
def _overnight() -> None:
    """Scores datasets of LLM completion requests while you sleep."""


def main() -> None:
    app(prog_name="overnight")


if __name__ == "__main__":
    main()
