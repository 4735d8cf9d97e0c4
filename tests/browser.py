"""Opens pages in Chromium, where this machine has it."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import matplotlib.image
import numpy as np
import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")


def opened(page: Path, folder: Path, dark: bool, size: tuple[int, int] = (1200, 1400)) -> tuple[Any, list[str]]:
    """A picture of a page, as an array of (height, width, 3) colours, and the addresses that it has asked for."""
    picture, net_log = folder / "page.png", folder / "net.json"
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    _run(
        page,
        folder,
        scheme,
        f"--screenshot={picture}",
        f"--window-size={size[0]},{size[1]}",
        f"--log-net-log={net_log}",
    )
    pixels = np.round(matplotlib.image.imread(picture)[:, :, :3] * 255).astype(int)
    return pixels, asked_for_by_pages(net_log)


def document_of(page: Path, folder: Path) -> str:
    """The HTML of a page after its scripts have run."""
    return _run(page, folder, "--dump-dom")


def result_of(content: str, script: str, folder: Path) -> Any:
    """What an expression of JavaScript gives in a page, a second after it is loaded; of a promise, what that gives.

    Args:
        content: The page.
        script: The expression.
        folder: Where the page and what Chromium writes may be.
    """
    page = folder / "with_script.html"
    write = "(found) => { document.documentElement.dataset.result = JSON.stringify(found); }"
    call = f"setTimeout(() => Promise.resolve({script}).then({write}), 1000);"
    page.write_text(content.replace("</body>", f"<script>{call}</script></body>"))
    found = re.search(r'<html[^>]*data-result="([^"]*)"', document_of(page, folder))
    assert found is not None, "the script on the page has failed"
    return json.loads(html.unescape(found[1]))


def result_in_frame(page: Path, script: str, folder: Path, seconds: int = 60) -> Any:
    """What an expression of JavaScript gives beside a page in a frame, which may load itself again.

    Args:
        page: The page, somewhere below `folder`.
        script: The expression; `frame` is the frame's element, and `until(condition)` a promise that it has held.
        folder: The folder that is served, where Chromium may write, too.
        seconds: For how long the browser's clock runs, which is faster than a real one.
    """
    relative = page.relative_to(folder).as_posix()
    content = f"""<!doctype html><body><iframe id="frame" src="{relative}" width="800" height="600"></iframe><script>
    const frame = document.getElementById("frame");
    const until = async (condition) => {{ while (!condition()) await new Promise((go) => setTimeout(go, 100)); }};
    const drawn = () => frame.contentDocument?.documentElement?.dataset.charts !== undefined;
    until(drawn).then(() => {script}).then((found) => {{
        document.documentElement.dataset.result = JSON.stringify(found);
    }}, (error) => {{ document.documentElement.dataset.result = JSON.stringify(String(error)); }});
    </script></body>"""
    (folder / "frame.html").write_text(content)
    with _Server(folder, []) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/frame.html"
        document = _run(address, folder, "--dump-dom", milliseconds=1000 * seconds)
        server.shutdown()
    found = re.search(r'<html[^>]*data-result="([^"]*)"', document)
    assert found is not None, "the script has not come to its end"
    return json.loads(html.unescape(found[1]))


def _run(page: Path | str, folder: Path, *options: str, milliseconds: int = 3000) -> str:
    command = [
        *(str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
        *("--disable-component-update", "--no-first-run", f"--user-data-dir={folder / 'profile'}"),
        *(f"--virtual-time-budget={milliseconds}", *options, page if isinstance(page, str) else page.as_uri()),
    ]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def asked_for_by_pages(net_log: Path) -> list[str]:
    """The addresses that pages have asked for; what the browser asks for by itself has no origin."""
    events = json.loads(net_log.read_text())["events"]
    assert events
    requests = [event["params"] for event in events if "initiator" in event.get("params", {})]
    return [each["url"] for each in requests if each["initiator"] != "not an origin" and not is_inline(each["url"])]


def is_inline(url: str) -> bool:
    return url.startswith("data:")


# Types each question into the search of the page in the frame, as a reader would, and sends what it lists. The policy
# of the server forbids other hosts; what the page asks of them nevertheless is sent too.
ASKING = """<!doctype html>
<iframe id="frame" src="index.html" width="1200" height="900"></iframe>
<script type="module">
const frame = document.getElementById("frame");
const questions = await (await fetch("questions.json")).json();
const elsewhere = [], answers = {};
const send = (found) => fetch("answers", {method: "POST", body: JSON.stringify(found)});

async function until(holds, patience) {
  const end = performance.now() + patience;
  while (!holds() && performance.now() < end) await new Promise((resume) => setTimeout(resume, 15));
  return Boolean(holds());
}

async function ask() {
  const find = (name) => frame.contentDocument?.querySelector(name);
  await until(() => find("[data-md-component=search-result] ol"), 30000);
  for (const host of [document, frame.contentDocument])
    host.addEventListener("securitypolicyviolation", (event) => elsewhere.push(event.blockedURI));
  const input = find("[data-md-component=search-query]");
  const results = () => [...frame.contentDocument.querySelectorAll(".md-search-result__item")];
  const type = (text) => { input.value = text; input.dispatchEvent(new Event("keyup")); };
  const toggle = find("[data-md-toggle=search]");
  // The scripts of the page listen from some moment on: what is typed earlier is typed once more.
  const ready = await until(() => {
    if (!toggle.checked) toggle.click();
    if (!results().length) type(input.value === "training" ? "train" : "training");
    return results().length;
  }, 60000);
  for (const question of ready ? questions : []) {
    type("");
    await until(() => !results().length, 5000);
    type(question);
    await until(() => results().length, 5000);
    answers[question] = results().slice(0, 10).map((item) => [...item.querySelectorAll("a")].map((link) => link.href));
  }
  return {ready, answers, elsewhere, error: find("[data-md-component=search-result]").innerText};
}

await send(await ask().catch((error) => ({ready: false, error: String(error), answers, elsewhere})));
</script>
"""
POLICY = "default-src 'self' 'unsafe-inline' data: blob:"


class _Asking(SimpleHTTPRequestHandler):
    """Serves a site, the page that asks, and its questions; takes the answers."""

    server: _Server

    def do_GET(self) -> None:
        name = self.path.lstrip("/")
        made = {"ask.html": ASKING, "questions.json": json.dumps(self.server.questions)}
        if name not in made:
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html" if name == "ask.html" else "application/json")
        self.end_headers()
        self.wfile.write(made[name].encode())

    def do_POST(self) -> None:
        self.server.answers.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def end_headers(self) -> None:
        self.send_header("Content-Security-Policy", POLICY)
        super().end_headers()

    def log_message(self, *args: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    """A server on a free port of this machine."""

    def __init__(self, site: Path, questions: list[str]) -> None:
        super().__init__(("127.0.0.1", 0), partial(_Asking, directory=str(site)))
        self.questions = questions
        self.answers: Queue[dict[str, Any]] = Queue()


def search(site: Path, questions: list[str], folder: Path) -> tuple[dict[str, list[list[str]]], list[str]]:
    """Ask the search of a built site, in Chromium.

    Args:
        site: The site's folder.
        questions: What to type.
        folder: Where Chromium may write.

    Returns:
        For each question the pages found, in order: the path of each within the site, and the places on it that match.
        And what the site asked of other hosts.
    """
    with _Server(site, questions) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        command = [
            *(str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
            *("--disable-component-update", "--no-first-run", f"--user-data-dir={folder / 'profile'}"),
            *("--remote-debugging-port=0", f"{address}ask.html"),
        ]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as browser:
            try:
                found = server.answers.get(timeout=240)
            finally:
                browser.terminate()
                server.shutdown()
    assert found["ready"], f"the search of the site gives no answers: {found['error']}"
    return {
        question: [[re.sub(r"\?[^#]*", "", link.removeprefix(address)) for link in page] for page in pages]
        for question, pages in found["answers"].items()
    }, found["elsewhere"]
