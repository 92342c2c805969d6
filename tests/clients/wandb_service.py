"""A master with the small service that W&B's own system tests use to make users.

Prints the two ports as JSON, and serves until its standard input is closed.
"""

import json
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from paceline._cluster.master.store import user_tables

sys.path.append(str(Path(__file__).parents[1] / "master"))

from sqlalchemy import insert

from conftest import ServedMaster
from paceline._cluster.master.authentication import StoredToken, _digest
from paceline._cluster.master.store.database import Transaction
from paceline._cluster.master.store.row_ids_and_counts import new_id
from paceline._cluster.messages.master_models import TokenScope


def add_user(master: ServedMaster, name: str) -> None:
    """Let a user in whose key is the name, as the tests want."""
    if master.core.tokens.find(name) is not None:
        return

    def job(transaction: Transaction) -> None:
        token_id, now = new_id(transaction.connection, user_tables.tokens), time.time()
        scope = TokenScope.SUBMIT
        row = {"id": token_id, "name": name, "scope": scope.value, "created_at": now}
        transaction.connection.execute(
            insert(user_tables.tokens).values(digest=_digest(name), **row)
        )
        token = StoredToken(
            id=token_id, name=name, scope=scope, created_at=now, expires_at=None, revoked_at=None
        )
        transaction.after_commit(lambda: master.core.tokens._remember(_digest(name), token))

    master.core.database.write(job).result()


def serve(master: ServedMaster) -> ThreadingHTTPServer:
    """Return the service, which is not started yet."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/db/user" and body["command"] == "up":
                add_user(master, body["username"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as home:
        served = ServedMaster(Path(home), 0)
        service = serve(served)
        threading.Thread(target=service.serve_forever, daemon=True).start()
        ports = {"base_port": served.port, "fixture_port": service.server_address[1]}
        print(json.dumps(ports), flush=True)
        sys.stdin.read()
        service.shutdown()
        served.close()
