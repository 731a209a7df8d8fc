"""A stand-in for a vLLM server: no model, it only answers, and says so.

    python tests/support/answering_process.py MODEL PORT [--ready-after S] [--die-after S] [--never] [--stubborn]

Like vLLM it has a child process, whose id it writes to MODEL.child.
"""

import argparse
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("port", type=int)
parser.add_argument("--ready-after", type=float, default=0.0)
parser.add_argument("--die-after", type=float)
parser.add_argument("--never", action="store_true", help="end before answering")
parser.add_argument("--stubborn", action="store_true", help="ignore SIGTERM")
parser.add_argument("--sleep", type=float, default=0.0, help="seconds that sampling takes")
settings = parser.parse_args()
started = time.monotonic()

CHILD = "import signal, time, sys; signal.signal(signal.SIGTERM, signal.SIG_DFL); time.sleep(600)"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        ready = time.monotonic() - started >= settings.ready_after
        self.answer(200 if ready else 503, {"server": "a stand-in that only answers", "model": settings.model})

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        time.sleep(settings.sleep)
        self.answer(200, {"server": "a stand-in that only answers"})

    def answer(self, status, content):
        body = json.dumps({**content, "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


if settings.stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("this is a stand-in that only answers", flush=True)
if settings.never:
    sys.exit("no such model")
child = subprocess.Popen([sys.executable, "-c", CHILD])
with open(f"{settings.model}.child", "w") as file:
    file.write(str(child.pid))
if settings.die_after is not None:
    threading.Timer(settings.die_after, lambda: os._exit(3)).start()
http.server.ThreadingHTTPServer(("127.0.0.1", settings.port), Handler).serve_forever()
