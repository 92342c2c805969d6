"""Sending one message to real receivers, good and bad ones."""

import email
import html
import json
import re
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from paceline._cluster.master.notify import notifier as sender_module
from paceline._cluster.master.notify.notices import Channel, Notice
from paceline._cluster.master.notify.notifier import Delivery, Group, Message, Outcome
from paceline._cluster.master.notify.send_message import sign

NOTICE = Notice(
    topic="experiment_failed", level="error", title="Experiment 3 (mnist) failed",
    text="ValueError: <b>lr</b> & @everyone", time=5.0, experiment_id=3,
)  # fmt: skip
MESSAGE = Message(id="msg_1", time=6.0, groups=[Group(notice=NOTICE, count=3, more=["Another"])])


def send(channel: Channel) -> Outcome:
    """Send the message, to the end."""
    delivery = Delivery(channel, MESSAGE, "cluster", "http://master:8080")
    try:
        return delivery.wait()
    finally:
        delivery.close()


def test_webhook_is_signed_and_says_what_happened(
    make_receiver: Callable[..., Any], secret: str
) -> None:
    receiver = make_receiver()
    outcome = send(Channel(webhook=f"{receiver.url}/hook", secret=secret))
    assert outcome.failure is None
    request = receiver.next()
    assert request.path == "/hook"
    assert request.headers["content-type"] == "application/json"
    assert request.json() == {
        "version": 1,
        "id": "msg_1",
        "time": 6.0,
        "cluster_id": "cluster",
        "num_left_out": 0,
        "link": "http://master:8080",
        "groups": [
            {
                "notice": {
                    "topic": "experiment_failed", "level": "error",
                    "title": "Experiment 3 (mnist) failed",
                    "text": "ValueError: <b>lr</b> & @everyone", "time": 5.0,
                    "experiment_id": 3, "trial_id": None,
                },
                "count": 3, "more": ["Another"],
            }
        ],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "failure", "retry_after_s"),
    [
        (500, "HTTP 500", 0),
        (404, "HTTP 404", 0),
        ((429, {"Retry-After": "120"}), "HTTP 429", 120),
        ((429, {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}), "HTTP 429", 0),
        ((503, {"Retry-After": "9" * 40}), "HTTP 503", 0),
    ],
)
def test_refused_webhook_says_the_status(
    make_receiver: Callable[..., Any],
    secret: str,
    answer: Any,
    failure: str,
    retry_after_s: float,
) -> None:
    receiver = make_receiver(answer)
    outcome = send(Channel(webhook=receiver.url, secret=secret))
    assert failure in str(outcome.failure)
    assert outcome.retry_after_s == retry_after_s


@pytest.mark.parametrize("kind", ["webhook", "apprise"])
def test_redirect_to_another_host_is_not_followed(
    make_receiver: Callable[..., Any], secret: str, kind: str
) -> None:
    stranger = make_receiver()
    receiver = make_receiver((307, {"Location": stranger.url}))
    channel = Channel(webhook=receiver.url, secret=secret)
    if kind == "apprise":
        pytest.importorskip("apprise")
        channel = Channel(url=receiver.url.replace("http", "json"))
    assert send(channel).failure is not None
    receiver.next()
    assert stranger.requests.empty()


def _flood(num_bytes: int) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(num_bytes))
        handler.end_headers()
        piece = bytes(2**20)
        try:
            for _ in range(num_bytes // len(piece)):
                handler.wfile.write(piece)
        except OSError:
            handler.close_connection = True

    return answer


def test_huge_answer_of_a_webhook_is_not_read(
    make_receiver: Callable[..., Any], secret: str
) -> None:
    receiver = make_receiver(_flood(2**40))
    assert send(Channel(webhook=receiver.url, secret=secret)).failure is None


@pytest.mark.long
def test_huge_answer_to_apprise_ends_its_process(make_receiver: Callable[..., Any]) -> None:
    pytest.importorskip("apprise")
    receiver = make_receiver(_flood(2**40))
    outcome = send(Channel(url=receiver.url.replace("http", "json")))
    assert outcome.failure is not None


def test_receiver_that_never_answers_is_cut_off(
    make_receiver: Callable[..., Any],
    secret: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sender_module, "_LIMIT_S", 3.0)
    receiver = make_receiver(lambda handler: receiver.release.wait())
    outcome = send(Channel(webhook=receiver.url, secret=secret))
    assert outcome.failure == "the receiver gives no answer within 3 s"


def test_close_cuts_off_what_is_sent(make_receiver: Callable[..., Any], secret: str) -> None:
    receiver = make_receiver(lambda handler: receiver.release.wait())
    channel = Channel(webhook=receiver.url, secret=secret)
    delivery = Delivery(channel, MESSAGE, "cluster", "http://master:8080")
    receiver.next()
    assert delivery.outcome() is None
    delivery.close()
    assert delivery._process.returncode == -9


def test_nobody_listens(free_port: int, secret: str) -> None:
    channel = Channel(webhook=f"http://127.0.0.1:{free_port}/path-with-token", secret=secret)
    assert "ConnectError" in str(send(channel).failure)


def test_mail_goes_by_apprise_to_a_mail_server(mail_server: Any) -> None:
    pytest.importorskip("apprise")
    port = mail_server.server_address[1]
    url = f"mailto://127.0.0.1:{port}?from=paceline@example.org&to=ann@example.org&format=text"
    assert send(Channel(url=url)).failure is None
    recipients, content = mail_server.mails.get(timeout=60)
    assert recipients == ["<ann@example.org>"]
    mail = email.message_from_bytes(content)
    subject = str(email.header.make_header(email.header.decode_header(mail["Subject"])))
    assert subject == "Experiment 3 (mnist) failed, and 2 more"
    text = mail.get_payload(decode=True)
    assert isinstance(text, bytes)
    assert "ValueError: <b>lr</b> & @\u200beveryone" in text.decode()
    assert "http://master:8080/experiments/3" in text.decode()


def test_json_goes_by_apprise(make_receiver: Callable[..., Any]) -> None:
    pytest.importorskip("apprise")
    receiver = make_receiver()
    url = receiver.url.replace("http", "json")
    assert send(Channel(url=f"{url}/hook")).failure is None
    body = json.loads(receiver.next().body)
    assert body["title"] == "Experiment 3 (mnist) failed, and 2 more"
    assert "... and 1 more" in body["message"]


TITLE = "Experiment 3 (mnist) failed, and 2 more"
TEXT = "\n".join(
    ["Experiment 3 (mnist) failed", "ValueError: <b>lr</b> & @\u200beveryone", "Another",
     "... and 1 more", "http://master:8080/experiments/3"]
)  # fmt: skip


def read_slack(body: dict[str, Any]) -> tuple[str, str]:
    """Return title and text of an incoming webhook of Slack, which shows entities as they are."""
    [part] = body["attachments"]
    assert (body["mrkdwn"], part["footer"], part["color"]) == (False, "Paceline", "#A32037")
    return part["title"], html.unescape(part["text"])


def read_discord(body: dict[str, Any]) -> tuple[str, str]:
    """Return title and text of a message to a webhook of Discord."""
    title, _, text = body["content"].partition("\r\n")
    return title, text


def read_teams(body: dict[str, Any]) -> tuple[str, str]:
    """Return title and text of an adaptive card; a backslash keeps signs from being Markdown."""
    assert body["type"] == "message"
    [part] = body["attachments"]
    assert part["contentType"] == "application/vnd.microsoft.card.adaptive"
    assert part["content"]["type"] == "AdaptiveCard"
    parts = {each.get("id"): each.get("text") for each in part["content"]["body"]}
    return parts["title"], parts["body"].replace("\\", "")


CHATS: dict[str, tuple[str, str, Callable[[dict[str, Any]], tuple[str, str]]]] = {
    "slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7": (
        "hooks.slack.com:443", "/services/T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7", read_slack,
    ),
    "discord://4174296324183162/4JKcW59uvN2Xv1QSSVf9Gg8B": (
        "discord.com:443", "/api/webhooks/4174296324183162/4JKcW59uvN2Xv1QSSVf9Gg8B", read_discord,
    ),
    "workflows://prod-1.westeurope.logic.azure.com:443/643e69f83c8944/KmxwhLm1dKEK0VbF": (
        "prod-1.westeurope.logic.azure.com:443",
        "/workflows/643e69f83c8944/triggers/manual/paths/invoke", read_teams,
    ),
}  # fmt: skip


@pytest.mark.parametrize("url", CHATS, ids=["slack", "discord", "teams"])
def test_chat_gets_title_text_and_link_in_its_own_form(internet: Any, url: str) -> None:
    """The library's own code speaks to the service's own address; the host there is the test's."""
    pytest.importorskip("apprise")
    host, path, read = CHATS[url]
    assert send(Channel(url=url)).failure is None
    request = internet.next()
    assert (request.host, request.path.partition("?")[0]) == (host, path)
    assert request.headers["content-type"].startswith("application/json")
    assert read(json.loads(request.body)) == (TITLE, TEXT)
    assert internet.requests.empty()


def test_failure_of_apprise_shows_no_part_of_the_address(free_port: int) -> None:
    pytest.importorskip("apprise")
    url = f"json://user:pass%40word@127.0.0.1:{free_port}/TOKEN123"
    failure = send(Channel(url=url)).failure
    assert failure is not None
    for part in ("TOKEN123", "pass@word", "pass%40word", "127.0.0.1"):
        assert part not in failure


def test_address_that_apprise_does_not_know() -> None:
    pytest.importorskip("apprise")
    outcome = send(Channel(url="nowhere://abc"))
    assert outcome.failure == "the `url` is no address that apprise knows"


def test_page_checks_signatures_as_they_are_made(
    make_receiver: Callable[..., Any], secret: str
) -> None:
    page = Path(__file__).parents[3] / "docs" / "messages.md"
    [block] = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    is_genuine = names["is_genuine"]
    receiver = make_receiver()
    assert send(Channel(webhook=receiver.url, secret=secret)).failure is None
    request = receiver.next()
    assert is_genuine(request.headers, request.body, secret)
    assert not is_genuine(request.headers, request.body + b" ", secret)
    for name in ("webhook-id", "webhook-timestamp"):
        changed = request.headers | {name: request.headers[name] + "1"}
        assert not is_genuine(changed, request.body, secret)
    old = request.headers | {"webhook-timestamp": "1000000000"}
    old["webhook-signature"] = sign(secret, old["webhook-id"], 1000000000, request.body)
    assert not is_genuine(old, request.body, secret)
