#!/usr/bin/env python3
"""A stand-in for the Hugging Face Hub's HTTP API, stdlib only, for tests (HF_ENDPOINT=http://127.0.0.1:PORT).

Speaks what huggingface_hub's create_repo / upload_file / upload_folder / upload_large_folder / CommitScheduler /
snapshot_download / hf_hub_download need: repos/create, preupload, git-lfs batch (basic transfer; also usable by the
real `git-lfs`), verify, commit (ndjson), tree, paths-info, revision info, resolve (HEAD, GET, Range).
Checks what it is sent: sha256 of LFS objects, the token, parentCommit.  It is NOT the Hub: no xet, no PRs, no quotas.
Faults, set by POST /__fault {"op":"commit|lfs_put|preupload|batch","times":N,"status":503|"drop"|"slow","delay":s}.
"""

# ruff: noqa: SIM115, RET503, E741, E501, N815
import argparse
import base64
import hashlib
import json
import os
import re
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hub:
    def __init__(self, root, token=None):
        self.root, self.token, self.lock, self.faults, self.log = root, token, threading.RLock(), [], []
        os.makedirs(f"{root}/objects", exist_ok=True)
        os.makedirs(f"{root}/repos", exist_ok=True)

    def path(self, kind, repo):
        return f"{self.root}/repos/{kind}--{repo.replace('/', '--')}.json"

    def load(self, kind, repo):
        try:
            return json.load(open(self.path(kind, repo)))
        except FileNotFoundError:
            return None

    def save(self, kind, repo, r):
        p = self.path(kind, repo)
        json.dump(r, open(p + ".tmp", "w"))
        os.replace(p + ".tmp", p)

    def obj(self, sha):
        return f"{self.root}/objects/{sha}"

    def put(self, data):
        sha = hashlib.sha256(data).hexdigest()
        with open(self.obj(sha), "wb") as f:
            f.write(data)
        return sha


def git_oid(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class H(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *a):
        pass

    def out(self, code, body=b"", ctype="application/json", **hdr):
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", ctype)
        if "Content_Length" not in hdr:
            self.send_header("Content-Length", str(len(body)))
        for k, v in hdr.items():
            self.send_header(k.replace("_", "-"), str(v))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def err(self, code, msg, name=None):
        self.out(
            code,
            {"error": msg},
            **({"X_Error_Code": name, "X_Error_Message": msg} if name else {"X_Error_Message": msg}),
        )

    def body(self):
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            parts = []
            while n := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(n))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def fault(self, op):
        with self.hub.lock:
            for f in self.hub.faults:
                if f["op"] == op and f["times"] > 0:
                    f["times"] -= 1
                    break
            else:
                return False
        if f["status"] == "slow":
            time.sleep(f.get("delay", 1))
            return False
        if f["status"] == "drop":
            self.rfile.read(min(65536, int(self.headers.get("Content-Length") or 0)))
            self.close_connection = True
            self.connection.close()
            return True
        self.body()
        self.err(f["status"], f"injected {f['status']}")
        return True

    def handle_any(self):
        u = urllib.parse.urlsplit(self.path)
        p = urllib.parse.unquote(u.path)
        q = urllib.parse.parse_qs(u.query)
        hub = self.hub
        hub.log.append((round(time.time(), 3), self.command, p))
        if p == "/__fault":
            hub.faults.append(json.loads(self.body()))
            return self.out(200, {})
        if p == "/__log":
            return self.out(200, hub.log)
        if (
            hub.token
            and self.command != "GET"
            and self.command != "HEAD"
            and not p.startswith("/__lfs/")
            and hub.token not in (self.headers.get("Authorization") or "")
        ):
            self.body()
            return self.err(401, "Invalid username or password.")
        if p == "/api/whoami-v2":
            return self.out(200, {"type": "user", "name": "ci", "orgs": [], "auth": {"accessToken": {"role": "write"}}})
        if p == "/api/validate-yaml":
            self.body()
            return self.out(200, {"errors": [], "warnings": []})
        if p == "/api/repos/create":
            b = json.loads(self.body())
            kind = b.get("type", "model") + "s"
            repo = f"{b.get('organization') or 'ci'}/{b['name']}"
            with hub.lock:
                if hub.load(kind, repo):
                    return self.out(409, {"error": "You already created this repo", "url": f"{self.base()}/{repo}"})
                hub.save(
                    kind,
                    repo,
                    {
                        "commits": [
                            {"oid": hashlib.sha1(repo.encode()).hexdigest(), "title": "initial commit", "files": {}}
                        ]
                    },
                )
            return self.out(200, {"url": f"{self.base()}/{repo}", "name": repo, "id": repo})
        if m := re.fullmatch(r"/__lfs/([0-9a-f]{64})", p):
            if self.command == "GET":
                return self.send_file(m[1])
            if self.fault("lfs_put"):
                return None
            sha, n, tmp, h = (
                m[1],
                int(self.headers["Content-Length"]),
                f"{hub.obj(m[1])}.{threading.get_ident()}",
                hashlib.sha256(),
            )
            with open(tmp, "wb") as f:
                while n > 0:
                    c = self.rfile.read(min(n, 1 << 20))
                    if not c:
                        os.unlink(tmp)
                        self.close_connection = True
                        return None
                    f.write(c)
                    h.update(c)
                    n -= len(c)
            if h.hexdigest() != sha:
                os.unlink(tmp)
                return self.err(400, "sha256 mismatch")
            os.replace(tmp, hub.obj(sha))
            return self.out(200)
        if m := re.fullmatch(r"/(?:(datasets|spaces)/)?([^/]+/[^/]+?)(?:\.git)?/info/lfs/objects/batch", p):
            if self.fault("batch"):
                return None
            b = json.loads(self.body())
            objs = []
            for o in b["objects"]:
                href = {"href": f"{self.base()}/__lfs/{o['oid']}"}
                have = os.path.exists(hub.obj(o["oid"]))
                if b["operation"] == "download":
                    objs.append(
                        {**o, "actions": {"download": href}}
                        if have
                        else {**o, "error": {"code": 404, "message": "not found"}}
                    )
                else:
                    objs.append(
                        dict(o)
                        if have
                        else {
                            **o,
                            "authenticated": True,
                            "actions": {"upload": href, "verify": {"href": f"{self.base()}/__verify"}},
                        }
                    )
            return self.out(200, {"transfer": "basic", "objects": objs}, ctype="application/vnd.git-lfs+json")
        if p == "/__verify":
            o = json.loads(self.body())
            ok = os.path.exists(hub.obj(o["oid"])) and os.path.getsize(hub.obj(o["oid"])) == o["size"]
            return self.out(200, {}) if ok else self.err(404, "object not there")
        if m := re.fullmatch(
            r"/api/(models|datasets|spaces)/([^/]+/[^/]+)(?:/(preupload|commit|revision|tree|paths-info|commits|refs)(?:/([^/]+))?(?:/(.*))?)?",
            p,
        ):
            return self.api(m[1], m[2], m[3], m[4] or "main", m[5] or "", q)
        if m := re.fullmatch(r"/(?:(datasets|spaces)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", p):
            kind = m[1] or "models"
            c = self.at(kind, m[2], m[3])
            if c is None:
                return self.err(404, "Repository Not Found", "RepoNotFound")
            f = c["files"].get(m[4])
            if not f:
                return self.err(404, "Entry not found", "EntryNotFound")
            return self.send_file(
                f["sha256"],
                ETag=f'"{f["sha256"] if f["lfs"] else f["oid"]}"',
                X_Repo_Commit=c["oid"],
                **({"X_Linked_Size": f["size"], "X_Linked_Etag": f'"{f["sha256"]}"'} if f["lfs"] else {}),
            )
        self.body()
        self.err(404, f"stand-in does not know {self.command} {p}")

    def base(self):
        return f"http://{self.headers['Host']}"

    def at(self, kind, repo, rev):
        r = self.hub.load(kind, repo)
        if not r:
            return None
        return r["commits"][-1] if rev == "main" else next((c for c in r["commits"] if c["oid"].startswith(rev)), None)

    def send_file(self, sha, **hdr):
        p = self.hub.obj(sha)
        if not os.path.exists(p):
            return self.err(404, "no such object")
        size = os.path.getsize(p)
        start, code = 0, 200
        if rg := re.match(r"bytes=(\d+)-", self.headers.get("Range") or ""):
            start, code = int(rg[1]), 206
            hdr["Content_Range"] = f"bytes {start}-{size - 1}/{size}"
        self.out(code, b"", ctype="application/octet-stream", Content_Length=size - start, Accept_Ranges="bytes", **hdr)
        if self.command == "GET":
            with open(p, "rb") as f:
                f.seek(start)
                while c := f.read(1 << 20):
                    self.wfile.write(c)

    def entries(self, c, prefix="", recursive=True):
        for path, f in sorted(c["files"].items()):
            if prefix and not path.startswith(prefix.rstrip("/") + "/"):
                continue
            yield {
                "type": "file",
                "path": path,
                "size": f["size"],
                "oid": f["oid"],
                **({"lfs": {"oid": f["sha256"], "size": f["size"], "pointerSize": 134}} if f["lfs"] else {}),
            }

    def api(self, kind, repo, what, rev, rest, q):
        hub = self.hub
        if hub.load(kind, repo) is None:
            self.body()
            return self.err(404, "Repository Not Found", "RepoNotFound")
        c = self.at(kind, repo, rev)
        if what is None or what == "revision":
            return self.out(
                200,
                {
                    "id": repo,
                    "modelId": repo,
                    "sha": c["oid"],
                    "private": False,
                    "tags": [],
                    "downloads": 0,
                    "likes": 0,
                    "siblings": [
                        {"rfilename": e["path"], "size": e["size"], "blobId": e["oid"]} for e in self.entries(c)
                    ],
                },
            )
        if what == "refs":
            return self.out(
                200,
                {
                    "branches": [{"name": "main", "ref": "refs/heads/main", "targetCommit": c["oid"]}],
                    "converts": [],
                    "tags": [],
                },
            )
        if what == "tree":
            return self.out(200, list(self.entries(c, rest)))
        if what == "paths-info":
            b = self.body()
            want = json.loads(b)["paths"] if b[:1] == b"{" else urllib.parse.parse_qs(b.decode()).get("paths", [])
            return self.out(200, [e for e in self.entries(c) if e["path"] in want])
        if what == "commits":
            return self.out(
                200,
                [
                    {
                        "id": x["oid"],
                        "title": x["title"],
                        "message": "",
                        "authors": [],
                        "date": "2026-01-01T00:00:00.000Z",
                    }
                    for x in reversed(hub.load(kind, repo)["commits"])
                ],
            )
        if what == "preupload":
            if self.fault("preupload"):
                return None
            out = []
            for f in json.loads(self.body())["files"]:
                binary = b"\0" in base64.b64decode(f["sample"])
                out.append(
                    {
                        "path": f["path"],
                        "uploadMode": "lfs" if f["size"] > 10 * 2**20 or (binary and f["size"] > 0) else "regular",
                        "shouldIgnore": False,
                        "oid": (lambda o: o and (o["sha256"] if o["lfs"] else o["oid"]))(c["files"].get(f["path"])),
                    }
                )
            return self.out(200, {"files": out})
        if what == "commit":
            if self.fault("commit"):
                return None
            items = [json.loads(l) for l in self.body().splitlines() if l.strip()]
            head = items[0]["value"]
            with hub.lock:
                r = hub.load(kind, repo)
                cur = r["commits"][-1]
                files = dict(cur["files"])
                if head.get("parentCommit") and head["parentCommit"] != cur["oid"]:
                    return self.err(412, "A commit has happened since. Please refresh and try again.")
                for it in items[1:]:
                    v = it["value"]
                    if it["key"] == "file":
                        d = base64.b64decode(v["content"])
                        files[v["path"]] = {"lfs": False, "size": len(d), "sha256": hub.put(d), "oid": git_oid(d)}
                    elif it["key"] == "lfsFile":
                        if not os.path.exists(hub.obj(v["oid"])):
                            return self.err(400, f"LFS object {v['oid']} was not uploaded")
                        ptr = f"version https://git-lfs.github.com/spec/v1\noid sha256:{v['oid']}\nsize {v['size']}\n".encode()
                        files[v["path"]] = {"lfs": True, "size": v["size"], "sha256": v["oid"], "oid": git_oid(ptr)}
                    elif it["key"] == "deletedFile":
                        files.pop(v["path"], None)
                    elif it["key"] == "deletedFolder":
                        files = {k: x for k, x in files.items() if not k.startswith(v["path"].rstrip("/") + "/")}
                oid = hashlib.sha1(json.dumps([cur["oid"], head, files], sort_keys=True).encode()).hexdigest()
                r["commits"].append({"oid": oid, "title": head["summary"], "files": files})
                hub.save(kind, repo, r)
            return self.out(
                200,
                {
                    "success": True,
                    "commitOid": oid,
                    "commitUrl": f"{self.base()}/{repo}/commit/{oid}",
                    "hookOutput": "",
                },
            )
        self.body()
        self.err(404, f"stand-in does not know {what}")

    do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = handle_any


if __name__ == "__main__":
    a = argparse.ArgumentParser()
    a.add_argument("--root", required=True)
    a.add_argument("--port", type=int, default=0)
    a.add_argument("--token")
    a = a.parse_args()
    H.hub = Hub(a.root, a.token)
    s = ThreadingHTTPServer(("127.0.0.1", a.port), H)
    s.daemon_threads = True
    print(f"http://127.0.0.1:{s.server_address[1]}", flush=True)
    s.serve_forever()
