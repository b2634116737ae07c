"""`overnight <verb>`: every verb behind one command."""

from jobs import check, export, score, status
from jobs.config import CONTEXT, make_app

app = make_app()
app.command("score", context_settings=CONTEXT)(score.score)
app.command("check", context_settings=CONTEXT)(check.check)
app.command("status", context_settings=CONTEXT)(status.status)
app.command("export", context_settings=CONTEXT)(export.export)


@app.callback()
def _overnight() -> None:
    """Scores datasets of LLM completion requests while you sleep."""


def main() -> None:
    app(prog_name="overnight")


if __name__ == "__main__":
    main()
