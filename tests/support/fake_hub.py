"""A small Hub in a thread: repositories in memory, and the calls by which huggingface_hub moves models to and fro.

It checks tokens, hashes of large files, and that commits name only what was uploaded. Like the real one it keeps small
files in the commit and large ones apart, does not take what it has already, and knows branches.
"""

import base64
import hashlib
import http.server
import json
import re
import threading
import urllib.parse
from pathlib import Path

import yaml

LARGE = (".safetensors", ".bin", ".pt")


class Repository:
    """Branches of commits; a commit is {"oid", "message", "files": {path: sha256 of the content}}."""

    def __init__(self, private):
        self.private = private
        start = {"oid": hashlib.sha1(b"start").hexdigest(), "message": "initial commit", "files": {}}
        self.branches = {"main": [start]}

    def find(self, revision):
        """The newest commit of a branch, or the one with an id."""
        if revision in self.branches:
            return self.branches[revision][-1]
        commits = [commit for branch in self.branches.values() for commit in branch]
        return next((commit for commit in commits if commit["oid"] == revision), None)


class Hub:
    """The server.

    Attributes:
        repositories: by id.
        contents: every file's content, by its sha256.
        faults: (repository, "create", "preupload", "lfs" or "commit") -> status to answer with instead.
        calls: (method, path) of every request.
        unknown: the requests that it has no answer to.
    """

    def __init__(self, user="me", token="hf_right", organizations=("lab",)):
        self.user, self.token = user, token
        self.namespaces = {user, *organizations}
        self.repositories, self.contents, self.faults = {}, {}, {}
        self.calls, self.unknown = [], []
        self.lock = threading.Lock()
        handler = type("HubHandler", (_Handler,), {"hub": self})
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.server.shutdown()
        self.server.server_close()

    def add(self, repo_id, folder):
        """A repository with the files of a folder."""
        repository = self.repositories[repo_id] = Repository(private=False)
        files = {path.name: self.keep(path.read_bytes()) for path in Path(folder).iterdir() if path.is_file()}
        self.commit(repository, "main", "added", files)

    def keep(self, content):
        digest = hashlib.sha256(content).hexdigest()
        self.contents[digest] = content
        return digest

    def commit(self, repository, branch, message, files):
        parent = repository.branches[branch][-1]
        everything = {**parent["files"], **files}
        oid = hashlib.sha1(json.dumps([parent["oid"], message, sorted(everything.items())]).encode()).hexdigest()
        repository.branches[branch].append({"oid": oid, "message": message, "files": everything})
        return oid

    def files(self, repo_id, revision="main"):
        """{path: content} of a repository."""
        return {
            path: self.contents[digest] for path, digest in self.repositories[repo_id].find(revision)["files"].items()
        }

    def messages(self, repo_id, branch="main"):
        """The messages of all commits but the first, empty one."""
        return [commit["message"] for commit in self.repositories[repo_id].branches[branch][1:]]


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    ROUTES = [
        ("POST", r"/api/repos/create", "create"),
        ("POST", r"/api/validate-yaml", "validate"),
        ("GET", r"/api/whoami-v2", "whoami"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/branch/(?P<revision>[^/]+)", "branch"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/preupload/(?P<revision>[^/]+)", "preupload"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/commit/(?P<revision>[^/]+)", "commit"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)(/(?P<path>.+))?", "tree"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)(/revision/(?P<revision>[^/]+))?", "info"),
        ("POST", r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch", "lfs"),
        ("PUT", r"/large/(?P<digest>[0-9a-f]{64})", "put"),
        ("POST", r"/large/(?P<digest>[0-9a-f]{64})/verify", "verify"),
        ("GET", r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
    ]

    def do_GET(self):
        self.dispatch("GET")

    def do_HEAD(self):
        self.dispatch("GET")

    def do_POST(self):
        self.dispatch("POST")

    def do_PUT(self):
        self.dispatch("PUT")

    def log_message(self, *arguments):
        pass

    def dispatch(self, method):
        path = urllib.parse.urlsplit(self.path).path
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with self.hub.lock:
            self.hub.calls.append((self.command, path))
            for known, pattern, name in self.ROUTES:
                found = re.fullmatch(pattern, path) if known == method else None
                if found:
                    parts = {key: urllib.parse.unquote(value) for key, value in found.groupdict().items() if value}
                    return getattr(self, name)(**parts)
            self.hub.unknown.append((self.command, path))
            self.refuse(404, "EntryNotFound")

    # -- answers ------------------------------------------------------------------------------------------------------

    def answer(self, content, status=200, **headers):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status, code=None):
        headers = {"X_Error_Code": code} if code else {}
        self.answer({"error": f"refused with {status}"}, status, **headers)

    @property
    def knows_user(self):
        return self.headers.get("Authorization") == f"Bearer {self.hub.token}"

    def may_write(self, repo, kind):
        """Whether a request goes on; if not, it is answered."""
        status = self.hub.faults.get((repo, kind))
        if status is None and not self.knows_user:
            status = 401
        if status is None and repo.split("/")[0] not in self.hub.namespaces:
            status = 403
        if status is not None:
            self.refuse(status)
        elif kind != "create" and repo not in self.hub.repositories:
            self.refuse(404, "RepoNotFound")
        else:
            return True
        return False

    def may_read(self, repo, revision):
        """The commit, or None when the request is answered."""
        repository = self.hub.repositories.get(repo)
        if repository is None or repository.private and not self.knows_user:
            return self.refuse(401, "RepoNotFound")
        commit = repository.find(revision)
        return self.refuse(404, "RevisionNotFound") if commit is None else commit

    # -- uploads ------------------------------------------------------------------------------------------------------

    def whoami(self):
        if not self.knows_user:
            return self.refuse(401)
        self.answer({"type": "user", "name": self.hub.user, "orgs": []})

    def create(self):
        wish = json.loads(self.body)
        repo = f"{wish.get('organization') or self.hub.user}/{wish['name']}"
        if not self.may_write(repo, "create"):
            return
        there = repo in self.hub.repositories
        if not there:
            self.hub.repositories[repo] = Repository(private=wish.get("visibility") == "private")
        self.answer({"url": f"{self.hub.endpoint}/{repo}", "id": repo}, 409 if there else 200)

    def validate(self):
        text = json.loads(self.body)["content"]
        try:
            metadata = yaml.safe_load(text.split("---\n")[1])
        except (yaml.YAMLError, IndexError) as error:
            return self.answer({"errors": [{"message": str(error)}], "warnings": []}, 400)
        errors = [] if isinstance(metadata.get("tags"), list) else [{"message": "tags must be a list"}]
        self.answer({"errors": errors, "warnings": []}, 400 if errors else 200)

    def branch(self, repo, revision):
        if self.may_write(repo, "branch"):
            branches = self.hub.repositories[repo].branches
            there = revision in branches
            branches.setdefault(revision, list(branches["main"]))
            self.answer({}, 409 if there else 200)

    def preupload(self, repo, revision):
        if not self.may_write(repo, "preupload"):
            return
        if revision not in self.hub.repositories[repo].branches:
            return self.refuse(404, "RevisionNotFound")
        have = self.hub.repositories[repo].find(revision)["files"]
        files = []
        for file in json.loads(self.body)["files"]:
            path, large = file["path"], file["path"].endswith(LARGE)
            oid = have.get(path)
            if oid is not None and not large:
                content = self.hub.contents[oid]
                oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            files.append(
                {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, "oid": oid}
            )
        self.answer({"files": files})

    def lfs(self, repo):
        if not self.may_write(repo, "lfs"):
            return
        objects = []
        for wish in json.loads(self.body)["objects"]:
            where = f"{self.hub.endpoint}/large/{wish['oid']}"
            actions = {"upload": {"href": where}, "verify": {"href": f"{where}/verify"}}
            known = wish["oid"] in self.hub.contents
            objects.append({"oid": wish["oid"], "size": wish["size"], **({} if known else {"actions": actions})})
        self.answer({"transfer": "basic", "objects": objects})

    def put(self, digest):
        if hashlib.sha256(self.body).hexdigest() != digest:
            return self.refuse(400)
        self.hub.keep(self.body)
        self.answer({})

    def verify(self, digest):
        size = json.loads(self.body)["size"]
        right = self.knows_user and len(self.hub.contents.get(digest, b"")) == size
        self.answer({}) if right else self.refuse(400)

    def commit(self, repo, revision):
        if not self.may_write(repo, "commit"):
            return
        repository = self.hub.repositories[repo]
        if revision not in repository.branches:
            return self.refuse(404, "RevisionNotFound")
        message, files = None, {}
        for line in self.body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                message = value["summary"]
            elif entry["key"] == "file":
                files[value["path"]] = self.hub.keep(base64.b64decode(value["content"]))
            elif entry["key"] == "lfsFile" and value["oid"] in self.hub.contents:
                files[value["path"]] = value["oid"]
            else:
                return self.refuse(400)
        oid = self.hub.commit(repository, revision, message, files)
        self.answer({"commitUrl": f"{self.hub.endpoint}/{repo}/commit/{oid}", "commitOid": oid, "success": True})

    # -- downloads ----------------------------------------------------------------------------------------------------

    def info(self, repo, revision="main"):
        commit = self.may_read(repo, revision)
        if commit is not None:
            siblings = [{"rfilename": path} for path in commit["files"]]
            private = self.hub.repositories[repo].private
            self.answer({"id": repo, "modelId": repo, "sha": commit["oid"], "private": private, "siblings": siblings})

    def tree(self, repo, revision, path=None):
        commit = self.may_read(repo, revision)
        if commit is None:
            return
        files = {name: digest for name, digest in commit["files"].items() if path is None or name.startswith(path)}
        if not files:
            return self.refuse(404, "EntryNotFound")
        self.answer(
            [
                {"type": "file", "path": name, "oid": digest[:40], "size": len(self.hub.contents[digest])}
                for name, digest in files.items()
            ]
        )

    def resolve(self, repo, revision, path):
        commit = self.may_read(repo, revision)
        if commit is None:
            return
        digest = commit["files"].get(path)
        if digest is None:
            return self.answer({}, 404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit["oid"])
        self.answer(self.hub.contents[digest], ETag=f'"{digest}"', X_Repo_Commit=commit["oid"])
