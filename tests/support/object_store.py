"""A server of objects on this machine, which answers TensorStore as Amazon's S3 and Google's Cloud Storage do."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

#: Names that an answer lists at most.
PAGE = 7


class ObjectStore(ThreadingHTTPServer):
    """Objects in memory.

    Attributes:
      objects: By their names, "bucket/run/CURRENT".
      watch: Called with a request's method and the object's name, before it is answered; what it returns, if it isn't
        None, is the status that is answered instead.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.watch: Callable[[str, str], int | None] = lambda method, name: None

    @property
    def environment(self) -> dict[str, str]:
        """What leads TensorStore here."""
        url = f"http://127.0.0.1:{self.server_port}"
        amazons = {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "secret"}
        return {**amazons, "TENSORSTORE_GCS_HTTP_URL": url, "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token"}


@contextlib.contextmanager
def object_store() -> Iterator[ObjectStore]:
    """Runs a server in a thread, for a `with` block."""
    with ObjectStore() as store:
        thread = threading.Thread(target=store.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield store
        finally:
            store.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    """Of S3 `PUT /bucket/name`, of Google's `POST /upload/storage/v1/b/bucket/o?name=`, and so on."""

    server: ObjectStore
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer is sent in one piece

    def log_message(self, *_: Any) -> None:
        """Prints nothing."""

    def _serve(self) -> None:
        url = urlsplit(self.path)
        asked = dict(parse_qsl(url.query))
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        _, googles, path = url.path.rpartition("/storage/v1/b/")
        bucket, _, key = unquote(path).lstrip("/").partition("/")
        key = asked.get("name", key.removeprefix("o").lstrip("/") if googles else key)
        name = f"{bucket}/{key}"
        unique = self.headers.get("If-None-Match") == "*" or asked.get("ifGenerationMatch") == "0"
        status = self.server.watch(self.command, name)
        if status is not None:
            self._answer(status)
        elif self.command in ("PUT", "POST"):
            self._write(name, body, unique)
        elif self.command == "DELETE":
            self._answer(204 if self.server.objects.pop(name, None) is not None or not googles else 404)
        elif not key:
            self._list(bucket, asked)
        elif name not in self.server.objects:
            self._answer(404)
        elif asked.get("alt") == "json":
            self._answer(200, _described(name, self.server.objects[name]))
        else:
            self._read(self.server.objects[name])

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _write(self, name: str, body: bytes, unique: bool) -> None:
        if unique and name in self.server.objects:
            self._answer(412)
            return
        self.server.objects[name] = body
        self._answer(200, _described(name, body), ETag=f'"{_version(body)}"')

    def _list(self, bucket: str, asked: dict[str, str]) -> None:
        start, end = asked.get("startOffset", ""), asked.get("endOffset", chr(0x10FFFF))
        after = asked.get("continuation-token") or asked.get("pageToken") or ""
        keys = sorted(name.partition("/")[2] for name in dict(self.server.objects) if name.startswith(f"{bucket}/"))
        keys = [k for k in keys if k.startswith(asked.get("prefix", "")) and start <= k < end and k > after]
        page, token = keys[:PAGE], keys[PAGE - 1] if keys[PAGE:] else ""
        if "list-type" not in asked:
            self._answer(200, json.dumps({"items": [{"name": key} for key in page], "nextPageToken": token}).encode())
            return
        more = f"<NextContinuationToken>{escape(token)}</NextContinuationToken>" if token else ""
        listed = "".join(f"<Contents><Key>{escape(key)}</Key></Contents>" for key in page)
        cut = f"<IsTruncated>{str(bool(token)).lower()}</IsTruncated>"
        self._answer(200, f"<ListBucketResult>{cut}{more}{listed}</ListBucketResult>".encode())

    def _read(self, data: bytes) -> None:
        known = {"ETag": f'"{_version(data)}"', "x-goog-generation": str(_version(data))}
        wanted = self.headers.get("Range")
        if wanted is None:
            self._answer(200, data, **known)
            return
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        begin = int(first) if first else max(0, len(data) - int(last))
        end = min(len(data), int(last) + 1) if first and last else len(data)
        if begin < end:
            self._answer(206, data[begin:end], Content_Range=f"bytes {begin}-{end - 1}/{len(data)}", **known)
        else:
            self._answer(416)


def _version(data: bytes) -> int:
    return int(hashlib.md5(data).hexdigest()[:15], 16)


def _described(name: str, data: bytes) -> bytes:
    bucket, _, key = name.partition("/")
    described = {"name": key, "bucket": bucket, "generation": str(_version(data)), "size": str(len(data))}
    return json.dumps(described).encode()
