"""Routes of the channels for messages to people."""

import asyncio
from typing import Annotated

from fastapi import Path

from paceline._cluster.master.api.requests_and_answers import ApiError, MasterOf
from paceline._cluster.master.api.route_scopes import ApiRouter
from paceline._cluster.messages.master_models import NotifyChannel, NotifyTest
from paceline._cluster.messages.runner_messages import NAME_PATTERN

notify_router = ApiRouter(tags=["master"])


@notify_router.get("/notify-channels")
async def list_notify_channels(master: MasterOf) -> list[NotifyChannel]:
    """List the channels for messages to people, without their addresses."""
    return master.notifier.channels()


@notify_router.post("/notify-channels/{name}/test")
async def test_notify_channel(
    name: Annotated[str, Path(pattern=NAME_PATTERN)], master: MasterOf
) -> NotifyTest:
    """Send a test message to a channel, and return the outcome."""
    try:
        outcome = await asyncio.to_thread(master.notifier.test, name)
    except KeyError:
        raise ApiError(
            404,
            "not_found",
            f"There is no channel {name!r}. Hint: an administrator adds it to `notify.yaml` in the"
            " home, and starts the master again.",
        ) from None
    return NotifyTest(failure=outcome.failure)
