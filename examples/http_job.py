"""Calls a service every minute, without code of its own at the worker's end.

    python examples/http_job.py

This program plays both parts: the worker that makes requests, which is otherwise `tocsin worker
http`, and a service that is called. The service keeps two promises that only it can keep: it does
the work of one run once, and it refuses attempts that are older than what it has seen.
"""

import ipaddress
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tocsin import Client, Every, Job
from tocsin.fencing import FENCING_TOKEN_HEADER, IDEMPOTENCY_KEY_HEADER
from tocsin.workers.http import AddressPolicy, create_http_worker
from tocsin.workers.http_payload import HttpPayload


class Service(BaseHTTPRequestHandler):
    """What is called. A real one keeps this in its database."""

    lock = threading.Lock()
    done: dict[str, str] = {}  # answers by key # noqa: RUF012
    highest_token = 0

    def do_POST(self) -> None:
        key = self.headers[IDEMPOTENCY_KEY_HEADER]
        token = int(self.headers[FENCING_TOKEN_HEADER])
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        with Service.lock:
            if token < Service.highest_token:
                self.answer(409, "a newer attempt was here")
                return
            Service.highest_token = token
            if key not in Service.done:
                print(f"working on {body}", flush=True)
                Service.done[key] = f"done: {body}"
            self.answer(200, Service.done[key])

    def answer(self, status: int, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


def main() -> None:
    service = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    threading.Thread(target=service.serve_forever, daemon=True).start()
    request = HttpPayload(
        url=f"http://127.0.0.1:{service.server_port}/reports",
        method="POST",
        headers={"Content-Type": "text/plain"},
        body="the report of {{run}}",
        timeout_s=10,
    )
    job = Job(
        name="examples/http",
        handler="http",
        schedules=[Every("1m")],
        payload=request.to_json_bytes(),
    )
    with Client() as client:
        client.apply_job(job)
    # Private addresses are refused unless allowed: here, this machine's own.
    here = AddressPolicy(networks=[ipaddress.ip_network("127.0.0.0/8")])
    create_http_worker(policy=here).run()


if __name__ == "__main__":
    main()
