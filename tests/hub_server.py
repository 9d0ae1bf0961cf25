"""A stand-in for the Hugging Face hub: as much of its interface as an upload and a download of small repositories need."""

import base64
import hashlib
import json
import re
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_letmein"
COMMIT = "0" * 39 + "1"


class Hub(ThreadingHTTPServer):
    """`repositories` holds the files of each by path, `private` the names of those that few see.

    `stored` is what was uploaded beside the commits, by SHA-256; `sent` counts the bytes of each file that were downloaded.
    A test may set `gated` (repository: status of the refusal), `refused` (files, answered with 403) and `cut` (file: number of
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.stored: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.commits: dict[str, dict[str, dict[str, bytes]]] = {}
        self.heads: dict[str, str] = {}
        self.gated: dict[str, int] = {}
        self.refused: set[str] = set()
        self.cut: dict[str, int] = {}
        self.sent: Counter[str] = Counter()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def commit(self, name: str, files: dict[str, bytes]) -> str:
        """Make these the files of the branch main; returns the commit, which stays available."""
        digest = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits.setdefault(name, {})[digest] = self.repositories[name] = files
        self.heads[name] = digest
        return digest

    def files_at(self, name: str, revision: str) -> tuple[str, dict[str, bytes] | None]:
        """The commit of a revision and its files; None if there is no such revision."""
        head = self.heads.get(name, COMMIT)
        if revision in ("main", head):
            return head, self.repositories[name]
        return revision, self.commits.get(name, {}).get(revision)


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, value: Any = None, status: int = 200, **headers: str) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content_Length": str(len(data)), "Content_Type": "application/json", **headers}.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _allowed(self) -> bool:
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            return True
        self._answer({"error": "who are you?"}, 401)
        return False

    def do_POST(self) -> None:
        body, path = self._body(), self.path.partition("?")[0]
        self.server.asked.append(f"POST {path}")
        if not self._allowed():
            return
        if path == "/api/repos/create":
            metadata = json.loads(body)
            name = f"{metadata.get('organization') or 'user'}/{metadata['name']}"
            known = name in self.server.repositories
            few = metadata.get("visibility") == "private" or metadata.get("private")  # by the version of the client
            if few and not known:  # one that is there already stays as it is
                self.server.private.add(name)
            self.server.repositories.setdefault(name, {})
            self._answer({"url": f"{self.server.url}/{name}"}, 409 if known else 200)
        elif path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif match := re.fullmatch(r"/api/models/(.+)/preupload/main", path):
            files = json.loads(body)["files"]
            modes = [{"path": one["path"], "uploadMode": _mode(one["path"]), "shouldIgnore": False} for one in files]
            self._answer({"files": modes})
        elif match := re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path):
            objects = json.loads(body)["objects"]
            action = [
                {**one, "actions": {"upload": {"href": f"{self.server.url}/lfs/{one['oid']}"}}} for one in objects
            ]
            self._answer({"transfer": "basic", "objects": action})
        elif match := re.fullmatch(r"/api/models/(.+)/commit/main", path):
            self._commit(match[1], body)
        else:
            self._answer({"error": path}, 404)

    def _commit(self, name: str, body: bytes) -> None:
        files = self.server.repositories[name]
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.stored[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        url = f"{self.server.url}/{name}/commit/{COMMIT}"
        self._answer({"success": True, "commitOid": COMMIT, "commitUrl": url, "hookOutput": ""})

    def do_PUT(self) -> None:
        body = self._body()
        self.server.asked.append(f"PUT {self.path}")
        assert hashlib.sha256(body).hexdigest() == self.path.rpartition("/")[2]
        self.server.stored[self.path.rpartition("/")[2]] = body
        self._answer({})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(f"{self.command} {path}")
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            if files := self._files(match[1], match[2] or "main"):
                siblings = [{"rfilename": file, "size": len(data)} for file, data in files[1].items()]
                metadata = {"id": match[1], "modelId": match[1], "private": match[1] in self.server.private}
                self._answer({**metadata, "sha": files[0], "siblings": siblings, "tags": []})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)/?", path):
            if files := self._files(match[1], match[2]):
                rows = [
                    {"type": "file", "path": file, "size": len(data), "oid": _tag(data)}
                    for file, data in files[1].items()
                ]
                self._answer(rows)
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(*match.groups())
        else:
            self._answer({"error": path}, 404)

    def _files(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """The commit of a revision and its files; None after an answer that there is no such repository or revision."""
        if name not in self.server.repositories:
            self._answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
            return None
        commit, files = self.server.files_at(name, revision)
        if files is None:
            self._answer({"error": "Revision not found"}, 404, X_Error_Code="RevisionNotFound")
            return None
        return commit, files

    def _resolve(self, name: str, revision: str, file: str) -> None:
        if status := self.server.gated.get(name):
            self._answer({"error": "accept the licence"}, status, X_Error_Code="GatedRepo")
        elif file in self.server.refused:
            self._answer({"error": "not for you"}, 403)
        elif found := self._files(name, revision):
            data = found[1].get(file)
            if data is None:
                self._answer({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound", X_Repo_Commit=found[0])
            else:
                self._send(file, data, ETag=f'"{_tag(data)}"', X_Repo_Commit=found[0])

    def _send(self, file: str, data: bytes, **headers: str) -> None:
        """Send a file, or the rest of it that the header Range asks for."""
        start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        rest = data[int(start[1]) :] if start else data
        if start:
            headers["Content_Range"] = f"bytes {start[1]}-{len(data) - 1}/{len(data)}"
        if self.command == "HEAD":
            self._answer(rest, **headers)
            return
        kept = rest[: self.server.cut.pop(file, len(rest))]
        self.server.sent[file] += len(kept)
        self._answer(kept, 206 if start else 200, **headers, Content_Length=str(len(rest)))
        self.close_connection = len(kept) < len(rest)


def _mode(path: str) -> str:
    return "lfs" if path.endswith((".safetensors", ".png")) else "regular"


def _tag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
