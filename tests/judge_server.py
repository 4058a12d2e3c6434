"""A server of this machine that speaks as OpenAI's chat completions do, for judges."""

import contextlib
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

Reply = Callable[[dict[str, Any]], int | str]
"""The body of a request -> an HTTP status, or the text of the answer."""
Asked = list[tuple[str, str | None, dict[str, Any]]]
"""Path, key and body of each request."""


@contextlib.contextmanager
def judge_server(reply: Reply, port: int = 0) -> Iterator[tuple[str, Asked]]:
    """The base URL of a server, and the requests that it has had."""
    asked: Asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, self.headers.get("Authorization"), body))
            answer = reply(body)
            if isinstance(answer, int):
                self.send_error(answer)
                return
            text = json.dumps({"choices": [{"message": {"role": "assistant", "content": answer}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
        server.shutdown()
