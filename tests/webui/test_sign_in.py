"""Who may look and act: links, passwords, sessions that end, and other sites."""

import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="NOT TESTED: no Playwright").expect


@pytest.mark.long
def test_a_link_signs_in_once(master: Any, open_page: Any) -> None:
    link = master.paceline("login").strip()
    page = open_page(master, link, is_signed_in=False)
    expect(page.get_by_role("heading", name="Home")).to_be_visible()
    other = open_page(master, link, is_signed_in=False)
    expect(other.get_by_role("alert")).to_contain_text("was used before")


def test_a_password_signs_in_and_leads_to_the_page_asked_for(master: Any, open_page: Any) -> None:
    master.paceline("user", "set-password", "--password", "correct horse")
    page = open_page(master, "/cluster", is_signed_in=False)
    page.get_by_label("Password", exact=True).fill("wrong horse")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_text("User and password must fit")).to_be_visible()
    page.get_by_label("Password", exact=True).fill("correct horse")
    page.get_by_label("Password", exact=True).press("Enter")
    expect(page.get_by_role("heading", name="Cluster")).to_be_visible()
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("button", name="Sign in")).to_be_visible()


@pytest.mark.long
def test_a_session_that_ends_in_mid_edit_loses_nothing(
    master: Any, open_page: Any, code: Path
) -> None:
    experiment = master.create(code, name="edited")
    experiment.kill()
    master.paceline("user", "set-password", "--password", "correct horse")
    page = open_page(master, f"/experiments/{experiment.id}/notes")
    notes = page.get_by_role("textbox", name="Notes")
    notes.fill("the second run was better")
    # Setting a password ends all sign-ins, and their streams of events: the page asks at once.
    master.paceline("user", "set-password", "--password", "correct horse")
    dialog = page.get_by_role("dialog", name="Sign in again")
    dialog.get_by_label("Password", exact=True).fill("correct horse")
    dialog.get_by_role("button", name="Sign in").click()
    expect(dialog).to_be_hidden()
    expect(notes).to_have_value("the second run was better")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_text("Saved", exact=True)).to_be_visible()
    reply = page.request.get(f"/api/v1/experiments/{experiment.id}")
    assert reply.json()["notes"] == "the second run was better"


@pytest.fixture
def other_site() -> Iterator[str]:
    """Return the address of another site on this machine."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<title>other</title>")

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def test_another_site_can_neither_read_nor_act(
    master: Any, open_page: Any, code: Path, other_site: str
) -> None:
    experiment = master.create(code, name="safe")
    page = open_page(master)
    expect(page.get_by_role("heading", name="Home")).to_be_visible()
    page.goto(other_site)
    # The browser has the cookie of the master, which is of the same site in its eyes.
    acted = page.evaluate(
        """async (url) => {
            const told = [];
            for (const mode of ["cors", "no-cors"])
                for (const [path, method] of [["", "GET"], ["/kill", "POST"]])
                    try {
                        const how = {method, mode, credentials: "include"};
                        const reply = await fetch(url + path, how);
                        told.push(reply.type + reply.status);
                    } catch (error) { told.push("refused"); }
            return told;
        }""",
        f"{master.url}/api/v1/experiments/{experiment.id}",
    )
    # Without CORS the page sees nothing of the answer but that there is one.
    assert acted == ["refused", "refused", "opaque0", "opaque0"]
    assert experiment.reload().data.state.value == "ACTIVE"
    with page.expect_navigation():
        page.evaluate(
            """(url) => {
                const form = document.createElement("form");
                Object.assign(form, {method: "post", action: url});
                document.body.append(form);
                form.submit();
            }""",
            f"{master.url}/api/v1/experiments/{experiment.id}/kill",
        )
    expect(page.locator("body")).to_contain_text(re.compile("other origins are refused", re.I))
    assert experiment.reload().data.state.value == "ACTIVE"
    experiment.kill()
