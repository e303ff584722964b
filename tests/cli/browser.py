"""Opens a page in Qt's Chromium, without a screen, and prints as JSON what a script finds there.

    python tests/cli/browser.py PAGE WIDTH [PICTURE] < SCRIPT

PAGE is a file or an address. SCRIPT assigns ``document.found`` at the end. Prints {"found": its value, "console": the
lines that the page's console printed}. With PICTURE, a screenshot of the whole page is written there.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
os.environ.setdefault("QTWEBENGINE_CHROMIUM_FLAGS", "--no-sandbox --disable-gpu --disable-dev-shm-usage")
os.environ.setdefault("QT_LOGGING_RULES", "*=false")

from PyQt6.QtCore import QTimer, QUrl
from PyQt6.QtWebEngineCore import QWebEnginePage
from PyQt6.QtWebEngineWidgets import QWebEngineView
from PyQt6.QtWidgets import QApplication

POLL_MS = 100
HEIGHT = 1600


class Page(QWebEnginePage):
    def __init__(self) -> None:
        super().__init__()
        self.console: list[str] = []

    def javaScriptConsoleMessage(self, level, message, line, source) -> None:  # noqa: N802
        self.console.append(f"{level.name} {message} ({source}:{line})")


def main(address: str, width: int, picture: str = "") -> None:
    app = QApplication(sys.argv[:1])
    view, page, script = QWebEngineView(), Page(), sys.stdin.read()
    view.setPage(page)
    view.resize(width, HEIGHT)

    def poll() -> None:
        page.runJavaScript("[document.found ?? null, document.documentElement.scrollHeight]", take)

    def take(answer: tuple[object, float]) -> None:
        found, height = answer
        if found is None:
            QTimer.singleShot(POLL_MS, poll)
            return
        print(json.dumps({"found": found, "console": page.console}))
        if not picture:
            app.quit()
            return
        view.resize(width, int(height))
        QTimer.singleShot(10 * POLL_MS, lambda: (view.grab().save(picture), app.quit()))

    page.loadFinished.connect(lambda _: (page.runJavaScript(script), poll()))
    page.load(QUrl.fromUserInput(address))
    view.show()
    app.exec()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
