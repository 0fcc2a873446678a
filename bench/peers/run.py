"""Runs another server with the work of a pipeline until standard input ends: run.py mosec batching.

It prints the server's address as a line of JSON once the server answers, as `bench part` does.
"""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
COMMANDS = {
    "mosec": [sys.executable, "serve_mosec.py"],
    "bentoml": [sys.executable, "-m", "bentoml", "serve", "serve_bentoml:Work"],
    "ray": [sys.executable, "serve_ray.py"],
    "rapidocr": [sys.executable, "serve_rapidocr.py"],
    "mosec-ocr": [sys.executable, "serve_mosec_ocr.py", "--timeout", "120000"],  # ms; requests of 32 callers wait
    "bentoml-ocr": [sys.executable, "-m", "bentoml", "serve", "serve_bentoml_ocr:Read"],
    "ray-ocr": [sys.executable, "serve_ray_ocr.py"],
}
START_LIMIT = 120  # seconds


def free_port():
    """Returns a port that nothing listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait(process, port, pipeline):
    """Waits for the first right answer: the input, or what stands in a picture."""
    body = want = (HERE / "body.json").read_bytes()
    if pipeline == "ocr":
        body, want = (HERE.parent.parent / "examples/ocr/pictures/sign.png").read_bytes(), b"PLATFORM 9"
    end = time.monotonic() + START_LIMIT
    while time.monotonic() < end and process.poll() is None:
        try:
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
                connection.request("POST", f"/v1/pipelines/{pipeline}:infer", body, {"Content-Type": "text/plain"})
                answer = connection.getresponse()
                text = answer.read()
                if answer.status == 200 and want in text:
                    return
        except (OSError, http.client.HTTPException):
            pass
        time.sleep(0.1)
    sys.exit(f"the server does not answer as it should; its exit status is {process.poll()}")


def main(server, pipeline):
    """Runs the server."""
    port = free_port()
    env = {
        **os.environ,
        "PEER_PORT": str(port),
        "PEER_PIPELINE": pipeline,
        "PYTHONDONTWRITEBYTECODE": "1",
        "MOSEC_PORT": str(port),
        "MOSEC_ADDRESS": "127.0.0.1",
        "BENTOML_PORT": str(port),
        "BENTOML_HOST": "127.0.0.1",
        "BENTOML_DO_NOT_TRACK": "True",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    }
    process = subprocess.Popen(COMMANDS[server], env=env, cwd=HERE, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    try:
        wait(process, port, pipeline)
        print(json.dumps({"url": f"http://127.0.0.1:{port}"}), flush=True)
        sys.stdin.read()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
