"""A Hugging Face Hub on 127.0.0.1, in memory: what pushing and pulling model repositories needs, and faults on order.

No server of this kind is published for tests: huggingface_hub's own tests ask a staging Hub, mirrors such as olah only
hand out, and self-hosted hubs need databases. Routes, headers and error codes are those that huggingface_hub's client
sends and reads.
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import yaml
from huggingface_hub.repocard_data import model_index_to_eval_results

LICENSES = ("apache-2.0", "mit", "cc-by-4.0", "other", "unknown")
NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


@dataclass
class Blob:
    """One file of a commit."""

    content: bytes
    lfs: bool

    @property
    def git(self):
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()

    @property
    def sha256(self):
        return hashlib.sha256(self.content).hexdigest()

    @property
    def oid(self):
        return self.sha256 if self.lfs else self.git

    def described(self, path):
        size = len(self.content)
        info = {"type": "file", "path": path, "rfilename": path, "size": size, "oid": self.git, "blobId": self.git}
        return info | (
            {"lfs": {"oid": self.sha256, "sha256": self.sha256, "size": size, "pointerSize": 134}} if self.lfs else {}
        )


@dataclass
class Repo:
    """Branches, and commits: sha -> path -> file."""

    private: bool = False
    gated: bool = False
    branches: dict = field(default_factory=dict)
    commits: dict = field(default_factory=dict)
    messages: list = field(default_factory=list)

    def commit(self, branch, files, message):
        parent = self.branches.get(branch, "")
        described = [parent, message, sorted((path, blob.git) for path, blob in files.items())]
        sha = hashlib.sha1(json.dumps(described).encode()).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        self.messages.append(message)
        return sha

    def resolve(self, revision):
        sha = self.branches.get(revision, revision)
        return sha if sha in self.commits else None


@dataclass
class Fault:
    """What to do to requests in place of answering: refuse, or drop the connection after so many bytes of content.

    So many ``times``, ``after`` so many that go well.
    """

    method: str
    path: str
    status: int = 0
    code: str = ""
    message: str = ""
    cut: int | None = None
    times: int = 1_000_000
    after: int = 0

    def strikes(self, method, path):
        """Whether this request is struck; counts it."""
        if self.method != method or not re.search(self.path, path) or not self.times:
            return False
        self.after -= 1
        self.times -= self.after < 0
        return self.after < 0


class LoopbackHub:
    """The Hub's state, and a server for it while its ``with`` block lasts."""

    def __init__(self):
        self.repos = {}
        self.objects = {}
        self.users = {"hf_thewriter1": "org", "hf_thereader1": "reader"}
        self.faults = []
        self.log = []
        self.uploads = []
        self.ranges = []

    def __enter__(self):
        handler = type("BoundHandler", (Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *exception):
        self.server.shutdown()
        self.server.server_close()

    def fault(self, *args, **options):
        self.faults.append(Fault(*args, **options))

    def files(self, repo, revision="main"):
        found = self.repos[repo]
        return {path: blob.content for path, blob in found.commits[found.resolve(revision)].items()}

    def asked(self, method, pattern):
        return [path for asked, path in self.log if asked == method and re.search(pattern, path)]


class Refusal(Exception):
    """An answer that is an error, as the Hub words it."""

    def __init__(self, status, message, code="", body=None):
        super().__init__(message)
        self.status, self.message, self.code, self.body = status, message, code, body


class Dropped(Exception):
    """The connection is to be closed without an answer."""


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else every answer waits for the client to acknowledge its headers
    hub: LoopbackHub

    def log_message(self, *args):
        pass

    def handle(self):
        try:
            super().handle()
        except (ConnectionError, Dropped):
            self.close_connection = True

    def do_GET(self):
        self.answer()

    do_HEAD = do_POST = do_PUT = do_GET

    def answer(self):
        split = urlsplit(self.path)
        path, self.query = split.path, parse_qs(split.query)
        self.hub.log.append((self.command, path))
        fault = next((fault for fault in self.hub.faults if fault.strikes(self.command, path)), None)
        self.cut = fault.cut if fault else None
        try:
            body = self.read_body()
            if fault and fault.status:
                raise Refusal(fault.status, fault.message, fault.code)
            self.dispatch(path, body)
        except Refusal as refusal:
            headers = {"X-Error-Message": " ".join(refusal.message.split())}
            headers |= {"X-Error-Code": refusal.code} if refusal.code else {}
            content = json.dumps(refusal.body or {"error": refusal.message}).encode()
            self.send(content, headers | {"Content-Type": "application/json"}, refusal.status)

    def read_body(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body
        size = int(self.headers.get("Content-Length") or 0)
        if self.command in ("PUT", "POST") and self.cut is not None:
            self.rfile.read(min(self.cut, size))
            raise Dropped
        return self.rfile.read(size)

    def send(self, content, headers, status=200):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": len(content)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.cut is not None:
            self.wfile.write(content[: self.cut])
            self.wfile.flush()
            raise Dropped
        self.wfile.write(content)

    def send_json(self, value, status=200):
        self.send(json.dumps(value).encode(), {"Content-Type": "application/json"}, status)

    # Who asks, and for what

    @property
    def user(self):
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token and token not in self.hub.users:
            raise Refusal(401, "Invalid credentials in Authorization header")
        return self.hub.users.get(token)

    def repo(self, name, write=False):
        repo = self.hub.repos.get(name)
        mine = self.user == name.partition("/")[0]
        if repo is None or (repo.private and not mine):
            raise Refusal(404 if self.user else 401, "Repository not found", "RepoNotFound")
        if repo.gated and not mine:
            raise Refusal(403, f"Access to model {name} is restricted", "GatedRepo")
        if write and not mine:
            raise Refusal(403, "You don't have the rights to write to this repository")
        return repo

    def revision(self, repo, quoted):
        sha = repo.resolve(unquote(quoted))
        if sha is None:
            raise Refusal(404, f"Invalid rev id: {unquote(quoted)}", "RevisionNotFound")
        return sha

    def dispatch(self, path, body):
        for method, pattern, action in ROUTES:
            match = re.fullmatch(pattern, path)
            if match and self.command in method:
                return getattr(self, action)(body, *map(str, match.groups()))
        raise Refusal(404, f"no route {self.command} {path}")

    # Reading

    def model_info(self, body, name, revision="main"):
        repo = self.repo(name)
        sha = self.revision(repo, revision)
        siblings = [blob.described(path) for path, blob in repo.commits[sha].items()]
        self.send_json(
            {"id": name, "modelId": name, "sha": sha, "private": repo.private, "tags": [], "siblings": siblings}
        )

    def tree(self, body, name, revision):
        repo = self.repo(name)
        files = repo.commits[self.revision(repo, revision)]
        self.send_json([blob.described(path) for path, blob in files.items()])

    def paths_info(self, body, name, revision):
        repo = self.repo(name)
        files = repo.commits[self.revision(repo, revision)]
        self.send_json([files[p].described(p) for p in parse_qs(body.decode())["paths"] if p in files])

    def resolve(self, body, name, revision, path):
        repo = self.repo(name)
        sha = self.revision(repo, revision)
        blob = repo.commits[sha].get(unquote(path))
        headers = {"X-Repo-Commit": sha}
        if blob is None:
            raise Refusal(404, "Entry not found", "EntryNotFound")
        headers |= {"ETag": f'"{blob.oid}"', "Accept-Ranges": "bytes"}
        headers |= {"X-Linked-Etag": f'"{blob.oid}"', "X-Linked-Size": len(blob.content)} if blob.lfs else {}
        start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "bytes=0-")[1]
        part = blob.content[int(start) :]
        if int(start):
            self.hub.ranges.append(self.headers["Range"])
            headers["Content-Range"] = f"bytes {start}-{len(blob.content) - 1}/{len(blob.content)}"
        self.send(part, headers, 206 if int(start) else 200)

    # Writing

    def create_repo(self, body, *_):
        wanted = json.loads(body)
        name = f"{wanted.get('organization') or self.user}/{wanted['name']}"
        if self.user is None:
            raise Refusal(401, "Invalid username or password.")
        if self.user != name.partition("/")[0]:
            raise Refusal(
                403, f"You don't have the rights to create a model under the namespace {name.partition('/')[0]}"
            )
        if name in self.hub.repos:
            raise Refusal(409, "You already created this model repo", body={"url": f"{self.hub.url}/{name}"})
        private = wanted.get("private") or wanted.get("visibility") == "private"
        self.hub.repos[name] = Repo(bool(private))
        self.hub.repos[name].commit(
            "main", {".gitattributes": Blob(b"*.safetensors filter=lfs\n", False)}, "initial commit"
        )
        self.send_json({"url": f"{self.hub.url}/{name}"})

    def create_branch(self, body, name, branch):
        repo = self.repo(name, write=True)
        if unquote(branch) in repo.branches:
            raise Refusal(409, "Reference already exists")
        repo.branches[unquote(branch)] = repo.branches["main"]
        self.send_json({})

    def preupload(self, body, name, revision):
        pull_request = "create_pr" in self.query
        repo = self.repo(name, write=not (pull_request or unquote(revision).startswith("refs/pr/")))
        files = repo.commits[self.revision(repo, revision)]
        asked = [file["path"] for file in json.loads(body)["files"]]
        modes = [{"path": p, "uploadMode": "lfs" if p.endswith(".safetensors") else "regular"} for p in asked]
        found = [
            m | {"shouldIgnore": False, "oid": files[m["path"]].oid if m["path"] in files else None} for m in modes
        ]
        self.send_json({"files": found})

    def lfs_batch(self, body, name):
        self.repo(name)
        found = []
        for wanted in json.loads(body)["objects"]:
            upload = {"upload": {"href": f"{self.hub.url}/lfs/{wanted['oid']}"}}
            found.append(wanted | ({} if wanted["oid"] in self.hub.objects else {"actions": upload}))
        self.send_json({"transfer": "basic", "objects": found})

    def lfs_put(self, body, oid):
        if hashlib.sha256(body).hexdigest() != oid:
            raise Refusal(400, "content and name differ")
        self.hub.objects[oid] = body
        self.hub.uploads.append(oid)
        self.send(b"", {})

    def commit(self, body, name, revision):
        pull_request = "create_pr" in self.query
        repo = self.repo(name, write=not (pull_request or unquote(revision).startswith("refs/pr/")))
        files = dict(repo.commits[self.revision(repo, revision)])
        branch, message = unquote(revision), ""
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                message = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = Blob(base64.b64decode(value["content"]), False)
            elif line["key"] == "lfsFile" and value["oid"] in self.hub.objects:
                files[value["path"]] = Blob(self.hub.objects[value["oid"]], True)
            else:
                raise Refusal(400, f"cannot commit {line}")
        answer = {}
        if pull_request:
            number = 1 + sum(name.startswith("refs/pr/") for name in repo.branches)
            branch = f"refs/pr/{number}"
            repo.branches[branch] = repo.branches[unquote(revision)]
            answer["pullRequestUrl"] = f"{self.hub.url}/{name}/discussions/{number}"
        if branch not in repo.branches:
            raise Refusal(400, "commits go to branches")
        sha = repo.commit(branch, files, message)
        self.send_json(answer | {"commitUrl": f"{self.hub.url}/{name}/commit/{sha}", "commitOid": sha})

    def validate_yaml(self, body):
        wanted = json.loads(body)
        errors, warnings = check_metadata(wanted["content"])
        answer = {key: [{"message": m} for m in found] for key, found in (("errors", errors), ("warnings", warnings))}
        if errors:
            raise Refusal(400, errors[0], body=answer)
        self.send_json(answer)


def check_metadata(content):
    """What the Hub finds wrong, and worth a warning, in a model card's metadata: errors, warnings."""
    match = re.match(r"---\n(.*?)\n---\n", content, re.S)
    if match is None:
        return [], ["empty or missing yaml metadata in repo card"]
    data = yaml.safe_load(match[1])
    errors = []
    if data.get("license") not in (None, *LICENSES):
        errors.append(f'"license" must be one of [{", ".join(LICENSES)}]')
    for key in ("base_model", "datasets"):
        values = data.get(key, [])
        if not all(NAME.fullmatch(value) for value in ([values] if isinstance(values, str) else values)):
            errors.append(f'"{key}" with value {values!r} is not valid. Use a model id from https://hf.co/models')
    if not all(isinstance(tag, str) for tag in data.get("tags", [])):
        errors.append('"tags" must be an array of strings')
    if "model-index" in data:
        try:
            _, results = model_index_to_eval_results(data["model-index"])
            if not all(isinstance(r.metric_value, int | float | str) for r in results):
                errors.append('"model-index[0].results[0].metrics[0].value" is required')
        except (KeyError, TypeError) as error:
            errors.append(f'"model-index" {error}')
    return errors, []


API, REPO = "/api/models/", r"([\w.-]+/[\w.-]+)"
ROUTES = [
    ("POST", "/api/repos/create", "create_repo"),
    ("POST", "/api/validate-yaml", "validate_yaml"),
    ("GET", f"{API}{REPO}", "model_info"),
    ("GET", f"{API}{REPO}/revision/([^/]+)", "model_info"),
    ("GET", f"{API}{REPO}/tree/([^/]+)", "tree"),
    ("POST", f"{API}{REPO}/paths-info/([^/]+)", "paths_info"),
    ("POST", f"{API}{REPO}/branch/([^/]+)", "create_branch"),
    ("POST", f"{API}{REPO}/preupload/([^/]+)", "preupload"),
    ("POST", f"{API}{REPO}/commit/([^/]+)", "commit"),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", "lfs_batch"),
    ("PUT", "/lfs/([0-9a-f]{64})", "lfs_put"),
    ("GET HEAD", f"/{REPO}/resolve/([^/]+)/(.+)", "resolve"),
]
