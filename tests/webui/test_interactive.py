"""Interactive work in the web UI, and a task as an attacker of the browser that opens it."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from paceline.cli._commands.interactive_commands import _Wish
from paceline.client import ApiError

# Keeps the headers that it is sent, and shows a page that tries the master's API by all means.
ATTACKER = """
import json, os, socketserver, sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path

run, master, target = Path(os.environ["PACELINE_RUN_DIR"]), sys.argv[1], Path(sys.argv[2])
PAGE = f'''<!doctype html><title>task</title><h1>task</h1><script>
async function attack() {{
  const found = [];
  for (const options of [{{}}, {{mode: "no-cors"}}, {{credentials: "include"}},
                         {{credentials: "include", mode: "no-cors"}},
                         {{credentials: "include", method: "POST", body: "x"}}]) {{
    for (const path of ["/api/v1/experiments", "/api/v1/tokens", "/api/v1/users"]) {{
      try {{
        const reply = await fetch("{master}" + path, options);
        found.push([path, reply.type, reply.status, await reply.text()]);
      }} catch (error) {{ found.push([path, "refused", 0, ""]); }}
    }}
  }}
  const frame = document.createElement("iframe");
  frame.src = "{master}/";
  document.body.append(frame);
  await new Promise(done => setTimeout(done, 500));
  let inner = "none";
  try {{ inner = frame.contentDocument ? frame.contentDocument.body.innerText : "none"; }}
  catch (error) {{ inner = "none"; }}
  document.cookie = "paceline_planted=x; path=/";
  found.push(["frame", "frame", 0, inner], ["cookie", "cookie", 0, document.cookie]);
  document.title = JSON.stringify(found);
}}
attack();
</script>'''

class Handler(BaseHTTPRequestHandler):
    def address_string(self): return "task"
    def log_message(self, *_): pass
    def do_GET(self):
        with target.open("a") as file: file.write(json.dumps(dict(self.headers)) + chr(10))
        body = PAGE.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer): daemon_threads = True
Server(str(run / "task.sock"), Handler).serve_forever()
"""


def start(master: Any, directory: Path, entrypoint: list[str] | None = None) -> Any:
    kind = "tensorboard" if entrypoint else "shell"
    wish = _Wish(kind, 1, None, None, "1h", None, None, directory)
    config = wish.config() | ({} if entrypoint is None else {"entrypoint": entrypoint})
    experiment = master.client.create_experiment(config)
    deadline = time.monotonic() + 120
    while True:
        # It may not run yet.
        with suppress(ApiError):
            if master.client.interactive_link(experiment.id).path is not None:
                return experiment
        assert time.monotonic() < deadline
        time.sleep(0.1)


@contextmanager
def opened(master: Any, experiment_id: int) -> Iterator[str]:
    with master.client.open_tunnel(experiment_id) as tunnel:
        is_over = threading.Event()
        server = threading.Thread(target=tunnel.serve, args=(lambda: not is_over.is_set(),))
        server.start()
        try:
            yield tunnel.url
        finally:
            is_over.set()
            server.join()


@pytest.mark.long
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_page_of_a_task_gets_nothing_of_the_master(
    master: Any, open_page: Callable[..., Any], tmp_path: Path, host: str
) -> None:
    """The browser is signed in at the master, by either of its names."""
    (tmp_path / "attack.py").write_text(ATTACKER)
    url = master.url.replace("127.0.0.1", host)
    heard = tmp_path / "heard"
    words = ["python3", str(tmp_path / "attack.py"), url, str(heard)]
    experiment = start(master, tmp_path, words)
    page = open_page(master, "about:blank", is_signed_in=False)
    link = master.client.sign_in_link().replace("127.0.0.1", host)
    page.goto(link)
    (cookie,) = page.context.cookies()
    assert cookie["name"].startswith("paceline_")
    with opened(master, experiment.id) as task:
        page.goto(task)
        page.wait_for_function("document.title.startsWith('[')")
        found = json.loads(page.title())
        page.goto("about:blank")
    for path, kind, status, text in found:
        # Opaque answers are empty for the page.
        assert (kind, status, text) in (
            ("refused", 0, ""), ("opaque", 0, ""), ("frame", 0, "none"),
            ("cookie", 0, "paceline_planted=x"),
        ), (path, kind)  # fmt: skip
    headers = [json.loads(line) for line in heard.read_text().splitlines()]
    assert headers
    # The task itself hears nothing of the sign-in: cookies ignore ports.
    assert not any(cookie["value"] in json.dumps(one) for one in headers)
    assert len(page.context.cookies(url)) == 1
    experiment.kill()
    experiment.wait(60)


@pytest.mark.long
def test_task_is_shown_with_its_kind_and_how_to_open_it(
    master: Any,
    open_page: Callable[..., Any],
    find_problems: Callable[..., list[str]],
    tmp_path: Path,
) -> None:
    from playwright.sync_api import expect

    experiment = start(master, tmp_path)
    page = open_page(master, "/experiments")
    row = page.get_by_role("row").filter(has_text=f"{experiment.id}").filter(has_text="shell")
    expect(row.first).to_be_visible()
    for scheme, width in (("light", 1280), ("dark", 390)):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 844})
        page.goto(f"/experiments/{experiment.id}")
        expect(page.get_by_text(f"paceline open {experiment.id}")).to_be_visible()
        assert find_problems(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    experiment.kill()
    expect(page.get_by_text(f"paceline open {experiment.id}")).to_have_count(0)
    expect(page.get_by_text("a shell on slots")).to_be_visible()
    experiment.wait(60)
