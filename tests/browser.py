"""A headless Chromium, where this machine has one."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PLACES = (
    "/usr/bin/chromium",
    "/usr/lib/chromium/chromium",
    "/snap/bin/chromium",
    "/opt/google/chrome/chrome",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)
# It asks for nothing of its own.
_QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-gpu")


def find_chromium() -> str | None:
    found = [path for name in NAMES if (path := shutil.which(name))]
    found += [path for path in PLACES if Path(path).exists()]
    return found[0] if found else None


class Visit:
    """A page from a file, and what it did: requests, messages on its console, exceptions, dialogs."""

    def __init__(
        self, browser: Any, path: Path, *, scheme: str = "light", width: int = 1280, height: int = 900
    ) -> None:
        self.context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": height})
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", self._dialog)
        self.page.goto(path.as_uri())

    def _dialog(self, dialog: Any) -> None:
        self.complaints.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def has_kept_to_itself(self, path: Path) -> bool:
        """Whether it asked for nothing but its own file, and nothing was refused to it."""
        return self.requests == [path.as_uri()] and self.complaints == []


@contextmanager
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=find_chromium(), args=[*_QUIET, "--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()
