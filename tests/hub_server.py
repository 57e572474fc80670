"""A Hugging Face Hub on loopback, as far as huggingface_hub and datasets use it. Files and history are kept on disk.

    with HubServer(folder, {"hf_token": ("someone", "write")}) as hub:
        hub.fail("POST .*/commit/", 500)  # the next commit fails
        ...  # HF_ENDPOINT=hub.url HF_HUB_DISABLE_XET=1
        hub.files("someone/model")

Large and binary files travel by LFS: batch, upload, verification, and on the way back a redirect to another host, which
must not see the token.
"""

import base64
import contextlib
import hashlib
import json
import re
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

REGULAR_BYTES = 1 << 20  # larger files travel by LFS
LFS_SUFFIXES = (".safetensors", ".png", ".bin", ".parquet", ".gz")


class Refusal(Exception):
    def __init__(self, status: int, message: str, code: str | None = None, **more):
        super().__init__(message)
        self.status, self.message, self.code, self.more = status, message, code, more


@dataclass
class Fault:
    """What goes wrong with the next `times` requests that match."""

    pattern: str  # of "METHOD /path"
    status: int | None = None  # the answer; None: the connection is cut
    times: int = 1
    headers: dict[str, str] = field(default_factory=dict)
    after: int = 0  # bytes of the request's or the answer's body that pass before the connection is cut


class Request(NamedTuple):
    """A line of the log."""

    method: str
    path: str
    status: int  # 0: cut
    token: str | None
    range: str | None
    moment: float


class HubServer:
    """tokens: token -> (user, "read" or "write")."""

    def __init__(self, folder: Path, tokens: dict[str, tuple[str, str]]):
        self.folder, self.tokens = Path(folder), tokens
        self.log: list[Request] = []
        self.faults: list[Fault] = []
        self.lock = threading.RLock()
        (self.folder / "blobs").mkdir(parents=True, exist_ok=True)
        handler = type("Handler", (Handler,), {"hub": self})
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.http.daemon_threads = True
        self.port = self.http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *exception) -> None:
        self.http.shutdown()
        self.http.server_close()

    def fail(self, pattern: str, status: int | None = None, **settings) -> None:
        self.faults.append(Fault(pattern, status, **settings))

    def add(self, repo: str, files: dict[str, bytes], kind: str = "models", private: bool = False) -> None:
        """A repository of this content, made without the client."""
        self.create(kind, repo, private)
        self.commit(kind, repo, "main", "Add files", {path: self.store(path, data) for path, data in files.items()})

    def files(self, repo: str, revision: str = "main", kind: str = "models") -> dict[str, bytes]:
        entries = self.read(kind, repo)["commits"][self.resolve(kind, repo, revision)]["files"]
        return {path: self.blob(entry["key"]).read_bytes() for path, entry in entries.items()}

    def titles(self, repo: str, revision: str = "main", kind: str = "models") -> list[str]:
        """Of the commits, newest first."""
        return [commit["title"] for _, commit in self.history(kind, repo, revision)]

    def requests(self, pattern: str) -> list[Request]:
        return [one for one in self.log if re.search(pattern, f"{one.method} {one.path}")]

    def place(self, kind: str, repo: str) -> Path:
        return self.folder / kind / repo / "repo.json"

    def blob(self, key: str) -> Path:
        return self.folder / "blobs" / key

    def store(self, path: str, data: bytes) -> dict:
        """Keep a file; what a commit says of it."""
        oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        key = hashlib.sha256(data).hexdigest()
        self.blob(key).write_bytes(data)
        return {"oid": oid, "size": len(data), "key": key, "lfs": self.is_large(path, len(data))}

    @staticmethod
    def is_large(path: str, size: int) -> bool:
        return size > 0 and (size > REGULAR_BYTES or path.endswith(LFS_SUFFIXES))

    def read(self, kind: str, repo: str) -> dict:
        if not self.place(kind, repo).exists():
            raise Refusal(404, "Repository not found", "RepoNotFound")
        return json.loads(self.place(kind, repo).read_text())

    def write(self, kind: str, repo: str, content: dict) -> None:
        draft = self.place(kind, repo).with_suffix(".draft")
        draft.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(content))
        draft.replace(self.place(kind, repo))

    def create(self, kind: str, repo: str, private: bool) -> None:
        self.write(kind, repo, {"private": private, "branches": {"main": None}, "tags": {}, "commits": {}})
        self.commit(kind, repo, "main", "initial commit", {".gitattributes": self.store(".gitattributes", b"\n")})

    def commit(self, kind: str, repo: str, branch: str, title: str, changes: dict[str, dict]) -> str:
        with self.lock:
            content = self.read(kind, repo)
            if branch not in content["branches"]:
                raise Refusal(404, f"Invalid rev id: {branch}", "RevisionNotFound")
            parent = content["branches"][branch]
            files = dict(content["commits"][parent]["files"]) if parent else {}
            moment = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
            commit = {"title": title, "parent": parent, "date": moment, "files": {**files, **changes}}
            sha = hashlib.sha1(json.dumps([commit, time.time_ns()]).encode()).hexdigest()
            content["commits"][sha], content["branches"][branch] = commit, sha
            self.write(kind, repo, content)
            return sha

    def resolve(self, kind: str, repo: str, revision: str) -> str:
        content = self.read(kind, repo)
        sha = {**content["tags"], **content["branches"], **{sha: sha for sha in content["commits"]}}.get(revision)
        if sha is None:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return sha

    def history(self, kind: str, repo: str, revision: str) -> list[tuple[str, dict]]:
        commits, sha, found = self.read(kind, repo)["commits"], self.resolve(kind, repo, revision), []
        while sha:
            found.append((sha, commits[sha]))
            sha = commits[sha]["parent"]
        return found


REPO = r"/api/(?P<kind>models|datasets)/(?P<repo>[^/]+/[^/]+)"
PAGE = r"/(?:(?P<kind>datasets)/)?(?P<repo>[^/]+/[^/]+)"
REVISION = r"(?P<revision>[^/]+)"
ROUTES = (  # the first that matches; the name of the method that answers
    (r"GET /api/whoami-v2", "whoami"),
    (r"POST /api/repos/create", "create_repo"),
    (r"POST /api/validate-yaml", "validate_card"),
    (rf"POST {REPO}/preupload/{REVISION}", "preupload"),
    (rf"POST {REPO}/commit/{REVISION}", "take_commit"),
    (rf"POST {REPO}/(?P<which>branch|tag)/{REVISION}", "add_reference"),
    (rf"GET {REPO}/refs", "list_references"),
    (rf"GET {REPO}/tree/{REVISION}(?:/(?P<path>.+))?", "tree"),
    (rf"POST {REPO}/paths-info/{REVISION}", "paths"),
    (rf"GET {REPO}(?:/revision/{REVISION})?", "describe"),
    (rf"POST {PAGE}\.git/info/lfs/objects/batch", "batch"),
    (r"PUT /lfs/(?P<key>\w+)", "take_large"),
    (r"POST /lfs/verify", "verify"),
    (rf"(?:GET|HEAD) {PAGE}/resolve/{REVISION}/(?P<path>.+)", "send"),
    (r"(?:GET|HEAD) /cdn/(?P<key>\w+)", "send_large"),
)


class Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args) -> None: ...

    def answer(self) -> None:
        self.connection.settimeout(30)
        self.url = urlsplit(self.path)
        bearer = self.headers.get("Authorization", "")
        self.token = bearer.removeprefix("Bearer ") or None
        self.request_line = f"{self.command} {self.url.path}"
        self.fault = self.next_fault()
        try:
            size = int(self.headers.get("Content-Length", 0))
            if self.fault and self.fault.status is None and size:
                self.rfile.read(min(self.fault.after, size))
                return self.cut()
            self.body = self.rfile.read(size)
            if self.fault and self.fault.status:
                raise Refusal(self.fault.status, "A fault on demand", headers=self.fault.headers)
            for pattern, name in ROUTES:
                if match := re.fullmatch(pattern, self.request_line):
                    groups = {key: value and unquote(value) for key, value in match.groupdict().items()}
                    if "kind" in groups:
                        groups["kind"] = groups["kind"] or "models"
                        self.check_reader(groups["kind"], groups["repo"])
                    return getattr(self, name)(**groups)
            raise Refusal(404, f"This server has no {self.request_line}")
        except Refusal as refusal:
            codes = {"X-Error-Code": refusal.code} if refusal.code else {}
            headers = {"X-Error-Message": refusal.message, **codes, **refusal.more.pop("headers", {})}
            self.json({"error": refusal.message, **refusal.more}, refusal.status, headers)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = answer

    def next_fault(self) -> Fault | None:
        with self.hub.lock:
            for fault in self.hub.faults:
                if fault.times and re.search(fault.pattern, self.request_line):
                    fault.times -= 1
                    return fault
        return None

    def note(self, status: int) -> None:
        asked = (self.token, self.headers.get("Range"), time.monotonic())
        self.hub.log.append(Request(self.command, self.url.path, status, *asked))

    def cut(self) -> None:
        self.note(0)
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(2)

    def reply(self, body: bytes, status: int = 200, headers: dict | None = None) -> None:
        cut = self.fault and self.fault.status is None
        with contextlib.suppress(ConnectionError):
            self.send_response(status)
            for name, value in {"Content-Length": len(body), **(headers or {})}.items():
                self.send_header(name, str(value))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body[: self.fault.after] if cut else body)
            if cut:
                self.wfile.flush()
                return self.cut()
        self.note(status)

    def json(self, content, status: int = 200, headers: dict | None = None) -> None:
        self.reply(json.dumps(content).encode(), status, {"Content-Type": "application/json", **(headers or {})})

    def given(self) -> dict:
        return json.loads(self.body or b"{}")

    def user(self, needed: bool = False) -> tuple[str | None, str]:
        if self.token is not None and self.token not in self.hub.tokens:
            raise Refusal(401, "Invalid credentials in Authorization header")
        if needed and self.token is None:
            raise Refusal(401, "Invalid username or password.")
        return self.hub.tokens.get(self.token, (None, "read"))

    def check_reader(self, kind: str, repo: str) -> None:
        user, _ = self.user()
        if self.hub.read(kind, repo)["private"] and user != repo.split("/")[0]:
            raise Refusal(404 if user else 401, "Repository not found", "RepoNotFound")

    def check_writer(self, repo: str) -> None:
        user, role = self.user(needed=True)
        if role != "write" or user != repo.split("/")[0]:
            raise Refusal(403, f"You don't have the rights to write to {repo} with this token")

    def whoami(self) -> None:
        user, role = self.user(needed=True)
        self.json({"name": user, "type": "user", "orgs": [], "auth": {"accessToken": {"role": role}}})

    def create_repo(self) -> None:
        given = self.given()
        repo = f"{given['organization'] or self.user()[0]}/{given['name']}"
        self.check_writer(repo)
        kind = given.get("type", "model") + "s"
        url = f"{self.hub.url}/{'' if kind == 'models' else kind + '/'}{repo}"
        with self.hub.lock:
            if self.hub.place(kind, repo).exists():
                raise Refusal(409, "You already created this repo", url=url)
            self.hub.create(kind, repo, given.get("visibility") == "private")
        self.json({"url": url, "name": repo})

    def validate_card(self) -> None:
        """The header of a card must be YAML that the Hub understands."""
        found = re.match(r"---\r?\n(.*?)\r?\n---", self.given()["content"], re.DOTALL)
        try:
            problems = card_problems(yaml.safe_load(found.group(1)) if found else {})
        except yaml.YAMLError as error:
            problems = [f"not YAML: {error}"]
        errors = [{"message": problem} for problem in problems]
        self.json({"errors": errors, "warnings": []}, 400 if errors else 200)

    def describe(self, kind: str, repo: str, revision: str | None) -> None:
        content, sha = self.hub.read(kind, repo), self.hub.resolve(kind, repo, revision or "main")
        commit = content["commits"][sha]
        siblings = [{"rfilename": path} for path in commit["files"]]
        dates = {"lastModified": commit["date"], "createdAt": commit["date"]}
        about = {"id": repo, "author": repo.split("/")[0], "sha": sha, "private": content["private"], **dates}
        self.json({**about, "gated": False, "disabled": False, "tags": [], "downloads": 0, "siblings": siblings})

    def add_reference(self, kind: str, repo: str, which: str, revision: str) -> None:
        self.check_writer(repo)
        with self.hub.lock:
            content, given = self.hub.read(kind, repo), self.given()
            start = given.get("startingPoint", "main") if which == "branch" else revision
            name = revision if which == "branch" else given["tag"]
            names = content["branches" if which == "branch" else "tags"]
            if name in names:
                raise Refusal(409, f"Reference {name} exists already")
            names[name] = self.hub.resolve(kind, repo, start)
            self.hub.write(kind, repo, content)
        self.json({})

    def list_references(self, kind: str, repo: str) -> None:
        content = self.hub.read(kind, repo)
        listed = {
            which: [{"name": n, "ref": f"refs/{folder}/{n}", "targetCommit": sha} for n, sha in content[which].items()]
            for which, folder in (("branches", "heads"), ("tags", "tags"))
        }
        self.json({**listed, "converts": [], "pullRequests": []})

    def entries(self, kind: str, repo: str, revision: str) -> dict[str, dict]:
        """path -> what the API says of each file and folder."""
        commit = self.hub.read(kind, repo)["commits"][self.hub.resolve(kind, repo, revision)]
        found = {}
        for path, entry in commit["files"].items():
            large = {"oid": entry["key"], "size": entry["size"], "pointerSize": 134}
            about = {"type": "file", "path": path, "oid": entry["oid"], "size": entry["size"]}
            found[path] = {**about, **({"lfs": large} if entry["lfs"] else {})}
            for parent in list(map(str, Path(path).parents))[:-1]:
                oid = hashlib.sha1(parent.encode()).hexdigest()
                found[parent] = {"type": "directory", "path": parent, "oid": oid, "size": 0}
        return found

    def tree(self, kind: str, repo: str, revision: str, path: str | None) -> None:
        entries, prefix = self.entries(kind, repo, revision), f"{path}/" if path else ""
        if path and path not in entries:
            raise Refusal(404, f"{path} does not exist", "EntryNotFound")
        below = [one for name, one in sorted(entries.items()) if name.startswith(prefix)]
        everything = parse_qs(self.url.query).get("recursive", ["false"])[0].lower() in ("true", "1")
        self.json([one for one in below if everything or "/" not in one["path"].removeprefix(prefix)])

    def paths(self, kind: str, repo: str, revision: str) -> None:
        entries = self.entries(kind, repo, revision)
        wanted = parse_qs(self.body.decode()).get("paths", [])
        self.json([entries[path] for path in wanted if path in entries])

    def preupload(self, kind: str, repo: str, revision: str) -> None:
        self.check_writer(repo)
        content = self.hub.read(kind, repo)["commits"][self.hub.resolve(kind, repo, revision)]["files"]
        answers = []
        for file in self.given()["files"]:
            large, old = self.hub.is_large(file["path"], file["size"]), content.get(file["path"])
            oid = {"oid": old["key" if large else "oid"]} if old else {}
            mode = {"uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            answers.append({"path": file["path"], **mode, **oid})
        self.json({"files": answers})

    def batch(self, kind: str, repo: str) -> None:
        self.check_writer(repo)
        objects = []
        for one in self.given()["objects"]:
            hrefs = {"upload": f"/lfs/{one['oid']}", "verify": "/lfs/verify"}
            actions = {name: {"href": self.hub.url + href} for name, href in hrefs.items()}
            objects.append(one if self.hub.blob(one["oid"]).exists() else {**one, "actions": actions})
        self.json({"transfer": "basic", "objects": objects})

    def take_large(self, key: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != key:
            raise Refusal(400, "The content differs from its checksum")
        self.hub.blob(key).write_bytes(self.body)
        self.json({})

    def verify(self) -> None:
        given = self.given()
        blob = self.hub.blob(given["oid"])
        if not blob.exists() or blob.stat().st_size != given["size"]:
            raise Refusal(404, "The object was not uploaded")
        self.json({})

    def take_commit(self, kind: str, repo: str, revision: str) -> None:
        self.check_writer(repo)
        title, changes = "", {}
        for key, value in ((line["key"], line["value"]) for line in map(json.loads, self.body.splitlines())):
            if key == "header":
                title = value["summary"]
            elif key == "file":
                changes[value["path"]] = self.hub.store(value["path"], base64.b64decode(value["content"]))
            else:  # lfsFile
                if not self.hub.blob(value["oid"]).exists():
                    raise Refusal(400, f"LFS pointer of {value['path']} points to a file that does not exist")
                changes[value["path"]] = self.hub.store(value["path"], self.hub.blob(value["oid"]).read_bytes())
        sha = self.hub.commit(kind, repo, revision, title, changes)
        self.json({"commitUrl": f"{self.hub.url}/{repo}/commit/{sha}", "commitOid": sha, "pullRequestUrl": None})

    def send(self, kind: str, repo: str, revision: str, path: str) -> None:
        sha = self.hub.resolve(kind, repo, revision)
        entry = self.hub.read(kind, repo)["commits"][sha]["files"].get(path)
        if entry is None:
            raise Refusal(404, "Entry not found", "EntryNotFound", headers={"X-Repo-Commit": sha})
        headers = {"X-Repo-Commit": sha, "ETag": f'"{entry["oid"]}"'}
        if entry["lfs"]:  # from another host
            linked = {"X-Linked-Etag": f'"{entry["key"]}"', "X-Linked-Size": entry["size"]}
            location = f"http://localhost:{self.hub.port}/cdn/{entry['key']}"
            return self.reply(b"", 302, {**headers, **linked, "Location": location})
        self.send_part(entry["key"], headers)

    def send_large(self, key: str) -> None:
        if self.token is not None:
            raise Refusal(400, "The token went to another host")
        self.send_part(key, {"ETag": f'"{key}"'})

    def send_part(self, key: str, headers: dict) -> None:
        data = self.hub.blob(key).read_bytes()
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if not wanted:
            return self.reply(data, 200, {**headers, "Accept-Ranges": "bytes"})
        first, last = wanted.groups()
        start = int(first) if first else max(0, len(data) - int(last))
        stop = min(int(last) + 1, len(data)) if first and last else len(data)
        if start >= len(data):
            raise Refusal(416, "Range not satisfiable", headers={"Content-Range": f"bytes */{len(data)}"})
        self.reply(data[start:stop], 206, {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"})


def card_problems(header: dict) -> list[str]:
    """What the Hub refuses in a card's header."""
    problems = []
    for name in ("base_model", "datasets"):
        values = header.get(name) or []
        for value in [values] if isinstance(values, str) else values:
            if not re.fullmatch(r"(?:[\w.-]+/)?[\w.-]+", value):
                problems.append(f'"{name}" with value "{value}" is not valid')
    results = [result for model in header.get("model-index") or [] for result in model["results"]]
    for metric in [metric for result in results for metric in result["metrics"]]:
        if not isinstance(metric["value"], int | float) or metric["value"] != metric["value"]:
            problems.append(f'"model-index" has a value that is no number: {metric}')
    return problems
