"""Sign-in by OpenID Connect in a browser, with a certified provider."""

import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="NOT TESTED: no Playwright").expect

DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def lab(
    master_of: Callable[..., Any], oidc_issuer: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """Return a master at which Ann signs in by a provider; others are not known."""
    home = tmp_path_factory.mktemp("home")
    settings = home / "oidc.yaml"
    settings.write_text(
        f"issuer: {oidc_issuer}\nname: The lab\nclient_id: paceline\n"
        'client_secret: "a secret: 100 %+"\n'
    )
    settings.chmod(0o600)
    running = master_of(home, "--slots", 1)
    running.client.add_user("ann")
    yield running
    running.stop()


def sign_in_at_provider(page: Any, person: str) -> None:
    page.get_by_placeholder("Enter any login").fill(person)
    page.get_by_placeholder("and password").fill("any")
    page.get_by_role("button", name="Sign-in").click()
    page.get_by_role("button", name="Continue").click()


@pytest.mark.long
def test_one_comes_back_to_the_page_that_was_wanted(lab: Any, open_page: Any) -> None:
    page = open_page(lab, "/experiments?q=a%20b", is_signed_in=False)
    page.get_by_role("link", name="Sign in with The lab").click()
    sign_in_at_provider(page, "1+ann")
    expect(page.get_by_role("heading", name="Experiments")).to_be_visible()
    assert page.url.endswith("/experiments?q=a%20b")
    assert page.request.get("/api/v1/session").json()["owner"] == "ann"
    page.get_by_role("button", name="Sign out").click()
    # Whoever leaves the page at once is not signed out.
    expect(page.get_by_role("link", name="Sign in with The lab")).to_be_visible()
    # The provider knows her still, and asks for no password.
    page.goto("/sign-in?next=/models")
    page.get_by_role("link", name="Sign in with The lab").click()
    page.get_by_role("button", name="Continue").click()
    expect(page.get_by_role("heading", name="Models", exact=True)).to_be_visible()


def test_who_is_refused_is_told_why_and_is_not_signed_in(lab: Any, open_page: Any) -> None:
    for person, told in (("9+eve", "no user for you"), ("9+admin", "is not linked to you")):
        page = open_page(lab, "/models?a=%2F", is_signed_in=False)
        page.get_by_role("link", name="Sign in with The lab").click()
        sign_in_at_provider(page, person)
        expect(page.get_by_role("alert")).to_contain_text(told)
        again = page.get_by_role("link", name="Sign in with The lab").get_attribute("href")
        assert again == "/api/v1/oidc/sign-in?next=%2Fmodels%3Fa%3D%252F"
        expect(page.get_by_role("button", name="Sign in", exact=True)).to_be_visible()
        assert page.request.get("/api/v1/session").json()["owner"] is None


@pytest.mark.long
def test_a_session_that_ends_is_renewed_in_another_tab(lab: Any, open_page: Any) -> None:
    """The page stays as it is: what was typed there is not lost."""
    page = open_page(lab, "/", is_signed_in=False)
    page.get_by_role("link", name="Sign in with The lab").click()
    sign_in_at_provider(page, "1+ann")
    page.get_by_role("button", name="Search").click()
    field = page.get_by_role("dialog").locator("input")
    field.fill("not to be lost")
    lab.client.set_password("correct horse", user="ann")
    dialog = page.get_by_role("dialog", name="Sign in again")
    with page.context.expect_page() as opened:
        dialog.get_by_role("link", name="Sign in with The lab").click()
    opened.value.get_by_role("button", name="Continue").click()
    expect(opened.value.get_by_role("heading", name="Home")).to_be_visible()
    opened.value.close()
    page.bring_to_front()
    page.evaluate("window.dispatchEvent(new Event('focus'))")
    expect(dialog).to_be_hidden()
    expect(field).to_have_value("not to be lost")


@pytest.mark.long
def test_the_command_line_takes_the_code_that_a_page_shows(lab: Any, open_page: Any) -> None:
    master, terminal = pty.openpty()
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    command = [sys.executable, "-m", "paceline.cli", "--master", lab.url, "login", "--oidc"]
    # As people call it, not as an agent would.
    kept = {k: v for k, v in kept.items() if "CLAUDE" not in k and "AGENT" not in k}
    process = subprocess.Popen(
        command, stdin=terminal, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=kept, text=True
    )
    try:
        assert process.stderr is not None
        link = re.search(r"http\S+", process.stderr.readline())
        assert link is not None, process.communicate(timeout=60)
        page = open_page(lab, link[0], is_signed_in=False)
        sign_in_at_provider(page, "1+ann")
        code = page.locator("code").inner_text()
        assert page.request.get("/api/v1/session").json()["owner"] is None
        os.write(master, f"{code}\n".encode())
        out, told = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
        os.close(master)
        os.close(terminal)
    assert process.returncode == 0, told
    headers = {"authorization": f"Bearer {out.strip()}"}
    assert page.request.get("/api/v1/session", headers=headers).json()["owner"] == "ann"


@pytest.mark.long
@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pages_of_the_sign_in_are_usable_by_all(
    viewport: dict[str, int],
    theme: str,
    lab: Any,
    open_page: Any,
    find_problems: Callable[..., list[str]],
) -> None:
    page = open_page(lab, "/sign-in?code=curl%20evil.example", is_signed_in=False)
    expect(page.get_by_role("button", name="Sign in", exact=True)).to_be_visible()
    expect(page.get_by_text("evil")).to_have_count(0)
    code = "x" * 43
    for path in ("/sign-in?problem=oidc_name_taken", f"/sign-in?code={code}", "/cluster"):
        page = open_page(lab, path, is_signed_in=False, viewport=viewport, color_scheme=theme)
        shown = page.get_by_text(code) if "code" in path else page.get_by_role("link")
        expect(shown).to_be_visible()
        assert find_problems(page) == []
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= viewport["width"]
